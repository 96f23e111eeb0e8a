"""Where libraries of CUDA are missing, too old or broken: one line that says so, no panic, and the CPU works."""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from conftest import clean_environment
from gpu import building

pytestmark = [
    pytest.mark.skipif(building.missing() is not None, reason=str(building.missing())),
    # the doubles are built when they are first asked for
    pytest.mark.timeout(300),
]

SCRIPT = """
import torch
import offbeat
from offbeat import _core, errors, runtime

print("report:", _core.cuda_report())
offbeat.init()
core = runtime.current()
(lane,) = core.lanes(flat=False, one=True)
try:
    # torch's default stream will do
    carrier = core.carrier(lane, 0, lambda: 0, lambda count, dtype, stream: torch.zeros(count))
    print("carrier:", carrier is not None)
except errors.Unsupported as error:
    print("refused:", error)
tensor = torch.ones(3)
offbeat.all_reduce(tensor)
model = torch.nn.Linear(3, 1)
optimizer = offbeat.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
model(tensor).sum().backward()
optimizer.step()
print("the CPU works")
offbeat.shutdown()
"""

# what the folder of libraries has: a double, nothing, or a library without a function
CUDA, EMPTY, NONE = "double", "empty", "none"
CASES = {
    "nothing": (NONE, CUDA, {}, "no CUDA: libcuda.so.1 is not there; try:"),
    "a driver without functions": (EMPTY, CUDA, {}, "no CUDA: libcuda.so.1 has no cuCtxGetCurrent; try:"),
    "an old driver": (CUDA, CUDA, {"FAKECUDA_VERSION": "11040"}, "no CUDA: the driver knows CUDA 11.4 only; try:"),
    "no device": (CUDA, CUDA, {"FAKECUDA_DEVICES": "0"}, "no CUDA: the driver does not start|try:"),
    "no NCCL": (CUDA, NONE, {}, "no NCCL: OFFBEAT_NCCL=|does not load|try:"),
    "NCCL without functions": (CUDA, EMPTY, {}, "no NCCL: it has no ncclGetVersion; try:"),
    "an old NCCL": (
        CUDA,
        CUDA,
        {"FAKENCCL_VERSION": "21602"},
        "no NCCL: NCCL 2.16.2 from OFFBEAT_NCCL is too old; try:",
    ),
    "all of it": (CUDA, CUDA, {}, None),
}


@pytest.fixture(scope="module")
def doubles():
    return building.build()


def library(folder, name, kind, doubles):
    """A library in a folder, or none."""
    if kind == CUDA:
        shutil.copy(doubles / name, folder / name)
    elif kind == EMPTY:
        (folder / "empty.c").write_text("int nothing;\n")
        command = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{name}", str(folder / "empty.c"), "-o", str(folder / name)]
        subprocess.run(command, check=True)
    return folder / name


def run(arguments, folder, nccl, env):
    env = {**clean_environment(), "LD_LIBRARY_PATH": str(folder), "OFFBEAT_NCCL": str(nccl), **env}
    env |= {"FAKENCCL_FOLDER": str(folder)}
    return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=100)


def attempt(case, folder, doubles):
    cuda, nccl, env, _ = CASES[case]
    library(folder, "libcuda.so.1", cuda, doubles)
    path = library(folder, "libnccl.so.2", nccl, doubles)
    return run(["-c", SCRIPT], folder, path, env)


@pytest.fixture(scope="module")
def attempts(tmp_path_factory, doubles):
    """All cases, as many at once as there are processors: each imports torch."""
    folders = [tmp_path_factory.mktemp("case") for _ in CASES]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return dict(zip(CASES, threads.map(partial(attempt, doubles=doubles), CASES, folders), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_a_missing_library_is_told_in_one_line_and_the_cpu_works(attempts, case):
    done, words = attempts[case], CASES[case][-1]
    assert done.returncode == 0, done.stdout + done.stderr
    assert "panic" not in done.stderr, done.stderr
    lines = dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line)
    assert "the CPU works" in done.stdout
    if words is None:
        assert lines["carrier"] == "True", done.stdout
        assert lines["report"].startswith("driver for CUDA 12.0, 1 device; NCCL 2.20.5"), done.stdout
    else:
        for part in words.split("|"):
            assert part in lines["refused"], done.stdout
            assert part in lines["report"], done.stdout


def test_doctor_says_it_too(tmp_path, doubles):
    done = run(["-m", "offbeat", "doctor"], tmp_path, tmp_path / "nowhere", {})
    (line,) = [line for line in done.stdout.splitlines() if line.split()[:1] == ["GPU"]]
    assert "no CUDA: libcuda.so.1 is not there" in line
    library(tmp_path, "libcuda.so.1", CUDA, doubles)
    done = run(["-m", "offbeat", "doctor"], tmp_path, doubles / "libnccl.so.2", {})
    (line,) = [line for line in done.stdout.splitlines() if line.split()[:1] == ["GPU"]]
    assert "driver for CUDA 12.0, 1 device; NCCL 2.20.5 (OFFBEAT_NCCL)" in line
    assert os.fspath(tmp_path) not in done.stderr
