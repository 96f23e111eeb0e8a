"""Collectives between local ranks: are they right, and how long do they take beside gloo's?

make demo        or        torchrun --nproc-per-node 4 examples/demo.py
"""

import statistics
import sys
import time

import torch
import torch.distributed as dist

import offbeat

SIZES = {"1 kB": 1 << 10, "64 kB": 1 << 16, "1 MB": 1 << 20, "16 MB": 1 << 24, "64 MB": 1 << 26}
ROUNDS = 20


def say(text="", end="\n"):
    if offbeat.rank() == 0:
        print(text, end=end, flush=True)


def check_collectives():
    rank, world = offbeat.rank(), offbeat.world_size()
    mine = torch.full((3,), float(rank))
    total = float(sum(range(world)))
    pieces = [torch.tensor([100 * rank + peer]) for peer in range(world)]

    def in_place(collective, *args):
        tensor = mine.clone()
        collective(tensor, *args)
        return tensor[0].item()

    results = {
        "all_reduce, sum": in_place(offbeat.all_reduce) == total,
        "all_reduce, mean": in_place(offbeat.all_reduce, "mean") == total / world,
        "broadcast from the last rank": in_place(offbeat.broadcast, world - 1) == world - 1,
        "all_gather": [t[0].item() for t in offbeat.all_gather(mine)] == list(range(world)),
        "reduce_scatter": offbeat.reduce_scatter([mine] * world)[0].item() == total,
        "all_to_all": [t.item() for t in offbeat.all_to_all(pieces)] == [100 * peer + rank for peer in range(world)],
        "all_gather_object": offbeat.all_gather_object({"rank": rank}) == [{"rank": r} for r in range(world)],
    }
    for name, right in results.items():
        wrong = torch.tensor(int(not right))
        offbeat.all_reduce(wrong, "max")  # one wrong rank is enough
        say(f"  {'wrong' if wrong else 'right'}  {name}")
        if wrong:
            sys.exit(f"{name} gave a wrong result on some rank")


def measure(name, nbytes):
    """Medians in ms of three ways to sum f32 over all ranks: in turns, so that all meet the same machine."""
    plain, shared = torch.empty(nbytes // 4), offbeat.shared_empty(nbytes // 4)
    ways = (dist.all_reduce, plain), (offbeat.all_reduce, plain), (offbeat.all_reduce, shared)
    times = [[], [], []]
    for i in range(-2, ROUNDS):  # two to warm up
        if sys.stdout.isatty():
            say(f"\r  {name}: round {max(i, 0) + 1} of {ROUNDS} ", end="")
        for (all_reduce, tensor), taken in zip(ways, times, strict=True):
            tensor.fill_(1.0)
            dist.barrier()
            began = time.perf_counter()
            all_reduce(tensor)
            if i >= 0:
                taken.append(1e3 * (time.perf_counter() - began))
            assert tensor[0] == tensor[-1] == offbeat.world_size()
    medians = torch.tensor([statistics.median(taken) for taken in times])
    offbeat.all_reduce(medians, "max")  # a collective is over when the last rank has it
    return medians.tolist()


def main():
    dist.init_process_group("gloo")  # only to compare with
    offbeat.init()
    say(f"\nOffbeat: {offbeat.world_size()} ranks, {offbeat.local_size()} of them on this host\n")
    check_collectives()
    say(f"\nall_reduce of f32, sum; median of {ROUNDS} rounds on the slowest rank\n")
    say("     size       gloo    offbeat, plain tensor    offbeat, shared_empty")
    for name, nbytes in SIZES.items():
        gloo, plain, shared = measure(name, nbytes)
        clear = "\r" if sys.stdout.isatty() else ""
        ours = f"{plain:9.3f} ms {gloo / plain:6.1f}x {shared:15.3f} ms {gloo / shared:6.1f}x"
        say(f"{clear}  {name:>7} {gloo:7.3f} ms {ours}")
    say("\nx: times faster than gloo in this run. `make bench` compares with OpenMPI too, also over slow networks.")
    offbeat.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
