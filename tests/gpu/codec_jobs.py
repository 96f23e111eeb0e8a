"""Jobs for the kernels of codecs: all golden cases are tensors of one bucket, so every launch serves twelve of them."""

from dataclasses import dataclass

import numpy as np
from gpu import golden, reference
from gpu.job import FILL, Address, Job

CODECS = list(reference.SIZES)
TYPES = {"f32": 4, "f16": 2, "bf16": 2}
TILE = 2048
TILE_TYPE = np.dtype([("value", "<u8"), ("record", "<u8"), ("count", "<u4"), ("span", "<u4")])
u32, u64, f32 = np.uint32, np.uint64, np.float32


@dataclass
class Layout:
    """Where tensors lie in a bucket and in its records."""

    codec: str
    counts: list[int]
    starts: list[int]
    records: list[int]
    count: int
    length: int

    @classmethod
    def of(cls, codec: str, counts: list[int], record_align: int = 16) -> "Layout":
        starts, records, start, record = [], [], 0, 0
        step = max(reference.SIZES[codec], 64)
        for count in counts:
            starts.append(start)
            records.append(record)
            start += -(-count // step) * step
            record += -(-reference.encoded_len(codec, count) // record_align) * record_align
        # nothing stands after the last one, so that whoever goes beyond it is seen
        end, length = starts[-1] + counts[-1], records[-1] + reference.encoded_len(codec, counts[-1])
        return cls(codec, counts, starts, records, end, length)

    def tiles(self, tile: int = TILE):
        rows = []
        for span, (count, start, record) in enumerate(zip(self.counts, self.starts, self.records, strict=True)):
            for at in range(0, count, tile):
                place = record + reference.encoded_len(self.codec, at)
                rows.append((start + at, place, min(tile, count - at), span))
        return np.array(rows, TILE_TYPE)

    def numbers(self, of_block) -> bytes:
        """The numbers of all blocks: of_block has those of a tensor."""
        size = reference.SIZES[self.codec]
        out = np.zeros(-(-self.count // size), u64)
        for count, start in zip(self.counts, self.starts, strict=True):
            blocks = -(-count // size)
            out[start // size : start // size + blocks] = of_block[:blocks]
        return out.tobytes()

    def values(self, parts, size: int, skew: int) -> bytes:
        """A bucket of values, `skew` elements after the beginning of its memory."""
        out = np.full((self.count + skew) * size, FILL, np.uint8)
        for part, start in zip(parts, self.starts, strict=True):
            raw = part.view(np.uint8)
            out[(start + skew) * size : (start + skew) * size + len(raw)] = raw
        return out.tobytes()

    def bytes_of(self, parts: list[bytes]) -> bytes:
        out = np.full(self.length, FILL, np.uint8)
        for part, start in zip(parts, self.records, strict=True):
            out[start : start + len(part)] = np.frombuffer(part, np.uint8)
        return out.tobytes()


def counter(value: int) -> bytes:
    return u32(value).tobytes()


def grid(tiles) -> int:
    return -(-len(tiles) // 4)


def codec_job(codec: str, dtype: str, cases=None, skew: int = 0, tile: int = TILE) -> Job:
    """Encodes, encodes with residuals, decodes and adds. With `skew` nothing is where wide accesses could be made."""
    cases = golden.CASES if cases is None else cases
    size, numbers = TYPES[dtype], golden.numbers(codec)
    if dtype == "f32":
        raws = [golden.values(case) for case in cases]
    else:
        raws = [reference.narrow(golden.values(case), dtype) for case in cases]
    wides = [reference.widen(raw, dtype) for raw in raws]
    residuals = [golden.residual(case) for case in cases]
    if dtype == "f32":
        plain = [golden.section(codec, case, "encoded") for case in cases]
        fed = [golden.section(codec, case, "encoded with residual") for case in cases]
        left = [golden.floats(codec, case, "residual after") for case in cases]
        decoded = [golden.floats(codec, case, "decoded") for case in cases]
    else:
        plain = [reference.encode(codec, wide, golden.STREAM, numbers) for wide in wides]
        both = [
            reference.encode_residual(codec, v, r, golden.STREAM, numbers)
            for v, r in zip(wides, residuals, strict=True)
        ]
        fed, left = [one for one, _ in both], [one for _, one in both]
        decoded = [reference.decode(codec, one, len(v)) for one, v in zip(plain, wides, strict=True)]

    layout = Layout.of(codec, [len(raw) for raw in raws], 4 if skew else 16)
    job, name, table = Job(), f"offbeat_{codec}", layout.tiles(tile)
    tiles, count = Address(job.buffer(table.tobytes())), u32(len(table))
    values = job.buffer(layout.values(raws, size, skew))
    residual = job.buffer(layout.values(residuals, 4, skew))
    at, rest = Address(values, skew * size), Address(residual, skew * 4)
    salt = (Address(job.buffer(layout.numbers(numbers))) if codec == "qsgd" else None, u64(golden.STREAM))
    label = f"{codec} {dtype}{' skewed' if skew else ''}"

    records, odd = job.room(layout.length), job.buffer(counter(7))
    job.launch(
        f"{name}_encode_{dtype}", grid(table), 128, at, None, tiles, count, Address(records), *salt, Address(odd)
    )
    job.expect(f"{label}: encoded", records, layout.bytes_of(plain))
    bad = sum(reference.non_finite(codec, one, len(raw)) for one, raw in zip(plain, raws, strict=True))
    job.expect(f"{label}: blocks that are not finite", odd, counter(7 + bad))

    second = job.room(layout.length)
    job.launch(f"{name}_encode_{dtype}", grid(table), 128, at, rest, tiles, count, Address(second), *salt, None)
    job.expect(f"{label}: encoded with residual", second, layout.bytes_of(fed))
    job.expect(f"{label}: residual", residual, layout.values(left, 4, skew), "f32")
    job.expect(f"{label}: values are left alone", values, layout.values(raws, size, skew))

    out = job.room((layout.count + skew) * size)
    job.launch(f"{name}_decode_{dtype}", grid(table), 128, Address(records), tiles, count, Address(out, skew * size))
    narrowed = [reference.narrow(one, dtype) for one in decoded]
    job.expect(f"{label}: decoded", out, layout.values(narrowed, size, skew), dtype)

    sums = job.buffer(layout.values(raws, size, skew))
    job.launch(f"{name}_add_{dtype}", grid(table), 128, Address(records), tiles, count, Address(sums, skew * size))
    with np.errstate(all="ignore"):
        added = [reference.narrow(wide + one, dtype) for wide, one in zip(wides, decoded, strict=True)]
    job.expect(f"{label}: added", sums, layout.values(added, size, skew), dtype)
    return job


def average_job(codec: str, peers: int = 3, cases=None, with_residual: bool = True) -> Job:
    """What the owner of a part does with the shares of its peers."""
    cases = golden.CASES if cases is None else cases
    numbers = golden.numbers(codec)
    values, residuals = [golden.values(case) for case in cases], [golden.residual(case) for case in cases]
    layout = Layout.of(codec, [len(one) for one in values])
    with np.errstate(all="ignore"):
        inputs = [[v, v[::-1] * f32(0.5), r - v * f32(0.25)][:peers] for v, r in zip(values, residuals, strict=True)]
    shares = [[reference.encode(codec, one, 1, numbers) for one in of_case] for of_case in inputs]
    means = [reference.average(codec, of_case, len(v), peers) for of_case, v in zip(shares, values, strict=True)]
    if with_residual:
        both = [
            reference.encode_residual(codec, v, r, golden.STREAM, numbers)
            for v, r in zip(means, residuals, strict=True)
        ]
    else:
        both = [(reference.encode(codec, v, golden.STREAM, numbers), r) for v, r in zip(means, residuals, strict=True)]

    job, table, stride = Job(), layout.tiles(), -(-layout.length // 16) * 16 + 48
    together = b"".join(layout.bytes_of([of_case[p] for of_case in shares]).ljust(stride, b"\0") for p in range(peers))
    residual, records, odd = job.buffer(layout.values(residuals, 4, 0)), job.room(layout.length), job.buffer(counter(0))
    salt = (Address(job.buffer(layout.numbers(numbers))) if codec == "qsgd" else None, u64(golden.STREAM))
    job.launch(
        f"offbeat_{codec}_average",
        grid(table),
        128,
        Address(job.buffer(together)),
        u64(stride),
        u32(peers),
        f32(peers),
        Address(residual) if with_residual else None,
        Address(job.buffer(table.tobytes())),
        u32(len(table)),
        Address(records),
        *salt,
        Address(odd),
    )
    label = f"{codec} average of {peers}"
    job.expect(f"{label}: encoded", records, layout.bytes_of([one for one, _ in both]))
    job.expect(f"{label}: residual", residual, layout.values([one for _, one in both], 4, 0), "f32")
    bad = sum(reference.non_finite(codec, one, len(v)) for (one, _), v in zip(both, means, strict=True))
    job.expect(f"{label}: blocks that are not finite", odd, counter(bad))
    return job


def counted_job() -> Job:
    """Numbers of blocks that nobody gave: they are counted."""
    values = golden.values("ordinary")
    layout, job = Layout.of("qsgd", [len(values)]), Job()
    table, records = layout.tiles(), job.room(layout.length)
    job.launch(
        "offbeat_qsgd_encode_f32",
        grid(table),
        128,
        Address(job.buffer(values.tobytes())),
        None,
        Address(job.buffer(table.tobytes())),
        u32(len(table)),
        Address(records),
        None,
        u64(99),
        None,
    )
    job.expect("qsgd: counted blocks", records, layout.bytes_of([reference.encode("qsgd", values, 99, range(99))]))
    return job


def divide_job(dtype: str, skew: int = 0) -> Job:
    raws = [reference.narrow(golden.values(case), dtype) for case in golden.CASES]
    layout, job, size = Layout.of("float16", [len(raw) for raw in raws]), Job(), TYPES[dtype]
    table, values = layout.tiles(), job.buffer(layout.values(raws, size, skew))
    job.launch(
        f"offbeat_divide_{dtype}",
        grid(table),
        128,
        Address(values, skew * size),
        Address(job.buffer(table.tobytes())),
        u32(len(table)),
        f32(3),
    )
    with np.errstate(all="ignore"):
        parts = [reference.narrow(reference.widen(raw, dtype) / f32(3), dtype) for raw in raws]
    job.expect(f"{dtype}: divided", values, layout.values(parts, size, skew), dtype)
    return job


def mix_job(source: str, target: str, weighted: bool) -> Job:
    """Sums of arrays: those of gossip and of the ranks of a host."""
    peers, job = 3, Job()
    inputs = [[golden.values(case), golden.residual(case), golden.values(case)[::-1]] for case in golden.CASES]
    raws = [[reference.narrow(one, source) for one in of_case] for of_case in inputs]
    layout = Layout.of("float16", [len(of_case[0]) for of_case in raws])
    table = layout.tiles()
    # sources are packed in another way than values
    table["record"] = table["value"] + 16
    stride = -(-layout.count // 16) * 16 + 32
    size = TYPES[source]
    arrays = [layout.values([one[p] for one in raws], size, 0) for p in range(peers)]
    together = b"".join((bytes(16 * size) + one).ljust(stride * size, b"\0") for one in arrays)
    factors = np.array([0.5, 0.3, 0.2], f32)
    values = job.room(layout.count * TYPES[target])
    divisor = f32(1) if weighted else f32(peers)
    job.launch(f"offbeat_mix_{source}_{target}", grid(table), 128, Address(job.buffer(together)), u64(stride),
               u32(peers), Address(job.buffer(factors.tobytes())) if weighted else None, divisor,
               Address(job.buffer(table.tobytes())), u32(len(table)), Address(values))  # fmt: skip
    parts = []
    with np.errstate(all="ignore"):
        for of_case in raws:
            terms = [reference.widen(one, source) * (factor if weighted else f32(1))
                     for one, factor in zip(of_case, factors, strict=True)]  # fmt: skip
            parts.append(reference.narrow((terms[0] + terms[1] + terms[2]) / divisor, target))
    job.expect(f"mix {source} to {target}{', weighted' if weighted else ''}", values,
               layout.values(parts, TYPES[target], 0), target)  # fmt: skip
    return job


MIXES = [
    ("f32", "f32"),
    ("f32", "f16"),
    ("f32", "bf16"),
    ("f16", "f32"),
    ("f16", "f16"),
    ("bf16", "f32"),
    ("bf16", "bf16"),
]
