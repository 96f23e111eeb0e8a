"""How ranks find each other: through torch's store, as torchrun provides it.

The store may outlive an attempt: torchrun's agents keep one for all restarts of a job, and each agent counts only the
failures of its own workers, so the restart count cannot name the attempt. Instead ranks agree on a fresh name at each
`init` (see `agree`), and all keys of the core live under it: a card left by a dead process is never read.
"""

import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore, rendezvous  # type: ignore[attr-defined]

from . import settings
from .errors import InvalidArgument, OffbeatError, Timeout

T = TypeVar("T")

# Polling starts fast, for ranks that start together, and slows down, to be gentle to a store with a thousand clients.
POLL_FIRST, POLL_MOST = 0.001, 0.05

# Stores made here, kept as long as the process: rank 0 may host the one that others still use, and a second `init` must
# not race with the end of the first one's server.
_stores: dict[tuple[str, int, int], Store] = {}
_left_by_parent: list[object] = []


class Adapter:
    """What the core needs of a torch store: `set`, and a `get` that gives None when nothing came in time."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def set(self, key: str, value: bytes) -> None:
        try:
            # torch takes bytes, whatever its stub says.
            self._store.set(key, value)  # type: ignore[arg-type]
        except RuntimeError as error:
            raise _unreachable(error) from error

    def get(self, key: str, wait: float) -> bytes | None:
        # Polls with `check` instead of `Store.wait`: that one cannot be interrupted by Ctrl-C, holds the connection for
        # all threads, and prints two warnings of torch at each timeout.
        deadline = time.monotonic() + wait
        pause = POLL_FIRST
        try:
            while not self._store.check([key]):
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                time.sleep(min(pause, left))
                pause = min(pause * 1.5, POLL_MOST)
            return bytes(self._store.get(key))
        except RuntimeError as error:
            raise _unreachable(error) from error


@dataclass(frozen=True)
class Place:
    """This process's place in the world, and where to meet the others."""

    store: Store | None
    rank: int
    world_size: int
    reach: str | None


def find(store: Store | str | None, rank: int | None, world_size: int | None, timeout: float) -> Place:
    """From the arguments, else torch.distributed's default group, else torchrun's environment, else a world of one."""
    rank = settings.whole("rank", rank, variables=("OFFBEAT_RANK",), least=0)
    world_size = settings.whole("world_size", world_size, variables=("OFFBEAT_WORLD_SIZE",), least=1)
    store = store or os.environ.get("OFFBEAT_STORE") or None
    if store is None and dist.is_initialized():
        return _of_default_group(rank, world_size)
    explicit = store is not None or rank is not None or world_size is not None
    rank = settings.whole("rank", rank, variables=("RANK",), least=0)
    world_size = settings.whole("world_size", world_size, variables=("WORLD_SIZE",), least=1)
    if not explicit and rank is None and world_size is None:
        return Place(None, 0, 1, None)
    if rank is None or world_size is None:
        known, missing = ("world_size", "rank") if rank is None else ("rank", "world_size")
        known = known if rank is not None or world_size is not None else "store"
        raise InvalidArgument(
            f"{known} is given but {missing} is not; give {missing}= or set {missing.upper()}, or start the job with "
            f"`torchrun --nproc-per-node=2 train.py`, which sets both"
        )
    if rank >= world_size:
        raise InvalidArgument(
            f"rank {rank} is outside a world of {world_size}; ranks count from 0, try rank={world_size - 1}"
        )
    if world_size == 1:
        return Place(None, 0, 1, None)
    if isinstance(store, str):
        return Place(
            _open(store, rank, world_size, timeout), rank, world_size, _address(_stores[store, rank, world_size])
        )
    if store is not None:
        if not isinstance(store, Store):
            raise InvalidArgument(
                f"store= must be a torch.distributed.Store, not {type(store).__name__}; try dist.TCPStore(…)"
            )
        return Place(store, rank, world_size, _address(store))
    missing_names = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing_names:
        raise InvalidArgument(
            f"rank and world size are set without {' and '.join(missing_names)}; "
            "start the job with `torchrun --nproc-per-node=2 train.py`, or unset RANK and WORLD_SIZE for a world of one"
        )
    return Place(_open("env://", rank, world_size, timeout), rank, world_size, os.environ["MASTER_ADDR"])


