"""Lets Offbeat choose the size of buckets while it trains, shows what it measured, and writes a trace.

torchrun --nproc-per-node 2 examples/07_tune_and_trace.py        or alone: python examples/07_tune_and_trace.py
To tune beforehand and keep the result:  offbeat tune -- python train.py
To see all ranks on one time line:       offbeat trace merge -o all.json out/trace-*.json, then open ui.perfetto.dev
"""

import torch
from torch import nn

import offbeat

offbeat.init()
torch.manual_seed(offbeat.rank())
layers = [layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.ReLU())]
model = nn.Sequential(*layers, nn.Linear(512, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
# sizes are tried in the first steps, all ranks agree on the best; no result changes by it
optimizer = offbeat.DistributedOptimizer(optimizer, model, bucket_bytes="auto")

for _ in range(100):
    x = torch.randn(16, 512)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), x.mean(1, keepdim=True)).backward()
    optimizer.step()

stats = offbeat.stats()
if offbeat.rank() == 0:
    for one in stats["models"]:
        print(f"{one['step']} steps, {one['buckets']} buckets of at most {one['bucket_bytes']} bytes")
    hidden = stats["seconds"]["hidden"]
    print("nothing to communicate" if hidden is None else f"{hidden:.0%} of the communication was hidden")
path = offbeat.trace.save("out/trace-{rank}.json")
print(f"rank {offbeat.rank()} of {offbeat.world_size()}: wrote {path}")
offbeat.shutdown()
