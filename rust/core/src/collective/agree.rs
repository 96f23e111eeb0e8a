//! How ranks make sure that all are in the same call where not every host hears every other, how they find out who is late
//! where they may be in different calls, and how they part.

use std::cell::Cell;

use offbeat_transport::frame::Header;
use offbeat_transport::inbox::Channel;
use offbeat_transport::outbox::Payload;
use offbeat_transport::watchdog::Watch;

use super::{Context, GRACE, Stage};
use crate::{Error, Kind, Result};

/// The number of the call under which ranks tell each other whom they miss; no call gets so far.
const COMPLAINTS: u64 = u64::MAX - 1;

impl Context<'_> {
    /// Compares the calls of neighbours in a call on several hosts that waits for another host before the neighbours would
    /// meet: those that differ must learn it before they wait for different ranks.
    pub(crate) fn compare_neighbours(&mut self) -> Result<()> {
        if self.team.is_none() || self.layout.hosts.len() == 1 {
            return Ok(());
        }
        let note = self.note;
        self.team()?.begin(&note, 0);
        self.meet_and_compare()
    }

    /// A call in which not every host sends to every other has one rank, the first of the group, hear from all, so that
    /// no difference goes unnoticed. Call once, before any wait for data: ranks that differ may wait for each other. The
    /// first of a host speaks for its neighbours, so they compare before it does.
    pub(crate) fn announce(&mut self) -> Result<()> {
        self.compare_neighbours()?;
        let (my_host, my_seat) = self.layout.seat(self.me);
        if my_host != 0 && my_seat == 0 {
            self.send(self.layout.hosts[0][0], Stage::Here, 0, Payload::Empty);
        }
        Ok(())
    }

    /// Ends a call that began with [`Context::announce`]: the first of the group has heard from the first of every other
    /// host and tells them so, and they their neighbours. Nobody returns from a call that others have made differently.
    pub(crate) fn agree(&mut self) -> Result<()> {
        if self.layout.hosts.len() == 1 {
            return Ok(());
        }
        let firsts: Vec<usize> = self.layout.hosts.iter().map(|host| host[0]).collect();
        self.look_outward(if self.me == firsts[0] { 0.0 } else { 1.0 });
        if self.me == firsts[0] {
            self.hear(&firsts[1..], Stage::Here)?;
            firsts[1..].iter().for_each(|first| self.send(*first, Stage::Alike, 0, Payload::Empty));
        } else if firsts.contains(&self.me) {
            self.hear(&firsts[..1], Stage::Alike)?;
        }
        if self.team.is_some() { self.meet() } else { Ok(()) }
    }

    /// The right story of a call between peers that took too long. A rank waits for its peers only, so it may be a call or
    /// more ahead of one that waits in turn, and neither can tell who is silent and who waits. So whoever's time is up
    /// tells everybody in which call it is and whom it misses, and listens for a moment: the earliest call has the story.
    pub(crate) fn earliest_story(&self, error: Error) -> Error {
        if error.kind != Kind::Timeout {
            return error;
        }
        let complaint = [&self.sequence.to_le_bytes()[..], &error.to_bytes()].concat();
        let header = Header { sequence: COMPLAINTS, ..self.header(Stage::Late, 0) };
        for rank in self.ranks.iter().filter(|rank| **rank != self.mesh.me()) {
            self.mesh.tell(*rank, header, &complaint);
        }
        let limit = self.watch.began.elapsed() + GRACE.min(self.watch.limit / 2);
        let watch = Watch { limit, warned: &Cell::new(true), ..*self.watch };
        let others = self.mesh.board().open(Channel::Call(self.group, COMPLAINTS));
        let mut earliest = (self.sequence, error);
        let end = loop {
            let complaint = match others.next(&watch, Vec::new) {
                Ok(complaint) => complaint,
                Err(end) => break end,
            };
            let Some((number, story)) = complaint.payload.split_first_chunk::<8>() else { continue };
            let number = u64::from_le_bytes(*number);
            if number == self.sequence && complaint.header.note != self.note {
                return self.mismatch(&[(self.mesh.me(), self.note), (complaint.from, complaint.header.note)]);
            }
            if let (true, Ok(story)) = (number < earliest.0, Error::from_bytes(story)) {
                earliest = (number, story);
            }
        };
        // somebody has heard all before us and said so, or a rank was lost meanwhile; else the time to listen is over
        let verdict = self.mesh.roster().verdict(self.group, self.ranks, Vec::new);
        match (verdict, end.kind) {
            (Err(story), _) => story,
            (Ok(()), Kind::Timeout) => earliest.1,
            (Ok(()), _) => end,
        }
    }

    /// Ends the last call of a group: when this returns, no neighbour touches my control block any more. A meeting would
    /// not do: the last one to come leaves it first, while the others still look at its block.
    pub(crate) fn part(&mut self) -> Result<()> {
        if self.team.is_none() {
            return Ok(());
        }
        let (host, _) = self.layout.seat(self.me);
        let neighbours: Vec<usize> = self.layout.hosts[host].iter().copied().filter(|m| *m != self.me).collect();
        let (board, channel) = (self.mesh.board(), Channel::Call(self.group, self.sequence));
        self.reception.get_or_insert_with(|| board.open(channel));
        neighbours.iter().for_each(|neighbour| self.send(*neighbour, Stage::Parted, 0, Payload::Empty));
        self.hear(&neighbours, Stage::Parted)
    }
}
