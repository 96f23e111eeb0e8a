//! What must hold for every codec, over values of every kind.

use proptest::collection::vec;
use proptest::prelude::*;

use super::{Codec, Int4, KNOWN, MinMax8, OneBit, Portable, Qsgd, Salt};

/// Each block-wise codec with wide instructions, where the processor has them, and without.
const PAIRS: [(&dyn Codec, &dyn Codec); 4] =
    [(&MinMax8, &Portable(MinMax8)), (&Int4, &Portable(Int4)), (&Qsgd, &Portable(Qsgd)), (&OneBit, &Portable(OneBit))];

fn encode(codec: &dyn Codec, values: &[f32], salt: Salt<'_>) -> Vec<u8> {
    // what was there before must not matter
    let mut bytes = vec![0xa5; codec.encoded_len(values.len())];
    codec.encode(values, salt, &mut bytes);
    bytes
}

fn decode(codec: &dyn Codec, bytes: &[u8], count: usize) -> Vec<f32> {
    let mut values = vec![f32::MAX; count];
    codec.decode(bytes, &mut values);
    values
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn finite() -> impl Strategy<Value = f32> {
    any::<u32>().prop_map(f32::from_bits).prop_filter("finite", |value| value.is_finite())
}

/// Lengths around those of blocks, and others.
fn length() -> impl Strategy<Value = usize> {
    prop_oneof![0usize..20, 100usize..300, 480usize..530, 2040usize..2060, 0usize..6000]
}

/// Finite values of one kind or another.
fn some_values() -> impl Strategy<Value = Vec<f32>> {
    length().prop_flat_map(|length| {
        prop_oneof![
            vec(-1f32..1.0, length),
            vec(finite(), length),
            // near the largest numbers there are, of one sign and of both
            vec(-3.4e38f32..3.4e38, length),
            vec(3.3e38f32..3.4e38, length),
            // denormal, and so near to it that a step is
            vec((0u32..5000).prop_map(f32::from_bits), length),
            vec(-1e-37f32..1e-37, length),
            // much larger than their differences
            vec((-0.5f32..0.5).prop_map(|small| 1e6 + small), length),
            vec((-1f32..1.0).prop_map(|small| -77.0 + small * 1e-3), length),
            // the same number
            finite().prop_map(move |value| vec![value; length]),
            // mostly zeros
            vec(prop_oneof![9 => Just(0f32), 1 => -1f32..1.0, 1 => Just(-0f32)], length),
            // one that is much larger than the others
            (vec(-1e-3f32..1e-3, length), any::<usize>()).prop_map(|(mut values, at)| {
                let length = values.len().max(1);
                values.get_mut(at % length).into_iter().for_each(|value| *value = 1e6);
                values
            }),
        ]
    })
}

proptest! {
    #[test]
    fn a_round_trip_stays_within_the_bound(values in some_values(), stream in any::<u64>()) {
        for codec in KNOWN {
            // what 16 bits cannot hold becomes infinite
            let most = if codec.name() == "float16" { 65504.0 } else { 3.38e38 };
            if codec.block() == 1 && values.iter().any(|value| value.abs() > most) {
                continue;
            }
            let bytes = encode(codec, &values, Salt { stream, ..Salt::default() });
            let back = decode(codec, &bytes, values.len());
            for (block, (values, back)) in values.chunks(codec.block()).zip(back.chunks(codec.block())).enumerate() {
                let bound = codec.error_bound(values);
                for (at, (value, back)) in values.iter().zip(back).enumerate() {
                    let error = (f64::from(*value) - f64::from(*back)).abs();
                    prop_assert!(
                        error <= f64::from(bound),
                        "{}: {value} became {back} at {at} of block {block}, bound {bound}", codec.name()
                    );
                }
            }
            prop_assert_eq!(codec.non_finite(&bytes), 0, "{}", codec.name());
        }
    }

    #[test]
    fn zero_stays_zero_and_the_same_number_stays_itself(values in some_values(), value in finite(), count in 1usize..600) {
        for codec in [&MinMax8 as &dyn Codec, &Int4, &Qsgd] {
            let back = decode(codec, &encode(codec, &values, Salt::default()), values.len());
            for (value, back) in values.iter().zip(&back) {
                prop_assert!(*value != 0.0 || back.to_bits() == 0, "{}: zero became {back}", codec.name());
            }
        }
        let same = vec![value; count];
        prop_assert_eq!(&decode(&MinMax8, &encode(&MinMax8, &same, Salt::default()), count), &same);
        for codec in KNOWN {
            let zeros = decode(codec, &encode(codec, &vec![0.0; count], Salt::default()), count);
            prop_assert!(zeros.iter().all(|value| value.to_bits() == 0), "{}", codec.name());
        }
    }

    #[test]
    fn adding_is_decoding_and_adding(values in some_values(), before in -1e3f32..1e3) {
        for codec in KNOWN {
            let bytes = encode(codec, &values, Salt::default());
            let expected: Vec<f32> = decode(codec, &bytes, values.len()).iter().map(|value| before + value).collect();
            let mut sum = vec![before; values.len()];
            codec.decode_add(&bytes, &mut sum);
            prop_assert_eq!(bits(&sum), bits(&expected), "{}", codec.name());
        }
    }

    #[test]
    fn pieces_make_the_bytes_of_the_whole(values in some_values(), stream in any::<u64>(), blocks in 1usize..4) {
        for codec in KNOWN {
            let numbers: Vec<u64> = (0..values.len().div_ceil(codec.block()) as u64).map(|n| n * n + 5).collect();
            let whole = encode(codec, &values, Salt { stream, blocks: &numbers, first: 0 });
            let pieces = values.chunks(blocks * codec.block()).zip(numbers.chunks(blocks));
            let joined: Vec<u8> = pieces.flat_map(|(v, numbers)| encode(codec, v, Salt { stream, blocks: numbers, first: 0 })).collect();
            prop_assert_eq!(whole, joined, "{}", codec.name());
        }
    }

    #[test]
    fn what_is_lost_is_kept_for_later(rounds in vec(vec(-1f32..1.0, 700), 1..12), stream in any::<u64>()) {
        for codec in KNOWN {
            let mut residual = vec![0f32; 700];
            let (mut wanted, mut sent) = (vec![0f64; 700], vec![0f64; 700]);
            for (round, values) in rounds.iter().enumerate() {
                let salt = Salt { stream: stream ^ round as u64, ..Salt::default() };
                let mut bytes = vec![0; codec.encoded_len(700)];
                let kept = residual.clone();
                codec.encode_residual(values, &mut residual, salt, &mut bytes);
                let sum: Vec<f32> = values.iter().zip(&kept).map(|(value, kept)| value + kept).collect();
                prop_assert_eq!(&bytes, &encode(codec, &sum, salt), "{}", codec.name());
                wanted.iter_mut().zip(values).for_each(|(wanted, value)| *wanted += f64::from(*value));
                sent.iter_mut().zip(decode(codec, &bytes, 700)).for_each(|(sent, value)| *sent += f64::from(value));
            }
            for ((wanted, sent), residual) in wanted.iter().zip(&sent).zip(&residual) {
                let missing = wanted - sent - f64::from(*residual);
                prop_assert!(missing.abs() < 1e-6 * rounds.len() as f64 * 10.0, "{}: {missing}", codec.name());
            }
        }
    }

    #[test]
    fn a_block_that_is_not_finite_says_so_and_spoils_no_other(
        mut values in vec(-1f32..1.0, 1..5000), at in any::<prop::sample::Index>(),
        odd in prop_oneof![Just(f32::NAN), Just(-f32::NAN), Just(f32::INFINITY), Just(f32::NEG_INFINITY)],
    ) {
        let at = at.index(values.len());
        let old: Vec<f32> = values.iter().map(|value| value * 0.125).collect();
        let mut clean = values.clone();
        // in the middle of the other values, so that the others' encoding does not depend on it
        clean[at] = 0.0;
        values[at] = odd;
        for codec in KNOWN {
            let mut residual = old.clone();
            let mut bytes = vec![0; codec.encoded_len(values.len())];
            codec.encode_residual(&values, &mut residual, Salt::default(), &mut bytes);
            prop_assert_eq!(codec.non_finite(&bytes), 1, "{}", codec.name());
            let back = decode(codec, &bytes, values.len());
            let (mut clean_residual, mut clean_bytes) = (old.clone(), bytes.clone());
            codec.encode_residual(&clean, &mut clean_residual, Salt::default(), &mut clean_bytes);
            let clean_back = decode(codec, &clean_bytes, values.len());
            for place in 0..values.len() {
                let (back, residual) = (back[place], residual[place]);
                if place / codec.block() == at / codec.block() {
                    prop_assert!(!back.is_finite() && (codec.block() == 1 || back.is_nan()), "{}: {back}", codec.name());
                    prop_assert_eq!(residual.to_bits(), old[place].to_bits());
                } else {
                    prop_assert_eq!(back.to_bits(), clean_back[place].to_bits());
                    prop_assert_eq!(residual.to_bits(), clean_residual[place].to_bits());
                }
            }
        }
    }

    #[test]
    fn wide_instructions_change_no_bit(
        values in prop_oneof![4 => some_values(), 1 => vec(any::<u32>().prop_map(f32::from_bits), 0..5000)],
        stream in any::<u64>(), before in vec(-1f32..1.0, 6000),
    ) {
        let (salt, before) = (Salt { stream, blocks: &[3, 1], first: 0 }, &before[..values.len()]);
        for (wide, portable) in PAIRS {
            let bytes = encode(wide, &values, salt);
            prop_assert_eq!(&bytes, &encode(portable, &values, salt), "{}", wide.name());
            prop_assert_eq!(bits(&decode(wide, &bytes, values.len())), bits(&decode(portable, &bytes, values.len())));
            let run = |codec: &dyn Codec| {
                let (mut sum, mut residual, mut bytes) = (before.to_vec(), before.to_vec(), bytes.clone());
                codec.decode_add(&bytes, &mut sum);
                codec.encode_residual(&values, &mut residual, salt, &mut bytes);
                (bits(&sum), bits(&residual), bytes)
            };
            prop_assert_eq!(run(wide), run(portable), "{}", wide.name());
        }
    }

    #[test]
    fn any_bytes_decode_to_something(bytes in vec(any::<u8>(), 0..3000), count in 0usize..3000) {
        for codec in KNOWN {
            let mut of_count = bytes.clone();
            of_count.resize(codec.encoded_len(count), 0x5a);
            let mut out = vec![0.0; count];
            codec.decode(&of_count, &mut out);
            codec.decode_add(&of_count, &mut out);
            prop_assert!(codec.non_finite(&of_count) <= count.div_ceil(codec.block()));
        }
    }
}

#[test]
fn sizes_are_as_promised() {
    let of = |codec: &dyn Codec, count| codec.encoded_len(count);
    for codec in KNOWN {
        assert_eq!(of(codec, 0), 0);
        assert!(codec.block() <= super::ROOM && of(codec, codec.block()) <= super::ROOM);
    }
    let ratio = |codec: &dyn Codec| of(codec, 1 << 20) as f64 / (4 << 20) as f64;
    assert!(ratio(&MinMax8) < 0.26 && ratio(&Qsgd) < 0.26 && ratio(&Int4) < 0.135 && ratio(&OneBit) < 0.032);
    assert_eq!([of(&MinMax8, 257), of(&Int4, 129), of(&Qsgd, 513), of(&OneBit, 2049)], [273, 73, 521, 265]);
}

#[test]
fn numbers_and_names_tell_codecs_apart() {
    for (at, codec) in KNOWN.iter().enumerate() {
        assert_eq!(usize::from(codec.code()), at + 1);
        assert!(super::by_name(codec.name()).is_ok_and(|found| found.code() == codec.code()));
        assert!(super::by_code(codec.code()).is_some_and(|found| found.name() == codec.name()));
    }
    assert!(super::by_name("nothing").is_err_and(|error| error.message.contains("minmax8")));
}

#[test]
fn dithering_is_right_in_the_mean_and_a_function_of_its_salt() {
    let values: Vec<f32> =
        (0..700).map(|i| (i as f32 * 0.37).sin() * 0.01 * if i == 9 { 100.0 } else { 1.0 }).collect();
    let rounds = 4000;
    let mut sums = vec![0f64; values.len()];
    for stream in 0..rounds {
        let bytes = encode(&Qsgd, &values, Salt { stream, ..Salt::default() });
        sums.iter_mut().zip(decode(&Qsgd, &bytes, values.len())).for_each(|(sum, value)| *sum += f64::from(value));
    }
    for (at, (sum, value)) in sums.iter().zip(&values).enumerate() {
        // the second record begins at byte 516
        let step = f64::from(super::scale::scale(&encode(&Qsgd, &values, Salt::default())[at / 512 * 516..]));
        // a coin with the probability of the fraction, in steps
        let fraction = (f64::from(value.abs()) / step).fract();
        let sigma = step * (fraction * (1.0 - fraction) / rounds as f64).sqrt();
        let error = sum / rounds as f64 - f64::from(*value);
        assert!(error.abs() <= 4.0 * sigma + step * 1e-6, "{error} at {at}, sigma {sigma}");
    }
    let of = |stream, blocks: &[u64]| encode(&Qsgd, &values, Salt { stream, blocks, first: 0 });
    assert_eq!(of(1, &[]), of(1, &[0, 1]));
    assert!(of(1, &[]) != of(2, &[]) && of(1, &[]) != of(1, &[1, 0]));
    // blocks with the same content and other numbers are rounded in another way
    let twice = encode(&Qsgd, &[&values[..512], &values[..512]].concat(), Salt::default());
    assert_ne!(twice[..516], twice[516..]);
}
