//! The watchdog: what ends a wait, or makes it heard. Every wait for a peer asks it every few milliseconds.
//!
//! A rank that is slow is reported long before the deadline, and by name; only the deadline fails the call.

use std::cell::Cell;
use std::time::{Duration, Instant};

use crate::Interrupt;
use crate::error::{Error, Kind, Result};
use crate::roster::Roster;

/// What to do about a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Wait on.
    Wait,
    /// Tell the user who is late, once, and wait on.
    Warn,
    /// It took too long.
    Fail,
}

/// Judges a wait that has lasted `waited` of at most `limit`. A third of the time is long enough to be worth a warning, and
/// leaves time to look; less than a second never is.
pub fn verdict(waited: Duration, limit: Duration, warned: bool) -> Verdict {
    if waited >= limit {
        Verdict::Fail
    } else if !warned && waited >= (limit / 3).max(Duration::from_secs(1)) {
        Verdict::Warn
    } else {
        Verdict::Wait
    }
}

/// Everything that can end a wait early: a failed group, a lost member, the deadline, a signal.
pub struct Watch<'a> {
    /// Whom to ask.
    pub roster: &'a Roster,
    /// The group of the operation.
    pub group: u64,
    /// Its members.
    pub members: &'a [u32],
    /// When the operation began.
    pub began: Instant,
    /// How long it may take.
    pub limit: Duration,
    /// Whether somebody was told already that it takes long.
    pub warned: &'a Cell<bool>,
    /// Lets the caller's signal handlers run; an error from it ends the wait.
    pub interrupt: Option<&'a Interrupt<'a>>,
    /// What is being done, for messages.
    pub what: &'a dyn Fn() -> String,
}

impl Watch<'_> {
    /// The verdict; `missing` names the ranks that are waited for.
    pub fn check(&self, missing: impl Fn() -> Vec<u32>) -> Result<()> {
        self.roster.verdict(self.group, self.members, &missing)?;
        if let Some(interrupt) = self.interrupt {
            interrupt()?;
        }
        match verdict(self.began.elapsed(), self.limit, self.warned.get()) {
            Verdict::Wait => Ok(()),
            Verdict::Warn => {
                self.warned.set(true);
                log::warn!("{}", self.late(&missing()));
                Ok(())
            }
            Verdict::Fail => Err(self.failed(&missing())),
        }
    }

    /// Who is waited for, as far as that is known.
    fn who(&self, missing: &[u32]) -> Option<String> {
        let names: Vec<String> = missing.iter().take(8).map(|rank| self.roster.card(*rank).name()).collect();
        let more = if missing.len() > names.len() { ", …" } else { "" };
        (!names.is_empty()).then(|| format!("{}{more}", names.join(", ")))
    }

    fn late(&self, missing: &[u32]) -> String {
        format!(
            "waiting for {} since {:.1} s in {}; it fails after {:.1} s",
            self.who(missing).unwrap_or_else(|| "the network, which takes no more data,".to_owned()),
            self.began.elapsed().as_secs_f64(),
            (self.what)(),
            self.limit.as_secs_f64()
        )
    }

    fn failed(&self, missing: &[u32]) -> Error {
        let who = match self.who(missing) {
            None => "the network takes no more data".to_owned(),
            Some(names) => format!("{names} did not answer"),
        };
        let me = self.roster.card(self.roster.me());
        Error {
            rank: missing.first().copied(),
            host: missing.first().map(|rank| self.roster.card(*rank).host.clone()).unwrap_or_default(),
            ..Error::new(
                Kind::Timeout,
                format!(
                    "{who} within {:.1} s while {} was in {}; try: look for a rank that is stuck or skipped this call, or \
                     raise timeout (OFFBEAT_TIMEOUT)",
                    self.limit.as_secs_f64(),
                    me.name(),
                    (self.what)()
                ),
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warns_once_and_fails_at_the_deadline() {
        let verdict =
            |seconds, limit, warned| verdict(Duration::from_secs_f64(seconds), Duration::from_secs_f64(limit), warned);
        assert_eq!(verdict(9.9, 30.0, false), Verdict::Wait);
        assert_eq!(verdict(10.0, 30.0, false), Verdict::Warn);
        assert_eq!(verdict(10.0, 30.0, true), Verdict::Wait);
        assert_eq!(verdict(30.0, 30.0, true), Verdict::Fail);
        assert_eq!(verdict(0.9, 1.5, false), Verdict::Wait);
        assert_eq!(verdict(0.9, 0.5, false), Verdict::Fail);
    }
}
