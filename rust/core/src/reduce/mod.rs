//! Element-wise reduction on the CPU, in a fixed order, for every type.
//!
//! Work goes in blocks that stay in the first-level cache: the first source is widened into an accumulator block, the
//! others are folded into it in order, and the block is narrowed into every destination. The loops are plain and are
//! compiled twice on x86-64: for the baseline and for AVX2, chosen at run time. Both give the same bits: no sums are
//! reordered, and nothing is fused.

mod element;

use element::{Accumulator, BLOCK, Element, with_type};

use crate::dtype::{DType, Op};

pub(crate) use element::to_brain;

/// Runs a function compiled for AVX2 where the processor has it.
macro_rules! dispatch {
    ($name:ident, $wide:ident, ($($arg:ident: $type:ty),*)) => {
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,f16c")]
        unsafe fn $wide<T: Element>($($arg: $type),*) {
            // SAFETY: the caller's promise is passed on.
            unsafe { $name::<T>($($arg),*) }
        }
    };
}

macro_rules! call {
    ($dtype:expr, $name:ident, $wide:ident, ($($arg:expr),*)) => {{
        #[cfg(target_arch = "x86_64")]
        let wide = std::is_x86_feature_detected!("avx2") && std::is_x86_feature_detected!("f16c");
        with_type!($dtype, T => {
            #[cfg(target_arch = "x86_64")]
            if wide {
                // SAFETY: the features were just detected; the caller's promise is passed on.
                return unsafe { $wide::<T>($($arg),*) };
            }
            // SAFETY: the caller's promise is passed on.
            unsafe { $name::<T>($($arg),*) }
        })
    }};
}

#[inline(always)]
unsafe fn source<'a, T>(start: *const u8, from: usize, count: usize) -> &'a [T] {
    // SAFETY: the caller promises aligned memory for `from + count` elements that nobody writes meanwhile.
    unsafe { std::slice::from_raw_parts(start.cast::<T>().add(from), count) }
}

#[inline(always)]
unsafe fn target<'a, T>(start: *mut u8, from: usize, count: usize) -> &'a mut [T] {
    // SAFETY: the caller promises aligned memory for `from + count` elements that nobody else uses meanwhile.
    unsafe { std::slice::from_raw_parts_mut(start.cast::<T>().add(from), count) }
}

/// Copies elements from any address to where they are aligned.
#[inline(always)]
unsafe fn realigned<T>(bytes: *const u8, from: usize, room: &mut [T]) -> &[T] {
    // SAFETY: the caller promises memory for as many elements after `from`, which is not that of `room`.
    unsafe {
        let start = bytes.add(from * size_of::<T>());
        std::ptr::copy_nonoverlapping(start, room.as_mut_ptr().cast(), size_of_val(room));
    }
    room
}

/// The sum of all sources over one block, in their order.
#[inline(always)]
unsafe fn sum_block<T: Element>(
    sources: &[*const u8],
    op: Op,
    acc: &mut [T::Acc],
    rooms: &mut [[T::Acc; BLOCK]; 2],
    from: usize,
) {
    let count = acc.len();
    let [room, other] = rooms;
    // SAFETY: the caller's promise is passed on.
    let get = |at: usize| unsafe { source::<T>(sources[at], from, count) };
    match sources.len() {
        0 => {}
        1 => acc.copy_from_slice(T::widen(get(0), room)),
        _ => {
            let (first, second) = (T::widen(get(0), room), T::widen(get(1), other));
            T::Acc::fold_two(op, acc, first, second);
        }
    }
    for at in 2..sources.len() {
        T::Acc::fold(op, acc, T::widen(get(at), room));
    }
}

#[inline(always)]
unsafe fn reduce_typed<T: Element>(
    sources: &[*const u8],
    targets: &[*mut u8],
    count: usize,
    op: Op,
    divisor: Option<u32>,
) {
    let mut acc = [T::Acc::default(); BLOCK];
    let mut rooms = [[T::Acc::default(); BLOCK]; 2];
    let mut from = 0;
    while from < count {
        let length = BLOCK.min(count - from);
        let acc = &mut acc[..length];
        // SAFETY: `reduce`'s caller promises the memory; a block is read whole before any of it is written.
        unsafe {
            sum_block::<T>(sources, op, acc, &mut rooms, from);
            if let Some(divisor) = divisor {
                T::Acc::divide(acc, divisor);
            }
            for start in targets {
                T::narrow(acc, target::<T>(*start, from, length));
            }
        }
        from += length;
    }
}
dispatch!(reduce_typed, reduce_wide, (sources: &[*const u8], targets: &[*mut u8], count: usize, op: Op, divisor: Option<u32>));

