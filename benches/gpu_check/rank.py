"""A rank of the check: the same training with DDP over NCCL and with every algorithm for GPUs."""

import os
import time

import torch
from torch import nn

import offbeat
from offbeat import algorithms

STEPS = 30
# How far weights may be from those of DDP after these steps, relative to how far these have moved.
ALGORITHMS: dict[str, tuple[offbeat.Algorithm, float]] = {
    "allreduce": (algorithms.GradientAllReduce(), 1e-3),
    "bytegrad": (algorithms.ByteGrad(), 0.1),
    "bytegrad with feedback": (algorithms.ByteGrad(feedback=True), 0.1),
    "qsgd": (algorithms.QSGD(), 0.1),
    "powersgd, rank 32": (algorithms.PowerSGD(rank=32, least=0), 0.3),
    "local_sgd, every step": (algorithms.LocalSGD(every=1), 1e-3),
    "decentralized, all": (algorithms.Decentralized(peers="all"), 1e-3),
    "diloco, every step": (algorithms.DiLoCo(every=1, outer_lr=1.0, outer_momentum=0.0), 1e-3),
    "low_precision_decentralized, all": (
        algorithms.LowPrecisionDecentralized(peers="all", codec=None, gamma=1.0),
        1e-3,
    ),
    "async_server, staleness 0": (algorithms.AsyncServer(staleness=0), 1e-3),
}


def make(device: torch.device) -> nn.Module:
    torch.manual_seed(1)
    width = 1024
    return nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 64)).to(
        device
    )


def flat(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, device: torch.device) -> float:
    """Seconds of a step, without the first ones."""
    generator = torch.Generator(device).manual_seed(rank)
    since = time.perf_counter()
    for step in range(STEPS):
        if step == STEPS // 3:
            torch.cuda.synchronize(device)
            since = time.perf_counter()
        x = torch.randn(64, 64, generator=generator, device=device)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x.flip(1)).backward()
        optimizer.step()
    torch.cuda.synchronize(device)
    return (time.perf_counter() - since) / (STEPS - STEPS // 3)


def main() -> None:
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    # every rank counts as a host, so that codecs have something to do
    os.environ["OFFBEAT_HOST"] = f"gpu{rank}"
    torch.distributed.init_process_group("nccl", device_id=device)
    offbeat.init()
    model = make(device)
    begin = flat(model)
    wrapped = nn.parallel.DistributedDataParallel(model, device_ids=[device.index])
    seconds = train(wrapped, torch.optim.SGD(model.parameters(), lr=0.1), rank, device)
    exact = flat(model)
    rows = [("DDP with NCCL", seconds, 0.0, True)]
    for name, (algorithm, bound) in ALGORITHMS.items():
        model = make(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = offbeat.DistributedOptimizer(optimizer, model, algorithm)
        seconds = train(model, optimizer, rank, device)
        # nobody leaves while others still need it for a step
        offbeat.barrier()
        optimizer.remove()
        far = float((flat(model) - exact).norm() / (exact - begin).norm())
        rows.append((name, seconds, far, far <= bound))
    if rank == 0:
        print(f"training on {offbeat.world_size()} GPUs, {begin.numel()} parameters\n")
        print("| algorithm | ms per step | distance from DDP | |\n|---|---|---|---|")
        for name, seconds, far, good in rows:
            print(f"| {name} | {1000 * seconds:.2f} | {far:.1e} | {'' if good else 'too far'} |")
        for name, _, far, good in rows:
            if not good:
                print(f"WRONG {name}: {far:.1e} from DDP")
    offbeat.shutdown()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
