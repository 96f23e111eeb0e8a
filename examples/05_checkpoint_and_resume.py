"""Stops in the middle, resumes from a file, and ends with the very same bits as if it had never stopped.

torchrun --nproc-per-node 2 examples/05_checkpoint_and_resume.py        or alone, with python
"""

import tempfile
from pathlib import Path

import torch
from torch import nn

import offbeat

STEPS, STOP = 30, 12


def train(begin, end, checkpoint=None):
    """From one step to another, starting from a checkpoint if there is one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer = offbeat.DistributedOptimizer(optimizer, model)
    if checkpoint is not None:  # after wrapping, on every rank its own
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    for step in range(begin, end):
        noise = torch.Generator().manual_seed(1000 * step + offbeat.rank())  # data by step and rank, not by history
        x = torch.randn(16, 10, generator=noise)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x.prod(1, keepdim=True)).backward()
        optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    optimizer.remove()  # as if this process had ended here
    return state


offbeat.init()
whole = train(0, STEPS)

directory = Path(offbeat.broadcast_object(tempfile.mkdtemp() if offbeat.rank() == 0 else None))
path = directory / f"rank{offbeat.rank()}.pt"  # a file for each rank: algorithms may have state of their own on each
torch.save(train(0, STOP), path)
resumed = train(STOP, STEPS, torch.load(path))
path.unlink()

same = all(torch.equal(whole["model"][name], value) for name, value in resumed["model"].items())
print(f"rank {offbeat.rank()} of {offbeat.world_size()}: resumed at step {STOP}, same bits after {STEPS}: {same}")
offbeat.barrier()
if offbeat.rank() == 0:
    directory.rmdir()
offbeat.shutdown()