def agree(place: Place, timeout: float) -> tuple[Store | None, str]:
    """The part of the store that belongs to this attempt alone, and its name; waits until all ranks have come.

    Each rank leaves a fresh nonce at `hello/<rank>`; rank 0 answers every nonce with the name of the attempt; the rank
    overwrites its hello with that name. Rank 0 is content when it reads its own name from everybody. Leftovers of
    earlier attempts are answered too, but nobody listens to that.
    """
    if place.store is None:
        return None, secrets.token_hex(8)
    run = os.environ.get("TORCHELASTIC_RUN_ID") or "none"
    root = PrefixStore(f"offbeat/{run}", place.store)
    store = Adapter(root)
    nonce = secrets.token_hex(8)
    if place.rank == 0:
        _gather(store, nonce, place.world_size, timeout)
        return PrefixStore(nonce, root), nonce
    store.set(f"hello/{place.rank}", nonce.encode())
    name = store.get(f"answer/{nonce}", timeout)
    if name is None:
        at = f" at {place.reach}" if place.reach else ""
        raise Timeout(
            f"rank {place.rank}: rank 0 did not answer through the store{at} within {timeout:g} s, and may itself wait "
            "for others; check that all ranks run and call offbeat.init(), or raise connect_timeout="
        )
    store.set(f"hello/{place.rank}", name)
    return PrefixStore(name.decode(), root), name.decode()


def after_fork_in_child() -> None:
    """The parent's connections are not ours; they are kept unused, because closing them would join its threads."""
    _left_by_parent.append(dict(_stores))
    _stores.clear()


def _gather(store: Adapter, name: str, world_size: int, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    missing = set(range(1, world_size))
    answered: set[bytes] = {name.encode()}
    pause = POLL_FIRST
    while True:
        for rank in sorted(missing):
            hello = store.get(f"hello/{rank}", 0.0)
            if hello == name.encode():
                missing.discard(rank)
            elif hello is not None and hello not in answered:
                store.set(f"answer/{hello.decode()}", name.encode())
                answered.add(hello)
        if not missing:
            return
        if time.monotonic() > deadline:
            some = ", ".join(map(str, sorted(missing)[:8])) + (", …" if len(missing) > 8 else "")
            raise Timeout(
                f"{len(missing)} of {world_size} ranks did not come within {timeout:g} s: {some}; check that they "
                "run and call offbeat.init(), or raise connect_timeout="
            )
        time.sleep(pause)
        pause = min(pause * 1.5, POLL_MOST)


def _of_default_group(rank: int | None, world_size: int | None) -> Place:
    # torch has no public way to the store of the default group.
    store = dist.distributed_c10d._get_default_store()
    theirs = dist.get_rank(), dist.get_world_size()
    if rank not in (None, theirs[0]) or world_size not in (None, theirs[1]):
        raise InvalidArgument(
            f"rank={rank}, world_size={world_size} contradicts torch.distributed's default group, where this is rank "
            f"{theirs[0]} of {theirs[1]}; leave both out, or give store= too"
        )
    return Place(store, *theirs, _address(store)) if theirs[1] > 1 else Place(None, 0, 1, None)


def _open(url: str, rank: int, world_size: int, timeout: float) -> Store:
    key = (url, rank, world_size)
    if key not in _stores:

        def connect() -> Store:
            made: Store = next(rendezvous(url, rank, world_size, timeout=timedelta(seconds=timeout)))[0]
            return made

        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}" if url == "env://" else url
        try:
            _stores[key] = _interruptible(connect)
        except dist.DistError as error:
            raise Timeout(
                f"rank {rank} of {world_size} cannot meet the others at the store {where} ({_first_line(error)}); "
                "check that every rank runs and that the address is reachable from here, or raise connect_timeout="
            ) from error
        except (ValueError, RuntimeError, OSError, AssertionError) as error:  # torch asserts that a URL has no ?rank=
            raise InvalidArgument(
                f"the store {where} cannot be used ({_first_line(error)}); check MASTER_ADDR and MASTER_PORT"
            ) from error
    return _stores[key]


def _interruptible(call: Callable[[], T]) -> T:
    """Runs a long call into C++ in a thread of its own, so that Ctrl-C ends the wait for it."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # handed to the caller below
            errors.append(error)

    thread = threading.Thread(target=run, name="offbeat-rendezvous", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.2)
    if errors:
        raise errors[0]
    return results[0]


def _address(store: Store) -> str | None:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store.host if isinstance(store, TCPStore) else None


def _unreachable(error: RuntimeError) -> OffbeatError:
    return OffbeatError(
        f"the store cannot be reached ({_first_line(error)}); check that rank 0 or torchrun's agent still runs"
    )


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
