//! Exchanges in the background: a thread of its own works on snapshots of a model, and training goes on meanwhile.
//!
//! ```text
//! training    … step │ copy │ step … step │ add │ step …        copies and adds at safe points only
//! background         └──▶ exchange with other ranks ─┘           letters (`post`), never calls of a group
//! ```
//! What comes of a round is a delta: result minus snapshot. It is *added* to the parameters, so steps made meanwhile are never
//! lost. Members are data: who is lost is dropped from the list, the round with it where it cannot be ended, and the next
//! goes over those that are left. Nothing here ever makes a training thread wait, unless it asks to.

mod average;
mod coder;
mod council;
mod desk;
mod exchange;
mod ferry;
mod gossip;
mod keeping;
mod method;
mod modular;
mod post;
mod server;
mod shard;
mod stepwise;
mod value;
mod worker;

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use offbeat_transport::frame::{FrameKind, Header};
use offbeat_transport::inbox::{Channel, Delivery};
use offbeat_transport::mesh::Mesh;
use offbeat_transport::{Interrupt, fork};

pub use council::{Agreed, Council};
pub use desk::{Closing, Desk, Progress, Stuck, Task};
pub use ferry::Ferry;
pub use keeping::{Labelled, Rounds, Saved};
pub use method::Method;

use exchange::{Exchange, Outcome};
use post::Post;

use crate::buffer::Storage;
use crate::codec::Codec;
use crate::coding::{Count, Tally};
use crate::{Error, Kind, Result};

/// How long a result that is under way is waited for where it is not needed.
const DRAIN: Duration = Duration::from_secs(5);

/// What a background exchange is made of.
#[derive(Clone, Copy, Debug)]
pub struct Description {
    /// What is exchanged.
    pub method: Method,
    /// From the beginning of a round to that of the next, at least; none to rest in proportion to what a round takes.
    pub period: Option<Duration>,
}

/// Makes the ferry of a model that is on a device, for so many numbers.
pub type Launch<'a> = &'a dyn Fn(usize) -> Result<Arc<dyn Ferry>>;

/// The background exchanges of a model. Dropping it ends them.
pub struct Background {
    mesh: Arc<Mesh>,
    channel: u64,
    desk: Arc<Desk>,
    places: Vec<usize>,
    /// The elements of each tensor.
    spans: Vec<Range<usize>>,
    tally: Arc<Tally>,
    timeout: Duration,
    worker: Arc<Mutex<Slot>>,
}

/// Where the worker is while it is not at work.
enum Slot {
    /// Its thread has not started.
    Ready(Box<worker::Worker>),
    /// Its thread has it, or had it and panicked.
    Away,
    /// Its thread has ended, and what it kept is here.
    Ended(Box<worker::Worker>),
}

impl Background {
    /// Prepares exchanges between the members of a group, under its number, for tensors of so many elements each. Nothing
    /// happens before [`Background::start`].
    pub(crate) fn new(
        mesh: &Arc<Mesh>,
        (channel, members): (u64, &[u32]),
        counts: &[usize],
        description: Description,
        launch: Option<Launch<'_>>,
        (chunk, timeout): (usize, Duration),
    ) -> Result<Self> {
        let grain = description.method.codec().map_or(1, Codec::block).next_multiple_of(16);
        let (places, spans, count) = lay_out(counts, grain);
        let tally = Arc::<Tally>::default();
        let exchange = description.method.build((mesh.me(), members), (&spans, count, grain), &tally)?;
        let ferry: Arc<dyn Ferry> = match launch {
            Some(launch) => launch(count)?,
            None => Arc::new(ferry::Here::new(mesh.arena(), count)?),
        };
        let desk = Arc::new(Desk::new(ferry, count, members.len()));
        // a letter is at most a whole model, or its codes and what goes with them
        let post = Post::new(Arc::clone(mesh), channel, members, chunk, count * 5 + 4096);
        let worker = worker::Worker::new(Arc::clone(&desk), post, exchange, channel, description.period);
        let worker = Arc::new(Mutex::new(Slot::Ready(Box::new(worker))));
        let spans = places.iter().zip(counts).map(|(place, count)| *place..place + count).collect();
        Ok(Background { mesh: Arc::clone(mesh), channel, desk, places, spans, tally, timeout, worker })
    }

