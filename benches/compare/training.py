"""The training rows: what is trained, what follows from the samples, what it should reach. Pure data and arithmetic.

Samples are seconds (bytes for memory) of every rank, by the name of what was measured: `plain` is torch alone, `again`
the same once more, `ours` a wrapped optimizer, `ddp` torch's DistributedDataParallel over gloo. A name with a tail is a
part of it, for example `ours-alone`; train_rank.py has them all.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from .cases import KB, MB, Place, wire_limit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True)
class Model:
    """A network by its measures. All are f32."""

    kind: str  # "mlp", "paused" (its backward sleeps), "cnn", "tiny" (many parameters), "uneven" (small and large ones)
    layers: int = 0
    width: int = 0

    @property
    def parameters(self) -> int:
        square = self.width * self.width
        return {
            "mlp": self.layers * (square + self.width),
            "paused": self.layers * (square + self.width),
            "cnn": 151_306,
            "tiny": self.layers * self.width,
            "uneven": self.layers * KB // 4 + square,
        }[self.kind]

    @property
    def gradient_bytes(self) -> int:
        return 4 * self.parameters

    @property
    def title(self) -> str:
        size = self.parameters / 1e6
        return {
            "mlp": f"MLP, {self.layers} × {self.width}², {size:.1f} M",
            "paused": f"MLP, {self.layers} × {self.width}², {size:.1f} M, whose backward sleeps",
            "cnn": f"CNN, {size:.2f} M",
            "tiny": f"{self.layers} parameters of {4 * self.width} bytes",
            "uneven": f"{self.layers} parameters of 1 kB, one of {4 * self.width**2 // MB} MB",
        }[self.kind]


@dataclass(frozen=True)
class Trial:
    """One row. `kind` says what is measured and what the value is; it should be at least or at most the goal."""

    key: str
    title: str
    kind: str
    place: Place
    model: Model
    batch: int
    goal: float
    at_least: bool = False
    repetitions: int = 21
    quick: int = 7
    inner: int = 1  # steps in a repetition
    bucket_bytes: int | None = None  # of both engines; None: each one's own default


@dataclass
class Outcome:
    trial: Trial
    ranks: list[dict[str, list[float]]] = field(default_factory=list)  # samples of each
    wrong: list[str] = field(default_factory=list)  # engines that trained something else than the other
    failure: str = ""
    rate: str = ""  # of the wire, where it was chosen by a measurement

    def slowest(self, name: str) -> list[float]:
        """Of every repetition the slowest rank."""
        if not self.ranks or name not in self.ranks[0]:
            return []
        return [max(times) for times in zip(*(rank[name] for rank in self.ranks), strict=True)]

    def median(self, name: str) -> float | None:
        return median(self.slowest(name))

    def reference(self) -> float | None:
        return KINDS[self.trial.kind].reference(self) if self.ranks else None

    def value(self, engine: str = "ours") -> float | None:
        """What the goal is about; for DDP its own, for comparison."""
        return KINDS[self.trial.kind].value(self, engine) if self.ranks else None

    def missed(self) -> list[str] | None:
        """The goals that were not reached; None when there was something that could not be measured."""
        if self.failure or self.wrong:
            return ["failed" if self.failure else "other weights than DDP's"]
        value, trial = self.value(), self.trial
        if value is None:
            return None
        met = value >= trial.goal if trial.at_least else value <= trial.goal
        return [] if met else ["missed"]

    def row(self) -> dict[str, Any]:
        """All of it, for the JSON."""
        names = self.ranks[0] if self.ranks else ()
        return asdict(self) | {
            "medians": {name: self.median(name) for name in names},
            "reference": self.reference(),
            "value": self.value(),
            "value of DDP": self.value("ddp"),
            "missed": self.missed(),
        }


@dataclass(frozen=True)
class Kind:
    """How a value follows from samples; `about` explains it under the table."""

    about: str
    unit: str  # of the value: "×", "" or "µs"
    value: Callable[[Outcome, str], float | None]
    reference: Callable[[Outcome], float | None]
    reference_is: str


def median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def over_plain(outcome: Outcome, engine: str) -> float | None:
    """The median of ratios of neighbouring steps: what disturbs the machine for longer than a step cancels."""
    ratios = []
    for rank in outcome.ranks:
        if engine in rank:
            ratios += [mine / plain for mine, plain in zip(rank[engine], rank["plain"], strict=True)]
    return median(ratios)


def faster_than_ddp(outcome: Outcome, engine: str) -> float | None:
    ours, ddp = outcome.median("ours"), outcome.median("ddp")
    return ddp / ours if ours and ddp and engine == "ours" else None


def best_step(outcome: Outcome) -> float | None:
    """A step can be no shorter than its computation, nor than its bytes need on the wire."""
    trial, plain = outcome.trial, outcome.median("plain")
    return max(plain, wire_limit(trial.place, trial.model.gradient_bytes)) if plain else None


def of_best_step(outcome: Outcome, engine: str) -> float | None:
    mine, best = outcome.median(engine), best_step(outcome)
    return mine / best if mine and best else None


def communication(outcome: Outcome, engine: str) -> list[float]:
    """A step with one sample computes next to nothing, and what it computes is measured without communication."""
    wire, computed = outcome.slowest(f"{engine}-wire"), outcome.slowest(f"{engine}-wire-alone")
    return [both - only for both, only in zip(wire, computed, strict=True)]


def hidden(outcome: Outcome, engine: str) -> float | None:
    alone, wire, step = outcome.slowest(f"{engine}-alone"), communication(outcome, engine), outcome.slowest(engine)
    rounds = zip(alone, wire, step, strict=True)
    return median([(computed + sent - both) / min(computed, sent) for computed, sent, both in rounds])


def of_ddp(outcome: Outcome, engine: str) -> float | None:
    ours, ddp = outcome.median("ours"), outcome.median("ddp")
    return ours / ddp if ours and ddp and engine == "ours" else None


def by_parameter(outcome: Outcome, engine: str) -> float | None:
    """On the worse rank, the median of what a parameter adds to forward and backward beyond the copy."""
    if not outcome.slowest(engine):
        return None
    costs = []
    for rank in outcome.ranks:
        more, less = (rank[engine], rank[f"{engine}-forward"]), (rank["plain"], rank["plain-forward"], rank["copy"])
        rounds = zip(zip(*more, strict=True), zip(*less, strict=True), strict=True)
        costs.append(statistics.median(sum(with_it) - sum(without) for with_it, without in rounds))
    return max(costs) / outcome.trial.model.layers


def median_of(name: str) -> Callable[[Outcome], float | None]:
    return lambda outcome: outcome.median(name)


KINDS = {
    "one": Kind(
        "a wrapped model's step ÷ plain torch's: single steps by turns in one process, the median of the ratios. "
        "*Once more* is plain torch ÷ plain torch, which shows the noise",
        "×",
        over_plain,
        median_of("plain"),
        "plain torch",
    ),
    "steps": Kind(
        "DDP's step ÷ ours, steps of both by turns", "×", faster_than_ddp, median_of("plain"), "compute alone"
    ),
    "wire": Kind(
        "step ÷ the longer of compute alone and 2(n−1)/n · bytes ÷ rate",
        "×",
        of_best_step,
        best_step,
        "limit",
    ),
    "overlap": Kind(
        "(alone + communication − step) ÷ the shorter of the two: alone is a step under `no_sync()`, communication a "
        "step on a single sample, less the same under `no_sync()`. The rate is chosen so that communication takes as "
        "long as backward alone, which is measured first",
        "",
        hidden,
        lambda outcome: median(communication(outcome, "ours")),
        "communication",
    ),
    "memory": Kind(
        "the highest Pss of a rank in 10 steps, ours ÷ DDP's, each in processes of its own",
        "×",
        of_ddp,
        median_of("ours-before"),
        "before wrapping",
    ),
    "hooks": Kind(
        "for each parameter, forward and backward with the wrapper − the same without − copying the same gradients",
        "µs",
        by_parameter,
        median_of("plain"),
        "plain backward",
    ),
}


def of_rate(bytes_per_second: float) -> str:
    """In netlab's grammar."""
    return f"{8 * bytes_per_second / 1e6:.1f}mbit"


