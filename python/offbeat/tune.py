"""`offbeat tune -- python train.py`: tries sizes of buckets on a training script, shows the curve, writes a profile."""

import contextlib
import importlib
import importlib.util
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from . import __version__, profile, sweep
from .errors import InvalidArgument
from .tuning import parse_sizes, size_text

LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch")
# How much of what a failed script wrote is shown; the launcher itself adds some thirty lines.
TAIL = 60
# How long a script may take to end when the sweep is over.
GRACE = 60.0
SKIP = 2
PASSES = 2


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    command: Sequence[str]
    nproc: int | None = None
    steps: int = 10
    sizes: str | None = None
    output: str = profile.NAME
    png: str | None = None
    as_json: bool = False


@dataclass
class Outcome:
    """What came of it."""

    # Seconds of a step by bytes of a bucket, and sizes that gave the same buckets as another.
    measured: dict[int, float] = field(default_factory=dict)
    same: dict[int, int] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)
    ranks: int = 0
    # How often sizes are tried at most, and how often they were.
    tries: int = 0
    tried: int = 0
    gradient_bytes: int = 0
    best: int | None = None
    alone: bool = False
    interrupted: bool = False
    code: int = 0

    def take(self, event: Mapping[str, Any]) -> None:
        """Takes one line of the sweep's file."""
        kind = event.get("event")
        if kind == "begin":
            # a model whose parameters changed begins anew
            self.measured, self.same, self.sizes, self.tried = {}, {}, event["sizes"], 0
            self.ranks, self.tries, self.gradient_bytes = event["ranks"], event["tries"], event["bytes"]
        elif kind == "tried":
            size, seconds = event["bytes"], event["seconds"]
            self.measured[size] = min(seconds, self.measured.get(size, seconds))
            self.tried += 1
        elif kind == "same":
            self.same[event["bytes"]] = event["like"]
            # it will not be tried in the later passes either
            self.tries -= PASSES
        elif kind == "end":
            self.best = event["best"]
        elif kind == "alone":
            self.alone = True

    @property
    def trouble(self) -> str | None:
        """Why there is no result, and what to try."""
        if self.best is not None:
            return None
        if self.interrupted:
            return "interrupted before the sweep was over"
        if self.code:
            return f"the script failed with exit code {self.code} before the sweep was over; its last lines are above"
        if self.sizes:
            return (
                f"the script ended after {self.tried} of up to {self.tries} tries of a size, for each of which it must "
                "make --steps and a few steps; let it train longer, or give fewer --steps or --sizes"
            )
        if self.alone:
            return (
                "the script ran as a world of one, where nothing is exchanged; try: --nproc-per-node 2, and "
                "offbeat.init() without rank= and world_size="
            )
        return (
            "the script ended and wrapped no model; call offbeat.init() in it, and then "
            "offbeat.DistributedOptimizer(optimizer, model) or offbeat.DataParallel(model)"
        )


def run(options: Options) -> int:
    """Runs the sweep. Gives 0 if a profile was written, 1 if not, 2 if nothing was started, and 130 after Ctrl-C."""
    try:
        command, request = prepare(options)
    except InvalidArgument as error:
        print(f"offbeat tune: {error}", file=sys.stderr)
        return 2
    if os.environ.get("RANK", "0") != "0":
        # another one of these commands, that of rank 0, does the talking
        return subprocess.run(options.command, check=False).returncode
    with tempfile.TemporaryDirectory(prefix="offbeat-tune-") as directory:
        outcome = launch(command, request, Path(directory))
    return conclude(outcome, options)


def prepare(options: Options) -> tuple[list[str], sweep.Request]:
    """What to start, and what to ask of it. Checks all that can be checked before."""
    if not options.command:
        raise InvalidArgument("there is no command; try: offbeat tune -- python train.py")
    if shutil.which(options.command[0]) is None:
        raise InvalidArgument(f"there is no command {options.command[0]!r}; try: offbeat tune -- python train.py")
    if options.nproc is not None and options.nproc < 2:
        raise InvalidArgument("one process exchanges nothing; try: --nproc-per-node 2")
    if options.steps < 1:
        raise InvalidArgument("--steps must be at least 1; try: --steps 10")
    if options.png is not None and not can_draw():
        raise InvalidArgument("--png needs matplotlib; try: pip install 'offbeat[plot]', or leave it out")
    for path in filter(None, (options.output, options.png)):
        folder = Path(path).absolute().parent
        if not folder.is_dir() or not os.access(folder, os.W_OK) or Path(path).is_dir():
            raise InvalidArgument(f"cannot write {path}; try: the path of a file in a folder that exists")
    request = sweep.Request(parse_sizes(options.sizes) if options.sizes else None, options.steps, SKIP, PASSES)
    return launcher(options.command, options.nproc), request


