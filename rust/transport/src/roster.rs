//! Who is still there: what the watchdog's verdict rests on.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};

use crate::SLICE;
use crate::error::{Error, Kind, Result};
use crate::rendezvous::Card;

/// What is known of a peer.
#[derive(Clone, Debug)]
enum Presence {
    /// Linked, but its own links are not all up.
    Linking,
    /// At work.
    Here,
    /// Said goodbye; frames may still be on their way.
    Leaving(String),
    /// Said goodbye, and everything that it sent has arrived.
    Left(String),
    /// Dead, cut off or failed.
    Gone(Error),
}

/// How a rank that is not there any more went.
#[derive(Clone, Debug)]
pub enum Absence {
    /// It said goodbye, and everything that it sent has arrived.
    Left(String),
    /// It is dead, cut off or failed.
    Gone(Error),
}

/// What is known of all ranks.
pub struct Roster {
    me: u32,
    cards: Vec<Card>,
    /// Whether anything has happened that a verdict must look at; most calls see that nothing has.
    trouble: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    presence: Vec<Presence>,
    streams: Vec<usize>,
    poisons: HashMap<u64, Error>,
    /// Ranks of which the user was told that they are gone.
    reported: HashSet<u32>,
    closing: bool,
}

impl Roster {
    pub(crate) fn new(me: u32, cards: Vec<Card>) -> Self {
        let presence = cards.iter().map(|c| if c.rank == me { Presence::Here } else { Presence::Linking }).collect();
        let streams = vec![0; cards.len()];
        let state = State { presence, streams, poisons: HashMap::new(), reported: HashSet::new(), closing: false };
        Roster { me, cards, trouble: AtomicBool::new(false), state: Mutex::new(state), changed: Condvar::new() }
    }

    /// What a rank says of itself.
    pub fn card(&self, rank: u32) -> &Card {
        &self.cards[rank as usize]
    }

    /// This rank.
    pub fn me(&self) -> u32 {
        self.me
    }

    fn change(&self, act: impl FnOnce(&mut State)) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if !state.closing {
            act(&mut state);
            let present = |p: &Presence| matches!(p, Presence::Here | Presence::Linking);
            if !state.poisons.is_empty() || !state.presence.iter().all(present) {
                self.trouble.store(true, Ordering::Release);
            }
            self.changed.notify_all();
        }
    }

    /// From now on nothing that peers do is news.
    pub(crate) fn close(&self) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).closing = true;
    }

    pub(crate) fn stream_opened(&self, rank: u32) {
        self.change(|state| state.streams[rank as usize] += 1);
    }

    /// A stream ended; once all have, a peer that said goodbye has left.
    pub(crate) fn stream_ended(&self, rank: u32) {
        self.change(|state| {
            let at = rank as usize;
            state.streams[at] = state.streams[at].saturating_sub(1);
            if let (0, Presence::Leaving(why)) = (state.streams[at], &state.presence[at]) {
                state.presence[at] = Presence::Left(why.clone());
            }
        });
    }

    pub(crate) fn ready(&self, rank: u32) {
        self.change(|state| {
            if matches!(state.presence[rank as usize], Presence::Linking) {
                state.presence[rank as usize] = Presence::Here;
            }
        });
    }

    pub(crate) fn goodbye(&self, rank: u32, why: String) {
        self.change(|state| {
            if !matches!(state.presence[rank as usize], Presence::Gone(_)) {
                state.presence[rank as usize] = Presence::Leaving(why);
            }
        });
    }

    /// Whether a peer has said goodbye or is known to be gone.
    pub(crate) fn is_accounted_for(&self, rank: u32) -> bool {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        !matches!(state.presence[rank as usize], Presence::Here | Presence::Linking) || state.closing
    }

    /// A peer is dead or unreachable; what was known before stands.
    pub(crate) fn lost(&self, rank: u32, how: &str) {
        let error = lost(self.card(rank), how);
        self.change(|state| match state.presence[rank as usize] {
            Presence::Here | Presence::Linking => state.presence[rank as usize] = Presence::Gone(error),
            // it will send nothing more, whatever its streams say
            Presence::Leaving(ref why) => state.presence[rank as usize] = Presence::Left(why.clone()),
            Presence::Left(_) | Presence::Gone(_) => {}
        });
    }

    /// A peer told why it is about to die, or broke the protocol.
    pub(crate) fn failed(&self, rank: u32, error: Error) {
        self.change(|state| {
            if !matches!(state.presence[rank as usize], Presence::Gone(_)) {
                state.presence[rank as usize] = Presence::Gone(error);
            }
        });
    }

    /// A group has failed; the first story stands, and is returned.
    pub fn poison(&self, group: u64, error: &Error) -> Error {
        self.change(|state| {
            state.poisons.entry(group).or_insert_with(|| error.clone());
        });
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.poisons.get(&group).unwrap_or(error).clone()
    }

    /// Waits a moment for all ranks to have linked to all others, and names those that have not.
    pub(crate) fn still_linking(&self) -> Vec<u32> {
        let linking = |presence: &Presence| matches!(presence, Presence::Linking);
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (state, _) = self
            .changed
            .wait_timeout_while(state, SLICE, |state| state.presence.iter().any(linking))
            .unwrap_or_else(PoisonError::into_inner);
        let late = state.presence.iter().zip(&self.cards).filter(|(presence, _)| linking(presence));
        late.map(|(_, card)| card.rank).collect()
    }

    /// How a rank went, if it did.
    pub fn absence(&self, rank: u32) -> Option<Absence> {
        if !self.trouble.load(Ordering::Acquire) {
            return None;
        }
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match state.presence.get(rank as usize)? {
            Presence::Left(why) => Some(Absence::Left(why.clone())),
            Presence::Gone(error) => Some(Absence::Gone(error.clone())),
            Presence::Linking | Presence::Here | Presence::Leaving(_) => None,
        }
    }

    /// Whether nobody has told the user yet that a rank is gone; who asks does so.
    pub fn report(&self, rank: u32) -> bool {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).reported.insert(rank)
    }

    /// Whether a group of ranks can go on: the story of its failure, or of a member that is not there any more. A member
    /// that left in good order is missed only by those that still need it: it may have done its part of a call before.
    pub fn verdict(&self, group: u64, members: &[u32], needed: impl Fn() -> Vec<u32>) -> Result<()> {
        if !self.trouble.load(Ordering::Acquire) {
            return Ok(());
        }
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(error) = state.poisons.get(&group) {
            return Err(error.clone());
        }
        // whoever left may have done so because another one is gone: that is the better story
        let mut missed = Ok(());
        for &rank in members {
            match &state.presence[rank as usize] {
                Presence::Gone(error) => return Err(error.clone()),
                Presence::Left(why) if missed.is_ok() && needed().contains(&rank) => {
                    missed = Err(left(self.card(rank), why));
                }
                Presence::Left(_) | Presence::Linking | Presence::Here | Presence::Leaving(_) => {}
            }
        }
        missed
    }
}

fn lost(card: &Card, how: &str) -> Error {
    Error::of_rank(
        Kind::PeerLost,
        card.rank,
        &card.host,
        format!(
            "{} is gone: {how}; try: read the end of its output, and the kernel log of its host for the \
             out-of-memory killer",
            card.name()
        ),
    )
}

fn left(card: &Card, why: &str) -> Error {
    Error::of_rank(
        Kind::PeerLost,
        card.rank,
        &card.host,
        format!(
            "{} has left ({why}) while others still wait for it; try: let every rank make the same calls before it ends",
            card.name()
        ),
    )
}
