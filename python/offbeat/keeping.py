"""What steps keep of parameters (residuals, momentum, factors, states of your own), by name: saving and loading.

A checkpoint says by whom it was saved; `fit` tells from that what of it means the same here.
"""

import warnings
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from . import _core, agreement
from .errors import InvalidArgument
from .steps import Described

# Of what `state_dict` gives: another one is saved when what is there means something else.
VERSION = 1

# Parameter, then the number of the step and what the step calls it.
Kept = dict[str, dict[str, Tensor]]


def readable(state: object) -> dict[str, Any]:
    """What a checkpoint has of ours, if this version can read it. A plain optimizer's has nothing."""
    if state is None:
        return {}
    if not isinstance(state, dict):
        raise InvalidArgument(
            f'the state under "offbeat" must be a dict, not {type(state).__name__}; try: what state_dict() gave, or '
            'leave "offbeat" out, and what the algorithm keeps begins anew'
        )
    if (version := state.get("version", VERSION)) != VERSION:
        raise InvalidArgument(
            f'the state under "offbeat" has version {version!r}, and this Offbeat ({_core.__version__}) reads '
            f'{VERSION}; try: the Offbeat that saved it, or leave "offbeat" out, and what the algorithm keeps begins '
            "anew"
        )
    return state


class Author(NamedTuple):
    """Who saves, or loads. Checkpoints from before some of this was saved count as of the rank that loads them."""

    algorithm: object
    world_size: object
    place: object
    rank: object
    hosts: object  # of each rank the lowest on its host
    codecs: object  # by which chunks are cut, and so who carries what

    @classmethod
    def of(cls, state: dict[str, Any], here: "Author") -> "Author":
        """Who has saved a state."""
        usual = here._asdict() | {"algorithm": None, "world_size": None, "place": "cpu"}
        return cls(**{name: state.get(name, value) for name, value in usual.items()})


class Fit(IntEnum):
    """How much of what was kept means the same here; each includes those before."""

    NOTHING = 0
    ALIKE = 1  # what all ranks have alike
    OWN = 2  # what each rank has for itself
    OF_HOSTS = 3  # what the ranks of a host have alike
    ALL = 4  # what depends on who carries it


def fit(saved_by: Author, here: Author) -> Fit:
    """By who has saved, and who loads."""
    if saved_by.algorithm != here.algorithm:
        return Fit.NOTHING
    if (saved_by.world_size, saved_by.rank) != (here.world_size, here.rank):
        return Fit.ALIKE
    if saved_by.hosts != here.hosts:
        return Fit.OWN
    return Fit.ALL if (saved_by.place, saved_by.codecs) == (here.place, here.codecs) else Fit.OF_HOSTS


class Match(NamedTuple):
    """A checkpoint and who loads it."""

    much: Fit
    saved_by: Author
    here: Author

    @classmethod
    def of(cls, state: dict[str, Any], here: Author, group: _core.Group | None) -> "Match":
        """What of a state fits on all ranks of a group: residuals of some, and none of others, would count for more
        than they are. Every rank calls it."""
        saved_by = Author.of(state, here)
        mine = fit(saved_by, here)
        fits = [mine] if group is None else agreement.gather(group, torch.tensor([int(mine)], device="cpu"))
        return cls(Fit(min(map(int, fits))), saved_by, here)

    @property
    def is_of_same_world(self) -> bool:
        """Whether it is of the same algorithm on as many ranks."""
        return self.saved_by[:2] == self.here[:2]


def of_hosts(steps: Sequence[Described]) -> frozenset[str]:
    """The numbers of those steps whose own things the ranks of a host have alike."""
    return frozenset(str(number) for number, (name, _) in enumerate(steps) if name in ("select", "replicas"))


def keeps(scheduler: _core.Scheduler, names: Sequence[str]) -> bool:
    """Whether steps keep anything."""
    return any(scheduler.saved(index) for index in range(len(names)))


