//! A torch tensor as a buffer: its address, type and shape. Contiguity and place are Python's to see to.

use std::ptr::NonNull;

use offbeat_core::buffer::{Buffer, Shaped};
use offbeat_core::dtype::DType;
use offbeat_core::{Error, Result as CoreResult};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyTuple;

use crate::errors::raise;

/// torch's dtype objects are singletons: their addresses tell the type.
fn dtype_of(tensor: &Bound<'_, PyAny>) -> PyResult<DType> {
    static KNOWN: PyOnceLock<Vec<(usize, DType)>> = PyOnceLock::new();
    let py = tensor.py();
    let known = KNOWN.get_or_try_init(py, || {
        let torch = py.import("torch")?;
        DType::ALL.iter().map(|dtype| Ok((torch.getattr(dtype.name())?.as_ptr() as usize, *dtype))).collect::<PyResult<_>>()
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
    let shape: Vec<u64> = shape.cast::<PyTuple>()?.iter().map(|dimension| dimension.extract()).collect::<PyResult<_>>()?;
    let address: usize = tensor.call_method0(intern!(py, "data_ptr"))?.extract()?;
    let count = shape.iter().product::<u64>() as usize;
    // an empty tensor has no address
    let start = if address == 0 { NonNull::<u64>::dangling().as_ptr().cast() } else { address as *mut u8 };
    Ok(Shaped { buffer: Buffer::host(start, count, dtype), shape })
}

/// Several tensors.
pub(crate) fn views(tensors: &[Bound<'_, PyAny>]) -> PyResult<Vec<Shaped>> {
    tensors.iter().map(view).collect()
}

/// The code of an element type in DLPack: (code, bits).
pub(crate) fn dlpack_type(dtype: DType) -> CoreResult<(u8, u8)> {
    let bits = dtype.size() as u8 * 8;
    Ok(match dtype {
        DType::I64 | DType::I32 | DType::I16 | DType::I8 => (0, bits),
        DType::U64 | DType::U32 | DType::U16 | DType::U8 => (1, bits),
        DType::F64 | DType::F32 | DType::F16 => (2, bits),
        DType::BF16 => (4, bits),
        DType::Bool => (6, bits),
    })
}
