"""Exceptions that nobody catches: what ends this rank, or a thread of it that trains, is quoted by the others."""

import contextlib
import sys
import threading
import traceback
from collections.abc import Callable
from types import TracebackType


class Uncaught:
    """Tells why this rank cannot go on, from when it is made until `stop`.

    Each `init` makes one of its own, which passes on to the hooks that it found. Others put theirs in between, and
    those keep what they found too: one hook that is set twice would find itself behind them.
    """

    def __init__(self, tell: Callable[[str], object]) -> None:
        self._tell: Callable[[str], object] | None = tell
        self._has_told = False
        self._here = threading.local()
        self._before, self._before_in_threads = sys.excepthook, threading.excepthook
        # a bound method is another object each time, and `stop` asks whether they are still these
        self._hook, self._hook_in_threads = self._on_uncaught, self._on_uncaught_in_thread
        sys.excepthook, threading.excepthook = self._hook, self._hook_in_threads

    def stop(self) -> None:
        """Tells nothing any more. Where somebody chained another hook to ours it stays in the chain and passes on."""
        self._tell = None
        if sys.excepthook is self._hook:
            sys.excepthook = self._before
        if threading.excepthook is self._hook_in_threads:
            threading.excepthook = self._before_in_threads

    def watch_thread(self) -> None:
        """This thread trains: the others wait for it, whatever the main thread does."""
        self._here.trains = True

    def tell_at_exit(self) -> None:
        """Tells of the exception that ends the process, where a hook that was set after ours has not passed it on."""
        error, trace = getattr(sys, "last_value", None), getattr(sys, "last_traceback", None)
        if error is None or trace is None or self._has_told or is_interactive():
            return
        # whoever prints an exception and goes on, as test runners do, leaves it there too; but has a caller
        if trace.tb_frame.f_back is None:
            self._say(type(error), error, trace)

    def _on_uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._say(kind, error, trace)
        self._before(kind, error, trace)

    def _on_uncaught_in_thread(self, args: threading.ExceptHookArgs) -> None:
        # sys.exit() ends a thread in good order
        if getattr(self._here, "trains", False) and args.exc_type is not SystemExit and args.exc_value is not None:
            self._say(args.exc_type, args.exc_value, args.exc_traceback)
        self._before_in_threads(args)

    def _say(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        tell = self._tell
        if tell is None:
            return
        # twice, because a signal may come meanwhile whose handler raises, as that of torch's DataLoader does
        for _ in range(2):
            # whatever goes wrong here must not hide the user's own exception
            with contextlib.suppress(Exception):
                tell(quote(kind, error, trace))
                self._has_told = True
                return


def is_interactive() -> bool:
    """Whether exceptions do not end this process, but are shown to somebody who goes on."""
    return bool(sys.flags.interactive or sys.flags.inspect) or hasattr(sys, "ps1")


def quote(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> str:
    """An exception in one line: what it says, and where it was raised."""
    text = "".join(traceback.format_exception_only(kind, error)).strip()
    if frames := traceback.extract_tb(trace):
        last = frames[-1]
        text += f" ({last.filename}:{last.lineno} in {last.name}: {last.line})"
    # names of files that are no UTF-8 have characters that cannot be sent
    return text.encode("utf-8", "backslashreplace").decode()
