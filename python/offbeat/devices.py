"""Models on a GPU: which device a rank trains on, and how its streams meet those of the core.

The core exchanges buckets on a stream of its own, one for each model. A gradient's hook says on which stream it was
made, and at the end of backward torch's current stream waits for the exchange; the host waits for neither. Memory of
buckets is torch's, so that its allocator knows of it.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from . import _core, agreement, hooks, runtime, slots
from .errors import Unsupported


class Device(Protocol):
    """What is asked of a device."""

    @property
    def index(self) -> int: ...
    def current_stream(self) -> int: ...  # the handle of torch's, on the calling thread
    def stream(self) -> int: ...  # the handle of one for us, which stays for ever
    # that a stream of ours uses too; without one, whoever asks keeps it until that is done with it
    def zeros(self, count: int, dtype: str, stream: int | None) -> Tensor: ...
    def joined(self) -> None: ...  # when the current stream has been told to wait
    def within(self, stream: int) -> AbstractContextManager[object]: ...  # where torch works on a stream of ours


class Cuda:
    """A GPU of torch's."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.index = device, device.index or 0

    def current_stream(self) -> int:
        """The handle of the current stream, which in a hook is that of the gradient."""
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    def stream(self) -> int:
        """The handle of a stream out of torch's pool, ahead of others where both have work. Torch never destroys these:
        its allocator notes on them when memory that we have used is free, maybe long after the model is gone."""
        return int(torch.cuda.Stream(self.device, priority=-1).cuda_stream)  # type: ignore[no-untyped-call]

    def zeros(self, count: int, dtype: str, stream: int | None) -> Tensor:
        """Memory to exchange; torch does not give it to anybody else before our stream is done with it."""
        flat = torch.zeros(count, dtype=getattr(torch, dtype), device=self.device)
        if stream is not None:
            flat.record_stream(self._ours(stream))
        # made between rounds; whoever writes to it first may be on another stream
        torch.cuda.current_stream(self.device).synchronize()
        return flat

    def joined(self) -> None:
        """Nothing: what comes on the stream waits."""

    def within(self, stream: int) -> AbstractContextManager[object]:
        """Makes a stream of ours the current one: what is enqueued inside runs between our kernels."""
        context: AbstractContextManager[object] = torch.cuda.stream(self._ours(stream))
        return context

    def _ours(self, stream: int) -> torch.cuda.Stream:
        return torch.cuda.ExternalStream(stream, device=self.device)  # type: ignore[no-untyped-call]


# How a device is made, by torch's name for its kind; the CPU is none.
KINDS: dict[str, Callable[[torch.device], Device]] = {"cuda": Cuda}


def of(named: Iterable[tuple[str, Tensor]]) -> Device | None:
    """The one device of all parameters; None if they are in the host's memory."""
    places: dict[torch.device, str] = {}
    for name, tensor in named:
        places.setdefault(tensor.device, name)
    if len(places) > 1:
        (first, one), (second, other), *_ = places.items()
        raise Unsupported(
            f"{one} is on {first} and {other} on {second}, and a rank trains on one device; try: "
            f"model.to({str(first)!r}) before wrapping, and one process for each GPU"
        )
    (device,) = places or (torch.device("cpu"),)
    return None if device.type not in KINDS else KINDS[device.type](device)


def of_tensor(tensor: Tensor) -> Device:
    """The device of a bucket that is on one."""
    return KINDS[tensor.device.type](tensor.device)


def refuse_elsewhere(named: Iterable[tuple[str, Tensor]]) -> None:
    """The core reads and writes memory of the CPU and of CUDA devices, and would trust the address of any other."""
    for name, tensor in named:
        if tensor.device.type not in ("cpu", *KINDS):
            raise Unsupported(
                f"{name} is on {tensor.device}, and this version trains on the CPU and on CUDA devices; try: "
                "model.cpu() before wrapping (model.to_empty(device='cpu') if it has no values yet)"
            )


