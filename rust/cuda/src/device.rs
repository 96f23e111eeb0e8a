//! A device: its primary context, which is torch's too.
//!
//! Every call of the driver goes through [`Device::with`]: the context becomes the thread's current one and the one before
//! comes back afterwards, so that whoever called finds torch's current device as it was. A panic in between is an error.

use std::sync::Arc;

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;
use offbeat_core::{Error, Kind, Result};

use crate::library;

/// A device and its primary context.
pub struct Device {
    ordinal: u32,
    raw: sys::CUdevice,
    context: sys::CUcontext,
    /// Whether memory can be allocated in the order of a stream.
    pub(crate) ordered: bool,
    rank: u32,
    host: String,
}

// SAFETY: the driver may be called from any thread; a context is only a handle, and made current where it is used.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl Device {
    /// Retains the primary context of a device. `rank` and `host` are this process's, for its errors.
    pub fn open(ordinal: u32, rank: u32, host: &str) -> Result<Arc<Self>> {
        let there = library::devices()?;
        let fails = |what: &str, error| {
            Error::of_rank(
                Kind::Unsupported,
                rank,
                host,
                format!("rank {rank} ({host}), {}", library::said(what, error)),
            )
        };
        if ordinal >= there {
            return Err(Error::invalid(format!(
                "rank {rank} ({host}) asks for cuda:{ordinal}, and there are {there} devices; try: torch.cuda.set_device(\
                 local_rank), and no more ranks on a host than it has devices"
            )));
        }
        library::guard(|| {
            let what = format!("cuda:{ordinal}");
            let raw = result::device::get(ordinal.cast_signed()).map_err(|error| fails(&what, error))?;
            let pools = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED;
            // SAFETY: the device exists; what is retained is released when this is dropped.
            let (context, ordered) = unsafe {
                let context = result::primary_ctx::retain(raw).map_err(|error| fails(&what, error))?;
                (context, result::device::get_attribute(raw, pools).is_ok_and(|pools| pools > 0))
            };
            Ok(Arc::new(Device { ordinal, raw, context, ordered, rank, host: host.to_owned() }))
        })
    }

    /// Its number.
    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// The rank of this process.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// Its host.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// What the device is called.
    pub fn name(&self) -> Result<String> {
        self.with("its name", || result::device::get_name(self.raw))
    }

    /// Runs something with the context current, and leaves the thread as it was.
    pub(crate) fn with<T>(&self, what: &str, act: impl FnOnce() -> std::result::Result<T, DriverError>) -> Result<T> {
        self.within(|| act().map_err(|error| self.fails(Kind::Unsupported, &library::said(what, error))))
    }

    /// As [`Device::with`], for what has errors of ours.
    pub(crate) fn within<T>(&self, act: impl FnOnce() -> Result<T>) -> Result<T> {
        library::guard(|| {
            // SAFETY: the context is retained as long as this device is there.
            let pushed = unsafe { sys::cuCtxPushCurrent_v2(self.context) };
            pushed.result().map_err(|error| self.fails(Kind::Unsupported, &library::said("its context", error)))?;
            let _pop = Pop;
            act()
        })
    }

    /// An error that names this rank and device.
    pub(crate) fn fails(&self, kind: Kind, text: &str) -> Error {
        let Device { rank, host, ordinal, .. } = self;
        Error::of_rank(kind, *rank, host, format!("rank {rank} ({host}, cuda:{ordinal}): {text}"))
    }
}

/// Makes the context current again that was so before.
struct Pop;

impl Drop for Pop {
    fn drop(&mut self) {
        let mut context = std::ptr::null_mut();
        // SAFETY: whoever made this pushed a context on this thread.
        if let Err(error) = unsafe { sys::cuCtxPopCurrent_v2(&raw mut context) }.result() {
            log::warn!("the current device could not be restored: {}", library::said("cuCtxPopCurrent", error));
        }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let released = library::guard(|| {
            // SAFETY: retained once, in `open`.
            let released = unsafe { result::primary_ctx::release(self.raw) };
            released.map_err(|error| self.fails(Kind::Unsupported, &library::said("its context", error)))
        });
        if let Err(error) = released {
            log::warn!("{}", error.message);
        }
    }
}
