//! Whether the CUDA driver is there, and which. Everything else in this crate asks here first.
//!
//! The driver's library is loaded when it is first asked for and never linked. cudarc panics where the library or a function
//! of it is missing, so both are looked for here before cudarc is used, and what is missing is an error of one line. A
//! panic that comes all the same becomes an error too ([`guard`]).

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;
use libloading::Library;
use offbeat_core::{Error, Result};

/// The oldest driver that takes our PTX, as the driver writes versions.
const OLDEST: i32 = 12_000;

/// The functions of the driver that this crate calls.
const FUNCTIONS: [&str; 35] = [
    "cuCtxGetCurrent",
    "cuCtxPopCurrent_v2",
    "cuCtxPushCurrent_v2",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDriverGetVersion",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventQuery",
    "cuEventRecord",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuInit",
    "cuLaunchKernel",
    "cuMemAllocAsync",
    "cuMemAlloc_v2",
    "cuMemFreeAsync",
    "cuMemFreeHost",
    "cuMemFree_v2",
    "cuMemHostAlloc",
    "cuMemHostGetDevicePointer_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuStreamCreateWithPriority",
    "cuStreamDestroy_v2",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
];

/// A driver that can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Driver {
    /// The newest CUDA that it knows: major and minor version.
    pub version: (i32, i32),
}

/// The driver, if it is there and new enough. Looks once; does not start it, so a process may still fork afterwards.
pub fn driver() -> Result<Driver> {
    static FOUND: OnceLock<Result<Driver>> = OnceLock::new();
    FOUND.get_or_init(|| guard(look)).clone()
}

fn look() -> Result<Driver> {
    let names = cudarc::get_lib_name_candidates("cuda");
    // SAFETY: loading the driver runs its initialisers, which are NVIDIA's; it is what any CUDA program does first.
    let Some(library) = names.iter().find_map(|name| unsafe { Library::new(name).ok() }) else {
        return Err(missing(
            "libcuda.so.1 is not there; try: install the NVIDIA driver, or start the container with GPUs",
        ));
    };
    for name in FUNCTIONS {
        // SAFETY: the symbol is only looked for, not called.
        if unsafe { library.get::<unsafe extern "C" fn()>(name.as_bytes()) }.is_err() {
            return Err(missing(&format!(
                "libcuda.so.1 has no {name}; try: update the NVIDIA driver to R525 or later"
            )));
        }
    }
    let mut version = 0;
    // SAFETY: the function is there, takes a place for a number, and needs no initialised driver.
    let code = unsafe { sys::cuDriverGetVersion(&raw mut version) };
    code.result().map_err(|error| missing(&said("cuDriverGetVersion", error)))?;
    match version < OLDEST {
        true => Err(missing(&format!(
            "the driver knows CUDA {}.{} only; try: update the NVIDIA driver to R525 (CUDA 12.0) or later",
            version / 1000,
            version % 1000 / 10
        ))),
        false => Ok(Driver { version: (version / 1000, version % 1000 / 10) }),
    }
}

/// How many devices there are. Starts the driver; a process should not fork and use CUDA in the child afterwards.
pub fn devices() -> Result<u32> {
    driver()?;
    guard(|| {
        let count = result::init().and_then(|()| result::device::get_count());
        let count = count.map_err(|error| missing(&said("the driver does not start", error)))?;
        match u32::try_from(count) {
            Ok(count) if count > 0 => Ok(count),
            _ => {
                Err(missing("the driver sees no device; try: nvidia-smi, and whether CUDA_VISIBLE_DEVICES hides them"))
            }
        }
    })
}

/// One line: what there is of CUDA and NCCL, or what is missing and what to try. Starts the driver to count devices only if
/// `starts` says so.
pub fn report(starts: bool) -> String {
    let driver = match driver() {
        Ok(driver) => driver,
        Err(error) => return error.message,
    };
    let (major, minor) = driver.version;
    let devices = match starts.then(devices) {
        None => String::new(),
        Some(Ok(1)) => ", 1 device".to_owned(),
        Some(Ok(count)) => format!(", {count} devices"),
        Some(Err(error)) => return format!("driver for CUDA {major}.{minor}, but {}", error.message),
    };
    let nccl = match crate::nccl::Nccl::find(None) {
        Ok(nccl) => nccl.to_string(),
        Err(error) => error.message,
    };
    format!("driver for CUDA {major}.{minor}{devices}; {nccl}")
}

/// Runs something that may call cudarc. A panic, which would be a function that [`driver`] did not look for, becomes an error.
pub(crate) fn guard<T>(act: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(act)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
        Err(missing(&format!(
            "the driver does not fit: {}; try: update the NVIDIA driver, and report this",
            text.unwrap_or("panic").lines().next().unwrap_or_default()
        )))
    })
}

/// What the driver says of an error, and what to try.
pub(crate) fn said(what: &str, error: DriverError) -> String {
    let name = error.error_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let text = error.error_string().map(|text| text.to_string_lossy().into_owned()).unwrap_or_default();
    format!("{what}: {text} ({name}, {}); try: {}", error.0 as u32, advice(error.0))
}

fn advice(code: sys::CUresult) -> &'static str {
    use sys::CUresult as Code;
    match code {
        Code::CUDA_ERROR_OUT_OF_MEMORY => {
            "smaller buckets (bucket_bytes), smaller batches, or torch.cuda.set_per_process_memory_fraction"
        }
        Code::CUDA_ERROR_NO_DEVICE | Code::CUDA_ERROR_INVALID_DEVICE => {
            "nvidia-smi, and whether CUDA_VISIBLE_DEVICES hides the device"
        }
        Code::CUDA_ERROR_UNSUPPORTED_PTX_VERSION
        | Code::CUDA_ERROR_INVALID_PTX
        | Code::CUDA_ERROR_NO_BINARY_FOR_GPU => {
            "update the NVIDIA driver to R525 or later, and a GPU of compute capability 7.0 or later"
        }
        Code::CUDA_ERROR_ILLEGAL_ADDRESS | Code::CUDA_ERROR_LAUNCH_FAILED => {
            "CUDA_LAUNCH_BLOCKING=1 to find the kernel at fault; the process cannot use the GPU any more"
        }
        _ => "nvidia-smi and the kernel's log (dmesg) on this host",
    }
}

fn missing(text: &str) -> Error {
    Error::unsupported(format!("no CUDA: {text}"))
}
