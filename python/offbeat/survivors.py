"""Gossip among the ranks that are left when some are lost.

Groups have failed with the lost rank, so a thread of the core exchanges letters instead, which belong to no group. The
training thread still waits for each round: it hands a copy of the parameters over, and adds what comes of it.
"""

from collections.abc import Sequence

from torch import Tensor

from . import _core
from .snapshots import Snapshots
from .steps import Gossip, Replicas

# Seconds between rounds that the thread would begin by itself: it never does.
NEVER = 1e8


class Survivors:
    """The rounds of those that are left. Members that are lost later are dropped from the graph by the core."""

    def __init__(self, group: _core.Group, parameters: Sequence[Tensor], step: Gossip | Replicas) -> None:
        modular = isinstance(step, Replicas) and step.codec is not None
        arguments: dict[str, object] = {"peers": step.peers, "seed": step.seed, "modular": modular}
        # the group is needed for its number only, which is the same on all ranks
        self._snapshots = Snapshots(group, parameters, "stepwise", arguments, period=NEVER)
        self._core = self._snapshots.core
        self._resting = False
        self._core.start()

    def start(self, number: int) -> bool:
        """Begins a round, which has this number on all ranks; False if nobody else is left."""
        self.resume()
        # nothing is under way, so this is for a snapshot, which is what the thread asks for first
        task = self._core.wait(only_results=False)
        if task is not None:
            self._snapshots.do(task, number)
        return task is not None

    def land(self, *, adds: bool) -> bool:
        """Waits for the round, and adds what came of it, unless that is of no use; False if nothing was added."""
        task = self._core.wait(only_results=False)
        if task is not None:
            self._snapshots.do(task if adds else "skip", 0)
        return adds and task == "apply"

    def rest(self) -> None:
        """Says that this rank skips rounds until it comes back: nobody waits for it."""
        if not self._resting:
            self._resting = True
            self._core.pause(0)

    def resume(self) -> None:
        """Says that it comes to the rounds that follow."""
        if self._resting:
            self._resting = False
            self._core.resume()

    @property
    def living(self) -> int:
        """How many ranks are left."""
        return self._core.progress()[3]

    def coded(self) -> tuple[int, int, int, float, float]:
        """What encoding has done."""
        return self._core.coded()

    def remove(self) -> None:
        """Says goodbye to the others."""
        self._core.stop()