    fn slot(&self) -> MutexGuard<'_, Slot> {
        self.worker.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The worker, if its thread has not started.
    fn take_ready(&self) -> Option<Box<worker::Worker>> {
        let mut slot = self.slot();
        match std::mem::replace(&mut *slot, Slot::Away) {
            Slot::Ready(worker) => Some(worker),
            other => {
                *slot = other;
                None
            }
        }
    }

    /// Starts the thread. What is in the snapshot counts as what all began with. A second call does nothing.
    pub fn start(&self) -> Result<()> {
        let Some(mut worker) = self.take_ready() else { return Ok(()) };
        self.desk.begins();
        let (desk, slot) = (Arc::clone(&self.desk), Arc::clone(&self.worker));
        let run = move || {
            if worker.run() {
                *slot.lock().unwrap_or_else(PoisonError::into_inner) = Slot::Ended(worker);
            }
            desk.ended();
        };
        let spawned = std::thread::Builder::new().name("offbeat-background".to_owned()).spawn(run);
        spawned.map(drop).map_err(|error| {
            self.desk.ended();
            Error::io("cannot start a thread", error)
        })
    }

    /// What this rank keeps of its exchanges, at a safe point. Nobody else is waited for.
    pub fn save(&self) -> Result<Saved> {
        // a thread that ends meanwhile leaves its worker
        for _ in 0..2 {
            if let Slot::Ready(worker) | Slot::Ended(worker) = &*self.slot() {
                self.wait_for_ferry()?;
                return Ok(Saved::new(worker.save(), &self.spans));
            }
            self.desk.ask();
            self.poke();
            if let Some(holdings) = self.desk.answer(self.timeout) {
                return Ok(Saved::new(holdings, &self.spans));
            }
        }
        Err(self.late("the background thread of", "does not say what it keeps"))
    }

    fn wait_for_ferry(&self) -> Result<()> {
        let began = Instant::now();
        while !self.desk.ferry.is_idle()? {
            if began.elapsed() >= self.timeout {
                return Err(self.late("the device of", "has not come to where its weights are copied to the host"));
            }
            std::thread::sleep(worker::GLANCE);
        }
        Ok(())
    }

    fn late(&self, who: &str, what: &str) -> Error {
        let name = self.mesh.roster().card(self.mesh.me()).name();
        Error::new(Kind::Timeout, format!("{who} {name} {what}; try: see what it logged before"))
    }

    /// Gives back what was saved of a tensor, before the thread starts. False if there is no use for it here.
    pub fn restore(&self, tensor: usize, label: &str, values: &[f32]) -> Result<bool> {
        let Slot::Ready(worker) = &mut *self.slot() else { return Err(too_late()) };
        let span = self.spans.get(tensor).ok_or_else(|| Error::invalid(format!("there is no tensor {tensor}")))?;
        match worker.room(label) {
            Some(room) => keeping::put(room, span, values).map(|()| true),
            None => Ok(false),
        }
    }

    /// All members have loaded a checkpoint, before the thread starts. They were at these rounds; at 0 if what was saved does
    /// not fit.
    pub fn go_on(&self, rounds: Rounds) -> Result<()> {
        let Slot::Ready(worker) = &mut *self.slot() else { return Err(too_late()) };
        worker.go_on(rounds);
        Ok(())
    }

    /// Where each tensor lies in the snapshot and in the delta: its first element.
    pub fn places(&self) -> &[usize] {
        &self.places
    }

    /// The memory of snapshot and delta, which the training thread copies weights to and adds from, and how many f32 each
    /// holds.
    pub fn memory(&self) -> ([Storage; 2], usize) {
        (self.desk.ferry.memory(), self.desk.count)
    }

    /// What takes snapshots to the host and deltas back, for the training thread.
    pub fn ferry(&self) -> &dyn Ferry {
        &*self.desk.ferry
    }

    /// What there is to do at a safe point; an error if the device has failed.
    pub fn look(&self) -> Result<Option<Task>> {
        self.desk.look()
    }

    /// The snapshot was taken, after so many steps.
    pub fn taken(&self, clock: u64) {
        self.desk.taken(clock);
        self.poke();
    }

    /// This rank has made so many steps, see [`Desk::passed`].
    pub fn passed(&self, clock: u64) {
        self.desk.passed(clock);
    }

