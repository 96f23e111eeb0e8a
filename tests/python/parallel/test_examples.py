"""The examples run, and say what they promise."""

from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_example(torchrun, path):
    job = torchrun(path, 2, timeout=110)
    assert job.ranks[0].out
    assert "Traceback" not in job.ranks[0].err + job.ranks[1].err
    if path.stem.startswith("01_"):
        assert [rank.out for rank in job.ranks] == [f"rank {rank} of 2: [3.0, 3.0, 3.0, 3.0]\n" for rank in range(2)]
    if path.stem == "demo":
        assert "wrong" not in job.ranks[0].out
