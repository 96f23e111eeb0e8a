"""What scripts on ranks have in common; `import support` works in all of them."""

import contextlib
import copy
import hashlib
import json
import time
from pathlib import Path

import torch
from torch import nn

import offbeat

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8)
DTYPES = (*FLOATS, *INTEGERS, torch.bool)


def fails(kind, words, call, *args, **options):
    """The call must raise exactly this error, whose message holds all the words; gives the error."""
    raised = None
    try:
        call(*args, **options)
    except kind as error:
        raised = error
    assert type(raised) is kind, f"{getattr(call, '__name__', call)} raised {raised!r} and not {kind.__name__}"
    missing = [word for word in words.split("|") if word not in str(raised)]
    assert not missing, f"{missing} not in: {raised}"
    return raised


def bits(tensor):
    """The bytes of a tensor, which tell -0.0 from 0.0 and one NaN from another."""
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.detach().reshape(-1))
    return bytes(flat.view(torch.uint8).numpy())


def same_everywhere(*tensors):
    """Whether every rank holds the same bits. Goes through the collective of objects, not through sums."""
    return len(set(offbeat.all_gather_object(tuple(bits(tensor) for tensor in tensors)))) == 1


def values(dtype, count, seed=0, *, small=False):
    """Numbers of a type that tell ranks and places apart; `small` ones can be multiplied without overflow."""
    generator = torch.Generator().manual_seed(1000 * seed + count)
    if dtype is torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).bool()
    if dtype.is_floating_point:
        return (torch.rand(count, generator=generator, dtype=torch.float64) + (0.5 if small else -0.5)).to(dtype)
    least = 0 if small or not dtype.is_signed else -20
    return torch.randint(least, 3 if small else 20, (count,), generator=generator).to(dtype)


def tell(**facts):
    """One line of JSON for the test to read (see `told`)."""
    print(json.dumps(facts, default=str), flush=True)


def told(rank):
    """What a rank said with `tell`, in order. Called by the test."""
    return [json.loads(line) for line in rank.out.splitlines() if line.startswith("{")]


def report(call, *args, **options):
    """Tells how a call that should fail did, and when (seconds since boot, so that ranks can be compared)."""
    try:
        call(*args, **options)
    except BaseException as error:  # the test judges it
        fields = {name: getattr(error, name, None) for name in ("rank", "host", "cause")}
        tell(kind=type(error).__name__, message=str(error), at=time.monotonic(), **fields)
    else:
        tell(kind=None)


def blocks(call, silent):
    """Makes a call that waits for a rank that never comes: an all_reduce, one under way ("handle"), or a recv."""
    if call == "recv":
        offbeat.recv(torch.ones(3), silent)
    elif call == "handle":
        offbeat.all_reduce(torch.ones(3), async_op=True).wait()
    else:
        offbeat.all_reduce(torch.ones(3))


def note_time(name):
    """Leaves the time in a file of the job's directory: what happens next may leave no chance to say anything."""
    Path(name).write_text(repr(time.monotonic()))


def descriptors(target=""):
    """The open descriptors of this process whose target holds a text."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if target in (link := str(entry.readlink())):
                found.append(link)
        except OSError:
            continue
    return found


# The environment that makes ranks of one host use either kind of link.
LINKS = {"shared memory": {}, "tcp": {"OFFBEAT_SHM": "0"}}

# Where the ranks of a job are, for `place`.
PLACES = {"one host": {}, "own hosts": lambda rank: {"OFFBEAT_HOST": f"h{rank}"}}
MIXED = PLACES | {"two on one host": lambda rank: {"OFFBEAT_HOST": f"h{rank // 2}"}}


def place(ranks, where, script, world, **options):
    """Starts the ranks of a job on hosts of this kind."""
    per_rank = MIXED[where]
    if per_rank:
        options["per_rank"] = per_rank
    return ranks(script, world, **options)


def survivors(job, *lost):
    """The ranks of a job but those that are lost."""
    return [rank for rank in job.ranks if rank.rank not in lost]


# Of training: small models, data that every rank can make for every other, and what should come out.

CNN, TRANSFORMER = "cnn", "transformer"


class Transformer(nn.Module):
    """Two layers of attention over short sequences of 17 words."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(17, 16)
        layers = (nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(2))
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(16, 17)

    def forward(self, words):
        hidden = self.words(words)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden).transpose(1, 2)


def make_model(kind=CNN, seed=0):
    """A small model, the same for the same seed. The convolutional one has BatchNorm."""
    torch.manual_seed(seed)
    if kind == TRANSFORMER:
        return Transformer()
    if kind == CNN:
        first = [nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)]
        second = [nn.Conv2d(6, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
        return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(128, 10))
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 4))


def make_optimizer(kind, model):
    """An optimizer with state."""
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)


