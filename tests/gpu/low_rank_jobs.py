"""Jobs for the kernels of low rank, and rust/core/src/codec/low_rank.rs in numpy, with sums in its order."""

from collections.abc import Callable
from functools import partial

import numpy as np
from gpu import golden, reference
from gpu.codec_jobs import TILE_TYPE, TYPES, counter
from gpu.job import FILL, Address, Job

THREADS = 512
# what a block has: rows of P, columns of Q, and rows and columns of the product
ROWS, COLUMNS, HIGH, BROAD = 64, 64, 128, 64
MATRIX_TYPE = np.dtype(
    [("value", "<u8"), ("left", "<u8"), ("right", "<u8"), ("rows", "<u4"), ("cols", "<u4"), ("rank", "<u4"),
     ("unused", "<u4")]
)  # fmt: skip
u32, f32, f64 = np.uint32, np.float32, np.float64
GOLDEN = {case: tuple(shape) for case, shape in golden.INDEX["low_rank.bin"]["rows, columns and rank"].items()}
# beyond a round of runs of rows, and the columns of factors that are worked on together; that one is not finite
SHAPES = [*GOLDEN.values(), (520, 20, 1), (40, 66, 18), (3, 2, 2), (2, 9, 1)]
ODD = 4


def folded(lanes):
    """The upper half of lanes is added to the lower one until one is left."""
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


def in_lanes(values, count: int):
    """Numbers in turns of so many, with zeros after the last."""
    rest = -values.shape[-1] % count
    padded = np.concatenate([values, np.zeros((*values.shape[:-1], rest), values.dtype)], axis=-1)
    return padded.reshape(*values.shape[:-1], -1, count)


@np.errstate(all="ignore")
def left(m, q):
    p = np.zeros((len(q), len(m)), f32)
    for start in range(0, m.shape[1], 1024):
        these, those = in_lanes(m[:, start : start + 1024], 8), in_lanes(q[:, start : start + 1024], 8)
        sums = np.zeros((len(q), len(m), 8), f32)
        for at in range(these.shape[1]):
            sums += these[None, :, at] * those[:, None, at]
        p += folded(sums)
    return p


@np.errstate(all="ignore")
def right(m, p):
    q = np.zeros((len(p), m.shape[1]), f32)
    for start in range(0, len(m), 64):
        sums = np.zeros_like(q)
        for row in range(start, min(start + 64, len(m))):
            sums += m[row] * p[:, row, None]
        q += sums
    return q


@np.errstate(all="ignore")
def product(p, q):
    sums = np.zeros((p.shape[1], q.shape[1]), f32)
    for of_p, of_q in zip(p, q, strict=True):
        sums += of_p[:, None] * of_q
    return sums


def dot(a, b):
    total = f64(0)
    for start in range(0, len(a), 1024):
        terms = in_lanes(a[start : start + 1024].astype(f64) * b[start : start + 1024].astype(f64), 32)
        sums = np.zeros(32, f64)
        for row in terms:
            sums += row
        total += folded(sums)
    return total


def sweep(done, current):
    for _ in range(2):
        for other in done:
            current -= f32(dot(other, current)) * other


@np.errstate(all="ignore")
def orthonormal(p):
    p, rows = p.copy(), p.shape[1]
    for column, current in enumerate(p):
        done, before = p[:column], np.sqrt(dot(current, current))
        sweep(done, current)
        rest = np.sqrt(dot(current, current))
        if rest > before * 1e-5 or np.isnan(rest) or np.isinf(before):
            current[:] = (current.astype(f64) / rest).astype(f32)
            continue
        for unit in range(column, column + rows if column < rows else column):
            current[:], current[unit % rows] = 0, 1
            sweep(done, current)
            rest = dot(current, current)
            if rest >= 0.5 * (rows - column) / rows:
                current[:] = (current.astype(f64) / np.sqrt(rest)).astype(f32)
                break
        else:
            current[:] = 0
    return p


def check_reference() -> None:
    """All of this gives the golden vectors."""
    for case, shape in GOLDEN.items():
        values, rest = golden_matrix(case)
        p = left(values + rest, start_of(shape))
        sound = orthonormal(p)
        q = right(values + rest, sound)
        full = product(sound, q)
        names = ("p", "p orthonormal", "q", "product", "residual after")
        for name, found in zip(names, (p, sound, q, full, values + rest - full), strict=True):
            assert found.tobytes() == golden.section("low_rank", case, name), (case, name)


def golden_matrix(case: str):
    """Values, and what is left of earlier rounds."""
    rows, cols, _ = GOLDEN[case]
    values, rest = (
        part[: rows * cols].reshape(rows, cols) for part in (golden.values("ordinary"), golden.residual("ordinary"))
    )
    return values, rest if case != "ordinary" else np.zeros_like(rest)


