//! [`Lanes`] as a register of AVX2.

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
            let top =
                _mm256_sub_epi32(_mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24), _mm256_set1_epi32(first as i32));
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
