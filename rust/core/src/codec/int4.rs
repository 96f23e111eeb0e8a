//! Four bits an element: fifteen levels around zero, scaled by the largest absolute value of a block.
//!
//! A record of a block of 128:
//!
//! | bytes | is |
//! |---|---|
//! | 0..4 | f32 step of the grid; NaN: not finite |
//! | 4.. | two codes in a byte, the first in its low half: the element is (code − 8) · step, with codes from 1 to 15 |
//!
//! Zero is code 8, and exact. With so few levels most of a small number is lost, so this codec wants residuals.

use super::blocks::{Blockwise, Sink};
use super::lanes::{LANES, Lanes};
use super::scale::{inverse, largest, mark, scale, symmetric_step, write};

/// Half a byte an element and four for each 128; error at most 1/14 of the largest absolute value of the block.
#[derive(Debug)]
pub struct Int4;

const SIZE: usize = 128;
const HEAD: usize = 4;
const LEVELS: f64 = 7.0;
/// The code of zero.
const ZERO: f32 = 8.0;

impl Blockwise for Int4 {
    const NAME: &'static str = "int4";
    const CODE: u8 = 4;
    const SIZE: usize = SIZE;
    const HEAD: usize = HEAD;
    const BIASED: bool = true;

    #[inline(always)]
    fn codes(count: usize) -> usize {
        count.div_ceil(2)
    }

    #[inline(always)]
    fn filler(_: f32) -> f32 {
        0.0
    }

    #[inline(always)]
    fn encode_block<V: Lanes>(values: &[[f32; LANES]], _: usize, _: u64, record: &mut [u8]) {
        let largest = largest::<V>(values);
        if largest.is_nan() {
            return mark(record);
        }
        let step = symmetric_step(largest, LEVELS);
        write(record, 0, step);
        let (inverse, zero) = (V::splat(inverse(step)), V::splat(ZERO));
        for (codes, values) in record[HEAD..].as_chunks_mut().0.iter_mut().zip(values.as_chunks::<4>().0) {
            let [a, b, c, d] = values;
            *codes = V::join(V::to_bytes([
                V::load(a).mul(inverse).add(zero),
                V::load(b).mul(inverse).add(zero),
                V::load(c).mul(inverse).add(zero),
                V::load(d).mul(inverse).add(zero),
            ]));
        }
    }

    #[inline(always)]
    fn decode_block<V: Lanes>(record: &[u8], sink: &mut impl Sink<V>) {
        let (step, zero) = (V::splat(scale(record)), V::splat(ZERO));
        for (at, codes) in record[HEAD..].as_chunks().0.iter().enumerate() {
            sink.take(at, V::split(*codes).sub(zero).mul(step));
        }
    }

    fn bound(values: &[f32]) -> f32 {
        let most = values.iter().fold(0f32, |most, value| most.max(value.abs()));
        // the step is rounded up, and is not denormal
        if most == 0.0 { 0.0 } else { most / 14.0 * 1.001 + f32::MIN_POSITIVE }
    }
}