def randoms(seed: int, *shape: int):
    return np.random.default_rng(seed).standard_normal(shape).astype(f32)


def made_of(shape, seed: int):
    """Values of a matrix, and what is left."""
    for case, known in GOLDEN.items():
        if shape == known:
            return golden_matrix(case)
    return randoms(seed, *shape[:2]), f32(0.1) * randoms(100 + seed, *shape[:2])


def table(shapes) -> tuple[np.ndarray, int]:
    """Matrices of a bucket, and how many elements it has."""
    rows, value, of_p, of_q = [], 0, 0, 0
    for high, broad, rank in shapes:
        rows.append((value, of_p, of_q, high, broad, rank, 0))
        # nothing stands after the last one, so that whoever goes beyond it is seen
        end = value + high * broad
        value, of_p, of_q = -(-end // 64) * 64, of_p + high * rank, of_q + broad * rank
    return np.array(rows, MATRIX_TYPE), end


def tiles(matrices, high: int | None, broad: int | None):
    """Where blocks begin: rows, columns or both."""
    found = []
    for span, one in enumerate(matrices):
        rows = range(0, int(one["rows"]), high) if high else [0]
        for row in rows:
            cols = range(0, int(one["cols"]), broad) if broad else [0]
            found += [(row, col, 0, span) if high else (col, 0, 0, span) for col in cols]
    return np.array(found, TILE_TYPE)


class Factored:
    """Matrices of one bucket, their factors, and what is left of them."""

    def __init__(self, dtype: str, skew: int = 0, shapes=None):
        self.dtype, self.skew, self.size = dtype, skew, TYPES[dtype]
        self.shapes = SHAPES if shapes is None else shapes
        self.matrices, self.count = table(self.shapes)
        self.job, self.label = Job(), f"low_rank {dtype}{' skewed' if skew else ''}"
        made = [made_of(shape, seed) for seed, shape in enumerate(self.shapes)]
        values, self.rests = [one for one, _ in made], [one for _, one in made]
        if len(values) > ODD:
            values[ODD][7, 5], values[ODD][8, 2] = np.inf, np.nan
        self.raws = [reference.narrow(one, dtype).reshape(one.shape) for one in values]
        with np.errstate(all="ignore"):
            self.ms = [
                reference.widen(raw.reshape(-1), dtype).reshape(raw.shape) + rest
                for raw, rest in zip(self.raws, self.rests, strict=True)
            ]
        self.about = Address(self.job.buffer(self.matrices.tobytes()))

    def put(self, parts, size: int) -> bytes:
        out = np.full((self.count + self.skew) * size, FILL, np.uint8)
        for part, one in zip(parts, self.matrices, strict=True):
            raw = np.frombuffer(np.ascontiguousarray(part).tobytes(), np.uint8)
            start = (int(one["value"]) + self.skew) * size
            out[start : start + len(raw)] = raw
        return out.tobytes()

    def bucket(self) -> tuple[int, Address]:
        buffer = self.job.buffer(self.put(self.raws, self.size))
        return buffer, Address(buffer, self.size * self.skew)

    def left(self) -> tuple[int, Address]:
        buffer = self.job.buffer(self.put(self.rests, 4))
        return buffer, Address(buffer, 4 * self.skew)

    def factors(self, parts) -> Address:
        return Address(self.job.buffer(b"".join(part.tobytes() for part in parts)))

    def tiles(self, high: int | None, broad: int | None) -> tuple[int, Address]:
        found = tiles(self.matrices, high, broad)
        return len(found), Address(self.job.buffer(found.tobytes()))

    def launch(self, name: str, blocks: int, *args) -> None:
        self.job.launch(f"offbeat_low_rank_{name}", blocks, THREADS, *args)

    def expect(self, what: str, at: Address, parts) -> None:
        self.job.expect(f"{self.label}: {what}", at.buffer, b"".join(part.tobytes() for part in parts), "f32")


def start_of(shape) -> np.ndarray:
    """Where the Q of a matrix begins."""
    for case, known in GOLDEN.items():
        if shape == known:
            return golden.floats("low_rank", case, "q at the start").reshape(shape[2], shape[1])
    return randoms(7, shape[2], shape[1])


def low_rank_job(dtype: str, skew: int = 0, shapes=None) -> Job:
    """All kernels, each on what the reference gives for those before it."""
    it = Factored(dtype, skew, shapes)
    first = [start_of(shape) for shape in it.shapes]
    values, at = it.bucket()
    _, rest = it.left()

    # some Q are zero and begin anew, one is not
    before = [one * (number % 2) for number, one in enumerate(first)]
    begun = it.factors([-one if number % 2 else one for number, one in enumerate(before)])
    it.launch("start", len(it.matrices), it.about, it.factors(first), begun)
    it.expect("start", begun, [-one if number % 2 else one for number, one in enumerate(first)])

    p = [left(m, q) for m, q in zip(it.ms, first, strict=True)]
    room = Address(it.job.room(sum(one.nbytes for one in p)))
    blocks, rows = it.tiles(ROWS, None)
    it.launch(f"left_{dtype}", blocks, at, rest, it.about, rows, it.factors(first), room)
    it.expect("p", room, p)

    sound = [orthonormal(one) for one in p]
    room = it.factors(p)
    it.launch("orthonormalise", len(it.matrices), it.about, room)
    it.expect("p orthonormal", room, sound)

    own = [right(m, one) for m, one in zip(it.ms, sound, strict=True)]
    room = Address(it.job.room(sum(one.nbytes for one in own)))
    blocks, cols = it.tiles(None, COLUMNS)
    it.launch(f"right_{dtype}", blocks, at, rest, it.about, cols, it.factors(sound), room)
    it.expect("q", room, own)
    it.job.expect(f"{it.label}: values are left alone", values, it.put(it.raws, it.size), dtype)

    # what others have is not finite in one matrix more, and is finite where this rank's is not
    every = [one if number == 0 else one + f32(0.5) for number, one in enumerate(own)]
    if len(every) > ODD:
        every[ODD] = randoms(9, *every[ODD].shape)
        every[ODD + 1][1, 1] = -np.inf
    fine = [bool(np.isfinite(one).all()) for one in every]
    flags, odd = it.job.room(4 * len(fine)), it.job.buffer(counter(3))
    it.launch("check", len(it.matrices), it.about, it.factors(every), Address(flags), Address(odd))
    it.job.expect(f"{it.label}: finite", flags, np.array(fine, u32).tobytes())
    it.job.expect(f"{it.label}: not finite", odd, counter(3 + fine.count(False)))

    # one whose P is finite though this rank's own values are not, so only these stay
    sound = [randoms(11, *one.shape) if not np.isfinite(one).all() else one for one in sound]
    own = [randoms(12, *one.shape) if not np.isfinite(one).all() else one for one in own]
    kept = it.factors(first)
    residual, rest = it.left()
    blocks, places = it.tiles(HIGH, BROAD)
    flags = Address(it.job.buffer(np.array(fine, u32).tobytes()))
    values, at = it.bucket()
    it.launch(f"finish_{dtype}", blocks, at, rest, it.about, places, it.factors(sound), it.factors(own),
              it.factors(every), flags, kept)  # fmt: skip
    with np.errstate(all="ignore"):
        lacking = [m - product(one, q) for m, one, q in zip(it.ms, sound, own, strict=True)]
    lacking = [
        np.where(np.isfinite(one), one, before) if good else before
        for one, before, good in zip(lacking, it.rests, fine, strict=True)
    ]
    full = [reference.narrow(product(one, q), dtype) for one, q in zip(sound, every, strict=True)]
    it.job.expect(f"{it.label}: product", values, it.put(full, it.size), dtype)
    it.job.expect(f"{it.label}: what is left", residual, it.put(lacking, 4), "f32")
    it.expect("factors", kept, [q if good else old for q, old, good in zip(every, first, fine, strict=True)])
    return it.job


def orthonormal_job() -> Job:
    """Columns that tell nothing, are not finite, or are too long for shared memory."""
    one, two = randoms(1, 3, 40), randoms(2, 6, 6)
    two[1], two[2], two[4], two[5] = 2 * two[0], 0, two[0] + two[3], 1e30
    odd, wide, huge = randoms(3, 3, 9), randoms(4, 5, 3), randoms(5, 2, 50)
    odd[1, 4], huge[1, 3] = np.nan, np.inf
    near = randoms(6, 2, 300)
    near[1] = near[0] * f32(1 + 1e-4) + near[1] * f32(1e-6)
    long = randoms(8, 2, 17000)
    every = [one, two, odd, wide, huge, near, np.zeros((4, 70), f32), long]
    job, (matrices, _) = Job(), table([(part.shape[1], 1, part.shape[0]) for part in every])
    p = job.buffer(b"".join(part.tobytes() for part in every))
    about = Address(job.buffer(matrices.tobytes()))
    job.launch("offbeat_low_rank_orthonormalise", len(every), THREADS, about, Address(p))
    job.expect("columns made orthonormal", p, b"".join(orthonormal(part).tobytes() for part in every), "f32")
    return job


def low_rank_jobs(dtypes=tuple(TYPES), skews=(0, 1), shapes=None) -> list[tuple[str, Callable[[], Job]]]:
    # of matrices with odd columns some rows are where wide accesses are made, whatever the skew
    cases = [(dtype, skew) for dtype in dtypes for skew in skews if skew or dtype == "f32"]
    jobs = [(f"low_rank {dtype}", partial(low_rank_job, dtype, skew, shapes)) for dtype, skew in cases]
    return [*jobs, ("orthonormal columns", orthonormal_job)]
