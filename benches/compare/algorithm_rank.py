"""One rank of a course: every contender trains its own copy of the model in one process, by turns.

Reads a job (JSON) and writes <directory>/rank<R>.json: samples by name, and a digest of each contender's weights.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import offbeat

from .rank import die_with_parent, digest
from .train_rank import Contender, build, shape_of, turns

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

INTERFACE = "eth0"  # what netlab calls it
QUIET = 20_000  # bytes that a host may send while nobody trains
SAMPLED = 64  # one weight out of so many tells how far ranks are apart


def bytes_sent() -> int:
    """By this host so far; a network namespace has counters of its own."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    fields = next(line.split(":")[1].split() for line in lines if line.strip().startswith(f"{INTERFACE}:"))
    return int(fields[8])


class Learner(Contender):
    """Learns to say what it is told, so that weights move as they do in real training, and replicas apart."""

    def loss(self, x: Tensor) -> Tensor:
        return (self.model(x) - x).square().sum(1).mean()


class Runner:
    """A contender with what is asked of it in its turn."""

    def __init__(self, contender: Contender, pace: dict[str, Any], rest: float, batches: Iterator[Tensor]) -> None:
        self.contender, self.batches, self.rest = contender, batches, rest
        self.steps, self.seconds, slow = pace["steps"], pace["seconds"], pace["slow"]
        self.slow = slow if offbeat.rank() == offbeat.world_size() - 1 else 1
        # exchanges beside the training rest while it is another one's turn
        self.background = contender.engine == "ours" and contender.algorithm.when == "background"
        if self.background:
            contender.optimizer.pause()

    def step(self) -> None:
        began = time.perf_counter()
        if self.rest:
            time.sleep(self.rest)
        self.contender.step(next(self.batches))
        if self.slow > 1:
            time.sleep((self.slow - 1) * (time.perf_counter() - began))

    def train(self) -> tuple[int, float]:
        """The steps of one repetition: how many, and seconds of all."""
        began, done, spent = time.perf_counter(), 0, 0.0
        while spent < self.seconds if self.seconds else done < self.steps:
            self.step()
            done, spent = done + 1, time.perf_counter() - began
        return done, spent

    def turn(self) -> dict[str, float]:
        """One repetition: seconds, processor time and bytes of a step, and how far replicas are apart after it."""
        name, optimizer = self.contender.name, self.contender.optimizer
        offbeat.barrier()
        if self.background:
            optimizer.resume()
        before, beside = bytes_sent(), time.process_time() - time.thread_time()
        steps, seconds = self.train()
        beside = time.process_time() - time.thread_time() - beside
        if self.background:
            sent = bytes_sent() - before
            optimizer.pause()
            wait_until_quiet()
        else:
            offbeat.barrier()  # what ranks sent each other has arrived
            sent = bytes_sent() - before
        said = {name: seconds / steps, f"{name}-bytes": sent / steps, f"{name}-beside": beside / steps}
        return said | ({f"{name}-spread": spread(self.contender.weights)} if self.background or steps > 1 else {})


def wait_until_quiet() -> None:
    """Until no host sends anything any more but what it takes to ask."""
    busy = True
    while busy:
        before = bytes_sent()
        time.sleep(0.3)
        sent = torch.tensor([bytes_sent() - before])
        offbeat.all_reduce(sent, "max")
        busy = sent.item() > QUIET


def spread(model: nn.Module) -> float:
    """The largest distance of a rank's weights from the mean of all, relative to it; looked at in a sample of them."""
    with torch.no_grad():
        mine = torch.cat([parameter.flatten()[::SAMPLED] for parameter in model.parameters()])
    mean = mine.clone()
    offbeat.all_reduce(mean, "mean")
    away = (mine - mean).norm().reshape(1)
    offbeat.all_reduce(away, "max")
    return (away / mean.norm()).item()


def fresh(kind: str, width: int, batch: int) -> Iterator[Tensor]:
    """Batches, other ones on each rank."""
    lot = torch.Generator().manual_seed(1 + offbeat.rank())
    while True:
        yield torch.randn(shape_of(kind, width, batch), generator=lot)


def measure(job: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    model = build(**job["model"])
    batches = fresh(job["model"]["kind"], job["model"]["width"], job["batch"])
    runners = []
    for one in job["contenders"]:
        pace = {name: one.pop(name) for name in ("steps", "seconds", "slow")}
        kind = Learner if job["learns"] else Contender
        runners.append(Runner(kind(model=copy.deepcopy(model), **one), pace, job["rest"], batches))
    seconds = turns([runner.turn for runner in runners], job["repetitions"], job["warm"])
    trained = [runner.contender for runner in runners if runner.contender.engine != "plain"]
    return {"samples": seconds, "digests": {one.name: digest(one.weights) for one in trained}}


def main() -> None:
    die_with_parent()
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    offbeat.init()
    result = measure(job)
    Path(job["directory"], f"rank{os.environ['RANK']}.json").write_text(json.dumps(result))
    offbeat.barrier()  # nobody leaves while another still needs it
    offbeat.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
