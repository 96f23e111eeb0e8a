//! Eight numbers at a time: as an array, and as a register of AVX2.
//!
//! Block-wise codecs are written once against [`Lanes`], in operations that both kinds do exactly alike. So the bits do not
//! depend on the processor, and a GPU can repeat them: nothing is fused, and what is rounded is rounded to the nearest, ties
//! to even.

#[cfg(target_arch = "x86_64")]
mod wide;

#[cfg(target_arch = "x86_64")]
pub(super) use wide::Wide;

/// Numbers of a register.
pub(super) const LANES: usize = 8;

/// Eight numbers, and what codecs do with them.
pub trait Lanes: Copy {
    /// The same number eight times.
    fn splat(value: f32) -> Self;
    /// Eight numbers from memory.
    fn load(values: &[f32; LANES]) -> Self;
    /// The numbers.
    fn store(self, out: &mut [f32; LANES]);
    /// Sums.
    fn add(self, other: Self) -> Self;
    /// Differences.
    fn sub(self, other: Self) -> Self;
    /// Products.
    fn mul(self, other: Self) -> Self;
    /// Absolute values.
    fn abs(self) -> Self;
    /// The smaller ones; `other` where one is NaN.
    fn min(self, other: Self) -> Self;
    /// The larger ones; `other` where one is NaN.
    fn max(self, other: Self) -> Self;
    /// Whether all are finite.
    fn are_finite(self) -> bool;
    /// The integers below numbers from 0 to 2²².
    fn floor(self) -> Self;
    /// 1 where a number is less than the other, else 0.
    fn below(self, other: Self) -> Self;
    /// The numbers, none of which is negative, with the signs of others.
    fn signed_as(self, other: Self) -> Self;
    /// The sign bits, the first number's lowest.
    fn signs(self) -> u8;
    /// The numbers with their signs flipped where the bits from `first` on are set, in the order of [`Lanes::signs`].
    fn flip(self, bits: u32, first: u32) -> Self;
    /// 32 numbers of less than 2¹⁵ to the nearest byte, ties to even.
    fn to_bytes(values: [Self; 4]) -> [u8; 4 * LANES];
    /// Bytes as numbers.
    fn from_bytes(bytes: &[u8; LANES]) -> Self;
    /// Integers as numbers, exact up to 2²⁴.
    fn from_integers(integers: &[i32; LANES]) -> Self;
    /// 32 codes of less than 16, two in a byte, the first in its low half.
    fn join(codes: [u8; 4 * LANES]) -> [u8; 2 * LANES];
    /// The codes in four such bytes as numbers.
    fn split(bytes: [u8; LANES / 2]) -> Self;
}

/// A loop that is written for any registers.
pub(super) trait Loop {
    /// Runs it, inlined.
    fn run<V: Lanes>(self);
}

/// Runs a loop on the widest registers that there are.
pub(super) fn widest(work: impl Loop) {
    #[cfg(target_arch = "x86_64")]
    if std::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2.
        return unsafe { wide_loop(work) };
    }
    work.run::<Plain>();
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn wide_loop(work: impl Loop) {
    work.run::<Wide>();
}

/// Asks for the memory so many numbers further on: the processor's own guesses end with a page, and rows of a matrix are
/// about as long.
#[inline(always)]
pub(super) fn prefetch(values: &[f32], ahead: usize) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: it is a hint, and no access: the address need not be one.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(values.as_ptr().wrapping_add(ahead).cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (values, ahead);
}

/// Adding it leaves an integer in the low bits of a number of less than 2²², rounded to the nearest, ties to even. Sums are
/// what every processor has, where conversions differ: 1.5 · 2²³.
pub(super) const MAGIC: f32 = 12_582_912.0;

/// An array, for any processor.
#[derive(Clone, Copy)]
pub(super) struct Plain([f32; LANES]);

impl Plain {
    #[inline(always)]
    fn map(self, f: impl Fn(f32) -> f32) -> Self {
        let mut out = self.0;
        for value in &mut out {
            *value = f(*value);
        }
        Plain(out)
    }

    #[inline(always)]
    fn zip(self, other: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        let mut out = self.0;
        for (value, other) in out.iter_mut().zip(other.0) {
            *value = f(*value, other);
        }
        Plain(out)
    }
}

