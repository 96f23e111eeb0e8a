//! Where the training thread and the background thread of a model meet: snapshot and delta (`ferry`), and whose turn it is.
//!
//! ```text
//! Seeding ─▶ Resting ─▶ Wanted ─▶ Taken ─▶ Done ─▶ Resting      the background thread: reads what all begins with;
//!                        training copies    training adds                                wants a snapshot; gives a delta
//! ```
//! The training thread looks at one atomic at each safe point. Whoever's turn it is owns the memory; so nothing is torn, and
//! neither side ever waits for the other, unless the training thread asks to ([`Desk::wait`]).

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use offbeat_transport::{Interrupt, SLICE};

use super::ferry::Ferry;
use super::keeping::Holdings;
use crate::{Error, Result};

/// Whose turn it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// The background thread reads from the snapshot what this rank begins with.
    Seeding,
    /// Nothing is under way.
    Resting,
    /// The background thread wants a snapshot.
    Wanted,
    /// There is one, and the background thread works with it.
    Taken,
    /// The delta is there; `bool` is whether there is anything to add.
    Done(bool),
}

/// What the training thread is asked to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Task {
    /// Add the delta to the parameters, then [`Desk::applied`].
    Apply,
    /// Copy the parameters into the snapshot, then [`Desk::taken`].
    Snapshot,
    /// Nothing came of the round: [`Desk::applied`], and no more.
    Skip,
}

/// What the rounds are for that begin from here on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Closing {
    /// Nothing: training goes on.
    #[default]
    Open,
    /// No rank makes steps for now, so nobody waits for any, and nothing shall be left over.
    Settles,
}

/// What a model's background exchanges have done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Progress {
    /// Rounds that gave something.
    pub rounds: u64,
    /// Rounds that were dropped because a member was lost.
    pub dropped: u64,
    /// The distance that the last round moved this rank: of its snapshot to what was agreed on.
    pub spread: f64,
    /// Members that are there, with this one.
    pub living: usize,
}

struct State {
    phase: Phase,
    /// Somebody waits: the background thread does not wait for its time.
    urgent: bool,
    stop: bool,
    running: bool,
    ended: bool,
    paused: bool,
    /// Whether something came of rounds during a pause that was not added yet.
    carrying: bool,
    closing: Closing,
    clock: u64,
    /// How many steps training has made and may go beyond, and since when; told where staleness is bounded.
    passed: (u64, Instant),
    /// Whom the background thread waits for.
    late: Vec<u32>,
    /// Why exchanges have ended, if the device has failed.
    failed: Option<Error>,
    progress: Progress,
    /// Whether the training thread wants to save, and what it gets.
    saves: bool,
    saved: Option<Holdings>,
}

/// The place where both threads meet.
pub struct Desk {
    attention: AtomicBool,
    state: Mutex<State>,
    bell: Condvar,
    pub(super) ferry: Arc<dyn Ferry>,
    pub(super) count: usize,
}

/// What the background thread sees.
#[derive(Clone, Copy, Debug)]
pub(super) struct View {
    pub(super) phase: Phase,
    pub(super) urgent: bool,
    pub(super) stop: bool,
    pub(super) paused: bool,
    pub(super) closing: Closing,
    pub(super) clock: u64,
    pub(super) passed: (u64, Instant),
}

impl Desk {
    pub(super) fn new(ferry: Arc<dyn Ferry>, count: usize, living: usize) -> Self {
        let state = State {
            phase: Phase::Resting,
            urgent: false,
            stop: false,
            running: false,
            ended: false,
            paused: false,
            carrying: false,
            closing: Closing::default(),
            clock: 0,
            passed: (0, Instant::now()),
            late: Vec::new(),
            failed: None,
            progress: Progress { living, ..Progress::default() },
            saves: false,
            saved: None,
        };
        Desk { attention: AtomicBool::new(false), state: Mutex::new(state), bell: Condvar::new(), ferry, count }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, state: &mut State, phase: Phase) {
        state.phase = phase;
        let asks = matches!(phase, Phase::Wanted | Phase::Done(_)) || state.failed.is_some();
        self.attention.store(asks, Ordering::Release);
        self.bell.notify_all();
    }

