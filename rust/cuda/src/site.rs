//! What a rank has of CUDA: its device, NCCL, the kernels and the watch. Opened once, when the first model asks for it.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use offbeat_core::event;
use offbeat_core::topology::Layout;
use offbeat_core::{Error, Result};

use crate::carrier::{Allocate, Carrier};
use crate::collective::Group;
use crate::communicator::{Alarm, Communicator, Members};
use crate::device::Device;
use crate::ferry::{self, Ferry};
use crate::kernels::{IMAGES, Kernels};
use crate::memory::Scratch;
use crate::nccl::{Nccl, UniqueId};
use crate::queue::Lane;
use crate::stream::Stream;
use crate::watch::Watch;

/// One rank's device and libraries.
pub struct Site {
    device: Arc<Device>,
    /// Or why there is none, for who needs it.
    nccl: Result<Arc<Nccl>>,
    kernels: Arc<Kernels>,
    watch: Arc<Watch>,
}

impl Site {
    /// Opens a device. `nccl` is where the caller knows a copy of NCCL to be.
    pub fn open(device: u32, (rank, host): (u32, &str), nccl: Option<&Path>) -> Result<Arc<Self>> {
        let device = Device::open(device, rank, host)?;
        let (nccl, kernels) = (Nccl::find(nccl), Kernels::new(&device, IMAGES));
        Ok(Arc::new(Site { device, nccl, kernels, watch: Arc::new(Watch::start()?) }))
    }

    /// Its device's number.
    pub fn device(&self) -> u32 {
        self.device.ordinal()
    }

    /// What takes snapshots of a model to the host and deltas back; it needs no NCCL.
    pub fn ferry(&self, count: usize, allocate: ferry::Allocate<'_>) -> Result<Ferry> {
        Ferry::new(&self.device, count, allocate)
    }

    /// NCCL, if this rank has it.
    pub fn nccl(&self) -> Result<&Arc<Nccl>> {
        self.nccl.as_ref().map_err(Clone::clone)
    }

    /// What ranks connect by. One of them makes it, and all are told.
    pub fn id(&self) -> Result<Vec<u8>> {
        self.nccl()?.unique_id().map(|id| id.0.to_vec())
    }

    /// Connects the members of a group; all of them call this. What they exchange runs on a stream of torch's, which is not
    /// used otherwise: torch notes on it when memory is free that was used there, also when the carrier has long gone.
    ///
    /// # Safety
    /// The stream is of this device, and is never destroyed.
    pub unsafe fn connect(
        &self,
        members: Members,
        layout: Layout,
        id: &[u8],
        limit: Duration,
        (stream, allocate): (event::Stream, Allocate),
        alarm: Alarm,
    ) -> Result<Carrier> {
        let id = id.try_into().map_err(|_| Error::invalid("an id of NCCL's has 128 bytes; try: report this"))?;
        let (nccl, device) = (self.nccl()?, &self.device);
        let communicator = Communicator::connect_heeding(nccl, device, members, UniqueId(id), limit, alarm)?;
        // SAFETY: the caller's promise.
        let stream = unsafe { Stream::borrow(&self.device, stream) };
        let scratch = Scratch::new(&stream);
        let kernels = Arc::clone(&self.kernels);
        Carrier::new(Lane::new(Group { communicator, stream, scratch, kernels, layout, limit }, &self.watch), allocate)
    }
}
