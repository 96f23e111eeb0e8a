"""What scripts on ranks have in common; `import support` works in all of them."""

import json
import time
from pathlib import Path

import torch

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


def same_everywhere(tensor):
    """Whether every rank holds the same bits. Goes through the collective of objects, not through sums."""
    return len(set(offbeat.all_gather_object(bits(tensor)))) == 1


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
