"""The short form of `make convergence`: one seed and few steps, on four ranks that are hosts of their own."""

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
# A run this short ends where the loss still falls steeply, so a short delay is a large difference.
STEPS = {"digits": 80, "characters": 50}
TOLERANCE = {"digits": 0.25, "characters": 0.03}
ROUNDING = 1e-3  # of GradientAllReduce, which adds up the same gradients in another order than DDP

SCRIPT = """
import sys
sys.path.insert(0, sys.argv[2])
from benches.convergence.rank import main
main(sys.argv[1])
"""


@pytest.fixture
def room(monkeypatch):
    """The room's own modules, which stand beside the tests."""
    monkeypatch.syspath_prepend(str(ROOT))
    from benches.convergence import methods

    yield methods
    for name in [name for name in sys.modules if name.split(".")[0] == "benches"]:
        del sys.modules[name]


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("task", STEPS)
def test_every_algorithm_learns_as_ddp_does(ranks, room, tmp_path, task):
    # where replicas differ for a while, so few steps say nothing: `make convergence` has those
    tried = [method for method in room.METHODS if method.within == room.WITHIN]
    (short,) = (replace(one, steps=STEPS[task], marks=2) for one in room.TASKS if one.key == task)
    job = {
        "seeds": 1,
        "tasks": [asdict(short)],
        "methods": list(map(asdict, tried)),
        "directory": str(tmp_path),
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    arguments = [tmp_path / "job.json", ROOT]
    ranks(SCRIPT, 4, args=arguments, timeout=220, per_rank=lambda rank: {"OFFBEAT_HOST": f"host{rank}"})
    said = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(4)]
    results = room.judge([short], tried, room.combine(said), TOLERANCE[task])
    assert [result.method.key for result in results] == [method.key for method in tried]
    for result in results:
        (run,) = result.runs
        assert run.losses[-1] < run.losses[0], result
        # near enough to DDP, the same bits on every rank, and a codec that really carried bytes
        assert result.missed() == [], (result.missed(), result.difference, result.share, result)
        if result.method.share is not None:
            assert result.share is not None, result
        if result.method.key == "allreduce":
            assert abs(result.difference) < ROUNDING, result
