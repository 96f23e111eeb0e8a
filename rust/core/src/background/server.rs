//! A server of which every member holds a shard: members push what they have changed since they last heard of a shard, its
//! owner adds a member's part of it, and answers with what it has then. The member moves there.
//!
//! A rank's own thread serves its shard also while its training is slow: nobody waits for a step of another. Where staleness
//! is bounded, an owner answers only when all members have come as far as who asks; then the answer holds all of it. But a
//! member may have ended its training, or wait for others in a call, with steps that it has not pushed and will not: it says
//! so after a while, and who comes to the same step is answered without them.
//!
//! With a codec updates are encoded with residuals, and answers as differences to what the owner knows the member to have.
//! Both sides keep that replica, and it is the same on both, bit by bit; the first answer of an owner is in full precision.
//!
//! Every member has an account: what it began with, and all that it has pushed. A shard's values are the mean of the accounts
//! of all. So a checkpoint of each member's own account is one of the server, whenever each of them saved: who goes on from
//! one says to the owners what its account is, and what it last heard of them, and they make values and replicas of that.
//! Nothing is lost then, and nothing is counted twice. In a bounded server owners keep the accounts too and make the mean in
//! the order of ranks, so that it does not matter who pushes first; without a bound they add as pushes come.
//!
//! The shard of a lost owner goes to the next member that is there, which begins it with what it had last heard of it.
//! Updates that were under way are pushed again, to the new owner.
//!
//! Where no rank makes steps for now, a round goes in full both ways, with what codecs have lost before, and is answered at
//! once. Everybody has the server's values after two of these, if all have ended the first before any begins the second.

use std::collections::BTreeMap;
use std::ops::Range;

use super::coder::Coder;
use super::desk::Closing;
use super::keeping::{Kept, Room, Rounds};
use super::post::{About, Envelope, Letter, Post, bytes_of, floats, shard};
use super::shard::{Opening, Owned, add};
use super::{Exchange, Outcome};

pub(super) struct Server {
    /// All members of the beginning: shard `s` is the part of the model that belongs to the one at place `s`.
    members: Vec<u32>,
    ranges: Vec<Range<usize>>,
    coder: Option<Coder>,
    bounded: bool,
    owned: BTreeMap<usize, Owned>,
    /// What this rank last heard of every shard.
    base: Vec<f32>,
    /// What this rank began with, and all that it has pushed.
    account: Vec<f32>,
    /// Whether base and account are there.
    seeded: bool,
    /// How far this rank had come when it last pushed.
    clock: u64,
    active: Option<Active>,
    /// How far members have come by their own account, with steps that they have not pushed.
    steps: BTreeMap<u32, u64>,
    /// Pushes for shards that are not known to be ours yet, or not open.
    early: Vec<Letter>,
    opening: Option<Opening>,
    /// What the round under way is for.
    closing: Closing,
}

struct Active {
    clock: u64,
    /// Shards without an answer, and who was asked.
    missing: BTreeMap<usize, u32>,
}

/// Who owns a shard among the living: the member at its place, or the next one that is there.
fn owner(members: &[u32], shard: usize, living: &[u32]) -> Option<u32> {
    let n = members.len();
    (0..n).map(|at| members[(shard + at) % n]).find(|rank| living.binary_search(rank).is_ok())
}

/// How far a member has come, by what it has pushed to a shard or by its own account.
fn come_to(owned: &Owned, steps: &BTreeMap<u32, u64>, rank: u32) -> u64 {
    let of = |clocks: &BTreeMap<u32, u64>| clocks.get(&rank).copied().unwrap_or(0);
    of(&owned.clocks).max(of(steps))
}

fn members_place(members: &[u32], rank: u32) -> Option<usize> {
    members.binary_search(&rank).ok()
}

impl Server {
    pub(super) fn new(
        members: &[u32],
        me: u32,
        count: usize,
        grain: usize,
        coder: Option<Coder>,
        bounded: bool,
    ) -> Self {
        let ranges: Vec<Range<usize>> = (0..members.len()).map(|at| shard(count, members.len(), at, grain)).collect();
        let mut server = Server {
            members: members.to_vec(),
            ranges,
            coder,
            bounded,
            owned: BTreeMap::new(),
            base: vec![0.0; count],
            account: vec![0.0; count],
            seeded: false,
            clock: 0,
            active: None,
            steps: BTreeMap::new(),
            early: Vec::new(),
            opening: None,
            closing: Closing::default(),
        };
        if let Some(mine) = members_place(members, me) {
            server.adopt(mine, members);
        }
        server
    }