    // -- the training thread

    /// What there is to do at a safe point; looks at one atomic where there is nothing. An error if the device has failed.
    pub fn look(&self) -> Result<Option<Task>> {
        if !self.attention.load(Ordering::Acquire) {
            return Ok(None);
        }
        let state = self.state();
        match &state.failed {
            Some(error) => Err(error.clone()),
            None => Ok(if state.paused { None } else { task(state.phase) }),
        }
    }

    /// The delta was added.
    pub fn applied(&self) {
        let mut state = self.state();
        if matches!(state.phase, Phase::Done(_)) {
            state.carrying = false;
            self.set(&mut state, Phase::Resting);
        }
    }

    /// The snapshot was taken, after so many steps of this rank.
    pub fn taken(&self, clock: u64) {
        let mut state = self.state();
        if state.phase == Phase::Wanted {
            state.clock = clock;
            self.set(&mut state, Phase::Taken);
        }
    }

    /// This rank has made so many steps, and no bound keeps it from the next.
    pub fn passed(&self, clock: u64) {
        self.state().passed = (clock, Instant::now());
    }

    /// Waits until there is something to do. None if there never will be: nobody is left, or the thread has ended. With
    /// `only_results` also if nothing is under way.
    pub fn wait(
        &self,
        only_results: bool,
        limit: Duration,
        interrupt: Option<&Interrupt<'_>>,
    ) -> Result<Option<Task>, Stuck> {
        let began = Instant::now();
        let mut state = self.state();
        state.urgent = true;
        let result = loop {
            if let Some(error) = &state.failed {
                break Err(Stuck::Failed(error.clone()));
            }
            let found = task(state.phase);
            let under_way = state.carrying || matches!(state.phase, Phase::Taken | Phase::Done(_));
            if only_results && !under_way || state.ended || (state.progress.living <= 1 && !under_way) {
                break Ok(None);
            }
            if found.is_some() && !state.paused && !(only_results && state.phase == Phase::Wanted) {
                break Ok(found);
            }
            if began.elapsed() >= limit {
                break Err(Stuck::Late(state.late.clone()));
            }
            state = self.bell.wait_timeout(state, SLICE).unwrap_or_else(PoisonError::into_inner).0;
            if let Some(interrupt) = interrupt {
                drop(state);
                let verdict = interrupt();
                state = self.state();
                if let Err(error) = verdict {
                    break Err(Stuck::Interrupted(error));
                }
            }
        };
        state.urgent = false;
        result
    }

    /// Before a pause: whether the training thread shall copy the parameters, to stand for the model meanwhile. Not so while
    /// something of the last pause is still to be added: the copy of that one has it already.
    pub fn hold(&self) -> bool {
        let mut state = self.state();
        let free = !state.carrying && matches!(state.phase, Phase::Resting | Phase::Wanted);
        if free {
            self.set(&mut state, Phase::Wanted);
        }
        free
    }

    /// From now on nothing is asked of the training thread, which has made so many steps. The background thread takes part
    /// in rounds that others begin, with the snapshot that it has.
    pub fn pause(&self, clock: u64) {
        let mut state = self.state();
        state.paused = true;
        if state.phase == Phase::Wanted {
            state.clock = clock;
            self.set(&mut state, Phase::Resting);
        }
    }

    /// Goes on after a pause.
    pub fn resume(&self) {
        self.state().paused = false;
    }

    /// What rounds that begin from here on are for.
    pub fn close(&self, closing: Closing) {
        self.state().closing = closing;
    }

    /// What was done so far.
    pub fn progress(&self) -> Progress {
        self.state().progress
    }

    /// Asks the background thread for what it keeps. It answers between two letters.
    pub(super) fn ask(&self) {
        let mut state = self.state();
        (state.saves, state.saved) = (true, None);
    }

