r"""Fixtures that run a script on several ranks: `ranks`, `torchrun` and `netlab`.

All three take a script (a path, its source, or a function without arguments that is written out as a script) and give
back a `Job` with the output of every rank::

    def test_sum(ranks):
        def script():
            import offbeat, torch
            offbeat.init()
            tensor = torch.ones(3)
            offbeat.all_reduce(tensor)
            print(tensor.tolist())

        job = ranks(script, 2)
        assert [rank.out for rank in job.ranks] == ["[2.0, 2.0, 2.0]\n"] * 2

A job that fails, leaves a process behind, or is not over at its timeout, fails the test and shows what every rank
wrote; `check=False` leaves the judgement to the test. `ranks.start(…)` does not wait, for tests that send signals.
Nothing outlives its test.

Scripts may import `support`, which stands beside this file. Ranks of `ranks` come from the `nursery`, where torch is
imported already; `fresh=True` starts interpreters instead.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from nursery import Child, Nursery

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    Script = Path | str | Callable[[], object]

# Where tests run in the background Ctrl-C is ignored, and every process that they start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
NETLAB = ROOT / "benches" / "netlab" / "netlab"
# Every process of a job inherits this variable: that is how we find those which left its sessions.
MARK = "PYTEST_JOB"
# What a rank must not inherit from the shell that runs the tests.
FOREIGN = ("OFFBEAT_", "NCCL_", "GLOO_", "TORCHELASTIC_", "PET_", "MASTER_", "RANK", "LOCAL_", "WORLD_SIZE", "GROUP_")
# Scripts find `support` on the path; faulthandler lets a rank that hangs show its stacks before it is killed. Torch's
# bfloat16 dies of SIGILL in virtual machines that show a processor's AMX and do not let anybody use it.
OURS = {
    "OMP_NUM_THREADS": "1",
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
    "PYTHONFAULTHANDLER": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONPATH": str(HERE),
}


@dataclass(frozen=True)
class Rank:
    """What one rank left behind. The code is None where only the launcher knows it, negative for a signal."""

    rank: int
    code: int | None
    out: str
    err: str


class Job:
    """Processes that belong together, in sessions of their own, with their output in files."""

    def __init__(self, directory: Path, world: int, env: Mapping[str, str] | None) -> None:
        self.directory = directory
        self.world = world
        self.mark = uuid.uuid4().hex
        self.processes: list[subprocess.Popen[bytes] | Child] = []
        self.env = clean_environment() | {MARK: self.mark} | dict(env or {})

    def spawn(self, command: Sequence[str | Path], name: str, **env: str) -> None:
        with (self.directory / f"{name}.out").open("wb") as out, (self.directory / f"{name}.err").open("wb") as err:
            self.processes.append(
                subprocess.Popen(
                    command,
                    cwd=self.directory,
                    env=self.env | env,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                )
            )

    def fork(self, nursery: Nursery, command: list[str], name: str, **env: str) -> None:
        out, err = self.directory / f"{name}.out", self.directory / f"{name}.err"
        self.processes.append(nursery.start(command, cwd=self.directory, env=self.env | env, out=out, err=err))

    def wait(self, timeout: float = 60, *, check: bool = True) -> Job:
        """Waits until all processes have ended; fails the test with everything they wrote if that takes too long."""
        deadline = time.monotonic() + timeout
        try:
            for process in self.processes:
                process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill()
            pytest.fail(f"the job was not over after {timeout} s\n{self.report()}", pytrace=False)
        if check and self.code:
            pytest.fail(f"the job failed with code {self.code}\n{self.report()}", pytrace=False)
        if check and (left := self.leftovers()):
            names = ", ".join(f"{pid} ({read(Path(f'/proc/{pid}/comm')).strip()})" for pid in left)
            pytest.fail(f"processes outlived the job: {names}\n{self.report()}", pytrace=False)
        return self

    def leftovers(self) -> list[int]:
        """Processes that outlive the job; helpers of Python itself get a moment to see that it is over."""
        deadline = time.monotonic() + 2
        while (left := self.alive()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return left

    @property
    def code(self) -> int:
        """The first exit code that is not 0, or 0."""
        return next((process.returncode for process in self.processes if process.returncode), 0)

    @property
    def ranks(self) -> list[Rank]:
        return [Rank(rank, self._code(rank), *self._output(rank)) for rank in range(self.world)]

    def _code(self, rank: int) -> int | None:
        return self.processes[rank].returncode

    def _output(self, rank: int) -> tuple[str, str]:
        return read(self.directory / f"{rank}.out"), read(self.directory / f"{rank}.err")

    def report(self) -> str:
        parts = []
        for rank in self.ranks:
            parts.append(f"--- rank {rank.rank}, code {rank.code}")
            parts += [f"[{name}] {line}" for name in ("out", "err") for line in getattr(rank, name).splitlines()]
        return "\n".join(parts)

    def alive(self) -> list[int]:
        """The job's processes that still run, with those that ranks or launchers have started."""
        found = {process.pid for process in self.processes if process.poll() is None}
        sessions = {process.pid for process in self.processes}
        for process in Path("/proc").glob("[0-9]*"):
            try:
                # after the name, which may hold anything: state, parent, group, session
                state, _, _, session = (process / "stat").read_text().rpartition(")")[2].split()[:4]
                ours = int(session) in sessions or self.mark.encode() in (process / "environ").read_bytes()
                if ours and state != "Z":
                    found.add(int(process.name))
            except OSError:  # it has ended, or is not ours
                continue
        return sorted(found)

    def kill(self) -> None:
        """Ends every process of the job: first so that it shows its stacks, then so that it cannot refuse."""
        self._send(signal.SIGABRT, set(), 1.0)
        self._send(signal.SIGKILL, set(), 5.0)
        for process in self.processes:
            process.wait(5)

    def _send(self, number: signal.Signals, spared: set[int], grace: float) -> None:
        for pid in set(self.alive()) - spared:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + grace
        while set(self.alive()) - spared and time.monotonic() < deadline:
            time.sleep(0.02)


