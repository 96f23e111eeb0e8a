"""Gradient accumulation with `no_sync()`, mixed precision with GradScaler, and clipping.

torchrun --nproc-per-node 2 examples/04_accumulation_and_scaler.py        or alone, with python
"""

import contextlib

import torch
from torch import nn

import offbeat

ACCUMULATE = 4  # small batches in a step

offbeat.init()
torch.manual_seed(offbeat.rank())
model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
optimizer = offbeat.DistributedOptimizer(optimizer, model)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

losses = []
for _ in range(40):
    optimizer.zero_grad()
    total = 0.0
    for part in range(ACCUMULATE):
        # only the last part's backward exchanges gradients, those of all parts at once
        last = part == ACCUMULATE - 1
        with contextlib.nullcontext() if last else optimizer.no_sync():
            x = torch.randn(8, 10)
            with torch.autocast("cpu", dtype=torch.float16):
                loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)) / ACCUMULATE
            scaler.scale(loss).backward()
        total += loss.item()
    scaler.unscale_(optimizer)  # gradients are final: the mean over all ranks and parts
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)  # all ranks skip the same steps, since all see the same gradients
    scaler.update()
    losses.append(total)

if offbeat.rank() == 0:
    print(f"loss {losses[0]:.3f} at the start, {losses[-1]:.3f} after {len(losses)} steps of {ACCUMULATE} parts")
scales = offbeat.all_gather_object(scaler.get_scale())
print(f"rank {offbeat.rank()} of {offbeat.world_size()}: same scale everywhere: {len(set(scales)) == 1}")
offbeat.shutdown()
