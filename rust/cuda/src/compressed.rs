//! All-reduce with a codec, which works between hosts only, as on the CPU, and gives the same bits: what differs is who
//! carries the bytes.
//!
//! ```text
//! values ─▶ (in the host: everyone's values to who carries them; sum)   full precision, over NVLink      1 kernel
//!        ─▶ encode ─▶ to who sums them                                  one grouped exchange             1 kernel
//!        ─▶ decode, sum in the order of the hosts, divide, encode       on the owner                     1 kernel
//!        ─▶ to all carriers ─▶ (in the host: to everyone)               one grouped exchange
//!        ─▶ decode                                                                                       1 kernel
//! ```
//! A host of one rank has no first kernel, and no exchange in the host. Where hosts have different numbers of ranks, a rank
//! may sum several runs of elements, with a kernel for each.

use std::ops::Range;

use offbeat_core::buffer::Buffer;
use offbeat_core::codec::Codec;
use offbeat_core::coding::mix;
use offbeat_core::dtype::{DType, Op};
use offbeat_core::{Error, Result};

use crate::collective::{Group, HostSum, Table, carried, pass_on};
use crate::kernels::{Salted, Stacked};
use crate::memory::Piece;
use crate::plan::{Plan, Segment, Tile, places};
use crate::stream::Address;

/// What an all-reduce with a codec keeps of losses: addresses of f32, as long as the tensor; 0 where nothing is kept.
#[derive(Clone, Copy, Debug, Default)]
pub struct Residuals {
    /// Of this host's shares, where this rank carries them.
    pub shares: Address,
    /// Of the results that are summed here.
    pub results: Address,
}

/// An all-reduce with a codec, built for one bucket: its plan, and the tables of its kernels on the device.
pub struct Compressed {
    codec: &'static dyn Codec,
    dtype: DType,
    op: Op,
    plan: Plan,
    host_sum: Option<HostSum>,
    /// The tiles that I encode, those of the segments that I sum, and all of them.
    mine: Table,
    owned: Vec<(usize, Table)>,
    all: Table,
    numbers: Option<Piece>,
}

impl Compressed {
    /// Builds it for tensors of `count` elements, of which `spans` are values (all if there are none). `numbers` are those of
    /// the codec's blocks, as in [`offbeat_core::coding::Coding::blocks`].
    pub fn build(
        group: &Group,
        codec: &'static dyn Codec,
        (count, dtype, op): (usize, DType, Op),
        spans: &[Range<usize>],
        numbers: &[u64],
    ) -> Result<Self> {
        if !matches!(op, Op::Sum | Op::Mean) {
            return Err(Error::invalid(format!(
                "codec {:?} works with sum and mean, not {op}; try: no codec",
                codec.name()
            )));
        }
        let plan = Plan::coded(&group.layout, count, spans, codec);
        let ((host, members), me) = (group.host(), group.me());
        let tiles: Vec<Tile> =
            carried(&plan, group).flat_map(|at| plan.tiles[plan.segments[at].tiles.clone()].to_vec()).collect();
        let mine = group.upload_tiles(&tiles)?;
        let mut owned = Vec::new();
        for (at, segment) in plan.segments.iter().enumerate() {
            if segment.owner == host && segment.carriers[host] == me && !segment.tiles.is_empty() {
                let tiles = plan.tiles[segment.tiles.clone()].iter();
                let from_zero = |tile: &Tile| Tile { record: tile.record - segment.records.start as u64, ..*tile };
                owned.push((at, group.upload_tiles(&tiles.map(from_zero).collect::<Vec<_>>())?));
            }
        }
        let numbers = group.upload_numbers(numbers)?;
        let host_sum = if members.len() > 1 { Some(HostSum::build(group, &plan)?) } else { None };
        let all = group.upload_tiles(&plan.tiles)?;
        Ok(Compressed { codec, dtype, op, plan, host_sum, mine, owned, all, numbers })
    }

    /// Enqueues one all-reduce, in place. `stream` is where random numbers come from; `odd` counts blocks that are not
    /// finite, if it is an address.
    ///
    /// # Safety
    /// The tensor and all that is named by its address stay until the group's stream has come past this.
    pub unsafe fn run(&self, group: &Group, buffer: Buffer, stream: u64, kept: Residuals, odd: Address) -> Result<()> {
        let end = self.plan.segments.last().map_or(0, |segment| segment.range.end);
        group.check_built(buffer, end, self.dtype)?;
        if group.layout.hosts.len() == 1 {
            // nothing is encoded inside a host
            // SAFETY: the caller's promise.
            return unsafe { group.all_reduce(buffer, self.op) };
        }
        // SAFETY: the caller's promise; scratch memory stays on this stream.
        unsafe {
            let records = group.scratch.take(self.plan.bytes)?;
            self.encode(group, buffer, records.address(), stream, kept, odd)?;
            self.sum(group, records.address(), stream, kept, odd)?;
            self.spread(group, records.address())?;
            let values = (buffer.start as Address, self.dtype);
            group.kernels.decode(&group.stream, self.codec, records.address(), self.all.tiles, values)
        }
    }

