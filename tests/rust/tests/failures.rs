//! When ranks disagree, are silent, leave or fail: every rank is told who and what, soon, and nothing hangs.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]

use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use offbeat_core::call::Call;
use offbeat_core::codec::{BFloat16, Float16};
use offbeat_core::coding::Coding;
use offbeat_core::config::Config;
use offbeat_core::dtype::{DType, Op};
use offbeat_core::engine::Engine;
use offbeat_core::event::{Event, Output};
use offbeat_core::transport::rendezvous::MemoryStore;
use offbeat_core::{Error, Kind, Result};
use offbeat_tests::tensor::{Memory, Tensor, all_reduce, enqueue, run};
use offbeat_tests::{LAYOUTS, Rank, Setup, TINY};

const SOON: Duration = Duration::from_secs(3);

/// A call that one rank makes differently. Gives the calls of the usual and of the odd rank, as messages name them.
struct Difference {
    usual: fn(&Tensor) -> Call,
    odd: fn(&Tensor) -> Call,
    names: [&'static str; 2],
}

fn f32s(tensor: &Tensor, shape: Vec<u64>) -> offbeat_core::buffer::Shaped {
    let mut view = tensor.view();
    view.buffer.count = shape.iter().product::<u64>() as usize;
    view.shape = shape;
    view
}

fn typed(tensor: &Tensor, dtype: DType) -> offbeat_core::buffer::Shaped {
    let mut view = tensor.view();
    view.buffer.dtype = dtype;
    view
}

fn list(tensor: &Tensor, count: u64) -> Vec<offbeat_core::buffer::Shaped> {
    // every test of lists runs with worlds of this many ranks
    (0..4).map(|_| f32s(tensor, vec![count])).collect()
}

fn sum(tensor: offbeat_core::buffer::Shaped) -> Call {
    Call::AllReduce { tensor, op: Op::Sum, coding: None }
}

/// Differences in every part of a call; tensors have 200 elements, more than any threshold.
fn differences() -> Vec<Difference> {
    vec![
        Difference {
            usual: |t| sum(f32s(t, vec![200])),
            odd: |t| sum(f32s(t, vec![100, 2])),
            names: ["float32[200]", "float32[100, 2]"],
        },
        Difference {
            usual: |t| sum(f32s(t, vec![200])),
            odd: |t| sum(f32s(t, vec![199])),
            names: ["float32[200]", "float32[199]"],
        },
        // one takes the short way and the other the long one
        Difference {
            usual: |t| sum(f32s(t, vec![200])),
            odd: |t| sum(f32s(t, vec![1])),
            names: ["float32[200]", "float32[1]"],
        },
        Difference {
            usual: |t| sum(f32s(t, vec![1])),
            odd: |t| sum(f32s(t, vec![200])),
            names: ["float32[200]", "float32[1]"],
        },
        Difference {
            usual: |t| sum(f32s(t, vec![2])),
            odd: |t| sum(f32s(t, vec![0])),
            names: ["float32[2]", "float32[0]"],
        },
        Difference {
            usual: |t| sum(typed(t, DType::F32)),
            odd: |t| sum(typed(t, DType::I32)),
            names: ["float32[200]", "int32[200]"],
        },
        Difference {
            usual: |t| sum(t.view()),
            odd: |t| Call::AllReduce { tensor: t.view(), op: Op::Mean, coding: None },
            names: ["sum", "mean"],
        },
        Difference {
            usual: |t| sum(t.view()),
            odd: |t| Call::AllReduce { tensor: t.view(), op: Op::Sum, coding: Some(Coding::plain(&Float16)) },
            names: ["float32[200], sum)", "codec"],
        },
        Difference {
            usual: |t| Call::AllReduce { tensor: t.view(), op: Op::Sum, coding: Some(Coding::plain(&Float16)) },
            odd: |t| Call::AllReduce { tensor: t.view(), op: Op::Sum, coding: Some(Coding::plain(&BFloat16)) },
            names: ["codec float16", "codec bfloat16"],
        },
        Difference { usual: |t| sum(t.view()), odd: |_| Call::Barrier, names: ["all_reduce", "barrier"] },
        Difference {
            usual: |_| Call::Barrier,
            odd: |t| Call::Broadcast { tensor: t.view(), src: 0 },
            names: ["barrier", "broadcast"],
        },
        Difference {
            usual: |t| Call::AllGather { tensor: t.view() },
            odd: |t| Call::AllToAll { tensors: list(t, 50) },
            names: ["all_gather", "all_to_all"],
        },
        Difference {
            usual: |t| Call::AllGather { tensor: f32s(t, vec![100, 2]) },
            odd: |t| Call::AllGather { tensor: f32s(t, vec![50, 4]) },
            names: ["[*, 2]", "[*, 4]"],
        },
        Difference {
            usual: |t| Call::Broadcast { tensor: t.view(), src: 0 },
            odd: |t| Call::Broadcast { tensor: t.view(), src: 1 },
            names: ["rank 0", "rank 1"],
        },
        Difference {
            usual: |t| Call::Broadcast { tensor: t.view(), src: 2 },
            odd: |t| Call::Broadcast { tensor: f32s(t, vec![1]), src: 2 },
            names: ["float32[200]", "float32[1]"],
        },
        Difference {
            usual: |t| Call::Reduce { tensor: t.view(), dst: 0, op: Op::Sum },
            odd: |t| Call::Reduce { tensor: t.view(), dst: 3, op: Op::Sum },
            names: ["sum, rank 0", "sum, rank 3"],
        },
        Difference {
            usual: |t| Call::Reduce { tensor: f32s(t, vec![1]), dst: 1, op: Op::Sum },
            odd: |t| sum(f32s(t, vec![200])),
            names: ["reduce(float32[1]", "all_reduce(float32[200]"],
        },
        Difference {
            usual: |t| Call::Gather { tensor: t.view(), dst: 1 },
            odd: |t| Call::Gather { tensor: t.view(), dst: 2 },
            names: ["float32[*], rank 1", "float32[*], rank 2"],
        },
        Difference {
            usual: |t| Call::ReduceScatter { tensors: list(t, 50), op: Op::Sum },
            odd: |t| Call::ReduceScatter { tensors: list(t, 49), op: Op::Sum },
            names: ["[50]", "[49]"],
        },
        Difference {
            usual: |t| Call::ReduceScatter { tensors: list(t, 50), op: Op::Sum },
            odd: |t| Call::AllToAll { tensors: list(t, 50) },
            names: ["reduce_scatter", "all_to_all"],
        },
        Difference {
            usual: |t| Call::Scatter { tensors: Some(list(t, 50)), src: 0, out: f32s(t, vec![50]) },
            odd: |t| Call::Scatter { tensors: Some(list(t, 50)), src: 1, out: f32s(t, vec![50]) },
            names: ["rank 0", "rank 1"],
        },
    ]
}

/// Layouts of four ranks: one host, four hosts, and every mixture.
const FOURS: [&[&str]; 5] =
    [&["a", "a", "a", "a"], &["a", "b", "c", "d"], &["a", "a", "b", "b"], &["a", "b", "b", "c"], &["a", "b", "a", "a"]];

/// Nobody returns from a call that others have made differently.
fn story_of(result: Result<Output>, rank: &Rank, what: &str) -> Error {
    match result {
        Err(error) => error,
        Ok(_) => panic!("rank {} heard of nothing: {what}", rank.rank),
    }
}

#[test]
fn every_difference_is_a_mismatch_that_names_both_calls_on_every_rank() {
    for layout in FOURS {
        let begun = Instant::now();
        Setup::new(layout, TINY).spawn(move |rank| {
            for (number, difference) in differences().into_iter().enumerate() {
                for odd in [number % 4, (number + 1 + number / 4) % 4] {
                    let group = rank.engine().group(&[0, 1, 2, 3], None).unwrap();
                    let tensor = Tensor::new(rank, Memory::ALL[number % 3], DType::F32, &[0; 800]);
                    let began = Instant::now();
                    let call = if rank.rank == odd { (difference.odd)(&tensor) } else { (difference.usual)(&tensor) };
                    let what = format!("difference {number} {:?} on rank {odd}", difference.names);
                    let error = story_of(run(&group, call), rank, &what);
                    let what = format!("{what}: {error}");
                    assert_eq!(error.kind, Kind::Mismatch, "{what}");
                    assert!(difference.names.iter().all(|name| error.message.contains(name)), "{what}");
                    assert!(error.message.contains(&format!("rank {odd} ")), "{what}");
                    assert!(began.elapsed() < SOON, "{what} took {:?}", began.elapsed());
                    // the story stands
                    assert_eq!(run(&group, Call::Barrier).unwrap_err(), error);
                }
            }
        });
        assert!(begun.elapsed() < Duration::from_secs(50));
    }
}

/// One call of every kind and way, no two alike.
const CALLS: [fn(&Tensor) -> Call; 14] = [
    |t| sum(t.view()),
    |t| sum(f32s(t, vec![1])),
    |t| Call::Reduce { tensor: t.view(), dst: 2, op: Op::Sum },
    |t| Call::Reduce { tensor: f32s(t, vec![3]), dst: 1, op: Op::Sum },
    |t| Call::Broadcast { tensor: t.view(), src: 3 },
    |t| Call::Broadcast { tensor: f32s(t, vec![10]), src: 1 },
    |t| Call::AllGather { tensor: t.view() },
    |t| Call::Gather { tensor: t.view(), dst: 0 },
    |t| Call::Gather { tensor: f32s(t, vec![0]), dst: 3 },
    |t| Call::Scatter { tensors: Some(list(t, 50)), src: 2, out: f32s(t, vec![50]) },
    |t| Call::Scatter { tensors: Some(list(t, 50)), src: 1, out: f32s(t, vec![50]) },
    |t| Call::ReduceScatter { tensors: list(t, 50), op: Op::Sum },
    |t| Call::AllToAll { tensors: list(t, 50) },
    |_| Call::Barrier,
];

/// Ranks that differ wait for different ranks; whoever waits for whom, somebody must notice.
#[test]
fn any_two_calls_are_told_apart_on_every_layout() {
    for layout in FOURS {
        Setup::new(layout, TINY).spawn(|rank| {
            for (i, usual) in CALLS.iter().enumerate() {
                for (j, other) in CALLS.iter().enumerate().filter(|(j, _)| i != *j && (i + j) % 2 == 1) {
                    // one rank differs, or two
                    let odd = [(i + j) % 4, if j % 3 == 0 { j % 4 } else { 9 }];
                    let group = rank.engine().group(&[0, 1, 2, 3], None).unwrap();
                    let tensor = Tensor::new(rank, Memory::ALL[i % 3], DType::F32, &[0; 800]);
                    let began = Instant::now();
                    let call = if odd.contains(&rank.rank) { other(&tensor) } else { usual(&tensor) };
                    let what = format!("calls {i} and {j} on {odd:?}");
                    let error = story_of(run(&group, call), rank, &what);
                    let what = format!("{what}: {error}");
                    assert_eq!(error.kind, Kind::Mismatch, "{what}");
                    assert!(began.elapsed() < SOON, "{what} took {:?}", began.elapsed());
                }
            }
        });
    }
}

#[test]
fn another_order_is_a_mismatch() {
    for layout in FOURS {
        Setup::new(layout, TINY).spawn(|rank| {
            let group = rank.engine().world();
            let tensor = Tensor::new(rank, Memory::Plain, DType::F32, &[0; 800]);
            let mut calls = vec![all_reduce(&tensor, Op::Sum, None), Call::AllGather { tensor: tensor.view() }];
            if rank.rank == 2 {
                calls.reverse();
            }
            run(group, Call::Barrier).unwrap();
            let first = calls.remove(0);
            let error = run(group, first).unwrap_err();
            assert_eq!(error.kind, Kind::Mismatch, "{error}");
            assert!(error.message.contains("all_reduce") && error.message.contains("all_gather"), "{error}");
            assert!(error.message.contains("call 1 "), "{error}");
        });
    }
}

/// Also by those that wait for one that waits for it.
#[test]
fn a_rank_that_does_not_call_is_named_by_all_that_wait() {
    for (turn, (layout, absent)) in FOURS.iter().flat_map(|layout| [(layout, 0), (layout, 3)]).enumerate() {
        let met = Arc::new(Barrier::new(4));
        // there are many pairs of a call and a layout: each layout gets some, and each call gets several layouts
        let numbers: Vec<usize> = (0..CALLS.len()).filter(|number| (number + turn) % 5 == 0).collect();
        let calls: Vec<_> = numbers.iter().map(|number| CALLS[*number]).collect();
        let world = Setup::new(layout, TINY).timeout(Duration::from_millis(500));
        let stories = world.spawn(move |rank| {
            let mut stories = Vec::new();
            for call in &calls {
                let group = rank.engine().group(&[0, 1, 2, 3], None).unwrap();
                met.wait();
                if rank.rank != absent {
                    let tensor = Tensor::new(rank, Memory::Mixed, DType::F32, &[0; 800]);
                    stories.push(run(&group, call(&tensor)).unwrap_err());
                }
                met.wait();
                // too late: when the news has come, it hears the story
                std::thread::sleep(Duration::from_millis(150));
                let error = run(&group, Call::Barrier).unwrap_err();
                assert_eq!(error.kind, Kind::Timeout, "{error}");
                met.wait();
            }
            stories
        });
        for (at, number) in numbers.iter().enumerate() {
            for error in stories.iter().filter_map(|of_rank| of_rank.get(at)) {
                let what = format!("{layout:?} without rank {absent}, call {number}: {error}");
                assert_eq!((error.kind, error.rank), (Kind::Timeout, Some(absent as u32)), "{what}");
                assert!(error.message.contains(&format!("rank {absent} (host ")), "{what}");
            }
        }
    }
}

/// How a rank goes away.
#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    Shutdown,
    Drop,
    Fail,
}