class TorchrunJob(Job):
    """One agent, which keeps its workers' output and exit codes to itself."""

    def _code(self, rank: int) -> int | None:
        return None

    def _output(self, rank: int) -> tuple[str, str]:
        # one directory for each attempt; the last one counts
        logs = sorted((self.directory / "logs").glob(f"*/attempt_*/{rank}"))
        return (read(logs[-1] / "stdout.log"), read(logs[-1] / "stderr.log")) if logs else ("", "")

    def report(self) -> str:
        return f"{super().report()}\n--- agent, code {self.code}\n{read(self.directory / 'agent.err')}"


class NetlabJob(Job):
    """One switch; a shell around each rank keeps its output and exit code. A killed rank has -9."""

    RANK = '"$@" > $RANK.out 2> $RANK.err; code=$?; echo $code > $RANK.code; exit $code'

    def _code(self, rank: int) -> int | None:
        return int(read(self.directory / f"{rank}.code") or -9)

    def kill(self) -> None:
        """The ranks first: then the switch ends by itself and removes its namespaces. SIGTERM would cut that short."""
        (switch,) = self.processes
        self._send(signal.SIGABRT, {switch.pid}, 1.0)
        self._send(signal.SIGKILL, {switch.pid}, 1.0)
        with contextlib.suppress(subprocess.TimeoutExpired):
            switch.wait(10)
        super().kill()

    def report(self) -> str:
        return f"{super().report()}\n--- netlab, code {self.code}\n{read(self.directory / 'netlab.err')}"


def clean_environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN)} | OURS


def read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def write(script: str | Callable[[], object], path: Path) -> Path:
    if isinstance(script, str):
        path.write_text(textwrap.dedent(script))
    else:  # guarded, because a DataLoader that spawns imports the script again
        call = f'\nif __name__ == "__main__":\n    {script.__name__}()\n'
        path.write_text(textwrap.dedent(inspect.getsource(script)) + call)
    return path


