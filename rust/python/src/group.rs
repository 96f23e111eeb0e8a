//! Groups, tickets and codecs as Python sees them.

use std::time::Duration;

use offbeat_core::call::Call;
use offbeat_core::coding::Coding;
use offbeat_core::dtype::Op;
use offbeat_core::event::{Event, Output, Queue};
use offbeat_core::group::Work;
use offbeat_core::{codec, event, group};
use pyo3::prelude::*;

use crate::dlpack;
use crate::errors::{Caught, raise};
use crate::tensor::{quick, view, views};

/// A codec, checked and built once.
#[pyclass(frozen, module = "offbeat._core")]
pub(crate) struct Codec(pub(crate) &'static dyn codec::Codec);

#[pymethods]
impl Codec {
    #[new]
    fn new(name: &str) -> PyResult<Self> {
        codec::by_name(name).map(Codec).map_err(raise)
    }

    #[getter]
    fn name(&self) -> &'static str {
        self.0.name()
    }
}

/// Work under way.
#[pyclass(frozen, module = "offbeat._core")]
pub(crate) struct Ticket {
    ticket: event::Ticket,
    gives_tensors: bool,
}

#[pymethods]
impl Ticket {
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Option<Vec<Py<PyAny>>>> {
        let limit = timeout.map(|seconds| Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX));
        let caught = Caught::default();
        py.detach(|| self.ticket.wait(limit, Some(&|| caught.check_signals()))).map_err(|e| caught.raise(e))?;
        if !self.gives_tensors {
            return Ok(None);
        }
        tensors(py, self.ticket.take()).map(Some)
    }

    fn done(&self) -> bool {
        self.ticket.done()
    }
}

fn tensors(py: Python<'_>, output: Output) -> PyResult<Vec<Py<PyAny>>> {
    output.into_iter().map(|tensor| dlpack::owned(py, tensor)).collect()
}

/// Some ranks of the world and the calls between them.
#[pyclass(frozen, module = "offbeat._core")]
pub(crate) struct Group(pub(crate) group::Group);

/// What a call gives: a ticket, or its result.
#[derive(IntoPyObject)]
pub(crate) enum Reply {
    Ticket(Ticket),
    Tensors(Vec<Py<PyAny>>),
    Nothing(Option<bool>),
}

impl Group {
    /// Runs or queues a call; `keep` are the tensors whose memory it uses.
    fn call(
        &self,
        py: Python<'_>,
        call: Call,
        keep: Vec<Py<PyAny>>,
        async_op: bool,
        gives_tensors: bool,
    ) -> PyResult<Reply> {
        if async_op {
            let work = Work { call, keep: Some(Box::new(keep)) };
            let ticket = py.detach(|| self.0.enqueue(work, None)).map_err(raise)?;
            return Ok(Reply::Ticket(Ticket { ticket, gives_tensors }));
        }
        let caught = Caught::default();
        let work = Work { call, keep: None };
        let output = py.detach(|| self.0.run(work, Some(&|| caught.check_signals()))).map_err(|e| caught.raise(e))?;
        if gives_tensors { tensors(py, output).map(Reply::Tensors) } else { Ok(Reply::Nothing(None)) }
    }
}

fn op(name: &str) -> PyResult<Op> {
    Op::from_name(name).map_err(raise)
}

/// References to keep while an asynchronous call is under way; none are needed while the caller waits.
fn keep<'a>(tensors: impl IntoIterator<Item = &'a Bound<'a, PyAny>>, async_op: bool) -> Vec<Py<PyAny>> {
    if async_op { tensors.into_iter().map(|tensor| tensor.clone().unbind()).collect() } else { Vec::new() }
}

#[pymethods]
impl Group {
    #[getter]
    fn ranks(&self) -> Vec<u32> {
        self.0.ranks().to_vec()
    }

    fn all_reduce(
        &self,
        py: Python<'_>,
        tensor: &Bound<'_, PyAny>,
        op: &str,
        codec: Option<&Codec>,
        async_op: bool,
    ) -> PyResult<Reply> {
        let coding = codec.map(|codec| Coding::plain(codec.0));
        let call = Call::AllReduce { tensor: view(tensor)?, op: self::op(op)?, coding };
        self.call(py, call, keep([tensor], async_op), async_op, false)
    }

    /// The short cut for a plain `torch.Tensor`: blocks and gives true, or does nothing and gives false if the tensor must
    /// go the long way.
    #[pyo3(signature = (tensor, op, /))]
    fn try_all_reduce(&self, py: Python<'_>, tensor: &Bound<'_, PyAny>, op: &str) -> PyResult<bool> {
        let Some(tensor) = quick(tensor) else { return Ok(false) };
        let call = Call::AllReduce { tensor, op: self::op(op)?, coding: None };
        self.call(py, call, Vec::new(), false, false).map(|_| true)
    }

    fn reduce(&self, py: Python<'_>, tensor: &Bound<'_, PyAny>, dst: u32, op: &str, async_op: bool) -> PyResult<Reply> {
        let call = Call::Reduce { tensor: view(tensor)?, dst, op: self::op(op)? };
        self.call(py, call, keep([tensor], async_op), async_op, false)
    }

    fn broadcast(&self, py: Python<'_>, tensor: &Bound<'_, PyAny>, src: u32, async_op: bool) -> PyResult<Reply> {
        let call = Call::Broadcast { tensor: view(tensor)?, src };
        self.call(py, call, keep([tensor], async_op), async_op, false)
    }

    fn scatter(
        &self,
        py: Python<'_>,
        tensors: Option<Vec<Bound<'_, PyAny>>>,
        src: u32,
        out: &Bound<'_, PyAny>,
        async_op: bool,
    ) -> PyResult<Reply> {
        let list = tensors.as_deref().map(views).transpose()?;
        let call = Call::Scatter { tensors: list, src, out: view(out)? };
        let all = tensors.iter().flatten().chain([out]);
        self.call(py, call, keep(all, async_op), async_op, false)
    }

    fn barrier(&self, py: Python<'_>, async_op: bool) -> PyResult<Reply> {
        self.call(py, Call::Barrier, Vec::new(), async_op, false)
    }

    fn all_gather(&self, py: Python<'_>, tensor: &Bound<'_, PyAny>, async_op: bool) -> PyResult<Reply> {
        let call = Call::AllGather { tensor: view(tensor)? };
        self.call(py, call, keep([tensor], async_op), async_op, true)
    }

    fn gather(&self, py: Python<'_>, tensor: &Bound<'_, PyAny>, dst: u32, async_op: bool) -> PyResult<Reply> {
        let call = Call::Gather { tensor: view(tensor)?, dst };
        self.call(py, call, keep([tensor], async_op), async_op, true)
    }

    fn reduce_scatter(
        &self,
        py: Python<'_>,
        tensors: Vec<Bound<'_, PyAny>>,
        op: &str,
        async_op: bool,
    ) -> PyResult<Reply> {
        let call = Call::ReduceScatter { tensors: views(&tensors)?, op: self::op(op)? };
        self.call(py, call, keep(&tensors, async_op), async_op, true)
    }

    fn all_to_all(&self, py: Python<'_>, tensors: Vec<Bound<'_, PyAny>>, async_op: bool) -> PyResult<Reply> {
        let call = Call::AllToAll { tensors: views(&tensors)? };
        self.call(py, call, keep(&tensors, async_op), async_op, true)
    }
}
