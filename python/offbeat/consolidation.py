"""One agreed model out of replicas that differ: for evaluation and for saving.

Ranks may be lost meanwhile. Nothing is changed before all means are there; where a call fails because a rank is gone,
those that are left find out whether they all have them, or else compute them again without it and without groups.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from . import _core, agreement, owners, runtime, views
from .errors import PeerFailed, PeerLost

# Tensors travel in pieces of this many bytes.
PIECE = 16 << 20


def consolidate(model: nn.Module) -> float:
    """Gives all ranks the same model, the mean of theirs, and says how far they were apart. Every rank calls it,
    between steps.

    Parameters and buffers of floating-point numbers become their mean over all ranks, other buffers are rank 0's.
    What the user has left out of wrapping stays each rank's own, and what is equal on all ranks already stays as it is,
    bit by bit. Training may go on with it: for an algorithm that exchanges weights it is one more average. Ranks that
    are lost, before or meanwhile, are left out.

    Returns:
        The largest distance of a rank's parameters from the mean, relative to the length of the mean; 0.0 if all were
        equal.
    """
    core = runtime.current()
    if core.world_size == 1:
        return 0.0
    ignored = agreement.left_out(model)
    parameters = {id(tensor): tensor for name, tensor in model.named_parameters() if name not in ignored}
    named = agreement.buffers_of(model, ignored)
    buffers = {id(tensor): tensor for _, tensor in named if id(tensor) not in parameters}
    replicas = owners.owners(parameters.values())
    with contextlib.ExitStack() as settled:
        for replica in replicas:
            settled.enter_context(replica.settled())
        references = [tensor for replica in replicas for tensor in replica.references()]
        spread, _ = average(core.world(), list(parameters.values()), [*buffers.values(), *references])
    for replica in replicas:
        replica.consolidated(spread)
    return spread


def meet(*, says: bool = False) -> bool:
    """Waits until all ranks that are there have come here; whether any of them says so, which all hear alike."""
    core = runtime.current()
    core.convene()
    here = core.gather_living(torch.tensor([says], dtype=torch.uint8, device="cpu"), patient=False)
    return any(value[0] for _, value in here or ())


@dataclass
class Draft:
    """What tensors will become."""

    changes: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    spread: float = 0.0
    step: int = 0

    def apply(self) -> None:
        """Makes tensors what they will be."""
        with torch.no_grad():
            for tensor, value in self.changes:
                tensor.copy_(value)


def average(
    group: _core.Group, parameters: list[Tensor], buffers: list[Tensor], *, step: int = 0, patient: bool = False
) -> tuple[float, int]:
    """Makes tensors equal on all ranks; gives how far the parameters were apart, and the step. That is this rank's own,
    or the largest if ranks were lost. With `patient` those that are left may take the time of a first step to come."""
    # on a GPU this goes through the host: it is not for the inside of a loop
    copies = {id(tensor): (tensor, tensor.detach().cpu()) for tensor in (*parameters, *buffers) if not tensor.is_cpu}
    if copies:
        parameters, buffers = (
            [copies[id(tensor)][1] if id(tensor) in copies else tensor for tensor in tensors]
            for tensors in (parameters, buffers)
        )
    core = runtime.current()
    core.convene()
    draft: Draft | None = None
    try:
        draft = Draft(*in_group(group, parameters, buffers), step)
        # who comes back from here knows that everybody has a draft
        group.barrier(False)
    except (PeerLost, PeerFailed):
        here = core.gather_living(torch.tensor([draft is not None], dtype=torch.uint8, device="cpu"), patient=patient)
        if draft is None or not (here is None or all(value[0] for _, value in here)):
            draft = among_living(core, parameters, buffers, step)
    else:
        core.settled()
    draft.apply()
    with torch.no_grad():
        for tensor, copy in copies.values():
            tensor.copy_(copy)
    return draft.spread, draft.step


def in_group(
    group: _core.Group, parameters: list[Tensor], buffers: list[Tensor]
) -> tuple[list[tuple[Tensor, Tensor]], float]:
    """What tensors become, and how far the parameters were apart, by calls in a group of all ranks."""

    def combine(piece: Tensor) -> None:
        if is_exact(piece):
            group.broadcast(piece, 0, False)
        else:
            group.all_reduce(piece, "mean", None, False)

    rows = agreement.gather(group, digests([*parameters, *buffers]))
    changes, distances = drafted(parameters, buffers, rows, combine)
    furthest = torch.tensor([distances.away], dtype=torch.float64, device="cpu")
    group.all_reduce(furthest, "max", None, False)
    return changes, distances.relative(float(furthest))


def among_living(core: _core.Runtime, parameters: list[Tensor], buffers: list[Tensor], step: int) -> Draft:
    """The same without a group, among the ranks that are left: exact buffers are those of the lowest of them. Everyone
    sends its tensors to everyone."""

    def combine(piece: Tensor) -> None:
        values = gather(core, piece)
        piece.copy_(values[0] if is_exact(piece) else mean_of(values))

    rows = gather(core, digests([*parameters, *buffers]))
    changes, distances = drafted(parameters, buffers, rows, combine)
    told = torch.stack(gather(core, torch.tensor([distances.away, step], dtype=torch.float64, device="cpu"))).amax(
        dim=0
    )
    return Draft(changes, distances.relative(float(told[0])), int(told[1]))


def drafted(
    parameters: list[Tensor], buffers: list[Tensor], rows: list[Tensor], combine: Callable[[Tensor], None]
) -> tuple[list[tuple[Tensor, Tensor]], "Distances"]:
    """What tensors become, by the digests that ranks have of them and what makes one of all ranks' pieces, in place."""
    tensors = [*parameters, *buffers]
    distances = Distances()
    with torch.no_grad():
        differ = (torch.stack(rows) != rows[0]).any(dim=0).tolist()
        picked = [tensor for tensor, differs in zip(tensors, differ, strict=True) if differs and tensor.numel() > 0]
        becomes = {id(tensor): (held, value) for tensor, held, value in exchanged(picked, combine)}
        for tensor in parameters:
            same = views.reals(tensor)
            distances.add(*becomes.get(id(tensor), (same, same)))
    return list(becomes.values()), distances