def save(scheduler: _core.Scheduler, names: Sequence[str], *, without: str | None = None) -> Kept:
    """All that steps keep, but for that of one keeper; empty if they keep nothing."""
    saved = {name: scheduler.saved(index) for index, name in enumerate(names)}
    found = {
        name: {label: from_dlpack(values) for label, keeper, values in entries if keeper != without}
        for name, entries in saved.items()
    }
    return {name: entries for name, entries in found.items() if entries}


def restore(scheduler: _core.Scheduler, names: Sequence[str], kept: Kept) -> None:
    """Gives steps back what they had kept."""
    for index, name in enumerate(names):
        for label, values in kept.get(name, {}).items():
            scheduler.restore(index, label, values)


def fitting(scheduler: _core.Scheduler, names: Sequence[str], kept: Kept, much: Fit, of_hosts: frozenset[str]) -> Kept:
    """Of what was kept, what there is a place of the same length for, and means the same here."""
    found: Kept = {}
    for index, name in enumerate(names):
        for label, keeper, values in scheduler.saved(index):
            own = Fit.OF_HOSTS if label.partition(".")[0] in of_hosts else Fit.OWN
            needed = {"all": Fit.ALIKE, "each": own, "carrier": Fit.ALL}[keeper]
            theirs = kept.get(name, {}).get(label)
            if theirs is not None and much >= needed and theirs.numel() == from_dlpack(values).numel():
                found.setdefault(name, {})[label] = theirs
    return found


def with_zeros(scheduler: _core.Scheduler, names: Sequence[str], taken: Kept) -> Kept:
    """The same, with zeros for what else steps keep: that is how they begin."""
    mine = save(scheduler, names)
    return {
        name: {label: taken.get(name, {}).get(label, torch.zeros_like(values)) for label, values in entries.items()}
        for name, entries in mine.items()
    }


def lost(kept: Kept, taken: Kept) -> dict[str, list[str]]:
    """What of it was not taken: labels by name."""
    found = {
        name: [label for label, values in entries.items() if values.numel() and label not in taken.get(name, {})]
        for name, entries in kept.items()
    }
    return {name: labels for name, labels in found.items() if labels}


def warn_of_reset(kept: Kept, taken: Kept, match: Match) -> None:
    """Says what of a checkpoint does not fit, and begins at zero."""
    if gone := lost(kept, taken):
        much, saved_by, here = match
        why = ""
        if saved_by == here:
            why = (
                " with other arguments"
                if much is Fit.ALL
                else ", and another rank has loaded a file that is not its own"
            )
        warnings.warn(
            f"the checkpoint is of {described(saved_by, here)}, this is {described(here, saved_by)}{why}: "
            f"{begins_anew(gone)}",
            stacklevel=3,
        )


def warn_of_new_buckets(kept: Kept, taken: Kept) -> None:
    """The same where a model has other parameters than it had, of what was anything at all."""
    if gone := lost({name: {k: v for k, v in of.items() if v.any()} for name, of in kept.items()}, taken):
        warnings.warn(
            f"other parameters are trained than before, and buckets are others: {begins_anew(gone)}", stacklevel=3
        )


def begins_anew(gone: dict[str, list[str]]) -> str:
    """What was not taken, in words."""
    labels = sorted({label for labels in gone.values() for label in labels})
    return f"what steps had kept of {len(gone)} parameters under {', '.join(labels)} begins at zero again"


def described(author: Author, other: Author) -> str:
    """Who saves or loads, with what is not the same of the other."""
    said = [] if author.place == other.place else [str(author.place)]
    if (author.algorithm, author.world_size) == (other.algorithm, other.world_size):
        said += [] if author.rank == other.rank else [f"rank {author.rank}"]
        said += [] if author.hosts == other.hosts else [f"hosts {author.hosts}"]
        said += [] if author.codecs == other.codecs else [f"codecs {author.codecs}"]
    return f"{author.algorithm} on {author.world_size} ranks" + (f" ({', '.join(said)})" if said else "")
