"""The golden vectors of tests/golden."""

import json
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).resolve().parents[1] / "golden"
INDEX = json.loads((FOLDER / "index.json").read_text(encoding="utf-8"))["files"]
CASES = list(INDEX["inputs.bin"]["seed and count"])
STREAM = int(INDEX["qsgd.bin"]["stream"], 16)
RATIO = INDEX["top_k.bin"]["ratio"]
# a case of top-k alone, whose values are made and not stored
BLOCKS = "blocks"


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


def of_blocks():
    """Cubes of numbers from −1 to 1, as `unit` of tests/rust/tests/golden.rs makes them."""
    seed, count = INDEX["top_k.bin"][BLOCKS]
    z = np.uint64(seed * 0x9E3779B97F4A7C15 & (1 << 64) - 1)
    z = z + np.arange(count, dtype=np.uint64) * np.uint64(0xBF58476D1CE4E5B9)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ z >> np.uint64(shift)) * np.uint64(factor)
    z ^= z >> np.uint64(31)
    unit = (z >> np.uint64(40)).astype(np.float32) / np.float32(8388608) - np.float32(1)
    return unit * unit * unit
