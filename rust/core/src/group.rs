//! A group of ranks, and its calls in order.
//!
//! Every rank numbers the calls of a group alike. A blocking call with nothing queued runs on the caller's own thread; a
//! call that must not block, or comes while others are under way, goes to the group's thread, which starts when it is
//! first needed. So calls of one group never overtake each other, and calls of different groups never wait for each other.

use std::any::Any;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use offbeat_transport::mesh::Mesh;
use offbeat_transport::roster::Watch;
use offbeat_transport::shm::arena::Piece;
use offbeat_transport::shm::team::{INLINE, Team};
use offbeat_transport::{Interrupt, fork};

use crate::buffer::{Owned, Shaped};
use crate::call::{Call, nothing};
use crate::collective::{Context, all_reduce, blocks, broadcast};
use crate::config::Tuning;
use crate::dtype::Op;
use crate::event::{Event, Output, Queue, Ticket};
use crate::topology::Layout;
use crate::{Error, Kind, Result};

/// A call, and what must live until it is done.
pub struct Work {
    /// The call.
    pub call: Call,
    /// Owners of the memory that the call uses.
    pub keep: Option<Box<dyn Any + Send>>,
}

// SAFETY: the buffers in a call are addresses whose owners travel along in `keep`, or wait for the call.
unsafe impl Send for Work {}

struct Job {
    work: Work,
    after: Option<Arc<dyn Event>>,
    ticket: Ticket,
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
    timeout: Duration,
    tuning: Tuning,
    line: Mutex<Line>,
    /// Rung when the line changes: a job came, a call ended, or the group closes.
    bell: Condvar,
    /// Held by whoever runs a call. Taken only by the one that `Line::busy` admits, so never contended.
    lane: Mutex<Lane>,
}

/// Who is next. Held for a moment only, never during a call.
#[derive(Default)]
struct Line {
    jobs: VecDeque<Job>,
    busy: bool,
    closed: bool,
    has_thread: bool,
}

struct Lane {
    sequence: u64,
    team: Option<Team>,
    /// Where neighbours find my control block; lives as long as the team.
    _control: Option<Arc<Piece>>,
}