/// Reduces `sources` in their order and writes the result, divided where asked, to every target.
///
/// # Safety
/// Sources and targets are aligned to the type and `count` elements long. A target may be a source, but must not overlap
/// one otherwise, and nobody else writes to sources or touches targets meanwhile.
pub unsafe fn reduce(
    sources: &[*const u8],
    targets: &[*mut u8],
    count: usize,
    dtype: DType,
    op: Op,
    divisor: Option<u32>,
) {
    call!(dtype, reduce_typed, reduce_wide, (sources, targets, count, op, divisor))
}

#[inline(always)]
unsafe fn partial_typed<T: Element>(sources: &[*const u8], acc: *mut u8, count: usize, op: Op) {
    let mut rooms = [[T::Acc::default(); BLOCK]; 2];
    let mut from = 0;
    while from < count {
        let length = BLOCK.min(count - from);
        // SAFETY: `partial`'s caller promises the memory.
        unsafe { sum_block::<T>(sources, op, target::<T::Acc>(acc, from, length), &mut rooms, from) };
        from += length;
    }
}
dispatch!(partial_typed, partial_wide, (sources: &[*const u8], acc: *mut u8, count: usize, op: Op));

/// Reduces `sources` in their order into accumulators, neither divided nor rounded.
///
/// # Safety
/// As for [`reduce`]; `acc` holds `count` elements of the accumulator's type and overlaps no source.
pub unsafe fn partial(sources: &[*const u8], acc: *mut u8, count: usize, dtype: DType, op: Op) {
    call!(dtype, partial_typed, partial_wide, (sources, acc, count, op))
}

#[inline(always)]
unsafe fn fold_typed<T: Element>(acc: *mut u8, bytes: *const u8, count: usize, op: Op) {
    let mut aligned = [T::default(); BLOCK];
    let mut room = [T::Acc::default(); BLOCK];
    let mut from = 0;
    while from < count {
        let length = BLOCK.min(count - from);
        // SAFETY: `fold`'s caller promises the memory; the block is ours.
        unsafe {
            let values = realigned(bytes, from, &mut aligned[..length]);
            T::Acc::fold(op, target::<T::Acc>(acc, from, length), T::widen(values, &mut room));
        }
        from += length;
    }
}
dispatch!(fold_typed, fold_wide, (acc: *mut u8, bytes: *const u8, count: usize, op: Op));

/// Folds `count` elements of type `dtype` that lie at any address into accumulators.
///
/// # Safety
/// Both are long enough, `acc` is aligned and of the type's accumulator, and they do not overlap.
pub unsafe fn fold(acc: *mut u8, bytes: *const u8, count: usize, dtype: DType, op: Op) {
    call!(dtype, fold_typed, fold_wide, (acc, bytes, count, op))
}

#[inline(always)]
unsafe fn widen_typed<T: Element>(bytes: *const u8, acc: *mut u8, count: usize) {
    let mut aligned = [T::default(); BLOCK];
    let mut room = [T::Acc::default(); BLOCK];
    let mut from = 0;
    while from < count {
        let length = BLOCK.min(count - from);
        // SAFETY: `widen`'s caller promises the memory; the block is ours.
        unsafe {
            let values = realigned(bytes, from, &mut aligned[..length]);
            target::<T::Acc>(acc, from, length).copy_from_slice(T::widen(values, &mut room));
        }
        from += length;
    }
}
dispatch!(widen_typed, widen_wide, (bytes: *const u8, acc: *mut u8, count: usize));

/// Turns elements at any address into accumulators.
///
/// # Safety
/// As for [`fold`].
pub unsafe fn widen(bytes: *const u8, acc: *mut u8, count: usize, dtype: DType) {
    call!(dtype, widen_typed, widen_wide, (bytes, acc, count))
}

#[inline(always)]
unsafe fn seal_typed<T: Element>(acc: *mut u8, targets: &[*mut u8], count: usize, divisor: Option<u32>) {
    let mut from = 0;
    while from < count {
        let length = BLOCK.min(count - from);
        // SAFETY: `seal`'s caller promises the memory.
        unsafe {
            let acc = target::<T::Acc>(acc, from, length);
            if let Some(divisor) = divisor {
                T::Acc::divide(acc, divisor);
            }
            for start in targets {
                T::narrow(acc, target::<T>(*start, from, length));
            }
        }
        from += length;
    }
}
dispatch!(seal_typed, seal_wide, (acc: *mut u8, targets: &[*mut u8], count: usize, divisor: Option<u32>));

/// Ends a reduction: divides the accumulators where asked, rounds them to `dtype` and writes them to every target.
///
/// # Safety
/// As for [`reduce`], with `acc` for the sources.
pub unsafe fn seal(acc: *mut u8, targets: &[*mut u8], count: usize, dtype: DType, divisor: Option<u32>) {
    call!(dtype, seal_typed, seal_wide, (acc, targets, count, divisor))
}

