"""What kernels read from and write to global memory, counted while their PTX is run, against the least that their
mathematics allows: every value, residual and record once."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
from gpu import codec_jobs, reference, top_k_jobs
from gpu.codec_jobs import TYPES, Layout, f32, grid, u32, u64
from gpu.job import Address, Job
from gpu.ptx import Module

COUNT, PEERS = 4 * codec_jobs.TILE, 4
SELECTED, RATIO = 2 * top_k_jobs.TILE, 0.01


@dataclass(frozen=True)
class Row:
    """A launch: bytes, and the least."""

    kernel: str
    note: str
    read: int
    written: int
    least: int
    sectors: int

    @property
    def ratio(self) -> float:
        return (self.read + self.written) / self.least


def measure(module: Module, job: Job, notes: list[tuple[str, int]]) -> list[Row]:
    """A row for each launch of a job: notes have what it is and the least bytes."""
    rows, counters = [], Counters()
    module.run(job, counters)
    for launch, counter, (note, least) in zip(job.launches, counters.all, notes, strict=True):
        sectors = counter["read sectors"] + counter["written sectors"]
        rows.append(Row(launch.kernel, note, counter["read"], counter["written"], least, sectors))
    return rows


class Counters:
    """A counter for each launch, in their order."""

    def __init__(self):
        self.all: list[Counter] = []

    def setdefault(self, _: str, counter: Counter) -> Counter:
        self.all.append(counter)
        return counter


def normal(count: int):
    return np.random.default_rng(1).standard_normal(count).astype(f32)


def of_codec(module: Module, codec: str, dtype: str) -> list[Row]:
    layout, job, size = Layout.of(codec, [COUNT]), Job(), TYPES[dtype]
    table = layout.tiles()
    tiles, count = Address(job.buffer(table.tobytes())), u32(len(table))
    values = Address(job.buffer(reference.narrow(normal(COUNT), dtype).tobytes()))
    residual, records = Address(job.buffer(bytes(4 * COUNT))), Address(job.room(layout.length))
    random = codec == "qsgd"
    numbers = Address(job.buffer(layout.numbers(range(COUNT)))) if random else None
    salt = (numbers, u64(1), None)
    numbered = 8 * (COUNT // reference.SIZES[codec]) if random else 0
    plain, coded = size * COUNT, reference.encoded_len(codec, COUNT)
    blocks, name, notes = grid(table), f"offbeat_{codec}", []
    job.launch(f"{name}_encode_{dtype}", blocks, 128, values, None, tiles, count, records, *salt)
    notes.append(("", plain + coded + numbered))
    job.launch(f"{name}_encode_{dtype}", blocks, 128, values, residual, tiles, count, records, *salt)
    notes.append(("with residual", plain + coded + numbered + 8 * COUNT))
    job.launch(f"{name}_decode_{dtype}", blocks, 128, records, tiles, count, values)
    notes.append(("", plain + coded))
    job.launch(f"{name}_add_{dtype}", blocks, 128, records, tiles, count, values)
    notes.append(("", 2 * plain + coded))
    if dtype == "f32":
        shares = Address(job.buffer(bytes(layout.length * PEERS)))
        for rest, note, extra in ((None, f"{PEERS} peers", 0), (residual, f"{PEERS} peers, with residual", 8 * COUNT)):
            job.launch(f"{name}_average", blocks, 128, shares, u64(layout.length), u32(PEERS), f32(PEERS), rest, tiles,
                       count, records, *salt)  # fmt: skip
            notes.append((note, (PEERS + 1) * coded + numbered + extra))
    return measure(module, job, notes)


def of_top_k(module: Module, dtype: str) -> list[Row]:
    """Without residual: fewer bytes, so what is spent beside them weighs more."""
    size = TYPES[dtype]
    raw = reference.narrow(normal(SELECTED), dtype)
    spans, tiles, entries, count, length = top_k_jobs.lay_out([SELECTED], RATIO, top_k_jobs.TILE)
    job, chosen = Job(), int(spans[0]["chosen"])
    values, lists = Address(job.buffer(raw.tobytes())), Address(job.room(length))
    top_k_jobs.launch_selection(job, dtype, spans, tiles, values, None, count, lists, None)
    for operation in ("decode", "add"):
        job.launch(f"offbeat_top_k_{operation}_{dtype}", len(entries), 256, lists, Address(job.buffer(spans.tobytes())),
                   Address(job.buffer(entries.tobytes())), values, None)  # fmt: skip
    keys = reference.widen(raw, dtype).view(u32) & u32(0x7FFFFFFF)
    last = np.sort(keys)[-chosen]
    few, bins = int((keys >> 20 >= last >> 20).sum()), 2 * 8192

    def counted(shift: int) -> int:
        """Candidates, and the bins that each tile has counted, read and written."""
        digits = [part[part >> shift + 10 == last >> shift + 10] >> shift for part in np.split(keys, len(tiles))]
        return 4 * few + 8 * sum(len(np.unique(one)) for one in digits)

    least = [size * SELECTED, bins, size * SELECTED + 8 * few, counted(10), bins, counted(0), bins, 4 * few,
             8 * len(spans) + 16 * len(tiles), 8 * few + 8 * chosen,
             (8 + size) * chosen, (8 + 2 * size) * chosen]  # fmt: skip
    return measure(module, job, [("", one) for one in least])


def of_divide(module: Module, dtype: str) -> list[Row]:
    layout, job = Layout.of("float16", [COUNT]), Job()
    table = layout.tiles()
    values = Address(job.buffer(reference.narrow(normal(COUNT), dtype).tobytes()))
    job.launch(f"offbeat_divide_{dtype}", grid(table), 128, values,
               Address(job.buffer(table.tobytes())), u32(len(table)), f32(3))  # fmt: skip
    return measure(module, job, [("", 2 * TYPES[dtype] * COUNT)])


def of_mix(module: Module, source: str, target: str) -> list[Row]:
    layout, job = Layout.of("float16", [COUNT]), Job()
    table, values = layout.tiles(), job.room(COUNT * TYPES[target])
    table["record"] = table["value"]
    sources = Address(job.buffer(bytes(PEERS * COUNT * TYPES[source])))
    job.launch(f"offbeat_mix_{source}_{target}", grid(table), 128, sources, u64(COUNT), u32(PEERS), None, f32(3),
               Address(job.buffer(table.tobytes())), u32(len(table)), Address(values))  # fmt: skip
    return measure(module, job, [(f"{PEERS} peers", (PEERS * TYPES[source] + TYPES[target]) * COUNT)])


def all_rows(module: Module) -> list[Row]:
    rows = [row for codec in codec_jobs.CODECS for dtype in TYPES for row in of_codec(module, codec, dtype)]
    rows += [row for dtype in TYPES for row in of_top_k(module, dtype) + of_divide(module, dtype)]
    rows += [row for pair in codec_jobs.MIXES for row in of_mix(module, *pair)]
    # kernels of top-k that know no type come once for each
    seen = set()
    return [row for row in rows if "top_k" not in row.kernel or (row.kernel not in seen and not seen.add(row.kernel))]