impl Group {
    #[expect(clippy::too_many_arguments, reason = "one place builds groups from their parts")]
    pub(crate) fn new(
        mesh: Arc<Mesh>,
        id: u64,
        ranks: Vec<u32>,
        layout: Layout,
        team: Option<Team>,
        control: Option<Arc<Piece>>,
        timeout: Duration,
        tuning: Tuning,
    ) -> Self {
        let me = ranks.iter().position(|rank| *rank == mesh.me());
        let tuning = Tuning { inline: tuning.inline.min(INLINE), ..tuning };
        let lane = Lane { sequence: 0, team, _control: control };
        Group(Arc::new(Inner {
            mesh,
            id,
            ranks,
            me,
            layout,
            timeout,
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

    /// Runs a call and waits for it: on this thread if nothing is queued.
    pub fn run(&self, work: Work, interrupt: Option<&Interrupt<'_>>) -> Result<Output> {
        self.admit(&work.call)?;
        {
            let mut line = self.0.line();
            if line.closed {
                return Err(closed());
            }
            if line.busy || !line.jobs.is_empty() {
                drop(line);
                let ticket = self.enqueue(work, None)?;
                if let Err(error) = ticket.wait(None, interrupt) {
                    if !ticket.done() {
                        // the call must not use the caller's memory after the caller has gone on: end it first
                        self.0.fail(error.clone(), &|| "a call behind others".to_owned());
                        let _ = ticket.wait(None, None);
                    }
                    return Err(error);
                }
                return Ok(ticket.take());
            }
            line.busy = true;
        }
        let result = self.0.execute(&work.call, interrupt);
        self.0.leave();
        result
    }

    fn admit(&self, call: &Call) -> Result<()> {
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
        call.check(&self.0.ranks, self.0.mesh.me())
    }

    /// No more calls: what is queued fails, what runs goes on.
    pub(crate) fn close(&self) {
        let mut line = self.0.line();
        line.closed = true;
        for job in line.jobs.drain(..) {
            job.ticket.complete(Err(closed()));
        }
        self.0.bell.notify_all();
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
        self.admit(&work.call)?;
        let ticket = Ticket::default();
        let mut line = self.0.line();
        if line.closed {
            return Err(closed());
        }
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

fn closed() -> Error {
    Error::new(Kind::NotInitialized, "the runtime was shut down; try: offbeat.init() first")
}

impl Inner {
    fn line(&self) -> MutexGuard<'_, Line> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn leave(&self) {
        let mut line = self.line();
        line.busy = false;
        // nobody listens in the usual case: no thread, no shutdown under way
        if line.has_thread || line.closed {
            self.bell.notify_all();
        }
    }

    /// The group's thread: one queued call after another, until the group closes.
    fn serve(&self) {
        loop {
            let mut line = self.line();
            while !line.closed && (line.busy || line.jobs.is_empty()) {
                line = self.bell.wait(line).unwrap_or_else(PoisonError::into_inner);
            }
            let Some(job) = line.jobs.pop_front() else { return };
            line.busy = true;
            drop(line);
            // a call that cannot begin here must not leave the other ranks waiting for it
            let ready = job.after.map_or(Ok(()), |event| event.wait(Some(self.timeout), None));
            let ready = ready.map_err(|error| self.mesh.poison(self.id, &self.ranks, &error));
            let result = ready.and_then(|()| self.execute(&job.work.call, None));
            self.leave();
            drop(job.work);
            job.ticket.complete(result);
        }
    }

    fn panicked(&self, panic: &(dyn Any + Send)) -> Error {
        let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
        let message = format!("a bug in offbeat: {}; try: report it with the trace above", text.unwrap_or("panic"));
        self.mesh.poison(self.id, &self.ranks, &Error::new(Kind::Unsupported, message))
    }

    /// Runs a call on this thread. A panic in it is a bug of ours; it must reach whoever waits, on every rank.
    fn execute(&self, call: &Call, interrupt: Option<&Interrupt<'_>>) -> Result<Output> {
        let attempt = std::panic::AssertUnwindSafe(|| self.attempt(call, interrupt));
        std::panic::catch_unwind(attempt).unwrap_or_else(|panic| Err(self.panicked(&*panic)))
    }

    /// A failure poisons the group: every member raises the same story.
    fn attempt(&self, call: &Call, interrupt: Option<&Interrupt<'_>>) -> Result<Output> {
        let mut lane = self.lane.lock().unwrap_or_else(PoisonError::into_inner);
        let Lane { sequence, team, .. } = &mut *lane;
        // a member that has left may have done its part of this call before; whoever waits for it will see. The others
        // are told: this rank may leave before they have learned the story by themselves
        let verdict = self.mesh.roster().verdict(self.id, &self.ranks, Vec::new);
        verdict.map_err(|error| self.mesh.poison(self.id, &self.ranks, &error))?;
        let description = call.describe();
        let number = *sequence;
        *sequence += 1;
        let what = || format!("call {number} of group {:?}, {description}", self.ranks);
        let watch = Watch {
            roster: self.mesh.roster(),
            group: self.id,
            members: &self.ranks,
            deadline: Instant::now() + self.timeout,
            patience: self.timeout,
            interrupt,
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
        result.map_err(|error| self.fail(error, &what))
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

/// Does what a call says.
fn perform(context: &mut Context<'_>, call: &Call) -> Result<Output> {
    let place = |context: &Context<'_>, rank: u32| context.ranks.iter().position(|r| *r == rank).unwrap_or_default();
    let everyone: Vec<usize> = match call {
        Call::AllToAll { .. } | Call::Gather { .. } => (0..context.ranks.len()).collect(),
        _ => Vec::new(),
    };
    match call {
        Call::Barrier => all_reduce::run(context, nothing(), Op::Bor, None, None).map(|()| Output::new()),
        Call::AllReduce { tensor, op, codec } => {
            all_reduce::run(context, tensor.buffer, *op, *codec, None).map(|()| Output::new())
        }
        Call::Reduce { tensor, dst, op } => {
            let only = place(context, *dst);
            all_reduce::run(context, tensor.buffer, *op, None, Some(only)).map(|()| Output::new())
        }
        Call::Broadcast { tensor, src } => {
            let root = place(context, *src);
            broadcast::run(context, tensor.buffer, root).map(|()| Output::new())
        }
        Call::AllGather { tensor } => blocks::all_gather(context, tensor.clone()),
        Call::ReduceScatter { tensors, op } => {
            let divisor = (*op == Op::Mean).then_some(context.ranks.len() as u32);
            blocks::reduce_scatter(context, tensors, *op, divisor).map(|mine| vec![mine])
        }
        Call::AllToAll { tensors } => {
            let outgoing: Vec<(usize, Shaped)> = tensors.iter().cloned().enumerate().collect();
            let received = blocks::exchange(context, &outgoing, &everyone)?;
            blocks::in_order(received, everyone.into_iter())
        }
        Call::Gather { tensor, dst } => {
            let dst = place(context, *dst);
            let expected = if dst == context.me { everyone } else { Vec::new() };
            context.announce()?;
            let received = blocks::exchange(context, &[(dst, tensor.clone())], &expected)?;
            context.agree()?;
            blocks::in_order(received, expected.into_iter())
        }
        Call::Scatter { tensors, src, out } => {
            let src = place(context, *src);
            let outgoing: Vec<(usize, Shaped)> = match tensors {
                Some(tensors) if src == context.me => tensors.iter().cloned().enumerate().collect(),
                _ => Vec::new(),
            };
            context.announce()?;
            let mut received = blocks::exchange(context, &outgoing, &[src])?;
            if let Some(block) = received.remove(&src) {
                deliver(context, &block, out, src)?;
            }
            context.agree()?;
            Ok(Output::new())
        }
    }
}

fn deliver(context: &Context<'_>, block: &Owned, out: &Shaped, src: usize) -> Result<()> {
    if block.shape != out.shape || block.dtype != out.buffer.dtype {
        return Err(Error::of_rank(
            Kind::Mismatch,
            context.ranks[src],
            "",
            format!(
                "scatter: rank {} sends {}{:?} to rank {}, whose out is {}{:?}; try: the same shape on both sides",
                context.ranks[src], block.dtype, block.shape, context.ranks[context.me], out.buffer.dtype, out.shape
            ),
        ));
    }
    let bytes = block.bytes();
    if !bytes.is_empty() {
        // SAFETY: shapes and types are equal, so the tensor is as long as the block.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), out.buffer.start, bytes.len()) };
    }
    Ok(())
}
