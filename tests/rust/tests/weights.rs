//! What the steps that work on weights compute, between ranks that are threads: outer steps by their formula, gossip that
//! preserves sums, and copies of peers that are theirs to the last bit.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]

use std::time::Duration;

use offbeat_core::algorithm::{Description, Step, What, When};
use offbeat_core::bucket::{Sizes, Tensor};
use offbeat_core::buffer::Place;
use offbeat_core::codec;
use offbeat_core::config::Tuning;
use offbeat_core::dtype::{DType, Op};
use offbeat_core::graph::Peers;
use offbeat_core::scheduler::Scheduler;
use offbeat_core::{Error, Kind};
use offbeat_tests::reference;
use offbeat_tests::world::{Rank, spawn};

const COUNTS: [usize; 4] = [300, 17, 700, 1];

fn start(rank: &Rank, steps: Vec<Step>) -> Result<Scheduler, Error> {
    let tensor = |(at, count): (usize, &usize)| Tensor {
        name: format!("layer{at}.weight"),
        count: *count,
        rows: 1,
        dtype: DType::F32,
        place: Place::Host,
    };
    let tensors = COUNTS.iter().enumerate().map(tensor).collect();
    let description = Description { what: What::Weights, when: When::AfterStep, ..Description::of_gradients(steps) };
    let lanes = rank.engine().lanes(false, None).unwrap();
    let scheduler = rank.engine().scheduler(lanes, 0, tensors, description, Sizes::new(2000).unwrap())?;
    fill(&scheduler, |_, _| 1.0);
    scheduler.begin(0).unwrap();
    Ok(scheduler)
}

/// Lets `work` at a tensor's weights.
fn floats<T>(scheduler: &Scheduler, tensor: usize, work: impl FnOnce(&mut [f32]) -> T) -> T {
    for (bucket, memory) in scheduler.buckets() {
        if let Some(slot) = bucket.slots.iter().find(|slot| slot.tensor == tensor) {
            // SAFETY: the slot is as long as the tensor; nothing is under way.
            return work(unsafe {
                std::slice::from_raw_parts_mut(memory.start().cast::<f32>().add(slot.offset), COUNTS[tensor])
            });
        }
    }
    panic!("tensor {tensor} has no place")
}

fn fill(scheduler: &Scheduler, value: impl Fn(usize, usize) -> f32) {
    for tensor in 0..COUNTS.len() {
        floats(scheduler, tensor, |weights| {
            weights.iter_mut().enumerate().for_each(|(at, room)| *room = value(tensor, at));
        });
    }
}

/// A round on the weights that are there; gives the new ones.
fn exchange(scheduler: &Scheduler) -> Vec<Vec<f32>> {
    (0..COUNTS.len()).for_each(|tensor| scheduler.mark_ready(tensor).unwrap());
    scheduler.finish(None).unwrap();
    weights(scheduler)
}

fn weights(scheduler: &Scheduler) -> Vec<Vec<f32>> {
    (0..COUNTS.len()).map(|tensor| floats(scheduler, tensor, |weights| weights.to_vec())).collect()
}

/// What a rank's optimizer adds to a weight in a step.
fn moved(rank: usize, step: u64, tensor: usize, at: usize) -> f32 {
    let bits = reference::mix(rank as u64 * 1000 + step, tensor as u64 * 1_000_003 + at as u64);
    (bits >> 40) as f32 / (1u64 << 24) as f32 - 0.5
}

fn move_on(scheduler: &Scheduler, rank: usize, step: u64) {
    for tensor in 0..COUNTS.len() {
        floats(scheduler, tensor, |weights| {
            weights.iter_mut().enumerate().for_each(|(at, x)| *x += moved(rank, step, tensor, at));
        });
    }
}

fn kept(scheduler: &Scheduler, name: &str) -> Vec<u32> {
    let of = |tensor| {
        let saved = scheduler.saved(tensor).unwrap();
        let entry = saved.iter().find(|saved| saved.name.ends_with(name)).unwrap();
        entry.values.iter().map(|value| value.to_bits()).collect::<Vec<_>>()
    };
    (0..COUNTS.len()).flat_map(of).collect()
}

fn replicas(peers: Peers, codec: Option<&str>, gamma: Option<f64>) -> Step {
    Step::Replicas { peers, codec: codec.map(|name| codec::by_name(name).unwrap()), gamma, seed: 1 }
}

