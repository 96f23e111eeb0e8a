"""What steps keep of parameters (residuals, momentum, factors, states of your own), by name: saving and loading."""

import warnings
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils.dlpack import from_dlpack

from . import _core

# Parameter, then the number of the step and what the step calls it.
Kept = dict[str, dict[str, Tensor]]


def save(scheduler: _core.Scheduler, names: Sequence[str]) -> Kept:
    """All that steps keep; empty if they keep nothing."""
    saved = {name: scheduler.saved(index) for index, name in enumerate(names)}
    return {
        name: {label: from_dlpack(values) for label, _, values in entries} for name, entries in saved.items() if entries
    }


def restore(scheduler: _core.Scheduler, names: Sequence[str], kept: Kept) -> None:
    """Gives steps back what they had kept."""
    for index, name in enumerate(names):
        for label, values in kept.get(name, {}).items():
            scheduler.restore(index, label, values)


def fitting(scheduler: _core.Scheduler, names: Sequence[str], kept: Kept, saved_by: "Author", here: "Author") -> Kept:
    """Of what was kept, what means the same here: what all ranks have alike everywhere, what each has for itself in a
    world of the same size, and what depends on who carries it only where that is the same too."""
    if saved_by == here:
        return kept
    keepers = ("all", "each") if saved_by[:2] == here[:2] else ("all",)
    fit = {
        name: {label for label, keeper, _ in scheduler.saved(index) if keeper in keepers}
        for index, name in enumerate(names)
    }
    found = {
        name: {label: values for label, values in entries.items() if label in fit.get(name, ())}
        for name, entries in kept.items()
    }
    return {name: entries for name, entries in found.items() if entries}


# An algorithm, how many ranks, and where they are: everything that was kept means the same only where all three are.
Author = tuple[object, object, object]


def author(state: dict[str, Any]) -> Author:
    """By whom a state was saved."""
    return state.get("algorithm"), state.get("world_size"), state.get("place", "cpu")


def warn_of_reset(kept: Kept, taken: Kept, saved_by: Author, here: Author) -> None:
    """Says what of a checkpoint does not fit, and begins at zero."""
    labels = {label for entries in kept.values() for label in entries}
    lost = sorted(labels - {label for entries in taken.values() for label in entries})
    if lost:
        apart = saved_by[2] != here[2]
        places = [f" ({each[2]})" if apart else "" for each in (saved_by, here)]
        warnings.warn(
            f"the checkpoint is of {saved_by[0]} on {saved_by[1]} ranks{places[0]}, this is {here[0]} on {here[1]}"
            f"{places[1]}: what steps "
            f"had kept of {len(kept)} parameters under {', '.join(lost)} begins at zero again",
            stacklevel=3,
        )
