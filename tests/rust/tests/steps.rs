//! What each step of a pipeline computes, between ranks that are threads: means that are exact where nothing is lost,
//! losses that are made up for later, equal bits on all ranks, and states that survive new buckets.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use offbeat_core::algorithm::{Description, Function, Keeper, Room, Saved, Step};
use offbeat_core::bucket::{Sizes, Tensor};
use offbeat_core::buffer::Place;
use offbeat_core::codec;
use offbeat_core::config::Tuning;
use offbeat_core::dtype::{DType, Op};
use offbeat_core::scheduler::Scheduler;
use offbeat_core::{Error, Kind};
use offbeat_tests::reference;
use offbeat_tests::world::{Rank, spawn};

const LAYOUTS: [&[&str]; 5] =
    [&["a", "a"], &["a", "b"], &["a", "b", "c"], &["a", "a", "b", "b"], &["a", "a", "a", "b"]];
/// (elements, rows).
const SHAPES: [(usize, usize); 5] = [(6 * 40, 6), (17, 1), (33 * 20, 33), (1, 1), (0, 1)];

fn tensors() -> Vec<Tensor> {
    let tensor = |(at, (count, rows)): (usize, &(usize, usize))| Tensor {
        name: format!("layer{at}.weight"),
        count: *count,
        rows: *rows,
        dtype: DType::F32,
        place: Place::Host,
    };
    SHAPES.iter().enumerate().map(tensor).collect()
}

fn all_reduce(codec: Option<&str>, feedback: bool) -> Step {
    let codec = codec.map(|name| codec::by_name(name).unwrap());
    Step::AllReduce { op: Op::Mean, codec, feedback, seed: 0, hierarchical: true }
}

fn momentum() -> Step {
    Step::Momentum { betas: vec![0.9; SHAPES.len()].into() }
}

fn start(rank: &Rank, steps: Vec<Step>, bytes: usize) -> Result<Scheduler, Error> {
    begin(rank, Description::of_gradients(steps), bytes)
}

fn begin(rank: &Rank, description: Description, bytes: usize) -> Result<Scheduler, Error> {
    let lanes = rank.engine().lanes(description.is_flat(), None).unwrap();
    rank.engine().scheduler(lanes, 0, tensors(), description, Sizes::new(bytes).unwrap())
}

