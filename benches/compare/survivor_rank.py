"""One rank that trains until its time is up, or until it kills itself.

Reads a job (JSON) and writes <directory>/rank<R>.json: when each of its steps ended, and when it died, if it did.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

import offbeat

from .algorithm_rank import Learner, fresh
from .rank import die_with_parent
from .train_rank import build

BATCH = 16


def train(job: dict[str, Any], path: Path) -> None:
    torch.manual_seed(0)
    learner = Learner("ours", build(**job["model"]), algorithm=job["algorithm"])
    batches = fresh(job["model"]["kind"], job["model"]["width"], BATCH)
    last = offbeat.rank() == offbeat.world_size() - 1
    offbeat.barrier()
    began, ends = time.monotonic(), []
    while time.monotonic() < began + job["seconds"]:
        learner.step(next(batches))
        ends.append(time.monotonic())
        if last and ends[-1] > began + job["killed"]:
            path.write_text(json.dumps({"ends": ends, "died": time.monotonic()}))
            os.kill(os.getpid(), signal.SIGKILL)
    path.write_text(json.dumps({"ends": ends, "died": None}))


def main() -> None:
    die_with_parent()
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    offbeat.init()
    train(job, Path(job["directory"], f"rank{os.environ['RANK']}.json"))
    offbeat.shutdown()


if __name__ == "__main__":
    main()
