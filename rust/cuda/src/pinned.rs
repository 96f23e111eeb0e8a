//! Memory of the host that the device reads and writes by itself: it stays where it is, so copies need nobody's help.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use cudarc::driver::{result, sys};
use offbeat_core::Result;

use crate::device::Device;
use crate::stream::Address;

/// Some bytes, all zero at first, that are known to the device.
pub struct Pinned {
    device: Arc<Device>,
    start: *mut u8,
}

// SAFETY: an address; whoever reads or writes there sees to it that nobody else does.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// So many bytes.
    pub fn new(device: &Arc<Device>, bytes: usize) -> Result<Self> {
        let flags = sys::CU_MEMHOSTALLOC_DEVICEMAP | sys::CU_MEMHOSTALLOC_PORTABLE;
        let start = device.with(&format!("{bytes} bytes of pinned memory of the host"), || {
            // SAFETY: what is allocated is filled here and freed once, when this is dropped.
            unsafe {
                let start = result::malloc_host(bytes.max(1), flags)?.cast::<u8>();
                std::ptr::write_bytes(start, 0, bytes);
                Ok(start)
            }
        })?;
        Ok(Pinned { device: Arc::clone(device), start })
    }

    /// Where it begins.
    pub fn start(&self) -> *mut u8 {
        self.start
    }

    /// Where the device finds it.
    pub fn address(&self) -> Result<Address> {
        self.device.with("memory that host and device share", || {
            let mut address = 0;
            // SAFETY: allocated in `new`.
            unsafe { sys::cuMemHostGetDevicePointer_v2(&raw mut address, self.start.cast(), 0).result()? };
            Ok(address)
        })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: allocated in `new`; whoever drops this has seen to it that the device does not use it any more.
        let freed = self.device.with("memory of the host", || unsafe { result::free_host(self.start.cast()) });
        freed.unwrap_or_else(|error| log::warn!("{}", error.message));
    }
}

/// Some numbers that the device writes and the host reads whenever it likes, without waiting for the device.
pub struct Words {
    memory: Pinned,
    address: Address,
    count: usize,
}

impl Words {
    /// So many of them.
    pub fn new(device: &Arc<Device>, count: usize) -> Result<Self> {
        let memory = Pinned::new(device, count * size_of::<u32>())?;
        Ok(Words { address: memory.address()?, memory, count })
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
        unsafe { AtomicU32::from_ptr(self.memory.start().cast::<u32>().add(word % self.count)) }
    }
}
