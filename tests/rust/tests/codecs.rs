//! all_reduce through a codec: the bits that the rule demands, within the stated bound, whatever the way; and long data.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]

use offbeat_core::codec::{BFloat16, Codec, Float16, Int4, KNOWN, MinMax8, OneBit, Qsgd};
use offbeat_core::config::Tuning;
use offbeat_core::dtype::{DType, Op};
use offbeat_tests::reference::{self, Values, difference, fill, hosts, numbers};
use offbeat_tests::tensor::{Memory, Tensor, all_reduce, run};
use offbeat_tests::{ALWAYS_SHORT, LAYOUTS, NEVER_SHORT, Rank, Setup, TINY};

fn inputs(rank: &Rank, dtype: DType, count: usize) -> Vec<Vec<u8>> {
    (0..rank.world()).map(|rank| fill(dtype, Values::Finite, (count * 16 + rank) as u64, count)).collect()
}

fn coded(rank: &Rank, memory: Memory, dtype: DType, op: Op, count: usize, codec: &'static dyn Codec) {
    let labels: Vec<&str> = rank.layout.iter().map(String::as_str).collect();
    let inputs = inputs(rank, dtype, count);
    let what = format!("{} on {dtype}[{count}], {op}, {memory:?}, {labels:?}", codec.name());
    let tensor = Tensor::new(rank, memory, dtype, &inputs[rank.rank]);
    run(rank.engine().world(), all_reduce(&tensor, op, Some(codec))).unwrap_or_else(|e| panic!("{what}: {e}"));
    let got = tensor.bytes();
    let (expected, bounds) = reference::reduce_coded(&hosts(&labels), &inputs, dtype, op, codec);
    // the reference draws other random numbers, so a stochastic codec is held to its bound only
    if codec.is_biased()
        && let Some(difference) = difference(dtype, &got, &expected)
    {
        panic!("{what}: {difference}");
    }
    let exact = reference::reduce(&hosts(&labels), &inputs, dtype, op);
    for ((got, exact), bound) in numbers(dtype, &got).iter().zip(numbers(dtype, &exact)).zip(bounds) {
        // what the last encoding may lose depends on the sum that was encoded, which is another one here
        let bound = if codec.is_biased() { bound } else { bound * 1.1 };
        assert!((got - exact).abs() <= f64::from(bound), "{what}: {got} is further than {bound} from {exact}");
    }
}

#[test]
fn codecs_keep_the_rule_and_the_bound_on_every_way() {
    for layout in LAYOUTS {
        for tuning in [TINY, NEVER_SHORT, ALWAYS_SHORT] {
            Setup::new(layout, tuning).spawn(|rank| {
                let mut turn = 0;
                for dtype in [DType::F32, DType::F16, DType::BF16] {
                    for count in [0, 1, 2, 7, 15, 16, 17, 33, 64, 97, 500, 1000] {
                        for codec in [&Float16 as &dyn Codec, &BFloat16] {
                            turn += 1;
                            let op = if turn % 4 < 2 { Op::Sum } else { Op::Mean };
                            coded(rank, Memory::ALL[turn % 3], dtype, op, count, codec);
                        }
                    }
                }
            });
        }
    }
}

/// Blocks of up to 2048 elements in chunks that would be shorter: data is cut between blocks only.
#[test]
fn blocks_stay_whole_on_every_way() {
    for layout in LAYOUTS {
        for tuning in [TINY, ALWAYS_SHORT] {
            Setup::new(layout, tuning).spawn(|rank| {
                let mut turn = 0;
                for dtype in [DType::F32, DType::F16, DType::BF16] {
                    for count in [0, 1, 127, 129, 513, 2047, 2049, 9000] {
                        for codec in [&MinMax8 as &dyn Codec, &Int4, &Qsgd, &OneBit] {
                            turn += 1;
                            let op = if turn % 5 < 3 { Op::Sum } else { Op::Mean };
                            coded(rank, Memory::ALL[turn % 3], dtype, op, count, codec);
                        }
                    }
                }
            });
        }
    }
}

