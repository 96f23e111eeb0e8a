//! What was not finite: kernels count in words that the host reads without waiting.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use offbeat_core::Result;

use crate::pinned::Words;
use crate::queue::Lane;

/// For how many rounds blocks that are not finite are counted by themselves.
const ROUNDS: u64 = 64;

/// How long the end of a carrier waits for what is under way before that is given up.
const PARTING: Duration = Duration::from_secs(5);

/// Blocks that were not finite, of each of the last rounds.
pub(crate) struct Odd {
    words: Words,
    newest: Mutex<u64>,
    /// Whose kernels count.
    lane: Arc<Lane>,
}

impl Drop for Odd {
    fn drop(&mut self) {
        // kernels count in memory that goes now
        if let Err(error) = self.lane.drain(PARTING) {
            log::warn!("{}", error.message);
        }
    }
}

impl Odd {
    /// None yet.
    pub(crate) fn new(lane: &Arc<Lane>) -> Result<Self> {
        let words = Words::new(lane.group().stream.device(), ROUNDS as usize)?;
        Ok(Odd { words, newest: Mutex::default(), lane: Arc::clone(lane) })
    }

    /// Where kernels of a round count.
    pub(crate) fn address(&self, round: u64) -> u64 {
        let mut newest = self.newest.lock().unwrap_or_else(PoisonError::into_inner);
        if *newest != round {
            *newest = round;
            self.words.clear((round % ROUNDS) as usize);
        }
        self.words.address((round % ROUNDS) as usize)
    }

    /// How many a round has had, as far as the host knows.
    pub(crate) fn of(&self, round: u64) -> u64 {
        let newest = *self.newest.lock().unwrap_or_else(PoisonError::into_inner);
        if round + ROUNDS <= newest { 0 } else { u64::from(self.words.get((round % ROUNDS) as usize)) }
    }
}