    /// Begins to serve a shard, with what was last heard of it.
    fn adopt(&mut self, shard: usize, living: &[u32]) {
        if !self.owned.contains_key(&shard) {
            let values = self.base[self.ranges[shard].clone()].to_vec();
            self.owned.insert(shard, Owned::new(values, if self.bounded { living } else { &[] }));
        }
    }

    /// Pushes this rank's changes of a shard to its owner. What is pushed a second time goes in full, and so does what settles.
    fn push(&mut self, post: &Post, shard: usize, snapshot: &[f32], clock: u64, again: bool) {
        let range = self.ranges[shard].clone();
        let pairs = snapshot[range.clone()].iter().zip(&self.base[range.clone()]);
        let mut changes: Vec<f32> = pairs.map(|(x, base)| x - base).collect();
        let settles = self.closing == Closing::Settles;
        if let Some(coder) = self.coder.as_mut().filter(|_| settles) {
            coder.make_up(&mut changes, &range);
        }
        let Some(owner) = owner(&self.members, shard, post.living()) else { return };
        if let Some(active) = &mut self.active {
            active.missing.insert(shard, owner);
        }
        self.clock = clock;
        let extra = self.closing as u64;
        let envelope = Envelope { shard: shard as u32, extra, ..Envelope::new(About::Push, post.epoch(), clock) };
        let account = &mut self.account[range.clone()];
        if let Some(coder) = self.coder.as_mut().filter(|_| !(again || settles) && owner != post.me) {
            let body = coder.encode_share(&changes, &range, post.me, clock);
            let mut sent = vec![0.0; range.len()];
            coder.decode_add(&body, &range, &mut sent);
            add(account, &sent);
            post.send(owner, &Envelope { plain: false, ..envelope }, &body);
            return;
        }
        add(account, &changes);
        if owner != post.me {
            post.send(owner, &envelope, bytes_of(&changes));
        } else if self.opening.is_some() {
            self.early.push(Letter { from: post.me, envelope, body: bytes_of(&changes).to_vec() });
        } else {
            self.adopt(shard, post.living());
            self.pushed(post, shard, post.me, &envelope, &changes);
        }
    }

    /// A member's changes of a shard of ours.
    fn pushed(&mut self, post: &Post, shard: usize, from: u32, envelope: &Envelope, changes: &[f32]) {
        let Some(owned) = self.owned.get_mut(&shard) else { return };
        owned.take(from, envelope.round, changes, post.living());
        let settles = envelope.extra == Closing::Settles as u64;
        if settles {
            owned.settle();
            // in full: there is no replica to tell the difference to
            owned.replicas.remove(&from);
            self.send_values(post, shard, from, envelope.round);
        } else {
            owned.waiting.push((from, envelope.round));
        }
        // where one rank makes no steps for now, none does
        self.answer(post, shard, !settles);
    }

    /// Answers those that need not wait any more: all, unless this is `bound` and they have come further than others.
    fn answer(&mut self, post: &Post, shard: usize, bound: bool) {
        let bound = bound && self.bounded;
        let Some(owned) = self.owned.get_mut(&shard) else { return };
        let slowest = post.living().iter().map(|rank| come_to(owned, &self.steps, *rank)).min().unwrap_or(0);
        let (now, later) =
            std::mem::take(&mut owned.waiting).into_iter().partition(|(_, clock)| !bound || *clock <= slowest);
        owned.waiting = later;
        let now: Vec<(u32, u64)> = now;
        if !now.is_empty() {
            owned.settle();
        }
        for (rank, clock) in now {
            self.send_values(post, shard, rank, clock);
        }
    }

    fn answer_all(&mut self, post: &Post) {
        for shard in self.owned.keys().copied().collect::<Vec<_>>() {
            self.answer(post, shard, true);
        }
    }

    fn send_values(&mut self, post: &Post, shard: usize, rank: u32, clock: u64) {
        let range = self.ranges[shard].clone();
        let Some(owned) = self.owned.get_mut(&shard) else { return };
        if rank == post.me {
            self.base[range].copy_from_slice(&owned.values);
            if let Some(active) = self.active.as_mut().filter(|active| active.clock == clock) {
                active.missing.remove(&shard);
            }
            return;
        }
        let envelope = Envelope { shard: shard as u32, ..Envelope::new(About::Pull, post.epoch(), clock) };
        let Some(coder) = &mut self.coder else {
            post.send(rank, &envelope, bytes_of(&owned.values));
            return;
        };
        if let Some(replica) = owned.replicas.get_mut(&rank) {
            let differences: Vec<f32> = owned.values.iter().zip(&*replica).map(|(x, replica)| x - replica).collect();
            let body = coder.encode_difference(&differences, &range, clock);
            coder.decode_add(&body, &range, replica);
            post.send(rank, &Envelope { plain: false, ..envelope }, &body);
        } else {
            owned.replicas.insert(rank, owned.values.clone());
            post.send(rank, &envelope, bytes_of(&owned.values));
        }
    }

