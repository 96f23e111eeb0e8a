"""Jobs for the kernels of steps that are no codec's own: momentum, outer steps, and copies of peers. The arithmetic is
that of rust/core/src/algorithm, in numpy."""

from functools import partial

import numpy as np
from gpu import golden, reference
from gpu.codec_jobs import TILE, TYPES, Layout, counter, f32, grid, u32, u64
from gpu.job import Address, Job

# a codec's name and, for differences that travel as they are, this
PLAIN = "plain"
PLAIN_LAYOUT = "float16"
BETAS = (0.9, 0.0, 0.5)


class Bucket:
    """All golden cases as tensors of one bucket, and arrays of f32 beside it."""

    def __init__(self, dtype: str, skew: int = 0, cases=None, codec: str = PLAIN_LAYOUT):
        self.cases = golden.CASES if cases is None else cases
        self.dtype, self.skew, self.size = dtype, skew, TYPES[dtype]
        self.raws = [reference.narrow(golden.values(case), dtype) for case in self.cases]
        self.wides = [reference.widen(raw, dtype) for raw in self.raws]
        self.layout = Layout.of(codec, [len(raw) for raw in self.raws], 4 if skew else 16)
        self.job = Job()
        table = self.layout.tiles()
        self.tiles, self.count = Address(self.job.buffer(table.tobytes())), u32(len(table))
        self.grid = grid(table)
        self.label = f"{dtype}{' skewed' if skew else ''}"

    def values(self) -> tuple[int, Address]:
        buffer = self.job.buffer(self.layout.values(self.raws, self.size, self.skew))
        return buffer, Address(buffer, self.skew * self.size)

    def floats(self, parts) -> tuple[int, Address]:
        buffer = self.job.buffer(self.layout.values(parts, 4, self.skew))
        return buffer, Address(buffer, self.skew * 4)

    def others(self, seed: int, near: float = 1.0):
        """Finite numbers that are not the values: what is kept never holds anything else."""
        random = np.random.default_rng(seed)
        with np.errstate(all="ignore"):
            parts = [
                np.where(np.isfinite(wide), wide, 0) * f32(near) + random.standard_normal(len(wide)).astype(f32)
                for wide in self.wides
            ]
        return [np.where(np.isfinite(part), part, f32(1)).astype(f32) for part in parts]

    def launch(self, name: str, *args) -> None:
        self.job.launch(f"offbeat_{name}_{self.dtype}", self.grid, 128, *args)

    def expect(self, what: str, buffer: int, parts) -> None:
        """Values, rounded to their type."""
        narrowed = [reference.narrow(part, self.dtype) for part in parts]
        data = self.layout.values(narrowed, self.size, self.skew)
        self.job.expect(f"{what} {self.label}", buffer, data, self.dtype)

    def expect_floats(self, what: str, buffer: int, parts) -> None:
        data = self.layout.values([np.asarray(part, f32) for part in parts], 4, self.skew)
        self.job.expect(f"{what} {self.label}", buffer, data, "f32")


@np.errstate(all="ignore")
def momentum_job(dtype: str, skew: int = 0, cases=None) -> Job:
    """Gradients to momentum, and what came back from others to gradients."""
    bucket = Bucket(dtype, skew, cases)
    kept = bucket.others(1)
    betas = np.array([BETAS[at % len(BETAS)] for at in range(len(kept))], f32)
    table = Address(bucket.job.buffer(betas.tobytes()))
    every = list(zip(bucket.wides, kept, betas, strict=True))
    one = f32(1)

    values, at = bucket.values()
    before, place = bucket.floats(kept)
    bucket.launch("momentum", at, place, table, bucket.tiles, bucket.count)
    bucket.expect("momentum", values, [beta * m + (one - beta) * x for x, m, beta in every])
    bucket.expect_floats("momentum: what is kept stays", before, kept)

    values, at = bucket.values()
    after, place = bucket.floats(kept)
    bucket.launch("gradient", at, place, table, bucket.tiles, bucket.count)
    bucket.expect("gradient", values, [(x - beta * m) / (one - beta) for x, m, beta in every])
    bucket.expect_floats("gradient: what is kept", after, [np.where(np.isfinite(x), x, m) for x, m, _ in every])
    return bucket.job


