"""Starts ranks in milliseconds: one process imports torch, and forks a child for each rank that is asked for.

The child is a process like any other: its own session, environment, directory and output, and a script that runs as
`__main__`. Only the import is already behind it. It forks before `offbeat.init`, so nothing of the runtime is
inherited. A script that raises ends as the interpreter ends; after one that does not only exit handlers run.
Run as a script, this file is the nursery; imported, it is the way to reach it.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve()


class Nursery:
    """The test's end of the connection. Requests and replies are lines of JSON."""

    def __init__(self, env: dict[str, str]) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", HERE, str(theirs.fileno())],
                env=env,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._lines = b""
        self._codes: dict[int, int] = {}

    def start(self, command: list[str], *, cwd: Path, env: dict[str, str], out: Path, err: Path) -> Child:
        """Runs the script `command[0]` with the rest as its arguments."""
        request = {"command": command, "cwd": str(cwd), "env": env, "out": str(out), "err": str(err)}
        self._socket.sendall(json.dumps(request).encode() + b"\n")
        while (reply := self._read(None)) and "started" not in reply:
            pass
        assert reply is not None
        # the number may be that of one that ended long ago
        self._codes.pop(reply["started"], None)
        return Child(self, reply["started"])

    def code(self, pid: int, timeout: float | None) -> int | None:
        """The exit code of a child, or None if it still runs after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while pid not in self._codes:
            if self._read(None if deadline is None else max(0.0, deadline - time.monotonic())) is None:
                return None
        return self._codes[pid]

    def close(self) -> None:
        self._socket.close()
        self._process.wait(10)

    def _read(self, timeout: float | None) -> dict[str, int] | None:
        while b"\n" not in self._lines:
            if not select.select([self._socket], [], [], timeout)[0]:
                return None
            if not (data := self._socket.recv(1 << 16)):
                raise RuntimeError("the nursery has ended")
            self._lines += data
        line, self._lines = self._lines.split(b"\n", 1)
        reply = json.loads(line)
        if "ended" in reply:
            self._codes[reply["ended"]] = reply["code"]
        return reply


class Child:
    """A rank, with as much of `subprocess.Popen` as jobs use."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self._nursery = nursery
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._nursery.code(self.pid, 0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self.returncode = self._nursery.code(self.pid, timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return self.returncode


def serve(control: socket.socket) -> list[str]:
    """Forks until the tests hang up; gives the command to run in a child, and never returns in the nursery itself."""
    children: dict[int, int] = {}  # the process behind each pidfd

    def tell(**reply: int) -> None:
        control.sendall(json.dumps(reply).encode() + b"\n")

    requests = control.makefile("rb", buffering=0)
    while True:
        ready, _, _ = select.select([control, *children], [], [])
        for pidfd in [fd for fd in ready if fd in children]:
            pid = children.pop(pidfd)
            os.close(pidfd)
            tell(ended=pid, code=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        if control not in ready:
            continue
        line = requests.readline()
        if not line:
            os._exit(0)
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            requests.close()
            control.close()
            for pidfd in children:
                os.close(pidfd)
            settle(request)
            return request["command"]
        children[os.pidfd_open(pid)] = pid
        tell(started=pid)


def settle(request: dict) -> None:
    """Makes a forked child look as if it had been started anew."""
    os.setsid()
    os.chdir(request["cwd"])
    for path, target in ((request["out"], 1), (request["err"], 2)):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(fd, target)
        os.close(fd)
    os.environ.clear()
    os.environ.update(request["env"])


def main() -> None:
    import atexit
    import faulthandler
    import gc
    import runpy
    import threading

    control = socket.socket(fileno=int(sys.argv[1]))
    faulthandler.enable()
    # whatever scripts import; the package promises that nothing happens at import
    import numpy  # noqa: F401, ICN001
    import torch._dynamo  # the first optimizer imports it, and it takes a second
    import torch.distributed
    import torch.utils.data
    import torch.utils.dlpack  # noqa: F401

    import offbeat  # noqa: F401

    gc.freeze()
    # at the end of a rank, what is frozen would count as leaked by those modules that look
    atexit.register(gc.unfreeze)
    sys.argv = serve(control)
    sys.path[0] = str(Path(sys.argv[0]).parent)
    sys.path.insert(1, str(HERE.parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
    # What an interpreter does at its end, but for taking torch apart: that touches memory which is shared with the
    # nursery until then, and takes longer than most tests.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
