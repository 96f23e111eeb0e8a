//! Memory of ours as a tensor: a DLPack capsule whose deleter frees it and never touches Python.

use std::ffi::{CStr, c_void};

use offbeat_core::buffer::Owned;
use offbeat_core::dtype::DType;
use offbeat_core::transport::shm::arena::Piece;
use pyo3::ffi;
use pyo3::prelude::*;

use crate::errors::raise;
use crate::tensor::dlpack_type;

const NAME: &CStr = c"dltensor";
const CPU: i32 = 1;

/// DLPack's `DLManagedTensor`, as its header declares it.
#[repr(C)]
struct Managed {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Managed)>,
}

/// A managed tensor together with what it points to.
struct Holder {
    managed: Managed,
    shape: Vec<i64>,
    memory: Memory,
}

/// Who owns the bytes; only ever dropped.
enum Memory {
    Piece(Piece),
    Owned(Owned),
}

/// A tensor that was received.
pub(crate) fn owned(py: Python<'_>, mut tensor: Owned) -> PyResult<Py<PyAny>> {
    let (start, dtype, shape) = (tensor.buffer().start, tensor.dtype, tensor.shape.clone());
    capsule(py, start, dtype, &shape, Memory::Owned(tensor))
}

/// Bytes in shared memory.
pub(crate) fn shared(py: Python<'_>, piece: Piece) -> PyResult<Py<PyAny>> {
    capsule(py, piece.start(), DType::U8, &[piece.len() as u64], Memory::Piece(piece))
}

fn capsule(py: Python<'_>, start: *mut u8, dtype: DType, shape: &[u64], memory: Memory) -> PyResult<Py<PyAny>> {
    let (code, bits) = dlpack_type(dtype).map_err(raise)?;
    let mut shape: Vec<i64> = shape.iter().map(|dimension| *dimension as i64).collect();
    let managed = Managed {
        data: start.cast(),
        device_type: CPU,
        device_id: 0,
        ndim: shape.len() as i32,
        code,
        bits,
        lanes: 1,
        shape: shape.as_mut_ptr(),
        strides: std::ptr::null_mut(),
        byte_offset: 0,
        context: std::ptr::null_mut(),
        deleter: Some(delete),
    };
    let holder = Box::into_raw(Box::new(Holder { managed, shape, memory }));
    // SAFETY: the holder is a fresh allocation; its first use is through the pointer to its `managed` field below.
    let managed = unsafe {
        (*holder).managed.context = holder.cast();
        &raw mut (*holder).managed
    };
    // SAFETY: we hold the GIL; the name is static; the destructor frees a capsule that nobody consumed.
    let capsule = unsafe { ffi::PyCapsule_New(managed.cast(), NAME.as_ptr(), Some(destroy)) };
    // SAFETY: `PyCapsule_New` gives a new reference, or null with an exception set.
    unsafe { Bound::from_owned_ptr_or_err(py, capsule) }.map(Bound::unbind)
}

/// Called by the consumer when its last tensor is gone, on any thread, without the GIL.
unsafe extern "C" fn delete(managed: *mut Managed) {
    // SAFETY: the context is the `Holder` that `capsule` leaked, and the consumer calls this once.
    let holder = unsafe { Box::from_raw((*managed).context.cast::<Holder>()) };
    debug_assert_eq!(holder.shape.len(), holder.managed.ndim as usize);
    match holder.memory {
        Memory::Piece(piece) => drop(piece),
        Memory::Owned(tensor) => drop(tensor),
    }
}

/// Called when the capsule goes away; a consumer has renamed it.
unsafe extern "C" fn destroy(capsule: *mut ffi::PyObject) {
    // SAFETY: Python calls this with the capsule and the GIL; a valid name means that the tensor is still ours.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, NAME.as_ptr()) != 0 {
            delete(ffi::PyCapsule_GetPointer(capsule, NAME.as_ptr()).cast());
        }
    }
}
