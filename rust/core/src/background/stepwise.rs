//! Gossip in step: in each round everyone moves to the weighted mean of its own snapshot and those of its peers in a graph of
//! the members. What synchronous gossip goes on with when a rank is lost: the same graph over those that are left.
//!
//! A round has the number that the training threads give it, so ranks that notice a loss at different times still meet in the
//! same rounds. Who goes on to another list of members, begins, or rests says from which round on (`Moved`). From this
//! everyone knows whether a peer comes to a round, and waits for nobody that does not: who skips a round stays where it is.
//! Who comes back to a round that a peer has ended without it is told so (`Over`), and leaves that peer out too; so it asks
//! for an answer until it has had one from each peer.
//! A round under way is ended with the list that it began with, so that no two ranks move on one side only.
//!
//! Modular codes are as in pairs (`gossip`): a snapshot is rounded first, all sides use the rounded numbers, and who cannot
//! make sense of the codes asks for the numbers in full.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::keeping::{Kept, Room, Rounds};
use super::post::{About, Envelope, Epoch, Letter, Post, take};
use super::value::Value;
use super::{Exchange, Outcome};
use crate::coding::Tally;
use crate::graph::Graph;

pub(super) struct Stepwise {
    graph: Graph,
    value: Value,
    /// The members of the rounds under way; those of the post may be fewer.
    living: Vec<u32>,
    epoch: Epoch,
    /// The first round that has not ended.
    next: u64,
    letters: Vec<Letter>,
    histories: BTreeMap<u32, History>,
    /// What the others were told of the rounds to come: nothing before the first, that this rank is in them, or rests.
    present: Option<bool>,
    /// Who was told that this rank rests, and has answered nothing since: it may end rounds without this rank.
    unsure: BTreeSet<u32>,
    meetings: Option<Vec<Meeting>>,
}

/// What a round has to do with one peer.
struct Meeting {
    peer: u32,
    weight: f32,
    theirs: Option<Vec<f32>>,
    understood: bool,
    asked_again: bool,
}

/// What a rank has said of its rounds.
#[derive(Debug, Default)]
struct History {
    /// From which rounds on it has which list of members; a list of none while it rests.
    lists: Vec<(u64, Epoch)>,
    /// The last round that it has spoken of: it is past all before.
    reached: u64,
}

impl History {
    fn add(&mut self, from: u64, epoch: Epoch) {
        // by round, and where it is the same as they came
        let place = self.lists.partition_point(|(earlier, _)| *earlier <= from);
        self.lists.insert(place, (from, epoch));
        self.reached = self.reached.max(from);
    }

    /// Whether the rank is past a round.
    fn is_past(&self, round: u64) -> bool {
        self.reached > round
    }

    /// Whether the rank is not in this round of this list, and never will be. Lists only become shorter, so who has another
    /// one of the same length, or a shorter one, never comes back to this.
    fn skips(&self, round: u64, epoch: Epoch) -> bool {
        match self.lists.iter().rev().find(|(from, _)| *from <= round) {
            Some((_, theirs)) if *theirs == epoch => false,
            Some((_, theirs)) => theirs.living <= epoch.living || self.is_past(round),
            // it made this round in the group, before it noticed
            None => self.is_past(round),
        }
    }
}

impl Stepwise {
    pub(super) fn new(members: &[u32], graph: Graph, count: usize, modular: bool, tally: Arc<Tally>) -> Self {
        Stepwise {
            graph,
            value: Value::new(count, modular, tally),
            living: members.to_vec(),
            epoch: Epoch::of(members),
            next: 0,
            letters: Vec::new(),
            histories: BTreeMap::new(),
            present: None,
            unsure: BTreeSet::new(),
            meetings: None,
        }
    }

    /// Tells the others from which round on this rank has which list.
    fn announce(&self, post: &Post, from: u64, epoch: Epoch) {
        let envelope = Envelope::new(About::Moved, epoch, from);
        post.others().into_iter().for_each(|rank| post.send(rank, &envelope, &[]));
    }

    /// Goes on to the list of those that are there now, if nothing of the old one is under way.
    fn catch_up(&mut self, post: &Post) {
        if self.meetings.is_none() && self.epoch != post.epoch() {
            (self.living, self.epoch) = (post.living().to_vec(), post.epoch());
            if self.present == Some(true) {
                self.announce(post, self.next, self.epoch);
            }
        }
    }

