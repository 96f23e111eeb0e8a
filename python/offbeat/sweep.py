"""Tries sizes of buckets while a replica trains: for `bucket_bytes="auto"`, and for the command `offbeat tune`.

The command tells it through OFFBEAT_TUNE, the path of a file. Its first line is the `Request`, the command's; a line
follows for each event of the sweep, written by one of the ranks that the command has started. All lines are JSON.
"""

import contextlib
import json
import os
import sys
import time
import weakref
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch

from . import runtime, settings, tuning
from .errors import InvalidArgument, Unsupported
from .gradients import Gradients
from .objects import broadcast_object

VARIABLE = "OFFBEAT_TUNE"

# The gradients of the replica that the command's sweep is about: the first one that was made.
_swept: weakref.ref[Gradients] | None = None


@dataclass(frozen=True)
class Request:
    """What `offbeat tune` asks for. Without sizes: what fits the model."""

    sizes: list[int] | None
    steps: int
    skip: int
    passes: int

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> "Request":
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8").partition("\n")[0]))
        except (OSError, ValueError, TypeError):
            raise InvalidArgument(
                f"{VARIABLE}={path} is not a file of `offbeat tune`, which sets it for what it starts; try: unset it"
            ) from None


class Sweep:
    """A tuner at work in a replica: it takes the times, lets ranks agree, and changes the buckets between rounds.

    All ranks take part in the same round, because they count rounds, and rank 0 decides whether there is a sweep.
    """

    def __init__(self, bucket_bytes: "int | Literal['auto']") -> None:
        self._auto = bucket_bytes == "auto"
        # The size to begin with, and to stay with if no other is better.
        self.usual = runtime.profiled_bucket_bytes() or settings.BUCKET_BYTES
        if bucket_bytes != "auto":
            self.usual = bucket_bytes
        self._file: Path | None = None
        self._request: Request | None = None
        self._tuner: tuning.Tuner | None = None
        self._median: float | None = None
        # When the last round ended; None when the time since then says nothing.
        self._since: float | None = None
        # Which size gave these buckets first.
        self._plans: dict[object, int] = {}

    def refuse(self) -> None:
        """Where buckets are on a GPU: the host does not see how long their exchange takes."""
        if self._auto or os.environ.get(VARIABLE):
            raise Unsupported(
                'bucket_bytes="auto" and `offbeat tune` take times on the host, which does not wait for a GPU; try: a '
                "size, e.g. bucket_bytes=25 * 2**20"
            )

    def begin(self, gradients: Gradients, total: int) -> int:
        """Begins, or begins anew with other parameters of `total` bytes. Gives the size of buckets, rank 0's."""
        request = asked_of(gradients) if runtime.rank() == 0 else None
        self.usual, self._auto, request = broadcast_object((self.usual, self._auto, request))
        self._request, self._file = request, report_file() if request is not None else None
        self._tuner, self._median, self._since, self._plans = None, None, None, {}
        if request is not None:
            sizes = sizes_for(request, total, self.usual)
            tuner = tuning.Tuner(sizes, steps=request.steps, skip=request.skip, passes=request.passes)
            self._report(event="begin", ranks=runtime.world_size(), bytes=total, sizes=sizes, tries=tuner.tries)
            self._tuner = tuner
        elif self._auto and len(sizes := tuning.candidates(total, self.usual)) > 1:
            self._tuner = tuning.Tuner(sizes)
        return self.usual if self._tuner is None else self._tuner.size

    def round_ended(self) -> None:
        """When all gradients of a step are exchanged. Steps are counted from one such moment to the next."""
        if self._tuner is None or self._median is not None:
            return
        before, self._since = self._since, time.perf_counter()
        if before is not None:
            self._median = self._tuner.observe(self._since - before)

    def pause(self) -> None:
        """The time until the next end of a round says nothing."""
        self._since = None

    def between_rounds(self, gradients: Gradients) -> None:
        """Before the forward of a round: changes the buckets, if it is time to."""
        tuner = self._tuner
        if tuner is None or self._median is None:
            return
        # the slowest rank counts: all others wait for it
        agreed = torch.tensor([self._median], dtype=torch.float64, device="cpu")
        gradients.running().group.all_reduce(agreed, "max", None, False)
        self._median = None
        self._plans.setdefault(gradients.plan(), tuner.size)
        tried, seconds = tuner.size, agreed.item()
        tuner.decide(seconds)
        self._report(event="tried", bytes=tried, seconds=seconds)
        while not tuner.done:
            gradients.rebucket(tuner.size)
            first = self._plans.setdefault(gradients.plan(), tuner.size)
            if first == tuner.size:
                return
            self._report(event="same", bytes=tuner.size, like=first)
            tuner.leave_out()
        self._tuner = None
        self._end(tuner, gradients)

    def _end(self, tuner: tuning.Tuner, gradients: Gradients) -> None:
        if self._request is not None:
            measured = sorted(tuner.results.items())
            self._report(event="end", best=tuner.best, preferred=tuner.sizes[0], measured=measured)
            # all ranks are here: each leaves the world in good order when its interpreter exits
            raise SystemExit(0)
        self._auto, self.usual = False, tuner.best
        if gradients.bucket_bytes != tuner.best:
            gradients.rebucket(tuner.best)
        if runtime.rank() == 0:
            others = ", ".join(f"{tuning.size_text(s)} {1e3 * t:.3g} ms" for s, t in sorted(tuner.results.items()))
            inform(f'bucket_bytes="auto" keeps buckets of {tuning.size_text(tuner.best)} (steps took: {others})')

    def _report(self, **event: object) -> None:
        if self._file is not None:
            # the command notices by itself when nothing comes
            with contextlib.suppress(OSError), self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(event) + "\n")


def asked_of(gradients: Gradients) -> Request | None:
    """What the command asks for, if this replica is the one that its sweep is about."""
    global _swept
    path = os.environ.get(VARIABLE)
    other = None if _swept is None else _swept()
    if not path or (other not in (None, gradients) and other.scheduler is not None):
        return None
    _swept = weakref.ref(gradients)
    return Request.read(Path(path))


def report_file() -> Path | None:
    """The command's file, on the rank that writes to it: one for each command, since each host may have its own."""
    path = os.environ.get(VARIABLE)
    return Path(path) if path and os.environ.get("LOCAL_RANK", str(runtime.rank())) == "0" else None


def sizes_for(request: Request, total: int, usual: int) -> list[int]:
    """The sizes to sweep, the preferred one first."""
    if request.sizes is None:
        return tuning.candidates(total, usual, least=tuning.LEAST // 2)
    return sorted(request.sizes, key=lambda size: size != usual)


def report_alone() -> None:
    """Tells the command, if there is one, that there is nothing to sweep in a world of one."""
    if path := os.environ.get(VARIABLE):
        with contextlib.suppress(OSError), Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"event": "alone"}) + "\n")


def inform(text: str) -> None:
    """A line on standard error, as the core logs it, where OFFBEAT_DEBUG asks for as much."""
    if os.environ.get("OFFBEAT_DEBUG", "").lower() in ("info", "debug", "trace"):
        sys.stderr.write(f"offbeat: rank {runtime.rank()}: info: {text}\n")
