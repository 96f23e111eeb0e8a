//! The mean of the snapshots of all members: each sends every other one the part that it sums, in the order of ranks, and
//! gets the other parts of the mean back. 2(n−1)/n of the model goes out on each rank.
//!
//! With a codec what travels are differences to the last mean, which all have alike, with residuals on both sides. The first
//! round of a list of members is in full precision: ranks may have ended the last one of the list before differently.
//!
//! Who goes on from a checkpoint does so with the last mean and the residuals, if all have saved after the same round. If not,
//! the first round is in full precision again and makes a new mean; residuals are each rank's own, and stay.
//!
//! A member that is lost in the middle ends the round for those that do not have the whole mean yet. Nothing is amiss with
//! that: who has it moves to it, the others stay where they are until the next. One that leaves in good order is waited with
//! until all have ended the rounds that it has.

use std::ops::Range;

use super::coder::Coder;
use super::keeping::{Kept, Room, Rounds};
use super::post::{About, Envelope, Epoch, Letter, Post, bytes_of, floats, shard};
use super::{Exchange, Outcome};

pub(super) struct Average {
    coder: Option<Coder>,
    grain: usize,
    count: usize,
    round: u64,
    /// Letters of this round, and of those to come.
    letters: Vec<Letter>,
    active: Option<Active>,
    dropped: bool,
    /// The last mean, which all members have alike; used with a codec only.
    reference: Vec<f32>,
    result: Vec<f32>,
}

struct Active {
    summed: bool,
    /// Whose part of the mean is there.
    filled: Vec<bool>,
}

impl Average {
    pub(super) fn new(count: usize, grain: usize, coder: Option<Coder>) -> Self {
        let reference = if coder.is_some() { vec![0.0; count] } else { Vec::new() };
        let (letters, result) = (Vec::new(), vec![0.0; count]);
        Average { coder, grain, count, round: 0, letters, active: None, dropped: false, reference, result }
    }

    fn part(&self, post: &Post, place: usize) -> Range<usize> {
        shard(self.count, post.living().len(), place, self.grain)
    }

    /// Whether this round travels in full precision.
    fn is_plain(&self) -> bool {
        self.coder.is_none() || self.round == 0
    }

    fn envelope(&self, post: &Post, about: About, place: usize) -> Envelope {
        let plain = self.is_plain();
        Envelope { shard: place as u32, plain, ..Envelope::new(about, post.epoch(), self.round) }
    }

    fn find(&self, post: &Post, about: About, from: u32) -> Option<&Letter> {
        let wanted = Envelope::new(about, post.epoch(), self.round);
        self.letters.iter().find(|letter| letter.is(from, &wanted))
    }

    /// Sums my part once everybody's share is there, and sends it to all.
    fn sum(&mut self, post: &Post, snapshot: &[f32]) -> bool {
        let (place, others) = (post.place(), post.others());
        let range = self.part(post, place);
        if !others.iter().all(|rank| range.is_empty() || self.find(post, About::Share, *rank).is_some()) {
            return false;
        }
        if range.is_empty() {
            return true;
        }
        let plain = self.is_plain();
        let mut sum = vec![0f32; range.len()];
        for rank in post.living() {
            if *rank == post.me {
                let mine = snapshot[range.clone()].iter();
                if plain {
                    sum.iter_mut().zip(mine).for_each(|(sum, x)| *sum += x);
                } else {
                    let before = &self.reference[range.clone()];
                    sum.iter_mut().zip(mine.zip(before)).for_each(|(sum, (x, a))| *sum += x - a);
                }
            } else if let Some(letter) = self.find(post, About::Share, *rank) {
                match &self.coder {
                    Some(coder) if !plain => coder.decode_add(&letter.body, &range, &mut sum),
                    _ => sum.iter_mut().zip(floats(&letter.body)).for_each(|(sum, x)| *sum += x),
                }
            }
        }
        let part = 1.0 / post.living().len() as f32;
        sum.iter_mut().for_each(|sum| *sum *= part);
        let envelope = self.envelope(post, About::Mean, place);
        let body = match &mut self.coder {
            Some(coder) if !plain => {
                let body = coder.encode_result(&sum, &range, self.round);
                let result = &mut self.result[range.clone()];
                result.copy_from_slice(&self.reference[range.clone()]);
                coder.decode_add(&body, &range, result);
                body
            }
            _ => {
                self.result[range].copy_from_slice(&sum);
                bytes_of(&sum).to_vec()
            }
        };
        others.iter().for_each(|rank| post.send(*rank, &envelope, &body));
        true
    }

