//! A model's background exchanges as Python sees them.

use std::time::Duration;

use offbeat_core::background::{self, Closing, Description, Labelled, Method, Rounds, Task};
use offbeat_core::dtype::DType;
use offbeat_core::graph::Peers;
use offbeat_core::{Error, Result};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::{Caught, raise};
use crate::group::Codec;
use crate::scheduler::floats;
use crate::{carrier, dlpack};

/// The background exchanges of a model.
#[pyclass(frozen, module = "offbeat._core")]
pub(crate) struct Background(pub(crate) background::Background);

/// A method from its name and arguments.
pub(crate) fn method(name: &str, arguments: &Bound<'_, PyDict>) -> PyResult<Method> {
    let get = |key: &str| {
        let missing = || raise(Error::invalid(format!("the method {name} lacks {key:?}")));
        arguments.get_item(key)?.ok_or_else(missing)
    };
    let codec = || -> PyResult<_> { Ok(get("codec")?.extract::<Option<PyRef<'_, Codec>>>()?.map(|codec| codec.0)) };
    match name {
        "average" => Ok(Method::Average { codec: codec()? }),
        "gossip" => Ok(Method::Gossip {
            peers: Peers::from_name(&get("peers")?.extract::<String>()?).map_err(raise)?,
            seed: get("seed")?.extract()?,
            modular: get("modular")?.extract()?,
        }),
        "stepwise" => Ok(Method::Stepwise {
            peers: Peers::from_name(&get("peers")?.extract::<String>()?).map_err(raise)?,
            seed: get("seed")?.extract()?,
            modular: get("modular")?.extract()?,
        }),
        "server" => Ok(Method::Server {
            codec: codec()?,
            feedback: get("feedback")?.extract()?,
            bounded: get("bounded")?.extract()?,
        }),
        _ => {
            Err(raise(Error::invalid(format!("there is no method {name:?}; try: average, gossip, stepwise or server"))))
        }
    }
}

/// What to do, and how often at most.
pub(crate) fn description(name: &str, arguments: &Bound<'_, PyDict>, period: Option<f64>) -> PyResult<Description> {
    let seconds = |period: f64| {
        Duration::try_from_secs_f64(period)
            .map_err(|_| raise(Error::invalid(format!("period={period}; try: a number of seconds from 0 on"))))
    };
    let period = period.map(seconds).transpose()?;
    Ok(Description { method: method(name, arguments)?, period })
}

fn word(task: Option<Task>) -> Option<&'static str> {
    task.map(|task| match task {
        Task::Apply => "apply",
        Task::Snapshot => "snapshot",
        Task::Skip => "skip",
    })
}

/// What is saved of a model's exchanges.
type Holdings = (u64, usize, Vec<Vec<(&'static str, Py<PyAny>)>>);

#[pymethods]
impl Background {
    fn start(&self) -> PyResult<()> {
        self.0.start().map_err(raise)
    }

    #[getter]
    fn places(&self) -> Vec<usize> {
        self.0.places().to_vec()
    }

    /// The snapshot and the delta: DLPack capsules, or the tensors that were lent.
    fn memory(&self, py: Python<'_>) -> PyResult<(Py<PyAny>, Py<PyAny>)> {
        let ([snapshot, delta], count) = self.0.memory();
        Ok((carrier::shown(py, &snapshot, DType::F32, count)?, carrier::shown(py, &delta, DType::F32, count)?))
    }

    fn look(&self) -> PyResult<Option<&'static str>> {
        self.0.look().map(word).map_err(raise)
    }

    #[pyo3(signature = (stream=0, /))]
    fn fetch(&self, py: Python<'_>, stream: u64) -> PyResult<()> {
        py.detach(|| self.0.ferry().fetch(stream)).map_err(raise)
    }

    #[pyo3(signature = (stream=0, /))]
    fn land(&self, py: Python<'_>, stream: u64) -> PyResult<()> {
        py.detach(|| self.0.ferry().land(stream)).map_err(raise)
    }

    #[pyo3(signature = (stream=0, /))]
    fn landed(&self, py: Python<'_>, stream: u64) -> PyResult<()> {
        py.detach(|| self.0.ferry().landed(stream)).map_err(raise)
    }

    fn taken(&self, clock: u64) {
        self.0.taken(clock);
    }

    fn applied(&self) {
        self.0.applied();
    }

    /// This rank has made so many steps, and no bound keeps it from the next.
    fn passed(&self, clock: u64) {
        self.0.passed(clock);
    }

    #[pyo3(signature = (*, only_results))]
    fn wait(&self, py: Python<'_>, only_results: bool) -> PyResult<Option<&'static str>> {
        let caught = Caught::default();
        let wait = || -> Result<Option<Task>> { self.0.wait(only_results, Some(&|| caught.check_signals())) };
        py.detach(wait).map(word).map_err(|error| caught.raise(error))
    }

    fn hold(&self) -> bool {
        self.0.hold()
    }

    fn pause(&self, clock: u64) {
        self.0.pause(clock);
    }

    fn resume(&self) {
        self.0.resume();
    }

    fn close(&self, closing: &str) -> PyResult<()> {
        let closing = match closing {
            "open" => Closing::Open,
            "settles" => Closing::Settles,
            _ => return Err(raise(Error::invalid(format!("nothing closes by {closing:?}")))),
        };
        self.0.close(closing);
        Ok(())
    }

    /// (number of the next round, members that are there, (label, DLPack capsule) of what is kept of each tensor).
    fn save(&self, py: Python<'_>) -> PyResult<Holdings> {
        let saved = py.detach(|| self.0.save()).map_err(raise)?;
        let part = |(label, values): (&'static str, Vec<f32>)| Ok((label, dlpack::floats(py, &values)?));
        let of = |labelled: Labelled| labelled.into_iter().map(part).collect::<PyResult<Vec<_>>>();
        Ok((saved.round, saved.living, saved.tensors.into_iter().map(of).collect::<PyResult<Vec<_>>>()?))
    }

    fn restore(&self, tensor: usize, label: &str, values: &Bound<'_, PyAny>) -> PyResult<bool> {
        self.0.restore(tensor, label, &floats(values)?).map_err(raise)
    }

    fn go_on(&self, mine: u64, least: u64, most: u64) -> PyResult<()> {
        self.0.go_on(Rounds { mine, least, most }).map_err(raise)
    }

    fn stop(&self) {
        self.0.stop();
    }

    /// (rounds, rounds that were dropped, spread, members that are there).
    fn progress(&self) -> (u64, u64, f64, usize) {
        let progress = self.0.progress();
        (progress.rounds, progress.dropped, progress.spread, progress.living)
    }

    /// (bytes before encoding, bytes after, blocks that were not finite, relative error of results, seconds spent).
    fn coded(&self) -> (u64, u64, u64, f64, f64) {
        let count = self.0.coded();
        (count.plain, count.coded, count.non_finite, count.error, count.spent)
    }
}
