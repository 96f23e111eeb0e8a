//! Pairs of members move to the middle of their snapshots: each sends its own, and adds half of the difference. What one adds
//! the other takes away, so an exchange keeps the sum of the two.
//!
//! Who meets whom is a function of the members and the number of the round, so nobody has to ask. With modular codes a
//! snapshot is rounded first, and both sides use the rounded numbers; who cannot make sense of the codes asks for the
//! numbers in full. Either way a round is over only when the peer has understood.
//!
//! A lost member changes the list, and with it who meets whom. A round that is under way between two others is ended first,
//! or else one of them would have moved and the other not. Whoever goes on to a new list says in how many rounds of the old
//! one it took part (`Moved`): so a rank knows whether its peer still comes.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::keeping::{Kept, Room, Rounds};
use super::post::{About, Envelope, Epoch, Letter, Post, take};
use super::value::Value;
use super::{Exchange, Outcome};
use crate::coding::Tally;
use crate::graph::Graph;

pub(super) struct Gossip {
    graph: Graph,
    value: Value,
    /// The members of the rounds under way; those of the post may be fewer.
    living: Vec<usize>,
    epoch: Epoch,
    round: u64,
    letters: Vec<Letter>,
    /// Which lists each rank has left, how many rounds of them it began, and the lists it went to.
    moved: BTreeMap<u32, Vec<(u64, u64, Epoch)>>,
    active: Option<Active>,
    theirs: Vec<f32>,
}

struct Active {
    /// None for who is left out.
    peer: Option<u32>,
    heard: bool,
    understood: bool,
    asked_again: bool,
}

impl Gossip {
    pub(super) fn new(members: &[u32], graph: Graph, count: usize, modular: bool, tally: Arc<Tally>) -> Self {
        Gossip {
            graph,
            value: Value::new(count, modular, tally),
            living: members.iter().map(|rank| *rank as usize).collect(),
            epoch: Epoch::of(members),
            round: 0,
            letters: Vec::new(),
            moved: BTreeMap::new(),
            active: None,
            theirs: vec![0.0; count],
        }
    }

    /// Goes on to the list of those that are there now, if nothing of the old one is under way.
    fn catch_up(&mut self, post: &Post) {
        if self.active.is_some() || self.epoch == post.epoch() {
            return;
        }
        let envelope = Envelope { extra: self.epoch.hash, ..Envelope::new(About::Moved, post.epoch(), self.round) };
        post.others().into_iter().for_each(|rank| post.send(rank, &envelope, &[]));
        self.living = post.living().iter().map(|rank| *rank as usize).collect();
        (self.epoch, self.round) = (post.epoch(), 0);
        let epoch = self.epoch;
        self.letters.retain(|l| l.envelope.epoch == epoch || l.envelope.epoch.living < epoch.living);
    }

    fn peer(&self, me: u32, round: u64) -> Option<u32> {
        self.graph.among(&self.living, me as usize, round).first().map(|rank| *rank as u32)
    }

    /// Whether a peer never comes to this round: it has gone on to another list before.
    fn never_comes(&self, peer: u32) -> bool {
        let moves = self.moved.get(&peer).map_or(&[][..], Vec::as_slice);
        match moves.iter().find(|(old, ..)| *old == self.epoch.hash) {
            Some((_, begun, _)) => *begun <= self.round,
            None => moves.iter().any(|(.., new)| new.living < self.epoch.living),
        }
    }

    fn envelope(&self, about: About) -> Envelope {
        Envelope::new(about, self.epoch, self.round)
    }

    fn take(&mut self, about: About, from: u32) -> Option<Letter> {
        let wanted = self.envelope(about);
        take(&mut self.letters, from, &wanted)
    }

    /// Reads the peer's snapshot, if it has come.
    fn read(&mut self, post: &Post, peer: u32, active: &mut Active, snapshot: &[f32]) {
        while let Some(letter) = self.take(About::Value, peer) {
            active.heard |= self.value.read(post, &letter, snapshot, &mut self.theirs);
        }
    }
}

impl Exchange for Gossip {
    fn save(&self, _: &[f32]) -> (u64, Vec<Kept>) {
        (self.round, self.value.save())
    }

    fn room(&mut self, label: &str) -> Option<Room<'_>> {
        self.value.room(label)
    }

    fn go_on(&mut self, rounds: Rounds) {
        // who is behind leaves rounds out, which its peers have had with others or without it
        self.round = rounds.most;
    }

    fn heard(&mut self, post: &mut Post, letter: Letter) {
        let envelope = letter.envelope;
        match envelope.about {
            About::Moved => {
                let moves = self.moved.entry(letter.from).or_default();
                moves.push((envelope.extra, envelope.round, envelope.epoch));
            }
            About::Value | About::Understood | About::Again => {
                let now = envelope.epoch == self.epoch && envelope.round >= self.round;
                if now || envelope.epoch.living < self.epoch.living {
                    self.letters.push(letter);
                }
            }
            _ => {}
        }
        self.catch_up(post);
    }

    fn lost(&mut self, post: &mut Post, rank: u32) {
        self.moved.remove(&rank);
        self.catch_up(post);
    }

    fn ended(&self, _: &Post) -> Option<(Epoch, u64)> {
        Some((self.epoch, self.round))
    }

    fn is_awaited(&self, post: &Post) -> bool {
        // who is left out of a round, or behind, must not keep those waiting that it meets later
        let waits = |letter: &Letter| letter.envelope.epoch == self.epoch && letter.envelope.round >= self.round;
        let is_left_out = self.peer(post.me, self.round).is_none();
        self.active.is_none() && (is_left_out || self.letters.iter().any(waits))
    }

    fn missing(&self, _: &Post) -> Vec<u32> {
        self.active.as_ref().and_then(|active| active.peer).into_iter().collect()
    }

    fn begin(&mut self, post: &mut Post, snapshot: &[f32], _: u64) {
        self.catch_up(post);
        let peer = self.peer(post.me, self.round);
        let understood = !self.value.is_coded();
        self.active = Some(Active { peer, heard: false, understood, asked_again: false });
        let Some(peer) = peer else { return };
        let envelope = self.envelope(About::Value);
        self.value.send(post, &[peer], &envelope, snapshot);
    }

    fn advance(&mut self, post: &mut Post, snapshot: &[f32], delta: &mut [f32]) -> Outcome {
        let Some(mut active) = self.active.take() else { return Outcome::Waiting };
        let Some(peer) = active.peer else {
            self.round += 1;
            self.catch_up(post);
            return Outcome::Idle;
        };
        self.read(post, peer, &mut active, snapshot);
        if self.take(About::Again, peer).is_some() && !active.asked_again {
            active.asked_again = true;
            self.value.send_in_full(post, peer, &self.envelope(About::Value));
        }
        active.understood |= self.take(About::Understood, peer).is_some();
        let here = post.living().binary_search(&peer).is_ok();
        if !active.heard && (!here || self.never_comes(peer)) {
            self.round += 1;
            self.catch_up(post);
            return Outcome::Dropped;
        }
        if !active.heard || (!active.understood && here) {
            self.active = Some(active);
            return Outcome::Waiting;
        }
        let pairs = self.theirs.iter().zip(self.value.own());
        delta.iter_mut().zip(pairs).for_each(|(delta, (theirs, own))| *delta = (theirs - own) * 0.5);
        self.value.learn(&self.theirs);
        self.round += 1;
        let (epoch, round) = (self.epoch, self.round);
        self.letters.retain(|letter| letter.envelope.epoch != epoch || letter.envelope.round >= round);
        self.catch_up(post);
        Outcome::Done
    }
}
