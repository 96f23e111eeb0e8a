//! The buckets of a plan in memory, and what is done with each.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use offbeat_transport::shm::arena::Piece;

use super::streams::Streams;
use crate::algorithm::{Carrier, Description, Keeper, Pipeline, Saved, Storage, Stream};
use crate::bucket::{Bucket, Grain, Plan, Tensor};
use crate::buffer::{Buffer, Place, Shaped};
use crate::dtype::DType;
use crate::group::Group;
use crate::readiness::Readiness;
use crate::{Error, Result};

/// What a plan has become.
#[derive(Default)]
pub(super) struct Built {
    pub(super) plan: Plan,
    pub(super) memory: Vec<Storage>,
    pub(super) pipelines: Vec<Pipeline>,
    pub(super) readiness: Readiness,
    /// The numbers that tell which tensors are used, where they are not in the buckets, and one more: whether anything was
    /// not finite. Rounds take turns with two of them: what was sent in the last one may be under way in this.
    apart: Option<[Piece; 2]>,
    turn: AtomicUsize,
    /// Where streams stand, where buckets are on a device.
    pub(super) streams: Option<Streams>,
    /// When each bucket became complete, for the trace.
    pub(super) ready: Vec<AtomicU64>,
}

impl Built {
    /// Allocates the buckets of a plan and builds what is done with each.
    pub(super) fn new(
        plan: Plan,
        tensors: &[Tensor],
        description: &Description,
        group: &Group,
        carrier: Option<&dyn Carrier>,
    ) -> Result<Self> {
        let readiness = Readiness::new(&plan, tensors);
        let arena = group.mesh().arena();
        let ready = plan.buckets.iter().map(|_| AtomicU64::new(0)).collect();
        let streams = carrier.map(|_| Streams::new(plan.buckets.len()));
        let mut built = Built { plan, readiness, ready, streams, ..Built::default() };
        for bucket in &built.plan.buckets {
            // padding must be zero for ever, and sums of anything else slow
            let memory = match (bucket.place, carrier) {
                (Place::Host, None) => {
                    let piece = arena.allocate(bucket.bytes().max(1))?;
                    // SAFETY: the piece is fresh and as long as it says.
                    unsafe { std::ptr::write_bytes(piece.start(), 0, piece.len()) };
                    Storage::Shared(Arc::new(piece))
                }
                (Place::Host, Some(_)) | (_, None) => return Err(nobody(bucket)),
                (_, Some(carrier)) => Storage::Lent(carrier.allocate(bucket)?),
            };
            built.pipelines.push(Pipeline::build(description, bucket, tensors, &memory, group, carrier)?);
            built.memory.push(memory);
        }
        if !grain(description, tensors).used_inside {
            let allocate = || {
                let piece = arena.allocate(tensors.len() + 1)?;
                // SAFETY: the piece is fresh and as long as it says.
                unsafe { std::ptr::write_bytes(piece.start(), 0, piece.len()) };
                Ok(piece)
            };
            built.apart = Some([allocate()?, allocate()?]);
        }
        Ok(built)
    }

    /// Lets anchors and copies begin with the weights in the buckets; on a device after the stream that wrote them, which
    /// waits before it writes others there.
    pub(super) fn begin(&self, carrier: Option<&dyn Carrier>, stream: Stream) -> Result<()> {
        let after: Vec<_> = carrier.map(|carrier| carrier.mark(stream)).transpose()?.into_iter().collect();
        for (bucket, pipeline) in self.pipelines.iter().enumerate() {
            let end = pipeline.begin(self.buffer(bucket), &after)?;
            if let (Some(carrier), Some(end)) = (carrier, end) {
                carrier.wait(stream, &*end)?;
            }
        }
        Ok(())
    }

    /// Whether a bucket may go out: all its tensors are there, and it is known what it has to wait for.
    pub(super) fn may_go(&self, bucket: usize) -> bool {
        match &self.streams {
            None => self.readiness.is_complete(bucket),
            Some(streams) => streams.is_marked(bucket),
        }
    }

    /// Begins the next round.
    pub(super) fn reset(&self) {
        self.readiness.reset();
        self.streams.iter().for_each(Streams::reset);
    }

    /// Lets the next round write elsewhere which tensors are used.
    pub(super) fn turn(&self) {
        self.turn.fetch_xor(1, Ordering::Relaxed);
    }

