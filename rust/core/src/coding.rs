//! How the values of a call are encoded on their way between hosts: by which codec, from which random numbers, and what
//! becomes of what the codec loses.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::codec::salt::{STEP, finalize};
use crate::codec::{Codec, Salt};

/// Elements of a result whose error is looked at: enough to know it, few enough to cost nothing.
pub(crate) const SAMPLE: usize = 4096;

/// Which of the two encodings of an all-reduce: everyone's share on its way to an owner, or the owner's result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leg {
    Share,
    Result,
}

/// How values are encoded.
#[derive(Clone, Debug)]
pub struct Coding {
    /// The codec.
    pub codec: &'static dyn Codec,
    /// Where random numbers come from besides the place of a block: a hash of seed and step.
    pub stream: u64,
    /// A number for each block of the tensor (see [`Salt::blocks`]); none if its place in the tensor is enough.
    pub blocks: Arc<[u64]>,
    /// Where values are: each span begins at a block, and its last block may be short. None if they are everywhere.
    pub spans: Arc<[Range<usize>]>,
    /// What is kept of the losses, if anything.
    pub residuals: Option<Residuals>,
    /// What is counted.
    pub tally: Arc<Tally>,
}

impl Coding {
    /// A codec alone: nothing is kept, and random numbers depend on the call's number.
    pub fn plain(codec: &'static dyn Codec) -> Self {
        let (blocks, spans) = (Arc::from([]), Arc::from([]));
        Coding { codec, stream: 0, blocks, spans, residuals: None, tally: Arc::default() }
    }

    /// The parts of a range that hold values, each beginning at a block.
    fn pieces(&self, range: &Range<usize>) -> impl Iterator<Item = Range<usize>> {
        let whole = self.spans.is_empty().then(|| range.clone());
        let first = self.spans.partition_point(|span| span.end <= range.start);
        let spans = self.spans[first..].iter().take_while(|span| span.start < range.end);
        let cut = |span: &Range<usize>| span.start.max(range.start)..span.end.min(range.end);
        spans.map(cut).chain(whole).filter(|piece| !piece.is_empty())
    }

    /// Bytes that a range takes.
    pub(crate) fn encoded_len(&self, range: &Range<usize>) -> usize {
        self.pieces(range).map(|piece| self.codec.encoded_len(piece.len())).sum()
    }

    /// Encodes a range of the tensor. `host` speaks where it is a share; a result has no author, so that it does not matter
    /// who owns which part.
    ///
    /// # Safety
    /// `values` are the elements of `range`. The residuals, if there are any, are as long as the tensor, and nobody else
    /// uses their elements of `range` meanwhile.
    pub(crate) unsafe fn encode(&self, values: &[f32], range: &Range<usize>, leg: Leg, host: u32, out: &mut [u8]) {
        let author = if leg == Leg::Share { u64::from(host) + 1 } else { 0 };
        let (block, stream) = (self.codec.block(), mix(self.stream, author));
        self.tally.time(|| {
            let mut rest = &mut *out;
            for piece in self.pieces(range) {
                let (record, after) = std::mem::take(&mut rest).split_at_mut(self.codec.encoded_len(piece.len()));
                rest = after;
                let blocks = self.blocks.get(piece.start / block..piece.end.div_ceil(block)).unwrap_or_default();
                let salt = Salt { stream, blocks, first: (piece.start / block) as u64 };
                let values = &values[within(&piece, range)];
                let Some(residuals) = &self.residuals else {
                    self.codec.encode(values, salt, record);
                    continue;
                };
                let kept = if leg == Leg::Share { residuals.shares } else { residuals.results };
                // SAFETY: the caller's promise.
                let kept = unsafe { std::slice::from_raw_parts_mut(kept.add(piece.start), piece.len()) };
                self.codec.encode_residual(values, kept, salt, record);
            }
        });
        let mut rest = &*out;
        let bad = self.pieces(range).map(|piece| {
            let (record, after) = rest.split_at(self.codec.encoded_len(piece.len()));
            rest = after;
            self.codec.non_finite(record) as u64
        });
        let bad = bad.sum();
        self.tally.add(range.len() as u64 * 4, out.len() as u64, bad);
    }

    /// Decodes a range; what lies between values becomes zero.
    pub(crate) fn decode(&self, bytes: &[u8], range: &Range<usize>, out: &mut [f32]) {
        self.tally.time(|| {
            let (mut rest, mut end) = (bytes, 0);
            for piece in self.pieces(range) {
                let (record, after) = rest.split_at(self.codec.encoded_len(piece.len()));
                rest = after;
                let place = within(&piece, range);
                out[end..place.start].fill(0.0);
                end = place.end;
                self.codec.decode(record, &mut out[place]);
            }
            out[end..].fill(0.0);
        });
    }

