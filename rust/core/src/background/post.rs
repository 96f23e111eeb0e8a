//! Letters between the background threads of a model, and who of them is there.
//!
//! A letter belongs to no group: what is lost poisons nothing. It travels as frames of at most a chunk, in any order, and
//! says for which members it was written. Members only ever become fewer, so of two lists the shorter is the newer.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use offbeat_transport::frame::{FrameKind, Header, NOTE};
use offbeat_transport::inbox::Delivery;
use offbeat_transport::mesh::Mesh;

use crate::Error;
use crate::coding::mix;

/// What a letter is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub(super) enum About {
    /// A part of a snapshot, for who sums it.
    Share = 1,
    /// A part of the mean.
    Mean = 2,
    /// A whole snapshot, for a peer.
    Value = 3,
    /// The peer's snapshot was understood.
    Understood = 4,
    /// It was not, and is wanted in full.
    Again = 5,
    /// The sender goes on with fewer members.
    Moved = 6,
    /// What the sender changed since it last heard of a shard's owner.
    Push = 7,
    /// The owner's values.
    Pull = 8,
    /// The sender has lost a member.
    Lost = 9,
    /// The sender takes part no more; so many frames went before, and so many rounds of this list of members have ended there.
    Bye = 10,
    /// After a checkpoint was loaded: all that the sender has put into a shard, for its owner.
    Account = 11,
    /// What the sender last heard of a shard, where answers are differences to it.
    Base = 12,
    /// The sender has what all members of its list have sent.
    Have = 13,
    /// What was agreed on: the list of members whose values count.
    Agreed = 14,
    /// How many steps the sender has made, where nothing tells that it will push them.
    Steps = 15,
    /// In gossip in step: the round has ended here without the peer, which stays where it is.
    Over = 16,
}

impl About {
    fn from_byte(byte: u8) -> Option<Self> {
        use About::*;
        let all = [
            Share, Mean, Value, Understood, Again, Moved, Push, Pull, Lost, Bye, Account, Base, Have, Agreed, Steps,
            Over,
        ];
        all.into_iter().find(|about| *about as u8 == byte)
    }
}

/// For which members a letter was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub(super) struct Epoch {
    pub(super) living: u32,
    pub(super) hash: u64,
}

impl Epoch {
    pub(super) fn of(living: &[u32]) -> Self {
        let hash = living.iter().fold(0, |hash, rank| mix(hash, u64::from(*rank)));
        Epoch { living: living.len() as u32, hash }
    }
}

/// What stands on a letter's envelope.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Envelope {
    pub(super) about: About,
    pub(super) epoch: Epoch,
    pub(super) round: u64,
    /// Which part of the model, or which rank.
    pub(super) shard: u32,
    /// Free for each kind.
    pub(super) extra: u64,
    /// Whether the body is plain numbers, not encoded ones.
    pub(super) plain: bool,
}

impl Envelope {
    pub(super) fn new(about: About, epoch: Epoch, round: u64) -> Self {
        Envelope { about, epoch, round, shard: 0, extra: 0, plain: true }
    }

    fn seal(&self, channel: u64, bytes: usize) -> Header {
        let mut note = [0; NOTE];
        note[0..8].copy_from_slice(&self.epoch.hash.to_le_bytes());
        note[8..12].copy_from_slice(&self.epoch.living.to_le_bytes());
        note[12..16].copy_from_slice(&self.shard.to_le_bytes());
        note[16..24].copy_from_slice(&(bytes as u64).to_le_bytes());
        note[24..32].copy_from_slice(&self.extra.to_le_bytes());
        note[32] = u8::from(self.plain);
        let bare = Header::bare(FrameKind::Letter);
        Header { stage: self.about as u8, group: channel, sequence: self.round, note, ..bare }
    }

    fn open(header: &Header) -> Option<(Self, usize)> {
        let word = |at: usize| header.note[at..at + 8].try_into().map_or(0, u64::from_le_bytes);
        let half = |at: usize| header.note[at..at + 4].try_into().map_or(0, u32::from_le_bytes);
        let envelope = Envelope {
            about: About::from_byte(header.stage)?,
            epoch: Epoch { living: half(8), hash: word(0) },
            round: header.sequence,
            shard: half(12),
            extra: word(24),
            plain: header.note[32] == 1,
        };
        Some((envelope, usize::try_from(word(16)).ok()?))
    }
}

/// A letter that has come.
#[derive(Debug)]
pub(super) struct Letter {
    pub(super) from: u32,
    pub(super) envelope: Envelope,
    pub(super) body: Vec<u8>,
}

impl Letter {
    /// Whether it is the one from a rank that is about this, in this round of this list of members.
    pub(super) fn is(&self, from: u32, wanted: &Envelope) -> bool {
        let key = |envelope: &Envelope| (envelope.about, envelope.epoch, envelope.round);
        self.from == from && key(&self.envelope) == key(wanted)
    }
}

