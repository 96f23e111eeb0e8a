"""Algorithms that let replicas differ for a while, and exchange weights instead of gradients."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from . import codecs
from .algorithm import Algorithm
from .checks import check_flag, check_warmup
from .errors import InvalidArgument
from .steps import AllReduce, Difference, Gossip, HostReduce, Outer, Replicas, Step, Weigh
from .syncs import Sync


@dataclass(frozen=True)
class LocalSGD(Algorithm):
    """Every host trains by itself, and weights are averaged over all ranks every so many steps.

    After the warm-up, in which gradients are averaged in every step, the ranks of a host still average their gradients,
    in shared memory, and nothing crosses between hosts but the weights after every `every`-th step: a 1/`every` of the
    bytes. The optimizer's state stays local. With every=1 and plain SGD it is `GradientAllReduce`.

    every: steps between averages.
    warmup_steps: steps at the beginning in which gradients are averaged instead.
    weighted: ranks count by the samples that they have seen since the last average, and not each the same; tell with
        `saw(len(batch))` of the wrapped optimizer or model before each backward. On the CPU.
    """

    name: ClassVar[str] = "local_sgd"

    every: int = 8
    warmup_steps: int = 0
    weighted: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        check_warmup(self.warmup_steps)
        check_flag("weighted", self.weighted)
        self.sync()

    def warmup(self) -> tuple[int, Sequence[Step]]:
        return self.warmup_steps, [*self._weighing(), AllReduce("mean")]

    def steps(self) -> Sequence[Step]:
        return [HostReduce()]

    def sync(self) -> Sync:
        return Sync([*self._weighing(), AllReduce("mean")], every=self.every, after=self.warmup_steps)

    def _weighing(self) -> list[Step]:
        return [Weigh()] if self.weighted else []


@dataclass(frozen=True)
class DiLoCo(LocalSGD):
    """Every host trains by itself; every so many steps the mean of how far they came makes an outer step.

    All ranks keep the same anchor θ, the weights after the last exchange, and momentum v, both in float32. With x the
    weights of a rank: d = mean(θ - x), v = outer_momentum · v + d, θ = θ - outer_lr · (d + outer_momentum · v), x = θ.
    With outer_lr=1 and outer_momentum=0 it is `LocalSGD`. Use the inner learning rate of one rank alone (an AdamW as
    usual). outer_lr 0.7 and outer_momentum 0.9 are for long runs with hundreds of exchanges; in short ones 0.7 and 0.3
    go as far as the ranks came, and no further.

    **Streaming.** With `fragments` the weights are divided into so many parts of about the same size, which take turns
    every `every / fragments` steps: the same bytes, but in smaller pieces. With `overlap` the exchange of a fragment
    begins so many steps before it is applied, and the wire is busy while the steps in between are made. These are not
    lost: x = θ + (what x has moved since the exchange began), so they count in the next one.

    every: steps between two exchanges of the same weight.
    outer_lr, outer_momentum: of the outer step.
    codec: how d is encoded between hosts.
    feedback: keep what the codec loses and send it later; None does so for codecs under 8 bits.
    fragments: parts that take turns; `every` is a multiple of it.
    overlap: steps between the beginning of an exchange and its use; under every / fragments.
    warmup_steps: steps at the beginning in which gradients are averaged instead.
    weighted: as in `LocalSGD`; d is the mean over samples.
    """

    name: ClassVar[str] = "diloco"

    every: int = 500
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    codec: codecs.Codec | str | None = None
    feedback: bool | None = None
    fragments: int = 1
    overlap: int = 0
    warmup_steps: int = 0

    def sync(self) -> Sync:
        coarse = codecs.name_of(self.codec) in ("int4", "onebit")
        feedback = coarse if self.feedback is None else self.feedback
        exchange = AllReduce("mean", self.codec, feedback=feedback)
        return Sync(
            [Difference(), *self._weighing(), exchange, Outer(self.outer_lr, self.outer_momentum)],
            every=self.every,
            fragments=self.fragments,
            overlap=self.overlap,
            after=self.warmup_steps,
        )


@dataclass(frozen=True)
class Decentralized(Algorithm):
    """Every host averages its weights with some others, while forward and backward run.

    In step t rank i has x_i and computes its gradient g_i there; its next weights are Σ_j W_ij x_j - lr · g_i (or
    whatever the optimizer makes of g_i). The average begins with the first forward after a step and is put in place of
    the weights before the next. Replicas differ, and are drawn together in every step; nobody waits for more than its
    peers. Ranks of a host average among themselves first. When ranks are lost, those that are left go on in the same
    kind of graph, of ranks.

    peers: who averages with whom, a graph of hosts. "exponential": one peer, at a distance that doubles from step to
        step, so that with 2^k hosts k steps make an exact average; "ring": both neighbours; "shift_one": one of the
        other half, which must be as large; "random": one by lot; "all": everybody, which is an all-reduce of weights.
    every: steps between averages.
    seed: of the lots; the same on every rank.
    """

    name: ClassVar[str] = "decentralized"

    peers: str = "exponential"
    every: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        self.sync()

    def steps(self) -> Sequence[Step]:
        return []

    def sync(self) -> Sync:
        return Sync([Gossip(self.peers, self.seed)], when="before_forward", every=self.every)


@dataclass(frozen=True)
class LowPrecisionDecentralized(Algorithm):
    """Every host averages its weights with some others after each step, in few bits.

    Everybody keeps copies of what its peers have, and only encoded differences to these travel, which become small as
    training converges. On a ring that is difference compression (DCD): with w, l, r the copies of its own weights and
    of the neighbours', d = (x - w) + (l - w) / 3 + (r - w) / 3 goes out encoded, everybody adds what it decodes, and
    x = w. On other graphs, and wherever gamma is given, it is CHOCO: q = x - x̂ goes out encoded, x̂ += q on all sides,
    and x += gamma · Σ_j W_ij (x̂_j - x̂_i). Ranks of a host average among themselves first. When ranks are lost, those
    that are left go on in the same kind of graph, with 8 bits of each weight modulo the distance between ranks.

    CHOCO's running sums are float32, and its mean drifts by some 3e-6 of the weights in each step: for long runs take
    the ring by DCD.

    peers: "ring"; or "exponential" (all its distances in every step) and "all" by CHOCO. Those that change from step to
        step have no copies.
    codec: how differences are encoded between hosts; under 8 bits only by CHOCO with a small gamma. None sends float32.
    every: steps between averages.
    gamma: the consensus step of CHOCO, over 0 and up to 1; None is difference compression on a ring, and else 0.5.
    seed: of a stochastic codec's random numbers; the same on every rank.
    """

    name: ClassVar[str] = "low_precision_decentralized"

    peers: str = "ring"
    codec: codecs.Codec | str | None = "minmax8"
    every: int = 1
    gamma: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.peers in ("shift_one", "random"):
            raise InvalidArgument(
                f"peers={self.peers!r} are others in every step, and copies are kept of those that stay; try: "
                '"ring", "exponential" or "all"'
            )
        self.sync()

    def steps(self) -> Sequence[Step]:
        return []

    def sync(self) -> Sync:
        gamma = 0.5 if self.gamma is None and self.peers != "ring" else self.gamma
        return Sync([Replicas(self.peers, self.codec, gamma, self.seed)], every=self.every, restart=True)
