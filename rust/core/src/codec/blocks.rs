//! What block-wise codecs have in common: the loop over blocks, the short block at the end, residuals, and scales.
//!
//! A codec says what happens to one whole block ([`Blockwise`]). The loops are compiled twice on x86-64, for the baseline
//! and for AVX2, and chosen at run time. Both give the same bits: operations and their order are written down, nothing is
//! fused, and sums are trees of a stated shape. A short block is filled up to a whole one, so there is one arithmetic for
//! both.
//!
//! A record begins with its scale, f32 and little-endian. NaN there marks a block that is not finite.

use std::fmt;

#[cfg(target_arch = "x86_64")]
use super::lanes::Wide;
use super::lanes::{LANES, Lanes, Plain};
use super::salt::Salt;
use super::scale::scale;
use super::{Codec, ROOM};

/// Bytes of the longest record.
const LONGEST: usize = 1024;

/// A codec by what it does to one block. Values and records are those of a whole block.
pub trait Blockwise: Send + Sync + fmt::Debug {
    /// As [`Codec::name`].
    const NAME: &'static str;
    /// As [`Codec::code`].
    const CODE: u8;
    /// Elements of a block.
    const SIZE: usize;
    /// Bytes of a record before its codes.
    const HEAD: usize;
    /// As [`Codec::is_biased`].
    const BIASED: bool;
    /// Whether the wide instructions of the processor may be used.
    const WIDE: bool = true;

    /// Bytes of the codes of `count` elements.
    fn codes(count: usize) -> usize;
    /// What fills up a short block that begins with `first`; it must not change how the others are encoded.
    fn filler(first: f32) -> f32;
    /// Encodes a block of which the first `count` elements are real.
    fn encode_block<V: Lanes>(values: &[[f32; LANES]], count: usize, key: u64, record: &mut [u8]);
    /// Decodes a block.
    fn decode_block<V: Lanes>(record: &[u8], sink: &mut impl Sink<V>);
    /// The largest absolute error in a block of finite values.
    fn bound(values: &[f32]) -> f32;
}

/// Where decoded numbers go.
pub trait Sink<V> {
    /// Takes the numbers from eight times `at` on.
    fn take(&mut self, at: usize, values: V);
}

/// Overwrites.
struct Set<'a>(&'a mut [[f32; LANES]]);

impl<V: Lanes> Sink<V> for Set<'_> {
    #[inline(always)]
    fn take(&mut self, at: usize, values: V) {
        if let Some(out) = self.0.get_mut(at) {
            values.store(out);
        }
    }
}

/// Adds.
struct Add<'a>(&'a mut [[f32; LANES]]);

impl<V: Lanes> Sink<V> for Add<'_> {
    #[inline(always)]
    fn take(&mut self, at: usize, values: V) {
        if let Some(out) = self.0.get_mut(at) {
            V::load(out).add(values).store(out);
        }
    }
}

/// Keeps what is left of the first numbers, in the second.
struct Rest<'a>(&'a [[f32; LANES]], &'a mut [[f32; LANES]]);

impl<V: Lanes> Sink<V> for Rest<'_> {
    #[inline(always)]
    fn take(&mut self, at: usize, values: V) {
        if let (Some(wanted), Some(out)) = (self.0.get(at), self.1.get_mut(at)) {
            V::load(wanted).sub(values).store(out);
        }
    }
}

