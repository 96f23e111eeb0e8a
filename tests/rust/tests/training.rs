//! Rounds of a scheduler between ranks that are threads: whatever the buckets, the order and the threads that mark, every
//! rank ends with the bits of the reference.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]

use std::time::Duration;

use offbeat_core::algorithm::{Description, Step, What, When};
use offbeat_core::bucket::{Sizes, Tensor};
use offbeat_core::buffer::Place;
use offbeat_core::config::Tuning;
use offbeat_core::dtype::{DType, Op};
use offbeat_core::scheduler::Scheduler;
use offbeat_core::{Error, Kind};
use offbeat_tests::reference::{self, Values};
use offbeat_tests::world::{Rank, Setup, spawn};

fn mean(hierarchical: bool) -> Description {
    let steps = vec![Step::AllReduce { op: Op::Mean, codec: None, feedback: false, seed: 0, hierarchical }];
    Description::of_gradients(steps)
}

fn start(rank: &Rank, tensors: Vec<Tensor>, description: Description, sizes: Sizes) -> Result<Scheduler, Error> {
    let lanes = rank.engine().lanes(description.is_flat(), None).unwrap();
    rank.engine().scheduler(lanes, 0, tensors, description, sizes)
}

/// Tensors of several types and of sizes from nothing to some hundred kilobytes.
fn tensors() -> Vec<Tensor> {
    let dtypes = [DType::F32, DType::F32, DType::F16, DType::F64, DType::BF16];
    let count = |at: usize| [1, 1000, 17, 0, 30_000, 5, 64][at % 7];
    (0..23)
        .map(|at| Tensor {
            name: format!("layer{at}.weight"),
            count: count(at),
            rows: 1,
            dtype: dtypes[at % dtypes.len()],
            place: Place::Host,
        })
        .collect()
}

/// Whether a rank lacks a tensor.
type Absent = fn(usize, usize) -> bool;

fn value(rank: usize, round: u64, at: usize, tensor: &Tensor) -> Vec<u8> {
    reference::fill(tensor.dtype, Values::Finite, (rank as u64 + 1) * 1000 + round * 100 + at as u64, tensor.count)
}

fn expected(hosts: &[Vec<usize>], round: u64, at: usize, tensor: &Tensor, absent: Absent) -> Vec<u8> {
    let world: usize = hosts.iter().map(Vec::len).sum();
    let of = |rank: usize| match absent(rank, at) {
        true => vec![0; tensor.count * tensor.dtype.size()],
        false => value(rank, round, at, tensor),
    };
    let inputs: Vec<Vec<u8>> = (0..world).map(of).collect();
    reference::reduce(hosts, &inputs, tensor.dtype, Op::Mean)
}

/// Where a tensor lies, and how long it is.
fn slot(scheduler: &Scheduler, at: usize, tensor: &Tensor) -> (*mut u8, usize) {
    for (bucket, memory) in scheduler.buckets() {
        if let Some(slot) = bucket.slots.iter().find(|slot| slot.tensor == at) {
            let size = tensor.dtype.size();
            return (memory.start().wrapping_add(slot.offset * size), tensor.count * size);
        }
    }
    panic!("tensor {at} has no place")
}

fn write(scheduler: &Scheduler, at: usize, tensor: &Tensor, bytes: &[u8]) {
    let (start, len) = slot(scheduler, at, tensor);
    assert_eq!(len, bytes.len());
    // SAFETY: the slot is as long as it says, and not under way before it is marked.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), start, len) };
}

fn read(scheduler: &Scheduler, at: usize, tensor: &Tensor) -> Vec<u8> {
    let (start, len) = slot(scheduler, at, tensor);
    // SAFETY: as above, and the round is over.
    unsafe { std::slice::from_raw_parts(start, len) }.to_vec()
}

/// A backward of this rank, in an order of its own; some tensors may be absent.
fn round(rank: &Rank, scheduler: &Scheduler, number: u64, absent: Absent) -> Vec<usize> {
    let tensors = tensors();
    let mut order: Vec<usize> = (0..tensors.len()).collect();
    order.sort_by_key(|at| reference::mix(rank.rank as u64 + number, *at as u64));
    for at in order.into_iter().filter(|at| !absent(rank.rank, *at)) {
        write(scheduler, at, &tensors[at], &value(rank.rank, number, at, &tensors[at]));
        scheduler.mark_ready(at).unwrap();
    }
    for at in scheduler.missing() {
        scheduler.mark_absent(at).unwrap();
    }
    scheduler.finish(None).unwrap()
}

