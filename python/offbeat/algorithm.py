"""What all algorithms are: a frozen description that the core and the replica work from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from . import adam, codecs
from .checks import check_warmup
from .errors import InvalidArgument
from .steps import Described, Parameter, Step
from .syncs import Sync, check_turns


@dataclass(frozen=True)
class Algorithm:
    """The base of all algorithms, and of your own: a frozen dataclass that describes, and computes nothing itself.

    A subclass has a `name` and says in `steps()` what is done with each bucket; `docs/algorithms.md` shows one in about
    30 lines.

    what: "gradients", "weights", "momentum" or "updates" (since the last exchange).
    when: "bucket" (as each bucket becomes ready in backward), "before_forward", "after_step" or "background".
    every: once in how many steps.
    These three are about `steps`. One that exchanges weights says so in `sync`, and may have no `steps` at all.
    """

    name: ClassVar[str] = ""
    what: ClassVar[str] = "gradients"
    when: ClassVar[str] = "bucket"
    # no annotation: those that have it as an argument decide on its place among the others
    every = 1

    def steps(self) -> Sequence[Step]:
        """What is done with each bucket, in this order."""
        raise InvalidArgument(
            f'{type(self).__name__} does not say what its steps are; try: steps() that returns [AllReduce("mean")]'
        )

    def warmup(self) -> tuple[int, Sequence[Step]]:
        """For how many exchanges something else is done first, and what."""
        return 0, ()

    def sync(self) -> Sync | None:
        """How weights are exchanged, if they are. Replicas differ in between."""
        return None

    def take_over(self, _: torch.optim.Optimizer | None, /) -> adam.FrozenAdam | None:
        """What makes the optimizer's step from some point on, if it does not make it itself. Raises if it cannot."""
        return None


@dataclass(frozen=True)
class Description:
    """An algorithm as the core takes it, for the parameters of one model."""

    warmup: int
    first: list[Described]
    steps: list[Described]

    @property
    def is_flat(self) -> bool:
        """Whether no step works by host: each rank counts as one of its own then."""
        by_host = [
            arguments["hierarchical"] for _, arguments in (*self.first, *self.steps) if "hierarchical" in arguments
        ]
        return bool(by_host) and not any(by_host)


def describe(
    algorithm: Algorithm, named: Sequence[tuple[str, Tensor]], optimizer: torch.optim.Optimizer | None
) -> Description:
    """What the core is told of an algorithm. Steps may want to know how the optimizer treats each parameter. Raises if
    there are no steps."""
    groups = () if optimizer is None else optimizer.param_groups
    settings = {id(tensor): group for group in groups for tensor in group["params"]}
    parameters = [Parameter(name, settings.get(id(tensor), {})) for name, tensor in named]
    (warmup, first), steps, sync = warmup_of(algorithm), algorithm.steps(), algorithm.sync()
    if not steps and sync is None:
        raise InvalidArgument(
            f'{algorithm} is an algorithm without steps; try: steps() that returns [AllReduce("mean")]'
        )
    check_times(algorithm)
    for what, listed in (("warmup()", first), ("steps()", steps), ("sync()", () if sync is None else sync.steps)):
        refuse_no_steps(f"{what} of {algorithm}", listed)
    return Description(
        warmup, [step.describe(parameters) for step in first], [step.describe(parameters) for step in steps]
    )


def check_times(algorithm: Algorithm) -> None:
    """Raises unless an algorithm says what is communicated, and when, in words that the core can read."""
    check_turns(algorithm.every)
    for name, value in (("what", algorithm.what), ("when", algorithm.when)):
        if not isinstance(value, str):
            raise InvalidArgument(f'{name}={value!r} of {algorithm}; try: "{getattr(Algorithm, name)}"')


def warmup_of(algorithm: Algorithm) -> tuple[int, Sequence[Step]]:
    """An algorithm's warm-up, if it is one."""
    given: object = algorithm.warmup()
    if not isinstance(given, list | tuple) or len(given) != 2:
        raise InvalidArgument(f'warmup() of {algorithm} gives {given!r}; try: a pair, e.g. (100, [AllReduce("mean")])')
    check_warmup(given[0], f"{algorithm}.warmup()[0]")
    return given[0], given[1]


def refuse_no_steps(what: str, listed: object) -> None:
    """Raises unless all of these are steps."""
    if not isinstance(listed, list | tuple):
        raise InvalidArgument(f'{what} gives {listed!r}, which is no list; try: [AllReduce("mean")]')
    for step in listed:
        if isinstance(step, type) and issubclass(step, Step):
            raise InvalidArgument(f"{what} gives the class {step.__name__}; try: [{step.__name__}()]")
        if not isinstance(step, Step):
            raise InvalidArgument(f'{what} gives {step!r}, which is no step; try: [AllReduce("mean")]')


def codecs_of(algorithm: Algorithm) -> list[str]:
    """The names of the codecs that an algorithm encodes with, in the order of its steps."""
    sync = algorithm.sync()
    steps = (*algorithm.warmup()[1], *algorithm.steps(), *(() if sync is None else sync.steps))
    names = (codecs.name_of(getattr(step, "codec", None)) for step in steps)
    return [name for name in names if name is not None]