    /// A push for a shard that may not be ours yet, as far as this rank knows.
    fn take_push(&mut self, post: &Post, letter: Letter) {
        let shard = letter.envelope.shard as usize;
        let Some(range) = self.ranges.get(shard).cloned() else { return };
        if self.opening.is_some() || owner(&self.members, shard, post.living()) != Some(post.me) {
            self.early.push(letter);
            return;
        }
        self.adopt(shard, post.living());
        let mut changes: Vec<f32> = vec![0.0; range.len()];
        if letter.envelope.plain {
            changes.iter_mut().zip(floats(&letter.body)).for_each(|(change, x)| *change = x);
        } else if let Some(coder) = &self.coder {
            coder.decode_add(&letter.body, &range, &mut changes);
        }
        self.pushed(post, shard, letter.from, &letter.envelope, &changes);
    }

    /// What a member says of its account of our shard, and of what it last heard of it.
    fn take_account(&mut self, post: &Post, letter: &Letter) {
        let (Some(opening), envelope) = (&mut self.opening, letter.envelope) else { return };
        let numbers: Vec<f32> = floats(&letter.body).collect();
        if members_place(&self.members, post.me).is_none_or(|mine| numbers.len() != self.ranges[mine].len()) {
            log::warn!("a letter of {} bytes from rank {} was left out", letter.body.len(), letter.from);
        } else if envelope.about == About::Account {
            opening.accounts.insert(letter.from, (envelope.round, numbers));
        } else {
            opening.bases.insert(letter.from, numbers);
        }
        self.try_to_open(post);
    }

    /// Begins to serve this rank's shard when all members have said what they have put into it.
    fn try_to_open(&mut self, post: &Post) {
        let (me, living) = (post.me, post.living());
        if !self.opening.as_ref().is_some_and(|opening| opening.is_complete(living, me, self.coder.is_some())) {
            return;
        }
        let (Some(opening), Some(mine)) = (self.opening.take(), members_place(&self.members, me)) else { return };
        if let Some(owned) = self.owned.get_mut(&mine) {
            owned.open(opening, living, self.bounded);
        }
        for letter in std::mem::take(&mut self.early) {
            self.take_push(post, letter);
        }
    }

    /// An owner's values.
    fn take_pull(&mut self, letter: &Letter) {
        let shard = letter.envelope.shard as usize;
        let (Some(active), Some(range)) = (self.active.as_mut(), self.ranges.get(shard).cloned()) else { return };
        if active.clock != letter.envelope.round || active.missing.get(&shard) != Some(&letter.from) {
            return;
        }
        active.missing.remove(&shard);
        let base = &mut self.base[range.clone()];
        if letter.envelope.plain {
            base.iter_mut().zip(floats(&letter.body)).for_each(|(base, x)| *base = x);
        } else if let Some(coder) = &self.coder {
            coder.decode_add(&letter.body, &range, base);
        }
    }
}

impl Exchange for Server {
    fn seed(&mut self, values: &[f32]) {
        if std::mem::replace(&mut self.seeded, true) {
            return;
        }
        self.base.copy_from_slice(values);
        self.account.copy_from_slice(values);
        for (shard, owned) in &mut self.owned {
            let mine = &values[self.ranges[*shard].clone()];
            owned.values.copy_from_slice(mine);
            owned.accounts.values_mut().for_each(|account| account.copy_from_slice(mine));
        }
    }

    fn open(&mut self, post: &mut Post) {
        let Some(opening) = &mut self.opening else { return };
        for (shard, (rank, range)) in self.members.iter().zip(&self.ranges).enumerate() {
            let (account, base) = (&self.account[range.clone()], &self.base[range.clone()]);
            if *rank == post.me {
                opening.accounts.insert(*rank, (self.clock, account.to_vec()));
            } else if !range.is_empty() {
                let letter = |about| Envelope { shard: shard as u32, ..Envelope::new(about, post.epoch(), self.clock) };
                post.send(*rank, &letter(About::Account), bytes_of(account));
                if self.coder.is_some() && self.clock > 0 {
                    post.send(*rank, &letter(About::Base), bytes_of(base));
                }
            }
        }
        // nobody writes of nothing
        if members_place(&self.members, post.me).is_none_or(|mine| self.ranges[mine].is_empty()) {
            self.opening = None;
        }
        self.try_to_open(post);
    }

