//! Scatter and gather: the way of long data between hosts. The module above tells what happens and why.

use std::collections::{HashMap, HashSet};

use offbeat_transport::outbox::Payload;
use offbeat_transport::pool::Block;
use offbeat_transport::shm::arena::Piece;

use super::super::carried::{Carried, each_once};
use super::chunks::{Chunk, chunks};
use super::{Context, Stage, Wire};
use crate::Result;
use crate::buffer::Buffer;
use crate::coding::Coding;
use crate::dtype::Op;

/// What has come of a chunk that is summed here.
struct Pending {
    sums: Vec<Option<Block>>,
    acc: Block,
    /// Hosts that are in `acc` already, in ascending order.
    folded: usize,
}

/// One call on one rank.
struct Scatter {
    wire: Wire,
    buffer: Buffer,
    plan: Vec<Chunk>,
    /// The chunks that I carry.
    mine: Vec<usize>,
    host: usize,
    seat: usize,
    /// The only (host, seat) that gets the result, if not all do.
    goal: Option<(usize, usize)>,
    /// My own full-size staging area, if I have neighbours and my tensor is not in shared memory.
    staging: Option<Piece>,
    carried: Carried,
    /// My host's shares as they were encoded, of chunks that are summed here too: a share is encoded once.
    encoded: HashMap<usize, Block>,
}

/// Reduces long data over several hosts; the result goes to every member, or to one.
pub(crate) fn scatter_gather(
    context: &mut Context<'_>,
    buffer: Buffer,
    op: Op,
    divisor: Option<u32>,
    coding: Option<Coding>,
    only: Option<usize>,
) -> Result<()> {
    let layout = context.layout;
    let (host, seat) = layout.seat(context.me);
    let largest = layout.hosts.iter().map(Vec::len).max().unwrap_or(1);
    let size = buffer.dtype.size();
    let align = coding.as_ref().map_or(1, |coding| coding.codec.block()).max(64 / size);
    // a chunk is so many bytes on the wire: frames of fewer cost both ends, and all between, more than they carry
    let chunk = match &coding {
        Some(Coding { codec, .. }) => context.tuning.chunk * codec.block() / codec.encoded_len(codec.block()),
        None => context.tuning.chunk / size,
    };
    // slices overlap the sums inside hosts with the wire
    let slices = if largest == 1 { 1 } else { (buffer.bytes() >> 20).clamp(1, 8) };
    let plan = chunks(layout, buffer.count, align, slices, chunk);
    let mine = (0..plan.len()).filter(|id| plan[*id].carriers[host] == context.me).collect();
    let mut job = Scatter {
        wire: Wire::new(context, buffer.dtype, op, divisor, coding),
        buffer,
        plan,
        mine,
        host,
        seat,
        goal: only.map(|member| layout.seat(member)),
        staging: None,
        carried: Carried::new(buffer, buffer),
        encoded: HashMap::new(),
    };
    let result = job.run(context, op, slices);
    if result.is_err() {
        // frames on their way may still point into the job's sums
        context.recall();
    }
    result
}

impl Scatter {
    fn run(&mut self, context: &mut Context<'_>, op: Op, slices: usize) -> Result<()> {
        let neighbours = context.layout.hosts[self.host].len() > 1;
        if self.goal.is_some() {
            context.announce()?;
        }
        if neighbours {
            self.enter(context)?;
        }
        for slice in 0..slices {
            if neighbours {
                if slice > 0 {
                    self.copy_in(slice);
                    context.meet()?;
                }
                self.sum_slice(op, slice);
            }
            for id in self.in_turn(slice, context.layout.hosts.len()) {
                self.send_sum(context, id);
            }
        }
        context.look_outward(0.0);
        self.collect(context)?;
        if neighbours {
            context.meet()?;
            self.copy_out();
        }
        if self.goal.is_some() {
            context.agree()?;
        }
        context.drain()
    }

    /// Stages the first slice if need be, meets the neighbours and learns where their data is.
    fn enter(&mut self, context: &mut Context<'_>) -> Result<()> {
        let place = match context.place_of(self.buffer) {
            Some(place) => place,
            None => self.staging.insert(context.mesh.arena().allocate(self.buffer.bytes())?).offset(),
        };
        self.copy_in(0);
        self.carried.enter(context, place, self.mine.iter().map(|id| &self.plan[*id].range))
    }

    /// Copies one slice of every part into the staging area.
    fn copy_in(&self, slice: usize) {
        let Some(piece) = &self.staging else { return };
        let size = self.buffer.dtype.size();
        for chunk in self.plan.iter().filter(|chunk| chunk.slice == slice) {
            // SAFETY: the staging area is as long as the tensor, and nobody reads this slice before the next meeting.
            unsafe {
                let to = piece.start().add(chunk.range.start * size);
                std::ptr::copy_nonoverlapping(self.buffer.at(chunk.range.start), to, chunk.range.len() * size);
            }
        }
    }

