//! The background thread of a model: takes letters, looks who is there, and drives an exchange round by round.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use offbeat_transport::SLICE;
use offbeat_transport::inbox::{Channel, Delivery};
use offbeat_transport::roster::Absence;

use super::desk::{Desk, Phase};
use super::keeping::{Holdings, Kept, Room, Rounds};
use super::post::{About, Epoch, Post};
use super::{Exchange, Outcome};
use crate::Result;

/// How long a round waits before it is noted whom it waits for, and before the user is told, once.
const LATE: Duration = Duration::from_secs(1);
const VERY_LATE: Duration = Duration::from_secs(30);
/// For so long a round waits to hear from a member itself that another one has lost: if that is dead the roster says so, and
/// if it has left its goodbye does. Neither comes only where two ranks are cut off from each other and not from the rest.
const LINGER: Duration = Duration::from_millis(500);
/// After so long without a safe point training may be over, or wait for other ranks in a call.
const STANDS: Duration = Duration::from_millis(100);
/// Without a period, for how many times as long as a round took the thread rests after it: what bytes cost of processors and
/// wire is then an eighth of what it would be without a rest, whatever the network and the model.
const RESTS: u32 = 7;
/// The shortest rest.
const SOONEST: Duration = Duration::from_micros(100);
/// Between two looks at a ferry that is on its way.
pub(super) const GLANCE: Duration = Duration::from_micros(300);

pub(super) struct Worker {
    desk: Arc<Desk>,
    post: Post,
    exchange: Box<dyn Exchange>,
    channel: u64,
    period: Option<Duration>,
    due: Instant,
    /// When the round under way began, once it has.
    began: Option<Instant>,
    warned: bool,
    /// Of which members the roster has said nothing yet.
    watched: Vec<u32>,
    /// Members that have left in good order, or that others have lost, and since when that is known.
    leaving: Vec<(u32, Instant)>,
    /// What came of rounds while training was paused, to be added with the next.
    carried: Option<Vec<f32>>,
    /// Whether the next thing to do waits for the ferry.
    ashore: bool,
}

impl Worker {
    pub(super) fn new(
        desk: Arc<Desk>,
        post: Post,
        exchange: Box<dyn Exchange>,
        channel: u64,
        period: Option<Duration>,
    ) -> Self {
        let watched = post.others();
        Worker {
            watched,
            leaving: Vec::new(),
            carried: None,
            ashore: false,
            desk,
            post,
            exchange,
            channel,
            period,
            due: Instant::now(),
            began: None,
            warned: false,
        }
    }

    /// Says goodbye without ever having begun.
    pub(super) fn leave(&self) {
        self.post.say_goodbye(self.exchange.ended(&self.post));
        self.desk.ended();
    }

    /// The thread; false after a panic, which is a bug of ours: training goes on without exchanges. If the device fails it
    /// does not.
    pub(super) fn run(&mut self) -> bool {
        let ended = catch_unwind(AssertUnwindSafe(|| self.serve()));
        match &ended {
            Ok(Ok(())) => {}
            Ok(Err(error)) => self.desk.fail(error.clone()),
            Err(_) => {
                log::error!(
                    "a bug in offbeat: the background thread has panicked; try: report it with the trace above"
                );
            }
        }
        self.post.say_goodbye(self.exchange.ended(&self.post));
        ended.is_ok()
    }

    /// What is kept, for the training thread, which waits for it or is the caller. What came of a round and was not added
    /// yet is a part of it.
    pub(super) fn save(&self) -> Holdings {
        // SAFETY: the training thread does not touch either while it waits, and whoever asks has seen the ferry idle.
        let (snapshot, delta) = unsafe { (self.desk.snapshot(), &*self.desk.delta()) };
        let (round, mut kept) = self.exchange.save(snapshot);
        let left = match self.desk.view().phase {
            Phase::Done(true) => Some(delta),
            _ => self.carried.as_deref(),
        };
        kept.extend(left.map(|left| Kept::of_elements("left", left)));
        Holdings { round, living: self.post.living().len(), kept }
    }

