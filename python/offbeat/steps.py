"""Steps: the closed vocabulary that algorithms are made of, and that the core runs without Python.

A step is a frozen description. `describe` gives what the core builds it from, once for each bucket.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from . import codecs, devices, memory
from .checks import check_flag, check_hierarchical, check_seed, is_number, is_whole
from .errors import InvalidArgument

Hierarchical = bool | Literal["auto"]
# A step as the core takes it: its name, and its arguments.
Described = tuple[str, dict[str, object]]


@dataclass(frozen=True)
class Parameter:
    """What a step may want to know of a parameter: its name, and the settings of its group in the optimizer."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """What all steps are."""

    def describe(self, parameters: Sequence[Parameter], /) -> Described:
        """The step's name in the core, and its arguments."""
        raise NotImplementedError(f"{type(self).__name__} must say what the core is to do")


@dataclass(frozen=True)
class AllReduce(Step):
    """Reduces the bucket over all ranks.

    op: "mean" or "sum".
    codec: how numbers are encoded between hosts.
    feedback: keep what the codec loses, on both sides, and send it later.
    seed: where the random numbers of a stochastic codec begin.
    hierarchical: "auto" and True sum the ranks of a host first, in shared memory, and each carries its share between
        hosts. False sums all ranks in ascending order, whatever the hosts: slower, and the same bits on every layout.
    """

    op: str = "mean"
    codec: codecs.Codec | str | None = None
    feedback: bool = False
    seed: int = 0
    hierarchical: Hierarchical = "auto"

    def __post_init__(self) -> None:
        if self.op not in ("mean", "sum"):
            raise InvalidArgument(f'op={self.op!r} makes no gradient; try: "mean" or "sum"')
        check_flag("feedback", self.feedback)
        codec = codecs.resolve(self.codec)
        if self.feedback and codec is None:
            raise InvalidArgument("feedback without a codec, which would lose nothing; try: a codec, or feedback=False")
        check_seed(self.seed)
        check_hierarchical(self.hierarchical)

    def describe(self, _: Sequence[Parameter], /) -> Described:
        return "all_reduce", {
            "op": self.op,
            "codec": codecs.resolve(self.codec),
            "feedback": self.feedback,
            "seed": self.seed,
            "hierarchical": self.hierarchical is not False,
        }


@dataclass(frozen=True)
class HostReduce(Step):
    """Averages the bucket over the ranks of each host, in shared memory; nothing crosses between hosts."""

    def describe(self, _: Sequence[Parameter], /) -> Described:
        return "host_reduce", {}


@dataclass(frozen=True)
class Difference(Step):
    """Weights become how far they are from the anchor: the weights that all ranks had after the last exchange."""

    def describe(self, _: Sequence[Parameter], /) -> Described:
        return "difference", {}


@dataclass(frozen=True)
class Outer(Step):
    """What the last `Difference` has made of weights, averaged, moves the anchor by a step of SGD with Nesterov's
    momentum, and weights become the anchor.

    lr: the learning rate; 1 is the mean, without momentum.
    momentum: how much of it stays.
    """

    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        if not is_number(self.lr) or not 0 < self.lr < float("inf"):
            raise InvalidArgument(f"an outer learning rate of {self.lr!r}; try: 0.7, or 1 for the plain mean")
        if not is_number(self.momentum) or not 0 <= self.momentum < 1:
            raise InvalidArgument(f"an outer momentum of {self.momentum!r}; try: a number from 0 to under 1, e.g. 0.9")

    def describe(self, _: Sequence[Parameter], /) -> Described:
        return "outer", {"lr": float(self.lr), "momentum": float(self.momentum)}


@dataclass(frozen=True)
class Weigh(Step):
    """What a rank has is multiplied by its share of the samples, ranks · its own / all of them since the last exchange:
    the mean over ranks that follows is one over samples. How many they are `saw()` of the wrapped optimizer or model
    says. For gradients and weights before `AllReduce`, and after `Difference` where there is one."""

    def describe(self, _: Sequence[Parameter], /) -> Described:
        return "weigh", {}


