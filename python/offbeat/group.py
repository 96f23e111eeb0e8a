"""Groups of ranks."""

import operator
from collections.abc import Iterable, Sequence

from . import _core, runtime
from .errors import InvalidArgument


class Group:
    """Some ranks of the world. Every rank of the world makes it, members or not, in the same order as other groups.

    Ranks are kept in ascending order, as in torch: `Group([3, 1])` is `Group([1, 3])`. A group has a thread and some
    shared memory until `close` or `offbeat.shutdown`; dropping the last reference does not end it.
    """

    __slots__ = ("_core", "_epoch", "_rank", "_ranks")

    def __init__(self, ranks: Iterable[int]) -> None:
        core = runtime.current()
        self._ranks = _checked(ranks, core.world_size)
        self._rank = self._ranks.index(core.rank) if core.rank in self._ranks else None
        self._core = core.group(self._ranks)
        self._epoch = runtime.epoch

    @property
    def ranks(self) -> list[int]:
        """The members, ascending."""
        return list(self._ranks)

    @property
    def rank(self) -> int | None:
        """This process's place among the members, from 0; None if it is none of them."""
        return self._rank

    @property
    def size(self) -> int:
        """How many members there are."""
        return len(self._ranks)

    def close(self) -> None:
        """The last call of the group: every member makes it, and it waits for all calls before it. Frees what it holds.

        Calls after it raise `InvalidArgument`. Ranks that are no members need not call it. Closing a group that has
        failed raises its story, and leaves its memory to `offbeat.shutdown`. A second `close` does nothing, and so does
        one after `shutdown`.
        """
        if runtime.is_initialized() and self._epoch == runtime.epoch:
            runtime.current().close_group(self._core)

    def __repr__(self) -> str:
        return f"Group({list(self._ranks)})"


def resolve(group: Group | None) -> tuple[_core.Group, Sequence[int]]:
    """The core's group and its ranks; the world for None. Refuses groups in which this rank cannot speak."""
    core = runtime.current()
    if group is None:
        assert runtime.world is not None
        return runtime.world, range(core.world_size)
    if not isinstance(group, Group):
        raise InvalidArgument(
            f"group= must be an offbeat.Group or None, not {type(group).__name__}; try: offbeat.Group([0, 1])"
        )
    if group._epoch != runtime.epoch:
        raise InvalidArgument(f"{group} was made before offbeat.shutdown(); try: make it again after offbeat.init()")
    if group._rank is None:
        raise InvalidArgument(f"rank {core.rank} is no member of {group}; try: a call by its members only")
    return group._core, group._ranks


def member(name: str, rank: int, ranks: Sequence[int]) -> int:
    """A global rank that belongs to the group."""
    try:
        number = operator.index(rank)
    except TypeError:
        raise InvalidArgument(f"{name} must be a rank (int), not {rank!r}; try: its global number, from 0") from None
    if number not in ranks:
        known = f"0 to {len(ranks) - 1}" if isinstance(ranks, range) else str(list(ranks))
        raise InvalidArgument(f"{name}={number} is not among the ranks of the group; try: one of {known}")
    return number


def _checked(ranks: Iterable[int], world_size: int) -> list[int]:
    try:
        numbers = sorted(operator.index(rank) for rank in ranks)
    except TypeError:
        raise InvalidArgument(f"ranks must be a list of ints, not {ranks!r}; try: offbeat.Group([0, 1])") from None
    if not numbers:
        raise InvalidArgument("a group needs at least one rank; try: offbeat.Group([0, 1])")
    if len(set(numbers)) != len(numbers):
        raise InvalidArgument(f"ranks {numbers} has duplicates; try: name each rank once")
    if numbers[0] < 0 or numbers[-1] >= world_size:
        raise InvalidArgument(
            f"ranks {numbers} leaves the world of {world_size}; try: ranks from 0 to {world_size - 1}"
        )
    return numbers