    /// The peers of this rank in a round, and what their snapshots count.
    fn peers(&self, me: u32, round: u64) -> Vec<(u32, f32)> {
        let Ok(place) = self.living.binary_search(&me) else { return Vec::new() };
        let mix = self.graph.over(self.living.len()).mix(&vec![1; self.living.len()], place, round);
        let others = mix.terms.iter().filter(|term| term.node != place);
        others.map(|term| (self.living[term.node], term.weight() as f32)).collect()
    }

    fn envelope(&self, about: About) -> Envelope {
        Envelope::new(about, self.epoch, self.next)
    }

    fn take(&mut self, about: About, from: u32) -> Option<Letter> {
        let wanted = self.envelope(about);
        take(&mut self.letters, from, &wanted)
    }

    /// Reads a peer's snapshot, if it has come, and says whether it makes sense.
    fn read(&mut self, post: &Post, meeting: &mut Meeting, snapshot: &[f32]) {
        while let Some(letter) = self.take(About::Value, meeting.peer) {
            let mut theirs = vec![0.0; snapshot.len()];
            if self.value.read(post, &letter, snapshot, &mut theirs) {
                meeting.theirs = Some(theirs);
            }
        }
    }

    /// Forgets letters of rounds that are over here. Who has written one and was not heard must not wait for an answer.
    fn forget(&mut self, post: &Post) {
        let next = self.next;
        let (past, rest): (Vec<_>, Vec<_>) =
            self.letters.drain(..).partition(|letter: &Letter| letter.envelope.round < next);
        self.letters = rest;
        past.iter().for_each(|letter| turn_away(post, letter));
    }

    /// Takes a meeting as far as it goes. False if the peer never comes.
    fn meet(&mut self, post: &Post, meeting: &mut Meeting, snapshot: &[f32]) -> bool {
        let peer = meeting.peer;
        self.read(post, meeting, snapshot);
        if self.take(About::Again, peer).is_some() && !meeting.asked_again {
            meeting.asked_again = true;
            self.value.send_in_full(post, peer, &self.envelope(About::Value));
        }
        let is_over = self.take(About::Over, peer).is_some();
        if self.take(About::Understood, peer).is_some() || is_over {
            meeting.understood = true;
            self.unsure.remove(&peer);
        }
        let here = post.living().binary_search(&peer).is_ok();
        let history = self.histories.get(&peer);
        let is_past = history.is_some_and(|history| history.is_past(self.next));
        // an answer comes before anything of later rounds, so who has gone on without one does not count this rank
        if is_over || (is_past && !meeting.understood) {
            return false;
        }
        // who is gone says nothing more
        meeting.understood |= !here;
        let comes = here && !history.is_some_and(|history| history.skips(self.next, self.epoch));
        meeting.theirs.is_some() || comes
    }
}

/// Answers who writes of a round that has ended here without it.
fn turn_away(post: &Post, letter: &Letter) {
    let Envelope { about, epoch, round, .. } = letter.envelope;
    if matches!(about, About::Value | About::Again) {
        post.send(letter.from, &Envelope::new(About::Over, epoch, round), &[]);
    }
}

impl Exchange for Stepwise {
    fn save(&self, _: &[f32]) -> (u64, Vec<Kept>) {
        // rounds have the numbers of training's exchanges, and the weights are all there is
        (self.next, Vec::new())
    }

