//! Reused byte buffers, so that the hot path neither allocates nor touches fresh pages, nor clears what it overwrites.

use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::BufMut;
use bytes::buf::UninitSlice;

/// Bytes kept for reuse at most.
const KEPT: usize = 16 << 20;

/// A stock of buffers.
#[derive(Clone, Default)]
pub struct Pool(Arc<Mutex<Stock>>);

#[derive(Default)]
struct Stock {
    /// The length of each is how much of it has ever been written: that much may be read without clearing it first.
    free: Vec<Vec<u8>>,
    bytes: usize,
}

impl Pool {
    /// An empty buffer that can hold `capacity` bytes without growing.
    pub fn take(&self, capacity: usize) -> Block {
        let bytes = self.find(capacity).unwrap_or_else(|| Vec::with_capacity(capacity));
        Block { bytes, len: 0, pool: self.clone() }
    }

    /// A buffer of `len` bytes, for whoever overwrites them all: they are what the last user left there.
    pub fn take_filled(&self, len: usize) -> Block {
        let mut bytes = self.find(len).unwrap_or_else(|| vec![0; len]);
        if bytes.len() < len {
            bytes.resize(len, 0);
        }
        Block { bytes, len, pool: self.clone() }
    }

    fn find(&self, capacity: usize) -> Option<Vec<u8>> {
        let mut stock = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // a buffer much larger than asked for is left for those who need it
        let fits = |b: &Vec<u8>| b.capacity() >= capacity && b.capacity() / 4 <= capacity.max(1024);
        let bytes = stock.free.iter().rposition(fits).map(|at| stock.free.swap_remove(at))?;
        stock.bytes -= bytes.capacity();
        Some(bytes)
    }
}

/// A buffer that goes back to its pool.
pub struct Block {
    /// All that was ever written; its first `len` bytes are the contents.
    bytes: Vec<u8>,
    len: usize,
    pool: Pool,
}

impl Block {
    /// Appends bytes.
    pub fn extend_from_slice(&mut self, more: &[u8]) {
        let (over, past) = more.split_at(more.len().min(self.bytes.len() - self.len));
        self.bytes[self.len..][..over.len()].copy_from_slice(over);
        self.bytes.extend_from_slice(past);
        self.len += more.len();
    }
}

impl Deref for Block {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

impl DerefMut for Block {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[..self.len]
    }
}

// SAFETY: `chunk_mut` is memory of the vector's own, and `len` moves only over bytes that are written.
unsafe impl BufMut for Block {
    fn remaining_mut(&self) -> usize {
        self.bytes.capacity() - self.len
    }

    fn chunk_mut(&mut self) -> &mut UninitSlice {
        let free = self.remaining_mut();
        // SAFETY: `len` is at most the capacity, and the rest of the allocation is borrowed with `self`.
        unsafe { UninitSlice::from_raw_parts_mut(self.bytes.as_mut_ptr().add(self.len), free) }
    }

    unsafe fn advance_mut(&mut self, count: usize) {
        self.len += count;
        if self.len > self.bytes.len() {
            // SAFETY: the caller has written `count` bytes of the chunk, from where the contents ended.
            unsafe { self.bytes.set_len(self.len) };
        }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let bytes = std::mem::take(&mut self.bytes);
        let mut stock = self.pool.0.lock().unwrap_or_else(PoisonError::into_inner);
        if bytes.capacity() > 0 && stock.bytes + bytes.capacity() <= KEPT {
            stock.bytes += bytes.capacity();
            stock.free.push(bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_comes_back_as_it_was_left_and_is_cleared_only_where_nobody_wrote() {
        let pool = Pool::default();
        let mut block = pool.take(4096);
        block.extend_from_slice(&[7; 1500]);
        let start = block.as_ptr();
        drop(block);
        let block = pool.take_filled(3000);
        assert_eq!((block.as_ptr(), block.len()), (start, 3000));
        assert!(block[..1500].iter().all(|byte| *byte == 7) && block[1500..].iter().all(|byte| *byte == 0));
        drop(block);
        // what was written once stays readable, however short the block was in between
        let mut block = pool.take(2000);
        assert!(block.is_empty());
        block.extend_from_slice(&[8; 10]);
        assert_eq!(*block, [8; 10]);
        drop(block);
        let block = pool.take_filled(2000);
        assert!(block.as_ptr() == start && block[..10] == [8; 10] && block[10..1500].iter().all(|byte| *byte == 7));
    }

    #[test]
    fn reading_goes_over_what_was_written_before_and_past_it() {
        let pool = Pool::default();
        pool.take(2048).extend_from_slice(&[1; 1000]);
        let mut block = pool.take(2048);
        assert!(block.remaining_mut() >= 2048 && block.chunk_mut().len() == block.remaining_mut());
        (&mut block).limit(700).put_bytes(2, 700);
        (&mut block).limit(700).put_bytes(3, 700);
        assert_eq!(*block, [[2; 700], [3; 700]].concat());
        block.extend_from_slice(&[4; 3]);
        assert_eq!((block.len(), block[1402]), (1403, 4));
    }
}
