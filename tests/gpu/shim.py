"""Builds the kernels for the CPU, and runs jobs there. What was built stays in target/shim, under names that say from
what: whoever needs the same again finds it, in another test or another run."""

import functools
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gpu.job import Job

ROOT = Path(__file__).resolve().parents[2]
SHIM = ROOT / "tests/gpu/shim"
KERNELS = ROOT / "kernels"
BUILT = ROOT / "target/shim"
FLAGS = ["-std=c++17", "-O1", "-g1", "-fPIC", "-ffp-contract=off"]


@functools.cache
def version() -> bytes:
    return subprocess.run(["g++", "--version"], check=True, capture_output=True).stdout


def make(name: str, inputs: Iterable[bytes], options: list[str], *places: str) -> Path:
    """What g++ makes of some inputs with options; `places` say where the inputs are, and do not count."""
    key = hashlib.sha256()
    for part in (version(), repr(options).encode(), *inputs):
        key.update(hashlib.sha256(part).digest())
    made = BUILT / f"{name}.{key.hexdigest()[:16]}"
    if not made.exists():
        BUILT.mkdir(parents=True, exist_ok=True)
        for old in BUILT.glob(f"{name}.*"):
            old.unlink(missing_ok=True)
        part = BUILT / f"{name}.{os.getpid()}.part"
        subprocess.run(["g++", *options, *places, "-o", str(part)], check=True)
        part.rename(made)
    return made


def flags_of(sanitizer: str | None) -> list[str]:
    return [f"-fsanitize={sanitizer}"] if sanitizer else []


def compile_one(source: Path, sanitizer: str | None = None, name: str | None = None) -> Path:
    """An object; the headers of a kernel lie beside it."""
    headers = [*sorted(SHIM.glob("*.hpp")), *sorted(source.parent.glob("*.cuh"))]
    texts = (path.read_bytes() for path in (source, *headers))
    where = [f"-I{SHIM}", f"-I{source.parent}", "-include", str(SHIM / "cuda.hpp"), "-x", "c++", str(source)]
    return make(f"{name or source.stem}-{sanitizer or 'plain'}", texts, [*FLAGS, *flags_of(sanitizer), "-c"], *where)


def link(name: str, objects: list[Path], options: list[str], *libraries: str) -> Path:
    """A program or library. The name of an object says what is in it."""
    names = (path.name.encode() for path in objects)
    return make(name, names, options, *map(str, objects), *libraries, "-lpthread")


def objects(program: str, sanitizer: str | None = None) -> list[Path]:
    """All kernels and a program around them, compiled. It must be linked last."""
    sources = [SHIM / "fibers.cpp", *sorted(KERNELS.glob("*.cu")), SHIM / f"{program}.cpp"]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return list(threads.map(functools.partial(compile_one, sanitizer=sanitizer), sources))


def runner(sanitizer: str | None = None) -> Path:
    """The runner with all kernels."""
    return link(f"all-{sanitizer or 'plain'}", objects("runner", sanitizer), flags_of(sanitizer))


def runner_of(kernel: Path, sanitizer: str | None, name: str) -> Path:
    """The runner with the kernels of one file, which has a name of its own."""
    parts = [SHIM / "fibers.cpp", SHIM / "runner.cpp"]
    first, last = (compile_one(part, sanitizer) for part in parts)
    return link(name, [first, compile_one(kernel, sanitizer, name), last], flags_of(sanitizer))


class Stopped(Exception):
    """The shim or a sanitizer stopped the program, or it found something at its end."""


def run(program: Path, job: Job) -> list[bytes]:
    """The buffers after a job."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "job").write_bytes(job.packed())
        # the thread sanitizer wants addresses where they would be without randomness
        command = ["setarch", "-R", str(program), f"{folder}/job", f"{folder}/out"]
        env = {"TSAN_OPTIONS": "halt_on_error=1 exitcode=66", "ASAN_OPTIONS": "detect_leaks=1", "PATH": "/usr/bin:/bin"}
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
        if done.returncode:
            raise Stopped(f"exit code {done.returncode}\n{done.stderr[:3000]}\n{done.stderr[-1000:]}")
        return job.unpacked((Path(folder) / "out").read_bytes())


def faults(program: Path, job: Job) -> list[str]:
    """What is not as expected, also if the program was stopped."""
    try:
        return job.faults(run(program, job))
    except Stopped as stop:
        return [str(stop)]
