"""How ranks find each other: through torch's store, as torchrun provides it.

The store may outlive an attempt: torchrun's agents keep one for all restarts of a job, and each agent counts only the
failures of its own workers, so the restart count cannot name the attempt. Instead ranks agree on a fresh name at each
`init` (see `agree`), and all keys of the core live under it: a card left by a dead process is never read.
"""

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import TypeVar, cast

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore, rendezvous  # type: ignore[attr-defined]

from . import processes, settings
from .errors import InvalidArgument, OffbeatError, PeerLost, Timeout

T = TypeVar("T")

# Polling starts fast, for ranks that start together, and slows down, to be gentle to a store with a thousand clients.
POLL_FIRST, POLL_MOST = 0.001, 0.05
# Who gives up stays for so long, and others listen for so much longer: the store may end with who knows the story.
STAY = 1.0
# How often those that wait look at processes.
LOOK = 0.25
# Seconds for one attempt to connect to a store that listens.
ATTEMPT = 3.0

# Stores made here, kept as long as the process: rank 0 may host the one that others still use, and a second `init` must
# not race with the end of the first one's server.
_stores: dict[tuple[str, int, int], Store] = {}
_left_by_parent: list[object] = []


class Adapter:
    """What the core needs of a torch store: `set`, and a `get` that gives None when nothing came in time.

    Torch's client waits for an answer for ever, and a host that is cut off gets none: so a thread of ours asks, and
    nobody waits for that longer than `timeout` from now. `host` is rank 0's address where rank 0 hosts the store: then
    losing one is losing the other. `others` are the processes of ranks that have come, which are looked at in waits.
    """

    def __init__(
        self, store: Store, timeout: float, host: str | None = None, others: dict[int, bytes] | None = None
    ) -> None:
        self._store = store
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._host = host
        self.others = others or {}
        self._looked = time.monotonic()
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # daemonic, since it may never come back; without a reference to us, who end it
        threading.Thread(target=_serve, args=(self._calls,), name="offbeat-rendezvous", daemon=True).start()

    def __del__(self) -> None:
        self._calls.put(None)

    def set(self, key: str, value: bytes) -> None:
        # torch takes bytes, whatever its stub says.
        self._ask(lambda: self._store.set(key, value))  # type: ignore[arg-type]

    def get(self, key: str, wait: float) -> bytes | None:
        # Polls with `check` instead of `Store.wait`: that one holds the connection for all threads, and prints two
        # warnings of torch at each timeout.
        for _ in _polls(time.monotonic() + wait):
            if self._ask(lambda: self._store.check([key])):
                return bytes(self._ask(lambda: self._store.get(key)))
            self.look()
        return None

    def look(self) -> None:
        """Raises if a rank has ended that had come; looks now and then."""
        if time.monotonic() - self._looked < LOOK:
            return
        self._looked = time.monotonic()
        for rank, about in self.others.items():
            if processes.has_ended(about):
                # the others of this machine shall see the same, not that we have ended over it, or the store with us
                time.sleep(STAY if 0 in self.others else 1.5 * STAY)
                who, host = processes.name(rank, about)
                raise PeerLost(
                    f"{who} has ended while ranks were meeting; try: read the end of its output", rank=rank, host=host
                )

    def _ask(self, call: Callable[[], T]) -> T:
        try:
            return _answer(self._calls.put, call, self._deadline)
        except RuntimeError as error:
            raise _unreachable(error, self._host) from error
        except TimeoutError:
            raise Timeout(
                f"the store{f' of rank 0 at {self._host}' if self._host else ''} did not answer within "
                f"{self._timeout:g} s; try: check that its host can be reached, or raise connect_timeout="
            ) from None


@dataclass(frozen=True)
class Place:
    """This process's place in the world, and where to meet the others.

    `reach` is the store's address, `host` the same where rank 0 is known to host it.
    """

    store: Store | None
    rank: int
    world_size: int
    reach: str | None
    host: str | None = None


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
            f"{known} is given but {missing} is not; try: {missing}= or {missing.upper()}, or start the job with "
            f"`torchrun --nproc-per-node=2 train.py`, which sets both"
        )
    if rank >= world_size:
        raise InvalidArgument(
            f"rank {rank} is outside a world of {world_size}; ranks count from 0; try: rank={world_size - 1}"
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
                f"store= must be a torch.distributed.Store, not {type(store).__name__}; try: dist.TCPStore(…)"
            )
        return Place(store, rank, world_size, _address(store))
    missing_names = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing_names:
        raise InvalidArgument(
            f"rank and world size are set without {' and '.join(missing_names)}; "
            "try: start the job with `torchrun --nproc-per-node=2 train.py`, or, for a world of one, unset RANK and "
            "WORLD_SIZE"
        )
    address = os.environ["MASTER_ADDR"]
    opened = _open("env://", rank, world_size, timeout)
    return Place(opened, rank, world_size, address, None if _agent_hosts() else address)


