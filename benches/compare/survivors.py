"""How long survivors wait when a rank is killed in the middle of training: one job for each algorithm.

All ranks train for some seconds; the last one kills itself on the way, with SIGKILL. What counts is the longest time
between the ends of two steps from then on, on any survivor, beyond what a step took before.
"""

from __future__ import annotations

import itertools
import statistics
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from . import launch
from .cases import Place
from .training import Model

if TYPE_CHECKING:
    from collections.abc import Callable

GOAL = 1.0  # seconds
TIMEOUT = 120.0
SECONDS, KILLED = 10.0, 5.0  # of training, and when it happens
PLACE = Place("wire4", "4 hosts, 100 Mbit/s, 1 ms one way", 4, 1, "100mbit", "1ms")
MODEL = Model("mlp", 6, 300)
ALGORITHMS = (
    "AsyncModelAverage()",
    "AsyncGossip()",
    "AsyncServer()",
    'Decentralized("exponential")',
    "LowPrecisionDecentralized()",
)


@dataclass
class Survived:
    """What came of one job."""

    algorithm: str
    before: float | None = None  # a step before it happened
    longest: float | None = None  # from one step's end to the next, after it
    steps: int = 0  # that the survivor with the fewest has made since
    failure: str = ""

    def missed(self) -> list[str] | None:
        if self.failure:
            return ["failed"]
        if self.longest is None or self.before is None:
            return None
        return ["time"] if self.longest - self.before > GOAL else []

    def row(self) -> dict[str, Any]:
        return asdict(self) | {"missed": self.missed()}


def judge(algorithm: str, ranks: list[dict[str, Any]]) -> Survived:
    """All clocks are that of one machine. The killed rank has left the time of its death."""
    died = next(said["died"] for said in ranks if said["died"] is not None)
    before, longest, steps = [], [], []
    for said in ranks:
        if said["died"] is not None:
            continue
        ends = said["ends"]
        gaps = [(end, end - begin) for begin, end in itertools.pairwise(ends)]
        before.append(statistics.median([gap for end, gap in gaps if end <= died]))
        after = [gap for end, gap in gaps if end > died]
        if not after:
            return Survived(algorithm, failure="a survivor made no step any more")
        longest.append(max(after))
        steps.append(len(after))
    return Survived(algorithm, max(before), max(longest), min(steps))


def measure(algorithm: str) -> Survived:
    job = {"algorithm": algorithm, "model": asdict(MODEL), "seconds": SECONDS, "killed": KILLED}
    # that a process ended badly is what was asked for
    ranks, failure = launch.run_ranks(PLACE, "benches.compare.survivor_rank", job, TIMEOUT)
    return judge(algorithm, ranks) if ranks else Survived(algorithm, failure=failure)


def measure_all(skipped: list[str], say: Callable[[str], None]) -> list[Survived]:
    say(f"survivors of a killed rank, {len(ALGORITHMS)} × {SECONDS:.0f} s")
    if why := launch.no_netlab():
        skipped.append(f"survivors: {why}")
        return []
    return [measure(algorithm) for algorithm in ALGORITHMS]
