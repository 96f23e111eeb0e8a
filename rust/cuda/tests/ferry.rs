//! Snapshots to the host and deltas back, on the doubles: what each wait is for. Left out one by one, each is missed on some
//! schedule of streams, on every run.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]
#![cfg(target_os = "linux")]

mod support;

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use offbeat_core::Result;
use offbeat_core::background::Ferry as _;
use offbeat_core::buffer::{Lent, Storage};
use offbeat_cuda::device::Device;
use offbeat_cuda::ferry::Ferry;
use offbeat_cuda::memory::{Piece, Scratch};
use offbeat_cuda::stream::{Address, Stream};

use support::Ranks;
use support::process::setting;

const COUNT: usize = 1000;

/// Streams in the order in which they are made, as bits of `FAKECUDA_SCHED`.
const TORCH: u32 = 1;
const OURS: u32 = 4;

#[test]
fn every_schedule_brings_what_was_sent() {
    let scheduled = [0, TORCH, OURS, TORCH | OURS].map(|lazy| Ranks::of("nothing", &[1]).with("FAKECUDA_SCHED", lazy));
    let as_it_comes = [(); 3].map(|()| Ranks::of("nothing", &[1]));
    for ranks in scheduled.into_iter().chain(as_it_comes) {
        let said = ranks.run().remove(0);
        assert!(said.ok, "{}", said.text);
        assert!(said.text.contains("leaked memory=0 streams=0 events=0 modules=0 contexts=0;"), "{}", said.text);
    }
}

#[test]
fn a_wait_that_is_left_out_is_missed_on_some_schedule() {
    for (case, lazy) in [
        ("the copy of weights", TORCH),
        ("the snapshot", OURS),
        ("the delta", OURS),
        // where torch's stream is eager it waits for the delta, and so makes ours run
        ("pinned memory", TORCH | OURS),
        ("the delta before", TORCH),
    ] {
        let said = Ranks::of(case, &[1]).with("FAKECUDA_SCHED", lazy).run().remove(0);
        assert!(!said.ok && said.text.contains("other numbers"), "without a wait for {case}: {}", said.text);
    }
}

/// Memory of torch's.
struct Tensor(Piece);

impl Lent for Tensor {
    fn start(&self) -> *mut u8 {
        self.0.address() as *mut u8
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

struct Training {
    torch: Arc<Stream>,
    idle: Arc<Stream>,
    memory: Arc<Scratch>,
    ferry: Ferry,
    /// The wait that is left out.
    forgets: String,
}

impl Training {
    fn begin() -> Result<Self> {
        let device = Device::open(0, 0, "here")?;
        let (torch, idle) = (Stream::new(&device)?, Stream::new(&device)?);
        let memory = Scratch::new(&torch);
        let allocate = |count: usize| memory.take(count * 4).map(|piece| Arc::new(Tensor(piece)) as Arc<dyn Lent>);
        let ferry = Ferry::new(&device, COUNT, &allocate)?;
        Ok(Training { torch, idle, memory, ferry, forgets: setting("CASE") })
    }

    fn device(&self) -> [Address; 2] {
        self.ferry.memory().map(|memory: Storage| memory.start() as Address)
    }

    fn wait_for_ferry(&self, what: &str) {
        while self.forgets != what && !self.ferry.is_idle().unwrap() {
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// Weights are copied on torch's stream, and come to the background thread.
    fn snapshot(&self, value: f32) -> Result<()> {
        let bytes: Vec<u8> = [value; COUNT].iter().flat_map(|value| value.to_le_bytes()).collect();
        // SAFETY: the snapshot is as long.
        unsafe { self.torch.upload(&bytes, self.device()[0])? };
        let stream = if self.forgets == "the copy of weights" { &self.idle } else { &self.torch };
        self.ferry.fetch(stream.handle())?;
        self.wait_for_ferry("the snapshot");
        // SAFETY: it is that long, and has come.
        let here = unsafe { std::slice::from_raw_parts(self.ferry.aboard()[0], COUNT) };
        assert!(here.iter().all(|number| *number == value), "other numbers: {} instead of {value}", here[0]);
        Ok(())
    }

    /// The background thread writes a delta, and torch's stream reads it.
    fn delta(&self, value: f32) -> Result<Piece> {
        self.wait_for_ferry("pinned memory");
        // SAFETY: it is that long, and nobody reads it.
        unsafe { std::slice::from_raw_parts_mut(self.ferry.aboard()[1], COUNT) }.fill(value);
        self.ferry.send()?;
        if self.forgets != "the delta" {
            self.ferry.land(self.torch.handle())?;
        }
        let read = self.memory.take(COUNT * 4)?;
        // SAFETY: both are as long, and stay until they were read.
        unsafe { self.torch.copy(self.device()[1], read.address(), COUNT * 4)? };
        if self.forgets != "the delta before" {
            self.ferry.landed(self.torch.handle())?;
        }
        Ok(read)
    }
}

#[test]
#[ignore = "a rank of the other tests"]
fn rank() {
    let training = Training::begin().unwrap();
    for round in 0..3 {
        let value = f32::from(round as u8);
        training.snapshot(value + 1.0).unwrap();
        // in a row, as nothing comes in between that waits for other reasons
        let read: Vec<Piece> = (0..3).map(|at| training.delta(value + 0.25 * at as f32).unwrap()).collect();
        for (at, piece) in read.iter().enumerate() {
            let (mut bytes, wanted) = (vec![0; COUNT * 4], value + 0.25 * at as f32);
            // SAFETY: it is that long.
            unsafe { training.torch.download(piece.address(), &mut bytes).unwrap() };
            let same = bytes.chunks_exact(4).all(|number| number == wanted.to_le_bytes());
            assert!(same, "other numbers: {:?} instead of {wanted}", &bytes[..4]);
        }
    }
    // one is on its way when all ends
    training.ferry.fetch(training.torch.handle()).unwrap();
}
