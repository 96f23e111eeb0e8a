//! Collectives on a device: everything is enqueued on one stream, and nothing waits on the host.
//!
//! All-reduce without a codec and broadcast are NCCL's own; `compressed.rs` and `gossip.rs` have the others. What they share
//! is here: the sum over the ranks of a host, as on the CPU in the order of the ranks and in f32.
//!
//! All of these send and receive between pairs on one communicator: NCCL takes the shortest way between each two, so ranks of
//! a host talk over NVLink; hosts may have different numbers of ranks; and the memory that every communicator costs is spent
//! once.

use std::sync::Arc;
use std::time::Duration;

use offbeat_core::buffer::{Buffer, Place};
use offbeat_core::dtype::{DType, Op};
use offbeat_core::topology::Layout;
use offbeat_core::{Error, Result};

use crate::communicator::{Calls, Communicator};
use crate::kernels::{Kernels, Stacked, Tiles};
use crate::memory::{Piece, Scratch};
use crate::plan::{Plan, Tile, places};
use crate::stream::{Address, Stream};

/// What collectives of a group work with, on one device.
pub struct Group {
    /// Who communicates.
    pub communicator: Arc<Communicator>,
    /// Where work is enqueued.
    pub stream: Arc<Stream>,
    /// Memory for it.
    pub scratch: Arc<Scratch>,
    /// The kernels.
    pub kernels: Arc<Kernels>,
    /// Who is on which host.
    pub layout: Layout,
    /// How long work may take.
    pub limit: Duration,
}

impl Group {
    pub(crate) fn me(&self) -> usize {
        self.communicator.members().me
    }

    /// My host, and who is on it.
    pub(crate) fn host(&self) -> (usize, &[usize]) {
        let (host, _) = self.layout.seat(self.me());
        (host, &self.layout.hosts[host])
    }

    pub(crate) fn check(&self, buffer: Buffer) -> Result<()> {
        let device = self.stream.device().ordinal();
        match buffer.place {
            Place::Cuda(at) if at == device => Ok(()),
            Place::Cuda(at) => Err(Error::invalid(format!(
                "a tensor on cuda:{at} in a group on cuda:{device}; try: tensor.to(\"cuda:{device}\"), one device for a rank"
            ))),
            Place::Host => Err(Error::invalid(format!(
                "a tensor on the CPU in a group on cuda:{device}; try: tensor.to(\"cuda:{device}\"), or ranks that are all on \
                 the CPU"
            ))),
        }
    }

    /// Whether a tensor is what something was built for.
    pub(crate) fn check_built(&self, buffer: Buffer, count: usize, dtype: DType) -> Result<()> {
        self.check(buffer)?;
        if (buffer.count, buffer.dtype) == (count, dtype) {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "built for {count} elements of {dtype}, and this is {} of {}; try: report this",
            buffer.count, buffer.dtype
        )))
    }

    /// Enqueues the reduction of a tensor over all members, in place.
    ///
    /// # Safety
    /// The tensor stays until the stream has come past this.
    pub unsafe fn all_reduce(&self, buffer: Buffer, op: Op) -> Result<()> {
        self.check(buffer)?;
        op.check(buffer.dtype)?;
        self.communicator.group(&self.stream, "all_reduce", |calls| {
            // SAFETY: the caller's promise.
            unsafe { calls.all_reduce(buffer.start as Address, buffer.count, buffer.dtype, op) }
        })
    }

    /// Enqueues a member's tensor to all.
    ///
    /// # Safety
    /// As for [`Group::all_reduce`].
    pub unsafe fn broadcast(&self, buffer: Buffer, root: usize) -> Result<()> {
        self.check(buffer)?;
        self.communicator.group(&self.stream, "broadcast", |calls| {
            // SAFETY: the caller's promise.
            unsafe { calls.broadcast(buffer.start as Address, buffer.bytes(), root) };
            Ok(())
        })
    }

    /// Memory with some bytes in it. The host may wait for the copy, so this is for what is built once.
    pub(crate) fn upload(&self, bytes: &[u8]) -> Result<Piece> {
        let piece = self.scratch.take(bytes.len())?;
        // SAFETY: the piece is long enough, and stays with whoever builds.
        unsafe { self.stream.upload(bytes, piece.address())? };
        Ok(piece)
    }

    /// A number for each element of a tensor, all zero. For what is built once, as above.
    pub(crate) fn zeros(&self, count: usize) -> Result<Piece> {
        self.upload(&vec![0; count * size_of::<f32>()])
    }

    /// The numbers of a codec's blocks, if there are any.
    pub(crate) fn upload_numbers(&self, numbers: &[u64]) -> Result<Option<Piece>> {
        let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        if bytes.is_empty() { Ok(None) } else { self.upload(&bytes).map(Some) }
    }

    /// Enqueues a copy of a tensor's values as f32.
    ///
    /// # Safety
    /// The tensor stays until the stream has come past this; the copy is as long, and `record` of each tile is its `value`.
    pub(crate) unsafe fn take(&self, buffer: Buffer, all: &Table, copy: &Piece) -> Result<()> {
        let one = Stacked { first: buffer.start as Address, stride: 0, peers: 1 };
        let to = (copy.address(), DType::F32);
        // SAFETY: the caller's promise.
        unsafe { self.kernels.mix(&self.stream, (one, buffer.dtype), (0, 1.0), all.tiles, to) }
    }

    pub(crate) fn upload_tiles(&self, tiles: &[Tile]) -> Result<Table> {
        // SAFETY: tiles are numbers without gaps between them.
        let bytes = unsafe { std::slice::from_raw_parts(tiles.as_ptr().cast(), size_of_val(tiles)) };
        let piece = self.upload(bytes)?;
        Ok(Table { tiles: Tiles { address: piece.address(), count: tiles.len() as u32 }, _piece: piece })
    }
}

