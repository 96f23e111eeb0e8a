//! Collectives: what each computes, by which way the bytes go, and in which order they are summed.
//!
//! | file | what | way |
//! |---|---|---|
//! | [`all_reduce`] | all_reduce, reduce, barrier | chooses among the ways below by size and place |
//! | [`local`] | the ranks of one host | slots, or straight in each other's shared memory |
//! | [`between`] | hosts | exchange (one delay), or scatter and gather (fewest bytes) |
//! | [`blocks`] | all_gather, gather, scatter, all_to_all, reduce_scatter | whole blocks from rank to rank |
//! | [`broadcast`] | broadcast | star for short data, chain for long |
//! | [`gossip`] | the weighted mean with some peers | each host's data to each peer host |
//!
//! Sums are always: the ranks of a host in ascending order, then the hosts in ascending order, whatever the way.
//! Every frame and every slot carries the description of the call; it is compared before a byte is believed.

mod agree;
pub mod all_reduce;
pub mod between;
pub mod blocks;
pub mod broadcast;
mod carried;
pub mod gossip;
pub mod local;
mod staged;

use std::cell::Cell;
use std::collections::{HashSet, VecDeque};
use std::time::Duration;

use offbeat_transport::frame::{FrameKind, Header, Note};
use offbeat_transport::inbox::{Channel, Delivery, Reception};
use offbeat_transport::mesh::Mesh;
use offbeat_transport::outbox::{Outgoing, Payload, Sends};
use offbeat_transport::pool::Block;
use offbeat_transport::shm::team::Team;
use offbeat_transport::watchdog::Watch;

use crate::config::Tuning;
use crate::describe::Description;
use crate::topology::Layout;
use crate::{Error, Kind, Result};

/// Whoever waits for a silent rank itself can name it when the deadline passes. Whoever waits for one that waits in turn
/// would name the wrong rank, so it waits longer, for the better story to come: by this, or half of a short timeout, for
/// each rank in between.
const GRACE: Duration = Duration::from_secs(1);

/// What a frame of a collective is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Stage {
    /// No data: "I am in this call".
    Here = 0,
    /// A host's share of a sum, to whoever sums it.
    Scatter = 1,
    /// A finished sum, from whoever summed it.
    Gather = 2,
    /// The shape of a block.
    Shape = 3,
    /// A piece of a block.
    Block = 4,
    /// No data: "all ranks are in this call".
    Alike = 5,
    /// No data, to neighbours: "I do not touch your control block any more".
    Parted = 6,
    /// The number of a call, and the story of its sender, whose time is up in it.
    Late = 7,
}

/// Everything that one call on one rank works with.
pub(crate) struct Context<'a> {
    pub(crate) mesh: &'a Mesh,
    pub(crate) group: u64,
    pub(crate) sequence: u64,
    pub(crate) ranks: &'a [u32],
    /// My place in `ranks`.
    pub(crate) me: usize,
    pub(crate) layout: &'a Layout,
    pub(crate) tuning: Tuning,
    pub(crate) watch: &'a Watch<'a>,
    pub(crate) note: Note,
    /// The members on my host, where there are several.
    pub(crate) team: Option<&'a mut Team>,
    /// What other hosts send, where there are several.
    pub(crate) reception: Option<Reception<'a>>,
    pub(crate) sends: Sends,
    /// What members have said without data.
    said: HashSet<(usize, u8)>,
    /// Members of which anything has come: they are in this call, and not to blame if it takes too long.
    heard: HashSet<usize>,
    /// Data that came while something else was waited for.
    early: VecDeque<(usize, Delivery)>,
    /// How many may wait in a row between me and a silent rank when I wait for a frame.
    before_frame: f32,
    /// The same when I wait for a neighbour.
    before_neighbour: f32,
}

impl<'a> Context<'a> {
    #[expect(clippy::too_many_arguments, reason = "one place builds a context from its parts")]
    pub(crate) fn new(
        mesh: &'a Mesh,
        (group, sequence): (u64, u64),
        ranks: &'a [u32],
        me: usize,
        layout: &'a Layout,
        tuning: Tuning,
        watch: &'a Watch<'a>,
        description: Description,
        team: Option<&'a mut Team>,
    ) -> Self {
        let several = layout.hosts.len() > 1;
        Context {
            mesh,
            group,
            sequence,
            ranks,
            me,
            layout,
            tuning,
            watch,
            note: description.encode(),
            team,
            reception: several.then(|| mesh.board().open(Channel::Call(group, sequence))),
            sends: Sends::default(),
            said: HashSet::new(),
            heard: HashSet::new(),
            early: VecDeque::new(),
            // whoever has neighbours meets them before it sends
            before_frame: if layout.hosts.iter().any(|host| host.len() > 1) { 1.0 } else { 0.0 },
            before_neighbour: 0.0,
        }
    }

