//! The scheduler of a model: its buckets go out in the agreed order, on a thread of their own, while backward goes on.
//!
//! ```text
//! hook of autograd  ─▶ arrive          counts; says when values are due to be moved into their slots
//!                   ─▶ mark_ready      writes "used", counts; wakes the thread when a bucket is complete
//! communication     ─▶ next ─▶ Pipeline::run ─▶ next …              holds no lock while a bucket is under way
//! end of backward   ─▶ missing, mark_absent ─▶ finish               waits for the round, gives its error
//! ```
//! Between hosts several threads take buckets in turn, each in a group of its own: while the last pieces of one bucket are
//! summed and sent back, the wire carries the next ones.
//!
//! In the first round nothing goes out before the end of backward: the order in which gradients become ready is observed,
//! and [`Scheduler::rebucket`] makes the final buckets of it.

mod afterwards;
mod agree;
mod built;
mod ending;
mod serving;
mod streams;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use offbeat_transport::mesh::Mesh;
use offbeat_transport::trace;
use offbeat_transport::{Interrupt, fork};

use afterwards::Afterwards;
use built::{Built, grain};

use crate::algorithm::{Carrier, Description, Saved, Storage, Stream};
use crate::bucket::{Bucket, Plan, Sizes, Tensor};
use crate::call::Call;
use crate::coding::{Count, Tally};
use crate::event::{Output, Queue};
use crate::group::{Group, Terms, Work};
use crate::readiness::Marked;
use crate::{Error, Result};

/// How long a bucket may take.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// In the first round, when other ranks may still compile or load data.
    pub first: Duration,
    /// Later.
    pub rest: Duration,
}

/// What a scheduler has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Rounds that ended well.
    pub rounds: u64,
    /// Time in which buckets were under way.
    pub communication: Duration,
    /// Time for which the end of backward waited.
    pub exposed: Duration,
}

#[derive(Default)]
struct State {
    step: u64,
    /// Buckets of this round that are done, for each lane.
    done: Vec<usize>,
    /// Whether buckets wait for the end of backward.
    held: bool,
    /// How many samples this rank has seen since the last round, where that matters.
    samples: f64,
    /// Tensors that have no value here in this round, with what steps kept of them before it.
    absent: Vec<(usize, Vec<Saved>)>,
    /// Blocks that were not finite, up to the last round.
    non_finite: u64,
    /// On a device: see `afterwards.rs`.
    afterwards: Afterwards,
    failed: Option<Error>,
    stop: bool,
}

impl State {
    /// Buckets of this round that are done.
    fn done(&self) -> usize {
        self.done.iter().sum()
    }
}

struct Shared {
    /// Bucket n goes through lane n modulo their number; all else goes through the first.
    lanes: Vec<Group>,
    /// The number that the trace knows the model by.
    model: u32,
    tensors: Vec<Tensor>,
    description: Description,
    limits: Limits,
    /// Who carries the steps, where the tensors are on a device.
    carrier: Option<Arc<dyn Carrier>>,
    /// Replaced between rounds only; whoever reads it holds it for a moment.
    built: RwLock<Arc<Built>>,
    state: Mutex<State>,
    /// Rung when a bucket is complete, a bucket is done, or the scheduler stops.
    bell: Condvar,
    communication: AtomicU64,
    exposed: AtomicU64,
    /// What codecs have done.
    tally: Arc<Tally>,
}

/// The scheduler of a model. Dropping it ends its thread.
pub struct Scheduler(Arc<Shared>);

impl Scheduler {
    /// Starts a scheduler. Until it has seen the first round, buckets follow the reverse order of the tensors, in which
    /// gradients usually become ready.
    pub(crate) fn start(
        lanes: Vec<Group>,
        model: u32,
        tensors: Vec<Tensor>,
        description: Description,
        sizes: Sizes,
        limits: Limits,
        carrier: Option<Arc<dyn Carrier>>,
    ) -> Result<Self> {
        if tensors.is_empty() {
            return Err(Error::invalid("there is nothing to train: no tensors; try: a model with parameters"));
        }
        if carrier.is_some() && lanes.len() > 1 {
            return Err(Error::invalid("a device exchanges one bucket after the other; try: one lane"));
        }
        let order: Vec<usize> = (0..tensors.len()).rev().collect();
        let grain = grain(&description, &tensors);
        let plan = Plan::new(&tensors, &order, &vec![false; tensors.len()], sizes, grain)?;
        let built = Built::new(plan, &tensors, &description, &lanes[0], carrier.as_deref())?;
        let shared = Arc::new(Shared {
            model,
            tensors,
            description,
            limits,
            carrier,
            built: RwLock::new(Arc::new(built)),
            state: Mutex::new(State { held: true, done: vec![0; lanes.len()], ..State::default() }),
            lanes,
            bell: Condvar::new(),
            communication: AtomicU64::new(0),
            exposed: AtomicU64::new(0),
            tally: Arc::default(),
        });
        let scheduler = Scheduler(shared);
        for lane in 0..scheduler.0.lanes.len() {
            let serving = Arc::clone(&scheduler.0);
            std::thread::Builder::new()
                .name("offbeat-train".to_owned())
                .spawn(move || serving.serve(lane))
                .map_err(|e| Error::io("cannot start a thread", e))?;
        }
        Ok(scheduler)
    }

