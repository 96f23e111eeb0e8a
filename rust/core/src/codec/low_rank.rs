//! A matrix as the product of two thin ones: the pieces of PowerSGD.
//!
//! A matrix of `rows` × `cols` is row-major. Its factors are kept column by column, which is how they are used: P is `rank`
//! columns of length `rows`, Q is `rank` columns of length `cols`. M is the sum of values and of what was left of earlier
//! ones. One step of subspace iteration, with sums over all ranks in between:
//!
//! 1. [`LowRank::left`]: P = M·Q
//! 2. [`LowRank::orthonormalise`]: P's columns become orthonormal
//! 3. [`LowRank::right`]: Q = Mᵀ·P
//! 4. [`LowRank::finish`]: the values become P·Qᵀ, and what is left is what that lacks of M
//!
//! Each of them but the second goes over memory once (`factors.rs`); the second is in `orthonormal.rs`. Every sum has a
//! stated order, so all ranks that start from the same bits end with the same bits.

use super::factors::{Finish, Left, Right, Sum};
use super::lanes::widest;
use super::orthonormal::Orthonormal;
use super::salt::draw;
use crate::{Error, Result};

/// The largest rank.
const MOST: usize = 1024;

/// The shape of a matrix and of its factors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LowRank {
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) rank: usize,
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

    /// Rows and columns of the matrix, and columns of its factors.
    pub fn dims(&self) -> (usize, usize, usize) {
        (self.rows, self.cols, self.rank)
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
    pub fn left(&self, values: &[f32], residual: &[f32], q: &[f32], p: &mut [f32]) {
        widest(Left { shape: *self, m: Sum { values, residual }, q, p });
    }

    /// Makes P's columns orthonormal: modified Gram–Schmidt, twice over, with sums in f64 (see `orthonormal.rs`).
    ///
    /// A column that is zero, or a sum of those before it, would stay so for ever. It becomes a unit vector instead, the first
    /// one from its own number on that is not nearly such a sum. Columns beyond the number of rows are zero, and what is not
    /// finite becomes NaN.
    pub fn orthonormalise(&self, p: &mut [f32]) {
        widest(Orthonormal { rows: self.rows, p: &mut p[..self.left_len()] });
    }

    /// Q = Mᵀ·P. An element adds its products in the order of the rows. That is done for 64 rows at a time, whose sums are
    /// added in order.
    pub fn right(&self, values: &[f32], residual: &[f32], p: &[f32], q: &mut [f32]) {
        widest(Right { shape: *self, m: Sum { values, residual }, p, q });
    }

    /// The values become P·Qᵀ, and the residual M − P·`own`ᵀ, where that is finite; elsewhere it stays as it was. An element
    /// adds its products in the order of the columns. If a Q is not finite, which all ranks see alike, the residual stays as
    /// it was from end to end: gives whether it is.
    pub fn finish(&self, values: &mut [f32], residual: &mut [f32], p: &[f32], own: &[f32], q: &[f32]) -> bool {
        let finite = q.iter().fold(true, |all, value| all & value.is_finite());
        widest(Finish { shape: *self, values, residual, p, own, q, keep: !finite });
        finite
    }
}

