"""Compiles kernels/*.cu to kernels/ptx/*.ptx with an old NVRTC, so that every driver since 525 (CUDA 12.0) takes them.

    python kernels/compile.py            # writes kernels/ptx, and the table in docs/kernels.md
    python kernels/compile.py --check    # says what is not as the sources give it, and changes nothing

NVRTC comes from the package nvidia-cuda-nvrtc-cu12==12.0.140 (the extra `gpu-check`), ptxas from triton, which torch
brings along. Neither needs a GPU.
"""

import argparse
import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

KERNELS = Path(__file__).resolve().parent
PTX = KERNELS / "ptx"
TABLE = KERNELS.parent / "docs" / "kernels.md"
VERSION = (12, 0)
ARCHITECTURE = "compute_70"
# nothing is fused, and denormal numbers stay: the bits must be those of the CPU
OPTIONS = ["--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true"]
TARGETS = ["sm_75", "sm_80", "sm_90", "sm_100", "sm_120"]


def sources() -> list[Path]:
    return sorted(KERNELS.glob("*.cu"))


def packages() -> list[Path]:
    """Where packages lie: beside torch, and in OFFBEAT_GPU_CHECK if that is set."""
    roots = [Path(path) for path in sys.path if path.endswith("-packages")]
    extra = os.environ.get("OFFBEAT_GPU_CHECK")
    return ([Path(extra)] if extra else []) + roots + [Path(sys.prefix) / "gpu-check"]


def find_nvrtc(old: bool = True) -> Path | None:
    """The library to compile with, or with `old=False` the newest one that torch brought along."""
    pattern = "nvidia/cuda_nvrtc/lib/libnvrtc.so.12" if old else "nvidia/cu13/lib/libnvrtc.so.13"
    found = (root / pattern for root in packages())
    return next((path for path in found if path.exists()), None)


def find_ptxas() -> Path | None:
    """An assembler that knows every architecture in TARGETS."""
    spec = importlib.util.find_spec("triton")
    found = (
        [Path(spec.origin).parent / "backends/nvidia/bin" / name for name in ("ptxas-blackwell", "ptxas")]
        if (spec and spec.origin)
        else []
    )
    found += [root / "nvidia/cuda_nvcc/bin/ptxas" for root in packages()]
    if on_path := shutil.which("ptxas"):
        found.append(Path(on_path))
    return next((path for path in found if path.exists()), None)


class Nvrtc:
    """NVRTC through its C interface: no header and no toolkit."""

    def __init__(self, path: Path):
        self.lib = ctypes.CDLL(str(path))
        self.lib.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = (major.value, minor.value)

    def _call(self, name: str, *args: object) -> None:
        if code := getattr(self.lib, name)(*args):
            raise RuntimeError(f"{name}: {self.lib.nvrtcGetErrorString(code).decode()}")

    def _text(self, program: ctypes.c_void_p, what: str) -> str:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        room = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, room)
        return room.value.decode()

    def compile(self, source: Path, architecture: str = ARCHITECTURE) -> str:
        """The PTX of a file. Headers are handed over in memory, so that no path gets into the text."""
        headers = sorted(source.parent.glob("*.cuh"))
        texts = (ctypes.c_char_p * len(headers))(*(path.read_bytes() for path in headers))
        names = (ctypes.c_char_p * len(headers))(*(path.name.encode() for path in headers))
        # NVRTC leaves this thread with a locale of its own, and with it Python would read files as ASCII
        uselocale = ctypes.CDLL(None).uselocale
        uselocale.restype, uselocale.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
        before = uselocale(None)
        program = ctypes.c_void_p()
        self._call(
            "nvrtcCreateProgram",
            ctypes.byref(program),
            source.read_bytes(),
            source.name.encode(),
            len(headers),
            texts,
            names,
        )
        try:
            options = [f"--gpu-architecture={architecture}", *OPTIONS]
            array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            if self.lib.nvrtcCompileProgram(program, len(options), array):
                raise RuntimeError(f"{source.name}: {self._text(program, 'ProgramLog')}")
            return self._text(program, "PTX")
        finally:
            self.lib.nvrtcDestroyProgram(ctypes.byref(program))
            uselocale(before)


