//! The engine as Python sees it.

use std::sync::Arc;
use std::time::Duration;

use offbeat_core::Error;
use offbeat_core::config::Config;
use offbeat_core::engine::Engine;
use offbeat_core::transport::rendezvous::Store;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::{Caught, raise};
use crate::group::Group;
use crate::store::PyStore;
use crate::tensor::view;
use crate::{dlpack, logger};

/// One rank's engine: its links, its groups and its shared memory.
#[pyclass(frozen, module = "offbeat._core")]
pub(crate) struct Runtime(Engine);

fn seconds(name: &str, value: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(value)
        .ok()
        .filter(|duration| !duration.is_zero())
        .ok_or_else(|| raise(Error::invalid(format!("{name}={value}; try: a positive number of seconds"))))
}

#[pymethods]
impl Runtime {
    #[new]
    #[pyo3(signature = (store, rank, world_size, *, connect_timeout, timeout, first_step_timeout, token, interface, reach))]
    #[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
    fn new(
        py: Python<'_>,
        store: Option<Py<PyAny>>,
        rank: u32,
        world_size: u32,
        connect_timeout: f64,
        timeout: f64,
        first_step_timeout: f64,
        token: Option<Vec<u8>>,
        interface: Option<String>,
        reach: Option<String>,
    ) -> PyResult<Self> {
        logger::install(rank);
        let mut config = Config::from_environment(|name| std::env::var(name).ok()).map_err(raise)?;
        config.options.connect_timeout = seconds("connect_timeout", connect_timeout)?;
        config.timeout = seconds("timeout", timeout)?;
        config.options.timeout = config.timeout;
        config.first_step_timeout = seconds("first_step_timeout", first_step_timeout)?;
        config.options.token = token;
        config.options.interface = interface.unwrap_or_default();
        config.options.reach = reach;
        let caught = Arc::new(Caught::default());
        let store = store.map(|store| PyStore { store, caught: Arc::clone(&caught) });
        let connect = || {
            let store = store.as_ref().map(|store| store as &dyn Store);
            Engine::connect(config, store, rank, world_size, Some(&|| caught.check_signals()))
        };
        py.detach(connect).map(Runtime).map_err(|error| caught.raise(error))
    }

    #[getter]
    fn rank(&self) -> u32 {
        self.0.rank()
    }

    #[getter]
    fn world_size(&self) -> u32 {
        self.0.world_size()
    }

    #[getter]
    fn local_rank(&self) -> usize {
        self.0.local_ranks().iter().position(|rank| *rank == self.0.rank()).unwrap_or_default()
    }

    #[getter]
    fn local_size(&self) -> usize {
        self.0.local_ranks().len()
    }

    #[getter]
    fn host(&self) -> &str {
        self.0.host()
    }

    fn world(&self) -> Group {
        Group(self.0.world().clone())
    }

    fn group(&self, py: Python<'_>, ranks: Vec<u32>) -> PyResult<Group> {
        let caught = Caught::default();
        py.detach(|| self.0.group(&ranks, Some(&|| caught.check_signals()))).map(Group).map_err(|e| caught.raise(e))
    }

    fn shared_empty(&self, py: Python<'_>, nbytes: usize) -> PyResult<Py<PyAny>> {
        dlpack::shared(py, self.0.shared(nbytes).map_err(raise)?)
    }

    fn send(&self, py: Python<'_>, tensor: &Bound<'_, PyAny>, dst: u32, tag: u64) -> PyResult<()> {
        let block = view(tensor)?;
        let caught = Caught::default();
        py.detach(|| self.0.send(&block, dst, tag, Some(&|| caught.check_signals()))).map_err(|e| caught.raise(e))
    }

    fn recv(&self, py: Python<'_>, tensor: &Bound<'_, PyAny>, src: u32, tag: u64) -> PyResult<()> {
        let block = view(tensor)?;
        let caught = Caught::default();
        py.detach(|| self.0.recv(&block, src, tag, Some(&|| caught.check_signals()))).map_err(|e| caught.raise(e))
    }

    fn links<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let mut links = Vec::new();
        self.0.each_link(|rank, link| {
            let (host, pid) = self.0.who(rank);
            let row = || {
                let row = PyDict::new(py);
                row.set_item("rank", rank)?;
                row.set_item("host", host)?;
                row.set_item("pid", pid)?;
                row.set_item("kind", link.kind.name())?;
                row.set_item("why", &link.why)?;
                row.set_item("local", &link.local)?;
                row.set_item("remote", &link.remote)?;
                row.set_item("streams", link.streams())?;
                Ok(row)
            };
            links.push(row());
        });
        links.into_iter().collect()
    }

    fn fail(&self, cause: &str) {
        self.0.fail(cause);
    }

    fn shutdown(&self, py: Python<'_>, reason: &str) {
        py.detach(|| self.0.shutdown(reason));
    }
}
