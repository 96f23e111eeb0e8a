//! Frames on their way out, and memory that is lent to them.
//!
//! A collective lends slices of a tensor to the writing tasks instead of copying them. The lender may go at any moment
//! (an error, a deadline): what is not yet written is then copied out, so no task ever reads memory that was taken back,
//! and no receiver ever gets bytes that were not meant.

use std::io::{self, IoSlice};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use tokio::sync::mpsc::UnboundedReceiver;

use crate::frame::{HEADER, Header};
use crate::pool::Block;
use crate::socket::Socket;
use crate::trace::{self, Recorder, Span, What};
use crate::watchdog::Watch;
use crate::wire::Gauge;
use crate::{Result, SLICE};

/// The body of a frame.
pub enum Payload {
    /// Nothing.
    Empty,
    /// Bytes of its own.
    Owned(Block),
    /// Bytes lent by [`Sends`].
    Lent(Lent),
}

impl Payload {
    /// Bytes in it.
    pub fn len(&self) -> usize {
        match self {
            Payload::Empty => 0,
            Payload::Owned(block) => block.len(),
            Payload::Lent(lent) => lent.len,
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn with<T>(&self, use_bytes: impl FnOnce(&[u8]) -> T) -> T {
        match self {
            Payload::Empty => use_bytes(&[]),
            Payload::Owned(block) => use_bytes(block),
            Payload::Lent(lent) => lent.loan.with(use_bytes),
        }
    }
}

/// A frame on its way out.
pub struct Outgoing {
    /// Its header; the length is set from the payload.
    pub header: Header,
    /// Its body.
    pub payload: Payload,
}

/// The borrower's side of a loan. Dropping it tells the lender that the bytes are no longer needed.
pub struct Lent {
    loan: Arc<Loan>,
    len: usize,
    pending: Arc<Pending>,
}

impl Drop for Lent {
    fn drop(&mut self) {
        *self.loan.lock() = Source::Gone;
        let mut count = self.pending.count.lock().unwrap_or_else(PoisonError::into_inner);
        *count -= 1;
        if *count == 0 {
            self.pending.none.notify_all();
        }
    }
}

struct Loan(Mutex<Source>);

enum Source {
    Borrowed(*const u8, usize),
    Copied(Vec<u8>),
    Gone,
}

// SAFETY: the pointer is read under the mutex only, and `Sends` replaces it before the memory goes away.
unsafe impl Send for Source {}

impl Loan {
    fn lock(&self) -> std::sync::MutexGuard<'_, Source> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn with<T>(&self, use_bytes: impl FnOnce(&[u8]) -> T) -> T {
        match &*self.lock() {
            // SAFETY: `Sends::lend` promises the memory until `Sends` is dropped, which first takes this mutex.
            Source::Borrowed(start, len) => use_bytes(unsafe { std::slice::from_raw_parts(*start, *len) }),
            Source::Copied(bytes) => use_bytes(bytes),
            Source::Gone => use_bytes(&[]),
        }
    }
}

#[derive(Default)]
struct Pending {
    count: Mutex<usize>,
    none: Condvar,
}

/// The lender's side: all loans of one operation.
#[derive(Default)]
pub struct Sends {
    loans: Vec<Arc<Loan>>,
    pending: Arc<Pending>,
}

impl Sends {
    /// Lends `len` bytes at `start`.
    ///
    /// # Safety
    /// The bytes must stay readable until `self` is dropped, and must not be written before they are no longer needed:
    /// until [`Sends::wait`] returned, or a reply proved that the receiver has them.
    pub unsafe fn lend(&mut self, start: *const u8, len: usize) -> Payload {
        if len == 0 {
            return Payload::Empty;
        }
        let loan = Arc::new(Loan(Mutex::new(Source::Borrowed(start, len))));
        self.loans.push(Arc::clone(&loan));
        *self.pending.count.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        Payload::Lent(Lent { loan, len, pending: Arc::clone(&self.pending) })
    }

    /// Waits until everything lent has been handed to the kernel.
    pub fn wait(&self, watch: &Watch<'_>) -> Result<()> {
        loop {
            let count = self.pending.count.lock().unwrap_or_else(PoisonError::into_inner);
            let (count, _) = self
                .pending
                .none
                .wait_timeout_while(count, SLICE, |count| *count > 0)
                .unwrap_or_else(PoisonError::into_inner);
            if *count == 0 {
                return Ok(());
            }
            // not under the lock: the verdict may run the caller's signal handlers
            drop(count);
            watch.check(Vec::new)?;
        }
    }
}

impl Drop for Sends {
    fn drop(&mut self) {
        for loan in &self.loans {
            let mut source = loan.lock();
            if let Source::Borrowed(start, len) = *source {
                // SAFETY: `lend`'s caller keeps the memory readable until this drop has returned.
                *source = Source::Copied(unsafe { std::slice::from_raw_parts(start, len) }.to_vec());
            }
        }
    }
}

/// Writes frames to a socket until the queue is closed, then says that nothing more comes.
pub(crate) async fn write_frames(
    socket: &Socket,
    queue: &mut UnboundedReceiver<Outgoing>,
    mut gauge: Option<Gauge>,
    peer: u32,
    trace: &Recorder,
) -> io::Result<()> {
    while let Some(Outgoing { mut header, payload }) = queue.recv().await {
        header.length = payload.len() as u32;
        let head = header.encode();
        let total = HEADER + payload.len();
        let begin = (payload.len() >= trace::LEAST_PAYLOAD).then(trace::now);
        let mut done = 0;
        while done < total {
            done += write_rest(socket, &head, &payload, done).await?;
        }
        if let Some(begin) = begin {
            trace.record(Span::of_frame(What::Send { peer }, &header, begin));
        }
        gauge.take_if(|gauge| !gauge.wrote(total, socket));
    }
    socket.finish_writing();
    Ok(())
}

/// Writes some of what is left of a frame.
async fn write_rest(socket: &Socket, head: &[u8; HEADER], payload: &Payload, done: usize) -> io::Result<usize> {
    let write_body = |write: &mut dyn FnMut(&[IoSlice<'_>]) -> io::Result<usize>| {
        payload.with(|body| {
            let (from_head, from_body) = (done.min(HEADER), done.saturating_sub(HEADER));
            write(&[IoSlice::new(&head[from_head..]), IoSlice::new(&body[from_body..])])
        })
    };
    socket.write_some(write_body).await
}
