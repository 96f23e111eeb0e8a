"""Measures Offbeat, gloo and OpenMPI in one run, and says which goals are met.

Sizes are powers of two (1 kB = 1024 bytes). Results go to out/compare.json and out/compare.png.
"""

from __future__ import annotations

import argparse
import itertools
import re
import shlex
import signal
import sys
import time
from itertools import groupby

from . import algorithms, chart, codecs, idle, launch, machine, report, survivors, training, training_jobs
from .cases import Case, Result, all_cases, size_text
from .engines import missing
from .launch import say

REPETITIONS, QUICK = 21, 7
IDLE, CODECS, SURVIVORS = "idle", "codecs", "survivors"


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="python -m benches.compare", description=__doc__)
    p.add_argument("--quick", action="store_true", help=f"{QUICK} repetitions, not {REPETITIONS}: to try something")
    p.add_argument("--only", metavar="PATTERN", default="", help="cases whose key matches this regular expression")
    p.add_argument("--list", action="store_true", help="print the keys of all cases")
    p.add_argument(
        "--without", action="append", default=[], choices=["ours", "gloo", "mpi"], help="leave an engine out"
    )
    p.add_argument("--update", action="store_true", help="also rewrite the tables in BENCHMARKS.md (full runs only)")
    a = p.parse_args()
    if a.update and (a.quick or a.only):
        p.error("--update wants a full run: numbers of different runs do not belong in one table")
    return a


def choose_engines(without: list[str], skipped: list[str]) -> list[str]:
    chosen = []
    for name in ("ours", "gloo", "mpi"):
        why = "left out by --without" if name in without else missing(name)
        if not why and name == "mpi" and launch.mpirun() is None:
            why = "no mpirun"
        if why:
            skipped.append(f"{name}: {why}")
        else:
            chosen.append(name)
    if not chosen:
        sys.exit("nothing to measure")
    return chosen


def measure(cases: list[Case], engines: list[str], repetitions: int, steps: int, skipped: list[str]) -> list[Result]:
    results: list[Result] = []
    began, number = time.monotonic(), 0
    for (place, _), group in groupby(cases, key=lambda case: (case.place, launch.mpi_profile(case))):
        mine = list(group)
        why = launch.no_netlab() if place.emulated else ""
        if place.emulated and not set(engines) & {"ours", "gloo"}:
            why = "neither ours nor gloo"
        if why:
            skipped.append(f"{place.title}: {why}")
            say(f"skipped: {skipped[-1]}")
            number += len(mine)
            continue
        here = [name for name in engines if name != "mpi"] if place.emulated else [*engines, "copy"]
        described = []
        for case in mine:
            number += 1
            text = f"{case.title.replace('`', '')}, {size_text(case.size)}"
            entry = {"key": case.key, "size": case.size, "memory": case.memory, "inner": case.inner}
            described.append(entry | {"number": number, "text": text})
        job = {"cases": described, "of": steps, "began": began, "repetitions": repetitions}
        results += launch.run(place, mine, here, job)
    return results


def main() -> int:
    a = arguments()
    cases = [case for case in all_cases() if re.search(a.only, case.key)]
    trials = [trial for trial in training.all_trials() if re.search(a.only, trial.key)]
    courses = [course for course in algorithms.all_courses() if re.search(a.only, course.key)]
    with_codecs, with_survivors = bool(re.search(a.only, CODECS)), bool(re.search(a.only, SURVIVORS))
    with_idle = bool(re.search(a.only, IDLE)) and sys.platform == "linux"
    if a.list:
        keyed = (*all_cases(), *training.all_trials(), *algorithms.all_courses())
        print(*(one.key for one in keyed), SURVIVORS, CODECS, IDLE, sep="\n")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    began, before = time.monotonic(), machine.load()
    skipped: list[str] = []
    engines = choose_engines(a.without, skipped)
    for reason in skipped:
        say(f"skipped: {reason}")
    if before > 0.5:
        say(f"the machine is busy (load average {before:.1f}): take the numbers as provisional")
    repetitions = QUICK if a.quick else REPETITIONS
    steps = len(cases) + len(trials) + len(courses) + with_survivors + with_codecs + with_idle
    results = measure(cases, engines, repetitions, steps, skipped)
    numbers = itertools.count(len(cases) + 1)

    def progress(text: str) -> None:
        say(f"[{next(numbers):2}/{steps}] {time.monotonic() - began:5.0f} s  {text}")

    trained = training_jobs.measure_all(trials, engines, skipped, progress, quick=a.quick)
    passed = training_jobs.pass_all(courses, engines, skipped, progress, quick=a.quick)
    survived = survivors.measure_all(skipped, progress) if with_survivors and "ours" in engines else []
    speeds: list[codecs.Speed] = []
    if with_codecs:
        progress("codecs on one core")
        speeds, why = codecs.measure()
        if why:
            skipped.append(f"codecs: {why}")
    idles = {}
    if with_idle:
        rounds = 1 if a.quick else idle.ROUNDS
        progress(f"idle ranks, {rounds} × {idle.WATCHED:.0f} s for each engine")
        idles = idle.measure(engines, rounds)
    done = report.Report(
        machine=machine.describe(),
        command=shlex.join(["python", "-m", "benches.compare", *sys.argv[1:]]),
        flags={name: shlex.join(["mpirun", *launch.mpi_flags(name)]) for name in launch.MPI_PROFILES},
        repetitions=repetitions,
        date=time.strftime("%Y-%m-%d"),
        load=(before, machine.load()),
        results=results,
        training=trained,
        passed=passed,
        survived=survived,
        codecs=speeds,
        idle=idles,
        skipped=skipped,
    )
    write(done, update=a.update)
    failed = [r.case.key for r in results if r.failure or r.wrong]
    failed += [o.trial.key for o in trained if o.failure or o.wrong]
    failed += [p.course.key for p in passed if p.failure or p.wrong]
    failed += [f"{SURVIVORS}: {one.algorithm}" for one in survived if one.failure]
    if failed:
        say(f"failed: {', '.join(failed)}")
    say(f"{time.monotonic() - began:.0f} s in all")
    return 1 if failed else 0


def write(done: report.Report, *, update: bool) -> None:
    launch.OUT.mkdir(exist_ok=True)
    print(report.tables(done))
    report.save_json(launch.OUT / "compare.json", done)
    why = chart.missing()
    if why:
        say(f"no picture: {why}")
    else:
        chart.draw(launch.OUT / "compare.png", done.results)
    if update:
        report.put_between(launch.BENCHMARKS, "compare", report.measured_part(done))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        say("stopped")
        sys.exit(130)
