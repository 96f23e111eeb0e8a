"""What is trained, how, and how near to DDP it should end. Pure data, and the arithmetic of verdicts.

A run is one training: a task, a method and a seed, which fixes the first weights and the batches. All methods take the
same number of steps on the same batches, or train for the same time where one rank is slow. Learning rates are DDP's,
tuned for DDP; where a method follows another rule, its line says so.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field, replace
from typing import Any

from ..compare.cases import Place

SEEDS, QUICK_SEEDS = 5, 1
QUICK_STEPS = 0.4  # of the steps
FEW_SEEDS = 2  # of tasks that only show something
RAMP = 20  # steps until the learning rate is reached; then it goes down to 0 in a line
MOMENTUM = 0.9
WITHIN = 0.02
APART = 0.05  # where replicas differ
DEVIATIONS = 2
HOSTS = Place("apart4", "4 ranks, each a host by name, over loopback", 4, 1)


@dataclass(frozen=True)
class Task:
    key: str
    kind: str  # in tasks.KINDS
    title: str
    steps: int
    batch: int  # of a rank
    rates: dict[str, float]  # the learning rate, by optimizer
    marks: int = 10  # how often the held-out loss is taken
    unequal: bool = False  # whether ranks have different kinds and numbers of samples
    slow: int = 1  # times that the last rank takes for a step
    seconds: float = 0.0  # for which all train, however many steps that is; 0: so many steps, however long
    is_judged: bool = True  # whether goals hold for it; the others show something

    @property
    def about(self) -> str:
        """How long is trained, for people."""
        how = f"{self.seconds:g} s" if self.seconds else f"{self.steps} steps"
        return f"{self.title}, {how} of 4 × {self.batch} samples"

    def shorter(self, share: float) -> Task:
        return replace(self, steps=round(self.steps * share), seconds=self.seconds * share)

    def mark_steps(self) -> list[int]:
        """After so many steps the held-out loss is taken; the last one is the last."""
        return [round(self.steps * mark / self.marks) for mark in range(1, self.marks + 1)]

    def factor(self, step: int, share: float) -> float:
        """Of the learning rate, in a step counted from 0, when this share of the training is behind it."""
        return min(1.0, (step + 1) / RAMP) * max(0.0, 1 - share)


@dataclass(frozen=True)
class Method:
    """One line of the table."""

    key: str
    optimizer: str  # "sgd" or "adam"; DDP with the same one is the yardstick
    algorithm: str = ""  # its constructor, where {fifth} is a fifth of the steps; empty: torch's DDP
    momentum: float = MOMENTUM  # of SGD; the learning rate changes with it so that a gradient moves weights as far
    rate: float = 1.0  # times the learning rate of DDP
    share: float | None = None  # bytes sent at most, of GradientAllReduce's: a codec that idles sends them all
    is_equal: bool = True  # whether replicas hold the same bits
    within: float = WITHIN  # how far from DDP's the loss may be

    @property
    def title(self) -> str:
        return self.algorithm.replace("{fifth}", "steps/5") or "DDP"

    @property
    def yardstick(self) -> str:
        return f"ddp-{self.optimizer}"

    @property
    def rule(self) -> str:
        """How the learning rate differs from DDP's, for people."""
        rules = [f"rate × {self.rate:g}"] if self.rate != 1 else []
        if self.momentum != MOMENTUM:
            rules.append(f"momentum {self.momentum:g}, rate × {self.momentum_factor:g} for it")
        return ", ".join(rules) or "as DDP"

    @property
    def momentum_factor(self) -> float:
        return round((1 - self.momentum) / (1 - MOMENTUM), 6)

    def learning_rate(self, task: Task) -> float:
        return task.rates[self.optimizer] * self.rate * (self.momentum_factor if self.optimizer == "sgd" else 1.0)

    def constructor(self, task: Task) -> str:
        return self.algorithm.replace("{fifth}", str(task.steps // 5))


DIGITS = Task("digits", "digits", "digits, CNN of 38 k parameters", 300, 16, {"sgd": 0.1, "adam": 3e-3})
CHARACTERS = Task(
    "characters",
    "characters",
    "characters of Python's library, transformer of 117 k",
    300,
    8,
    {"sgd": 0.2, "adam": 4e-3},
)


def unequal(task: Task) -> Task:
    title = f"{task.title}, unequal shards"
    return replace(task, key=f"{task.key}-unequal", title=title, unequal=True, is_judged=False)


def slowed(task: Task, seconds: float) -> Task:
    title = f"{task.title}, one rank 5× slower"
    return replace(task, key=f"{task.key}-slow", title=title, slow=5, seconds=seconds, is_judged=False)


TASKS = [DIGITS, CHARACTERS, unequal(DIGITS), unequal(CHARACTERS), slowed(DIGITS, 4.0), slowed(CHARACTERS, 8.0)]

# Shares are those of the codec, with room for what every message carries besides. Warm-up sends all of a fifth.
METHODS = [
    Method("ddp-sgd", "sgd"),
    Method("ddp-adam", "adam"),
    Method("allreduce", "sgd", "GradientAllReduce()"),
    Method("bytegrad", "sgd", "ByteGrad()", share=0.30),
    Method("qsgd", "sgd", "QSGD()", share=0.30),
    # what a residual holds back comes late, as momentum does: less of the one makes room for the other
    Method("topk", "sgd", "TopK(ratio=0.01, warmup_steps={fifth})", momentum=0.5, share=0.35),
    Method("powersgd", "sgd", "PowerSGD(rank=4, warmup_steps={fifth})", share=0.45),
    Method("qadam8", "adam", 'QAdam(warmup_steps={fifth}, codec="minmax8")', share=0.50),
    Method("qadam4", "adam", 'QAdam(warmup_steps={fifth}, codec="int4")', share=0.40),
    Method("onebit_adam", "adam", "OneBitAdam(warmup_steps={fifth})", share=0.35),
    # where the number of steps is no multiple, replicas end apart
    Method("local_sgd", "sgd", "LocalSGD(every=10, warmup_steps={fifth})", share=0.35, within=APART, is_equal=False),
    # in so few exchanges outer momentum cannot settle: outer_lr / (1 - outer_momentum) of 1 keeps the learning rate
    Method(
        "diloco",
        "adam",
        "DiLoCo(every=10, outer_momentum=0.3, warmup_steps={fifth})",
        share=0.35,
        within=APART,
        is_equal=False,
    ),
    Method(
        "streaming",
        "adam",
        'DiLoCo(every=10, outer_momentum=0.3, codec="minmax8", fragments=5, overlap=1, warmup_steps={fifth})',
        share=0.30,
        within=APART,
        is_equal=False,
    ),
    Method("decentralized", "sgd", 'Decentralized("exponential")', share=0.75, within=APART, is_equal=False),
    Method("ring8", "sgd", "LowPrecisionDecentralized()", share=0.40, within=APART, is_equal=False),
    Method("average", "sgd", "AsyncModelAverage(period=0)", within=APART, is_equal=False),
    Method("average8", "sgd", 'AsyncModelAverage(period=0, codec="minmax8")', within=APART, is_equal=False),
    Method("gossip", "sgd", "AsyncGossip(period=0)", within=APART, is_equal=False),
    Method("gossip8", "sgd", 'AsyncGossip(period=0, codec="modular")', within=APART, is_equal=False),
    Method("server", "sgd", "AsyncServer(period=0)", within=APART, is_equal=False),
    Method("server8", "sgd", 'AsyncServer(period=0, codec="minmax8")', within=APART, is_equal=False),
]
# What says something where one rank is slow: who waits for it, and who does not.
AT_OWN_PACE = ("ddp-sgd", "allreduce", "local_sgd", "decentralized", "average", "gossip", "server")


def methods_for(task: Task, methods: list[Method]) -> list[Method]:
    return [method for method in methods if task.slow == 1 or method.key in AT_OWN_PACE]


def seeds_for(task: Task, seeds: int) -> int:
    return seeds if task.is_judged else min(seeds, FEW_SEEDS)


@dataclass
class Run:
    """What one training left behind. Losses and seconds are those at the task's marks."""

    task: str
    method: str
    seed: int
    losses: list[float]
    seconds: list[float]  # of training alone, on the slowest rank
    sent: int | None  # bytes by the slowest rank; None where nobody counts
    coded: int | None  # bytes that a codec made, on the rank that made fewest; None without a codec
    is_equal: bool  # whether all ranks ended with the same bits
    steps: list[int] = field(default_factory=list)  # that each rank has made


def combine(ranks: list[list[dict[str, Any]]]) -> list[Run]:
    """One run out of what each rank said of it. Every rank took the loss on a share of the held-out data."""
    runs = []
    for said in zip(*ranks, strict=True):
        first = said[0]
        losses = [statistics.fmean(each) for each in zip(*(one["losses"] for one in said), strict=True)]
        seconds = [max(each) for each in zip(*(one["seconds"] for one in said), strict=True)]
        sent = None if first["sent"] is None else max(one["sent"] for one in said)
        coded = None if first["coded"] is None else min(one["coded"] for one in said)
        is_equal = len({one["digest"] for one in said}) == 1
        steps = [one["steps"] for one in said]
        runs.append(Run(first["task"], first["method"], first["seed"], losses, seconds, sent, coded, is_equal, steps))
    return runs


@dataclass
class Result:
    """All seeds of a method on a task, held against DDP's."""

    task: Task
    method: Method
    runs: list[Run] = field(default_factory=list)
    ddp: list[Run] = field(default_factory=list)  # those of DDP with the same optimizer
    plain: list[Run] = field(default_factory=list)  # those of GradientAllReduce
    within: float = WITHIN

    @property
    def last(self) -> list[float]:
        return [run.losses[-1] for run in self.runs]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.last)

    @property
    def deviation(self) -> float:
        return deviation(self.last)

    @property
    def difference(self) -> float | None:
        """Of the loss, relative to DDP's; above 0 is worse."""
        return self.mean / mean_loss(self.ddp) - 1 if self.ddp else None

    @property
    def limit(self) -> float:
        spread = deviation([run.losses[-1] for run in self.ddp]) / mean_loss(self.ddp) if self.ddp else 0.0
        return max(self.within, self.method.within, DEVIATIONS * spread)

    @property
    def share(self) -> float | None:
        """Bytes sent, of those of GradientAllReduce."""
        pairs = [(mine.sent, other.sent) for mine, other in zip(self.runs, self.plain, strict=False)]
        ratios = [mine / other for mine, other in pairs if mine is not None and other]
        return statistics.fmean(ratios) if ratios else None

    @property
    def seconds(self) -> float:
        return statistics.fmean(run.seconds[-1] for run in self.runs)

    def missed(self) -> list[str] | None:
        """The goals that were not reached; None when there was something that could not be measured."""
        if self.method.key == self.method.yardstick or not self.task.is_judged:
            return []
        missed = []
        if self.method.is_equal and not all(run.is_equal for run in self.runs):
            missed.append("replicas differ")
        if self.method.share is not None and any(run.coded == 0 for run in self.runs):
            missed.append("the codec carried nothing")
        if self.method.share is not None and self.share is not None and self.share > self.method.share:
            missed.append(f"more than {self.method.share:g} of the bytes")
        # a loss that is not a number is not within anything
        if self.difference is not None and not self.difference <= self.limit:
            missed.append("loss")
        unknown = self.difference is None or (self.method.share is not None and self.share is None)
        return missed if missed or not unknown else None


def mean_loss(runs: list[Run]) -> float:
    return statistics.fmean(run.losses[-1] for run in runs)


def deviation(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else 0.0


def judge(tasks: list[Task], methods: list[Method], runs: list[Run], within: float = WITHIN) -> list[Result]:
    """A result for each task and method that has runs."""
    results = []
    for task in tasks:
        for method in methods:
            ran, ddp, plain = (
                [run for run in runs if (run.task, run.method) == (task.key, key)]
                for key in (method.key, method.yardstick, "allreduce")
            )
            if ran:
                results.append(Result(task, method, ran, ddp, plain, within))
    return results
