//! Eight bits between the least and the largest number of a block.
//!
//! A record of a block of 256:
//!
//! | bytes | is |
//! |---|---|
//! | 0..4 | f32 step of the grid; NaN: not finite; negative: see below |
//! | 4..8 | f32 low end of the grid |
//! | 8.. | a code for each element: the element is low + code · step |
//!
//! A block that has zero between its ends, or at one of them, gets a grid on which zero is: low is then a multiple of the
//! step. That costs no accuracy, since shifting the grid by half a step leaves the ends within half a step of it. A block of
//! equal numbers has step 0, and low is the number.
//!
//! Numbers of 2¹²⁵ and more would overflow in these sums. Their block says so with a negative step, holds its least number
//! in place of low, and is worked out in f64.

use super::blocks::{Blockwise, Sink};
use super::lanes::{LANES, Lanes};
use super::scale::{fold, inverse, is_finite, mark, nearest, read, scale, step, write};

/// One byte an element and eight for each 256; error at most half of 1/255 of the range of the block.
#[derive(Debug)]
pub struct MinMax8;

const SIZE: usize = 256;
const HEAD: usize = 8;
/// From here on numbers count as huge: 2¹²⁵.
const HUGE: f32 = 4.253_529_6e37;

impl Blockwise for MinMax8 {
    const NAME: &'static str = "minmax8";
    const CODE: u8 = 3;
    const SIZE: usize = SIZE;
    const HEAD: usize = HEAD;
    const BIASED: bool = true;

    #[inline(always)]
    fn codes(count: usize) -> usize {
        count
    }

    #[inline(always)]
    fn filler(first: f32) -> f32 {
        first
    }

    #[inline(always)]
    fn encode_block<V: Lanes>(values: &[[f32; LANES]], _: usize, _: u64, record: &mut [u8]) {
        let Some((least, most)) = range::<V>(values) else { return mark(record) };
        let step = step((f64::from(most) - f64::from(least)) * (1.0 / 255.0));
        if most >= HUGE || least <= -HUGE {
            return encode_huge(values, least, step, record);
        }
        // exact: a multiple of the step, or the least number itself
        let low = low(least, step) as f32;
        write(record, 0, step);
        write(record, 4, low);
        let (low, inverse) = (V::splat(low), V::splat(inverse(step)));
        for (codes, values) in record[HEAD..].as_chunks_mut().0.iter_mut().zip(values.as_chunks::<4>().0) {
            let [a, b, c, d] = values;
            *codes = V::to_bytes([
                V::load(a).sub(low).mul(inverse),
                V::load(b).sub(low).mul(inverse),
                V::load(c).sub(low).mul(inverse),
                V::load(d).sub(low).mul(inverse),
            ]);
        }
    }

    #[inline(always)]
    fn decode_block<V: Lanes>(record: &[u8], sink: &mut impl Sink<V>) {
        let (step, low) = (scale(record), read(record, 4));
        if step < 0.0 || step.is_nan() {
            for (at, values) in decode_odd(record).iter().enumerate() {
                sink.take(at, V::load(values));
            }
            return;
        }
        let (step, low) = (V::splat(step), V::splat(low));
        for (at, codes) in record[HEAD..].as_chunks().0.iter().enumerate() {
            sink.take(at, low.add(V::from_bytes(codes).mul(step)));
        }
    }

    fn bound(values: &[f32]) -> f32 {
        let (least, most) =
            values.iter().fold((f32::MAX, f32::MIN), |(least, most), value| (least.min(*value), most.max(*value)));
        let half = (f64::from(most) - f64::from(least)) / 510.0;
        // the step is rounded up, the arithmetic rounds, and a step is not denormal
        let rounding = f64::from(least.abs().max(most.abs())) * 2f64.powi(-23);
        if least == most { 0.0 } else { (half * 1.001 + rounding) as f32 + f32::MIN_POSITIVE }
    }
}

/// The least and the largest number, if all are finite.
#[inline(always)]
fn range<V: Lanes>(values: &[[f32; LANES]]) -> Option<(f32, f32)> {
    let mut least = [V::splat(f32::MAX); 2];
    let (mut most, mut sum) = ([V::splat(f32::MIN); 2], [V::splat(0.0); 2]);
    for pair in values.as_chunks::<2>().0 {
        for (at, values) in pair.iter().enumerate() {
            let values = V::load(values);
            least[at] = values.min(least[at]);
            most[at] = values.max(most[at]);
            sum[at] = values.add(sum[at]);
        }
    }
    let least = fold(least[0].min(least[1]), |a, b| if a < b { a } else { b });
    let most = fold(most[0].max(most[1]), |a, b| if a > b { a } else { b });
    // zeros of both signs are equal, and which one is found depends on the order
    is_finite(sum, values).then_some((least + 0.0, most + 0.0))
}

/// The low end of the grid of a block: its least number, moved by at most half a step so that zero is on the grid if the
/// block reaches it. Depends on what a record holds only, so that huge blocks can be decoded.
#[inline(always)]
fn low(least: f32, step: f32) -> f64 {
    let reaches = least <= 0.0 && f64::from(least) + 255.0 * f64::from(step) >= 0.0;
    // `0 −` makes a grid that begins at zero begin at +0
    let moved = 0.0 - f64::from(nearest(-least * inverse(step))) * f64::from(step);
    if reaches && step > 0.0 { moved } else { f64::from(least) }
}

#[cold]
fn encode_huge(values: &[[f32; LANES]], least: f32, step: f32, record: &mut [u8]) {
    write(record, 0, -step);
    write(record, 4, least);
    let (low, step) = (low(least, step), f64::from(step));
    for (code, value) in record[HEAD..].iter_mut().zip(values.as_flattened()) {
        let place = if step > 0.0 { (f64::from(*value) - low) / step } else { 0.0 };
        *code = place.round_ties_even().clamp(0.0, 255.0) as u8;
    }
}

/// Decodes what is not finite, or huge.
#[cold]
fn decode_odd(record: &[u8]) -> [[f32; LANES]; SIZE / LANES] {
    let step = -scale(record);
    let low = low(read(record, 4), step);
    let mut out = [[f32::NAN; LANES]; SIZE / LANES];
    if step.is_nan() {
        return out;
    }
    for (out, code) in out.as_flattened_mut().iter_mut().zip(&record[HEAD..]) {
        // half a step outside may be beyond what there is
        *out = (low + f64::from(*code) * f64::from(step)).clamp(f64::from(f32::MIN), f64::from(f32::MAX)) as f32;
    }
    out
}
