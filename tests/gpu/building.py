"""Builds the doubles of libcuda and libnccl, and the kernels for the former, when their sources are newer.

`python -m gpu.building FOLDER` (in tests/) does so.
"""

import fcntl
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from gpu import shim

ROOT = Path(__file__).resolve().parents[2]
DOUBLES = ROOT / "tests/gpu/doubles"
FOLDER = ROOT / "target/doubles"
FLAGS = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread", "-shared", "-fPIC"]


def missing() -> str | None:
    """Why they cannot be built here, if so."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return "doubles of libcuda and libnccl run on Linux and x86-64 only"
    return (
        None if shutil.which("g++") else "there is no g++ to build doubles of libcuda and libnccl; try: apt install g++"
    )


def is_older(made: Path, sources: list[Path]) -> bool:
    return not made.exists() or made.stat().st_mtime < max(source.stat().st_mtime for source in sources)


def compile_double(folder: Path, name: str, files: list[str], libraries: list[str]) -> None:
    sources, made = [DOUBLES / file for file in files], folder / name
    if is_older(made, sources):
        part = folder / f"{name}.part"
        command = ["g++", *FLAGS, f"-Wl,-soname,{name}", str(sources[0]), f"-L{folder}", *libraries, "-o", str(part)]
        subprocess.run(command, check=True)
        part.rename(made)


def build(folder: Path = FOLDER) -> Path:
    """The folder with libcuda.so.1, libnccl.so.2 and kernels.so."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        compile_double(folder, "libcuda.so.1", ["libcuda.cpp", "streams.h", "double.h"], ["-ldl"])
        compile_double(folder, "libnccl.so.2", ["libnccl.cpp", "double.h"], ["-l:libcuda.so.1"])
        sources = [*shim.SHIM.glob("*.?pp"), *shim.KERNELS.glob("*.cu*")]
        if is_older(folder / "kernels.so", sources):
            needs = [f"-L{folder}", "-l:libcuda.so.1"]
            built = shim.link("kernels", shim.objects("library"), ["-shared", "-Wl,--no-as-needed"], *needs)
            shutil.copy(built, folder / "kernels.so.part").rename(folder / "kernels.so")
    return folder


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
