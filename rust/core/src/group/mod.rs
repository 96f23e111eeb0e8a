//! A group of ranks, and its calls in order.
//!
//! Every rank numbers the calls of a group alike. A blocking call with nothing queued runs on the caller's own thread; a
//! call that must not block, or comes while others are under way, goes to the group's thread, which starts when it is
//! first needed. So calls of one group never overtake each other, and calls of different groups never wait for each other.

mod line;

use std::any::Any;
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use offbeat_transport::mesh::Mesh;
use offbeat_transport::shm::arena::Piece;
use offbeat_transport::shm::team::{INLINE, Team};
use offbeat_transport::watchdog::Watch;
use offbeat_transport::{Interrupt, fork};

use self::line::{End, Job, Line};
use crate::call::Call;
use crate::collective::Context;
use crate::config::Tuning;
use crate::event::{Event, Output, Queue, Ticket, guarded};
use crate::perform::perform;
use crate::topology::Layout;
use crate::{Error, Kind, Result};

/// On which terms a call runs, besides its group's own.
#[derive(Clone, Copy, Default)]
pub struct Terms<'a> {
    /// Lets the caller's signal handlers run; an error from it ends the call.
    pub interrupt: Option<&'a Interrupt<'a>>,
    /// How long it may take, if not the group's usual time.
    pub limit: Option<Duration>,
    /// What it is part of, for messages.
    pub purpose: Option<&'a dyn Fn() -> String>,
}

/// A call, and what must live until it is done.
pub struct Work {
    /// The call.
    pub call: Call,
    /// Owners of the memory that the call uses.
    pub keep: Option<Box<dyn Any + Send>>,
}

// SAFETY: the buffers in a call are addresses whose owners travel along in `keep`, or wait for the call.
unsafe impl Send for Work {}

/// Who is in a group, and how this rank meets those of its own host.
pub(crate) struct Members {
    /// In ascending order.
    pub(crate) ranks: Vec<u32>,
    pub(crate) layout: Layout,
    /// None if this rank has no neighbours in the group.
    pub(crate) team: Option<Team>,
    /// Where neighbours find this rank; given back with the group. None in the group of all ranks, whose blocks are the mesh's.
    pub(crate) control: Option<Piece>,
}

/// A group of ranks. Cheap to clone.
#[derive(Clone)]
pub struct Group(Arc<Inner>);

struct Inner {
    mesh: Arc<Mesh>,
    id: u64,
    ranks: Vec<u32>,
    /// My place in `ranks`, if I am a member.
    me: Option<usize>,
    layout: Layout,
    /// How long a call may take, in nanoseconds.
    limit: AtomicU64,
    tuning: Tuning,
    line: Mutex<Line>,
    /// Rung when the line changes: a job came, a call ended, or the group closes.
    bell: Condvar,
    /// Held by whoever runs a call. Taken only by the one that `Line::busy` admits, so never contended.
    lane: Mutex<Lane>,
}

struct Lane {
    sequence: u64,
    team: Option<Team>,
    /// Where neighbours find my control block; given back when all have parted, or with the group.
    control: Option<Piece>,
}

impl Group {
    pub(crate) fn new(mesh: Arc<Mesh>, id: u64, members: Members, timeout: Duration, tuning: Tuning) -> Self {
        let Members { ranks, layout, team, control } = members;
        let me = ranks.iter().position(|rank| *rank == mesh.me());
        let tuning = Tuning { inline: tuning.inline.min(INLINE), ..tuning };
        let lane = Lane { sequence: 0, team, control };
        Group(Arc::new(Inner {
            mesh,
            id,
            ranks,
            me,
            layout,
            limit: AtomicU64::new(timeout.as_nanos() as u64),
            tuning,
            line: Mutex::default(),
            bell: Condvar::new(),
            lane: Mutex::new(lane),
        }))
    }

    /// The members, in ascending order.
    pub fn ranks(&self) -> &[u32] {
        &self.0.ranks
    }

    /// How many hosts the members are on.
    pub fn hosts(&self) -> usize {
        self.0.layout.hosts.len()
    }

    /// Who is on which host.
    pub fn layout(&self) -> &Layout {
        &self.0.layout
    }

    /// Whether nothing is known that would end the group.
    pub fn verdict(&self) -> Result<()> {
        self.0.mesh.roster().verdict(self.0.id, &self.0.ranks, Vec::new)
    }

