//! Those that are left when ranks are lost, with ranks as threads: gossip in step, and agreement without a group.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]

use std::sync::Barrier;
use std::time::{Duration, Instant};

use offbeat_core::background::{Agreed, Background, Description, Method, Task};
use offbeat_core::config::Tuning;
use offbeat_core::graph::{Graph, Peers};
use offbeat_tests::world::{Rank, Setup};

const NEVER: Duration = Duration::from_secs(100_000);
const COUNT: usize = 3000;

/// Chunks so small that letters have many frames, in several streams.
fn setup(layout: &[&str]) -> Setup {
    Setup::new(layout, Tuning { chunk: 1 << 10, ..Tuning::default() }).streams(2)
}

/// A rank's weights, and its rounds.
struct Model {
    background: Background,
    weights: Vec<f32>,
}

impl Model {
    fn new(rank: &Rank, peers: Peers, modular: bool) -> Self {
        let lanes = rank.engine().lanes(false, None).unwrap();
        let description = Description { method: Method::Stepwise { peers, seed: 5, modular }, period: Some(NEVER) };
        let background = rank.engine().background(&lanes[0], &[COUNT], description).unwrap();
        Model { background, weights: at_first(rank.rank) }
    }

    /// A whole round. False if nothing came of it.
    fn round(&mut self, number: u64) -> bool {
        let ([snapshot, delta], _) = self.background.memory();
        let Some(Task::Snapshot) = self.background.wait(false, None).unwrap() else { return false };
        // SAFETY: the memory is that long, and it is the training thread's turn.
        unsafe { std::slice::from_raw_parts_mut(snapshot.start().cast::<f32>(), COUNT) }.copy_from_slice(&self.weights);
        self.background.taken(number);
        let task = self.background.wait(false, None).unwrap();
        if task == Some(Task::Apply) {
            // SAFETY: as above.
            let delta = unsafe { std::slice::from_raw_parts(delta.start().cast::<f32>(), COUNT) };
            self.weights.iter_mut().zip(delta).for_each(|(x, d)| *x += d);
        }
        self.background.applied();
        task == Some(Task::Apply)
    }
}

fn at_first(rank: usize) -> Vec<f32> {
    (0..COUNT).map(|at| ((at * 7 + rank * 13) % 101) as f32 / 50.0 - 1.0).collect()
}

fn apart(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max)
}

/// What a rank does about being lost.
fn go(rank: &mut Rank) {
    // in one process nobody can be killed; this is an uncaught exception
    rank.engine().fail("ValueError: out of luck");
    rank.drop_engine();
}

#[test]
fn those_that_are_left_mix_as_their_graph_says() {
    for peers in Peers::ALL {
        for modular in [false, true] {
            let rounds = 4..10u64;
            let of_all = rounds.clone();
            // who leaves while another one is between two rounds is not in its next one
            let ended = Barrier::new(4);
            let ends = setup(&["a", "a", "b", "b", "c"]).spawn(move |rank| {
                let mut model = Model::new(rank, peers, modular);
                if rank.rank == 2 {
                    go(rank);
                    return Vec::new();
                }
                model.background.start().unwrap();
                while model.background.progress().living > 4 {
                    std::thread::sleep(Duration::from_millis(1));
                }
                // rank 0 notices a round before the others, which have made that one in their group: nobody comes to it
                let early = rank.rank == 0 && model.round(of_all.start - 1);
                assert!(!early, "{peers:?}");
                for number in of_all.clone() {
                    model.round(number);
                }
                ended.wait();
                model.weights
            });
            let living = [0, 1, 3, 4];
            let graph = Graph::new(peers, 4, 5).unwrap();
            let mut rows: Vec<Vec<f32>> = living.iter().map(|rank| at_first(*rank)).collect();
            for number in rounds {
                let before = rows.clone();
                for (place, row) in rows.iter_mut().enumerate() {
                    row.fill(0.0);
                    for term in graph.mix(&[1; 4], place, number).terms {
                        row.iter_mut().zip(&before[term.node]).for_each(|(x, of)| *x += term.weight() as f32 * of);
                    }
                }
            }
            let sum =
                |rows: &[&Vec<f32>]| (0..COUNT).map(|at| rows.iter().map(|row| row[at]).sum()).collect::<Vec<f32>>();
            let (wanted, found): (Vec<_>, Vec<_>) = rows.iter().zip(living).map(|(row, at)| (row, &ends[at])).unzip();
            assert!(apart(&sum(&wanted), &sum(&found)) < 1e-4, "{peers:?} {modular}: the sum stays");
            for (row, rank) in rows.iter().zip(living) {
                let apart = apart(row, &ends[rank]);
                // half a step of each of the ranks that meet in each round, of steps of 1/16
                assert!(apart < if modular { 0.3 } else { 1e-5 }, "{peers:?} {modular} on rank {rank}: {apart}");
            }
        }
    }
}

#[test]
fn nobody_waits_for_who_goes_or_rests() {
    for peers in [Peers::Ring, Peers::Random] {
        // of the two that stay neither leaves before the other has looked who is there
        let looked = Barrier::new(2);
        let ends = setup(&["a", "b", "b", "c"]).spawn(move |rank| {
            let mut model = Model::new(rank, peers, false);
            model.background.start().unwrap();
            let began = Instant::now();
            for number in 0..60 {
                // one goes in the middle of things, one in good order, and one rests for a while
                match (rank.rank, number) {
                    (1, 20) => {
                        go(rank);
                        return model.weights;
                    }
                    (2, 40) => {
                        model.background.stop();
                        return model.weights;
                    }
                    (3, 10) => model.background.pause(0),
                    (3, 15) => model.background.resume(),
                    _ => {}
                }
                if rank.rank != 3 || !(10..15).contains(&number) {
                    model.round(number);
                }
            }
            assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
            let living = model.background.progress().living;
            looked.wait();
            assert_eq!(living, 2);
            model.weights
        });
        assert!(apart(&ends[0], &ends[3]) < 1e-3, "{peers:?}");
    }
}