PEERS = ("all", "ring", "shift_one", "exponential", "random")


@dataclass(frozen=True)
class Gossip(Step):
    """Weights become the weighted mean of a host's own and those of its peers in this round.

    peers: who they are; see `offbeat.algorithms.Decentralized`.
    seed: where random peers come from.
    """

    peers: str = "exponential"
    seed: int = 0

    def __post_init__(self) -> None:
        check_peers(self.peers)
        check_seed(self.seed)

    def describe(self, _: Sequence[Parameter], /) -> Described:
        return "gossip", {"peers": self.peers, "seed": self.seed}


@dataclass(frozen=True)
class Replicas(Step):
    """The mean with the peers, of which everybody keeps copies, by encoded differences to these.

    peers: who they are; the same in every round.
    codec: how differences are encoded between hosts.
    gamma: the consensus step of CHOCO; None is difference compression, which is for peers="ring".
    seed: where the random numbers of a stochastic codec begin.
    """

    peers: str = "ring"
    codec: codecs.Codec | str | None = "minmax8"
    gamma: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_peers(self.peers)
        codecs.resolve(self.codec)
        check_seed(self.seed)
        if self.gamma is not None and not (is_number(self.gamma) and 0 < self.gamma <= 1):
            raise InvalidArgument(f"gamma={self.gamma!r} is not over 0 and up to 1; try: 0.5")

    def describe(self, _: Sequence[Parameter], /) -> Described:
        codec = codecs.resolve(self.codec)
        return "replicas", {"peers": self.peers, "codec": codec, "gamma": self.gamma, "seed": self.seed}


@dataclass(frozen=True)
class Momentum(Step):
    """A gradient becomes the momentum that it makes: beta · momentum + (1 - beta) · gradient.

    Momentum changes less from step to step than a gradient does, so a coarse codec loses less of it. All ranks keep the
    same; a later `Gradient` takes the gradient out again.

    beta: how much stays; None takes that of the parameter's group in the optimizer, or 0.9 where there is none.
    """

    beta: float | None = None

    def __post_init__(self) -> None:
        if self.beta is not None and not (is_number(self.beta) and 0 <= self.beta < 1):
            raise InvalidArgument(f"beta={self.beta!r}; try: a number from 0 to under 1, e.g. 0.9")

    def describe(self, parameters: Sequence[Parameter], /) -> Described:
        return "momentum", {"betas": [beta_of(p.settings) if self.beta is None else self.beta for p in parameters]}


def beta_of(settings: Mapping[str, Any]) -> float:
    """How much momentum an optimizer keeps with these settings."""
    betas = settings.get("betas")
    beta = float(betas[0] if betas else settings.get("momentum") or 0.9)
    return beta if 0 <= beta < 1 else 0.9


@dataclass(frozen=True)
class Gradient(Step):
    """The momentum of the last `Momentum` step becomes the gradient again that would have made it."""

    def describe(self, _: Sequence[Parameter], /) -> Described:
        return "gradient", {}


@dataclass(frozen=True)
class Select(Step):
    """The mean over all ranks of the largest elements of each matrix; the others are kept and sent later.

    What is no matrix (biases, scales) is sent whole.

    ratio: the share of the elements that is sent; at least one of each matrix.
    hierarchical: as in `AllReduce`; the ranks of a host select from their sum.
    """

    ratio: float = 0.01
    hierarchical: Hierarchical = "auto"

    def __post_init__(self) -> None:
        if not is_number(self.ratio) or not 0 < self.ratio <= 1:
            raise InvalidArgument(f"ratio={self.ratio!r} is not over 0 and up to 1; try: 0.01")
        check_hierarchical(self.hierarchical)

    def describe(self, _: Sequence[Parameter], /) -> Described:
        return "select", {"ratio": float(self.ratio), "hierarchical": self.hierarchical is not False}


