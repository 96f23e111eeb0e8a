//! The step `LowRank`: the mean over all ranks, of matrices as two thin factors (PowerSGD).
//!
//! With M what a rank has of a matrix and of what was left, and Q as it was after the round before:
//!
//! 1. P = M·Q, summed over all ranks, its columns made orthonormal.
//! 2. Q = Mᵀ·P, averaged over all ranks; the result is P·Qᵀ.
//! 3. What is left is M − P·Qᵀ with this rank's own Q. Its mean over ranks is what the result lacks, and it does not grow by
//!    what ranks differ in.
//!
//! Tensors that are no matrices, or too small for it to pay, travel whole and beside P. That makes two calls for a bucket,
//! of rank·(rows + cols) numbers for each matrix.

use std::ops::Range;

use super::memory::{Keeper, Memory};
use super::pipeline::{Round, read_floats, with_floats};
use super::select::LEFT;
use crate::bucket::{Bucket, Slot, Tensor};
use crate::buffer::{Buffer, Shaped};
use crate::call::Call;
use crate::codec;
use crate::coding::{SAMPLE, mix};
use crate::digest::digest;
use crate::dtype::{DType, Op};
use crate::{Error, Result};

/// The Q of each matrix is called this.
pub const FACTOR: &str = "factor";

pub(super) struct LowRank {
    parts: Vec<Part>,
}

/// A slot, and what becomes of it.
#[derive(Clone, Debug)]
pub struct Part {
    /// Its elements.
    pub range: Range<usize>,
    /// From which its Q begins.
    pub key: u64,
    /// Its factors; none if it travels whole.
    pub shape: Option<codec::LowRank>,
}

impl Part {
    /// How many numbers of what is left are kept of it.
    pub fn left_len(&self) -> usize {
        self.shape.map_or(0, |_| self.range.len())
    }

    /// How much of the first call is its.
    pub fn first_len(&self) -> usize {
        self.shape.map_or(self.range.len(), |shape| shape.left_len())
    }

    /// How much of the second call is its: its Q.
    pub fn second_len(&self) -> usize {
        self.shape.map_or(0, |shape| shape.right_len())
    }
}

/// What becomes of each slot of a bucket.
pub fn factoring(rank: usize, rate: f64, seed: u64, bucket: &Bucket, tensors: &[Tensor]) -> Result<Vec<Part>> {
    // says what is wrong with the rank, whatever the tensors
    codec::LowRank::new(1, 1, rank)?;
    if !(0.0..=1e6).contains(&rate) {
        return Err(Error::invalid(format!("a least rate of compression of {rate}; try: 2, or 0 for all matrices")));
    }
    let part = |slot: &Slot| {
        let tensor = &tensors[slot.tensor];
        let range = slot.offset..slot.offset + tensor.count;
        Ok(Part { range, key: mix(seed, digest(tensor.name.as_bytes())), shape: factors(tensor, rank, rate)? })
    };
    bucket.slots.iter().map(part).collect()
}

/// The factors of a tensor, if it is a matrix and they are at least `rate` times smaller.
fn factors(tensor: &Tensor, rank: usize, rate: f64) -> Result<Option<codec::LowRank>> {
    let (rows, cols) = (tensor.rows, tensor.count / tensor.rows.max(1));
    if rows <= 1 || cols <= 1 {
        return Ok(None);
    }
    let rank = rank.min(rows).min(cols);
    let pays = (rank * (rows + cols)) as f64 * rate < (rows * cols) as f64;
    pays.then(|| codec::LowRank::new(rows, cols, rank)).transpose()
}

impl LowRank {
    pub(super) fn build(
        rank: usize,
        rate: f64,
        seed: u64,
        bucket: &Bucket,
        tensors: &[Tensor],
    ) -> Result<(Self, Vec<Memory>)> {
        let parts = factoring(rank, rate, seed, bucket, tensors)?;
        let memories = vec![
            Memory::of_slots(LEFT, Keeper::Each, parts.iter().map(Part::left_len)),
            Memory::of_slots(FACTOR, Keeper::All, parts.iter().map(Part::second_len)),
        ];
        Ok((LowRank { parts }, memories))
    }

