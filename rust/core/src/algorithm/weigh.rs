//! The step `Weigh`: what a rank has is multiplied by its share of the samples.
//!
//! A rank that saw n of N samples since its last round counts as w = n·ranks/N, so that a mean over ranks is one over samples:
//! mean(w·x) = Σ n·x / N. Before `AllReduce` it does that for gradients and for weights, after `Difference` for how far
//! weights have moved. N takes a call of its own, of one number, beside the other buckets on their way.

use std::ops::Range;

use super::memory::spans;
use super::pipeline::{Round, with_floats};
use crate::bucket::{Bucket, Tensor};
use crate::buffer::{Buffer, Shaped};
use crate::call::Call;
use crate::dtype::{DType, Op};
use crate::{Error, Result};

pub(super) struct Weigh {
    spans: Vec<Range<usize>>,
}

impl Weigh {
    pub(super) fn build(bucket: &Bucket, tensors: &[Tensor]) -> Self {
        Weigh { spans: spans(bucket, tensors) }
    }

    pub(super) fn run(&self, round: &Round<'_>) -> Result<()> {
        let mut all = round.samples;
        let buffer = Buffer::host((&raw mut all).cast(), 1, DType::F64);
        let tensor = Shaped { buffer, shape: vec![1] };
        round.call(Call::AllReduce { tensor, op: Op::Sum, coding: None })?;
        let share = share(round.samples, all, round.group.ranks().len())?;
        for range in &self.spans {
            with_floats(round.buffer, range.clone(), |values| values.iter_mut().for_each(|value| *value *= share));
        }
        Ok(())
    }
}

/// How much a rank counts that saw so many of all samples; 1 where all saw as many. Every rank finds fault alike.
fn share(samples: f64, all: f64, ranks: usize) -> Result<f32> {
    if all > 0.0 && all.is_finite() {
        return Ok((samples * ranks as f64 / all) as f32);
    }
    Err(Error::invalid(format!(
        "ranks saw {all} samples in all since the last exchange, and count by these; try: saw(len(batch)) of the wrapped \
         optimizer or model, before backward(), or weighted=False"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_of_samples_and_their_mean_is_one() {
        assert_eq!([1.0, 0.0, 5.0].map(|samples| share(samples, 6.0, 3).unwrap()), [0.5, 0.0, 2.5]);
        assert_eq!(share(7.0, 28.0, 4).unwrap(), 1.0);
        for all in [0.0, f64::NAN, f64::INFINITY] {
            assert!(share(1.0, all, 2).unwrap_err().message.contains("try:"));
        }
    }
}
