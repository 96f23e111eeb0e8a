//! gossip: everyone's data becomes the weighted mean of its own and that of its peers of this round ([`Graph`]).
//!
//! Nodes of the graph are hosts. The ranks of a host sum among themselves, each the parts that it carries
//! ([`Layout::parts`]), and send their sums to the members that carry the same parts on the peer hosts; everyone adds what
//! comes to its own in the order of the hosts, and writes the result into all neighbours' buffers. So a host sends its data
//! once to each peer host, all its ranks talk, and there is one delay.
//!
//! ```text
//! host a: ranks 0 1    host b: ranks 2 3        a and b are peers
//!   0 sums part 0 of 0 and 1  ─▶ 2              2 sums part 0 of 2 and 3  ─▶ 0
//!   1 sums part 1             ─▶ 3              3 sums part 1             ─▶ 1
//!   0 adds (0 + 1) + (2 + 3), divides by 4, and writes part 0 of the buffers of 0 and 1
//! ```
//! Where all ranks involved count the same (in a matching always, on a ring if hosts are alike), their sum is divided once, as
//! in an all_reduce; otherwise each host's sum is multiplied by its factor. Either way the order is that of the hosts, so
//! the two of a pair hold the same bits afterwards, and peers `all` give the bits of an all_reduce with mean.
//!
//! A rank waits for its peers and neighbours only, and compares notes with them only.

use std::collections::HashMap;
use std::ops::Range;

use offbeat_transport::pool::Block;
use offbeat_transport::shm::arena::Piece;

use super::carried::{Carried, each_once};
use super::{Context, Stage, local};
use crate::Result;
use crate::buffer::Buffer;
use crate::dtype::{DType, Op};
use crate::graph::{Graph, Mix};
use crate::reduce;
use crate::topology::{Layout, cut};

/// A piece of the data that travels in one frame.
#[derive(Debug, PartialEq, Eq)]
struct Chunk {
    range: Range<usize>,
    /// The member of each host that carries it.
    carriers: Vec<usize>,
}

/// Cuts the data into chunks, alike on every rank. Empty data is one empty chunk: peers compare notes on it.
fn chunks(layout: &Layout, count: usize, size: usize, chunk_bytes: usize) -> Vec<Chunk> {
    if count == 0 {
        return vec![Chunk { range: 0..0, carriers: layout.hosts.iter().map(|host| host[0]).collect() }];
    }
    let align = 64 / size;
    let mut chunks = Vec::new();
    for part in layout.parts(count, align) {
        let (first, len) = (part.range.start, part.range.len());
        let ways = (len * size).div_ceil(chunk_bytes);
        for at in 0..ways {
            let range = first + cut(len, ways, at, align)..first + cut(len, ways, at + 1, align);
            if !range.is_empty() {
                chunks.push(Chunk { range, carriers: part.carriers.clone() });
            }
        }
    }
    chunks
}

/// What has come of a chunk.
struct Pending {
    /// Of each term of the mix.
    sums: Vec<Option<Block>>,
    acc: Block,
    /// Terms that are in `acc` already, in ascending order.
    folded: usize,
}

/// One call on one rank.
struct Gossip {
    mix: Mix,
    /// What is mixed.
    source: Buffer,
    /// Where the result goes; often the same.
    target: Buffer,
    plan: Vec<Chunk>,
    /// The chunks that I carry.
    mine: Vec<usize>,
    host: usize,
    /// Whether each host has one rank only, and so sends its values as they are; else it sends accumulators.
    raw: Vec<bool>,
    /// A copy of my data in shared memory, if I have neighbours and my tensor is not there.
    staging: Option<Piece>,
    carried: Carried,
}

/// Mixes `tensor` with the data of this step's peers, in place or into `out`.
pub(crate) fn run(
    context: &mut Context<'_>,
    tensor: Buffer,
    out: Option<Buffer>,
    graph: &Graph,
    step: u64,
) -> Result<()> {
    let layout = context.layout;
    let (host, _) = layout.seat(context.me);
    let masses: Vec<u32> = layout.hosts.iter().map(|members| members.len() as u32).collect();
    let mix = graph.mix(&masses, host, step);
    let target = out.unwrap_or(tensor);
    if mix.terms.len() == 1 {
        copy(tensor, target);
        if context.team.is_some() {
            local::all_reduce(context, target, Op::Mean, Some(masses[host]), None)?;
        }
        return no_more(context);
    }
    let plan = chunks(layout, tensor.count, tensor.dtype.size(), context.tuning.chunk);
    let mine = (0..plan.len()).filter(|id| plan[*id].carriers[host] == context.me).collect();
    let mut job = Gossip {
        mix,
        source: tensor,
        target,
        plan,
        mine,
        host,
        raw: masses.iter().map(|mass| *mass == 1).collect(),
        staging: None,
        carried: Carried::new(tensor, target),
    };
    let result = job.run(context);
    if result.is_err() {
        // frames on their way may still point into the job's sums
        context.recall();
    }
    result
}