    fn copy_out(&self) {
        if let Some(piece) = &self.staging
            && self.goal.is_none_or(|goal| goal == (self.host, self.seat))
        {
            // SAFETY: all neighbours have met since they wrote to my staging area.
            unsafe { std::ptr::copy_nonoverlapping(piece.start(), self.buffer.start, self.buffer.bytes()) };
        }
    }

    /// Sums one slice of what I carry over all neighbours.
    fn sum_slice(&self, op: Op, slice: usize) {
        for id in self.mine.iter().filter(|id| self.plan[**id].slice == slice) {
            // SAFETY: all neighbours have met with this slice in place, and its sums have not been sent yet.
            unsafe { self.carried.sum_up(&self.plan[*id].range, op) };
        }
    }

    /// Sends my host's sum of a chunk to whoever adds the hosts up.
    fn send_sum(&mut self, context: &mut Context<'_>, id: usize) {
        let chunk = &self.plan[id];
        let hosts: Vec<usize> = match (chunk.owner, self.goal) {
            (Some(owner), _) => vec![owner],
            (None, Some((goal, _))) => vec![goal],
            (None, None) => (0..chunk.carriers.len()).collect(),
        };
        let sum = self.carried.sum_of(&chunk.range);
        let mut encoded: Option<Block> = None;
        for to in hosts.into_iter().filter(|to| *to != self.host) {
            // SAFETY: the sum is complete. It is lent only if it stays: not where a tensor that is its own sum gets the
            // result before the owner (the other host) has answered.
            let payload = unsafe {
                let stays = chunk.owner.is_some() || self.carried.has_sums();
                if self.wire.is_coded() {
                    let share = encoded.get_or_insert_with(|| self.wire.encode(context, self.host, sum, &chunk.range));
                    context.copy(share.as_ptr(), share.len())
                } else if !stays {
                    Payload::Owned(self.wire.encode(context, self.host, sum, &chunk.range))
                } else {
                    context.lend(sum, self.wire.sum_len(self.host, &chunk.range))
                }
            };
            context.send(chunk.carriers[to], Stage::Scatter, id, payload);
        }
        if let Some(share) = encoded
            && chunk.owner.is_none()
        {
            self.encoded.insert(id, share);
        }
    }

    /// The chunks of a slice that I carry, in the order to send them: every host begins with the one after it, so that at
    /// any time each host hears from another one.
    fn in_turn(&self, slice: usize, hosts: usize) -> Vec<usize> {
        let mut ids: Vec<usize> = self.mine.iter().copied().filter(|id| self.plan[*id].slice == slice).collect();
        for round in ids.chunks_mut(hosts) {
            round.sort_by_key(|id| self.plan[*id].owner.map(|owner| (owner + hosts - self.host) % hosts));
        }
        ids
    }

    fn is_summed_here(&self, chunk: &Chunk) -> bool {
        match chunk.owner {
            Some(owner) => owner == self.host,
            None => self.goal.is_none_or(|(goal, _)| goal == self.host),
        }
    }

    fn awaits_result(&self, chunk: &Chunk) -> bool {
        chunk.owner.is_some_and(|owner| owner != self.host) && self.goal.is_none_or(|(goal, _)| goal == self.host)
    }

    /// Takes what comes until every chunk that I carry is done.
    fn collect(&self, context: &mut Context<'_>) -> Result<()> {
        let hosts = context.layout.hosts.len();
        let of_mine = |keep: &dyn Fn(&Chunk) -> bool| -> Vec<usize> {
            self.mine.iter().copied().filter(|id| keep(&self.plan[*id])).collect()
        };
        let mut pending: HashMap<usize, Pending> = HashMap::new();
        let mut sums: HashSet<usize> = of_mine(&|chunk| self.is_summed_here(chunk)).into_iter().collect();
        let mut results: HashSet<usize> = of_mine(&|chunk| self.awaits_result(chunk)).into_iter().collect();
        while !sums.is_empty() || !results.is_empty() {
            let next = context.poll()?;
            let (from, delivery) = match next {
                Some(next) => next,
                None => context.receive(|| self.missing(hosts, &sums, &results, &pending))?,
            };
            let (id, from_host) = (delivery.header.index as usize, context.layout.seat(from).0);
            let chunk = match self.plan.get(id) {
                Some(chunk) if chunk.carriers[from_host] == from => chunk,
                _ => return Err(context.bad_frame(delivery.from, "an unknown chunk")),
            };
            let count = chunk.range.len();
            if delivery.header.stage == Stage::Gather as u8 {
                if delivery.payload.len() != self.wire.result_len(&chunk.range) || !results.remove(&id) {
                    return Err(context.bad_frame(delivery.from, "a result of the wrong length, or twice"));
                }
                // SAFETY: the length was checked; what I carry is mine in all neighbours' buffers until the last meeting.
                unsafe { self.wire.accept(context, &delivery.payload, &self.targets(chunk), &chunk.range) };
                continue;
            }
            if delivery.payload.len() != self.wire.sum_len(from_host, &chunk.range) || !sums.contains(&id) {
                return Err(context.bad_frame(delivery.from, "a sum of the wrong length, or not for us"));
            }
            if chunk.owner.is_none() {
                let (own, theirs) = (self.carried.sum_of(&chunk.range).cast_const(), delivery.payload.as_ptr());
                let pair = if self.host == 0 { [own, theirs] } else { [theirs, own] };
                // SAFETY: the length was checked; what I carry is mine in all neighbours' buffers until the last meeting.
                if unsafe { self.wire.sum_pair(pair, &self.targets(chunk), count) } {
                    sums.remove(&id);
                    continue;
                }
            }
            let state = pending.entry(id).or_insert_with(|| Pending {
                sums: (0..hosts).map(|_| None).collect(),
                acc: context.scratch(count * self.buffer.dtype.accumulator().size()),
                folded: 0,
            });
            state.sums[from_host] = Some(delivery.payload);
            self.fold_ready(context, id, state);
            if state.folded == hosts
                && let Some(state) = pending.remove(&id)
            {
                sums.remove(&id);
                self.finish(context, id, state.acc);
            }
        }
        Ok(())
    }

