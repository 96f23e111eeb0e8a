//! Work is enqueued, not called: `enqueue(work, after) -> event`.
//!
//! On the CPU an event is a [`Ticket`] that a thread completes; on CUDA it will be a CUDA event on a stream. Whoever
//! enqueues work never waits for it; whoever needs the result waits for the event, with a deadline.

use std::any::Any;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use offbeat_transport::{Interrupt, SLICE};

use crate::buffer::Owned;
use crate::{Error, Kind, Result};

/// What work leaves behind besides what it wrote in place.
pub type Output = Vec<Owned>;

/// A stream of the caller's, by the handle that its device knows it by.
pub type Stream = u64;

/// Something that will have happened.
pub trait Event: Send + Sync {
    /// Whether it has happened, well or badly.
    fn done(&self) -> bool;
    /// Waits for it. An error of the work is returned to everyone who waits.
    fn wait(&self, limit: Option<Duration>, interrupt: Option<&Interrupt<'_>>) -> Result<()>;
    /// The event as what it is, if a queue may know its kind: it can then wait for it without a thread that waits.
    fn as_any(&self) -> Option<&dyn Any> {
        None
    }
}

/// A place where work is done in the order in which it is enqueued.
pub trait Queue {
    /// The kind of work.
    type Work;
    /// The event that a piece of work gives.
    type Event: Event;
    /// Enqueues work that begins when `after` has happened.
    fn enqueue(&self, work: Self::Work, after: Option<Arc<dyn Event>>) -> Result<Self::Event>;
}

/// The result of work under way on the CPU.
#[derive(Clone, Default)]
pub struct Ticket(Arc<Shared>);

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    done: Condvar,
}

#[derive(Default)]
enum State {
    #[default]
    Pending,
    Done(Option<Output>),
    Failed(Error),
}

impl Ticket {
    /// Completes the work; only the first result counts.
    pub fn complete(&self, result: Result<Output>) {
        let mut state = self.0.state.lock().unwrap_or_else(PoisonError::into_inner);
        if matches!(*state, State::Pending) {
            *state = match result {
                Ok(output) => State::Done(Some(output)),
                Err(error) => State::Failed(error),
            };
            self.0.done.notify_all();
        }
    }

    /// Takes the output of work that is done; the second taker gets an empty one.
    pub fn take(&self) -> Output {
        match &mut *self.0.state.lock().unwrap_or_else(PoisonError::into_inner) {
            State::Done(output) => output.take().unwrap_or_default(),
            State::Pending | State::Failed(_) => Output::new(),
        }
    }
}

impl Event for Ticket {
    fn done(&self) -> bool {
        !matches!(*self.0.state.lock().unwrap_or_else(PoisonError::into_inner), State::Pending)
    }

    fn wait(&self, limit: Option<Duration>, interrupt: Option<&Interrupt<'_>>) -> Result<()> {
        let end = limit.and_then(|limit| Instant::now().checked_add(limit));
        let mut state = self.0.state.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            match &*state {
                State::Done(_) => return Ok(()),
                State::Failed(error) => return Err(error.clone()),
                State::Pending => {}
            }
            let left = end.map_or(SLICE, |end| end.saturating_duration_since(Instant::now()).min(SLICE));
            if left.is_zero() {
                return Err(Error::new(
                    Kind::Timeout,
                    format!(
                        "the work is still under way after {:.1} s; try: wait again, or wait longer",
                        limit.unwrap_or_default().as_secs_f64()
                    ),
                ));
            }
            state = self.0.done.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
            if matches!(*state, State::Pending)
                && let Some(interrupt) = interrupt
            {
                drop(state);
                interrupt()?;
                state = self.0.state.lock().unwrap_or_else(PoisonError::into_inner);
            }
        }
    }
}

/// Runs something on this thread. A panic in it is a bug of ours, and becomes an error like any other: whoever waits for
/// the result must get one.
pub(crate) fn guarded<T>(act: impl FnOnce() -> Result<T>) -> Result<T> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(act)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
        let text = text.unwrap_or("panic");
        Err(Error::new(Kind::Unsupported, format!("a bug in offbeat: {text}; try: report it with the trace above")))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everyone_gets_the_error_and_the_first_result_counts() {
        let ticket = Ticket::default();
        let short = Some(Duration::from_millis(1));
        assert_eq!(ticket.wait(short, None).unwrap_err().kind, Kind::Timeout);
        ticket.complete(Err(Error::invalid("no")));
        ticket.complete(Ok(Output::new()));
        for _ in 0..2 {
            assert_eq!(ticket.wait(None, None).unwrap_err().message, "no");
        }
        assert!(ticket.done());
    }
}
