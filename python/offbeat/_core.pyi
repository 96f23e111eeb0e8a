"""The Rust core, as Python sees it. Not a public interface: use the functions of `offbeat`."""

from collections.abc import Sequence
from typing import Protocol, TypedDict, final, type_check_only

from torch import Tensor

__all__ = ["Codec", "Group", "Runtime", "Ticket", "__version__", "interfaces"]

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
    def shared_empty(self, nbytes: int) -> object: ...  # a DLPack capsule of uint8[nbytes]
    def send(self, tensor: Tensor, dst: int, tag: int) -> None: ...
    def recv(self, tensor: Tensor, src: int, tag: int) -> None: ...
    def links(self) -> list[Link]: ...
    def fail(self, cause: str) -> None: ...  # tells the peers why this rank is about to die
    def shutdown(self, reason: str) -> None: ...  # flushes, says goodbye; a second call does nothing

def interfaces(spec: str | None) -> list[tuple[str, str, bool]]: ...  # (name, address, chosen by spec)
