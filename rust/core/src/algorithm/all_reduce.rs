//! The step `AllReduce` for one bucket: the blocks of its codec, and what that has lost.

use std::ops::Range;
use std::sync::Arc;

use super::memory::{Keeper, Memory, spans};
use super::pipeline::Round;
use crate::bucket::{Bucket, Tensor};
use crate::buffer::{Buffer, Shaped};
use crate::call::Call;
use crate::codec::Codec;
use crate::coding::{Coding, Residuals, Tally, mix};
use crate::digest::digest;
use crate::dtype::Op;
use crate::momentum::Momenta;
use crate::{Error, Result};

pub(super) struct AllReduce {
    op: Op,
    codec: Option<&'static dyn Codec>,
    seed: u64,
    /// A number for each block of the codec.
    blocks: Arc<[u64]>,
    /// The elements of each tensor: what lies between is not encoded.
    spans: Arc<[Range<usize>]>,
    /// Where gradients travel as momentum: how much of it stays, for each tensor.
    betas: Option<Arc<[f32]>>,
}

impl AllReduce {
    pub(super) fn build(
        op: Op,
        codec: Option<&'static dyn Codec>,
        feedback: bool,
        seed: u64,
        bucket: &Bucket,
        tensors: &[Tensor],
    ) -> Result<(Self, Vec<Memory>)> {
        if feedback && codec.is_none() {
            return Err(Error::invalid(
                "feedback without a codec, which would lose nothing; try: a codec, or no feedback",
            ));
        }
        let blocks = codec.map_or(Arc::from([]), |codec| numbers(bucket, tensors, codec.block()));
        let lost = |name| Memory::of_elements(name, Keeper::Carrier, bucket, tensors);
        let memories = if feedback { vec![lost("shares"), lost("results")] } else { Vec::new() };
        Ok((AllReduce { op, codec, seed, blocks, spans: spans(bucket, tensors).into(), betas: None }, memories))
    }

    /// Whether values are encoded.
    pub(super) fn is_coded(&self) -> bool {
        self.codec.is_some()
    }

    /// From now on gradients travel as momentum.
    pub(super) fn make_momentum(&mut self, betas: Arc<[f32]>) {
        self.betas = Some(betas);
    }

    /// What is asked of the group.
    pub(super) fn call(&self, buffer: Buffer, step: u64, tally: &Arc<Tally>, kept: Kept) -> Call {
        let coding = self.codec.map(|codec| Coding {
            codec,
            stream: mix(self.seed, step),
            blocks: Arc::clone(&self.blocks),
            spans: Arc::clone(&self.spans),
            residuals: kept.residuals,
            momentum: kept.momentum.zip(self.betas.clone()).map(|(values, betas)| Momenta { values, betas }),
            tally: Arc::clone(tally),
        });
        Call::AllReduce { tensor: Shaped { buffer, shape: vec![buffer.count as u64] }, op: self.op, coding }
    }

    /// Reduces the bucket. `momentum` has a number for each element, where gradients travel as that.
    pub(super) fn run(&self, round: &Round<'_>, memories: &mut [Memory], momentum: Option<&mut Memory>) -> Result<()> {
        let residuals = match memories {
            [shares, results] => {
                Some(Residuals { shares: shares.values().as_mut_ptr(), results: results.values().as_mut_ptr() })
            }
            _ => None,
        };
        let kept = Kept { residuals, momentum: momentum.map(|memory| memory.values().as_mut_ptr()) };
        round.call(self.call(round.buffer, round.step, round.tally, kept)).map(drop)
    }
}

/// Where the numbers are that a step keeps for each element.
#[derive(Default)]
pub(super) struct Kept {
    residuals: Option<Residuals>,
    momentum: Option<*mut f32>,
}

/// A number for each block of a bucket: which tensor it is of, and where in it. It does not depend on the bucket.
pub fn numbers(bucket: &Bucket, tensors: &[Tensor], block: usize) -> Arc<[u64]> {
    let mut numbers = vec![0; bucket.count.div_ceil(block)];
    for slot in &bucket.slots {
        let tensor = &tensors[slot.tensor];
        let name = digest(tensor.name.as_bytes());
        let first = slot.offset / block;
        for (index, number) in numbers[first..].iter_mut().take(tensor.count.div_ceil(block)).enumerate() {
            *number = mix(name, index as u64);
        }
    }
    numbers.into()
}