    /// The members of each host, as places in [`Group::ranks`], and my own host and seat.
    pub(crate) fn seats(&self) -> (&[Vec<usize>], (usize, usize)) {
        (&self.0.layout.hosts, self.0.layout.seat(self.0.me.unwrap_or_default()))
    }

    /// Runs a call and waits for it: on this thread if nothing is queued.
    pub fn run(&self, work: Work, interrupt: Option<&Interrupt<'_>>) -> Result<Output> {
        self.run_on(work, &Terms { interrupt, ..Terms::default() })
    }

    /// As [`Group::run`], on special terms. They hold for a call that runs on this thread.
    pub fn run_on(&self, work: Work, terms: &Terms<'_>) -> Result<Output> {
        self.check(&work.call)?;
        {
            let mut line = self.0.line();
            if line.busy || !line.jobs.is_empty() {
                drop(line);
                let ticket = self.enqueue(work, None)?;
                if let Err(error) = ticket.wait(None, terms.interrupt) {
                    if !ticket.done() {
                        // the call must not use the caller's memory after the caller has gone on: end it first
                        self.0.fail(error.clone(), &|| "a call behind others".to_owned());
                        let _ = ticket.wait(None, None);
                    }
                    return Err(error);
                }
                return Ok(ticket.take());
            }
            line.admit(&work.call)?;
            line.busy = true;
        }
        let result = self.0.execute(&work.call, terms);
        self.0.leave();
        result
    }

    fn check(&self, call: &Call) -> Result<()> {
        if fork::in_child() {
            return Err(Error::new(
                Kind::NotInitialized,
                "this process was forked from a rank and is none itself; try: communicate in the parent only",
            ));
        }
        if self.0.me.is_none() {
            return Err(Error::invalid(format!(
                "rank {} is not in the group {:?}; try: call this on its members only",
                self.0.mesh.me(),
                self.0.ranks
            )));
        }
        if self.0.id == 0 && matches!(call, Call::Close) {
            return Err(Error::invalid("the group of all ranks lasts as long as the runtime; try: shut that down"));
        }
        call.check_hosts(self.hosts())?;
        call.check(&self.0.ranks, self.0.mesh.me())
    }

    /// The rank in whose process this is.
    pub(crate) fn me(&self) -> u32 {
        self.0.mesh.me()
    }

    /// From now on calls may take this long.
    pub(crate) fn set_limit(&self, limit: Duration) {
        self.0.limit.store(limit.as_nanos() as u64, Ordering::Relaxed);
    }

    pub(crate) fn mesh(&self) -> &Arc<Mesh> {
        &self.0.mesh
    }

    /// Ends the group from outside of a call, for all its members.
    pub fn abandon(&self, error: &Error) -> Error {
        self.0.fail(error.clone(), &|| "an exchange of gradients".to_owned())
    }

    /// Its number, the same on all ranks.
    pub(crate) fn id(&self) -> u64 {
        self.0.id
    }

    /// Whether its last call was made.
    pub(crate) fn is_closed(&self) -> bool {
        self.0.line().end == Some(End::Closed)
    }

    /// The runtime shuts down: what is queued fails, what runs goes on.
    pub(crate) fn cancel(&self) {
        let mut line = self.0.line();
        line.end = Some(End::Shutdown);
        for job in line.jobs.drain(..) {
            job.ticket.complete(Err(End::Shutdown.story()));
        }
        self.0.bell.notify_all();
    }

    /// Tells all members what this rank knows to have ended the group, if anything.
    pub(crate) fn pass_on(&self) {
        if let Err(story) = self.verdict() {
            self.0.mesh.poison(self.0.id, &self.0.ranks, &story);
        }
    }

    /// Waits for the call that runs, if any.
    pub(crate) fn finish(&self, limit: Duration) {
        let line = self.0.line();
        let result = self.0.bell.wait_timeout_while(line, limit, |line| line.busy);
        drop(result);
    }
}

impl Queue for Group {
    type Work = Work;
    type Event = Ticket;

    /// Queues a call for the group's thread.
    fn enqueue(&self, work: Work, after: Option<Arc<dyn Event>>) -> Result<Ticket> {
        self.check(&work.call)?;
        let ticket = Ticket::default();
        let mut line = self.0.line();
        line.admit(&work.call)?;
        line.jobs.push_back(Job { work, after, ticket: ticket.clone() });
        if !line.has_thread {
            let inner = Arc::clone(&self.0);
            let name = format!("offbeat-group-{}", self.0.id);
            std::thread::Builder::new()
                .name(name)
                .spawn(move || inner.serve())
                .map_err(|e| Error::io("cannot start a thread", e))?;
            line.has_thread = true;
        }
        self.0.bell.notify_all();
        Ok(ticket)
    }
}

