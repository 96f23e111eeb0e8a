//! The steps `Momentum` and `Gradient` on a device: one kernel each.

use std::ops::Range;

use offbeat_core::Result;
use offbeat_core::buffer::Buffer;

use crate::collective::{Group, Table};
use crate::kernels::Way;
use crate::memory::Piece;
use crate::plan::tiles;
use crate::stream::Address;

/// Both steps for one bucket.
pub struct Momentum {
    /// The momentum that all ranks have alike.
    pub(crate) kept: Piece,
    /// How much of it stays, for each tensor of the bucket.
    betas: Piece,
    all: Table,
}

impl Momentum {
    /// Builds them for tensors at these places of a bucket, each with a beta of its own.
    pub fn build(group: &Group, count: usize, spans: &[Range<usize>], betas: &[f32]) -> Result<Self> {
        let betas: Vec<u8> = betas.iter().flat_map(|beta| beta.to_le_bytes()).collect();
        let all = group.upload_tiles(&tiles(spans))?;
        Ok(Momentum { kept: group.zeros(count)?, betas: group.upload(&betas)?, all })
    }

    /// Enqueues one of the steps. On the way back, what the ranks have averaged is the momentum from now on.
    ///
    /// # Safety
    /// The bucket stays until the group's stream has come past this.
    pub unsafe fn run(&self, group: &Group, buffer: Buffer, way: Way) -> Result<()> {
        let (values, tables) = ((buffer.start as Address, buffer.dtype), (self.kept.address(), self.betas.address()));
        // SAFETY: the caller's promise; the tiles are of the bucket, and a number is kept for each of its elements.
        unsafe { group.kernels.momentum(&group.stream, way, values, tables, self.all.tiles) }
    }
}
