//! One rank's shared memory: a sealed memfd of fixed size, of which only the pages in use exist.
//!
//! The size is sealed against shrinking and growing, so no neighbour can be hit by SIGBUS, and nothing lies in /dev/shm
//! or on disk: the kernel frees it with the last process that maps it, however that one ends.

use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use rustix::mm::{MapFlags, ProtFlags};

use super::space::{PAGE, Space};
use crate::error::{Error, Result};
use crate::handshake::nonce;

/// Bytes at the start of an arena by which a neighbour proves that it mapped the right one.
pub(crate) const COOKIE: usize = 32;
/// Free pages kept for reuse; what is over goes back to the system.
const KEPT: u64 = 64 << 20;

/// A mapping of an arena, one's own or a neighbour's.
#[derive(Debug)]
pub struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping is plain memory; who may touch which part when is settled by the protocol of `Team`.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes of a memfd.
    pub(crate) fn new(memory: &impl AsFd, len: usize) -> Result<Self> {
        let (read_write, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::NORESERVE);
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
        let start = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, read_write, flags, memory, 0) }
            .map_err(|e| Error::io("cannot map shared memory (ulimit -v?)", e))?;
        #[cfg(target_os = "linux")]
        // SAFETY: the range was just mapped; the advice changes no contents and is free to be refused.
        let _ = unsafe { rustix::mm::madvise(start, len, rustix::mm::Advice::LinuxHugepage) };
        let start = NonNull::new(start.cast()).ok_or_else(|| Error::io("cannot map shared memory", "null"))?;
        Ok(Mapping { start, len })
    }

    /// Maps `len` bytes of private memory.
    fn private(len: usize) -> Result<Self> {
        let (read_write, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
        let start = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), len, read_write, flags) }
            .map_err(|e| Error::io("cannot map memory; try: raise ulimit -v, or a smaller OFFBEAT_SHARED_BYTES", e))?;
        let start = NonNull::new(start.cast()).ok_or_else(|| Error::io("cannot map memory", "null"))?;
        Ok(Mapping { start, len })
    }

    /// The address of an offset; panics never, but an offset outside is an error of ours.
    pub fn at(&self, offset: usize, len: usize) -> Result<*mut u8> {
        if offset.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(Error::io("shared memory", format!("offset {offset} + {len} is outside of {}", self.len)));
        }
        // SAFETY: offset is inside the mapping, as checked.
        Ok(unsafe { self.start.as_ptr().add(offset) })
    }

    /// The offset of an address range that lies in this mapping.
    pub fn offset_of(&self, start: *const u8, len: usize) -> Option<usize> {
        let offset = (start as usize).checked_sub(self.start.as_ptr() as usize)?;
        (offset + len <= self.len).then_some(offset)
    }

    /// Bytes mapped.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing is mapped; never.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The cookie at the start.
    pub(crate) fn cookie(&self) -> [u8; COOKIE] {
        let mut cookie = [0; COOKIE];
        // SAFETY: every arena is longer than its cookie, which is written once, before the arena is shared.
        unsafe { std::ptr::copy_nonoverlapping(self.start.as_ptr(), cookie.as_mut_ptr(), COOKIE) };
        cookie
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this value owns the mapping; whoever keeps pointers into it keeps an `Arc` to it.
        let result = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.len) };
        if let Err(error) = result {
            log::warn!("unmapping shared memory: {error}");
        }
    }
}

/// One's own shared memory.
#[derive(Debug)]
pub struct Arena {
    /// What neighbours can map; none for private memory.
    memory: Option<OwnedFd>,
    mapping: Arc<Mapping>,
    space: Mutex<(Space, u64)>,
}

impl Arena {
    /// Makes an arena of `capacity` bytes; pages come into being when they are touched.
    pub fn new(capacity: u64) -> Result<Arc<Self>> {
        let capacity = capacity / PAGE * PAGE;
        let memory = create(capacity).map_err(|e| Error::io("cannot create shared memory", e))?;
        let mapping = Mapping::new(&memory, capacity as usize)?;
        Arena::over(Some(memory), mapping)
    }

    /// Memory that nobody else can map.
    fn private(capacity: u64) -> Result<Arc<Self>> {
        Arena::over(None, Mapping::private((capacity / PAGE * PAGE) as usize)?)
    }

    fn over(memory: Option<OwnedFd>, mapping: Mapping) -> Result<Arc<Self>> {
        let capacity = mapping.len as u64;
        let cookie = nonce()?;
        // SAFETY: nobody else knows of this mapping yet.
        unsafe { std::ptr::copy_nonoverlapping(cookie.as_ptr(), mapping.start.as_ptr(), COOKIE) };
        let space = Mutex::new((Space::new(PAGE, capacity), 0));
        Ok(Arc::new(Arena { memory, mapping: Arc::new(mapping), space }))
    }

