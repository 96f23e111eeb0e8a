//! Codecs: a slice of numbers as fewer bytes, with a stated error bound.
//!
//! A codec sees whole blocks of f32, wherever the numbers came from. What it encodes is a function of the values and, for
//! the stochastic ones, of the caller's [`Salt`]; so all ranks decode the same bytes to the same numbers, and encoding a
//! tensor in pieces, cut at multiples of a block, gives the bytes of encoding it whole.

mod bfloat16;
mod blocks;
mod factors;
mod float16;
mod int4;
mod lanes;
mod list;
mod low_rank;
mod min_max8;
mod one_bit;
mod orthonormal;
#[cfg(test)]
mod properties;
mod qsgd;
pub(crate) mod salt;
mod scale;
mod threshold;
mod top_k;

use std::fmt;

pub use bfloat16::BFloat16;
pub use blocks::Portable;
pub use float16::Float16;
pub use int4::Int4;
pub use low_rank::LowRank;
pub use min_max8::MinMax8;
pub use one_bit::OneBit;
pub use qsgd::Qsgd;
pub use salt::Salt;
pub use top_k::TopK;

use crate::{Error, Result};

/// Elements whose residuals are worked out at once, and the longest block of any codec.
const ROOM: usize = 2048;

/// An encoding of f32 values.
///
/// A block of values becomes a record of bytes, and records follow each other: the encoding of data is the encodings of
/// its blocks, one after the other. A block with a NaN or an infinity in it becomes a record of the usual size that says
/// so and decodes to NaN from end to end (or, where a block is one element, to that element).
pub trait Codec: Send + Sync + fmt::Debug {
    /// The name by which it is asked for.
    fn name(&self) -> &'static str;
    /// A number that tells it from all others in frames and descriptions.
    fn code(&self) -> u8;
    /// Elements that are encoded together; data is cut at multiples of it only.
    fn block(&self) -> usize;
    /// Bytes that `count` values take; never depends on the values.
    fn encoded_len(&self, count: usize) -> usize;
    /// Encodes all of `values` into `out`, whose length is [`Codec::encoded_len`].
    fn encode(&self, values: &[f32], salt: Salt<'_>, out: &mut [u8]);
    /// Decodes into `out`, whose length is the count that was encoded. Any bytes decode to something.
    fn decode(&self, bytes: &[u8], out: &mut [f32]);
    /// Decodes and adds to `out`.
    fn decode_add(&self, bytes: &[u8], out: &mut [f32]);
    /// The largest absolute error of decoding what was encoded, for finite values.
    fn error_bound(&self, values: &[f32]) -> f32;
    /// Whether the mean error over many encodings is not zero; then residuals make up for it.
    fn is_biased(&self) -> bool;
    /// How many blocks of some encoded data are not finite.
    fn non_finite(&self, bytes: &[u8]) -> usize;

    /// Encodes with error feedback: encodes `values + residual` and leaves in `residual` what that lost. Where the result
    /// is not finite the residual stays as it was, so one bad step does not spoil those after it.
    fn encode_residual(&self, values: &[f32], residual: &mut [f32], salt: Salt<'_>, out: &mut [u8]) {
        // rooms in the first-level cache, so that memory is read once
        let (mut wanted, mut sent, mut numbers) = ([0f32; ROOM], [0f32; ROOM], [0u64; ROOM]);
        let blocks = (ROOM / self.block()).max(1);
        let step = blocks * self.block();
        let pieces = values.chunks(step).zip(residual.chunks_mut(step)).zip(out.chunks_mut(self.encoded_len(step)));
        for (piece, ((values, residual), out)) in pieces.enumerate() {
            let (wanted, sent) = (&mut wanted[..values.len()], &mut sent[..values.len()]);
            for ((wanted, value), residual) in wanted.iter_mut().zip(values).zip(&*residual) {
                *wanted = value + residual;
            }
            numbers.iter_mut().take(blocks).enumerate().for_each(|(at, n)| *n = salt.block(piece * blocks + at));
            self.encode(wanted, Salt { blocks: &numbers[..blocks], ..salt }, out);
            self.decode(out, sent);
            for ((residual, wanted), sent) in residual.iter_mut().zip(wanted).zip(sent) {
                // a block that is not finite decodes to nothing finite
                *residual = if sent.is_finite() { *wanted - *sent } else { *residual };
            }
        }
    }
}

/// All codecs, in the order of their numbers.
pub const KNOWN: [&dyn Codec; 6] = [&Float16, &BFloat16, &MinMax8, &Int4, &Qsgd, &OneBit];

/// The codec with a number.
pub fn by_code(code: u8) -> Option<&'static dyn Codec> {
    KNOWN.into_iter().find(|codec| codec.code() == code)
}

/// The codec with a name.
pub fn by_name(name: &str) -> Result<&'static dyn Codec> {
    KNOWN.into_iter().find(|codec| codec.name() == name).ok_or_else(|| {
        let names: Vec<&str> = KNOWN.iter().map(|codec| codec.name()).collect();
        Error::invalid(format!("unknown codec {name:?}; try: {}", names.join(", ")))
    })
}

/// How many of some numbers of two bytes have all bits of the exponent set: infinities and NaN.
fn not_finite(bytes: &[u8], exponent: u16) -> usize {
    pairs(bytes).filter(|bits| bits & exponent == exponent).count()
}

/// Values of two bytes each, little-endian.
fn pairs(bytes: &[u8]) -> impl Iterator<Item = u16> {
    bytes.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]]))
}

#[cfg(test)]
mod tests {
    use super::*;
    #[test]
    fn odd_values_keep_their_meaning() {
        for codec in [&Float16 as &dyn Codec, &BFloat16] {
            let values = [0.0, -0.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e-45, 3e38];
            let mut bytes = vec![0; codec.encoded_len(values.len())];
            codec.encode(&values, Salt::default(), &mut bytes);
            let mut back = [1.0; 7];
            codec.decode(&bytes, &mut back);
            assert_eq!(back[0].to_bits(), 0);
            assert_eq!(back[1].to_bits(), 1 << 31);
            assert!(back[2].is_nan() && back[3] == f32::INFINITY && back[4] == f32::NEG_INFINITY);
            assert_eq!(back[5], 0.0);
            assert!(back[6] > 1e38, "{}", codec.name());
        }
    }
}
