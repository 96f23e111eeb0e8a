"""What instructions of PTX do. Each function binds one instruction to the registers of a grid, and gives what is done
when threads reach it: it is called with a mask of them, or True for all."""

import operator

import numpy as np

OPERATIONS = {}


class Unknown(Exception):
    """An instruction, or a form of one, that the interpreter does not know."""


def operation(*names):
    def register(bind):
        OPERATIONS.update(dict.fromkeys(names, bind))
        return bind

    return register


def plain_nan(value):
    """A device gives one NaN only, whatever it was made from."""
    odd = value != value
    if odd.any():
        bits = {2: 0x7FFF, 4: 0x7FFFFFFF, 8: 0x7FFFFFFFFFFFFFFF}[value.itemsize]
        value = value.copy()
        value.view(f"u{value.itemsize}")[odd] = bits
    return value


def of_two(grid, one, kind, act):
    """d = act(a, b), all of one type."""
    write, a, b = grid.write(one.args[0], kind), grid.read(one.args[1], kind), grid.read(one.args[2], kind)
    if kind[0] == "f":
        return lambda mask: write(plain_nan(act(a, b)), mask)
    return lambda mask: write(act(a, b), mask)


@operation("add", "sub", "div", "min", "max")
def arithmetic(grid, one):
    kind, rest = one.operation[-1], one.operation[1:-1]
    if kind[0] == "f" and one.operation[0] in ("add", "sub", "div") and rest != ("rn",):
        raise Unknown(one.text)
    if kind[0] != "f" and (rest or one.operation[0] == "div"):
        raise Unknown(one.text)
    # the number where the other is NaN
    acts = {"add": np.add, "sub": np.subtract, "div": np.divide, "min": np.fmin, "max": np.fmax}
    return of_two(grid, one, kind, acts[one.operation[0]])


@operation("mul")
def multiply(grid, one):
    kind, mode = one.operation[-1], one.operation[1]
    if mode == "wide":
        wide = {"u16": "u32", "u32": "u64", "s32": "s64"}[kind]
        write, a, b = grid.write(one.args[0], wide), grid.read(one.args[1], kind), grid.read(one.args[2], kind)
        dtype = {"u32": np.uint32, "u64": np.uint64, "s64": np.int64}[wide]
        return lambda mask: write(a.astype(dtype) * b.astype(dtype), mask)
    if mode != ("rn" if kind[0] == "f" else "lo"):
        raise Unknown(one.text)
    return of_two(grid, one, kind, np.multiply)


@operation("mad")
def multiply_add(grid, one):
    if one.operation[1] != "lo":
        raise Unknown(one.text)
    kind = one.operation[-1]
    write, (a, b, c) = grid.write(one.args[0], kind), (grid.read(arg, kind) for arg in one.args[1:])
    return lambda mask: write(a * b + c, mask)


@operation("and", "or", "xor")
def logic(grid, one):
    acts = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
    return of_two(grid, one, one.operation[-1], acts[one.operation[0]])


@operation("rem")
def remainder(grid, one):
    return of_two(grid, one, one.operation[-1], np.remainder)


@operation("sqrt")
def square_root(grid, one):
    if one.operation[1] != "rn":
        raise Unknown(one.text)
    write, a = grid.write(one.args[0], one.operation[-1]), grid.read(one.args[1], one.operation[-1])
    return lambda mask: write(plain_nan(np.sqrt(a)), mask)


@operation("not", "neg", "abs")
def of_one(grid, one):
    kind = one.operation[-1]
    acts = {"not": np.invert, "neg": np.negative, "abs": np.abs}
    write, a, act = grid.write(one.args[0], kind), grid.read(one.args[1], kind), acts[one.operation[0]]
    return lambda mask: write(act(a), mask)


@operation("shl", "shr")
def shift(grid, one):
    kind = one.operation[-1]
    if kind[0] == "s":
        raise Unknown(one.text)
    write, a, by = grid.write(one.args[0], kind), grid.read(one.args[1], kind), grid.read(one.args[2], "u32")
    bits = 8 * a.itemsize
    act = np.left_shift if one.operation[0] == "shl" else np.right_shift

    def run(mask):
        amount = np.minimum(by, bits - 1).astype(a.dtype)
        write(np.where(by < bits, act(a, amount), a.dtype.type(0)), mask)

    return run


@operation("setp")
def compare(grid, one):
    kind, how = one.operation[-1], one.operation[1]
    if len(one.operation) != 3 or "|" in one.args[0]:
        raise Unknown(one.text)
    write, a, b = grid.write(one.args[0], "pred"), grid.read(one.args[1], kind), grid.read(one.args[2], kind)
    if how == "nan":
        return lambda mask: write(np.isnan(a) | np.isnan(b), mask)
    act = getattr(operator, how[:2])
    if kind[0] == "f" and how[2:] == "u":
        return lambda mask: write(act(a, b) | np.isnan(a) | np.isnan(b), mask)
    if kind[0] == "f" and how == "ne":
        return lambda mask: write((a != b) & ~np.isnan(a) & ~np.isnan(b), mask)
    if len(how) != 2:
        raise Unknown(one.text)
    return lambda mask: write(act(a, b), mask)


