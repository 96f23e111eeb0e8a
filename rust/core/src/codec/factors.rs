//! The loops of [`LowRank`] over a matrix.
//!
//! A matrix is too long for caches, so what counts is how often it goes over the bus. M, the sum of values and of what was
//! left, is nowhere in memory: to write it once and read it twice costs as much as to add it up three times. Some rows are
//! worked on together, so that what is loaded of a factor serves all of them; and what a strip of columns needs of a factor
//! is packed before, since columns of a factor that are a power of two apart would push each other out of the cache.

use super::LowRank;
use super::lanes::{LANES, Lanes, Loop, prefetch};
use super::scale::fold;

/// Columns of M whose products with Q are summed by themselves.
const TILE: usize = 1024;
/// Rows of M whose products with P are summed by themselves.
const ROWS: usize = 64;
/// Columns of Q that are worked on together.
const COLUMNS: usize = 4;

type Eight = [f32; LANES];

/// M, as what it is the sum of.
pub(super) struct Sum<'a> {
    pub(super) values: &'a [f32],
    pub(super) residual: &'a [f32],
}

impl<'a> Sum<'a> {
    /// Some rows of M, from one column to another.
    #[inline(always)]
    fn rows<const R: usize>(&self, cols: usize, row: usize, (start, end): (usize, usize)) -> Rows<'a, R> {
        let strip = |of: &'a [f32], row: usize| &of[row * cols + start..row * cols + end];
        Rows {
            values: std::array::from_fn(|at| strip(self.values, row + at)),
            residual: std::array::from_fn(|at| strip(self.residual, row + at)),
            ahead: R * cols,
        }
    }
}

/// Some rows of M.
struct Rows<'a, const R: usize> {
    values: [&'a [f32]; R],
    residual: [&'a [f32]; R],
    /// How many numbers further the next rows are.
    ahead: usize,
}

// No closures: one that is not inlined would not be compiled for the wide registers that it works with.
impl<const R: usize> Rows<'_, R> {
    /// Eight columns of them; zeros follow the last one.
    #[inline(always)]
    fn eight<V: Lanes>(&self, at: usize) -> [V; R] {
        let mut sums = [V::splat(0.0); R];
        for ((sum, values), residual) in sums.iter_mut().zip(self.values).zip(self.residual) {
            let (values, residual) = (&values[at * LANES..], &residual[at * LANES..]);
            prefetch(values, self.ahead);
            prefetch(residual, self.ahead);
            *sum = match (values.first_chunk(), residual.first_chunk()) {
                (Some(values), Some(residual)) => V::load(values).add(V::load(residual)),
                _ => padded::<V>(values).add(padded(residual)),
            };
        }
        sums
    }
}

/// The numbers at the end, and zeros after them.
#[inline(always)]
fn padded<V: Lanes>(rest: &[f32]) -> V {
    let mut room = [0f32; LANES];
    room[..rest.len()].copy_from_slice(rest);
    V::load(&room)
}

/// Ranges of at most so many.
fn pieces(count: usize, most: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..count).step_by(most).map(move |start| (start, (start + most).min(count)))
}

/// P = M·Q.
pub(super) struct Left<'a> {
    pub(super) shape: LowRank,
    pub(super) m: Sum<'a>,
    pub(super) q: &'a [f32],
    pub(super) p: &'a mut [f32],
}

impl Loop for Left<'_> {
    #[inline(always)]
    fn run<V: Lanes>(mut self) {
        let LowRank { rows, cols, rank } = self.shape;
        self.p.fill(0.0);
        let width = TILE.min(cols).div_ceil(LANES);
        let mut packed = vec![[[0f32; LANES]; COLUMNS]; rank.div_ceil(COLUMNS) * width];
        for tile in pieces(cols, TILE) {
            let width = (tile.1 - tile.0).div_ceil(LANES);
            for column in 0..rank {
                let q = &self.q[column * cols + tile.0..column * cols + tile.1];
                let room = packed[column / COLUMNS * width..].iter_mut();
                for (room, q) in room.zip(q.chunks(LANES)) {
                    padded::<V>(q).store(&mut room[column % COLUMNS]);
                }
            }
            for row in (0..rows - rows % 2).step_by(2) {
                self.rows::<V, 2>(row, tile, &packed);
            }
            if rows % 2 == 1 {
                self.rows::<V, 1>(rows - 1, tile, &packed);
            }
        }
    }
}

