//! The engine as Python sees it.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use offbeat_core::algorithm::{self, Description, When, meet};
use offbeat_core::background::{Agreed, Ferry};
use offbeat_core::bucket::Sizes;
use offbeat_core::buffer::Place;
use offbeat_core::config::Config;
use offbeat_core::dtype::DType;
use offbeat_core::engine::Engine;
use offbeat_core::transport::rendezvous::Store;
use offbeat_core::transport::trace::{Span, What};
use offbeat_core::{Error, Result};
use offbeat_cuda::site::Site;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyDict};

use crate::background::{self, Background};
use crate::carrier::{self, Carrier};
use crate::errors::{Caught, raise};
use crate::group::Group;
use crate::scheduler::{self, Scheduler};
use crate::store::PyStore;
use crate::tensor::view;
use crate::{dlpack, logger};

/// One rank's engine: its links, its groups and its shared memory.
#[pyclass(frozen, module = "offbeat._core")]
pub(crate) struct Runtime {
    engine: Engine,
    /// What this rank has of CUDA, once a model has asked for it.
    site: Mutex<Option<Arc<Site>>>,
    first_step_timeout: Duration,
}

impl Runtime {
    fn site(&self) -> std::sync::MutexGuard<'_, Option<Arc<Site>>> {
        self.site.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The device, opened if it is not yet.
    fn open(&self, device: u32) -> Result<Arc<Site>> {
        let mut site = self.site();
        if let Some(open) = site.as_ref().filter(|open| open.device() == device) {
            return Ok(Arc::clone(open));
        }
        let opened = Site::open(device, (self.engine.rank(), self.engine.host()), None)?;
        *site = Some(Arc::clone(&opened));
        Ok(opened)
    }
}

