//! docs/codecs.md in code: every block-wise codec a second time, slowly, one element at a time, without any of the code
//! under test.

use half::{bf16, f16};

/// The encoding of some values.
pub fn encode(codec: &str, values: &[f32], stream: u64, blocks: &[u64]) -> Vec<u8> {
    let of = |size: usize, each: &dyn Fn(&[f32], u64) -> Vec<u8>| -> Vec<u8> {
        let numbered = values.chunks(size).enumerate();
        numbered.flat_map(|(at, block)| each(block, blocks.get(at).copied().unwrap_or(at as u64))).collect()
    };
    match codec {
        "float16" => values.iter().flat_map(|value| f16::from_f32(*value).to_le_bytes()).collect(),
        "bfloat16" => values.iter().flat_map(|value| bf16::from_f32(*value).to_le_bytes()).collect(),
        "minmax8" => of(256, &|block, _| min_max8(block)),
        "int4" => of(128, &|block, _| int4(block)),
        "qsgd" => of(512, &|block, number| qsgd(block, stream, number)),
        "onebit" => of(2048, &|block, _| one_bit(block)),
        other => panic!("no codec {other}"),
    }
}

/// What an encoding of `count` values means.
pub fn decode(codec: &str, bytes: &[u8], count: usize) -> Vec<f32> {
    let (size, record) = match codec {
        "float16" => return pairs(bytes).map(|bits| f16::from_bits(bits).to_f32()).collect(),
        "bfloat16" => return pairs(bytes).map(|bits| bf16::from_bits(bits).to_f32()).collect(),
        "minmax8" => (256, 264),
        "int4" => (128, 68),
        "qsgd" => (512, 516),
        _ => (2048, 260),
    };
    let mut out = Vec::new();
    for (at, record) in bytes.chunks(record).enumerate() {
        let count = size.min(count - at * size);
        let scale = number(record, 0);
        for i in 0..count {
            out.push(match codec {
                _ if scale.is_nan() => f32::NAN,
                "minmax8" if scale < 0.0 => {
                    let step = -scale;
                    let value = low(number(record, 4), step) + f64::from(record[8 + i]) * f64::from(step);
                    value.clamp(f64::from(f32::MIN), f64::from(f32::MAX)) as f32
                }
                "minmax8" => number(record, 4) + f32::from(record[8 + i]) * scale,
                "int4" => (f32::from(record[4 + i / 2] >> (i % 2 * 4) & 15) - 8.0) * scale,
                "qsgd" => (f32::from(record[4 + i]) - 128.0) * scale,
                _ if record[4 + i / 8] >> (i % 8) & 1 == 1 => -scale,
                _ => scale,
            });
        }
    }
    out
}

fn pairs(bytes: &[u8]) -> impl Iterator<Item = u16> {
    bytes.chunks(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]]))
}

fn number(record: &[u8], at: usize) -> f32 {
    f32::from_le_bytes(record[at..at + 4].try_into().unwrap())
}

/// The record of a block that is not finite.
fn odd(block: &[f32], length: usize) -> Option<Vec<u8>> {
    let mut record = vec![0; length];
    record[..4].copy_from_slice(&0x7fc0_0000u32.to_le_bytes());
    block.iter().any(|value| !value.is_finite()).then_some(record)
}

fn step(exact: f64) -> f32 {
    if exact == 0.0 {
        return 0.0;
    }
    let cut = (exact as f32).to_bits() >> 8;
    f32::from_bits((cut + 1) << 8).max(2f32.powi(-126))
}

fn inverse(step: f32) -> f32 {
    if step == 0.0 { 0.0 } else { 1.0 / step }
}

fn low(least: f32, step: f32) -> f64 {
    if least <= 0.0 && f64::from(least) + 255.0 * f64::from(step) >= 0.0 && step > 0.0 {
        let z = (-least * inverse(step)).round_ties_even();
        0.0 - f64::from(z) * f64::from(step)
    } else {
        f64::from(least)
    }
}

