//! A torch tensor as a buffer: its address, type and shape. Contiguity and place are Python's to see to.
//!
//! Newer versions of torch export DLPack's C functions, which tell all of it in one call ([`quick`]); asking for one
//! attribute after another takes longer than reducing a short tensor.

use std::ffi::{c_int, c_void};
use std::ptr::NonNull;

use offbeat_core::Error;
use offbeat_core::buffer::{Buffer, Shaped};
use offbeat_core::dtype::DType;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyCapsule, PyTuple};

use crate::dlpack::Tensor;
use crate::errors::raise;

/// torch's dtype objects are singletons: their addresses tell the type.
fn dtype_of(tensor: &Bound<'_, PyAny>) -> PyResult<DType> {
    static KNOWN: PyOnceLock<Vec<(usize, DType)>> = PyOnceLock::new();
    let py = tensor.py();
    let known = KNOWN.get_or_try_init(py, || {
        let torch = py.import("torch")?;
        DType::ALL
            .iter()
            .map(|dtype| Ok((torch.getattr(dtype.name())?.as_ptr() as usize, *dtype)))
            .collect::<PyResult<_>>()
    })?;
    let dtype = tensor.getattr(intern!(py, "dtype"))?;
    match known.iter().find(|(address, _)| *address == dtype.as_ptr() as usize) {
        Some((_, dtype)) => Ok(*dtype),
        None => Err(raise(Error::unsupported(format!(
            "tensors of {dtype} are not supported; try: torch.view_as_real() for complex ones, or another dtype"
        )))),
    }
}

/// The tensor as a shaped buffer.
pub(crate) fn view(tensor: &Bound<'_, PyAny>) -> PyResult<Shaped> {
    let py = tensor.py();
    let dtype = dtype_of(tensor)?;
    let shape = tensor.getattr(intern!(py, "shape"))?;
    let shape: Vec<u64> =
        shape.cast::<PyTuple>()?.iter().map(|dimension| dimension.extract()).collect::<PyResult<_>>()?;
    let address: usize = tensor.call_method0(intern!(py, "data_ptr"))?.extract()?;
    let count = shape.iter().product::<u64>() as usize;
    // an empty tensor has no address
    let start = if address == 0 { NonNull::<u64>::dangling().as_ptr().cast() } else { address as *mut u8 };
    Ok(Shaped { buffer: Buffer::host(start, count, dtype), shape })
}

/// DLPack's `DLPackExchangeAPI`, as its header declares it (version 1).
#[repr(C)]
struct ExchangeApi {
    major: u32,
    minor: u32,
    previous: *const c_void,
    allocate: *const c_void,
    managed_from_object: *const c_void,
    managed_to_object: *const c_void,
    tensor_from_object: Option<unsafe extern "C" fn(*mut c_void, *mut Tensor) -> c_int>,
    current_stream: *const c_void,
}

type FromObject = unsafe extern "C" fn(*mut c_void, *mut Tensor) -> c_int;

/// The C function that describes a `torch.Tensor`, where this torch has it.
fn from_object(py: Python<'_>) -> Option<FromObject> {
    static FUNCTION: PyOnceLock<Option<FromObject>> = PyOnceLock::new();
    let find = || -> PyResult<Option<FromObject>> {
        let tensor = py.import("torch")?.getattr("Tensor")?;
        let Ok(capsule) = tensor.getattr("__dlpack_c_exchange_api__") else { return Ok(None) };
        let api = capsule.cast::<PyCapsule>()?.pointer_checked(Some(c"dlpack_exchange_api"))?.cast::<ExchangeApi>();
        // SAFETY: torch keeps the structure of that name alive for ever; version 1 has this layout.
        let api = unsafe { api.as_ref() };
        Ok(api.tensor_from_object.filter(|_| api.major == 1))
    };
    *FUNCTION.get_or_init(py, || find().unwrap_or_default())
}

/// A contiguous tensor of more than one element on the CPU, whose type is exactly `torch.Tensor` (the caller looks);
/// none if it is anything else, or if this torch cannot tell quickly. (A view of a single element may have its sign bit
/// elsewhere.)
pub(crate) fn quick(tensor: &Bound<'_, PyAny>) -> Option<Shaped> {
    let describe = from_object(tensor.py())?;
    let mut out = Tensor::default();
    // SAFETY: the object is a `torch.Tensor`, as the caller has seen, and the GIL is held.
    if unsafe { describe(tensor.as_ptr().cast(), &raw mut out) } != 0 {
        // the slow way finds the words for what is wrong
        drop(PyErr::take(tensor.py()));
        return None;
    }
    let dtype = out.dtype()?;
    // SAFETY: the structure borrows the tensor's own sizes, which live as long as it does.
    let (shape, strides) = unsafe { out.shape_and_strides()? };
    let mut expected = 1;
    for (length, stride) in shape.iter().zip(strides).rev() {
        if *length != 1 && *stride != expected {
            return None;
        }
        expected *= length;
    }
    if expected < 2 || !out.on_cpu() {
        return None;
    }
    let buffer = Buffer::host(out.start(), expected as usize, dtype);
    Some(Shaped { buffer, shape: shape.iter().map(|length| *length as u64).collect() })
}

/// Several tensors.
pub(crate) fn views(tensors: &[Bound<'_, PyAny>]) -> PyResult<Vec<Shaped>> {
    tensors.iter().map(view).collect()
}
