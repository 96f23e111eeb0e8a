"""The engines behind one face: a buffer, an all-reduce on it, a barrier."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable


class Engine(Protocol):
    def buffer(self, count: int, memory: str) -> torch.Tensor: ...
    def call(self, tensor: torch.Tensor) -> Callable[[], object]:
        """The all-reduce of this tensor, with all that can be prepared outside the measured time."""
        ...

    def barrier(self) -> None: ...
    def close(self) -> None: ...


class Gloo:
    def __init__(self) -> None:
        dist.init_process_group("gloo")

    def buffer(self, count: int, memory: str) -> torch.Tensor:  # noqa: ARG002
        return torch.empty(count)

    def call(self, tensor: torch.Tensor) -> Callable[[], object]:
        return lambda: dist.all_reduce(tensor)

    def barrier(self) -> None:
        dist.barrier()

    def close(self) -> None:
        dist.destroy_process_group()


class Mpi:
    """OpenMPI through mpi4py. The buffer is described once, so that a call costs as little as it can in Python."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self.mpi = MPI
        self.world = MPI.COMM_WORLD

    def buffer(self, count: int, memory: str) -> torch.Tensor:  # noqa: ARG002
        return torch.empty(count)

    def call(self, tensor: torch.Tensor) -> Callable[[], object]:
        array = tensor.numpy()
        place, described, add = self.mpi.IN_PLACE, [array, array.size, self.mpi.FLOAT], self.mpi.SUM
        return lambda: self.world.Allreduce(place, described, add)

    def barrier(self) -> None:
        self.world.Barrier()

    def close(self) -> None:
        pass  # mpi4py finalizes at exit


class Ours:
    def __init__(self) -> None:
        import offbeat

        self.offbeat = offbeat
        offbeat.init()

    def buffer(self, count: int, memory: str) -> torch.Tensor:
        return self.offbeat.shared_empty(count, dtype=torch.float32) if memory == "shared" else torch.empty(count)

    def call(self, tensor: torch.Tensor) -> Callable[[], object]:
        return lambda: self.offbeat.all_reduce(tensor)

    def barrier(self) -> None:
        self.offbeat.barrier()

    def close(self) -> None:
        self.offbeat.shutdown()


class Copy:
    """Not an all-reduce: the bytes that each rank has to read and to write, as the limit on one host."""

    def __init__(self, barrier: Callable[[], None]) -> None:
        self.barrier = barrier

    def buffer(self, count: int, memory: str) -> torch.Tensor:  # noqa: ARG002
        return torch.empty(count)

    def call(self, tensor: torch.Tensor) -> Callable[[], object]:
        source = torch.zeros_like(tensor).fill_(0.0)
        return lambda: tensor.copy_(source)

    def close(self) -> None:
        pass


def start(names: list[str]) -> dict[str, Engine]:
    """The engines of these names, in the order in which they take turns. Gloo first: ours can use its store."""
    makers: dict[str, Callable[[], Engine]] = {"gloo": Gloo, "ours": Ours, "mpi": Mpi}
    engines = {name: make() for name, make in makers.items() if name in names}
    if "copy" in names:
        engines["copy"] = Copy(next(iter(engines.values())).barrier)
    return {name: engines[name] for name in ("ours", "gloo", "mpi", "copy") if name in engines}


def missing(name: str) -> str:
    """Why an engine cannot be measured here; empty when it can. Imports nothing."""
    needed = {"ours": ["offbeat", "offbeat._core"], "gloo": [], "mpi": ["mpi4py"], "copy": []}[name]
    for module in needed:
        try:
            found = importlib.util.find_spec(module)
        except ImportError:
            found = None
        if found is None:
            return f"no module {module}"
    return ""


def algorithm(constructor: str) -> Any:
    """The algorithm that a text such as `TopK(ratio=0.01)` makes: tables stay data, and a job can be JSON."""
    from offbeat import algorithms

    return eval(constructor, dict(vars(algorithms)))
