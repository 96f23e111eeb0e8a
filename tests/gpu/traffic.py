"""What kernels read from and write to global memory, counted while their PTX is run, against the least that their
mathematics allows: every value, residual and record once."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from gpu import codec_jobs, low_rank_jobs, reference, step_jobs, top_k_jobs
from gpu.codec_jobs import TYPES, Layout, f32, grid, u32, u64
from gpu.job import Address, Job
from gpu.ptx import Module

COUNT, PEERS = 4 * codec_jobs.TILE, 4
SELECTED, RATIO = 2 * top_k_jobs.TILE, 0.01
FACTORED, RANK = 1 << 16, 4


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
    spans, tiles, targets, count, length = top_k_jobs.lay_out([SELECTED], RATIO, top_k_jobs.TILE)
    job, chosen = Job(), int(spans[0]["chosen"])
    coded = reference.top_k_len(SELECTED, chosen)
    values, lists = Address(job.buffer(raw.tobytes())), Address(job.room(length))
    top_k_jobs.launch_selection(job, dtype, spans, tiles, values, None, count, lists, None)
    for operation in ("decode", "add"):
        job.launch(f"offbeat_top_k_{operation}_{dtype}", len(targets), 256, lists, Address(job.buffer(spans.tobytes())),
                   Address(job.buffer(targets.tobytes())), values, None)  # fmt: skip
    keys = reference.widen(raw, dtype).view(u32) & u32(0x7FFFFFFF)
    last = np.sort(keys)[-chosen]
    few, bins = int((keys >> 20 >= last >> 20).sum()), 2 * 8192

    def counted(shift: int) -> int:
        """Candidates, and the bins that each tile has counted, read and written."""
        digits = [part[part >> shift + 10 == last >> shift + 10] >> shift for part in np.split(keys, len(tiles))]
        return 4 * few + 8 * sum(len(np.unique(one)) for one in digits)

    least = [size * SELECTED, bins, size * SELECTED + 8 * few, counted(10), bins, counted(0), bins, 4 * few,
             8 * len(spans) + 16 * len(tiles), 8 * few + coded,
             coded + size * chosen, coded + 2 * size * chosen]  # fmt: skip
    return measure(module, job, [("", one) for one in least])


def of_low_rank(module: Module, dtype: str) -> list[Row]:
    """A square matrix. Kernels that know no type come with f32."""
    side, size = int(FACTORED**0.5), TYPES[dtype]
    it = low_rank_jobs.Factored(dtype, shapes=[(side, side, RANK)])
    elements, factor = side * side, 4 * side * RANK
    (_, values), (_, rest) = it.bucket(), it.left()
    p, own, q, kept = (it.factors([normal(side * RANK)]) for _ in range(4))
    finite = Address(it.job.buffer(u32(1).tobytes()))
    (rows, by_rows), (cols, by_cols) = it.tiles(low_rank_jobs.ROWS, None), it.tiles(None, low_rank_jobs.COLUMNS)
    both, by_both = it.tiles(low_rank_jobs.HIGH, low_rank_jobs.BROAD)
    it.launch(f"left_{dtype}", rows, values, rest, it.about, by_rows, kept, p)
    it.launch(f"right_{dtype}", cols, values, rest, it.about, by_cols, p, own)
    it.launch(f"finish_{dtype}", both, values, rest, it.about, by_both, p, own, q, finite, kept)
    least = [*2 * [(size + 4) * elements + 2 * factor], (2 * size + 8) * elements + 4 * factor]
    if dtype == "f32":
        # a Q that is zero is the most work
        it.launch("start", 1, it.about, q, it.factors([np.zeros(side * RANK, f32)]))
        it.launch("orthonormalise", 1, it.about, p)
        it.launch("check", 1, it.about, q, finite, None)
        least += [3 * factor, 2 * factor, factor]
    return measure(module, it.job, [("", one) for one in least])


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


class Tensor:
    """One tensor of COUNT elements as a bucket, for steps that keep something of each."""

    def __init__(self, dtype: str, codec: str = step_jobs.PLAIN_LAYOUT):
        self.job, self.dtype, self.size = Job(), dtype, TYPES[dtype]
        self.layout = Layout.of(codec, [COUNT])
        table = self.layout.tiles()
        self.tiles = (Address(self.job.buffer(table.tobytes())), u32(len(table)))
        self.grid = grid(table)
        self.values = Address(self.job.buffer(reference.narrow(normal(COUNT), dtype).tobytes()))
        self.notes: list[tuple[str, int]] = []

    def floats(self) -> Address:
        return Address(self.job.buffer(normal(COUNT).tobytes()))

    def launch(self, name: str, note: str, least: int, *args) -> None:
        self.job.launch(f"offbeat_{name}_{self.dtype}", self.grid, 128, *args)
        self.notes.append((note, least))


def of_momentum(module: Module, dtype: str) -> list[Row]:
    it = Tensor(dtype)
    kept, betas = it.floats(), Address(it.job.buffer(f32(0.9).tobytes()))
    it.launch("momentum", "", (2 * it.size + 4) * COUNT, it.values, kept, betas, *it.tiles)
    it.launch("gradient", "", (2 * it.size + 8) * COUNT, it.values, kept, betas, *it.tiles)
    return measure(module, it.job, it.notes)


def of_outer(module: Module, dtype: str) -> list[Row]:
    it = Tensor(dtype)
    anchor, speed, pace = it.floats(), it.floats(), (f32(0.7), f32(0.9))
    it.launch("difference", "", (2 * it.size + 4) * COUNT, it.values, anchor, *it.tiles)
    for kept, note, extra in ((None, "", 8), (speed, "with momentum", 16)):
        it.launch("outer", note, (2 * it.size + extra) * COUNT, it.values, anchor, kept, *pace, *it.tiles, None)
    return measure(module, it.job, it.notes)


def of_replicas(module: Module, codec: str, dtype: str) -> list[Row]:
    plain = codec == step_jobs.PLAIN
    it = Tensor(dtype, step_jobs.PLAIN_LAYOUT if plain else codec)
    if plain:
        table = it.layout.tiles()
        table["record"] = 4 * table["value"]
        it.tiles = (Address(it.job.buffer(table.tobytes())), it.tiles[1])
    length = 4 * COUNT if plain else reference.encoded_len(codec, COUNT)
    random = codec == "qsgd"
    numbers = Address(it.job.buffer(it.layout.numbers(range(COUNT)))) if random else None
    numbered = 8 * (COUNT // reference.SIZES[codec]) if random else 0
    own, first, second = it.floats(), it.floats(), it.floats()
    told, heard = Address(it.job.room(length)), Address(it.job.buffer(bytes(length * PEERS)))
    weights = Address(it.job.buffer(np.ones(PEERS + 1, f32).tobytes()))
    for near, far, note, copies in ((first, second, "ring", 3), (None, None, "CHOCO", 1)):
        it.launch(f"{codec}_tell", note, (it.size + 4 * copies) * COUNT + length + numbered, it.values, own, near, far,
                  f32(0.3), f32(0.3), *it.tiles, told, numbers, u64(1), None)  # fmt: skip
    for far, note, copies, records in ((second, "ring", 3, 3), (None, f"CHOCO, {PEERS} peers", 2, 1 + PEERS)):
        it.launch(f"{codec}_hear", note, (2 * it.size + 8 * copies) * COUNT + records * length, it.values, own, first,
                  far, told, heard, u64(length), u32(PEERS), u32(0), u32(1), weights, f32(0.5), *it.tiles)  # fmt: skip
    return measure(module, it.job, it.notes)


def calls() -> list[tuple]:
    """What measures all kernels: functions and their arguments."""
    every = [(of_codec, codec, dtype) for codec in codec_jobs.CODECS for dtype in TYPES]
    every += [(call, dtype) for dtype in TYPES for call in (of_top_k, of_low_rank, of_divide, of_momentum, of_outer)]
    every += [(of_replicas, codec, dtype) for codec in (*codec_jobs.CODECS, step_jobs.PLAIN) for dtype in TYPES]
    return every + [(of_mix, *pair) for pair in codec_jobs.MIXES]


def all_rows(module: Module) -> list[Row]:
    return distinct(call(module, *arguments) for call, *arguments in calls())


def distinct(every: Iterable[list[Row]]) -> list[Row]:
    """Kernels of top-k that know no type come once for each."""
    rows, seen = [row for some in every for row in some], set()
    return [row for row in rows if "top_k" not in row.kernel or (row.kernel not in seen and not seen.add(row.kernel))]
