//! Columns made orthonormal: modified Gram–Schmidt, twice over, with sums in f64.
//!
//! A sum takes 1024 numbers at a time: they go to 32 lanes in turn, a lane adds its own in order, then the upper half of the
//! lanes is added to the lower one until one is left. The sums of these are added in order. A GPU does that with a warp for
//! each 1024.

use super::lanes::{Lanes, Loop};

/// Numbers whose products are summed by themselves, and in how many lanes.
const TILE: usize = 1024;
const LANES: usize = 32;
/// A column of which orthogonalising leaves less than this share counts as a sum of those before it.
const DEPENDENT: f64 = 1e-5;

/// Columns of a length, one after the other.
pub(super) struct Orthonormal<'a> {
    pub(super) rows: usize,
    pub(super) p: &'a mut [f32],
}

impl Loop for Orthonormal<'_> {
    // written for any registers, and compiled for some
    #[inline(always)]
    fn run<V: Lanes>(self) {
        let Orthonormal { rows, p } = self;
        for column in 0..p.len() / rows {
            let (done, rest) = p.split_at_mut(column * rows);
            let current = &mut rest[..rows];
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
#[inline(always)]
fn sweep(done: &[f32], current: &mut [f32]) {
    for _ in 0..2 {
        for other in done.chunks_exact(current.len()) {
            let share = dot(other, current) as f32;
            current.iter_mut().zip(other).for_each(|(value, other)| *value -= share * other);
        }
    }
}

#[inline(always)]
fn divide(current: &mut [f32], by: f64) {
    current.iter_mut().for_each(|value| *value = (f64::from(*value) / by) as f32);
}

/// A unit vector that the columns before do not make up. Of all of them together these miss `rows − column` in squares, so
/// one misses at least the mean.
#[cold]
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

#[inline(always)]
pub(super) fn dot(a: &[f32], b: &[f32]) -> f64 {
    let mut sum = 0.0;
    for (a, b) in a.chunks(TILE).zip(b.chunks(TILE)) {
        let mut lanes = [0f64; LANES];
        let ((whole, last), (others, rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
        for (a, b) in whole.iter().zip(others) {
            for ((lane, a), b) in lanes.iter_mut().zip(a).zip(b) {
                *lane += f64::from(*a) * f64::from(*b);
            }
        }
        for ((lane, a), b) in lanes.iter_mut().zip(last).zip(rest) {
            *lane += f64::from(*a) * f64::from(*b);
        }
        for half in [16, 8, 4, 2, 1] {
            let (lower, upper) = lanes.split_at_mut(half);
            lower.iter_mut().zip(upper).for_each(|(lower, upper)| *lower += *upper);
        }
        sum += lanes[0];
    }
    sum
}
