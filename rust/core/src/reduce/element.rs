//! The types of elements: what each is accumulated in, how it gets there and back, and what ops do to it.

use half::f16;
use half::slice::HalfFloatSliceExt;

use crate::dtype::Op;

/// Elements of a block.
pub(super) const BLOCK: usize = 1024;

/// A type that reductions are done in.
pub(super) trait Accumulator: Copy + Default + 'static {
    fn fold(op: Op, acc: &mut [Self], other: &[Self]);
    fn fold_two(op: Op, acc: &mut [Self], first: &[Self], second: &[Self]);
    fn divide(acc: &mut [Self], divisor: u32);
    fn scale(acc: &mut [Self], factor: f64);
}

macro_rules! zip_with {
    ($acc:ident, $first:expr, $second:expr, $combine:expr) => {
        for ((acc, first), second) in $acc.iter_mut().zip($first).zip($second) {
            *acc = $combine(*first, *second);
        }
    };
}

macro_rules! accumulate {
    ($type:ty, $combine:ident, $divide:expr, $scale:expr) => {
        impl Accumulator for $type {
            #[inline(always)]
            fn fold(op: Op, acc: &mut [Self], other: &[Self]) {
                macro_rules! go {
                    ($f:expr) => {
                        for (acc, other) in acc.iter_mut().zip(other) {
                            *acc = $f(*acc, *other);
                        }
                    };
                }
                $combine!(op, $type, go);
            }

            #[inline(always)]
            fn fold_two(op: Op, acc: &mut [Self], first: &[Self], second: &[Self]) {
                macro_rules! go {
                    ($f:expr) => {
                        zip_with!(acc, first, second, $f)
                    };
                }
                $combine!(op, $type, go);
            }

            #[inline(always)]
            fn divide(acc: &mut [Self], divisor: u32) {
                for value in acc {
                    *value = $divide(*value, divisor);
                }
            }

            #[inline(always)]
            fn scale(acc: &mut [Self], factor: f64) {
                for value in acc {
                    *value = $scale(*value, factor);
                }
            }
        }
    };
}

/// NaN wins in min and max, as in torch; bit operations on floats are refused before any work (`Op::check`).
macro_rules! float_ops {
    ($op:ident, $type:ty, $go:ident) => {
        match $op {
            Op::Sum | Op::Mean => $go!(|a: $type, b: $type| a + b),
            Op::Product => $go!(|a: $type, b: $type| a * b),
            Op::Min => $go!(|a: $type, b: $type| if a < b || a.is_nan() { a } else { b }),
            Op::Max => $go!(|a: $type, b: $type| if a > b || a.is_nan() { a } else { b }),
            Op::Band | Op::Bor | Op::Bxor => {}
        }
    };
}

macro_rules! integer_ops {
    ($op:ident, $type:ty, $go:ident) => {
        match $op {
            Op::Sum | Op::Mean => $go!(|a: $type, b: $type| a.wrapping_add(b)),
            Op::Product => $go!(|a: $type, b: $type| a.wrapping_mul(b)),
            Op::Min => $go!(|a: $type, b: $type| a.min(b)),
            Op::Max => $go!(|a: $type, b: $type| a.max(b)),
            Op::Band => $go!(|a: $type, b: $type| a & b),
            Op::Bor => $go!(|a: $type, b: $type| a | b),
            Op::Bxor => $go!(|a: $type, b: $type| a ^ b),
        }
    };
}

accumulate!(f64, float_ops, |value: f64, divisor: u32| value / f64::from(divisor), |value: f64, factor| value * factor);
accumulate!(f32, float_ops, |value: f32, divisor: u32| value / divisor as f32, |value: f32, factor| value
    * factor as f32);
accumulate!(i64, integer_ops, |value, _| value, |value, _| value);
accumulate!(i32, integer_ops, |value, _| value, |value, _| value);
accumulate!(i16, integer_ops, |value, _| value, |value, _| value);
accumulate!(i8, integer_ops, |value, _| value, |value, _| value);
accumulate!(u64, integer_ops, |value, _| value, |value, _| value);
accumulate!(u32, integer_ops, |value, _| value, |value, _| value);
accumulate!(u16, integer_ops, |value, _| value, |value, _| value);
accumulate!(u8, integer_ops, |value, _| value, |value, _| value);