impl Inner {
    fn limit(&self) -> Duration {
        Duration::from_nanos(self.limit.load(Ordering::Relaxed))
    }

    fn line(&self) -> MutexGuard<'_, Line> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn leave(&self) {
        let mut line = self.line();
        line.busy = false;
        // nobody listens in the usual case: no thread, no end near
        if line.has_thread || line.end.is_some() {
            self.bell.notify_all();
        }
    }

    /// The group's thread: one queued call after another, until no more can come.
    fn serve(&self) {
        loop {
            let mut line = self.line();
            while line.busy || (line.jobs.is_empty() && line.end.is_none()) {
                line = self.bell.wait(line).unwrap_or_else(PoisonError::into_inner);
            }
            let Some(job) = line.jobs.pop_front() else { return };
            line.busy = true;
            drop(line);
            // a call that cannot begin here must not leave the other ranks waiting for it
            let ready = job.after.map_or(Ok(()), |event| event.wait(Some(self.limit()), None));
            let ready = ready.map_err(|error| self.mesh.poison(self.id, &self.ranks, &error));
            let result = ready.and_then(|()| self.execute(&job.work.call, &Terms::default()));
            self.leave();
            drop(job.work);
            job.ticket.complete(result);
        }
    }

    /// Runs a call on this thread. A panic in it is a bug of ours; it must reach whoever waits, on every rank.
    fn execute(&self, call: &Call, terms: &Terms<'_>) -> Result<Output> {
        let result = guarded(|| Ok(self.attempt(call, terms)));
        result.unwrap_or_else(|bug| Err(self.mesh.poison(self.id, &self.ranks, &bug)))
    }

    /// A failure poisons the group: every member raises the same story.
    fn attempt(&self, call: &Call, terms: &Terms<'_>) -> Result<Output> {
        let mut lane = self.lane.lock().unwrap_or_else(PoisonError::into_inner);
        let Lane { sequence, team, control } = &mut *lane;
        // a member that has left may have done its part of this call before; whoever waits for it will see. The others
        // are told: this rank may leave before they have learned the story by themselves
        let verdict = self.mesh.roster().verdict(self.id, &self.ranks, Vec::new);
        verdict.map_err(|error| self.mesh.poison(self.id, &self.ranks, &error))?;
        let description = call.describe();
        let number = *sequence;
        *sequence += 1;
        let what = || match terms.purpose {
            Some(purpose) => format!("{} ({description})", purpose()),
            None => format!("call {number} of group {:?}, {description}", self.ranks),
        };
        // a model that was let go closes its groups, and nobody waits for that: that others still have theirs is no news
        let unattended = matches!(call, Call::Close) && terms.interrupt.is_none();
        let watch = Watch {
            roster: self.mesh.roster(),
            group: self.id,
            members: &self.ranks,
            began: Instant::now(),
            limit: terms.limit.unwrap_or_else(|| self.limit()),
            warned: &Cell::new(unattended),
            interrupt: terms.interrupt,
            what: &what,
        };
        let me = self.me.unwrap_or_default();
        let mut context = Context::new(
            &self.mesh,
            (self.id, number),
            &self.ranks,
            me,
            &self.layout,
            self.tuning,
            &watch,
            description,
            team.as_mut(),
        );
        let result = perform(&mut context, call);
        drop(context);
        if result.is_ok() && matches!(call, Call::Close) {
            (*team, *control) = (None, None);
        }
        // members may still be in calls of before, which need no one that has left: closing without it is not their trouble
        let parting = matches!(call, Call::Close);
        result.map_err(|error| if parting && error.kind == Kind::PeerLost { error } else { self.fail(error, &what) })
    }

    fn fail(&self, error: Error, what: &dyn Fn() -> String) -> Error {
        if error.kind != Kind::Interrupted {
            return self.mesh.poison(self.id, &self.ranks, &error);
        }
        let card = self.mesh.roster().card(self.mesh.me());
        let cause = error.message.clone();
        let message =
            format!("{} was interrupted by {cause} in {}; try: nothing, it was asked to stop", card.name(), what());
        let story = Error::of_rank(Kind::PeerFailed, card.rank, &card.host, message);
        self.mesh.poison(self.id, &self.ranks, &Error { cause, ..story });
        error
    }
}
