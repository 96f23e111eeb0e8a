"""Ranks with fewer batches than others: who is done early takes part with zeros until all are.

While `Turns.join` is active, working ranks say what they are about to do together before they do it, and ranks without
data ask, and do the same with nothing to contribute.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import torch

from . import _core, advice, agreement, runtime
from .algorithm import Algorithm
from .errors import Exhausted, InvalidArgument, PeerFailed, PeerLost

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
    FORWARD = 6
    # New buckets for other parameters, which ranks without data do not know: only where there are no such ranks.
    REFRESH = 7


@dataclass(frozen=True)
class Rules:
    """What happens when a rank has no more data. The names are those of DDP's `join`.

    divide_by_initial_world_size: whether a mean of gradients divides by the number of all ranks, and not by that of
        those that still work.
    throw_on_early_termination: whether the loop ends on all ranks then, with `Exhausted`.
    """

    divide_by_initial_world_size: bool = True
    throw_on_early_termination: bool = False


class Member(Protocol):
    """Who takes turns: a member."""

    @property
    def algorithm(self) -> Algorithm: ...
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
        # What a mean over all ranks is multiplied with.
        self.scale = 1.0
        # Ranks that had no more data while others worked, in this `join` or the last one.
        self.idle: set[int] = set()
        self._rules = Rules()

    def look(self, member: Member) -> None:
        """Before each forward in training: where one rank without data ends the loop of all, nobody makes a step more
        than that one."""
        if self.joining and self._rules.throw_on_early_termination:
            self.take(member, Turn.FORWARD)

    def take(self, member: Member, turn: Turn) -> Turn:
        """Tells ranks without data what comes, or asks. Gives what the working ranks do."""
        if not self.joining or member.has_lost:
            return turn
        world = runtime.world_size()
        # the turn, and for each rank whether it works
        words = torch.zeros(1 + world, dtype=torch.int64, device="cpu")
        words[0], words[1 + runtime.rank()] = int(turn), bool(turn)
        if not _together(member, lambda: member.group.all_reduce(words, "max", None, False)):
            return turn
        working = words[1:].nonzero().flatten().tolist()
        self.source = working[0] if working else 0
        idle = [rank for rank in range(world) if working and rank not in working]
        self.idle.update(idle)
        if self._rules.throw_on_early_termination and idle:
            raise exhausted(idle)
        if Turn(int(words[0])) is Turn.REFRESH and idle:
            raise changed(idle)
        if working and not self._rules.divide_by_initial_world_size:
            self.scale = world / len(working)
        return Turn(int(words[0]))

    @contextlib.contextmanager
    def join(self, member: Member, rules: Rules) -> Iterator[None]:
        """Lets ranks have different numbers of batches: who leaves the context early takes part with zeros.

        At the end all ranks have the parameters, buffers and optimizer state of one that worked until the end; where an
        algorithm exchanges weights they have the mean of all parameters and buffers. Where gossip goes on without a
        lost rank, who leaves the context early waits for the end.
        """
        global _joined
        if not rules.divide_by_initial_world_size:
            advice.refuse_other_than_mean(member.algorithm)
        if not member.is_running:
            yield
            return
        if _joined:
            raise InvalidArgument(
                "one join() at a time: ranks could not tell whose turn it is; try: leave the other first; for two "
                "models in one loop see docs/training.md"
            )
        self._compare(member, rules)
        self.joining = _joined = True
        self._rules, self.idle = rules, set()
        try:
            yield
            idle = 0
            while (turn := self.take(member, Turn.NOTHING)) is not Turn.NOTHING:
                member.follow(turn)
                idle += 1
            member.end_join(0 if member.has_lost else self._last(member, idle=bool(idle)))
        finally:
            self.joining = _joined = False
            self.source, self.scale, self._rules = 0, 1.0, Rules()

    @staticmethod
    def _compare(member: Member, rules: Rules) -> None:
        """Ranks with different rules would take each other's turns."""
        if member.has_lost:
            return
        what, wanted = "arguments of join()", "the same ones on every rank"
        _together(member, lambda: agreement.compare(member.group, what, [str(rules)], wanted))

    @staticmethod
    def _last(member: Member, *, idle: bool) -> int:
        """The lowest rank that has worked until the end."""
        world = runtime.world_size()
        worked_until_the_end = torch.tensor([0 if idle else world - runtime.rank()], device="cpu")
        _together(member, lambda: member.group.all_reduce(worked_until_the_end, "max", None, False))
        return world - int(worked_until_the_end)


class Joined(Protocol):
    """Whose exchanges `Joins` keeps in step: a replica."""

    def join(self, rules: Rules) -> contextlib.AbstractContextManager[None]: ...


class Joins:
    """What both wrappers have for ranks with different numbers of batches."""

    def _joined(self) -> Joined:
        """The replica. Every rank asks for it alike."""
        raise NotImplementedError

    def join(
        self,
        *,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> contextlib.AbstractContextManager[None]:
        """Around a loop in which ranks have different numbers of batches. The arguments are those of DDP.

        Args:
            divide_by_initial_world_size: False divides gradients by the number of ranks that still have data.
            enable: False does nothing, where all ranks are known to have as many.
            throw_on_early_termination: with the first rank that has no more data the loop ends on all of them: each
                raises `offbeat.errors.Exhausted`, after the same number of steps.
        """
        rules = Rules(
            divide_by_initial_world_size=divide_by_initial_world_size,
            throw_on_early_termination=throw_on_early_termination,
        )
        return self._joined().join(rules) if enable else contextlib.nullcontext()


def _together(member: Member, call: Callable[[], object]) -> bool:
    """Makes a call of all ranks. False where a rank is lost over it, and the member goes on without that one."""
    try:
        call()
    except (PeerLost, PeerFailed):
        if not member.lose():
            raise
        return False
    return True


def exhausted(ranks: Sequence[int]) -> Exhausted:
    """The story of a loop that ends on all ranks, the same on each of them."""
    return Exhausted(
        f"rank {', '.join(map(str, ranks))} has no more data, so join(throw_on_early_termination=True) ends the loop "
        "on every rank; try: catch offbeat.errors.Exhausted around it, or leave the argument out to train on with "
        "what the others have",
        ranks=list(ranks),
    )


def changed(ranks: Sequence[int]) -> InvalidArgument:
    """The story of parameters that ranks without data do not know, the same on every rank."""
    return InvalidArgument(
        "parameters were added or thawed in join(), which every rank must do, and rank "
        f"{', '.join(map(str, ranks))} has no more data; try: do it on every rank before join() or after it"
    )
