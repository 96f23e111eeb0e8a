"""Work under way, and the tensors that take part in it."""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.utils.dlpack import from_dlpack

from . import _core
from .errors import InvalidArgument, OffbeatError, Timeout, Unsupported

T = TypeVar("T")
_no_dispatch = Tensor.__torch_dispatch__

# Work whose handle was dropped early. The communication thread still uses its tensors: they stay here until it is done,
# and where a copy stands for a tensor its result is put into place then.
_orphans: list[tuple[_core.Ticket, Sequence[Tensor], Callable[[list[object] | None], object]]] = []


class Handle(Generic[T]):
    """A collective under way. Keep its tensors untouched until `wait` returned or `done` said True."""

    __slots__ = ("__weakref__", "_error", "_finish", "_lock", "_tensors", "_ticket", "_value")
    _value: T

    def __init__(
        self, ticket: _core.Ticket, tensors: Sequence[Tensor], finish: Callable[[list[object] | None], T]
    ) -> None:
        self._ticket: _core.Ticket | None = ticket
        self._tensors = tensors
        self._finish: Callable[[list[object] | None], T] | None = finish
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        settle_orphans()

    def wait(self, timeout: float | None = None) -> T:
        """What the blocking call would return, or its error. When only `timeout` (seconds) ran out, wait again."""
        deadline = None if timeout is None else time.monotonic() + timeout
        if not self._lock.acquire(timeout=-1 if timeout is None else max(timeout, 0.0)):
            raise Timeout(
                f"not done within {timeout:g} s, and another thread waits too; try: wait longer, or ask done()"
            )
        try:
            self._settle(None if deadline is None else max(deadline - time.monotonic(), 0.0))
        finally:
            self._lock.release()
        if self._error is not None:
            raise self._error
        return self._value

    def done(self) -> bool:
        """Whether `wait` would return (or raise) at once. True also means that results are in place."""
        ticket = self._ticket
        if ticket is None:
            return True
        if not ticket.done() or not self._lock.acquire(blocking=False):
            return False
        try:
            self._settle(None)
        finally:
            self._lock.release()
        return True

    def _settle(self, timeout: float | None) -> None:
        ticket, finish = self._ticket, self._finish
        if ticket is None or finish is None:
            return
        try:
            self._value = finish(ticket.wait(timeout))
        except Timeout as error:
            # Out of patience, or out of the work's own time? Only the first leaves something to wait for.
            if not ticket.done():
                raise
            self._error = error
        except Exception as error:
            self._error = error
        self._ticket, self._finish, self._tensors = None, None, ()

    def __del__(self) -> None:
        ticket, finish = getattr(self, "_ticket", None), getattr(self, "_finish", None)
        if ticket is not None and finish is not None:
            _orphans.append((ticket, self._tensors, finish))


def settle_orphans() -> None:
    """Ends the work of dropped handles that is done. Its errors are nobody's: the group's next call raises them."""
    if not _orphans:
        return
    here = _orphans[:]
    del _orphans[: len(here)]
    for orphan in here:
        ticket, _, finish = orphan
        if ticket.done():
            with contextlib.suppress(Exception):
                finish(ticket.wait(None))
        else:
            _orphans.append(orphan)


def is_staged(tensor: Tensor) -> bool:
    """Whether a tensor goes through memory of the host: collectives of the user's do so on a GPU."""
    return tensor.is_cuda


def readable(tensor: Tensor, name: str = "tensor") -> Tensor:
    """The tensor itself where the core can read it, else a contiguous copy.

    A copy from a GPU is made in the order of torch's current stream, and is there when this returns.
    """
    if not isinstance(tensor, Tensor):
        raise InvalidArgument(
            f"{name} must be a torch.Tensor, not {type(tensor).__name__}; try: torch.as_tensor({name})"
        )
    if type(tensor).__torch_dispatch__ is not _no_dispatch:
        raise Unsupported(
            f"{name} is a {type(tensor).__name__}, which holds no memory of its own; try: the tensor inside it, e.g. "
            f"{name}.to_local()"
        )
    staged = is_staged(tensor)
    if not tensor.is_cpu and not staged:
        raise Unsupported(
            f"{name} is on {tensor.device}, and this version communicates from the CPU and from CUDA devices; try: "
            f"{name}.cpu()"
        )
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise Unsupported(f"{name} is sparse, nested or opaque ({tensor.layout}); try: {name}.to_dense() or its values")
    if tensor.is_quantized:
        raise Unsupported(f"{name} is quantized ({tensor.dtype}); try: {name}.dequantize() or {name}.int_repr()")
    if tensor.is_complex():
        raise Unsupported(f"{name} is complex ({tensor.dtype}); try: torch.view_as_real({name})")
    if staged:
        # never the tensor itself: `Tensor.cpu` copies nothing that is there already
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor.detach())
    if tensor.is_contiguous() and not tensor.is_neg():
        return tensor
    return tensor.detach().contiguous().resolve_neg()


def writable(tensor: Tensor, name: str = "tensor") -> Tensor:
    """As `readable`, for a tensor that is written: the copy must be copied back (`in_place`).

    Autograd is told already here, since a call that fails may have written a part: what was saved for backward is
    stale.
    """
    flat = readable(tensor, name)
    if flat is not tensor and _overlaps(tensor):
        raise InvalidArgument(
            f"{name} is expanded or overlaps itself: several of its elements share one place; try: {name}.clone()"
        )
    increment_version(tensor)
    return flat


def _overlaps(tensor: Tensor) -> bool:
    """Whether elements may share a place: some stride does not step over what the smaller ones reach."""
    reach = 0
    for stride, size in sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        if size == 0:
            return False
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False


def readable_list(tensors: Sequence[Tensor], size: int, name: str = "tensors") -> list[Tensor]:
    """A list with one tensor for each rank of the group."""
    if not isinstance(tensors, list | tuple):
        raise InvalidArgument(
            f"{name} must be a list of tensors, not {type(tensors).__name__}; try: list({name}.chunk({size}))"
        )
    if len(tensors) != size:
        raise InvalidArgument(
            f"{name} has {len(tensors)} tensors for {size} ranks; try: give one for each rank of the group"
        )
    return [readable(tensor, f"{name}[{index}]") for index, tensor in enumerate(tensors)]


def in_place(
    result: _core.Ticket | list[object] | None, tensor: Tensor, flat: Tensor, async_op: bool, *also: Tensor
) -> Handle[None] | None:
    """Ends a call that wrote into `flat`, which stands for `tensor`."""

    def finish(_: list[object] | None) -> None:
        if flat is not tensor:
            tensor.detach().copy_(flat)
        elif async_op:
            # a graph may have saved it since the call was queued
            increment_version(tensor)

    if async_op:
        return Handle(_ticket(result), (tensor, flat, *also), finish)
    finish(None)
    return None


def received(
    result: _core.Ticket | list[object] | None,
    tensors: Sequence[Tensor],
    async_op: bool,
    like: Tensor,
    pick: Callable[[list[Tensor]], T],
) -> Handle[T] | T:
    """Ends a call that gives new tensors, on the device of `like`."""
    device = like.device

    def finish(capsules: list[object] | None) -> T:
        return pick([from_dlpack(capsule).to(device) for capsule in capsules or ()])

    if async_op:
        return Handle(_ticket(result), tensors, finish)
    return finish(result if isinstance(result, list) else None)


def _ticket(result: object) -> _core.Ticket:
    if result is None or isinstance(result, list):
        raise OffbeatError("the core gave no ticket for an asynchronous call; try: report this")
    return result  # type: ignore[return-value]
