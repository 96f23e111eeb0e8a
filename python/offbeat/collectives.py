"""Collectives: calls that every rank of a group makes, matched by their order.

`src` and `dst` are global ranks. With `async_op=True` a call returns a `Handle` at once, whose `wait` gives what the
blocking call would return.

Tensors on a GPU go through memory of the host: there in the order of the stream that is torch's current one at the
call, and back in the order of the one that is so when the call, or `wait`, ends.
"""

from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from . import codecs, runtime
from .errors import InvalidArgument
from .group import Group, member, resolve
from .handle import Handle, in_place, readable, readable_list, received, settle_orphans, writable

Codec = codecs.Codec | str | None


@overload
def all_reduce(
    tensor: Tensor,
    op: str = "sum",
    *,
    codec: Codec = None,
    group: Group | None = None,
    async_op: Literal[False] = False,
) -> None: ...
@overload
def all_reduce(
    tensor: Tensor, op: str = "sum", *, codec: Codec = None, group: Group | None = None, async_op: Literal[True]
) -> Handle[None]: ...
def all_reduce(
    tensor: Tensor, op: str = "sum", *, codec: Codec = None, group: Group | None = None, async_op: bool = False
) -> Handle[None] | None:
    """Reduces the tensors of all ranks, in place: every rank gets the same bits.

    op: "sum", "mean", "min", "max", "product" on numbers ("mean" only on floats); "band", "bor", "bxor" on integers and
        bool.
    codec: encodes what travels between hosts, e.g. "bfloat16" (see `offbeat.codecs`).
    """
    # The short cut, where Python would otherwise take longer than the reduction itself. Everything else goes the long
    # way, which also finds the words for what is wrong.
    world = runtime.world
    is_plain = group is None and codec is None and not async_op and type(tensor) is Tensor and type(op) is str
    if world is not None and is_plain:
        increment_version(tensor)
        if world.try_all_reduce(tensor, op):
            return None
    core, _ = resolve(group)
    _check_op(op)
    flat = writable(tensor)
    return in_place(core.all_reduce(flat, op, codecs.resolve(codec), async_op), tensor, flat, async_op)


@overload
def reduce(
    tensor: Tensor, dst: int, op: str = "sum", *, group: Group | None = None, async_op: Literal[False] = False
) -> None: ...
@overload
def reduce(
    tensor: Tensor, dst: int, op: str = "sum", *, group: Group | None = None, async_op: Literal[True]
) -> Handle[None]: ...
def reduce(
    tensor: Tensor, dst: int, op: str = "sum", *, group: Group | None = None, async_op: bool = False
) -> Handle[None] | None:
    """Reduces the tensors of all ranks into that of `dst`, in place; the others stay as they are."""
    core, ranks = resolve(group)
    _check_op(op)
    dst = member("dst", dst, ranks)
    mine = dst == runtime.rank()
    flat = writable(tensor) if mine else readable(tensor)
    return in_place(core.reduce(flat, dst, op, async_op), tensor if mine else flat, flat, async_op)


@overload
def broadcast(
    tensor: Tensor, src: int = 0, *, group: Group | None = None, async_op: Literal[False] = False
) -> None: ...
@overload
def broadcast(tensor: Tensor, src: int = 0, *, group: Group | None = None, async_op: Literal[True]) -> Handle[None]: ...
def broadcast(
    tensor: Tensor, src: int = 0, *, group: Group | None = None, async_op: bool = False
) -> Handle[None] | None:
    """Copies the tensor of `src` into those of the others."""
    core, ranks = resolve(group)
    src = member("src", src, ranks)
    mine = src == runtime.rank()
    flat = readable(tensor) if mine else writable(tensor)
    return in_place(core.broadcast(flat, src, async_op), flat if mine else tensor, flat, async_op)


@overload
def all_gather(tensor: Tensor, *, group: Group | None = None, async_op: Literal[False] = False) -> list[Tensor]: ...
@overload
def all_gather(tensor: Tensor, *, group: Group | None = None, async_op: Literal[True]) -> Handle[list[Tensor]]: ...
def all_gather(
    tensor: Tensor, *, group: Group | None = None, async_op: bool = False
) -> Handle[list[Tensor]] | list[Tensor]:
    """The tensors of all ranks, in the order of ranks. They may differ in the first dimension."""
    core, _ = resolve(group)
    flat = readable(tensor)
    return received(core.all_gather(flat, async_op), (flat,), async_op, tensor, lambda tensors: tensors)


