"""Turns results into Markdown tables, JSON and the measured part of BENCHMARKS.md."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

from . import algorithms as algorithm_rules
from . import codecs as codec_rules
from . import idle as idle_rules
from . import survivors as survivor_rules
from .cases import MB, NAMES, Result, size_text
from .training import KINDS, Outcome

if TYPE_CHECKING:
    from pathlib import Path

    from .algorithms import Passed
    from .codecs import Speed
    from .survivors import Survived

NOT_YET = "not yet measured"
LIMIT_IS = "the limit is a step of the same processes not talking, and then the bytes of the algorithm on the wire"


@dataclass
class Report:
    machine: dict[str, str]
    command: str
    flags: dict[str, str]  # of OpenMPI, by profile
    repetitions: int
    date: str
    load: tuple[float, float]  # before and after
    results: list[Result] = field(default_factory=list)
    training: list[Outcome] = field(default_factory=list)
    passed: list[Passed] = field(default_factory=list)
    survived: list[Survived] = field(default_factory=list)
    codecs: list[Speed] = field(default_factory=list)
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


def machine_table(machine: dict[str, str]) -> str:
    return table(["machine", ""], [[key, value] for key, value in machine.items()])


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


def training_place(outcome: Outcome) -> str:
    trial = outcome.trial
    parts = [trial.place.title]
    if outcome.rate:
        parts.append(f"{outcome.rate.removesuffix('mbit')} Mbit/s")
    if trial.bucket_bytes:
        parts.append(f"buckets of {size_text(trial.bucket_bytes)}")
    return ", ".join(parts)


def training_table(outcomes: list[Outcome]) -> str:
    head = ["what", "where", "model", "batch", "Offbeat", "DDP", "beside", "Offbeat's value (goal)", "DDP's", "met"]
    rows = []
    for o in outcomes:
        trial, kind = o.trial, KINDS[o.trial.kind]

        def amount(value: float | None, memory: bool = trial.kind == "memory") -> str:
            return f"{value / MB:.0f} MB" if memory and value else time_text(value)

        def worth(value: float | None, unit: str = kind.unit) -> str:
            return "–" if value is None else f"{value * 1e6:.2f} µs" if unit == "µs" else f"{value:.2f}{unit}"

        beside = f"{kind.reference_is}: {amount(o.reference())}"
        if "again" in (o.ranks[0] if o.ranks else ()):
            beside += f", once more {worth(o.value('again'))}"
        goal = f"{'≥' if trial.at_least else '≤'} {worth(trial.goal)}"
        row = [trial.title, training_place(o), trial.model.title, str(trial.batch)]
        row += [amount(o.median("ours")), amount(o.median("ddp")), beside]
        rows.append([*row, f"{worth(o.value())} ({goal})", worth(o.value("ddp")), verdict(o.missed())])
    kinds = {o.trial.kind: o for o in reversed(outcomes)}
    notes = "".join(
        f"\n- *{o.trial.title}*: {KINDS[kind].about}. {len(o.slowest('ours'))} rounds."
        for kind, o in reversed(kinds.items())
    )
    return f"{table(head, rows)}\n{notes}"


def course_table(passed: Passed) -> str:
    course = passed.course
    (yardstick,) = (one for one in course.contenders if one.key == course.yardstick)
    head = ["algorithm", "optimizer", "step", f"faster than {yardstick.title} (goal)", "sent in a step by all hosts"]
    head += [f"of {yardstick.title}'s (goal)", "limit", "step of the limit (goal)", "met"]
    rows = []
    for one in passed.contenders:
        sent = passed.sent(one.key)
        row = [one.title, one.optimizer, time_text(passed.step(one.key))]
        if one.engine == "plain":
            rows.append([*row, *[""] * (len(head) - len(row))])
            continue
        share = passed.share(one)
        row += [
            ratio_text(passed.faster(one), f"≥ {one.faster:g}×" if one.faster else ""),
            "–" if sent is None else f"{sent / 1e6:.2f} MB",
            ("–" if share is None else f"{share:.3f}") + (f" (≤ {one.share:g})" if one.share else ""),
            time_text(passed.limit(one)),
            ratio_text(passed.of_limit(one), f"≤ {one.of_limit:g}×" if one.of_limit else ""),
        ]
        has_goal = one.faster or one.share or one.of_limit
        rows.append([*row, verdict(passed.missed(one)) if has_goal else ""])
    if any(one.used for one in passed.contenders):
        head, rows = background_rows(passed)
    return f"{course.title}:\n\n{table(head, rows)}"


def background_rows(passed: Passed) -> tuple[list[str], list[list[str]]]:
    """Where exchanges go on beside the training, other things count."""
    head = ["algorithm", "step", "beside", "of it (goal)", "used of the wire (goal)"]
    head += ["processor time a step beside training", "replicas apart: first and last repetition"]
    head += ["the last, of those not talking", "met"]
    rows = []
    for one in passed.contenders:
        used, spread = passed.used(one), passed.spread(one.key)
        row = [one.title, time_text(passed.step(one.key))]
        row.append("the same, none slowed" if one.slow > 1 else "not talking" if one.used else "")
        row.append(ratio_text(passed.of_limit(one), f"≤ {one.of_limit:g}×") if one.of_limit else "")
        row.append("–" if used is None else f"{100 * used:.0f} %" + (f" (≥ {100 * one.used:g} %)" if one.used else ""))
        row.append(time_text(passed.beside(one.key)))
        row.append(f"{spread[0]:.2g}, {spread[-1]:.2g}" if spread else "–")
        row.append(ratio_text(passed.apart(one), f"≤ {algorithm_rules.APART:g}×") if one.used else "")
        rows.append([*row, verdict(passed.missed(one)) if one.used else ""])
    return head, rows


def survivor_table(survived: list[Survived]) -> str:
    head = ["algorithm", "a step before", f"longest after (goal: ≤ {survivor_rules.GOAL:g} s more)"]
    head += ["steps since, at least", "met"]
    rows = [
        [f"`{one.algorithm}`", time_text(one.before), time_text(one.longest), str(one.steps), verdict(one.missed())]
        for one in survived
    ]
    return table(head, rows)


def codec_table(speeds: list[Speed]) -> str:
    head = ["codec", "what", "time", "a copy", f"speed, of the copy's (goal: ≥ {codec_rules.GOAL:g})", "met"]
    rows = []
    for one in speeds:
        times = [time_text(one.seconds), time_text(one.copy)]
        rows.append([f"`{one.codec}`", one.act, *times, f"{one.of_copy:.2f}", verdict(one.missed())])
    return table(head, rows)


def tables(report: Report) -> str:
    parts = []
    host = [r for r in report.results if not r.case.place.emulated]
    wire = [r for r in report.results if r.case.place.emulated]
    if host:
        parts.append("One host:\n\n" + host_table(host))
    if wire:
        parts.append("Emulated hosts:\n\n" + wire_table(wire))
    if report.training:
        parts.append("Training with SGD, against torch's DDP over gloo:\n\n" + training_table(report.training))
    if report.passed:
        courses = "\n\n".join(course_table(passed) for passed in report.passed)
        parts.append(f"Training with algorithms that send less; {LIMIT_IS}:\n\n{courses}")
    if report.survived:
        place, model = survivor_rules.PLACE.title, survivor_rules.MODEL.title
        about = f"One of four ranks is killed (SIGKILL) while all train; {place}, {model}:"
        parts.append(f"{about}\n\n{survivor_table(report.survived)}")
    if report.codecs:
        parts.append("Codecs on one core, 64 MB of f32:\n\n" + codec_table(report.codecs))
    if report.idle:
        parts.append("Doing nothing:\n\n" + idle_table(report.idle))
    return "\n\n".join(parts)


def measured_part(report: Report) -> str:
    machine = machine_table(report.machine)
    about = (
        f"Measured {report.date} by `{report.command}`, medians of {report.repetitions} repetitions; "
        f"load average {report.load[0]:.1f} before and {report.load[1]:.1f} after."
    )
    flags = "".join(f"\n- OpenMPI, {name}: `{words}`" for name, words in report.flags.items())
    skipped = "".join(f"\nSkipped: {reason}." for reason in report.skipped)
    return f"{machine}\n\n{about}\n{flags}\n{skipped}\n\n{tables(report)}"


def put_between(path: Path, name: str, part: str) -> None:
    """Puts a measured part where the marks of its name are."""
    begin, end = (f"<!-- {name}:{side} -->" for side in ("begin", "end"))
    before, rest = path.read_text().split(begin)
    _, after = rest.split(end)
    path.write_text(f"{before}{begin}\n\n{part}\n\n{end}{after}")


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
    plain = replace(report, passed=[])  # it holds functions
    content = asdict(plain) | {"results": rows, "training": [o.row() for o in report.training]}
    content |= {"survived": [one.row() for one in report.survived]}
    content |= {"passed": [row for passed in report.passed for row in passed.rows()]}
    path.write_text(json.dumps(content, indent=1) + "\n")
