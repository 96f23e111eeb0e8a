"""The examples run, and say what they promise."""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import clean_environment

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


PROMISES = {
    "02_minimal_loop": "same weights everywhere: True",
    "04_accumulation_and_scaler": "same scale everywhere: True",
    "05_checkpoint_and_resume": "same bits after 30: True",
    "07_tune_and_trace": "wrote",
    "09_fewer_exchanges": "one model now: True",
    "10_gpu_training": "same weights everywhere: True",
}


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_example(torchrun, path):
    job = torchrun(path, 2, timeout=110)
    assert job.ranks[0].out
    assert "Traceback" not in job.ranks[0].err + job.ranks[1].err
    for rank in job.ranks:
        assert PROMISES.get(path.stem, "") in rank.out
        assert "False" not in rank.out
    if path.stem.startswith("01_"):
        assert [rank.out for rank in job.ranks] == [f"rank {rank} of 2: [3.0, 3.0, 3.0, 3.0]\n" for rank in range(2)]
    if path.stem == "03_ddp_style":
        assert float(job.ranks[0].out.split("accuracy")[1].split()[0]) > 0.8
    if path.stem == "08_your_own_algorithm":
        lines = job.ranks[0].out.splitlines()
        assert [line.split(":")[0] for line in lines] == ["majority_vote", "lazy_ring"]
        for line in lines:
            first, last = line.split()[2:5:2]
            assert float(last) < 0.7 * float(first), line
    if path.stem == "demo":
        assert "times as fast" in job.ranks[0].out
        written = sorted(file.name for file in (job.directory / "out").iterdir())
        assert written == ["demo-trace-0.json", "demo-trace-1.json", "demo.png"]
        assert (job.directory / "out" / "demo.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("[01]*.py")), ids=lambda path: path.stem)
def test_example_alone(path, tmp_path):
    """Without torchrun they are a world of one, as they say."""
    run = [sys.executable, str(path)]
    done = subprocess.run(run, cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert "False" not in done.stdout
