"""Training on the path of the GPU, with CPU tensors in its place (`standin.py`), beside the path of the CPU."""

import contextlib
import dataclasses
import gc
import io

import torch
from standin import Double, in_place_of_a_gpu
from torch import nn

import offbeat
from offbeat.steps import AllReduce, Apply

STEPS = 5

# ranks by host
LAYOUTS = {"alone on a host": "ab", "three hosts": "abc", "two each": "aabb", "three and one": "aaab", "one host": "aa"}
# where both hosts and their ranks are several, NCCL adds up in an order of its own
IN_ORDER = ["alone on a host", "three hosts", "one host"]


@dataclasses.dataclass(frozen=True)
class Coded(offbeat.Algorithm):
    """Gradients by any codec, with residuals."""

    name = "coded"
    codec: str = "onebit"

    def steps(self):
        return [AllReduce("mean", self.codec, feedback=True)]


@dataclasses.dataclass(frozen=True)
class Warm(offbeat.algorithms.QAdam):
    """With a warm-up in 8 bits: in full precision NCCL may add up in an order of its own."""

    name = "warm"

    def warmup(self):
        return self.warmup_steps, [AllReduce("mean", "minmax8")]


@dataclasses.dataclass(frozen=True)
class Vote(offbeat.Algorithm):
    """The example of docs/algorithms.md: ranks vote with the signs of their momentum. It may fail in a step."""

    name = "vote"
    codec: str | None = "onebit"
    fails: int = -1

    def steps(self):
        return [Apply(self.vote, state=["momentum", "seen"]), AllReduce("sum", self.codec), Apply(self.count)]

    def vote(self, bucket):
        if bucket.step == self.fails and offbeat.rank() == 1:
            raise ValueError("not in this step")
        momentum = bucket.state["momentum"].lerp_(bucket.values.float(), 0.1)
        bucket.state["seen"].add_(bucket.step)
        bucket.values.copy_(momentum.sign())

    def count(self, bucket):
        bucket.values.sign_()
        for name, piece in bucket.tensors():
            piece.mul_(len(name))


class Model(nn.Module):
    """With buffers, vectors of odd lengths, and a part that not every rank uses in every step."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(20, 300), nn.BatchNorm1d(300), nn.Linear(300, 7)
        self.spare = nn.Linear(7, 7)
        self.to(dtype)

    def forward(self, x, spare):
        x = self.last(self.norm(self.first(x)).relu())
        return self.spare(x) if spare else x


def chosen_by(algorithm):
    """An algorithm by its name, or by the text that makes one."""
    known = vars(offbeat.algorithms) | {"Coded": Coded, "Warm": Warm, "Vote": Vote}
    return eval(algorithm, known) if "(" in algorithm else algorithm


def make_small(algorithm):
    """An optimizer of ten tensors that are one bucket, and a function that makes a step."""
    model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(5)))
    adam = torch.optim.Adam(model.parameters(), lr=1e-7)
    optimizer = offbeat.DistributedOptimizer(adam, model, chosen_by(algorithm))

    def step():
        optimizer.zero_grad()
        model(torch.ones(4, 40)).mean().backward()
        optimizer.step()

    return optimizer, step


def make(algorithm, dtype=torch.float32, *, seed=0, bucket_bytes=8000):
    """A model and its optimizer. Ranks begin with different values, and get rank 0's."""
    torch.manual_seed(seed + offbeat.rank())
    model, chosen = Model(dtype), chosen_by(algorithm)
    plain = dtype is not torch.float32 and not isinstance(chosen, offbeat.algorithms.QAdam)
    # with an eps that float16 has
    optimizer = (
        torch.optim.SGD(model.parameters(), lr=0.01)
        if plain
        else torch.optim.Adam(
            model.parameters(), lr=0.01, betas=(0.9, 0.99), eps=1e-4 if dtype is torch.float16 else 1e-8
        )
    )
    return model, offbeat.DistributedOptimizer(optimizer, model, chosen, bucket_bytes=bucket_bytes)


