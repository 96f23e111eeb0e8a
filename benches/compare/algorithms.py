"""The rows of algorithms that send less: what is trained, what a step should cost. Pure data and arithmetic.

All contenders of a course train their own copy of one model in the same processes, by turns. Samples are seconds of a
step and, under the same name with the tail `-bytes`, what the interfaces of a host sent in it; with the tail `-beside`,
seconds of processor time of all threads but the one that trains; with the tail `-spread`, how far replicas that may
differ were apart after it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from .cases import Place
from .training import Model, median

OF_LIMIT = 1.15
SLOW = 5  # times a slowed rank takes for a step
USED = 0.1  # of the wire, at least, by what works beside the training
GROWN = 2.0  # times, at most, that the spread may have grown from one half of the repetitions to the next
APART = 1.0  # of how far ranks that do not talk are apart, at most
F32, INDEX = 4, 4
# bytes an element, with the scales of its block
MINMAX8, QSGD, INT4, ONE_BIT, BFLOAT16 = 1 + 8 / 256, 1 + 4 / 512, 1 / 2 + 4 / 128, 1 / 8 + 4 / 2048, 2.0

Bytes = Callable[[Model, int], float]  # what a host sends in a step, by model and number of hosts


def all_reduced(numbers: float, hosts: int, size: float = F32) -> float:
    """Scatter and gather: everybody sends all but its own share, twice."""
    return 2 * (hosts - 1) / hosts * numbers * size


def coded(size: float) -> Bytes:
    return lambda model, hosts: all_reduced(model.parameters, hosts, size)


def low_rank(rank: int) -> Bytes:
    """Two factors of each weight matrix, and what is no matrix as it is."""

    def sent(model: Model, hosts: int) -> float:
        factors, biases = 2 * model.width * rank, model.width
        return all_reduced(model.layers * (factors + biases), hosts)

    return sent


def selected(ratio: float) -> Bytes:
    """Everybody sends everybody its values with their indices: some of each matrix, and all of what is no matrix. Ours
    sends two bytes for an index, and none for what is whole, so it can come below."""

    def sent(model: Model, hosts: int) -> float:
        weights, biases = model.layers * model.width**2, model.layers * model.width
        return (hosts - 1) * (ratio * weights + biases) * (F32 + INDEX)

    return sent


def told(peers: int, size: float = F32) -> Bytes:
    """Everybody sends all it has to so many peers."""
    return lambda model, _: peers * model.parameters * size


def averaged(every: int) -> Bytes:
    """Weights are averaged once in so many steps."""
    return lambda model, hosts: all_reduced(model.parameters, hosts) / every


def hidden(*_: object) -> float:
    """The wire is busy beside the training, which waits for nothing."""
    return 0.0


@dataclass(frozen=True)
class Contender:
    """One way to train, and what it should reach beside the yardstick of its course."""

    key: str
    engine: str  # "plain" (does not talk), "ddp", "ddp-bf16" (with torch's own hook) or "ours"
    optimizer: str = "sgd"
    algorithm: str = ""  # its constructor
    bytes: Bytes | None = None
    faster: float | None = None  # than the yardstick, at least
    share: float | None = None  # of the yardstick's bytes, at most
    of_limit: float | None = None  # times the limit, at most
    steps: int = 1  # that are timed as one, where not all are alike
    seconds: float = 0.0  # for which all ranks train, at their own pace, instead of a number of steps
    alone: str = ""  # the contender that does not talk, with the same optimizer and number of steps
    is_equal: bool = True  # whether replicas hold the same bits
    slow: int = 1  # times that the last rank takes for a step; the others count
    used: float | None = None  # of the wire, at least

    @property
    def title(self) -> str:
        plain = {"plain": "not talking", "ddp": "DDP", "ddp-bf16": "DDP, bf16 hook"}
        title = f"`{self.algorithm}`" if self.algorithm else plain[self.engine]
        title += f", one rank {self.slow}× slower" if self.slow > 1 else ""
        return title if self.steps == 1 else f"{title}, mean of {self.steps}"

    def described(self) -> dict[str, str | int]:
        """What a rank needs to know."""
        said = {"name": self.key, "engine": self.engine, "optimizer": self.optimizer, "algorithm": self.algorithm}
        return said | {"steps": self.steps, "seconds": self.seconds, "slow": self.slow}


def ours(key: str, optimizer: str, algorithm: str, sent: Bytes, faster: float, share: float) -> Contender:
    return Contender(key, "ours", optimizer, algorithm, sent, faster, share, OF_LIMIT)


@dataclass(frozen=True)
class Course:
    """Contenders that take turns at one place."""

    key: str
    place: Place
    model: Model
    batch: int
    yardstick: str
    contenders: tuple[Contender, ...]
    repetitions: int = 7
    quick: int = 2
    warm: int = 3  # rounds that are not counted
    learns: bool = False  # whether weights must move as in real training, for how far replicas come apart
    rest: float = 0.0  # seconds that each step sleeps too, as if some of it ran on an accelerator

    @property
    def title(self) -> str:
        rest = f"; every step sleeps {1000 * self.rest:g} ms too" if self.rest else ""
        return f"{self.place.title}, {self.model.title}, batch {self.batch}{rest}"


@dataclass
class Passed:
    """What came out of a course."""

    course: Course
    contenders: list[Contender]  # those that could be measured
    ranks: list[dict[str, list[float]]] = field(default_factory=list)  # samples of each
    wrong: list[str] = field(default_factory=list)  # contenders whose replicas differ
    failure: str = ""

    def step(self, key: str) -> float | None:
        """The median of the slowest rank of every repetition, of those that are not slowed. Where all train for the
        same time it is that of all their steps: which rank gets more of the processors is chance."""
        if not self.ranks or key not in self.ranks[0]:
            return None
        slowed = any(one.key == key and one.slow > 1 for one in self.contenders)
        timed = any(one.key == key and one.seconds for one in self.contenders)
        counted = self.ranks[:-1] if slowed else self.ranks
        rounds = zip(*(rank[key] for rank in counted), strict=True)
        return median([statistics.harmonic_mean(times) if timed else max(times) for times in rounds])

    def beside(self, key: str) -> float | None:
        """Processor time a step of all threads that do not train, on a rank; of those that are not slowed."""
        name = f"{key}-beside"
        if not self.ranks or name not in self.ranks[0]:
            return None
        slowed = any(one.key == key and one.slow > 1 for one in self.contenders)
        return statistics.fmean(time for rank in (self.ranks[:-1] if slowed else self.ranks) for time in rank[name])

    def sent(self, key: str) -> float | None:
        """Bytes a step on the wire, all hosts together. Ranks of a host see the same interface: one speaks for all."""
        name, apart = f"{key}-bytes", self.course.place.ranks_per_host
        if not self.ranks or name not in self.ranks[0]:
            return None
        rounds = zip(*(rank[name] for rank in self.ranks[::apart]), strict=True)
        return statistics.median(sum(each) for each in rounds)

    def used(self, contender: Contender) -> float | None:
        """How much was sent of what the wire carries meanwhile. A rank that is slowed has longer steps."""
        key, apart = contender.key, self.course.place.ranks_per_host
        if not self.ranks or f"{key}-bytes" not in self.ranks[0]:
            return None
        speakers = self.ranks[::apart]
        rates = [sum(rank[f"{key}-bytes"]) / sum(rank[key]) for rank in speakers]
        return statistics.fmean(rates) / self.course.place.bytes_per_second

    def spread(self, key: str) -> list[float]:
        """How far replicas were apart after each repetition. All ranks have agreed on it."""
        return self.ranks[0].get(f"{key}-spread", []) if self.ranks else []

    def grown(self, contender: Contender) -> float | None:
        """How much larger the spread was in the later half of the repetitions."""
        spread = self.spread(contender.key)
        half = len(spread) // 2
        return ratio(max(spread[half:]), max(spread[:half])) if half else None

    def apart(self, contender: Contender) -> float | None:
        """How far replicas are apart at the end, beside those that do not talk: these are apart without bounds."""
        mine, alone = self.spread(contender.key), self.spread(self.course.yardstick)
        return ratio(mine[-1], alone[-1]) if mine and alone else None

    def faster(self, contender: Contender) -> float | None:
        return ratio(self.step(self.course.yardstick), self.step(contender.key))

    def share(self, contender: Contender) -> float | None:
        silent = any(one.key == self.course.yardstick and one.engine == "plain" for one in self.contenders)
        return None if silent else ratio(self.sent(contender.key), self.sent(self.course.yardstick))

    def limit(self, contender: Contender) -> float | None:
        """Alone with the same optimizer, and then the bytes of its mathematics on the wire."""
        alone, place = self.step(contender.alone or f"plain-{contender.optimizer}"), self.course.place
        if alone is None or contender.bytes is None:
            return None
        return alone + contender.bytes(self.course.model, place.hosts) / place.bytes_per_second

    def of_limit(self, contender: Contender) -> float | None:
        return ratio(self.step(contender.key), self.limit(contender))

    def missed(self, contender: Contender) -> list[str] | None:
        """The goals that were not reached; None when there was something that could not be measured."""
        if self.failure or contender.key in self.wrong:
            return ["failed" if self.failure else "replicas differ"]
        missed, unknown = [], False
        for name, goal, value, sign in (
            ("speed", contender.faster, self.faster(contender), -1),
            ("bytes", contender.share, self.share(contender), 1),
            ("limit", contender.of_limit, self.of_limit(contender), 1),
            ("idle wire", contender.used, self.used(contender), -1),
            ("spread", GROWN if contender.used else None, self.grown(contender), 1),
            ("apart as if not talking", APART if contender.used else None, self.apart(contender), 1),
        ):
            if goal is not None:
                unknown |= value is None
                if value is not None and sign * value > sign * goal:
                    missed.append(name)
        return missed if missed or not unknown else None

    def rows(self) -> list[dict[str, Any]]:
        """All of it, for the JSON."""
        return [
            asdict(contender)
            | {"bytes": contender.bytes and contender.bytes(self.course.model, self.course.place.hosts)}
            | {"course": self.course.key, "step": self.step(contender.key), "sent": self.sent(contender.key)}
            | {"faster than the yardstick": self.faster(contender), "share of its bytes": self.share(contender)}
            | {"limit": self.limit(contender), "of the limit": self.of_limit(contender)}
            | {"used of the wire": self.used(contender), "spread": self.spread(contender.key)}
            | {"apart, beside those that do not talk": self.apart(contender)}
            | {"processor time beside training": self.beside(contender.key)}
            | {"missed": self.missed(contender), "failure": self.failure}
            | {"seconds": [rank[contender.key] for rank in self.ranks]}
            | {"bytes of each step": [rank[f"{contender.key}-bytes"] for rank in self.ranks]}
            for contender in self.contenders
        ]


def ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one and other else None


def in_background(seconds: float = 20.0) -> tuple[Contender, ...]:
    """Steps should be as long as those of ranks that do not talk, and no longer when another rank is slow."""
    contenders = [Contender("plain", "plain", seconds=seconds, is_equal=False)]
    for key, name in (("average", "AsyncModelAverage"), ("gossip", "AsyncGossip"), ("server", "AsyncServer")):
        algorithm = f"{name}()"
        beside = {"bytes": hidden, "of_limit": 1.1, "seconds": seconds, "is_equal": False, "used": USED}
        contenders.append(Contender(key, "ours", "sgd", algorithm, alone="plain", **beside))
        contenders.append(Contender(f"{key}-slow", "ours", "sgd", algorithm, alone=key, slow=SLOW, **beside))
    return tuple(contenders)


def all_courses() -> list[Course]:
    slow4 = Place("wire4", "4 hosts, 100 Mbit/s, 1 ms one way", 4, 1, "100mbit", "1ms")
    slow2x2 = Place("wire2x2", "2 hosts × 2 ranks, 100 Mbit/s", 2, 2, "100mbit", "1ms")
    mlp = Model("mlp", 6, 1000)
    # warm-up is over before the first repetition that counts
    contenders = (
        Contender("plain-sgd", "plain"),
        Contender("plain-adam", "plain", "adam"),
        Contender("ddp", "ddp", bytes=coded(F32)),
        Contender("ddp-bf16", "ddp-bf16", bytes=coded(BFLOAT16)),
        ours("bytegrad", "sgd", "ByteGrad()", coded(MINMAX8), 3.6, 0.27),
        ours("qsgd", "sgd", "QSGD()", coded(QSGD), 3.6, 0.27),
        ours("qadam4", "adam", 'QAdam(warmup_steps=2, codec="int4")', coded(INT4), 6.5, 0.145),
        ours("onebit_adam", "adam", "OneBitAdam(warmup_steps=2)", coded(ONE_BIT), 14, 0.04),
        ours("powersgd", "sgd", "PowerSGD(rank=4)", low_rank(4), 14, 0.03),
        ours("topk", "sgd", "TopK(ratio=0.01)", selected(0.01), 12, 0.045),
    )
    shared = (
        Contender("allreduce", "ours", "sgd", "GradientAllReduce()", coded(F32)),
        # a quarter, and the scales
        Contender("bytegrad", "ours", "sgd", "ByteGrad()", coded(MINMAX8), share=0.27),
    )
    streaming = 'DiLoCo(every=50, fragments=5, overlap=5, codec="minmax8")'
    of_weights = (
        Contender("plain-sgd", "plain"),
        Contender("plain-50", "plain", steps=50),
        Contender("ddp", "ddp", bytes=coded(F32)),
        Contender("decentralized", "ours", "sgd", 'Decentralized("exponential")', told(1), faster=1.4, is_equal=False),
        Contender("ring8", "ours", "sgd", "LowPrecisionDecentralized()", told(2, MINMAX8), faster=2.8, is_equal=False),
        Contender(
            "local_sgd", "ours", "sgd", "LocalSGD(every=50)", averaged(50), share=1 / 45, steps=50, alone="plain-50"
        ),
        Contender("diloco", "ours", "sgd", streaming, hidden, of_limit=1.1, steps=50, alone="plain-50", is_equal=False),
    )
    # without a rest four ranks, their exchanges and the emulated wire share the processors, and make each other wait
    in_rests = tuple(one for one in of_weights if one.key in ("plain-50", "diloco"))
    return [
        Course("background-wire4", slow4, mlp, 16, "plain", in_background(), repetitions=2, warm=1, learns=True),
        Course("weights-wire4", slow4, mlp, 16, "ddp", of_weights),
        Course("streaming-wire4", slow4, mlp, 16, "plain-50", in_rests, rest=0.1),
        Course("algorithms-wire4", slow4, mlp, 16, "ddp", contenders),
        Course("algorithms-wire2x2", slow2x2, mlp, 16, "allreduce", shared, repetitions=5),
    ]