#[test]
fn an_outer_step_is_nesterovs() {
    for layout in [&["a", "b"][..], &["a", "b", "c"], &["a", "a", "b"]] {
        spawn(layout, Tuning::default(), move |rank| {
            let mean = Step::AllReduce { op: Op::Mean, codec: None, feedback: false, seed: 0, hierarchical: true };
            let outer = Step::Outer { lr: 0.7, momentum: 0.9 };
            let scheduler = start(rank, vec![Step::Difference, mean, outer]).unwrap();
            let (mut anchor, mut speed) =
                (vec![vec![1.0f32; 700]; COUNTS.len()], vec![vec![0.0f32; 700]; COUNTS.len()]);
            for step in 0..4 {
                move_on(&scheduler, rank.rank, step);
                let results = exchange(&scheduler);
                for (tensor, values) in results.iter().enumerate() {
                    for (at, value) in values.iter().enumerate() {
                        let moves = (0..layout.len()).map(|rank| moved(rank, step, tensor, at)).sum::<f32>();
                        let d = -moves / layout.len() as f32;
                        speed[tensor][at] = 0.9 * speed[tensor][at] + d;
                        anchor[tensor][at] -= 0.7 * (d + 0.9 * speed[tensor][at]);
                        assert!((value - anchor[tensor][at]).abs() < 1e-5, "step {step}: {value}");
                    }
                }
            }
        });
    }
}

#[test]
fn copies_of_peers_are_theirs_to_the_last_bit() {
    for layout in [&["a", "b"][..], &["a", "b", "c"], &["a", "b", "c", "d", "e"], &["a", "a", "b", "b", "c"]] {
        for name in ["minmax8", "qsgd", "bfloat16"] {
            let known = spawn(layout, Tuning::default(), move |rank| {
                let scheduler = start(rank, vec![replicas(Peers::Ring, Some(name), None)]).unwrap();
                let mut known = Vec::new();
                for step in 0..5 {
                    move_on(&scheduler, rank.rank, step);
                    let weights = exchange(&scheduler);
                    let weights: Vec<u32> = weights.iter().flatten().map(|value| value.to_bits()).collect();
                    let [own, left, right] = ["own", "left", "right"].map(|name| kept(&scheduler, name));
                    assert!(weights == own, "{name}: weights are what the others know");
                    known.push([own, left, right]);
                }
                known
            });
            let hosts = reference::hosts(layout);
            for (host, members) in hosts.iter().enumerate() {
                let right = hosts[(host + 1) % hosts.len()][0];
                for member in members {
                    for (mine, theirs) in known[*member].iter().zip(&known[right]) {
                        assert!(mine[2] == theirs[0], "{name} on {layout:?}: the right one is another");
                        assert!(mine[0] == theirs[1], "{name} on {layout:?}: the left one is another");
                    }
                    assert!(known[*member] == known[members[0]], "{name} on {layout:?}: ranks of a host differ");
                }
            }
        }
    }
}

/// (sum, largest distance from the mean) over ranks of all weights.
fn spread(all: &[Vec<f32>]) -> (f64, f64) {
    let (mut total, mut furthest) = (0.0, 0.0f64);
    for at in 0..all[0].len() {
        let sum: f64 = all.iter().map(|of| f64::from(of[at])).sum();
        let mean = sum / all.len() as f64;
        total += sum;
        furthest = all.iter().map(|of| (f64::from(of[at]) - mean).abs()).fold(furthest, f64::max);
    }
    (total, furthest)
}

#[test]
fn gossip_preserves_the_sum_and_draws_together() {
    let layout = ["a", "b", "c", "d"];
    let gossip = |peers| Step::Gossip { peers, seed: 5 };
    for (step, rounds, left) in [
        (gossip(Peers::All), 1, 1e-6),
        (gossip(Peers::Exponential), 2, 1e-6),
        (gossip(Peers::Ring), 30, 1e-6),
        (gossip(Peers::Random), 60, 1e-3),
        (replicas(Peers::Ring, None, None), 30, 1e-5),
        (replicas(Peers::Ring, Some("minmax8"), None), 40, 0.02),
        (replicas(Peers::Exponential, Some("minmax8"), Some(1.0)), 40, 0.02),
        (replicas(Peers::All, Some("int4"), Some(0.3)), 80, 0.05),
        (replicas(Peers::Ring, Some("onebit"), Some(0.1)), 300, 0.1),
    ] {
        let ended = spawn(&layout, Tuning::default(), move |rank| {
            let scheduler = start(rank, vec![step.clone()]).unwrap();
            move_on(&scheduler, rank.rank, 0);
            let before = weights(&scheduler).concat();
            let mut after = Vec::new();
            (0..rounds).for_each(|_| after = exchange(&scheduler).concat());
            (before, after)
        });
        let (before, after): (Vec<_>, Vec<_>) = ended.into_iter().unzip();
        let ((sum, _), (after_sum, furthest)) = (spread(&before), spread(&after));
        // a codec rounds what each sends, which adds to the sum what it loses
        let tolerance = if left > 1e-3 { 1e-3 } else { 1e-6 };
        assert!((sum - after_sum).abs() < tolerance * sum.abs(), "{left}: {sum} became {after_sum}");
        assert!(furthest < left, "{furthest} apart, not {left}");
    }
}

