//! Kernels: PTX that is embedded in this library, loaded for a device, and launched on addresses.
//!
//! PTX is text that the driver compiles for the device when it is loaded, so it is loaded once for each device and kept. The
//! driver does not check arguments: [`Arguments`] are plain numbers, in the order of the kernel's declaration, and
//! `kernels.rs` is the one place that knows these.

use std::ffi::{CString, c_void};
use std::sync::Arc;

use cudarc::driver::{result, sys};
use offbeat_core::{Error, Result};

use crate::device::Device;
use crate::stream::Stream;

/// Compiled PTX on a device.
pub struct Module {
    device: Arc<Device>,
    raw: sys::CUmodule,
}

// SAFETY: a module is a handle that the driver lets any thread use.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

/// A kernel of a module.
pub struct Function {
    module: Arc<Module>,
    raw: sys::CUfunction,
    name: String,
}

// SAFETY: as for the module, which it keeps.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

impl Module {
    /// Lets the driver compile some PTX.
    pub fn load(device: &Arc<Device>, ptx: &str) -> Result<Arc<Self>> {
        let text = CString::new(ptx).map_err(|_| Error::invalid("PTX with a zero byte in it"))?;
        // SAFETY: text that ends with a zero; the driver checks what it says.
        let raw = device.with("our kernels", || unsafe { result::module::load_data(text.as_ptr().cast()) })?;
        Ok(Arc::new(Module { device: Arc::clone(device), raw }))
    }

    /// The kernel with a name.
    pub fn function(self: &Arc<Self>, name: &str) -> Result<Function> {
        let text = CString::new(name).map_err(|_| Error::invalid("a name with a zero byte in it"))?;
        let what = format!("the kernel {name}");
        // SAFETY: the module is loaded.
        let raw = self.device.with(&what, || unsafe { result::module::get_function(self.raw, text) })?;
        Ok(Function { module: Arc::clone(self), raw, name: name.to_owned() })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: loaded in `load`, and no function of it is left.
        let freed = self.device.with("our kernels", || unsafe { result::module::unload(self.raw) });
        freed.unwrap_or_else(|error| log::warn!("{}", error.message));
    }
}

/// How many blocks of how many threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Blocks.
    pub blocks: u32,
    /// Threads of each.
    pub threads: u32,
}

/// What a kernel is given, in its order.
#[derive(Default)]
pub struct Arguments(Vec<u64>);

impl Arguments {
    /// None yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// An address, or a number of 64 bits.
    pub fn wide(mut self, value: u64) -> Self {
        self.0.push(value);
        self
    }

    /// A number of 32 bits.
    pub fn short(self, value: u32) -> Self {
        // the driver reads as many bytes as the kernel declares, from the first on
        self.wide(u64::from(value).to_le())
    }

    /// A number with a fraction.
    pub fn float(self, value: f32) -> Self {
        self.short(value.to_bits())
    }
}

impl Function {
    /// Enqueues a launch.
    ///
    /// # Safety
    /// The arguments are those that the kernel declares, and what they point to stays until it has run.
    pub unsafe fn launch(&self, stream: &Stream, grid: Grid, arguments: &mut Arguments) -> Result<()> {
        let mut places: Vec<*mut c_void> = arguments.0.iter_mut().map(|value| (&raw mut *value).cast()).collect();
        let what = format!("the kernel {}", self.name);
        let (blocks, threads) = ((grid.blocks, 1, 1), (grid.threads, 1, 1));
        self.module.device.with(&what, || {
            // SAFETY: the caller's promise; the driver copies the arguments before it returns.
            unsafe { result::launch_kernel(self.raw, blocks, threads, 0, stream.raw(), &mut places) }
        })
    }
}
