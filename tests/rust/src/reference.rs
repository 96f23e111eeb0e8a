//! What collectives must compute, written down a second time: slowly, one element at a time, without any of the code under
//! test. Sums go over the ranks of a host in ascending order, then over the hosts in the order of their first rank.

use half::{bf16, f16};
use offbeat_core::codec::Codec;
use offbeat_core::dtype::{DType, Op};

use crate::arithmetic;

/// A well-mixed number for a position (splitmix64).
pub fn mix(seed: u64, position: u64) -> u64 {
    let mut z = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(position.wrapping_mul(0xbf58_476d_1ce4_e5b9));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Which values a tensor is filled with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Values {
    /// Ordinary numbers of different magnitude, so that another order of a sum gives other bits.
    Finite,
    /// The same, and now and then zero of both signs, infinity, NaN, the smallest and the largest number.
    Odd,
}

/// The bytes of `count` elements that depend on nothing but the arguments.
pub fn fill(dtype: DType, values: Values, seed: u64, count: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(count * dtype.size());
    for position in 0..count as u64 {
        let bits = mix(seed, position);
        if !dtype.is_float() {
            let bits = if dtype == DType::Bool { bits & 1 } else { bits };
            bytes.extend(&bits.to_le_bytes()[..dtype.size()]);
            continue;
        }
        let odd = values == Values::Odd && bits.is_multiple_of(16);
        let value = if odd { odd_value(dtype, bits >> 4) } else { ordinary(bits) };
        match dtype {
            DType::F64 => bytes.extend(value.to_le_bytes()),
            DType::F32 => bytes.extend((value as f32).to_le_bytes()),
            DType::F16 => bytes.extend(f16::from_f64(value).to_le_bytes()),
            _ => bytes.extend(bf16::from_f64(value).to_le_bytes()),
        }
    }
    bytes
}

fn ordinary(bits: u64) -> f64 {
    let mantissa = 1.0 + (bits >> 12) as f64 / (1u64 << 52) as f64;
    let exponent = ((bits >> 4) % 11) as i32 - 5;
    let sign = if bits & 8 == 0 { 1.0 } else { -1.0 };
    sign * mantissa * 2f64.powi(exponent)
}

fn odd_value(dtype: DType, bits: u64) -> f64 {
    let (least, most) = match dtype {
        DType::F64 => (f64::from_bits(1), f64::MAX),
        DType::F32 => (f64::from(f32::from_bits(1)), f64::from(f32::MAX)),
        DType::F16 => (f16::from_bits(1).to_f64(), f16::MAX.to_f64()),
        _ => (bf16::from_bits(1).to_f64(), bf16::MAX.to_f64()),
    };
    [0.0, -0.0, f64::INFINITY, f64::NEG_INFINITY, f64::NAN, least, -least, most][(bits % 8) as usize]
}

/// The operations that make sense for a type.
pub fn ops(dtype: DType) -> Vec<Op> {
    match dtype {
        DType::Bool => vec![Op::Band, Op::Bor, Op::Bxor],
        _ if dtype.is_float() => vec![Op::Sum, Op::Mean, Op::Min, Op::Max, Op::Product],
        _ => vec![Op::Sum, Op::Min, Op::Max, Op::Product, Op::Band, Op::Bor, Op::Bxor],
    }
}

/// The places of some ranks by host: hosts in the order of their first rank.
pub fn hosts(labels: &[&str]) -> Vec<Vec<usize>> {
    let mut hosts: Vec<(&str, Vec<usize>)> = Vec::new();
    for (place, label) in labels.iter().enumerate() {
        match hosts.iter_mut().find(|(known, _)| known == label) {
            Some((_, places)) => places.push(place),
            None => hosts.push((label, vec![place])),
        }
    }
    hosts.into_iter().map(|(_, places)| places).collect()
}

fn float<T: PartialOrd + Copy>(op: Op, a: T, b: T, sum: T, product: T) -> T {
    let nan = |x: T| x.partial_cmp(&x).is_none();
    match op {
        Op::Sum | Op::Mean => sum,
        Op::Product => product,
        Op::Min if a < b || nan(a) => a,
        Op::Max if a > b || nan(a) => a,
        _ => b,
    }
}

fn single(op: Op, a: f32, b: f32) -> f32 {
    float(op, a, b, a + b, a * b)
}

fn double(op: Op, a: f64, b: f64) -> f64 {
    float(op, a, b, a + b, a * b)
}

/// An integer of any width as the widest one.
fn wide(dtype: DType, bytes: &[u8]) -> i128 {
    let signed = matches!(dtype, DType::I64 | DType::I32 | DType::I16 | DType::I8);
    let mut all = [if signed && bytes[bytes.len() - 1] >= 0x80 { 0xff } else { 0 }; 16];
    all[..bytes.len()].copy_from_slice(bytes);
    i128::from_le_bytes(all)
}

/// An integer operation whose result is right in the bytes that the type has: wrapping keeps the low bytes.
fn integer(op: Op, a: i128, b: i128) -> i128 {
    match op {
        Op::Sum | Op::Mean => a.wrapping_add(b),
        Op::Product => a.wrapping_mul(b),
        Op::Min => a.min(b),
        Op::Max => a.max(b),
        Op::Band => a & b,
        Op::Bor => a | b,
        Op::Bxor => a ^ b,
    }
}

fn fold<T: Copy>(hosts: &[Vec<usize>], get: impl Fn(usize) -> T, combine: impl Fn(T, T) -> T) -> T {
    let sum = |places: &Vec<usize>| places[1..].iter().fold(get(places[0]), |sum, place| combine(sum, get(*place)));
    hosts[1..].iter().fold(sum(&hosts[0]), |all, host| combine(all, sum(host)))
}

pub(crate) fn read_f32(dtype: DType, bytes: &[u8], at: usize) -> f32 {
    let two = || u16::from_le_bytes(bytes[at * 2..at * 2 + 2].try_into().unwrap());
    match dtype {
        DType::F32 => f32::from_le_bytes(bytes[at * 4..at * 4 + 4].try_into().unwrap()),
        DType::F16 => f16::from_bits(two()).to_f32(),
        _ => bf16::from_bits(two()).to_f32(),
    }
}

pub(crate) fn write_f32(dtype: DType, value: f32, out: &mut Vec<u8>) {
    match dtype {
        DType::F32 => out.extend(value.to_le_bytes()),
        DType::F16 => out.extend(f16::from_f32(value).to_le_bytes()),
        _ => out.extend(bf16::from_f32(value).to_le_bytes()),
    }
}

/// The reduction of everyone's `inputs` over `hosts`.
pub fn reduce(hosts: &[Vec<usize>], inputs: &[Vec<u8>], dtype: DType, op: Op) -> Vec<u8> {
    let size = dtype.size();
    let count = inputs[0].len() / size;
    let mut out = Vec::with_capacity(inputs[0].len());
    for at in 0..count {
        let element = |place: usize| &inputs[place][at * size..(at + 1) * size];
        match dtype {
            DType::F64 => {
                let get = |place| f64::from_le_bytes(element(place).try_into().unwrap());
                let value = fold(hosts, get, |a, b| double(op, a, b));
                let value = if op == Op::Mean { value / inputs.len() as f64 } else { value };
                out.extend(value.to_le_bytes());
            }
            DType::F32 | DType::F16 | DType::BF16 => {
                let value = fold(hosts, |place| read_f32(dtype, &inputs[place], at), |a, b| single(op, a, b));
                let value = if op == Op::Mean { value / inputs.len() as f32 } else { value };
                write_f32(dtype, value, &mut out);
            }
            _ => {
                let value = fold(
                    hosts,
                    |place| wide(dtype, element(place)),
                    |a, b| {
                        // bring the sum back into its type's range, or the widest integer would overflow and order wrongly
                        wide(dtype, &integer(op, a, b).to_le_bytes()[..size])
                    },
                );
                out.extend(&value.to_le_bytes()[..size]);
            }
        }
    }
    out
}

/// An all_reduce through a codec that ignores its salt: the result, and how far each element may be from the exact one.
pub fn reduce_coded(
    hosts: &[Vec<usize>],
    inputs: &[Vec<u8>],
    dtype: DType,
    op: Op,
    codec: &dyn Codec,
) -> (Vec<u8>, Vec<f32>) {
    let count = inputs[0].len() / dtype.size();
    let divisor = if op == Op::Mean { inputs.len() as f32 } else { 1.0 };
    let sum_of = |host: &Vec<usize>| -> Vec<f32> {
        let get = |place: usize, at| read_f32(dtype, &inputs[place], at);
        (0..count).map(|at| host[1..].iter().fold(get(host[0], at), |sum, place| sum + get(*place, at))).collect()
    };
    let mut errors = vec![0f32; count];
    let mut coded = |values: &[f32], divisor: f32| {
        for (values, errors) in values.chunks(codec.block()).zip(errors.chunks_mut(codec.block())) {
            let bound = codec.error_bound(values) / divisor;
            errors.iter_mut().for_each(|error| *error += bound);
        }
        let bytes = arithmetic::encode(codec.name(), values, 0, &[]);
        arithmetic::decode(codec.name(), &bytes, count)
    };
    let mut values = vec![0f32; count];
    for (at, host) in hosts.iter().enumerate() {
        // nothing is encoded on one host
        let sum = if hosts.len() == 1 { sum_of(host) } else { coded(&sum_of(host), divisor) };
        values = if at == 0 { sum } else { values.iter().zip(sum).map(|(value, sum)| value + sum).collect() };
    }
    values.iter_mut().for_each(|value| *value /= divisor);
    if hosts.len() > 1 {
        values = coded(&values, 1.0);
    }
    let mut out = Vec::new();
    for (value, error) in values.iter().zip(&mut errors) {
        let last = match dtype {
            DType::F32 => 0.0,
            DType::F16 => value.abs() / 1024.0,
            _ => value.abs() / 128.0,
        };
        // sums of coded values are rounded where their size is that of the errors too
        *error += last + (value.abs() + *error) * 1e-6;
        write_f32(dtype, *value, &mut out);
    }
    (out, errors)
}

/// The elements as f64, for distances.
pub fn numbers(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    (0..bytes.len() / dtype.size())
        .map(|at| match dtype {
            DType::F64 => f64::from_le_bytes(bytes[at * 8..at * 8 + 8].try_into().unwrap()),
            _ => f64::from(read_f32(dtype, bytes, at)),
        })
        .collect()
}

/// Where two results differ first, if they do. Bits count; only the payload of NaN is free.
pub fn difference(dtype: DType, got: &[u8], expected: &[u8]) -> Option<String> {
    if got == expected {
        return None;
    }
    if got.len() != expected.len() {
        return Some(format!("{} bytes instead of {}", got.len(), expected.len()));
    }
    let size = dtype.size();
    let nan = |bytes: &[u8]| dtype.is_float() && numbers(dtype, bytes)[0].is_nan();
    got.chunks(size).zip(expected.chunks(size)).enumerate().find_map(|(at, (got, expected))| {
        (got != expected && !(nan(got) && nan(expected)))
            .then(|| format!("element {at} of {dtype} is {got:02x?} instead of {expected:02x?}"))
    })
}
