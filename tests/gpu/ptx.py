"""Runs the PTX that NVRTC gave, in numpy: all threads of a grid at once, those at the lowest instruction first.

Nothing is taken for granted: an instruction that is not known, a register or shared memory that is read before it is
written, an address that is not in a buffer or not aligned, a barrier or warp operation that not all threads reach, are
errors. NaN is what a device makes of it. What reaches global memory is counted: the distinct bytes that an instruction
of a block touches, and the sectors of 32 bytes.
"""

import re
from collections import Counter
from dataclasses import dataclass

import numpy as np
from gpu.job import Address, Job
from gpu.operations import OPERATIONS, Unknown

WARP, SECTOR = 32, 32
NEVER = np.int64(1 << 40)
TYPES = {
    "u8": np.uint8, "b8": np.uint8, "s8": np.int8, "u16": np.uint16, "b16": np.uint16, "s16": np.int16,
    "u32": np.uint32, "b32": np.uint32, "s32": np.int32, "u64": np.uint64, "b64": np.uint64, "s64": np.int64,
    "f16": np.float16, "f32": np.float32, "f64": np.float64,
}  # fmt: skip
RAW = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
ENTRY = re.compile(r"\.entry (\w+)\((.*?)\)\s*(?:\.\w+ [\d, ]+\s*)*\{(.*?)\n\}", re.S)
LINE = re.compile(r"(?:@(!?)(%p\d+)\s+)?([\w.]+)\s*(.*);$")


class Fault(Exception):
    """A kernel did what it must not."""


@dataclass(frozen=True)
class Instruction:
    operation: tuple[str, ...]
    args: tuple[str, ...]
    predicate: str | None
    negated: bool
    text: str


@dataclass
class Entry:
    """A kernel."""

    name: str
    params: list[tuple[str, str]]
    code: list[Instruction]
    labels: dict[str, int]
    shared: dict[str, int]
    shared_bytes: int
    # the type of registers by the beginning of their names
    registers: dict[str, str]


def parse(text: str) -> dict[str, Entry]:
    """The kernels of a module."""
    return {match[1]: parse_entry(match[1], match[2], match[3]) for match in ENTRY.finditer(text)}