    /// From here on neighbours may wait for other hosts, and whoever sends me frames for `more` ranks in a row.
    pub(crate) fn look_outward(&mut self, more: f32) {
        if self.layout.hosts.len() > 1 {
            self.before_frame += more;
            // more than a frame ever has: whoever sends has met its neighbours, and waited in a chain and to agree
            self.before_neighbour = 4.0;
        }
    }

    /// The watch of a wait with so many ranks between me and a silent one.
    fn patient(&self, before: f32) -> Watch<'a> {
        let grace = GRACE.min(self.watch.limit / 2).mul_f32(before);
        Watch { limit: self.watch.limit + grace, ..*self.watch }
    }

    /// The team, where the caller knows that there is one.
    pub(crate) fn team(&mut self) -> Result<&mut Team> {
        self.team.as_deref_mut().ok_or_else(no_team)
    }

    /// Meets the team and makes sure that all members are in the same call.
    pub(crate) fn meet_and_compare(&mut self) -> Result<()> {
        self.meet()?;
        let note = self.note;
        let team = self.team()?;
        if (0..team.len()).all(|member| team.note(member) == note) {
            return Ok(());
        }
        let notes: Vec<(u32, Note)> = (0..team.len()).map(|member| (team.rank(member), team.note(member))).collect();
        team.give_up();
        Err(self.mismatch(&notes))
    }

    /// Meets the team. A frame of another call ends the wait: a neighbour may be waiting for whoever sent it.
    pub(crate) fn meet(&mut self) -> Result<()> {
        let (watch, note) = (self.patient(self.before_neighbour), self.note);
        let team = self.team.as_deref_mut().ok_or_else(no_team)?;
        let other: Cell<Option<(u32, Note)>> = Cell::new(None);
        let differs =
            |delivery: &Delivery| (delivery.header.note != note).then_some((delivery.from, delivery.header.note));
        let look = || {
            other.set(self.reception.as_ref().and_then(|reception| reception.find(differs)));
            match other.get() {
                Some(_) => Err(Error::new(Kind::Mismatch, "a frame of another call")),
                None => watch.interrupt.map_or(Ok(()), |check| check()),
            }
        };
        let result = team.meet(&Watch { interrupt: Some(&look), ..watch });
        if result.is_err() {
            team.give_up();
        }
        match other.get() {
            Some(theirs) if result.is_err() => Err(self.mismatch(&[(self.mesh.me(), note), theirs])),
            _ => result,
        }
    }

    fn mismatch(&self, notes: &[(u32, Note)]) -> Error {
        let mut lines: Vec<(u32, Note)> = notes.to_vec();
        lines.sort_by_key(|(rank, _)| *rank);
        let usual = lines[0].1;
        let other = lines.iter().find(|(_, note)| *note != usual).map(|(rank, _)| *rank);
        let text: Vec<String> = lines
            .iter()
            .map(|(rank, note)| format!("  {}: {}", self.mesh.roster().card(*rank).name(), Description::decode(note)))
            .collect();
        Error {
            rank: other,
            ..Error::new(
                Kind::Mismatch,
                format!(
                    "ranks differ in call {} of group {:?}:\n{}\ntry: make the same calls, with the same shapes and types, \
                     in the same order on every rank of the group",
                    self.sequence,
                    self.ranks,
                    text.join("\n")
                ),
            )
        }
    }

    fn header(&self, stage: Stage, index: usize) -> Header {
        Header {
            stage: stage as u8,
            group: self.group,
            sequence: self.sequence,
            index: index as u32,
            note: self.note,
            ..Header::bare(FrameKind::Data)
        }
    }

    /// Sends a frame to a member; to a neighbour only in [`Context::part`].
    pub(crate) fn send(&self, to: usize, stage: Stage, index: usize, payload: Payload) {
        self.mesh.send(self.ranks[to], Outgoing { header: self.header(stage, index), payload });
    }

    /// Lends memory to a frame.
    ///
    /// # Safety
    /// As for [`Sends::lend`]: the memory stays readable until the context is dropped, and unchanged until it is sent.
    pub(crate) unsafe fn lend(&mut self, start: *const u8, len: usize) -> Payload {
        // SAFETY: the caller's promise is passed on.
        unsafe { self.sends.lend(start, len) }
    }

    /// A copy of memory for a frame.
    ///
    /// # Safety
    /// `len` bytes at `start` are readable and nobody writes them meanwhile.
    pub(crate) unsafe fn copy(&self, start: *const u8, len: usize) -> Payload {
        let mut block = self.mesh.pool().take(len);
        // SAFETY: the caller's promise.
        block.extend_from_slice(unsafe { std::slice::from_raw_parts(start, len) });
        Payload::Owned(block)
    }

    /// Room for accumulators, with anything in it, aligned to eight bytes as the allocator aligns everything of this size.
    pub(crate) fn scratch(&self, bytes: usize) -> Block {
        let block = self.mesh.pool().take_filled(bytes.max(8));
        debug_assert_eq!(block.as_ptr() as usize % 8, 0);
        block
    }

    /// The next frame of this call from another host: which member, and what.
    pub(crate) fn receive(&mut self, missing: impl Fn() -> Vec<usize>) -> Result<(usize, Delivery)> {
        loop {
            if let Some(next) = self.early.pop_front() {
                return Ok(next);
            }
            self.take_one(&missing)?;
        }
    }

    /// The next frame, if one is there.
    pub(crate) fn poll(&mut self) -> Result<Option<(usize, Delivery)>> {
        while self.early.is_empty() {
            let Some(delivery) = self.reception.as_ref().and_then(Reception::poll) else { break };
            self.sort(delivery)?;
        }
        Ok(self.early.pop_front())
    }

    /// Waits until some members have said something that carries no data.
    pub(crate) fn hear(&mut self, members: &[usize], stage: Stage) -> Result<()> {
        loop {
            let absent: Vec<usize> =
                members.iter().copied().filter(|m| !self.said.contains(&(*m, stage as u8))).collect();
            if absent.is_empty() {
                return Ok(());
            }
            self.take_one(&|| absent.clone())?;
        }
    }

    fn take_one(&mut self, missing: &dyn Fn() -> Vec<usize>) -> Result<()> {
        let reception = self.reception.as_ref().ok_or_else(|| Error::io("receiving", "nobody sends frames here"))?;
        let ranks = || {
            let (silent, others): (Vec<usize>, Vec<usize>) = missing().iter().partition(|m| !self.heard.contains(m));
            let late = if silent.is_empty() { others } else { silent };
            late.into_iter().map(|member| self.ranks[member]).collect()
        };
        let next = reception.next(&self.patient(self.before_frame), ranks);
        if let (Err(_), Some(team)) = (&next, &self.team) {
            team.give_up();
        }
        self.sort(next?)
    }

    fn sort(&mut self, delivery: Delivery) -> Result<()> {
        let (from, delivery) = self.admit(delivery)?;
        self.heard.insert(from);
        let stage = delivery.header.stage;
        if [Stage::Here, Stage::Alike, Stage::Parted].iter().any(|said| *said as u8 == stage) {
            self.said.insert((from, stage));
        } else {
            self.early.push_back((from, delivery));
        }
        Ok(())
    }

    fn admit(&self, delivery: Delivery) -> Result<(usize, Delivery)> {
        if delivery.header.note != self.note {
            let mine = (self.mesh.me(), self.note);
            return Err(self.mismatch(&[mine, (delivery.from, delivery.header.note)]));
        }
        match self.ranks.iter().position(|rank| *rank == delivery.from) {
            Some(member) => Ok((member, delivery)),
            None => Err(self.bad_frame(delivery.from, "it is not in this group")),
        }
    }

    pub(crate) fn bad_frame(&self, rank: u32, why: &str) -> Error {
        let card = self.mesh.roster().card(rank);
        Error::of_rank(
            Kind::BadFrame,
            rank,
            &card.host,
            format!("{} sent a frame that does not fit: {why}", card.name()),
        )
    }

    /// Takes back what was lent and has not left, by copying it: for a failed call, before the memory goes away.
    pub(crate) fn recall(&mut self) {
        self.sends = Sends::default();
    }

    /// Waits until everything lent has left.
    pub(crate) fn drain(&self) -> Result<()> {
        self.sends.wait(&self.patient(self.before_neighbour))
    }
}

fn no_team() -> Error {
    Error::io("shared memory", "this rank has no team")
}
