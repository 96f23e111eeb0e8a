//! A Python store as the core's `Store`.

use std::sync::Arc;
use std::time::Duration;

use offbeat_core::Error;
use offbeat_core::transport::rendezvous::Store;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::errors::Caught;

/// A Python object with `set(key, value)` and `get(key, wait)`.
pub(crate) struct PyStore {
    pub(crate) store: Py<PyAny>,
    pub(crate) caught: Arc<Caught>,
}

impl Store for PyStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<(), Error> {
        let set = |py: Python<'_>| self.store.call_method1(py, "set", (key, PyBytes::new(py, value)));
        Python::attach(set).map(|_| ()).map_err(|exception| self.caught.keep(exception))
    }

    fn get(&self, key: &str, wait: Duration) -> Result<Option<Vec<u8>>, Error> {
        let get = |py: Python<'_>| self.store.call_method1(py, "get", (key, wait.as_secs_f64()))?.extract(py);
        Python::attach(get).map_err(|exception| self.caught.keep(exception))
    }
}
