"""Jobs for the kernels of top-k: all golden cases are the tensors of one bucket."""

import math

import numpy as np
from gpu import golden, reference
from gpu.codec_jobs import TILE_TYPE, TYPES, counter
from gpu.job import FILL, Address, Job

TILE = 16384
BLOCK = reference.TOP_K_BLOCK
SPAN_TYPE = np.dtype(
    [
        ("value", "<u8"),
        ("list", "<u8"),
        ("count", "<u4"),
        ("chosen", "<u4"),
        ("first_tile", "<u4"),
        ("tile_count", "<u4"),
    ]
)
u32, f32 = np.uint32, np.float32


def chosen_of(count: int, ratio: float) -> int:
    return min(max(math.ceil(count * ratio * (1 - 1e-12)), 1), count)


def lay_out(counts: list[int], ratio: float, tile: int):
    """Spans, tiles over their elements, and tiles over what their lists are decoded into."""
    spans, tiles, targets, start, place = [], [], [], 0, 0
    for span, count in enumerate(counts):
        chosen, first = chosen_of(count, ratio), len(tiles)
        tiles += cut(start, count, tile, span)
        targets += cut(start, count, tile if chosen == count else BLOCK, span)
        spans.append((start, place, count, chosen, first, len(tiles) - first))
        start += -(-count // 64) * 64
        place += -(-reference.top_k_len(count, chosen) // 16) * 16
    return np.array(spans, SPAN_TYPE), np.array(tiles, TILE_TYPE), np.array(targets, TILE_TYPE), start, place


def cut(start: int, count: int, length: int, span: int):
    return [(start + at, 0, min(length, count - at), span) for at in range(0, count, length)]


def put(parts, places, size: int, length: int) -> bytes:
    out = np.full(length * size, FILL, np.uint8)
    for part, place in zip(parts, places, strict=True):
        raw = np.frombuffer(bytes(part), np.uint8)
        out[place * size : place * size + len(raw)] = raw
    return out.tobytes()


def select(values, residual, chosen: int):
    """A list, and what is left."""
    with np.errstate(all="ignore"):
        wanted = values if residual is None else values + residual
    indices = reference.top_k(np.ascontiguousarray(wanted), chosen)
    left = None
    if residual is not None:
        left = wanted.copy()
        left[indices] = 0
        left = np.where(np.isfinite(wanted), left, residual)
    return reference.top_k_list(indices, wanted), left


def launch_selection(job: Job, dtype: str, spans, tiles, values, residual, count: int, lists: Address, odd) -> int:
    """All launches of a selection; the buffer of counts, which is zero again."""
    table, places = Address(job.buffer(tiles.tobytes())), Address(job.buffer(spans.tobytes()))
    counts = job.buffer(bytes(8192 * len(spans)))
    counted, searches = Address(counts), Address(job.room(8 * len(spans)))
    candidates, tallies = Address(job.room(8 * count)), Address(job.room(16 * len(tiles)))
    name, many, few = "offbeat_top_k", (len(tiles), 256), (len(spans), 256)
    job.launch(f"{name}_first_{dtype}", *many, values, residual, table, counted)
    job.launch(f"{name}_narrow", *few, places, counted, searches, u32(0))
    job.launch(f"{name}_emit_{dtype}", *many, values, residual, table, places, searches, candidates, tallies)
    for digit in (1, 2):
        job.launch(f"{name}_count", *many, table, candidates, tallies, searches, counted, u32(digit))
        job.launch(f"{name}_narrow", *few, places, counted, searches, u32(digit))
    job.launch(f"{name}_tally", *many, table, candidates, searches, tallies)
    job.launch(f"{name}_place", *few, places, tallies)
    job.launch(f"{name}_gather", *many, table, places, candidates, tallies, searches, lists, residual, odd)
    return counts


def top_k_job(dtype: str, with_residual: bool, tile: int = TILE, skew: int = 0, cases=None) -> Job:
    """Selects and decodes. With small tiles tensors have many of them."""
    size, cases = TYPES[dtype], golden.CASES if cases is None else cases
    raws = [reference.narrow(golden.values(case), dtype) for case in cases]
    wides = [reference.widen(raw, dtype) for raw in raws]
    residuals = [golden.residual(case) if with_residual else None for case in cases]
    spans, tiles, targets, count, length = lay_out([len(raw) for raw in raws], golden.RATIO, tile)
    if dtype == "f32":
        suffix = " with residual" if with_residual else ""
        lists = [golden.section("top_k", case, f"encoded{suffix}") for case in cases]
        left = [golden.section("top_k", case, "residual after") for case in cases]
    else:
        both = [select(v, r, int(s["chosen"])) for v, r, s in zip(wides, residuals, spans, strict=True)]
        lists, left = [one for one, _ in both], [one if one is None else one.tobytes() for _, one in both]
    job, label = Job(), f"top_k {dtype}{' with residual' if with_residual else ''}, tiles of {tile}"
    places = [int(one) + skew for one in spans["value"]]
    values = job.buffer(put([raw.tobytes() for raw in raws], places, size, count + skew))
    residual = None
    if with_residual:
        residual = Address(job.buffer(put([one.tobytes() for one in residuals], places, 4, count + skew)), 4 * skew)
    records, odd = job.room(length), job.buffer(counter(0))
    counts = launch_selection(
        job, dtype, spans, tiles, Address(values, size * skew), residual, count, Address(records), Address(odd)
    )
    sent = [np.frombuffer(one, f32, int(span["chosen"])) for one, span in zip(lists, spans, strict=True)]
    job.expect(f"{label}: lists", records, put(lists, [int(one) for one in spans["list"]], 1, length))
    job.expect(f"{label}: counts are zero again", counts, bytes(8192 * len(spans)))
    job.expect(f"{label}: not finite", odd, counter(sum(int((~np.isfinite(one)).sum()) for one in sent)))
    if residual:
        job.expect(f"{label}: residual", residual.buffer, put(left, places, 4, count + skew), "f32")
    decode(job, label, dtype, (spans, targets, count), Address(records), lists, wides, skew)
    return job


def decode(job: Job, label: str, dtype: str, tables, records: Address, lists, wides, skew: int) -> None:
    spans, targets, count = tables
    size, odd = TYPES[dtype], job.buffer(counter(0))
    places = [int(one) + skew for one in spans["value"]]
    table, rows = Address(job.buffer(spans.tobytes())), Address(job.buffer(targets.tobytes()))
    for operation, before in (("decode", [np.zeros(len(wide), f32) for wide in wides]), ("add", wides)):
        start = put([reference.narrow(one, dtype).tobytes() for one in before], places, size, count + skew)
        out = job.buffer(start)
        job.launch(
            f"offbeat_top_k_{operation}_{dtype}",
            len(targets),
            256,
            records,
            table,
            rows,
            Address(out, size * skew),
            Address(odd),
        )
        after = []
        for one, data, span in zip(before, lists, spans, strict=True):
            indices, sent = reference.top_k_entries(data, len(one), int(span["chosen"]))
            one = one.copy()
            with np.errstate(all="ignore"):
                one[indices] = sent if operation == "decode" else one[indices] + sent
            after.append(reference.narrow(one, dtype).tobytes())
        job.expect(f"{label}: {operation}", out, put(after, places, size, count + skew), dtype)
    job.expect(f"{label}: refused entries", odd, counter(0))


def hard_job() -> Job:
    """Many equal values over many tiles, keys that differ in their last digit, and everything sent."""
    rng = np.random.default_rng(5)
    parts = [
        np.ones(3000, f32),
        rng.integers(0, 3, 2500).astype(f32),
        (np.uint32(0x3F800000) + rng.integers(0, 9, 2000).astype(u32)).view(f32) * f32(-1),
        np.zeros(700, f32),
        rng.standard_normal(5).astype(f32),
    ]
    job = Job()
    for ratio in (0.3, 1.0):
        spans, tiles, _, count, length = lay_out([len(part) for part in parts], ratio, 256)
        values = job.buffer(put([part.tobytes() for part in parts], [int(one) for one in spans["value"]], 4, count))
        lists = [select(part, None, int(span["chosen"]))[0] for part, span in zip(parts, spans, strict=True)]
        records = job.room(length)
        launch_selection(job, "f32", spans, tiles, Address(values), None, count, Address(records), None)
        job.expect(
            f"top_k of equal values, {ratio}", records, put(lists, [int(one) for one in spans["list"]], 1, length)
        )
    return job


def blocks_job() -> Job:
    """Tensors of several blocks of numbers: the golden one; one that sends only of its first block; one that sends
    nothing of its first and its last."""
    gap = np.zeros(3 * BLOCK, f32)
    gap[BLOCK + 5 :: 6][: chosen_of(len(gap), golden.RATIO)] = -2
    parts = [golden.of_blocks(), np.ones(BLOCK + 1, f32), gap]
    spans, tiles, targets, count, length = lay_out([len(part) for part in parts], golden.RATIO, TILE)
    lists = [select(part, None, int(span["chosen"]))[0] for part, span in zip(parts, spans, strict=True)]
    lists[0] = golden.section("top_k", golden.BLOCKS, "encoded")
    job = Job()
    values = job.buffer(put([part.tobytes() for part in parts], [int(one) for one in spans["value"]], 4, count))
    records = job.room(length)
    launch_selection(job, "f32", spans, tiles, Address(values), None, count, Address(records), None)
    job.expect("top_k of blocks: lists", records, put(lists, [int(one) for one in spans["list"]], 1, length))
    decode(job, "top_k of blocks", "f32", (spans, targets, count), Address(records), lists, parts, 0)
    return job


# of three blocks, the last of three numbers: starts, places, what stands after them; what is decoded all the same
# (index and value), and how many are refused
STRANGERS = {
    "of ours": ([1, 2], [7, 7, 2], 0, {7: 1, BLOCK + 7: 2, 2 * BLOCK + 2: 3}, 0),
    "starts backwards": ([2, 1], [7, 8, 2], 0, {7: 1, 8: 2}, 3),
    "a start beyond the end": ([1, 4], [7, 7, 2], 0, {7: 1}, 2),
    "starts beyond the end and back": ([2**32 - 1, 2], [7, 7, 2], 0, {2 * BLOCK + 2: 3}, 2),
    "more than a block has": ([0, 0], [0, 1, 2, 2], 0, {}, 1),
    "twice the same place": ([2, 2], [7, 7, 2], 0, {7: 1, 2 * BLOCK + 2: 3}, 1),
    "places backwards": ([3, 3], [8, 7, 9], 0, {8: 1, 9: 3}, 1),
    "a place beyond the end": ([1, 2], [7, 65535, 3], 0, {7: 1, 2 * BLOCK - 1: 2}, 1),
    "something after the end": ([1, 2], [7, 7, 2], 1, {7: 1, BLOCK + 7: 2, 2 * BLOCK + 2: 3}, 1),
}


def stranger_job() -> Job:
    """Lists that we would not have written: what is out of order or range is passed over and counted."""
    job, count = Job(), 2 * BLOCK + 3
    table = Address(job.buffer(np.array(cut(0, count, BLOCK, 0), TILE_TYPE).tobytes()))
    for story, (starts, places, after, decoded, refused) in STRANGERS.items():
        chosen = len(places)
        span = np.array([(0, 0, count, chosen, 0, 3)], SPAN_TYPE)
        codes = np.array([*places, *[after] * (chosen % 2)], np.uint16)
        data = np.arange(1, chosen + 1, dtype=f32).tobytes() + np.array(starts, u32).tobytes() + codes.tobytes()
        out, odd = job.buffer(bytes(4 * count)), job.buffer(counter(0))
        job.launch(
            "offbeat_top_k_decode_f32",
            3,
            256,
            Address(job.buffer(data)),
            Address(job.buffer(span.tobytes())),
            table,
            Address(out),
            Address(odd),
        )
        want = np.zeros(count, f32)
        want[list(decoded)] = list(decoded.values())
        job.expect(f"lists of strangers, {story}: values", out, want.tobytes())
        job.expect(f"lists of strangers, {story}: refused", odd, counter(refused))
    return job