impl Left<'_> {
    #[inline(always)]
    fn rows<V: Lanes, const R: usize>(&mut self, row: usize, tile: (usize, usize), packed: &[[Eight; COLUMNS]]) {
        let LowRank { rows, cols, rank } = self.shape;
        let (m, width) = (self.m.rows::<R>(cols, row, tile), (tile.1 - tile.0).div_ceil(LANES));
        for (group, columns) in (0..rank).step_by(COLUMNS).zip(packed.chunks_exact(width)) {
            let mut sums = [[V::splat(0.0); COLUMNS]; R];
            for (at, columns) in columns.iter().enumerate() {
                let m = m.eight::<V>(at);
                for (column, values) in columns.iter().enumerate() {
                    let values = V::load(values);
                    for (sums, m) in sums.iter_mut().zip(m) {
                        sums[column] = sums[column].add(m.mul(values));
                    }
                }
            }
            for (row, sums) in (row..).zip(sums) {
                for (column, sum) in (group..rank).zip(sums) {
                    self.p[column * rows + row] += fold(sum, |a, b| a + b);
                }
            }
        }
    }
}

/// Q = Mᵀ·P.
pub(super) struct Right<'a> {
    pub(super) shape: LowRank,
    pub(super) m: Sum<'a>,
    pub(super) p: &'a [f32],
    pub(super) q: &'a mut [f32],
}

impl Loop for Right<'_> {
    #[inline(always)]
    fn run<V: Lanes>(self) {
        let LowRank { rows, cols, rank } = self.shape;
        self.q.fill(0.0);
        let width = TILE.min(cols).div_ceil(LANES);
        // COLUMNS of them side by side
        let mut sums = vec![[[0f32; LANES]; COLUMNS]; rank.div_ceil(COLUMNS) * width];
        for tile in pieces(cols, TILE) {
            let width = (tile.1 - tile.0).div_ceil(LANES);
            for (first, last) in pieces(rows, ROWS) {
                sums.fill([[0.0; LANES]; COLUMNS]);
                let odd = last - (last - first) % 2;
                for row in (first..odd).step_by(2) {
                    self.rows::<V, 2>(row, tile, &mut sums);
                }
                if odd < last {
                    self.rows::<V, 1>(odd, tile, &mut sums);
                }
                for column in 0..rank {
                    let q = self.q[column * cols + tile.0..column * cols + tile.1].chunks_mut(LANES);
                    let sums = &sums[column / COLUMNS * width..];
                    for (q, sums) in q.zip(sums) {
                        q.iter_mut().zip(sums[column % COLUMNS]).for_each(|(q, sum)| *q += sum);
                    }
                }
            }
        }
    }
}

impl Right<'_> {
    /// Adds the products of some rows, one after the other, for all columns of P.
    #[inline(always)]
    fn rows<V: Lanes, const R: usize>(&self, row: usize, tile: (usize, usize), sums: &mut [[Eight; COLUMNS]]) {
        let LowRank { rows, cols, rank } = self.shape;
        let (m, width) = (self.m.rows::<R>(cols, row, tile), (tile.1 - tile.0).div_ceil(LANES));
        for (group, sums) in (0..rank).step_by(COLUMNS).zip(sums.chunks_exact_mut(width)) {
            // columns beyond the last one are added up in vain
            let mut factors = [[V::splat(0.0); COLUMNS]; R];
            for (row, factors) in (row..).zip(&mut factors) {
                for (column, factor) in (group..rank).zip(factors) {
                    *factor = V::splat(self.p[column * rows + row]);
                }
            }
            for (at, sums) in sums.iter_mut().enumerate() {
                let m = m.eight::<V>(at);
                for (column, sum) in sums.iter_mut().enumerate() {
                    let mut total = V::load(sum);
                    for (factors, m) in factors.iter().zip(m) {
                        total = total.add(m.mul(factors[column]));
                    }
                    total.store(sum);
                }
            }
        }
    }
}

/// The values become P·Qᵀ, and the residual what is left of M.
pub(super) struct Finish<'a> {
    pub(super) shape: LowRank,
    pub(super) values: &'a mut [f32],
    pub(super) residual: &'a mut [f32],
    pub(super) p: &'a [f32],
    pub(super) own: &'a [f32],
    pub(super) q: &'a [f32],
    /// Whether the residual stays as it is.
    pub(super) keep: bool,
}

