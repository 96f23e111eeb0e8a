//! Eight numbers at a time: as an array, and as a register of AVX2.
//!
//! Block-wise codecs are written once against [`Lanes`], in operations that both kinds do exactly alike. So the bits do not
//! depend on the processor, and a GPU can repeat them: nothing is fused, and what is rounded is rounded to the nearest, ties
//! to even.

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

#[cfg(target_arch = "x86_64")]
pub(super) use wide::Wide;

#[cfg(target_arch = "x86_64")]
mod wide {
    use std::arch::x86_64::*;

    use super::{LANES, Lanes};

    /// A register. There is one only where the processor has AVX2: who names this type (`widest`, `blocks.rs`) asks before.
    #[derive(Clone, Copy)]
    pub(crate) struct Wide(__m256);

    /// What an operation of AVX2 gives.
    macro_rules! avx2 {
        ($($body:tt)*) => {
            // SAFETY: a `Wide` is only there if AVX2 is; memory is read and written through arrays of the right length.
            unsafe { $($body)* }
        };
    }

    impl Lanes for Wide {
        #[inline(always)]
        fn splat(value: f32) -> Self {
            Wide(avx2!(_mm256_set1_ps(value)))
        }

        #[inline(always)]
        fn load(values: &[f32; LANES]) -> Self {
            Wide(avx2!(_mm256_loadu_ps(values.as_ptr())))
        }

        #[inline(always)]
        fn store(self, out: &mut [f32; LANES]) {
            avx2!(_mm256_storeu_ps(out.as_mut_ptr(), self.0));
        }

        #[inline(always)]
        fn add(self, other: Self) -> Self {
            Wide(avx2!(_mm256_add_ps(self.0, other.0)))
        }

        #[inline(always)]
        fn sub(self, other: Self) -> Self {
            Wide(avx2!(_mm256_sub_ps(self.0, other.0)))
        }

        #[inline(always)]
        fn mul(self, other: Self) -> Self {
            Wide(avx2!(_mm256_mul_ps(self.0, other.0)))
        }

        #[inline(always)]
        fn abs(self) -> Self {
            Wide(avx2!(_mm256_andnot_ps(_mm256_set1_ps(-0.0), self.0)))
        }

        #[inline(always)]
        fn min(self, other: Self) -> Self {
            Wide(avx2!(_mm256_min_ps(self.0, other.0)))
        }

        #[inline(always)]
        fn max(self, other: Self) -> Self {
            Wide(avx2!(_mm256_max_ps(self.0, other.0)))
        }

        #[inline(always)]
        fn are_finite(self) -> bool {
            let infinity = Wide::splat(f32::INFINITY);
            avx2!(_mm256_movemask_ps(_mm256_cmp_ps::<_CMP_LT_OQ>(self.abs().0, infinity.0))) == 0xff
        }

        #[inline(always)]
        fn floor(self) -> Self {
            Wide(avx2!(_mm256_floor_ps(self.0)))
        }

        #[inline(always)]
        fn below(self, other: Self) -> Self {
            Wide(avx2!(_mm256_and_ps(_mm256_cmp_ps::<_CMP_LT_OQ>(self.0, other.0), _mm256_set1_ps(1.0))))
        }

        #[inline(always)]
        fn signed_as(self, other: Self) -> Self {
            Wide(avx2!(_mm256_or_ps(self.0, _mm256_and_ps(other.0, _mm256_set1_ps(-0.0)))))
        }

        #[inline(always)]
        fn signs(self) -> u8 {
            avx2!(_mm256_movemask_ps(self.0)) as u8
        }

        #[inline(always)]
        fn flip(self, bits: u32, first: u32) -> Self {
            Wide(avx2!({
                // each lane shifts its own bit up to the sign
                let top = _mm256_sub_epi32(
                    _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24),
                    _mm256_set1_epi32(first as i32),
                );
                let shifted = _mm256_castsi256_ps(_mm256_sllv_epi32(_mm256_set1_epi32(bits as i32), top));
                _mm256_xor_ps(self.0, _mm256_and_ps(shifted, _mm256_set1_ps(-0.0)))
            }))
        }

        #[inline(always)]
        fn to_bytes(values: [Self; 4]) -> [u8; 4 * LANES] {
            let mut bytes = [0; 4 * LANES];
            avx2!({
                let [a, b, c, d] = values;
                let (a, b) = (_mm256_cvtps_epi32(a.0), _mm256_cvtps_epi32(b.0));
                let (c, d) = (_mm256_cvtps_epi32(c.0), _mm256_cvtps_epi32(d.0));
                let packed = _mm256_packus_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
                // packing works within halves of a register, so groups of four come out of order
                let ordered = _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
                _mm256_storeu_si256(bytes.as_mut_ptr().cast(), ordered);
            });
            bytes
        }

        #[inline(always)]
        fn from_bytes(bytes: &[u8; LANES]) -> Self {
            Wide(avx2!(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(bytes.as_ptr().cast())))))
        }

        #[inline(always)]
        fn from_integers(integers: &[i32; LANES]) -> Self {
            Wide(avx2!(_mm256_cvtepi32_ps(_mm256_loadu_si256(integers.as_ptr().cast()))))
        }

        #[inline(always)]
        fn join(codes: [u8; 4 * LANES]) -> [u8; 2 * LANES] {
            let mut bytes = [0; 2 * LANES];
            avx2!({
                let codes = _mm256_loadu_si256(codes.as_ptr().cast());
                // the first of a pair and sixteen times the second
                let pairs = _mm256_maddubs_epi16(codes, _mm256_set1_epi16(0x1001));
                let packed = _mm256_packus_epi16(pairs, pairs);
                let joined = _mm256_permute4x64_epi64::<0b1000>(packed);
                _mm_storeu_si128(bytes.as_mut_ptr().cast(), _mm256_castsi256_si128(joined));
            });
            bytes
        }

        #[inline(always)]
        fn split(bytes: [u8; LANES / 2]) -> Self {
            Wide(avx2!({
                let all = _mm256_set1_epi32(i32::from_le_bytes(bytes));
                let shifted = _mm256_srlv_epi32(all, _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
                _mm256_cvtepi32_ps(_mm256_and_si256(shifted, _mm256_set1_epi32(15)))
            }))
        }
    }
}
