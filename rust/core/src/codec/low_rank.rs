//! A matrix as the product of two thin ones: the pieces of PowerSGD.
//!
//! A matrix M of `rows` × `cols` is row-major. Its factors are kept column by column, which is how they are used: P is `rank`
//! columns of length `rows`, Q is `rank` columns of length `cols`. One step of subspace iteration, with sums over all ranks
//! in between:
//!
//! 1. [`LowRank::left`]: P = M·Q
//! 2. [`LowRank::orthonormalise`]: P's columns become orthonormal
//! 3. [`LowRank::right`]: Q = Mᵀ·P
//! 4. [`LowRank::product`]: P·Qᵀ, and [`LowRank::residual`]: what it lacks of M
//!
//! M is read once in each step but the second. Every sum has a stated order, so all ranks that start from the same bits end
//! with the same bits. The loops are compiled for AVX2 too, as those of block-wise codecs are.

#[cfg(target_arch = "x86_64")]
use super::lanes::Wide;
use super::lanes::{LANES, Lanes, Plain};
use super::salt::draw;
use super::scale::fold;
use crate::{Error, Result};

/// Columns of M that are worked on together, so that as many rows of Q stay in the cache.
const TILE: usize = 1024;
/// A column of which orthogonalising leaves less than this share counts as a sum of those before it.
const DEPENDENT: f64 = 1e-5;
/// The largest rank.
const MOST: usize = 1024;

/// The shape of a matrix and of its factors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LowRank {
    rows: usize,
    cols: usize,
    rank: usize,
}

impl LowRank {
    /// A matrix of `rows` × `cols` as factors of `rank` columns.
    pub fn new(rows: usize, cols: usize, rank: usize) -> Result<Self> {
        if !(1..=MOST).contains(&rank) {
            return Err(Error::invalid(format!("rank {rank} is not from 1 to {MOST}; try: 4")));
        }
        if rows == 0 || cols == 0 {
            return Err(Error::invalid(format!("a matrix of {rows} × {cols} has no factors; try: no compression")));
        }
        Ok(LowRank { rows, cols, rank })
    }

    /// Numbers of P.
    pub fn left_len(&self) -> usize {
        self.rows * self.rank
    }

    /// Numbers of Q.
    pub fn right_len(&self) -> usize {
        self.cols * self.rank
    }

    /// A Q to begin with: numbers from −1 to 1 that depend on `key` only.
    pub fn start(&self, key: u64, q: &mut [f32]) {
        for (counter, value) in q.iter_mut().enumerate() {
            *value = (draw(key, counter as u64) >> 40) as f32 / 8_388_608.0 - 1.0;
        }
    }

    /// P = M·Q. A row's products go to eight lanes in turn; a lane adds its own in order, then the upper half of the lanes
    /// is added to the lower one until one is left. That is done for 1024 columns at a time, whose sums are added in order.
    pub fn left(&self, m: &[f32], q: &[f32], p: &mut [f32]) {
        #[cfg(target_arch = "x86_64")]
        if std::is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has AVX2.
            return unsafe { left_wide(*self, m, q, p) };
        }
        left::<Plain>(*self, m, q, p);
    }

    /// Q = Mᵀ·P. An element adds its products in the order of the rows.
    pub fn right(&self, m: &[f32], p: &[f32], q: &mut [f32]) {
        #[cfg(target_arch = "x86_64")]
        if std::is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has AVX2.
            return unsafe { right_wide(*self, m, p, q) };
        }
        right::<Plain>(*self, m, p, q);
    }

    /// P·Qᵀ. An element adds its products in the order of the columns.
    pub fn product(&self, p: &[f32], q: &[f32], out: &mut [f32]) {
        #[cfg(target_arch = "x86_64")]
        if std::is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has AVX2.
            return unsafe { product_wide(*self, p, q, out) };
        }
        product::<Plain>(*self, p, q, out);
    }

    /// M − P·Qᵀ, and whether it is finite; where it is not, `out` stays as it was.
    pub fn residual(&self, m: &[f32], p: &[f32], q: &[f32], out: &mut [f32]) -> bool {
        let mut finite = true;
        let mut room = vec![0f32; self.cols];
        for (row, (m, out)) in m.chunks_exact(self.cols).zip(out.chunks_exact_mut(self.cols)).enumerate() {
            let one = LowRank { rows: 1, ..*self };
            let mut factors = [0f32; MOST];
            let factors = &mut factors[..self.rank];
            factors.iter_mut().enumerate().for_each(|(column, factor)| *factor = p[column * self.rows + row]);
            one.product(factors, q, &mut room);
            for ((out, m), product) in out.iter_mut().zip(m).zip(&room) {
                let left = m - product;
                finite &= left.is_finite();
                *out = if left.is_finite() { left } else { *out };
            }
        }
        finite
    }

    /// Makes P's columns orthonormal: modified Gram–Schmidt, twice over, with sums in f64.
    ///
    /// A column that is zero, or a sum of those before it, would stay so for ever. It becomes a unit vector instead, the first
    /// one from its own number on that is not nearly such a sum. Columns beyond the number of rows are zero, and what is not
    /// finite becomes NaN.
    pub fn orthonormalise(&self, p: &mut [f32]) {
        for column in 0..self.rank {
            let (done, rest) = p.split_at_mut(column * self.rows);
            let current = &mut rest[..self.rows];
            let before = dot(current, current).sqrt();
            sweep(done, current);
            let left = dot(current, current).sqrt();
            if left > before * DEPENDENT || left.is_nan() || before.is_infinite() {
                divide(current, left);
            } else {
                substitute(done, current, column);
            }
        }
    }
}

