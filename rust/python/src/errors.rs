//! Errors become the Python classes of `offbeat.errors`; signals pass through as what they are.

use std::sync::Mutex;

use offbeat_core::{Error, Kind};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// An error as a Python exception of the same name.
pub(crate) fn raise(error: Error) -> PyErr {
    Python::attach(|py| build(py, &error).unwrap_or_else(|problem| problem))
}

fn build(py: Python<'_>, error: &Error) -> PyResult<PyErr> {
    if error.kind == Kind::Interrupted {
        return Ok(PyRuntimeError::new_err(error.message.clone()));
    }
    let class = py.import("offbeat.errors")?.getattr(error.kind.name())?;
    let fields = PyDict::new(py);
    match error.kind {
        Kind::PeerLost => {
            fields.set_item("rank", error.rank)?;
            fields.set_item("host", &error.host)?;
        }
        Kind::PeerFailed => {
            fields.set_item("rank", error.rank)?;
            fields.set_item("cause", &error.cause)?;
        }
        _ => {}
    }
    Ok(PyErr::from_value(class.call((&error.message,), Some(&fields))?))
}

/// An exception that Python raised while Rust was waiting: a signal handler's, or the store's.
#[derive(Default)]
pub(crate) struct Caught(Mutex<Option<PyErr>>);

impl Caught {
    /// Keeps an exception and gives the error that carries it through Rust.
    pub(crate) fn keep(&self, exception: PyErr) -> Error {
        let message = exception.to_string();
        if let Ok(mut slot) = self.0.lock() {
            *slot = Some(exception);
        }
        Error::new(Kind::Interrupted, message)
    }

    /// Lets Python's signal handlers run; does nothing outside of the main thread.
    pub(crate) fn check_signals(&self) -> Result<(), Error> {
        Python::attach(|py| py.check_signals()).map_err(|exception| self.keep(exception))
    }

    /// The exception that was kept, or the error itself.
    pub(crate) fn raise(&self, error: Error) -> PyErr {
        let kept = match error.kind {
            Kind::Interrupted => self.0.lock().ok().and_then(|mut slot| slot.take()),
            _ => None,
        };
        kept.unwrap_or_else(|| raise(error))
    }
}