    /// Decodes a range and adds it to `out`.
    pub(crate) fn decode_add(&self, bytes: &[u8], range: &Range<usize>, out: &mut [f32]) {
        self.tally.time(|| {
            let mut rest = bytes;
            for piece in self.pieces(range) {
                let (record, after) = rest.split_at(self.codec.encoded_len(piece.len()));
                rest = after;
                self.codec.decode_add(record, &mut out[within(&piece, range)]);
            }
        });
    }
}

/// Where a part of a range lies in it.
fn within(piece: &Range<usize>, range: &Range<usize>) -> Range<usize> {
    piece.start - range.start..piece.end - range.start
}

/// What a codec has lost, for each element of a tensor, kept to be sent later (error feedback). Memory of the caller's that
/// outlives the call.
#[derive(Clone, Copy, Debug)]
pub struct Residuals {
    /// Of this host's shares, where this rank carries them.
    pub shares: *mut f32,
    /// Of the results that are summed here.
    pub results: *mut f32,
}

// SAFETY: they are addresses; whoever makes them promises (`Work`) that the memory outlives the call, which alone uses it.
unsafe impl Send for Residuals {}
// SAFETY: as above.
unsafe impl Sync for Residuals {}

/// What coding has done so far.
#[derive(Debug, Default)]
pub struct Tally {
    plain: AtomicU64,
    coded: AtomicU64,
    non_finite: AtomicU64,
    /// Nanoseconds that encoding and decoding took.
    spent: AtomicU64,
    /// Squared errors and squared values of results, as bits of f64: only the thread that runs the call adds to them.
    error: AtomicU64,
    norm: AtomicU64,
}

/// What a [`Tally`] says at a moment.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Count {
    /// Bytes before encoding.
    pub plain: u64,
    /// Bytes after it.
    pub coded: u64,
    /// Blocks that held NaN or infinity.
    pub non_finite: u64,
    /// Seconds that encoding and decoding took.
    pub spent: f64,
    /// The norm of what results lost against the norm of results; 0 if nothing was encoded.
    pub error: f64,
}

impl Tally {
    /// Notes something that was encoded: bytes before and after, and blocks that were not finite.
    pub fn add(&self, plain: u64, coded: u64, non_finite: u64) {
        self.plain.fetch_add(plain, Ordering::Relaxed);
        self.coded.fetch_add(coded, Ordering::Relaxed);
        self.non_finite.fetch_add(non_finite, Ordering::Relaxed);
    }

    /// Notes how long it took to encode or decode something.
    pub(crate) fn time<T>(&self, work: impl FnOnce() -> T) -> T {
        let began = Instant::now();
        let result = work();
        self.spent.fetch_add(began.elapsed().as_nanos() as u64, Ordering::Relaxed);
        result
    }

    /// Notes how far a result is from what it should be.
    pub(crate) fn compare(&self, exact: &[f32], decoded: &[f32]) {
        self.sample(exact.iter().zip(decoded).map(|(exact, decoded)| (*exact, exact - decoded)));
    }

    /// Notes values and what was lost of each.
    pub(crate) fn sample(&self, values: impl Iterator<Item = (f32, f32)>) {
        let (mut error, mut norm) = (0.0, 0.0);
        for (exact, lost) in values.take(SAMPLE) {
            error += f64::from(lost).powi(2);
            norm += f64::from(exact).powi(2);
        }
        let add = |place: &AtomicU64, value: f64| {
            let sum = f64::from_bits(place.load(Ordering::Relaxed)) + value;
            place.store(sum.to_bits(), Ordering::Relaxed);
        };
        if error.is_finite() && norm.is_finite() {
            add(&self.error, error);
            add(&self.norm, norm);
        }
    }

    /// What was counted so far.
    pub fn count(&self) -> Count {
        let of = |place: &AtomicU64| place.load(Ordering::Relaxed);
        let (error, norm) = (f64::from_bits(of(&self.error)), f64::from_bits(of(&self.norm)));
        let error = if norm > 0.0 { (error / norm).sqrt() } else { 0.0 };
        let spent = Duration::from_nanos(of(&self.spent)).as_secs_f64();
        Count { plain: of(&self.plain), coded: of(&self.coded), non_finite: of(&self.non_finite), spent, error }
    }
}

/// Mixes two numbers well.
pub fn mix(a: u64, b: u64) -> u64 {
    finalize(a.wrapping_mul(STEP).wrapping_add(b).wrapping_add(STEP))
}