def step(model, optimizer, number):
    """One step on data of this rank and step. The spare part is used by some rank in every other step."""
    generator = torch.Generator().manual_seed(100 * number + offbeat.rank())
    x = torch.randn(8, 20, generator=generator).to(model.first.weight.dtype)
    optimizer.zero_grad()
    spare = number % 2 == 0 and offbeat.rank() == number // 2 % offbeat.world_size()
    model(x, spare).float().square().mean().backward()
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    optimizer.step()
    return [*gradients, *(t.clone() for t in model.state_dict().values())]


def train(algorithm, dtype=torch.float32, steps=STEPS):
    """Gradients and weights after each step and what was kept, and the names of the latter."""
    model, optimizer = make(algorithm, dtype)
    seen = [step(model, optimizer, number) for number in range(steps)]
    kept = kept_by(optimizer)
    optimizer.remove()
    seen.append([whole(kept[name][label], label) for name, label in names_of(kept)])
    return seen, names_of(kept)


def kept_by(optimizer):
    return kept_in(optimizer.state_dict())


def kept_in(state):
    """What steps keep, of gradients and of weights; never of both."""
    ours = state["offbeat"]
    return ours.get("kept", {}) | ours.get("weights", {}).get("kept", {})


def names_of(kept):
    return [(name, label) for name in sorted(kept) for label in sorted(kept[name])]


def whole(kept, label):
    """What is kept of a tensor, wherever it lies: on the GPU others carry and sum an element, and never several. All
    else is every rank's own."""
    if not label.endswith(("shares", "results")):
        return kept
    rows, hosts = offbeat.all_gather(kept), offbeat.all_gather_object(offbeat.host())
    rows = [row for row, host in zip(rows, hosts, strict=True) if host == offbeat.host() or "results" in label]
    return torch.stack(rows).gather(0, torch.stack(rows).abs().argmax(dim=0, keepdim=True))


def differences(one, other):
    """(step, place) of tensors that are not the same to the bit."""
    found = []
    for number, (these, those) in enumerate(zip(one, other, strict=True)):
        for place, (a, b) in enumerate(zip(these, those, strict=True)):
            same = a is b if a is None or b is None else torch.equal(bits(a), bits(b))
            found += [] if same else [(number, place)]
    return found


def bits(tensor):
    return (
        tensor.detach().contiguous().view(torch.uint8) if tensor.dim() else tensor.detach().reshape(1).view(torch.uint8)
    )


def compare(cases, schedules=(None,), train=train):
    """Trains with each (algorithm, dtype) on both paths, on that of the GPU on each schedule of streams; None: as they
    happen to run. Gives a double that was used and is not left behind yet."""
    double = Double()
    for algorithm, dtype in cases:
        usual, words = train(algorithm, dtype)
        for lazy in schedules:
            case = f"{algorithm} of {dtype}" + ("" if lazy is None else f", lazy {lazy:b}")
            # for the report of a job that hangs
            print(case, flush=True)
            if lazy is not None:
                double.schedule(lazy)
            with in_place_of_a_gpu(double):
                found, others = train(algorithm, dtype)
            wrong = differences(usual, found)
            assert not wrong, f"other bits: {case}, (step, tensor) {wrong[:10]}"
            assert words == others, (case, words, others)
    return double


def both():
    """A script of ranks: trains with algorithms on both paths, and compares bits. Its arguments are types, algorithms,
    and schedules of streams if there are any."""
    import sys

    import gpu_background
    import gpu_training
    import torch

    import offbeat

    offbeat.init(timeout=20.0)
    types, *rest = sys.argv[1:]
    schedules = [int(one) for one in rest if one.isdigit()]
    algorithms = [one for one in rest if not one.isdigit()]
    background = algorithms[0].startswith("Async")
    cases = [(algorithm, getattr(torch, dtype)) for dtype in types.split(",") for algorithm in algorithms]
    train = gpu_background.train if background else gpu_training.train
    gpu_training.leave(gpu_training.compare(cases, schedules or [None], train))