def make_batch(kind, rank, step, size=6):
    """What a rank learns in a step; every rank can make it."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    if kind == TRANSFORMER:
        words = torch.randint(0, 17, (size, 9), generator=generator)
        return words[:, :-1], words[:, 1:]
    if kind == CNN:
        return torch.randn(size, 1, 8, 8, generator=generator), torch.randint(0, 10, (size,), generator=generator)
    return torch.randn(size, 8, generator=generator), torch.randint(0, 4, (size,), generator=generator)


def loss_of(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def train(model, optimizer, kind, steps, rank=None):
    """The loop that users write; gives the losses."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, make_batch(kind, offbeat.rank() if rank is None else rank, step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def wrap(wraps, model, optimizer, **options):
    """Wraps by one of both names; gives what is called in forward then."""
    if wraps == "DataParallel":
        return offbeat.DataParallel(model, **options)
    offbeat.DistributedOptimizer(optimizer, model, **options)
    return model


def train_scaled(model, optimizer, scheduler, scaler, step):
    """A step with a GradScaler, clipping every other time; the gradients of rank 1 overflow in step 4."""
    optimizer.zero_grad()
    loss = loss_of(model, make_batch("mlp", offbeat.rank(), step))
    if step == 4 and offbeat.rank() == 1:
        loss = loss * float("inf")
    scaler.scale(loss).backward()
    if step % 2:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()


def simulate(model, optimizer, kind, steps, layout):
    """The same training in one process: gradients of all ranks, summed in the documented order, and divided once.

    The layout is a list of hosts, each a list of ranks. Buffers are those of rank 0, as in DDP.
    """
    parameters = list(model.parameters())
    for step in steps:
        before = [buffer.clone() for buffer in model.buffers()]
        after, gradients = [], {}
        for rank in sorted(rank for host in layout for rank in host):
            for buffer, value in zip(model.buffers(), before, strict=True):
                buffer.copy_(value)
            gradients[rank] = torch.autograd.grad(loss_of(model, make_batch(kind, rank, step)), parameters)
            if rank == 0:
                after = [buffer.clone() for buffer in model.buffers()]
        for buffer, value in zip(model.buffers(), after, strict=True):
            buffer.copy_(value)
        for at, parameter in enumerate(parameters):
            parameter.grad = mean_in_order({rank: of_rank[at] for rank, of_rank in gradients.items()}, layout)
        optimizer.step()


def mean_in_order(parts, layout=None):
    """The mean over ranks, as documented: ranks of a host ascending, then hosts ascending, then one division."""
    if not isinstance(parts, dict):
        parts = dict(enumerate(parts))
    total = None
    for host in layout or [sorted(parts)]:
        of_host = parts[host[0]].clone()
        for rank in host[1:]:
            of_host += parts[rank]
        total = of_host if total is None else total + of_host
    return total / len(parts)


def gradients_of(model, loss):
    """Gradients by name, computed without touching the model's own."""
    named = {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}
    return dict(zip(named, torch.autograd.grad(loss, list(named.values()), allow_unused=True), strict=True))


def mean_gradients(model, losses):
    """What every rank should find in `.grad`: the mean over `losses`, one function of the model for each rank.

    None counts as zero, unless nobody has a gradient.
    """
    alone = copy.deepcopy(model)
    ranks = [gradients_of(alone, loss(alone)) for loss in losses]
    found = {}
    for name, tensor in alone.named_parameters():
        if any(of_rank.get(name) is not None for of_rank in ranks):
            parts = [torch.zeros_like(tensor) if of_rank.get(name) is None else of_rank[name] for of_rank in ranks]
            found[name] = mean_in_order([part.detach() for part in parts])
    return found


def check_gradients(model, want, what=""):
    """Every `.grad` must hold the wanted bits; None where nothing is wanted."""
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if name not in want:
            assert gradient is None, f"{what} {name} has a gradient and should have none: {gradient}"
            continue
        assert gradient is not None, f"{what} {name} has no gradient"
        assert gradient.shape == parameter.shape, (what, name)
        assert gradient.dtype == parameter.dtype, (what, name)
        assert bits(gradient) == bits(want[name]), f"{what} {name}: differs by {(gradient - want[name]).abs().max()}"


def digest(model, *, buffers=True):
    """A text that is the same for two models only if all their bits are."""
    tensors = dict(model.named_parameters()) | (dict(model.named_buffers()) if buffers else {})
    summary = hashlib.sha256()
    for name, tensor in tensors.items():
        summary.update(name.removeprefix("module.").encode() + bits(tensor))
    return summary.hexdigest()[:16]


def differences(model, other):
    """How far the parameters of two models are apart, relative to the largest of each tensor."""
    pairs = zip(model.named_parameters(), other.parameters(), strict=True)
    return {name: float((a - b).detach().abs().max() / b.detach().abs().max()) for (name, a), b in pairs}


@contextlib.contextmanager
def noted_warnings():
    """The texts of the warnings that are given inside."""
    import warnings

    texts = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(each.message) for each in caught]
