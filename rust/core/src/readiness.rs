//! Which tensors of a round are ready, and which buckets are complete by that. No locks, no clocks, no threads.
//!
//! A round is one exchange of all buckets, usually one backward. In it every tensor is marked once, by whichever thread of
//! autograd has made its gradient; who marks the last tensor of a bucket learns that the bucket is complete. A tensor that
//! is marked again is noted: it gets several gradients in one backward, and its bucket must wait for the end next time.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

use crate::bucket::Plan;

/// What marking a tensor brought about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Marked {
    /// Its bucket still waits for others.
    Waiting,
    /// Its bucket is complete.
    Complete(usize),
    /// It had been marked before in this round; its bucket was complete already, or was not.
    Again {
        /// Whether the bucket may be on its way.
        complete: bool,
    },
}

struct OfTensor {
    bucket: usize,
    late: bool,
    /// When it was first marked in this round, counted from 1; 0 if it was not.
    turn: AtomicU32,
    again: AtomicBool,
}

struct OfBucket {
    tensors: usize,
    left: AtomicUsize,
}

/// The state of a round.
#[derive(Default)]
pub struct Readiness {
    tensors: Vec<OfTensor>,
    buckets: Vec<OfBucket>,
    turns: AtomicU32,
}

impl Readiness {
    /// Nothing is ready.
    pub fn new(plan: &Plan) -> Self {
        let tensors = plan.homes.iter().map(|(bucket, _)| OfTensor {
            bucket: *bucket,
            late: plan.buckets[*bucket].late,
            turn: AtomicU32::new(0),
            again: AtomicBool::new(false),
        });
        let buckets = plan
            .buckets
            .iter()
            .map(|bucket| OfBucket { tensors: bucket.slots.len(), left: AtomicUsize::new(bucket.slots.len()) });
        Readiness { tensors: tensors.collect(), buckets: buckets.collect(), turns: AtomicU32::new(0) }
    }

    /// Marks a tensor as ready. What the caller wrote before is visible to whoever sees its bucket complete.
    pub fn mark(&self, tensor: usize) -> Marked {
        let it = &self.tensors[tensor];
        let turn = self.turns.fetch_add(1, Ordering::Relaxed) + 1;
        if it.turn.swap(turn, Ordering::AcqRel) != 0 {
            it.again.store(true, Ordering::Relaxed);
            return Marked::Again { complete: !it.late && self.is_complete(it.bucket) };
        }
        if it.late { Marked::Waiting } else { self.count(it.bucket) }
    }

    /// Marks a tensor whose bucket waits for the end of backward, at that end.
    pub fn mark_late(&self, tensor: usize) -> Marked {
        let it = &self.tensors[tensor];
        debug_assert!(it.late, "only late tensors wait for the end");
        self.count(it.bucket)
    }

    fn count(&self, bucket: usize) -> Marked {
        match self.buckets[bucket].left.fetch_sub(1, Ordering::AcqRel) {
            1 => Marked::Complete(bucket),
            _ => Marked::Waiting,
        }
    }

    /// Whether a tensor was marked in this round.
    pub fn is_marked(&self, tensor: usize) -> bool {
        self.tensors[tensor].turn.load(Ordering::Acquire) != 0
    }

    /// Whether all tensors of a bucket are ready.
    pub fn is_complete(&self, bucket: usize) -> bool {
        self.buckets[bucket].left.load(Ordering::Acquire) == 0
    }

    /// Whether anything was marked in this round.
    pub fn has_begun(&self) -> bool {
        self.turns.load(Ordering::Acquire) > 0
    }

    /// The tensors that were not marked in this round.
    pub fn missing(&self) -> Vec<usize> {
        (0..self.tensors.len()).filter(|at| self.tensors[*at].turn.load(Ordering::Acquire) == 0).collect()
    }

    /// The tensors that wait for the end of backward.
    pub fn late(&self) -> Vec<usize> {
        (0..self.tensors.len()).filter(|at| self.tensors[*at].late).collect()
    }