#[inline(always)]
unsafe fn scale_typed<T: Element>(acc: *mut u8, count: usize, factor: f64) {
    // SAFETY: `scale`'s caller promises the memory.
    T::Acc::scale(unsafe { target::<T::Acc>(acc, 0, count) }, factor);
}
dispatch!(scale_typed, scale_wide, (acc: *mut u8, count: usize, factor: f64));

/// Multiplies the accumulators of `dtype` by a factor; those of integers stay as they are.
///
/// # Safety
/// `acc` holds `count` accumulators, aligned, that nobody else uses meanwhile.
pub unsafe fn scale(acc: *mut u8, count: usize, dtype: DType, factor: f64) {
    call!(dtype, scale_typed, scale_wide, (acc, count, factor))
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::f16;

    fn reduce_all<T: Copy>(sources: &[Vec<T>], dtype: DType, op: Op, divisor: Option<u32>) -> Vec<T> {
        let mut out = sources[0].clone();
        let starts: Vec<*const u8> = sources.iter().map(|s| s.as_ptr().cast()).collect();
        // SAFETY: all vectors have one length and type.
        unsafe { reduce(&starts, &[out.as_mut_ptr().cast()], out.len(), dtype, op, divisor) };
        out
    }

    #[test]
    fn sums_are_in_order_at_every_length() {
        for length in [0, 1, 7, 1023, 1024, 1025, 5000] {
            let sources: Vec<Vec<f32>> =
                (0..5).map(|r| (0..length).map(|i| (i as f32 * 0.37 + r as f32 * 1e7).sin() * 1e3).collect()).collect();
            let expected: Vec<f32> =
                (0..length).map(|i| (1..5).fold(sources[0][i], |sum, r| sum + sources[r][i])).collect();
            assert_eq!(reduce_all(&sources, DType::F32, Op::Sum, None), expected);
        }
    }

    #[test]
    fn half_types_accumulate_in_f32_and_round_once() {
        // 2048 + 1 + 1 in f16: rounding each sum would lose both ones
        let of = |v: f32| vec![f16::from_f32(v)];
        assert_eq!(reduce_all(&[of(2048.0), of(1.0), of(1.0)], DType::F16, Op::Sum, None), of(2050.0));
        let brain = |v: f32| vec![half::bf16::from_f32(v)];
        assert_eq!(reduce_all(&[brain(256.0), brain(1.0), brain(1.0)], DType::BF16, Op::Sum, None), brain(258.0));
        assert_eq!(reduce_all(&[of(1.0), of(2.0)], DType::F16, Op::Mean, Some(2)), of(1.5));
    }

    #[test]
    fn integers_wrap_and_bits_combine() {
        let (a, b) = (vec![250u8, 3], vec![10u8, 5]);
        assert_eq!(reduce_all(&[a.clone(), b.clone()], DType::U8, Op::Sum, None), [4, 8]);
        assert_eq!(reduce_all(&[a.clone(), b.clone()], DType::U8, Op::Max, None), [250, 5]);
        assert_eq!(reduce_all(&[a, b], DType::U8, Op::Bxor, None), [240, 6]);
    }

    #[test]
    fn nan_wins_in_min_and_max() {
        for op in [Op::Min, Op::Max] {
            assert!(reduce_all(&[vec![1.0f64], vec![f64::NAN]], DType::F64, op, None)[0].is_nan());
            assert!(reduce_all(&[vec![f64::NAN], vec![1.0f64]], DType::F64, op, None)[0].is_nan());
        }
    }

    #[test]
    fn brain_rounds_as_the_library_does() {
        for bits in (0..=u32::MAX).step_by(65_521) {
            let value = f32::from_bits(bits);
            assert_eq!(to_brain(value), half::bf16::from_f32(value).to_bits(), "{value} {bits:x}");
        }
    }

    #[test]
    fn folding_partials_equals_reducing() {
        let sources: Vec<Vec<f32>> = (0..3).map(|r| (0..3000).map(|i| (i * (r + 1)) as f32 * 0.1).collect()).collect();
        let mut acc = vec![0f32; 3000];
        let mut out = vec![0f32; 3000];
        let start: *mut u8 = acc.as_mut_ptr().cast();
        // SAFETY: all vectors have one length and type.
        unsafe {
            widen(sources[0].as_ptr().cast(), start, 3000, DType::F32);
            fold(start, sources[1].as_ptr().cast(), 3000, DType::F32, Op::Sum);
            fold(start, sources[2].as_ptr().cast(), 3000, DType::F32, Op::Sum);
            seal(start, &[out.as_mut_ptr().cast()], 3000, DType::F32, Some(3));
        }
        assert_eq!(out, reduce_all(&sources, DType::F32, Op::Mean, Some(3)));
    }
}
