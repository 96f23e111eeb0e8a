"""Algorithms: what is communicated, when, and through which steps. Frozen descriptions; the core does the work.

An algorithm of your own is a subclass of `Algorithm` with a `steps` method, exactly like those below.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import ClassVar

import torch

from . import adam, codecs
from .algorithm import Algorithm
from .asynchronous import AsyncGossip, AsyncModelAverage, AsyncServer
from .checks import check_flag, check_warmup
from .errors import InvalidArgument
from .local import Decentralized, DiLoCo, LocalSGD, LowPrecisionDecentralized
from .steps import AllReduce, Gradient, Hierarchical, LowRank, Momentum, Select, Step, Weigh
from .syncs import Sync

# Where other packages register algorithms by name.
ENTRY_POINTS = "offbeat.algorithms"


class Averaging(Algorithm):
    """What algorithms that give the mean or the sum in every exchange have in common."""

    average: bool

    def __post_init__(self) -> None:
        check_flag("average", self.average)
        self.steps()


@dataclass(frozen=True)
class GradientAllReduce(Averaging):
    """Averages gradients over all ranks while backward goes on: the result of torch's DistributedDataParallel.

    average: False gives the sum instead of the mean.
    hierarchical: see `offbeat.steps.AllReduce`.
    weighted: ranks count by their samples since the last exchange, so that the mean is one over all samples also where
        batches differ in size; tell with `saw(len(batch))` of the wrapped optimizer or model before backward. On the
        CPU.
    """

    name: ClassVar[str] = "allreduce"

    average: bool = True
    hierarchical: Hierarchical = "auto"
    weighted: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag("weighted", self.weighted)
        if self.weighted and not self.average:
            raise InvalidArgument("weighted=True with average=False, a sum that nobody divides; try: average=True")

    def steps(self) -> Sequence[Step]:
        exchange = AllReduce("mean" if self.average else "sum", hierarchical=self.hierarchical)
        return [Weigh(), exchange] if self.weighted else [exchange]


@dataclass(frozen=True)
class ByteGrad(Averaging):
    """Averages gradients in 8 bits between hosts: a quarter of the bytes of float32.

    Every rank sends its share to its owner in blocks of 256 numbers with one range each; the owner adds up in float32
    and sends the mean in the same encoding. A block loses at most half a step of its range on either way.

    average: False gives the sum instead of the mean.
    feedback: keep what is lost and send it later. Rarely needed with 8 bits, and costs two more copies of gradients.
    hierarchical: "auto" encodes between hosts only; see `offbeat.steps.AllReduce`.
    """

    name: ClassVar[str] = "bytegrad"

    average: bool = True
    feedback: bool = False
    hierarchical: Hierarchical = "auto"

    def steps(self) -> Sequence[Step]:
        op = "mean" if self.average else "sum"
        return [AllReduce(op, "minmax8", feedback=self.feedback, hierarchical=self.hierarchical)]


@dataclass(frozen=True)
class QSGD(Averaging):
    """Averages gradients in 8 bits between hosts, rounded up or down at random so that the expected value is exact.

    The random numbers depend on seed, step, parameter and the place in it: a run can be repeated, and resumed.

    average: False gives the sum instead of the mean.
    seed: for other random numbers; the same on every rank.
    hierarchical: "auto" encodes between hosts only; see `offbeat.steps.AllReduce`.
    """

    name: ClassVar[str] = "qsgd"

    average: bool = True
    seed: int = 0
    hierarchical: Hierarchical = "auto"

    def steps(self) -> Sequence[Step]:
        op = "mean" if self.average else "sum"
        return [AllReduce(op, "qsgd", seed=self.seed, hierarchical=self.hierarchical)]


class WarmingUp(Algorithm):
    """What algorithms that average gradients in full precision at first have in common."""

    warmup_steps: int
    hierarchical: Hierarchical

    def __post_init__(self) -> None:
        check_warmup(self.warmup_steps)
        self.steps()

    def warmup(self) -> tuple[int, Sequence[Step]]:
        return self.warmup_steps, [AllReduce("mean", hierarchical=self.hierarchical)]


@dataclass(frozen=True)
class QAdam(WarmingUp):
    """Adam whose momentum travels in few bits, after a warm-up in full precision.

    In the warm-up it is torch's Adam on averaged gradients. Then the second moment v is frozen as v̂ = v / (1 - β2^T);
    ranks average β1·m + (1 - β1)·g, encoded, and the step is lr · m / (1 - β1^t) / (√v̂ + eps), with decoupled weight
    decay. An element whose v̂ is 0 is not updated any more. When `backward` returns, `.grad` is the gradient that makes
    the averaged momentum.

    The optimizer must be a plain torch.optim.Adam or AdamW; each group has its own betas, eps and weight decay.

    warmup_steps: exchanges in full precision; about a fifth of all steps, and more than 1 / (1 - β2) of them for v to
        settle.
    codec: how momentum is encoded between hosts: "minmax8", "int4" or "onebit".
    feedback: keep what the codec loses and send it later; None does so for codecs under 8 bits.
    hierarchical: "auto" encodes between hosts only; see `offbeat.steps.AllReduce`.
    """

    name: ClassVar[str] = "qadam"

    warmup_steps: int = 100
    codec: codecs.Codec | str | None = "minmax8"
    feedback: bool | None = None
    hierarchical: Hierarchical = "auto"

    def steps(self) -> Sequence[Step]:
        coarse = codecs.name_of(self.codec) in ("int4", "onebit")
        feedback = coarse if self.feedback is None else self.feedback
        exchange = AllReduce("mean", self.codec, feedback=feedback, hierarchical=self.hierarchical)
        return [Momentum(), exchange, Gradient()]

    def take_over(self, optimizer: torch.optim.Optimizer | None, /) -> adam.FrozenAdam | None:
        return adam.FrozenAdam(optimizer, self.warmup_steps, type(self).__name__)


@dataclass(frozen=True)
class OneBitAdam(QAdam):
    """`QAdam` with one bit for each element: signs and a magnitude for each block, with residuals on both sides.

    A 32nd of the bytes of float32. Give it a warm-up until the second moment has settled.
    """

    name: ClassVar[str] = "onebit_adam"

    codec: codecs.Codec | str | None = "onebit"


@dataclass(frozen=True)
class PowerSGD(WarmingUp):
    """Averages gradients as matrices of low rank, with what these lack kept on each rank and sent later.

    A matrix M of r × c (and what was left of it) becomes P = M·Q, averaged and made orthonormal, and Q = Mᵀ·P,
    averaged; the gradient is P·Qᵀ. Q is where the next step begins. It sends rank·(r + c) instead of r·c numbers.

    rank: columns of P and Q; more is more exact.
    warmup_steps: exchanges in full precision before.
    least: a matrix that would not become this many times smaller travels whole, as vectors do; 0 takes every matrix.
    seed: where the first Q begins; the same on every rank.
    hierarchical: see `offbeat.steps.AllReduce`.
    """

    name: ClassVar[str] = "powersgd"

    rank: int = 4
    warmup_steps: int = 0
    least: float = 2.0
    seed: int = 0
    hierarchical: Hierarchical = "auto"

    def steps(self) -> Sequence[Step]:
        return [LowRank(self.rank, self.least, self.seed, self.hierarchical)]


@dataclass(frozen=True)
class TopK(WarmingUp):
    """Averages the largest elements of each gradient; the others are kept on each host and sent when they have grown.

    An element that is sent takes 6 bytes, and goes to every other host. Parameters that are no matrices (biases,
    scales) are sent whole, with 4 bytes an element. Take less momentum than usual (0.5 instead of 0.9, and the learning
    rate five times higher): what is sent late acts like momentum already.

    ratio: the share of the elements that is sent.
    warmup_steps: exchanges in full precision before.
    hierarchical: "auto" selects from the sum of a host's ranks; see `offbeat.steps.AllReduce`.
    """

    name: ClassVar[str] = "topk"

    ratio: float = 0.01
    warmup_steps: int = 0
    hierarchical: Hierarchical = "auto"

    def steps(self) -> Sequence[Step]:
        return [Select(self.ratio, self.hierarchical)]


OF_GRADIENTS: tuple[type[Algorithm], ...] = (GradientAllReduce, ByteGrad, QSGD, QAdam, OneBitAdam, PowerSGD, TopK)
OF_WEIGHTS: tuple[type[Algorithm], ...] = (LocalSGD, DiLoCo, Decentralized, LowPrecisionDecentralized)
IN_BACKGROUND: tuple[type[Algorithm], ...] = (AsyncModelAverage, AsyncGossip, AsyncServer)
KNOWN: dict[str, type[Algorithm]] = {kind.name: kind for kind in (*OF_GRADIENTS, *OF_WEIGHTS, *IN_BACKGROUND)}


def named(name: str) -> Algorithm:
    """The algorithm with a name: one of ours, or one that an installed package registered as an entry point."""
    if name in KNOWN:
        return KNOWN[name]()
    registered = {point.name: point for point in metadata.entry_points(group=ENTRY_POINTS)}
    if name not in registered:
        names = ", ".join(map(repr, [*KNOWN, *sorted(registered)]))
        raise InvalidArgument(f"there is no algorithm {name!r}; try: one of {names}")
    point = registered[name]
    try:
        made = point.load()()
    except Exception as error:
        raise InvalidArgument(
            f"the algorithm {name!r} ({point.value}) cannot be made: {error!r}; try: to import and call it"
        ) from error
    if not isinstance(made, Algorithm):
        raise InvalidArgument(
            f"the algorithm {name!r} ({point.value}) is no offbeat.Algorithm: {made!r}; try: a subclass of it"
        )
    return made


def resolve(algorithm: Algorithm | str) -> Algorithm:
    """The algorithm for an instance or a name."""
    if isinstance(algorithm, str):
        return named(algorithm)
    if isinstance(algorithm, type) and issubclass(algorithm, Algorithm):
        raise InvalidArgument(f"algorithm= got the class {algorithm.__name__}; try: {algorithm.__name__}()")
    if not isinstance(algorithm, Algorithm):
        raise InvalidArgument(
            f"algorithm= must be one of offbeat.algorithms or a name, not {algorithm!r}; try: algorithm='allreduce'"
        )
    return algorithm


__all__ = [
    "QSGD",
    "Algorithm",
    "AsyncGossip",
    "AsyncModelAverage",
    "AsyncServer",
    "ByteGrad",
    "Decentralized",
    "DiLoCo",
    "GradientAllReduce",
    "LocalSGD",
    "LowPrecisionDecentralized",
    "OneBitAdam",
    "PowerSGD",
    "QAdam",
    "Sync",
    "TopK",
    "resolve",
]