    /// Folds all sums that are next in the order of the hosts.
    fn fold_ready(&self, context: &Context<'_>, id: usize, state: &mut Pending) {
        let chunk = &self.plan[id];
        let acc = state.acc.as_mut_ptr();
        while state.folded < state.sums.len() {
            let host = state.folded;
            // SAFETY: sums have the length of their chunk (checked on arrival), and so has the accumulator.
            unsafe {
                if host == self.host {
                    let own = self.carried.sum_of(&chunk.range);
                    if let Some(share) = self.encoded.get(&id) {
                        self.wire.fold(acc, host, share.as_ptr(), &chunk.range);
                    } else if self.wire.is_coded() {
                        let share = self.wire.encode(context, host, own, &chunk.range);
                        self.wire.fold(acc, host, share.as_ptr(), &chunk.range);
                    } else {
                        self.wire.fold(acc, host, own, &chunk.range);
                    }
                } else {
                    let Some(sum) = state.sums[host].take() else { return };
                    self.wire.fold(acc, host, sum.as_ptr(), &chunk.range);
                }
            }
            state.folded += 1;
        }
    }

    /// Where the result of a chunk goes on my host.
    fn targets(&self, chunk: &Chunk) -> Vec<*mut u8> {
        let seats = match self.goal {
            None => 0..self.carried.seats(),
            Some((host, seat)) if host == self.host => seat..seat + 1,
            Some(_) => 0..0,
        };
        seats.map(|seat| self.carried.at(seat, &chunk.range)).collect()
    }

    /// Ends a chunk's sum: writes it on my host and sends it to the others that want it.
    fn finish(&self, context: &mut Context<'_>, id: usize, mut acc: Block) {
        let chunk = &self.plan[id];
        let bytes = chunk.range.len() * self.buffer.dtype.size();
        let mut targets = self.targets(chunk);
        // where only another host wants the result, no tensor here may change: it gets memory of its own
        let mut apart = targets.is_empty().then(|| context.scratch(bytes));
        if let Some(block) = &mut apart {
            targets.push(block.as_mut_ptr());
        }
        // SAFETY: the accumulator holds the chunk; what I carry is mine in all neighbours' buffers until the last meeting.
        let encoded = unsafe { self.wire.seal(context, acc.as_mut_ptr(), &targets, &chunk.range) };
        if chunk.owner.is_none() {
            return;
        }
        let wanted = |host: &usize| *host != self.host && self.goal.is_none_or(|(goal, _)| goal == *host);
        let hosts = chunk.carriers.len();
        for to in (1..hosts).map(|step| (self.host + step) % hosts).filter(wanted) {
            // SAFETY: my own tensor or staging area stays as it is until this call ends.
            let payload = unsafe {
                match (&encoded, &apart) {
                    (Some(block), _) => context.copy(block.as_ptr(), block.len()),
                    (None, Some(block)) => context.copy(block.as_ptr(), bytes),
                    (None, None) => context.lend(self.carried.at(self.own_seat(), &chunk.range), bytes),
                }
            };
            context.send(chunk.carriers[to], Stage::Gather, id, payload);
        }
    }

    fn own_seat(&self) -> usize {
        if self.carried.seats() == 1 { 0 } else { self.seat }
    }

    /// Who keeps us waiting.
    fn missing(
        &self,
        hosts: usize,
        sums: &HashSet<usize>,
        results: &HashSet<usize>,
        pending: &HashMap<usize, Pending>,
    ) -> Vec<usize> {
        let absent = |id: &usize, host: &usize| match pending.get(id) {
            Some(state) => *host >= state.folded && state.sums[*host].is_none(),
            None => true,
        };
        let mut members: Vec<usize> =
            results.iter().filter_map(|id| Some(self.plan[*id].carriers[self.plan[*id].owner?])).collect();
        for id in sums {
            let late = (0..hosts).filter(|host| *host != self.host && absent(id, host));
            members.extend(late.map(|host| self.plan[*id].carriers[host]));
        }
        each_once(members)
    }
}