/// A type of elements, and how it becomes its accumulator and back.
pub(super) trait Element: Copy + Default + 'static {
    type Acc: Accumulator;
    /// The source as accumulators: itself, or `room` filled with it.
    fn widen<'a>(source: &'a [Self], room: &'a mut [Self::Acc; BLOCK]) -> &'a [Self::Acc];
    fn narrow(acc: &[Self::Acc], out: &mut [Self]);
}

macro_rules! own_accumulator {
    ($($type:ty),*) => {$(
        impl Element for $type {
            type Acc = $type;
            #[inline(always)]
            fn widen<'a>(source: &'a [Self], _: &'a mut [Self; BLOCK]) -> &'a [Self] {
                source
            }
            #[inline(always)]
            fn narrow(acc: &[Self], out: &mut [Self]) {
                out.copy_from_slice(acc);
            }
        }
    )*};
}
own_accumulator!(f64, f32, i64, i32, i16, i8, u64, u32, u16, u8);

impl Element for f16 {
    type Acc = f32;
    #[inline(always)]
    fn widen<'a>(source: &'a [Self], room: &'a mut [f32; BLOCK]) -> &'a [f32] {
        source.convert_to_f32_slice(&mut room[..source.len()]);
        &room[..source.len()]
    }
    #[inline(always)]
    fn narrow(acc: &[f32], out: &mut [Self]) {
        out.convert_from_f32_slice(acc);
    }
}

/// bfloat16 as its bits: plain shifts vectorise where a library type's methods do not.
#[derive(Clone, Copy, Default)]
#[repr(transparent)]
pub(super) struct Brain(u16);

impl Element for Brain {
    type Acc = f32;
    #[inline(always)]
    fn widen<'a>(source: &'a [Self], room: &'a mut [f32; BLOCK]) -> &'a [f32] {
        for (wide, narrow) in room.iter_mut().zip(source) {
            *wide = f32::from_bits(u32::from(narrow.0) << 16);
        }
        &room[..source.len()]
    }
    #[inline(always)]
    fn narrow(acc: &[f32], out: &mut [Self]) {
        for (out, value) in out.iter_mut().zip(acc) {
            *out = Brain(to_brain(*value));
        }
    }
}

/// f32 to bfloat16, to the nearest, ties to even; NaN stays NaN.
#[inline(always)]
pub(crate) fn to_brain(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = (bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16) as u16;
    let quiet = ((bits >> 16) | 0x40) as u16;
    if value.is_nan() { quiet } else { rounded }
}

/// Runs a body for the element type of a dtype.
macro_rules! with_type {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            $crate::dtype::DType::F64 => {
                type $T = f64;
                $body
            }
            $crate::dtype::DType::F32 => {
                type $T = f32;
                $body
            }
            $crate::dtype::DType::F16 => {
                type $T = half::f16;
                $body
            }
            $crate::dtype::DType::BF16 => {
                type $T = $crate::reduce::element::Brain;
                $body
            }
            $crate::dtype::DType::I64 => {
                type $T = i64;
                $body
            }
            $crate::dtype::DType::I32 => {
                type $T = i32;
                $body
            }
            $crate::dtype::DType::I16 => {
                type $T = i16;
                $body
            }
            $crate::dtype::DType::I8 => {
                type $T = i8;
                $body
            }
            $crate::dtype::DType::U64 => {
                type $T = u64;
                $body
            }
            $crate::dtype::DType::U32 => {
                type $T = u32;
                $body
            }
            $crate::dtype::DType::U16 => {
                type $T = u16;
                $body
            }
            $crate::dtype::DType::U8 | $crate::dtype::DType::Bool => {
                type $T = u8;
                $body
            }
        }
    };
}
pub(super) use with_type;