/// Takes the letter out of many that [`Letter::is`] the wanted one, if it has come.
pub(super) fn take(letters: &mut Vec<Letter>, from: u32, wanted: &Envelope) -> Option<Letter> {
    let at = letters.iter().position(|letter| letter.is(from, wanted))?;
    Some(letters.swap_remove(at))
}

/// A letter of which not all frames have come.
struct Partial {
    body: Vec<u8>,
    missing: usize,
}

/// How many frames came from a rank before it said goodbye, and its goodbye, which says how many there were: they overtake
/// each other.
#[derive(Clone, Copy, Debug, Default)]
struct Came {
    frames: u64,
    goodbye: Option<Envelope>,
}

impl Came {
    fn take(&mut self, envelope: &Envelope) {
        match envelope.about {
            About::Bye => self.goodbye = Some(*envelope),
            _ => self.frames += 1,
        }
    }

    /// Whether that is all there is; none before the goodbye.
    fn is_all(&self) -> Option<bool> {
        self.goodbye.map(|goodbye| self.frames >= goodbye.extra)
    }
}

/// Sends and receives the letters of a model, and knows who is there.
pub(super) struct Post {
    pub(super) mesh: Arc<Mesh>,
    pub(super) me: u32,
    channel: u64,
    chunk: usize,
    longest: usize,
    living: Vec<u32>,
    epoch: Epoch,
    partial: HashMap<(u32, Envelope), Partial>,
    /// Since when there are such, and for how long there were before.
    receiving: Option<Instant>,
    received: Duration,
    /// Of each rank of the world: how many frames went there.
    sent: Vec<Cell<u64>>,
    came: Vec<Came>,
}

impl Post {
    /// For the members of a group. `longest` is the most that a letter may hold.
    pub(super) fn new(mesh: Arc<Mesh>, channel: u64, members: &[u32], chunk: usize, longest: usize) -> Self {
        let (me, living, epoch) = (mesh.me(), members.to_vec(), Epoch::of(members));
        let world = mesh.world() as usize;
        Post {
            mesh,
            me,
            channel,
            chunk,
            longest,
            living,
            epoch,
            partial: HashMap::new(),
            receiving: None,
            received: Duration::ZERO,
            sent: vec![Cell::new(0); world],
            came: vec![Came::default(); world],
        }
    }

    /// The members that are there, in ascending order, with this one.
    pub(super) fn living(&self) -> &[u32] {
        &self.living
    }

    /// All of them but this one.
    pub(super) fn others(&self) -> Vec<u32> {
        self.living.iter().copied().filter(|rank| *rank != self.me).collect()
    }

    pub(super) fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// This rank's place among the living.
    pub(super) fn place(&self) -> usize {
        self.living.binary_search(&self.me).unwrap_or_default()
    }

    pub(super) fn send(&self, to: u32, envelope: &Envelope, body: &[u8]) {
        let header = envelope.seal(self.channel, body.len());
        if body.is_empty() {
            self.mesh.tell(to, header, &[]);
        }
        for (index, piece) in body.chunks(self.chunk).enumerate() {
            self.mesh.tell(to, Header { index: index as u32, ..header }, piece);
        }
        let sent = &self.sent[to as usize];
        sent.set(sent.get() + body.len().div_ceil(self.chunk).max(1) as u64);
    }

    /// A frame has come: the letter, if that was its last. Letters from ranks that are not members any more are dropped.
    pub(super) fn receive(&mut self, delivery: &Delivery) -> Option<Letter> {
        let from = delivery.from;
        if self.living.binary_search(&from).is_err() || from == self.me {
            return None;
        }
        let (envelope, bytes) = Envelope::open(&delivery.header)?;
        self.came[from as usize].take(&envelope);
        if bytes > self.longest {
            log::warn!("a letter of {bytes} bytes from rank {from} was dropped: at most {} make sense", self.longest);
            return None;
        }
        let begin = delivery.header.index as usize * self.chunk;
        let piece = &*delivery.payload;
        if begin == 0 && piece.len() == bytes {
            return Some(Letter { from, envelope, body: piece.to_vec() });
        }
        let new = || Partial { body: vec![0; bytes], missing: bytes };
        let partial = self.partial.entry((from, envelope)).or_insert_with(new);
        partial.body.get_mut(begin..begin + piece.len())?.copy_from_slice(piece);
        partial.missing = partial.missing.saturating_sub(piece.len());
        let whole = (partial.missing == 0).then(|| self.partial.remove(&(from, envelope))).flatten();
        self.keep_time();
        whole.map(|partial| Letter { from, envelope, body: partial.body })
    }

    /// For how long long letters were on their way here since this was last asked: what exchanges cost the wire, also those
    /// that others began. Waiting for somebody to write is not in it.
    pub(super) fn time_receiving(&mut self) -> Duration {
        self.keep_time();
        std::mem::take(&mut self.received)
    }

