//! One bit an element, its sign, and one scale for a block: the mean of the absolute values.
//!
//! Of all ±s the mean is nearest in the sense of least squares: Σ(|p| − s)² is least there. So it leaves the least residual,
//! without which this codec makes no sense.
//!
//! A record of a block of 2048:
//!
//! | bytes | is |
//! |---|---|
//! | 0..4 | f32 scale; NaN: not finite |
//! | 4.. | the sign bits of eight elements in a byte, the first in its lowest bit: the element is scale, or −scale where it is set |
//!
//! The sum is a tree that a group of 32 threads can repeat: lane l adds |p| of the elements l, l + 32, l + 64, … in this
//! order, then the upper half of the lanes is added to the lower one until one is left.

use super::blocks::{Blockwise, Sink};
use super::lanes::{LANES, Lanes};
use super::scale::{fold, mark, scale, write};

/// A bit an element and four bytes for each 2048; error at most the largest absolute value of the block.
#[derive(Debug)]
pub struct OneBit;

const SIZE: usize = 2048;
const HEAD: usize = 4;
/// Registers of the 32 lanes of the sum.
const WIDTH: usize = 4;

impl Blockwise for OneBit {
    const NAME: &'static str = "onebit";
    const CODE: u8 = 6;
    const SIZE: usize = SIZE;
    const HEAD: usize = HEAD;
    const BIASED: bool = true;

    #[inline(always)]
    fn codes(count: usize) -> usize {
        count.div_ceil(8)
    }

    #[inline(always)]
    fn filler(_: f32) -> f32 {
        0.0
    }

    #[inline(always)]
    fn encode_block<V: Lanes>(values: &[[f32; LANES]], count: usize, _: u64, record: &mut [u8]) {
        let mut sums = [V::splat(0.0); WIDTH];
        let signs = record[HEAD..].as_chunks_mut::<WIDTH>().0;
        for (values, signs) in values.as_chunks::<WIDTH>().0.iter().zip(signs) {
            for ((values, sum), signs) in values.iter().zip(&mut sums).zip(signs) {
                let values = V::load(values);
                *sum = sum.add(values.abs());
                *signs = values.signs();
            }
        }
        let sum = total(sums);
        let scale = if sum.is_finite() { sum / count as f32 } else { huge_mean::<V>(values, count) };
        if scale.is_nan() {
            return mark(record);
        }
        write(record, 0, scale);
    }

    #[inline(always)]
    fn decode_block<V: Lanes>(record: &[u8], sink: &mut impl Sink<V>) {
        let scale = V::splat(scale(record));
        for (at, signs) in record[HEAD..].as_chunks().0.iter().enumerate() {
            let signs = u32::from_le_bytes(*signs);
            for part in 0..WIDTH {
                sink.take(at * WIDTH + part, scale.flip(signs, (part * LANES) as u32));
            }
        }
    }

    fn bound(values: &[f32]) -> f32 {
        // the mean of equal numbers may be rounded up
        values.iter().fold(0f32, |most, value| most.max(value.abs())) * 1.00001
    }
}

/// Adds the upper half of 32 lanes to the lower one until one is left: the shape that a group of 32 threads has.
#[inline(always)]
fn total<V: Lanes>(sums: [V; WIDTH]) -> f32 {
    let [a, b, c, d] = sums;
    fold(a.add(c).add(b.add(d)), |a, b| a + b)
}

/// The mean of absolute values whose sum overflows, from the same tree over smaller numbers; NaN if one is not finite.
#[cold]
fn huge_mean<V: Lanes>(values: &[[f32; LANES]], count: usize) -> f32 {
    let (small, zero) = (V::splat(1.0 / SIZE as f32), V::splat(0.0));
    let mut sums = [zero; WIDTH];
    for values in values.as_chunks::<WIDTH>().0 {
        for (sum, values) in sums.iter_mut().zip(values) {
            let values = V::load(values);
            // the second product is NaN for an infinity
            *sum = sum.add(values.abs().mul(small).add(values.mul(zero)));
        }
    }
    // rounding may carry a mean of the largest numbers beyond them
    let mean = total(sums) / count as f32 * SIZE as f32;
    if mean.is_nan() { mean } else { mean.min(f32::MAX) }
}