@dataclass(frozen=True)
class LowRank(Step):
    """The mean over all ranks, of matrices as two thin factors; what these lack is kept and sent later.

    rank: columns of a factor.
    least: matrices whose factors are not so many times smaller travel whole, as all that is no matrix does; 0 takes
        every matrix.
    seed: where the first factors begin.
    hierarchical: as in `AllReduce`.
    """

    rank: int = 4
    least: float = 2.0
    seed: int = 0
    hierarchical: Hierarchical = "auto"

    def __post_init__(self) -> None:
        if not is_whole(self.rank) or not 1 <= self.rank <= 1024:
            raise InvalidArgument(f"rank={self.rank!r} is not a whole number from 1 to 1024; try: 4")
        if not is_number(self.least) or not 0 <= self.least <= 1e6:
            raise InvalidArgument(f"least={self.least!r} is no rate of compression; try: 2, or 0 for every matrix")
        check_seed(self.seed)
        check_hierarchical(self.hierarchical)

    def describe(self, _: Sequence[Parameter], /) -> Described:
        return "low_rank", {
            "rank": self.rank,
            "rate": float(self.least),
            "seed": self.seed,
            "hierarchical": self.hierarchical is not False,
        }


@dataclass(frozen=True)
class Bucket:
    """What a function of yours works on: the gradients of several parameters in one flat tensor.

    values: all of them, with zeros between parameters. Change it in place.
    state: a float32 tensor as long as `values` for each name of `Apply.state`; zero at the beginning, saved and loaded
        with the optimizer.
    step: the number of the exchange.
    """

    values: Tensor
    state: Mapping[str, Tensor]
    step: int
    places: Sequence[tuple[str, int, int]]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The name of each parameter, and its piece of `values`."""
        for name, first, count in self.places:
            yield name, self.values.narrow(0, first, count)


@dataclass(frozen=True)
class Apply(Step):
    """Calls a function of yours with each bucket, on the communication thread, holding the GIL.

    On a GPU it is called with torch's current stream set to that of the exchange: what it enqueues runs between the
    steps before and after it. It should not wait for the device (`.item()`, `print` of values).

    What it does must depend on what all ranks have alike (the step, results of steps before it), or on this rank's data
    before a step that makes all ranks equal again.

    function: gets a `Bucket` and changes its `values` in place.
    state: names of what it keeps from step to step for each element.
    """

    function: Callable[[Bucket], object]
    state: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise InvalidArgument(
                f"Apply takes a function of a bucket, not {self.function!r}; try: one that changes bucket.values"
            )
        listed = isinstance(self.state, list | tuple) and all(isinstance(name, str) for name in self.state)
        if not listed or len(set(self.state)) < len(self.state):
            raise InvalidArgument(f"state={self.state!r}; try: a list of different names, e.g. state=('momentum',)")

    def describe(self, _: Sequence[Parameter], /) -> Described:
        def run(
            values: object, state: dict[str, object], places: list[tuple[str, int, int]], step: int, stream: int | None
        ) -> None:
            bucket = Bucket(memory.shown(values), {k: memory.shown(v) for k, v in state.items()}, step, places)
            with contextlib.nullcontext() if stream is None else devices.of_tensor(bucket.values).within(stream):
                self.function(bucket)

        name = getattr(self.function, "__qualname__", repr(self.function))
        return "apply", {"function": run, "name": name, "states": list(self.state)}


def check_peers(peers: object) -> None:
    """Raises unless it is a rule."""
    if peers not in PEERS:
        raise InvalidArgument(f"peers={peers!r}; try: one of {', '.join(map(repr, PEERS))}")


__all__ = [
    "AllReduce",
    "Apply",
    "Bucket",
    "Difference",
    "Gossip",
    "Gradient",
    "HostReduce",
    "LowRank",
    "Momentum",
    "Outer",
    "Parameter",
    "Replicas",
    "Select",
    "Step",
    "Weigh",
]