class Home:
    """A model in the host's memory: the core reads and writes its buckets by itself, and no stream waits."""

    place = "cpu"
    carrier = None

    def connect(self, line: hooks.Line, scheduler: _core.Scheduler) -> None:
        """Lets hooks tell the scheduler of gradients."""
        line.connect(scheduler.arrive, scheduler.mark_ready)

    def absent(self, scheduler: _core.Scheduler, index: int, _: Tensor) -> None:
        """Says that a gradient is not there: it counts as zero."""
        scheduler.mark_absent(index)

    def marker(self, mark: Callable[[Sequence[int]], None]) -> Callable[[Sequence[int]], None]:
        """What marks tensors that are written."""
        return mark

    def finish(self, scheduler: _core.Scheduler) -> list[int]:
        """Ends a round."""
        return scheduler.finish()

    def begin(self, scheduler: _core.Scheduler) -> None:
        """Lets steps begin with the weights in the buckets."""
        scheduler.begin()

    def carries(self, _: Tensor) -> bool:
        """Whether a tensor is on a device that is carried."""
        return False

    def broadcast(self, group: _core.Group, tensor: Tensor, source: int) -> None:
        """Gives all ranks what `source` has."""
        group.broadcast(tensor, source, False)


class Carriage:
    """A model's device, and who carries its buckets there; to be asked the same as `Home`."""

    place = "gpu"

    def __init__(self, device: Device, group: _core.Group) -> None:
        self.device = device
        self.carrier = runtime.current().carrier(group, device.index, device.stream, device.zeros)

    def connect(self, line: hooks.Line, scheduler: _core.Scheduler) -> None:
        """Lets hooks tell the scheduler of gradients: one by one, since each may be on another stream."""
        line.connect(hooks.at_once, self.marker(scheduler.mark_ready))

    def absent(self, scheduler: _core.Scheduler, index: int, place: Tensor) -> None:
        """Says that a gradient is not there: it counts as zero."""
        slots.clear(place)
        scheduler.mark_absent(index, self.device.current_stream())

    def marker(self, mark: Callable[[Sequence[int], int], None]) -> Callable[[Sequence[int]], None]:
        """What marks tensors that torch's current stream has written."""
        current = self.device.current_stream
        return lambda tensors: mark(tensors, current())

    def finish(self, scheduler: _core.Scheduler) -> list[int]:
        """Ends a round: torch's current stream waits for it."""
        gained = scheduler.finish(self.device.current_stream())
        self.device.joined()
        return gained

    def begin(self, scheduler: _core.Scheduler) -> None:
        """Lets steps begin with the weights in the buckets: torch's current stream has written them, and waits before
        it writes others there."""
        scheduler.begin(self.device.current_stream())
        self.device.joined()

    def carries(self, tensor: Tensor) -> bool:
        """Whether a tensor is on a device that is carried."""
        return tensor.device.type in KINDS

    def broadcast(self, group: _core.Group, tensor: Tensor, source: int) -> None:
        """Gives all ranks what `source` has, on torch's current stream where it is on the device."""
        if not self.carries(tensor):
            group.broadcast(tensor, source, False)
            return
        self.carrier.broadcast(tensor, source, self.device.current_stream())
        self.device.joined()


def connect(device: Device | None, group: _core.Group) -> Home | Carriage:
    """Connects the devices of all ranks, where there are any. Every rank calls it."""
    return Home() if device is None else Carriage(device, group)


def agreed(named: Sequence[tuple[str, Tensor]], buffers: Sequence[tuple[str, Tensor]] = ()) -> Device | None:
    """The device of a model, after all ranks have found that theirs can be exchanged, and that they have the same."""
    agreement.refuse_sparse([*named, *buffers])
    refuse_elsewhere([*named, *buffers])
    device = of(named)
    agree(device)
    return device


def agree(device: Device | None) -> None:
    """Raises the same `Mismatch` on every rank unless all train on GPUs, or all on the CPU."""
    agreement.compare(
        runtime.current().world(), "devices", ["parameters on " + ("the CPU" if device is None else "a GPU")]
    )
