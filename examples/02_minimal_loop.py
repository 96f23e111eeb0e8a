"""Trains on all ranks: two lines more than on one.

torchrun --nproc-per-node 2 examples/02_minimal_loop.py        or alone: python examples/02_minimal_loop.py
"""

import torch
from torch import nn

import offbeat

offbeat.init()  # the first line
torch.manual_seed(offbeat.rank())  # data of its own for each rank; weights come from rank 0 anyway

model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
optimizer = offbeat.DistributedOptimizer(optimizer, model)  # the second line

for step in range(100):
    x = torch.randn(16, 10)
    y = x.sum(1, keepdim=True)
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()  # gradients are averaged while it runs
    optimizer.step()
    if step % 33 == 0 and offbeat.rank() == 0:
        print(f"step {step:3}  loss {loss.item():.3f}")

weights = nn.utils.parameters_to_vector(model.parameters()).detach()
same = all(torch.equal(weights, other) for other in offbeat.all_gather(weights))
print(f"rank {offbeat.rank()} of {offbeat.world_size()}: same weights everywhere: {same}")
offbeat.shutdown()