def parse_entry(name: str, params: str, body: str) -> Entry:
    entry = Entry(name, re.findall(r"\.param \.(\w+) (\w+)", params), [], {}, {}, 0, {})
    for line in (line.split("//")[0].strip() for line in body.split("\n")):
        if shared := re.match(r"\.shared \.align (\d+) \.b8 (\S+)\[(\d+)\];", line):
            align = int(shared[1])
            entry.shared[shared[2]] = -(-entry.shared_bytes // align) * align
            entry.shared_bytes = entry.shared[shared[2]] + int(shared[3])
        elif register := re.match(r"\.reg \.(\w+)\s+(%[a-z]+)<\d+>;", line):
            entry.registers[register[2]] = register[1]
        elif label := re.match(r"(\$\w+):$", line):
            entry.labels[label[1]] = len(entry.code)
        elif line and line not in "{}" and not line.startswith("."):
            parts = LINE.match(line)
            if not parts:
                raise Unknown(line)
            args = tuple(part.strip() for part in re.split(r",\s*(?![^{]*\})", parts[4])) if parts[4] else ()
            entry.code.append(Instruction(tuple(parts[3].split(".")), args, parts[2], parts[1] == "!", line))
        elif line.startswith(".") and not line.startswith((".loc", ".pragma")):
            raise Unknown(line)
    return entry


class Memory:
    """Buffers in one array, with gaps between them that belong to nobody."""

    GAP = 256

    def __init__(self, buffers):
        self.starts, end = [], 4096
        for one in buffers:
            self.starts.append(end)
            end += -(-len(one) // self.GAP) * self.GAP + self.GAP
        self.lengths = [len(one) for one in buffers]
        self.bytes, self.valid = np.zeros(end, np.uint8), np.zeros(end, bool)
        for start, one in zip(self.starts, buffers, strict=True):
            self.bytes[start : start + len(one)] = one
            self.valid[start : start + len(one)] = True

    def contents(self) -> list[bytes]:
        return [self.bytes[start : start + n].tobytes() for start, n in zip(self.starts, self.lengths, strict=True)]

    def check(self, at, size: int) -> None:
        if (at % size).any():
            raise Fault(f"{int(at[at % size != 0][0]):#x} is not a multiple of {size}")
        inside = (at >= 0) & (at + size <= len(self.bytes))
        if not inside.all() or not (self.valid[at] & self.valid[at + size - 1]).all():
            raise Fault(f"an access of {size} bytes that is in no buffer")


class Grid:
    """One launch."""

    def __init__(
        self, entry: Entry, blocks: int, threads: int, args: list[int], memory: Memory, traffic: Counter | None
    ):
        if len(args) != len(entry.params):
            raise Fault(f"{entry.name} takes {len(entry.params)} arguments, not {len(args)}")
        self.entry, self.memory, self.traffic = entry, memory, traffic
        self.count, self.threads = blocks * threads, threads
        number = np.arange(self.count)
        self.thread, self.block = number, number // threads
        self.special = {"%tid.x": number % threads, "%ctaid.x": number // threads, "%laneid": number % WARP,
                        "%ntid.x": np.full(self.count, threads), "%nctaid.x": np.full(self.count, blocks)}  # fmt: skip
        self.values = {name: value for (_, name), value in zip(entry.params, args, strict=True)}
        self.registers: dict[str, np.ndarray] = {}
        # shared memory of all blocks, and whether it was ever written
        self.room = -(-entry.shared_bytes // 16) * 16
        self.shared = np.full(blocks * self.room, 0xA5, np.uint8)
        self.written = np.zeros(blocks * self.room, bool)
        self.bound: list = [None] * len(entry.code)

    def run(self) -> None:
        code, end = self.entry.code, len(self.entry.code)
        pc = np.zeros(self.count, np.int64)
        held = np.full(self.count, -1)
        with np.errstate(all="ignore"):
            while True:
                at = int(pc.min())
                if at >= NEVER:
                    raise Fault(f"{code[int(held.max())].text} is not reached by all")
                if at >= end:
                    if (held >= 0).any():
                        raise Fault(f"{code[int(held.max())].text} is not reached by all")
                    return
                active = pc == at
                others = pc[~active]
                stop = int(others.min()) if len(others) else end
                mask = active if len(others) else True
                # straight on until somebody else's turn comes, or the way forks
                while at < stop and at < end:
                    kind = code[at].operation[0]
                    if kind in ("bra", "ret", "bar", "shfl", "vote"):
                        break
                    self.step(at, mask)
                    at += 1
                pc[active] = at
                if at >= min(stop, end):
                    continue
                if code[at].operation[0] in ("bra", "ret"):
                    self.turn(at, active, pc, end)
                else:
                    self.meet(at, active, pc, held)

    def turn(self, at: int, active, pc, end: int) -> None:
        one = self.entry.code[at]
        taken = active if one.predicate is None else active & self.condition(one)
        pc[active] = at + 1
        pc[taken] = end if one.operation[0] == "ret" else self.entry.labels[one.args[0]]

    def meet(self, at: int, active, pc, held) -> None:
        """Threads wait until all of their warp or block are here."""
        one = self.entry.code[at]
        width = self.threads if one.operation[:2] == ("bar", "sync") else WARP
        here = active | (held == at)
        ready = here.reshape(-1, width).all(1).repeat(width)
        held[here] = at
        pc[here] = NEVER
        if ready.any():
            held[ready], pc[ready] = -1, at + 1
            if one.operation[0] != "bar":
                self.step(at, ready)
            elif one.operation[1] == "warp" and ((self.read(one.args[0], "u32") != 0xFFFFFFFF) & ready).any():
                raise Fault(f"{one.text} without all lanes")

    def condition(self, one: Instruction):
        if one.predicate not in self.registers:
            raise Fault(f"{one.predicate} is read before it is written")
        return ~self.registers[one.predicate] if one.negated else self.registers[one.predicate]

    def step(self, at: int, mask) -> None:
        one = self.entry.code[at]
        if one.predicate is not None:
            mask = mask & self.condition(one)
            if not mask.any():
                return
        if self.bound[at] is None:
            operation = OPERATIONS.get(one.operation[0])
            if operation is None:
                raise Unknown(one.text)
            self.bound[at] = operation(self, one)
        self.bound[at](mask)

    # operands

    def raw(self, name: str, new: bool = False) -> np.ndarray:
        """A register, as unsigned numbers of its own size."""
        if name not in self.registers:
            if not new:
                raise Fault(f"{name} is read before it is written")
            kind = self.entry.registers[re.match(r"%[a-z]+", name)[0]]
            dtype = bool if kind == "pred" else RAW[np.dtype(TYPES[kind]).itemsize]
            self.registers[name] = np.zeros(self.count, dtype)
        return self.registers[name]

    def read(self, operand: str, kind: str):
        """An operand as an array of a type: mostly a view that stays valid, so instructions ask once."""
        if operand in self.special:
            return self.special[operand].astype(TYPES[kind])
        if operand.startswith("%"):
            raw = self.raw(operand)
            if kind == "pred":
                return raw
            if raw.itemsize != np.dtype(TYPES[kind]).itemsize:
                raise Unknown(f"{operand} read as {kind}")
            return raw.view(TYPES[kind])
        if operand in self.entry.shared:
            return np.full(1, self.entry.shared[operand], TYPES[kind])
        dtype = np.dtype(TYPES[kind])
        if operand.startswith(("0f", "0d")):
            return np.array([int(operand[2:], 16)], RAW[dtype.itemsize]).view(dtype)
        value = int(operand, 0) & ((1 << 8 * dtype.itemsize) - 1)
        return np.array([value], RAW[dtype.itemsize]).view(dtype)

    def write(self, name: str, kind: str):
        """What takes a result of a type: wider registers are filled up by the type's sign."""
        raw = self.raw(name, new=True)
        if kind == "pred" or raw.itemsize == np.dtype(TYPES[kind]).itemsize:
            to = raw if kind == "pred" else raw.view(TYPES[kind])
            return lambda value, mask: np.copyto(to, value, where=mask)
        wide = raw.view({2: np.int16, 4: np.int32, 8: np.int64}[raw.itemsize]) if kind[0] == "s" else raw
        return lambda value, mask: np.copyto(wide, value.astype(wide.dtype), where=mask)

    def address(self, operand: str):
        """The addresses that [register + offset] or [name + offset] mean."""
        name, offset = re.match(r"\[([^+\]]+)\+?(-?\d+)?\]", operand).groups()
        base = self.read(name, "u64") if not name.startswith("%r") or name.startswith("%rd") else self.read(name, "u32")
        return lambda: np.broadcast_to(base.astype(np.int64) + int(offset or 0), (self.count,))

    # memory

    def count_access(self, what: str, at, mask, size: int) -> None:
        if self.traffic is None:
            return
        # warps of a block that read the same find it in the first-level cache
        block = self.block if mask is True else self.block[mask]
        self.traffic[what] += size * len(np.unique(block << 40 | at))
        self.traffic[f"{what} sectors"] += SECTOR * len(np.unique(block << 40 | at // SECTOR))

    def view(self, space: str, at, mask, dtype, width: int, what: str):
        """What is "read" or "written" by active threads: a memory as numbers of a type, and places in it."""
        if space == "global":
            return self.global_view(at, mask, dtype, width, what)
        return self.shared_view(at, mask, dtype, width, what == "read")

    def global_view(self, at, mask, dtype, width: int, what: str):
        """Checked addresses of active threads, as places in the memory seen as numbers of a type."""
        mine = at if mask is True else at[mask]
        size = np.dtype(dtype).itemsize
        self.memory.check(mine, size * width)
        self.count_access(what, mine, mask, size * width)
        return self.memory.bytes.view(dtype), mine // size

    def shared_view(self, at, mask, dtype, width: int, reads: bool):
        size = np.dtype(dtype).itemsize
        blocks = self.thread // self.threads
        mine, blocks = (at, blocks) if mask is True else (at[mask], blocks[mask])
        if (mine % (size * width)).any() or (mine < 0).any() or (mine + size * width > self.entry.shared_bytes).any():
            raise Fault("an access to shared memory that is out of bounds or not aligned")
        mine = mine + blocks * self.room
        for byte in range(size * width):
            if reads and not self.written[mine + byte].all():
                raise Fault("shared memory is read before it is written")
            self.written[mine + byte] = True
        return self.shared.view(dtype), mine // size


class Module:
    """The kernels of some files of PTX."""

    def __init__(self, *texts: str):
        self.entries = {name: entry for text in texts for name, entry in parse(text).items()}

    def run(self, job: Job, traffic: dict[str, Counter] | None = None) -> list[bytes]:
        """The buffers after a job. `traffic` gets what each kernel read and wrote."""
        memory = Memory(job.buffers)
        for one in job.launches:
            args = [memory.starts[arg.buffer] + arg.offset if isinstance(arg, Address) else
                    0 if arg is None else int.from_bytes(arg.tobytes(), "little") for arg in one.args]  # fmt: skip
            counter = None if traffic is None else traffic.setdefault(one.kernel, Counter())
            Grid(self.entries[one.kernel], one.blocks, one.threads, args, memory, counter).run()
        return memory.contents()
