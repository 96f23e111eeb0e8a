//! One rank in a process of its own: a device, a stream that stands for torch's, and a queue.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use libloading::os::unix::Library;
use offbeat_core::Result;
use offbeat_core::buffer::{Buffer, Place};
use offbeat_core::dtype::DType;
use offbeat_core::event::{Event, Queue};
use offbeat_core::topology::Layout;
use offbeat_cuda::collective::Group;
use offbeat_cuda::communicator::{Communicator, Members};
use offbeat_cuda::device::Device;
use offbeat_cuda::kernels::{Image, Kernels};
use offbeat_cuda::memory::{Piece, Scratch};
use offbeat_cuda::nccl::{Nccl, UniqueId};
use offbeat_cuda::queue::{Done, Kind, Lane, Work};
use offbeat_cuda::stream::Stream;
use offbeat_cuda::watch::Watch;

/// Which waits between streams are left out, to see that a test finds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Forgets {
    Nothing,
    Before,
    After,
}

pub struct Process {
    pub rank: usize,
    pub layout: Layout,
    pub lane: Lane,
    /// Stands for torch's current stream, and for its allocator.
    pub torch: Arc<Stream>,
    pub memory: Arc<Scratch>,
}

pub fn setting(name: &str) -> String {
    std::env::var(name).unwrap_or_default()
}

/// My rank, and who is on which host.
pub fn place() -> (usize, Layout) {
    let sizes: Vec<usize> = setting("HOSTS").split(',').map(|size| size.parse().unwrap()).collect();
    (setting("RANK").parse().unwrap(), Layout::of_sizes(&sizes))
}

/// Bytes that rank 0 makes and all others read; stands for a broadcast on the mesh.
pub fn spread(name: &str, make: impl FnOnce() -> Vec<u8>) -> Vec<u8> {
    let path = PathBuf::from(setting("MEETING")).join(name);
    if place().0 == 0 {
        let bytes = make();
        std::fs::write(path.with_extension("part"), &bytes).unwrap();
        std::fs::rename(path.with_extension("part"), &path).unwrap();
        return bytes;
    }
    loop {
        match std::fs::read(&path) {
            Ok(bytes) => return bytes,
            Err(_) => std::thread::sleep(Duration::from_millis(2)),
        }
    }
}

impl Process {
    /// Connects to all other ranks.
    pub fn start(images: &'static [Image], limit: Duration) -> Result<Self> {
        let (rank, layout) = place();
        let device = Device::open(0, rank as u32, "here")?;
        let torch = Stream::new(&device)?;
        let stream = Stream::new(&device)?;
        let nccl = Nccl::find(None)?;
        let id = spread("id", || nccl.unique_id().unwrap().0.to_vec());
        let ranks: Vec<u32> = (0..layout.hosts.iter().map(Vec::len).sum::<usize>() as u32).collect();
        let members = Members { ranks, me: rank };
        let communicator = Communicator::connect(&nccl, &device, members, UniqueId(id.try_into().unwrap()), limit)?;
        let group = Group {
            communicator,
            scratch: Scratch::new(&stream),
            stream,
            kernels: Kernels::new(&device, images),
            layout: layout.clone(),
            limit,
        };
        let memory = Scratch::new(&torch);
        Ok(Process { rank, layout, lane: Lane::new(group, &Arc::new(Watch::start()?)), torch, memory })
    }

    /// Memory of torch's, with something in it that torch's stream writes.
    pub fn tensor(&self, data: &[u8], dtype: DType) -> Result<(Piece, Buffer)> {
        let piece = self.memory.take(data.len())?;
        // SAFETY: the piece is as long, and is kept until it was read.
        unsafe { self.torch.upload(data, piece.address())? };
        let (start, count) = (piece.address() as *mut u8, data.len() / dtype.size());
        Ok((piece, Buffer { start, count, dtype, place: Place::Cuda(0) }))
    }