/// Adds what no code of a snapshot nearby can tell.
fn jump(weights: &mut [f32]) {
    weights.iter_mut().enumerate().for_each(|(at, x)| *x += (at % 7) as f32 * 31.7);
}

fn sum(rows: &[Vec<f32>]) -> Vec<f32> {
    (0..COUNT).map(|at| rows.iter().map(|row| row[at]).sum()).collect()
}

#[test]
fn who_comes_back_to_a_round_that_is_over_stays_where_it_is() {
    // the other one begins the round before it hears of the rest, or after
    for (modular, waits) in [(false, false), (false, true), (true, false), (true, true)] {
        let met = Barrier::new(2);
        let ends = setup(&["a", "b"]).spawn(move |rank| {
            let mut model = Model::new(rank, Peers::Ring, modular);
            model.background.start().unwrap();
            assert!((0..3).all(|number| model.round(number)));
            if rank.rank == 0 {
                assert!(!model.round(3), "nobody is there");
                met.wait();
            } else {
                std::thread::sleep(Duration::from_millis(if waits { 100 } else { 0 }));
                model.background.pause(0);
                met.wait();
                model.background.resume();
                jump(&mut model.weights);
                let before = model.weights.clone();
                assert!(!model.round(3), "{modular} {waits}: the other one has ended it");
                assert_eq!(model.weights, before);
            }
            met.wait();
            assert!(model.round(4), "{modular} {waits}");
            met.wait();
            model.weights
        });
        let mut begin = [at_first(0), at_first(1)];
        jump(&mut begin[1]);
        assert!(apart(&sum(&ends), &sum(&begin)) < 1e-3, "{modular} {waits}: the sum stays");
    }
}

#[test]
fn who_comes_back_while_others_are_in_the_round_moves_with_those_that_count_it() {
    for modular in [false, true] {
        let met = Barrier::new(3);
        let ends = setup(&["a", "b", "c"]).spawn(move |rank| {
            let mut model = Model::new(rank, Peers::Ring, modular);
            model.background.start().unwrap();
            assert!((0..3).all(|number| model.round(number)));
            match rank.rank {
                1 => model.background.pause(0),
                _ => assert!(model.round(3)),
            }
            met.wait();
            // rank 0 is in the round without rank 1, and waits for rank 2, which has heard that rank 1 comes
            std::thread::sleep(Duration::from_millis(100 * rank.rank as u64));
            if rank.rank == 1 {
                model.background.resume();
                jump(&mut model.weights);
            }
            assert!(model.round(4), "rank 2 is there for both");
            assert!(model.round(5));
            met.wait();
            model.weights
        });
        let mut begin = [at_first(0), at_first(1), at_first(2)];
        jump(&mut begin[1]);
        assert!(apart(&sum(&ends), &sum(&begin)) < 1e-2, "{modular}: the sum stays");
    }
}

#[test]
fn all_that_are_left_use_the_same_values() {
    for turn in 0..12u64 {
        let ends = setup(&["a", "a", "b", "b", "c"]).spawn(move |rank| {
            let me = rank.rank as u64;
            let mut found = Vec::new();
            for question in 0..20u64 {
                rank.engine().convene();
                // two go, at moments that differ from turn to turn: before they hand anything in, and after
                if (me == 1 && question == turn) || (me == 4 && question == turn / 2 + 3) {
                    if turn % 3 > 0 {
                        rank.engine().gather_living(&[0; 5000], false, None).unwrap();
                    }
                    go(rank);
                    return found;
                }
                let value = vec![(me * 20 + question) as u8; 5000];
                match rank.engine().gather_living(&value, false, None).unwrap() {
                    Agreed::Values(values) => found.push(values),
                    Agreed::Settled => panic!("nobody has said so"),
                }
            }
            found
        });
        assert_eq!(ends[0].len(), 20);
        assert!(ends[0] == ends[2] && ends[0] == ends[3], "turn {turn}");
        let ranks: Vec<u32> = ends[0][19].iter().map(|(rank, _)| *rank).collect();
        assert_eq!(ranks, [0, 2, 3]);
        assert_eq!(ends[0][19][1].1, vec![2 * 20 + 19; 5000]);
    }
}

#[test]
fn what_ended_well_for_one_is_settled_for_all() {
    let ends = setup(&["a", "b", "c"]).spawn(|rank| {
        let mut found = Vec::new();
        for question in 0..9 {
            rank.engine().convene();
            if question % 3 == rank.rank {
                rank.engine().settled();
            } else {
                found.push(rank.engine().gather_living(&[1], false, None).unwrap());
            }
        }
        found
    });
    assert!(ends.iter().all(|found| *found == vec![Agreed::Settled; 6]), "{ends:?}");
}

#[test]
fn who_does_not_come_is_named_at_the_deadline() {
    let ends = setup(&["a", "b", "c"]).timeout(Duration::from_secs(1)).spawn(|rank| {
        rank.engine().convene();
        (rank.rank != 2).then(|| rank.engine().gather_living(&[1], false, None).unwrap_err().to_string())
    });
    for story in ends.into_iter().flatten() {
        assert!(story.contains("rank 2 (host c") && story.contains("try:"), "{story}");
    }
}
