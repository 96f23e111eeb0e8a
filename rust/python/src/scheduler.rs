//! A model's scheduler as Python sees it: in a training step only integers cross this border.

use std::sync::Arc;

use offbeat_core::algorithm::{Keeper, Saved, Step, Storage};
use offbeat_core::bucket::{Sizes, Tensor};
use offbeat_core::buffer::Place;
use offbeat_core::dtype::{DType, Op};
use offbeat_core::graph::Peers;
use offbeat_core::{Error, scheduler};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::{Caught, raise};
use crate::function::Function;
use crate::group::{Codec, Group};
use crate::tensor::view;
use crate::{carrier, dlpack};

/// The scheduler of a model.
#[pyclass(frozen, module = "offbeat._core")]
pub(crate) struct Scheduler(pub(crate) scheduler::Scheduler);

/// (name, elements, rows, dtype) of a tensor.
pub(crate) fn tensor((name, count, rows, dtype): (String, usize, usize, String), place: Place) -> PyResult<Tensor> {
    match DType::from_name(&dtype).filter(|dtype| dtype.is_float()) {
        Some(dtype) => Ok(Tensor { name, count, rows, dtype, place }),
        None => Err(raise(Error::unsupported(format!(
            "parameter {name} is {dtype}, whose gradients cannot be summed; try: float32, float64, float16 or bfloat16"
        )))),
    }
}