    /// The delta was added.
    pub fn applied(&self) {
        self.desk.applied();
        self.poke();
    }

    /// Waits until there is something to do, see [`Desk::wait`]; the time is up after the timeout of calls.
    pub fn wait(&self, only_results: bool, interrupt: Option<&Interrupt<'_>>) -> Result<Option<Task>> {
        self.poke();
        let limit = if only_results { self.timeout.min(DRAIN) } else { self.timeout };
        self.desk.wait(only_results, limit, interrupt).map_err(|stuck| match stuck {
            Stuck::Interrupted(error) | Stuck::Failed(error) => error,
            Stuck::Late(ranks) => {
                let roster = self.mesh.roster();
                let names: Vec<String> = ranks.iter().take(8).map(|rank| roster.card(*rank).name()).collect();
                Error::new(
                    Kind::Timeout,
                    format!(
                        "{} waited {:.1} s for {} in an exchange of weights; try: raise timeout (OFFBEAT_TIMEOUT), or where \
                         there is a staleness bound a larger one or None",
                        roster.card(self.mesh.me()).name(),
                        self.timeout.as_secs_f64(),
                        if names.is_empty() { "its background thread".to_owned() } else { names.join(", ") }
                    ),
                )
            }
        })
    }

    /// Before a pause, see [`Desk::hold`].
    pub fn hold(&self) -> bool {
        self.desk.hold()
    }

    /// Asks nothing of the training thread from now on, see [`Desk::pause`].
    pub fn pause(&self, clock: u64) {
        self.desk.pause(clock);
        self.poke();
    }

    /// Goes on after a pause.
    pub fn resume(&self) {
        self.desk.resume();
        self.poke();
    }

    /// What rounds that begin from here on are for, see [`Desk::close`].
    pub fn close(&self, closing: Closing) {
        self.desk.close(closing);
    }

    /// What was done so far.
    pub fn progress(&self) -> Progress {
        self.desk.progress()
    }

    /// What encoding has done.
    pub fn coded(&self) -> Count {
        self.tally.count()
    }

    /// Ends the thread: it says goodbye to the others. Waits for a moment only.
    pub fn stop(&self) {
        // the thread and the locks are the parent's
        if fork::in_child() {
            return;
        }
        self.desk.stop();
        match self.take_ready() {
            Some(worker) => {
                worker.leave();
                *self.slot() = Slot::Ended(worker);
            }
            None => self.poke(),
        }
    }

    /// What an engine needs to end it.
    pub(crate) fn ending(&self) -> Ending {
        Ending { mesh: Arc::downgrade(&self.mesh), channel: self.channel, desk: Arc::downgrade(&self.desk) }
    }

    fn poke(&self) {
        poke(&self.mesh, self.channel);
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        self.stop();
    }
}

/// How an engine ends the thread of a model before it leaves.
pub(crate) struct Ending {
    mesh: std::sync::Weak<Mesh>,
    channel: u64,
    desk: std::sync::Weak<Desk>,
}

impl Ending {
    /// Ends it, and waits until it has, for at most `limit`.
    pub(crate) fn end(&self, limit: Duration) {
        if let (Some(mesh), Some(desk)) = (self.mesh.upgrade(), self.desk.upgrade()) {
            desk.stop();
            poke(&mesh, self.channel);
            desk.wait_for_end(limit);
        }
    }
}

fn too_late() -> Error {
    Error::invalid(
        "a checkpoint is loaded into exchanges that have begun; try: load it before the first step".to_owned(),
    )
}

/// Wakes the background thread.
fn poke(mesh: &Mesh, channel: u64) {
    let (header, payload) = (Header::bare(FrameKind::Letter), mesh.pool().take(0));
    mesh.board().deliver(Channel::Letters(channel), Delivery { from: mesh.me(), header, payload });
}

/// Where tensors begin, where their values are, and how many elements that takes.
fn lay_out(counts: &[usize], grain: usize) -> (Vec<usize>, Vec<Range<usize>>, usize) {
    let (mut places, mut spans, mut end) = (Vec::new(), Vec::new(), 0);
    for count in counts {
        places.push(end);
        if *count > 0 {
            spans.push(end..end + count);
        }
        end = (end + count).next_multiple_of(grain);
    }
    (places, spans, end)
}
