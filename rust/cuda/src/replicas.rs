//! The step `Replicas` on a device: gossip by encoded differences to copies that every rank keeps.
//!
//! ```text
//! values ─▶ (in the host: the mean of its ranks)                        full precision, over NVLink      2 exchanges, 2 kernels
//!        ─▶ how far they are from the copies, encoded                   on every rank, the whole bucket  1 kernel
//!        ─▶ to the peers, from who carries each part                    one grouped exchange
//!        ─▶ (in the host: what came to everyone)                        one grouped exchange
//!        ─▶ copies and values                                                                            1 kernel
//! ```
//! The ranks of a host have the same copies, as on the CPU, so each tells itself what its host tells. Only who carries is
//! another than there; a host speaks with its own number, and the bits are the same.

use std::ops::Range;

use offbeat_core::Result;
use offbeat_core::algorithm::Mixing;
use offbeat_core::buffer::Buffer;
use offbeat_core::codec::Codec;
use offbeat_core::coding::mix;
use offbeat_core::dtype::DType;

use crate::collective::{Group, Table, carried, pass_on};
use crate::gossip::Gossip;
use crate::kernels::{Copies, News, Salted, Stacked};
use crate::memory::Piece;
use crate::plan::{Plan, tiles};
use crate::stream::Address;

/// Gossip by differences, built for one bucket.
pub struct Replicas {
    mixing: Mixing,
    codec: Option<&'static dyn Codec>,
    plan: Plan,
    all: Table,
    /// The same tiles without records, for copying.
    whole: Table,
    numbers: Option<Piece>,
    /// CHOCO's, of this host and of its peers.
    weights: Piece,
    /// The mean over the ranks of each host.
    inside: Option<Gossip>,
    /// As many as the rule has names for.
    pub(crate) copies: Vec<Piece>,
}

impl Replicas {
    /// Builds it for tensors at these places of a bucket. `numbers` are those of the codec's blocks.
    pub fn build(
        group: &Group,
        mixing: Mixing,
        codec: Option<&'static dyn Codec>,
        (count, dtype): (usize, DType),
        spans: &[Range<usize>],
        numbers: &[u64],
    ) -> Result<Self> {
        let plan = Plan::told(&group.layout, count, spans, codec);
        let several = group.layout.hosts.iter().any(|members| members.len() > 1);
        let weights = std::iter::once(mixing.own).chain(mixing.peers.iter().map(|(_, weight)| *weight));
        let weights: Vec<u8> = weights.flat_map(f32::to_le_bytes).collect();
        let copies = mixing.copies().iter().map(|_| group.zeros(count)).collect::<Result<_>>()?;
        Ok(Replicas {
            codec,
            all: group.upload_tiles(&plan.tiles)?,
            whole: group.upload_tiles(&tiles(spans))?,
            numbers: group.upload_numbers(numbers)?,
            weights: group.upload(&weights)?,
            inside: if several { Some(Gossip::inside(group, count, dtype)?) } else { None },
            copies,
            mixing,
            plan,
        })
    }

    /// Names of the copies, in their order.
    pub(crate) fn names(&self) -> &'static [&'static str] {
        self.mixing.copies()
    }

    /// Bytes before and after encoding in one round.
    pub fn traffic(&self) -> (u64, u64) {
        if self.codec.is_none() || self.mixing.peers.is_empty() {
            return (0, 0);
        }
        let values: u64 = self.plan.tiles.iter().map(|tile| u64::from(tile.count)).sum();
        (values * 4, self.plan.bytes as u64)
    }

    /// Enqueues that all copies become the weights of now.
    ///
    /// # Safety
    /// The bucket stays until the group's stream has come past this.
    pub unsafe fn begin(&self, group: &Group, buffer: Buffer) -> Result<()> {
        // SAFETY: the caller's promise.
        self.copies.iter().try_for_each(|copy| unsafe { group.take(buffer, &self.whole, copy) })
    }

    /// Enqueues a round. `stream` is where random numbers come from; `odd` counts blocks that are not finite.
    ///
    /// # Safety
    /// As for [`Replicas::begin`]; `odd` is an address, or 0.
    pub unsafe fn run(&self, group: &Group, buffer: Buffer, step: u64, stream: u64, odd: Address) -> Result<()> {
        let (host, _) = group.host();
        let values = (buffer.start as Address, buffer.dtype);
        // SAFETY: the caller's promise; scratch memory stays on this stream.
        unsafe {
            if let Some(inside) = &self.inside {
                inside.run(group, buffer, step)?;
            }
            if self.mixing.peers.is_empty() {
                return Ok(());
            }
            let told = group.scratch.take(self.plan.bytes)?;
            let heard = group.scratch.take(self.mixing.peers.len() * self.plan.bytes)?;
            let salt = Salted {
                residual: 0,
                numbers: self.numbers.as_ref().map_or(0, Piece::address),
                stream: mix(stream, host as u64 + 1),
                // what travels as it is was not encoded
                odd: if self.codec.is_some() { odd } else { 0 },
            };
            let (kernels, copies, tiles) = (&group.kernels, self.addresses(), self.all.tiles);
            let (draws, records) = (self.mixing.draws(), (told.address(), salt));
            kernels.tell(&group.stream, self.codec, values, (copies, draws), tiles, records)?;
            self.exchange(group, told.address(), heard.address())?;
            let (stride, peers) = (self.plan.bytes as u64, self.mixing.peers.len() as u32);
            let heard = Stacked { first: heard.address(), stride, peers };
            let (rule, weights) = (self.mixing.rule, self.weights.address());
            let news = News { rule, weights, told: told.address(), heard };
            kernels.hear(&group.stream, self.codec, values, copies, news, tiles)
        }
    }

    fn addresses(&self) -> Copies {
        let at = |place: usize| self.copies.get(place).map_or(0, Piece::address);
        Copies { own: at(0), first: at(1), second: at(2) }
    }

    /// What I carry to the peers' carriers and theirs to me; then everything to everyone in the host.
    unsafe fn exchange(&self, group: &Group, told: Address, heard: Address) -> Result<()> {
        let ((host, members), me) = (group.host(), group.me());
        let filled = |at: &usize| !self.plan.segments[*at].records.is_empty();
        let peers = || self.mixing.peers.iter().map(|(peer, _)| *peer).enumerate();
        let place = |at: usize, records: &Range<usize>| heard + (at * self.plan.bytes + records.start) as u64;
        group.communicator.group(&group.stream, "differences to peers", |calls| {
            for segment in carried(&self.plan, group).filter(filled).map(|at| &self.plan.segments[at]) {
                let (from, bytes) = (told + segment.records.start as u64, segment.records.len());
                for (at, peer) in peers() {
                    // SAFETY: the caller's promise; there is room for what every peer tells.
                    unsafe {
                        calls.send(from, bytes, segment.carriers[peer]);
                        calls.recv(place(at, &segment.records), bytes, segment.carriers[peer]);
                    }
                }
            }
            Ok(())
        })?;
        if members.len() == 1 {
            return Ok(());
        }
        group.communicator.group(&group.stream, "differences in the host", |calls| {
            for segment in (0..self.plan.segments.len()).filter(filled).map(|at| &self.plan.segments[at]) {
                for (at, _) in peers() {
                    let what = (place(at, &segment.records), segment.records.len());
                    // SAFETY: the caller's promise.
                    unsafe { pass_on(calls, what, segment.carriers[host], (me, members)) };
                }
            }
            Ok(())
        })
    }
}
