//! The watch over work under way on streams: nobody on the host waits for it, so somebody has to see when it hangs.
//!
//! A thread looks at every communicator's state now and then, and at the work whose deadline has come. What is late, or whose
//! communicator NCCL found an error in, is aborted: its streams go on, and the story is told to whoever asks next. The thread
//! touches no stream that is in time.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use offbeat_core::event::Event;
use offbeat_core::{Error, Kind, Result};

use crate::communicator::Communicator;
use crate::stream::Mark;

/// How often it looks.
const PERIOD: Duration = Duration::from_millis(50);
/// Work that is older is asked whether it is done, so that the list does not grow.
const OLD: Duration = Duration::from_secs(1);

/// Work under way.
struct Pending {
    mark: Arc<Mark>,
    communicator: Arc<Communicator>,
    what: String,
    since: Instant,
    limit: Duration,
}

#[derive(Default)]
struct State {
    pending: VecDeque<Pending>,
    stop: bool,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

/// The thread and what it watches. It ends when this is dropped.
pub struct Watch {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    /// Starts the thread.
    pub fn start() -> Result<Self> {
        let shared = Arc::<Shared>::default();
        let theirs = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("offbeat-gpu-watch".to_owned()).spawn(move || run(&theirs));
        let thread = thread.map_err(|error| Error::io("starting the watch over the GPU", error))?;
        Ok(Watch { shared, thread: Some(thread) })
    }

    /// Watches over work until its mark is reached.
    pub(crate) fn over(&self, mark: &Arc<Mark>, communicator: &Arc<Communicator>, what: &str, limit: Duration) {
        let pending = Pending {
            mark: Arc::clone(mark),
            communicator: Arc::clone(communicator),
            what: what.to_owned(),
            since: Instant::now(),
            limit,
        };
        let mut state = self.shared.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.pending.push_back(pending);
        self.shared.changed.notify_one();
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner).stop = true;
        self.shared.changed.notify_one();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::warn!("the watch over the GPU had failed");
        }
    }
}

/// What to do about work that was enqueued `age` ago, and has `limit`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    /// It has just begun.
    Leave,
    /// See whether it is done.
    Ask,
    /// It is to be done by now.
    Judge,
}

fn verdict(age: Duration, limit: Duration) -> Verdict {
    if age >= limit {
        Verdict::Judge
    } else if age >= OLD {
        Verdict::Ask
    } else {
        Verdict::Leave
    }
}

fn run(shared: &Shared) {
    let lock = || shared.state.lock().unwrap_or_else(PoisonError::into_inner);
    let mut state = lock();
    while !state.stop {
        let wait = if state.pending.is_empty() { Duration::from_secs(3600) } else { PERIOD };
        state = shared.changed.wait_timeout(state, wait).unwrap_or_else(PoisonError::into_inner).0;
        let pending = std::mem::take(&mut state.pending);
        // others may enqueue meanwhile
        drop(state);
        let left: Vec<Pending> = pending.into_iter().filter(keeps).collect();
        state = lock();
        left.into_iter().rev().for_each(|pending| state.pending.push_front(pending));
    }
}

/// Looks at one piece of work; says whether it is to be watched further.
fn keeps(pending: &Pending) -> bool {
    if pending.communicator.check().is_err() {
        return false;
    }
    let age = pending.since.elapsed();
    match verdict(age, pending.limit) {
        Verdict::Leave => true,
        Verdict::Ask => !pending.mark.done(),
        Verdict::Judge if pending.mark.done() => false,
        Verdict::Judge => {
            let members = &pending.communicator.members().ranks;
            let text = format!(
                "{} among ranks {members:?} is not done after {:.1} s; try: look which rank is late, NCCL_DEBUG=WARN, or a \
                 longer timeout",
                pending.what,
                age.as_secs_f64()
            );
            let me = members.get(pending.communicator.members().me).copied().unwrap_or_default();
            let text = format!("rank {me}: {text}");
            pending.communicator.abort(Error::new(Kind::Timeout, text));
            false
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_is_left_alone_then_asked_then_judged() {
        let of = |age, limit| verdict(Duration::from_millis(age), Duration::from_millis(limit));
        assert_eq!(of(10, 30_000), Verdict::Leave);
        assert_eq!(of(1500, 30_000), Verdict::Ask);
        assert_eq!(of(30_000, 30_000), Verdict::Judge);
        assert_eq!(of(200, 100), Verdict::Judge);
    }
}
