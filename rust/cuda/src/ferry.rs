//! Snapshots from a device to the host and deltas back, on a stream of our own: core's [`Ferry`].
//!
//! Torch's stream copies weights into a flat tensor and adds another one to them. Between these and pinned memory of the same
//! length our stream copies, after what torch's has done and before what it does next:
//!
//! ```text
//! torch's stream   copy │ …                 wait │ add │
//! our stream       wait └▶ to the host ▪    to the device ▪    wait └▶ …       ▪ what `is_idle` asks for
//! ```

use std::mem::ManuallyDrop;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use offbeat_core::buffer::{Lent, Storage};
use offbeat_core::event::Event;
use offbeat_core::{Result, background, event};

use crate::device::Device;
use crate::pinned::Pinned;
use crate::stream::{Mark, Stream};

/// How long the end of a ferry waits for what is on its way.
const PARTING: Duration = Duration::from_secs(5);

/// Gives memory of torch's for so many f32, all zero. It is given back when our stream is done with it.
pub type Allocate<'a> = &'a dyn Fn(usize) -> Result<Arc<dyn Lent>>;

/// One model's.
pub struct Ferry {
    stream: Arc<Stream>,
    /// Of the snapshot and of the delta.
    sides: ManuallyDrop<[Side; 2]>,
    bytes: usize,
    /// The end of what was enqueued last.
    last: Mutex<Option<Mark>>,
}

/// Memory here and there.
struct Side {
    device: Arc<dyn Lent>,
    host: Pinned,
}

impl Ferry {
    /// For snapshots and deltas of so many numbers.
    pub fn new(device: &Arc<Device>, count: usize, allocate: Allocate<'_>) -> Result<Self> {
        let stream = Stream::new(device)?;
        let bytes = count * size_of::<f32>();
        let side = || Result::Ok(Side { device: allocate(count)?, host: Pinned::new(device, bytes)? });
        let sides = ManuallyDrop::new([side()?, side()?]);
        Ok(Ferry { stream, sides, bytes, last: Mutex::default() })
    }

    fn last(&self) -> MutexGuard<'_, Option<Mark>> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn torch(&self, stream: event::Stream) -> Arc<Stream> {
        // SAFETY: the handle is of torch's current stream on this device, and torch never destroys its streams.
        unsafe { Stream::borrow(self.stream.device(), stream) }
    }
}

impl background::Ferry for Ferry {
    fn memory(&self) -> [Storage; 2] {
        self.sides.each_ref().map(|side| Storage::Lent(Arc::clone(&side.device)))
    }

    fn aboard(&self) -> [*mut f32; 2] {
        self.sides.each_ref().map(|side| side.host.start().cast())
    }

    fn fetch(&self, stream: event::Stream) -> Result<()> {
        // of two snapshots in a row the first may be torn by the copy of the second: nobody looks before that has come
        self.stream.wait(&self.torch(stream).mark()?)?;
        let [Side { device, host }, _] = &*self.sides;
        // SAFETY: both are that long, and stay until the stream has come past this, see `drop`.
        unsafe { self.stream.fetch(device.start() as u64, host.start(), self.bytes)? };
        *self.last() = Some(self.stream.mark()?);
        Ok(())
    }

    fn is_idle(&self) -> Result<bool> {
        let mut last = self.last();
        let idle = last.as_ref().map_or(Ok(true), Mark::reached)?;
        if idle {
            *last = None;
        }
        Ok(idle)
    }

    fn send(&self) -> Result<()> {
        let [_, Side { device, host }] = &*self.sides;
        // SAFETY: as in `fetch`; the background thread leaves the host's side alone until this is idle.
        unsafe { self.stream.send(host.start(), device.start() as u64, self.bytes)? };
        *self.last() = Some(self.stream.mark()?);
        Ok(())
    }

    fn land(&self, stream: event::Stream) -> Result<()> {
        // a passage that is known to have ended needs no wait
        self.last().as_ref().map_or(Ok(()), |mark| self.torch(stream).wait(mark))
    }

    fn landed(&self, stream: event::Stream) -> Result<()> {
        self.stream.wait(&self.torch(stream).mark()?)
    }
}

impl Drop for Ferry {
    fn drop(&mut self) {
        let last = self.last().take();
        match last.map_or(Ok(()), |mark| mark.wait(Some(PARTING), None)) {
            // SAFETY: the device is done with them, and nobody touches them after this.
            Ok(()) => unsafe { ManuallyDrop::drop(&mut self.sides) },
            // memory that a stream may still write to is better lost than given to others
            Err(error) => log::warn!("memory of a snapshot is left behind: {}", error.message),
        }
    }
}