    fn room(&mut self, _: &str) -> Option<Room<'_>> {
        None
    }

    fn go_on(&mut self, _: Rounds) {}

    fn heard(&mut self, post: &mut Post, letter: Letter) {
        let envelope = letter.envelope;
        let history = self.histories.entry(letter.from).or_default();
        match envelope.about {
            About::Moved => history.add(envelope.round, envelope.epoch),
            _ if envelope.round < self.next => turn_away(post, &letter),
            About::Value | About::Understood | About::Again | About::Over => {
                history.reached = history.reached.max(envelope.round);
                self.letters.push(letter);
            }
            _ => {}
        }
    }

    fn lost(&mut self, post: &mut Post, rank: u32) {
        self.histories.remove(&rank);
        self.unsure.remove(&rank);
        self.catch_up(post);
    }

    fn rests(&mut self, post: &mut Post, resting: bool) {
        if resting && self.present.replace(false) != Some(false) {
            self.unsure = post.others().into_iter().collect();
            self.announce(post, self.next, Epoch::default());
        } else if !resting && self.present == Some(false) {
            self.present = Some(true);
            self.announce(post, self.next, self.epoch);
        }
    }

    fn is_awaited(&self, _: &Post) -> bool {
        // rounds begin when the training thread says so
        false
    }

    fn missing(&self, _: &Post) -> Vec<u32> {
        let waits = |meeting: &&Meeting| meeting.theirs.is_none() || !meeting.understood;
        self.meetings.iter().flatten().filter(waits).map(|meeting| meeting.peer).collect()
    }

    fn begin(&mut self, post: &mut Post, snapshot: &[f32], clock: u64) {
        self.catch_up(post);
        // rounds in between are skipped, whether there was time to say so or not
        let skipped = (clock > self.next && self.present == Some(true)).then_some(self.next);
        self.next = clock;
        self.forget(post);
        if self.present.replace(true) != Some(true) || skipped.is_some() {
            self.announce(post, clock, self.epoch);
        }
        // after it: who has heard the one and not the other must not take this rank for resting
        if let Some(from) = skipped {
            self.announce(post, from, Epoch::default());
        }
        let peers = self.peers(post.me, clock);
        let asks = self.value.is_coded() || peers.iter().any(|(peer, _)| self.unsure.contains(peer));
        let envelope = Envelope { extra: u64::from(asks), ..self.envelope(About::Value) };
        // who does not come stays where it is, and so it needs nothing
        let comes = |peer| !self.histories.get(&peer).is_some_and(|history| history.skips(clock, self.epoch));
        let peers: Vec<(u32, f32)> = peers.into_iter().filter(|(peer, _)| comes(*peer)).collect();
        let to: Vec<u32> = peers.iter().map(|(peer, _)| *peer).collect();
        self.value.send(post, &to, &envelope, snapshot);
        let meet = |(peer, weight)| Meeting { peer, weight, theirs: None, understood: !asks, asked_again: false };
        self.meetings = Some(peers.into_iter().map(meet).collect());
    }

    fn advance(&mut self, post: &mut Post, snapshot: &[f32], delta: &mut [f32]) -> Outcome {
        let Some(mut meetings) = self.meetings.take() else { return Outcome::Waiting };
        meetings.retain_mut(|meeting| self.meet(post, meeting, snapshot));
        if meetings.iter().any(|meeting| meeting.theirs.is_none() || !meeting.understood) {
            self.meetings = Some(meetings);
            return Outcome::Waiting;
        }
        delta.fill(0.0);
        for meeting in &meetings {
            let Some(theirs) = &meeting.theirs else { continue };
            let pairs = theirs.iter().zip(self.value.own());
            delta.iter_mut().zip(pairs).for_each(|(delta, (theirs, own))| *delta += (theirs - own) * meeting.weight);
            self.value.learn(theirs);
        }
        self.next += 1;
        self.forget(post);
        self.catch_up(post);
        if meetings.is_empty() { Outcome::Idle } else { Outcome::Done }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_history_tells_who_comes_to_which_round() {
        let (all, three, other, two) =
            (Epoch::of(&[0, 1, 2, 3]), Epoch::of(&[0, 1, 2]), Epoch::of(&[0, 1, 3]), Epoch::of(&[0, 1]));
        let mut history = History::default();
        assert!(!history.skips(5, all), "nothing is known, so it is waited for");
        history.add(6, all);
        assert!(history.skips(5, all), "it made round 5 in the group");
        assert!(!history.skips(6, all) && !history.skips(9, all));
        assert!(!history.skips(6, three), "it may still hear of the loss");
        history.add(8, three);
        assert!(!history.skips(7, all), "which it was in");
        assert!(history.skips(8, all) && history.skips(7, three));
        assert!(!history.skips(8, three));
        assert!(history.skips(8, other), "as long a list of others");
        assert!(!history.skips(8, two));
        history.add(10, Epoch::default());
        assert!(history.skips(10, three) && history.skips(30, three), "it rests");
        assert!(!history.skips(9, three), "in which it was before");
        history.add(20, two);
        assert!(history.skips(19, two) && !history.skips(20, two));
        assert!(history.is_past(19) && !history.is_past(20));
        // rounds that were skipped, told after the next that was not
        history.add(30, two);
        history.add(25, Epoch::default());
        assert!(!history.skips(24, two) && history.skips(25, two) && history.skips(29, two) && !history.skips(30, two));
    }
}