    /// As [`Arena::new`], or much smaller where address space is limited (`ulimit -v`), which others need too; or private,
    /// with the reason, where there is no shared memory at all.
    pub(crate) fn as_large_as_can_be(capacity: u64) -> Result<(Arc<Self>, Option<String>)> {
        const LEAST: u64 = 64 << 20;
        let mut smaller = capacity;
        let error = loop {
            match Arena::new(smaller) {
                Ok(arena) => return Ok((arena, None)),
                Err(_) if smaller / 16 >= LEAST => smaller /= 16,
                Err(error) => break error,
            }
        };
        Ok((Arena::private(smaller)?, Some(error.message)))
    }

    /// The whole of it.
    pub fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }

    pub(crate) fn descriptor(&self) -> Option<&OwnedFd> {
        self.memory.as_ref()
    }

    /// Takes `len` bytes, aligned to a cache line pair; uninitialised.
    pub fn allocate(self: &Arc<Self>, len: usize) -> Result<Piece> {
        let mut space = self.space.lock().unwrap_or_else(PoisonError::into_inner);
        let offset = space.0.take(len as u64).ok_or_else(|| {
            Error::unsupported(format!(
                "no room for {len} bytes of shared memory in this rank's {} MB; try: OFFBEAT_SHARED_BYTES",
                self.mapping.len >> 20
            ))
        })?;
        let used_again = Space::rounded(len as u64).min(space.1);
        space.1 -= used_again;
        Ok(Piece { arena: Arc::clone(self), offset, len })
    }

    fn release(&self, offset: u64, len: u64) {
        let rounded = Space::rounded(len);
        let mut space = self.space.lock().unwrap_or_else(PoisonError::into_inner);
        let keep = rounded < PAGE || space.1 + rounded <= KEPT;
        if keep {
            space.1 += rounded;
        } else if let Some(Err(error)) = self.memory.as_ref().map(|memory| give_back(memory, offset, rounded)) {
            log::debug!("giving shared memory back: {error}");
        }
        space.0.give(offset, len);
    }
}

/// A file in memory of a size that nobody can change.
#[cfg(target_os = "linux")]
fn create(capacity: u64) -> std::io::Result<OwnedFd> {
    use rustix::fs::{MemfdFlags, SealFlags};
    let memory = rustix::fs::memfd_create("offbeat", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&memory, capacity)?;
    rustix::fs::fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(memory)
}

/// Gives pages back to the system; they read as zero from then on.
#[cfg(target_os = "linux")]
fn give_back(memory: &OwnedFd, offset: u64, len: u64) -> std::io::Result<()> {
    use rustix::fs::FallocateFlags;
    Ok(rustix::fs::fallocate(memory, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, offset, len)?)
}

/// A file that is deleted at once: nobody else maps it here.
#[cfg(not(target_os = "linux"))]
fn create(capacity: u64) -> std::io::Result<OwnedFd> {
    let path = std::env::temp_dir().join(format!("offbeat-{}-{capacity}", std::process::id()));
    let file = std::fs::File::options().read(true).write(true).create(true).truncate(true).open(&path)?;
    std::fs::remove_file(&path)?;
    file.set_len(capacity)?;
    Ok(file.into())
}

#[cfg(not(target_os = "linux"))]
fn give_back(_: &OwnedFd, _: u64, _: u64) -> std::io::Result<()> {
    Ok(())
}

/// A part of one's own arena, free again when dropped.
#[derive(Debug)]
pub struct Piece {
    arena: Arc<Arena>,
    offset: u64,
    len: usize,
}

impl Piece {
    /// Where it is in the arena.
    pub fn offset(&self) -> usize {
        self.offset as usize
    }

    /// Its address here.
    pub fn start(&self) -> *mut u8 {
        // SAFETY: the allocator gives offsets inside the mapping only.
        unsafe { self.arena.mapping.start.as_ptr().add(self.offset as usize) }
    }

    /// Its length.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        self.arena.release(self.offset, self.len as u64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_writable_and_their_pages_go_back() {
        let arena = Arena::new(1 << 40).unwrap();
        let blocks = || rustix::fs::fstat(arena.descriptor().unwrap()).unwrap().st_blocks as u64 * 512;
        let before = blocks();
        for len in [1usize, 100_000, 128 << 20] {
            let piece = arena.allocate(len).unwrap();
            // SAFETY: the piece is ours and `len` long.
            unsafe { std::ptr::write_bytes(piece.start(), 7, len) };
            assert_eq!(arena.mapping.offset_of(piece.start(), len), Some(piece.offset()));
            assert!(blocks() >= before + len as u64 / 2);
        }
        assert!(blocks() <= before + KEPT + PAGE * 32);
    }

    #[test]
    fn the_size_is_sealed() {
        let arena = Arena::new(1 << 20).unwrap();
        assert!(rustix::fs::ftruncate(arena.descriptor().unwrap(), 0).is_err());
        assert!(rustix::fs::ftruncate(arena.descriptor().unwrap(), 1 << 21).is_err());
        assert!(arena.allocate(1 << 21).unwrap_err().message.contains("try:"));
    }

    #[test]
    fn offsets_outside_are_refused() {
        let arena = Arena::new(1 << 16).unwrap();
        assert!(arena.mapping.at(1 << 16, 1).is_err());
        assert!(arena.mapping.at(usize::MAX, 2).is_err());
    }
}
