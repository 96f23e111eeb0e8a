//! The extension module `offbeat._core`: converts, releases the GIL, maps errors. Decides nothing.

mod dlpack;
mod errors;
mod group;
mod logger;
mod runtime;
mod store;
mod tensor;

use offbeat_core::transport::address::{Selector, interfaces as list_interfaces};
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

/// The Rust core of offbeat.
#[pymodule]
mod _core {
    use pyo3::prelude::*;

    #[pymodule_export]
    use super::group::{Codec, Group, Ticket};
    #[pymodule_export]
    use super::interfaces;
    #[pymodule_export]
    use super::runtime::Runtime;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