fn check(scheduler: &Scheduler, hosts: &[Vec<usize>], number: u64, absent: Absent) {
    for (at, tensor) in tensors().iter().enumerate() {
        let wanted = expected(hosts, number, at, tensor, absent);
        let difference = reference::difference(tensor.dtype, &read(scheduler, at, tensor), &wanted);
        assert_eq!(difference, None, "round {number}, {}", tensor.name);
    }
}

const NOBODY: Absent = |_, _| false;
const LAYOUTS: [&[&str]; 5] = [&["a"], &["a", "a"], &["a", "b", "c"], &["a", "a", "b", "b"], &["a", "b", "a"]];

#[test]
fn every_bucket_size_gives_the_bits_of_the_reference() {
    for layout in LAYOUTS {
        spawn(layout, Tuning::default(), move |rank| {
            let hosts = reference::hosts(layout);
            let sizes = Sizes::new(1 << 20).unwrap();
            let scheduler = start(rank, tensors(), mean(true), sizes).unwrap();
            round(rank, &scheduler, 0, NOBODY);
            check(&scheduler, &hosts, 0, NOBODY);
            for (number, bytes) in [1, 5000, 200_000, 1 << 26].into_iter().enumerate() {
                let number = number as u64 + 1;
                let order: Vec<usize> = (0..tensors().len()).rev().collect();
                let sizes = Sizes::new(bytes).unwrap();
                scheduler.rebucket(&order, &vec![false; order.len()], sizes, None).unwrap();
                for again in 0..3 {
                    round(rank, &scheduler, number * 10 + again, NOBODY);
                    check(&scheduler, &hosts, number * 10 + again, NOBODY);
                }
            }
            assert_eq!(scheduler.totals().rounds, 13);
        });
    }
}

#[test]
fn a_flat_sum_does_not_depend_on_hosts() {
    spawn(&["a", "a", "b", "b"], Tuning::default(), |rank| {
        let scheduler = start(rank, tensors(), mean(false), Sizes::new(50_000).unwrap()).unwrap();
        round(rank, &scheduler, 0, NOBODY);
        check(&scheduler, &[vec![0, 1, 2, 3]], 0, NOBODY);
    });
}

#[test]
fn absent_tensors_count_as_zero_and_come_back_where_somebody_has_them() {
    // rank 1 lacks every third tensor, nobody has tensor 4, and only rank 1 has tensor 5
    let absent: Absent = |rank, at| at == 4 || (rank != 1 && at == 5) || (rank == 1 && at % 3 == 0);
    for layout in LAYOUTS.iter().filter(|layout| layout.len() > 1) {
        spawn(layout, Tuning::default(), move |rank| {
            let sizes = Sizes::new(100_000).unwrap();
            let scheduler = start(rank, tensors(), mean(true), sizes).unwrap();
            for number in 0..2 {
                let gained = round(rank, &scheduler, number, absent);
                let mine: Vec<usize> = (0..tensors().len()).filter(|at| absent(rank.rank, *at) && *at != 4).collect();
                assert_eq!(gained, mine);
                check(&scheduler, &reference::hosts(layout), number, absent);
            }
        });
    }
}

#[test]
fn the_first_round_is_observed_and_rank_0_decides() {
    let orders = spawn(&["a", "b"], Tuning::default(), |rank| {
        let tensors = tensors();
        let scheduler = start(rank, tensors.clone(), mean(true), Sizes::new(1).unwrap()).unwrap();
        // rank 1 marks in the other direction, and tensor 2 twice
        let mut order: Vec<usize> = (0..tensors.len()).collect();
        if rank.rank == 1 {
            order.reverse();
        }
        for at in order {
            scheduler.mark_ready(at).unwrap();
            if rank.rank == 1 && at == 2 {
                scheduler.mark_ready(at).unwrap();
            }
        }
        assert_eq!(scheduler.totals().communication, Duration::ZERO, "nothing goes out before the end");
        let (observed, late) = scheduler.observed();
        scheduler.finish(None).unwrap();
        scheduler.rebucket(&observed, &late, Sizes::new(10_000).unwrap(), None).unwrap();
        let buckets = scheduler.buckets();
        assert!(buckets.last().unwrap().0.late, "a tensor that came twice on any rank waits for the end");
        round(rank, &scheduler, 7, NOBODY);
        check(&scheduler, &[vec![0], vec![1]], 7, NOBODY);
        buckets.iter().flat_map(|(bucket, _)| bucket.slots.iter().map(|slot| slot.tensor)).collect::<Vec<_>>()
    });
    assert_eq!(orders[0], orders[1]);
    assert_eq!(orders[0].last(), Some(&2));
    let first: Vec<usize> = orders[0].iter().copied().filter(|at| tensors()[*at].dtype == DType::F32).take(3).collect();
    assert_eq!(first, [0, 1, 5], "rank 0 marked in this order");
}

