"""The kernels for GPUs, checked without one: docs/kernels.md tells what each check finds."""

import os
import platform
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from gpu import building, checks, codec_jobs, golden, low_rank_jobs, mutants, reference, shim, top_k_jobs, traffic
from gpu.checks import toolchain
from gpu.codec_jobs import CODECS, TYPES
from gpu.job import canonical
from gpu.ptx import Module

ROOT = Path(__file__).resolve().parents[3]

can_build = pytest.mark.skipif(
    shutil.which("g++") is None or platform.machine() != "x86_64",
    reason="kernels run on a CPU where there are g++ and x86-64 only",
)
needs_nvrtc = pytest.mark.skipif(
    toolchain.find_nvrtc() is None,
    reason="NVRTC 12.0 is not installed; try: pip install nvidia-cuda-nvrtc-cu12==12.0.140",
)
needs_ptxas = pytest.mark.skipif(toolchain.find_ptxas() is None, reason="there is no ptxas; try: pip install triton")
# building takes its time where others build too
slow_to_build = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def workers():
    """Processes for `gpu.checks`, one for each processor."""
    with checks.workers() as pool:
        yield pool


@pytest.fixture(scope="module")
def module() -> Module:
    return checks.module()


def test_the_reference_gives_the_golden_vectors():
    for codec in CODECS:
        for case in golden.CASES:
            values, numbers = golden.values(case), golden.numbers(codec)
            data = reference.encode(codec, values, golden.STREAM, numbers)
            fed, left = reference.encode_residual(codec, values, golden.residual(case), golden.STREAM, numbers)
            decoded = reference.decode(codec, data, len(values))
            assert data == golden.section(codec, case, "encoded"), (codec, case)
            assert fed == golden.section(codec, case, "encoded with residual"), (codec, case)
            for got, what in ((decoded, "decoded"), (left, "residual after")):
                assert canonical(got.tobytes(), "f32").tobytes() == golden.section(codec, case, what), (
                    codec,
                    case,
                    what,
                )
    for case in golden.CASES:
        values, residual = golden.values(case), golden.residual(case)
        chosen = top_k_jobs.chosen_of(len(values), golden.RATIO)
        assert top_k_jobs.select(values, None, chosen)[0] == golden.section("top_k", case, "encoded"), case
        fed, left = top_k_jobs.select(values, residual, chosen)
        assert fed == golden.section("top_k", case, "encoded with residual"), case
        assert canonical(left.tobytes(), "f32").tobytes() == golden.section("top_k", case, "residual after"), case
    values = golden.of_blocks()
    data = top_k_jobs.select(values, None, top_k_jobs.chosen_of(len(values), golden.RATIO))[0]
    assert data == golden.section("top_k", golden.BLOCKS, "encoded")
    low_rank_jobs.check_reference()


@can_build
@slow_to_build
@pytest.mark.parametrize("sanitizer", [None, "address"], ids=lambda sanitizer: sanitizer or "plain")
def test_sources_on_a_cpu(workers, sanitizer):
    assert checks.wrong(workers, partial(checks.on_a_cpu, shim.runner(sanitizer)), mutants.all_jobs()) == []


@can_build
@slow_to_build
def test_no_races(workers):
    assert checks.wrong(workers, partial(checks.on_a_cpu, shim.runner("thread")), mutants.race_jobs()) == []


@slow_to_build
@pytest.mark.parametrize("family", mutants.families())
def test_committed_ptx(workers, family):
    assert checks.wrong(workers, checks.as_ptx, mutants.families()[family]) == []


@slow_to_build
def test_every_kernel_is_run_and_moves_little_more_than_it_must(workers, module):
    rows = traffic.distinct(workers.map(checks.moved, traffic.calls()))
    assert {row.kernel for row in rows} == set(module.entries)
    assert [f"{row.kernel} {row.note}: {row.ratio:.3f}" for row in rows if not 1 <= row.ratio <= 1.1] == []
    columns = [line.split(" | ")[:5] for line in toolchain.documented().split("\n")[2:]]
    stated = {tuple(cell.strip("| ") for cell in line) for line in columns}
    found = {
        (f"`{row.kernel.removeprefix('offbeat_')}`" + (f" {row.note}" if row.note else ""),
         *map(str, (row.read, row.written, row.least)), f"{row.ratio:.3f}")
        for row in rows
    }  # fmt: skip
    assert found == stated, "docs/kernels.md is stale; try: make kernels"


