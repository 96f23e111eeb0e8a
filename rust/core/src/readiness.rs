//! Which tensors of a round are ready, and which buckets are complete by that. No locks, no clocks, no threads.
//!
//! A round is one exchange of all buckets, usually one backward. In it every tensor is marked once, by whichever thread of
//! autograd has made its gradient; who marks the last tensor of a bucket learns that the bucket is complete. A tensor that
//! is marked again is noted: it gets several gradients in one backward, and its bucket must wait for the end next time.
//!
//! Before it is marked a value is moved into its bucket. Small ones are cheaper to move together, so a value first only
//! arrives, and [`Readiness::arrive`] says when those that have arrived are due to be moved and marked.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

use crate::bucket::{Plan, Tensor};

/// So many bytes that have arrived are moved in any case: they are still in the cache, and in memory twice.
const GATHERED: usize = 64 << 10;
/// A tensor counts as at least so many of them: it is more than its values.
const LEAST: usize = 512;

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
    bytes: usize,
    arrived: AtomicBool,
    /// When it was first marked in this round, counted from 1; 0 if it was not.
    turn: AtomicU32,
    again: AtomicBool,
}

struct OfBucket {
    tensors: usize,
    /// Tensors that have not arrived.
    awaited: AtomicUsize,
    /// Tensors that are not marked.
    left: AtomicUsize,
}

/// The state of a round.
#[derive(Default)]
pub struct Readiness {
    tensors: Vec<OfTensor>,
    buckets: Vec<OfBucket>,
    turns: AtomicU32,
    /// Bytes that have arrived since some were last due.
    gathered: AtomicUsize,
}

impl Readiness {
    /// Nothing is ready.
    pub fn new(plan: &Plan, tensors: &[Tensor]) -> Self {
        let tensors = plan.homes.iter().zip(tensors).map(|((bucket, _), tensor)| OfTensor {
            bucket: *bucket,
            late: plan.buckets[*bucket].late,
            bytes: tensor.count * tensor.dtype.size(),
            arrived: AtomicBool::new(false),
            turn: AtomicU32::new(0),
            again: AtomicBool::new(false),
        });
        let buckets = plan.buckets.iter().map(|bucket| {
            let tensors = bucket.slots.len();
            OfBucket { tensors, awaited: AtomicUsize::new(tensors), left: AtomicUsize::new(tensors) }
        });
        Readiness { tensors: tensors.collect(), buckets: buckets.collect(), ..Readiness::default() }
    }

    /// Notes that a tensor has a value. Says whether all that have arrived are due: with the last of a bucket, which can go
    /// out then, with one that had arrived before, or when they are many.
    pub fn arrive(&self, tensor: usize) -> bool {
        let it = &self.tensors[tensor];
        let again = it.arrived.swap(true, Ordering::Relaxed);
        let last = !again && !it.late && self.buckets[it.bucket].awaited.fetch_sub(1, Ordering::Relaxed) == 1;
        let bytes = it.bytes.max(LEAST);
        let due = again || last || self.gathered.fetch_add(bytes, Ordering::Relaxed) + bytes >= GATHERED;
        if due {
            self.gathered.store(0, Ordering::Relaxed);
        }
        due
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
            it.arrived.store(false, Ordering::Relaxed);
            it.turn.store(0, Ordering::Relaxed);
            it.again.store(false, Ordering::Relaxed);
        }
        self.gathered.store(0, Ordering::Relaxed);
        for bucket in &self.buckets {
            bucket.awaited.store(bucket.tensors, Ordering::Relaxed);
            bucket.left.store(bucket.tensors, Ordering::Relaxed);
        }
        self.turns.store(0, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bucket::{Grain, Sizes};
    use crate::buffer::Place;
    use crate::dtype::DType;

    /// Of tensors with so many elements.
    fn readiness(counts: &[usize], late: &[bool], sizes: Sizes) -> Readiness {
        let tensor = |(at, count): (usize, &usize)| Tensor {
            name: at.to_string(),
            count: *count,
            rows: 1,
            dtype: DType::F32,
            place: Place::Host,
        };
        let tensors: Vec<Tensor> = counts.iter().enumerate().map(tensor).collect();
        let order: Vec<usize> = (0..late.len()).collect();
        Readiness::new(&Plan::new(&tensors, &order, late, sizes, Grain::default()).unwrap(), &tensors)
    }

    fn small(late: &[bool]) -> Readiness {
        readiness(&vec![256; late.len()], late, Sizes { first: 2048, rest: 2048 })
    }

    #[test]
    fn those_that_have_arrived_are_due_with_the_last_of_a_bucket() {
        let readiness = small(&[false; 4]);
        for _ in 0..2 {
            assert_eq!([1, 3, 0, 2].map(|tensor| readiness.arrive(tensor)), [false, false, true, true]);
            assert!(!readiness.has_begun());
            readiness.reset();
        }
    }

    #[test]
    fn one_that_arrives_again_is_due_and_counts_once() {
        let readiness = small(&[false, false, true]);
        assert_eq!([0, 0, 2, 2, 1].map(|tensor| readiness.arrive(tensor)), [false, true, false, true, true]);
    }

    #[test]
    fn many_bytes_are_due() {
        let one = Sizes { first: 1 << 30, rest: 1 << 30 };
        let large = readiness(&[GATHERED / 4, 1, 1], &[false; 3], one);
        assert_eq!([1, 0].map(|tensor| large.arrive(tensor)), [false, true]);
        let many = GATHERED / LEAST;
        let tiny = readiness(&vec![1; 2 * many + 1], &vec![false; 2 * many + 1], one);
        let due: Vec<usize> = (0..2 * many).filter(|tensor| tiny.arrive(*tensor)).collect();
        assert_eq!(due, [many - 1, 2 * many - 1]);
    }

    #[test]
    fn the_last_tensor_completes_its_bucket() {
        let readiness = small(&[false; 4]);
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
        let readiness = small(&[false; 2]);
        readiness.mark(0);
        assert_eq!(readiness.mark(0), Marked::Again { complete: false });
        assert_eq!(readiness.mark(1), Marked::Complete(0));
        assert_eq!(readiness.mark(0), Marked::Again { complete: true });
        assert_eq!(readiness.observed(), (vec![1, 0], vec![true, false]));
    }

    #[test]
    fn late_buckets_wait_for_the_end() {
        let readiness = small(&[true, false]);
        assert_eq!(readiness.mark(0), Marked::Waiting);
        assert_eq!(readiness.mark(0), Marked::Again { complete: false });
        assert_eq!(readiness.mark(1), Marked::Complete(0));
        assert!(!readiness.is_complete(1));
        assert_eq!(readiness.late(), [0]);
        assert_eq!(readiness.mark_late(0), Marked::Complete(1));
    }

    #[test]
    fn of_many_threads_one_completes_the_bucket() {
        let readiness = small(&[false; 2]);
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