impl<B: Blockwise> Codec for B {
    fn name(&self) -> &'static str {
        B::NAME
    }

    fn code(&self) -> u8 {
        B::CODE
    }

    fn block(&self) -> usize {
        B::SIZE
    }

    fn encoded_len(&self, count: usize) -> usize {
        let (whole, rest) = (count / B::SIZE, count % B::SIZE);
        whole * record::<B>() + short::<B>(rest)
    }

    fn encode(&self, values: &[f32], salt: Salt<'_>, out: &mut [u8]) {
        #[cfg(target_arch = "x86_64")]
        if is_wide::<B>() {
            // SAFETY: the processor has AVX2.
            return unsafe { encode_wide::<B>(values, salt, out) };
        }
        encode::<B, Plain>(values, salt, out);
    }

    fn decode(&self, bytes: &[u8], out: &mut [f32]) {
        #[cfg(target_arch = "x86_64")]
        if is_wide::<B>() {
            // SAFETY: the processor has AVX2.
            return unsafe { decode_wide::<B, false>(bytes, out) };
        }
        decode::<B, Plain, false>(bytes, out);
    }

    fn decode_add(&self, bytes: &[u8], out: &mut [f32]) {
        #[cfg(target_arch = "x86_64")]
        if is_wide::<B>() {
            // SAFETY: the processor has AVX2.
            return unsafe { decode_wide::<B, true>(bytes, out) };
        }
        decode::<B, Plain, true>(bytes, out);
    }

    fn error_bound(&self, values: &[f32]) -> f32 {
        values.chunks(B::SIZE).map(B::bound).fold(0.0, f32::max)
    }

    fn is_biased(&self) -> bool {
        B::BIASED
    }

    fn non_finite(&self, bytes: &[u8]) -> usize {
        bytes.chunks(record::<B>()).filter(|record| !scale(record).is_finite()).count()
    }

    fn encode_residual(&self, values: &[f32], residual: &mut [f32], salt: Salt<'_>, out: &mut [u8]) {
        #[cfg(target_arch = "x86_64")]
        if is_wide::<B>() {
            // SAFETY: the processor has AVX2.
            return unsafe { encode_residual_wide::<B>(values, residual, salt, out) };
        }
        encode_residual::<B, Plain>(values, residual, salt, out);
    }
}

/// A block-wise codec without the wide instructions of the processor: for tests, since the bits must be the same.
#[derive(Debug)]
pub struct Portable<B>(pub B);

impl<B: Blockwise> Blockwise for Portable<B> {
    const NAME: &'static str = B::NAME;
    const CODE: u8 = B::CODE;
    const SIZE: usize = B::SIZE;
    const HEAD: usize = B::HEAD;
    const BIASED: bool = B::BIASED;
    const WIDE: bool = false;

    fn codes(count: usize) -> usize {
        B::codes(count)
    }

    fn filler(first: f32) -> f32 {
        B::filler(first)
    }

    #[inline(always)]
    fn encode_block<V: Lanes>(values: &[[f32; LANES]], count: usize, key: u64, record: &mut [u8]) {
        B::encode_block::<V>(values, count, key, record);
    }

    #[inline(always)]
    fn decode_block<V: Lanes>(record: &[u8], sink: &mut impl Sink<V>) {
        B::decode_block::<V>(record, sink);
    }

    fn bound(values: &[f32]) -> f32 {
        B::bound(values)
    }
}

#[cfg(target_arch = "x86_64")]
fn is_wide<B: Blockwise>() -> bool {
    B::WIDE && std::is_x86_feature_detected!("avx2")
}