def free_port() -> int:
    """A port below the ephemeral range, so that no connection takes it before the store does."""
    while True:
        port = random.randrange(20000, 30000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


class Launcher:
    """Starts jobs in directories under the test's own, and ends with the test whatever is left of them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.jobs: list[Job] = []

    def prepare(
        self, kind: type[Job], script: Script, world: int, env: Mapping[str, str] | None, args: Sequence[object]
    ) -> tuple[Job, list[str]]:
        directory = Path(tempfile.mkdtemp(prefix="job", dir=self.directory))
        job = kind(directory, world, env)
        self.jobs.append(job)
        if not isinstance(script, Path):
            script = write(script, directory / "script.py")
        return job, [str(script), *map(str, args)]

    def close(self) -> None:
        for job in self.jobs:
            job.kill()


class Ranks(Launcher):
    """One process for each rank, as a plain launcher would: rank 0 hosts the store."""

    def __init__(self, directory: Path, nursery: Callable[[], Nursery]) -> None:
        super().__init__(directory)
        self.nursery = nursery

    def start(
        self,
        script: Script,
        nproc: int,
        *,
        env: Mapping[str, str] | None = None,
        per_rank: Callable[[int], Mapping[str, str]] = lambda rank: {},
        args: Sequence[object] = (),
        fresh: bool = sys.platform != "linux",
    ) -> Job:
        job, command = self.prepare(Job, script, nproc, env, args)
        world = {"WORLD_SIZE": str(nproc), "LOCAL_WORLD_SIZE": str(nproc)}
        world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        for rank in range(nproc):
            mine = {"RANK": str(rank), "LOCAL_RANK": str(rank), **per_rank(rank)}
            variables = {name: value for name, value in (world | mine).items() if value}
            if fresh:
                job.spawn([sys.executable, *command], str(rank), **variables)
            else:
                job.fork(self.nursery(), command, str(rank), **variables)
        return job

    def __call__(self, script: Script, nproc: int, *, timeout: float = 60, check: bool = True, **options) -> Job:
        return self.start(script, nproc, **options).wait(timeout, check=check)


class Torchrun(Launcher):
    """Torch's own launcher: the agent hosts the store."""

    def start(
        self,
        script: Script,
        nproc: int,
        *,
        env: Mapping[str, str] | None = None,
        args: Sequence[object] = (),
        max_restarts: int = 0,
        patience: float = 0.1,
        python: Path | str = sys.executable,
    ) -> Job:
        """`patience` is how long the agent may take to end the others when one has ended."""
        job, command = self.prepare(TorchrunJob, script, nproc, env, args)
        options = f"--nproc-per-node {nproc} --max-restarts {max_restarts} --redirects 3 --log-dir logs"
        options += f" --monitor-interval {patience}"
        rendezvous = "--rdzv-backend c10d --rdzv-endpoint localhost:0 --local-addr localhost"
        launch = [str(python), "-m", "torch.distributed.run", *options.split(), *rendezvous.split()]
        job.spawn([*launch, *command], "agent")
        return job

    def __call__(self, script: Script, nproc: int, *, timeout: float = 90, check: bool = True, **options) -> Job:
        return self.start(script, nproc, **options).wait(timeout, check=check)


class Netlab(Launcher):
    """Hosts as network namespaces, joined by links of a given rate and delay. Rank 0 hosts the store."""

    def start(
        self,
        script: Script,
        *,
        hosts: int = 2,
        ranks: int = 1,
        rate: str = "1gbit",
        delay: str = "0ms",
        options: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        args: Sequence[object] = (),
    ) -> Job:
        """`ranks` are those of each host; `options` are further ones of netlab, such as `["--cut", "5s:1"]`."""
        job, command = self.prepare(NetlabJob, script, hosts * ranks, env, args)
        network = f"--hosts {hosts} --ranks {ranks} --rate {rate} --delay {delay}".split()
        shell = ["sh", "-c", NetlabJob.RANK, "sh"]
        job.spawn([sys.executable, NETLAB, *network, *options, "--", *shell, sys.executable, *command], "netlab")
        return job

    def __call__(self, script: Script, *, timeout: float = 90, check: bool = True, **options) -> Job:
        return self.start(script, **options).wait(timeout, check=check)


def why_no_netlab() -> str | None:
    if os.geteuid() != 0:
        return "netlab needs root"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "netlab needs /dev/net/tun"
    if not shutil.which("ip"):
        return "netlab needs the command ip (iproute2)"
    return None


@pytest.fixture(scope="session")
def nursery() -> Iterator[Callable[[], Nursery]]:
    """The one nursery of all tests, opened by the first that needs it."""
    opened: list[Nursery] = []

    def open_once() -> Nursery:
        if not opened:
            opened.append(Nursery(clean_environment()))
        return opened[0]

    yield open_once
    for each in opened:
        each.close()


@pytest.fixture
def ranks(tmp_path: Path, nursery: Callable[[], Nursery]) -> Iterator[Ranks]:
    launcher = Ranks(tmp_path, nursery)
    yield launcher
    launcher.close()


@pytest.fixture
def torchrun(tmp_path: Path) -> Iterator[Torchrun]:
    launcher = Torchrun(tmp_path)
    yield launcher
    launcher.close()


@pytest.fixture
def netlab(tmp_path: Path) -> Iterator[Netlab]:
    if reason := why_no_netlab():
        pytest.skip(reason)
    launcher = Netlab(tmp_path)
    yield launcher
    launcher.close()


@pytest.fixture(scope="session")
def doubles() -> Path:
    """The folder with doubles of libcuda and libnccl."""
    from gpu import building

    if building.missing() is not None:
        pytest.skip(str(building.missing()))
    return building.build()


@pytest.fixture
def train(ranks: Ranks, doubles: Path) -> Callable[..., Job]:
    """Runs a script of ranks on the doubles: their hosts, arguments, and variables of the environment."""

    def run(script: Script, hosts: str, *args: str, **env: object) -> Job:
        env = {"DOUBLES": str(doubles), **{name: str(value) for name, value in env.items()}}
        options = {key: env.pop(key) for key in ("check", "timeout") if key in env}
        return ranks(
            script,
            len(hosts),
            env=env,
            args=args,
            per_rank=lambda rank: {"OFFBEAT_HOST": hosts[rank]},
            timeout=float(options.get("timeout", 100)),
            check=options.get("check") != "False",
        )

    return run
