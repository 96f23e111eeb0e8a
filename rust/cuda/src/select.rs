//! The step `Select` on a device: the mean over all ranks of the largest elements of each tensor, with the bits of the CPU.
//!
//! ```text
//! values ─▶ (in the host: their sum, to everyone)                        full precision, over NVLink
//!        ─▶ with what is left of earlier rounds: select, write lists     on everyone                     10 kernels
//!        ─▶ lists to the other hosts ─▶ (in the host: to everyone)       one grouped exchange (two)
//!        ─▶ lists of all hosts in their order, added up; divide          on everyone                     a kernel for each
//! ```
//! The ranks of a host have the same sum, so they select the same, and each has all lists of its host. Every rank sends a
//! part of them, wherever that begins, to who carries it on another host.

use std::ops::Range;

use offbeat_core::Result;
use offbeat_core::algorithm::list_traffic;
use offbeat_core::buffer::Buffer;
use offbeat_core::codec::TopK;
use offbeat_core::dtype::DType;

use crate::collective::{Group, Table, carried, pass_on};
use crate::gossip::Gossip;
use crate::kernels::top_k::{COUNTS, Lists, Room, SCRATCH, Scatter, Tables};
use crate::kernels::{Stacked, Tiles};
use crate::memory::Piece;
use crate::plan::Plan;
use crate::stream::Address;

/// A selection, built for one bucket.
pub struct Select {
    count: usize,
    dtype: DType,
    host_sum: Gossip,
    tables: Tables,
    /// What the tables lie in.
    _held: ([Table; 2], [Piece; 2]),
    /// What was left of earlier runs, for each element.
    pub(crate) left: Piece,
    /// Who carries which bytes of the lists of a host.
    plan: Plan,
    /// Bytes from the lists of one host to those of the next.
    stride: usize,
    /// The whole bucket.
    all: Table,
    /// Bytes before and after selecting.
    traffic: (u64, u64),
}

impl Select {
    /// Builds it for tensors in a bucket of `count` elements, and how many each sends.
    pub fn build(group: &Group, tensors: &[(Range<usize>, TopK)], count: usize, dtype: DType) -> Result<Self> {
        let lists = Lists::new(tensors);
        let (tiles, targets) = (group.upload_tiles(&lists.tiles)?, group.upload_tiles(&lists.targets)?);
        // SAFETY: spans are numbers without gaps between them.
        let bytes =
            unsafe { std::slice::from_raw_parts(lists.spans.as_ptr().cast(), size_of_val(lists.spans.as_slice())) };
        let (spans, counts) = (group.upload(bytes)?, group.upload(&vec![0; lists.spans.len() * COUNTS])?);
        let tables = Tables {
            spans: Tiles { address: spans.address(), count: lists.spans.len() as u32 },
            tiles: tiles.tiles,
            targets: targets.tiles,
            counts: counts.address(),
        };
        // where a tile is read it is written
        let whole = Plan::plain(&group.layout, count);
        let plan = Plan::plain(&group.layout, lists.bytes);
        // of all ranks of a host everyone sends a part
        let sent: u64 = carried(&plan, group).map(|at| plan.segments[at].range.len() as u64).sum();
        let values: u64 = tensors.iter().map(|(range, _)| range.len() as u64 * 4).sum();
        let values = values * sent / (lists.bytes as u64).max(1);
        let places: Vec<(usize, usize)> = whole.segments.iter().map(|it| it.range.start).enumerate().collect();
        Ok(Select {
            count,
            dtype,
            host_sum: Gossip::sum_inside(group, count, dtype)?,
            tables,
            _held: ([tiles, targets], [spans, counts]),
            left: group.zeros(count)?,
            plan,
            stride: lists.bytes.next_multiple_of(16),
            all: group.upload_tiles(&whole.placed(&places))?,
            traffic: list_traffic(values, sent, group.layout.hosts.len()),
        })
    }

    /// Bytes before and after selecting, in one run.
    pub fn traffic(&self) -> (u64, u64) {
        self.traffic
    }

    /// Enqueues one run, in place. `odd` counts what is not finite.
    ///
    /// # Safety
    /// The bucket and all that is named by its address stay until the group's stream has come past this.
    pub unsafe fn run(&self, group: &Group, buffer: Buffer, odd: Address) -> Result<()> {
        group.check_built(buffer, self.count, self.dtype)?;
        let (hosts, (host, _)) = (group.layout.hosts.len(), group.host());
        let values = (buffer.start as Address, self.dtype);
        let (of_span, of_tile, of_element) = SCRATCH;
        let searches = group.scratch.take(self.tables.spans.count as usize * of_span)?;
        let tallies = group.scratch.take(self.tables.tiles.count as usize * of_tile)?;
        let candidates = group.scratch.take(self.count * of_element)?;
        let lists = group.scratch.take(hosts * self.stride)?;
        let lists_of = |host: usize| lists.address() + (host * self.stride) as u64;
        let room = Room { searches: searches.address(), tallies: tallies.address(), candidates: candidates.address() };
        let (stream, kernels) = (&group.stream, &group.kernels);
        // SAFETY: the caller's promise; tables and scratch memory stay on this stream, and are as long as they say.
        unsafe {
            self.host_sum.run(group, buffer, 0)?;
            kernels.select(stream, values, &self.tables, room, (lists_of(host), self.left.address(), odd))?;
            self.exchange(group, &lists_of)?;
            // what lies between tensors is zero anyway
            stream.clear(values.0, buffer.bytes())?;
            for host in 0..hosts {
                let how = if host == 0 { Scatter::Decode } else { Scatter::Add };
                kernels.scatter(stream, (how, lists_of(host)), &self.tables, values, odd)?;
            }
            let (own, world) =
                (Stacked { first: values.0, stride: 0, peers: 1 }, group.communicator.members().ranks.len());
            kernels.mix(stream, (own, self.dtype), (0, world as f32), self.all.tiles, values)
        }
    }

    /// Everybody gets the lists of all other hosts.
    unsafe fn exchange(&self, group: &Group, lists_of: &dyn Fn(usize) -> Address) -> Result<()> {
        let ((host, members), me) = (group.host(), group.me());
        let others: Vec<usize> = (0..group.layout.hosts.len()).filter(|other| *other != host).collect();
        if others.is_empty() {
            return Ok(());
        }
        let segments = &self.plan.segments;
        group.communicator.group(&group.stream, "selected elements to all hosts", |calls| {
            for segment in carried(&self.plan, group).map(|at| &segments[at]) {
                let (first, bytes) = (segment.range.start as u64, segment.range.len());
                for other in &others {
                    // SAFETY: the caller's promise; there is room for the lists of all hosts.
                    unsafe {
                        calls.send(lists_of(host) + first, bytes, segment.carriers[*other]);
                        calls.recv(lists_of(*other) + first, bytes, segment.carriers[*other]);
                    }
                }
            }
            Ok(())
        })?;
        if members.len() == 1 {
            return Ok(());
        }
        group.communicator.group(&group.stream, "selected elements in the host", |calls| {
            for segment in segments {
                for other in &others {
                    let place = (lists_of(*other) + segment.range.start as u64, segment.range.len());
                    // SAFETY: as above.
                    unsafe { pass_on(calls, place, segment.carriers[host], (me, members)) };
                }
            }
            Ok(())
        })
    }
}
