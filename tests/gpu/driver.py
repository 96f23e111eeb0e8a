"""Runs jobs on a device, by the driver itself: the committed PTX on real hardware, or on the double of libcuda."""

import ctypes
import time
from collections import Counter
from collections.abc import Iterable

import numpy as np
from gpu.job import NONE, SCALAR, Job, pack


class Refused(Exception):
    """The driver gave an error."""


class Driver:
    """A device with all kernels loaded. Has what an interpreter of PTX has: `run`."""

    def __init__(self, library: str, texts: Iterable[str], device: int = 0):
        self.cuda = ctypes.CDLL(library)
        self.context, self.functions = ctypes.c_void_p(), {}
        self.modules: list[ctypes.c_void_p] = []
        # seconds of each launch of the last job
        self.times: list[float] = []
        self.call("cuInit", 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), device)
        self.device = device
        self.call("cuCtxPushCurrent_v2", self.context)
        for text in texts:
            self.modules.append(ctypes.c_void_p())
            self.call("cuModuleLoadData", ctypes.byref(self.modules[-1]), ctypes.c_char_p(text.encode()))

    def call(self, name: str, *args) -> None:
        code = getattr(self.cuda, name)(*args)
        if code:
            text = ctypes.c_char_p()
            self.cuda.cuGetErrorName(code, ctypes.byref(text))
            raise Refused(f"{name}: {(text.value or b'?').decode()} ({code})")

    def name(self) -> str:
        text = ctypes.create_string_buffer(100)
        self.call("cuDeviceGetName", text, 100, self.device)
        return text.value.decode()

    def function(self, name: str) -> ctypes.c_void_p:
        for module in self.modules if name not in self.functions else ():
            found = ctypes.c_void_p()
            if self.cuda.cuModuleGetFunction(ctypes.byref(found), module, name.encode()) == 0:
                self.functions[name] = found
        if name not in self.functions:
            raise Refused(f"no module has {name}")
        return self.functions[name]

    def allocate(self, data) -> ctypes.c_uint64:
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(len(data), 1)))
        self.copy_in(address, data)
        return address

    def copy_in(self, address: ctypes.c_uint64, data) -> None:
        raw = np.ascontiguousarray(data)
        size = ctypes.c_size_t(len(raw))
        self.call("cuMemcpyHtoDAsync_v2", address, ctypes.c_void_p(raw.ctypes.data), size, None)
        self.wait()

    def wait(self) -> None:
        self.call("cuStreamSynchronize", None)

    def run(self, job: Job, counters: object = None) -> list[bytes]:
        """The buffers after a job. A counter is asked for with each launch, and stays empty."""
        places = [self.allocate(one) for one in job.buffers]
        self.times = []
        try:
            for launch in job.launches:
                self.times.append(self.timed(launch, places))
                if counters is not None:
                    counters.setdefault(launch.kernel, Counter())
            out = []
            for place, one in zip(places, job.buffers, strict=True):
                raw = np.empty(len(one), np.uint8)
                size = ctypes.c_size_t(len(raw))
                self.call("cuMemcpyDtoHAsync_v2", ctypes.c_void_p(raw.ctypes.data), place, size, None)
                self.wait()
                out.append(raw.tobytes())
            return out
        finally:
            for place in places:
                self.call("cuMemFree_v2", place)

    def timed(self, launch, places) -> float:
        values = []
        for arg in launch.args:
            buffer, value = pack(arg)
            address = 0 if buffer == NONE else value if buffer == SCALAR else places[buffer].value + value
            values.append(ctypes.c_uint64(address))
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        function, grid = self.function(launch.kernel), [launch.blocks, 1, 1, launch.threads, 1, 1]
        began = time.perf_counter()
        self.call("cuLaunchKernel", function, *map(ctypes.c_uint, grid), ctypes.c_uint(0), None, pointers, None)
        self.wait()
        return time.perf_counter() - began

    def copy_speed(self, size: int, repeat: int = 5) -> float:
        """Bytes per second that a copy inside of the device reads and writes."""
        one, other = self.allocate(np.zeros(size, np.uint8)), self.allocate(np.zeros(size, np.uint8))
        try:
            best = float("inf")
            for _ in range(repeat):
                began = time.perf_counter()
                self.call("cuMemcpyDtoDAsync_v2", one, other, ctypes.c_size_t(size), None)
                self.wait()
                best = min(best, time.perf_counter() - began)
            return 2 * size / best
        finally:
            for place in (one, other):
                self.call("cuMemFree_v2", place)

    def close(self) -> None:
        for module in self.modules:
            self.call("cuModuleUnload", module)
        self.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
        self.call("cuDevicePrimaryCtxRelease_v2", self.device)
