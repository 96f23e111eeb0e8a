"""The tuner finds the best size from times alone: here from times that are made up."""

import random
import re

import pytest

from offbeat import tuning
from offbeat.errors import InvalidArgument
from offbeat.tuning import Tuner, candidates, parse_size, parse_sizes, size_text

MIB = 1 << 20


def play(tuner, time_of, limit=10_000):
    """Feeds the tuner until it is done; `time_of(size, step)` are the steps' times. Gives the sizes in their order."""
    tried, step = [tuner.size], 0
    while not tuner.done:
        median = tuner.observe(time_of(tuner.size, step))
        step += 1
        assert step < limit
        if median is not None:
            tuner.decide(median)
            tried.append(tuner.size)
    return tried


def around(lowest, per_doubling=0.1):
    """Times with one minimum."""
    return lambda size, _: 0.01 * (1 + per_doubling * abs(size.bit_length() - lowest.bit_length()))


@pytest.mark.parametrize("lowest", [MIB // 2, 2 * MIB, 8 * MIB, 64 * MIB])
@pytest.mark.parametrize("passes", [1, 3])
def test_it_finds_the_minimum(lowest, passes):
    tuner = Tuner(candidates(100 * MIB, 8 * MIB), passes=passes)
    tried = play(tuner, around(lowest))
    assert (tuner.best, tuner.size, tried[-1]) == (lowest, lowest, lowest)
    assert sorted(tuner.results) == [MIB << shift >> 1 for shift in range(8)]
    assert tuner.results[lowest] == pytest.approx(0.01)


def test_it_stays_with_the_preferred_size_unless_another_is_faster_by_the_margin():
    for gain, expected in ((0.015, 8 * MIB), (0.03, 2 * MIB)):
        tuner = Tuner([8 * MIB, MIB, 2 * MIB])
        play(tuner, lambda size, _, gain=gain: 0.02 * (1 - gain if size == 2 * MIB else 1))
        assert tuner.best == expected


def test_steps_after_a_change_do_not_count():
    tuner = Tuner([1, 2], steps=3, skip=2)
    assert [tuner.observe(seconds) for seconds in (9.0, 9.0, 1.0, 3.0)] == [None] * 4
    assert tuner.observe(2.0) == 2.0
    assert tuner.decide(2.0) == 2
    assert [tuner.observe(seconds) for seconds in (9.0, 9.0, 1.0, 1.0)] == [None] * 4
    assert tuner.observe(1.0) == 1.0


def test_it_takes_no_more_steps_than_it_says():
    for passes in (1, 2):
        tuner = Tuner([4, 1, 2], steps=3, skip=1, passes=passes)
        steps = []
        play(tuner, lambda size, step, steps=steps: steps.append(step) or float(size))
        assert tuner.best == 1
        assert len(steps) == tuner.rounds == (3 * passes + 2) * 4
        # without a second match
        tuner, steps = Tuner([4, 1, 2], steps=3, skip=1, passes=passes), []
        play(tuner, lambda size, step, steps=steps: steps.append(step) or 1.0)
        assert tuner.best == 4
        assert len(steps) == 3 * passes * 4


def test_a_slow_beginning_does_not_speak_against_the_preferred_size():
    """The first steps of a job are slow, and the preferred size is tried in them: hence the second match."""
    tuner = Tuner(candidates(100 * MIB, 8 * MIB))
    play(tuner, lambda size, step: 0.02 if step < 10 else 0.01)
    assert tuner.best == 8 * MIB


def test_outliers_do_not_count():
    """An evaluation or a checkpoint now and then: fewer than half of the steps of a size."""
    tuner = Tuner(candidates(100 * MIB, 8 * MIB))
    play(tuner, lambda size, step: around(2 * MIB)(size, step) + (5.0 if step % 3 == 0 else 0.0))
    assert tuner.best == 2 * MIB


@pytest.mark.parametrize("seed", range(20))
def test_noise(seed):
    chance = random.Random(seed)
    tuner = Tuner(candidates(100 * MIB, 8 * MIB), steps=10)
    play(tuner, lambda size, step: around(2 * MIB)(size, step) * (1 + 0.03 * chance.random()))
    assert tuner.best == 2 * MIB


@pytest.mark.parametrize("seed", range(10))
def test_ranks_that_agree_on_times_decide_alike(seed):
    chance = random.Random(seed)
    ranks = [Tuner(candidates(100 * MIB, 8 * MIB)) for _ in range(4)]
    while not ranks[0].done:
        medians = [rank.observe(chance.random()) for rank in ranks]
        if medians[0] is not None:
            assert None not in medians
            assert len({rank.decide(max(medians)) for rank in ranks}) == 1
        assert len({(rank.size, rank.best, rank.done) for rank in ranks}) == 1
    assert all(rank.done and rank.results == ranks[0].results for rank in ranks)


def test_sizes_that_give_the_same_buckets_are_left_out_of_all_passes():
    tuner = Tuner([8, 1, 2, 4], steps=1, skip=0, passes=2)
    tried = []
    while not tuner.done:
        if tuner.size == 2:
            tuner.leave_out()
            continue
        tried.append(tuner.size)
        tuner.decide(tuner.observe(1.0))
    assert tried == [8, 1, 4, 8, 1, 4]
    assert tuner.best == 8


def test_the_last_size_can_be_left_out():
    tuner = Tuner([8, 1], steps=1, skip=0)
    assert tuner.decide(1.0) == 1
    assert tuner.leave_out() == 8
    assert tuner.done


def test_wrong_arguments():
    for options in ({"sizes": []}, {"sizes": [0]}, {"sizes": [1], "steps": 0}, {"sizes": [1], "skip": -1}):
        with pytest.raises(InvalidArgument):
            Tuner(**options)
    for seconds in (float("nan"), float("inf"), -1.0):
        with pytest.raises(InvalidArgument, match="agreed"):
            Tuner([1]).decide(seconds)


def test_candidates_fit_the_model():
    assert candidates(100 * MIB, 8 * MIB) == [8 * MIB, MIB // 2, MIB, 2 * MIB, 4 * MIB, 16 * MIB, 32 * MIB, 64 * MIB]
    assert candidates(3 * MIB, 8 * MIB) == [8 * MIB, MIB // 2, MIB, 2 * MIB, 4 * MIB]
    assert candidates(3 * MIB, 1000) == [1000, MIB // 2, MIB, 2 * MIB, 4 * MIB]
    assert candidates(1000, 8 * MIB) == [8 * MIB]
    assert max(candidates(1 << 40, 8 * MIB)) == tuning.MOST


def test_sizes_as_text():
    assert [size_text(size) for size in (1, 1000, 1024, 1536, 4 * MIB, 3 << 29)] == [
        "1 bytes",
        "1000 bytes",
        "1 KiB",
        "1.5 KiB",
        "4 MiB",
        "1.5 GiB",
    ]
    assert parse_sizes("256K, 1M,1.5MiB ,4096,2kb,256K") == [256 << 10, MIB, 3 * MIB // 2, 4096, 2048]
    for wrong in ("", "0", "-1", "x", "1.0001", "K", "1T", "1e3", "9" * 30):
        with pytest.raises(InvalidArgument, match=re.escape(repr(wrong))):
            parse_size(wrong)
    with pytest.raises(InvalidArgument, match="no size"):
        parse_sizes(" , ")
