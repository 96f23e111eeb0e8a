//! Weights as how far they have moved, and back.
//!
//! Every rank keeps the same anchor θ: the weights that all had after the last round. `Difference` replaces weights x by
//! θ − x, which a codec can encode finely, because it is small and centred, and whose mean is what an optimizer would call a
//! gradient. After the ranks have averaged it to d, `Outer` makes a step of SGD with Nesterov's momentum with it:
//!
//! v = μ·v + d, θ = θ − η·(d + μ·v)
//!
//! and gives the new θ as everybody's weights. With η = 1 and μ = 0 that is the mean of the weights. Anchor and momentum are
//! kept in f32, whatever the type of the weights. Where d is not finite both stay as they were.

use std::ops::Range;

use super::memory::{Keeper, Memory, spans};
use super::pipeline::{Round, with_floats};
use crate::bucket::{Bucket, Tensor};
use crate::{Error, Result};

/// The step `Difference` for one bucket.
pub(super) struct Difference {
    spans: Vec<Range<usize>>,
}

impl Difference {
    pub(super) fn build(bucket: &Bucket, tensors: &[Tensor]) -> (Self, Vec<Memory>) {
        let anchor = Memory::of_elements("anchor", Keeper::All, bucket, tensors);
        (Difference { spans: spans(bucket, tensors) }, vec![anchor])
    }

    pub(super) fn run(&self, round: &Round<'_>, anchor: &mut Memory) {
        for (slot, range) in self.spans.iter().enumerate() {
            with_floats(round.buffer, range.clone(), |values| {
                for (value, anchor) in values.iter_mut().zip(anchor.slot(slot)) {
                    *value = *anchor - *value;
                }
            });
        }
    }
}

/// The step `Outer` for one bucket.
pub(super) struct Outer {
    spans: Vec<Range<usize>>,
    lr: f32,
    momentum: f32,
}

impl Outer {
    /// Whether these make a step that converges.
    pub(super) fn check(lr: f64, momentum: f64) -> Result<()> {
        if !(lr.is_finite() && lr > 0.0) {
            return Err(Error::invalid(format!("an outer learning rate of {lr}; try: 0.7, or 1 for the plain mean")));
        }
        if !(0.0..1.0).contains(&momentum) {
            return Err(Error::invalid(format!("an outer momentum of {momentum}; try: from 0 to under 1, e.g. 0.9")));
        }
        Ok(())
    }

    pub(super) fn build(lr: f64, momentum: f64, bucket: &Bucket, tensors: &[Tensor]) -> (Self, Vec<Memory>) {
        let memories = match momentum > 0.0 {
            true => vec![Memory::of_elements("momentum", Keeper::All, bucket, tensors)],
            false => Vec::new(),
        };
        (Outer { spans: spans(bucket, tensors), lr: lr as f32, momentum: momentum as f32 }, memories)
    }

    pub(super) fn run(&self, round: &Round<'_>, anchor: &mut Memory, memories: &mut [Memory]) {
        let Outer { lr, momentum, .. } = *self;
        let mut bad = 0;
        for (slot, range) in self.spans.iter().enumerate() {
            with_floats(round.buffer, range.clone(), |values| {
                let mut moving = memories.first_mut().map(|memory| memory.slot(slot).iter_mut());
                for (value, anchor) in values.iter_mut().zip(anchor.slot(slot)) {
                    let moved = *value;
                    let speed = moving.as_mut().and_then(Iterator::next);
                    if !moved.is_finite() {
                        bad += 1;
                        continue;
                    }
                    let mut step = moved;
                    if let Some(speed) = speed {
                        *speed = momentum * *speed + moved;
                        step += momentum * *speed;
                    }
                    *anchor -= lr * step;
                    *value = *anchor;
                }
            });
        }
        round.tally.add(0, 0, bad);
    }
}
