"""What can go wrong. Every error is an `OffbeatError`, and also the builtin that fits (`except TimeoutError` works)."""


class OffbeatError(Exception):
    """Anything that Offbeat raises on purpose."""


# Attributes have defaults, because unpickling calls the class with the message alone and then restores them.
class PeerLost(OffbeatError, ConnectionError):
    """Another rank is gone: killed, crashed, or out of reach. `rank` and `host` say which."""

    rank: int
    host: str

    def __init__(self, message: str = "", *, rank: int = -1, host: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.host = host


class PeerFailed(OffbeatError, RuntimeError):
    """Another rank raised an exception. `rank` says which one, `cause` quotes it."""

    rank: int
    cause: str

    def __init__(self, message: str = "", *, rank: int = -1, cause: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.cause = cause


class Timeout(OffbeatError, TimeoutError):
    """Something did not happen in its time, though nobody is known to be lost: look for a slow rank, which the message
    names, or raise `timeout` of `init`."""


class Mismatch(OffbeatError, RuntimeError):
    """Ranks called different things, in another order, or with another shape, dtype or op, or have different
    models or versions. The message shows the difference."""


class BadFrame(OffbeatError, ConnectionError):
    """Bytes came in that are not ours, or not of this version: check that all ranks run the same one."""


class Unauthorized(OffbeatError, PermissionError):
    """The other side did not know the job's token: check that `OFFBEAT_TOKEN` is the same everywhere."""


class NonFinite(OffbeatError, ArithmeticError):
    """Gradients or weights that were to be encoded hold NaN or Inf. Raised by `optimizer.step()`, unless a GradScaler
    skips the step."""


class Exhausted(OffbeatError, RuntimeError):
    """In `join(throw_on_early_termination=True)`: `ranks` have no more data, and the loop ends on all of them."""

    ranks: list[int]

    def __init__(self, message: str = "", *, ranks: list[int] | None = None) -> None:
        super().__init__(message)
        self.ranks = ranks or []


class NotInitialized(OffbeatError, RuntimeError):
    """The call needs `offbeat.init()` first."""


class Unsupported(OffbeatError, NotImplementedError):
    """A reasonable wish that this build or this version cannot fulfil."""


class InvalidArgument(OffbeatError, ValueError):
    """An argument or environment variable that makes no sense."""


__all__ = [
    "BadFrame",
    "Exhausted",
    "InvalidArgument",
    "Mismatch",
    "NonFinite",
    "NotInitialized",
    "OffbeatError",
    "PeerFailed",
    "PeerLost",
    "Timeout",
    "Unauthorized",
    "Unsupported",
]