@can_build
@slow_to_build
def test_ptx_has_the_signatures_of_the_sources(module):
    """What is launched with addresses of arguments must have as many of the same sizes."""
    listed = subprocess.run([shim.runner(), "--list"], check=True, capture_output=True, text=True).stdout
    sizes = {line.split()[0]: [int(size) for size in line.split()[1:]] for line in listed.splitlines()}
    bytes_of = {"u32": 4, "f32": 4, "u64": 8}
    assert {name: [bytes_of[kind] for kind, _ in entry.params] for name, entry in module.entries.items()} == sizes


def test_the_readme_names_every_kernel(module):
    text = (ROOT / "kernels/README.md").read_text(encoding="utf-8")
    patterns = [re.sub("<codec>", f"({'|'.join(CODECS)})", name) for name in re.findall(r"`(offbeat_[\w<>]+)`", text)]
    patterns = [re.sub("<type>", f"({'|'.join(TYPES)})", name) for name in patterns]
    assert [name for name in module.entries if not any(re.fullmatch(one, name) for one in patterns)] == []


@needs_nvrtc
@slow_to_build
def test_committed_ptx_is_what_the_sources_give(workers):
    assert toolchain.Nvrtc(toolchain.find_nvrtc()).version == toolchain.VERSION
    sources = toolchain.sources()
    given = dict(zip((one.stem for one in sources), workers.map(checks.compiled, sources), strict=True))
    stale = [name for name in given | toolchain.committed() if given.get(name) != toolchain.committed().get(name)]
    assert stale == [], "try: make kernels"
    for text in given.values():
        assert ".version 8.0" in text
        assert ".target sm_70" in text


@pytest.mark.skipif(toolchain.find_nvrtc(old=False) is None, reason="torch came without NVRTC 13")
@slow_to_build
def test_a_new_nvrtc_takes_the_sources(workers):
    newest = partial(checks.compiled, old=False, architecture="compute_90")
    assert all(".entry offbeat_" in text for text in workers.map(newest, toolchain.sources()))


@needs_ptxas
@slow_to_build
def test_nothing_is_spilled(workers):
    cases = [(name, target) for name in toolchain.committed() for target in toolchain.TARGETS]
    for (name, target), uses in zip(cases, workers.map(checks.assembled, cases), strict=True):
        assert len(uses) == toolchain.committed()[name].count(".entry"), (name, target)
        assert {kernel: use for kernel, use in uses.items() if use.spilled} == {}, target


@can_build
@slow_to_build
@pytest.mark.parametrize("check", ["plain", "address", "thread"])
def test_faulty_kernels_are_refused(workers, check):
    faulty = [mutant for mutant in mutants.found() if mutant.check == check]
    unseen = []
    for mutant, caught in zip(faulty, workers.map(checks.mutant, faulty), strict=True):
        if caught is None:
            unseen.append(f"{mutant.name}: {mutant.story}, and nobody noticed")
        elif not re.search(mutant.symptom, caught):
            unseen.append(f"{mutant.name}: {caught} and not {mutant.symptom}")
    assert faulty
    assert unseen == []


@needs_nvrtc
@pytest.mark.parametrize("name", ["plain_nan", "half_rounding"])
def test_faulty_ptx_is_refused(tmp_path, name):
    """What only the device's own instructions show."""
    mutant = next(one for one in mutants.found(ptx=True) if one.name == name)
    mutant.apply(tmp_path / "kernels")
    text = checks.compiled(tmp_path / "kernels" / mutant.kernel)
    job = codec_jobs.codec_job("float16", "f32")
    assert job.faults(Module(text).run(job)) != []
    assert np.isfinite(golden.values("ordinary")).all()


@can_build
@slow_to_build
def test_the_check_for_hardware_runs_on_the_doubles():
    """`make gpu-check` as far as it goes without torch's own GPU: all golden vectors by the driver, and times."""
    doubles = building.build()
    env = {"FAKECUDA_KERNELS": str(doubles / "kernels.so"), "FAKECUDA_REPORT": "1", "OFFBEAT_NCCL": "nowhere"}
    command = [sys.executable, "-m", "benches.gpu_check", "--only-kernels", "--elements", "65536"]
    command += ["--library", str(doubles / "libcuda.so.1")]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"golden vectors: \d{3,} launches, 0 wrong", done.stdout), done.stdout
    assert done.stdout.count("\n| `") > 87, done.stdout
    assert "leaked memory=0 streams=0 events=0 modules=0 contexts=0" in done.stderr, done.stderr


def test_the_check_for_hardware_says_where_there_is_none():
    done = subprocess.run([sys.executable, "-m", "benches.gpu_check"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout.count("\n")) == (2, 1), done
    assert done.stdout.startswith("gpu-check: no GPU that torch can use here"), done
