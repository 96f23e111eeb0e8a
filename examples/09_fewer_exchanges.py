"""Weights instead of gradients: every host makes 10 steps by itself, then all make an outer step with their mean.

torchrun --nproc-per-node 2 examples/09_fewer_exchanges.py        or alone: python examples/09_fewer_exchanges.py
"""

import os

import torch
from torch import nn

import offbeat

# Only to see it on one machine: ranks of one host would average their gradients in every step.
os.environ["OFFBEAT_HOST"] = f"host{os.environ.get('RANK', '0')}"
offbeat.init()
torch.manual_seed(offbeat.rank())
model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
algorithm = offbeat.algorithms.DiLoCo(every=10, outer_momentum=0.3, codec="minmax8")
optimizer = offbeat.DistributedOptimizer(optimizer, model, algorithm)

for step in range(205):
    x = torch.randn(16, 10)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), x.abs().sum(1, keepdim=True))
    loss.backward()
    optimizer.step()
    if step % 50 == 49 and offbeat.rank() == 0:
        print(f"step {step + 1:3}  loss {loss.item():.3f}  exchanges {offbeat.stats()['models'][0]['syncs']}")

# Five steps after the last exchange replicas differ again: one model of them, to evaluate or to keep.
spread = offbeat.consolidate(model)
same = len(set(offbeat.all_gather_object(str([p.tolist() for p in model.parameters()])))) == 1
print(f"rank {offbeat.rank()}: replicas were {spread:.1e} apart; one model now: {same}")
offbeat.shutdown()
