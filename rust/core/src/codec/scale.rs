//! Records and their scales: what block-wise codecs write before their codes, and how they find it.

use super::lanes::{LANES, Lanes, MAGIC};

/// The number at a place of a record.
#[inline(always)]
pub(super) fn read(record: &[u8], at: usize) -> f32 {
    record.get(at..).and_then(<[u8]>::first_chunk).map_or(f32::NAN, |bytes| f32::from_le_bytes(*bytes))
}

/// Writes a number at a place of a record.
#[inline(always)]
pub(super) fn write(record: &mut [u8], at: usize, value: f32) {
    if let Some(bytes) = record.get_mut(at..).and_then(<[u8]>::first_chunk_mut) {
        *bytes = value.to_le_bytes();
    }
}

/// The scale of a record.
#[inline(always)]
pub(super) fn scale(record: &[u8]) -> f32 {
    read(record, 0)
}

/// Makes a record that of a block that is not finite: the same bytes whatever the values.
#[cold]
pub(super) fn mark(record: &mut [u8]) {
    record.fill(0);
    write(record, 0, f32::NAN);
}

/// The step of a grid: a little over `exact`, with 16 significant bits and not denormal; zero for zero.
///
/// With 16 bits the product with an integer of 8 bits is exact, so whether a compiler fuses it with a sum makes no
/// difference; and over the exact step, so the ends of the range round to codes that exist. Its inverse is finite.
#[inline(always)]
pub(super) fn step(exact: f64) -> f32 {
    let bits = ((exact as f32).to_bits() & !0xff) + 0x100;
    if exact == 0.0 { 0.0 } else { f32::from_bits(bits).max(f32::MIN_POSITIVE) }
}

/// The step of a grid from −`levels` to `levels` steps that reaches `largest`, and no number on it overflows.
#[inline(always)]
pub(super) fn symmetric_step(largest: f32, levels: f64) -> f32 {
    let most = f32::from_bits(((f64::from(f32::MAX) / levels) as f32).to_bits() & !0xff);
    step(f64::from(largest) * (1.0 / levels)).min(most)
}

/// What to multiply with instead of dividing by a step.
#[inline(always)]
pub(super) fn inverse(step: f32) -> f32 {
    if step == 0.0 { 0.0 } else { 1.0 / step }
}

/// The integer nearest to a number of less than 2²², ties to even.
#[inline(always)]
pub(super) fn nearest(value: f32) -> f32 {
    (value + MAGIC) - MAGIC
}

/// The largest absolute value of a block, NaN if one is not finite.
#[inline(always)]
pub(super) fn largest<V: Lanes>(values: &[[f32; LANES]]) -> f32 {
    let (mut most, mut sum) = ([V::splat(0.0); 2], [V::splat(0.0); 2]);
    for pair in values.as_chunks::<2>().0 {
        for ((most, sum), values) in most.iter_mut().zip(&mut sum).zip(pair) {
            let values = V::load(values).abs();
            *most = values.max(*most);
            *sum = values.add(*sum);
        }
    }
    let most = fold(most[0].max(most[1]), |a, b| if a > b { a } else { b });
    if is_finite(sum, values) { most } else { f32::NAN }
}

/// Whether all values of a block are finite, if `sum` is their sum, or that of their absolute values, in any order. It is
/// not if one of them is not; the other way round it may have overflowed. This finds NaN, which maxima lose.
#[inline(always)]
pub(super) fn is_finite<V: Lanes>(sum: [V; 2], values: &[[f32; LANES]]) -> bool {
    fold(sum[0].add(sum[1]), |a, b| a + b).is_finite() || is_really_finite(values)
}

#[cold]
fn is_really_finite(values: &[[f32; LANES]]) -> bool {
    values.as_flattened().iter().all(|value| value.is_finite())
}

/// Folds the upper half of a register onto the lower one until one number is left.
#[inline(always)]
pub(super) fn fold<V: Lanes>(register: V, combine: impl Fn(f32, f32) -> f32) -> f32 {
    let mut lanes = [0f32; LANES];
    register.store(&mut lanes);
    let [a, b, c, d, e, f, g, h] = lanes;
    let (even, odd) = (combine(combine(a, e), combine(c, g)), combine(combine(b, f), combine(d, h)));
    combine(even, odd)
}