    fn save(&self, snapshot: &[f32]) -> (u64, Vec<Kept>) {
        // of a round under way all is in the account that had changed up to the snapshot
        let base = if self.active.is_some() || !self.seeded { snapshot } else { &self.base };
        let account = if self.seeded { &self.account } else { snapshot };
        let kept = [Kept::of_elements("account", account), Kept::of_elements("base", base)];
        // answers make up for what they lose by themselves
        let lost = self.coder.iter().flat_map(Coder::save).filter(|kept| kept.label == "shares");
        (self.clock, kept.into_iter().chain(lost).collect())
    }

    fn room(&mut self, label: &str) -> Option<Room<'_>> {
        match label {
            "account" | "base" => {
                self.seeded = true;
                Some(Room::of_elements(if label == "base" { &mut self.base } else { &mut self.account }))
            }
            "shares" => self.coder.as_mut()?.room(label),
            _ => None,
        }
    }

    fn go_on(&mut self, rounds: Rounds) {
        self.clock = rounds.mine;
        self.opening = Some(Opening::default());
    }

    fn heard(&mut self, post: &mut Post, letter: Letter) {
        match letter.envelope.about {
            About::Push => self.take_push(post, letter),
            About::Account | About::Base => self.take_account(post, &letter),
            About::Pull => self.take_pull(&letter),
            About::Steps => {
                self.steps.insert(letter.from, letter.envelope.round);
                self.answer_all(post);
            }
            _ => {}
        }
    }

    fn lost(&mut self, post: &mut Post, rank: u32) {
        for shard in 0..self.members.len() {
            if owner(&self.members, shard, post.living()) == Some(post.me) {
                self.adopt(shard, post.living());
            }
        }
        // a member's part is another one now: what is saved from here on begins with what was last heard
        self.account.copy_from_slice(&self.base);
        self.owned.values_mut().for_each(|owned| owned.without(rank));
        self.early.retain(|letter| letter.from != rank);
        for letter in std::mem::take(&mut self.early) {
            self.take_push(post, letter);
        }
        self.try_to_open(post);
        // who waited for the lost one need not any more
        self.answer_all(post);
    }

    fn stands(&mut self, post: &mut Post, clock: u64) {
        let told = self.steps.get(&post.me).copied().unwrap_or(0).max(self.clock);
        if self.bounded && clock > told {
            self.steps.insert(post.me, clock);
            let envelope = Envelope::new(About::Steps, post.epoch(), clock);
            post.others().into_iter().for_each(|rank| post.send(rank, &envelope, &[]));
            self.answer_all(post);
        }
    }

    fn close(&mut self, closing: Closing) {
        self.closing = closing;
    }

    fn is_awaited(&self, _: &Post) -> bool {
        // in a bounded one answers wait for the slowest
        self.owned.values().any(|owned| !owned.waiting.is_empty()) && self.active.is_none()
    }

    fn missing(&self, post: &Post) -> Vec<u32> {
        let Some(active) = &self.active else { return Vec::new() };
        let slow = |owned: &Owned| {
            let behind = |rank: &&u32| come_to(owned, &self.steps, **rank) < active.clock;
            post.living().iter().filter(behind).copied().collect::<Vec<u32>>()
        };
        match self.owned.values().map(slow).find(|late| !late.is_empty() && self.bounded) {
            Some(late) => late,
            None => active.missing.values().copied().collect(),
        }
    }

    fn begin(&mut self, post: &mut Post, snapshot: &[f32], clock: u64) {
        let all: Vec<usize> = (0..self.members.len()).filter(|at| !self.ranges[*at].is_empty()).collect();
        self.active = Some(Active { clock, missing: all.iter().map(|shard| (*shard, post.me)).collect() });
        for shard in all {
            self.push(post, shard, snapshot, clock, false);
        }
    }

    fn advance(&mut self, post: &mut Post, snapshot: &[f32], delta: &mut [f32]) -> Outcome {
        let Some(active) = &self.active else { return Outcome::Waiting };
        // pushes to owners that are lost go to those that took their place
        let is_lost = |asked: &u32| post.living().binary_search(asked).is_err();
        let missing = active.missing.iter();
        let lost: Vec<usize> = missing.filter(|(_, asked)| is_lost(asked)).map(|(shard, _)| *shard).collect();
        let clock = active.clock;
        for shard in lost {
            self.push(post, shard, snapshot, clock, true);
        }
        if self.active.as_ref().is_some_and(|active| !active.missing.is_empty()) {
            return Outcome::Waiting;
        }
        self.active = None;
        delta.iter_mut().zip(self.base.iter().zip(snapshot)).for_each(|(delta, (base, x))| *delta = base - x);
        Outcome::Done
    }
}