/// Steps from what `offbeat.steps` describes: a name with arguments for each.
pub(crate) fn steps(described: Vec<(String, Bound<'_, PyDict>)>, rank: u32) -> PyResult<Vec<Step>> {
    described.into_iter().map(|(name, arguments)| step(&name, &arguments, rank)).collect()
}

fn step(name: &str, arguments: &Bound<'_, PyDict>, rank: u32) -> PyResult<Step> {
    let get = |key: &str| arguments.get_item(key)?.ok_or_else(|| missing(name, key));
    match name {
        "all_reduce" => Ok(Step::AllReduce {
            op: Op::from_name(&get("op")?.extract::<String>()?).map_err(raise)?,
            codec: get("codec")?.extract::<Option<PyRef<'_, Codec>>>()?.map(|codec| codec.0),
            feedback: get("feedback")?.extract()?,
            seed: get("seed")?.extract()?,
            hierarchical: get("hierarchical")?.extract()?,
        }),
        "host_reduce" => Ok(Step::HostReduce),
        "difference" => Ok(Step::Difference),
        "outer" => Ok(Step::Outer { lr: get("lr")?.extract()?, momentum: get("momentum")?.extract()? }),
        "gossip" => Ok(Step::Gossip {
            peers: Peers::from_name(&get("peers")?.extract::<String>()?).map_err(raise)?,
            seed: get("seed")?.extract()?,
        }),
        "replicas" => Ok(Step::Replicas {
            peers: Peers::from_name(&get("peers")?.extract::<String>()?).map_err(raise)?,
            codec: get("codec")?.extract::<Option<PyRef<'_, Codec>>>()?.map(|codec| codec.0),
            gamma: get("gamma")?.extract()?,
            seed: get("seed")?.extract()?,
        }),
        "momentum" => Ok(Step::Momentum { betas: get("betas")?.extract::<Vec<f32>>()?.into() }),
        "gradient" => Ok(Step::Gradient),
        "weigh" => Ok(Step::Weigh),
        "select" => Ok(Step::Select { ratio: get("ratio")?.extract()?, hierarchical: get("hierarchical")?.extract()? }),
        "low_rank" => Ok(Step::LowRank {
            rank: get("rank")?.extract()?,
            rate: get("rate")?.extract()?,
            seed: get("seed")?.extract()?,
            hierarchical: get("hierarchical")?.extract()?,
        }),
        "apply" => {
            let (callable, name) = (get("function")?.unbind(), get("name")?.extract()?);
            Ok(Step::Apply { function: Arc::new(Function { callable, name, rank }), states: get("states")?.extract()? })
        }
        _ => Err(raise(Error::invalid(format!("there is no step {name:?}; try: those of offbeat.steps")))),
    }
}

fn missing(step: &str, key: &str) -> PyErr {
    raise(Error::invalid(format!("the step {step} lacks {key:?}")))
}

/// The numbers in a contiguous float32 tensor on the CPU.
pub(crate) fn floats(tensor: &Bound<'_, PyAny>) -> PyResult<Vec<f32>> {
    let buffer = view(tensor)?.buffer;
    if buffer.dtype != DType::F32 {
        return Err(raise(Error::invalid(format!("a state of {}; try: the float32 that was saved", buffer.dtype))));
    }
    // SAFETY: the caller holds the tensor, which is contiguous and of this type.
    Ok(unsafe { std::slice::from_raw_parts(buffer.start.cast::<f32>(), buffer.count) }.to_vec())
}

/// A DLPack capsule or the tensor that was lent, and (tensor, first element) of what lies in it.
type BucketView = (Py<PyAny>, Vec<(usize, usize)>);

#[pymethods]
impl Scheduler {
    #[getter]
    fn group(&self) -> Group {
        Group(self.0.group().clone())
    }

    fn buckets(&self, py: Python<'_>) -> PyResult<Vec<BucketView>> {
        let view = |(bucket, memory): (offbeat_core::bucket::Bucket, Storage)| {
            let slots = bucket.slots.iter().map(|slot| (slot.tensor, slot.offset)).collect();
            Ok((carrier::shown(py, &memory, bucket.dtype, bucket.count)?, slots))
        };
        self.0.buckets().into_iter().map(view).collect()
    }

    #[pyo3(signature = (tensor, /))]
    fn arrive(&self, tensor: usize) -> PyResult<bool> {
        self.0.arrive(tensor).map_err(raise)
    }

    #[pyo3(signature = (tensors, stream=0, /))]
    fn mark_ready(&self, tensors: Vec<usize>, stream: u64) -> PyResult<()> {
        tensors.into_iter().try_for_each(|tensor| self.0.mark_ready_on(tensor, stream)).map_err(raise)
    }

    #[pyo3(signature = (tensor, stream=0, /))]
    fn mark_absent(&self, tensor: usize, stream: u64) -> PyResult<()> {
        self.0.mark_absent_on(tensor, stream).map_err(raise)
    }

    fn missing(&self) -> Vec<usize> {
        self.0.missing()
    }

    fn has_begun(&self) -> bool {
        self.0.has_begun()
    }

    #[pyo3(signature = (stream=0, /))]
    fn finish(&self, py: Python<'_>, stream: u64) -> PyResult<Vec<usize>> {
        let caught = Caught::default();
        py.detach(|| self.0.finish_on(stream, Some(&|| caught.check_signals()))).map_err(|e| caught.raise(e))
    }

    /// Takes the weights that lie in the buckets as where anchors and copies begin.
    #[pyo3(signature = (stream=0, /))]
    fn begin(&self, stream: u64) -> PyResult<()> {
        self.0.begin(stream).map_err(raise)
    }

    fn reset(&self, why: &str) -> PyResult<()> {
        self.0.reset(why).map_err(raise)
    }

    fn observed(&self) -> (Vec<usize>, Vec<bool>) {
        self.0.observed()
    }

    fn hold(&self, held: bool) {
        self.0.hold(held);
    }

    fn weigh(&self, samples: f64) {
        self.0.weigh(samples);
    }

    fn rebucket(&self, py: Python<'_>, order: Vec<usize>, late: Vec<bool>, bucket_bytes: usize) -> PyResult<()> {
        let sizes = Sizes::new(bucket_bytes).map_err(raise)?;
        let caught = Caught::default();
        py.detach(|| self.0.rebucket(&order, &late, sizes, Some(&|| caught.check_signals())))
            .map_err(|e| caught.raise(e))
    }

    /// (bytes before encoding, bytes after, blocks that were not finite, relative error of results, seconds spent).
    fn coded(&self) -> (u64, u64, u64, f64, f64) {
        let count = self.0.coded();
        (count.plain, count.coded, count.non_finite, count.error, count.spent)
    }

    fn was_non_finite(&self) -> bool {
        self.0.was_non_finite()
    }

    fn resume(&self, step: u64) {
        self.0.resume(step);
    }

    /// (name, who has it, DLPack capsule) of what steps keep of a tensor.
    fn saved(&self, py: Python<'_>, tensor: usize) -> PyResult<Vec<(String, &'static str, Py<PyAny>)>> {
        let describe = |saved: Saved| {
            let keeper = match saved.keeper {
                Keeper::All => "all",
                Keeper::Each => "each",
                Keeper::Carrier => "carrier",
            };
            Ok((saved.name, keeper, dlpack::floats(py, &saved.values)?))
        };
        self.0.saved(tensor).map_err(raise)?.into_iter().map(describe).collect()
    }

    fn restore(&self, tensor: usize, name: &str, values: &Bound<'_, PyAny>) -> PyResult<()> {
        self.0.restore(tensor, name, &floats(values)?).map_err(raise)
    }

    /// (rounds, seconds of communication, seconds for which backward waited).
    fn totals(&self) -> (u64, f64, f64) {
        let totals = self.0.totals();
        (totals.rounds, totals.communication.as_secs_f64(), totals.exposed.as_secs_f64())
    }
}
