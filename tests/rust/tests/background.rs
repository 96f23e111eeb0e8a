//! Exchanges in the background, with ranks as threads: the training thread is played by the test.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]

use std::time::{Duration, Instant};

use offbeat_core::background::{Background, Closing, Description, Method, Rounds, Task};
use offbeat_core::codec::{Codec, MinMax8};
use offbeat_core::config::Tuning;
use offbeat_core::graph::{Graph, Peers};
use offbeat_tests::world::{Rank, Setup};

const LONG: Duration = Duration::from_secs(3600);

/// Chunks so small that letters have many frames, in several streams.
fn setup(layout: &[&str]) -> Setup {
    Setup::new(layout, Tuning { chunk: 1 << 10, ..Tuning::default() }).streams(2)
}

/// A rank's model, and its steps.
struct Model {
    background: Background,
    weights: Vec<f32>,
    clock: u64,
}

impl Model {
    fn new(rank: &Rank, method: Method, period: Duration, weights: Vec<f32>) -> Self {
        let model = Model::prepare(rank, method, period, weights);
        model.copy();
        model.background.start().unwrap();
        model
    }

    /// One whose thread has not started.
    fn prepare(rank: &Rank, method: Method, period: Duration, weights: Vec<f32>) -> Self {
        let lanes = rank.engine().lanes(false, None).unwrap();
        let description = Description { method, period: Some(period) };
        let background = rank.engine().background(&lanes[0], &[weights.len()], description).unwrap();
        Model { background, weights, clock: 0 }
    }

    fn copy(&self) {
        let ([snapshot, _], _) = self.background.memory();
        // SAFETY: the memory is that long, and it is the training thread's turn.
        let memory = unsafe { std::slice::from_raw_parts_mut(snapshot.start().cast::<f32>(), self.weights.len()) };
        memory.copy_from_slice(&self.weights);
    }

    fn act(&mut self, task: Task) {
        match task {
            Task::Snapshot => {
                self.copy();
                self.background.taken(self.clock);
            }
            Task::Apply => {
                let ([_, delta], _) = self.background.memory();
                // SAFETY: as above.
                let delta = unsafe { std::slice::from_raw_parts(delta.start().cast::<f32>(), self.weights.len()) };
                self.weights.iter_mut().zip(delta).for_each(|(x, d)| *x += d);
                self.background.applied();
            }
            Task::Skip => self.background.applied(),
        }
    }

    /// One step, and a safe point that waits for nobody.
    fn step(&mut self, change: impl Fn(usize) -> f32) {
        self.weights.iter_mut().enumerate().for_each(|(at, x)| *x += change(at));
        self.clock += 1;
        if let Some(task) = self.background.look().unwrap() {
            self.act(task);
        }
    }

    /// A whole round: a snapshot of now, and what comes of it. False if nobody is left.
    fn round(&mut self) -> bool {
        let mut taken = false;
        loop {
            let Some(task) = self.background.wait(false, None).unwrap() else { return false };
            self.act(task);
            match task {
                Task::Snapshot => taken = true,
                _ if taken => return true,
                _ => {}
            }
        }
    }

    /// Lets a copy stand for the model.
    fn pause(&mut self) {
        if let Some(task) = self.background.look().unwrap().filter(|task| *task != Task::Snapshot) {
            self.act(task);
        }
        if self.background.hold() {
            self.copy();
        }
        self.background.pause(self.clock);
    }

    /// Goes on, and adds what came of rounds meanwhile.
    fn resume(&mut self) {
        self.background.resume();
        while let Some(task) = self.background.wait(true, None).unwrap() {
            self.act(task);
        }
    }
}

fn at_first(rank: usize, count: usize) -> Vec<f32> {
    (0..count).map(|at| ((at * 7 + rank * 13) % 101) as f32 / 50.0 - 1.0).collect()
}

fn close(a: &[f32], b: &[f32], bound: f32) {
    let worst = a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
    assert!(a.len() == b.len() && worst <= bound, "{worst} is over {bound}");
}

fn mean(rows: &[Vec<f32>]) -> Vec<f32> {
    (0..rows[0].len()).map(|at| rows.iter().map(|row| row[at]).sum::<f32>() / rows.len() as f32).collect()
}

