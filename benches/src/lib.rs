//! Ranks as threads for the benches: a world that runs one job on every rank, again and again, without starting anew.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a bench that cannot run should stop")]

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Barrier};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use offbeat_core::buffer::{Buffer, Shaped};
use offbeat_core::call::Call;
use offbeat_core::config::{Config, Tuning};
use offbeat_core::dtype::{DType, Op};
use offbeat_core::engine::Engine;
use offbeat_core::group::Work;
use offbeat_core::transport::rendezvous::MemoryStore;

/// `repetitions` all-reduces of `count` f32.
struct Job {
    count: usize,
    repetitions: u64,
}

/// Ranks that wait for jobs.
pub struct World {
    jobs: Vec<Sender<Job>>,
    times: Receiver<Duration>,
    ranks: Vec<JoinHandle<()>>,
}

impl World {
    /// One rank for each host label.
    pub fn new(hosts: &[&str], tuning: Tuning) -> Self {
        let (store, start) = (Arc::new(MemoryStore::default()), Arc::new(Barrier::new(hosts.len())));
        let (done, times) = channel();
        let (mut jobs, mut ranks) = (Vec::new(), Vec::new());
        for (rank, host) in hosts.iter().enumerate() {
            let (sender, inbox) = channel();
            let (store, start, done) = (Arc::clone(&store), Arc::clone(&start), done.clone());
            let (host, world) = (host.to_string(), hosts.len() as u32);
            jobs.push(sender);
            ranks.push(std::thread::spawn(move || {
                let mut config = Config { tuning, ..Config::default() };
                config.options.host = Some(host);
                let engine = Engine::connect(config, Some(&*store), rank as u32, world, None).unwrap();
                serve(&engine, &inbox, &start, &done);
            }));
        }
        World { jobs, times, ranks }
    }

    /// The time of the slowest rank for so many all-reduces, in memory that neighbours share.
    pub fn all_reduce(&self, count: usize, repetitions: u64) -> Duration {
        self.jobs.iter().for_each(|rank| rank.send(Job { count, repetitions }).unwrap());
        self.jobs.iter().map(|_| self.times.recv().unwrap()).max().unwrap_or_default()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.jobs.clear();
        self.ranks.drain(..).for_each(|rank| rank.join().unwrap());
    }
}

fn serve(engine: &Engine, jobs: &Receiver<Job>, start: &Barrier, done: &Sender<Duration>) {
    while let Ok(Job { count, repetitions }) = jobs.recv() {
        let memory = engine.shared(count * 4).unwrap();
        // SAFETY: the memory is ours and `count` f32 long.
        unsafe { std::ptr::write_bytes(memory.start(), 0, count * 4) };
        let buffer = Buffer::host(memory.start(), count, DType::F32);
        let run = || {
            let tensor = Shaped { buffer, shape: vec![count as u64] };
            let call = Call::AllReduce { tensor, op: Op::Sum, coding: None };
            engine.world().run(Work { call, keep: None }, None).unwrap();
        };
        run();
        start.wait();
        let began = Instant::now();
        (0..repetitions).for_each(|_| run());
        done.send(began.elapsed()).unwrap();
    }
}
