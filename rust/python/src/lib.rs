//! The extension module `offbeat._core`: converts, releases the GIL, maps errors. Decides nothing.

mod background;
mod carrier;
mod dlpack;
mod errors;
mod function;
mod group;
mod logger;
mod runtime;
mod scheduler;
mod store;
mod tensor;

use offbeat_core::transport::address::{Selector, interfaces as list_interfaces};
use offbeat_core::transport::{host, trace};
use pyo3::prelude::*;

use crate::errors::raise;

/// (name, address, whether `spec` selects it) of each interface that is up.
#[pyfunction]
#[pyo3(signature = (spec))]
fn interfaces(spec: Option<&str>) -> PyResult<Vec<(String, String, bool)>> {
    let selector = Selector::parse(spec.unwrap_or_default()).map_err(raise)?;
    let found = list_interfaces().map_err(raise)?;
    Ok(found.into_iter().map(|i| (i.name.clone(), i.ip.to_string(), selector.selects(&i))).collect())
}

/// A number for the contents of a contiguous tensor on the CPU.
#[pyfunction]
fn digest(py: Python<'_>, tensor: &Bound<'_, PyAny>) -> PyResult<i64> {
    let buffer = tensor::view(tensor)?.buffer;
    // SAFETY: the caller holds the tensor, which is contiguous and as long as it says.
    let bytes = unsafe { std::slice::from_raw_parts(buffer.start.cast_const(), buffer.bytes()) };
    Ok(py.detach(|| offbeat_core::digest::digest(bytes)).cast_signed())
}

/// Nanoseconds of the clock that traces are recorded by.
#[pyfunction]
fn now() -> u64 {
    trace::now()
}

/// Which clock that is: the same text on all ranks that read the same one.
#[pyfunction]
fn clock() -> String {
    host::clock()
}

/// One line: what there is of CUDA and NCCL, or what is missing and what to try. Starts the driver, if it is there.
#[pyfunction]
fn cuda_report(py: Python<'_>) -> String {
    py.detach(|| offbeat_cuda::library::report(true))
}

/// The Rust core of offbeat.
#[pymodule]
mod _core {
    use pyo3::prelude::*;

    #[pymodule_export]
    use super::background::Background;
    #[pymodule_export]
    use super::carrier::Carrier;
    #[pymodule_export]
    use super::group::{Codec, Group, Ticket};
    #[pymodule_export]
    use super::runtime::Runtime;
    #[pymodule_export]
    use super::scheduler::Scheduler;
    #[pymodule_export]
    use super::{clock, cuda_report, digest, interfaces, now};

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
