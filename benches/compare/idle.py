"""What a rank costs that does nothing: processor time, and memory beyond torch's.

Two processes that only import torch are compared with two that also start an engine in a world of two. They are
processes of their own, so that nothing measured before is counted; two in both cases, so that they share as much.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

from . import launch

WATCHED = 6.0  # seconds
TICK = 0.010  # the kernel's own resolution in /proc/<pid>/stat: less than this is not measurable there
MEMORY_GOAL = 40.0  # MB
ROUNDS = 3


def memory() -> dict[str, float]:
    """In MB. Pss counts a page that two processes share as half a page for each, Rss as one for each."""
    fields = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return {key.lower(): int(fields[key].split()[0]) / 1024 for key in ("Rss", "Pss")}


def processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)  # of all threads
    return usage.ru_utime + usage.ru_stime


def rank_main(role: str, directory: Path) -> None:
    """The watched process. It looks at itself, once all of its world are as far."""
    import torch.distributed as dist

    from .rank import die_with_parent

    die_with_parent()
    rank = os.environ["RANK"]
    if role == "gloo":
        dist.init_process_group("gloo")
    elif role == "ours":
        import offbeat

        offbeat.init()
    (directory / f"ready{rank}").touch()
    while not all((directory / f"ready{other}").exists() for other in range(2)):
        time.sleep(0.05)
    time.sleep(1.0)
    before = processor_seconds()
    time.sleep(WATCHED)
    spent = processor_seconds() - before
    (directory / f"rank{rank}.json").write_text(json.dumps(memory() | {"cpu": spent}))
    (directory / f"done{rank}").touch()
    while not all((directory / f"done{other}").exists() for other in range(2)):
        time.sleep(0.05)
    if role == "gloo":
        dist.destroy_process_group()
    elif role == "ours":
        offbeat.shutdown()


def one_round(role: str) -> list[dict[str, float]]:
    with tempfile.TemporaryDirectory(prefix="offbeat-idle-") as name:
        command = [sys.executable, "-m", "benches.compare.idle", role, name]
        with launch.processes(launch.local_starts(2, command)) as running:
            failure = launch.wait_for(running, 120)
        if failure:
            raise RuntimeError(f"idle {role}: {failure}")
        return [json.loads(path.read_text()) for path in sorted(Path(name).glob("rank*.json"))]


def measure(engines: list[str], rounds: int) -> dict[str, dict[str, float]]:
    """For each engine: seconds of processor time, and MB beyond a process that only imported torch."""
    roles = ["torch", *(name for name in ("gloo", "ours") if name in engines)]
    seen: dict[str, list[dict[str, float]]] = {role: [] for role in roles}
    for _ in range(rounds):
        for role in roles:
            seen[role] += one_round(role)
    medians = {
        role: {key: statistics.median(one[key] for one in values) for key in ("rss", "pss")}
        for role, values in seen.items()
    }
    return {
        role: {
            "cpu": max(one["cpu"] for one in values),
            "watched": WATCHED,
            "rss": medians[role]["rss"] - medians["torch"]["rss"],
            "pss": medians[role]["pss"] - medians["torch"]["pss"],
        }
        for role, values in seen.items()
    }


def missed(idle: dict[str, float]) -> list[str]:
    reasons = ["processor"] if idle["cpu"] >= TICK else []
    return reasons + (["memory"] if max(idle["rss"], idle["pss"]) > MEMORY_GOAL else [])


if __name__ == "__main__":
    rank_main(sys.argv[1], Path(sys.argv[2]))