#[test]
fn everyone_moves_to_the_mean_and_stays_there() {
    for (codec, bound) in [(None, 1e-6), (Some(&MinMax8 as &'static dyn offbeat_core::codec::Codec), 1e-6)] {
        for count in [1, 700, 5000] {
            let ends = setup(&["a", "a", "b"]).spawn(move |rank| {
                let method = Method::Average { codec };
                let mut model = Model::new(rank, method, LONG, at_first(rank.rank, count));
                assert!(model.round() && model.round());
                assert_eq!(model.background.progress().rounds, 2);
                rank.engine().world().run(barrier(), None).unwrap();
                model.weights
            });
            let begin: Vec<Vec<f32>> = (0..3).map(|rank| at_first(rank, count)).collect();
            ends.iter().for_each(|end| close(end, &mean(&begin), bound));
        }
    }
}

#[test]
fn steps_made_meanwhile_are_never_lost() {
    // every rank adds the same to its weights in the end: the mean moves by exactly that, whenever rounds happened
    for method in [
        Method::Average { codec: None },
        Method::Gossip { peers: Peers::Random, seed: 1, modular: false },
        Method::Server { codec: None, feedback: false, bounded: false },
    ] {
        let ends = setup(&["a", "b", "b", "c"]).spawn(move |rank| {
            let mut model = Model::new(rank, method, Duration::ZERO, vec![1.0; 3000]);
            let began = Instant::now();
            for step in 0..200 {
                model.step(|at| if at % 2 == 0 { 0.5 } else { -0.25 });
                std::thread::sleep(Duration::from_micros(if step % 10 == rank.rank { 9000 } else { 1000 }));
            }
            assert!(began.elapsed() < Duration::from_secs(20));
            let rounds = model.background.progress().rounds;
            model.pause();
            rank.engine().world().run(barrier(), None).unwrap();
            // nobody begins a round any more; those under way end with the copies
            std::thread::sleep(Duration::from_millis(300));
            rank.engine().world().run(barrier(), None).unwrap();
            model.resume();
            rank.engine().world().run(barrier(), None).unwrap();
            (model.weights, rounds)
        });
        assert!(ends.iter().all(|(_, rounds)| *rounds > 0), "{:?}", ends.iter().map(|e| e.1).collect::<Vec<_>>());
        let rows: Vec<Vec<f32>> = ends.into_iter().map(|(weights, _)| weights).collect();
        let wanted: Vec<f32> = (0..3000).map(|at| if at % 2 == 0 { 101.0 } else { -49.0 }).collect();
        match method {
            // what was pushed is in the server's hands, and comes back with the next answer
            Method::Server { .. } => rows.iter().for_each(|row| assert!(row[0] > 30.0 && row[0] < 170.0)),
            _ => close(&mean(&rows), &wanted, 1e-3),
        }
    }
}

fn barrier() -> offbeat_core::group::Work {
    offbeat_core::group::Work { call: offbeat_core::call::Call::Barrier, keep: None }
}

#[test]
fn gossip_is_the_mean_of_the_pairs_of_its_graph() {
    for modular in [false, true] {
        let (world, count, rounds) = (5, 3000, 8);
        let ends = setup(&["a", "a", "b", "b", "c"]).spawn(move |rank| {
            let method = Method::Gossip { peers: Peers::Random, seed: 9, modular };
            let mut model = Model::new(rank, method, LONG, at_first(rank.rank, count));
            for _ in 0..rounds {
                assert!(model.round());
            }
            // nobody leaves while another is in its last round
            rank.engine().world().run(barrier(), None).unwrap();
            (model.weights, model.background.coded())
        });
        let graph = Graph::new(Peers::Random, world, 9).unwrap();
        let mut rows: Vec<Vec<f32>> = (0..world).map(|rank| at_first(rank, count)).collect();
        let sum = mean(&rows);
        for round in 0..rounds {
            let before = rows.clone();
            for rank in 0..world {
                if let Some(peer) = graph.peers(rank, round).first() {
                    rows[rank] = mean(&[before[rank].clone(), before[*peer].clone()]);
                }
            }
        }
        let found: Vec<Vec<f32>> = ends.iter().map(|end| end.0.clone()).collect();
        close(&mean(&found), &sum, 1e-5);
        for (rank, row) in found.iter().enumerate() {
            // half a step in each round, of steps of 1/32
            close(row, &rows[rank], if modular { 0.13 } else { 1e-5 });
        }
        if modular {
            assert!(ends.iter().all(|(_, coded)| coded.plain > 0 && coded.coded < coded.plain));
        }
    }
}

#[test]
fn a_bounded_server_adds_up_everybodys_steps() {
    for codec in [None, Some(&MinMax8 as &'static dyn offbeat_core::codec::Codec)] {
        let ends = setup(&["a", "a", "b"]).spawn(move |rank| {
            let method = Method::Server { codec, feedback: true, bounded: true };
            let mut model = Model::new(rank, method, LONG, vec![1.0; 4000]);
            let mine = rank.rank as f32 + 1.0;
            for step in 1..=10u64 {
                model.weights.iter_mut().for_each(|x| *x += mine);
                model.clock = step;
                assert!(model.round());
            }
            model.weights
        });
        // the mean of 1, 2 and 3, ten times
        for end in ends {
            close(&end, &[21.0; 4000], if codec.is_some() { 0.2 } else { 1e-4 });
        }
    }
}

#[test]
fn a_checkpoint_in_the_middle_of_a_round_counts_every_update_once() {
    for codec in [None, Some(&MinMax8 as &'static dyn offbeat_core::codec::Codec)] {
        let ends = setup(&["a", "b"]).spawn(move |rank| {
            let method = Method::Server { codec, feedback: true, bounded: true };
            let step = |model: &mut Model| {
                model.weights.iter_mut().for_each(|x| *x += rank.rank as f32 + 1.0);
                model.clock += 1;
            };
            let mut model = Model::new(rank, method, LONG, vec![1.0; 4000]);
            step(&mut model);
            assert!(model.round());
            step(&mut model);
            if rank.rank == 0 {
                // it pushes and is not answered: the other one has not come as far
                let task = model.background.wait(false, None).unwrap().unwrap();
                assert_eq!(task, Task::Snapshot);
                model.act(task);
                let end = Instant::now() + Duration::from_secs(10);
                while model.background.save().unwrap().round != 2 && Instant::now() < end {
                    std::thread::sleep(Duration::from_millis(2));
                }
                step(&mut model);
            }
            let saved = model.background.save().unwrap();
            assert_eq!((saved.round, saved.living), (2 - rank.rank as u64, 2));
            rank.engine().world().run(barrier(), None).unwrap();
            let (weights, clock) = (std::mem::take(&mut model.weights), model.clock);
            drop(model);

            let mut model = Model::prepare(rank, method, LONG, weights);
            model.clock = clock;
            for (label, values) in &saved.tensors[0] {
                assert!(model.background.restore(0, label, values).unwrap(), "{label}");
            }
            assert!(!model.background.restore(0, "something", &[]).unwrap());
            assert!(model.background.restore(0, "base", &[1.0]).is_err(), "too few");
            model.background.go_on(Rounds { mine: saved.round, least: 1, most: 2 }).unwrap();
            model.copy();
            model.background.start().unwrap();
            assert!(model.background.go_on(Rounds { mine: 0, least: 0, most: 0 }).is_err(), "too late");
            if rank.rank == 1 {
                step(&mut model);
            }
            assert_eq!(model.clock, 3);
            assert!(model.round());
            // what is kept can be had after the end too
            rank.engine().world().run(barrier(), None).unwrap();
            model.background.stop();
            assert_eq!(model.background.save().unwrap().round, 3);
            model.weights
        });
        // three steps of 1 and of 2
        for end in ends {
            close(&end, &[5.5; 4000], if codec.is_some() { 0.02 } else { 1e-6 });
        }
    }
}

#[test]
fn a_rank_that_goes_in_the_middle_is_dropped_and_the_others_agree() {
    for method in [
        Method::Average { codec: None },
        Method::Average { codec: Some(&MinMax8) },
        Method::Gossip { peers: Peers::Random, seed: 2, modular: true },
        Method::Server { codec: Some(&MinMax8), feedback: true, bounded: false },
        Method::Server { codec: None, feedback: false, bounded: true },
    ] {
        let ends = setup(&["a", "a", "b", "b"]).spawn(move |rank| {
            let mut model = Model::new(rank, method, Duration::from_millis(1), at_first(rank.rank, 4000));
            for _ in 0..40 {
                model.step(|_| 0.0);
                std::thread::sleep(Duration::from_millis(1));
            }
            if rank.rank == 2 {
                rank.drop_engine();
                return (model.weights, 0);
            }
            let end = Instant::now() + Duration::from_secs(10);
            while model.background.progress().living > 3 && Instant::now() < end {
                model.step(|_| 0.0);
                std::thread::sleep(Duration::from_millis(1));
            }
            let before = model.background.progress().rounds;
            let end = Instant::now() + Duration::from_millis(1500);
            while Instant::now() < end {
                model.step(|_| 0.0);
                std::thread::sleep(Duration::from_millis(1));
            }
            (model.weights.clone(), model.background.progress().rounds - before)
        });
        assert!([0, 1, 3].iter().all(|rank| ends[*rank].1 > 5), "{method:?}: {:?}", ends.iter().map(|e| e.1));
        close(&ends[0].0, &ends[1].0, 0.02);
        close(&ends[0].0, &ends[3].0, 0.02);
    }
}

/// Each rank's steps are in the values of all, when all have closed a first round and then a second one: whatever they knew
/// before, and however far they had come.
#[test]
fn two_closing_rounds_leave_nothing_over() {
    for (codec, bounded) in [(None, false), (None, true), (Some(&MinMax8 as &'static dyn Codec), false)] {
        let ends = setup(&["a", "a", "b"]).spawn(move |rank| {
            let method = Method::Server { codec, feedback: true, bounded };
            let mut model = Model::new(rank, method, LONG, vec![1.0; 4000]);
            // a first answer, so that the next ones are encoded
            model.clock = 1;
            assert!(model.round());
            model.weights.iter_mut().enumerate().for_each(|(at, x)| *x += (1 + rank.rank + at % 7) as f32);
            model.clock += 1 + rank.rank as u64;
            if rank.rank == 2 && !bounded {
                assert!(model.round());
            }
            rank.engine().world().run(barrier(), None).unwrap();
            model.background.close(Closing::Settles);
            assert!(model.round());
            rank.engine().world().run(barrier(), None).unwrap();
            assert!(model.round());
            model.background.close(Closing::Open);
            rank.engine().world().run(barrier(), None).unwrap();
            model.weights
        });
        let want: Vec<f32> = (0..4000).map(|at| 3.0 + (at % 7) as f32).collect();
        ends.iter().for_each(|end| close(end, &want, 1e-5));
    }
}

/// Nothing but the goodbye of who leaves says so here: its engine stays until the end, and every round waits for all members.
#[test]
fn who_leaves_in_good_order_is_waited_for_no_longer_than_its_letters_take() {
    let rounds = setup(&["a", "a", "b", "c", "d"]).spawn(|rank| {
        let method = Method::Server { codec: None, feedback: false, bounded: true };
        let mut model = Model::new(rank, method, Duration::ZERO, vec![1.0; 4000]);
        let mut seen = Vec::new();
        // one leaves after each round, and the last two together
        for round in 0..=rank.rank.min(3) {
            model.weights.iter_mut().for_each(|x| *x += 1.0 + rank.rank as f32);
            model.clock += 1;
            assert!(model.round(), "round {round} of rank {}", rank.rank);
            seen.push(model.weights.clone());
        }
        drop(model);
        rank.engine().world().run(barrier(), None).unwrap();
        seen
    });
    close(&rounds[4][0], &[4.0; 4000], 1e-5);
    for (rank, seen) in rounds[..4].iter().enumerate() {
        assert_eq!(seen.len(), rank + 1);
        seen.iter().zip(&rounds[4]).for_each(|(theirs, last)| close(theirs, last, 1e-5));
    }
}

/// Who has all that it needs leaves at once, while others still wait for letters, or have not even begun.
#[test]
fn rounds_that_have_ended_for_who_leaves_end_for_all() {
    for method in [
        Method::Average { codec: None },
        Method::Average { codec: Some(&MinMax8) },
        Method::Gossip { peers: Peers::Exponential, seed: 0, modular: false },
        Method::Gossip { peers: Peers::Exponential, seed: 0, modular: true },
    ] {
        for turn in 0..6 {
            let ends = setup(&["a", "b", "c", "d"]).spawn(move |rank| {
                let mut model = Model::new(rank, method, Duration::ZERO, at_first(rank.rank, 20_000));
                for round in 0..2 {
                    if rank.rank == turn % 4 {
                        std::thread::sleep(Duration::from_millis(3));
                    }
                    assert!(
                        model.round(),
                        "round {round} of rank {}, {method:?}: {:?}",
                        rank.rank,
                        model.background.progress()
                    );
                }
                let dropped = model.background.progress().dropped;
                let weights = std::mem::take(&mut model.weights);
                if turn % 2 == 0 {
                    drop(model);
                    rank.engine().world().run(barrier(), None).unwrap();
                } else {
                    rank.drop_engine();
                }
                (weights, dropped)
            });
            let middle = mean(&(0..4).map(|rank| at_first(rank, 20_000)).collect::<Vec<_>>());
            for (weights, dropped) in ends {
                assert_eq!(dropped, 0, "{method:?}");
                close(&weights, &middle, 0.05);
            }
        }
    }
}

#[test]
fn two_threads_in_one_process_end_with_their_owners() {
    let alone = setup(&["a", "b"]).spawn(|rank| {
        let mut one = Model::new(rank, Method::Average { codec: None }, LONG, vec![rank.rank as f32; 100]);
        let mut two = Model::new(rank, Method::Average { codec: None }, LONG, vec![rank.rank as f32; 100]);
        assert!(two.round() && one.round());
        if rank.rank == 0 {
            drop(one);
            return (two.round(), two.weights[0]);
        }
        let left = two.round();
        // the peer of this one has gone, without a word of failure: nobody is left to wait for
        let end = Instant::now() + Duration::from_secs(10);
        while one.background.progress().living > 1 && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(!one.round());
        (left, two.weights[0])
    });
    assert_eq!(alone, [(true, 0.5), (true, 0.5)]);
}
