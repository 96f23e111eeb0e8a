"""Sets the clocks of several hosts by what their ranks did together. Pure.

Ranks of one boot read the same clock. Between clocks, causes come before their effects: a frame is not read before it
was written, and nobody ends a reduction before everybody has begun it. In one direction that bounds the difference of
two clocks from below, in the other from above. Frames say it more closely, since they take less time than what they are
part of, and do not depend on who is late; reductions help where no long frames went both ways.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .timeline import Recording, Span

# A reduction: model, step, bucket, and how often it still comes (a trace loses its beginning, never its end).
Key = tuple[int, int, int, int]
# A call: its group and number. The frames of one between two ranks: sender, receiver, call.
Call = tuple[int, int]
Flow = tuple[int, int, int, int]
# Slopes are the median over pairs of moments; more than this many take time and add no precision.
MOST_MOMENTS = 200


@dataclass(frozen=True)
class Setting:
    """How to read a clock: what to add to its times, in nanoseconds, to get those of the first rank's clock."""

    ranks: tuple[int, ...]
    by: str  # "the same clock", "frames", "reductions" or "wall clocks"
    offset: float = 0.0
    drift: float = 0.0  # further nanoseconds for each nanosecond since `origin`
    origin: int = 0
    uncertainty: float | None = 0.0  # how far off it may be; None if nobody knows

    def __call__(self, time: int) -> int:
        """A time of this clock as one of the first rank's."""
        return time + round(self.offset + self.drift * (time - self.origin))


class Edges(NamedTuple):
    """The latest beginning and the earliest end of a reduction, over the ranks on one clock."""

    begin: int
    end: int


@dataclass
class Seen:
    """What the ranks on one clock have seen."""

    reductions: dict[Key, Edges] = field(default_factory=dict)
    written: dict[Flow, list[int]] = field(default_factory=lambda: defaultdict(list))  # when they began to be
    read: dict[Flow, list[int]] = field(default_factory=lambda: defaultdict(list))  # when they had been

    @classmethod
    def by(cls, recordings: Iterable[Recording]) -> "Seen":
        """Everything that the bounds are made from."""
        seen = cls()
        for recording in recordings:
            for key, span in keyed(recording.spans).items():
                begin, end = seen.reductions.get(key, (span.begin, span.end))
                seen.reductions[key] = Edges(max(begin, span.begin), min(end, span.end))
            for span in recording.spans:
                if span.kind == "send":
                    seen.written[recording.rank, span.id, span.model, span.step].append(span.begin)
                elif span.kind == "receive":
                    seen.read[span.id, recording.rank, span.model, span.step].append(span.end)
        return seen


class Bounds(NamedTuple):
    """The least and the most that may be added to a clock, from what happened together at `at` by that clock."""

    at: int
    low: int
    high: int

    @property
    def middle(self) -> float:
        """The best guess from this one."""
        return (self.low + self.high) / 2


def align(recordings: Iterable[Recording]) -> dict[str, Setting]:
    """For each clock in these recordings, how to read it. The clock of the lowest rank is the one that counts."""
    readers: dict[str, list[Recording]] = defaultdict(list)
    for recording in sorted(recordings, key=lambda recording: recording.rank):
        readers[recording.clock].append(recording)
    ranks = {clock: tuple(recording.rank for recording in those) for clock, those in readers.items()}
    seen = {clock: Seen.by(those) for clock, those in readers.items()}
    first, *others = readers
    settings = {first: Setting(ranks[first], "the same clock")}

    def by_causes(clock: str) -> Setting | None:
        for known, setting in settings.items():
            frames = _by_frames(seen[known], seen[clock], setting)
            if bounds := frames or _by_reductions(seen[known], seen[clock], setting):
                offset, drift, origin, uncertainty = fit(bounds)
                total = None if setting.uncertainty is None else uncertainty + setting.uncertainty
                return Setting(ranks[clock], "frames" if frames else "reductions", offset, drift, origin, total)
        return None

    while others:
        found = ((clock, setting) for clock in others if (setting := by_causes(clock)) is not None)
        clock, setting = next(found, (others[0], None))
        if setting is None:
            difference = _to_wall(readers[clock][0]) - _to_wall(readers[first][0])
            setting = Setting(ranks[clock], "wall clocks", difference, uncertainty=None)
        settings[clock] = setting
        others.remove(clock)
    return settings


