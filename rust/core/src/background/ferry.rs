//! Where snapshots come from and deltas go. The background thread works in the host's memory; a model may be elsewhere.
//!
//! ```text
//! training stream   copy weights │ ........................ │ wait for the delta, add it
//! ferry                          └─▶ snapshot to the host   delta to the device ─┘
//! background thread                                      └─▶ exchange ─┘   looks whether the ferry is idle, and never blocks
//! ```
//! On a device all of it is enqueued, so the training thread waits for nothing. Whose turn it is (`desk`) settles who may begin
//! a passage; whether the last one has ended is only known to who asks for it.

use std::sync::Arc;

use offbeat_transport::shm::arena::{Arena, Piece};

use crate::Result;
use crate::buffer::Storage;
use crate::event::Stream;

/// Takes snapshots to the host and deltas back. What is not said otherwise is for a model in the host's memory, where there is
/// no passage.
pub trait Ferry: Send + Sync {
    /// Snapshot and delta of f32, where the training thread copies weights to and adds from.
    fn memory(&self) -> [Storage; 2];
    /// The same in the host's memory, where the background thread works.
    fn aboard(&self) -> [*mut f32; 2];
    /// The training thread has weights copied on a stream: takes the snapshot to the host, after that.
    fn fetch(&self, _: Stream) -> Result<()> {
        Ok(())
    }
    /// Whether nothing is on its way. As long as something is, the background thread leaves the host's side alone.
    fn is_idle(&self) -> Result<bool> {
        Ok(true)
    }
    /// Takes the delta to where the model is. The background thread writes to it again when the ferry is idle.
    fn send(&self) -> Result<()> {
        Ok(())
    }
    /// Lets what the training thread enqueues on a stream from now on wait for the delta.
    fn land(&self, _: Stream) -> Result<()> {
        Ok(())
    }
    /// The training thread has the delta added on a stream: the next one comes after that.
    fn landed(&self, _: Stream) -> Result<()> {
        Ok(())
    }
}

/// Both sides are one, in the host's memory.
pub(super) struct Here {
    snapshot: Arc<Piece>,
    delta: Arc<Piece>,
}

impl Here {
    /// Room for so many numbers, all zero.
    pub(super) fn new(arena: &Arc<Arena>, count: usize) -> Result<Self> {
        let bytes = (count * size_of::<f32>()).max(size_of::<f32>());
        let piece = || {
            let piece = arena.allocate(bytes)?;
            // SAFETY: the piece is fresh and as long as that.
            unsafe { std::ptr::write_bytes(piece.start(), 0, bytes) };
            Ok(Arc::new(piece))
        };
        Ok(Here { snapshot: piece()?, delta: piece()? })
    }
}

impl Ferry for Here {
    fn memory(&self) -> [Storage; 2] {
        [Storage::Shared(Arc::clone(&self.snapshot)), Storage::Shared(Arc::clone(&self.delta))]
    }

    fn aboard(&self) -> [*mut f32; 2] {
        [self.snapshot.start().cast(), self.delta.start().cast()]
    }
}