impl Lanes for Plain {
    #[inline(always)]
    fn splat(value: f32) -> Self {
        Plain([value; LANES])
    }

    #[inline(always)]
    fn load(values: &[f32; LANES]) -> Self {
        Plain(*values)
    }

    #[inline(always)]
    fn store(self, out: &mut [f32; LANES]) {
        *out = self.0;
    }

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        self.zip(other, |a, b| a + b)
    }

    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        self.zip(other, |a, b| a - b)
    }

    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        self.zip(other, |a, b| a * b)
    }

    #[inline(always)]
    fn abs(self) -> Self {
        self.map(f32::abs)
    }

    #[inline(always)]
    fn min(self, other: Self) -> Self {
        self.zip(other, |a, b| if a < b { a } else { b })
    }

    #[inline(always)]
    fn max(self, other: Self) -> Self {
        self.zip(other, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    fn are_finite(self) -> bool {
        self.0.iter().fold(true, |all, value| all & value.is_finite())
    }

    #[inline(always)]
    fn floor(self) -> Self {
        self.map(|value| {
            let nearest = (value + MAGIC) - MAGIC;
            if nearest > value { nearest - 1.0 } else { nearest }
        })
    }

    #[inline(always)]
    fn below(self, other: Self) -> Self {
        self.zip(other, |a, b| if a < b { 1.0 } else { 0.0 })
    }

    #[inline(always)]
    fn signed_as(self, other: Self) -> Self {
        self.zip(other, f32::copysign)
    }

    #[inline(always)]
    fn signs(self) -> u8 {
        let mut bytes = [0; LANES];
        for (byte, value) in bytes.iter_mut().zip(self.0) {
            *byte = (value.to_bits() >> 31) as u8;
        }
        // this factor puts the lowest bit of each of eight bytes into the highest byte, side by side
        (u64::from_le_bytes(bytes).wrapping_mul(0x0102_0408_1020_4080) >> 56) as u8
    }

    #[inline(always)]
    fn flip(self, bits: u32, first: u32) -> Self {
        let (mut out, bits) = (self.0, bits >> first);
        for (at, value) in out.iter_mut().enumerate() {
            *value = f32::from_bits(value.to_bits() ^ (bits << (31 - at) & 1 << 31));
        }
        Plain(out)
    }

    #[inline(always)]
    fn to_bytes(values: [Self; 4]) -> [u8; 4 * LANES] {
        let mut bytes = [0; 4 * LANES];
        for (bytes, values) in bytes.as_chunks_mut::<LANES>().0.iter_mut().zip(values) {
            let values = values.max(Plain::splat(0.0)).min(Plain::splat(255.0));
            for (byte, value) in bytes.iter_mut().zip(values.0) {
                *byte = (value + MAGIC).to_bits() as u8;
            }
        }
        bytes
    }

    #[inline(always)]
    fn from_bytes(bytes: &[u8; LANES]) -> Self {
        let mut out = [0f32; LANES];
        for (value, byte) in out.iter_mut().zip(bytes) {
            *value = f32::from(*byte);
        }
        Plain(out)
    }

    #[inline(always)]
    fn from_integers(integers: &[i32; LANES]) -> Self {
        let mut out = [0f32; LANES];
        for (value, integer) in out.iter_mut().zip(integers) {
            *value = *integer as f32;
        }
        Plain(out)
    }

    #[inline(always)]
    fn join(codes: [u8; 4 * LANES]) -> [u8; 2 * LANES] {
        let mut bytes = [0; 2 * LANES];
        for (byte, pair) in bytes.iter_mut().zip(codes.as_chunks::<2>().0) {
            let pair = u16::from_le_bytes(*pair);
            *byte = (pair | pair >> 4) as u8;
        }
        bytes
    }

    #[inline(always)]
    fn split(bytes: [u8; LANES / 2]) -> Self {
        let (bits, mut out) = (u32::from_le_bytes(bytes), [0f32; LANES]);
        for (at, value) in out.iter_mut().enumerate() {
            *value = (bits >> (4 * at) & 15) as i32 as f32;
        }
        Plain(out)
    }
}
