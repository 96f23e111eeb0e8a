//! Memory of ours as a tensor: a DLPack capsule whose deleter frees it and never touches Python.

use std::ffi::{CStr, c_void};
use std::sync::Arc;

use offbeat_core::buffer::Owned;
use offbeat_core::dtype::DType;
use offbeat_core::transport::shm::arena::Piece;
use pyo3::ffi;
use pyo3::prelude::*;

const NAME: &CStr = c"dltensor";
const CPU: i32 = 1;

/// DLPack's `DLTensor`, as its header declares it.
#[repr(C)]
pub(crate) struct Tensor {
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
}

impl Default for Tensor {
    fn default() -> Self {
        Tensor {
            data: std::ptr::null_mut(),
            device_type: CPU,
            device_id: 0,
            ndim: 0,
            code: 0,
            bits: 0,
            lanes: 1,
            shape: std::ptr::null_mut(),
            strides: std::ptr::null_mut(),
            byte_offset: 0,
        }
    }
}

impl Tensor {
    pub(crate) fn dtype(&self) -> Option<DType> {
        DType::ALL.into_iter().find(|dtype| code_and_bits(*dtype) == (self.code, self.bits) && self.lanes == 1)
    }

    pub(crate) fn on_cpu(&self) -> bool {
        self.device_type == CPU
    }

    pub(crate) fn start(&self) -> *mut u8 {
        self.data.cast::<u8>().wrapping_add(self.byte_offset as usize)
    }

    /// The lengths and strides of the dimensions.
    ///
    /// # Safety
    /// The structure was filled by somebody who keeps them alive for as long as the result is used.
    pub(crate) unsafe fn shape_and_strides(&self) -> Option<(&[i64], &[i64])> {
        if self.ndim <= 0 || self.shape.is_null() || self.strides.is_null() {
            return None;
        }
        // SAFETY: both have `ndim` elements.
        unsafe {
            let slice = |start: *mut i64| std::slice::from_raw_parts(start.cast_const(), self.ndim as usize);
            Some((slice(self.shape), slice(self.strides)))
        }
    }
}

/// The code of an element type in DLPack, and its bits.
fn code_and_bits(dtype: DType) -> (u8, u8) {
    let code = match dtype {
        DType::I64 | DType::I32 | DType::I16 | DType::I8 => 0,
        DType::U64 | DType::U32 | DType::U16 | DType::U8 => 1,
        DType::F64 | DType::F32 | DType::F16 => 2,
        DType::BF16 => 4,
        DType::Bool => 6,
    };
    (code, dtype.size() as u8 * 8)
}

/// DLPack's `DLManagedTensor`.
#[repr(C)]
struct Managed {
    tensor: Tensor,
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
    Bucket(Arc<Piece>),
    Owned(Owned),
}

/// A tensor that was received.
pub(crate) fn owned(py: Python<'_>, mut tensor: Owned) -> PyResult<Py<PyAny>> {
    let (start, dtype, shape) = (tensor.buffer().start, tensor.dtype, tensor.shape.clone());
    capsule(py, start, dtype, &shape, Memory::Owned(tensor))
}

/// A copy of some numbers.
pub(crate) fn floats(py: Python<'_>, values: &[f32]) -> PyResult<Py<PyAny>> {
    let mut tensor = Owned::new(DType::F32, vec![values.len() as u64]);
    for (room, value) in tensor.bytes_mut().chunks_exact_mut(4).zip(values) {
        room.copy_from_slice(&value.to_le_bytes());
    }
    owned(py, tensor)
}

/// Bytes in shared memory.
pub(crate) fn shared(py: Python<'_>, piece: Piece) -> PyResult<Py<PyAny>> {
    capsule(py, piece.start(), DType::U8, &[piece.len() as u64], Memory::Piece(piece))
}

/// A bucket, which its scheduler uses too.
pub(crate) fn bucket(py: Python<'_>, memory: Arc<Piece>, dtype: DType, count: usize) -> PyResult<Py<PyAny>> {
    capsule(py, memory.start(), dtype, &[count as u64], Memory::Bucket(memory))
}

fn capsule(py: Python<'_>, start: *mut u8, dtype: DType, shape: &[u64], memory: Memory) -> PyResult<Py<PyAny>> {
    let (code, bits) = code_and_bits(dtype);
    let mut shape: Vec<i64> = shape.iter().map(|dimension| *dimension as i64).collect();
    let tensor = Tensor {
        data: start.cast(),
        ndim: shape.len() as i32,
        code,
        bits,
        shape: shape.as_mut_ptr(),
        ..Tensor::default()
    };
    let managed = Managed { tensor, context: std::ptr::null_mut(), deleter: Some(delete) };
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
    debug_assert_eq!(holder.shape.len(), holder.managed.tensor.ndim as usize);
    match holder.memory {
        Memory::Piece(piece) => drop(piece),
        Memory::Bucket(piece) => drop(piece),
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