#[test]
fn a_rank_that_goes_away_is_named_and_the_others_go_on_without_it() {
    for layout in LAYOUTS.iter().filter(|layout| layout.len() >= 3) {
        for (end, gone) in [(End::Shutdown, 0), (End::Drop, 1), (End::Fail, 2)] {
            let world = layout.len();
            let met = Arc::new(Barrier::new(world));
            Setup::new(layout, TINY).spawn(move |rank| {
                let rest: Vec<u32> = (0..world as u32).filter(|other| *other as usize != gone).collect();
                let others = rank.engine().group(&rest, None).unwrap();
                met.wait();
                if rank.rank == gone {
                    // the others are in their calls by then
                    std::thread::sleep(Duration::from_millis(100));
                    match end {
                        End::Shutdown => rank.engine().shutdown("it has seen enough"),
                        End::Drop => rank.drop_engine(),
                        End::Fail => rank.engine().fail("ValueError: no"),
                    }
                    met.wait();
                    return;
                }
                let group = rank.engine().world();
                let tensor = Tensor::new(rank, Memory::Plain, DType::F32, &[0; 800]);
                let began = Instant::now();
                let queued = enqueue(group, all_reduce(&tensor, Op::Sum, None)).unwrap();
                let error = run(group, Call::Barrier).unwrap_err();
                let kind = if end == End::Fail { Kind::PeerFailed } else { Kind::PeerLost };
                assert_eq!((error.kind, error.rank), (kind, Some(gone as u32)), "{end:?}: {error}");
                assert_eq!(error.host, rank.layout[gone]);
                let words = match end {
                    End::Shutdown => "it has seen enough",
                    End::Drop => "engine was dropped",
                    End::Fail => "ValueError: no",
                };
                assert!(error.message.contains(words), "{error}");
                assert_eq!(queued.wait(Some(SOON), None).unwrap_err(), error);
                assert_eq!(run(group, Call::Barrier).unwrap_err(), error);
                assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
                // messages to and from the lost rank fail too, those between the others do not
                let error = rank.engine().recv(&tensor.view(), gone as u32, 5, None).unwrap_err();
                assert_eq!((error.kind, error.rank), (kind, Some(gone as u32)), "{error}");
                for _ in 0..5 {
                    run(&others, all_reduce(&tensor, Op::Sum, None)).unwrap();
                }
                met.wait();
            });
        }
    }
}