@np.errstate(all="ignore")
def outer_job(dtype: str, skew: int = 0, cases=None) -> Job:
    """Differences to an anchor, and outer steps with and without momentum."""
    bucket = Bucket(dtype, skew, cases)
    anchors, speeds = bucket.others(1), bucket.others(2)
    lr, mu = f32(0.7), f32(0.9)

    values, at = bucket.values()
    anchor, place = bucket.floats(anchors)
    bucket.launch("difference", at, place, bucket.tiles, bucket.count)
    bucket.expect("difference", values, [a - x for x, a in zip(bucket.wides, anchors, strict=True)])
    bucket.expect_floats("difference: the anchor stays", anchor, anchors)

    bad = sum(int((~np.isfinite(wide)).sum()) for wide in bucket.wides)
    for with_momentum in (True, False):
        values, at = bucket.values()
        anchor, place = bucket.floats(anchors)
        speed, fast = bucket.floats(speeds)
        odd = bucket.job.buffer(counter(5))
        bucket.launch(
            "outer", at, place, fast if with_momentum else None, lr, mu, bucket.tiles, bucket.count, Address(odd)
        )
        moved, faster, new = [], [], []
        for d, a, v in zip(bucket.wides, anchors, speeds, strict=True):
            fine, gained = np.isfinite(d), mu * v + d
            step = d + mu * gained if with_momentum else d
            moved.append(np.where(fine, a - lr * step, a))
            faster.append(np.where(fine, gained, v) if with_momentum else v)
            new.append(np.where(fine, a - lr * step, d))
        what = f"outer{' with momentum' if with_momentum else ''}"
        bucket.expect(what, values, new)
        bucket.expect_floats(f"{what}: anchor", anchor, moved)
        bucket.expect_floats(f"{what}: speed", speed, faster)
        bucket.job.expect(f"{what}: what is not finite {bucket.label}", odd, counter(5 + bad))
    return bucket.job


def encoded(codec: str, values, numbers) -> bytes:
    return values.tobytes() if codec == PLAIN else reference.encode(codec, values, golden.STREAM, numbers)


def decoded(codec: str, data: bytes, count: int):
    return np.frombuffer(data, f32) if codec == PLAIN else reference.decode(codec, data, count)


def gained(known, news, weight=1.0):
    """Adds what is finite."""
    return np.where(np.isfinite(news), known + f32(weight) * news, known)


class Records(Bucket):
    """The same with places for records of a codec."""

    def __init__(self, codec: str, dtype: str, skew: int, cases):
        super().__init__(dtype, skew, cases, PLAIN_LAYOUT if codec == PLAIN else codec)
        self.codec = codec
        if codec == PLAIN:
            # twice the bytes of a cast
            self.layout.records = [2 * record for record in self.layout.records]
            self.layout.length *= 2
            table = self.layout.tiles()
            for span, record in enumerate(self.layout.records):
                mine = table["span"] == span
                table["record"][mine] = record + 4 * np.arange(mine.sum()) * TILE
            self.tiles = Address(self.job.buffer(table.tobytes()))
        self.numbers = [] if codec == PLAIN else golden.numbers(codec)
        self.label = f"{codec} {self.label}"

    def encoded(self, parts) -> list[bytes]:
        return [encoded(self.codec, np.ascontiguousarray(part, f32), self.numbers) for part in parts]

    def decoded(self, records: list[bytes]):
        return [decoded(self.codec, one, len(wide)) for one, wide in zip(records, self.wides, strict=True)]

    def salt(self):
        numbers = Address(self.job.buffer(self.layout.numbers(self.numbers))) if self.codec == "qsgd" else None
        return numbers, u64(golden.STREAM)


