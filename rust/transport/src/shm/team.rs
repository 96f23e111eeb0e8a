//! The members of a group on one host: their control blocks, and the meeting point that collectives are made of.
//!
//! A control block lies in its owner's arena. It has the owner's phase and two slots, used in turn by consecutive calls.
//! A slot holds the description of the call, the place of the caller's data in its arena, and room for short data.
//!
//! Why two slots are enough: a member fills a slot again two calls later, and before that it has met all others in the
//! call between; they came to that meeting after they had read everything of the first call.

use std::sync::Arc;
use std::time::Duration;

use super::arena::{Mapping, Piece};
use super::step::{Futex, Patience, Post};
use crate::error::Result;
use crate::frame::{NOTE, Note};
use crate::watchdog::Watch;

/// Room for short data in a slot.
pub const INLINE: usize = 16 << 10;

#[repr(C, align(128))]
struct Slot {
    note: Note,
    place: u64,
    data: [u8; INLINE],
}

#[repr(C)]
struct Control {
    post: Post<Futex>,
    slots: [Slot; 2],
}

/// Bytes of a control block.
pub const CONTROL: usize = size_of::<Control>();
const _: () = assert!(NOTE + 8 <= 128, "the head of a slot is one cache line pair");

/// Makes a control block ready for use, before any neighbour knows of it.
pub fn prepare(block: &Piece) {
    // SAFETY: the block is ours alone and at least CONTROL long; zero is a valid control block.
    unsafe { std::ptr::write_bytes(block.start(), 0, CONTROL.min(block.len())) };
}

/// One member of a team.
struct Seat {
    rank: u32,
    memory: Arc<Mapping>,
    control: *mut Control,
}

/// The members of a group on this host, in ascending order of rank.
pub struct Team {
    me: usize,
    seats: Vec<Seat>,
    patience: Patience,
    phase: u32,
    turn: usize,
}

// SAFETY: the pointers lead into mappings that the seats keep alive; `Team` is used by one thread at a time.
unsafe impl Send for Team {}

impl Team {
    /// A team of (rank, its memory, the offset of its control block); `me` is my place in it.
    pub fn new(me: usize, seats: Vec<(u32, Arc<Mapping>, usize)>, patience: Patience) -> Result<Self> {
        let seats = seats
            .into_iter()
            .map(|(rank, memory, offset)| {
                let control = memory.at(offset, CONTROL)?.cast();
                Ok(Seat { rank, memory, control })
            })
            .collect::<Result<_>>()?;
        Ok(Team { me, seats, patience, phase: 0, turn: 0 })
    }

    /// How many members there are.
    pub fn len(&self) -> usize {
        self.seats.len()
    }

    /// Whether I am alone.
    pub fn is_empty(&self) -> bool {
        self.seats.len() < 2
    }

    /// My place.
    pub fn me(&self) -> usize {
        self.me
    }

    /// The rank of a member.
    pub fn rank(&self, member: usize) -> u32 {
        self.seats[member].rank
    }

    /// Begins a call: describes it and says where my data is. The room for short data is returned, mine to fill until
    /// [`Team::meet`].
    pub fn begin(&mut self, note: &Note, place: u64) -> &mut [u8] {
        self.turn ^= 1;
        let slot = self.slot(self.me);
        // SAFETY: the slot is in a live mapping; nobody reads it until the next meeting (see the module's head).
        unsafe {
            (&raw mut (*slot).note).write(*note);
            (&raw mut (*slot).place).write(place);
            std::slice::from_raw_parts_mut((&raw mut (*slot).data).cast(), INLINE)
        }
    }

    fn slot(&self, member: usize) -> *mut Slot {
        let control = self.seats[member].control;
        // SAFETY: the control block lies in a mapping that the seat keeps alive.
        unsafe { &raw mut (*control).slots[self.turn] }
    }

    /// A member's description of its call; valid after the first meeting of a call.
    pub fn note(&self, member: usize) -> Note {
        // SAFETY: written before the meeting, and not again before the owner's call after the next.
        unsafe { (&raw const (*self.slot(member)).note).read() }
    }

    /// Where a member's data is in its arena.
    pub fn place(&self, member: usize) -> u64 {
        // SAFETY: as in `note`.
        unsafe { (&raw const (*self.slot(member)).place).read() }
    }

    /// A member's short data.
    pub fn inline(&self, member: usize) -> *const u8 {
        // SAFETY: only the address is computed, inside a live mapping.
        unsafe { (&raw const (*self.slot(member)).data).cast() }
    }

    /// The address of a range of a member's arena.
    pub fn address(&self, member: usize, offset: usize, len: usize) -> Result<*mut u8> {
        self.seats[member].memory.at(offset, len)
    }

    /// Waits until all members have come here: what each wrote before is visible to all.
    pub fn meet(&mut self, watch: &Watch<'_>) -> Result<()> {
        self.phase = self.phase.wrapping_add(1);
        let target = self.phase;
        // SAFETY: control blocks lie in mappings that the seats keep alive; `Post` is made of atomics.
        let post = |seat: &Seat| unsafe { &(*seat.control).post };
        post(&self.seats[self.me]).announce(target);
        for at in 0..self.seats.len() {
            if at != self.me {
                let missing = || {
                    // those that are waited for now, and those after them that have not come either
                    let late = |seat: &&Seat| post(seat).wait(target, NO_PATIENCE, || Err(())).is_err();
                    self.seats[at..].iter().filter(late).map(|s| s.rank).collect()
                };
                post(&self.seats[at]).wait(target, self.patience, || watch.check(missing))?;
            }
        }
        // one that came here before us may have given up since; its story is on its way
        while let Some(seat) = self.seats.iter().find(|seat| post(seat).has_given_up()) {
            watch.check(|| vec![seat.rank])?;
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Ends a call early, for ever: a member that comes late must not touch memory that I am about to use otherwise.
    pub fn give_up(&self) {
        let control = self.seats[self.me].control;
        // SAFETY: as in `meet`.
        unsafe { (*control).post.give_up() };
    }
}

const NO_PATIENCE: Patience = Patience { spins: 1, yields: 0, sleep: Duration::ZERO };
