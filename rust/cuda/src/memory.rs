//! Scratch memory on a device, kept for reuse.
//!
//! A pool belongs to one stream. What was used on a stream may be used by later work on the same stream without waiting for
//! anything, so a piece goes back into the pool as soon as the work on it is enqueued, and a step that is like the one before
//! it allocates nothing. Buckets are not taken from here: their memory is torch's.

use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::result;
use offbeat_core::Result;

use crate::stream::{Address, Stream};

/// Pieces are multiples of this, and so begin where every kernel may load whole vectors.
const UNIT: usize = 512;

/// The pool of a stream.
pub struct Scratch {
    stream: Arc<Stream>,
    /// (bytes, address) of what nobody uses.
    free: Mutex<Vec<(usize, Address)>>,
}

/// Some memory, for work on the pool's stream; back in the pool when it is dropped.
pub struct Piece {
    pool: Arc<Scratch>,
    bytes: usize,
    address: Address,
}

impl Scratch {
    /// An empty pool.
    pub fn new(stream: &Arc<Stream>) -> Arc<Self> {
        Arc::new(Scratch { stream: Arc::clone(stream), free: Mutex::default() })
    }

    /// At least so many bytes, with anything in them.
    pub fn take(self: &Arc<Self>, bytes: usize) -> Result<Piece> {
        let bytes = bytes.next_multiple_of(UNIT).max(UNIT);
        let found = {
            let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
            let best = best(&free, bytes);
            best.map(|at| free.swap_remove(at))
        };
        let (bytes, address) = match found {
            Some(piece) => piece,
            None => (bytes, self.allocate(bytes)?),
        };
        Ok(Piece { pool: Arc::clone(self), bytes, address })
    }

    fn allocate(&self, bytes: usize) -> Result<Address> {
        let device = self.stream.device();
        device.with(&format!("{bytes} bytes of scratch memory"), || {
            // SAFETY: what is allocated is freed once, when the pool is dropped.
            unsafe {
                match device.ordered {
                    true => result::malloc_async(self.stream.raw(), bytes),
                    false => result::malloc_sync(bytes),
                }
            }
        })
    }
}

/// The smallest piece that is long enough, unless it is wastefully long.
fn best(free: &[(usize, Address)], bytes: usize) -> Option<usize> {
    let fits = |(_, piece): &(usize, &(usize, Address))| (bytes..=4 * bytes).contains(&piece.0);
    free.iter().enumerate().filter(fits).min_by_key(|(_, piece)| piece.0).map(|(at, _)| at)
}

impl Piece {
    /// Where it begins.
    pub fn address(&self) -> Address {
        self.address
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        self.pool.free.lock().unwrap_or_else(PoisonError::into_inner).push((self.bytes, self.address));
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let device = self.stream.device();
        for (_, address) in self.free.get_mut().unwrap_or_else(PoisonError::into_inner).drain(..) {
            // SAFETY: allocated in `allocate`, and nobody has it; the stream frees it after all work on it.
            let freed = device.with("scratch memory", || unsafe {
                match device.ordered {
                    true => result::free_async(address, self.stream.raw()),
                    false => result::free_sync(address),
                }
            });
            freed.unwrap_or_else(|error| log::warn!("{}", error.message));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::best;

    #[test]
    fn the_smallest_that_fits_and_is_not_wasteful() {
        let free = [(4096, 1), (1024, 2), (2048, 3)];
        assert_eq!(best(&free, 1024), Some(1));
        assert_eq!(best(&free, 1536), Some(2));
        assert_eq!(best(&free, 512), Some(1));
        assert_eq!(best(&free, 128), None);
        assert_eq!(best(&free, 8192), None);
    }
}