def fit(bounds: Sequence[Bounds]) -> tuple[float, float, int, float]:
    """(offset, drift, origin, uncertainty) that agree with the bounds, or come closest; bounds are sorted.

    First without drift: the middle of what all bounds allow. If they contradict each other, the clocks drift apart, so
    a line is laid through their middles, and they are judged beside it. If they still do, something else is wrong with
    some of them (an algorithm that does not wait for everybody), and the median of the middles is the best guess.
    """
    origin = bounds[len(bounds) // 2].at
    if narrow := _intersection(bounds):
        return narrow[0], 0.0, origin, narrow[1]
    drift = _slope(bounds)
    lean = [round(drift * (each.at - origin)) for each in bounds]
    level = [Bounds(each.at, each.low - by, each.high - by) for each, by in zip(bounds, lean, strict=True)]
    if narrow := _intersection(level):
        return narrow[0], drift, origin, narrow[1]
    offset = statistics.median(each.middle for each in level)
    spread = statistics.median(abs(each.middle - offset) for each in level)
    width = statistics.median((each.high - each.low) / 2 for each in level)
    return offset, drift, origin, spread + width


def keyed(spans: Iterable[Span], kind: str = "reduce") -> dict[Key, Span]:
    """The reductions of a rank, or how they were queued, by what they have in common with those of other ranks."""
    found: dict[Key, Span] = {}
    times: dict[tuple[int, int, int], int] = defaultdict(int)
    for span in sorted((span for span in spans if span.kind == kind), key=lambda span: span.begin, reverse=True):
        what = (span.model, span.step, span.id)
        found[*what, times[what]] = span
        times[what] += 1
    return found


def _intersection(bounds: Iterable[Bounds]) -> tuple[float, float] | None:
    """The middle of what all bounds allow and half its width, or None if they contradict each other."""
    low, high = max(each.low for each in bounds), min(each.high for each in bounds)
    return ((low + high) / 2, (high - low) / 2) if low <= high else None


def _slope(bounds: Sequence[Bounds]) -> float:
    """The median slope between middles half of the time apart: a few wrong ones do not bend it."""
    some = bounds[:: max(1, len(bounds) // MOST_MOMENTS)]
    pairs = zip(some, some[len(some) // 2 :], strict=False)
    slopes = [
        (later.middle - sooner.middle) / (later.at - sooner.at) for sooner, later in pairs if later.at > sooner.at
    ]
    return statistics.median(slopes) if slopes else 0.0


def _by_reductions(known: Seen, other: Seen, setting: Setting) -> list[Bounds]:
    bounds = []
    for key in known.reductions.keys() & other.reductions.keys():
        mine, theirs = known.reductions[key], other.reductions[key]
        low, high = setting(mine.begin) - theirs.end, setting(mine.end) - theirs.begin
        bounds.append(Bounds(theirs.begin, low, high))
    return _possible(bounds)


def _by_frames(known: Seen, other: Seen, setting: Setting) -> list[Bounds]:
    """One pair of bounds for each call that sent frames both ways."""
    lows: dict[Call, int] = {}
    for call, written, read in _matched(known.written, other.read):
        low = max(setting(begin) - end for begin, end in zip(written, read, strict=True))
        lows[call] = max(low, lows.get(call, low))
    highs: dict[Call, tuple[int, int]] = {}
    for call, written, read in _matched(other.written, known.read):
        high = min(setting(end) - begin for begin, end in zip(written, read, strict=True))
        highs[call] = min((high, written[0]), highs.get(call, (high, written[0])))
    return _possible(Bounds(highs[call][1], lows[call], highs[call][0]) for call in lows.keys() & highs.keys())


def _matched(
    written: Mapping[Flow, list[int]], read: Mapping[Flow, list[int]]
) -> Iterable[tuple[Call, list[int], list[int]]]:
    for flow in written.keys() & read.keys():
        # Streams may overtake each other, but the nth one to be read cannot come before the nth one was written, if all
        # are there: a trace may have lost some.
        if len(written[flow]) == len(read[flow]):
            yield flow[2:], sorted(written[flow]), sorted(read[flow])


def _possible(bounds: Iterable[Bounds]) -> list[Bounds]:
    """Without those that nothing can satisfy: whoever took part did not wait for each other."""
    return sorted(each for each in bounds if each.low <= each.high)


def _to_wall(recording: Recording) -> int:
    return recording.unix - recording.monotonic