    /// Takes in the parts of the mean that have come.
    fn gather(&mut self, post: &Post, filled: &mut [bool]) {
        let plain = self.is_plain();
        for (place, rank) in post.living().iter().enumerate() {
            let range = self.part(post, place);
            if filled[place] || *rank == post.me {
                continue;
            }
            if range.is_empty() {
                filled[place] = true;
                continue;
            }
            let mut result = std::mem::take(&mut self.result);
            if let Some(letter) = self.find(post, About::Mean, *rank) {
                let out = &mut result[range.clone()];
                match &self.coder {
                    Some(coder) if !plain => {
                        out.copy_from_slice(&self.reference[range.clone()]);
                        coder.decode_add(&letter.body, &range, out);
                    }
                    _ => out.iter_mut().zip(floats(&letter.body)).for_each(|(out, x)| *out = x),
                }
                filled[place] = true;
            }
            self.result = result;
        }
    }
}

impl Exchange for Average {
    fn save(&self, _: &[f32]) -> (u64, Vec<Kept>) {
        let Some(coder) = &self.coder else { return (self.round, Vec::new()) };
        let reference = Kept::of_elements("reference", &self.reference);
        (self.round, coder.save().into_iter().chain([reference]).collect())
    }

    fn room(&mut self, label: &str) -> Option<Room<'_>> {
        let coder = self.coder.as_mut()?;
        if label == "reference" { Some(Room::of_elements(&mut self.reference)) } else { coder.room(label) }
    }

    fn go_on(&mut self, rounds: Rounds) {
        self.round = if rounds.least == rounds.most { rounds.mine } else { 0 };
    }

    fn heard(&mut self, post: &mut Post, letter: Letter) {
        let (epoch, mine) = (letter.envelope.epoch, post.epoch());
        let now = epoch == mine && letter.envelope.round >= self.round;
        if matches!(letter.envelope.about, About::Share | About::Mean) && (now || epoch.living < mine.living) {
            self.letters.push(letter);
        }
    }

    fn lost(&mut self, post: &mut Post, _: u32) {
        self.round = 0;
        self.dropped |= self.active.take().is_some();
        let mine = post.epoch();
        self.letters.retain(|letter| letter.envelope.epoch == mine || letter.envelope.epoch.living < mine.living);
        if let Some(coder) = &mut self.coder {
            coder.forget();
        }
    }

    fn ended(&self, post: &Post) -> Option<(Epoch, u64)> {
        Some((post.epoch(), self.round))
    }

    fn is_awaited(&self, post: &Post) -> bool {
        post.others().iter().any(|rank| self.find(post, About::Share, *rank).is_some())
    }

    fn missing(&self, post: &Post) -> Vec<u32> {
        let about = if self.active.as_ref().is_some_and(|active| active.summed) { About::Mean } else { About::Share };
        post.others().into_iter().filter(|rank| self.find(post, about, *rank).is_none()).collect()
    }

    fn begin(&mut self, post: &mut Post, snapshot: &[f32], _: u64) {
        let (plain, me, round) = (self.is_plain(), post.me, self.round);
        let parts: Vec<(usize, u32)> = post.living().iter().copied().enumerate().filter(|(_, r)| *r != me).collect();
        for (place, rank) in parts {
            let range = self.part(post, place);
            if range.is_empty() {
                continue;
            }
            let envelope = self.envelope(post, About::Share, place);
            match &mut self.coder {
                Some(coder) if !plain => {
                    let pairs = snapshot[range.clone()].iter().zip(&self.reference[range.clone()]);
                    let differences: Vec<f32> = pairs.map(|(x, a)| x - a).collect();
                    post.send(rank, &envelope, &coder.encode_share(&differences, &range, me, round));
                }
                _ => post.send(rank, &envelope, bytes_of(&snapshot[range])),
            }
        }
        self.active = Some(Active { summed: false, filled: vec![false; post.living().len()] });
    }

    fn advance(&mut self, post: &mut Post, snapshot: &[f32], delta: &mut [f32]) -> Outcome {
        if std::mem::take(&mut self.dropped) {
            return Outcome::Dropped;
        }
        let Some(mut active) = self.active.take() else { return Outcome::Waiting };
        active.summed = active.summed || self.sum(post, snapshot);
        active.filled[post.place()] = active.summed;
        self.gather(post, &mut active.filled);
        if !active.filled.iter().all(|filled| *filled) {
            self.active = Some(active);
            return Outcome::Waiting;
        }
        delta.iter_mut().zip(self.result.iter().zip(snapshot)).for_each(|(delta, (mean, x))| *delta = mean - x);
        if self.coder.is_some() {
            self.reference.copy_from_slice(&self.result);
        }
        self.round += 1;
        let (epoch, round) = (post.epoch(), self.round);
        self.letters.retain(|letter| letter.envelope.epoch != epoch || letter.envelope.round >= round);
        Outcome::Done
    }
}