def launcher(command: Sequence[str], nproc: int | None) -> list[str]:
    """The command under torchrun, unless it is that already or a launcher has started us."""
    modules = [module for flag, module in itertools.pairwise(command) if flag == "-m"]
    if os.environ.get("RANK") or Path(command[0]).name == "torchrun" or modules[:1] in ([m] for m in LAUNCHERS):
        if nproc is not None:
            raise InvalidArgument(
                "--nproc-per-node does not count where a launcher is used; try: give it to the launcher"
            )
        return list(command)
    nproc = nproc or min(4, max(2, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2))
    torchrun = f"-m torch.distributed.run --standalone --nproc-per-node {nproc} --no-python"
    return [sys.executable, *torchrun.split(), *command]


def launch(command: Sequence[str], request: sweep.Request, directory: Path) -> Outcome:
    """Starts the command and follows the sweep to its end."""
    events, log = directory / "events", directory / "log"
    request.write(events)
    outcome = Outcome()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=os.environ | {sweep.VARIABLE: str(events)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            with Progress(outcome) as progress:
                for event in follow(events, process):
                    outcome.take(event)
                    progress.show(event)
        except KeyboardInterrupt:
            outcome.interrupted = True
        finally:
            end(process)
            signal.signal(signal.SIGTERM, previous)
    outcome.code = process.returncode
    if outcome.best is None and outcome.code and not outcome.interrupted:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        print("\n".join(f"  | {line}" for line in lines[-TAIL:]), file=sys.stderr)
    return outcome


def follow(events: Path, process: "subprocess.Popen[bytes]") -> Iterator[dict[str, Any]]:
    """The sweep's events as they come, and an empty one now and then, until the process has ended."""
    deadline = None
    with events.open(encoding="utf-8") as file:
        file.readline()
        rest = ""
        while True:
            # before the file is read: what an ended process wrote is there
            ended = process.poll() is not None
            *lines, rest = (rest + file.read()).split("\n")
            for line in lines:
                event = json.loads(line)
                if event.get("event") == "end":
                    deadline = time.monotonic() + GRACE
                yield event
            if ended or (deadline is not None and time.monotonic() > deadline):
                return
            time.sleep(0.1)
            yield {}


def end(process: "subprocess.Popen[bytes]") -> None:
    """Makes sure that the process has ended, with all that a launcher started."""
    if process.poll() is None:
        process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)
        return
    process.kill()
    process.wait()


