//! The step `Replicas`: gossip in few bits, through copies of the peers' weights that everybody keeps.
//!
//! Weights do not become small while training converges, and encoded as they are they would stay as far apart as the codec's
//! error. What is sent is a difference to something that both sides know, and it shrinks as training does. The ranks of a host
//! first average among themselves and then do the same, bit by bit; nodes are hosts, with the weights Wᵢⱼ of [`Mixing`].
//!
//! **Difference compression** (DCD, on a ring). Every node keeps its own weights w as the others know them, and those of its
//! neighbours l and r. With x the weights after the optimizer's step:
//!
//! 1. d = (x − w) + Wₗ·(l − w) + Wᵣ·(r − w): its own update, and the mixing.
//! 2. c = encode(d) goes to both neighbours; q = decode(c) is what all three add: w += q, and the neighbours l or r.
//! 3. x = w.
//!
//! So nothing is ever lost silently: everybody's copy of w is w, bit by bit. Without a codec it is x = Σⱼ Wᵢⱼ wⱼ + (x − w), the
//! gossip that `Gossip` makes.
//!
//! **CHOCO** (on any graph that stays the same). Every node keeps x̂, what the others believe of it, and s = Σⱼ Wᵢⱼ x̂ⱼ:
//!
//! 1. q = decode(encode(x − x̂)) goes to all peers; x̂ += q, s += Σⱼ Wᵢⱼ qⱼ.
//! 2. x += γ·(s − x̂).
//!
//! It converges with any codec if γ is small enough, and keeps two copies, whatever the number of peers.
//!
//! On the wire go the encoded weights once to each peer host. Where hosts have several ranks, as many as the smallest host has
//! carry tensors between hosts. An element that is not finite changes no copy on any side.

use std::ops::Range;
use std::sync::Arc;

use super::all_reduce::numbers;
use super::memory::{Keeper, Memory, spans};
use super::mixing::{Mixing, Rule};
use super::pipeline::{Round, with_floats};
use crate::bucket::{Bucket, Tensor};
use crate::buffer::{Owned, Shaped};
use crate::call::Call;
use crate::codec::Codec;
use crate::coding::{Coding, Leg, mix};
use crate::dtype::{DType, Op};
use crate::graph::Peers;
use crate::group::Group;
use crate::{Error, Kind, Result};

/// Elements that are worked on together: a multiple of every codec's block.
const CHUNK: usize = 8192;

pub(super) struct Replicas {
    mixing: Mixing,
    codec: Option<&'static dyn Codec>,
    seed: u64,
    blocks: Arc<[u64]>,
    spans: Arc<[Range<usize>]>,
}

impl Replicas {
    pub(super) fn build(
        peers: Peers,
        codec: Option<&'static dyn Codec>,
        gamma: Option<f64>,
        seed: u64,
        bucket: &Bucket,
        tensors: &[Tensor],
        group: &Group,
    ) -> Result<(Self, Vec<Memory>)> {
        let (hosts, (host, _)) = group.seats();
        let ranks: Vec<u32> = hosts.iter().map(|members| members.len() as u32).collect();
        let mixing = Mixing::new(peers, gamma, &ranks, host)?;
        let memory = |name: &&str| Memory::of_elements(name, Keeper::Each, bucket, tensors);
        let memories = mixing.copies().iter().map(memory).collect();
        let blocks = codec.map_or(Arc::from([]), |codec| numbers(bucket, tensors, codec.block()));
        Ok((Replicas { mixing, codec, seed, blocks, spans: spans(bucket, tensors).into() }, memories))
    }

    pub(super) fn run(&self, round: &Round<'_>, memories: &mut [Memory]) -> Result<()> {
        let (hosts, _) = round.group.seats();
        if hosts.iter().any(|members| members.len() > 1) {
            let tensor = Shaped { buffer: round.buffer, shape: vec![round.buffer.count as u64] };
            round.call(Call::HostReduce { tensor, op: Op::Mean })?;
        }
        if self.mixing.peers.is_empty() {
            return Ok(());
        }
        let coding = self.codec.map(|codec| Coding {
            codec,
            stream: mix(self.seed, round.step),
            blocks: Arc::clone(&self.blocks),
            spans: Arc::clone(&self.spans),
            residuals: None,
            momentum: None,
            tally: Arc::clone(round.tally),
        });
        let places = self.places();
        let wire = Wire { coding, chunks: self.chunks(&places), places };
        let mine = self.encode(round, &wire, memories);
        let theirs = self.exchange(round, &wire, mine.bytes())?;
        self.apply(round, &wire, (mine.bytes(), theirs.bytes()), memories);
        Ok(())
    }

