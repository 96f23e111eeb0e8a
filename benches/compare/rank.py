"""One rank: all engines in one process, in turns, so that whatever disturbs the machine disturbs all alike.

Reads a job (JSON), appends one line for each case to <directory>/rank<R>.jsonl; the launching process puts them
together, which needs no engine. Rank 0 shows progress.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from . import engines as kinds

if TYPE_CHECKING:
    from .engines import Engine

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Nothing stays behind, even when the launching process is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def digest(model: torch.nn.Module) -> str:
    """The same on two ranks only if all their weights have the same bits."""
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    return hashlib.sha256(bytes(weights.view(torch.uint8).numpy())).hexdigest()[:16]


def adopt_mpi_environment() -> None:
    """Under mpirun: the variables that torch and ours read."""
    for ours, theirs in {
        "RANK": "OMPI_COMM_WORLD_RANK",
        "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
        "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
        "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
    }.items():
        if theirs in os.environ:
            os.environ.setdefault(ours, os.environ[theirs])


def sums_are_right(engine: Engine, tensor: torch.Tensor, rank: int, world: int) -> bool:
    """A closed formula of rank and index, in integers that f32 holds exactly."""
    index = torch.arange(tensor.numel(), dtype=torch.float32).remainder_(1021)
    tensor.copy_(index).add_(rank + 1)
    engine.call(tensor)()
    return torch.equal(tensor, index.mul_(world).add_(world * (world + 1) // 2))


def measure(
    case: dict[str, Any], repetitions: int, engines: dict[str, Engine], rank: int, world: int
) -> dict[str, Any]:
    count = case["size"] // 4
    tensors = {name: engine.buffer(count, case["memory"]) for name, engine in engines.items()}
    wrong = set()
    seconds: dict[str, list[float]] = {name: [] for name in engines}

    def check() -> None:
        for name, engine in engines.items():
            if name != "copy" and not sums_are_right(engine, tensors[name], rank, world):
                wrong.add(name)
            tensors[name].fill_(0.0)  # sums of zero stay zero, however often they are taken

    check()
    calls = {name: engine.call(tensors[name]) for name, engine in engines.items()}
    for repetition in range(-1, repetitions):  # the first one only warms up
        for name, engine in engines.items():
            call, inner = calls[name], range(case["inner"])
            engine.barrier()
            began = time.perf_counter()
            for _ in inner:
                call()
            spent = time.perf_counter() - began
            if repetition >= 0:
                seconds[name].append(spent / case["inner"])
    check()
    return {"key": case["key"], "seconds": seconds, "wrong": sorted(wrong)}


def main() -> None:
    die_with_parent()
    adopt_mpi_environment()
    job = json.loads(Path(sys.argv[1]).read_text())
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    engines = kinds.start(job["engines"])
    with Path(job["directory"], f"rank{rank}.jsonl").open("a") as out:
        for case in job["cases"]:
            if rank == 0:
                elapsed = time.monotonic() - job["began"]
                print(f"[{case['number']:2}/{job['of']}] {elapsed:5.0f} s  {case['text']}", file=sys.stderr, flush=True)
            result = measure(case, job["repetitions"], engines, rank, world)
            out.write(json.dumps(result) + "\n")
            out.flush()
    for engine in engines.values():
        engine.barrier()  # nobody leaves while another still needs it
    for engine in reversed(engines.values()):
        engine.close()


if __name__ == "__main__":
    main()
