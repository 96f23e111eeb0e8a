"""Training on the path of the GPU, with CPU tensors in its place (`standin.py`), beside the path of the CPU."""

import contextlib
import dataclasses
import gc

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


def make(algorithm, dtype=torch.float32, *, seed=0, bucket_bytes=8000):
    """A model and its optimizer. Ranks begin with different values, and get rank 0's."""
    torch.manual_seed(seed + offbeat.rank())
    model = Model(dtype)
    known = vars(offbeat.algorithms) | {"Coded": Coded, "Warm": Warm, "Vote": Vote}
    chosen = eval(algorithm, known) if "(" in algorithm else algorithm
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
    """Gradients and weights after each step, and what was kept."""
    model, optimizer = make(algorithm, dtype)
    seen = [step(model, optimizer, number) for number in range(steps)]
    kept = kept_by(optimizer)
    optimizer.remove()
    seen.append([whole(kept[name][label], label) for name in sorted(kept) for label in sorted(kept[name])])
    return seen


def kept_by(optimizer):
    """What steps keep, of gradients and of weights; never of both."""
    state = optimizer.state_dict()["offbeat"]
    return state.get("kept", {}) | state.get("weights", {}).get("kept", {})


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


def compare(cases):
    """Trains with each (algorithm, dtype) on both paths. Gives a double that was used and is not left behind yet."""
    double = Double()
    for algorithm, dtype in cases:
        usual = train(algorithm, dtype)
        with in_place_of_a_gpu(double):
            found = train(algorithm, dtype)
        wrong = differences(usual, found)
        assert not wrong, f"other bits: {algorithm} of {dtype}, (step, tensor) {wrong[:10]}"
    return double


def both():
    """A script of ranks: trains with algorithms on both paths, and compares bits."""
    import sys

    import torch
    from gpu_training import compare, leave

    import offbeat

    offbeat.init(timeout=20.0)
    dtype = getattr(torch, sys.argv[1])
    leave(compare([(algorithm, dtype) for algorithm in sys.argv[2:]]))


def leave(double):
    """Ends in good order: nothing may be left."""
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