fn copy(from: Buffer, to: Buffer) {
    if from.start != to.start && from.bytes() > 0 {
        // SAFETY: both are the call's, of one length, and do not overlap (`Call::check`).
        unsafe { std::ptr::copy_nonoverlapping(from.start.cast_const(), to.start, from.bytes()) };
    }
}

/// Whoever is in this call has sent all it had to and heard all it waited for; what is left was sent in another call.
fn no_more(context: &mut Context<'_>) -> Result<()> {
    match context.poll()? {
        None => Ok(()),
        Some((_, delivery)) => Err(context.bad_frame(delivery.from, "it is no peer in this round")),
    }
}

impl Gossip {
    fn run(&mut self, context: &mut Context<'_>) -> Result<()> {
        let neighbours = context.team.is_some();
        if neighbours {
            self.enter(context)?;
        }
        for at in 0..self.mine.len() {
            let id = self.mine[at];
            if neighbours {
                // SAFETY: all neighbours have met with their data in place, and this sum has not been sent yet.
                unsafe { self.carried.sum_up(&self.plan[id].range, Op::Sum) };
            }
            self.send(context, id);
        }
        context.look_outward(0.0);
        self.collect(context)?;
        if neighbours {
            context.meet()?;
            if let Some(piece) = &self.staging {
                copy(Buffer { start: piece.start(), ..self.target }, self.target);
            }
        }
        context.drain()?;
        no_more(context)
    }

    /// Puts my data where the neighbours see it and the result is to be, meets them and learns where theirs is.
    fn enter(&mut self, context: &mut Context<'_>) -> Result<()> {
        let (place, seen) = match context.place_of(self.target) {
            Some(place) => (place, self.target),
            None => {
                let piece = self.staging.insert(context.mesh.arena().allocate(self.target.bytes())?);
                (piece.offset(), Buffer { start: piece.start(), ..self.target })
            }
        };
        copy(self.source, seen);
        self.carried.enter(context, place, self.mine.iter().map(|id| &self.plan[*id].range))
    }

    /// The type in which a host's sum is kept and sent.
    fn sent_as(&self, host: usize) -> DType {
        if self.raw[host] { self.source.dtype } else { self.source.dtype.accumulator() }
    }

    /// Sends my host's sum of a chunk to the peers, every host in another order, so that not all talk to one at a time.
    fn send(&self, context: &mut Context<'_>, id: usize) {
        let chunk = &self.plan[id];
        let (sum, bytes) = (self.carried.sum_of(&chunk.range), chunk.range.len() * self.sent_as(self.host).size());
        // a tensor that is its own sum gets the result in place, perhaps before the frame has left
        let stays = self.carried.has_sums() || self.source.start != self.target.start;
        let after = self.mix.terms.iter().filter(|term| term.node > self.host);
        for term in after.chain(self.mix.terms.iter().filter(|term| term.node < self.host)) {
            // SAFETY: the sum is complete, and what is lent stays as it is until this call ends.
            let payload = unsafe { if stays { context.lend(sum, bytes) } else { context.copy(sum, bytes) } };
            context.send(chunk.carriers[term.node], Stage::Scatter, id, payload);
        }
    }

