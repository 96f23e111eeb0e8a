"""Which backwards are followed by an exchange: what `no_sync()` said in the forwards before them. Pure."""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple


class Said(NamedTuple):
    """What a forward said."""

    held: bool
    # After how many backwards.
    time: int


class Accumulation:
    """The forwards since the last backward that was exchanged. As in DDP, `no_sync()` counts where forward is."""

    def __init__(self) -> None:
        # Whether no_sync() is active, or its flag is down (`DataParallel.require_backward_grad_sync`).
        self.is_held = False
        # Whether there was a forward through the model since the last exchange.
        self.was_called = False
        # What forwards said since the last backward: whether they were held.
        self._said: set[bool] = set()
        # How many backwards are over.
        self._time = 0

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forwards in this context leave gradients where they are."""
        before, self.is_held = self.is_held, True
        try:
            yield
        finally:
            self.is_held = before

    def forward_begins(self) -> None:
        """Before a forward in training."""
        self.was_called = True

    def forward_ended(self, *, in_training: bool) -> Said:
        """After it: one that raised says nothing. One in evaluation speaks through its outputs only: it may be one
        rank's alone, and no backward may ever follow."""
        if in_training:
            self._said.add(self.is_held)
        return Said(self.is_held, self._time)

    def asks_for_exchange(self, said: Said | None) -> bool:
        """Whether the backward that begins is followed by an exchange. `said` is by the forward whose output came
        first, if it is known.

        A forward outside of `no_sync()` asks for the exchange, also one that was not for training; where none is known
        the present counts.
        """
        held = (self.is_held or bool(self._said)) if said is None else said.held
        return not held or False in self._said

    def asks_later(self, said: Said) -> bool:
        """Whether one that is not is followed by it after all, now that it has come to an output of another forward.
        Where a backward has ended since that forward, this has had its exchange."""
        return not said.held and said.time == self._time

    def forget(self) -> None:
        """When a backward is over, exchanged or not, or has raised."""
        self._said.clear()
        self._time += 1
