"""`offbeat doctor`: what this machine offers, how ranks reach each other, what is missing and what to try."""

import fcntl
import json
import os
import platform
import resource
import shutil
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from . import _core, runtime, settings
from .errors import OffbeatError
from .objects import all_gather_object

Row = tuple[str, str]

ACROSS = (
    "to see links between ranks, run it under torchrun, on each host:\n"
    "  torchrun --nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-endpoint=HOST:29400 -m offbeat doctor"
)


@dataclass
class Report:
    """What was found; `missing` holds a sentence with what to try for each thing that is not as it should be."""

    versions: list[Row] = field(default_factory=list)
    machine: list[Row] = field(default_factory=list)
    interfaces: list[Row] = field(default_factory=list)
    environment: list[Row] = field(default_factory=list)
    ranks: list[dict[str, object]] = field(default_factory=list)
    links: list[dict[str, object]] = field(default_factory=list)
    error: str | None = None
    missing: list[str] = field(default_factory=list)


def run(*, as_json: bool) -> int:
    """Looks at everything, prints on rank 0, and gives the exit code: 1 if something is missing."""
    report = Report()
    _versions(report)
    _machine(report)
    _interfaces(report)
    _environment(report)
    speaks = True
    if os.environ.get("RANK"):
        speaks = _world(report)
    if report.error is not None and os.environ.get("RANK") != "0":
        # One table is enough: rank 0 prints it, the others say only what happened to them.
        print(report.missing[-1], file=sys.stderr, flush=True)
        return 1
    if speaks:
        print(json.dumps(asdict(report), indent=2) if as_json else _text(report), flush=True)
        return 1 if report.missing else 0
    return 0


def _versions(report: Report) -> None:
    libc = " ".join(platform.libc_ver()).strip() or "unknown"
    report.versions += [
        ("offbeat", _core.__version__),
        ("torch", str(torch.__version__)),
        ("python", f"{platform.python_version()} ({platform.machine()})"),
        ("kernel", f"{platform.system()} {platform.release()}"),
        ("libc", libc),
    ]
    # Only told, not asked for: tensors on the CPU need none of it.
    report.versions.append(("GPU", f"{_core.cuda_report()} (not needed on the CPU)"))


def _machine(report: Report) -> None:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    report.machine += [("cpus", f"{usable} usable of {os.cpu_count()}"), ("memory", _memory())]
    if Path("/dev/shm").is_dir():
        report.machine.append(
            ("/dev/shm", f"{_size(shutil.disk_usage('/dev/shm').total)} (not used, any size will do)")
        )
    works, why = _memfd()
    report.machine.append(("memfd", "works" if works else f"does not work: {why}"))
    if not works and platform.system() == "Linux":
        report.missing.append(
            f"shared memory: sealed memfd does not work here ({why}), so ranks of one host will use TCP; allow "
            "memfd_create in the container's seccomp profile"
        )
    for name, number in (("locked memory", resource.RLIMIT_MEMLOCK), ("open files", resource.RLIMIT_NOFILE)):
        soft, hard = resource.getrlimit(number)
        unit = _size if name == "locked memory" else str
        shown = ["unlimited" if limit == resource.RLIM_INFINITY else unit(limit) for limit in (soft, hard)]
        report.machine.append((name, f"{shown[0]} (at most {shown[1]})"))
        if name == "open files" and soft != resource.RLIM_INFINITY and soft < 1024:
            report.missing.append(f"open files: the limit is {soft}, and each link takes a few; try: `ulimit -n 4096`")


def _interfaces(report: Report) -> None:
    try:
        spec = settings.interface(None)
        found = _core.interfaces(spec)
    except OffbeatError as error:
        report.missing.append(f"interfaces: {error}")
        return
    for name, address, chosen in found:
        mark = "" if spec is None else " · chosen" if chosen else " · left out"
        report.interfaces.append((name, address + mark))
    if spec is not None and not any(chosen for _, _, chosen in found):
        names = ", ".join(sorted({name for name, _, _ in found}))
        report.missing.append(f"interfaces: {spec!r} chooses none of {names}; correct or unset {_variable()}")