    /// The group for everything but buckets.
    pub fn group(&self) -> &Group {
        &self.0.lanes[0]
    }

    /// The buckets, and the memory of each.
    pub fn buckets(&self) -> Vec<(Bucket, Storage)> {
        let built = self.0.built();
        built.plan.buckets.iter().cloned().zip(built.memory.iter().cloned()).collect()
    }

    /// Says that a tensor has a value, which is not in its slot yet. Gives whether all those are due to be moved there, and
    /// then marked. Called by autograd's threads.
    pub fn arrive(&self, tensor: usize) -> Result<bool> {
        self.0.check(tensor)?;
        Ok(self.0.built().readiness.arrive(tensor))
    }

    /// Says that a tensor's value is in its slot. Called by autograd's threads.
    pub fn mark_ready(&self, tensor: usize) -> Result<()> {
        self.mark_ready_on(tensor, 0)
    }

    /// The same, where the bucket is on a device: the value is there when this stream has come so far.
    pub fn mark_ready_on(&self, tensor: usize, stream: Stream) -> Result<()> {
        self.0.check(tensor)?;
        let built = self.0.built();
        if !built.readiness.is_marked(tensor) {
            let (used, dtype) = built.used(tensor);
            // SAFETY: the number is not under way before all tensors of its bucket are marked; this one is written by
            // whoever marks this tensor.
            unsafe { std::ptr::copy_nonoverlapping(dtype.one().as_ptr(), used, dtype.size()) };
        }
        self.0.note(&built, tensor, stream);
        self.0.marked(&built, built.readiness.mark(tensor), tensor)
    }

    /// Says that a tensor has no value in this round: it counts as zero, and as unused.
    pub fn mark_absent(&self, tensor: usize) -> Result<()> {
        self.mark_absent_on(tensor, 0)
    }

    /// The same, where the bucket is on a device: the caller has filled the slot with zeros on this stream.
    pub fn mark_absent_on(&self, tensor: usize, stream: Stream) -> Result<()> {
        let built = self.0.built();
        if tensor >= self.0.tensors.len() || built.readiness.is_marked(tensor) {
            return Err(Error::invalid(format!("tensor {tensor} cannot be absent")));
        }
        let (used, dtype) = built.used(tensor);
        let (bucket, range) = built.place_of(tensor, self.0.tensors[tensor].count);
        let start = built.buffer(bucket).at(range.start);
        // SAFETY: both ranges lie in the bucket, which is not under way before all its tensors are marked; or the second one
        // beside it, in the host's memory.
        unsafe {
            if built.streams.is_none() {
                std::ptr::write_bytes(start, 0, self.0.tensors[tensor].count * self.0.tensors[tensor].dtype.size());
            }
            std::ptr::write_bytes(used, 0, dtype.size());
        }
        self.0.note(&built, tensor, stream);
        // on a device the host waits for that; without a gradient it waits for the answer of the others too
        let kept = built.saved(tensor)?;
        self.0.state().absent.push((tensor, kept));
        self.0.marked(&built, built.readiness.mark(tensor), tensor)
    }

    /// The tensors that were neither marked nor absent in this round.
    pub fn missing(&self) -> Vec<usize> {
        self.0.built().readiness.missing()
    }

    /// Whether a round is under way: something was marked and it has not been finished.
    pub fn has_begun(&self) -> bool {
        self.0.built().readiness.has_begun()
    }

    /// The order in which tensors became ready in the round under way, and those that became so again.
    pub fn observed(&self) -> (Vec<usize>, Vec<bool>) {
        self.0.built().readiness.observed()
    }