def forgetful():
    """A script of ranks: trains on both paths, on that of the GPU with the wrong stream somewhere or without waits, and
    says whether it shows."""
    import contextlib
    import sys

    import gpu_background
    import gpu_training
    from standin import Double, in_place_of_a_gpu

    import offbeat

    offbeat.init(timeout=5.0)
    algorithm, where, forgotten = sys.argv[1:]
    of = gpu_background if algorithm.startswith("Async") else gpu_training
    usual, double = of.train(algorithm), Double()
    if forgotten:
        double.forget(forgotten, ours=True, times=10**6)
    with in_place_of_a_gpu(double), of.elsewhere(double, where) if where else contextlib.nullcontext():
        shows = gpu_training.differences(usual[0], of.train(algorithm)[0])
        print("other bits" if shows else "the same bits", flush=True)


def end(optimizer):
    """Nobody leaves while others still need it for a step."""
    offbeat.barrier()
    optimizer.remove()


def run(double, algorithm, parts, begin=make):
    """The weights after training in parts, such as "gpu:3,cpu:6": a path, and the step before which it ends. Each part
    has a model and an optimizer of its own, which go on from the checkpoint of the one before."""
    file, number = None, 0
    for part in parts.split(","):
        path, stop = part.split(":")
        with in_place_of_a_gpu(double) if path == "gpu" else contextlib.nullcontext():
            model, optimizer = begin(algorithm, seed=0 if file is None else 9)
            if file is not None:
                loaded = torch.load(file, weights_only=True)
                model.load_state_dict(loaded["model"])
                optimizer.load_state_dict(loaded["optimizer"])
                assert names_of(kept_in(loaded["optimizer"])) == names_of(kept_by(optimizer)), (algorithm, parts)
            while number < int(stop):
                step(model, optimizer, number)
                number += 1
            file = io.BytesIO()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
            file.seek(0)
            end(optimizer)
    return [bits(tensor).clone() for tensor in model.state_dict().values()]


def stopped():
    """A script of ranks: training that is stopped goes on to the bit. Its arguments are ways to the same end, as `run`
    takes them, and algorithms."""
    import sys

    import gpu_background
    import gpu_training
    import torch
    from standin import Double

    import offbeat

    offbeat.init(timeout=20.0)
    double = Double()
    ways, *algorithms = sys.argv[1:]
    for algorithm in algorithms:
        begin = gpu_background.begin if algorithm.startswith("Async") else gpu_training.make
        usual, *others = ways.split()
        wanted = gpu_training.run(double, algorithm, usual, begin)
        for way in others:
            found = gpu_training.run(double, algorithm, way, begin)
            same = [torch.equal(a, b) for a, b in zip(wanted, found, strict=True)]
            assert all(same), (algorithm, way, same)
    gpu_training.leave(double)


def leave(double):
    """Ends the rank in good order: nothing may be left."""
    # an error that was caught holds on to where it came from
    gc.collect()
    offbeat.shutdown()
    left = double.left()
    assert left == 0, f"{left} things of the device were left behind"


@contextlib.contextmanager
def elsewhere(double, where):
    """Lets a stream go by: `where` is "before", what our stream waits for, or "after", what torch's waits for."""
    from offbeat import devices

    idle = double.new_stream()
    double.streams.append(idle)
    if where == "before":
        name, wrong = "marker", lambda carriage, mark: lambda tensors: mark(tensors, idle.value)
    else:

        def wrong(carriage, scheduler):
            gained = scheduler.finish(idle.value)
            carriage.device.joined()
            return gained

        name = "finish"
    right = getattr(devices.Carriage, name)
    setattr(devices.Carriage, name, wrong)
    try:
        yield
    finally:
        setattr(devices.Carriage, name, right)
