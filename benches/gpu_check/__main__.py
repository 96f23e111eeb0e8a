"""The report: golden vectors on the device, the speed of every kernel, and training beside DDP with NCCL."""

import argparse
import os
import platform
import subprocess
import sys
from pathlib import Path

import torch

from offbeat import _core

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "kernels")]

import compile as toolchain  # noqa: E402
from gpu import codec_jobs, mutants, top_k_jobs, traffic  # noqa: E402
from gpu.driver import Driver, Refused  # noqa: E402

# Elements of the tensors that kernels are timed on: 64 MB of float32, more than caches hold.
LONG = 1 << 24


def golden(driver: Driver) -> list[str]:
    """Runs all jobs of the kernels; a line for each that is wrong, and one for all."""
    wrong, count = [], 0
    for name, make in mutants.all_jobs():
        job = make()
        count += len(job.launches)
        try:
            wrong += [f"WRONG {name}: {fault}" for fault in job.faults(driver.run(job))]
        except Refused as refused:
            wrong.append(f"WRONG {name}: {refused}")
    return [*wrong, f"golden vectors: {count} launches, {len(wrong)} wrong"]


def bandwidth(driver: Driver, elements: int) -> list[str]:
    """The speed of every kernel by the least bytes that it must move, against a copy inside of the device."""
    traffic.COUNT = elements // codec_jobs.TILE * codec_jobs.TILE
    traffic.SELECTED = elements // top_k_jobs.TILE * top_k_jobs.TILE
    traffic.FACTORED = elements
    copy = driver.copy_speed(4 * elements)
    lines = [f"copy inside of the device: {copy / 1e9:.0f} GB/s", "", "| kernel | GB/s | of a copy |", "|---|---|---|"]
    seen = set()
    for row, seconds in timed_rows(driver):
        label = f"{row.kernel.removeprefix('offbeat_')} {row.note}".strip()
        if label not in seen:
            seen.add(label)
            speed = row.least / seconds
            lines.append(f"| `{label}` | {speed / 1e9:.0f} | {100 * speed / copy:.0f} % |")
    return lines


def timed_rows(driver: Driver):
    """(row, seconds) of every launch; the first run of each job warms up."""
    for call, *arguments in traffic.calls():
        call(driver, *arguments)
        yield from zip(call(driver, *arguments), driver.times, strict=True)


def training(ranks: int) -> list[str]:
    """What `rank.py` says of training on so many devices."""
    if ranks < 2:
        return ["training beside DDP: needs two GPUs, and there is one"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*command, "-m", "benches.gpu_check.rank"], cwd=ROOT, capture_output=True, text=True, timeout=900, check=False
    )
    return done.stdout.splitlines() if done.returncode == 0 else [f"WRONG training: {done.stdout}{done.stderr[-3000:]}"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="make gpu-check", description=__doc__)
    parser.add_argument("--library", default="libcuda.so.1", help="the driver")
    parser.add_argument("--elements", type=int, default=LONG, help="of the tensors that kernels are timed on")
    parser.add_argument("--only-kernels", action="store_true", help="no training")
    options = parser.parse_args()
    report = _core.cuda_report()
    if not options.only_kernels and not torch.cuda.is_available():
        print(f"gpu-check: no GPU that torch can use here, so there is nothing to check ({report})")
        return 2
    driver = Driver(options.library, toolchain.committed().values())
    lines = [
        "# offbeat gpu-check",
        "",
        f"- offbeat {_core.__version__}, torch {torch.__version__}, {platform.platform()}",
    ]
    lines += [
        f"- {report}",
        f"- device 0: {driver.name()}",
        "",
        *golden(driver),
        "",
        *bandwidth(driver, options.elements),
    ]
    driver.close()
    if not options.only_kernels:
        lines += ["", *training(torch.cuda.device_count())]
    wrong = sum(line.startswith("WRONG") for line in lines)
    lines += ["", f"{wrong} things are wrong; try: an issue with this report" if wrong else "all is as it should be"]
    print("\n".join(lines))
    if "OUT" in os.environ:
        Path(os.environ["OUT"]).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
