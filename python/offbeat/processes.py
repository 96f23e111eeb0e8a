"""Whether the process of another rank has ended, where it can be seen: on the same machine."""

import json
import os
import socket
from pathlib import Path


def mine() -> bytes:
    """What others of this machine need to look at this process."""
    about = {"host": os.environ.get("OFFBEAT_HOST") or socket.gethostname(), "pid": os.getpid()}
    return json.dumps(about | {"machine": _machine(), "began": _began(os.getpid())}).encode()


def name(rank: int, about: bytes) -> tuple[str, str]:
    """How errors call a rank, and its host."""
    fields = json.loads(about)
    return f"rank {rank} (host {fields['host']}, pid {fields['pid']})", fields["host"]


def has_ended(about: bytes) -> bool:
    """Never true of a process that cannot be seen from here."""
    fields = json.loads(about)
    seen = fields["machine"] is not None and fields["machine"] == _machine()
    # a number may be used again; the moment at which its process began may not
    return seen and _began(fields["pid"]) != fields["began"]


def _machine() -> str | None:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return None


def _began(pid: int) -> str | None:
    """In ticks since the machine started; None if there is no such process, or only what its parent has not read."""
    try:
        # after the name, which may hold anything
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
