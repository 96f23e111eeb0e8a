"""Turns results into Markdown tables, JSON and the measured part of BENCHMARKS.md."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from . import idle as idle_rules
from .cases import NAMES, Result, size_text

if TYPE_CHECKING:
    from pathlib import Path

BEGIN, END = "<!-- compare:begin -->", "<!-- compare:end -->"
NOT_YET = "not yet measured"


@dataclass
class Report:
    machine: dict[str, str]
    command: str
    flags: dict[str, str]  # of OpenMPI, by profile
    repetitions: int
    date: str
    load: tuple[float, float]  # before and after
    results: list[Result] = field(default_factory=list)
    idle: dict[str, dict[str, float]] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)


def time_text(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    for unit, factor in (("µs", 1e6), ("ms", 1e3), ("s", 1.0)):
        value = seconds * factor
        if value < 1000:
            return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"
    return f"{seconds:.0f} s"


def ratio_text(ratio: float | None, goal: str) -> str:
    value = "–" if ratio is None else f"{ratio:.1f}×" if ratio >= 10 else f"{ratio:.2f}×"
    return f"{value} ({goal})" if goal else value


def verdict(missed: list[str] | None) -> str:
    if missed is None:
        return NOT_YET
    return f"**no**: {', '.join(missed)}" if missed else "yes"


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in lines)


def host_table(results: list[Result]) -> str:
    head = ["where", "size", *(NAMES[e] for e in ("ours", "gloo", "mpi", "copy"))]
    head += ["faster than gloo (goal)", "faster than OpenMPI (goal)", "of the limit", "met"]
    rows = []
    for r in results:
        case = r.case
        rows.append(
            [case.title, size_text(case.size)]
            + [time_text(r.median(e)) for e in ("ours", "gloo", "mpi", "copy")]
            + [
                ratio_text(r.faster_than("gloo"), f"≥ {case.over_gloo:g}×" if case.over_gloo else ""),
                ratio_text(r.faster_than("mpi"), f"≥ {case.over_mpi:g}×" if case.over_mpi else ""),
                ratio_text(r.times_limit(), ""),
                verdict(r.missed()),
            ]
        )
    return table(head, rows)


def wire_table(results: list[Result]) -> str:
    head = ["where", "size", "limit", "Offbeat", "gloo", "Offbeat of the limit (goal)", "gloo of the limit", "met"]
    rows = []
    for r in results:
        goal = f"≤ {r.case.of_limit:g}×" + (f", ≥ {r.case.floor:g}×" if r.case.floor else "")
        row = [r.case.title, size_text(r.case.size), time_text(r.limit())]
        row += [time_text(r.median("ours")), time_text(r.median("gloo"))]
        row += [ratio_text(r.times_limit(), goal), ratio_text(r.times_limit("gloo"), ""), verdict(r.missed())]
        rows.append(row)
    return table(head, rows)


def idle_table(idle: dict[str, dict[str, float]]) -> str:
    titles = {"ours": "after `offbeat.init()`", "gloo": "after `init_process_group`", "torch": "only `import torch`"}
    tick = f"{idle_rules.TICK * 1e3:.0f} ms"
    head = ["idle rank, world of 2", f"processor time in {idle_rules.WATCHED:.0f} s (goal: below a tick of {tick})"]
    head += [f"memory beyond torch's (goal: ≤ {idle_rules.MEMORY_GOAL:.0f} MB)", "met"]
    rows = []
    for role, title in titles.items():
        one = idle.get(role)
        if one is None:
            rows.append([title, "–", "–", NOT_YET])
            continue
        size = f"{one['pss']:.1f} MB (Rss {one['rss']:.1f} MB)" if role != "torch" else "–"
        met = verdict(idle_rules.missed(one)) if role == "ours" else ""
        rows.append([title, time_text(one["cpu"]), size, met])
    return table(head, rows)


def tables(report: Report) -> str:
    parts = []
    host = [r for r in report.results if not r.case.place.emulated]
    wire = [r for r in report.results if r.case.place.emulated]
    if host:
        parts.append("One host:\n\n" + host_table(host))
    if wire:
        parts.append("Emulated hosts:\n\n" + wire_table(wire))
    if report.idle:
        parts.append("Doing nothing:\n\n" + idle_table(report.idle))
    return "\n\n".join(parts)


def measured_part(report: Report) -> str:
    machine = table(["machine", ""], [[key, value] for key, value in report.machine.items()])
    about = (
        f"Measured {report.date} by `{report.command}`, medians of {report.repetitions} repetitions; "
        f"load average {report.load[0]:.1f} before and {report.load[1]:.1f} after."
    )
    flags = "".join(f"\n- OpenMPI, {name}: `{words}`" for name, words in report.flags.items())
    skipped = "".join(f"\nSkipped: {reason}." for reason in report.skipped)
    return f"{machine}\n\n{about}\n{flags}\n{skipped}\n\n{tables(report)}"


def update(path: Path, report: Report) -> None:
    text = path.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    path.write_text(f"{before}{BEGIN}\n\n{measured_part(report)}\n\n{END}{after}")


def save_json(path: Path, report: Report) -> None:
    rows = [
        {
            "key": r.case.key,
            "size": r.case.size,
            "inner": r.case.inner,
            "world": r.case.place.world,
            "medians": {engine: r.median(engine) for engine in r.seconds},
            "seconds": r.seconds,
            "limit": r.limit(),
            "missed": r.missed(),
            "wrong": r.wrong,
            "failure": r.failure,
        }
        for r in report.results
    ]
    content = asdict(report) | {"results": rows}
    path.write_text(json.dumps(content, indent=1) + "\n")
