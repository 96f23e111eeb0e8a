//! Stochastic rounding to 127 levels of either sign, scaled by the largest absolute value of a block: unbiased, so the
//! errors of many ranks and steps cancel and no residual is needed.
//!
//! A record of a block of 512:
//!
//! | bytes | is |
//! |---|---|
//! | 0..4 | f32 step of the grid; NaN: not finite |
//! | 4.. | a code for each element: the element is (code − 128) · step, with codes from 1 to 255 |
//!
//! An element of magnitude r steps becomes ⌊r⌋ or ⌊r⌋ + 1 steps, the latter if the fraction of r is larger than a random
//! number of 24 bits. The 64 bits that counter i draws serve two elements: the upper 24 of the low half i, the upper 24 of
//! the high half i + 256.

use super::blocks::{Blockwise, Sink};
use super::lanes::{LANES, Lanes};
use super::salt::draw;
use super::scale::{inverse, largest, mark, scale, symmetric_step, write};

/// One byte an element and four for each 512; error less than 1/127 of the largest absolute value of the block, and none
/// in the mean.
#[derive(Debug)]
pub struct Qsgd;

const SIZE: usize = 512;
const HEAD: usize = 4;
const HALF: usize = SIZE / 2;
const LEVELS: f64 = 127.0;
/// The code of zero.
const ZERO: f32 = 128.0;
/// What makes 24 bits a number from 0 to 1.
const UNIT: f32 = 1.0 / 16_777_216.0;

impl Blockwise for Qsgd {
    const NAME: &'static str = "qsgd";
    const CODE: u8 = 5;
    const SIZE: usize = SIZE;
    const HEAD: usize = HEAD;
    const BIASED: bool = false;

    #[inline(always)]
    fn codes(count: usize) -> usize {
        count
    }

    #[inline(always)]
    fn filler(_: f32) -> f32 {
        0.0
    }

    #[inline(always)]
    fn encode_block<V: Lanes>(values: &[[f32; LANES]], _: usize, key: u64, record: &mut [u8]) {
        let largest = largest::<V>(values);
        if largest.is_nan() {
            return mark(record);
        }
        let step = symmetric_step(largest, LEVELS);
        write(record, 0, step);
        let mut random = [[[0i32; LANES]; HALF / LANES]; 2];
        let [low, high] = &mut random;
        for (counter, (low, high)) in low.as_flattened_mut().iter_mut().zip(high.as_flattened_mut()).enumerate() {
            let bits = draw(key, counter as u64);
            (*low, *high) = ((bits as u32 >> 8) as i32, (bits >> 40) as i32);
        }
        let inverse = V::splat(inverse(step));
        let groups = values.as_chunks::<4>().0.iter().zip(random.as_flattened().as_chunks::<4>().0);
        for (codes, (values, random)) in record[HEAD..].as_chunks_mut().0.iter_mut().zip(groups) {
            *codes = V::to_bytes([
                dither(V::load(&values[0]), inverse, V::from_integers(&random[0])),
                dither(V::load(&values[1]), inverse, V::from_integers(&random[1])),
                dither(V::load(&values[2]), inverse, V::from_integers(&random[2])),
                dither(V::load(&values[3]), inverse, V::from_integers(&random[3])),
            ]);
        }
    }

    #[inline(always)]
    fn decode_block<V: Lanes>(record: &[u8], sink: &mut impl Sink<V>) {
        let (step, zero) = (V::splat(scale(record)), V::splat(ZERO));
        for (at, codes) in record[HEAD..].as_chunks().0.iter().enumerate() {
            sink.take(at, V::from_bytes(codes).sub(zero).mul(step));
        }
    }

    fn bound(values: &[f32]) -> f32 {
        let most = values.iter().fold(0f32, |most, value| most.max(value.abs()));
        // the step is rounded up, and is not denormal
        if most == 0.0 { 0.0 } else { most / 127.0 * 1.001 + f32::MIN_POSITIVE }
    }
}

/// Codes of numbers that are rounded up or down as 24 random bits say.
#[inline(always)]
fn dither<V: Lanes>(values: V, inverse: V, random: V) -> V {
    let steps = values.abs().mul(inverse).min(V::splat(LEVELS as f32));
    let floor = steps.floor();
    let up = random.mul(V::splat(UNIT)).below(steps.sub(floor));
    floor.add(up).signed_as(values).add(V::splat(ZERO))
}
