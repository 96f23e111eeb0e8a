"""Tensors in memory of the core's."""

import math
import operator
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from . import _core, runtime, views
from .errors import InvalidArgument


def shared_empty(*size: int | Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """An uninitialised tensor in shared memory, where ranks of one host reduce it without a copy.

    Takes sizes as `torch.empty` does: `shared_empty(2, 3)` or `shared_empty((2, 3))`.
    """
    core = runtime.current()
    shape = _shape(size)
    if not isinstance(dtype, torch.dtype):
        raise InvalidArgument(f"dtype= must be a torch.dtype, not {dtype!r}; try: torch.float32")
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    flat: Tensor = from_dlpack(core.shared_empty(count * dtype.itemsize))
    return flat.view(dtype).reshape(shape)


def listed(
    named: Sequence[tuple[str, Tensor]], dtype_of: Callable[[Tensor], str] = views.dtype_of
) -> list[tuple[str, int, int, str]]:
    """What a scheduler is told of tensors: name, elements, rows and type of each."""
    return [(name, views.elements(t), views.rows(t), dtype_of(t)) for name, t in named]


def spread(scheduler: _core.Scheduler, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[list[int]]]:
    """Where tensors lie in a scheduler's buckets: a view in the shape of each; and which are in each bucket, in the
    order in which those go out."""
    found: dict[int, Tensor] = {}
    buckets: list[list[int]] = []
    for memory, slots in scheduler.buckets():
        flat = shown(memory)
        for index, offset in slots:
            found[index] = views.place_in(flat, tensors[index], offset)
        buckets.append([index for index, _ in slots])
    return [found[index] for index in range(len(tensors))], buckets


def shown(memory: object) -> Tensor:
    """Memory of a bucket as the core shows it: a capsule, or the tensor that it was lent."""
    flat: Tensor = memory if isinstance(memory, Tensor) else from_dlpack(memory)
    return flat


def _shape(size: tuple[int | Sequence[int], ...]) -> tuple[int, ...]:
    numbers = size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size
    try:
        shape = tuple(operator.index(number) for number in numbers)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidArgument(
            f"sizes must be ints or one tuple of ints, not {size!r}; try: shared_empty(2, 3)"
        ) from None
    if any(number < 0 for number in shape):
        raise InvalidArgument(f"sizes must not be negative, but are {shape}; try: shared_empty(2, 3)")
    return shape