def agree(place: Place, timeout: float) -> tuple[Adapter | None, str]:
    """The part of the store that belongs to this attempt alone, and its name; waits until all ranks have come.

    Each rank leaves a fresh nonce at `hello/<rank>`; rank 0 answers every nonce with the name of the attempt, and which
    process it is itself; the rank overwrites its hello with the same two. Rank 0 is content when it reads its own name
    from everybody. Leftovers of earlier attempts are answered too, but nobody listens to that. Then it tells all who
    has come, or what went wrong: whoever went on alone would wait for rank 0, and name it.
    """
    if place.store is None:
        return None, secrets.token_hex(8)
    run = os.environ.get("TORCHELASTIC_RUN_ID") or "none"
    root = PrefixStore(f"offbeat/{run}", place.store)
    store = Adapter(root, timeout + 2 * STAY, place.host)
    nonce = secrets.token_hex(8)
    name, others = _lead(store, nonce, place, timeout) if place.rank == 0 else _follow(store, nonce, place, timeout)
    return Adapter(PrefixStore(name, root), timeout + STAY, place.host, others), name


def _lead(store: Adapter, name: str, place: Place, timeout: float) -> tuple[str, dict[int, bytes]]:
    try:
        _gather(store, name, place.world_size, timeout)
    except (Timeout, PeerLost) as error:
        lost = {"rank": error.rank, "host": error.host} if isinstance(error, PeerLost) else {}
        store.set(f"gathered/{name}", json.dumps({"message": str(error), "lost": lost}).encode())
        time.sleep(STAY)
        raise
    except (KeyboardInterrupt, SystemExit) as error:
        who, host = processes.name(0, processes.mine())
        message = f"{who} was ended by {type(error).__name__} while ranks were meeting; try: start the job again"
        store.set(f"gathered/{name}", json.dumps({"message": message, "lost": {"rank": 0, "host": host}}).encode())
        raise
    come = {0: processes.mine(), **store.others}
    store.set(f"gathered/{name}", json.dumps({rank: about.decode() for rank, about in come.items()}).encode())
    return name, store.others


def _follow(store: Adapter, nonce: str, place: Place, timeout: float) -> tuple[str, dict[int, bytes]]:
    deadline = time.monotonic() + timeout + STAY
    store.set(f"hello/{place.rank}", nonce.encode())
    name, told = store.get(f"answer/{nonce}", timeout + STAY), None
    if name is not None:
        name, _, about = name.partition(b" ")
        store.others[0] = about
        store.set(f"hello/{place.rank}", name + b" " + processes.mine())
        told = store.get(f"gathered/{name.decode()}", max(0.0, deadline - time.monotonic()))
    if name is None or told is None:
        at = f" at {place.reach}" if place.reach else ""
        raise Timeout(
            f"rank {place.rank}: rank 0 did not answer through the store{at} within {timeout:g} s, and may itself wait "
            "for others; try: check that all ranks run and call offbeat.init(), or raise connect_timeout="
        )
    story = json.loads(told)
    if "message" in story:
        raise PeerLost(story["message"], **story["lost"]) if story["lost"] else Timeout(story["message"])
    others = {int(rank): about.encode() for rank, about in story.items() if int(rank) != place.rank}
    return name.decode(), others


def after_fork_in_child() -> None:
    """The parent's connections are not ours; they are kept unused, because closing them would join its threads."""
    _left_by_parent.append(dict(_stores))
    _stores.clear()


def _gather(store: Adapter, name: str, world_size: int, timeout: float) -> None:
    missing = set(range(1, world_size))
    answered: set[bytes] = {name.encode()}
    for _ in _polls(time.monotonic() + timeout):
        for rank in sorted(missing):
            hello = store.get(f"hello/{rank}", 0.0)
            said, _, about = (hello or b"").partition(b" ")
            if said == name.encode():
                missing.discard(rank)
                store.others[rank] = about
            elif said and said not in answered:
                store.set(f"answer/{said.decode()}", name.encode() + b" " + processes.mine())
                answered.add(said)
        if not missing:
            return
        store.look()
    some = ", ".join(map(str, sorted(missing)[:8])) + (", …" if len(missing) > 8 else "")
    raise Timeout(
        f"{len(missing)} of {world_size} ranks did not come within {timeout:g} s: {some}; try: check that they run and "
        "call offbeat.init(), or raise connect_timeout="
    )


