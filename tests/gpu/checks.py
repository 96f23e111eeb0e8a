"""What is checked of kernels, a function for each check. They are called in processes that stay (`workers`), one for
each processor; what such a process needs for all its checks it makes once."""

import functools
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from gpu import shim
from gpu.job import Job
from gpu.mutants import Mutant, Named
from gpu.ptx import Module
from gpu.traffic import Row

sys.path.insert(0, str(shim.KERNELS))
import compile as toolchain


def workers() -> ProcessPoolExecutor:
    # nothing of the tests' own process, whose threads would not come along
    return ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn"))


def wrong(pool: ProcessPoolExecutor, check: Callable[[Callable[[], Job]], list[str]], jobs: list[Named]) -> list[str]:
    """What a check finds in any of some jobs, each fault with the name of its job."""
    found = pool.map(check, (make for _, make in jobs))
    return [f"{name}: {fault}" for (name, _), faults in zip(jobs, found, strict=True) for fault in faults]


@functools.cache
def module() -> Module:
    """The committed PTX."""
    return Module(*toolchain.committed().values())


def as_ptx(make: Callable[[], Job]) -> list[str]:
    job = make()
    return job.faults(module().run(job))


def on_a_cpu(runner: Path, make: Callable[[], Job]) -> list[str]:
    return shim.faults(runner, make())


def mutant(mutant: Mutant) -> str | None:
    """The first that is found of it, if anything is."""
    with tempfile.TemporaryDirectory() as folder:
        mutant.apply(Path(folder) / "kernels")
        runner = shim.runner_of(Path(folder) / "kernels" / mutant.kernel, mutant.sanitizer, f"mutant-{mutant.name}")
    found = (fault for _, make in mutant.jobs() for fault in shim.faults(runner, make()))
    return next(found, None)


def moved(call: tuple) -> list[Row]:
    """What kernels move: one of `traffic.calls`."""
    function, *arguments = call
    return function(module(), *arguments)


def compiled(source: Path, old: bool = True, architecture: str = toolchain.ARCHITECTURE) -> str:
    return toolchain.Nvrtc(toolchain.find_nvrtc(old)).compile(source, architecture)


def assembled(case: tuple[str, str]) -> dict[str, toolchain.Use]:
    """What kernels of a committed file use on an architecture."""
    name, target = case
    return toolchain.assemble(toolchain.find_ptxas(), toolchain.committed()[name], target)
