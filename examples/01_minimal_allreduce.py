"""Sums a tensor over all ranks.

torchrun --nproc-per-node 2 examples/01_minimal_allreduce.py
"""

import torch

import offbeat

offbeat.init()  # finds the other ranks through torchrun's environment
tensor = torch.full((4,), float(offbeat.rank() + 1))
offbeat.all_reduce(tensor)  # in place
print(f"rank {offbeat.rank()} of {offbeat.world_size()}: {tensor.tolist()}")
offbeat.shutdown()