def _environment(report: Report) -> None:
    ours = sorted(name for name in os.environ if name.startswith(("OFFBEAT_", "TORCHELASTIC_")))
    theirs = (
        "NCCL_SOCKET_IFNAME",
        "MASTER_ADDR",
        "MASTER_PORT",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
    )
    for name in (*ours, *theirs, "OMP_NUM_THREADS"):
        if name in os.environ:
            report.environment.append((name, "(set, not shown)" if name == "OFFBEAT_TOKEN" else os.environ[name]))


def _world(report: Report) -> bool:
    """Joins the world and collects every rank's links. Says whether this rank is the one that prints."""
    try:
        runtime.init()
        core = runtime.current()
        mine = {"rank": core.rank, "host": core.host, "name": socket.gethostname(), "pid": os.getpid()}
        everyone = all_gather_object((mine, core.links(), report.missing))
        runtime.shutdown()
    except OffbeatError as error:
        report.error = f"{type(error).__name__}: {error}"
        report.missing.append(f"the world: rank {os.environ['RANK']} could not join it: {report.error}")
        return True
    if mine["rank"] != 0:
        return False
    hosts = {row["rank"]: row["host"] for row, _, _ in everyone}
    for row, links, missing in everyone:
        report.ranks.append(dict(row))
        # Rank 0's own are in the report already; the same trouble on one host is told once.
        report.missing += [
            told for text in missing if row["rank"] != 0 and (told := f"{row['name']}: {text}") not in report.missing
        ]
        for link in links:
            if link["kind"] == "self":
                continue
            fell_back = link["kind"] != "shared memory" and hosts[row["rank"]] == hosts[link["rank"]]
            advice = ""
            if fell_back:
                advice = "shared memory is faster; run both ranks as one user, in one container and network namespace"
                report.missing.append(f"link {row['rank']} → {link['rank']}: {link['kind']} ({link['why']}); {advice}")
            report.links.append({"from": row["rank"], "to": link["rank"], **_told(link), "try": advice})
    return True


def _told(link: "_core.Link") -> dict[str, object]:
    return {key: link[key] for key in ("kind", "why", "local", "remote", "streams")}


def _text(report: Report) -> str:
    parts = []
    for title in ("versions", "machine", "interfaces", "environment"):
        if rows := getattr(report, title):
            parts.append(f"{title}\n{_table(rows)}")
    if report.ranks:
        ranks = [(str(r["rank"]), f"host {r['host']}", str(r["name"]), f"pid {r['pid']}") for r in report.ranks]
        parts.append(f"ranks\n{_table(ranks)}")
        links = [
            (
                f"{link['from']} → {link['to']}",
                str(link["kind"]),
                f"{link['local']} → {link['remote']} ×{link['streams']}" if link["remote"] else "",
                str(link["why"]),
                f"try: {link['try']}" if link["try"] else "",
            )
            for link in report.links
        ]
        if links:
            parts.append(f"links\n{_table(links)}")
    elif report.error is None:
        parts.append(ACROSS)
    if report.missing:
        parts.append("what is missing and what to try\n" + "\n".join(f"  - {text}" for text in report.missing))
    else:
        parts.append("nothing is missing")
    return "\n\n".join(parts)


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(f"  {line}".rstrip() for line in lines)


def _memfd() -> tuple[bool, str]:
    if not hasattr(os, "memfd_create"):
        return False, f"{platform.system()} has none"
    try:
        descriptor = os.memfd_create("offbeat-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, 4096)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        finally:
            os.close(descriptor)
    except OSError as error:
        return False, str(error)
    return True, ""


def _memory() -> str:
    total = _size(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        limit = "max"
    return total if limit == "max" else f"{total}, this container may use {_size(int(limit))}"


def _variable() -> str:
    return next((name for name in settings.INTERFACE_VARIABLES if os.environ.get(name)), "interface=")


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TB"