def exchanged(tensors: list[Tensor], combine: Callable[[Tensor], None]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Tensors, with a view of what they hold, and what that becomes. All of one type travel together, in pieces: there
    may be thousands of small ones."""
    by_type: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
    for tensor in tensors:
        contents = agreement.contents(tensor)
        by_type.setdefault(contents.dtype, []).append((tensor, contents))
    for dtype, of_type in by_type.items():
        flat = torch.cat([contents.reshape(-1) for _, contents in of_type])
        for piece in torch.split(flat, PIECE // dtype.itemsize):
            combine(piece)
        sizes = [contents.numel() for _, contents in of_type]
        for (tensor, contents), value in zip(of_type, torch.split(flat, sizes), strict=True):
            yield tensor, contents, value.view(contents.shape)


def gather(core: _core.Runtime, tensor: Tensor) -> list[Tensor]:
    """What those have that are left, in the order of their ranks."""
    values = core.gather_living(tensor.contiguous().view(torch.uint8), patient=False)
    return [torch.frombuffer(value, dtype=tensor.dtype) for _, value in values or ()]


def mean_of(values: list[Tensor]) -> Tensor:
    """Their mean, summed in this order."""
    wide = torch.float64 if values[0].dtype is torch.float64 else torch.float32
    total = values[0].to(wide, copy=True)
    for value in values[1:]:
        total += value.to(wide)
    return (total / len(values)).to(values[0].dtype)


class Distances:
    """How far parameters are from what they become; squared."""

    def __init__(self) -> None:
        self.away = self.length = 0.0

    def add(self, value: Tensor, mean: Tensor) -> None:
        """Counts a parameter."""
        self.length += float(mean.double().square().sum())
        if value is not mean:
            self.away += float((value - mean).double().square().sum())

    def relative(self, furthest: float) -> float:
        """The distance of the furthest rank, relative to the length of the mean."""
        return (furthest / self.length) ** 0.5 if self.length else 0.0


def digests(tensors: list[Tensor]) -> Tensor:
    """A number for each tensor's bytes."""
    return torch.tensor([agreement.digest(tensor) for tensor in tensors], dtype=torch.int64, device="cpu")


def is_exact(tensor: Tensor) -> bool:
    """Whether it holds no floating-point numbers, of which there would be a mean."""
    return not (tensor.is_floating_point() or tensor.is_complex())