class Progress:
    """A bar on a terminal, a line for each size elsewhere; on standard error."""

    WIDTH = 24

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.began = time.monotonic()
        self.bar = sys.stderr.isatty()

    def __enter__(self) -> Self:
        if not self.bar:
            print("starting the script", file=sys.stderr, flush=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def show(self, event: Mapping[str, Any]) -> None:
        """Shows where the sweep is."""
        outcome = self.outcome
        if self.bar:
            filled = self.WIDTH * outcome.tried // max(1, outcome.tries, outcome.tried)
            now = f"{outcome.tried} of {outcome.tries} tries" if outcome.sizes else "starting the script"
            text = f"[{'#' * filled}{'.' * (self.WIDTH - filled)}] {now}, {time.monotonic() - self.began:.0f} s"
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
        elif event.get("event") == "begin":
            text = (
                f"{outcome.ranks} ranks, {size_text(outcome.gradient_bytes)} of gradients, {len(outcome.sizes)} sizes"
            )
            print(text, file=sys.stderr, flush=True)
        elif event.get("event") == "tried":
            text = f"{size_text(event['bytes'])}: {time_text(event['seconds'])} a step"
            print(text, file=sys.stderr, flush=True)
        elif event.get("event") == "same":
            text = f"{size_text(event['bytes'])}: the same buckets as with {size_text(event['like'])}"
            print(text, file=sys.stderr, flush=True)


def conclude(outcome: Outcome, options: Options) -> int:
    """Shows what was measured, and writes the profile and the picture if the sweep came to its end."""
    trouble, told, picture = outcome.trouble, outcome.measured and not options.as_json, None
    if told:
        print(table(outcome))
        print(curve(sorted(outcome.measured.items())))
    if outcome.best is not None:
        machine = profile.machine() | {"ranks": outcome.ranks, "gradient_bytes": outcome.gradient_bytes}
        measured = tuple(sorted(outcome.measured.items()))
        made = profile.Profile(outcome.best, measured, f"offbeat tune {__version__}", machine)
        try:
            profile.save(made, options.output)
        except InvalidArgument as error:
            trouble = str(error)
        if can_draw():
            picture = options.png or str(Path(options.output).with_suffix(".png"))
            draw(outcome, picture)
    if options.as_json:
        facts = {
            "bucket_bytes": outcome.best,
            "measured": sorted(outcome.measured.items()),
            "same": sorted(outcome.same.items()),
            "profile": None if trouble else options.output,
            "png": picture,
            "error": trouble,
        }
        print(json.dumps(facts, indent=2))
    elif not trouble:
        print(advice(outcome, options.output, picture))
    if trouble:
        print(f"offbeat tune: {trouble}", file=sys.stderr)
    return 0 if not trouble else 130 if outcome.interrupted else 1


def advice(outcome: Outcome, output: str, picture: str | None) -> str:
    """What was found, where it is, and how to use it."""
    assert outcome.best is not None
    usual = outcome.sizes[0]
    best, at_usual = outcome.measured[outcome.best], outcome.measured[usual]
    gain = f", {100 * (1 - best / at_usual):.1f} % less than with {size_text(usual)}" if outcome.best != usual else ""
    lines = [f"buckets of {size_text(outcome.best)}: {time_text(best)} a step{gain}"]
    if len(outcome.measured) == 1:
        lines.append("all sizes give the same buckets for this model, so none is better than another")
    lines.append(f"profile: {output}")
    lines.append(f"picture: {picture}" if picture else "no picture: matplotlib is missing; pip install 'offbeat[plot]'")
    if Path(output).name == profile.NAME:
        lines.append("offbeat.init() takes it where it is in the working directory; elsewhere")
    else:
        lines.append("to use it")
    lines[-1] += f" give init(profile={output!r}) or OFFBEAT_PROFILE={output}"
    lines.append("it does not count where the script gives bucket_bytes=, or OFFBEAT_BUCKET_BYTES is set")
    return "\n".join(lines)


def table(outcome: Outcome) -> str:
    """One line for each size."""
    fastest = min(outcome.measured.values())
    lines = ["", "    bucket        step"]
    for size in sorted({*outcome.measured, *outcome.same}):
        if size in outcome.same:
            lines.append(f"{size_text(size):>10}              same buckets as with {size_text(outcome.same[size])}")
            continue
        seconds = outcome.measured[size]
        more = f"+{100 * (seconds / fastest - 1):.1f} %" if seconds > fastest else "fastest"
        mark = "  <- best" if size == outcome.best else ""
        lines.append(f"{size_text(size):>10}  {time_text(seconds):>10}  {more:>8}{mark}")
    return "\n".join(lines)


def curve(measured: Sequence[tuple[int, float]], height: int = 8, column: int = 8) -> str:
    """The times as a curve of characters, sizes from left to right."""
    times = [seconds for _, seconds in measured]
    least, most = min(times), max(times)
    scale = (height - 1) / (most - least) if most > least else 0.0
    rows = [round((most - seconds) * scale) for seconds in times]
    lines = [""]
    for row in range(height if scale else 1):
        label = time_text(most) if row == 0 else time_text(least) if row == height - 1 else ""
        marks = "".join(("*" if at == row else "").center(column) for at in rows)
        lines.append(f"{label:>10} |{marks}".rstrip())
    lines.append(f"{'':>10} +{'-' * column * len(measured)}")
    lines.append(f"{'':>11} {''.join(short(size).center(column) for size, _ in measured)}".rstrip())
    return "\n".join([*lines, ""])


def short(size: int) -> str:
    return size_text(size).replace("iB", "").replace(" bytes", "B").replace(" ", "")


def time_text(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.2f} {unit}"
    return f"{seconds * 1e6:.0f} µs"


def can_draw() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def draw(outcome: Outcome, path: str) -> None:
    """The curve as a PNG."""
    # by name, so that types can be checked where it is not installed; and no pyplot, which would look for a display
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    sizes, times = zip(*sorted(outcome.measured.items()), strict=True)
    axes.plot(sizes, [1e3 * seconds for seconds in times], "o-", color="#0072b2")
    if outcome.best is not None:
        label = f"best: {size_text(outcome.best)}"
        axes.plot(
            [outcome.best], [1e3 * outcome.measured[outcome.best]], "o", ms=12, mfc="none", color="#d55e00", label=label
        )
        axes.legend()
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [short(size) for size in sizes])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("bytes of a bucket")
    axes.set_ylabel("ms for a step")
    axes.set_title(f"{outcome.ranks} ranks, {size_text(outcome.gradient_bytes)} of gradients")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120, format="png")
