"""What `offbeat.stats()` gives, and where models add their part."""

import itertools
import weakref
from collections.abc import Callable
from typing import NotRequired, Protocol, TypedDict

from . import _core


class ModelSeconds(TypedDict):
    """How long a model communicated, and how much of that its backward passes waited for."""

    communication: float
    exposed: float


class Seconds(ModelSeconds):
    """The sums over all models; `hidden` is the part that nobody waited for, None while there was no communication."""

    hidden: float | None


class Bytes(TypedDict):
    """Of frames, with their headers."""

    sent: int
    received: int


class Link(Bytes):
    """What went over the link to a rank."""

    rank: int
    kind: str


class Coding(TypedDict):
    """What encoding has done: bytes before and after, the part of results that was lost, blocks with NaN or Inf, and
    the seconds that it took.

    Bytes are those of what this rank has encoded; of matrices and their factors; and where the largest elements are
    selected, those of the lists that it has sent to other hosts, and what an all-reduce would have sent in their place.
    """

    plain: int
    coded: int
    saved: int
    error: float
    non_finite: int
    seconds: float


class Background(TypedDict):
    """What exchanges in the background have done: rounds that gave something, and those that were dropped with a lost
    rank; this rank's steps since the snapshot of the last one; how far that moved it; ranks that are there."""

    syncs: int
    dropped: int
    staleness: int
    spread: float
    living: int


class Model(TypedDict):
    """A model's part."""

    model: int
    algorithm: str
    step: int
    parameters: int
    buckets: int
    bucket_bytes: int
    unused: list[str]
    seconds: ModelSeconds
    coding: Coding | None  # None where nothing was encoded
    syncs: int  # exchanges of weights that were applied
    spread: float | None  # how far replicas were apart at the last `consolidate`
    living: NotRequired[int]  # ranks that are there, where gossip goes on without those that are lost
    background: NotRequired[Background]  # where the algorithm works there


class Stats(TypedDict):
    """What a rank has done since `init`."""

    rank: int
    world_size: int
    steps: int  # of the model with the most
    seconds: Seconds
    bytes: Bytes
    links: list[Link]
    models: list[Model]


def coding(counted: tuple[int, int, int, float, float]) -> Coding | None:
    """What was counted; None while nothing was encoded."""
    plain, coded, non_finite, error, seconds = counted
    if not plain and not non_finite and not seconds:
        return None
    return {
        "plain": plain,
        "coded": coded,
        "saved": plain - coded,
        "error": error,
        "non_finite": non_finite,
        "seconds": seconds,
    }


def seconds_saved(done: Coding, communication: float) -> float:
    """How much longer communication would have taken without encoding, by the rate at which encoded bytes went. What
    is left of it without this rank's own encoding is not all of the wire: others encode as long, and are waited for."""
    wire = max(communication - 2 * done["seconds"], 0.0)
    return wire * done["saved"] / max(done["coded"], 1) - done["seconds"]


# Each model puts in a function that gives its part, which any thread may call at any time: it waits for nothing, and
# keeps nothing alive. It gives None when its model is gone. `shutdown` empties the table.
models: dict[int, Callable[[], Model | None]] = {}

_numbers = itertools.count()


def number() -> int:
    """A number for a model, or for a part of one with buckets of its own: its name in traces and in `models`."""
    return next(_numbers)


def collect(core: _core.Runtime) -> Stats:
    """All parts. Never blocks: the numbers are read as they are at this moment."""
    return assemble(
        core.rank, core.world_size, core.traffic(), [part for give in list(models.values()) if (part := give())]
    )


def assemble(rank: int, world_size: int, traffic: list[tuple[int, str, int, int]], parts: list[Model]) -> Stats:
    """The sums over links and models."""
    links: list[Link] = [
        {"rank": peer, "kind": kind, "sent": sent, "received": received}
        for peer, kind, sent, received in traffic
        if peer != rank
    ]
    communication = sum(part["seconds"]["communication"] for part in parts)
    exposed = sum(part["seconds"]["exposed"] for part in parts)
    hidden = min(1.0, max(0.0, 1 - exposed / communication)) if communication else None
    return {
        "rank": rank,
        "world_size": world_size,
        "steps": max((part["step"] for part in parts), default=0),
        "seconds": {"communication": float(communication), "exposed": float(exposed), "hidden": hidden},
        "bytes": {"sent": sum(link["sent"] for link in links), "received": sum(link["received"] for link in links)},
        "links": links,
        "models": parts,
    }


class Counted(Protocol):
    """What has a part in `offbeat.stats()`."""

    def stats(self) -> Model:
        """What it has done so far."""
        ...


def weakly(counted: Counted) -> Callable[[], Model | None]:
    """Gives its part of `offbeat.stats()` without keeping it alive."""
    reference = weakref.ref(counted)

    def part() -> Model | None:
        alive = reference()
        return None if alive is None else alive.stats()

    return part
