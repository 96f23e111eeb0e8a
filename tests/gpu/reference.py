"""docs/codecs.md once more, in numpy: what kernels must give where no golden vector stands, for values of 16 bits and
for averages. `test_kernels.py` holds it to the golden vectors first."""

import numpy as np

SIZES = {"float16": 1, "bfloat16": 1, "minmax8": 256, "int4": 128, "qsgd": 512, "onebit": 2048}
HEADS = {"minmax8": 8, "int4": 4, "qsgd": 4, "onebit": 4}
TOP_K_BLOCK = 1 << 16
MOST = np.finfo(np.float32).max
GOLDEN = 0x9E3779B97F4A7C15
WORD = (1 << 64) - 1


def codes_len(codec: str, count: int) -> int:
    return {"minmax8": count, "int4": -(-count // 2), "qsgd": count, "onebit": -(-count // 8)}[codec]


def encoded_len(codec: str, count: int) -> int:
    if SIZES[codec] == 1:
        return 2 * count
    whole, rest = divmod(count, SIZES[codec])
    lengths = [SIZES[codec]] * whole + [rest] * (rest > 0)
    return sum(HEADS[codec] + codes_len(codec, length) for length in lengths)


def to_bf16(values):
    bits = values.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def to_f16(values):
    return np.where(np.isnan(values), np.uint16(0x7E00), values.astype(np.float16).view(np.uint16))


def narrow(values, dtype: str):
    """Numbers as a type has them: bits of 16, or f32 itself."""
    values = np.ascontiguousarray(values, np.float32)
    with np.errstate(all="ignore"):
        return {"f32": lambda x: x.copy(), "f16": to_f16, "bf16": to_bf16}[dtype](values)


def widen(raw, dtype: str):
    if dtype == "f32":
        return raw.view(np.float32)
    if dtype == "f16":
        return raw.view(np.float16).astype(np.float32)
    return (raw.astype(np.uint32) << 16).view(np.float32)


def f32_of(bits: int):
    return np.array([bits], np.uint32).view(np.float32)[0]


def step_of(exact):
    if exact == 0:
        return np.float32(0)
    bits = int(np.float32(exact).view(np.uint32))
    return max(f32_of((bits & ~0xFF) + 0x100), np.float32(2.0**-126))


def symmetric_step(block, levels):
    most = f32_of(int(np.float32(np.float64(MOST) / levels).view(np.uint32)) & ~0xFF)
    return min(step_of(np.float64(np.abs(block).max()) * (1.0 / levels)), most)


def inverse(step):
    return np.float32(0) if step == 0 else np.float32(1) / step


def low_end(least, step):
    reaches = least <= 0 and np.float64(least) + 255.0 * np.float64(step) >= 0 and step > 0
    return 0.0 - np.float64(np.rint(-least * inverse(step))) * np.float64(step) if reaches else np.float64(least)


def min_max8(block):
    least, most = block.min() + np.float32(0), block.max() + np.float32(0)
    step = step_of((np.float64(most) - np.float64(least)) * (1.0 / 255.0))
    low = low_end(least, step)
    if max(abs(least), abs(most)) >= np.float32(2.0**125):
        steps = (block.astype(np.float64) - low) / np.float64(step) if step > 0 else np.zeros(len(block))
        head = [-step, least]
    else:
        steps = (block - np.float32(low)) * inverse(step)
        head = [step, np.float32(low)]
    return np.array(head, np.float32).tobytes() + np.clip(np.rint(steps), 0, 255).astype(np.uint8).tobytes()


def int4(block):
    step = symmetric_step(block, 7.0)
    codes = np.rint(block * inverse(step) + np.float32(8)).astype(np.uint8)
    if len(codes) % 2:
        codes = np.append(codes, np.uint8(8))
    return step.tobytes() + (codes[::2] | codes[1::2] << 4).tobytes()


def mix(z: int) -> int:
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & WORD
    z = (z ^ z >> 27) * 0x94D049BB133111EB & WORD
    return z ^ z >> 31


def draws(key: int):
    """The 24 random bits of each element of a block of 512."""
    z = np.uint64(key) + np.arange(1, 257, dtype=np.uint64) * np.uint64(GOLDEN)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ z >> np.uint64(shift)) * np.uint64(factor)
    z ^= z >> np.uint64(31)
    return np.concatenate([z >> np.uint64(8) & np.uint64(0xFFFFFF), z >> np.uint64(40)]).astype(np.float32)


def qsgd(block, stream: int, number: int):
    step = symmetric_step(block, 127.0)
    random = draws(mix(stream ^ mix(number + GOLDEN & WORD)))[: len(block)]
    steps = np.minimum(np.abs(block) * inverse(step), np.float32(127))
    floor = np.floor(steps)
    level = floor + (random * np.float32(2.0**-24) < steps - floor)
    return step.tobytes() + (np.copysign(level, block) + 128).astype(np.uint8).tobytes()


def lane_sum(values):
    """Lane l of 32 adds the elements l, l + 32, ... in order, then the upper half of lanes is added to the lower."""
    lanes = np.zeros(32, np.float32)
    for row in np.append(values, np.zeros(-len(values) % 32, np.float32)).reshape(-1, 32):
        lanes = lanes + row
    while len(lanes) > 1:
        lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
    return lanes[0]


def one_bit(block):
    count, magnitudes = np.float32(len(block)), np.abs(block)
    scale = lane_sum(magnitudes) / count
    if not np.isfinite(lane_sum(magnitudes)):
        scale = min(lane_sum(magnitudes * np.float32(1 / 2048)) / count * np.float32(2048), MOST)
    return np.float32(scale).tobytes() + np.packbits(np.signbit(block), bitorder="little").tobytes()


def encode(codec: str, values, stream: int, numbers) -> bytes:
    if SIZES[codec] == 1:
        return narrow(values, "f16" if codec == "float16" else "bf16").tobytes()
    size, out = SIZES[codec], []
    with np.errstate(all="ignore"):
        for at in range(0, len(values), size):
            block = values[at : at + size]
            if not np.isfinite(block).all():
                out.append(f32_of(0x7FC00000).tobytes() + bytes(encoded_len(codec, len(block)) - 4))
            elif codec == "qsgd":
                out.append(qsgd(block, stream, int(numbers[at // size])))
            else:
                out.append({"minmax8": min_max8, "int4": int4, "onebit": one_bit}[codec](block))
    return b"".join(out)


def decode(codec: str, data: bytes, count: int):
    if SIZES[codec] == 1:
        return widen(np.frombuffer(data, np.uint16), "f16" if codec == "float16" else "bf16")
    size, out, start = SIZES[codec], [np.zeros(0, np.float32)], 0
    for at in range(0, count, size):
        length = min(size, count - at)
        record = data[start : start + encoded_len(codec, length)]
        start += len(record)
        with np.errstate(all="ignore"):
            out.append(decode_block(codec, record, length))
    return np.concatenate(out)


def decode_block(codec: str, record: bytes, count: int):
    scale, codes = np.frombuffer(record[:4], np.float32)[0], np.frombuffer(record[HEADS[codec] :], np.uint8)
    if np.isnan(scale):
        return np.full(count, np.nan, np.float32)
    if codec == "int4":
        codes = np.stack([codes & 15, codes >> 4], 1).reshape(-1)[:count]
        return (codes.astype(np.float32) - np.float32(8)) * scale
    if codec == "qsgd":
        return (codes.astype(np.float32) - np.float32(128)) * scale
    if codec == "onebit":
        return np.where(np.unpackbits(codes, bitorder="little")[:count], -scale, scale)
    low = np.frombuffer(record[4:8], np.float32)[0]
    if scale < 0:
        exact = low_end(low, -scale) + codes.astype(np.float64) * np.float64(-scale)
        return np.clip(exact, -np.float64(MOST), np.float64(MOST)).astype(np.float32)
    return low + codes.astype(np.float32) * scale


def encode_residual(codec: str, values, residual, stream: int, numbers):
    """The encoding of values and residual, and what is left."""
    with np.errstate(all="ignore"):
        wanted = values + residual
        data = encode(codec, wanted, stream, numbers)
        sent = decode(codec, data, len(values))
        return data, np.where(np.isfinite(sent), wanted - sent, residual)


def average(codec: str, shares: list[bytes], count: int, divisor: float):
    """The mean of encodings, summed in order."""
    with np.errstate(all="ignore"):
        total = decode(codec, shares[0], count)
        for share in shares[1:]:
            total = total + decode(codec, share, count)
        return total / np.float32(divisor)


def non_finite(codec: str, data: bytes, count: int) -> int:
    """How many blocks of an encoding are not finite; an element is a block where values are cast."""
    decoded = decode(codec, data, count)
    return sum(not np.isfinite(decoded[at : at + SIZES[codec]]).all() for at in range(0, count, SIZES[codec]))


def top_k(values, chosen: int):
    """Where the largest magnitudes are, in ascending order; of equal ones the first."""
    keys = values.view(np.uint32) & np.uint32(0x7FFFFFFF)
    order = np.argsort(-keys.astype(np.int64), kind="stable")
    return np.sort(order[:chosen]).astype(np.uint32)


def top_k_len(count: int, chosen: int) -> int:
    starts, places = 4 * max((count - 1) // TOP_K_BLOCK, 0), -(-2 * chosen // 4) * 4
    return 4 * chosen + (starts + places if chosen < count else 0)


def top_k_list(indices, values) -> bytes:
    """The encoding of these of the values."""
    sent, count = values[indices].tobytes(), len(values)
    if len(indices) == count:
        return sent
    starts = np.searchsorted(indices, np.arange(TOP_K_BLOCK, count, TOP_K_BLOCK)).astype(np.uint32)
    data = sent + starts.tobytes() + indices.astype(np.uint16).tobytes()
    return data + bytes(-len(data) % 4)


def top_k_entries(data: bytes, count: int, chosen: int):
    """The indices and values of an encoding."""
    values = np.frombuffer(data, np.float32, chosen)
    if chosen == count:
        return np.arange(count), values
    starts = np.frombuffer(data, np.uint32, (count - 1) // TOP_K_BLOCK, 4 * chosen)
    places = np.frombuffer(data, np.uint16, chosen, 4 * chosen + starts.nbytes)
    return np.searchsorted(starts, np.arange(chosen), "right") * TOP_K_BLOCK + places, values