@dataclass(frozen=True)
class Use:
    """What a kernel uses of a multiprocessor on one architecture."""

    registers: int
    shared: int
    spilled: int


def assemble(ptxas: Path, text: str, target: str) -> dict[str, Use]:
    """Assembles a module for an architecture: what each kernel uses."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "module.ptx").write_text(text, encoding="utf-8")
        command = [str(ptxas), "-v", f"-arch={target}", f"{folder}/module.ptx", "-o", f"{folder}/module.cubin"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr)
    uses = {}
    for part in done.stderr.split("Compiling entry function '")[1:]:
        spilled = sum(int(number) for number in re.findall(r"(\d+) bytes (?:stack frame|spill \w+)", part))
        shared = re.search(r"(\d+) bytes smem", part)
        registers = int(re.search(r"Used (\d+) registers", part)[1])
        uses[part.split("'")[0]] = Use(registers, int(shared[1]) if shared else 0, spilled)
    return uses


def committed() -> dict[str, str]:
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(PTX.glob("*.ptx"))}


def compiled(nvrtc: Nvrtc) -> dict[str, str]:
    return {source.stem: nvrtc.compile(source) for source in sources()}


def table(texts: dict[str, str], ptxas: Path) -> str:
    """Traffic and use of every kernel, as Markdown."""
    sys.path.insert(0, str(KERNELS.parent / "tests"))
    from gpu import traffic
    from gpu.ptx import Module

    uses = {target: {} for target in TARGETS}
    for target in TARGETS:
        for text in texts.values():
            uses[target].update(assemble(ptxas, text, target))
    head = [
        "kernel",
        "bytes read",
        "written",
        "least",
        "ratio",
        "in sectors",
        *(f"{target[3:]}" for target in TARGETS),
        "shared",
        "spills",
    ]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in traffic.all_rows(Module(*texts.values())):
        of = [uses[target][row.kernel] for target in TARGETS]
        cells = [
            f"`{row.kernel.removeprefix('offbeat_')}`" + (f" {row.note}" if row.note else ""),
            row.read,
            row.written,
            row.least,
            f"{row.ratio:.3f}",
            f"{row.sectors / row.least:.3f}",
            *(use.registers for use in of),
            max(use.shared for use in of),
            max(use.spilled for use in of),
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


BEGIN, END = "<!-- table: kernels/compile.py -->\n", "\n<!-- end -->"


def documented() -> str:
    """The table as it stands in the documentation."""
    return TABLE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing, fail if something would be")
    check = parser.parse_args().check
    library, ptxas = find_nvrtc(), find_ptxas()
    if library is None or ptxas is None:
        print("no NVRTC or no ptxas; try: pip install nvidia-cuda-nvrtc-cu12==12.0.140, and triton")
        return 1
    nvrtc = Nvrtc(library)
    if nvrtc.version != VERSION:
        print(f"NVRTC {nvrtc.version} and not {VERSION}: its PTX would not load on old drivers")
        return 1
    texts = compiled(nvrtc)
    rows = table(texts, ptxas)
    if check:
        stale = [name for name in sorted(texts | committed()) if texts.get(name) != committed().get(name)]
        stale += ["docs/kernels.md"] if rows != documented() else []
        print(f"stale: {', '.join(stale)}; try: python kernels/compile.py" if stale else "all as the sources give it")
        return bool(stale)
    PTX.mkdir(exist_ok=True)
    for old in set(committed()) - set(texts):
        (PTX / f"{old}.ptx").unlink()
    for name, text in texts.items():
        (PTX / f"{name}.ptx").write_text(text, encoding="utf-8")
    before, after = TABLE.read_text(encoding="utf-8").split(BEGIN)[0], TABLE.read_text(encoding="utf-8").split(END)[1]
    TABLE.write_text(before + BEGIN + rows + END + after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