    /// Where what was saved under a label belongs, before the thread begins.
    pub(super) fn room(&mut self, label: &str) -> Option<Room<'_>> {
        if label != "left" {
            return self.exchange.room(label);
        }
        self.desk.carries();
        let count = self.desk.count;
        Some(Room::of_elements(self.carried.get_or_insert_with(|| vec![0.0; count])))
    }

    /// Goes on from what was saved, see [`Exchange::go_on`].
    pub(super) fn go_on(&mut self, rounds: Rounds) {
        self.exchange.go_on(rounds);
    }

    fn serve(&mut self) -> Result<()> {
        let mesh = Arc::clone(&self.post.mesh);
        let inbox = mesh.board().open(Channel::Letters(self.channel));
        self.due = Instant::now() + self.period.unwrap_or_default();
        while !self.desk.view().stop && !self.desk.ferry.is_idle()? {
            std::thread::sleep(GLANCE);
        }
        if self.desk.view().stop {
            return Ok(());
        }
        // SAFETY: in this phase the snapshot is ours.
        self.exchange.seed(unsafe { self.desk.snapshot() });
        self.desk.turn_to(Phase::Resting);
        self.exchange.open(&mut self.post);
        while !self.desk.view().stop {
            let first = inbox.wait(self.patience());
            // before letters are taken: those of who is absent are all among them then
            let absent = self.absent();
            let mut delivery = first.or_else(|| inbox.poll());
            while let Some(letter) = delivery {
                self.take(&letter);
                delivery = inbox.poll();
            }
            self.ashore = false;
            self.turn()?;
            // after it: a round that has all it needs of who has left ends well
            if self.go_on_without(absent) {
                self.turn()?;
            }
            let (steps, since) = self.desk.view().passed;
            if since.elapsed() >= STANDS {
                self.exchange.stands(&mut self.post, steps);
            }
            if self.desk.saves() && self.is_idle()? {
                self.desk.give(self.save());
            }
        }
        Ok(())
    }

    /// Whether the host's side of snapshot and delta may be used; if not, this is soon asked again.
    fn is_idle(&mut self) -> Result<bool> {
        let idle = self.desk.ferry.is_idle()?;
        self.ashore |= !idle;
        Ok(idle)
    }

    /// How long nothing happens unless somebody writes or pokes: until the next round is due, where one is going to begin.
    fn patience(&self) -> Duration {
        if self.ashore {
            return GLANCE;
        }
        let view = self.desk.view();
        let begins = view.phase == Phase::Resting && !view.paused && self.post.living().len() > 1;
        let left = self.due.saturating_duration_since(Instant::now());
        if begins { left.clamp(SOONEST, SLICE) } else { SLICE }
    }

    fn take(&mut self, delivery: &Delivery) {
        let Some(letter) = self.post.receive(delivery) else { return };
        match letter.envelope.about {
            About::Bye => self.leaving.push((letter.from, Instant::now())),
            // two ranks that have lost each other cannot both be members; who is told first goes on without the other
            About::Lost if letter.envelope.shard == self.post.me => self.drop_member(letter.from),
            // whom another one has lost may still have letters on their way
            About::Lost => self.leaving.push((letter.envelope.shard, Instant::now())),
            _ => self.exchange.heard(&mut self.post, letter),
        }
    }

    fn drop_member(&mut self, rank: u32) {
        if self.post.drop_member(rank) {
            self.exchange.lost(&mut self.post, rank);
            let living = self.post.living().len();
            self.desk.count(|progress| progress.living = living);
        }
    }

    /// Who is known to be gone or to have left, and was not before.
    fn absent(&mut self) -> Vec<(u32, Absence)> {
        let roster = self.post.mesh.roster();
        let absent: Vec<_> = self.watched.iter().filter_map(|rank| Some((*rank, roster.absence(*rank)?))).collect();
        self.watched.retain(|rank| absent.iter().all(|(other, _)| other != rank));
        absent
    }

    /// Goes on without members that are absent, or leave and are not needed any more; true if there are any. Those that did
    /// not say goodbye are reported, once.
    fn go_on_without(&mut self, absent: Vec<(u32, Absence)>) -> bool {
        let before = self.post.living().len();
        for (rank, how) in absent {
            match how {
                Absence::Left(_) => self.leaving.push((rank, Instant::now())),
                Absence::Gone(error) => {
                    self.drop_member(rank);
                    self.post.report(rank, &error);
                }
            }
        }
        let (is_busy, here) = (self.desk.view().phase == Phase::Taken, self.exchange.ended(&self.post));
        let leaving = std::mem::take(&mut self.leaving);
        let (mut later, now): (Vec<_>, Vec<_>) = leaving.into_iter().partition(|(rank, since)| {
            let needs = need(here, self.post.ended_at(*rank), is_busy);
            lingers(needs, self.post.has_all_of(*rank), since.elapsed())
        });
        // who went on without one of these has ended what is still to end here with it
        let waits = !later.is_empty();
        let (more, now): (Vec<_>, Vec<_>) =
            now.into_iter().partition(|(rank, _)| waits && went_on(here, self.post.ended_at(*rank)));
        later.extend(more);
        self.leaving = later;
        for (rank, _) in now {
            // what becomes of who has said goodbye is no news; but one that fails does so too, after its story was heard
            let failed = matches!(self.post.mesh.roster().absence(rank), Some(Absence::Gone(_)));
            if self.post.has_all_of(rank).is_some() && !failed {
                self.watched.retain(|other| *other != rank);
            }
            self.drop_member(rank);
        }
        self.post.living().len() < before
    }

    /// Does what the phase asks for.
    fn turn(&mut self) -> Result<()> {
        let view = self.desk.view();
        match view.phase {
            Phase::Resting => {
                let now = view.urgent || Instant::now() >= self.due || self.exchange.is_awaited(&self.post);
                self.exchange.rests(&mut self.post, view.paused);
                if view.paused {
                    // the snapshot of the pause stands for the model, for whoever needs it
                    if self.exchange.is_awaited(&self.post) {
                        self.desk.turn_to(Phase::Taken);
                    }
                } else if self.carried.is_some() {
                    if self.is_idle()? {
                        let carried = self.carried.take().unwrap_or_default();
                        // SAFETY: while nothing is under way the delta is ours.
                        unsafe { self.desk.delta() }.copy_from_slice(&carried);
                        self.hand_over()?;
                    }
                } else if now && self.post.living().len() > 1 {
                    self.desk.turn_to(Phase::Wanted);
                }
            }
            Phase::Taken if !self.is_idle()? => {}
            Phase::Taken => {
                if self.began.is_none() {
                    self.began = Some(Instant::now());
                    // SAFETY: in this phase the snapshot is ours.
                    let snapshot = unsafe { self.desk.snapshot() };
                    self.exchange.close(view.closing);
                    self.exchange.begin(&mut self.post, snapshot, view.clock);
                }
                self.advance()?;
            }
            Phase::Seeding | Phase::Wanted | Phase::Done(_) => {}
        }
        Ok(())
    }

    fn advance(&mut self) -> Result<()> {
        let desk = Arc::clone(&self.desk);
        // SAFETY: in this phase both are ours, and nobody else has borrowed them.
        let (snapshot, delta) = unsafe { (desk.snapshot(), desk.delta()) };
        let outcome = self.exchange.advance(&mut self.post, snapshot, delta);
        let began = self.began.unwrap_or_else(Instant::now);
        match outcome {
            Outcome::Waiting => {
                if began.elapsed() > LATE {
                    let late = self.exchange.missing(&self.post);
                    if began.elapsed() > VERY_LATE && !std::mem::replace(&mut self.warned, true) {
                        let names: Vec<String> =
                            late.iter().take(8).map(|rank| self.post.mesh.roster().card(*rank).name()).collect();
                        log::warn!(
                            "an exchange in the background waits for {} since {VERY_LATE:?}; training goes on. This is \
                             said once.",
                            names.join(", ")
                        );
                    }
                    self.desk.waits_for(late);
                }
                return Ok(());
            }
            Outcome::Done => {
                let spread = delta.iter().map(|d| f64::from(*d).powi(2)).sum::<f64>().sqrt();
                self.desk.count(|progress| {
                    progress.rounds += 1;
                    progress.spread = spread;
                });
                self.finish(delta)?;
            }
            Outcome::Idle if self.desk.view().paused || self.carried.is_some() => self.desk.turn_to(Phase::Resting),
            Outcome::Idle => self.desk.turn_to(Phase::Done(false)),
            Outcome::Dropped => {
                self.desk.count(|progress| progress.dropped += 1);
                self.desk.turn_to(Phase::Resting);
            }
        }
        self.began = None;
        self.due = next(self.period, began, Instant::now(), self.post.time_receiving());
        Ok(())
    }

    /// Hands the delta over. While training is paused it is kept, and added to the snapshot, which stands for the model.
    fn finish(&mut self, delta: &mut [f32]) -> Result<()> {
        if self.desk.view().paused {
            // SAFETY: in this phase the snapshot is ours, and the slice of the round is used no more.
            let snapshot = unsafe { self.desk.snapshot_mut() };
            snapshot.iter_mut().zip(&*delta).for_each(|(x, delta)| *x += delta);
            match &mut self.carried {
                Some(carried) => carried.iter_mut().zip(&*delta).for_each(|(carried, delta)| *carried += delta),
                None => self.carried = Some(delta.to_vec()),
            }
            self.desk.keep();
            return Ok(());
        }
        if let Some(carried) = self.carried.take() {
            delta.iter_mut().zip(carried).for_each(|(delta, carried)| *delta += carried);
        }
        self.hand_over()
    }

    /// The delta is for the training thread, which has it added when it has come to where the model is.
    fn hand_over(&self) -> Result<()> {
        self.desk.ferry.send()?;
        self.desk.turn_to(Phase::Done(true));
        Ok(())
    }
}