#[test]
fn random_numbers_depend_on_the_call_and_not_on_the_way() {
    for layout in [&["a", "b"][..], &["a", "b", "c"], &["a", "a", "b"]] {
        let results = [TINY, NEVER_SHORT, ALWAYS_SHORT].map(|tuning| {
            Setup::new(layout, tuning).spawn(|rank| {
                let inputs = inputs(rank, DType::F32, 9000);
                let twice = [(); 2].map(|()| {
                    let tensor = Tensor::new(rank, Memory::Plain, DType::F32, &inputs[rank.rank]);
                    run(rank.engine().world(), all_reduce(&tensor, Op::Sum, Some(&Qsgd))).unwrap();
                    tensor.bytes()
                });
                assert!(twice[0] != twice[1], "two calls rounded alike");
                twice
            })
        });
        assert!(results.iter().flatten().all(|result| *result == results[0][0]), "{layout:?}");
    }
}

#[test]
fn what_is_not_finite_reaches_every_rank_in_its_block_only() {
    for layout in [&["a", "b"][..], &["a", "b", "c"], &["a", "a", "b"]] {
        for tuning in [TINY, ALWAYS_SHORT] {
            Setup::new(layout, tuning).spawn(|rank| {
                for (codec, odd) in KNOWN.into_iter().zip([f32::NAN, f32::INFINITY].into_iter().cycle()) {
                    let mut values = vec![0.25f32; 5000];
                    if rank.rank == 1 {
                        values[2500] = odd;
                    }
                    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
                    let tensor = Tensor::new(rank, Memory::Plain, DType::F32, &bytes);
                    run(rank.engine().world(), all_reduce(&tensor, Op::Mean, Some(codec))).unwrap();
                    let block = 2500 / codec.block();
                    for (at, value) in numbers(DType::F32, &tensor.bytes()).iter().enumerate() {
                        if at / codec.block() == block {
                            assert!(!value.is_finite(), "{} at {at}: {value}", codec.name());
                        } else {
                            assert!((value - 0.25).abs() < 0.01, "{} at {at}: {value}", codec.name());
                        }
                    }
                }
            });
        }
    }
}

#[test]
fn what_a_codec_cannot_do_is_refused_before_anything_is_sent() {
    Setup::new(&["a", "b"], TINY).spawn(|rank| {
        let group = rank.engine().world();
        for (dtype, op) in [(DType::F64, Op::Sum), (DType::I32, Op::Sum), (DType::F32, Op::Max)] {
            let tensor = Tensor::new(rank, Memory::Plain, dtype, &[0; 32]);
            let error = run(group, all_reduce(&tensor, op, Some(&Float16))).unwrap_err();
            assert!(error.message.contains("float16") && error.message.contains("try:"), "{error}");
        }
        // the group goes on
        coded(rank, Memory::Plain, DType::F32, Op::Sum, 5, &Float16);
    });
}

/// Data so long that sums inside of hosts and the wire overlap slice by slice, over several streams; and five
/// hosts.
#[test]
fn long_data_in_slices_over_several_streams() {
    let tuning = Tuning { chunk: 40_000, segment: 100_000, ..Tuning::default() };
    let five = &["a", "b", "c", "d", "e"][..];
    for (layout, streams) in [
        (&["a", "a", "b", "b"][..], 3),
        (&["a", "b", "a"], 3),
        (&["a", "b", "a", "b", "c"], 3),
        (&["a", "a"], 3),
        (five, 1),
        (five, 3),
    ] {
        Setup::new(layout, tuning).streams(streams).spawn(|rank| {
            let labels: Vec<&str> = rank.layout.iter().map(String::as_str).collect();
            let count = 800_011;
            for (turn, (dtype, op)) in [(DType::F32, Op::Sum), (DType::BF16, Op::Mean)].into_iter().enumerate() {
                let inputs = inputs(rank, dtype, count);
                let tensor = Tensor::new(rank, [Memory::Mixed, Memory::Plain][turn], dtype, &inputs[rank.rank]);
                run(rank.engine().world(), all_reduce(&tensor, op, None)).unwrap();
                let expected = reference::reduce(&hosts(&labels), &inputs, dtype, op);
                assert_eq!(difference(dtype, &tensor.bytes(), &expected), None);
            }
            for codec in [&BFloat16 as &dyn Codec, &MinMax8, &OneBit] {
                coded(rank, Memory::Shared, DType::F32, Op::Mean, count, codec);
            }
        });
    }
}
