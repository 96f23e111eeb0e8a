//! Gossip: the weighted mean with the peers of a step. Nodes of the graph are hosts, which sum among their ranks first; as on
//! the CPU, terms are added in the order of the hosts, and the bits are the same.

use offbeat_core::buffer::Buffer;
use offbeat_core::dtype::{DType, Op};
use offbeat_core::graph::{Graph, Mix, Term};
use offbeat_core::{Error, Result};

use crate::collective::{Group, HostSum, Table, carried, pass_on};
use crate::kernels::Stacked;
use crate::memory::Piece;
use crate::plan::{Plan, places};
use crate::stream::Address;

/// Gossip, built for one bucket.
pub struct Gossip {
    /// None: with nobody but the ranks of my host.
    graph: Option<Graph>,
    /// Among these: their mean, or their sum.
    op: Op,
    dtype: DType,
    plan: Plan,
    host_sum: Option<HostSum>,
    /// (segment, place) of what I carry, in each array that comes.
    places: Vec<(usize, usize)>,
    len: usize,
    mine: Table,
}

impl Gossip {
    /// Builds it for tensors of `count` elements. The graph's nodes are the hosts.
    pub fn build(group: &Group, graph: Graph, count: usize, dtype: DType) -> Result<Self> {
        if graph.nodes() != group.layout.hosts.len() {
            return Err(Error::invalid(format!(
                "gossip: a graph of {} nodes in a group on {} hosts; try: one node for each host",
                graph.nodes(),
                group.layout.hosts.len()
            )));
        }
        Self::with(group, (Some(graph), Op::Mean), count, dtype)
    }

    /// Builds the mean over the ranks of each host.
    pub fn inside(group: &Group, count: usize, dtype: DType) -> Result<Self> {
        Self::with(group, (None, Op::Mean), count, dtype)
    }

    /// Builds the sum over the ranks of each host.
    pub fn sum_inside(group: &Group, count: usize, dtype: DType) -> Result<Self> {
        Self::with(group, (None, Op::Sum), count, dtype)
    }

    fn with(group: &Group, (graph, op): (Option<Graph>, Op), count: usize, dtype: DType) -> Result<Self> {
        let plan = Plan::plain(&group.layout, count);
        let (places, len) = places(carried(&plan, group).map(|at| (at, plan.segments[at].range.len())));
        let mine = group.upload_tiles(&plan.placed(&places))?;
        // where one host has several ranks, all send f32
        let sums = group.layout.hosts.iter().any(|members| members.len() > 1);
        let host_sum = if sums { Some(HostSum::build(group, &plan)?) } else { None };
        Ok(Gossip { graph, op, dtype, plan, host_sum, places, len, mine })
    }

    /// Enqueues the mean with the peers of a step, in place.
    ///
    /// # Safety
    /// The tensor stays until the group's stream has come past this.
    pub unsafe fn run(&self, group: &Group, buffer: Buffer, step: u64) -> Result<()> {
        group.check(buffer)?;
        let (host, members) = group.host();
        let masses: Vec<u32> = group.layout.hosts.iter().map(|members| members.len() as u32).collect();
        let blend = match &self.graph {
            Some(graph) => graph.mix(&masses, host, step),
            None => alone(host, masses[host], self.op),
        };
        if blend.terms.len() == 1 && members.len() == 1 {
            return Ok(());
        }
        let values = buffer.start as Address;
        let sums = match &self.host_sum {
            // SAFETY: the caller's promise.
            Some(host_sum) => Some(unsafe { host_sum.run(group, &self.plan, values, self.dtype)? }),
            None => None,
        };
        let (own, dtype) = sums.as_ref().map_or((values, self.dtype), |sums| (sums.address(), DType::F32));
        let heap = group.scratch.take(blend.terms.len() * self.len * dtype.size())?;
        group.communicator.group(&group.stream, "gossip", |calls| {
            for (at, place) in &self.places {
                let segment = &self.plan.segments[*at];
                let (from, bytes) =
                    (own + (segment.range.start * dtype.size()) as u64, segment.range.len() * dtype.size());
                for (term, peer) in blend.terms.iter().enumerate() {
                    let to = heap.address() + ((term * self.len + place) * dtype.size()) as u64;
                    // SAFETY: the caller's promise; the heap has room for what every term sends.
                    unsafe {
                        calls.send(from, bytes, segment.carriers[peer.node]);
                        calls.recv(to, bytes, segment.carriers[peer.node]);
                    }
                }
            }
            Ok(())
        })?;
        let weights: Vec<u8> = blend.terms.iter().flat_map(|term| (term.factor as f32).to_le_bytes()).collect();
        let factors = match blend.divisor {
            Some(_) => None,
            None => Some(group.upload(&weights)?),
        };
        let divisor = blend.divisor.unwrap_or(1) as f32;
        let sources = Stacked { first: heap.address(), stride: self.len as u64, peers: blend.terms.len() as u32 };
        let factors = (factors.as_ref().map_or(0, Piece::address), divisor);
        // SAFETY: what came is there when the kernel runs, on the same stream.
        unsafe {
            let target = (values, self.dtype);
            group.kernels.mix(&group.stream, (sources, dtype), factors, self.mine.tiles, target)?;
        }
        if members.len() == 1 {
            return Ok(());
        }
        group.communicator.group(&group.stream, "gossip in the host", |calls| {
            let size = self.dtype.size();
            for segment in &self.plan.segments {
                let place = (values + (segment.range.start * size) as u64, segment.range.len() * size);
                // SAFETY: the caller's promise.
                unsafe { pass_on(calls, place, segment.carriers[host], (group.me(), members)) };
            }
            Ok(())
        })
    }
}

/// The mean or the sum over the ranks of one host.
fn alone(host: usize, ranks: u32, op: Op) -> Mix {
    let term = Term { node: host, factor: 1.0 / f64::from(ranks), mass: u64::from(ranks) };
    Mix { terms: vec![term], divisor: Some(if op == Op::Sum { 1 } else { ranks }) }
}