@operation("selp")
def select(grid, one):
    kind = one.operation[-1]
    write, a, b = grid.write(one.args[0], kind), grid.read(one.args[1], kind), grid.read(one.args[2], kind)
    which = grid.read(one.args[3], "pred")
    return lambda mask: write(np.where(which, a, b), mask)


@operation("mov")
def move(grid, one):
    kind = one.operation[-1]
    if one.args[0].startswith("{") or one.args[1].startswith("{"):
        return repack(grid, one)
    if kind == "pred" and not one.args[1].startswith("%"):
        write, value = grid.write(one.args[0], "pred"), np.array([int(one.args[1]) != 0])
        return lambda mask: write(value, mask)
    write, a = grid.write(one.args[0], kind), grid.read(one.args[1], kind)
    return lambda mask: write(a, mask)


def repack(grid, one):
    """Halves of a word as one register, or the other way round."""
    whole = one.operation[-1]
    if whole not in ("b32", "b64"):
        raise Unknown(one.text)
    half, wide, bits = ("b16", np.uint32, 16) if whole == "b32" else ("b32", np.uint64, 32)
    if one.args[1].startswith("{"):
        low, high = (grid.read(part.strip(), half) for part in one.args[1][1:-1].split(","))
        write = grid.write(one.args[0], whole)
        return lambda mask: write(low.astype(wide) | high.astype(wide) << wide(bits), mask)
    parts = [part.strip() for part in one.args[0][1:-1].split(",")]
    a = grid.read(one.args[1], whole)
    writes = [None if part == "_" else grid.write(part, half) for part in parts]
    narrow = np.uint16 if bits == 16 else np.uint32

    def run(mask):
        for at, write in enumerate(writes):
            if write:
                write((a >> wide(bits * at)).astype(narrow), mask)

    return run


