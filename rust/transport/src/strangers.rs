//! Who comes to a listener and has proven nothing: how many may wait there, and how much is said of them.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::task::AbortHandle;

/// Unproven connections at one time; for more the oldest go.
pub(crate) const MOST: usize = 256;
/// So many warnings of a listener are shown, and then none for a while: whoever fills a port must not fill a disk.
const SHOWN: u32 = 5;
/// That while.
const QUIET: Duration = Duration::from_secs(10);

/// Connections that have proven nothing yet, in the order in which they came.
///
/// A rank proves itself within a few round trips, so among too many it is the oldest that are not ranks: a newcomer that
/// was turned away might be one, and a crowd that says nothing would keep the world from linking.
#[derive(Default)]
pub(crate) struct Strangers(VecDeque<AbortHandle>);

impl Strangers {
    /// Makes room for one more; whether somebody had to go for that.
    pub(crate) fn make_room(&mut self) -> bool {
        if self.0.len() >= MOST {
            self.0.retain(|stranger| !stranger.is_finished());
        }
        let crowded = self.0.len() >= MOST;
        if crowded && let Some(oldest) = self.0.pop_front() {
            oldest.abort();
        }
        crowded
    }

    /// One more has come.
    pub(crate) fn add(&mut self, stranger: AbortHandle) {
        self.0.push_back(stranger);
    }
}

/// Warnings of a listener: the first few, and later how many there were since.
#[derive(Default)]
pub(crate) struct Complaints(Mutex<Said>);

#[derive(Default)]
struct Said {
    since: Option<Instant>,
    shown: u32,
    hidden: u64,
}

impl Said {
    /// Whether one more is shown, and how many were not before it.
    fn show(&mut self, now: Instant) -> Option<u64> {
        if self.since.is_none_or(|since| now.duration_since(since) >= QUIET) {
            let hidden = self.hidden;
            *self = Said { since: Some(now), shown: 1, hidden: 0 };
            return Some(hidden);
        }
        if self.shown < SHOWN {
            self.shown += 1;
            return Some(0);
        }
        self.hidden += 1;
        None
    }
}

impl Complaints {
    /// Warns, unless it has been done often enough.
    pub(crate) fn warn(&self, text: &str) {
        match self.0.lock().unwrap_or_else(PoisonError::into_inner).show(Instant::now()) {
            Some(0) => log::warn!("{text}"),
            Some(hidden) => log::warn!("{text} ({hidden} warnings like this were not shown)"),
            None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_many_warnings_few_are_shown_and_the_others_counted() {
        let (mut said, began) = (Said::default(), Instant::now());
        let shown = (0..1000).filter_map(|_| said.show(began)).collect::<Vec<_>>();
        assert_eq!(shown, [0; SHOWN as usize]);
        assert_eq!(said.show(began + QUIET), Some(1000 - u64::from(SHOWN)));
        assert_eq!(said.show(began + QUIET), Some(0));
    }
}
