"""What exchanges in the background keep (accounts, references, residuals, distances), by name of parameter: saving it,
and going on from it on all ranks together."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from . import _core, agreement
from .keeping import Kept

# Without these a number of rounds means nothing. What else is kept begins at zero where it is missing.
NEEDED = ("account", "base", "reference")


def save(core: _core.Background, names: Sequence[str]) -> tuple[int, int, Kept]:
    """The number of the next round, the ranks that take part, and all that is kept."""
    number, living, tensors = core.save()
    found = zip(names, tensors, strict=True)
    return number, living, {name: {label: from_dlpack(values) for label, values in of} for name, of in found if of}


def go_on(
    core: _core.Background,
    group: _core.Group,
    names: Sequence[str],
    state: dict[str, Any],
    here: tuple[str, int, int],
) -> bool:
    """Gives exchanges that have not begun what they had kept, if that fits on all ranks. Says whether it did. Every
    rank calls it; `here` is the algorithm, the number of ranks and this one."""
    kept: Kept = state.get("kept", {})
    saved_by = (state.get("algorithm"), state.get("world_size"), state.get("rank"))
    number: int = state.get("round", 0)
    fits = "round" in state and saved_by == here and has_all(save(core, names)[2], kept)
    rows = torch.stack(agreement.gather(group, torch.tensor([int(fits), number], device="cpu")))
    everywhere, numbers = bool(rows[:, 0].all()), rows[:, 1]
    taken: set[str] = set()
    if everywhere:
        for index, name in enumerate(names):
            for label, values in kept.get(name, {}).items():
                if core.restore(index, label, values.detach().to("cpu", torch.float32).contiguous()):
                    taken.add(label)
        core.go_on(number, int(numbers.min()), int(numbers.max()))
    else:
        core.go_on(0, 0, 0)
    lost = sorted({label for entries in kept.values() for label in entries} - taken)
    if "round" in state and not everywhere:
        lost += ["rounds", "clocks"]
    if lost:
        warn_of_reset(lost, saved_by, here)
    return everywhere


def has_all(mine: Kept, kept: Kept) -> bool:
    """Whether all that is needed was kept, of all parameters."""
    for name, entries in mine.items():
        for label, values in entries.items():
            other = kept.get(name, {}).get(label)
            if label in NEEDED and (other is None or other.numel() != values.numel()):
                return False
    return True


def warn_of_reset(lost: Sequence[str], saved_by: tuple[object, object, object], here: tuple[str, int, int]) -> None:
    """Says what of a checkpoint does not fit, and begins anew."""
    if saved_by == here:
        why = f"the checkpoint of {here[0]} has what this run has no use for, or other ranks' does not fit"
    else:
        why = (
            f"the checkpoint is of {saved_by[0]} on {saved_by[1]} ranks, by rank {saved_by[2]}; this is {here[0]} on "
            f"{here[1]}, rank {here[2]}"
        )
    warnings.warn(f"{why}: {', '.join(lost)} begin anew", stacklevel=4)
