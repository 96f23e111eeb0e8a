//! Streams, of our own and torch's, and marks in them.
//!
//! A [`Mark`] is a CUDA event: it has happened when all that was enqueued before it is done. Streams wait for marks of other
//! streams; the host only asks, and sleeps in between ([`Event::wait`]), so that a deadline and signals can end the wait.

use std::any::Any;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;
use offbeat_core::event::{self, Event};
use offbeat_core::{Error, Interrupt, Kind, Result};

use crate::device::Device;
use crate::story::Story;

/// The address of something in a device's memory.
pub type Address = u64;

/// Between two looks at a mark: at first it is nearly there, later it may take long.
const PAUSES: (Duration, Duration) = (Duration::from_micros(20), Duration::from_millis(1));
/// How often signal handlers may run in a wait.
const SIGNALS: Duration = Duration::from_millis(20);

/// Work in order, on one device.
pub struct Stream {
    device: Arc<Device>,
    raw: sys::CUstream,
    ours: bool,
}

// SAFETY: a stream is a handle that the driver lets any thread use.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// A stream of our own, ahead of torch's where both have work: what is exchanged early is waited for less.
    pub fn new(device: &Arc<Device>) -> Result<Arc<Self>> {
        let kind = result::stream::StreamKind::NonBlocking;
        // the driver takes the highest priority that it has for a lower number
        let raw = device.with("a stream", || result::stream::create_with_priority(kind, -5))?;
        Ok(Arc::new(Stream { device: Arc::clone(device), raw, ours: true }))
    }

    /// A stream of torch's, by `torch.cuda.current_stream().cuda_stream`; 0 is the default stream.
    ///
    /// # Safety
    /// The stream is of this device and outlives what is returned.
    pub unsafe fn borrow(device: &Arc<Device>, raw: event::Stream) -> Arc<Self> {
        Arc::new(Stream { device: Arc::clone(device), raw: raw as sys::CUstream, ours: false })
    }

    /// Its device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// By what others know it.
    pub fn handle(&self) -> event::Stream {
        self.raw as event::Stream
    }

    pub(crate) fn raw(&self) -> sys::CUstream {
        self.raw
    }

    /// Marks the end of what is enqueued so far.
    pub fn mark(&self) -> Result<Mark> {
        self.device.with("an event", || {
            let raw = result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)?;
            let mark = Mark { device: Arc::clone(&self.device), raw, story: None };
            // SAFETY: both are alive, and of one context.
            unsafe { result::event::record(mark.raw, self.raw)? };
            Ok(mark)
        })
    }

    /// Lets what is enqueued from now on wait for a mark, of any stream.
    pub fn wait(&self, mark: &Mark) -> Result<()> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both are alive.
        self.device.with("an event", || unsafe { result::stream::wait_event(self.raw, mark.raw, flags) })
    }

    /// Copies inside of the device.
    ///
    /// # Safety
    /// Both are `bytes` long, do not overlap, and stay until the copy is done.
    pub unsafe fn copy(&self, from: Address, to: Address, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        self.device.with("a copy", || unsafe { result::memcpy_dtod_async(to, from, bytes, self.raw) })
    }

    /// Fills memory with zeros.
    ///
    /// # Safety
    /// It is `bytes` long, and stays until that is done.
    pub unsafe fn clear(&self, at: Address, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        self.device.with("zeros", || unsafe { result::memset_d8_async(at, 0, bytes, self.raw) })
    }

    /// Copies to pinned memory of the host; nothing waits for it.
    ///
    /// # Safety
    /// Both are `bytes` long and stay until the copy is done, and nobody touches `to` before.
    pub unsafe fn fetch(&self, from: Address, to: *mut u8, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        self.device.with("a copy", || unsafe { sys::cuMemcpyDtoHAsync_v2(to.cast(), from, bytes, self.raw).result() })
    }

    /// Copies from pinned memory of the host; nothing waits for it.
    ///
    /// # Safety
    /// Both are `bytes` long and stay until the copy is done, and nobody writes to `from` before.
    pub unsafe fn send(&self, from: *const u8, to: Address, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        self.device.with("a copy", || unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.cast(), bytes, self.raw).result() })
    }

    /// Copies to the device. The driver has read the bytes when this returns; not for the inside of a step.
    ///
    /// # Safety
    /// `to` has room, and stays until the copy is done.
    pub unsafe fn upload(&self, from: &[u8], to: Address) -> Result<()> {
        if from.is_empty() {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        self.device.with("a copy", || unsafe { result::memcpy_htod_async(to, from, self.raw) })
    }

    /// Copies from the device and waits for it; not for the inside of a step.
    ///
    /// # Safety
    /// `from` is as long as `to`.
    pub unsafe fn download(&self, from: Address, to: &mut [u8]) -> Result<()> {
        if to.is_empty() {
            return Ok(());
        }
        self.device.with("a copy", || {
            // SAFETY: the caller's promise; the bytes stay until the stream has come so far.
            unsafe {
                result::memcpy_dtoh_async(to, from, self.raw)?;
                result::stream::synchronize(self.raw)
            }
        })
    }

    /// Waits until all that is enqueued is done, without a deadline; for the end of things.
    pub fn drain(&self) -> Result<()> {
        // SAFETY: the stream is alive.
        self.device.with("a stream", || unsafe { result::stream::synchronize(self.raw) })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.ours {
            // SAFETY: made in `new`; the driver ends what is enqueued before it frees the stream.
            let freed = self.device.with("a stream", || unsafe { result::stream::destroy(self.raw) });
            freed.unwrap_or_else(|error| log::warn!("{}", error.message));
        }
    }
}

