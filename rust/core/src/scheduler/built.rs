//! The buckets of a plan in memory, and what is done with each.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use offbeat_transport::shm::arena::Piece;

use crate::algorithm::{Description, Keeper, Pipeline, Saved};
use crate::bucket::{Bucket, Plan, Tensor};
use crate::buffer::{Buffer, Shaped};
use crate::dtype::DType;
use crate::group::Group;
use crate::readiness::Readiness;
use crate::{Error, Result};

/// What a plan has become.
#[derive(Default)]
pub(super) struct Built {
    pub(super) plan: Plan,
    pub(super) memory: Vec<Arc<Piece>>,
    pub(super) pipelines: Vec<Pipeline>,
    pub(super) readiness: Readiness,
    /// The numbers that tell which tensors are used, where they are not in the buckets, and one more: whether anything was
    /// not finite.
    apart: Option<Piece>,
    /// When each bucket became complete, for the trace.
    pub(super) ready: Vec<AtomicU64>,
}

impl Built {
    /// Allocates the buckets of a plan and builds what is done with each.
    pub(super) fn new(plan: Plan, tensors: &[Tensor], description: &Description, group: &Group) -> Result<Self> {
        let readiness = Readiness::new(&plan, tensors);
        let arena = group.mesh().arena();
        let ready = plan.buckets.iter().map(|_| AtomicU64::new(0)).collect();
        let mut built = Built { plan, readiness, ready, ..Built::default() };
        for bucket in &built.plan.buckets {
            let piece = arena.allocate(bucket.bytes().max(1))?;
            // SAFETY: the piece is fresh and as long as it says. Padding must be zero for ever, and sums of anything else slow.
            unsafe { std::ptr::write_bytes(piece.start(), 0, piece.len()) };
            let piece = Arc::new(piece);
            built.pipelines.push(Pipeline::build(description, bucket, tensors, &piece, group)?);
            built.memory.push(piece);
        }
        if !description.grain().used_inside {
            built.apart = Some(arena.allocate(tensors.len() + 1)?);
        }
        Ok(built)
    }

    /// A bucket's memory.
    pub(super) fn buffer(&self, bucket: usize) -> Buffer {
        let Bucket { dtype, count, place, .. } = self.plan.buckets[bucket];
        Buffer { place, ..Buffer::host(self.memory[bucket].start(), count, dtype) }
    }

    /// Where the number is that tells whether a tensor is used, and its type.
    pub(super) fn used(&self, tensor: usize) -> (*mut u8, DType) {
        let (bucket, slot) = self.plan.homes[tensor];
        match &self.apart {
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
        let (apart, count) = (self.apart.as_ref()?, self.plan.homes.len() + 1);
        // SAFETY: the last of `count` bytes; nothing is under way.
        unsafe { apart.start().add(count - 1).write(u8::from(non_finite)) };
        Some(Shaped { buffer: Buffer::host(apart.start(), count, DType::U8), shape: vec![count as u64] })
    }

    /// Whether anything was not finite on any rank, when what [`Built::apart`] gave has been reduced.
    pub(super) fn non_finite(&self) -> bool {
        let Some(apart) = &self.apart else { return false };
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
    pub(super) fn saved(&self, tensor: usize) -> Vec<Saved> {
        let (bucket, slot) = self.plan.homes[tensor];
        self.pipelines[bucket].saved(slot)
    }

    /// Takes over what steps have kept of a tensor, here or in an earlier run.
    pub(super) fn restore(&self, tensor: usize, name: &str, values: &[f32], tensors: &[Tensor]) -> Result<()> {
        let (bucket, slot) = self.plan.homes[tensor];
        self.pipelines[bucket].restore(slot, name, values).map_err(|wanted| {
            Error::invalid(format!(
                "{name} of {} has {} numbers and not {wanted}; try: the checkpoint of this very model and algorithm",
                tensors[tensor].name,
                values.len()
            ))
        })
    }

    /// What steps keep of all tensors and must not be lost when buckets change.
    pub(super) fn movable(&self) -> Vec<(usize, Saved)> {
        let of = |tensor| self.saved(tensor).into_iter().map(move |saved| (tensor, saved));
        let all = (0..self.plan.homes.len()).flat_map(of);
        all.filter(|(_, saved)| saved.keeper != Keeper::Carrier).collect()
    }
}
