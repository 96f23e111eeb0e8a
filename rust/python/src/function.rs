//! A step that the user wrote in Python: the one place where the communication thread takes the GIL.

use offbeat_core::algorithm::{self, Room};
use offbeat_core::dtype::DType;
use offbeat_core::{Error, Kind};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::carrier::shown;

/// `offbeat.steps.Apply`'s callable: gets capsules, or tensors and a stream where buckets are on a device, and gives nothing.
#[derive(Debug)]
pub(crate) struct Function {
    pub(crate) callable: Py<PyAny>,
    /// What it is called in messages.
    pub(crate) name: String,
    /// Who we are.
    pub(crate) rank: u32,
}

impl Function {
    fn enter(&self, py: Python<'_>, room: &Room<'_>) -> PyResult<()> {
        let bucket = shown(py, room.bucket, room.dtype, room.count)?;
        let states = PyDict::new(py);
        for (name, memory) in &room.states {
            states.set_item(name, shown(py, memory, DType::F32, room.count)?)?;
        }
        self.callable.call1(py, (bucket, states, room.tensors.to_vec(), room.step, room.stream)).map(drop)
    }
}

impl algorithm::Function for Function {
    fn call(&self, room: &Room<'_>) -> Result<(), Error> {
        let outcome = Python::try_attach(|py| self.enter(py, room));
        let cause = match outcome {
            Some(Ok(())) => return Ok(()),
            Some(Err(exception)) => exception.to_string(),
            None => "the interpreter is going away".to_owned(),
        };
        let message = format!(
            "the function {} of rank {} failed on a bucket of step {}: {cause}; try: call it by hand on a tensor",
            self.name, self.rank, room.step
        );
        Err(Error { cause, ..Error::of_rank(Kind::PeerFailed, self.rank, "", message) })
    }
}
