"""Which backwards are followed by an exchange: what `no_sync()` said in the forwards before them. Pure."""

import contextlib
from collections.abc import Iterator


class Accumulation:
    """The forwards since the last backward that was exchanged. As in DDP, `no_sync()` counts where forward is."""

    def __init__(self) -> None:
        # Whether no_sync() is active, or its flag is down (`DataParallel.require_backward_grad_sync`).
        self.is_held = False
        # Whether there was a forward through the model since the last exchange.
        self.was_called = False
        # What forwards said since the last backward: whether they were held.
        self._said: set[bool] = set()

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

    def forward_ended(self) -> None:
        """After it: one that raised says nothing."""
        self._said.add(self.is_held)

    def asks_for_exchange(self, held: bool | None) -> bool:
        """Whether the backward that begins is followed by an exchange. `held` is what the forward said whose output
        came first, if it is known.

        A forward outside of `no_sync()` asks for the exchange, also one that was not for training; where none is known
        the present counts.
        """
        if held is None:
            held = self.is_held or bool(self._said)
        return not held or False in self._said

    def forget(self) -> None:
        """When a backward is over, exchanged or not, or has raised."""
        self._said.clear()
