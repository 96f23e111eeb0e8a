"""Measures Offbeat, gloo and OpenMPI in one run, and says which goals are met.

Sizes are powers of two (1 kB = 1024 bytes). Results go to out/compare.json and out/compare.png.
"""

from __future__ import annotations

import argparse
import re
import shlex
import signal
import sys
import time
from itertools import groupby

from . import chart, idle, launch, machine, report
from .cases import Case, Result, all_cases, size_text
from .engines import missing

REPETITIONS, QUICK = 21, 7
OUT = launch.ROOT / "out"
BENCHMARKS = launch.ROOT / "BENCHMARKS.md"
IDLE = "idle"


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


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


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
    with_idle = bool(re.search(a.only, IDLE)) and sys.platform == "linux"
    if a.list:
        print(*(case.key for case in all_cases()), IDLE, sep="\n")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    began, before = time.monotonic(), machine.load()
    skipped: list[str] = []
    engines = choose_engines(a.without, skipped)
    for reason in skipped:
        say(f"skipped: {reason}")
    if before > 0.5:
        say(f"the machine is busy (load average {before:.1f}): take the numbers as provisional")
    repetitions, steps = QUICK if a.quick else REPETITIONS, len(cases) + with_idle
    results = measure(cases, engines, repetitions, steps, skipped)
    idles = {}
    if with_idle:
        rounds = 1 if a.quick else idle.ROUNDS
        spent = time.monotonic() - began
        say(f"[{steps:2}/{steps}] {spent:5.0f} s  idle ranks, {rounds} × {idle.WATCHED:.0f} s for each engine")
        idles = idle.measure(engines, rounds)
    done = report.Report(
        machine=machine.describe(),
        command=shlex.join(["python", "-m", "benches.compare", *sys.argv[1:]]),
        flags={name: shlex.join(["mpirun", *launch.mpi_flags(name)]) for name in launch.MPI_PROFILES},
        repetitions=repetitions,
        date=time.strftime("%Y-%m-%d"),
        load=(before, machine.load()),
        results=results,
        idle=idles,
        skipped=skipped,
    )
    write(done, update=a.update)
    failed = [r.case.key for r in results if r.failure or r.wrong]
    if failed:
        say(f"failed: {', '.join(failed)}")
    say(f"{time.monotonic() - began:.0f} s in all")
    return 1 if failed else 0


def write(done: report.Report, *, update: bool) -> None:
    OUT.mkdir(exist_ok=True)
    print(report.tables(done))
    report.save_json(OUT / "compare.json", done)
    why = chart.missing()
    if why:
        say(f"no picture: {why}")
    else:
        chart.draw(OUT / "compare.png", done.results)
    if update:
        report.update(BENCHMARKS, done)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        say("stopped")
        sys.exit(130)
