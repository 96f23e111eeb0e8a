"""Algorithms that exchange snapshots of the weights in the background: frozen descriptions, as all algorithms are."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from . import codecs
from .algorithm import Algorithm
from .checks import check_flag, check_period, check_seed, check_warmup, is_whole
from .errors import InvalidArgument
from .steps import Step

# Seconds from round to round where ranks wait for each other.
BOUNDED = 0.1


# No dataclass of its own: what it only names would come first among the fields of those that have it.
class Background(Algorithm):
    """What all algorithms are that exchange snapshots of the weights while training goes on.

    Ranks train on their own gradients, at their own pace. A thread exchanges snapshots; what comes of it is added to
    the weights at the end of a step, so no step is lost and none waits, unless a bound says so. A rank that is lost is
    reported once, and the others go on without it. Every rank needs its own share of the data.
    """

    what: ClassVar[str] = "weights"
    when: ClassVar[str] = "background"

    # Fields of those that have them.
    period: ClassVar[float | None]
    warmup_steps: ClassVar[int] = 0
    # Whether what ranks have changed is somewhere else than in their replicas, which go there to meet.
    has_server: ClassVar[bool] = False

    def steps(self) -> Sequence[Step]:
        return ()

    @property
    def bound(self) -> int | None:
        """How many steps may be made without an exchange; None for any number."""
        return None

    @property
    def pace(self) -> float | None:
        """Seconds from round to round, at least; None to rest in proportion. Where ranks wait for each other they wait
        for rounds, and a rest must not grow with what one took."""
        return BOUNDED if self.period is None and self.bound is not None else self.period

    def method(self) -> tuple[str, dict[str, object]]:
        """What the core's thread does."""
        raise NotImplementedError(f"{type(self).__name__} must say what its method is")


@dataclass(frozen=True)
class AsyncModelAverage(Background):
    """All ranks move to the mean of their weights, again and again, while they train.

    Each rank sends 2(n-1)/n of its weights in each round. With a codec it sends differences to the last mean, encoded,
    with residuals on both sides.

    Use the learning rate of a single rank, or up to √n of it: a rank's step is not averaged with those of others.

    period: seconds from the beginning of a round to that of the next, at least; None rests seven times as long as each
        round took, and 0 never.
    codec: how differences to the last mean are encoded, e.g. "minmax8".
    warmup_steps: steps with averaged gradients first.
    """

    name: ClassVar[str] = "async_model_average"

    period: float | None = None  # type: ignore[misc]
    codec: codecs.Codec | str | None = None
    warmup_steps: int = 0  # type: ignore[misc]

    def __post_init__(self) -> None:
        check_period(self.period)
        check_warmup(self.warmup_steps)
        codecs.resolve(self.codec)

    def method(self) -> tuple[str, dict[str, object]]:
        return "average", {"codec": codecs.resolve(self.codec)}


@dataclass(frozen=True)
class AsyncGossip(Background):
    """Pairs of ranks move to the middle of their weights, again and again, while they train (AD-PSGD).

    A rank sends its weights once in each round. With codec="modular" it sends 8 bits of each weight, modulo how far
    ranks are apart, which both sides then know exactly (Moniqua); where that fails, the weights travel in full.

    peers: who meets whom: "random", "exponential" or "shift_one".
    period: as of `AsyncModelAverage`.
    codec: "modular", or None for float32.
    seed: for other random pairs; the same on every rank.
    """

    name: ClassVar[str] = "async_gossip"

    peers: str = "random"
    period: float | None = None  # type: ignore[misc]
    codec: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_period(self.period)
        check_seed(self.seed)
        if self.peers not in ("random", "exponential", "shift_one"):
            raise InvalidArgument(f"peers={self.peers!r} are no pairs; try: 'random', 'exponential' or 'shift_one'")
        if self.codec not in (None, "modular"):
            raise InvalidArgument(f"codec={self.codec!r} keeps nothing of its losses in gossip; try: 'modular' or None")

    def method(self) -> tuple[str, dict[str, object]]:
        return "gossip", {"peers": self.peers, "seed": self.seed, "modular": self.codec == "modular"}


@dataclass(frozen=True)
class AsyncServer(Background):
    """A parameter server of which every rank serves a part, in the background.

    A rank pushes what its steps have changed, an n-th of which is added to the server's weights, and moves to those.
    With a codec updates and answers are encoded, with residuals one way and replicas the other.

    staleness: how many steps a rank may make before the others have come as far, and their updates are in. None lets
        everyone run; 0 with plain SGD is what averaged gradients give.
    period: as of `AsyncModelAverage`, from one push to the next; with a bound None is 0.1.
    codec: how updates and answers are encoded, e.g. "minmax8".
    feedback: keep what is lost of updates and send it later; None does so where there is a codec.
    """

    name: ClassVar[str] = "async_server"
    has_server: ClassVar[bool] = True

    staleness: int | None = None
    period: float | None = None  # type: ignore[misc]
    codec: codecs.Codec | str | None = None
    feedback: bool | None = None

    def __post_init__(self) -> None:
        check_period(self.period)
        if self.feedback is not None:
            check_flag("feedback", self.feedback)
        bound = self.staleness
        if bound is not None and not (is_whole(bound) and bound >= 0):
            raise InvalidArgument(f"staleness={bound!r}; try: a whole number from 0 on, or None for no bound")
        codec = codecs.resolve(self.codec)
        if self.feedback and codec is None:
            raise InvalidArgument("feedback without a codec, which would lose nothing; try: a codec, or feedback=None")

    @property
    def bound(self) -> int | None:
        return self.staleness

    def method(self) -> tuple[str, dict[str, object]]:
        feedback = self.feedback if self.feedback is not None else self.codec is not None
        bounded = self.staleness is not None
        return "server", {"codec": codecs.resolve(self.codec), "feedback": feedback, "bounded": bounded}