impl Loop for Finish<'_> {
    #[inline(always)]
    fn run<V: Lanes>(mut self) {
        let LowRank { rows, cols, rank } = self.shape;
        let mut packed = vec![[[0f32; LANES]; 2]; rank * TILE.min(cols).div_ceil(LANES)];
        let (mut four, mut one) = (vec![[0f32; 4]; rank], vec![[0f32; 1]; rank]);
        for strip in pieces(cols, TILE) {
            for column in 0..rank {
                let place = column * cols + strip.0..column * cols + strip.1;
                let pairs = self.own[place.clone()].chunks(LANES).zip(self.q[place].chunks(LANES));
                for (room, (own, q)) in packed.iter_mut().skip(column).step_by(rank).zip(pairs) {
                    padded::<V>(own).store(&mut room[0]);
                    padded::<V>(q).store(&mut room[1]);
                }
            }
            for row in (0..rows - rows % 4).step_by(4) {
                self.rows::<V, 4>(row, strip, &packed, &mut four);
            }
            for row in rows - rows % 4..rows {
                self.rows::<V, 1>(row, strip, &packed, &mut one);
            }
        }
    }
}

impl Finish<'_> {
    #[inline(always)]
    fn rows<V: Lanes, const R: usize>(
        &mut self,
        row: usize,
        strip: (usize, usize),
        packed: &[[Eight; 2]],
        factors: &mut [[f32; R]],
    ) {
        let LowRank { rows, cols, rank } = self.shape;
        for (column, factors) in factors.iter_mut().enumerate() {
            factors.copy_from_slice(&self.p[column * rows + row..column * rows + row + R]);
        }
        let mut values = strips::<R>(&mut self.values[row * cols..], cols, strip);
        let mut residual = strips::<R>(&mut self.residual[row * cols..], cols, strip);
        let mut packed = packed.chunks_exact(rank);
        for (at, packed) in packed.by_ref().take((strip.1 - strip.0) / LANES).enumerate() {
            let products = products::<V, R>(factors, packed);
            for ((values, residual), (own, q)) in values.iter_mut().zip(&mut residual).zip(products) {
                prefetch(&values.0[at], R * cols);
                prefetch(&residual.0[at], R * cols);
                settle(&mut values.0[at], &mut residual.0[at], own, q, self.keep);
            }
        }
        // the last columns, if they are fewer than a register has
        let count = (strip.1 - strip.0) % LANES;
        if let (1.., Some(packed)) = (count, packed.next()) {
            let products = products::<V, R>(factors, packed);
            for ((values, residual), (own, q)) in values.into_iter().zip(residual).zip(products) {
                let (values, residual) = (values.1, residual.1);
                let (mut room, mut kept) = ([0f32; LANES], [0f32; LANES]);
                room[..count].copy_from_slice(values);
                kept[..count].copy_from_slice(residual);
                settle(&mut room, &mut kept, own, q, self.keep);
                values.copy_from_slice(&room[..count]);
                residual.copy_from_slice(&kept[..count]);
            }
        }
    }
}

/// A part of each of the next rows: whole registers, and what it has beyond them.
#[inline(always)]
fn strips<const R: usize>(
    rows: &mut [f32],
    cols: usize,
    (start, end): (usize, usize),
) -> [(&mut [Eight], &mut [f32]); R] {
    let mut rows = rows.chunks_mut(cols);
    std::array::from_fn(|_| match rows.next() {
        Some(row) => row[start..end].as_chunks_mut(),
        None => Default::default(),
    })
}

/// Elements of P·ownᵀ and P·Qᵀ, eight of each row.
#[inline(always)]
fn products<V: Lanes, const R: usize>(factors: &[[f32; R]], packed: &[[Eight; 2]]) -> [(V, V); R] {
    let mut sums = [(V::splat(0.0), V::splat(0.0)); R];
    for (factors, [own, q]) in factors.iter().zip(packed) {
        let (own, q) = (V::load(own), V::load(q));
        for (sums, factor) in sums.iter_mut().zip(factors) {
            let factor = V::splat(*factor);
            *sums = (sums.0.add(own.mul(factor)), sums.1.add(q.mul(factor)));
        }
    }
    sums
}

#[inline(always)]
fn settle<V: Lanes>(values: &mut Eight, residual: &mut Eight, own: V, q: V, keep: bool) {
    let left = V::load(values).add(V::load(residual)).sub(own);
    if keep {
    } else if left.are_finite() {
        left.store(residual);
    } else {
        let mut room = [0f32; LANES];
        left.store(&mut room);
        let finite = residual.iter_mut().zip(room).filter(|(_, left)| left.is_finite());
        finite.for_each(|(residual, left)| *residual = left);
    }
    q.store(values);
}
