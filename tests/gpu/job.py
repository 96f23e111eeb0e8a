"""A job: buffers, launches of kernels on them, and what must stand in the buffers afterwards. The shim and the
interpreter of PTX run the same jobs."""

import struct
from dataclasses import dataclass, field

import numpy as np

NONE, SCALAR = 0xFFFFFFFF, 0xFFFFFFFE
# what buffers hold before, so that a byte that is written where none should be is seen
FILL = 0xA5
NAN = {
    "f32": (np.uint32, 0x7F800000, 0x7FC00000),
    "f16": (np.uint16, 0x7C00, 0x7E00),
    "bf16": (np.uint16, 0x7F80, 0x7FC0),
}


@dataclass(frozen=True)
class Address:
    """A byte of a buffer, as an argument of a kernel."""

    buffer: int
    offset: int = 0


@dataclass(frozen=True)
class Launch:
    kernel: str
    blocks: int
    threads: int
    args: tuple


@dataclass(frozen=True)
class Expectation:
    what: str
    buffer: int
    data: bytes
    # the type of numbers of which every NaN is as good as any other; None: bytes
    floats: str | None


@dataclass
class Job:
    buffers: list = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    expectations: list[Expectation] = field(default_factory=list)

    def buffer(self, data) -> int:
        """Memory with these contents."""
        self.buffers.append(np.frombuffer(bytes(data), np.uint8).copy())
        return len(self.buffers) - 1

    def room(self, length: int) -> int:
        return self.buffer(bytes([FILL]) * length)

    def launch(self, kernel: str, blocks: int, threads: int, *args) -> None:
        """Arguments are addresses, None, or numpy scalars of the argument's type."""
        if blocks:
            self.launches.append(Launch(kernel, blocks, threads, args))

    def expect(self, what: str, buffer: int, data, floats: str | None = None) -> None:
        self.expectations.append(Expectation(what, buffer, bytes(data), floats))

    def packed(self) -> bytes:
        """The job as the runner reads it."""
        out = [struct.pack("<I", len(self.buffers))]
        for one in self.buffers:
            out += [struct.pack("<Q", len(one)), one.tobytes()]
        out.append(struct.pack("<I", len(self.launches)))
        for one in self.launches:
            name = one.kernel.encode()
            out.append(
                struct.pack("<I", len(name)) + name + struct.pack("<III", one.blocks, one.threads, len(one.args))
            )
            out += [struct.pack("<IQ", *pack(arg)) for arg in one.args]
        return b"".join(out)

    def unpacked(self, data: bytes) -> list[bytes]:
        """The buffers that the runner wrote."""
        out, start = [], 0
        for one in self.buffers:
            out.append(data[start : start + len(one)])
            start += len(one)
        return out

    def faults(self, buffers: list[bytes]) -> list[str]:
        """What is not as expected."""
        out = []
        for one in self.expectations:
            got, want = (canonical(data, one.floats) for data in (bytes(buffers[one.buffer]), one.data))
            if len(got) != len(want):
                out.append(f"{one.what}: {len(got)} bytes and not {len(want)}")
            elif got.tobytes() != want.tobytes():
                bad = np.nonzero(got != want)[0]
                first = bad[0]
                out.append(f"{one.what}: {len(bad)} differ, first [{first}]: {got[first]:#x} and not {want[first]:#x}")
        return out


def pack(arg) -> tuple[int, int]:
    if arg is None:
        return NONE, 0
    if isinstance(arg, Address):
        return arg.buffer, arg.offset
    return SCALAR, int.from_bytes(arg.tobytes(), "little")


def canonical(data: bytes, floats: str | None):
    """Numbers as bits, every NaN with the same ones."""
    if floats is None:
        return np.frombuffer(data, np.uint8)
    word, infinity, nan = NAN[floats]
    bits = np.frombuffer(data, word)
    return np.where((bits & word((1 << 8 * word().itemsize - 1) - 1)) > infinity, word(nan), bits)
