"""Trains on GPUs, one for each rank, where there are as many; else the same lines train on the CPU.

torchrun --nproc-per-node 2 examples/10_gpu_training.py        or alone: python examples/10_gpu_training.py
"""

import torch
from torch import nn

import offbeat

offbeat.init()
rank, world = offbeat.rank(), offbeat.world_size()
# All ranks train on GPUs, or all on the CPU: one GPU for each rank of every host.
gpus = all(offbeat.all_gather_object(torch.cuda.device_count() >= offbeat.local_size()))
device = torch.device("cuda", offbeat.local_rank()) if gpus else torch.device("cpu")
if gpus:
    torch.cuda.set_device(device)
torch.manual_seed(rank)

model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
# 8 bits between hosts; inside of one NCCL sums in full precision.
optimizer = offbeat.DistributedOptimizer(optimizer, model, "bytegrad" if offbeat.local_size() < world else "allreduce")

for step in range(60):
    x = torch.randn(32, 64, device=device)
    loss = nn.functional.mse_loss(model(x), x.roll(1, dims=1))
    optimizer.zero_grad()
    loss.backward()  # on a GPU the exchange is enqueued here, and nobody on the host waits for it
    optimizer.step()
    if step % 20 == 0 and rank == 0:
        print(f"step {step:2}  loss {loss.item():.3f}")

weights = nn.utils.parameters_to_vector(model.parameters()).detach().cpu()
same = all(torch.equal(weights, other) for other in offbeat.all_gather(weights))
print(f"rank {rank} of {world} on {device}: same weights everywhere: {same}")
offbeat.shutdown()
