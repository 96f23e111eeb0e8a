//! How neighbours keep step: each has a phase that only grows, and waits for the phases of the others.
//!
//! A waiter spins, then yields, then sleeps on the phase's word until it is woken. A poster wakes only if somebody may
//! sleep. Why no wake-up is lost: the waiter counts itself among the sleepers before it looks at the phase for the last
//! time, the poster stores the phase before it looks at the count, and each has a fence between the two, so at least one
//! sees the other; and sleeping is refused by the kernel when the word has changed meanwhile. The protocol is generic over
//! its words, so that loom can try all interleavings (tests below); the mapped one uses futexes.

use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::time::Duration;

/// An atomic word that one can sleep on.
pub trait Word {
    /// Reads the word; what its writer wrote before is visible after.
    fn load(&self) -> u32;
    /// Writes the word, after everything written before.
    fn store(&self, value: u32);
    /// Adds to the word, wrapping.
    fn add(&self, value: u32);
    /// Sleeps at most `limit` while the word is `expected`.
    fn sleep(&self, expected: u32, limit: Duration);
    /// Wakes all sleepers.
    fn wake(&self);
    /// Puts everything before it before everything after it, in an order that all threads agree on.
    fn fence();
}

/// One member's place in the protocol.
#[repr(C, align(128))]
#[derive(Default)]
pub struct Post<W> {
    phase: W,
    sleepers: W,
    given_up: W,
}

/// How long to spin and how often to yield before sleeping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patience {
    /// Looks at the word with a pause between them.
    pub spins: u32,
    /// Looks at the word with the processor given away between them.
    pub yields: u32,
    /// The longest sleep before the verdict is asked for.
    pub sleep: Duration,
}

impl Patience {
    /// Spinning pays only while the one that is waited for runs at the same time.
    pub fn new(neighbours: usize, cores: usize) -> Self {
        let spins = if neighbours <= cores { 4000 } else { 20 };
        Patience { spins, yields: 40, sleep: crate::SLICE }
    }
}

/// Whether `phase` has come as far as `target`; phases wrap around.
fn reached(phase: u32, target: u32) -> bool {
    phase.wrapping_sub(target) < 1 << 31
}

impl<W: Word> Post<W> {
    /// Announces that the owner has come to `phase`: everything that it wrote before is visible to those who see it.
    pub fn announce(&self, phase: u32) {
        self.phase.store(phase);
        W::fence();
        if self.sleepers.load() != 0 {
            self.phase.wake();
        }
    }

    /// Says that the owner has ended a call early, and that its memory may be in other use: nobody may go on with it.
    pub fn give_up(&self) {
        self.given_up.store(1);
    }

    /// Whether the owner has given up.
    pub fn has_given_up(&self) -> bool {
        self.given_up.load() != 0
    }

    /// Waits until the owner has come to `target`. `verdict` is asked now and then; its error ends the wait, unless the
    /// phase was reached after all.
    pub fn wait<E>(
        &self,
        target: u32,
        patience: Patience,
        mut verdict: impl FnMut() -> Result<(), E>,
    ) -> Result<(), E> {
        for _ in 0..patience.spins {
            if reached(self.phase.load(), target) {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        for _ in 0..patience.yields {
            if reached(self.phase.load(), target) {
                return Ok(());
            }
            std::thread::yield_now();
        }
        loop {
            self.sleepers.add(1);
            W::fence();
            let seen = self.phase.load();
            let arrived = reached(seen, target);
            if !arrived {
                self.phase.sleep(seen, patience.sleep);
            }
            self.sleepers.add(u32::MAX);
            if arrived || reached(self.phase.load(), target) {
                return Ok(());
            }
            if let Err(error) = verdict() {
                return if reached(self.phase.load(), target) { Ok(()) } else { Err(error) };
            }
        }
    }
}

/// A word in memory that several processes map.
#[repr(transparent)]
#[derive(Default)]
pub struct Futex(AtomicU32);

impl Word for Futex {
    fn load(&self) -> u32 {
        self.0.load(Ordering::Acquire)
    }

    fn store(&self, value: u32) {
        self.0.store(value, Ordering::Release);
    }

    fn add(&self, value: u32) {
        self.0.fetch_add(value, Ordering::AcqRel);
    }

    fn fence() {
        fence(Ordering::SeqCst);
    }

    #[cfg(target_os = "linux")]
    fn sleep(&self, expected: u32, limit: Duration) {
        use rustix::thread::futex::{Flags, Timespec, wait};
        let limit = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: i64::from(limit.subsec_nanos()) };
        // whatever ends the sleep (a wake, the limit, a signal, a changed word), the caller looks again
        let _ = wait(&self.0, Flags::empty(), expected, Some(&limit));
    }

    #[cfg(target_os = "linux")]
    fn wake(&self) {
        use rustix::thread::futex::{Flags, wake};
        let _ = wake(&self.0, Flags::empty(), i32::MAX as u32);
    }

    #[cfg(not(target_os = "linux"))]
    fn sleep(&self, _: u32, limit: Duration) {
        std::thread::sleep(limit.min(Duration::from_micros(50)));
    }

    #[cfg(not(target_os = "linux"))]
    fn wake(&self) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_wrap_around() {
        assert!(reached(5, 5) && reached(6, 5) && !reached(4, 5));
        assert!(reached(2, u32::MAX) && !reached(u32::MAX, 2));
    }

    #[test]
    fn a_waiter_is_told_the_verdict() {
        let post: Post<Futex> = Post::default();
        let patience = Patience { spins: 1, yields: 1, sleep: Duration::from_millis(1) };
        assert_eq!(post.wait(1, patience, || Err("lost")), Err("lost"));
        post.announce(1);
        assert_eq!(post.wait(1, patience, || Err("lost")), Ok(()));
    }
}

/// All interleavings of two and three members that meet twice, with data behind each meeting.
#[cfg(test)]
mod model {
    use super::*;
    use loom::cell::UnsafeCell;
    use loom::sync::atomic::AtomicU32;
    use loom::sync::{Arc, Condvar, Mutex};
    use loom::thread;