#[test]
fn an_interrupted_rank_says_so_and_the_others_do_not_wait() {
    for layout in FOURS {
        Setup::new(layout, TINY).spawn(|rank| {
            let group = rank.engine().world();
            let tensor = Tensor::new(rank, Memory::Plain, DType::F32, &[0; 800]);
            let began = Instant::now();
            if rank.rank == 1 {
                let work = offbeat_core::group::Work { call: all_reduce(&tensor, Op::Sum, None), keep: None };
                let interrupt = || Err(Error::new(Kind::Interrupted, "Ctrl-C"));
                assert_eq!(group.run(work, Some(&interrupt)).unwrap_err().kind, Kind::Interrupted);
            } else if rank.rank != 2 {
                let error = run(group, all_reduce(&tensor, Op::Sum, None)).unwrap_err();
                assert_eq!((error.kind, error.rank), (Kind::PeerFailed, Some(1)), "{error}");
                assert!(error.cause.contains("Ctrl-C"), "{error:?}");
            }
            assert!(began.elapsed() < SOON);
        });
    }
}

/// A bug of ours, here in what is asked during a wait: no panic reaches the caller, whose thread the call runs on.
#[test]
fn a_panic_in_a_call_is_an_error_for_all() {
    fn bug() -> Result<()> {
        panic!("a very odd bug")
    }
    for layout in [&["a", "a", "b"][..], &["a", "a", "a"], &["a", "b", "c"]] {
        Setup::new(layout, TINY).spawn(|rank| {
            let ranks: Vec<u32> = (0..rank.world() as u32).collect();
            let group = rank.engine().group(&ranks, None).unwrap();
            let tensor = Tensor::new(rank, Memory::Plain, DType::F32, &[0; 800]);
            let began = Instant::now();
            if rank.rank != 2 {
                let work = offbeat_core::group::Work { call: all_reduce(&tensor, Op::Sum, None), keep: None };
                let result = if rank.rank == 1 { group.run(work, Some(&bug)) } else { group.run(work, None) };
                let error = result.unwrap_err();
                assert!(error.message.contains("a bug in offbeat: a very odd bug"), "{error}");
            }
            assert!(began.elapsed() < SOON);
            // messages belong to no group: only this rank hears of it, and goes on
            if rank.rank == 1 {
                let error = rank.engine().recv(&tensor.view(), 0, 7, Some(&bug)).unwrap_err();
                assert!(error.message.contains("a bug in offbeat: a very odd bug"), "{error}");
            }
            run(rank.engine().world(), Call::Barrier).unwrap();
        });
    }
}

