//! Where the caller's streams stand, for buckets on a device: what a bucket has to wait for, and who waits for it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::Result;
use crate::algorithm::{Carrier, Stream};
use crate::event::Event;

#[derive(Default)]
struct OfBucket {
    /// The streams that have written to it in this round.
    writers: Vec<Stream>,
    /// How far each of them must have come; none before it is complete.
    after: Vec<Arc<dyn Event>>,
    /// The end of its exchange.
    end: Option<Arc<dyn Event>>,
}

/// One for each bucket.
pub(super) struct Streams(Vec<Mutex<OfBucket>>);

impl Streams {
    pub(super) fn new(buckets: usize) -> Self {
        Streams((0..buckets).map(|_| Mutex::default()).collect())
    }

    fn of(&self, bucket: usize) -> MutexGuard<'_, OfBucket> {
        self.0[bucket].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes who has written to a bucket, before that counts.
    pub(super) fn note(&self, bucket: usize, stream: Stream) {
        let mut it = self.of(bucket);
        if !it.writers.contains(&stream) {
            it.writers.push(stream);
        }
    }

    /// Marks the writers of a bucket that is complete.
    pub(super) fn mark(&self, bucket: usize, carrier: &dyn Carrier) -> Result<()> {
        let mut it = self.of(bucket);
        it.after = it.writers.iter().map(|stream| carrier.mark(*stream)).collect::<Result<_>>()?;
        Ok(())
    }

    pub(super) fn is_marked(&self, bucket: usize) -> bool {
        !self.of(bucket).after.is_empty()
    }

    /// What a bucket has to wait for.
    pub(super) fn after(&self, bucket: usize) -> Vec<Arc<dyn Event>> {
        self.of(bucket).after.clone()
    }

    /// Notes the end of a bucket's exchange.
    pub(super) fn end(&self, bucket: usize, event: Arc<dyn Event>) {
        self.of(bucket).end = Some(event);
    }

    /// Lets a stream wait for all buckets.
    pub(super) fn join(&self, stream: Stream, carrier: &dyn Carrier) -> Result<()> {
        // all ends are on one stream of the carrier's, in this order: the last one is the end of all
        match self.0.len().checked_sub(1).and_then(|last| self.of(last).end.clone()) {
            Some(end) => carrier.wait(stream, &*end),
            None => Ok(()),
        }
    }

    pub(super) fn reset(&self) {
        (0..self.0.len()).for_each(|bucket| *self.of(bucket) = OfBucket::default());
    }
}