/// Bytes of a whole block.
#[inline(always)]
fn record<B: Blockwise>() -> usize {
    B::HEAD + B::codes(B::SIZE)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn encode_wide<B: Blockwise>(values: &[f32], salt: Salt<'_>, out: &mut [u8]) {
    encode::<B, Wide>(values, salt, out);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn decode_wide<B: Blockwise, const ADD: bool>(bytes: &[u8], out: &mut [f32]) {
    decode::<B, Wide, ADD>(bytes, out);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn encode_residual_wide<B: Blockwise>(values: &[f32], residual: &mut [f32], salt: Salt<'_>, out: &mut [u8]) {
    encode_residual::<B, Wide>(values, residual, salt, out);
}

/// The bytes of the whole blocks of `count` elements, and how many elements these have. Counted in elements, since a block
/// that is short of one may have a record as long as a whole one's.
#[inline(always)]
fn whole<B: Blockwise>(count: usize, bytes: usize) -> (usize, usize) {
    let blocks = count / B::SIZE;
    debug_assert_eq!(bytes, blocks * record::<B>() + short::<B>(count % B::SIZE));
    ((blocks * record::<B>()).min(bytes), blocks * B::SIZE)
}

/// Bytes of the short block at the end.
fn short<B: Blockwise>(rest: usize) -> usize {
    if rest > 0 { B::HEAD + B::codes(rest) } else { 0 }
}

#[inline(always)]
fn encode<B: Blockwise, V: Lanes>(values: &[f32], salt: Salt<'_>, out: &mut [u8]) {
    let (bytes, count) = whole::<B>(values.len(), out.len());
    let ((values, rest), (out, last)) = (values.split_at(count), out.split_at_mut(bytes));
    let blocks = values.chunks_exact(B::SIZE).zip(out.chunks_exact_mut(record::<B>()));
    for (index, (values, record)) in blocks.enumerate() {
        B::encode_block::<V>(values.as_chunks().0, B::SIZE, salt.key(index), record);
    }
    encode_short::<B, V>(rest, salt.key(count / B::SIZE), last);
}

/// Encodes the short block at the end, if there is one.
#[inline(always)]
fn encode_short<B: Blockwise, V: Lanes>(values: &[f32], key: u64, out: &mut [u8]) {
    let Some(first) = values.first() else { return };
    let (mut room, mut whole) = ([0f32; ROOM], [0u8; LONGEST]);
    room[..values.len()].copy_from_slice(values);
    room[values.len()..].fill(B::filler(*first));
    B::encode_block::<V>(room[..B::SIZE].as_chunks().0, values.len(), key, &mut whole[..record::<B>()]);
    out.copy_from_slice(&whole[..out.len()]);
}

#[inline(always)]
fn decode<B: Blockwise, V: Lanes, const ADD: bool>(bytes: &[u8], out: &mut [f32]) {
    let (length, count) = whole::<B>(out.len(), bytes.len());
    let ((bytes, rest), (out, last)) = (bytes.split_at(length), out.split_at_mut(count));
    for (record, out) in bytes.chunks_exact(record::<B>()).zip(out.chunks_exact_mut(B::SIZE)) {
        decode_one::<B, V, ADD>(record, out);
    }
    if !last.is_empty() {
        let (mut room, mut whole) = ([0f32; ROOM], [0u8; LONGEST]);
        whole[..rest.len()].copy_from_slice(rest);
        room[..last.len()].copy_from_slice(last);
        decode_one::<B, V, ADD>(&whole[..record::<B>()], &mut room[..B::SIZE]);
        last.copy_from_slice(&room[..last.len()]);
    }
}

#[inline(always)]
fn decode_one<B: Blockwise, V: Lanes, const ADD: bool>(record: &[u8], out: &mut [f32]) {
    let out = out.as_chunks_mut().0;
    if ADD { B::decode_block::<V>(record, &mut Add(out)) } else { B::decode_block::<V>(record, &mut Set(out)) }
}

#[inline(always)]
fn encode_residual<B: Blockwise, V: Lanes>(values: &[f32], residual: &mut [f32], salt: Salt<'_>, out: &mut [u8]) {
    let (bytes, count) = whole::<B>(values.len(), out.len());
    let ((values, rest), (out, last)) = (values.split_at(count), out.split_at_mut(bytes));
    let (residual, kept) = residual.split_at_mut(count);
    let mut room = [[0f32; LANES]; ROOM / LANES];
    let wanted = &mut room[..B::SIZE / LANES];
    let blocks = values.chunks_exact(B::SIZE).zip(residual.chunks_exact_mut(B::SIZE));
    for (index, ((values, residual), record)) in blocks.zip(out.chunks_exact_mut(record::<B>())).enumerate() {
        let (values, residual) = (values.as_chunks().0, residual.as_chunks_mut().0);
        residual_of::<B, V>(values, residual, wanted, (B::SIZE, salt.key(index)), record);
    }
    if let Some(first) = rest.first() {
        let (mut values, mut residual, mut whole) = ([0f32; ROOM], [0f32; ROOM], [0u8; LONGEST]);
        values[..rest.len()].copy_from_slice(rest);
        residual[..rest.len()].copy_from_slice(kept);
        values[rest.len()..].fill(B::filler(*first + residual[0]));
        let (values, inside) = (values[..B::SIZE].as_chunks().0, residual[..B::SIZE].as_chunks_mut().0);
        let salted = (rest.len(), salt.key(count / B::SIZE));
        residual_of::<B, V>(values, inside, wanted, salted, &mut whole[..record::<B>()]);
        kept.copy_from_slice(&residual[..rest.len()]);
        last.copy_from_slice(&whole[..last.len()]);
    }
}

/// One block of [`Codec::encode_residual`]. What is wanted stays in the first-level cache, so memory is read once.
#[inline(always)]
fn residual_of<B: Blockwise, V: Lanes>(
    values: &[[f32; LANES]],
    residual: &mut [[f32; LANES]],
    wanted: &mut [[f32; LANES]],
    (count, key): (usize, u64),
    record: &mut [u8],
) {
    for ((wanted, values), residual) in wanted.iter_mut().zip(values).zip(&*residual) {
        V::load(values).add(V::load(residual)).store(wanted);
    }
    B::encode_block::<V>(wanted, count, key, record);
    if scale(record).is_finite() {
        B::decode_block::<V>(record, &mut Rest(wanted, residual));
    }
}
