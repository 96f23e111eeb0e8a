"""Starts the jobs of the rows of training and of algorithms, and collects their samples."""

from __future__ import annotations

import dataclasses
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from . import launch
from .algorithms import Course, Passed
from .training import Outcome, Trial, of_rate

if TYPE_CHECKING:
    from collections.abc import Callable

    from .cases import Place

TIMEOUT = 900.0
CALIBRATION = 5  # backwards that choose the rate of the wire


def run(trial: Trial, place: Place, engines: list[str], repetitions: int, kind: str = "") -> Outcome:
    """One job: one process for each rank, all engines in it."""
    job: dict[str, Any] = {"engines": engines, "repetitions": repetitions, "kind": kind or trial.kind}
    job |= {"model": asdict(trial.model), "parameters": trial.model.parameters}
    job |= {"batch": trial.batch, "inner": trial.inner, "bucket_bytes": trial.bucket_bytes}
    ranks, failure = launch.run_ranks(place, "benches.compare.train_rank", job, TIMEOUT)
    wrong = sorted({name for said in ranks for name in said["wrong"]})
    return Outcome(trial, [said["samples"] for said in ranks], wrong, failure)


def overlap(trial: Trial, engines: list[str], repetitions: int) -> Outcome:
    """Measures backward alone, and then all the rest on a wire that needs as long."""
    local = dataclasses.replace(trial.place, rate="")
    calibration = run(trial, local, ["plain"], CALIBRATION, "backward")
    backward = calibration.median("plain")
    if calibration.failure or backward is None:
        return calibration
    rate = of_rate(trial.model.gradient_bytes / backward)
    outcome = run(trial, dataclasses.replace(trial.place, rate=rate), engines, repetitions)
    return dataclasses.replace(outcome, rate=rate)


def memory(trial: Trial, engines: list[str], rounds: int) -> Outcome:
    """Each engine in processes of its own, by turns."""
    whole = Outcome(trial, [{} for _ in range(trial.place.world)])
    for _ in range(rounds):
        for engine in engines:
            one = run(trial, trial.place, [engine], 1)
            if one.failure:
                return one
            for mine, rank in zip(whole.ranks, one.ranks, strict=True):
                for name, values in rank.items():
                    mine.setdefault(name, []).extend(values)
    return whole


def measure(trial: Trial, engines: list[str], *, quick: bool) -> Outcome:
    repetitions = trial.quick if quick else trial.repetitions
    if trial.kind == "overlap":
        return overlap(trial, engines, repetitions)
    if trial.kind == "memory":
        return memory(trial, engines, repetitions)
    # plain torch twice: how far it is from itself is the noise
    control = ["again"] if trial.kind == "one" else []
    return run(trial, trial.place, ["plain", *engines, *control], repetitions)


def measure_all(
    trials: list[Trial], engines: list[str], skipped: list[str], say: Callable[[str], None], *, quick: bool
) -> list[Outcome]:
    """Engines are those of the other rows; DDP is gloo's. `say` gets a line for each trial."""
    here = [ours for ours, theirs in (("ours", "ours"), ("ddp", "gloo")) if theirs in engines]
    outcomes = []
    for trial in trials:
        text = f"training: {trial.title}, {trial.model.title}, {trial.place.title}"
        say(text)
        why = launch.no_netlab() if trial.place.emulated else ""
        if why or not here:
            skipped.append(f"{text}: {why or 'neither ours nor gloo'}")
            continue
        outcomes.append(measure(trial, here, quick=quick))
        if outcomes[-1].failure:
            launch.say(f"{trial.key}: {outcomes[-1].failure}")
    return outcomes


def pass_course(course: Course, engines: list[str], *, quick: bool) -> Passed:
    """One job for all contenders."""
    there = ("ours", "plain") + (("ddp", "ddp-bf16") if "gloo" in engines else ())
    chosen = [contender for contender in course.contenders if contender.engine in there]
    job: dict[str, Any] = {"model": asdict(course.model), "batch": course.batch}
    job |= {"learns": course.learns, "rest": course.rest}
    job |= {"repetitions": course.quick if quick else course.repetitions, "warm": course.warm}
    job |= {"contenders": [contender.described() for contender in chosen]}
    ranks, failure = launch.run_ranks(course.place, "benches.compare.algorithm_rank", job, TIMEOUT)
    digests = [said["digests"] for said in ranks]
    equal = [contender.key for contender in chosen if contender.is_equal and contender.engine != "plain"]
    wrong = [name for name in equal if len({each[name] for each in digests}) > 1]
    return Passed(course, chosen, [said["samples"] for said in ranks], wrong, failure)


def pass_all(
    courses: list[Course], engines: list[str], skipped: list[str], say: Callable[[str], None], *, quick: bool
) -> list[Passed]:
    passed = []
    for course in courses:
        text = f"algorithms: {course.title}"
        say(text)
        why = launch.no_netlab() or ("" if "ours" in engines else "without ours")
        if why:
            skipped.append(f"{text}: {why}")
            continue
        passed.append(pass_course(course, engines, quick=quick))
        if passed[-1].failure:
            launch.say(f"{course.key}: {passed[-1].failure}")
    return passed