def _of_default_group(rank: int | None, world_size: int | None) -> Place:
    # torch has no public way to the store of the default group.
    store = dist.distributed_c10d._get_default_store()
    theirs = dist.get_rank(), dist.get_world_size()
    if rank not in (None, theirs[0]) or world_size not in (None, theirs[1]):
        raise InvalidArgument(
            f"rank={rank}, world_size={world_size} contradicts torch.distributed's default group, where this is rank "
            f"{theirs[0]} of {theirs[1]}; try: leave both out, or give store= too"
        )
    return Place(store, *theirs, _address(store)) if theirs[1] > 1 else Place(None, 0, 1, None)


def _open(url: str, rank: int, world_size: int, timeout: float) -> Store:
    key = (url, rank, world_size)
    if key not in _stores:

        def connect() -> Store:
            if url == "env://":
                return _connect(rank, timeout)
            made: Store = next(rendezvous(url, rank, world_size, timeout=timedelta(seconds=timeout)))[0]
            return made

        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}" if url == "env://" else url
        try:
            _stores[key] = _answer(_start_thread, connect, time.monotonic() + timeout + STAY)
        except (dist.DistError, TimeoutError) as error:
            raise Timeout(
                f"rank {rank} of {world_size} cannot meet the others at the store {where} ({_first_line(error)}); "
                "try: check that every rank runs and that the address is reachable from here, or raise connect_timeout="
            ) from error
        except (ValueError, RuntimeError, OSError, AssertionError) as error:  # torch asserts that a URL has no ?rank=
            raise InvalidArgument(
                f"the store {where} cannot be used ({_first_line(error)}); try: check MASTER_ADDR and MASTER_PORT"
            ) from error
    return _stores[key]


def _agent_hosts() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _connect(rank: int, timeout: float) -> Store:
    """The store of torchrun's environment. As torch's own rendezvous, which only counts those that come, where `agree`
    knows their names, and which lets a client take twice its time where nobody listens."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    hosts = rank == 0 and not _agent_hosts()
    deadline = time.monotonic() + timeout
    libuv = {} if os.environ.get("USE_LIBUV", "1") == "1" else {"use_libuv": False}
    while True:
        if not hosts:
            _await_listener(address, port, deadline)
        left = deadline - time.monotonic()
        # whoever listened may be gone again
        attempt = timedelta(seconds=timeout if hosts else max(1.0, min(left, ATTEMPT)))
        options = {"wait_for_workers": False, "multi_tenant": not _agent_hosts(), **libuv}
        try:
            store = TCPStore(address, port, None, hosts, timeout=attempt, **options)
        except dist.DistError:
            if hosts or left <= ATTEMPT:
                raise
            continue
        store.set_timeout(timedelta(seconds=timeout))
        return store


def _await_listener(address: str, port: int, deadline: float) -> None:
    for left in _polls(deadline):
        try:
            socket.create_connection((address, port), timeout=max(0.1, min(left, 5.0))).close()
            return
        except OSError as error:
            if left <= 0:
                raise TimeoutError(_first_line(error)) from error


def _polls(deadline: float) -> Iterator[float]:
    """Gives the seconds that are left: at once, after pauses that grow, and a last time at the deadline."""
    pause = POLL_FIRST
    while True:
        left = deadline - time.monotonic()
        yield left
        if left <= 0:
            return
        time.sleep(min(pause, left))
        pause = min(pause * 1.5, POLL_MOST)


def _serve(calls: "SimpleQueue[Callable[[], None] | None]") -> None:
    while (call := calls.get()) is not None:
        call()
        del call  # it holds who asks


def _answer(start: Callable[[Callable[[], None]], object], call: Callable[[], T], deadline: float) -> T:
    """What a call into C++ gives that another thread makes, so that Ctrl-C and the deadline end the wait for it."""
    answers: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()

    def run() -> None:
        try:
            answers.put((call(), None))
        except BaseException as error:  # handed to the caller below
            answers.put((None, error))

    start(run)
    while True:
        try:
            result, error = answers.get(timeout=0.2)
        except Empty:
            if time.monotonic() > deadline:
                raise TimeoutError("no answer") from None
            continue
        if error is not None:
            raise error
        return cast("T", result)


def _start_thread(run: Callable[[], None]) -> None:
    threading.Thread(target=run, name="offbeat-rendezvous", daemon=True).start()


def _address(store: Store) -> str | None:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store.host if isinstance(store, TCPStore) else None


def _unreachable(error: RuntimeError, host: str | None) -> OffbeatError:
    if host is None:
        return OffbeatError(
            f"the store cannot be reached ({_first_line(error)}); try: check that rank 0 or torchrun's agent still runs"
        )
    return PeerLost(
        f"rank 0 (at {host}) is gone: it hosts the store, which cannot be reached any more ({_first_line(error)}); "
        "try: read the end of its output",
        rank=0,
        host=host,
    )


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