/// Takes out of a column what the columns before it have of it, twice: once leaves too much of what nearly is their sum.
fn sweep(done: &[f32], current: &mut [f32]) {
    for _ in 0..2 {
        for other in done.chunks_exact(current.len()) {
            let share = dot(other, current) as f32;
            current.iter_mut().zip(other).for_each(|(value, other)| *value -= share * other);
        }
    }
}

fn divide(current: &mut [f32], by: f64) {
    current.iter_mut().for_each(|value| *value = (f64::from(*value) / by) as f32);
}

/// A unit vector that the columns before do not make up. Of all of them together these miss `rows − column` in squares, so
/// one misses at least the mean.
fn substitute(done: &[f32], current: &mut [f32], column: usize) {
    let rows = current.len();
    if column < rows {
        let enough = 0.5 * (rows - column) as f64 / rows as f64;
        for unit in (0..rows).map(|step| (column + step) % rows) {
            current.fill(0.0);
            current[unit] = 1.0;
            sweep(done, current);
            let left = dot(current, current);
            if left >= enough {
                return divide(current, left.sqrt());
            }
        }
    }
    current.fill(0.0);
}

/// Products are added in eight lanes in turn, then the upper half of the lanes to the lower one until one is left.
fn dot(a: &[f32], b: &[f32]) -> f64 {
    let mut lanes = [0f64; LANES];
    for (a, b) in a.chunks(LANES).zip(b.chunks(LANES)) {
        for ((lane, a), b) in lanes.iter_mut().zip(a).zip(b) {
            *lane += f64::from(*a) * f64::from(*b);
        }
    }
    let [a, b, c, d, e, f, g, h] = lanes;
    ((a + e) + (c + g)) + ((b + f) + (d + h))
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn left_wide(shape: LowRank, m: &[f32], q: &[f32], p: &mut [f32]) {
    left::<Wide>(shape, m, q, p);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn right_wide(shape: LowRank, m: &[f32], p: &[f32], q: &mut [f32]) {
    right::<Wide>(shape, m, p, q);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn product_wide(shape: LowRank, p: &[f32], q: &[f32], out: &mut [f32]) {
    product::<Wide>(shape, p, q, out);
}

#[inline(always)]
fn left<V: Lanes>(shape: LowRank, m: &[f32], q: &[f32], p: &mut [f32]) {
    let LowRank { rows, cols, rank } = shape;
    p.fill(0.0);
    for start in (0..cols).step_by(TILE) {
        let end = (start + TILE).min(cols);
        for row in 0..rows {
            let m = &m[row * cols + start..row * cols + end];
            let mut at = 0;
            while at < rank {
                // a column too many is not read twice, only added up twice
                let four = [at, at + 1, at + 2, at + 3].map(|column| column.min(rank - 1) * cols);
                let [a, b, c, d] = four.map(|begin| &q[begin + start..begin + end]);
                let sums = dots::<V>(m, a, b, c, d);
                for (column, sum) in (at..rank).zip(sums) {
                    p[column * rows + row] += sum;
                }
                at += 4;
            }
        }
    }
}

/// The products of a row with four columns, summed.
#[inline(always)]
fn dots<V: Lanes>(row: &[f32], a: &[f32], b: &[f32], c: &[f32], d: &[f32]) -> [f32; 4] {
    let [mut e, mut f, mut g, mut h] = [V::splat(0.0); 4];
    let (whole, rest) = row.as_chunks();
    let columns = a.as_chunks().0.iter().zip(b.as_chunks().0).zip(c.as_chunks().0).zip(d.as_chunks().0);
    for (row, (((a, b), c), d)) in whole.iter().zip(columns) {
        let row = V::load(row);
        e = e.add(row.mul(V::load(a)));
        f = f.add(row.mul(V::load(b)));
        g = g.add(row.mul(V::load(c)));
        h = h.add(row.mul(V::load(d)));
    }
    if !rest.is_empty() {
        let at = whole.len() * LANES;
        let row = padded::<V>(rest);
        e = e.add(row.mul(padded(&a[at..])));
        f = f.add(row.mul(padded(&b[at..])));
        g = g.add(row.mul(padded(&c[at..])));
        h = h.add(row.mul(padded(&d[at..])));
    }
    [fold(e, sum), fold(f, sum), fold(g, sum), fold(h, sum)]
}

#[inline(always)]
fn sum(a: f32, b: f32) -> f32 {
    a + b
}

#[inline(always)]
fn right<V: Lanes>(shape: LowRank, m: &[f32], p: &[f32], q: &mut [f32]) {
    let LowRank { rows, cols, rank } = shape;
    q.fill(0.0);
    for start in (0..cols).step_by(TILE) {
        let end = (start + TILE).min(cols);
        for row in (0..rows).step_by(4) {
            let [a, b, c, d] = [row, row + 1, row + 2, row + 3].map(|row| row.min(rows - 1) * cols);
            let [a, b, c, d] = [a, b, c, d].map(|begin| &m[begin + start..begin + end]);
            for column in 0..rank {
                let q = &mut q[column * cols + start..column * cols + end];
                let p = &p[column * rows + row..(column + 1) * rows];
                match p {
                    [e, f, g, h, ..] => add_four::<V>(q, [a, b, c, d], [*e, *f, *g, *h]),
                    _ => {
                        for (row, factor) in [a, b, c].into_iter().zip(p) {
                            add::<V>(q, row, *factor);
                        }
                    }
                }
            }
        }
    }
}

/// Adds multiples of four rows, one after the other.
#[inline(always)]
fn add_four<V: Lanes>(out: &mut [f32], rows: [&[f32]; 4], factors: [f32; 4]) {
    let ([a, b, c, d], [e, f, g, h]) = (rows, factors);
    let whole = out.len() / LANES * LANES;
    let (e, f, g, h) = (V::splat(e), V::splat(f), V::splat(g), V::splat(h));
    let rows = a.as_chunks().0.iter().zip(b.as_chunks().0).zip(c.as_chunks().0).zip(d.as_chunks().0);
    for (out, (((a, b), c), d)) in out.as_chunks_mut().0.iter_mut().zip(rows) {
        let sum = V::load(out).add(V::load(a).mul(e)).add(V::load(b).mul(f));
        sum.add(V::load(c).mul(g)).add(V::load(d).mul(h)).store(out);
    }
    for (row, factor) in [a, b, c, d].into_iter().zip(factors) {
        add::<V>(&mut out[whole..], &row[whole..], factor);
    }
}

/// Adds a multiple of a row.
#[inline(always)]
fn add<V: Lanes>(out: &mut [f32], row: &[f32], factor: f32) {
    let times = V::splat(factor);
    let ((whole, rest), (row, last)) = (out.as_chunks_mut(), row.as_chunks());
    for (out, row) in whole.iter_mut().zip(row) {
        V::load(out).add(V::load(row).mul(times)).store(out);
    }
    for (out, value) in rest.iter_mut().zip(last) {
        *out += value * factor;
    }
}

#[inline(always)]
fn product<V: Lanes>(shape: LowRank, p: &[f32], q: &[f32], out: &mut [f32]) {
    let LowRank { rows, cols, rank } = shape;
    for start in (0..cols).step_by(TILE) {
        let end = (start + TILE).min(cols);
        for row in 0..rows {
            let (groups, rest) = out[row * cols + start..row * cols + end].as_chunks_mut::<{ 4 * LANES }>();
            let mut at = start;
            for out in groups.iter_mut() {
                let [mut a, mut b, mut c, mut d] = [V::splat(0.0); 4];
                for column in 0..rank {
                    let factor = V::splat(p[column * rows + row]);
                    let q = q[column * cols + at..].as_chunks().0;
                    if let [e, f, g, h, ..] = q {
                        a = a.add(V::load(e).mul(factor));
                        b = b.add(V::load(f).mul(factor));
                        c = c.add(V::load(g).mul(factor));
                        d = d.add(V::load(h).mul(factor));
                    }
                }
                for (out, sum) in out.as_chunks_mut().0.iter_mut().zip([a, b, c, d]) {
                    sum.store(out);
                }
                at += 4 * LANES;
            }
            for (at, out) in (at..).zip(rest) {
                *out = (0..rank).fold(0.0, |sum, column| sum + q[column * cols + at] * p[column * rows + row]);
            }
        }
    }
}

/// The numbers at the end, and zeros after them.
#[inline(always)]
fn padded<V: Lanes>(rest: &[f32]) -> V {
    let mut room = [0f32; LANES];
    room[..rest.len()].copy_from_slice(rest);
    V::load(&room)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn random(count: usize, key: u64) -> Vec<f32> {
        let mut values = vec![0f32; count];
        LowRank { rows: 1, cols: count, rank: 1 }.start(key, &mut values);
        values
    }

    /// Gram–Schmidt may leave this.
    fn assert_orthonormal(shape: LowRank, p: &[f32]) {
        for (a, left) in p.chunks_exact(shape.rows).enumerate() {
            for (b, right) in p.chunks_exact(shape.rows).enumerate() {
                let expected = if a == b && a < shape.rows { 1.0 } else { 0.0 };
                assert!((dot(left, right) - expected).abs() < 1e-5, "{shape:?}: {a}, {b}: {}", dot(left, right));
            }
        }
    }

    /// One step for a matrix; P·Qᵀ.
    fn step(shape: LowRank, m: &[f32], q: &mut [f32]) -> (Vec<f32>, Vec<f32>) {
        let (mut p, mut out) = (vec![1.0; shape.left_len()], vec![0.0; m.len()]);
        shape.left(m, q, &mut p);
        shape.orthonormalise(&mut p);
        shape.right(m, &p, q);
        shape.product(&p, q, &mut out);
        (p, out)
    }

    proptest! {
        #[test]
        fn products_are_those_of_the_definition(rows in 1usize..40, cols in 1usize..1100, rank in 1usize..10, key in any::<u64>()) {
            let shape = LowRank::new(rows, cols, rank).unwrap();
            let (m, q) = (random(rows * cols, key), random(cols * rank, key ^ 1));
            let mut p = vec![9.0; shape.left_len()];
            shape.left(&m, &q, &mut p);
            let near = |got: f32, exact: f64, terms: usize| (f64::from(got) - exact).abs() < 1e-6 * terms as f64 + 1e-6;
            for row in 0..rows {
                for column in 0..rank {
                    let exact: f64 = (0..cols).map(|at| f64::from(m[row * cols + at]) * f64::from(q[column * cols + at])).sum();
                    prop_assert!(near(p[column * rows + row], exact, cols));
                }
            }
            let (mut back, mut full, mut rest) = (vec![9.0; shape.right_len()], m.clone(), m.clone());
            shape.right(&m, &p, &mut back);
            for at in (0..cols).step_by(1 + cols / 20) {
                for column in 0..rank {
                    let exact: f64 = (0..rows).map(|row| f64::from(m[row * cols + at]) * f64::from(p[column * rows + row])).sum();
                    let size = p[column * rows..(column + 1) * rows].iter().fold(1f32, |most, p| most.max(p.abs()));
                    prop_assert!(near(back[column * cols + at] / size, exact / f64::from(size), rows));
                }
            }
            shape.product(&p, &q, &mut full);
            prop_assert!(shape.residual(&m, &p, &q, &mut rest));
            for (at, (full, rest)) in full.iter().zip(&rest).enumerate() {
                let (row, col) = (at / cols, at % cols);
                // columns in their order, so to the bit
                let exact = (0..rank).fold(0f32, |sum, column| sum + p[column * rows + row] * q[column * cols + col]);
                prop_assert_eq!((full.to_bits(), rest.to_bits()), (exact.to_bits(), (m[at] - exact).to_bits()));
            }
        }

        #[test]
        fn a_matrix_of_a_rank_is_found_with_that_rank(
            rows in 1usize..60, cols in 1usize..60, rank in 1usize..6, more in 0usize..3, key in any::<u64>(),
        ) {
            let rank = rank.min(rows).min(cols);
            let made = LowRank::new(rows, cols, rank).unwrap();
            let mut m = vec![0.0; rows * cols];
            let (mut left, right) = (random(rows * rank, key), random(cols * rank, key ^ 2));
            // well away from a lower rank, whose rounding errors would be taken for directions
            made.orthonormalise(&mut left);
            made.product(&left, &right, &mut m);
            let shape = LowRank::new(rows, cols, rank + more).unwrap();
            let mut q = random(shape.right_len(), key ^ 3);
            let mut found = Vec::new();
            for _ in 0..2 {
                let (p, product) = step(shape, &m, &mut q);
                assert_orthonormal(shape, &p);
                found = product;
            }
            let size = m.iter().fold(1e-3f32, |most, value| most.max(value.abs()));
            for (found, value) in found.iter().zip(&m) {
                prop_assert!((found - value).abs() <= 2e-5 * size, "{found} instead of {value}");
            }
        }

        #[test]
        fn wide_registers_change_no_bit(rows in 1usize..30, cols in 1usize..1100, rank in 1usize..12, key in any::<u64>()) {
            let shape = LowRank::new(rows, cols, rank).unwrap();
            let (m, q) = (random(rows * cols, key), random(cols * rank, key ^ 1));
            let (mut wide, mut plain) = (vec![0.0; shape.left_len()], vec![0.0; shape.left_len()]);
            shape.left(&m, &q, &mut wide);
            left::<Plain>(shape, &m, &q, &mut plain);
            prop_assert_eq!(&wide, &plain);
            let (mut wide_q, mut plain_q) = (q.clone(), q.clone());
            shape.right(&m, &wide, &mut wide_q);
            right::<Plain>(shape, &m, &plain, &mut plain_q);
            prop_assert_eq!(&wide_q, &plain_q);
            let (mut full, mut other) = (m.clone(), m.clone());
            shape.product(&wide, &wide_q, &mut full);
            product::<Plain>(shape, &wide, &wide_q, &mut other);
            prop_assert_eq!(full, other);
        }
    }

    #[test]
    fn columns_that_tell_nothing_become_unit_vectors() {
        let shape = LowRank::new(6, 3, 5).unwrap();
        let mut p = vec![0.0; 30];
        p[..6].copy_from_slice(&[1.0, 2.0, 0.0, 0.0, 0.0, 0.0]);
        // a multiple of the first, zero, the same again, and one that overflows when squared in f32
        p[6..12].copy_from_slice(&[2.0, 4.0, 0.0, 0.0, 0.0, 0.0]);
        p[18..24].copy_from_slice(&[1.0, 2.0, 0.0, 0.0, 0.0, 0.0]);
        p[24..].fill(1e30);
        shape.orthonormalise(&mut p);
        assert_orthonormal(shape, &p);
        // more columns than rows
        let tall = LowRank::new(2, 2, 3).unwrap();
        let mut p = random(6, 1);
        tall.orthonormalise(&mut p);
        assert_orthonormal(tall, &p);
        assert_eq!(p[4..], [0.0, 0.0]);
    }

    #[test]
    fn what_is_not_finite_is_seen_and_leaves_the_residual() {
        let shape = LowRank::new(4, 5, 2).unwrap();
        let mut m = random(20, 1);
        m[7] = f32::NAN;
        let mut q = random(shape.right_len(), 2);
        let (p, product) = step(shape, &m, &mut q);
        assert!(product.iter().all(|value| value.is_nan()));
        let mut residual = vec![0.25; 20];
        assert!(!shape.residual(&m, &p, &q, &mut residual));
        assert_eq!(residual, vec![0.25; 20]);
    }

    #[test]
    fn ranks_that_make_no_sense_are_refused() {
        for (rows, cols, rank) in [(4, 4, 0), (4, 4, 1025), (0, 4, 1), (4, 0, 1)] {
            assert!(LowRank::new(rows, cols, rank).is_err_and(|error| error.message.contains("try:")));
        }
    }
}
