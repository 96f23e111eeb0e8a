//! A snapshot as peers get it in a round of gossip: whole, or rounded and in modular codes (`modular`), and then all sides
//! use the rounded numbers. Who cannot make sense of codes asks for the numbers in full.

use std::sync::Arc;

use super::keeping::{Kept, Room};
use super::modular::Modular;
use super::post::{About, Envelope, Letter, Post, bytes_of, floats};
use crate::coding::Tally;

pub(super) struct Value {
    modular: Option<Modular>,
    tally: Arc<Tally>,
    /// What this rank's snapshot counts as in this round: rounded, if it was encoded.
    own: Vec<f32>,
}

impl Value {
    pub(super) fn new(count: usize, modular: bool, tally: Arc<Tally>) -> Self {
        Value { modular: modular.then(|| Modular::new(count)), tally, own: vec![0.0; count] }
    }

    /// Whether peers say if they have understood.
    pub(super) fn is_coded(&self) -> bool {
        self.modular.is_some()
    }

    pub(super) fn own(&self) -> &[f32] {
        &self.own
    }

    /// Begins a round with a snapshot: sends it to the peers.
    pub(super) fn send(&mut self, post: &Post, peers: &[u32], envelope: &Envelope, snapshot: &[f32]) {
        let (own, tally) = (&mut self.own, &self.tally);
        let modular = self.modular.as_ref().filter(|modular| modular.is_ready());
        let encoded = modular.and_then(|modular| tally.time(|| modular.encode(snapshot, own)));
        if encoded.is_none() {
            own.copy_from_slice(snapshot);
            if self.modular.is_some() {
                tally.add(0, 0, snapshot.iter().filter(|x| !x.is_finite()).count() as u64);
            }
        }
        for peer in peers {
            match &encoded {
                Some((body, hash)) => {
                    tally.add(snapshot.len() as u64 * 4, body.len() as u64, 0);
                    post.send(*peer, &Envelope { extra: *hash, plain: false, ..*envelope }, body);
                }
                None => post.send(*peer, envelope, bytes_of(snapshot)),
            }
        }
    }

    /// Sends it to a peer in full.
    pub(super) fn send_in_full(&self, post: &Post, peer: u32, envelope: &Envelope) {
        let bytes = self.own.len() as u64 * 4;
        self.tally.add(bytes, bytes, 0);
        post.send(peer, envelope, bytes_of(&self.own));
    }

    /// Reads a peer's snapshot, from a snapshot near to it. Tells whether it makes sense, the peer too where that asks: with
    /// codes always, and else with `extra`.
    pub(super) fn read(&self, post: &Post, letter: &Letter, near: &[f32], out: &mut [f32]) -> bool {
        let envelope = &letter.envelope;
        let clear = if envelope.plain {
            out.iter_mut().zip(floats(&letter.body)).for_each(|(out, x)| *out = x);
            letter.body.len() == out.len() * 4
        } else {
            self.tally.time(|| Modular::decode(&letter.body, envelope.extra, near, out))
        };
        if self.is_coded() || envelope.extra != 0 {
            let about = if clear { About::Understood } else { About::Again };
            post.send(letter.from, &Envelope::new(about, envelope.epoch, envelope.round), &[]);
        }
        clear
    }

    /// Notes how far a peer was.
    pub(super) fn learn(&mut self, theirs: &[f32]) {
        if let Some(modular) = &mut self.modular {
            modular.learn(&self.own, theirs);
        }
    }

    /// What is known of how far peers are.
    pub(super) fn save(&self) -> Vec<Kept> {
        self.modular.as_ref().and_then(Modular::save).into_iter().collect()
    }

    pub(super) fn room(&mut self, label: &str) -> Option<Room<'_>> {
        self.modular.as_mut()?.room(label)
    }
}
