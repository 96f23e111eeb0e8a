//! NCCL's library: found, loaded and checked, as a table of the functions that this crate calls.
//!
//! It is looked for in this order: where `OFFBEAT_NCCL` says, the instance that is loaded already (torch's), a path that the
//! caller knows (where torch's package keeps it), and what the system's loader finds. The first one counts: two instances in
//! one process would each take device memory and threads.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::mem::ManuallyDrop;
use std::path::Path;
use std::sync::Arc;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use offbeat_core::dtype::{DType, Op};
use offbeat_core::{Error, Result};

/// The oldest version that has all that is used here, as NCCL writes versions: 2.18.
const OLDEST: c_int = 21_800;
/// Names a library to take instead of any other.
pub const VARIABLE: &str = "OFFBEAT_NCCL";
const NAME: &str = "libnccl.so.2";
/// Only if it is loaded already.
const RTLD_NOLOAD: c_int = if cfg!(target_os = "linux") { 0x4 } else { 0x10 };

/// A result code of NCCL's.
pub(crate) type Code = c_int;
pub(crate) const SUCCESS: Code = 0;
pub(crate) const IN_PROGRESS: Code = 7;

/// A communicator of NCCL's.
pub(crate) type Raw = *mut c_void;
type RawStream = *mut c_void;

/// What ranks that want to meet must all know. Made by one of them and spread by whoever connects them.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct UniqueId(pub [u8; 128]);

impl fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("UniqueId(…)")
    }
}

/// How a communicator is to be, as NCCL 2.14 declared it; newer ones read the version and take their defaults for the rest.
#[repr(C)]
pub(crate) struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
}

impl Config {
    /// No call of the communicator blocks, so that all of them can be given up at a deadline.
    pub(crate) fn patient() -> Self {
        Config { size: size_of::<Self>(), magic: 0xcafe_beef, version: 21_400, blocking: 0 }
    }
}

macro_rules! functions {
    ($($field:ident: $name:literal ($($type:ty),*) -> $result:ty;)*) => {
        /// The functions, by what they are called here.
        // SAFETY: whoever calls one keeps to what the header of NCCL asks for.
        pub(crate) struct Functions {
            $(pub(crate) $field: unsafe extern "C" fn($($type),*) -> $result,)*
        }

        impl Functions {
            fn load(library: &Library) -> std::result::Result<Self, &'static str> {
                Ok(Functions {
                    // SAFETY: NCCL's header declares the function so, in every version since 2.18.
                    $($field: unsafe { *library.get(concat!($name, "\0").as_bytes()).map_err(|_| $name)? },)*
                })
            }
        }
    };
}

functions! {
    get_version: "ncclGetVersion" (*mut c_int) -> Code;
    error_string: "ncclGetErrorString" (Code) -> *const c_char;
    last_error: "ncclGetLastError" (Raw) -> *const c_char;
    unique_id: "ncclGetUniqueId" (*mut UniqueId) -> Code;
    init: "ncclCommInitRankConfig" (*mut Raw, c_int, UniqueId, c_int, *mut Config) -> Code;
    finalize: "ncclCommFinalize" (Raw) -> Code;
    destroy: "ncclCommDestroy" (Raw) -> Code;
    abort: "ncclCommAbort" (Raw) -> Code;
    async_error: "ncclCommGetAsyncError" (Raw, *mut Code) -> Code;
    group_start: "ncclGroupStart" () -> Code;
    group_end: "ncclGroupEnd" () -> Code;
    send: "ncclSend" (*const c_void, usize, c_int, c_int, Raw, RawStream) -> Code;
    recv: "ncclRecv" (*mut c_void, usize, c_int, c_int, Raw, RawStream) -> Code;
    all_reduce: "ncclAllReduce" (*const c_void, *mut c_void, usize, c_int, c_int, Raw, RawStream) -> Code;
    broadcast: "ncclBroadcast" (*const c_void, *mut c_void, usize, c_int, c_int, Raw, RawStream) -> Code;
}

/// NCCL, loaded.
pub struct Nccl {
    pub(crate) call: Functions,
    version: c_int,
    origin: &'static str,
    // never closed: threads of its own may still run in it
    _library: ManuallyDrop<Library>,
}

impl Nccl {
    /// Finds and loads it. `known` is where the caller knows a copy to be, which is asked before the system's loader.
    pub fn find(known: Option<&Path>) -> Result<Arc<Self>> {
        let (library, origin) = open(known)?;
        let call = Functions::load(&library).map_err(|name| {
            missing(&format!("it has no {name}; try: NCCL 2.18 or later, as torch 2.1 and later bring"))
        })?;
        let mut version = 0;
        // SAFETY: a place for a number.
        let code = unsafe { (call.get_version)(&raw mut version) };
        if code != SUCCESS || version < OLDEST {
            let found = Version(version);
            return Err(missing(&format!(
                "{found} from {origin} is too old; try: 2.18 or later, as torch 2.1 and later bring"
            )));
        }
        Ok(Arc::new(Nccl { call, version, origin, _library: ManuallyDrop::new(library) }))
    }