fn min_max8(block: &[f32]) -> Vec<u8> {
    if let Some(record) = odd(block, 8 + block.len()) {
        return record;
    }
    let least = block.iter().copied().fold(f32::MAX, f32::min) + 0.0;
    let most = block.iter().copied().fold(f32::MIN, f32::max) + 0.0;
    let step = step((f64::from(most) - f64::from(least)) * (1.0 / 255.0));
    let low = low(least, step);
    let huge = least.abs().max(most.abs()) >= 2f32.powi(125);
    let head = if huge { [-step, least] } else { [step, low as f32] };
    let mut record: Vec<u8> = head.iter().flat_map(|number| number.to_le_bytes()).collect();
    record.extend(block.iter().map(|value| match () {
        () if step == 0.0 => 0,
        () if huge => ((f64::from(*value) - low) / f64::from(step)).round_ties_even().clamp(0.0, 255.0) as u8,
        () => ((value - low as f32) * inverse(step)).round_ties_even().clamp(0.0, 255.0) as u8,
    }));
    record
}

/// The step of a grid of `levels` on either side.
fn symmetric(block: &[f32], levels: f64) -> f32 {
    let most = block.iter().fold(0f32, |most, value| most.max(value.abs()));
    let cap = f32::from_bits(((f64::from(f32::MAX) / levels) as f32).to_bits() >> 8 << 8);
    step(f64::from(most) * (1.0 / levels)).min(cap)
}

fn int4(block: &[f32]) -> Vec<u8> {
    if let Some(record) = odd(block, 4 + block.len().div_ceil(2)) {
        return record;
    }
    let step = symmetric(block, 7.0);
    let code = |value: &f32| (value * inverse(step) + 8.0).round_ties_even() as u8;
    let mut record = step.to_le_bytes().to_vec();
    record.extend(block.chunks(2).map(|pair| code(&pair[0]) | code(pair.get(1).unwrap_or(&0.0)) << 4));
    record
}

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn qsgd(block: &[f32], stream: u64, number: u64) -> Vec<u8> {
    const G: u64 = 0x9e37_79b9_7f4a_7c15;
    if let Some(record) = odd(block, 4 + block.len()) {
        return record;
    }
    let step = symmetric(block, 127.0);
    let key = mix(stream ^ mix(number.wrapping_add(G)));
    let mut record = step.to_le_bytes().to_vec();
    for (i, value) in block.iter().enumerate() {
        let bits = mix(key.wrapping_add((i as u64 % 256 + 1).wrapping_mul(G)));
        let u = if i < 256 { bits >> 8 & 0xff_ffff } else { bits >> 40 };
        let r = (value.abs() * inverse(step)).min(127.0);
        let level = r.floor() + if u as f32 / 16_777_216.0 < r - r.floor() { 1.0 } else { 0.0 };
        record.push((128.0 + level.copysign(*value)) as u8);
    }
    record
}

fn one_bit(block: &[f32]) -> Vec<u8> {
    if let Some(record) = odd(block, 4 + block.len().div_ceil(8)) {
        return record;
    }
    let mean = |factor: f32| {
        let mut lanes = [0f32; 32];
        for (i, value) in block.iter().enumerate() {
            lanes[i % 32] += value.abs() * factor;
        }
        for half in [16, 8, 4, 2, 1] {
            (0..half).for_each(|lane| lanes[lane] += lanes[lane + half]);
        }
        lanes[0] / block.len() as f32
    };
    let scale = if mean(1.0).is_finite() { mean(1.0) } else { (mean(1.0 / 2048.0) * 2048.0).min(f32::MAX) };
    let mut record = scale.to_le_bytes().to_vec();
    for eight in block.chunks(8) {
        record.push(eight.iter().enumerate().map(|(bit, value)| u8::from(value.is_sign_negative()) << bit).sum());
    }
    record
}