    /// Where the encoded values of each slot lie.
    fn places(&self) -> Vec<Range<usize>> {
        let mut end = 0;
        let place = |span: &Range<usize>| {
            let len = self.codec.map_or(span.len() * size_of::<f32>(), |codec| codec.encoded_len(span.len()));
            end += len;
            end - len..end
        };
        self.spans.iter().map(place).collect()
    }

    /// The elements of all slots, some at a time.
    fn chunks(&self, places: &[Range<usize>]) -> Vec<Chunk> {
        let len = |count: usize| self.codec.map_or(count * size_of::<f32>(), |codec| codec.encoded_len(count));
        let mut chunks = Vec::new();
        for (slot, (span, place)) in self.spans.iter().zip(places).enumerate() {
            for first in (0..span.len()).step_by(CHUNK) {
                let last = (first + CHUNK).min(span.len());
                chunks.push(Chunk {
                    slot,
                    within: first..last,
                    range: span.start + first..span.start + last,
                    bytes: place.start + len(first)..place.start + len(last),
                });
            }
        }
        chunks
    }

    /// What this host tells the others.
    fn encode(&self, round: &Round<'_>, wire: &Wire, memories: &mut [Memory]) -> Owned {
        let (_, (host, _)) = round.group.seats();
        let mut bytes = Owned::new(DType::U8, vec![wire.places.last().map_or(0, |place| place.end) as u64]);
        let mut told: Vec<f32> = Vec::with_capacity(CHUNK);
        for Chunk { slot, within, range, bytes: place } in &wire.chunks {
            let (slot, within) = (*slot, within.clone());
            told.clear();
            with_floats(round.buffer, range.clone(), |values| match (&self.mixing.rule, &mut *memories) {
                (Rule::Ring(..), [own, l, r]) => {
                    let (a, b) = self.mixing.draws();
                    let (own, l, r) = (own.slot(slot), l.slot(slot), r.slot(slot));
                    let known = own[within.clone()].iter().zip(&l[within.clone()]).zip(&r[within.clone()]);
                    told.extend(values.iter().zip(known).map(|(x, ((w, l), r))| (x - w) + a * (*l - w) + b * (*r - w)));
                }
                (_, memories) => {
                    let known = &memories[0].slot(slot)[within];
                    told.extend(values.iter().zip(known).map(|(value, known)| value - *known));
                }
            });
            wire.encode(&told, range, host as u32, &mut bytes.bytes_mut()[place.clone()]);
        }
        bytes
    }

    /// What each peer host tells, in their order.
    fn exchange(&self, round: &Round<'_>, wire: &Wire, mine: &[u8]) -> Result<Owned> {
        let (hosts, (_, seat)) = round.group.seats();
        let carriers = hosts.iter().map(Vec::len).min().unwrap_or(1);
        let carried: Vec<Range<usize>> = self.carried(carriers, seat).map(|slot| wire.places[slot].clone()).collect();
        let mut outgoing = Owned::new(DType::U8, vec![carried.iter().map(Range::len).sum::<usize>() as u64]);
        gather(mine, &carried, outgoing.bytes_mut());
        let block = Shaped { shape: outgoing.shape.clone(), buffer: outgoing.buffer() };
        let ranks = round.group.ranks();
        let to = |(host, _): &(usize, f32)| (ranks[hosts[*host][seat]], block.clone());
        let blocks = if seat < carriers { self.mixing.peers.iter().map(to).collect() } else { Vec::new() };
        let received = round.call(Call::Exchange { blocks, step: round.step })?;
        let mut theirs = Owned::new(DType::U8, vec![(mine.len() * self.mixing.peers.len()) as u64]);
        for (at, block) in received.iter().enumerate() {
            if block.bytes().len() != outgoing.bytes().len() {
                let message = "encoded weights of another length; try: the same version on every rank";
                let rank = Some(ranks[hosts[self.mixing.peers[at].0][seat]]);
                return Err(Error { rank, ..Error::new(Kind::BadFrame, message) });
            }
            scatter(block.bytes(), &carried, &mut theirs.bytes_mut()[at * mine.len()..][..mine.len()]);
        }
        // the ranks of a host put together what each has got; the rest is zero
        if hosts.iter().any(|members| members.len() > 1) {
            let tensor = Shaped { shape: theirs.shape.clone(), buffer: theirs.buffer() };
            round.call(Call::HostReduce { tensor, op: Op::Bor })?;
        }
        Ok(theirs)
    }