    /// Its version.
    pub fn version(&self) -> (i32, i32, i32) {
        Version(self.version).parts()
    }

    /// A new id, for a communicator that does not exist yet.
    pub fn unique_id(&self) -> Result<UniqueId> {
        let mut id = UniqueId([0; 128]);
        // SAFETY: the id is as long as NCCL says (NCCL_UNIQUE_ID_BYTES).
        match unsafe { (self.call.unique_id)(&raw mut id) } {
            SUCCESS => Ok(id),
            code => Err(Error::unsupported(self.said("ncclGetUniqueId", code, std::ptr::null_mut()))),
        }
    }

    /// What NCCL says of an error, and what to try.
    pub(crate) fn said(&self, what: &str, code: Code, communicator: Raw) -> String {
        // SAFETY: both give texts that live as long as the library; the communicator may be null.
        let (text, last) =
            unsafe { (text((self.call.error_string)(code)), text((self.call.last_error)(communicator))) };
        let last = if last.is_empty() { String::new() } else { format!(": {}", last.replace('\n', " ").trim()) };
        format!("{what}: {text} (NCCL error {code}){last}; try: {}", advice(code))
    }
}

impl fmt::Display for Nccl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", Version(self.version), self.origin)
    }
}

impl fmt::Debug for Nccl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// The library and where it came from.
fn open(known: Option<&Path>) -> Result<(Library, &'static str)> {
    // SAFETY: loading NCCL runs its initialisers, which start nothing.
    let load = |path: &Path, flags| unsafe { Library::open(Some(path), flags | RTLD_NOW | RTLD_LOCAL) };
    if let Some(path) = std::env::var_os(VARIABLE).filter(|path| !path.is_empty()) {
        let library = load(Path::new(&path), 0);
        return library.map(|library| (library, VARIABLE)).map_err(|error| {
            missing(&format!("{VARIABLE}={} does not load ({error}); try: correct or unset it", path.display()))
        });
    }
    if let Ok(library) = load(Path::new(NAME), RTLD_NOLOAD) {
        return Ok((library, "loaded already"));
    }
    if let Some(library) = known.and_then(|path| load(path, 0).ok()) {
        return Ok((library, "of torch's package"));
    }
    load(Path::new(NAME), 0).map(|library| (library, "the system's")).map_err(|_| {
        missing(&format!(
            "{NAME} is not there; try: a torch built for CUDA, pip install nvidia-nccl-cu12, or {VARIABLE}=path"
        ))
    })
}

struct Version(c_int);

impl Version {
    fn parts(&self) -> (i32, i32, i32) {
        // before 2.9 a version was written with a hundred fewer
        let unit = if self.0 >= 10_000 { 10_000 } else { 1000 };
        (self.0 / unit, self.0 % unit / 100, self.0 % 100)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (major, minor, patch) = self.parts();
        write!(f, "NCCL {major}.{minor}.{patch}")
    }
}

/// # Safety
/// Null, or a text that ends with a zero.
unsafe fn text(start: *const c_char) -> String {
    // SAFETY: the caller's promise.
    if start.is_null() { String::new() } else { unsafe { CStr::from_ptr(start) }.to_string_lossy().into_owned() }
}

fn advice(code: Code) -> &'static str {
    match code {
        1 => "nvidia-smi and NCCL_DEBUG=WARN on this rank",
        2 | 6 => "NCCL_DEBUG=WARN, NCCL_SOCKET_IFNAME, and whether all ranks are alive",
        4 | 5 => "NCCL_DEBUG=WARN; ranks may have called different things",
        _ => "NCCL_DEBUG=INFO on all ranks",
    }
}

fn missing(text: &str) -> Error {
    Error::unsupported(format!("no NCCL: {text}"))
}

/// NCCL's number of an element type.
pub(crate) fn type_code(dtype: DType) -> Result<c_int> {
    Ok(match dtype {
        DType::I8 => 0,
        DType::U8 => 1,
        DType::I32 => 2,
        DType::U32 => 3,
        DType::I64 => 4,
        DType::U64 => 5,
        DType::F16 => 6,
        DType::F32 => 7,
        DType::F64 => 8,
        DType::BF16 => 9,
        DType::I16 | DType::U16 | DType::Bool => {
            return Err(Error::unsupported(format!("NCCL does not reduce {dtype}; try: .to(torch.int32)")));
        }
    })
}

/// NCCL's number of an operation.
pub(crate) fn op_code(op: Op) -> Result<c_int> {
    Ok(match op {
        Op::Sum => 0,
        Op::Product => 1,
        Op::Max => 2,
        Op::Min => 3,
        Op::Mean => 4,
        Op::Band | Op::Bor | Op::Bxor => {
            return Err(Error::unsupported(format!("NCCL has no {op}; try: .cpu() first, or sum, min, max")));
        }
    })
}
