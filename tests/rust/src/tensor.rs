//! Memory with canaries around it, plain or shared, and the calls on it.

use offbeat_core::Result;
use offbeat_core::buffer::{Buffer, Owned, Shaped};
use offbeat_core::call::Call;
use offbeat_core::codec::Codec;
use offbeat_core::coding::Coding;
use offbeat_core::dtype::{DType, Op};
use offbeat_core::event::{Output, Queue, Ticket};
use offbeat_core::group::{Group, Work};
use offbeat_core::transport::shm::arena::Piece;

use crate::world::Rank;

/// Where a tensor lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// On the heap of the process.
    Plain,
    /// In the engine's shared memory.
    Shared,
    /// Shared on even ranks, plain on odd ones.
    Mixed,
}

impl Memory {
    /// All of them.
    pub const ALL: [Memory; 3] = [Memory::Plain, Memory::Shared, Memory::Mixed];
}

/// Untouched bytes before and after a tensor; a multiple of every alignment.
const MARGIN: usize = 64;
const CANARY: u8 = 0xa7;

enum Store {
    Plain(Vec<u64>),
    Shared(Piece),
}

/// A tensor in memory of its own.
pub struct Tensor {
    store: Store,
    dtype: DType,
    shape: Vec<u64>,
    len: usize,
}

impl Tensor {
    /// A tensor of one dimension that holds `bytes`.
    pub fn new(rank: &Rank, memory: Memory, dtype: DType, bytes: &[u8]) -> Self {
        Tensor::shaped(rank, memory, dtype, vec![(bytes.len() / dtype.size()) as u64], bytes)
    }

    /// A tensor of a shape that holds `bytes`.
    pub fn shaped(rank: &Rank, memory: Memory, dtype: DType, shape: Vec<u64>, bytes: &[u8]) -> Self {
        assert_eq!(shape.iter().product::<u64>() as usize * dtype.size(), bytes.len());
        let shared = memory == Memory::Shared || (memory == Memory::Mixed && rank.rank.is_multiple_of(2));
        let whole = bytes.len() + 2 * MARGIN;
        let store = if shared {
            Store::Shared(rank.engine().shared(whole).expect("shared memory"))
        } else {
            Store::Plain(vec![0; whole.div_ceil(8)])
        };
        let mut tensor = Tensor { store, dtype, shape, len: bytes.len() };
        tensor.whole().fill(CANARY);
        tensor.whole()[MARGIN..MARGIN + bytes.len()].copy_from_slice(bytes);
        tensor
    }

    fn base(&self) -> *mut u8 {
        match &self.store {
            Store::Plain(words) => words.as_ptr().cast_mut().cast(),
            Store::Shared(piece) => piece.start(),
        }
    }

    fn whole(&mut self) -> &mut [u8] {
        // SAFETY: the memory is this tensor's own, initialised here, and borrowed mutably; no call is under way.
        unsafe { std::slice::from_raw_parts_mut(self.base(), self.len + 2 * MARGIN) }
    }

    /// The contents. Panics if anything beside them was written.
    pub fn bytes(&self) -> Vec<u8> {
        // SAFETY: as in `whole`; the caller has waited for the calls that write here.
        let whole = unsafe { std::slice::from_raw_parts(self.base().cast_const(), self.len + 2 * MARGIN) };
        let (before, rest) = whole.split_at(MARGIN);
        let (inside, after) = rest.split_at(self.len);
        let untouched = |margin: &[u8]| margin.iter().all(|byte| *byte == CANARY);
        assert!(untouched(before) && untouched(after), "something wrote beside the tensor");
        inside.to_vec()
    }

    /// As calls take it. An empty tensor has no address, as torch's have none.
    pub fn view(&self) -> Shaped {
        let start = if self.len == 0 { std::ptr::null_mut() } else { self.base().wrapping_add(MARGIN) };
        Shaped { buffer: Buffer::host(start, self.len / self.dtype.size(), self.dtype), shape: self.shape.clone() }
    }
}

/// Runs a call and waits for it.
pub fn run(group: &Group, call: Call) -> Result<Output> {
    group.run(Work { call, keep: None }, None)
}

/// Queues a call whose memory the caller keeps until it is done.
pub fn enqueue(group: &Group, call: Call) -> Result<Ticket> {
    group.enqueue(Work { call, keep: None }, None)
}

/// An all_reduce of a tensor, in place.
pub fn all_reduce(tensor: &Tensor, op: Op, codec: Option<&'static dyn Codec>) -> Call {
    Call::AllReduce { tensor: tensor.view(), op, coding: codec.map(Coding::plain) }
}

/// The contents of what a call gave.
pub fn contents(output: &[Owned]) -> Vec<Vec<u8>> {
    output.iter().map(|block| block.bytes().to_vec()).collect()
}