    /// Whether buckets wait for the end of backward, as in the first round.
    pub fn hold(&self, held: bool) {
        self.0.state().held = held;
    }

    /// How many samples this rank has seen since the last round: by these it counts, where an algorithm weighs.
    pub fn weigh(&self, samples: f64) {
        self.0.state().samples = samples;
    }

    /// What codecs have done so far.
    pub fn coded(&self) -> Count {
        self.0.tally.count()
    }

    /// Goes on counting steps from here, as a run that was interrupted would have.
    pub fn resume(&self, step: u64) {
        self.0.state().step = step;
    }

    /// Whether any rank met a value that is not finite where it had to be encoded, in the last round.
    ///
    /// Asked before each step of the optimizer. On a device it is an earlier round, on which a step was built: nobody waits to
    /// know more.
    pub fn was_non_finite(&self) -> bool {
        match self.0.carrier {
            Some(_) => self.0.step_begins(),
            None => self.0.built().non_finite(),
        }
    }

    /// Takes the weights that lie in the buckets, which all ranks have alike, as where anchors and copies begin. Where buckets
    /// are on a device, a stream has written them, and waits before it writes others there.
    pub fn begin(&self, stream: Stream) -> Result<()> {
        self.0.built().begin(self.0.carrier.as_deref(), stream)
    }

    /// What steps keep of a tensor, between rounds.
    pub fn saved(&self, tensor: usize) -> Result<Vec<Saved>> {
        self.0.built().saved(tensor)
    }

    /// Takes over what [`Scheduler::saved`] gave in an earlier run.
    pub fn restore(&self, tensor: usize, name: &str, values: &[f32]) -> Result<()> {
        self.0.built().restore(tensor, name, values, &self.0.tensors)
    }

    /// What has been done so far.
    pub fn totals(&self) -> Totals {
        let time = |counter: &AtomicU64| Duration::from_nanos(counter.load(Ordering::Relaxed));
        let rounds = self.0.state().step;
        Totals { rounds, communication: time(&self.0.communication), exposed: time(&self.0.exposed) }
    }
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        if fork::in_child() {
            return;
        }
        self.0.state().stop = true;
        self.0.bell.notify_all();
        // nobody waits for the others to do the same: their schedulers may live on, or go when their interpreter feels so
        for group in &self.0.lanes {
            if let Err(error) = group.enqueue(Work { call: Call::Close, keep: None }, None) {
                log::debug!("closing a group of a model: {error}");
            }
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check(&self, tensor: usize) -> Result<()> {
        let is_known = tensor < self.tensors.len();
        is_known.then_some(()).ok_or_else(|| Error::invalid(format!("there is no tensor {tensor}")))
    }

    fn built(&self) -> Arc<Built> {
        Arc::clone(&self.built.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn replace(&self, built: Built) {
        *self.built.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(built);
    }

    fn mesh(&self) -> &Mesh {
        self.lanes[0].mesh()
    }

    fn call(&self, call: Call, limit: Option<Duration>, interrupt: Option<&Interrupt<'_>>) -> Result<Output> {
        self.lanes[0].run_on(Work { call, keep: None }, &Terms { interrupt, limit, purpose: None })
    }

    /// Notes which stream writes a tensor, where that matters.
    fn note(&self, built: &Built, tensor: usize, stream: Stream) {
        if let Some(streams) = &built.streams {
            streams.note(built.plan.homes[tensor].0, stream);
        }
    }

    fn marked(&self, built: &Built, marked: Marked, tensor: usize) -> Result<()> {
        match marked {
            Marked::Waiting | Marked::Again { complete: false } => Ok(()),
            Marked::Complete(bucket) => {
                built.ready[bucket].store(trace::now(), Ordering::Relaxed);
                if let (Some(streams), Some(carrier)) = (&built.streams, self.carrier.as_deref()) {
                    streams.mark(bucket, carrier)?;
                }
                // under the lock, so that the thread is either waiting or will look again
                let _state = self.state();
                self.bell.notify_all();
                Ok(())
            }
            Marked::Again { complete: true } if self.state().held => Ok(()),
            Marked::Again { complete: true } => Err(Error::invalid(format!(
                "parameter {} got another gradient in the same backward after its bucket had been sent; try: \
                 checkpoint(use_reentrant=False), or wrap the model when its first backward is like all others",
                self.tensors[tensor].name
            ))),
        }
    }
}
