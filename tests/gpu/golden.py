"""The golden vectors of tests/golden."""

import json
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).resolve().parents[1] / "golden"
INDEX = json.loads((FOLDER / "index.json").read_text(encoding="utf-8"))["files"]
CASES = list(INDEX["inputs.bin"]["seed and count"])
STREAM = int(INDEX["qsgd.bin"]["stream"], 16)
RATIO = INDEX["top_k.bin"]["ratio"]


def section(file: str, case: str, what: str) -> bytes:
    """A section of a file."""
    for one in INDEX[f"{file}.bin"]["sections"]:
        if (one["case"], one["what"]) == (case, what):
            with (FOLDER / f"{file}.bin").open("rb") as data:
                data.seek(one["offset"])
                return data.read(one["bytes"])
    raise KeyError((file, case, what))


def floats(file: str, case: str, what: str):
    return np.frombuffer(section(file, case, what), np.float32)


def values(case: str):
    return floats("inputs", case, "values")


def residual(case: str):
    return floats("inputs", case, "residual before")


def numbers(codec: str):
    """The numbers of the blocks of every case."""
    return INDEX[f"{codec}.bin"]["blocks"]
