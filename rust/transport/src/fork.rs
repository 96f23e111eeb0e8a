//! Forked children (DataLoader workers) must not keep a dead parent's connections open, nor use its runtime.
//!
//! Every descriptor that a peer watches is registered here. A handler that runs in the child right after `fork` closes
//! them all; it only reads atomics and calls `close`, which is all that is allowed there.

use std::os::fd::RawFd;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};

const EMPTY: i32 = -1;
const CAPACITY: usize = 1 << 14;

static OPEN: [AtomicI32; CAPACITY] = [const { AtomicI32::new(EMPTY) }; CAPACITY];
/// One past the highest place ever used, so that the handler need not look at all of them.
static USED: AtomicUsize = AtomicUsize::new(0);
static IN_CHILD: AtomicBool = AtomicBool::new(false);
static INSTALL: Once = Once::new();

/// Whether this process was forked from one that had a runtime.
pub fn in_child() -> bool {
    IN_CHILD.load(Ordering::Relaxed)
}

/// Keeps a descriptor registered; drop it before the descriptor is closed.
#[derive(Debug)]
pub(crate) struct ClosedInChild(Option<usize>);

impl ClosedInChild {
    /// Registers a descriptor. With more than 16,384 of them the rest stay open in children: then only `fork` without
    /// `exec` can delay the news of this rank's death, and local peers learn of it all the same.
    pub(crate) fn new(descriptor: RawFd) -> Self {
        INSTALL.call_once(|| {
            // SAFETY: `close_all` is an extern "C" function without arguments that is safe to run after fork.
            unsafe { libc::pthread_atfork(None, None, Some(close_all)) };
        });
        let place = (0..CAPACITY).find(|place| {
            OPEN[*place].compare_exchange(EMPTY, descriptor, Ordering::SeqCst, Ordering::Relaxed).is_ok()
        });
        if let Some(place) = place {
            USED.fetch_max(place + 1, Ordering::SeqCst);
        }
        ClosedInChild(place)
    }
}

impl Drop for ClosedInChild {
    fn drop(&mut self) {
        if let Some(place) = self.0 {
            OPEN[place].store(EMPTY, Ordering::SeqCst);
        }
    }
}

extern "C" fn close_all() {
    IN_CHILD.store(true, Ordering::SeqCst);
    for place in &OPEN[..USED.load(Ordering::SeqCst)] {
        let descriptor = place.swap(EMPTY, Ordering::SeqCst);
        if descriptor != EMPTY {
            // SAFETY: the descriptor is this process's copy of a registered one; the child never uses it.
            unsafe { libc::close(descriptor) };
        }
    }
}
