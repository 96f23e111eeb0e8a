"""The runtime's life: `init` joins the world, `shutdown` leaves it; between them this module holds the one runtime."""

import atexit
import contextlib
import os
import sys
import threading
from typing import TYPE_CHECKING

from . import _core, counters, metrics, rendezvous, settings
from . import profile as profiles
from .errors import InvalidArgument, NotInitialized
from .uncaught import Uncaught

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

# The world's group while initialised, else None. Collectives read it directly: it is the one lookup on their fast path.
world: _core.Group | None = None
# Counts successful inits, so that a Group from before a shutdown is recognised.
epoch = 0
# The name of this attempt: the same on all ranks, another one after each init.
job = ""

_runtime: _core.Runtime | None = None
_metrics: metrics.Writer | None = None
_profile: "profiles.Found | None" = None
_forked = False
_watches_forks = False
_left_by_parent: list[object] = []
_uncaught: Uncaught | None = None
# Reentrant, because a signal handler may call `shutdown` while `init` runs in the same thread.
_lock = threading.RLock()


def init(
    *,
    connect_timeout: float = settings.Default(60.0),
    first_step_timeout: float = settings.Default(300.0),
    timeout: float = settings.Default(30.0),
    token: str | bytes | None = None,
    interface: str | None = None,
    profile: "str | os.PathLike[str] | None" = None,
    store: "Store | str | None" = None,
    rank: int | None = None,
    world_size: int | None = None,
) -> None:
    """Joins the world, as torchrun describes it; without torchrun, a world of one. Every rank calls it once.

    Each argument can also be given as environment variable OFFBEAT_<NAME>; the argument wins. Times are in seconds.

    Args:
        connect_timeout: for all ranks to come and to connect.
        first_step_timeout: for the first training step, where ranks may still compile or load data.
        timeout: for each later collective.
        token: the job's secret; by default rank 0 makes one and spreads it through the store.
        interface: which network interfaces to use ("eth0", "^lo,docker", "10.0.0.0/8"); also OFFBEAT_SOCKET_IFNAME,
            then NCCL_SOCKET_IFNAME. By default the one that routes to the peer.
        profile: a file of `offbeat tune`; also ./offbeat-profile.json, then offbeat/profile.json in the user's
            configuration ($XDG_CONFIG_HOME or ~/.config). Rank 0 prints which one it uses.
        store: a torch.distributed.Store, or a URL that torch.distributed.rendezvous knows; with rank and world_size.
        rank, world_size: by default torch.distributed's default group, or RANK and WORLD_SIZE.
    """
    global _runtime, _profile, _metrics, world, epoch, job
    with _lock:
        _refuse_in_child()
        if _runtime is not None:
            raise InvalidArgument("offbeat is initialised already; try: init() once, or offbeat.shutdown() before it")
        connect_timeout = settings.seconds("connect_timeout", connect_timeout)
        first_step_timeout = settings.seconds("first_step_timeout", first_step_timeout)
        timeout = settings.seconds("timeout", timeout)
        secret = settings.token(token)
        chosen = settings.interface(interface)
        # whoever tunes begins without: a profile that is wrong or gone must not keep anyone from making a new one
        found = None if os.environ.get("OFFBEAT_TUNE") else profiles.find(profile)
        place = rendezvous.find(store, rank, world_size, connect_timeout)
        target = settings.metrics(place.rank)
        part, name = rendezvous.agree(place, connect_timeout)
        runtime = _core.Runtime(
            part,
            place.rank,
            place.world_size,
            connect_timeout=connect_timeout,
            timeout=timeout,
            first_step_timeout=first_step_timeout,
            token=secret,
            interface=chosen,
            reach=place.reach,
        )
        world = runtime.world()
        epoch += 1
        _runtime, _profile, job = runtime, found, name
        _install(runtime)
        if target is not None:
            _metrics = metrics.Writer(target, lambda: counters.collect(runtime))
        if found is not None and place.rank == 0:
            sys.stderr.write(f"offbeat: {found}\n")


def shutdown() -> None:
    """Leaves the world in good order. Does nothing when not initialised; `init` may be called again after it."""
    global _runtime, _profile, world
    with _lock:
        _refuse_in_child()
        if _runtime is None:
            return
        runtime, _runtime, _profile, world = _runtime, None, None, None
        _uninstall()
        _leave(runtime, "it called offbeat.shutdown()")
        counters.models.clear()


def is_initialized() -> bool:
    """Whether `init` was called in this process (a forked child is another one) and `shutdown` was not."""
    return _runtime is not None


def rank() -> int:
    """This process's number in the world, from 0."""
    return current().rank


def world_size() -> int:
    """How many ranks there are."""
    return current().world_size


def local_rank() -> int:
    """This process's number among the ranks of its host, from 0."""
    return current().local_rank


def local_size() -> int:
    """How many ranks this host has."""
    return current().local_size


def host() -> str:
    """The name of this rank's host, the same for all ranks that share memory and network."""
    return current().host


def profiled_bucket_bytes() -> int | None:
    """The size of buckets that the profile in use says, if there is one."""
    return None if _profile is None else _profile.profile.bucket_bytes


def stats() -> counters.Stats:
    """What this rank has done since `init`: bytes of each link, steps and seconds of each model, and their sums.

    Seconds of communication are those during which a bucket was reduced; the exposed ones those during which the
    backward pass was over and waited for it; hidden is the part of the communication that was not exposed, None while
    there was none. Bytes are those of frames; what ranks read in the memory of their neighbours is not among them.
    """
    return counters.collect(current())


def current() -> _core.Runtime:
    """The runtime, or a clear error."""
    if _runtime is None:
        _refuse_in_child()
        raise NotInitialized("offbeat is not initialised; try: offbeat.init() first")
    return _runtime


def _refuse_in_child() -> None:
    if _forked:
        raise NotInitialized(
            f"this process (pid {os.getpid()}) was forked from a rank and cannot take its place; try: communicate in "
            "the parent only, or start the child with multiprocessing's 'spawn' method"
        )


def training_here() -> None:
    """This thread trains: if it raises what nobody catches, the others are told."""
    if _uncaught is not None:
        _uncaught.watch_thread()


def _install(runtime: _core.Runtime) -> None:
    global _uncaught, _watches_forks
    _uncaught = Uncaught(runtime.fail)
    atexit.register(_at_exit, os.getpid())
    if not _watches_forks:
        # A fork handler and not a comparison of pids at each call: getpid() costs a good part of a small all-reduce.
        os.register_at_fork(after_in_child=_after_fork_in_child)
        _watches_forks = True


def _uninstall() -> None:
    global _uncaught
    if _uncaught is not None:
        _uncaught.stop()
        _uncaught = None
    atexit.unregister(_at_exit)


def _after_fork_in_child() -> None:
    global _runtime, _metrics, world, _forked, _lock
    # Another thread of the parent may have held it.
    _lock = threading.RLock()
    if _runtime is not None:
        # Kept, not dropped: the threads and descriptors behind it are the parent's.
        _left_by_parent.append((_runtime, world, _metrics))
        _runtime, _metrics, world, _forked = None, None, None, True
        _uninstall()
    rendezvous.after_fork_in_child()


def _at_exit(pid: int) -> None:
    if _runtime is not None and pid == os.getpid():
        if _uncaught is not None:
            _uncaught.tell_at_exit()
        with contextlib.suppress(Exception):
            _leave(_runtime, "its interpreter exited")


def _leave(runtime: _core.Runtime, why: str) -> None:
    global _metrics
    writer, _metrics = _metrics, None
    if writer is not None:
        writer.stop()
    runtime.shutdown(why)
