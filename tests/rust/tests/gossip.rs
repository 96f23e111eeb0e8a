//! Averaging with peers instead of with all, and exchanges between peers: every graph on every layout against the reference,
//! bit by bit, what rounds do to sums and differences, and what happens when ranks disagree or are lost.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]

use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use offbeat_core::call::Call;
use offbeat_core::config::Tuning;
use offbeat_core::dtype::{DType, Op};
use offbeat_core::graph::{Graph, Peers};
use offbeat_core::group::Group;
use offbeat_core::{Error, Kind};
use offbeat_tests::reference::{Values, difference, fill, hosts, numbers};
use offbeat_tests::tensor::{Memory, Tensor, all_reduce, contents, run};
use offbeat_tests::{ALWAYS_SHORT, NEVER_SHORT, Rank, Setup, TINY, mixing, spawn};

const FLOATS: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::BF16];
const SOON: Duration = Duration::from_secs(3);

/// Worlds of one to eight hosts, and hosts of several ranks; on the last ones a ring weighs hosts differently.
const WORLDS: [&[&str]; 14] = [
    &["a"],
    &["a", "b"],
    &["a", "b", "c"],
    &["a", "b", "c", "d"],
    &["a", "b", "c", "d", "e"],
    &["a", "b", "c", "d", "e", "f"],
    &["a", "b", "c", "d", "e", "f", "g"],
    &["a", "b", "c", "d", "e", "f", "g", "h"],
    &["a", "a"],
    &["a", "a", "b", "b"],
    &["a", "a", "a", "b"],
    &["a", "b", "a", "b", "c"],
    &["a", "a", "b", "c", "d"],
    &["a", "b", "b", "c", "c", "c", "d", "e"],
];

fn graphs(nodes: usize) -> Vec<Graph> {
    Peers::ALL.into_iter().filter_map(|peers| Graph::new(peers, nodes, 5).ok()).collect()
}

fn graph(rank: &Rank, peers: Peers) -> Graph {
    Graph::new(peers, rank.engine().world().hosts(), 5).unwrap()
}

fn labels(rank: &Rank) -> Vec<&str> {
    rank.layout.iter().map(String::as_str).collect()
}

fn gossip(tensor: &Tensor, graph: Graph, step: u64) -> Call {
    Call::Gossip { tensor: tensor.view(), out: None, graph, step }
}