/// Bytes of ranks.
type ByRank<'py> = Vec<(u32, Bound<'py, PyByteArray>)>;

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
        if log::log_enabled!(log::Level::Info) {
            log::info!("{}", offbeat_cuda::library::report(false));
        }
        let mut config = Config::from_environment(|name| std::env::var(name).ok()).map_err(raise)?;
        config.options.connect_timeout = seconds("connect_timeout", connect_timeout)?;
        config.timeout = seconds("timeout", timeout)?;
        config.options.timeout = config.timeout;
        let first_step_timeout = seconds("first_step_timeout", first_step_timeout)?;
        config.first_step_timeout = first_step_timeout;
        config.options.token = token;
        config.options.interface = interface.unwrap_or_default();
        config.options.reach = reach;
        let caught = Arc::new(Caught::default());
        let store = store.map(|store| PyStore { store, caught: Arc::clone(&caught) });
        let connect = || {
            let store = store.as_ref().map(|store| store as &dyn Store);
            Engine::connect(config, store, rank, world_size, Some(&|| caught.check_signals()))
        };
        let engine = py.detach(connect).map_err(|error| caught.raise(error))?;
        Ok(Runtime { engine, site: Mutex::default(), first_step_timeout })
    }

    #[getter]
    fn rank(&self) -> u32 {
        self.engine.rank()
    }

    #[getter]
    fn world_size(&self) -> u32 {
        self.engine.world_size()
    }

    #[getter]
    fn local_rank(&self) -> usize {
        self.engine.local_ranks().iter().position(|rank| *rank == self.engine.rank()).unwrap_or_default()
    }

    #[getter]
    fn local_size(&self) -> usize {
        self.engine.local_ranks().len()
    }

    #[getter]
    fn host(&self) -> &str {
        self.engine.host()
    }

    fn world(&self) -> Group {
        Group(self.engine.world().clone())
    }

    fn group(&self, py: Python<'_>, ranks: Vec<u32>) -> PyResult<Group> {
        let caught = Caught::default();
        py.detach(|| self.engine.group(&ranks, Some(&|| caught.check_signals())))
            .map(Group)
            .map_err(|e| caught.raise(e))
    }

    #[pyo3(signature = (*, flat, one=false))]
    fn lanes(&self, py: Python<'_>, flat: bool, one: bool) -> PyResult<Vec<Group>> {
        let caught = Caught::default();
        let interrupt = || caught.check_signals();
        let lanes = py.detach(|| match one {
            true => self.engine.lane(flat, Some(&interrupt)).map(|lane| vec![lane]),
            false => self.engine.lanes(flat, Some(&interrupt)),
        });
        let lanes = lanes.map_err(|error| caught.raise(error))?;
        Ok(lanes.into_iter().map(Group).collect())
    }

    /// Connects the device of every member's parameters. `stream()` gives one of torch's for this carrier;
    /// `allocate(elements, dtype, stream)` gives memory for buckets, all zero.
    fn carrier(
        &self,
        py: Python<'_>,
        group: &Group,
        device: u32,
        stream: Py<PyAny>,
        allocate: Py<PyAny>,
    ) -> PyResult<Carrier> {
        let caught = Caught::default();
        let connected = py.detach(|| {
            let limit = self.first_step_timeout;
            let interrupt = || caught.check_signals();
            carrier::connect(
                self.open(device),
                &group.0,
                self.engine.rank(),
                (&stream, allocate),
                limit,
                Some(&interrupt),
            )
        });
        connected.map_err(|error| caught.raise(error))
    }

    #[pyo3(signature = (lanes, model, tensors, *, what, when, every, warmup, first, steps, bucket_bytes, carrier=None))]
    #[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
    fn scheduler(
        &self,
        lanes: Vec<PyRef<'_, Group>>,
        model: u32,
        tensors: Vec<(String, usize, usize, String)>,
        what: &str,
        when: &str,
        every: u64,
        warmup: u64,
        first: Vec<(String, Bound<'_, PyDict>)>,
        steps: Vec<(String, Bound<'_, PyDict>)>,
        bucket_bytes: usize,
        carrier: Option<PyRef<'_, Carrier>>,
    ) -> PyResult<Scheduler> {
        let place = carrier.as_ref().map_or(Place::Host, |carrier| Place::Cuda(carrier.device));
        let tensor = |tensor| scheduler::tensor(tensor, place);
        let tensors = tensors.into_iter().map(tensor).collect::<PyResult<Vec<_>>>()?;
        let (first, steps) =
            (scheduler::steps(first, self.engine.rank())?, scheduler::steps(steps, self.engine.rank())?);
        let (what, when) = (algorithm::What::from_name(what).map_err(raise)?, When::from_name(when).map_err(raise)?);
        let description = Description { what, when, every, warmup, first, steps };
        let sizes = Sizes::new(bucket_bytes).map_err(raise)?;
        let lanes = lanes.iter().map(|group| group.0.clone()).collect();
        let carrier = carrier.map(|carrier| Arc::clone(&carrier.inner) as Arc<dyn algorithm::Carrier>);
        self.engine.scheduler_on(carrier, lanes, model, tensors, description, sizes).map(Scheduler).map_err(raise)
    }

    /// `device` is the number of the GPU on which the model is, and what gives memory there, as for a carrier; then every
    /// member calls this.
    #[pyo3(signature = (group, counts, method, arguments, *, period, device=None))]
    #[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
    fn background(
        &self,
        py: Python<'_>,
        group: &Group,
        counts: Vec<usize>,
        method: &str,
        arguments: &Bound<'_, PyDict>,
        period: Option<f64>,
        device: Option<(u32, Py<PyAny>)>,
    ) -> PyResult<Background> {
        let description = background::description(method, arguments, period)?;
        let Some((device, function)) = device else {
            return self.engine.background(&group.0, &counts, description).map(Background).map_err(raise);
        };
        let caught = Caught::default();
        let made = py.detach(|| {
            let made = self.open(device).and_then(|site| {
                let allocate = |count| carrier::allocate(&function, count, DType::F32, None);
                let launch = |count| Ok(Arc::new(site.ferry(count, &allocate)?) as Arc<dyn Ferry>);
                self.engine.background_on(Some(&launch), &group.0, &counts, description)
            });
            // without this one the others would train alone
            meet(&group.0, made.as_ref().map(|_| Vec::new()).map_err(Clone::clone), Some(&|| caught.check_signals()))?;
            made
        });
        made.map(Background).map_err(|error| caught.raise(error))
    }

    fn convene(&self, py: Python<'_>) {
        py.detach(|| self.engine.convene());
    }

    fn settled(&self, py: Python<'_>) {
        py.detach(|| self.engine.settled());
    }

    /// What the ranks that are there have handed in, by rank; None if one of them has the result of the call that failed.
    #[pyo3(signature = (tensor, *, patient))]
    fn gather_living<'py>(
        &self,
        py: Python<'py>,
        tensor: &Bound<'py, PyAny>,
        patient: bool,
    ) -> PyResult<Option<ByRank<'py>>> {
        let value = view(tensor)?.buffer;
        // SAFETY: the tensor is contiguous and the caller's until this returns.
        let value = unsafe { std::slice::from_raw_parts(value.start.cast_const(), value.bytes()) };
        let caught = Caught::default();
        let gather = || self.engine.gather_living(value, patient, Some(&|| caught.check_signals()));
        Ok(match py.detach(gather).map_err(|error| caught.raise(error))? {
            Agreed::Settled => None,
            Agreed::Values(values) => {
                Some(values.into_iter().map(|(rank, value)| (rank, PyByteArray::new(py, &value))).collect())
            }
        })
    }

    fn close_group(&self, py: Python<'_>, group: &Group) -> PyResult<()> {
        let caught = Caught::default();
        py.detach(|| self.engine.close_group(&group.0, Some(&|| caught.check_signals()))).map_err(|e| caught.raise(e))
    }

    fn shared_empty(&self, py: Python<'_>, nbytes: usize) -> PyResult<Py<PyAny>> {
        dlpack::shared(py, self.engine.shared(nbytes).map_err(raise)?)
    }

    fn send(&self, py: Python<'_>, tensor: &Bound<'_, PyAny>, dst: u32, tag: u64) -> PyResult<()> {
        let block = view(tensor)?;
        let caught = Caught::default();
        py.detach(|| self.engine.send(&block, dst, tag, Some(&|| caught.check_signals()))).map_err(|e| caught.raise(e))
    }

    fn recv(&self, py: Python<'_>, tensor: &Bound<'_, PyAny>, src: u32, tag: u64) -> PyResult<()> {
        let block = view(tensor)?;
        let caught = Caught::default();
        py.detach(|| self.engine.recv(&block, src, tag, Some(&|| caught.check_signals()))).map_err(|e| caught.raise(e))
    }

    fn links<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let mut links = Vec::new();
        self.engine.each_link(|rank, link| {
            let (host, pid) = self.engine.who(rank);
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

    /// (rank, kind, bytes sent, bytes received) of each link.
    fn traffic(&self) -> Vec<(u32, &'static str, u64, u64)> {
        let mut rows = Vec::new();
        self.engine.each_link(|rank, link| {
            let (sent, received) = link.traffic();
            rows.push((rank, link.kind.name(), sent, received));
        });
        rows
    }

    /// (kind, bucket or peer, model, step, begin, end, bytes) of each span that is kept.
    fn trace(&self) -> Vec<(&'static str, u32, u32, u64, u64, u64, u64)> {
        let spans = self.engine.trace().spans();
        spans.iter().map(|s| (s.what.name(), s.what.id(), s.model, s.step, s.begin, s.end, s.bytes)).collect()
    }

    fn trace_dropped(&self) -> u64 {
        self.engine.trace().dropped()
    }

    fn trace_clear(&self) {
        self.engine.trace().clear();
    }

    #[pyo3(signature = (kind, model, step, begin, end, *, of=0, nbytes=0))]
    #[expect(clippy::too_many_arguments, reason = "they are the fields of a span")]
    fn mark(&self, kind: &str, model: u32, step: u64, begin: u64, end: u64, of: u32, nbytes: u64) -> PyResult<()> {
        let what = What::from_name(kind, of)
            .ok_or_else(|| raise(Error::invalid(format!("kind={kind:?}; try: forward, backward or wait"))))?;
        self.engine.trace().record(Span { what, model, step, begin, end, bytes: nbytes });
        Ok(())
    }

    fn fail(&self, cause: &str) {
        self.engine.fail(cause);
    }

    fn shutdown(&self, py: Python<'_>, reason: &str) {
        py.detach(|| {
            self.engine.shutdown(reason);
            drop(self.site().take());
        });
    }
}
