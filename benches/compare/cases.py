"""What is measured, and what it should reach: pure data, and the arithmetic of goals.

A limit is the time below which no all-reduce can come. On a wire it follows from rate and delay; on one host it is
measured in the same run as a plain copy of the same bytes by every rank at once: in place in shared memory, each rank
has to read as many bytes as the tensor has, and to write as many.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

KB, MB = 1 << 10, 1 << 20
NAMES = {"ours": "Offbeat", "gloo": "gloo", "mpi": "OpenMPI", "copy": "copy"}
# a copy that stays in the caches of one core says nothing about two cores
SMALLEST_COPY_LIMIT = MB


@dataclass(frozen=True)
class Place:
    """Where ranks run: on this host, or on emulated ones when there is a rate."""

    key: str
    title: str
    hosts: int
    ranks_per_host: int
    rate: str = ""  # in netlab's grammar
    delay: str = "0ms"

    @property
    def world(self) -> int:
        return self.hosts * self.ranks_per_host

    @property
    def emulated(self) -> bool:
        return bool(self.rate)

    @property
    def bytes_per_second(self) -> float:
        number, unit = self.rate[:-4], self.rate[-4]
        return float(number) * {"m": 1e6, "g": 1e9}[unit] / 8

    @property
    def one_way(self) -> float:
        return float(self.delay.removesuffix("ms")) / 1e3


@dataclass(frozen=True)
class Case:
    """One row of the table. Ratios to peers are at least the goal, ratios to the limit at most."""

    place: Place
    size: int
    memory: str = "shared"  # or "plain": ordinary tensors for ours, too
    inner: int = 1  # calls in one repetition
    over_gloo: float | None = None
    over_mpi: float | None = None
    of_limit: float | None = None
    floor: float | None = None  # below this share of the limit it was not the wire
    limit: float | None = None  # seconds; None: measured

    @property
    def key(self) -> str:
        return f"{self.place.key}-{self.memory}-{size_text(self.size).replace(' ', '')}"

    @property
    def title(self) -> str:
        if self.place.emulated:
            return self.place.title
        return f"{self.place.title}, {'`shared_empty`' if self.memory == 'shared' else 'plain tensors'}"


@dataclass
class Result:
    """Seconds of one all-reduce for each engine: of every repetition, the slowest rank."""

    case: Case
    seconds: dict[str, list[float]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)  # engines whose sums were not right
    failure: str = ""

    def median(self, engine: str) -> float | None:
        values = sorted(self.seconds.get(engine, []))
        if not values:
            return None
        middle = len(values) // 2
        return values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) / 2

    def limit(self) -> float | None:
        if self.case.limit is not None:
            return self.case.limit
        return self.median("copy") if self.case.size >= SMALLEST_COPY_LIMIT else None

    def faster_than(self, peer: str) -> float | None:
        ours, theirs = self.median("ours"), self.median(peer)
        return theirs / ours if ours and theirs else None

    def times_limit(self, engine: str = "ours") -> float | None:
        value, limit = self.median(engine), self.limit()
        return value / limit if value and limit else None

    def missed(self) -> list[str] | None:
        """The goals that were not reached; None when ours or a needed peer was not measured."""
        case, missed, unknown = self.case, [], False
        if self.failure or "ours" in self.wrong:
            return ["failed" if self.failure else "wrong sums"]
        for peer, goal in (("gloo", case.over_gloo), ("mpi", case.over_mpi)):
            if goal is not None:
                ratio = self.faster_than(peer)
                unknown |= ratio is None
                if ratio is not None and ratio < goal:
                    missed.append(NAMES[peer])
        if case.of_limit is not None:
            ratio = self.times_limit()
            unknown |= ratio is None
            if ratio is not None and ratio > case.of_limit:
                missed.append("limit")
            if ratio is not None and case.floor is not None and ratio < case.floor:
                missed.append("faster than the wire")
        return missed if missed or not unknown else None


def size_text(size: int) -> str:
    return f"{size // MB} MB" if size >= MB else f"{size // KB} kB"


def wire_limit(place: Place, size: int) -> float:
    """Every host sends and receives 2(n−1)/n of the bytes, whatever the number of ranks on it."""
    return 2 * (place.hosts - 1) / place.hosts * size / place.bytes_per_second


def delay_limit(place: Place) -> float:
    return math.ceil(math.log2(place.hosts)) * place.one_way


def all_cases() -> list[Case]:
    two = Place("host2", "2 ranks, one host", 1, 2)
    four = Place("host4", "4 ranks, one host", 1, 4)
    # calls in a repetition: enough to make the start of a repetition, which is not the same on all ranks, negligible
    inner = {KB: 300, 64 * KB: 100, MB: 20, 16 * MB: 3, 64 * MB: 1}
    sizes = (KB, 64 * KB, MB, 16 * MB, 64 * MB)
    cases = [
        Case(two, size, inner=inner[size], over_gloo=gloo, over_mpi=mpi)
        for size, gloo, mpi in zip(sizes, (20, 20, 10, 5, 5), (0.5, 1.5, 1.5, 1.0, 1.5), strict=True)
    ]
    cases += [
        Case(two, size, "plain", inner=inner[size], over_gloo=gloo)
        for size, gloo in zip(sizes[2:], (4, 3, 3), strict=True)
    ]
    cases += [
        Case(four, size, inner=inner[size], over_gloo=gloo, over_mpi=mpi)
        for size, gloo, mpi in zip(sizes[1:], (5, 5, 3, 3), (None, 1.3, 1.3, 1.3), strict=True)
    ]
    slow4 = Place("wire4", "4 hosts, 500 Mbit/s", 4, 1, "500mbit")
    slow2x2 = Place("wire2x2", "2 hosts × 2 ranks, 500 Mbit/s", 2, 2, "500mbit")
    far2 = Place("far2", "2 hosts, 1 Gbit/s, 5 ms one way", 2, 1, "1gbit", "5ms")
    far4 = Place("far4", "4 hosts, 1 Gbit/s, 5 ms one way", 4, 1, "1gbit", "5ms")
    large = 16 * MB
    far_large = large / far2.bytes_per_second + 2 * far2.one_way
    cases += [
        Case(slow4, large, inner=2, of_limit=1.08, floor=0.97, limit=wire_limit(slow4, large)),
        Case(slow2x2, large, inner=2, of_limit=1.15, limit=wire_limit(slow2x2, large)),
        Case(far2, KB, inner=20, of_limit=1.4, limit=delay_limit(far2)),
        Case(far4, KB, inner=20, of_limit=1.4, limit=delay_limit(far4)),
        Case(far2, large, inner=3, of_limit=1.2, limit=far_large),
    ]
    return cases
