//! A queue of collectives on a device: core's [`Queue`] on a stream of our own.
//!
//! Work begins when an event has happened, which is a mark in torch's stream, and ends with a mark that torch's stream can
//! wait for. Nothing waits on the host; a thread watches over what is under way ([`Watch`]).

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use offbeat_core::buffer::Buffer;
use offbeat_core::dtype::Op;
use offbeat_core::event::{Event, Queue};
use offbeat_core::{Interrupt, Result};

use crate::collective::Group;
use crate::compressed::{Compressed, Residuals};
use crate::gossip::Gossip;
use crate::stream::{Address, Mark};
use crate::watch::Watch;

/// One exchange. All members of the group enqueue the same ones in the same order.
pub struct Work<'a> {
    /// What is done.
    pub kind: Kind<'a>,
    /// To what. The memory stays until the work is done: in torch's words, `record_stream`.
    pub buffer: Buffer,
    /// What it is called in errors: which bucket in which step.
    pub what: String,
}

/// What is done to a tensor, in place.
pub enum Kind<'a> {
    /// The reduction over all members.
    AllReduce(Op),
    /// The reduction over all members, encoded between hosts.
    Compressed {
        /// How, as it was built for this bucket.
        plan: Arc<Compressed>,
        /// Where random numbers come from: a hash of seed and step.
        stream: u64,
        /// What is kept of losses.
        kept: Residuals,
        /// Where blocks that are not finite are counted, or 0.
        odd: Address,
    },
    /// The mean with the peers of a step.
    Gossip {
        /// How, as it was built for this bucket.
        plan: Arc<Gossip>,
        /// The step.
        step: u64,
    },
    /// A member's tensor to all.
    Broadcast {
        /// Whose: a place in the group.
        root: usize,
    },
    /// What a step enqueues on the group's stream for its bucket.
    Step(Box<Enqueue<'a>>),
}

/// Enqueues something for a bucket, whose memory stays until that is done.
pub type Enqueue<'a> = dyn Fn(&Group, Buffer) -> Result<()> + 'a;

/// The end of some work.
#[derive(Clone)]
pub struct Done(Arc<Mark>);

impl Done {
    /// The mark behind it, for a stream to wait for.
    pub fn mark(&self) -> &Mark {
        &self.0
    }
}

impl Event for Done {
    fn done(&self) -> bool {
        self.0.done()
    }

    fn wait(&self, limit: Option<Duration>, interrupt: Option<&Interrupt<'_>>) -> Result<()> {
        self.0.wait(limit, interrupt)
    }

    fn as_any(&self) -> Option<&dyn Any> {
        self.0.as_any()
    }
}

/// The collectives of a group, in order.
pub struct Lane {
    group: Group,
    watch: Arc<Watch>,
    /// How long work may take, in nanoseconds.
    limit: AtomicU64,
}

impl Lane {
    /// A queue for a group.
    pub fn new(group: Group, watch: &Arc<Watch>) -> Self {
        let limit = AtomicU64::new(group.limit.as_nanos() as u64);
        Lane { group, watch: Arc::clone(watch), limit }
    }

    /// From now on work may take this long, and not what the group says.
    pub fn set_limit(&self, limit: Duration) {
        self.limit.store(limit.as_nanos() as u64, Ordering::Relaxed);
    }

    /// The group, for building what work needs.
    pub fn group(&self) -> &Group {
        &self.group
    }

    /// Waits on the host until all work is done; what takes longer is given up. For the end of things.
    pub fn drain(&self, limit: Duration) -> Result<()> {
        let Group { communicator, stream, .. } = &self.group;
        if let Err(error) = stream.mark()?.wait(Some(limit), None) {
            communicator.abort(error);
        }
        stream.drain()
    }

    fn run(&self, work: &Work<'_>) -> Result<()> {
        let Work { kind, buffer, .. } = work;
        // SAFETY: whoever enqueues work promises that its memory stays until the work is done.
        unsafe {
            match kind {
                Kind::AllReduce(op) => self.group.all_reduce(*buffer, *op),
                Kind::Broadcast { root } => self.group.broadcast(*buffer, *root),
                Kind::Compressed { plan, stream, kept, odd } => plan.run(&self.group, *buffer, *stream, *kept, *odd),
                Kind::Gossip { plan, step } => plan.run(&self.group, *buffer, *step),
                Kind::Step(enqueue) => enqueue(&self.group, *buffer),
            }
        }
    }
}

impl Lane {
    /// Enqueues some work in order; it begins when all of `after` has happened. The event is its end.
    pub fn enqueue_all(&self, works: &[Work<'_>], after: &[Arc<dyn Event>]) -> Result<Done> {
        let Group { communicator, stream, .. } = &self.group;
        let limit = Duration::from_nanos(self.limit.load(Ordering::Relaxed));
        if let Some(error) = communicator.story().told() {
            return Err(error);
        }
        works.iter().try_for_each(|work| self.group.check(work.buffer))?;
        for after in after {
            match after.as_any().and_then(<dyn Any>::downcast_ref::<Mark>) {
                Some(mark) => stream.wait(mark)?,
                // work of a CPU: somebody has to wait for it
                None => after.wait(Some(limit), None)?,
            }
        }
        for work in works {
            self.run(work).map_err(|mut error| {
                error.message = format!("{}: {}", work.what, error.message);
                // half of it may be under way, and others wait for the rest
                communicator.abort(error.clone());
                error
            })?;
        }
        let mark = Arc::new(stream.mark()?.told_by(communicator.story()));
        if let Some(last) = works.last() {
            self.watch.over(&mark, communicator, &last.what, limit);
        }
        Ok(Done(mark))
    }
}

impl Queue for Lane {
    type Work = Work<'static>;
    type Event = Done;

    fn enqueue(&self, work: Work<'static>, after: Option<Arc<dyn Event>>) -> Result<Done> {
        self.enqueue_all(&[work], after.as_slice())
    }
}
