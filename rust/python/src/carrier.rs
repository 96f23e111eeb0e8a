//! Who carries steps on a GPU, as Python sees it: made for a model whose parameters are there.

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use offbeat_core::algorithm::{Lent, meet};
use offbeat_core::bucket::Bucket;
use offbeat_core::buffer::{Buffer, Place, Storage};
use offbeat_core::dtype::DType;
use offbeat_core::group::Group;
use offbeat_core::{Error, Interrupt, Result};
use offbeat_cuda::carrier;
use offbeat_cuda::communicator::Members;
use offbeat_cuda::site::Site;
use pyo3::prelude::*;

use crate::dlpack;
use crate::errors::raise;
use crate::tensor::view;

/// Carries the steps of a model's buckets on a device.
#[pyclass(frozen, module = "offbeat._core")]
pub(crate) struct Carrier {
    pub(crate) inner: Arc<carrier::Carrier>,
    pub(crate) device: u32,
    group: Group,
}

/// A tensor of torch's, as memory for a bucket.
struct Tensor {
    object: Py<PyAny>,
    address: usize,
}

impl Lent for Tensor {
    fn start(&self) -> *mut u8 {
        self.address as *mut u8
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Asks a function of Python's for memory: `allocate(elements, dtype, stream)` gives a tensor that is all zero, and that a stream
/// of ours uses too; without one, whoever asks keeps it until it is done with it.
pub(crate) fn allocate(function: &Py<PyAny>, count: usize, dtype: DType, stream: Option<u64>) -> Result<Arc<dyn Lent>> {
    let dtype = dtype.name();
    let made = Python::attach(|py| -> PyResult<Tensor> {
        let object = function.call1(py, (count, dtype, stream))?;
        let address = object.call_method0(py, "data_ptr")?.extract(py)?;
        Ok(Tensor { object, address })
    });
    match made {
        Ok(tensor) => Ok(Arc::new(tensor)),
        Err(error) => Err(Error::unsupported(format!(
            "no memory on the device for {count} {dtype} to be exchanged: {error}; try: smaller batches{}",
            if stream.is_some() { ", or a smaller bucket_bytes" } else { "" }
        ))),
    }
}

/// Memory as Python sees it: a DLPack capsule, or the tensor that was lent.
pub(crate) fn shown(py: Python<'_>, memory: &Storage, dtype: DType, count: usize) -> PyResult<Py<PyAny>> {
    match memory {
        Storage::Shared(memory) => dlpack::bucket(py, Arc::clone(memory), dtype, count),
        Storage::Lent(memory) => match memory.as_any().downcast_ref::<Tensor>() {
            Some(tensor) => Ok(tensor.object.clone_ref(py)),
            None => Err(raise(Error::unsupported("memory that was lent and is not torch's; try: report this"))),
        },
    }
}

/// Asks a function of Python's for the handle of a stream that torch never destroys.
fn stream(function: &Py<PyAny>) -> Result<u64> {
    Python::attach(|py| function.call0(py)?.extract(py)).map_err(|error: PyErr| {
        Error::unsupported(format!("torch has no stream on the device: {error}; try: torch.cuda.Stream() by itself"))
    })
}

/// Connects the members of a group, each with its device: all of them call this, and all learn if one cannot.
pub(crate) fn connect(
    opened: Result<Arc<Site>>,
    group: &Group,
    rank: u32,
    (stream_of, function): (&Py<PyAny>, Py<PyAny>),
    limit: Duration,
    interrupt: Option<&Interrupt<'_>>,
) -> Result<Carrier> {
    let me = group.ranks().iter().position(|member| *member == rank).unwrap_or_default();
    let opened = opened.and_then(|site| Ok((site, stream(stream_of)?)));
    let mine = opened.as_ref().map_err(Clone::clone);
    let id = mine.and_then(|(site, _)| if me == 0 { site.id() } else { site.nccl().map(|_| Vec::new()) });
    let id = meet(group, id, interrupt)?;
    let (site, stream) = opened?;
    let members = Members { ranks: group.ranks().to_vec(), me };
    let watched = group.clone();
    let alarm = Box::new(move || watched.verdict());
    let memory = Box::new(move |bucket: &Bucket, stream| allocate(&function, bucket.count, bucket.dtype, Some(stream)));
    // SAFETY: the stream is torch's, which never destroys its streams.
    let connected = unsafe { site.connect(members, group.layout().clone(), &id, limit, (stream, memory), alarm) };
    // the others wait for this rank
    let inner = connected.map_err(|error| group.abandon(&error))?;
    Ok(Carrier { inner: Arc::new(inner), device: site.device(), group: group.clone() })
}

#[pymethods]
impl Carrier {
    /// A rank's tensor to all, after what is enqueued on `stream`, which waits for it.
    #[pyo3(signature = (tensor, src, stream, /))]
    fn broadcast(&self, py: Python<'_>, tensor: &Bound<'_, PyAny>, src: u32, stream: u64) -> PyResult<()> {
        let Some(root) = self.group.ranks().iter().position(|rank| *rank == src) else {
            return Err(raise(Error::invalid(format!("rank {src} is not in the group {:?}", self.group.ranks()))));
        };
        let buffer = Buffer { place: Place::Cuda(self.device), ..view(tensor)?.buffer };
        // SAFETY: torch frees memory of a stream in the order of that stream, which waits for the broadcast.
        py.detach(|| unsafe { self.inner.broadcast(buffer, root, stream) }).map_err(raise)
    }
}