    fn keep_time(&mut self) {
        let now = Instant::now();
        if let Some(since) = self.receiving {
            self.received += now - since;
        }
        self.receiving = (!self.partial.is_empty()).then_some(now);
    }

    /// Whether all has come that a rank wrote before it said goodbye; none if it has not.
    pub(super) fn has_all_of(&self, rank: u32) -> Option<bool> {
        self.came.get(rank as usize)?.is_all()
    }

    /// How many rounds of which list of members had ended at a rank that said goodbye.
    pub(super) fn ended_at(&self, rank: u32) -> Option<(Epoch, u64)> {
        let goodbye = self.came.get(rank as usize)?.goodbye?;
        Some((goodbye.epoch, goodbye.round))
    }

    /// Goes on without a member, and tells the others so. False if it was none any more.
    pub(super) fn drop_member(&mut self, rank: u32) -> bool {
        let Ok(place) = self.living.binary_search(&rank) else { return false };
        if rank == self.me {
            return false;
        }
        self.living.remove(place);
        self.partial.retain(|(from, _), _| *from != rank);
        self.epoch = Epoch::of(&self.living);
        let envelope = Envelope { shard: rank, ..Envelope::new(About::Lost, self.epoch, 0) };
        for other in self.others() {
            self.send(other, &envelope, &[]);
        }
        true
    }

    /// Tells the user that a member is gone, unless somebody has.
    pub(super) fn report(&self, rank: u32, error: &Error) {
        if self.mesh.roster().report(rank) {
            log::warn!("{error}. Training goes on with {} of the ranks.", self.living.len());
        }
    }

    /// Tells the others that this rank takes part no more, which rounds have ended here, and how much it has written to them
    /// before.
    pub(super) fn say_goodbye(&self, ended: Option<(Epoch, u64)>) {
        let (epoch, rounds) = ended.unwrap_or((self.epoch, 0));
        for other in self.others() {
            let before = self.sent[other as usize].get();
            self.send(other, &Envelope { extra: before, ..Envelope::new(About::Bye, epoch, rounds) }, &[]);
        }
    }
}

/// Numbers as they travel.
pub(super) fn bytes_of(values: &[f32]) -> &[u8] {
    // SAFETY: any f32 is four readable bytes.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

/// The numbers of a plain body.
pub(super) fn floats(body: &[u8]) -> impl Iterator<Item = f32> {
    body.chunks_exact(4).map(|word| f32::from_le_bytes([word[0], word[1], word[2], word[3]]))
}

/// Elements `range` of `count` that belong to part `at` of `parts`, cut at multiples of `grain`.
pub(super) fn shard(count: usize, parts: usize, at: usize, grain: usize) -> std::ops::Range<usize> {
    let each = count.div_ceil(parts.max(1)).next_multiple_of(grain.max(1));
    (at * each).min(count)..((at + 1) * each).min(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_cover_everything_once() {
        for (count, parts, grain) in [(0, 3, 16), (1, 3, 16), (1000, 3, 16), (4096, 4, 256), (5000, 7, 1)] {
            let ranges: Vec<_> = (0..parts).map(|at| shard(count, parts, at, grain)).collect();
            assert_eq!(ranges[0].start, 0);
            assert_eq!(ranges[parts - 1].end, count);
            assert!(ranges.windows(2).all(|pair| pair[0].end == pair[1].start));
            assert!(ranges.iter().all(|range| range.start % grain == 0 || range.start == count));
        }
    }

    #[test]
    fn all_has_come_when_the_goodbye_and_every_frame_before_it_have() {
        let push = Envelope::new(About::Push, Epoch::default(), 0);
        let bye = |before| Envelope { extra: before, ..Envelope::new(About::Bye, Epoch::default(), 0) };
        let mut came = Came::default();
        came.take(&push);
        assert_eq!(came.is_all(), None, "it may write more");
        // a goodbye on the first stream overtakes pieces of long letters on the others
        came.take(&bye(3));
        came.take(&push);
        assert_eq!(came.is_all(), Some(false));
        came.take(&push);
        assert_eq!(came.is_all(), Some(true));
        let mut silent = Came::default();
        silent.take(&bye(0));
        assert_eq!(silent.is_all(), Some(true), "who never wrote");
    }

    #[test]
    fn an_envelope_can_be_read_again() {
        let envelope = Envelope {
            about: About::Pull,
            epoch: Epoch::of(&[1, 4, 9]),
            round: 77,
            shard: 3,
            extra: u64::MAX,
            plain: false,
        };
        assert_eq!(Envelope::open(&envelope.seal(5, 1234)), Some((envelope, 1234)));
        assert_eq!(Envelope::open(&Header { stage: 99, ..envelope.seal(5, 0) }), None);
    }
}
