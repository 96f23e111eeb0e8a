"""The Rust core, as Python sees it. Not a public interface: use the functions of `offbeat`."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypedDict, final, type_check_only

from torch import Tensor

__all__ = [
    "Background",
    "Carrier",
    "Codec",
    "Group",
    "Runtime",
    "Scheduler",
    "Ticket",
    "__version__",
    "clock",
    "cuda_report",
    "digest",
    "interfaces",
    "now",
]

__version__: str

@type_check_only
class Store(Protocol):
    """Where ranks leave their cards for each other. `get` gives None when nothing came in `wait` seconds."""

    def set(self, key: str, value: bytes) -> None: ...
    def get(self, key: str, wait: float) -> bytes | None: ...

@type_check_only
class Link(TypedDict):
    """How this rank reaches another one, and why so."""

    rank: int
    host: str
    pid: int
    kind: str  # "self", "shared memory" or "tcp"
    why: str
    local: str  # address of our end ("" for shared memory)
    remote: str
    streams: int

@final
class Codec:
    """A codec, checked and built once. Raises `InvalidArgument` for an unknown name or parameter."""

    def __new__(cls, name: str) -> Codec: ...
    @property
    def name(self) -> str: ...

@final
class Ticket:
    """Work under way. `wait` gives its result: None, or DLPack capsules of the tensors received."""

    def wait(self, timeout: float | None = None) -> list[object] | None: ...
    def done(self) -> bool: ...

@final
class Group:
    """Some ranks of the world and the calls between them, matched by their order.

    Tensors are contiguous and on the CPU; the caller sees to that. With `async_op` a call gives a `Ticket` at once;
    without, it blocks and gives the result: None for calls that work in place, DLPack capsules for the others.
    """

    @property
    def ranks(self) -> list[int]: ...
    def all_reduce(self, tensor: Tensor, op: str, codec: Codec | None, async_op: bool) -> Ticket | None: ...
    # the short cut: False, and nothing done, if the tensor must go the long way; only for type(tensor) is torch.Tensor
    def try_all_reduce(self, tensor: Tensor, op: str, /) -> bool: ...
    def reduce(self, tensor: Tensor, dst: int, op: str, async_op: bool) -> Ticket | None: ...
    def broadcast(self, tensor: Tensor, src: int, async_op: bool) -> Ticket | None: ...
    def scatter(self, tensors: Sequence[Tensor] | None, src: int, out: Tensor, async_op: bool) -> Ticket | None: ...
    def barrier(self, async_op: bool) -> Ticket | None: ...
    def all_gather(self, tensor: Tensor, async_op: bool) -> Ticket | list[object]: ...
    # on ranks other than dst the list is empty
    def gather(self, tensor: Tensor, dst: int, async_op: bool) -> Ticket | list[object]: ...
    # a list of one
    def reduce_scatter(self, tensors: Sequence[Tensor], op: str, async_op: bool) -> Ticket | list[object]: ...
    def all_to_all(self, tensors: Sequence[Tensor], async_op: bool) -> Ticket | list[object]: ...

@final
class Scheduler:
    """A model's buckets, and the thread that exchanges them while backward goes on. Tensors are numbered from 0.

    A round: each tensor is marked once, ready or absent, then `finish` waits for all buckets. One that gets its value
    arrives first: `arrive` says when it is time to move all that have arrived into their slots, and to mark them.
    """

    @property
    def group(self) -> Group: ...
    # for each bucket a DLPack capsule of all its elements (on a GPU the tensor itself), and (tensor, first element) of
    # what lies in it
    def buckets(self) -> list[tuple[object, list[tuple[int, int]]]]: ...
    def arrive(self, tensor: int, /) -> bool: ...
    # on a GPU: the stream that has written the values, or zeros
    def mark_ready(self, tensors: Sequence[int], stream: int = 0, /) -> None: ...
    def mark_absent(self, tensor: int, stream: int = 0, /) -> None: ...
    def missing(self) -> list[int]: ...
    def has_begun(self) -> bool: ...
    # tensors that are absent here and have a value all the same; on a GPU `stream` waits for the buckets
    def finish(self, stream: int = 0, /) -> list[int]: ...
    # anchors and copies begin with the weights that lie in the buckets; on a GPU `stream` has written them, and waits
    def begin(self, stream: int = 0, /) -> None: ...
    def reset(self, why: str) -> None: ...  # forgets a round that did not end
    def observed(self) -> tuple[list[int], list[bool]]: ...  # the order of the round under way; which came again
    def hold(self, held: bool) -> None: ...  # whether buckets wait for the end of backward
    def weigh(self, samples: float) -> None: ...  # how many samples were seen since the last round
    def rebucket(self, order: Sequence[int], late: Sequence[bool], bucket_bytes: int) -> None: ...
    # bytes before and after, bad blocks, relative error of results, seconds of encoding and decoding
    def coded(self) -> tuple[int, int, int, float, float]: ...
    def was_non_finite(self) -> bool: ...  # whether any rank met such a value where it had to encode, in the last round
    def resume(self, step: int) -> None: ...  # goes on counting steps from here
    # what steps keep of a tensor: name, who has it ("all" alike, "each" its own, "carrier"), DLPack capsule of float32
    def saved(self, tensor: int) -> list[tuple[str, str, object]]: ...
    def restore(self, tensor: int, name: str, values: Tensor) -> None: ...
    def totals(self) -> tuple[int, float, float]: ...  # rounds, seconds of communication, seconds waited for

@final
class Carrier:
    """Carries the steps of a model's buckets on a GPU, on a stream of its own. Streams are handles of the driver's."""

    def broadcast(self, tensor: Tensor, src: int, stream: int, /) -> None: ...  # `stream` waits for it

@final
class Background:
    """A model's exchanges in the background, on snapshots of all its parameters in one flat float32 tensor.

    At a safe point `look` says what there is to do: "snapshot" (copy the parameters, then `taken`), "apply" (add the
    delta, then `applied`), "skip" (`applied` at once), or None. On a GPU weights are copied and deltas added on a
    stream of the caller's, and the core is told which.
    """

    def start(self) -> None: ...  # what is in the snapshot counts as what all began with
    @property
    def places(self) -> list[int]: ...  # the first element of each tensor
    def memory(self) -> tuple[object, object]: ...  # snapshot and delta: DLPack capsules, or the tensors that were lent
    def look(self) -> str | None: ...
    def fetch(self, stream: int = 0, /) -> None: ...  # weights were copied on this stream
    def land(self, stream: int = 0, /) -> None: ...  # before the delta is added on this stream, which waits for it
    def landed(self, stream: int = 0, /) -> None: ...  # it was added
    def taken(self, clock: int) -> None: ...  # steps made before it
    def applied(self) -> None: ...
    def passed(self, clock: int) -> None: ...
    # until there is something to do; None if there never will be, or, with only_results, if nothing is under way
    def wait(self, *, only_results: bool) -> str | None: ...
    def hold(self) -> bool: ...  # before a pause: whether to copy the parameters first
    def pause(self, clock: int) -> None: ...
    def resume(self) -> None: ...
    # what the next rounds are for: "open", or "settles": no rank makes steps for now
    def close(self, closing: str) -> None: ...
    # the number of the next round, members, and (label, DLPack capsule of float32) of what is kept of each tensor
    def save(self) -> tuple[int, int, list[list[tuple[str, object]]]]: ...
    # both before `start`: gives back what was kept of a tensor (False if there is no use for it); all ranks have loaded
    def restore(self, tensor: int, label: str, values: Tensor) -> bool: ...
    def go_on(self, mine: int, least: int, most: int) -> None: ...  # rounds: this rank's, and those of all
    def stop(self) -> None: ...
    def progress(self) -> tuple[int, int, float, int]: ...  # rounds, dropped ones, spread, members
    def coded(self) -> tuple[int, int, int, float, float]: ...  # as of a scheduler

@final
class Runtime:
    """One rank's engine: its links, its groups and its shared memory."""

    def __new__(
        cls,
        store: Store | None,
        rank: int,
        world_size: int,
        *,
        connect_timeout: float,
        timeout: float,
        first_step_timeout: float,
        token: bytes | None,
        interface: str | None,
        reach: str | None,
    ) -> Runtime:
        """Joins the world. `reach` is an address that every rank can reach (the store's), to choose an interface by."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def local_size(self) -> int: ...
    @property
    def host(self) -> str: ...
    def world(self) -> Group: ...
    def group(self, ranks: Sequence[int]) -> Group: ...
    # groups of all ranks for the training of one model; every rank calls it
    def lanes(self, *, flat: bool, one: bool = False) -> list[Group]: ...
    # connects the GPUs of all members; `allocate` gives memory for a bucket, all zero: elements, dtype, and the stream
    # that uses it
    def carrier(
        self, group: Group, device: int, stream: Callable[[], int], allocate: Callable[[int, str, int | None], Tensor]
    ) -> Carrier: ...
    def scheduler(
        self,
        lanes: Sequence[Group],
        model: int,  # a number for the trace
        tensors: Sequence[tuple[str, int, int, str]],  # name, elements, rows, dtype
        *,
        what: str,
        when: str,
        every: int,
        warmup: int,  # rounds
        first: Sequence[tuple[str, dict[str, object]]],  # steps of the warm-up
        steps: Sequence[tuple[str, dict[str, object]]],
        bucket_bytes: int,
        carrier: Carrier | None = None,
    ) -> Scheduler: ...
    def background(
        self,
        group: Group,  # of its own, for its number and its members
        counts: Sequence[int],  # elements of each tensor
        method: str,
        arguments: dict[str, object],
        *,
        period: float | None,
        device: tuple[int, Callable[[int, str, int | None], Tensor]] | None = None,  # as for a carrier
    ) -> Background: ...
    # one outcome for all ranks that are left, whoever is lost: before calls in groups; when these have ended well; or
    # else what the others hand in (bytes by rank), or None if one of them says that they have ended well there
    def convene(self) -> None: ...
    def settled(self) -> None: ...
    def gather_living(self, tensor: Tensor, *, patient: bool) -> list[tuple[int, bytearray]] | None: ...
    def close_group(self, group: Group) -> None: ...  # a call that all members make; a second one does nothing
    def shared_empty(self, nbytes: int) -> object: ...  # a DLPack capsule of uint8[nbytes]
    def send(self, tensor: Tensor, dst: int, tag: int) -> None: ...
    def recv(self, tensor: Tensor, src: int, tag: int) -> None: ...
    def links(self) -> list[Link]: ...
    # (rank, kind, sent, received) of each link: bytes with the headers of frames, without what neighbours share
    def traffic(self) -> list[tuple[int, str, int, int]]: ...
    # (kind, bucket or peer, model, step, begin, end, bytes) of each span that is kept, in the order of their ends.
    # Kinds are "forward", "backward", "wait"; "queued", "reduce", "python" of a bucket; "send", "receive" of a peer,
    # where model and step are the group and the number of the call. Times are those of `now`.
    def trace(self) -> list[tuple[str, int, int, int, int, int, int]]: ...
    def trace_dropped(self) -> int: ...  # spans that gave way to newer ones
    def trace_clear(self) -> None: ...
    def mark(
        self, kind: str, model: int, step: int, begin: int, end: int, *, of: int = 0, nbytes: int = 0
    ) -> None: ...  # adds a span, `of` a bucket or a peer where the kind has one
    def fail(self, cause: str) -> None: ...  # tells the peers why this rank is about to die
    def shutdown(self, reason: str) -> None: ...  # flushes, says goodbye; a second call does nothing

def digest(tensor: Tensor) -> int: ...  # of the bytes of a contiguous tensor
def now() -> int: ...  # nanoseconds of the clock that traces are recorded by
def clock() -> str: ...  # names that clock: the same text on all ranks that read the same one
def cuda_report() -> str: ...  # one line: what there is of CUDA and NCCL, or what is missing; starts the driver
def interfaces(spec: str | None) -> list[tuple[str, str, bool]]: ...  # (name, address, chosen by spec)