/// Tiles that lie on the device.
pub(crate) struct Table {
    pub(crate) tiles: Tiles,
    _piece: Piece,
}

/// The first stage where a host has several ranks: its sum of what I carry, in f32.
pub(crate) struct HostSum {
    /// (segment, place) of what I carry, in each array that comes.
    places: Vec<(usize, usize)>,
    /// Elements of such an array.
    len: usize,
    table: Table,
}

impl HostSum {
    pub(crate) fn build(group: &Group, plan: &Plan) -> Result<Self> {
        let (places, len) = places(carried(plan, group).map(|at| (at, plan.segments[at].range.len())));
        let table = group.upload_tiles(&plan.placed(&places))?;
        Ok(HostSum { places, len, table })
    }

    /// Enqueues the exchange and the sum; the result has room for the whole tensor, and what I carry in it.
    ///
    /// # Safety
    /// The values stay until the stream has come past this.
    pub(crate) unsafe fn run(&self, group: &Group, plan: &Plan, values: Address, dtype: DType) -> Result<Piece> {
        let (host, members) = group.host();
        let size = dtype.size();
        let heap = group.scratch.take(members.len() * self.len * size)?;
        let whole = plan.segments.last().map_or(0, |segment| segment.range.end);
        let sums = group.scratch.take(whole * 4)?;
        group.communicator.group(&group.stream, "the sum in the host", |calls| {
            for segment in &plan.segments {
                let from = values + (segment.range.start * size) as u64;
                // SAFETY: the caller's promise.
                unsafe { calls.send(from, segment.range.len() * size, segment.carriers[host]) };
            }
            for (at, place) in &self.places {
                for (seat, member) in members.iter().enumerate() {
                    let to = heap.address() + ((seat * self.len + place) * size) as u64;
                    // SAFETY: the heap has room for everyone's part.
                    unsafe { calls.recv(to, plan.segments[*at].range.len() * size, *member) };
                }
            }
            Ok(())
        })?;
        let sources = Stacked { first: heap.address(), stride: self.len as u64, peers: members.len() as u32 };
        let (stream, tiles) = (&group.stream, self.table.tiles);
        // SAFETY: tiles lie in the arrays that came, and in the sums; both stay on this stream.
        unsafe { group.kernels.mix(stream, (sources, dtype), (0, 1.0), tiles, (sums.address(), DType::F32))? };
        Ok(sums)
    }
}

/// The segments that I carry.
pub(crate) fn carried<'a>(plan: &'a Plan, group: &Group) -> impl Iterator<Item = usize> + use<'a> {
    let ((host, _), me) = (group.host(), group.me());
    (0..plan.segments.len()).filter(move |at| plan.segments[*at].carriers[host] == me)
}

/// Sends something from who carries it to its neighbours.
///
/// # Safety
/// As for [`Calls::send`].
pub(crate) unsafe fn pass_on(
    calls: &mut Calls<'_>,
    (place, bytes): (Address, usize),
    carrier: usize,
    (me, members): (usize, &[usize]),
) {
    // SAFETY: the caller's promise.
    unsafe {
        match carrier == me {
            true => members.iter().filter(|other| **other != me).for_each(|other| calls.send(place, bytes, *other)),
            false => calls.recv(place, bytes, carrier),
        }
    }
}
