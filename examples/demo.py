"""Trains a small convolutional network on handwritten digits, once with torch's DDP and once with Offbeat.

make demo        or        torchrun --nproc-per-node 4 examples/demo.py

Both start from the same weights and see the same data in the same order, epoch by epoch in turns, so that both meet the
same machine. Writes out/demo.png (loss and time of steps) and a trace for each rank.
"""

import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import offbeat

EPOCHS, BATCH, TESTED = 8, 16, 360
TOLERANCE = 1e-5
OUT = Path("out")
COLOURS = {"DDP": "#d55e00", "Offbeat": "#0072b2"}


def say(text="", end="\n"):
    if offbeat.rank() == 0:
        print(text, end=end, flush=True)


def network():
    """Smooth everywhere: at a kink of ReLU or max-pooling one rounded bit can send two trainings different ways."""
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(1, 32, 3, padding=1), nn.GELU(), nn.Conv2d(32, 64, 3, padding=1), nn.GELU()]
    dense = [nn.Flatten(), nn.Linear(1024, 128), nn.GELU(), nn.Linear(128, 10)]
    return nn.Sequential(*convolutions, nn.AvgPool2d(2), *dense)


def digits():
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8)[order] / 8 - 1
    y = torch.tensor(labels)[order]
    return (x[TESTED:], y[TESTED:]), (x[:TESTED], y[:TESTED])


class Run:
    """One training. All that differs between the two is in `__init__`."""

    def __init__(self, name):
        self.name, self.weights = name, network()
        self.model = DistributedDataParallel(self.weights) if name == "DDP" else self.weights
        self.optimizer = torch.optim.SGD(self.weights.parameters(), lr=0.05, momentum=0.9)
        if name == "Offbeat":
            self.optimizer = offbeat.DistributedOptimizer(self.optimizer, self.weights)
        self.losses, self.times = [], []  # of each epoch, a list

    def epoch(self, number, x, y):
        losses, times = [], []
        rank, together = offbeat.rank(), BATCH * offbeat.world_size()
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(number))
        for step in range(len(y) // together):
            mine = order[step * together + rank * BATCH :][:BATCH]
            began = time.perf_counter()
            loss = nn.functional.cross_entropy(self.model(x[mine]), y[mine])
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            times.append(1e3 * (time.perf_counter() - began))
            losses.append(loss.item())
            if sys.stdout.isatty():
                say(f"\r  epoch {number + 1}, {self.name}: step {step + 1:3}  ", end="")
        self.losses.append(losses)
        self.times.append(times)

    def accuracy(self, x, y):
        with torch.no_grad():
            return (self.weights(x).argmax(1) == y).float().mean().item()

    def all(self, values):
        """Of every step, without the first epoch, in which both engines arrange their buckets."""
        return [value for epoch in values[1:] for value in epoch]


def draw(path, runs):
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    for run, style, width in zip(runs, ("-", "--"), (3, 1.5), strict=True):
        colour = COLOURS[run.name]
        left.plot([loss for epoch in run.losses for loss in epoch], style, lw=width, color=colour, label=run.name)
        steps, middle = run.all(run.times), statistics.median(run.all(run.times))
        right.plot(steps, ".", ms=4, alpha=0.5, color=colour)
        right.axhline(middle, color=colour, label=f"{run.name}: median {middle:.1f} ms")
    left.set(title="loss on rank 0", xlabel="step", yscale="log")
    # a few steps in which the system did something else would squeeze all the others
    highest = 3 * max(statistics.median(run.all(run.times)) for run in runs)
    right.set(title="time of a step, after the first epoch", xlabel="step", ylabel="ms", ylim=(0, highest))
    for axes in (left, right):
        axes.legend()
        axes.grid(alpha=0.3)
    figure.suptitle(f"A small convolutional network learns digits on {offbeat.world_size()} ranks of one host")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def table_line(epoch, runs, test):
    losses = "  ".join(f"{statistics.mean(run.losses[epoch]):7.4f}" for run in runs)
    shares = "  ".join(f"{run.accuracy(*test):7.1%}" for run in runs)
    times = "  ".join(f"{statistics.median(run.times[epoch]):7.1f}" for run in runs)
    return f"  {epoch + 1:5}   {losses}   {shares}   {times}"


def main():
    dist.init_process_group("gloo")  # for DDP
    offbeat.init()
    torch.set_num_threads(1)
    train, test = digits()
    runs = [Run("DDP"), Run("Offbeat")]
    count = sum(p.numel() for p in runs[0].weights.parameters())
    say(f"\n{len(train[1])} digits, {count} parameters, {offbeat.world_size()} ranks with batches of {BATCH}\n")
    say("                loss         accuracy, tested      ms for a step")
    say("  epoch       DDP  Offbeat       DDP  Offbeat       DDP  Offbeat")
    for epoch in range(EPOCHS):
        for run in runs:
            offbeat.barrier()
            run.epoch(epoch, *train)
        if offbeat.rank() == 0:  # testing on one rank alone waits for nobody
            say(("\r" if sys.stdout.isatty() else "") + table_line(epoch, runs, test))
    ddp, ours = (nn.utils.parameters_to_vector(run.weights.parameters()).detach() for run in runs)
    distance = ((ours - ddp).norm() / ddp.norm()).item()
    slow, fast = (statistics.median(run.all(run.times)) for run in runs)
    say(f"\nweights: DDP's and ours differ by {distance:.1e} of their norm (order of sums; at most {TOLERANCE:.0e})")
    assert distance <= TOLERANCE, f"weights differ by {distance}"
    say(f"steps:   {fast:.1f} ms with Offbeat, {slow:.1f} ms with DDP over gloo: {slow / fast:.2f} times as fast")
    OUT.mkdir(exist_ok=True)
    if offbeat.rank() == 0:
        draw(OUT / "demo.png", runs)
        say(f"picture: {OUT / 'demo.png'}")
    offbeat.trace.save(OUT / "demo-trace-{rank}.json")
    say(f"traces:  {OUT}/demo-trace-*.json; together: offbeat trace merge -o all.json {OUT}/demo-trace-*.json")
    offbeat.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
