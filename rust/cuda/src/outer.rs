//! The steps `Difference` and `Outer` on a device: one kernel each, on one anchor.

use std::ops::Range;
use std::sync::Arc;

use offbeat_core::Result;
use offbeat_core::buffer::Buffer;

use crate::collective::{Group, Table};
use crate::kernels::Pace;
use crate::memory::Piece;
use crate::plan::tiles;
use crate::stream::Address;

/// The step `Difference` for one bucket.
pub struct Difference {
    /// The weights that all ranks had after the last round.
    pub(crate) anchor: Piece,
    all: Table,
}

impl Difference {
    /// Builds it for tensors at these places of a bucket.
    pub fn build(group: &Group, count: usize, spans: &[Range<usize>]) -> Result<Self> {
        Ok(Difference { anchor: group.zeros(count)?, all: group.upload_tiles(&tiles(spans))? })
    }

    /// Enqueues it: weights become how far they are from the anchor.
    ///
    /// # Safety
    /// The bucket stays until the group's stream has come past this.
    pub unsafe fn run(&self, group: &Group, buffer: Buffer) -> Result<()> {
        let values = (buffer.start as Address, buffer.dtype);
        // SAFETY: the caller's promise; the tiles are of the bucket, and the anchor is as long.
        unsafe { group.kernels.difference(&group.stream, values, self.anchor.address(), self.all.tiles) }
    }

    /// Enqueues that the anchor becomes the weights of now.
    ///
    /// # Safety
    /// As for [`Difference::run`].
    pub unsafe fn begin(&self, group: &Group, buffer: Buffer) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { group.take(buffer, &self.all, &self.anchor) }
    }
}

/// The step `Outer` for one bucket.
pub struct Outer {
    begun: Arc<Difference>,
    /// None where nothing of it stays.
    pub(crate) speed: Option<Piece>,
    lr: f32,
    momentum: f32,
}

impl Outer {
    /// Builds it for a bucket of so many elements, as the end of what has begun.
    pub fn build(group: &Group, count: usize, begun: &Arc<Difference>, lr: f64, momentum: f64) -> Result<Self> {
        let speed = if momentum > 0.0 { Some(group.zeros(count)?) } else { None };
        Ok(Outer { begun: Arc::clone(begun), speed, lr: lr as f32, momentum: momentum as f32 })
    }

    /// Enqueues it: differences, averaged, move the anchor, and become it. `odd` counts those that are not finite.
    ///
    /// # Safety
    /// As for [`Difference::run`]; `odd` is an address, or 0.
    pub unsafe fn run(&self, group: &Group, buffer: Buffer, odd: Address) -> Result<()> {
        let Difference { anchor, all } = &*self.begun;
        let values = (buffer.start as Address, buffer.dtype);
        let speed = self.speed.as_ref().map_or(0, Piece::address);
        let pace = Pace { lr: self.lr, momentum: self.momentum };
        // SAFETY: as above.
        unsafe { group.kernels.outer(&group.stream, values, (anchor.address(), speed), pace, all.tiles, odd) }
    }
}
