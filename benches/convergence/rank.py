"""One rank: every run in one process, one after the other, so that engines start once.

Reads a job (JSON) and writes <directory>/rank<R>.json: one entry for each run. Rank 0 shows progress.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import offbeat

from ..compare.engines import algorithm
from ..compare.rank import die_with_parent, digest
from . import tasks
from .methods import Method, Task, methods_for, seeds_for

AGREED = 5  # steps after which ranks that wait for each other look at the time


class Training:
    """A network that is trained in one way, on this rank's batches."""

    def __init__(self, kind: Any, task: Task, method: Method, seed: int) -> None:
        self.kind, self.task, self.rank, self.world = kind, task, offbeat.rank(), offbeat.world_size()
        torch.manual_seed(seed)
        self.weights = self.model = kind.network()
        self.lot = torch.Generator().manual_seed(1000 * seed + self.rank)
        self.shard = kind.shard(self.rank, self.world) if task.unequal else None
        self.slow = task.slow if self.rank == self.world - 1 else 1
        self.done, self.spent = 0, 0.0
        rate = method.learning_rate(task)
        self.optimizer: Any = (
            torch.optim.SGD(self.weights.parameters(), lr=rate, momentum=method.momentum)
            if method.optimizer == "sgd"
            else torch.optim.Adam(self.weights.parameters(), lr=rate)
        )
        self.in_background = False
        if method.algorithm:
            chosen = algorithm(method.constructor(task))
            self.in_background = chosen.when == "background"
            self.optimizer = offbeat.DistributedOptimizer(self.optimizer, self.weights, chosen)
        else:
            self.model = DistributedDataParallel(self.weights)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: task.factor(step, self.share(step))
        )

    def share(self, step: int) -> float:
        """How much of the training is behind a step."""
        return self.spent / self.task.seconds if self.task.seconds else step / self.task.steps

    def step(self) -> None:
        began = time.perf_counter()
        self.optimizer.zero_grad()
        tasks.loss(self.model, self.kind.batch(self.task.batch, self.lot, self.shard)).backward()
        self.optimizer.step()
        if self.slow > 1:
            time.sleep((self.slow - 1) * (time.perf_counter() - began))
        self.done += 1
        self.spent += time.perf_counter() - began
        self.scheduler.step()

    def steps(self, until: int) -> None:
        """So many steps in all."""
        while self.done < until:
            self.step()

    def work(self, until: float) -> None:
        """So many seconds in all."""
        while self.in_background and self.spent < until:
            self.step()
        if not self.in_background:
            spent = torch.zeros(1)
            while spent.item() < until:  # ranks that wait for each other stop after the same step
                for _ in range(AGREED):
                    self.step()
                spent.fill_(self.spent)
                offbeat.all_reduce(spent, "max")

    def held_out_loss(self) -> float:
        """Of the model that all agree on, on this rank's share; training goes on with what each has."""
        agreed = self.kind.network()
        agreed.load_state_dict(self.weights.state_dict())
        offbeat.consolidate(agreed)
        return tasks.held_out_loss(agreed, self.kind.held_out(self.rank, self.world))


def train(kind: Any, task: Task, method: Method, seed: int) -> dict[str, Any]:
    before = offbeat.stats()["bytes"]["sent"]
    training = Training(kind, task, method, seed)
    losses: list[float] = []
    seconds: list[float] = []
    for number, mark in enumerate(task.mark_steps(), 1):
        offbeat.barrier()
        if task.seconds:
            training.work(task.seconds * number / task.marks)
        else:
            training.steps(mark)
        seconds.append(training.spent)
        counted = offbeat.stats()["bytes"]["sent"]
        losses.append(training.held_out_loss())
        before += offbeat.stats()["bytes"]["sent"] - counted  # looking at it is no part of the training
    sent = coded = None
    if method.algorithm:
        stats = offbeat.stats()
        coding = stats["models"][-1]["coding"]
        sent, coded = stats["bytes"]["sent"] - before, coding["coded"] if coding else None
        training.optimizer.remove()
    said = {"task": task.key, "method": method.key, "seed": seed, "losses": losses, "seconds": seconds}
    return said | {"sent": sent, "coded": coded, "digest": digest(training.weights), "steps": training.done}


def main(path: str) -> None:
    job = json.loads(Path(path).read_text())
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    offbeat.init()
    methods, course = [Method(**one) for one in job["methods"]], [Task(**one) for one in job["tasks"]]
    count = sum(seeds_for(task, job["seeds"]) * len(methods_for(task, methods)) for task in course)
    said: list[dict[str, Any]] = []
    began = time.monotonic()
    for task in course:
        kind = tasks.KINDS[task.kind]()
        for seed in range(seeds_for(task, job["seeds"])):
            for method in methods_for(task, methods):  # by turns: what disturbs the machine disturbs all alike
                said.append(train(kind, task, method, seed))
                if offbeat.rank() == 0:
                    text = f"{task.key}, seed {seed}, {method.title}, {method.optimizer}: {said[-1]['losses'][-1]:.4f}"
                    elapsed = time.monotonic() - began
                    print(f"[{len(said):3}/{count}] {elapsed:4.0f} s  {text}", file=sys.stderr, flush=True)
    Path(job["directory"], f"rank{os.environ['RANK']}.json").write_text(json.dumps(said))
    offbeat.barrier()  # nobody leaves while another still needs it
    offbeat.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    die_with_parent()
    main(sys.argv[1])
