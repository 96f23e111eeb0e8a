"""What all algorithms are: a frozen description that the core and the replica work from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from . import adam
from .errors import InvalidArgument
from .steps import Step
from .syncs import Sync


@dataclass(frozen=True)
class Algorithm:
    """What all algorithms are.

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
        raise NotImplementedError(f"{type(self).__name__} must say what its steps are")

    def warmup(self) -> tuple[int, Sequence[Step]]:
        """For how many exchanges something else is done first, and what."""
        return 0, ()

    def sync(self) -> Sync | None:
        """How weights are exchanged, if they are. Replicas differ in between."""
        return None

    def take_over(self, _: torch.optim.Optimizer | None, /) -> adam.FrozenAdam | None:
        """What makes the optimizer's step from some point on, if it does not make it itself. Raises if it cannot."""
        return None


def check_warmup(steps: object) -> None:
    """Raises unless it is a number of steps."""
    if isinstance(steps, bool) or not isinstance(steps, int) or not 0 <= steps < 2**63:
        raise InvalidArgument(f"warmup_steps={steps!r}; try a whole number from 0 on, e.g. 100")
