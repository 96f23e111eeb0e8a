//! The communication threads of a scheduler: each takes the buckets of its lane in the agreed order, and runs their pipelines.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use offbeat_transport::trace::{self, Span, What};

use super::Shared;
use super::built::Built;
use crate::algorithm::Round;
use crate::event::guarded;
use crate::group::Terms;
use crate::{Error, Result};

impl Shared {
    /// A communication thread: one bucket of its lane after another, until the scheduler is dropped.
    pub(super) fn serve(&self, lane: usize) {
        while let Some((built, bucket, step)) = self.next(lane) {
            let began = trace::now();
            let result = self.exchange(&built, lane, bucket, step);
            let (ended, bytes) = (trace::now(), built.plan.buckets[bucket].bytes() as u64);
            self.communication.fetch_add(ended - began, Ordering::Relaxed);
            let number = bucket as u32;
            let ready = built.ready[bucket].load(Ordering::Relaxed);
            self.record(What::Queued { bucket: number }, step, ready, began, bytes);
            self.record(What::Reduce { bucket: number }, step, began, ended, bytes);
            // dropped before the others are told: a rebuild must find the memory free
            drop(built);
            let mut state = self.state();
            match result {
                Ok(()) => state.done[lane] += 1,
                Err(error) if state.failed.is_none() => {
                    state.failed = Some(error.clone());
                    drop(state);
                    // the other lanes of this and all ranks wait for buckets that will never come
                    self.abandon(&error);
                }
                Err(_) => {}
            }
            self.bell.notify_all();
        }
    }

    /// Waits for the next bucket of a lane in the agreed order to be complete.
    fn next(&self, lane: usize) -> Option<(Arc<Built>, usize, u64)> {
        let mut state = self.state();
        loop {
            if state.stop {
                return None;
            }
            if !state.held && state.failed.is_none() {
                let (built, bucket) = (self.built(), state.done[lane] * self.lanes.len() + lane);
                if bucket < built.plan.buckets.len() && built.may_go(bucket) {
                    return Some((built, bucket, state.step));
                }
            }
            state = self.bell.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    pub(super) fn record(&self, what: What, step: u64, begin: u64, end: u64, bytes: u64) {
        self.mesh().trace().record(Span { what, model: self.model, step, begin, end, bytes });
    }

    fn exchange(&self, built: &Built, lane: usize, bucket: usize, step: u64) -> Result<()> {
        let purpose = || self.label(&built.plan, bucket, step);
        let terms = Terms { interrupt: None, limit: None, purpose: Some(&purpose) };
        let (buffer, group) = (built.buffer(bucket), &self.lanes[lane]);
        let ran = |begin, end| self.record(What::Python { bucket: bucket as u32 }, step, begin, end, 0);
        let after = built.streams.as_ref().map_or(Vec::new(), |streams| streams.after(bucket));
        let (samples, tally) = (self.state().samples, &self.tally);
        let round = Round { buffer, group, terms: &terms, after: &after, step, samples, tally, ran: &ran };
        let result = guarded(|| built.pipelines[bucket].run(&round));
        let result = result.map(|end| {
            if let (Some(streams), Some(end)) = (&built.streams, end) {
                streams.end(bucket, end);
            }
        });
        result.map_err(|error| match error.message.contains("bucket") {
            true => error,
            false => Error { message: format!("{} (while this rank was in {})", error.message, purpose()), ..error },
        })
    }
}
