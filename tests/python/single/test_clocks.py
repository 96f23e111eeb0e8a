"""Clocks of several hosts, set by the reductions that their ranks made together."""

import pytest
from recorded import MS, recording, world

from offbeat import merge
from offbeat.clocks import Bounds, align, fit
from offbeat.timeline import Span

S = 1000 * MS


def spread(recordings):
    """By how much times that were the same in truth differ at most: the forward passes of a step all begin together."""
    merged, _ = merge.merge(recordings)
    begins = {}
    for each in merged:
        for span in each.spans:
            if span.kind == "forward":
                begins.setdefault(span.step, []).append(span.begin)
    return max(max(those) - min(those) for those in begins.values())


def test_ranks_of_one_boot_are_left_alone():
    (setting,) = align(world("aaa")).values()
    assert (setting.ranks, setting.offset, setting.uncertainty, setting.by) == ((0, 1, 2), 0, 0, "the same clock")


@pytest.mark.parametrize("skew", [0, 3 * S, -7 * S, 400_000 * S])
def test_skewed_clocks(skew):
    recordings = world("abab", skews={"b": skew})
    settings = align(recordings)
    found = settings["boot-b"]
    assert found.ranks == (1, 3)
    assert found.by == "reductions"
    assert abs(found.offset - skew) <= found.uncertainty <= 2.1 * MS
    assert found.drift == 0
    assert spread(recordings) <= 2 * found.uncertainty


def test_every_clock_is_set_to_that_of_the_lowest_rank():
    skews = {"a": 5 * S, "b": -2 * S, "c": 11 * S}
    settings = align(reversed(world("abcabc", skews=skews)))
    assert settings["boot-a"].offset == 0
    for host in "bc":
        assert abs(settings[f"boot-{host}"].offset - (skews[host] - skews["a"])) <= 2 * MS


def test_drifting_clocks():
    # 100 parts in a million over a minute are 6 ms, more than any bound is wide
    recordings = world("ab", steps=2000, skews={"b": 3 * S}, drifts={"b": 1e-4})
    found = align(recordings)["boot-b"]
    assert found.drift == pytest.approx(1e-4, rel=0.05)
    assert found.uncertainty <= 2 * MS
    assert spread(recordings) <= MS // 2


def test_a_few_wrong_reductions_do_no_harm():
    recordings = world("ab", steps=100, skews={"b": 3 * S})
    # somebody who does not wait: its reductions end before the others begin theirs
    early = [
        span._replace(begin=span.begin - 500 * MS, end=span.end - 500 * MS)
        if span.kind == "reduce" and span.step % 10 == 3
        else span
        for span in recordings[1].spans
    ]
    found = align([recordings[0], recording(1, early, clock="boot-b")])["boot-b"]
    assert abs(found.offset - 3 * S) <= 2 * MS
    assert found.uncertainty <= 5 * MS


def test_bounds_that_contradict_each_other():
    assert fit([Bounds(0, -10, 10), Bounds(1, 0, 30)]) == (5, 0, 1, 5)
    offset, _, _, uncertainty = fit([Bounds(0, 0, 2), Bounds(0, 10, 12), Bounds(0, 10, 14), Bounds(0, 11, 13)])
    assert offset == pytest.approx(12, abs=1)
    assert uncertainty > 0


def test_through_a_host_in_between():
    def reduce(step, begin):
        return Span("reduce", 0, 0, step, begin, begin + MS, 0)

    # a and c never meet, but both meet b
    a = recording(0, [reduce(0, 100 * MS)])
    b = recording(1, [reduce(0, 300 * MS), reduce(1, 500 * MS)], clock="boot-b")
    c = recording(2, [reduce(1, 900 * MS)], clock="boot-c")
    settings = align([a, c, b])
    assert settings["boot-b"].offset == -200 * MS
    assert settings["boot-c"].offset == -600 * MS
    assert settings["boot-c"].uncertainty == 2 * settings["boot-b"].uncertainty


def test_without_reductions_the_wall_clocks_must_do():
    a = recording(0, monotonic=100, unix=1000)
    b = recording(1, clock="boot-b", monotonic=700, unix=1010)
    found = align([a, b])["boot-b"]
    assert (found.by, found.offset, found.uncertainty) == ("wall clocks", -590, None)


def test_repeated_reductions_are_matched_from_the_end():
    def spans(skew, times):
        return [Span("reduce", 0, 0, 5, 1000 * MS * n + skew, 1000 * MS * n + skew + MS, 0) for n in times]

    # the first two are lost on one side
    found = align([recording(0, spans(0, range(4))), recording(1, spans(-9 * S, (2, 3)), clock="boot-b")])["boot-b"]
    assert found.offset == 9 * S


@pytest.mark.parametrize("skew", [0, 3 * S, -7 * S])
def test_frames_say_more_than_reductions(skew):
    # with one bucket, reductions alone cannot tell a late rank from a clock that is behind
    late = {1: 5 * MS}
    recordings = world("ab", buckets=1, skews={"b": skew}, late=late)
    assert abs(align(recordings)["boot-b"].offset - skew) > 2 * MS
    recordings = world("ab", buckets=1, skews={"b": skew}, late=late, transit=MS // 5)
    found = align(recordings)["boot-b"]
    assert found.by == "frames"
    assert abs(found.offset - skew) <= found.uncertainty <= MS // 4


def test_frames_that_drift():
    recordings = world("abc", steps=1000, skews={"b": 3 * S}, drifts={"b": 1e-4, "c": -2e-5}, transit=MS // 5)
    settings = align(recordings)
    assert settings["boot-b"].drift == pytest.approx(1e-4, rel=0.05)
    assert settings["boot-c"].drift == pytest.approx(-2e-5, rel=0.05)
    assert spread(recordings) <= MS // 4


def test_calls_of_which_frames_are_lost_do_not_count():
    # of four frames of a call over several streams, the first ones are gone from the sender's trace
    def frames(kind, peer, call, begins):
        return [Span(kind, peer, 0, call, begin, begin + MS, 1 << 17) for begin in begins]

    a = [*frames("send", 1, 7, [3 * MS, 4 * MS]), *frames("receive", 1, 7, [MS]), *frames("receive", 1, 8, [MS])]
    b = [*frames("receive", 0, 7, [MS, 2 * MS, 3 * MS, 4 * MS]), *frames("send", 0, 7, [0]), *frames("send", 0, 8, [0])]
    assert align([recording(0, a), recording(1, b, clock="boot-b")])["boot-b"].by == "wall clocks"
    whole = [*a, *frames("send", 1, 7, [MS, 2 * MS])]
    found = align([recording(0, whole), recording(1, b, clock="boot-b")])["boot-b"]
    assert (found.by, found.offset, found.uncertainty) == ("frames", MS / 2, 1.5 * MS)
