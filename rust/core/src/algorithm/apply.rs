//! The step `Apply`: a function that the user wrote.

use std::fmt;
use std::sync::Arc;

use offbeat_transport::shm::arena::Piece;
use offbeat_transport::trace;

use super::carrier::{Storage, Stream};
use super::memory::{Keeper, Memory};
use super::pipeline::Round;
use crate::Result;
use crate::bucket::{Bucket, Tensor};
use crate::dtype::DType;

/// What a function works on. It may hold on to the memory, and must expect it to change.
pub struct Room<'a> {
    /// The bucket.
    pub bucket: &'a Storage,
    /// The type of its elements.
    pub dtype: DType,
    /// How many there are, with what lies between tensors.
    pub count: usize,
    /// (name, first element, elements) of each tensor in it.
    pub tensors: &'a [(String, usize, usize)],
    /// What it keeps: a float32 for each element of the bucket, by name.
    pub states: Vec<(&'a str, Storage)>,
    /// The round.
    pub step: u64,
    /// Where the bucket is on a device: the stream on which it is to work. What is enqueued there is done, on that stream.
    pub stream: Option<Stream>,
}

/// Does something with a bucket, on the communication thread.
pub trait Function: fmt::Debug + Send + Sync {
    /// Changes the bucket in place. An error ends the training on all ranks.
    fn call(&self, room: &Room<'_>) -> Result<()>;
}

/// A function for one bucket.
pub struct Apply {
    function: Arc<dyn Function>,
    bucket: Storage,
    dtype: DType,
    count: usize,
    tensors: Vec<(String, usize, usize)>,
}

impl Apply {
    /// A function for a bucket that lies in `memory`.
    pub fn new(function: &Arc<dyn Function>, bucket: &Bucket, tensors: &[Tensor], memory: &Storage) -> Self {
        let described =
            |slot: &crate::bucket::Slot| (tensors[slot.tensor].name.clone(), slot.offset, tensors[slot.tensor].count);
        Apply {
            function: Arc::clone(function),
            bucket: memory.clone(),
            dtype: bucket.dtype,
            count: bucket.count,
            tensors: bucket.slots.iter().map(described).collect(),
        }
    }

    /// What it keeps under these names, in the host's memory.
    pub(super) fn memories(
        states: &[String],
        bucket: &Bucket,
        tensors: &[Tensor],
        allocate: impl Fn(usize) -> Result<Piece>,
    ) -> Result<Vec<Memory>> {
        let state = |name: &String| {
            let piece = allocate(bucket.count * size_of::<f32>())?;
            // SAFETY: the piece is fresh and as long as it says.
            unsafe { std::ptr::write_bytes(piece.start(), 0, piece.len()) };
            Ok(Memory::of_elements(name, Keeper::Each, bucket, tensors).lent(piece))
        };
        states.iter().map(state).collect()
    }

    pub(super) fn run(&self, round: &Round<'_>, memories: &[Memory]) -> Result<()> {
        let state = |memory: &'_ Memory| Some(Storage::Shared(Arc::clone(memory.piece()?)));
        let states = memories.iter().filter_map(|memory| Some((memory.name.as_str(), state(memory)?))).collect();
        self.call(states, (round.step, None), round.ran)
    }

    /// Calls it in a round, for a bucket on a device with the stream; `ran` is told from when to when.
    pub fn call(
        &self,
        states: Vec<(&str, Storage)>,
        (step, stream): (u64, Option<Stream>),
        ran: &dyn Fn(u64, u64),
    ) -> Result<()> {
        let Apply { bucket, dtype, count, tensors, .. } = self;
        let began = trace::now();
        let result = self.function.call(&Room { bucket, dtype: *dtype, count: *count, tensors, states, step, stream });
        ran(began, trace::now());
        result
    }
}