#[test]
fn what_is_not_finite_changes_no_copy() {
    spawn(&["a", "b", "c"], Tuning::default(), |rank| {
        let scheduler = start(rank, vec![replicas(Peers::Ring, Some("minmax8"), None)]).unwrap();
        move_on(&scheduler, rank.rank, 0);
        exchange(&scheduler);
        if rank.rank == 1 {
            floats(&scheduler, 0, |weights| weights[7] = f32::NAN);
        }
        let results = exchange(&scheduler);
        assert_eq!(scheduler.was_non_finite(), rank.rank == 1);
        assert_eq!(results[0][7].is_nan(), rank.rank == 1);
        for name in ["own", "left", "right"] {
            assert!(kept(&scheduler, name).iter().all(|bits| f32::from_bits(*bits).is_finite()), "{name}");
        }
    });
}

#[test]
fn ranks_of_a_host_average_and_nothing_crosses() {
    spawn(&["a", "a", "b"], Tuning::default(), |rank| {
        let scheduler = start(rank, vec![Step::HostReduce]).unwrap();
        fill(&scheduler, |_, _| rank.rank as f32);
        let wanted = if rank.rank < 2 { 0.5 } else { 2.0 };
        assert!(exchange(&scheduler).iter().flatten().all(|value| *value == wanted));
    });
}

#[test]
fn who_leaves_early_does_not_disturb_those_that_need_it_no_more() {
    spawn(&["a", "b", "c", "d"], Tuning::default(), |rank| {
        // peers of the first round are 0 and 1, 2 and 3
        let scheduler = start(rank, vec![Step::Gossip { peers: Peers::Exponential, seed: 0 }]).unwrap();
        if rank.rank < 2 {
            std::thread::sleep(Duration::from_millis(700));
        }
        fill(&scheduler, |_, _| rank.rank as f32);
        let wanted = if rank.rank < 2 { 0.5 } else { 2.5 };
        assert!(exchange(&scheduler).iter().flatten().all(|value| *value == wanted));
        // rank 2 closes its lanes while 0 and 1 are still to exchange, and finds that 3 has left
        if rank.rank == 3 {
            rank.engine().shutdown("it is done");
        } else if rank.rank == 2 {
            std::thread::sleep(Duration::from_millis(200));
            drop(scheduler);
            std::thread::sleep(Duration::from_millis(700));
        }
    });
}

#[test]
fn wrong_steps_do_not_start() {
    spawn(&["a", "b", "c"], Tuning::default(), |rank| {
        for (step, told) in [
            (Step::Gossip { peers: Peers::ShiftOne, seed: 0 }, "shift_one"),
            (replicas(Peers::Random, None, Some(0.5)), "others in every step"),
            (replicas(Peers::All, None, None), "a copy of each"),
            (replicas(Peers::Ring, None, Some(1.5)), "gamma of 1.5"),
            (Step::Outer { lr: 0.7, momentum: 0.9 }, "without Difference"),
            (Step::Difference, "Difference without Outer after it"),
            (Step::Outer { lr: 0.0, momentum: 0.9 }, "learning rate of 0"),
            (Step::Outer { lr: 1.0, momentum: 1.0 }, "momentum of 1"),
        ] {
            let error = start(rank, vec![step]).err().unwrap();
            assert_eq!(error.kind, Kind::InvalidArgument);
            assert!(error.message.contains(told) && error.message.contains("try:"), "{error}");
        }
        let description = Description::of_gradients(vec![Step::Difference]);
        let lanes = rank.engine().lanes(false, None).unwrap();
        let tensor = Tensor { name: "w".into(), count: 1, rows: 1, dtype: DType::F32, place: Place::Host };
        let error = rank.engine().scheduler(lanes, 0, vec![tensor], description, Sizes::new(1).unwrap()).err().unwrap();
        assert!(error.message.contains("works on weights"), "{error}");
    });
}
