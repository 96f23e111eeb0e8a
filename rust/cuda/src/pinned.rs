//! Words that the device writes and the host reads whenever it likes, without waiting for the device.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use cudarc::driver::{result, sys};
use offbeat_core::Result;

use crate::device::Device;
use crate::stream::Address;

/// Some numbers in the host's memory that the device can reach, all zero at first.
pub struct Words {
    device: Arc<Device>,
    host: *mut u32,
    address: Address,
    count: usize,
}

// SAFETY: the host reads and writes the words as atomics; the address is a number.
unsafe impl Send for Words {}
// SAFETY: as above.
unsafe impl Sync for Words {}

impl Words {
    /// So many of them.
    pub fn new(device: &Arc<Device>, count: usize) -> Result<Self> {
        let flags = sys::CU_MEMHOSTALLOC_DEVICEMAP | sys::CU_MEMHOSTALLOC_PORTABLE;
        let (host, address) = device.with("memory that host and device share", || {
            // SAFETY: what is allocated is filled here and freed once, when this is dropped.
            unsafe {
                let host = result::malloc_host(count * size_of::<u32>(), flags)?.cast::<u32>();
                std::ptr::write_bytes(host, 0, count);
                let mut address = 0;
                match sys::cuMemHostGetDevicePointer_v2(&raw mut address, host.cast(), 0).result() {
                    Ok(()) => Ok((host, address)),
                    Err(error) => result::free_host(host.cast()).and(Err(error)),
                }
            }
        })?;
        Ok(Words { device: Arc::clone(device), host, address, count })
    }

    /// Where the device finds a word.
    pub fn address(&self, word: usize) -> Address {
        self.address + (word % self.count * size_of::<u32>()) as u64
    }

    /// A word, as far as the device has come.
    pub fn get(&self, word: usize) -> u32 {
        self.at(word).load(Ordering::Relaxed)
    }

    /// Makes a word zero that the device does not write to.
    pub fn clear(&self, word: usize) {
        self.at(word).store(0, Ordering::Relaxed);
    }

    fn at(&self, word: usize) -> &AtomicU32 {
        // SAFETY: one of the words, which are aligned and live as long as this; the device changes them as a whole.
        unsafe { AtomicU32::from_ptr(self.host.add(word % self.count)) }
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        // SAFETY: allocated in `new`; whoever drops this has seen to it that the device does not write to it any more.
        let freed = self.device.with("memory of the host", || unsafe { result::free_host(self.host.cast()) });
        freed.unwrap_or_else(|error| log::warn!("{}", error.message));
    }
}