fn f32s(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn every_graph(rank: &Rank, tuning: Tuning) {
    let hosts = hosts(&labels(rank));
    let my_host = hosts.iter().position(|host| host.contains(&rank.rank)).unwrap();
    let group = rank.engine().world();
    let mut turn = 0;
    for graph in graphs(hosts.len()) {
        for (dtype, count) in FLOATS.into_iter().flat_map(|dtype| [0, 1, 7, 129, 1001].map(|count| (dtype, count))) {
            turn += 1;
            let (step, memory) = (turn * 7 / 3, Memory::ALL[turn as usize % 3]);
            let what = format!("{graph:?}, step {step}, {dtype}, {count} elements, {memory:?}, {tuning:?}");
            let input = |rank: usize| fill(dtype, Values::Odd, turn * 100 + rank as u64, count);
            let inputs: Vec<Vec<u8>> = (0..rank.world()).map(input).collect();
            let expected = mixing::gossip(&graph, step, &hosts, &inputs, dtype, my_host);

            let tensor = Tensor::new(rank, memory, dtype, &inputs[rank.rank]);
            run(group, gossip(&tensor, graph, step)).unwrap_or_else(|e| panic!("{what}: {e}"));
            assert_eq!(difference(dtype, &tensor.bytes(), &expected), None, "{what}");

            let tensor = Tensor::new(rank, memory, dtype, &inputs[rank.rank]);
            let out = Tensor::new(rank, Memory::ALL[(turn as usize / 3) % 3], dtype, &vec![0; inputs[0].len()]);
            let call = Call::Gossip { tensor: tensor.view(), out: Some(out.view()), graph, step };
            run(group, call).unwrap_or_else(|e| panic!("{what}: {e}"));
            assert_eq!(difference(dtype, &out.bytes(), &expected), None, "{what}, into another");
            assert_eq!(tensor.bytes(), inputs[rank.rank], "{what} changed its input");
        }
    }
}

#[test]
fn every_graph_on_every_layout() {
    for world in WORLDS {
        for tuning in [TINY, NEVER_SHORT, ALWAYS_SHORT] {
            spawn(world, tuning, move |rank| every_graph(rank, tuning));
        }
    }
}

#[test]
fn long_data_on_several_streams() {
    for world in [&["a", "b", "c"][..], &["a", "a", "b", "b"], &["a", "b", "b", "c", "c", "c", "d", "e"]] {
        Setup::new(world, Tuning::default()).streams(3).spawn(|rank| {
            let hosts = hosts(&labels(rank));
            let my_host = hosts.iter().position(|host| host.contains(&rank.rank)).unwrap();
            for (step, peers) in [Peers::Ring, Peers::Exponential].into_iter().enumerate() {
                let graph = graph(rank, peers);
                let inputs: Vec<Vec<u8>> =
                    (0..rank.world()).map(|of| fill(DType::F32, Values::Finite, of as u64, 700_001)).collect();
                let tensor = Tensor::new(rank, Memory::Mixed, DType::F32, &inputs[rank.rank]);
                run(rank.engine().world(), gossip(&tensor, graph, step as u64)).unwrap();
                let expected = mixing::gossip(&graph, step as u64, &hosts, &inputs, DType::F32, my_host);
                assert_eq!(difference(DType::F32, &tensor.bytes(), &expected), None, "{graph:?}");
            }
        });
    }
}

#[test]
fn with_all_it_is_an_all_reduce() {
    for world in WORLDS {
        spawn(world, TINY, |rank| {
            for (dtype, count) in FLOATS.into_iter().flat_map(|dtype| [1, 50, 777].map(|count| (dtype, count))) {
                let input = fill(dtype, Values::Finite, rank.rank as u64, count);
                let (mixed, reduced) =
                    (Tensor::new(rank, Memory::Shared, dtype, &input), Tensor::new(rank, Memory::Plain, dtype, &input));
                run(rank.engine().world(), gossip(&mixed, graph(rank, Peers::All), 3)).unwrap();
                run(rank.engine().world(), all_reduce(&reduced, Op::Mean, None)).unwrap();
                assert_eq!(mixed.bytes(), reduced.bytes(), "{dtype}, {count} elements");
            }
        });
    }
}

/// Some rounds of a graph; the values of all ranks before and after each.
fn rounds(world: &[&str], peers: Peers, steps: u64) -> Vec<Vec<Vec<f64>>> {
    let of_ranks = spawn(world, TINY, move |rank| {
        let graph = graph(rank, peers);
        let tensor =
            Tensor::new(rank, Memory::Mixed, DType::F32, &fill(DType::F32, Values::Finite, rank.rank as u64, 300));
        let mut seen = vec![numbers(DType::F32, &tensor.bytes())];
        for step in 0..steps {
            run(rank.engine().world(), gossip(&tensor, graph, step)).unwrap();
            seen.push(numbers(DType::F32, &tensor.bytes()));
        }
        seen
    });
    (0..=steps as usize).map(|step| of_ranks.iter().map(|seen| seen[step].clone()).collect()).collect()
}

/// The sum over ranks of each element, and how far all elements are from their mean over ranks.
fn sums_and_spread(values: &[Vec<f64>]) -> (Vec<f64>, f64) {
    let sums: Vec<f64> = (0..values[0].len()).map(|at| values.iter().map(|of| of[at]).sum()).collect();
    let far = |of: &Vec<f64>| of.iter().zip(&sums).map(|(x, sum)| (x - sum / values.len() as f64).powi(2)).sum::<f64>();
    let spread = values.iter().map(far).sum::<f64>().sqrt();
    (sums, spread)
}

#[test]
fn rounds_preserve_the_sum_over_ranks_and_bring_them_together() {
    for world in WORLDS.iter().filter(|world| world.len() > 1) {
        let nodes = hosts(world).len();
        for graph in graphs(nodes) {
            let values = rounds(world, graph.rule(), 12);
            let (before, mut spread) = sums_and_spread(&values[0]);
            let largest = values[0].iter().flatten().fold(0f64, |most, value| most.max(value.abs()));
            for after in &values[1..] {
                let (sums, next) = sums_and_spread(after);
                let worst = sums.iter().zip(&before).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                assert!(worst <= 1e-6 * largest * world.len() as f64, "{world:?} {graph:?}: {worst}");
                assert!(next <= spread * (1.0 + 1e-6), "{world:?} {graph:?}: {spread}, then {next}");
                spread = next;
            }
        }
    }
}

#[test]
fn differences_shrink_at_the_rate_of_the_ring() {
    for (world, rate) in [(WORLDS[3], 1.0 / 3.0), (WORLDS[7], 0.8048)] {
        let values = rounds(world, Peers::Ring, 10);
        let spread: Vec<f64> = values.iter().map(|values| sums_and_spread(values).1).collect();
        for (step, pair) in spread.windows(2).enumerate().filter(|(_, pair)| pair[0] > 1e-3) {
            assert!(pair[1] <= rate * pair[0] * 1.0001, "step {step} of {world:?}: {pair:?}");
        }
        // it is no faster in the end either, when only the slowest difference is left
        assert!(spread[6] > 0.9 * rate * spread[5], "{world:?}: {spread:?}");
    }
}

#[test]
fn a_hypercube_holds_one_value_after_log_n_rounds() {
    for (world, steps) in [(WORLDS[1], 1), (WORLDS[3], 2), (WORLDS[7], 3), (WORLDS[9], 1)] {
        let values = rounds(world, Peers::Exponential, steps);
        assert!(values[steps as usize].iter().all(|of| *of == values[steps as usize][0]), "{world:?}");
        let (_, spread) = sums_and_spread(&values[steps as usize]);
        assert!(spread < 1e-5 && sums_and_spread(&values[0]).1 > 1.0, "{spread}");
    }
}

#[test]
fn blocks_cross_between_peers() {
    for world in WORLDS {
        spawn(world, TINY, |rank| {
            let (me, group, world) = (rank.rank, rank.engine().world(), rank.world());
            for graph in graphs(world) {
                for (step, length) in [0usize, 1, 5, 96, 1000].into_iter().enumerate() {
                    // to each another length; in every second step all get the same memory
                    let same = step % 2 == 0;
                    let len = |to: usize| if same { length } else { length * (to + 1) / 2 };
                    let data = |from: usize, to: usize| {
                        fill(DType::U8, Values::Finite, (from * 8 + if same { 0 } else { to }) as u64, len(to))
                    };
                    let peers = graph.peers(me, step as u64);
                    let mine: Vec<Tensor> = peers
                        .iter()
                        .map(|to| Tensor::new(rank, Memory::ALL[step % 3], DType::U8, &data(me, *to)))
                        .collect();
                    let at = |place: usize| if same { &mine[0] } else { &mine[place] };
                    let blocks = peers.iter().enumerate().map(|(place, to)| (*to as u32, at(place).view())).collect();
                    let got = contents(&run(group, Call::Exchange { blocks, step: step as u64 }).unwrap());
                    let expected: Vec<Vec<u8>> = peers.iter().map(|from| data(*from, me)).collect();
                    assert_eq!(got, expected, "{graph:?}, step {step}");
                }
            }
        });
    }
}

#[test]
fn wrong_arguments_are_told_before_anything_is_sent() {
    spawn(&["a", "b", "c"], TINY, |rank| {
        let group = rank.engine().world();
        let told = |call: Call, words: &str| {
            let error = run(group, call).unwrap_err();
            assert_eq!(error.kind, Kind::InvalidArgument, "{error}");
            assert!(error.message.contains(words) && error.message.contains("try:"), "{error}");
        };
        let tensor = Tensor::new(rank, Memory::Plain, DType::F32, &[0; 40]);
        let other = Tensor::new(rank, Memory::Plain, DType::F32, &[0; 44]);
        let whole = Tensor::new(rank, Memory::Plain, DType::I32, &[0; 40]);
        let ring = graph(rank, Peers::Ring);
        told(gossip(&tensor, Graph::new(Peers::Ring, 4, 0).unwrap(), 0), "4 nodes in a group on 3 hosts");
        told(gossip(&whole, ring, 0), "int32");
        let into = |out: &Tensor| Call::Gossip { tensor: tensor.view(), out: Some(out.view()), graph: ring, step: 0 };
        told(into(&other), "[11]");
        told(into(&tensor), "overlaps");
        let send = |to: &[usize]| Call::Exchange {
            blocks: to.iter().map(|to| (*to as u32, tensor.view())).collect(),
            step: 0,
        };
        told(send(&[7]), "rank 7 is not in the group");
        told(send(&[rank.rank]), "this rank");
        told(send(&[(rank.rank + 1) % 3, (rank.rank + 1) % 3]), "twice");
        // nothing was sent, and the group is as good as new
        run(group, gossip(&tensor, ring, 0)).unwrap();
    });
}

/// What one rank does otherwise than the others, as long as nobody has noticed.
struct Difference {
    usual: fn(&Rank, &Tensor, u64) -> Call,
    odd: fn(&Rank, &Tensor, u64) -> Call,
    names: [&'static str; 2],
}

fn shorter(tensor: &Tensor) -> offbeat_core::buffer::Shaped {
    let mut view = tensor.view();
    (view.buffer.count, view.shape) = (3, vec![3]);
    view
}

fn differences() -> Vec<Difference> {
    vec![
        Difference {
            usual: |rank, t, step| gossip(t, graph(rank, Peers::Ring), step),
            odd: |rank, t, step| gossip(t, graph(rank, Peers::All), step),
            names: ["peers ring", "peers all"],
        },
        Difference {
            usual: |rank, t, step| gossip(t, graph(rank, Peers::Exponential), step),
            odd: |rank, t, step| gossip(t, graph(rank, Peers::Ring), step),
            names: ["peers exponential", "peers ring"],
        },
        Difference {
            usual: |rank, t, step| gossip(t, graph(rank, Peers::Ring), step),
            odd: |rank, t, step| gossip(t, graph(rank, Peers::Ring), step + 1),
            names: ["step 0", "step 1"],
        },
        Difference {
            usual: |rank, t, step| gossip(t, graph(rank, Peers::Exponential), step),
            odd: |rank, t, step| gossip(t, graph(rank, Peers::Exponential), step + 1),
            names: ["peers exponential, step", "peers exponential, step"],
        },
        Difference {
            usual: |rank, t, step| {
                gossip(t, Graph::new(Peers::Random, rank.engine().world().hosts(), 1).unwrap(), step)
            },
            odd: |rank, t, step| gossip(t, Graph::new(Peers::Random, rank.engine().world().hosts(), 2).unwrap(), step),
            names: ["seed #1", "seed #2"],
        },
        Difference {
            usual: |rank, t, step| gossip(t, graph(rank, Peers::Ring), step),
            odd: |rank, t, step| Call::Gossip { tensor: shorter(t), out: None, graph: graph(rank, Peers::Ring), step },
            names: ["float32[200]", "float32[3]"],
        },
        Difference {
            usual: |rank, t, step| gossip(t, graph(rank, Peers::Exponential), step),
            odd: |_, t, _| all_reduce(t, Op::Mean, None),
            names: ["gossip", "all_reduce"],
        },
        Difference {
            usual: |_, t, _| all_reduce(t, Op::Mean, None),
            odd: |rank, t, step| gossip(t, graph(rank, Peers::Ring), step),
            names: ["gossip", "all_reduce"],
        },
        Difference {
            usual: |rank, t, step| to_peers(rank, t, Peers::Ring, step),
            odd: |rank, t, step| to_peers(rank, t, Peers::Ring, step + 1),
            names: ["exchange(step", "exchange(step"],
        },
        Difference {
            usual: |rank, t, step| to_peers(rank, t, Peers::Ring, step),
            odd: |_, _, _| Call::Barrier,
            names: ["exchange", "barrier"],
        },
    ]
}

/// An exchange of a tensor between ranks, whatever their hosts.
fn to_peers(rank: &Rank, tensor: &Tensor, peers: Peers, step: u64) -> Call {
    let peers = Graph::new(peers, rank.world(), 0).unwrap().peers(rank.rank, step);
    Call::Exchange { blocks: peers.into_iter().map(|peer| (peer as u32, tensor.view())).collect(), step }
}

/// The story that ends a sequence of calls.
fn until_it_fails(group: &Group, mut call: impl FnMut(u64) -> Call) -> Error {
    for step in 0..1000 {
        if let Err(error) = run(group, call(step)) {
            return error;
        }
    }
    panic!("a thousand calls went well")
}

/// Layouts in which no round leaves anybody out.
const FOURS: [&[&str]; 4] =
    [&["a", "b", "c", "d"], &["a", "a", "b", "b"], &["a", "b", "a", "a"], &["a", "a", "a", "a"]];

#[test]
fn every_difference_is_a_mismatch_that_names_both_calls() {
    for layout in FOURS {
        Setup::new(layout, TINY).spawn(move |rank| {
            for (number, difference) in differences().into_iter().enumerate() {
                for odd in [number % 4, (number + 1 + number / 4) % 4] {
                    let group = rank.engine().group(&[0, 1, 2, 3], None).unwrap();
                    let tensor = Tensor::new(rank, Memory::ALL[number % 3], DType::F32, &[0; 800]);
                    let began = Instant::now();
                    let call = if rank.rank == odd { difference.odd } else { difference.usual };
                    let error = until_it_fails(&group, |step| call(rank, &tensor, step));
                    let what = format!(
                        "difference {number} {:?} on rank {odd} of {:?}: {error}",
                        difference.names, rank.layout
                    );
                    assert_eq!(error.kind, Kind::Mismatch, "{what}");
                    assert!(difference.names.iter().all(|name| error.message.contains(name)), "{what}");
                    assert!(error.message.contains(&format!("rank {odd} ")), "{what}");
                    assert!(began.elapsed() < SOON, "{what} took {:?}", began.elapsed());
                }
            }
        });
    }
}

#[test]
fn a_peer_that_goes_away_is_named_by_all() {
    for layout in [WORLDS[3], WORLDS[4], WORLDS[9], WORLDS[10]] {
        for (peers, gone) in [(Peers::Ring, 0), (Peers::Exponential, 1), (Peers::Random, 2)] {
            let met = Arc::new(Barrier::new(layout.len()));
            Setup::new(layout, TINY).spawn(move |rank| {
                let tensor = Tensor::new(rank, Memory::Mixed, DType::F32, &[0; 800]);
                let graph = graph(rank, peers);
                for step in 0..3 {
                    run(rank.engine().world(), gossip(&tensor, graph, step)).unwrap();
                }
                met.wait();
                if rank.rank == gone {
                    match peers {
                        Peers::Ring => rank.drop_engine(),
                        _ => rank.engine().fail("ValueError: no"),
                    }
                    met.wait();
                    return;
                }
                let began = Instant::now();
                let error = until_it_fails(rank.engine().world(), |step| gossip(&tensor, graph, step + 3));
                let kind = if peers == Peers::Ring { Kind::PeerLost } else { Kind::PeerFailed };
                assert_eq!((error.kind, error.rank), (kind, Some(gone as u32)), "{error}");
                assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
                met.wait();
            });
        }
    }
}

/// Also by those that are several calls ahead of it, and wait for one that waits for one that waits for it.
#[test]
fn a_silent_peer_is_named_by_all() {
    for (at, layout) in [WORLDS[1], WORLDS[3], WORLDS[7], WORLDS[9], WORLDS[10], WORLDS[13]].into_iter().enumerate() {
        let setup = Setup::new(layout, TINY).timeout(Duration::from_millis(500));
        let met = Arc::new(Barrier::new(layout.len()));
        setup.spawn(move |rank| {
            let absent = rank.world() - 1;
            let tensor = Tensor::new(rank, Memory::Mixed, DType::F32, &[0; 800]);
            let calls: [&dyn Fn(u64) -> Call; 3] = [
                &|step| gossip(&tensor, graph(rank, [Peers::Ring, Peers::Random][at % 2]), step),
                &|step| gossip(&tensor, graph(rank, Peers::Exponential), step),
                &|step| to_peers(rank, &tensor, Peers::Ring, step),
            ];
            for (number, call) in calls.into_iter().enumerate() {
                let group = rank.engine().group(&(0..rank.world() as u32).collect::<Vec<_>>(), None).unwrap();
                run(&group, call(0)).unwrap();
                met.wait();
                if rank.rank != absent {
                    let error = until_it_fails(&group, |step| call(step + 1));
                    assert_eq!(error.kind, Kind::Timeout, "{error}");
                    // neighbours in an exchange may be a call apart, and name each other (ROADMAP.md)
                    if number < 2 {
                        assert_eq!(error.rank, Some(absent as u32), "{error}");
                    }
                }
                met.wait();
            }
        });
    }
}

/// A rank that is left out of a round compares notes with nobody in it, and may be ahead before the difference shows: then
/// the deadline tells, and every rank hears of it.
#[test]
fn a_difference_between_rounds_that_leave_somebody_out_ends_at_the_deadline_at_last() {
    for layout in [WORLDS[2], WORLDS[4], WORLDS[11]] {
        Setup::new(layout, TINY).timeout(Duration::from_millis(500)).spawn(|rank| {
            let everyone: Vec<u32> = (0..rank.world() as u32).collect();
            for (peers, odd) in [(Peers::Exponential, 0), (Peers::Exponential, 2), (Peers::Random, 1)] {
                let group = rank.engine().group(&everyone, None).unwrap();
                let tensor = Tensor::new(rank, Memory::Plain, DType::F32, &[0; 800]);
                let graph = graph(rank, peers);
                let ahead = u64::from(rank.rank == odd);
                let error = until_it_fails(&group, |step| gossip(&tensor, graph, step + ahead));
                assert!(matches!(error.kind, Kind::Mismatch | Kind::Timeout), "{error}");
                assert!(error.rank.is_some(), "{error}");
            }
        });
    }
}

#[test]
fn a_ring_of_unequal_hosts_by_hand() {
    // hosts a and e have one rank beside larger ones: factors differ, and are used
    let values = spawn(WORLDS[13], TINY, |rank| {
        let tensor = Tensor::new(rank, Memory::Plain, DType::F32, &f32s(&[rank.rank as f32]));
        run(rank.engine().world(), gossip(&tensor, graph(rank, Peers::Ring), 0)).unwrap();
        numbers(DType::F32, &tensor.bytes())[0]
    });
    // ranks 0 | 1 2 | 3 4 5 | 6 | 7 on a ring of hosts with 1, 2, 3, 1, 1 ranks; around them are 4, 6, 6, 5, 3
    let (a, b, c, d, e) = (0.0, 3.0, 12.0, 6.0, 7.0);
    let by_hand = [
        b / 6.0 + e / 4.0 + a * (1.0 - 2.0 / 6.0 - 1.0 / 4.0),
        (a + b + c) / 6.0,
        (b + c + d) / 6.0,
        c / 6.0 + e / 5.0 + d * (1.0 - 3.0 / 6.0 - 1.0 / 5.0),
        a / 4.0 + d / 5.0 + e * (1.0 - 1.0 / 4.0 - 1.0 / 5.0),
    ];
    for (rank, host) in [0, 1, 1, 2, 2, 2, 3, 4].into_iter().enumerate() {
        assert!(
            (values[rank] - by_hand[host]).abs() < 1e-5,
            "rank {rank}: {} instead of {}",
            values[rank],
            by_hand[host]
        );
    }
}
