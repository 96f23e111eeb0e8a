"""A parameter as the core sees it: how many real numbers of which type it has, in how many rows, and views of them."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def reals(tensor: Tensor) -> Tensor:
    """The tensor, as real numbers."""
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()


def dtype_of(parameter: Tensor) -> str:
    """The type of the numbers in a parameter."""
    return str(reals(parameter).dtype).removeprefix("torch.")


def type_of_gradient(parameter: Tensor) -> torch.dtype:
    """The parameter's own type, unless torch was told another (`grad_dtype`)."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def dtype_of_gradient(parameter: Tensor) -> str:
    """The type of the numbers in a parameter's gradient."""
    return str(type_of_gradient(parameter).to_real()).removeprefix("torch.")


def elements(parameter: Tensor) -> int:
    """Real numbers in a parameter."""
    return parameter.numel() * (2 if parameter.is_complex() else 1)


def rows(parameter: Tensor) -> int:
    """Rows of a parameter as a matrix in memory: its outermost dimension there; 1 if it has but one."""
    if parameter.dim() < 2 or not parameter.numel():
        return 1
    strides = parameter.stride() if is_dense(parameter.shape, parameter.stride()) else range(parameter.dim(), 0, -1)
    return max(zip(strides, parameter.shape, strict=True))[1]


def is_dense(shape: Sequence[int], strides: Iterable[int]) -> bool:
    """Whether the elements fill their memory without gaps or overlaps, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def order(tensor: Tensor) -> tuple[int, ...]:
    """The dimensions from the outermost in memory to the innermost, as `place_in` lays out what is like the tensor.
    Those of length 1 are nowhere, and stay out."""
    dims, strides = [dim for dim, size in enumerate(tensor.shape) if size != 1], tensor.stride()
    if not is_dense(tensor.shape, strides):
        return tuple(dims)
    return tuple(sorted(dims, key=lambda dim: -strides[dim]))


def place_in(flat: Tensor, parameter: Tensor, offset: int) -> Tensor:
    """A view of flat memory in the shape of a parameter, and with its strides where it has no gaps."""
    piece = flat.narrow(0, offset, elements(parameter))
    if parameter.is_complex():
        piece = torch.view_as_complex(piece.view(-1, 2))
    if is_dense(parameter.shape, parameter.stride()):
        return piece.as_strided(parameter.shape, parameter.stride())
    return piece.view(parameter.shape)
