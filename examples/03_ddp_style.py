"""The shape of torch's DistributedDataParallel: a script that uses DDP needs another import and another name.

torchrun --nproc-per-node 2 examples/03_ddp_style.py        or alone: python examples/03_ddp_style.py
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import offbeat

offbeat.init()
rank, world = offbeat.rank(), offbeat.world_size()
torch.manual_seed(0)
x = torch.randn(512, 20)
data = TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())
sampler = DistributedSampler(data, num_replicas=world, rank=rank, seed=0)
loader = DataLoader(data, batch_size=32, sampler=sampler)

model = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 2))
model = offbeat.DataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

for epoch in range(10):
    sampler.set_epoch(epoch)
    for features, labels in loader:
        loss = nn.functional.cross_entropy(model(features), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

if rank == 0:  # evaluation on one rank alone waits for nobody
    model.eval()
    with torch.no_grad():
        accuracy = (model(x).argmax(1) == data.tensors[1]).float().mean().item()
    print(f"{world} ranks: accuracy {accuracy:.2f}")
    print(f"keys of a checkpoint have no prefix: {next(iter(model.module.state_dict()))}")
offbeat.shutdown()