    /// The slots that a seat carries between hosts, out of so many seats: about as many elements each.
    fn carried(&self, seats: usize, seat: usize) -> impl Iterator<Item = usize> {
        let total = self.spans.iter().map(Range::len).sum::<usize>().max(1);
        let mut before = 0;
        let carrier = move |range: &Range<usize>| {
            before += range.len();
            (before - range.len()) * seats / total
        };
        self.spans.iter().map(carrier).enumerate().filter(move |(_, carrier)| *carrier == seat).map(|(slot, _)| slot)
    }

    /// Brings all copies up to date, and the weights to where they go.
    fn apply(&self, round: &Round<'_>, wire: &Wire, (mine, theirs): (&[u8], &[u8]), memories: &mut [Memory]) {
        let mut news: Vec<f32> = Vec::with_capacity(CHUNK);
        for Chunk { slot, within, range, bytes } in &wire.chunks {
            let (slot, within) = (*slot, within.clone());
            news.resize(range.len(), 0.0);
            wire.decode(&mine[bytes.clone()], range, &mut news);
            add(&mut memories[0].slot(slot)[within.clone()], &news, 1.0);
            if let Rule::Choco(_) = self.mixing.rule {
                add(&mut memories[1].slot(slot)[within.clone()], &news, self.mixing.own);
            }
            for (at, (_, weight)) in self.mixing.peers.iter().enumerate() {
                wire.decode(&theirs[at * mine.len()..][bytes.clone()], range, &mut news);
                match self.mixing.rule {
                    Rule::Ring(left, right) => {
                        for (memory, _) in [(1, left), (2, right)].into_iter().filter(|(_, side)| *side == at) {
                            add(&mut memories[memory].slot(slot)[within.clone()], &news, 1.0);
                        }
                    }
                    Rule::Choco(_) => add(&mut memories[1].slot(slot)[within.clone()], &news, *weight),
                }
            }
            with_floats(round.buffer, range.clone(), |values| match (&self.mixing.rule, &mut *memories) {
                (Rule::Choco(gamma), [own, sum]) => {
                    let (own, sum) = (&own.slot(slot)[within.clone()], &sum.slot(slot)[within]);
                    for ((value, own), sum) in values.iter_mut().zip(own).zip(sum) {
                        *value += gamma * (*sum - *own);
                    }
                }
                (_, memories) => {
                    for (value, own) in values.iter_mut().zip(&memories[0].slot(slot)[within]) {
                        // what is not finite here has changed no copy, and is for this rank to see
                        *value = if value.is_finite() { *own } else { *value };
                    }
                }
            });
        }
    }
}

/// Some elements of a slot, few enough to stay in the cache from one pass over them to the next.
struct Chunk {
    slot: usize,
    /// Places in the slot, in the bucket, and among the encoded bytes.
    within: Range<usize>,
    range: Range<usize>,
    bytes: Range<usize>,
}

/// How values travel.
struct Wire {
    /// None for plain f32.
    coding: Option<Coding>,
    /// The bytes of each slot.
    places: Vec<Range<usize>>,
    /// All elements, in order.
    chunks: Vec<Chunk>,
}

impl Wire {
    fn encode(&self, values: &[f32], range: &Range<usize>, host: u32, out: &mut [u8]) {
        match &self.coding {
            // SAFETY: the values are those of the range, and there are no residuals.
            Some(coding) => unsafe { coding.encode(values, range, Leg::Share, host, out) },
            None => {
                for (bytes, value) in out.chunks_exact_mut(size_of::<f32>()).zip(values) {
                    bytes.copy_from_slice(&value.to_le_bytes());
                }
            }
        }
    }

    fn decode(&self, bytes: &[u8], range: &Range<usize>, out: &mut [f32]) {
        match &self.coding {
            Some(coding) => coding.decode(bytes, range, out),
            None => {
                for (bytes, value) in bytes.chunks_exact(size_of::<f32>()).zip(out) {
                    *value = f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
                }
            }
        }
    }
}

/// Adds what is finite; the other side leaves out the same.
fn add(known: &mut [f32], news: &[f32], weight: f32) {
    for (known, new) in known.iter_mut().zip(news) {
        // a choice and no branch, so that several go at once
        *known = if new.is_finite() { *known + weight * new } else { *known };
    }
}

fn gather(bytes: &[u8], places: &[Range<usize>], out: &mut [u8]) {
    let mut rest = out;
    for place in places {
        let (room, after) = std::mem::take(&mut rest).split_at_mut(place.len());
        room.copy_from_slice(&bytes[place.clone()]);
        rest = after;
    }
}

fn scatter(bytes: &[u8], places: &[Range<usize>], out: &mut [u8]) {
    let mut rest = bytes;
    for place in places {
        let (piece, after) = rest.split_at(place.len());
        out[place.clone()].copy_from_slice(piece);
        rest = after;
    }
}