#[cfg(test)]
mod tests {
    use super::super::lanes::{Loop, Plain};
    use super::super::orthonormal::dot;
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
        let (mut p, mut out, none) = (vec![1.0; shape.left_len()], m.to_vec(), vec![0.0; m.len()]);
        shape.left(m, &none, q, &mut p);
        shape.orthonormalise(&mut p);
        shape.right(m, &none, &p, q);
        shape.finish(&mut out, &mut none.clone(), &p, q, q);
        (p, out)
    }

    /// An element of P·Qᵀ: columns in their order, so to the bit.
    fn product(shape: LowRank, p: &[f32], q: &[f32], at: usize) -> f32 {
        let (row, col) = (at / shape.cols, at % shape.cols);
        (0..shape.rank).fold(0f32, |sum, column| sum + p[column * shape.rows + row] * q[column * shape.cols + col])
    }

    proptest! {
        #[test]
        fn products_are_those_of_the_definition(rows in 1usize..40, cols in 1usize..1100, rank in 1usize..10, key in any::<u64>()) {
            let shape = LowRank::new(rows, cols, rank).unwrap();
            let (values, residual) = (random(rows * cols, key), random(rows * cols, key ^ 2));
            let m: Vec<f32> = values.iter().zip(&residual).map(|(value, residual)| value + residual).collect();
            let (q, own) = (random(cols * rank, key ^ 1), random(cols * rank, key ^ 3));
            let mut p = vec![9.0; shape.left_len()];
            shape.left(&values, &residual, &q, &mut p);
            let near = |got: f32, exact: f64, terms: usize| (f64::from(got) - exact).abs() < 1e-6 * terms as f64 + 1e-6;
            for row in 0..rows {
                for column in 0..rank {
                    let exact: f64 = (0..cols).map(|at| f64::from(m[row * cols + at]) * f64::from(q[column * cols + at])).sum();
                    prop_assert!(near(p[column * rows + row], exact, cols));
                }
            }
            let mut back = vec![9.0; shape.right_len()];
            shape.right(&values, &residual, &p, &mut back);
            for at in (0..cols).step_by(1 + cols / 20) {
                for column in 0..rank {
                    let exact: f64 = (0..rows).map(|row| f64::from(m[row * cols + at]) * f64::from(p[column * rows + row])).sum();
                    let size = p[column * rows..(column + 1) * rows].iter().fold(1f32, |most, p| most.max(p.abs()));
                    prop_assert!(near(back[column * cols + at] / size, exact / f64::from(size), rows));
                }
            }
            let (mut full, mut rest) = (values.clone(), residual.clone());
            prop_assert!(shape.finish(&mut full, &mut rest, &p, &own, &q));
            for (at, (full, rest)) in full.iter().zip(&rest).enumerate() {
                let left = m[at] - product(shape, &p, &own, at);
                prop_assert_eq!((full.to_bits(), rest.to_bits()), (product(shape, &p, &q, at).to_bits(), left.to_bits()));
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
            m.iter_mut().enumerate().for_each(|(at, value)| *value = product(made, &left, &right, at));
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
        fn wide_registers_change_no_bit(rows in 1usize..80, cols in 1usize..1100, rank in 1usize..12, key in any::<u64>()) {
            let shape = LowRank::new(rows, cols, rank).unwrap();
            let (mut values, mut residual) = (random(rows * cols, key), random(rows * cols, key ^ 2));
            let q = random(cols * rank, key ^ 1);
            let (mut p, mut plain) = (vec![0.0; shape.left_len()], vec![0.0; shape.left_len()]);
            shape.left(&values, &residual, &q, &mut p);
            Left { shape, m: Sum { values: &values, residual: &residual }, q: &q, p: &mut plain }.run::<Plain>();
            prop_assert_eq!(&p, &plain);
            shape.orthonormalise(&mut p);
            Orthonormal { rows, p: &mut plain }.run::<Plain>();
            prop_assert_eq!(&p, &plain);
            let (mut own, mut plain) = (q.clone(), q.clone());
            shape.right(&values, &residual, &p, &mut own);
            Right { shape, m: Sum { values: &values, residual: &residual }, p: &p, q: &mut plain }.run::<Plain>();
            prop_assert_eq!(&own, &plain);
            // a number that is not finite in what is left
            values[key as usize % (rows * cols)] = f32::INFINITY;
            let (mut other, mut rest) = (values.clone(), residual.clone());
            shape.finish(&mut values, &mut residual, &p, &own, &q);
            let (p, own, q) = (&p, &own, &q);
            Finish { shape, values: &mut other, residual: &mut rest, p, own, q, keep: false }.run::<Plain>();
            prop_assert_eq!((values, residual), (other, rest));
        }

        #[test]
        fn sums_are_in_the_stated_order(rows in 60usize..140, cols in 1usize..40, key in any::<u64>()) {
            let shape = LowRank::new(rows, cols, 1).unwrap();
            let (m, p) = (random(rows * cols, key), random(rows, key ^ 1));
            let (none, mut q) = (vec![0.0; m.len()], vec![0.0; cols]);
            shape.right(&m, &none, &p, &mut q);
            for (col, q) in q.iter().enumerate() {
                let of = |first: usize| {
                    (first..rows.min(first + 64)).fold(0f32, |sum, row| sum + (m[row * cols + col] + 0.0) * p[row])
                };
                prop_assert_eq!(q.to_bits(), (0..rows).step_by(64).fold(0f32, |sum, first| sum + of(first)).to_bits());
            }
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
        // seen by all, whatever this rank has; and only by this one
        let (mut residual, own) = (vec![0.25; 20], random(shape.right_len(), 3));
        assert!(!shape.finish(&mut m.clone(), &mut residual, &random(8, 4), &own, &q));
        assert_eq!(residual, vec![0.25; 20]);
        let finite = random(shape.right_len(), 5);
        assert!(shape.finish(&mut m, &mut residual, &p, &own, &finite));
        assert_eq!(residual, vec![0.25; 20]);
    }

    #[test]
    fn ranks_that_make_no_sense_are_refused() {
        for (rows, cols, rank) in [(4, 4, 0), (4, 4, 1025), (0, 4, 1), (4, 0, 1)] {
            assert!(LowRank::new(rows, cols, rank).is_err_and(|error| error.message.contains("try:")));
        }
    }
}