    /// Its answer; none if it has ended, or says nothing for so long.
    pub(super) fn answer(&self, limit: Duration) -> Option<Holdings> {
        let waits = |state: &mut State| state.saved.is_none() && !state.ended;
        let waited = self.bell.wait_timeout_while(self.state(), limit, waits);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner).0;
        state.saves = false;
        state.saved.take()
    }

    // -- the background thread

    /// Whether the training thread waits for what is kept.
    pub(super) fn saves(&self) -> bool {
        self.state().saves
    }

    /// Gives it.
    pub(super) fn give(&self, holdings: Holdings) {
        let mut state = self.state();
        (state.saves, state.saved) = (false, Some(holdings));
        self.bell.notify_all();
    }

    /// There is something to be added that was loaded.
    pub(super) fn carries(&self) {
        self.state().carrying = true;
    }

    /// # Safety
    /// Only where the training thread leaves it alone, before the first round and while a snapshot is taken, and the ferry is
    /// idle.
    pub(super) unsafe fn snapshot(&self) -> &[f32] {
        // SAFETY: it is that long, and the caller sees to the rest.
        unsafe { std::slice::from_raw_parts(self.ferry.aboard()[0], self.count) }
    }

    /// # Safety
    /// As [`Desk::snapshot`], and nobody else has borrowed it.
    #[expect(clippy::mut_from_ref, reason = "whose turn it is settles who may use the memory")]
    pub(super) unsafe fn snapshot_mut(&self) -> &mut [f32] {
        // SAFETY: it is that long, and the caller sees to the rest.
        unsafe { std::slice::from_raw_parts_mut(self.ferry.aboard()[0], self.count) }
    }

    /// # Safety
    /// Only while a snapshot is taken and the ferry is idle, and once at a time.
    #[expect(clippy::mut_from_ref, reason = "whose turn it is settles who may use the memory")]
    pub(super) unsafe fn delta(&self) -> &mut [f32] {
        // SAFETY: it is that long, and the caller sees to the rest.
        unsafe { std::slice::from_raw_parts_mut(self.ferry.aboard()[1], self.count) }
    }

    pub(super) fn view(&self) -> View {
        let state = self.state();
        View {
            phase: state.phase,
            urgent: state.urgent,
            stop: state.stop,
            paused: state.paused,
            closing: state.closing,
            clock: state.clock,
            passed: state.passed,
        }
    }

    pub(super) fn turn_to(&self, phase: Phase) {
        let mut state = self.state();
        self.set(&mut state, phase);
    }

    /// What came of a round is kept for after the pause.
    pub(super) fn keep(&self) {
        let mut state = self.state();
        state.carrying = true;
        self.set(&mut state, Phase::Resting);
    }

    pub(super) fn count(&self, act: impl FnOnce(&mut Progress)) {
        let mut state = self.state();
        act(&mut state.progress);
        self.bell.notify_all();
    }

    pub(super) fn waits_for(&self, late: Vec<u32>) {
        self.state().late = late;
    }

    pub(super) fn stop(&self) {
        self.state().stop = true;
    }

    pub(super) fn begins(&self) {
        let mut state = self.state();
        state.running = true;
        self.set(&mut state, Phase::Seeding);
    }

    /// The device has failed, and every safe point says so from now on.
    pub(super) fn fail(&self, error: Error) {
        let mut state = self.state();
        state.failed = Some(error);
        let phase = state.phase;
        self.set(&mut state, phase);
    }

    pub(super) fn ended(&self) {
        let mut state = self.state();
        (state.running, state.ended) = (false, true);
        self.set(&mut state, Phase::Resting);
    }

    /// Waits until the background thread has ended, if it runs.
    pub(super) fn wait_for_end(&self, limit: Duration) {
        let state = self.state();
        drop(self.bell.wait_timeout_while(state, limit, |state| state.running));
    }
}

/// Why a wait at a safe point ended without anything to do.
#[derive(Debug)]
pub enum Stuck {
    /// The time is up; these are waited for, as far as it is known.
    Late(Vec<u32>),
    /// A signal came.
    Interrupted(Error),
    /// The device has failed.
    Failed(Error),
}

fn task(phase: Phase) -> Option<Task> {
    match phase {
        Phase::Wanted => Some(Task::Snapshot),
        Phase::Done(true) => Some(Task::Apply),
        Phase::Done(false) => Some(Task::Skip),
        Phase::Seeding | Phase::Resting | Phase::Taken => None,
    }
}