    pub fn enqueue(&self, kind: Kind<'static>, buffer: Buffer, forgets: Forgets) -> Result<Done> {
        let work = Work { kind, buffer, what: "bucket 3 in step 7".to_owned() };
        let ready: Arc<dyn Event> = Arc::new(self.torch.mark()?);
        let done = self.lane.enqueue(work, (forgets != Forgets::Before).then_some(ready))?;
        if forgets != Forgets::After {
            self.torch.wait(done.mark())?;
        }
        Ok(done)
    }

    /// What torch's stream finds in some memory, now.
    pub fn read(&self, buffer: Buffer) -> Result<Vec<u8>> {
        let mut bytes = vec![0; buffer.bytes()];
        // SAFETY: the buffer is as long.
        unsafe { self.torch.download(buffer.start as u64, &mut bytes)? };
        Ok(bytes)
    }

    /// Data through a collective: written and read on torch's stream.
    pub fn through(&self, kind: Kind<'static>, data: &[u8], dtype: DType) -> Result<Vec<u8>> {
        let (piece, buffer) = self.tensor(data, dtype)?;
        let done = self.enqueue(kind, buffer, Forgets::Nothing)?;
        let found = self.read(buffer)?;
        drop(piece);
        done.wait(Some(Duration::from_secs(30)), None)?;
        Ok(found)
    }
}

/// How often a double has done something.
pub fn count(library: &str, function: &str, what: &str) -> i64 {
    let what = std::ffi::CString::new(what).unwrap();
    // SAFETY: the double's function, as double.h declares it; the library is loaded anyway.
    unsafe {
        let library = Library::new(library).unwrap();
        let count = library.get::<unsafe extern "C" fn(*const std::ffi::c_char) -> i64>(function.as_bytes()).unwrap();
        count(what.as_ptr())
    }
}

/// The driver's function with a name.
///
/// # Safety
/// It is declared as `F`.
unsafe fn driver<F: Copy>(name: &str) -> F {
    // SAFETY: the caller's promise; the library is loaded anyway, and stays.
    unsafe { *Library::new("libcuda.so.1").unwrap().get::<F>(name.as_bytes()).unwrap() }
}

/// The thread's current context, as the driver tells it.
pub fn current_context() -> usize {
    let mut context = 0usize;
    // SAFETY: the driver's function, with a place for a handle.
    let code = unsafe { driver::<unsafe extern "C" fn(*mut usize) -> i32>("cuCtxGetCurrent")(&raw mut context) };
    assert_eq!(code, 0);
    context
}

/// Another device that the caller works on, as torch may.
pub struct Elsewhere(usize);

impl Elsewhere {
    /// Makes the context of the last device current.
    pub fn enter(device: i32) -> Self {
        let mut context = 0usize;
        // SAFETY: the driver's functions, in the order that it wants.
        unsafe {
            assert_eq!(driver::<unsafe extern "C" fn(u32) -> i32>("cuInit")(0), 0);
            let retain = driver::<unsafe extern "C" fn(*mut usize, i32) -> i32>("cuDevicePrimaryCtxRetain");
            assert_eq!(retain(&raw mut context, device), 0);
            assert_eq!(driver::<unsafe extern "C" fn(usize) -> i32>("cuCtxPushCurrent_v2")(context), 0);
        }
        Elsewhere(context)
    }

    /// Whether it is still current; gives it back.
    pub fn leave(self, device: i32) {
        assert_eq!(current_context(), self.0, "the current device is another one");
        let mut context = 0usize;
        // SAFETY: as above.
        unsafe {
            driver::<unsafe extern "C" fn(*mut usize) -> i32>("cuCtxPopCurrent_v2")(&raw mut context);
            driver::<unsafe extern "C" fn(i32) -> i32>("cuDevicePrimaryCtxRelease_v2")(device);
        }
        assert_eq!(current_context(), 0, "contexts were left behind");
    }
}
