"""Algorithms of your own: signSGD with momentum, where ranks vote on each weight, and gossip now and then.

torchrun --nproc-per-node 4 examples/08_your_own_algorithm.py
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

import offbeat
from offbeat.algorithms import Sync
from offbeat.steps import AllReduce, Apply, Bucket, Gossip, Step


@dataclass(frozen=True)
class MajorityVote(offbeat.Algorithm):
    """Every rank votes with the signs of its momentum, one bit each; the gradient becomes what most have voted for."""

    name: ClassVar[str] = "majority_vote"

    beta: float = 0.9

    def steps(self) -> Sequence[Step]:
        return [
            Apply(self.vote, state=["momentum"]),
            # ±1 is exact in one bit, and so is the sign of a sum, as long as no host sums the votes of its ranks before
            AllReduce("sum", "onebit", hierarchical=False),
            Apply(self.count),
        ]

    def vote(self, bucket: Bucket) -> None:
        momentum = bucket.state["momentum"].lerp_(bucket.values, 1 - self.beta)
        bucket.values.copy_(torch.where(momentum < 0, -1.0, 1.0))  # one bit has no zero

    def count(self, bucket: Bucket) -> None:
        bucket.values.sign_()


@dataclass(frozen=True)
class LazyRing(offbeat.Algorithm):
    """Every host trains by itself, and averages its weights with both neighbours on a ring every few steps."""

    name: ClassVar[str] = "lazy_ring"

    every: int = 4

    def steps(self) -> Sequence[Step]:
        return []

    def sync(self) -> Sync:  # of offbeat.algorithms
        return Sync([Gossip("ring")], every=self.every)


def train(algorithm: offbeat.Algorithm, lr: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    optimizer = offbeat.DistributedOptimizer(optimizer, model, algorithm)

    generator = torch.Generator().manual_seed(offbeat.rank())  # each rank its own share of the data
    losses = []
    for _ in range(100):
        inputs = torch.randn(32, 8, generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    apart = offbeat.consolidate(model)
    if offbeat.rank() == 0:
        said = f"loss {losses[0]:.3f} -> {losses[-1]:.3f} with {offbeat.world_size()} ranks"
        print(f"{algorithm.name}: {said}, {apart:.4f} apart")


def main() -> None:
    offbeat.init()
    train(MajorityVote(), lr=0.003)  # a step of this size for every weight
    train(LazyRing(), lr=0.05)
    offbeat.shutdown()


if __name__ == "__main__":
    main()
