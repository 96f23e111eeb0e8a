"""Builds the kernels for the CPU, and runs jobs there."""

import subprocess
import tempfile
from pathlib import Path

from gpu.job import Job

ROOT = Path(__file__).resolve().parents[2]
SHIM = ROOT / "tests/gpu/shim"
KERNELS = ROOT / "kernels"
FLAGS = ["-std=c++17", "-O1", "-g1", "-fPIC", "-ffp-contract=off", f"-I{SHIM}", "-include", str(SHIM / "cuda.hpp")]


def compile_one(source: Path, to: Path, sanitize: list[str], kernels: Path) -> Path:
    command = ["g++", *FLAGS, *sanitize, f"-I{kernels}", "-x", "c++", "-c", str(source), "-o", str(to)]
    subprocess.run(command, check=True)
    return to


def link(objects: list[Path], to: Path, options: list[str]) -> Path:
    subprocess.run(["g++", *options, *map(str, objects), "-o", str(to), "-lpthread"], check=True)
    return to


def objects(folder: Path, program: str, sanitize: list[str] | None = None) -> list[Path]:
    """All kernels and a program around them, compiled. It must be linked last."""
    folder.mkdir(parents=True, exist_ok=True)
    sources = [SHIM / "fibers.cpp", *sorted(KERNELS.glob("*.cu")), SHIM / f"{program}.cpp"]
    return [compile_one(source, folder / f"{source.stem}.o", sanitize or [], KERNELS) for source in sources]


def build(folder: Path, sanitizer: str | None = None) -> Path:
    """The runner with all kernels."""
    sanitize = [f"-fsanitize={sanitizer}"] if sanitizer else []
    return link(objects(folder, "runner", sanitize), folder / "runner", sanitize)


def rebuild(runner: Path, folder: Path, sanitizer: str | None, kernels: Path, name: str) -> Path:
    """The same runner with one file of kernels only, compiled from another folder."""
    sanitize = [f"-fsanitize={sanitizer}"] if sanitizer else []
    one = compile_one(kernels / name, folder / "kernel.o", sanitize, kernels)
    return link([runner.parent / "fibers.o", one, runner.parent / "runner.o"], folder / "runner", sanitize)


class Stopped(Exception):
    """The shim or a sanitizer stopped the program, or it found something at its end."""


def run(runner: Path, job: Job) -> list[bytes]:
    """The buffers after a job."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "job").write_bytes(job.packed())
        # the thread sanitizer wants addresses where they would be without randomness
        command = ["setarch", "-R", str(runner), f"{folder}/job", f"{folder}/out"]
        env = {"TSAN_OPTIONS": "halt_on_error=1 exitcode=66", "ASAN_OPTIONS": "detect_leaks=1", "PATH": "/usr/bin:/bin"}
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
        if done.returncode:
            raise Stopped(f"exit code {done.returncode}\n{done.stderr[:3000]}\n{done.stderr[-1000:]}")
        return job.unpacked((Path(folder) / "out").read_bytes())


def faults(runner: Path, job: Job) -> list[str]:
    return job.faults(run(runner, job))
