//! Tensors where neighbours can read them: in place if they lie in shared memory, else a copy there.

use offbeat_transport::shm::arena::Piece;

use super::Context;
use crate::Result;
use crate::buffer::Buffer;

/// Data in shared memory; a copy is free again when this is dropped, so keep it until the neighbours have met again.
pub(crate) struct Staged {
    place: usize,
    _copy: Option<Piece>,
}

impl Staged {
    /// Where it is in my arena.
    pub(crate) fn place(&self) -> usize {
        self.place
    }
}

impl Context<'_> {
    /// Where a tensor lies in my arena, if it does.
    pub(crate) fn place_of(&self, buffer: Buffer) -> Option<usize> {
        self.mesh.arena().mapping().offset_of(buffer.start, buffer.bytes())
    }

    /// A tensor where neighbours can read it; an empty one is nowhere, and nobody reads it.
    pub(crate) fn stage(&self, buffer: Buffer) -> Result<Staged> {
        if buffer.bytes() == 0 {
            return Ok(Staged { place: 0, _copy: None });
        }
        match self.place_of(buffer) {
            Some(place) => Ok(Staged { place, _copy: None }),
            None => self.stage_all(&[buffer]).map(|(staged, _)| staged),
        }
    }

    /// Copies of tensors, one after another, and where each begins from the place of the first.
    pub(crate) fn stage_all(&self, buffers: &[Buffer]) -> Result<(Staged, Vec<usize>)> {
        let mut len = 0;
        let starts: Vec<usize> = buffers
            .iter()
            .map(|buffer| {
                let start = len;
                len += buffer.bytes().next_multiple_of(64);
                start
            })
            .collect();
        let piece = self.mesh.arena().allocate(len)?;
        for (buffer, start) in buffers.iter().zip(&starts) {
            // SAFETY: the piece is ours alone and has room for all tensors, which are the call's to read.
            unsafe {
                std::ptr::copy_nonoverlapping(buffer.start.cast_const(), piece.start().add(*start), buffer.bytes());
            }
        }
        Ok((Staged { place: piece.offset(), _copy: Some(piece) }, starts))
    }
}