    /// Folds what peers send until every chunk is done.
    fn collect(&self, context: &mut Context<'_>) -> Result<()> {
        let mut pending: HashMap<usize, Option<Pending>> = self.mine.iter().map(|id| (*id, None)).collect();
        while !pending.is_empty() {
            let (from, delivery) = match context.poll()? {
                Some(next) => next,
                None => context.receive(|| self.missing(&pending))?,
            };
            let (id, from_host) = (delivery.header.index as usize, context.layout.seat(from).0);
            let term = self.mix.terms.iter().position(|term| term.node == from_host && from_host != self.host);
            let (Some(term), Some(state)) = (term, pending.get_mut(&id)) else {
                return Err(context.bad_frame(delivery.from, "it is no peer in this round, or sends a chunk again"));
            };
            let chunk = &self.plan[id];
            let count = chunk.range.len();
            if chunk.carriers[from_host] != from
                || delivery.header.stage != Stage::Scatter as u8
                || delivery.payload.len() != count * self.sent_as(from_host).size()
            {
                return Err(context.bad_frame(delivery.from, "not its host's sum of this chunk"));
            }
            let state = state.get_or_insert_with(|| Pending {
                sums: self.mix.terms.iter().map(|_| None).collect(),
                acc: context.scratch(count * self.source.dtype.accumulator().size()),
                folded: 0,
            });
            state.sums[term] = Some(delivery.payload);
            self.fold_ready(context, id, state);
            if state.folded == self.mix.terms.len() {
                // SAFETY: the accumulator holds the chunk, and what I carry is mine in all neighbours' buffers until the
                // last meeting.
                unsafe {
                    let (acc, divisor) = (state.acc.as_mut_ptr(), self.mix.divisor);
                    reduce::seal(acc, &self.carried.places(&chunk.range), count, self.source.dtype, divisor);
                }
                pending.remove(&id);
            }
        }
        Ok(())
    }

    /// Folds all sums that are next in the order of the hosts.
    fn fold_ready(&self, context: &Context<'_>, id: usize, state: &mut Pending) {
        let range = &self.plan[id].range;
        while let Some(term) = self.mix.terms.get(state.folded) {
            let own = term.node == self.host;
            let sum = match &state.sums[state.folded] {
                _ if own => self.carried.sum_of(range).cast_const(),
                Some(block) => block.as_ptr(),
                None => return,
            };
            let factor = if self.mix.divisor.is_some() { None } else { Some(term.factor) };
            // SAFETY: sums have the length of their chunk (checked on arrival), and so has the accumulator.
            unsafe { self.fold(context, state, sum, range.len(), self.sent_as(term.node), factor) };
            state.sums[state.folded] = None;
            state.folded += 1;
        }
    }

    /// Adds a sum, multiplied where factors differ, to what was folded before.
    unsafe fn fold(
        &self,
        context: &Context<'_>,
        state: &mut Pending,
        sum: *const u8,
        count: usize,
        dtype: DType,
        factor: Option<f64>,
    ) {
        let (acc, wide) = (state.acc.as_mut_ptr(), dtype.accumulator());
        // SAFETY: the caller's promise; the scratch has room for as many accumulators.
        unsafe {
            match (state.folded, factor) {
                (0, None) => reduce::widen(sum, acc, count, dtype),
                (_, None) => reduce::fold(acc, sum, count, dtype, Op::Sum),
                (0, Some(factor)) => {
                    reduce::widen(sum, acc, count, dtype);
                    reduce::scale(acc, count, wide, factor);
                }
                (_, Some(factor)) => {
                    let mut part = context.scratch(count * wide.size());
                    reduce::widen(sum, part.as_mut_ptr(), count, dtype);
                    reduce::scale(part.as_mut_ptr(), count, wide, factor);
                    reduce::fold(acc, part.as_ptr(), count, wide, Op::Sum);
                }
            }
        }
    }

    /// Who keeps us waiting.
    fn missing(&self, pending: &HashMap<usize, Option<Pending>>) -> Vec<usize> {
        let mut members = Vec::new();
        for (id, state) in pending {
            for (at, term) in self.mix.terms.iter().enumerate().filter(|(_, term)| term.node != self.host) {
                let here = state.as_ref().is_some_and(|state| at < state.folded || state.sums[at].is_some());
                if !here {
                    members.push(self.plan[*id].carriers[term.node]);
                }
            }
        }
        each_once(members)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::is_gapless;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn chunks_cover_everything_once(
            sizes in proptest::collection::vec(1usize..4, 1..5), count in 0usize..20_000, size in 2usize..9,
        ) {
            let layout = Layout::of_sizes(&sizes);
            let plan = chunks(&layout, count, size, 512);
            prop_assert!(is_gapless(plan.iter().map(|chunk| &chunk.range), count));
            for chunk in &plan {
                prop_assert!(chunk.range.len() * size <= 512 + 64, "{:?}", chunk);
                prop_assert_eq!(chunk.carriers.len(), sizes.len());
            }
            prop_assert!(!plan.is_empty());
        }
    }
}
