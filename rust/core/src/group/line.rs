//! Who is next in a group: the calls that are queued, and whether more may come.

use std::collections::VecDeque;
use std::sync::Arc;

use super::Work;
use crate::call::Call;
use crate::event::{Event, Ticket};
use crate::{Error, Kind, Result};

/// A queued call.
pub(super) struct Job {
    pub(super) work: Work,
    pub(super) after: Option<Arc<dyn Event>>,
    pub(super) ticket: Ticket,
}

/// Who is next. Held for a moment only, never during a call.
#[derive(Default)]
pub(super) struct Line {
    pub(super) jobs: VecDeque<Job>,
    pub(super) busy: bool,
    pub(super) end: Option<End>,
    pub(super) has_thread: bool,
}

/// Why a group takes no more calls.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum End {
    /// Its last call was made.
    Closed,
    Shutdown,
}

impl Line {
    /// Admits a call, if one may still come; nothing comes after the one that closes.
    pub(super) fn admit(&mut self, call: &Call) -> Result<()> {
        match self.end {
            Some(end) => Err(end.story()),
            None if matches!(call, Call::Close) => {
                self.end = Some(End::Closed);
                Ok(())
            }
            None => Ok(()),
        }
    }
}

impl End {
    /// What whoever calls hears.
    pub(super) fn story(self) -> Error {
        match self {
            End::Closed => Error::invalid("this group was closed; try: make another one of the same ranks"),
            End::Shutdown => Error::new(Kind::NotInitialized, "the runtime was shut down; try: offbeat.init() first"),
        }
    }
}