@np.errstate(all="ignore")
def tell_job(codec: str, dtype: str, skew: int = 0, cases=None) -> Job:
    """What a host tells its peers, on a ring and by CHOCO."""
    bucket = Records(codec, dtype, skew, cases)
    own, left, right = (bucket.others(seed) for seed in (1, 2, 3))
    a, b = f32(1 / 3), f32(0.25)
    values, at = bucket.values()
    copies = [bucket.floats(parts) for parts in (own, left, right)]
    for ring in (True, False):
        told = [
            (x - w) + a * (near - w) + b * (far - w) if ring else x - w
            for x, w, near, far in zip(bucket.wides, own, left, right, strict=True)
        ]
        records, odd = bucket.job.room(bucket.layout.length), bucket.job.buffer(counter(3))
        neighbours = (copies[1][1], copies[2][1]) if ring else (None, None)
        bucket.launch(f"{codec}_tell", at, copies[0][1], *neighbours, a, b, bucket.tiles, bucket.count,
                      Address(records), *bucket.salt(), Address(odd))  # fmt: skip
        want, what = bucket.encoded(told), f"tell {'ring' if ring else 'choco'}"
        floats = "f32" if codec == PLAIN else None
        bucket.job.expect(f"{what} {bucket.label}", records, bucket.layout.bytes_of(want), floats)
        bad = 0
        if codec != PLAIN:
            bad = sum(reference.non_finite(codec, one, len(x)) for one, x in zip(want, bucket.wides, strict=True))
        bucket.job.expect(f"{what}: blocks that are not finite {bucket.label}", odd, counter(3 + bad))
    bucket.expect("tell: values are left alone", values, bucket.wides)
    for (copy, _), parts in zip(copies, (own, left, right), strict=True):
        bucket.expect_floats("tell: copies are left alone", copy, parts)
    return bucket.job


@np.errstate(all="ignore")
def hear_job(codec: str, dtype: str, skew: int = 0, cases=None) -> Job:
    """Copies and weights after what three peers told, on a ring of the last and the first of them, and by CHOCO."""
    bucket, peers = Records(codec, dtype, skew, cases), 3
    own, first, second = (bucket.others(seed) for seed in (1, 2, 3))
    # one of them is not finite somewhere, as the values of some cases are
    told = bucket.encoded([x - w for x, w in zip(bucket.wides, own, strict=True)])
    heard = [bucket.encoded([x[::-1] * f32(scale) for x in bucket.wides]) for scale in (1, 0.25, -0.5)]
    stride = -(-bucket.layout.length // 16) * 16 + 48
    together = b"".join(bucket.layout.bytes_of(one).ljust(stride, b"\0") for one in heard)
    news, mine = [bucket.decoded(one) for one in heard], bucket.decoded(told)
    gamma, weights = f32(0.4), np.array([0.4, 0.3, 0.2, 0.1], f32)
    records = Address(bucket.job.buffer(bucket.layout.bytes_of(told)))
    others, counted = Address(bucket.job.buffer(together)), Address(bucket.job.buffer(weights.tobytes()))
    known = [gained(w, q) for w, q in zip(own, mine, strict=True)]
    for ring in (True, False):
        values, at = bucket.values()
        copies = [bucket.floats(parts) for parts in (own, first, second)]
        places = [copies[0][1], copies[1][1], copies[2][1] if ring else None]
        bucket.launch(f"{codec}_hear", at, *places, records, others, u64(stride), u32(peers), u32(2), u32(0), counted,
                      gamma, bucket.tiles, bucket.count)  # fmt: skip
        if ring:
            one = [gained(v, q) for v, q in zip(first, news[2], strict=True)]
            other = [gained(v, q) for v, q in zip(second, news[0], strict=True)]
            new = [np.where(np.isfinite(x), w, x) for x, w in zip(bucket.wides, known, strict=True)]
        else:
            one = [gained(v, q, weights[0]) for v, q in zip(first, mine, strict=True)]
            for peer, weight in zip(news, weights[1:], strict=True):
                one = [gained(v, q, weight) for v, q in zip(one, peer, strict=True)]
            other = second
            new = [x + gamma * (s - w) for x, s, w in zip(bucket.wides, one, known, strict=True)]
        what = f"hear {'ring' if ring else 'choco'}"
        bucket.expect(what, values, new)
        for (copy, _), parts, name in zip(copies, (known, one, other), ("own", "first", "second"), strict=True):
            bucket.expect_floats(f"{what}: {name}", copy, parts)
    return bucket.job


def replicas_jobs(codec: str, dtypes=tuple(TYPES), skews=(0, 1), cases=None) -> list[tuple[str, partial]]:
    return [
        (f"{codec} {job.__name__} {dtype}", partial(job, codec, dtype, skew, cases))
        for job in (tell_job, hear_job) for dtype in dtypes for skew in skews
    ]  # fmt: skip


def elementwise_jobs(job, dtypes=tuple(TYPES), skews=(0, 1), cases=None) -> list[tuple[str, partial]]:
    return [(f"{job.__name__} {dtype}", partial(job, dtype, skew, cases)) for dtype in dtypes for skew in skews]
