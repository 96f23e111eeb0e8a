"""Starts the ranks of a job and puts their times together; whatever happens, nothing it started stays behind."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .cases import KB, MB, Case, Place, Result

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "out"
BENCHMARKS = ROOT / "BENCHMARKS.md"
NETLAB = ROOT / "benches" / "netlab" / "netlab"
JOB_TIMEOUT = 900.0
# No one configuration of OpenMPI is the fastest at every size, so each case gets the one that was, in a sweep of seven
# (BENCHMARKS.md tells of it). All yield while they wait and none binds, which would bind the others' threads as well.
MPI_COMMON = {"pml": "ob1", "btl": "self,sm", "mpi_yield_when_idle": "1"}
MPI_PROFILES = {
    "small": {"coll_sm_priority": "100"},  # collectives in a shared segment
    "middle": {"coll": "^han", "smsc": "^cma"},  # copies in two steps, through shared memory
    "large": {"smsc": "cma"},  # one copy, by the kernel
}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def mpirun() -> str | None:
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() else shutil.which("mpirun")


def mpi_profile(case: Case) -> str:
    if case.place.emulated:
        return ""
    if case.size > 16 * MB:
        return "large"
    return "small" if case.place.world == 2 and case.size <= 64 * KB else "middle"


def mpi_flags(profile: str) -> list[str]:
    words = ["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]
    if os.geteuid() == 0:
        words.append("--allow-run-as-root")
    for key, value in (MPI_COMMON | MPI_PROFILES[profile]).items():
        words += ["--mca", key, value]
    return words


def no_netlab() -> str:
    """Why emulated hosts cannot be had here; empty when they can."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "netlab needs root"
    if not Path("/dev/net/tun").exists():
        return "no /dev/net/tun"
    return "" if shutil.which("ip") else "no `ip` command (iproute2)"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment() -> dict[str, str]:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    env = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(p for p in paths if p))
    # emulated hosts have no names, and torch's store warns about each
    env.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
        env.pop(name, None)
    return env


@contextlib.contextmanager
def processes(starts: list[tuple[list[str], dict[str, str]]]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Runs commands, each in a session of its own, and ends what is left of them."""
    running: list[subprocess.Popen[bytes]] = []
    try:
        for words, env in starts:
            running.append(subprocess.Popen(words, cwd=ROOT, env=env, start_new_session=True))
        yield running
    finally:
        # mpirun and netlab end their ranks on SIGTERM; ranks of ours without them just end
        stops = (signal.SIGINT, signal.SIGTERM)
        previous = [signal.signal(stop, signal.SIG_IGN) for stop in stops]
        for process in running:
            if process.poll() is None:
                process.terminate()
        for process in running:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for stop, handler in zip(stops, previous, strict=True):
            signal.signal(stop, handler)


def local_starts(world: int, command: list[str]) -> list[tuple[list[str], dict[str, str]]]:
    """Plain processes with the environment that torchrun would give."""
    port = str(free_port())
    starts = []
    for rank in range(world):
        env = environment()
        env.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
        env.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        starts.append((command, env))
    return starts


def rank_starts(place: Place, command: list[str]) -> list[tuple[list[str], dict[str, str]]]:
    """One process for each rank, on this host or on emulated ones. Hosts without a rate are hosts by name only."""
    if place.emulated:
        words = [str(NETLAB), "--all", "--hosts", str(place.hosts), "--ranks", str(place.ranks_per_host)]
        words += ["--rate", place.rate, "--delay", place.delay, "--timeout", str(JOB_TIMEOUT)]
        return [([sys.executable, *words, "--", *command], environment())]
    starts = local_starts(place.world, command)
    if place.hosts > 1:
        for rank, (_, env) in enumerate(starts):
            env["OFFBEAT_HOST"] = f"host{rank // place.ranks_per_host}"
    return starts


def starts_for(case: Case, engines: list[str], command: list[str]) -> list[tuple[list[str], dict[str, str]]]:
    if "mpi" in engines and not case.place.emulated:
        env = environment() | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        words = [mpirun() or "mpirun", *mpi_flags(mpi_profile(case)), "-n", str(case.place.world)]
        return [([*words, *command], env)]
    return rank_starts(case.place, command)


def wait_for(running: list[subprocess.Popen[bytes]], timeout: float) -> str:
    """Why the job did not end well; empty when it did. One rank's failure ends the wait: the rest would hang."""
    until = time.monotonic() + timeout
    while True:
        codes = [process.poll() for process in running]
        bad = [code for code in codes if code]
        if bad:
            return f"a process ended with code {bad[0]}"
        if all(code == 0 for code in codes):
            return ""
        if time.monotonic() > until:
            return f"not done after {timeout:.0f} s"
        time.sleep(0.05)


def run(place: Place, cases: list[Case], engines: list[str], job: dict[str, Any]) -> list[Result]:
    with tempfile.TemporaryDirectory(prefix="offbeat-compare-") as name:
        directory = Path(name)
        (directory / "job.json").write_text(json.dumps(job | {"engines": engines, "directory": name}))
        command = [sys.executable, "-m", "benches.compare.rank", str(directory / "job.json")]
        with processes(starts_for(cases[0], engines, command)) as running:
            failure = wait_for(running, JOB_TIMEOUT)
        if failure:
            say(f"{place.title}: {failure}")
        return collect(directory, place.world, cases, failure)


def run_ranks(place: Place, module: str, job: dict[str, Any], timeout: float) -> tuple[list[Any], str]:
    """Runs `python -m module job.json` as every rank of a place; gives what each left in rank<R>.json, or why not."""
    with tempfile.TemporaryDirectory(prefix="offbeat-bench-") as name:
        path = Path(name, "job.json")
        path.write_text(json.dumps(job | {"directory": name}))
        with processes(rank_starts(place, [sys.executable, "-m", module, str(path)])) as running:
            failure = wait_for(running, timeout)
        written = [Path(name, f"rank{rank}.json") for rank in range(place.world)]
        if not all(one.exists() for one in written):
            return [], failure or "no result"
        return [json.loads(one.read_text()) for one in written], failure


def collect(directory: Path, world: int, cases: list[Case], failure: str) -> list[Result]:
    """Of every repetition the slowest rank."""
    ranks = []
    for rank in range(world):
        path = directory / f"rank{rank}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        ranks.append({line["key"]: line for line in map(json.loads, lines)})
    results = []
    for case in cases:
        if not all(case.key in lines for lines in ranks):
            results.append(Result(case, failure=failure or "no result"))
            continue
        mine = [lines[case.key] for lines in ranks]
        seconds = {
            engine: [max(times) for times in zip(*(line["seconds"][engine] for line in mine), strict=True)]
            for engine in mine[0]["seconds"]
        }
        results.append(Result(case, seconds, sorted({name for line in mine for name in line["wrong"]})))
    return results