fn story(result: Result<Vec<usize>, Error>) -> (Kind, String) {
    let error = result.unwrap_err();
    (error.kind, error.message)
}

#[test]
fn a_rank_that_does_not_come_is_named_with_bucket_and_step() {
    let setup = Setup::new(&["a", "b"], Tuning::default()).timeout(Duration::from_secs(1));
    let stories = setup.spawn(|rank| {
        let scheduler = start(rank, tensors(), mean(true), Sizes::new(50_000).unwrap()).unwrap();
        round(rank, &scheduler, 0, NOBODY);
        let (order, late) = scheduler.observed();
        scheduler.rebucket(&order, &late, Sizes::new(50_000).unwrap(), None).unwrap();
        if rank.rank == 1 {
            std::thread::sleep(Duration::from_secs(2));
            return None;
        }
        (0..tensors().len()).for_each(|at| scheduler.mark_ready(at).unwrap());
        Some(story(scheduler.finish(None)))
    });
    let (kind, message) = stories[0].clone().unwrap();
    assert_eq!(kind, Kind::Timeout);
    // two buckets are under way; either deadline may come first
    for part in ["rank 1", "bucket ", "layer", "of step 1", "try:"] {
        assert!(message.contains(part), "{part:?} is not in {message}");
    }
}

#[test]
fn a_round_that_backward_did_not_end_is_forgotten_or_told() {
    let stories = spawn(&["a", "b"], Tuning::default(), |rank| {
        let scheduler = start(rank, tensors(), mean(true), Sizes::new(50_000).unwrap()).unwrap();
        // nothing has gone out in the first round
        scheduler.mark_ready(3).unwrap();
        scheduler.reset("it raised").unwrap();
        round(rank, &scheduler, 0, NOBODY);
        check(&scheduler, &[vec![0], vec![1]], 0, NOBODY);
        // now everything has
        (0..tensors().len()).for_each(|at| scheduler.mark_ready(at).unwrap());
        if rank.rank == 1 {
            return story(scheduler.finish(None));
        }
        let error = scheduler.reset("it raised").unwrap_err();
        (error.kind, error.message)
    });
    assert_eq!(stories[0].0, Kind::PeerFailed);
    assert!(stories[0].1.contains("rank 0") && stories[0].1.contains("it raised") && stories[0].1.contains("try:"));
}

#[test]
fn a_second_gradient_after_the_bucket_was_sent_is_an_error() {
    spawn(&["a", "a"], Tuning::default(), |rank| {
        let scheduler = start(rank, tensors(), mean(true), Sizes::new(1).unwrap()).unwrap();
        round(rank, &scheduler, 0, NOBODY);
        let last = tensors().len() - 1;
        scheduler.mark_ready(last).unwrap();
        let error = scheduler.mark_ready(last).unwrap_err();
        assert!(error.message.contains(&tensors()[last].name) && error.message.contains("try:"), "{error}");
        (0..last).for_each(|at| scheduler.mark_ready(at).unwrap());
        scheduler.finish(None).unwrap();
    });
}

#[test]
fn wrong_descriptions_do_not_start() {
    spawn(&["a"], Tuning::default(), |rank| {
        let sizes = Sizes::new(1).unwrap();
        assert_eq!(start(rank, vec![], mean(true), sizes).err().unwrap().kind, Kind::InvalidArgument);
        // gradients may stay where they are, weights without steps are a mistake
        let none = Description { what: What::Weights, when: When::AfterStep, steps: vec![], ..mean(true) };
        assert_eq!(start(rank, tensors(), none, sizes).err().unwrap().kind, Kind::InvalidArgument);
        let unwarmed = Description { warmup: 3, ..mean(true) };
        assert_eq!(start(rank, tensors(), unwarmed, sizes).err().unwrap().kind, Kind::InvalidArgument);
    });
}