@operation("cvt")
def convert(grid, one):
    to, source = one.operation[-2:]
    how = one.operation[1:-2]
    write = grid.write(one.args[0], to)
    types = {"f16": np.float16, "f32": np.float32, "f64": np.float64}
    if source[0] == "f":
        a = grid.read(one.args[1], "b16").view(np.float16) if source == "f16" else grid.read(one.args[1], source)
        if to in types and (how == ("rn",) or not how):
            return lambda mask: write(plain_nan(a.astype(types[to])), mask)
        if (to, source, how) == ("f16", "f32", ("rz",)):
            return lambda mask: write(towards_zero(a), mask)
        if to == "s32" and how == ("rni",):
            return lambda mask: write(np.clip(np.rint(np.nan_to_num(a)), -(2**31), 2**31 - 1).astype(np.int32), mask)
        raise Unknown(one.text)
    # the low bits of a register that is wider than the type
    raw, bits = grid.raw(one.args[1]), int(source[1:])
    narrow = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}[bits]
    signed = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}[bits]
    target = types.get(to) or np.dtype(("i" if to[0] == "s" else "u") + str(int(to[1:]) // 8)).type
    if to[0] == "f" and how != ("rn",):
        raise Unknown(one.text)

    def run(mask):
        value = raw.astype(narrow)
        write((value.view(signed) if source[0] == "s" else value).astype(target), mask)

    return run


def towards_zero(a):
    """Half precision that is never larger."""
    near = plain_nan(a.astype(np.float16))
    larger = np.abs(near.astype(np.float32)) > np.abs(a)
    return (near.view(np.uint16) - larger.astype(np.uint16)).view(np.float16)


@operation("cvta")
def convert_address(grid, one):
    if one.operation != ("cvta", "to", "global", "u64"):
        raise Unknown(one.text)
    write, a = grid.write(one.args[0], "u64"), grid.read(one.args[1], "u64")
    return lambda mask: write(a, mask)


@operation("ld")
def load(grid, one):
    kind, space = one.operation[-1], one.operation[1]
    names = [part.strip() for part in one.args[0].strip("{}").split(",")]
    writes = [grid.write(name, kind) for name in names]
    dtype = np.dtype({"u8": np.uint8, "u16": np.uint16, "u32": np.uint32, "u64": np.uint64, "f32": np.float32,
                      "f64": np.float64, "b32": np.uint32, "b64": np.uint64, "s32": np.int32,
                      "b16": np.uint16}[kind])  # fmt: skip
    if space == "param":
        bits = grid.values[one.args[1].strip("[]")]
        value = np.array([bits & ((1 << 8 * dtype.itemsize) - 1)], f"u{dtype.itemsize}").view(dtype)
        return lambda mask: writes[0](value, mask)
    if space not in ("global", "shared"):
        raise Unknown(one.text)
    where = grid.address(one.args[1])

    def run(mask):
        memory, at = grid.view(space, where(), mask, dtype, len(names), "read")
        for number, write in enumerate(writes):
            got = np.zeros(grid.count, dtype)
            got[mask] = memory[at + number]
            write(got, mask)

    return run


@operation("st")
def store(grid, one):
    kind, space = one.operation[-1], one.operation[1]
    # what names no space is written to global memory
    space = "global" if space in ("v2", "v4") else space
    names = [part.strip() for part in one.args[1].strip("{}").split(",")]
    if space not in ("global", "shared"):
        raise Unknown(one.text)
    where = grid.address(one.args[0])
    # a register may be wider than what is stored of it
    bits = int(kind[1:])
    wider = all(name.startswith("%") and 8 * grid.raw(name).itemsize > bits for name in names)
    values = [grid.raw(name) if wider else grid.read(name, kind) for name in names]
    dtype = np.dtype(f"u{bits // 8}") if wider else values[0].dtype

    def run(mask):
        memory, at = grid.view(space, where(), mask, dtype, len(names), "written")
        for number, value in enumerate(values):
            whole = np.broadcast_to(value, (grid.count,))
            memory[at + number] = whole[mask].astype(dtype) if mask is not True else whole.astype(dtype)

    return run


@operation("atom", "red")
def atomic(grid, one):
    space = one.operation[1]
    if one.operation[2:] != ("add", "u32"):
        raise Unknown(one.text)
    place, value = (one.args[1], one.args[2]) if one.operation[0] == "atom" else (one.args[0], one.args[1])
    where, by = grid.address(place), np.broadcast_to(grid.read(value, "u32"), (grid.count,))

    def run(mask):
        # what was there before is given to nobody: a register that is read without it is an error
        memory, at = grid.view(space, where(), mask, np.uint32, 1, "read")
        grid.view(space, where(), mask, np.uint32, 1, "written")
        np.add.at(memory, at, by[mask] if mask is not True else by)

    return run


@operation("popc")
def count_bits(grid, one):
    write, a = grid.write(one.args[0], "u32"), grid.read(one.args[1], "b32")

    def run(mask):
        x = a - (a >> np.uint32(1) & np.uint32(0x55555555))
        x = (x & np.uint32(0x33333333)) + (x >> np.uint32(2) & np.uint32(0x33333333))
        x = x + (x >> np.uint32(4)) & np.uint32(0x0F0F0F0F)
        write(x * np.uint32(0x01010101) >> np.uint32(24), mask)

    return run


@operation("prmt")
def permute(grid, one):
    write, selector = grid.write(one.args[0], "b32"), grid.read(one.args[3], "u32")
    a, b = grid.read(one.args[1], "u32"), grid.read(one.args[2], "u32")

    def run(mask):
        if (selector & 0x8888).any():
            raise Unknown(f"{one.text} with signs")
        both = b.astype(np.uint64) << np.uint64(32) | a.astype(np.uint64)
        out = np.zeros(1, np.uint64)
        for byte in range(4):
            chosen = (selector >> np.uint32(4 * byte) & np.uint32(7)).astype(np.uint64)
            out = out | (both >> np.uint64(8) * chosen & np.uint64(0xFF)) << np.uint64(8 * byte)
        write(out.astype(np.uint32), mask)

    return run


@operation("bfi")
def insert_bits(grid, one):
    write, (a, b, at, length) = grid.write(one.args[0], "b32"), (grid.read(arg, "u32") for arg in one.args[1:])
    if len(at) != 1 or len(length) != 1 or int(at[0]) + int(length[0]) > 32:
        raise Unknown(one.text)
    field = np.uint32(((1 << int(length[0])) - 1) << int(at[0]))
    return lambda mask: write((b & ~field) | (a << np.uint32(at[0]) & field), mask)


@operation("shfl")
def shuffle(grid, one):
    mode, kind = one.operation[2:]
    name = one.args[0].split("|")[0]
    write, a, b = grid.write(name, kind), grid.read(one.args[1], kind), grid.read(one.args[2], "u32")
    clamp, lanes = grid.read(one.args[3], "u32"), grid.read(one.args[4], "u32")
    lane = grid.thread % 32
    inside = grid.write(one.args[0].split("|")[1], "pred") if "|" in one.args[0] else None

    def run(mask):
        if ((lanes != 0xFFFFFFFF) & mask).any() or ((clamp != (0 if mode == "up" else 31)) & mask).any():
            raise Unknown(f"{one.text} of a part of a warp")
        by = b.astype(np.int64)
        source = {"bfly": lambda: lane ^ by, "idx": lambda: by % 32 + 0 * lane, "up": lambda: lane - by}[mode]()
        there = (source >= 0) & (source < 32)
        write(a[grid.thread - lane + np.where(there, source, lane)], mask)
        if inside:
            inside(there, mask)

    return run


@operation("vote")
def vote(grid, one):
    if one.operation[1:] != ("sync", "ballot", "b32"):
        raise Unknown(one.text)
    write, a, lanes = grid.write(one.args[0], "b32"), grid.read(one.args[1], "pred"), grid.read(one.args[2], "u32")

    def run(mask):
        if ((lanes != 0xFFFFFFFF) & mask).any():
            raise Unknown(f"{one.text} of a part of a warp")
        bits = a.reshape(-1, 32).astype(np.uint64) << np.arange(32, dtype=np.uint64)
        write(bits.sum(1, dtype=np.uint64).astype(np.uint32).repeat(32), mask)

    return run