    /// Bytes before and after encoding of what this rank encodes in one all-reduce.
    pub fn traffic(&self, group: &Group) -> (u64, u64) {
        if group.layout.hosts.len() == 1 {
            return (0, 0);
        }
        let all = carried(&self.plan, group).chain(self.owned.iter().map(|(at, _)| *at));
        let of = |segment: &Segment| {
            let values: u64 = self.plan.tiles[segment.tiles.clone()].iter().map(|tile| u64::from(tile.count)).sum();
            (values * 4, segment.records.len() as u64)
        };
        all.map(|at| of(&self.plan.segments[at])).fold((0, 0), |sum, it| (sum.0 + it.0, sum.1 + it.1))
    }

    fn salt(&self, stream: u64, author: u64, residual: Address, odd: Address) -> Salted {
        let numbers = self.numbers.as_ref().map_or(0, Piece::address);
        Salted { residual, numbers, stream: mix(stream, author), odd }
    }

    /// My host's share of what I carry, as records.
    unsafe fn encode(
        &self,
        group: &Group,
        buffer: Buffer,
        records: Address,
        stream: u64,
        kept: Residuals,
        odd: Address,
    ) -> Result<()> {
        // a host speaks with the name of its first rank, and a result with none
        let first = group.communicator.members().ranks[group.host().1[0]];
        let salt = self.salt(stream, u64::from(first) + 1, kept.shares, odd);
        let values = buffer.start as Address;
        let (device, tiles) = (&group.stream, self.mine.tiles);
        // SAFETY: the caller's promise; the tiles are of the tensor, and the records as long as the plan says.
        unsafe {
            let Some(host_sum) = &self.host_sum else {
                return group.kernels.encode(device, self.codec, (values, self.dtype), tiles, records, salt);
            };
            let sums = host_sum.run(group, &self.plan, values, self.dtype)?;
            group.kernels.encode(device, self.codec, (sums.address(), DType::F32), tiles, records, salt)
        }
    }

    /// Shares to who sums them; the sums, encoded again, in place of my share.
    unsafe fn sum(&self, group: &Group, records: Address, stream: u64, kept: Residuals, odd: Address) -> Result<()> {
        let hosts = group.layout.hosts.len();
        let (host, _) = group.host();
        let segments = &self.plan.segments;
        let lengths = self.owned.iter().map(|(at, _)| (*at, segments[*at].records.len()));
        let (places, stride) = places(lengths);
        let shares = group.scratch.take(hosts * stride)?;
        group.communicator.group(&group.stream, "shares to their owners", |calls| {
            for segment in carried(&self.plan, group).map(|at| &segments[at]).filter(|it| !it.records.is_empty()) {
                let from = records + segment.records.start as u64;
                // SAFETY: the caller's promise.
                unsafe { calls.send(from, segment.records.len(), segment.carriers[segment.owner]) };
            }
            for (at, place) in &places {
                for (other, carrier) in segments[*at].carriers.iter().enumerate() {
                    let to = shares.address() + (other * stride + place) as u64;
                    // SAFETY: there is room for the shares of all hosts.
                    unsafe { calls.recv(to, segments[*at].records.len(), *carrier) };
                }
            }
            Ok(())
        })?;
        let divisor = if self.op == Op::Mean { group.communicator.members().ranks.len() as f32 } else { 1.0 };
        debug_assert!(self.owned.iter().all(|(at, _)| segments[*at].owner == host));
        for ((at, table), (_, place)) in self.owned.iter().zip(&places) {
            let first = shares.address() + *place as u64;
            let shares = Stacked { first, stride: stride as u64, peers: hosts as u32 };
            let (to, salt) = (records + segments[*at].records.start as u64, self.salt(stream, 0, kept.results, odd));
            // SAFETY: the shares have come when the kernel runs, on the same stream.
            unsafe { group.kernels.average(&group.stream, self.codec, (shares, divisor), table.tiles, to, salt)? };
        }
        Ok(())
    }

    /// Results from who summed them to all who carry them, and from these to their neighbours.
    unsafe fn spread(&self, group: &Group, records: Address) -> Result<()> {
        let ((host, members), me) = (group.host(), group.me());
        let filled = |at: &usize| !self.plan.segments[*at].records.is_empty();
        group.communicator.group(&group.stream, "results to all hosts", |calls| {
            for segment in carried(&self.plan, group).filter(filled).map(|at| &self.plan.segments[at]) {
                let (place, bytes) = (records + segment.records.start as u64, segment.records.len());
                let owner = segment.carriers[segment.owner];
                let others = segment.carriers.iter().filter(|carrier| **carrier != me);
                // SAFETY: the caller's promise.
                unsafe {
                    match owner == me {
                        true => others.for_each(|carrier| calls.send(place, bytes, *carrier)),
                        false => calls.recv(place, bytes, owner),
                    }
                }
            }
            Ok(())
        })?;
        if members.len() == 1 {
            return Ok(());
        }
        group.communicator.group(&group.stream, "results in the host", |calls| {
            for at in (0..self.plan.segments.len()).filter(filled) {
                let segment = &self.plan.segments[at];
                let (place, bytes) = (records + segment.records.start as u64, segment.records.len());
                // SAFETY: the caller's promise.
                unsafe { pass_on(calls, (place, bytes), segment.carriers[host], (me, members)) };
            }
            Ok(())
        })
    }
}
