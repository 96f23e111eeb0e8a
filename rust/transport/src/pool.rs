//! Reused byte buffers, so that the hot path neither allocates nor touches fresh pages.

use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, PoisonError};

/// Bytes kept for reuse at most.
const KEPT: usize = 16 << 20;

/// A stock of buffers.
#[derive(Clone, Default)]
pub struct Pool(Arc<Mutex<Stock>>);

#[derive(Default)]
struct Stock {
    free: Vec<Vec<u8>>,
    bytes: usize,
}

impl Pool {
    /// An empty buffer that can hold `capacity` bytes without growing.
    pub fn take(&self, capacity: usize) -> Block {
        let mut stock = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // a buffer much larger than asked for is left for those who need it
        let fit = stock.free.iter().rposition(|b| b.capacity() >= capacity && b.capacity() / 4 <= capacity.max(1024));
        let bytes = match fit {
            Some(at) => {
                let bytes = stock.free.swap_remove(at);
                stock.bytes -= bytes.capacity();
                bytes
            }
            None => Vec::with_capacity(capacity),
        };
        Block { bytes, pool: self.clone() }
    }
}

/// A buffer that goes back to its pool.
pub struct Block {
    bytes: Vec<u8>,
    pool: Pool,
}

impl Block {
    /// Makes the buffer `len` bytes long; the contents are unspecified.
    pub fn set_len(&mut self, len: usize) {
        self.bytes.resize(len, 0);
    }
}

impl Deref for Block {
    type Target = Vec<u8>;
    fn deref(&self) -> &Vec<u8> {
        &self.bytes
    }
}

impl DerefMut for Block {
    fn deref_mut(&mut self) -> &mut Vec<u8> {
        &mut self.bytes
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let mut bytes = std::mem::take(&mut self.bytes);
        bytes.clear();
        let mut stock = self.pool.0.lock().unwrap_or_else(PoisonError::into_inner);
        if bytes.capacity() > 0 && stock.bytes + bytes.capacity() <= KEPT {
            stock.bytes += bytes.capacity();
            stock.free.push(bytes);
        }
    }
}
