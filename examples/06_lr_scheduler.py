"""Learning-rate schedulers: the wrapped optimizer is the same object, so one made before or after wrapping works.

torchrun --nproc-per-node 2 examples/06_lr_scheduler.py        or alone: python examples/06_lr_scheduler.py
"""

import torch
from torch import nn

import offbeat

STEPS = 60

offbeat.init()
torch.manual_seed(offbeat.rank())
model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
base = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
warm_up = torch.optim.lr_scheduler.LinearLR(base, start_factor=0.1, total_iters=10)
optimizer = offbeat.DistributedOptimizer(base, model)
assert optimizer is base
cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS - 10)
schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, cosine], milestones=[10])

for step in range(STEPS):
    x = torch.randn(16, 10)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), x.abs().sum(1, keepdim=True))
    loss.backward()
    optimizer.step()
    schedule.step()
    if step % 15 == 14 and offbeat.rank() == 0:
        print(f"step {step + 1:2}  learning rate {schedule.get_last_lr()[0]:.4f}  loss {loss.item():.3f}")
offbeat.shutdown()
