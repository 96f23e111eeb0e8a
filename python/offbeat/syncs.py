"""When weights are exchanged, and which of them: pure functions of the step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from .checks import is_whole
from .errors import InvalidArgument
from .steps import AllReduce, Difference, Gossip, HostReduce, Outer, Replicas, Step, Weigh


@dataclass(frozen=True)
class Sync:
    """An exchange of weights.

    steps: what is done with each bucket of weights, in this order.
    when: "after_step" of the optimizer; or "before_forward": it begins with the first forward in training after a step
        and is used before the next one.
    every: after how many steps all weights have been exchanged once.
    fragments: into how many parts weights are divided, which take turns: one is exchanged every `every / fragments`
        steps.
    overlap: for how many steps training goes on while an exchange is under way. What these change is not lost: it is
        added to the result, as is what changes weights after an exchange "before_forward" has begun.
    after: steps before any of this, in which the algorithm's warm-up exchanges gradients.
    restart: whether what the steps keep begins anew from weights that all ranks have alike, where that happens.
    """

    steps: Sequence[Step]
    when: Literal["after_step", "before_forward"] = "after_step"
    every: int = 1
    fragments: int = 1
    overlap: int = 0
    after: int = 0
    restart: bool = False

    def __post_init__(self) -> None:
        check_turns(self.every, self.fragments, self.overlap)
        if self.when not in ("after_step", "before_forward"):
            raise InvalidArgument(
                f'when={self.when!r} is no time to exchange weights; try: "after_step" or "before_forward"'
            )
        if self.when == "before_forward" and (self.fragments, self.overlap) != (1, 0):
            raise InvalidArgument(
                f'fragments={self.fragments}, overlap={self.overlap} with when="before_forward", which exchanges all '
                'weights at once; try: when="after_step"'
            )

    @property
    def interval(self) -> int:
        """Steps from one exchange to the next."""
        return self.every // self.fragments

    @property
    def gossip(self) -> Gossip | Replicas | None:
        """The one step, if it is gossip of all weights at once: that goes on without ranks that are lost."""
        only = self.steps[0] if len(self.steps) == 1 and (self.fragments, self.overlap) == (1, 0) else None
        return only if isinstance(only, Gossip | Replicas) else None

    @property
    def cuts(self) -> bool:
        """Whether a tensor may be divided between fragments: no step asks what shape it has, or looks at all of it."""
        return all(isinstance(step, AllReduce | HostReduce | Difference | Outer | Weigh) for step in self.steps)

    def number(self, step: int) -> int:
        """The number of the exchange that begins when so many steps have been made, among all of them."""
        return (step - self.after) // self.interval

    def starts(self, step: int) -> int | None:
        """The fragment whose exchange begins when so many steps have been made."""
        step -= self.after
        if self.when == "before_forward":
            return 0 if step >= 0 and step % self.every == 0 else None
        return None if step < 1 else self._turn(step + self.overlap)

    def ends(self, step: int) -> int | None:
        """The fragment whose exchange ends, after an optimizer's step, when so many have been made."""
        return None if self.when == "before_forward" else self._turn(step - self.after)

    def _turn(self, step: int) -> int | None:
        turns, rest = divmod(step, self.interval)
        return (turns - 1) % self.fragments if turns > 0 and rest == 0 else None


class Piece(NamedTuple):
    """Some elements of a tensor, in the order of its memory."""

    tensor: int
    first: int
    last: int  # the one after it


# Tensors are cut at multiples of this many elements: of every codec's blocks.
GRAIN = 2048


def divide(sizes: Sequence[int], fragments: int, *, cut: Sequence[bool] | None = None) -> list[list[Piece]]:
    """Which tensors are in which fragment, so that all have about as many elements: the largest first, each to the
    fragment with the least. Neighbours in the model end up in different ones, as is best for streaming. Of those that
    `cut` allows, what a fragment has no room for goes to the next; a fragment twice as large as the others would take
    twice their time on the wire, and all of it waits for that one."""
    room = -(-sum(sizes) // (fragments * GRAIN)) * GRAIN
    parts: list[list[Piece]] = [[] for _ in range(fragments)]
    loads = [0] * fragments
    may_cut = cut or [False] * len(sizes)
    # what cannot be cut goes first, and the others fill up what is left
    for tensor in sorted(range(len(sizes)), key=lambda tensor: (may_cut[tensor], -sizes[tensor], tensor)):
        last: int | None = None
        # once at least: a tensor without elements is a piece too
        while last != sizes[tensor]:
            first = last or 0
            # where loads are equal the shorter list, so that none stays empty, also of tensors without elements
            least = min(range(fragments), key=lambda part: (loads[part], len(parts[part]), part))
            fits = (room - loads[least]) // GRAIN * GRAIN
            last = first + fits if may_cut[tensor] and 0 < fits < sizes[tensor] - first else sizes[tensor]
            parts[least].append(Piece(tensor, first, last))
            loads[least] += last - first
    if not all(parts):
        filled = sum(map(bool, parts))
        raise InvalidArgument(
            f"fragments={fragments} of {len(sizes)} parameters, which are not enough to divide; try: {filled}"
        )
    return [sorted(part) for part in parts]


def check_turns(every: object, fragments: object = 1, overlap: object = 0) -> None:
    """Raises unless exchanges can follow each other so."""
    if not is_whole(every) or every < 1:
        raise InvalidArgument(f"every={every!r}; try: a whole number of steps from 1 on")
    if not is_whole(fragments) or fragments < 1:
        raise InvalidArgument(f"fragments={fragments!r}; try: a whole number from 1 on")
    if every % fragments:
        raise InvalidArgument(
            f"every={every} is no multiple of fragments={fragments}, so they could not take turns evenly; try: "
            f"every={fragments * max(1, round(every / fragments))}"
        )
    if not is_whole(overlap) or overlap < 0:
        raise InvalidArgument(f"overlap={overlap!r}; try: a whole number of steps from 0 on")
    if overlap >= every // fragments:
        raise InvalidArgument(
            f"overlap={overlap} is not under every / fragments = {every // fragments}: an exchange would begin before "
            f"the last has ended; try: overlap={every // fragments - 1} or less"
        )