    /// The order in which tensors became ready in this round (those marked again: for the last time), and which of them
    /// were marked again. Tensors that were not marked come last.
    pub fn observed(&self) -> (Vec<usize>, Vec<bool>) {
        let turn = |at: &usize| self.tensors[*at].turn.load(Ordering::Acquire);
        let mut order: Vec<usize> = (0..self.tensors.len()).collect();
        order.sort_by_key(|at| if turn(at) == 0 { u32::MAX } else { turn(at) });
        (order, self.tensors.iter().map(|it| it.late || it.again.load(Ordering::Relaxed)).collect())
    }

    /// Begins the next round. Nobody may mark meanwhile.
    pub fn reset(&self) {
        for it in &self.tensors {
            it.turn.store(0, Ordering::Relaxed);
            it.again.store(false, Ordering::Relaxed);
        }
        for bucket in &self.buckets {
            bucket.left.store(bucket.tensors, Ordering::Relaxed);
        }
        self.turns.store(0, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bucket::{Grain, Sizes, Tensor};
    use crate::buffer::Place;
    use crate::dtype::DType;

    fn plan(late: &[bool]) -> Plan {
        let tensor =
            |at: usize| Tensor { name: at.to_string(), count: 256, rows: 1, dtype: DType::F32, place: Place::Host };
        let tensors: Vec<Tensor> = (0..late.len()).map(tensor).collect();
        let order: Vec<usize> = (0..late.len()).collect();
        Plan::new(&tensors, &order, late, Sizes { first: 2048, rest: 2048 }, Grain::default()).unwrap()
    }

    #[test]
    fn the_last_tensor_completes_its_bucket() {
        let readiness = Readiness::new(&plan(&[false; 4]));
        assert_eq!(readiness.mark(1), Marked::Waiting);
        assert_eq!(readiness.mark(2), Marked::Waiting);
        assert_eq!(readiness.mark(0), Marked::Complete(0));
        assert_eq!(readiness.missing(), [3]);
        assert_eq!(readiness.mark(3), Marked::Complete(1));
        assert_eq!(readiness.observed(), (vec![1, 2, 0, 3], vec![false; 4]));
        readiness.reset();
        assert!(!readiness.has_begun() && !readiness.is_complete(0));
        assert_eq!(readiness.missing().len(), 4);
    }

    #[test]
    fn a_second_mark_is_noted_and_counts_once() {
        let readiness = Readiness::new(&plan(&[false; 2]));
        readiness.mark(0);
        assert_eq!(readiness.mark(0), Marked::Again { complete: false });
        assert_eq!(readiness.mark(1), Marked::Complete(0));
        assert_eq!(readiness.mark(0), Marked::Again { complete: true });
        assert_eq!(readiness.observed(), (vec![1, 0], vec![true, false]));
    }

    #[test]
    fn late_buckets_wait_for_the_end() {
        let readiness = Readiness::new(&plan(&[true, false]));
        assert_eq!(readiness.mark(0), Marked::Waiting);
        assert_eq!(readiness.mark(0), Marked::Again { complete: false });
        assert_eq!(readiness.mark(1), Marked::Complete(0));
        assert!(!readiness.is_complete(1));
        assert_eq!(readiness.late(), [0]);
        assert_eq!(readiness.mark_late(0), Marked::Complete(1));
    }

    #[test]
    fn of_many_threads_one_completes_the_bucket() {
        let readiness = Readiness::new(&plan(&[false; 2]));
        for _ in 0..200 {
            let mark = |tensor| readiness.mark(tensor) == Marked::Complete(0);
            let both = std::thread::scope(|scope| {
                let (a, b) = (scope.spawn(|| mark(0)), scope.spawn(|| mark(1)));
                [a.join().unwrap(), b.join().unwrap()]
            });
            assert_eq!(both.iter().filter(|completed| **completed).count(), 1);
            readiness.reset();
        }
    }
}
