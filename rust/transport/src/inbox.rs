//! Frames that have arrived, sorted by the operation that waits for them.
//!
//! A frame may come before its operation has begun here: an inbox is made by whoever comes first, the reader of the
//! stream or the operation. One operation drains its inbox in any order it likes.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::frame::Header;
use crate::pool::Block;
use crate::watchdog::Watch;
use crate::{Result, SLICE};

/// Which operation a frame is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Channel {
    /// A collective call: its group and its number in it.
    Call(u64, u64),
    /// Messages from a rank under a tag.
    Mail(u32, u64),
    /// Pieces of a message that a rank offered, by its number.
    Incoming(u32, u64),
    /// Answers of a rank to a message that we offered, by its number.
    Outgoing(u32, u64),
    /// Letters from all ranks between the background threads of a model, by its group. Those of the world's group, 0, are
    /// for whoever comes to read them, again and again.
    Letters(u64),
}

/// A frame that has arrived.
pub struct Delivery {
    /// The rank that sent it.
    pub from: u32,
    /// Its header.
    pub header: Header,
    /// Its body.
    pub payload: Block,
}

#[derive(Default)]
struct Inbox {
    queue: Mutex<VecDeque<Delivery>>,
    bell: Condvar,
}

/// All inboxes of a rank.
#[derive(Default)]
pub struct Switchboard {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    inboxes: HashMap<Channel, Arc<Inbox>>,
    /// For each group the first call that has not ended; frames for earlier ones are of no use.
    live: HashMap<u64, u64>,
    /// Groups whose background thread has ended; letters for them are of no use.
    ended: HashSet<u64>,
}

impl Switchboard {
    /// Puts a frame into its inbox.
    pub fn deliver(&self, channel: Channel, delivery: Delivery) {
        let inbox = {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            if let Channel::Call(group, sequence) = channel
                && state.live.get(&group).is_some_and(|live| sequence < *live)
            {
                return;
            }
            if matches!(channel, Channel::Letters(group) if state.ended.contains(&group)) {
                return;
            }
            Arc::clone(state.inboxes.entry(channel).or_default())
        };
        inbox.queue.lock().unwrap_or_else(PoisonError::into_inner).push_back(delivery);
        inbox.bell.notify_one();
    }

    /// Opens an inbox; it is closed when the returned value is dropped; letters stay.
    pub fn open(&self, channel: Channel) -> Reception<'_> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let inbox = Arc::clone(state.inboxes.entry(channel).or_default());
        Reception { board: self, channel, inbox }
    }
}

/// The receiving end of an inbox.
pub struct Reception<'a> {
    board: &'a Switchboard,
    channel: Channel,
    inbox: Arc<Inbox>,
}

impl Reception<'_> {
    /// The next frame, if one is there.
    pub fn poll(&self) -> Option<Delivery> {
        self.inbox.queue.lock().unwrap_or_else(PoisonError::into_inner).pop_front()
    }

    /// The next frame, if one comes within `limit`.
    pub fn wait(&self, limit: Duration) -> Option<Delivery> {
        let queue = self.inbox.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.inbox.bell.wait_timeout_while(queue, limit, |queue| queue.is_empty());
        waited.unwrap_or_else(PoisonError::into_inner).0.pop_front()
    }

    /// Looks through the frames that are there, and leaves them.
    pub fn find<T>(&self, look: impl Fn(&Delivery) -> Option<T>) -> Option<T> {
        self.inbox.queue.lock().unwrap_or_else(PoisonError::into_inner).iter().find_map(look)
    }

    /// Waits for the next frame; `missing` names the ranks that are waited for.
    pub fn next(&self, watch: &Watch<'_>, missing: impl Fn() -> Vec<u32>) -> Result<Delivery> {
        let mut queue = self.inbox.queue.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(delivery) = queue.pop_front() {
                return Ok(delivery);
            }
            queue = self.inbox.bell.wait_timeout(queue, SLICE).unwrap_or_else(PoisonError::into_inner).0;
            if queue.is_empty() {
                drop(queue);
                let verdict = watch.check(&missing);
                queue = self.inbox.queue.lock().unwrap_or_else(PoisonError::into_inner);
                // what came before the peer left still counts
                if queue.is_empty() {
                    verdict?;
                }
            }
        }
    }
}

impl Drop for Reception<'_> {
    fn drop(&mut self) {
        let mut state = self.board.state.lock().unwrap_or_else(PoisonError::into_inner);
        match self.channel {
            // letters may wait in it, or other receivers
            Channel::Mail(..) => {
                let queue = self.inbox.queue.lock().unwrap_or_else(PoisonError::into_inner);
                if !queue.is_empty() || Arc::strong_count(&self.inbox) > 2 {
                    return;
                }
            }
            Channel::Call(group, sequence) => {
                let live = state.live.entry(group).or_default();
                *live = (*live).max(sequence + 1);
            }
            Channel::Letters(0) => return,
            Channel::Letters(group) => drop(state.ended.insert(group)),
            Channel::Incoming(..) | Channel::Outgoing(..) => {}
        }
        state.inboxes.remove(&self.channel);
    }
}
