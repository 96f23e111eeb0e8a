//! N ranks as N threads over a store in memory, each with its own engine.

use std::any::Any;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use offbeat_core::config::{Config, Tuning};
use offbeat_core::engine::Engine;
use offbeat_core::transport::rendezvous::MemoryStore;

/// What a world is made of. Ranks with the same label share memory, others talk TCP over loopback.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The host label of each rank.
    pub layout: Vec<String>,
    /// Sizes at which ways change.
    pub tuning: Tuning,
    /// For a call.
    pub timeout: Duration,
    /// For everything; then the test fails, whatever still runs.
    pub deadline: Duration,
    /// TCP streams for each pair.
    pub streams: Option<u8>,
}

impl Setup {
    /// A world with a layout and sizes, and patience for a busy machine.
    pub fn new(layout: &[&str], tuning: Tuning) -> Self {
        Setup {
            layout: layout.iter().map(|host| (*host).to_owned()).collect(),
            tuning,
            timeout: Duration::from_secs(20),
            deadline: Duration::from_secs(60),
            streams: None,
        }
    }

    /// With another timeout for calls.
    pub fn timeout(self, timeout: Duration) -> Self {
        Setup { timeout, ..self }
    }

    /// With several TCP streams for each pair.
    pub fn streams(self, streams: u8) -> Self {
        Setup { streams: Some(streams), ..self }
    }

    fn config(&self, rank: usize) -> Config {
        let mut config = Config { timeout: self.timeout, tuning: self.tuning, ..Config::default() };
        config.options.host = Some(self.layout[rank].clone());
        config.options.interface = "lo".to_owned();
        config.options.shared_bytes = 1 << 32;
        config.options.connect_timeout = self.deadline;
        config.options.streams = self.streams;
        config
    }

    /// Runs `act` on every rank and gives what each returned. A rank that panics, or is not done when the deadline has
    /// passed, fails the test with the stories of all ranks.
    pub fn spawn<T: Send + 'static>(self, act: impl Fn(&mut Rank) -> T + Send + Sync + 'static) -> Vec<T> {
        let world = self.layout.len();
        let (act, store) = (Arc::new(act), Arc::new(MemoryStore::default()));
        let lines = Arc::new((Line::default(), Line::default()));
        let (done, results) = mpsc::channel();
        for rank in 0..world {
            let (setup, act, store) = (self.clone(), Arc::clone(&act), Arc::clone(&store));
            let (lines, done) = (Arc::clone(&lines), done.clone());
            let run = move || {
                let (start, finish) = &*lines;
                let limit = Instant::now() + setup.deadline;
                let work = || {
                    let engine = Engine::connect(setup.config(rank), Some(&*store), rank as u32, world as u32, None);
                    let engine = engine.unwrap_or_else(|error| panic!("cannot connect: {error}"));
                    // a rank that ends at once would end the linking of those that are not done with it
                    start.wait_for_all(world, limit);
                    let mut rank = Rank { rank, layout: setup.layout.clone(), engine: Some(engine) };
                    let value = act(&mut rank);
                    // who leaves early must not look lost to those who are still at work
                    finish.wait_for_all(world, limit);
                    value
                };
                let result = catch_unwind(AssertUnwindSafe(work)).map_err(|panic| text_of(&*panic));
                if result.is_err() {
                    start.give_up();
                    finish.give_up();
                }
                // the test may have given up already
                let _ = done.send((rank, result));
            };
            std::thread::Builder::new().name(format!("rank-{rank}")).spawn(run).expect("a thread for a rank");
        }
        drop(done);
        gather(&results, world, self.deadline)
    }
}

/// Runs `act` on every rank of a world with the given layout and sizes; see [`Setup::spawn`].
pub fn spawn<T: Send + 'static>(
    layout: &[&str],
    tuning: Tuning,
    act: impl Fn(&mut Rank) -> T + Send + Sync + 'static,
) -> Vec<T> {
    Setup::new(layout, tuning).spawn(act)
}

fn gather<T>(results: &mpsc::Receiver<(usize, Result<T, String>)>, world: usize, deadline: Duration) -> Vec<T> {
    let end = Instant::now() + deadline;
    let (mut values, mut failures): (BTreeMap<usize, T>, Vec<String>) = (BTreeMap::new(), Vec::new());
    while values.len() + failures.len() < world {
        // when one has failed the others follow soon, or are stuck
        let limit = if failures.is_empty() { end } else { end.min(Instant::now() + Duration::from_secs(30)) };
        match results.recv_timeout(limit.saturating_duration_since(Instant::now())) {
            Ok((rank, Ok(value))) => drop(values.insert(rank, value)),
            Ok((rank, Err(story))) => failures.push(format!("rank {rank}: {story}")),
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                let done: Vec<usize> = values.keys().copied().collect();
                failures.push(format!("a hang: only ranks {done:?} of {world} are done after {deadline:?}"));
                break;
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    values.into_values().collect()
}

fn text_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
    text.unwrap_or("panic").to_owned()
}

/// Where ranks wait for each other: before they act, and before they shut down.
#[derive(Default)]
struct Line {
    /// How many have come, and whether somebody never will.
    state: Mutex<(usize, bool)>,
    changed: Condvar,
}

impl Line {
    fn wait_for_all(&self, world: usize, limit: Instant) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.0 += 1;
        self.changed.notify_all();
        let patience = limit.saturating_duration_since(Instant::now());
        let all = self.changed.wait_timeout_while(state, patience, |(come, failed)| *come < world && !*failed);
        drop(all);
    }

    fn give_up(&self) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).1 = true;
        self.changed.notify_all();
    }
}

/// One rank of a world.
pub struct Rank {
    /// Its number.
    pub rank: usize,
    /// The host label of every rank.
    pub layout: Vec<String>,
    engine: Option<Engine>,
}

impl Rank {
    /// Its engine.
    pub fn engine(&self) -> &Engine {
        self.engine.as_ref().expect("the engine was dropped")
    }

    /// How many ranks there are.
    pub fn world(&self) -> usize {
        self.layout.len()
    }

    /// Drops the engine while others may still wait for this rank.
    pub fn drop_engine(&mut self) {
        self.engine = None;
    }
}
