//! What a method is to the thread that drives it.

use super::desk::Closing;
use super::keeping::{Kept, Room, Rounds};
use super::post::{Epoch, Letter, Post};

/// What a round came to, so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// It goes on.
    Waiting,
    /// The delta is there.
    Done,
    /// It is over, and there is nothing to add.
    Idle,
    /// It cannot be ended, and another one may begin.
    Dropped,
}

/// A method at work: decides on letters and losses; touches no clock and no lock.
pub(super) trait Exchange: Send {
    /// What this rank's model was at the beginning.
    fn seed(&mut self, _: &[f32]) {}
    /// Says to the others what they need of this rank before the first round.
    fn open(&mut self, _: &mut Post) {}
    /// The number of the next round, and what is kept beside it. The snapshot is that of the round under way, if one is; or
    /// what this rank begins with.
    fn save(&self, snapshot: &[f32]) -> (u64, Vec<Kept>);
    /// Where what was saved under a label belongs.
    fn room(&mut self, label: &str) -> Option<Room<'_>>;
    /// All members go on from what they have saved, or from nothing where that did not fit; before the first round.
    fn go_on(&mut self, rounds: Rounds);
    /// A letter has come.
    fn heard(&mut self, post: &mut Post, letter: Letter);
    /// A member is not there any more; the post knows already.
    fn lost(&mut self, post: &mut Post, rank: u32);
    /// Nothing is under way, and training is paused or not.
    fn rests(&mut self, _: &mut Post, _: bool) {}
    /// Training has made so many steps, and no safe point for a while: there may be no more of them.
    fn stands(&mut self, _: &mut Post, _: u64) {}
    /// What the rounds that begin from here on are for.
    fn close(&mut self, _: Closing) {}
    /// How many rounds of which list of members have ended here, where a round that has ended for one of them shall end for
    /// all: then one that leaves stays a member for the others until they have come as far.
    fn ended(&self, _: &Post) -> Option<(Epoch, u64)> {
        None
    }
    /// Whether others wait for this rank to begin.
    fn is_awaited(&self, post: &Post) -> bool;
    /// Whom the round under way waits for.
    fn missing(&self, post: &Post) -> Vec<u32>;
    /// Begins a round with a snapshot, taken after `clock` steps.
    fn begin(&mut self, post: &mut Post, snapshot: &[f32], clock: u64);
    /// Goes on with the round as far as it can, and writes the delta at its end.
    fn advance(&mut self, post: &mut Post, snapshot: &[f32], delta: &mut [f32]) -> Outcome;
}