    /// A futex as the kernel documents it: compare and sleep are one atomic act.
    struct Modelled {
        word: AtomicU32,
        kernel: Mutex<()>,
        queue: Condvar,
    }

    impl Default for Modelled {
        fn default() -> Self {
            Modelled { word: AtomicU32::new(0), kernel: Mutex::new(()), queue: Condvar::new() }
        }
    }

    impl Word for Modelled {
        fn load(&self) -> u32 {
            self.word.load(Ordering::Acquire)
        }
        fn store(&self, value: u32) {
            self.word.store(value, Ordering::Release);
        }
        fn add(&self, value: u32) {
            self.word.fetch_add(value, Ordering::AcqRel);
        }
        fn fence() {
            loom::sync::atomic::fence(Ordering::SeqCst);
        }
        fn sleep(&self, expected: u32, _: Duration) {
            let guard = self.kernel.lock().unwrap();
            if self.word.load(Ordering::Acquire) == expected {
                // no time-out in the model: a lost wake-up is a deadlock, which loom reports
                drop(self.queue.wait(guard).unwrap());
            }
        }
        fn wake(&self) {
            let _guard = self.kernel.lock().unwrap();
            self.queue.notify_all();
        }
    }

    struct Member {
        post: Post<Modelled>,
        /// Two slots, used in turn, as a team's control block has them.
        slots: [UnsafeCell<u32>; 2],
    }

    fn meet(members: usize, turns: u32) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(if members > 2 { 2 } else { 3 });
        builder.check(move || {
            let team: Arc<Vec<Member>> = Arc::new(
                (0..members)
                    .map(|_| Member { post: Post::default(), slots: [UnsafeCell::new(0), UnsafeCell::new(0)] })
                    .collect(),
            );
            let run = move |me: usize, team: Arc<Vec<Member>>| {
                let patience = Patience { spins: 0, yields: 0, sleep: Duration::ZERO };
                for turn in 1..=turns {
                    let slot = (turn % 2) as usize;
                    // loom fails here if anybody may still read what the slot held two turns ago
                    // SAFETY: loom watches over it.
                    team[me].slots[slot].with_mut(|value| unsafe { *value = turn * 10 + me as u32 });
                    team[me].post.announce(turn);
                    for (other, member) in team.iter().enumerate().filter(|(other, _)| *other != me) {
                        member.post.wait(turn, patience, || Ok::<(), ()>(())).unwrap();
                        // SAFETY: loom watches over it.
                        let value = member.slots[slot].with(|value| unsafe { *value });
                        assert_eq!(value, turn * 10 + other as u32);
                    }
                }
            };
            let others: Vec<_> = (1..members)
                .map(|me| {
                    let team = Arc::clone(&team);
                    thread::spawn(move || run(me, team))
                })
                .collect();
            run(0, team);
            others.into_iter().for_each(|t| t.join().unwrap());
        });
    }

    #[test]
    fn loom_two_members_three_turns() {
        meet(2, 3);
    }

    #[test]
    fn loom_three_members_two_turns() {
        meet(3, 2);
    }
}
