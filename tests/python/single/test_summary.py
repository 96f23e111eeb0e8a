"""The one line that a merged trace is summed up in."""

import re

import pytest
from recorded import MS, recording, world

from offbeat import merge, summary
from offbeat.timeline import Span


def summarize(recordings):
    merged, settings = merge.merge(recordings)
    return summary.summarize(merged, settings.values())


def frames(kind, peer, count, size, begin=0, length=10 * MS):
    return [Span(kind, peer, 0, n, begin + n * length, begin + (n + 1) * length, size) for n in range(count)]


def test_the_line():
    late = {2: 3 * MS}
    recordings = world("aabb", steps=120, skews={"b": 4_000 * MS}, late=late, wait=2 * MS)
    recordings[0] = recording(
        0, [*recordings[0].spans, *frames("send", 3, 10, 105_000)], world_size=4, host="a", clock="boot-a"
    )
    found = summarize(recordings)
    assert found.steps == 120
    assert found.last.rank == 2
    assert found.last.share == 1
    assert found.last.seconds == pytest.approx(3e-3, rel=0.1)
    assert found.hidden == pytest.approx(1 - 2 / 6.3, abs=0.15)
    pattern = (
        r"120 steps, 4 ranks: rank 2 \(host b\) was last to be ready in 100 % of steps, by (2\.9|3|3\.\d) ms; "
        r"slowest link 0 -> 3: 84 Mbit/s; \d\d % of the communication was hidden behind compute; "
        r"the clocks agree within ±\d(\.\d+)? ms"
    )
    assert re.fullmatch(pattern, found.line), found.line


def test_a_line_about_nothing():
    assert summarize([recording(0), recording(1)]).line == (
        "0 steps, 2 ranks: no reduction was traced on several ranks; no link carried 1 MB; no step communicated"
    )


def test_missing_ranks_and_unknown_clocks_are_told():
    line = summarize([recording(0, world_size=8), recording(1, clock="boot-b")]).line
    assert line.startswith("0 steps, 2 of 8 ranks: ")
    assert line.endswith("may be off")


def test_nobody_is_blamed_for_less_than_the_clocks_can_tell():
    found = summarize(world("ab", skews={"b": 1000 * MS}))
    assert found.last.seconds < found.uncertainty
    assert "no rank was late by more than the clocks can tell" in found.line


@pytest.mark.parametrize(
    ("moments", "late"),
    [
        ({0: (5, 5), 1: (9, 9)}, (1, 4)),
        ({0: (5, 5), 1: (9, 9), 2: (6, 6)}, (1, 3.5)),
        # two ranks of a slow host are late together; the others have waited all the same
        ({0: (1, 1), 1: (2, 2), 2: (50, 50), 3: (52, 52)}, (3, 50)),
        # the other one was ready earlier, but busy until then
        ({0: (5, 8), 1: (9, 9)}, (1, 1)),
        ({0: (5, 10), 1: (9, 20)}, (1, 0)),
    ],
)
def test_lateness(moments, late):
    assert summary.lateness({rank: summary.Moments(*each) for rank, each in moments.items()}) == late


def test_who_is_last_is_counted_by_steps():
    spans = {rank: [] for rank in range(3)}
    for step in range(10):
        slow = 2 if step < 7 else 0
        for rank in spans:
            begin = 1000 * MS * step + (5 * MS if rank == slow else 0)
            spans[rank].append(Span("reduce", 0, 0, step, begin, 1000 * MS * step + 9 * MS, 0))
    found = summarize([recording(rank, spans[rank], world_size=3) for rank in spans]).last
    assert (found.rank, found.share, found.seconds) == (2, 0.7, 0.005)


def test_time_in_the_queue_is_no_lateness():
    def spans(ready, begin):
        return [Span("queued", 0, 0, 0, ready, begin, 0), Span("reduce", 0, 0, 0, begin, 100 * MS, 0)]

    found = summarize([recording(0, spans(0, 10 * MS)), recording(1, spans(2 * MS, 30 * MS))]).last
    assert (found.rank, found.seconds) == (1, 0)
    found = summarize([recording(0, spans(0, 10 * MS)), recording(1, spans(25 * MS, 30 * MS))]).last
    assert (found.rank, found.seconds) == (1, 0.015)


def test_rates_are_those_of_the_slower_side():
    sender = recording(0, frames("send", 1, 20, 100_000))
    receiver = recording(1, frames("receive", 0, 20, 100_000, length=20 * MS))
    (rate,) = summary.rates([sender, receiver])
    assert (rate.sender, rate.receiver, rate.bytes) == (0, 1, 2_000_000)
    assert rate.bits_per_second == pytest.approx(40e6)


def test_streams_of_a_link_count_together_and_small_links_not_at_all():
    both = frames("send", 1, 10, 100_000) + frames("send", 1, 10, 100_000, begin=5 * MS)
    (rate,) = summary.rates([recording(0, both + frames("send", 2, 9, 100_000))])
    assert rate.receiver == 1
    assert rate.bits_per_second == pytest.approx(2_000_000 * 8 / 0.105)


def test_union():
    assert summary.union([]) == 0
    assert summary.union([(5, 7), (0, 3), (2, 4), (3, 4), (6, 6)]) == 6


@pytest.mark.parametrize(("waited", "hidden"), [(0, 1.0), (25, 0.75), (100, 0.0), (300, 0.0)])
def test_hidden(waited, hidden):
    spans = [
        Span("reduce", 0, 0, 0, 0, 60, 0),
        Span("reduce", 1, 0, 0, 50, 100, 0),
        Span("wait", 0, 0, 0, 0, waited, 0),
    ]
    assert summary.hidden([recording(0, spans)]) == hidden