@overload
def gather(
    tensor: Tensor, dst: int, *, group: Group | None = None, async_op: Literal[False] = False
) -> list[Tensor] | None: ...
@overload
def gather(
    tensor: Tensor, dst: int, *, group: Group | None = None, async_op: Literal[True]
) -> Handle[list[Tensor] | None]: ...
def gather(
    tensor: Tensor, dst: int, *, group: Group | None = None, async_op: bool = False
) -> Handle[list[Tensor] | None] | list[Tensor] | None:
    """On `dst` the tensors of all ranks, in the order of ranks; None elsewhere."""
    core, ranks = resolve(group)
    dst = member("dst", dst, ranks)
    mine = dst == runtime.rank()
    flat = readable(tensor)

    def pick(tensors: list[Tensor]) -> list[Tensor] | None:
        return tensors if mine else None

    return received(core.gather(flat, dst, async_op), (flat,), async_op, tensor, pick)


@overload
def scatter(
    tensors: Sequence[Tensor] | None,
    src: int,
    out: Tensor,
    *,
    group: Group | None = None,
    async_op: Literal[False] = False,
) -> None: ...
@overload
def scatter(
    tensors: Sequence[Tensor] | None, src: int, out: Tensor, *, group: Group | None = None, async_op: Literal[True]
) -> Handle[None]: ...
def scatter(
    tensors: Sequence[Tensor] | None, src: int, out: Tensor, *, group: Group | None = None, async_op: bool = False
) -> Handle[None] | None:
    """Copies each rank's tensor of the list on `src` into its `out`. The others pass None for the list."""
    core, ranks = resolve(group)
    src = member("src", src, ranks)
    flat = writable(out, "out")
    parts: list[Tensor] | None = None
    if src == runtime.rank():
        if tensors is None:
            raise InvalidArgument(
                f"src={src} has no tensors to scatter; try: give a list with one for each rank of the group"
            )
        parts = readable_list(tensors, len(ranks))
    return in_place(core.scatter(parts, src, flat, async_op), out, flat, async_op, *(parts or ()))


@overload
def reduce_scatter(
    tensors: Sequence[Tensor], op: str = "sum", *, group: Group | None = None, async_op: Literal[False] = False
) -> Tensor: ...
@overload
def reduce_scatter(
    tensors: Sequence[Tensor], op: str = "sum", *, group: Group | None = None, async_op: Literal[True]
) -> Handle[Tensor]: ...
def reduce_scatter(
    tensors: Sequence[Tensor], op: str = "sum", *, group: Group | None = None, async_op: bool = False
) -> Handle[Tensor] | Tensor:
    """Reduces lists of tensors, one for each rank; each rank gets its own, reduced, as a new tensor."""
    core, ranks = resolve(group)
    _check_op(op)
    parts = readable_list(tensors, len(ranks))
    return received(core.reduce_scatter(parts, op, async_op), parts, async_op, tensors[0], lambda mine: mine[0])


@overload
def all_to_all(
    tensors: Sequence[Tensor], *, group: Group | None = None, async_op: Literal[False] = False
) -> list[Tensor]: ...
@overload
def all_to_all(
    tensors: Sequence[Tensor], *, group: Group | None = None, async_op: Literal[True]
) -> Handle[list[Tensor]]: ...
def all_to_all(
    tensors: Sequence[Tensor], *, group: Group | None = None, async_op: bool = False
) -> Handle[list[Tensor]] | list[Tensor]:
    """Sends the i-th tensor to the i-th rank; gives what the ranks sent here, in their order. Sizes may differ."""
    core, ranks = resolve(group)
    parts = readable_list(tensors, len(ranks))
    return received(core.all_to_all(parts, async_op), parts, async_op, tensors[0], lambda theirs: theirs)


@overload
def barrier(*, group: Group | None = None, async_op: Literal[False] = False) -> None: ...
@overload
def barrier(*, group: Group | None = None, async_op: Literal[True]) -> Handle[None]: ...
def barrier(*, group: Group | None = None, async_op: bool = False) -> Handle[None] | None:
    """Returns when all ranks of the group have come to it."""
    core, _ = resolve(group)
    nothing = torch.empty(0, device="cpu")
    handle = in_place(core.barrier(async_op), nothing, nothing, async_op)
    # calls before it are done, also those that nobody waits for
    settle_orphans()
    return handle


def send(tensor: Tensor, dst: int, *, tag: int = 0) -> None:
    """Sends a tensor to `dst`, which calls `recv` with the same tag."""
    core = runtime.current()
    core.send(readable(tensor), member("dst", dst, range(core.world_size)), _tag(tag))


def recv(tensor: Tensor, src: int, *, tag: int = 0) -> None:
    """Receives into the tensor what `src` sends with the same tag."""
    core = runtime.current()
    flat = writable(tensor)
    core.recv(flat, member("src", src, range(core.world_size)), _tag(tag))
    in_place(None, tensor, flat, False)


def _check_op(op: str) -> None:
    if not isinstance(op, str):
        raise InvalidArgument(f"op must be the name of an operation, not {op!r}; try: 'sum', 'mean', 'min' or 'max'")


def _tag(tag: int) -> int:
    if not isinstance(tag, int) or not 0 <= tag < 2**32:
        raise InvalidArgument(f"tag must be an int from 0 to 4294967295, not {tag!r}; try: tag=0")
    return tag
