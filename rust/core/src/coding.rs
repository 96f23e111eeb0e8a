//! How the values of a call are encoded on their way between hosts: by which codec, from which random numbers, what becomes
//! of what the codec loses, and whether gradients travel as momentum.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::codec::salt::{STEP, finalize};
use crate::codec::{Codec, Salt};
use crate::momentum::{self, Momenta};

/// Elements of a result whose error is looked at: enough to know it, few enough to cost nothing.
pub(crate) const SAMPLE: usize = 4096;

/// Elements whose momentum is worked out at once, just before they are encoded: a multiple of every codec's block, and few
/// enough to stay in the cache.
const TOGETHER: usize = 8192;

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
    /// Where values are gradients and travel as the momentum that they make: that momentum.
    pub momentum: Option<Momenta>,
    /// What is counted.
    pub tally: Arc<Tally>,
}

impl Coding {
    /// A codec alone: nothing is kept, and random numbers depend on the call's number.
    pub fn plain(codec: &'static dyn Codec) -> Self {
        let (blocks, spans) = (Arc::from([]), Arc::from([]));
        Coding { codec, stream: 0, blocks, spans, residuals: None, momentum: None, tally: Arc::default() }
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

    /// How much of the momentum stays of a piece.
    fn beta(&self, momenta: &Momenta, piece: &Range<usize>) -> f32 {
        momenta.betas[self.spans.partition_point(|span| span.end <= piece.start)]
    }

    /// Encodes a range of the tensor. `host` speaks where it is a share; a result has no author, so that it does not matter
    /// who owns which part.
    ///
    /// # Safety
    /// `values` are the elements of `range`. The residuals and the momentum, if there are any, are as long as the tensor, and
    /// nobody else uses their elements of `range` meanwhile.
    pub(crate) unsafe fn encode(&self, values: &[f32], range: &Range<usize>, leg: Leg, host: u32, out: &mut [u8]) {
        let author = if leg == Leg::Share { u64::from(host) + 1 } else { 0 };
        let stream = mix(self.stream, author);
        self.tally.time(|| {
            let mut rest = &mut *out;
            for piece in self.pieces(range) {
                let (record, after) = std::mem::take(&mut rest).split_at_mut(self.codec.encoded_len(piece.len()));
                rest = after;
                let values = &values[within(&piece, range)];
                // SAFETY: the caller's promise.
                unsafe {
                    match &self.momentum {
                        Some(momenta) if leg == Leg::Share => self.encode_made(values, momenta, &piece, stream, record),
                        _ => self.encode_piece(values, &piece, leg, stream, record),
                    }
                }
            }
        });
        // what fills a bucket up between tensors is not encoded
        let (mut rest, mut count, mut bad) = (&*out, 0, 0);
        for piece in self.pieces(range) {
            let (record, after) = rest.split_at(self.codec.encoded_len(piece.len()));
            rest = after;
            count += piece.len() as u64;
            bad += self.codec.non_finite(record) as u64;
        }
        self.tally.add(count * 4, out.len() as u64, bad);
    }

    /// Encodes the momentum that a piece of gradients makes, some at a time.
    ///
    /// # Safety
    /// As [`Coding::encode`].
    unsafe fn encode_made(
        &self,
        gradients: &[f32],
        momenta: &Momenta,
        piece: &Range<usize>,
        stream: u64,
        mut out: &mut [u8],
    ) {
        let beta = self.beta(momenta, piece);
        // SAFETY: the caller's promise.
        let momentum = unsafe { momenta.of(piece) };
        let mut room = Vec::with_capacity(TOGETHER);
        for (at, (gradients, momentum)) in gradients.chunks(TOGETHER).zip(momentum.chunks(TOGETHER)).enumerate() {
            room.clear();
            room.extend(gradients.iter().zip(momentum).map(|(g, m)| momentum::made(*g, *m, beta)));
            let start = piece.start + at * TOGETHER;
            let (record, after) = std::mem::take(&mut out).split_at_mut(self.codec.encoded_len(room.len()));
            out = after;
            // SAFETY: the caller's promise.
            unsafe { self.encode_piece(&room, &(start..start + room.len()), Leg::Share, stream, record) };
        }
    }

    /// Encodes a piece that begins at a block.
    ///
    /// # Safety
    /// As [`Coding::encode`].
    unsafe fn encode_piece(&self, values: &[f32], piece: &Range<usize>, leg: Leg, stream: u64, record: &mut [u8]) {
        let block = self.codec.block();
        let blocks = self.blocks.get(piece.start / block..piece.end.div_ceil(block)).unwrap_or_default();
        let salt = Salt { stream, blocks, first: (piece.start / block) as u64 };
        let Some(residuals) = &self.residuals else {
            return self.codec.encode(values, salt, record);
        };
        let kept = if leg == Leg::Share { residuals.shares } else { residuals.results };
        // SAFETY: the caller's promise.
        let kept = unsafe { std::slice::from_raw_parts_mut(kept.add(piece.start), piece.len()) };
        self.codec.encode_residual(values, kept, salt, record);
    }

    /// The result of a range is there: where it is momentum, it becomes the gradients that make it.
    ///
    /// # Safety
    /// `values` are the elements of `range`; nobody else uses their momentum meanwhile.
    pub(crate) unsafe fn settle(&self, range: &Range<usize>, values: &mut [f32]) {
        let Some(momenta) = &self.momentum else { return };
        for piece in self.pieces(range) {
            // SAFETY: the caller's promise.
            let momentum = unsafe { momenta.of(&piece) };
            momentum::settle(&mut values[within(&piece, range)], momentum, self.beta(momenta, &piece));
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::KNOWN;

    /// Numbers around zero.
    fn numbers(count: usize, seed: u64) -> Vec<f32> {
        (0..count as u64).map(|at| (mix(seed, at) >> 40) as f32 / (1u64 << 23) as f32 - 1.0).collect()
    }

    #[test]
    fn momentum_made_on_the_way_has_the_bits_of_momentum_made_before() {
        // longer than what is worked out at once, with a gap, and ends that are no whole blocks
        let (first, second) = (0..3 * TOGETHER + 100, 4 * TOGETHER..5 * TOGETHER + 7);
        let (count, betas) = (second.end, [0.9, 0.5]);
        for codec in KNOWN {
            let (gradients, old) = (numbers(count, 1), numbers(count, 2));
            let mut made = gradients.clone();
            for (span, beta) in [&first, &second].into_iter().zip(betas) {
                made[span.clone()]
                    .iter_mut()
                    .zip(&old[span.clone()])
                    .for_each(|(g, m)| *g = momentum::made(*g, *m, beta));
            }
            let mut momentum = old.clone();
            let mut kept = [numbers(count, 3), numbers(count, 3)];
            let addresses = kept.each_mut().map(|kept| kept.as_mut_ptr());
            let coding = |kept: *mut f32, momentum| Coding {
                spans: Arc::new([first.clone(), second.clone()]),
                residuals: Some(Residuals { shares: kept, results: kept }),
                momentum,
                ..Coding::plain(codec)
            };
            let momenta = Momenta { values: momentum.as_mut_ptr(), betas: Arc::new(betas) };
            let (on_the_way, before) = (coding(addresses[0], Some(momenta)), coding(addresses[1], None));
            // as chunks are: each a whole number of blocks, but for the last
            for range in [0..2 * TOGETHER, 2 * TOGETHER..count] {
                let mut bytes = [(); 2].map(|()| vec![0; before.encoded_len(&range)]);
                // SAFETY: the values are those of the range, and all that is kept is as long as the tensor.
                unsafe {
                    on_the_way.encode(&gradients[range.clone()], &range, Leg::Share, 1, &mut bytes[0]);
                    before.encode(&made[range.clone()], &range, Leg::Share, 1, &mut bytes[1]);
                }
                assert!(bytes[0] == bytes[1], "{} of {range:?}", codec.name());
                let mut result = vec![0.0; range.len()];
                before.decode(&bytes[1], &range, &mut result);
                // SAFETY: as above.
                unsafe { on_the_way.settle(&range, &mut result) };
                before.decode(&bytes[1], &range, &mut made[range.clone()]);
            }
            assert!(kept[0] == kept[1], "{}: residuals", codec.name());
            for span in [&first, &second] {
                assert!(momentum[span.clone()] == made[span.clone()], "{}: the new momentum", codec.name());
            }
            assert!(momentum[first.end..second.start] == old[first.end..second.start], "what lies between");
        }
    }
}
