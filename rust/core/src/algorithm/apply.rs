//! The step `Apply`: a function that the user wrote.

use std::fmt;
use std::sync::Arc;

use offbeat_transport::shm::arena::Piece;
use offbeat_transport::trace;

use super::memory::{Keeper, Memory};
use super::pipeline::Round;
use crate::Result;
use crate::bucket::{Bucket, Tensor};
use crate::dtype::DType;

/// What a function works on. It may hold on to the memory, and must expect it to change.
pub struct Room<'a> {
    /// The bucket.
    pub bucket: &'a Arc<Piece>,
    /// The type of its elements.
    pub dtype: DType,
    /// How many there are, with what lies between tensors.
    pub count: usize,
    /// (name, first element, elements) of each tensor in it.
    pub tensors: &'a [(String, usize, usize)],
    /// What it keeps: a float32 for each element of the bucket, by name.
    pub states: Vec<(&'a str, &'a Arc<Piece>)>,
    /// The round.
    pub step: u64,
}

/// Does something with a bucket, on the communication thread.
pub trait Function: fmt::Debug + Send + Sync {
    /// Changes the bucket in place. An error ends the training on all ranks.
    fn call(&self, room: &Room<'_>) -> Result<()>;
}

pub(super) struct Apply {
    function: Arc<dyn Function>,
    bucket: Arc<Piece>,
    dtype: DType,
    count: usize,
    tensors: Vec<(String, usize, usize)>,
}

impl Apply {
    pub(super) fn build(
        function: &Arc<dyn Function>,
        states: &[String],
        bucket: &Bucket,
        tensors: &[Tensor],
        memory: &Arc<Piece>,
        allocate: impl Fn(usize) -> Result<Piece>,
    ) -> Result<(Self, Vec<Memory>)> {
        let state = |name: &String| {
            let piece = allocate(bucket.count * size_of::<f32>())?;
            // SAFETY: the piece is fresh and as long as it says.
            unsafe { std::ptr::write_bytes(piece.start(), 0, piece.len()) };
            Ok(Memory::of_elements(name, Keeper::Each, bucket, tensors).lent(piece))
        };
        let memories = states.iter().map(state).collect::<Result<_>>()?;
        let described =
            |slot: &crate::bucket::Slot| (tensors[slot.tensor].name.clone(), slot.offset, tensors[slot.tensor].count);
        let apply = Apply {
            function: Arc::clone(function),
            bucket: Arc::clone(memory),
            dtype: bucket.dtype,
            count: bucket.count,
            tensors: bucket.slots.iter().map(described).collect(),
        };
        Ok((apply, memories))
    }

    pub(super) fn run(&self, round: &Round<'_>, memories: &[Memory]) -> Result<()> {
        let states = memories.iter().filter_map(|memory| Some((memory.name.as_str(), memory.piece()?))).collect();
        let Apply { bucket, dtype, count, tensors, .. } = self;
        let began = trace::now();
        let result =
            self.function.call(&Room { bucket, dtype: *dtype, count: *count, tensors, states, step: round.step });
        (round.ran)(began, trace::now());
        result
    }
}