/// What a member that leaves is still needed for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Need {
    Nothing,
    /// What it wrote before it said goodbye, which may be a part of the round under way; or its goodbye, if it says one.
    Letters,
    /// It has ended rounds of this list of members that are still to end here.
    Rounds,
}

/// What one is needed for, by how many rounds of which list of members have ended here and there, if there are such and it has
/// said so.
fn need(here: Option<(Epoch, u64)>, there: Option<(Epoch, u64)>, is_busy: bool) -> Need {
    match (here, there) {
        (Some(here), Some(there)) if here.0 == there.0 && here.1 < there.1 => Need::Rounds,
        (Some(_), None) => Need::Letters,
        // they tell without whom it went on
        _ if went_on(here, there) => Need::Letters,
        _ if is_busy => Need::Letters,
        _ => Need::Nothing,
    }
}

/// Whether a member went on to a shorter list of members before it left.
fn went_on(here: Option<(Epoch, u64)>, there: Option<(Epoch, u64)>) -> bool {
    here.zip(there).is_some_and(|(here, there)| there.0.living < here.0.living)
}

/// Whether a member that leaves still is one, if all has come that it wrote before it said goodbye. What is known of one from
/// others alone is believed after a while.
fn lingers(needs: Need, has_all: Option<bool>, known_for: Duration) -> bool {
    match needs {
        Need::Nothing => false,
        Need::Letters => has_all.map_or(known_for < LINGER, |all| !all),
        Need::Rounds => true,
    }
}