    pub(super) fn run(&self, round: &Round<'_>, memories: &mut [Memory]) -> Result<()> {
        let [left, factor] = memories else { return Ok(()) };
        let mut first = vec![0f32; self.parts.iter().map(Part::first_len).sum()];
        let mut second = vec![0f32; self.parts.iter().map(Part::second_len).sum()];
        round.tally.time(|| self.project(round, left, factor, &mut first));
        mean(round, &mut first)?;
        round.tally.time(|| self.project_back(round, left, &mut first, &mut second));
        let own = second.clone();
        mean(round, &mut second)?;
        round.tally.time(|| self.finish(round, &first, (&own, &second), left, factor));
        Ok(())
    }

    /// P = M·Q for matrices, and all else as it is.
    fn project(&self, round: &Round<'_>, left: &mut Memory, factor: &mut Memory, first: &mut [f32]) {
        let mut rest = first;
        for (slot, part) in self.parts.iter().enumerate() {
            let (p, after) = std::mem::take(&mut rest).split_at_mut(part.first_len());
            rest = after;
            read_floats(round.buffer, part.range.clone(), |values| match part.shape {
                None => p.copy_from_slice(values),
                Some(shape) => {
                    let q = factor.slot(slot);
                    if q.iter().all(|value| *value == 0.0) {
                        shape.start(part.key, q);
                    }
                    shape.left(values, left.slot(slot), q, p);
                }
            });
        }
    }

    /// Makes P orthonormal, and Q = Mᵀ·P.
    fn project_back(&self, round: &Round<'_>, left: &mut Memory, first: &mut [f32], second: &mut [f32]) {
        let (mut rest, mut room) = (first, second);
        for (slot, part) in self.parts.iter().enumerate() {
            let (p, after) = std::mem::take(&mut rest).split_at_mut(part.first_len());
            let (q, later) = std::mem::take(&mut room).split_at_mut(part.second_len());
            (rest, room) = (after, later);
            if let Some(shape) = part.shape {
                shape.orthonormalise(p);
                read_floats(round.buffer, part.range.clone(), |values| shape.right(values, left.slot(slot), p, q));
            }
        }
    }

    /// The bucket becomes P·Qᵀ, or the mean; what is left of M and the new Q are kept if they are finite.
    fn finish(
        &self,
        round: &Round<'_>,
        first: &[f32],
        (own, everyones): (&[f32], &[f32]),
        left: &mut Memory,
        factor: &mut Memory,
    ) {
        let (mut p_at, mut q_at) = (0, 0);
        for (slot, part) in self.parts.iter().enumerate() {
            let (first_len, second_len) = (part.first_len(), part.second_len());
            let p = &first[p_at..p_at + first_len];
            let (own, q) = (&own[q_at..q_at + second_len], &everyones[q_at..q_at + second_len]);
            (p_at, q_at) = (p_at + first_len, q_at + second_len);
            with_floats(round.buffer, part.range.clone(), |values| match part.shape {
                None => {
                    values.copy_from_slice(p);
                    let (bytes, bad) = (size_of_val(p) as u64, p.iter().filter(|value| !value.is_finite()).count());
                    round.tally.add(bytes, bytes, bad as u64);
                }
                Some(shape) => {
                    let left = left.slot(slot);
                    let sums = values.iter().zip(&*left).take(SAMPLE).map(|(value, left)| value + left);
                    let exact: Vec<f32> = sums.collect();
                    let finite = shape.finish(values, left, p, own, q);
                    if finite {
                        factor.slot(slot).copy_from_slice(q);
                    }
                    round.tally.sample(exact.into_iter().zip(left.iter().copied()));
                    let sent = (first_len + second_len) * size_of::<f32>();
                    round.tally.add(part.range.len() as u64 * 4, sent as u64, u64::from(!finite));
                }
            });
        }
    }
}

fn mean(round: &Round<'_>, values: &mut [f32]) -> Result<()> {
    let buffer = Buffer::host(values.as_mut_ptr().cast(), values.len(), DType::F32);
    let tensor = Shaped { buffer, shape: vec![values.len() as u64] };
    round.call(Call::AllReduce { tensor, op: Op::Mean, coding: None }).map(drop)
}