    fn now(&self) -> Option<&Piece> {
        self.apart.as_ref().map(|both| &both[self.turn.load(Ordering::Relaxed)])
    }

    /// A bucket's memory.
    pub(super) fn buffer(&self, bucket: usize) -> Buffer {
        let Bucket { dtype, count, place, .. } = self.plan.buckets[bucket];
        Buffer { place, ..Buffer::host(self.memory[bucket].start(), count, dtype) }
    }

    /// Where the number is that tells whether a tensor is used, and its type.
    pub(super) fn used(&self, tensor: usize) -> (*mut u8, DType) {
        let (bucket, slot) = self.plan.homes[tensor];
        match self.now() {
            Some(apart) => (apart.start().wrapping_add(tensor), DType::U8),
            None => {
                let Bucket { used, dtype, .. } = self.plan.buckets[bucket];
                (self.buffer(bucket).at(used + slot), dtype)
            }
        }
    }

    /// What travels beside the buckets at the end of a round, if anything: which tensors are used, and whether anything was
    /// not finite here.
    pub(super) fn apart(&self, non_finite: bool) -> Option<Shaped> {
        let (apart, count) = (self.now()?, self.plan.homes.len() + 1);
        // SAFETY: the last of `count` bytes; nothing is under way.
        unsafe { apart.start().add(count - 1).write(u8::from(non_finite)) };
        Some(Shaped { buffer: Buffer::host(apart.start(), count, DType::U8), shape: vec![count as u64] })
    }

    /// Whether anything was not finite on any rank, when what [`Built::apart`] gave has been reduced.
    pub(super) fn non_finite(&self) -> bool {
        self.says_non_finite(self.turn.load(Ordering::Relaxed))
    }

    /// The same of the round before.
    pub(super) fn was_non_finite(&self) -> bool {
        self.says_non_finite(1 - self.turn.load(Ordering::Relaxed))
    }

    fn says_non_finite(&self, turn: usize) -> bool {
        let Some(apart) = self.apart.as_ref().map(|both| &both[turn]) else { return false };
        // SAFETY: as above.
        unsafe { apart.start().add(self.plan.homes.len()).read() != 0 }
    }

    /// The elements of a tensor in its bucket.
    pub(super) fn place_of(&self, tensor: usize, count: usize) -> (usize, Range<usize>) {
        let (bucket, slot) = self.plan.homes[tensor];
        let first = self.plan.buckets[bucket].slots[slot].offset;
        (bucket, first..first + count)
    }

    /// What steps keep of a tensor.
    pub(super) fn saved(&self, tensor: usize) -> Result<Vec<Saved>> {
        let (bucket, slot) = self.plan.homes[tensor];
        self.pipelines[bucket].saved(slot)
    }

    /// Takes over what steps have kept of a tensor, here or in an earlier run.
    pub(super) fn restore(&self, tensor: usize, name: &str, values: &[f32], tensors: &[Tensor]) -> Result<()> {
        let (bucket, slot) = self.plan.homes[tensor];
        let wrong = |wanted: usize| {
            Error::invalid(format!(
                "{name} of {} has {} numbers and not {wanted}; try: the checkpoint of this very model and algorithm",
                tensors[tensor].name,
                values.len()
            ))
        };
        self.pipelines[bucket].restore(slot, name, values, &wrong)
    }

    /// What steps keep of all tensors and must not be lost when buckets change.
    pub(super) fn movable(&self) -> Result<Vec<(usize, Saved)>> {
        let mut all = Vec::new();
        for tensor in 0..self.plan.homes.len() {
            let moves = self.saved(tensor)?.into_iter().filter(|saved| saved.keeper != Keeper::Carrier);
            all.extend(moves.map(|saved| (tensor, saved)));
        }
        Ok(all)
    }
}

/// How buckets of some tensors must be made. Nobody writes single numbers into the memory of a device, or reads them there.
pub(super) fn grain(description: &Description, tensors: &[Tensor]) -> Grain {
    let grain = description.grain();
    let at_hand = tensors.iter().all(|tensor| tensor.place == Place::Host);
    Grain { used_inside: grain.used_inside && at_hand, ..grain }
}

fn nobody(bucket: &Bucket) -> Error {
    Error::unsupported(format!(
        "a bucket on {:?} in a model whose others are elsewhere; try: all parameters of a rank on one device",
        bucket.place
    ))
}