/// When a round is due after one that began and ended then, if letters were on their way for `receiving` since the one before.
///
/// Who was late finds the letters of the others there, and ends at once: what they took on the wire counts all the same. Who
/// waited for a rank that was busy elsewhere, or paused, counts that for a second at most.
fn next(period: Option<Duration>, began: Instant, ended: Instant, receiving: Duration) -> Instant {
    match period {
        Some(period) => began + period,
        None => ended + RESTS * (ended - began).clamp(receiving, receiving + LATE),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_leaves_is_waited_for_until_all_of_it_is_here_and_no_clock_asked() {
        for known_for in [Duration::ZERO, LINGER, 1000 * LINGER] {
            assert!(!lingers(Need::Letters, Some(true), known_for));
            assert!(lingers(Need::Letters, Some(false), known_for), "it is on its way, or else the roster tells");
            assert!(lingers(Need::Rounds, Some(true), known_for), "of the same members, which others still write for");
            assert!(!lingers(Need::Nothing, Some(false), known_for));
        }
        assert!(lingers(Need::Letters, None, Duration::ZERO));
        assert!(!lingers(Need::Letters, None, LINGER), "it is cut off from another rank, and not from this one");
    }

    #[test]
    fn who_leaves_is_needed_for_the_rounds_that_have_ended_there() {
        let (all, fewer) = (Epoch::of(&[0, 1, 2]), Epoch::of(&[1, 2]));
        let at = |epoch, rounds| Some((epoch, rounds));
        assert_eq!(need(at(all, 3), at(all, 4), false), Need::Rounds);
        assert_eq!(need(at(all, 4), at(all, 4), false), Need::Nothing);
        assert_eq!(need(at(all, 4), at(all, 4), true), Need::Letters);
        assert_eq!(need(at(fewer, 0), at(all, 4), false), Need::Nothing, "that list is past");
        assert_eq!(need(at(all, 4), None, false), Need::Letters, "another rank has heard its goodbye");
        assert_eq!(need(at(all, 4), at(fewer, 0), false), Need::Letters);
        assert_eq!(need(None, at(all, 0), false), Need::Nothing, "a server has no rounds of all");
        assert!(went_on(at(all, 3), at(fewer, 0)) && !went_on(at(all, 3), at(all, 0)));
    }

    #[test]
    fn rounds_follow_a_period_or_rest_in_proportion() {
        let (began, second) = (Instant::now(), Duration::from_secs(1));
        let ended = began + 3 * second;
        assert_eq!(next(Some(10 * second), began, ended, second), began + 10 * second);
        assert_eq!(next(Some(Duration::ZERO), began, ended, second), began, "at once");
        assert_eq!(next(None, began, ended, 3 * second), ended + 21 * second);
        assert_eq!(next(None, began, began, 2 * second), began + 14 * second, "the letter of a peer was there already");
        assert_eq!(next(None, began, began + 60 * second, second), began + (60 + 14) * second, "a peer was paused");
    }
}
