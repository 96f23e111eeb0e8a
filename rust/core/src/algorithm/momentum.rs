//! Gradients as the momentum that they make, and back.
//!
//! Every rank keeps the same momentum m. `Momentum` replaces a gradient g by β·m + (1 − β)·g, which changes less from round
//! to round than g does and so loses less in a coarse encoding. After the ranks have averaged that to m', `Gradient` gives
//! (m' − β·m) / (1 − β): the mean gradient, or the one that makes m' of m if something was lost on the way. So whatever
//! stands behind it, an optimizer, clipping, a scaled loss, sees a gradient, and an optimizer with this momentum ends with
//! m' itself. What m is matters to the loss only, never to the result: it may as well begin at zero.
//!
//! Where nothing but an encoded all-reduce stands between the two and a rank is alone on its host, that does both on the way
//! (`Pipeline::fuse`).

use std::ops::Range;
use std::sync::Arc;

use super::memory::{Keeper, Memory, spans};
use super::pipeline::{Round, with_floats};
use crate::bucket::{Bucket, Tensor};
use crate::{Error, Result, momentum};

/// The steps `Momentum` and `Gradient` for one bucket.
pub(super) struct Momentum {
    /// The elements of each slot, and how much of their momentum stays.
    spans: Vec<(Range<usize>, f32)>,
}

impl Momentum {
    /// Whether these are a momentum for each tensor.
    pub(super) fn check(betas: &[f32], tensors: &[Tensor]) -> Result<()> {
        if let Some(beta) = betas.iter().find(|beta| !(0.0..1.0).contains(*beta)) {
            return Err(Error::invalid(format!("a momentum with beta {beta}; try: from 0 to under 1, e.g. 0.9")));
        }
        if betas.len() != tensors.len() {
            return Err(Error::invalid(format!("{} betas for {} tensors; try: one each", betas.len(), tensors.len())));
        }
        Ok(())
    }

    pub(super) fn build(betas: &[f32], bucket: &Bucket, tensors: &[Tensor]) -> (Self, Vec<Memory>) {
        let betas = bucket.slots.iter().map(|slot| betas[slot.tensor]);
        let memory = Memory::of_elements("momentum", Keeper::All, bucket, tensors);
        (Momentum { spans: spans(bucket, tensors).into_iter().zip(betas).collect() }, vec![memory])
    }

    pub(super) fn forward(&self, round: &Round<'_>, memory: &mut Memory) {
        for (slot, (range, beta)) in self.spans.iter().enumerate() {
            with_floats(round.buffer, range.clone(), |values| {
                for (value, momentum) in values.iter_mut().zip(memory.slot(slot)) {
                    *value = momentum::made(*value, *momentum, *beta);
                }
            });
        }
    }

    pub(super) fn back(&self, round: &Round<'_>, memory: &mut Memory) {
        for (slot, (range, beta)) in self.spans.iter().enumerate() {
            with_floats(round.buffer, range.clone(), |values| momentum::settle(values, memory.slot(slot), *beta));
        }
    }

    /// How much of the momentum stays, for each slot.
    pub(super) fn betas(&self) -> Arc<[f32]> {
        self.spans.iter().map(|(_, beta)| *beta).collect()
    }
}
