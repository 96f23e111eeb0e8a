"""Trains two real tasks with every algorithm, beside torch's DDP, and says which come near enough to it.

Results go to out/convergence.json and out/convergence.png.
"""

from __future__ import annotations

import argparse
import re
import shlex
import signal
import sys
import time
from dataclasses import asdict, replace

from ..compare import launch, machine
from ..compare.chart import missing
from ..compare.launch import say
from ..compare.report import put_between
from . import chart, report
from .methods import HOSTS, METHODS, QUICK_SEEDS, QUICK_STEPS, SEEDS, TASKS, combine, judge

TIMEOUT = 7200.0  # a slow machine takes an hour
ALWAYS = ("ddp-sgd", "ddp-adam", "allreduce")  # what the others are held against


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="python -m benches.convergence", description=__doc__)
    p.add_argument("--quick", action="store_true", help=f"{QUICK_SEEDS} seed, {QUICK_STEPS:g} of the steps: to try")
    p.add_argument("--seeds", type=int, help=f"{SEEDS} if not given")
    p.add_argument("--only", metavar="PATTERN", default="", help="methods whose key matches, and what they need")
    p.add_argument("--task", metavar="PATTERN", default="", help="tasks whose key matches")
    p.add_argument("--list", action="store_true", help="print the keys of all tasks and methods")
    p.add_argument("--rate", default="", help="on emulated hosts with links of this rate, for example 100mbit")
    p.add_argument("--delay", default="0ms", help="one way, with --rate")
    p.add_argument("--update", action="store_true", help="also rewrite the table in BENCHMARKS.md (full runs only)")
    a = p.parse_args()
    if a.update and (a.quick or a.only or a.task or a.seeds or a.rate):
        p.error("--update wants a full run: numbers of different runs do not belong in one table")
    return a


def main() -> int:
    a = arguments()
    if a.list:
        print(*(one.key for one in (*TASKS, *METHODS)), sep="\n")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    place = HOSTS
    if a.rate:
        title = f"4 hosts, {a.rate}, {a.delay} one way"
        place = replace(HOSTS, title=title, rate=a.rate, delay=a.delay)
    if why := launch.no_netlab() if a.rate else "":
        sys.exit(why)
    methods = [method for method in METHODS if method.key in ALWAYS or re.search(a.only, method.key)]
    tasks = [task.shorter(QUICK_STEPS if a.quick else 1.0) for task in TASKS if re.search(a.task, task.key)]
    seeds = a.seeds or (QUICK_SEEDS if a.quick else SEEDS)
    began, before = time.monotonic(), machine.load()
    job = {"seeds": seeds, "tasks": list(map(asdict, tasks)), "methods": list(map(asdict, methods))}
    ranks, failure = launch.run_ranks(place, "benches.convergence.rank", job, TIMEOUT)
    if failure:
        say(f"failed: {failure}")
        return 1
    results = judge(tasks, methods, combine(ranks))
    done = report.Report(
        machine=machine.describe(),
        command=shlex.join(["python", "-m", "benches.convergence", *sys.argv[1:]]),
        date=time.strftime("%Y-%m-%d"),
        place=place.title,
        seeds=seeds,
        load=(before, machine.load()),
        results=results,
    )
    launch.OUT.mkdir(exist_ok=True)
    print(report.tables(results))
    report.save_json(launch.OUT / "convergence.json", done)
    if why := missing():
        say(f"no picture: {why}")
    else:
        chart.draw(launch.OUT / "convergence.png", results, f"Offbeat's algorithms and DDP: {place.title}")
    if a.update:
        put_between(launch.BENCHMARKS, "convergence", report.measured_part(done))
    say(f"{time.monotonic() - began:.0f} s in all")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        say("stopped")
        sys.exit(130)
