"""What a merged trace says in one line: who was late, which link was slow, how much communication was hidden. Pure."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .clocks import Key, Setting, keyed
from .timeline import COMPUTE, Recording

# A link that carried less says nothing about its rate.
LEAST_BYTES = 1_000_000


@dataclass(frozen=True)
class Last:
    """The rank that others waited for most often.

    Whoever is ready for a reduction last is late by the time since half of the others had begun it: had their own
    communication kept them busy until then, nobody would have waited. Summed over the reductions of a step, the rank
    with the largest sum is the last one of that step. In `share` of the steps that was this rank, and `seconds` is the
    median of its sums in those.
    """

    rank: int
    host: str
    share: float
    seconds: float


@dataclass(frozen=True)
class Rate:
    """How quick one direction of a link was while it was busy.

    Writing ends when the kernel has the bytes, which is too early, and reading begins when the first ones come, which
    is too late; both make a link look quicker than it is, so the slower of the two counts.
    """

    sender: int
    receiver: int
    bits_per_second: float
    bytes: int


@dataclass(frozen=True)
class Summary:
    """All of it. Times are in seconds."""

    ranks: int
    world_size: int
    steps: int
    last: Last | None
    links: list[Rate]  # the slowest first
    hidden: float | None  # the part of the communication that no backward pass waited for
    uncertainty: float | None  # of the clocks; None if nobody knows
    dropped: int

    @property
    def line(self) -> str:
        """What to print."""
        ranks = f"{self.ranks} ranks" if self.ranks == self.world_size else f"{self.ranks} of {self.world_size} ranks"
        said = [self._last(), self._link(), self._hidden()]
        if self.uncertainty is None:
            said.append("the clocks were set by the wall clocks, so times between hosts may be off")
        elif self.uncertainty:
            said.append(f"the clocks agree within ±{_time(self.uncertainty)}")
        return f"{self.steps} steps, {ranks}: " + "; ".join(said)

    def _last(self) -> str:
        last = self.last
        if last is None:
            return "no reduction was traced on several ranks"
        if self.uncertainty is not None and last.seconds <= self.uncertainty:
            return "no rank was late by more than the clocks can tell"
        name = f"rank {last.rank} (host {last.host})"
        return f"{name} was last to be ready in {_percent(last.share)} of steps, by {_time(last.seconds)}"

    def _link(self) -> str:
        if not self.links:
            return "no link carried 1 MB"
        slowest = self.links[0]
        return f"slowest link {slowest.sender} -> {slowest.receiver}: {_rate(slowest.bits_per_second)}"

    def _hidden(self) -> str:
        if self.hidden is None:
            return "no step communicated"
        return f"{_percent(self.hidden)} of the communication was hidden behind compute"


def summarize(recordings: Sequence[Recording], settings: Iterable[Setting]) -> Summary:
    """The summary of recordings whose times have been set to one clock already."""
    known = [setting.uncertainty for setting in settings]
    return Summary(
        ranks=len(recordings),
        world_size=recordings[0].world_size,
        steps=steps(recordings),
        last=last(recordings),
        links=rates(recordings),
        hidden=hidden(recordings),
        uncertainty=None if None in known else max(each for each in known if each is not None) / 1e9,
        dropped=sum(recording.dropped for recording in recordings),
    )


def steps(recordings: Iterable[Recording]) -> int:
    """How many steps the model with the most of them took."""
    seen: dict[int, set[int]] = defaultdict(set)
    for recording in recordings:
        for span in recording.spans:
            if span.kind == "reduce" or span.kind in COMPUTE:
                seen[span.model].add(span.step)
    return max(map(len, seen.values()), default=0)


def last(recordings: Iterable[Recording]) -> Last | None:
    """Who was last most often, or None if no reduction was seen by two ranks."""
    hosts = {recording.rank: recording.host for recording in recordings}
    moments: dict[Key, dict[int, Moments]] = defaultdict(dict)
    for recording in recordings:
        queued = keyed(recording.spans, "queued")
        for key, span in keyed(recording.spans).items():
            # without a time in the queue, it began as soon as it was ready
            ready = min(span.begin, queued[key].begin) if key in queued else span.begin
            moments[key][recording.rank] = Moments(ready, span.begin)
    late: dict[tuple[int, int], dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for (model, step, _, _), those in moments.items():
        if len(those) > 1:
            rank, by = lateness(those)
            late[model, step][rank] += by
    worst = [max(sums.items(), key=lambda item: item[1]) for sums in late.values()]
    if not worst:
        return None
    # a step in which nobody had to wait has no last one
    counted = Counter(rank for rank, by in worst if by > 0) or Counter(rank for rank, _ in worst)
    rank, times = counted.most_common(1)[0]
    typical = statistics.median(by for who, by in worst if who == rank)
    return Last(rank, hosts[rank], times / len(worst), typical / 1e9)


class Moments(NamedTuple):
    """When a rank was ready for a reduction, and when it began it."""

    ready: int
    began: int


def lateness(moments: Mapping[int, Moments]) -> tuple[int, float]:
    """The last rank to be ready for a reduction, and how long half of the others had waited for it by then."""
    last = max(moments, key=lambda rank: moments[rank].ready)
    waiting = statistics.median(each.began for rank, each in moments.items() if rank != last)
    return last, max(0.0, moments[last].ready - waiting)


def rates(recordings: Iterable[Recording]) -> list[Rate]:
    """The rate of each direction of each link that carried enough, the slowest first."""
    spans: dict[tuple[int, int, str], list[tuple[int, int]]] = defaultdict(list)
    carried: Counter[tuple[int, int, str]] = Counter()
    for recording in recordings:
        for span in recording.spans:
            if span.kind in ("send", "receive"):
                ends = (recording.rank, span.id) if span.kind == "send" else (span.id, recording.rank)
                spans[*ends, span.kind].append((span.begin, span.end))
                carried[*ends, span.kind] += span.bytes
    slowest: dict[tuple[int, int], Rate] = {}
    for (sender, receiver, kind), times in spans.items():
        count = carried[sender, receiver, kind]
        if count >= LEAST_BYTES:
            rate = Rate(sender, receiver, count * 8e9 / max(1, union(times)), count)
            other = slowest.setdefault((sender, receiver), rate)
            slowest[sender, receiver] = min(rate, other, key=lambda rate: rate.bits_per_second)
    return sorted(slowest.values(), key=lambda rate: rate.bits_per_second)


def hidden(recordings: Iterable[Recording]) -> float | None:
    """The part of the communication that no backward pass waited for, over all ranks; None if there was none."""
    busy = waited = 0
    for recording in recordings:
        busy += union((span.begin, span.end) for span in recording.spans if span.kind == "reduce")
        waited += sum(span.end - span.begin for span in recording.spans if span.kind == "wait")
    return min(1.0, max(0.0, 1 - waited / busy)) if busy else None


def union(times: Iterable[tuple[int, int]]) -> int:
    """How long at least one of them lasted."""
    total = 0
    reached: int | None = None
    for begin, end in sorted(times):
        if reached is None or begin > reached:
            total += end - begin
            reached = end
        elif end > reached:
            total += end - reached
            reached = end
    return total


def _percent(part: float) -> str:
    return f"{100 * part:.0f} %"


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.2g} ms"


def _rate(bits_per_second: float) -> str:
    for limit, unit in ((1e9, "Gbit/s"), (1e6, "Mbit/s")):
        if bits_per_second >= limit:
            return f"{bits_per_second / limit:.3g} {unit}"
    return f"{bits_per_second / 1e3:.3g} kbit/s"
