//! What became of a communicator: nothing yet, or the first error, which everyone who comes later gets.

use std::sync::OnceLock;

use offbeat_core::Error;

/// The story of a failure, told once and heard by all.
#[derive(Debug, Default)]
pub struct Story(OnceLock<Error>);

impl Story {
    /// The error, if it has failed.
    pub fn told(&self) -> Option<Error> {
        self.0.get().cloned()
    }

    /// Tells what happened; gives what counts, which is what was told first.
    pub(crate) fn tell(&self, error: Error) -> Error {
        self.0.get_or_init(|| error).clone()
    }
}
