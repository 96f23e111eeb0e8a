"""CPU tensors in the place of a GPU's memory, on doubles of libcuda and libnccl: the real path of the GPU, without one.

Only tests import this: it puts a device for tensors of the CPU into `offbeat.devices`, which has none otherwise.
Torch works on the host at once; here that is a stream too: a gradient reaches its bucket in the order of that stream,
and the host goes on after `joined` as that stream does. A wait that is forgotten shows on some schedule of the streams.
"""

import contextlib
import ctypes
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from offbeat import devices, slots


class Double:
    """The doubles, loaded, and a stream in the place of torch's."""

    def __init__(self) -> None:
        folder = Path(os.environ["DOUBLES"])
        settings = {"FAKECUDA_IDENTITY": "1", "FAKECUDA_KERNELS": str(folder / "kernels.so")}
        os.environ.update(settings | {"OFFBEAT_NCCL": str(folder / "libnccl.so.2")})
        os.environ.setdefault("FAKENCCL_FOLDER", str(Path.cwd()))
        # torch looks for a driver once, and must find none: this one would not do for it
        assert not torch.cuda.is_available()
        # under its own name, so that whoever asks for libcuda.so.1 gets it
        self.cuda = ctypes.CDLL(str(folder / "libcuda.so.1"))
        self.nccl = ctypes.CDLL(str(folder / "libnccl.so.2"))
        for function in (self.cuda.fakecuda_count, self.cuda.fakecuda_alive, self.nccl.fakenccl_count):
            function.restype = ctypes.c_long
        context = ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.call("cuCtxPushCurrent_v2", context)
        self.streams = [self.new_stream()]
        # gradients on their way into buckets, and buckets: torch keeps memory until streams that use it are done
        self.held: list[torch.Tensor] = []
        self.lent: list[torch.Tensor] = []

    @property
    def stream(self) -> ctypes.c_void_p:
        return self.streams[0]

    def new_stream(self) -> ctypes.c_void_p:
        stream = ctypes.c_void_p()
        self.call("cuStreamCreateWithPriority", ctypes.byref(stream), 0, 0)
        return stream

    def schedule(self, lazy: int) -> None:
        """Begins anew with a schedule: torch's stream is the first, the next ones are of the next model."""
        self.drain()
        self.cuda.fakecuda_schedule(ctypes.c_long(lazy))
        # those before it stay until the end: models that are gone may still give something back there
        self.streams.insert(0, self.new_stream())

    def call(self, name: str, *arguments) -> None:
        code = getattr(self.cuda, name)(*arguments)
        assert code == 0, f"{name}: {code}"

    def write(self, to: torch.Tensor, values: torch.Tensor) -> None:
        """Copies in the order of the stream; until then the place holds nonsense."""
        source = torch.empty_like(to).copy_(values)
        to.fill_(float("nan"))
        assert to.stride() == source.stride()
        self.held.append(source)
        arguments = [ctypes.c_uint64(to.data_ptr()), ctypes.c_uint64(source.data_ptr()), ctypes.c_size_t(source.nbytes)]
        self.call("cuMemcpyDtoDAsync_v2", *arguments, self.stream)

    def drain(self) -> None:
        self.cuda.fakecuda_drain(self.stream)
        self.held.clear()

    def forget(self, wait: str, *, ours: bool, before: int = 0, times: int = 1) -> None:
        """Lets waits go by: those of our streams, or those of torch's."""
        arguments = [ctypes.c_int(ours), ctypes.c_long(before), ctypes.c_long(times)]
        self.cuda.fakecuda_forget(wait.encode(), self.stream, *arguments)

    def counts(self) -> dict[str, int]:
        """How often things were done so far."""
        of_cuda = ("kernels", "host synchronizations", "cuMemAllocAsync", "cuEventCreate", "cuMemcpyHtoDAsync_v2")
        found = {name: self.cuda.fakecuda_count(name.encode()) for name in of_cuda}
        return found | {name: self.nccl.fakenccl_count(name.encode()) for name in ("groups", "ncclAllReduce")}

    def left(self, seconds: float = 10.0) -> int:
        """What is alive after everything was given back; threads get a moment to end."""
        self.drain()
        # streams of torch's pool outlive what was done on them, and so does the context
        end, ours = time.monotonic() + seconds, len(self.streams) + 1
        while self.cuda.fakecuda_alive() + self.nccl.fakenccl_alive() > ours and time.monotonic() < end:
            time.sleep(0.01)
        for stream in self.streams:
            self.call("cuStreamDestroy_v2", stream)
        self.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
        self.call("cuDevicePrimaryCtxRelease_v2", 0)
        return self.cuda.fakecuda_alive() + self.nccl.fakenccl_alive()


class Device:
    """What `offbeat.devices` asks of a device."""

    index = 0

    def __init__(self, double: Double) -> None:
        self.double = double

    def current_stream(self) -> int:
        return self.double.stream.value or 0

    def stream(self) -> int:
        self.double.streams.append(self.double.new_stream())
        return self.double.streams[-1].value or 0

    def zeros(self, count: int, dtype: str, stream: int | None) -> torch.Tensor:
        assert stream not in (0, self.double.stream.value)
        self.double.lent.append(torch.zeros(count, dtype=getattr(torch, dtype)))
        return self.double.lent[-1]

    def joined(self) -> None:
        self.double.drain()

    @contextlib.contextmanager
    def within(self, stream: int) -> Iterator[None]:
        # what torch does here it does on the host at once, so the stream must have come so far
        self.double.cuda.fakecuda_drain(ctypes.c_void_p(stream))
        yield


@contextlib.contextmanager
def in_place_of_a_gpu(double: Double) -> Iterator[None]:
    """Inside, tensors of the CPU count as a GPU's."""

    def fill(views, tensors):
        for view, tensor in zip(views, tensors, strict=True):
            double.write(view, tensor)

    def clear(view):
        double.write(view, torch.zeros_like(view))

    before = slots.fill, slots.clear
    slots.fill, slots.clear = fill, clear
    devices.KINDS["cpu"] = lambda _: Device(double)
    try:
        yield
    finally:
        slots.fill, slots.clear = before
        del devices.KINDS["cpu"]


@contextlib.contextmanager
def where_it_is_asked_for() -> Iterator[Double | None]:
    """On the doubles if the test names them (`DOUBLES`), on the CPU otherwise: one script for both."""
    if "DOUBLES" not in os.environ:
        yield None
        return
    double = Double()
    with in_place_of_a_gpu(double):
        yield double
