//! A buffer is (pointer, length, dtype, place): what a collective works on, wherever it lies.

use std::any::Any;
use std::sync::Arc;

use offbeat_transport::shm::arena::Piece;

use crate::dtype::DType;

/// Where memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Memory of this host, shared or not.
    Host,
    /// Memory of a CUDA device.
    Cuda(u32),
}

/// Some elements in memory that somebody else owns.
#[derive(Clone, Copy, Debug)]
pub struct Buffer {
    /// The first element, aligned to its type.
    pub start: *mut u8,
    /// How many elements.
    pub count: usize,
    /// Their type.
    pub dtype: DType,
    /// Where they are.
    pub place: Place,
}

// SAFETY: a buffer is an address; whoever makes one promises (`Call`) that the memory outlives the work on it.
unsafe impl Send for Buffer {}
// SAFETY: as above; sharing an address shares no access.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// A buffer on the host. An empty tensor of torch's has no address; here it gets one, as slices need one.
    pub fn host(start: *mut u8, count: usize, dtype: DType) -> Self {
        let start = if start.is_null() { std::ptr::NonNull::<Line>::dangling().as_ptr().cast() } else { start };
        Buffer { start, count, dtype, place: Place::Host }
    }

    /// Its length in bytes.
    pub fn bytes(&self) -> usize {
        self.count * self.dtype.size()
    }

    /// The address of an element.
    pub fn at(&self, element: usize) -> *mut u8 {
        debug_assert!(element <= self.count);
        self.start.wrapping_add(element * self.dtype.size())
    }
}

/// Memory that somebody else owns, for as long as this is there.
pub trait Lent: Send + Sync {
    /// Where it begins.
    fn start(&self) -> *mut u8;
    /// As what it is, for whoever lent it.
    fn as_any(&self) -> &dyn Any;
}

/// Memory that a model's tensors are copied into.
#[derive(Clone)]
pub enum Storage {
    /// Where neighbours reduce in it.
    Shared(Arc<Piece>),
    /// Of a device.
    Lent(Arc<dyn Lent>),
}

impl Storage {
    /// Where it begins.
    pub fn start(&self) -> *mut u8 {
        match self {
            Storage::Shared(piece) => piece.start(),
            Storage::Lent(memory) => memory.start(),
        }
    }
}

/// A buffer with a shape, as it is received from or sent to another rank.
#[derive(Clone, Debug)]
pub struct Shaped {
    /// The elements.
    pub buffer: Buffer,
    /// The length of each dimension.
    pub shape: Vec<u64>,
}

/// Memory of our own, aligned for every instruction set, for a tensor that was received.
#[derive(Debug)]
pub struct Owned {
    lines: Vec<Line>,
    /// The type of the elements.
    pub dtype: DType,
    /// The length of each dimension.
    pub shape: Vec<u64>,
    len: usize,
}

#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
struct Line([u8; 64]);

impl Owned {
    /// Memory for a tensor; the contents are zero.
    pub fn new(dtype: DType, shape: Vec<u64>) -> Self {
        let count: u64 = shape.iter().product();
        let len = count as usize * dtype.size();
        Owned { lines: vec![Line([0; 64]); len.div_ceil(64).max(1)], dtype, shape, len }
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the lines are contiguous, initialised, and at least `len` bytes.
        unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast(), self.len) }
    }

    /// The bytes, to be filled.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.len) }
    }

    /// The whole as a buffer.
    pub fn buffer(&mut self) -> Buffer {
        let count = self.len / self.dtype.size();
        Buffer::host(self.lines.as_mut_ptr().cast(), count, self.dtype)
    }
}