/// A place in a stream.
pub struct Mark {
    device: Arc<Device>,
    raw: sys::CUevent,
    /// What became of the communicator whose work it ends, if any.
    story: Option<Arc<Story>>,
}

// SAFETY: an event is a handle that the driver lets any thread use.
unsafe impl Send for Mark {}
// SAFETY: as above.
unsafe impl Sync for Mark {}

impl Mark {
    /// Ties the mark to what becomes of a communicator: if that fails, so has the work before the mark.
    pub(crate) fn told_by(mut self, story: &Arc<Story>) -> Self {
        self.story = Some(Arc::clone(story));
        self
    }

    /// Whether it has happened; an error if the device has failed.
    pub(crate) fn reached(&self) -> Result<bool> {
        self.device.with("work on the device", || {
            // SAFETY: the event is alive.
            match unsafe { result::event::query(self.raw) } {
                Ok(()) => Ok(true),
                Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
                Err(error) => Err(error),
            }
        })
    }

    fn failure(&self) -> Option<Error> {
        self.story.as_ref().and_then(|story| story.told())
    }
}

impl Event for Mark {
    fn as_any(&self) -> Option<&dyn Any> {
        Some(self)
    }

    fn done(&self) -> bool {
        self.failure().is_some() || self.reached().unwrap_or(true)
    }

    fn wait(&self, limit: Option<Duration>, interrupt: Option<&Interrupt<'_>>) -> Result<()> {
        let began = Instant::now();
        let (mut pause, mut heard) = (PAUSES.0, began);
        loop {
            let reached = self.reached()?;
            // work that was given up ends too, with whatever is in memory
            if let Some(error) = self.failure() {
                return Err(error);
            }
            if reached {
                return Ok(());
            }
            if limit.is_some_and(|limit| began.elapsed() >= limit) {
                let text = format!(
                    "the work is still under way after {:.1} s; try: wait again, or wait longer",
                    limit.unwrap_or_default().as_secs_f64()
                );
                return Err(self.device.fails(Kind::Timeout, &text));
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(PAUSES.1);
            if let Some(interrupt) = interrupt
                && heard.elapsed() >= SIGNALS
            {
                heard = Instant::now();
                interrupt()?;
            }
        }
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        // SAFETY: made in `mark`; streams that wait for it go on waiting for what it marked.
        let freed = self.device.with("an event", || unsafe { result::event::destroy(self.raw) });
        freed.unwrap_or_else(|error| log::warn!("{}", error.message));
    }
}
