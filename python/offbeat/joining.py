"""Ranks with fewer batches than others: who is done early takes part with zeros until all are.

While `Turns.join` is active, working ranks say what they are about to do together before they do it, and ranks without
data ask, and do the same with nothing to contribute.
"""

import contextlib
from collections.abc import Iterator
from enum import IntEnum
from typing import Protocol

import torch

from . import _core, runtime
from .errors import InvalidArgument, PeerFailed, PeerLost

# Whether some replica of this process is in `join`.
_joined = False


class Turn(IntEnum):
    """What ranks are about to do together."""

    NOTHING = 0
    GRADIENTS = 1
    BUFFERS = 2
    BUCKETS = 3
    CHECK = 4
    STEP = 5


class Member(Protocol):
    """Who takes turns: a member."""

    @property
    def is_running(self) -> bool: ...
    @property
    def group(self) -> _core.Group: ...
    @property
    def has_lost(self) -> bool: ...  # whether it goes on without ranks that are lost
    def lose(self) -> bool: ...  # when a call has failed because a rank is lost: whether it goes on
    def follow(self, turn: Turn) -> None: ...  # without data
    def end_join(self, source: int) -> None: ...  # `source` has worked until the end


class Turns:
    """What the ranks of a replica do next, where some may have run out of data."""

    def __init__(self) -> None:
        self.joining = False
        # The lowest rank that still works: whose buffers count.
        self.source = 0

    def take(self, member: Member, turn: Turn) -> Turn:
        """Tells ranks without data what comes, or asks. Gives what the working ranks do."""
        if not self.joining or member.has_lost:
            return turn
        world = runtime.world_size()
        words = torch.tensor([int(turn), world - runtime.rank() if turn else 0])
        try:
            member.group.all_reduce(words, "max", None, False)
        except (PeerLost, PeerFailed):
            if not member.lose():
                raise
            return turn
        self.source = world - int(words[1]) if words[1] else 0
        return Turn(int(words[0]))

    @contextlib.contextmanager
    def join(self, member: Member) -> Iterator[None]:
        """Lets ranks have different numbers of batches: who leaves the context early takes part with zeros.

        At the end all ranks have the parameters, buffers and optimizer state of one that worked until the end; where an
        algorithm exchanges weights they have the mean of all parameters and buffers. The mean still divides by the
        number of all ranks. Where gossip goes on without a lost rank, who leaves the context early waits for the end.
        """
        global _joined
        if not member.is_running:
            yield
            return
        if _joined:
            raise InvalidArgument("one join() at a time: ranks could not tell whose turn it is; leave the other first")
        self.joining = _joined = True
        try:
            yield
            idle = 0
            while (turn := self.take(member, Turn.NOTHING)) is not Turn.NOTHING:
                member.follow(turn)
                idle += 1
            member.end_join(0 if member.has_lost else self._last(member, idle=bool(idle)))
        finally:
            self.joining = _joined = False
            self.source = 0

    @staticmethod
    def _last(member: Member, *, idle: bool) -> int:
        """The lowest rank that has worked until the end."""
        world = runtime.world_size()
        worked_until_the_end = torch.tensor([0 if idle else world - runtime.rank()])
        try:
            member.group.all_reduce(worked_until_the_end, "max", None, False)
        except (PeerLost, PeerFailed):
            if not member.lose():
                raise
        return world - int(worked_until_the_end)