/// A value for an element: gaussian-like, another for each rank, round and place.
fn value(rank: usize, round: u64, tensor: usize, at: usize) -> f32 {
    let draw = |salt: u64| {
        let bits = reference::mix(rank as u64 * 1000 + round, salt + tensor as u64 * 1_000_003 + at as u64);
        (bits >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    draw(1) + draw(2 << 32) + draw(3 << 32)
}

fn mean(world: usize, round: u64, tensor: usize, at: usize) -> f32 {
    (0..world).map(|rank| value(rank, round, tensor, at)).sum::<f32>() / world as f32
}

/// Lets `work` at a tensor's values, which are not under way.
fn with_floats<T>(scheduler: &Scheduler, tensor: usize, work: impl FnOnce(&mut [f32]) -> T) -> T {
    for (bucket, memory) in scheduler.buckets() {
        if let Some(slot) = bucket.slots.iter().find(|slot| slot.tensor == tensor) {
            // SAFETY: the slot is as long as the tensor, and the memory is held here.
            return work(unsafe {
                let start = memory.start().cast::<f32>().add(slot.offset);
                std::slice::from_raw_parts_mut(start, SHAPES[tensor].0)
            });
        }
    }
    panic!("tensor {tensor} has no place")
}

/// A round; gives the results of all tensors.
fn round(rank: &Rank, scheduler: &Scheduler, number: u64) -> Vec<Vec<f32>> {
    round_of(scheduler, |tensor, at| value(rank.rank, number, tensor, at))
}

fn round_of(scheduler: &Scheduler, value: impl Fn(usize, usize) -> f32) -> Vec<Vec<f32>> {
    for tensor in 0..SHAPES.len() {
        with_floats(scheduler, tensor, |room| {
            room.iter_mut().enumerate().for_each(|(at, room)| *room = value(tensor, at));
        });
        scheduler.mark_ready(tensor).unwrap();
    }
    scheduler.finish(None).unwrap();
    (0..SHAPES.len()).map(|tensor| with_floats(scheduler, tensor, |values| values.to_vec())).collect()
}

fn bits(results: &[Vec<f32>]) -> Vec<u32> {
    results.iter().flatten().map(|value| value.to_bits()).collect()
}

fn assert_close(results: &[Vec<f32>], wanted: impl Fn(usize, usize) -> f32, tolerance: f32) {
    for (tensor, values) in results.iter().enumerate() {
        for (at, value) in values.iter().enumerate() {
            let wanted = wanted(tensor, at);
            assert!((value - wanted).abs() <= tolerance, "tensor {tensor} at {at}: {value}, not {wanted}");
        }
    }
}

#[test]
fn steps_that_lose_nothing_give_the_mean() {
    let full_rank = Step::LowRank { rank: 64, rate: 0.0, seed: 3, hierarchical: true };
    let everything = Step::Select { ratio: 1.0, hierarchical: true };
    for layout in LAYOUTS {
        for steps in [
            vec![everything.clone()],
            vec![full_rank.clone()],
            vec![momentum(), all_reduce(None, false), Step::Gradient],
        ] {
            let results = spawn(layout, Tuning::default(), move |rank| {
                let scheduler = start(rank, steps.clone(), 2000).unwrap();
                for number in 0..3 {
                    let results = round(rank, &scheduler, number);
                    let tolerance = if matches!(steps[0], Step::Momentum { .. }) { 1e-5 } else { 2e-6 };
                    assert_close(&results, |tensor, at| mean(layout.len(), number, tensor, at), tolerance);
                }
                bits(&round(rank, &scheduler, 9))
            });
            assert!(results.iter().all(|other| *other == results[0]), "replicas differ on {layout:?}");
        }
    }
}

#[test]
fn momentum_is_the_same_inside_of_an_exchange_and_beside_it() {
    // the bits of all results, and of what is kept under each name without the number of its step
    let run = |layout, steps: Vec<Step>| {
        spawn(layout, Tuning::default(), move |rank| {
            let scheduler = start(rank, steps.clone(), 2000).unwrap();
            let results: Vec<Vec<u32>> = (0..4).map(|number| bits(&round(rank, &scheduler, number))).collect();
            // a value that is not finite spoils its block, and no momentum
            let spoiled = round_of(&scheduler, |tensor, at| if (tensor, at) == (2, 5) { f32::NAN } else { 1.0 });
            let after = bits(&round(rank, &scheduler, 5));
            let saved = (0..SHAPES.len()).flat_map(|tensor| scheduler.saved(tensor).unwrap());
            let named = |saved: Saved| {
                let values = saved.values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
                (saved.name.split_once('.').unwrap().1.to_owned(), values)
            };
            (results, spoiled[2][5].is_nan(), after, saved.map(named).collect::<Vec<_>>())
        })
    };
    for layout in [LAYOUTS[1], LAYOUTS[2], LAYOUTS[4]] {
        for (codec, feedback) in [("onebit", true), ("int4", true), ("minmax8", false)] {
            let exchange = || all_reduce(Some(codec), feedback);
            let inside = run(layout, vec![momentum(), exchange(), Step::Gradient]);
            // a step in between keeps them apart
            let nothing = Step::Apply { function: Arc::new(Nothing), states: Vec::new() };
            let beside = run(layout, vec![momentum(), nothing, exchange(), Step::Gradient]);
            assert!(inside == beside, "{codec} on {layout:?}");
            assert!(inside.iter().all(|(_, spoiled, ..)| *spoiled));
        }
    }
}

/// What steps keep of an element of a tensor under a name, summed over some ranks.
fn kept(saved: &[Vec<Vec<Saved>>], ranks: &[usize], name: &str, tensor: usize, at: usize) -> f32 {
    let of = |rank: &usize| {
        let entry = saved[*rank][tensor].iter().find(|saved| saved.name.ends_with(name));
        entry.and_then(|saved| saved.values.get(at)).copied().unwrap_or_default()
    };
    ranks.iter().map(of).sum()
}

#[test]
fn what_is_lost_is_kept_to_be_sent_later() {
    // over many rounds the sum of results differs from the sum of means by what is kept at the end, and by nothing else
    let lossy: [(&str, Vec<Step>); 5] = [
        ("select", vec![Step::Select { ratio: 0.1, hierarchical: true }]),
        ("low_rank", vec![Step::LowRank { rank: 2, rate: 0.0, seed: 3, hierarchical: true }]),
        ("onebit", vec![momentum(), all_reduce(Some("onebit"), true), Step::Gradient]),
        ("int4", vec![momentum(), all_reduce(Some("int4"), true), Step::Gradient]),
        ("minmax8", vec![all_reduce(Some("minmax8"), true)]),
    ];
    const ROUNDS: u64 = 40;
    for layout in [LAYOUTS[1], LAYOUTS[2], LAYOUTS[3]] {
        for (name, steps) in lossy.clone() {
            let ended = spawn(layout, Tuning::default(), move |rank| {
                let scheduler = start(rank, steps.clone(), 2000).unwrap();
                let mut sums: Vec<Vec<f32>> = SHAPES.iter().map(|(count, _)| vec![0.0; *count]).collect();
                for number in 0..ROUNDS {
                    let results = round(rank, &scheduler, number);
                    sums.iter_mut().flatten().zip(results.iter().flatten()).for_each(|(sum, value)| *sum += value);
                }
                (sums, (0..SHAPES.len()).map(|tensor| scheduler.saved(tensor).unwrap()).collect::<Vec<_>>())
            });
            let (sums, saved): (Vec<_>, Vec<_>) = ended.into_iter().unzip();
            assert!(sums.iter().all(|other| bits(other) == bits(&sums[0])), "{name}: replicas differ on {layout:?}");
            let hosts = reference::hosts(layout);
            let (world, everyone) = (layout.len(), (0..layout.len()).collect::<Vec<_>>());
            // what the ranks of a host have of a sum is the same on all of them
            let firsts: Vec<usize> = hosts.iter().map(|host| host[0]).collect();
            // of two hosts both sum everything
            let owners = if hosts.len() == 2 { &hosts[0] } else { &everyone };
            let lost = |tensor, at| match name {
                "select" => kept(&saved, &firsts, "left", tensor, at) / world as f32,
                "low_rank" => kept(&saved, &everyone, "left", tensor, at) / world as f32,
                _ => {
                    let shares = kept(&saved, &everyone, "shares", tensor, at) / world as f32;
                    let gain = if name == "minmax8" { 1.0 } else { 10.0 };
                    (shares + kept(&saved, owners, "results", tensor, at)) * gain
                }
            };
            let wanted = |tensor, at| (0..ROUNDS).map(|number| mean(world, number, tensor, at)).sum::<f32>();
            let mut some = 0.0f32;
            for (tensor, values) in sums[0].iter().enumerate() {
                for (at, sum) in values.iter().enumerate() {
                    let (lost, wanted) = (lost(tensor, at), wanted(tensor, at));
                    some = some.max(lost.abs());
                    let tolerance = 1e-3 * (1.0 + lost.abs());
                    assert!(
                        (sum + lost - wanted).abs() < tolerance,
                        "{name} on {layout:?}, tensor {tensor} at {at}: {sum} + {lost} is not {wanted}"
                    );
                }
            }
            assert!(some > 1e-4, "{name} on {layout:?} loses nothing");
        }
    }
}

#[test]
fn what_is_kept_of_a_tensor_waits_while_nobody_uses_it() {
    const IDLE: usize = 2;
    let low_rank = Step::LowRank { rank: 2, rate: 0.0, seed: 3, hierarchical: true };
    for steps in [
        vec![low_rank],
        vec![Step::Select { ratio: 0.1, hierarchical: true }],
        vec![all_reduce(Some("int4"), true)],
        vec![momentum(), all_reduce(Some("onebit"), true), Step::Gradient],
    ] {
        for layout in [&["a", "b", "c"][..], &["a", "a", "b"]] {
            let steps = steps.clone();
            let moved = spawn(layout, Tuning::default(), move |rank| {
                let scheduler = start(rank, steps.clone(), 2000).unwrap();
                for number in 0..3 {
                    round(rank, &scheduler, number);
                }
                let saved = || [IDLE, 0].map(|tensor| scheduler.saved(tensor).unwrap());
                let before = saved();
                let step = |users: std::ops::Range<usize>| {
                    for tensor in 0..SHAPES.len() {
                        if tensor == IDLE && !users.contains(&rank.rank) {
                            scheduler.mark_absent(tensor).unwrap();
                        } else {
                            with_floats(&scheduler, tensor, |room| room.fill(0.5));
                            scheduler.mark_ready(tensor).unwrap();
                        }
                    }
                    scheduler.finish(None).unwrap()
                };
                assert_eq!(step(0..0), [0; 0]);
                let [idle, other] = saved();
                assert_eq!(idle, before[0], "{steps:?}");
                // where one rank uses it all have a result, and what is kept goes on
                let gained = step(0..1);
                assert_eq!(gained, if rank.rank == 0 { vec![] } else { vec![IDLE] });
                (saved()[0] != before[0], other != before[1])
            });
            // whoever keeps something of an element
            assert!(moved.iter().any(|(idle, _)| *idle) && moved.iter().any(|(_, other)| *other));
        }
    }
}

#[test]
fn a_matrix_of_low_rank_is_found() {
    spawn(&["a", "b", "c"], Tuning::default(), |rank| {
        let scheduler =
            start(rank, vec![Step::LowRank { rank: 2, rate: 0.0, seed: 0, hierarchical: true }], 1 << 20).unwrap();
        // the sum of two outer products, of which every rank has another multiple
        let matrix = |tensor: usize, at: usize| {
            let cols = SHAPES[tensor].0 / SHAPES[tensor].1;
            let (row, col) = ((at / cols) as f32, (at % cols) as f32);
            (row - 2.0) * (col * 0.3).sin() + (row * 0.7).cos() * (col - 5.0)
        };
        let factor = (rank.rank + 1) as f32;
        let results = round_of(&scheduler, |tensor, at| factor * matrix(tensor, at));
        for tensor in [0, 2] {
            for (at, value) in results[tensor].iter().enumerate() {
                let wanted = 2.0 * matrix(tensor, at);
                assert!((value - wanted).abs() < 1e-3, "tensor {tensor} at {at}: {value}, not {wanted}");
            }
        }
    });
}

#[test]
fn the_largest_elements_are_sent_and_the_others_kept() {
    spawn(&["a", "b"], Tuning::default(), |rank| {
        let scheduler = start(rank, vec![Step::Select { ratio: 0.1, hierarchical: true }], 1 << 20).unwrap();
        // tensor 0 has 240 elements, of which 24 are sent; both ranks have the same ones
        let results = round_of(&scheduler, |_, at| at as f32);
        let wanted: Vec<f32> = (0..240).map(|at| if at < 216 { 0.0 } else { at as f32 }).collect();
        assert_eq!(results[0], wanted);
        let saved = scheduler.saved(0).unwrap();
        assert_eq!((saved.len(), saved[0].name.as_str(), saved[0].keeper), (1, "0.left", Keeper::Each));
        let left: Vec<f32> = (0..240).map(|at| if at < 216 { at as f32 } else { 0.0 }).collect();
        assert_eq!(saved[0].values, left);
        // what was kept counts: element 215 has grown to 430
        assert_eq!(round_of(&scheduler, |_, at| at as f32)[0][215], 430.0);
        // tensor 1 is no matrix, and is sent whole
        assert_eq!(results[1], (0..17).map(|at| at as f32).collect::<Vec<_>>());
    });
}

#[test]
fn a_warm_up_does_something_else_first() {
    spawn(&["a", "b"], Tuning::default(), |rank| {
        let steps = vec![Step::Select { ratio: 0.01, hierarchical: true }];
        let description =
            Description { warmup: 2, first: vec![all_reduce(None, false)], ..Description::of_gradients(steps) };
        let scheduler = begin(rank, description, 1 << 20).unwrap();
        for number in 0..2 {
            let results = round(rank, &scheduler, number);
            assert_close(&results, |tensor, at| mean(2, number, tensor, at), 1e-6);
        }
        let results = round(rank, &scheduler, 2);
        assert!(results[0].iter().filter(|value| **value == 0.0).count() > 200, "few are sent after the warm-up");
    });
}

#[test]
fn states_move_when_buckets_change() {
    for steps in [
        vec![Step::Select { ratio: 0.1, hierarchical: true }],
        vec![Step::LowRank { rank: 1, rate: 2.0, seed: 0, hierarchical: true }],
        vec![momentum(), all_reduce(Some("minmax8"), false), Step::Gradient],
        vec![Step::Apply { function: Arc::new(Count::default()), states: vec!["seen".into()] }],
    ] {
        spawn(&["a", "b", "a"], Tuning::default(), move |rank| {
            let run = |sizes: [usize; 3]| {
                let scheduler = start(rank, steps.clone(), 1 << 20).unwrap();
                let order: Vec<usize> = (0..SHAPES.len()).collect();
                let mut results = Vec::new();
                for (number, bytes) in sizes.into_iter().enumerate() {
                    results.push(bits(&round(rank, &scheduler, number as u64)));
                    let sizes = Sizes::new(bytes).unwrap();
                    scheduler.rebucket(&order, &vec![false; order.len()], sizes, None).unwrap();
                }
                results.push(bits(&round(rank, &scheduler, 7)));
                (results, (0..SHAPES.len()).map(|tensor| scheduler.saved(tensor).unwrap()).collect::<Vec<_>>())
            };
            assert!(run([1, 1, 1]) == run([1 << 20, 3000, 700]), "{} depends on buckets", steps[0].name());
        });
    }
}

/// Leaves a bucket as it is.
#[derive(Debug)]
struct Nothing;

impl Function for Nothing {
    fn call(&self, _: &Room<'_>) -> Result<(), Error> {
        Ok(())
    }
}

/// Adds up what it has seen, and gives that.
#[derive(Debug, Default)]
struct Count(AtomicU64);

impl Function for Count {
    fn call(&self, room: &Room<'_>) -> Result<(), Error> {
        self.0.fetch_add(1, Ordering::Relaxed);
        if room.step == 99 {
            return Err(Error::new(Kind::InvalidArgument, "enough"));
        }
        let [("seen", seen)] = room.states.as_slice() else { panic!("a state called seen") };
        // SAFETY: both are as long as the bucket, and nobody else uses them meanwhile.
        let (values, seen) = unsafe {
            (
                std::slice::from_raw_parts_mut(room.bucket.start().cast::<f32>(), room.count),
                std::slice::from_raw_parts_mut(seen.start().cast::<f32>(), room.count),
            )
        };
        for (value, seen) in values.iter_mut().zip(seen) {
            *seen += *value;
            *value = *seen;
        }
        Ok(())
    }
}

#[test]
fn a_function_of_the_users_keeps_a_state_and_its_failure_is_told() {
    let stories = spawn(&["a", "b"], Tuning::default(), |rank| {
        let function = Arc::new(Count::default());
        let apply = Step::Apply { function: function.clone(), states: vec!["seen".into()] };
        let scheduler = start(rank, vec![apply, all_reduce(None, false)], 1 << 20).unwrap();
        round_of(&scheduler, |_, _| 1.0);
        let results = round_of(&scheduler, |_, _| rank.rank as f32);
        assert_close(&results, |_, _| 1.5, 0.0);
        assert!(function.0.load(Ordering::Relaxed) >= 2);
        // only rank 1 fails, and both tell
        scheduler.resume(if rank.rank == 1 { 99 } else { 2 });
        (0..SHAPES.len()).for_each(|tensor| scheduler.mark_ready(tensor).unwrap());
        scheduler.finish(None).unwrap_err().message
    });
    assert!(stories.iter().all(|story| story.contains("enough")), "{stories:?}");
}

#[test]
fn a_value_that_is_not_finite_is_known_to_all_and_spoils_one_round_only() {
    for steps in [
        vec![Step::Select { ratio: 0.1, hierarchical: true }],
        vec![Step::LowRank { rank: 2, rate: 0.0, seed: 0, hierarchical: true }],
        vec![momentum(), all_reduce(Some("int4"), true), Step::Gradient],
        vec![all_reduce(Some("minmax8"), true)],
    ] {
        for layout in [LAYOUTS[2], LAYOUTS[3]] {
            let steps = steps.clone();
            spawn(layout, Tuning::default(), move |rank| {
                let scheduler = start(rank, steps.clone(), 1 << 20).unwrap();
                round(rank, &scheduler, 0);
                assert!(!scheduler.was_non_finite());
                let bad = |tensor, at| tensor == 0 && at == 7 && rank.rank == layout.len() - 1;
                let value = |tensor, at| if bad(tensor, at) { f32::NAN } else { value(rank.rank, 1, tensor, at) };
                let results = round_of(&scheduler, value);
                assert!(results[0][7].is_nan(), "{}: it is lost", steps[0].name());
                assert!(results[2].iter().all(|value| value.is_finite()), "{}: others too", steps[0].name());
                assert!(scheduler.was_non_finite(), "{}: rank {} does not know", steps[0].name(), rank.rank);
                for number in 2..4 {
                    let results = round(rank, &scheduler, number);
                    assert!(results.iter().flatten().all(|value| value.is_finite()), "{}", steps[0].name());
                    assert!(!scheduler.was_non_finite());
                }
            });
        }
    }
}

#[test]
fn what_low_rank_sends_whole_is_looked_at_too() {
    spawn(&["a", "b"], Tuning::default(), |rank| {
        let low_rank = Step::LowRank { rank: 2, rate: 0.0, seed: 0, hierarchical: true };
        let scheduler = start(rank, vec![low_rank], 1 << 20).unwrap();
        // tensor 1 is no matrix
        let bad = |tensor, at| tensor == 1 && at == 3 && rank.rank == 1;
        let results = round_of(&scheduler, |tensor, at| if bad(tensor, at) { f32::INFINITY } else { 1.0 });
        assert!(!results[1][3].is_finite() && results[2].iter().all(|value| value.is_finite()));
        assert!(scheduler.was_non_finite(), "rank {} does not know", rank.rank);
        round(rank, &scheduler, 1);
        assert!(!scheduler.was_non_finite());
    });
}

#[test]
fn bytes_before_and_after_are_those_of_values() {
    let values = SHAPES.iter().map(|(count, _)| *count as u64 * 4).sum::<u64>();
    let counted = |layout, steps: Vec<Step>| {
        spawn(layout, Tuning::default(), move |rank| {
            let scheduler = start(rank, steps.clone(), 1 << 20).unwrap();
            round(rank, &scheduler, 0);
            let count = scheduler.coded();
            (count.plain, count.coded)
        })
    };
    // so few are summed by every rank: shares and results of all of them, without what lies between tensors
    for layout in [LAYOUTS[1], LAYOUTS[2], LAYOUTS[3]] {
        let both = counted(layout, vec![all_reduce(Some("float16"), false)]);
        let (plain, coded) = both.iter().fold((0, 0), |sum, it| (sum.0 + it.0, sum.1 + it.1));
        let encoded = 2 * layout.len() as u64 * values;
        assert_eq!((plain, coded), (encoded, encoded / 2), "on {layout:?}");
    }
    // every other host gets a copy of the lists; without them each host would send its share of two rounds
    let lists: u64 = SHAPES
        .iter()
        .map(|(count, rows)| codec::TopK::new(*count, if *rows > 1 { 0.1 } else { 1.0 }).unwrap().encoded_len() as u64)
        .sum();
    for layout in LAYOUTS {
        let both = counted(layout, vec![Step::Select { ratio: 0.1, hierarchical: true }]);
        for ranks in reference::hosts(layout) {
            let (plain, coded) = ranks.iter().fold((0, 0), |sum, rank| (sum.0 + both[*rank].0, sum.1 + both[*rank].1));
            let hosts = reference::hosts(layout).len() as u64;
            assert_eq!(coded, (hosts - 1) * lists, "on {layout:?}");
            // of each rank it is rounded
            assert!(plain.abs_diff(2 * (hosts - 1) * values / hosts) <= 2, "on {layout:?}: {plain}");
        }
    }
}

#[test]
fn wrong_steps_do_not_start() {
    spawn(&["a"], Tuning::default(), |rank| {
        let refused = |steps: Vec<Step>| start(rank, steps, 1000).err().unwrap();
        for (steps, told) in [
            (vec![Step::Select { ratio: 0.0, hierarchical: true }], "ratio 0"),
            (vec![Step::Select { ratio: 2.0, hierarchical: true }], "ratio 2"),
            (vec![Step::LowRank { rank: 0, rate: 2.0, seed: 0, hierarchical: true }], "rank 0"),
            (vec![Step::LowRank { rank: 1, rate: -1.0, seed: 0, hierarchical: true }], "rate of compression"),
            (vec![Step::Momentum { betas: vec![1.0; SHAPES.len()].into() }], "beta 1"),
            (vec![all_reduce(None, false), Step::Gradient], "Gradient without Momentum before it"),
            (vec![momentum(), Step::Gradient, all_reduce(None, false), Step::Gradient], "Gradient without Momentum"),
            (vec![momentum(), all_reduce(None, false)], "Momentum without Gradient after it"),
            (vec![momentum(), momentum(), all_reduce(None, false), Step::Gradient], "Momentum without Gradient"),
            (vec![all_reduce(None, true)], "without a codec"),
        ] {
            let error = refused(steps);
            assert_eq!(error.kind, Kind::InvalidArgument);
            assert!(error.message.contains(told) && error.message.contains("try:"), "{error}");
        }
    });
}
