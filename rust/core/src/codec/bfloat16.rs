//! Brain floating point: f32 with 8 significant bits; the range of f32.

use super::{Codec, Salt, not_finite, pairs};
use crate::reduce::to_brain;

/// Two bytes an element; relative error at most 2⁻⁸.
#[derive(Debug)]
pub struct BFloat16;

fn wide(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

impl Codec for BFloat16 {
    fn name(&self) -> &'static str {
        "bfloat16"
    }

    fn code(&self) -> u8 {
        2
    }

    fn block(&self) -> usize {
        1
    }

    fn encoded_len(&self, count: usize) -> usize {
        count * 2
    }

    fn encode(&self, values: &[f32], _: Salt<'_>, out: &mut [u8]) {
        for (out, value) in out.chunks_exact_mut(2).zip(values) {
            out.copy_from_slice(&to_brain(*value).to_le_bytes());
        }
    }

    fn decode(&self, bytes: &[u8], out: &mut [f32]) {
        out.iter_mut().zip(pairs(bytes)).for_each(|(out, bits)| *out = wide(bits));
    }

    fn decode_add(&self, bytes: &[u8], out: &mut [f32]) {
        out.iter_mut().zip(pairs(bytes)).for_each(|(out, bits)| *out += wide(bits));
    }

    fn error_bound(&self, values: &[f32]) -> f32 {
        values.iter().fold(0f32, |bound, v| bound.max(v.abs() / 256.0)).max(f32::MIN_POSITIVE)
    }

    fn is_biased(&self) -> bool {
        true
    }

    fn non_finite(&self, bytes: &[u8]) -> usize {
        not_finite(bytes, 0x7f80)
    }
}
