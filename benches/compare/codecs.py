"""How fast codecs are on one core, beside a copy of the same input: runs the Rust bench, and reads what it prints."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass

from . import launch

GOAL = 0.5  # of the speed of a copy, at least
CODECS = ("minmax8", "int4", "onebit")
ACTS = ("encode", "decode")
TIMEOUT = 900.0  # it may have to be compiled first
LINE = re.compile(r"(\w+) +(\w+) +([\d.]+) ms +[\d.]+ GB/s +copy +([\d.]+) ms +ratio +[\d.]+, median +([\d.]+)")


@dataclass
class Speed:
    """Seconds for the input, the shortest of all rounds, and what came out."""

    codec: str
    act: str
    seconds: float
    copy: float
    ratio: float  # to the copy, the median of all rounds

    @property
    def of_copy(self) -> float:
        """The speed, in that of the copy."""
        return 1 / self.ratio

    def missed(self) -> list[str]:
        return [] if self.of_copy >= GOAL else ["missed"]


def read(output: str) -> list[Speed]:
    speeds = []
    for line in output.splitlines():
        if found := LINE.fullmatch(line.strip()):
            codec, act, spent, copy, ratio = found.groups()
            if codec in CODECS and act in ACTS:
                speeds.append(Speed(codec, act, float(spent) / 1e3, float(copy) / 1e3, float(ratio)))
    return speeds


def measure() -> tuple[list[Speed], str]:
    """The speeds, or why there are none."""
    command = ["cargo", "bench", "--quiet", "--package", "offbeat-benches", "--bench", "codec", "--", *CODECS]
    try:
        done = subprocess.run(command, cwd=launch.ROOT, capture_output=True, text=True, timeout=TIMEOUT)
    except FileNotFoundError:
        return [], "no cargo"
    except subprocess.TimeoutExpired:
        return [], f"not done after {TIMEOUT:.0f} s"
    speeds = read(done.stdout)
    if done.returncode or len(speeds) != len(CODECS) * len(ACTS):
        launch.say(done.stdout + done.stderr)
        return [], f"the bench ended with code {done.returncode}"
    return speeds, ""