#[test]
fn a_wrong_token_is_told_to_all_long_before_the_deadline() {
    for (layout, wrong) in [(["a", "b", "c"], 0), (["a", "b", "c"], 2), (["a", "a", "a"], 1)] {
        let store = MemoryStore::default();
        let connect = |rank: usize| {
            let mut config = Config::default();
            config.options.host = Some(layout[rank].to_owned());
            config.options.interface = "lo".to_owned();
            config.options.shared_bytes = 1 << 30;
            config.options.token = Some(if rank == wrong { b"wrong".to_vec() } else { b"right".to_vec() });
            let began = Instant::now();
            let Err(error) = Engine::connect(config, Some(&store), rank as u32, 3, None) else {
                panic!("{rank} is in")
            };
            assert_eq!(error.kind, Kind::Unauthorized, "{error}");
            assert!(error.message.contains("OFFBEAT_TOKEN"), "{error}");
            assert!(error.message.contains(&format!("rank {wrong} ")), "{error}");
            assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
        };
        std::thread::scope(|scope| {
            let ranks: Vec<_> = (0..3).map(|rank| scope.spawn(move || connect(rank))).collect();
            ranks.into_iter().for_each(|rank| rank.join().unwrap());
        });
    }
}

/// Much is on its way when the call fails: what was lent must outlive the failure.
#[test]
fn a_failure_with_megabytes_under_way() {
    for layout in [&["a", "a", "b", "c"][..], &["a", "b", "c"]] {
        Setup::new(layout, offbeat_core::config::Tuning::default()).spawn(|rank| {
            for odd in 0..rank.world() {
                let ranks: Vec<u32> = (0..rank.world() as u32).collect();
                let group = rank.engine().group(&ranks, None).unwrap();
                let tensor = Tensor::new(rank, Memory::Plain, DType::F32, &vec![0; 48 << 20]);
                let op = if rank.rank == odd { Op::Max } else { Op::Sum };
                let error = run(&group, all_reduce(&tensor, op, None)).unwrap_err();
                assert_eq!(error.kind, Kind::Mismatch, "{error}");
                drop(tensor);
            }
        });
    }
}