def all_trials() -> list[Trial]:
    here = Place("here", "1 rank", 1, 1)
    two = Place("host2", "2 ranks, one host", 1, 2)
    slow4 = Place("wire4", "4 hosts, 100 Mbit/s, 1 ms one way", 4, 1, "100mbit", "1ms")
    apart = Place("wire2", "2 hosts, 1 ms one way", 2, 1, "1gbit", "1ms")  # the rate comes from a measurement
    mlp, large, uneven = Model("mlp", 6, 1000), Model("mlp", 6, 2040), Model("uneven", 200, 5120)
    cnn, tiny, slim, deep = Model("cnn"), Model("tiny", 1000, 16), Model("mlp", 6, 576), Model("mlp", 12, 504)
    asleep, narrow = Model("paused", 12, 504), Model("mlp", 24, 90)
    few, some, many = {"repetitions": 5, "quick": 1}, {"repetitions": 11, "quick": 3}, {"repetitions": 300, "quick": 80}

    def by_layer(model: Model) -> dict[str, Any]:
        """A bucket for each layer: the last one, which nothing hides, is small, and none waits for the next
        layer's bias."""
        return {"at_least": True, "bucket_bytes": model.gradient_bytes // model.layers, **some}

    return [
        Trial("training-one-mlp", "world of one", "one", here, mlp, 16, 1.02, **many),
        Trial("training-one-cnn", "world of one", "one", here, cnn, 32, 1.02, **many),
        Trial("training-host2", "step", "steps", two, mlp, 16, 1.5, at_least=True, inner=5),
        Trial("training-uneven", "step, sizes far apart", "steps", two, uneven, 4, 1.0, at_least=True),
        Trial("training-hooks", "hooks", "hooks", two, tiny, 1, 2e-6, **many),
        Trial("training-wire4", "step on a slow wire", "wire", slow4, slim, 16, 1.08, **some),
        Trial("training-wire4-mlp", "step on a slow wire", "wire", slow4, mlp, 16, 1.08, **few),
        # few bytes in a long backward: the emulated wire, on the same processors, takes next to nothing of them
        Trial("training-overlap", "overlap", "overlap", apart, narrow, 32768, 0.8, **by_layer(narrow)),
        # as long a backward with 16 times the bytes
        Trial("training-overlap-fast", "overlap", "overlap", apart, deep, 2048, 0.8, **by_layer(deep)),
        # the same with the processor free for communication, as where an accelerator computes
        Trial("training-overlap-asleep", "overlap", "overlap", apart, asleep, 16, 0.8, **by_layer(asleep)),
        Trial("training-memory-6m", "memory", "memory", two, mlp, 16, 1.0, **few),
        Trial("training-memory-25m", "memory", "memory", two, large, 16, 1.0, **few),
    ]
