"""Turns results into a Markdown table, JSON and the measured part of BENCHMARKS.md."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from ..compare.report import machine_table, table, time_text, verdict
from .methods import DEVIATIONS, FEW_SEEDS, Result

if TYPE_CHECKING:
    from pathlib import Path


@dataclass
class Report:
    machine: dict[str, str]
    command: str
    date: str
    place: str
    seeds: int
    load: tuple[float, float]  # before and after
    results: list[Result] = field(default_factory=list)


def row(result: Result) -> list[str]:
    method, first = result.method, result.runs[0]
    loss = f"{result.mean:.4f}" + (f" ± {result.deviation:.4f}" if len(result.runs) > 1 else "")
    cells = [f"`{method.title}`" if method.algorithm else method.title, method.optimizer, method.rule, loss]
    time = time_text(result.seconds)
    if result.task.seconds:
        fewest, most = min(min(run.steps) for run in result.runs), max(max(run.steps) for run in result.runs)
        time += f", {fewest} steps" if fewest == most else f", {fewest} to {most} steps"
    if not method.algorithm:
        return [*cells, "", "", time, ""]
    worse = "–" if result.difference is None else f"{100 * result.difference:+.1f} %"
    if result.difference is not None and result.task.is_judged:
        worse += f" (≤ {100 * result.limit:.1f} %)"
    share = "–" if result.share is None else f"{result.share:.3f}"
    if method.share is not None and result.task.is_judged:
        share += f" (≤ {method.share:g})"
    coded = "" if first.coded is None else f", {first.coded / 1e6:.1f} MB encoded"
    return [*cells, worse, share + coded, time, verdict(result.missed()) if result.task.is_judged else ""]


def tables(results: list[Result]) -> str:
    head = ["algorithm", "optimizer", "learning rate", "held-out loss", "against DDP (limit)"]
    head += ["bytes, of `GradientAllReduce()`'s", "time", "met"]
    parts = []
    for task in {result.task.key: result.task for result in results}.values():
        mine = [result for result in results if result.task.key == task.key]
        rates = ", ".join(f"{rate:g} for {name}" for name, rate in task.rates.items())
        about = f"{task.about}, DDP's learning rate {rates}:"
        parts.append(about[0].upper() + about[1:] + "\n\n" + table(head, [row(result) for result in mine]))
    return "\n\n".join(parts)


def measured_part(report: Report) -> str:
    within = f"{100 * report.results[0].within:g} %"
    about = (
        f"Measured {report.date} by `{report.command}`: {report.place}, means of {report.seeds} seeds with their "
        f"standard deviation, of {FEW_SEEDS} where nothing is judged; the limit is the larger of {within} and "
        f"{DEVIATIONS} standard deviations of DDP's own seeds; load average {report.load[0]:.1f} before and "
        f"{report.load[1]:.1f} after."
    )
    return f"{machine_table(report.machine)}\n\n{about}\n\n{tables(report.results)}"


def save_json(path: Path, report: Report) -> None:
    rows = [
        asdict(result)
        | {"mean": result.mean, "deviation": result.deviation, "difference": result.difference, "limit": result.limit}
        | {"share": result.share, "missed": result.missed(), "mark_steps": result.task.mark_steps()}
        for result in report.results
    ]
    for one in rows:  # each stands in a row of its own already
        del one["ddp"], one["plain"]
    path.write_text(json.dumps(asdict(report) | {"results": rows}, indent=1) + "\n")
