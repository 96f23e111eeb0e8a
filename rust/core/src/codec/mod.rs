//! Codecs: a slice of numbers as fewer bytes, with a stated error bound.
//!
//! A codec sees whole blocks of f32, wherever the numbers came from. What it encodes is a function of the values alone
//! (and, for the stochastic ones to come, of counters that the caller gives), so all ranks decode the same bytes to the
//! same numbers.

mod bfloat16;
mod float16;

use std::fmt;

pub use bfloat16::BFloat16;
pub use float16::Float16;

use crate::{Error, Result};

/// An encoding of f32 values.
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
    fn encode(&self, values: &[f32], out: &mut [u8]);
    /// Decodes into `out`.
    fn decode(&self, bytes: &[u8], out: &mut [f32]);
    /// Decodes and adds to `out`.
    fn decode_add(&self, bytes: &[u8], out: &mut [f32]);
    /// The largest absolute error of decoding what was encoded, for finite values.
    fn error_bound(&self, values: &[f32]) -> f32;
}

const KNOWN: [&dyn Codec; 2] = [&Float16, &BFloat16];

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

/// Values of two bytes each, little-endian.
fn pairs(bytes: &[u8]) -> impl Iterator<Item = u16> {
    bytes.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn round_trip_within_the_bound(values in proptest::collection::vec(-1e4f32..1e4, 0..300)) {
            for codec in [&Float16 as &dyn Codec, &BFloat16] {
                let mut bytes = vec![0; codec.encoded_len(values.len())];
                codec.encode(&values, &mut bytes);
                let mut back = vec![0.0; values.len()];
                codec.decode(&bytes, &mut back);
                let bound = codec.error_bound(&values);
                for (value, back) in values.iter().zip(&back) {
                    prop_assert!((value - back).abs() <= bound, "{} {value} {back}", codec.name());
                }
                let mut sum = values.clone();
                codec.decode_add(&bytes, &mut sum);
                for ((sum, value), back) in sum.iter().zip(&values).zip(&back) {
                    prop_assert_eq!(*sum, value + back);
                }
            }
        }
    }

    #[test]
    fn odd_values_keep_their_meaning() {
        for codec in [&Float16 as &dyn Codec, &BFloat16] {
            let values = [0.0, -0.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e-45, 3e38];
            let mut bytes = vec![0; codec.encoded_len(values.len())];
            codec.encode(&values, &mut bytes);
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
