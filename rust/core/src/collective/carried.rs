//! What a rank does for its host where data crosses between hosts: it knows where its neighbours' tensors are, sums the parts
//! that it carries over them, and puts results there.

use std::ops::Range;

use offbeat_transport::pool::Block;

use super::Context;
use crate::Result;
use crate::buffer::Buffer;
use crate::dtype::Op;
use crate::reduce;

/// The parts that a rank carries. Without neighbours its own data is its host's sum.
pub(super) struct Carried {
    own: Buffer,
    /// Where results go: the tensor, or its staged copy, of every member of my host.
    visible: Vec<*mut u8>,
    /// My host's sums of the elements that I carry; none where my data is the sum.
    sums: Option<Sums>,
}

/// Accumulators for the elements from `first` on.
struct Sums {
    start: *mut u8,
    first: usize,
    _memory: Block,
}

impl Carried {
    /// Without neighbours: of data that is summed, into a tensor for the result, which is often the same.
    pub(super) fn new(own: Buffer, target: Buffer) -> Self {
        Carried { own, visible: vec![target.start], sums: None }
    }

    /// Meets the neighbours, with my data at a place of my arena, and learns where theirs is. These are what I carry.
    pub(super) fn enter<'a>(
        &mut self,
        context: &mut Context<'_>,
        place: usize,
        ranges: impl Iterator<Item = &'a Range<usize>> + Clone,
    ) -> Result<()> {
        let note = context.note;
        context.team()?.begin(&note, place as u64);
        context.meet_and_compare()?;
        let team = context.team()?;
        let bytes = self.own.bytes();
        let address = |member| team.address(member, team.place(member) as usize, bytes);
        self.visible = (0..team.len()).map(address).collect::<Result<_>>()?;
        let first = ranges.clone().map(|range| range.start).min().unwrap_or(0);
        let end = ranges.map(|range| range.end).max().unwrap_or(0);
        let mut memory = context.scratch((end - first) * self.own.dtype.accumulator().size());
        self.sums = Some(Sums { start: memory.as_mut_ptr(), first, _memory: memory });
        Ok(())
    }

    /// Whether sums have memory of their own, and do not lie in my data.
    pub(super) fn has_sums(&self) -> bool {
        self.sums.is_some()
    }

    /// How many members' tensors there are.
    pub(super) fn seats(&self) -> usize {
        self.visible.len()
    }

    /// Where a range is in the tensor of a seat.
    pub(super) fn at(&self, seat: usize, range: &Range<usize>) -> *mut u8 {
        self.visible[seat].wrapping_add(range.start * self.own.dtype.size())
    }

    /// The addresses of a range in all tensors.
    pub(super) fn places(&self, range: &Range<usize>) -> Vec<*mut u8> {
        (0..self.seats()).map(|seat| self.at(seat, range)).collect()
    }

    /// My host's sum of a range that I carry, in the type that it is sent in.
    pub(super) fn sum_of(&self, range: &Range<usize>) -> *mut u8 {
        match &self.sums {
            None => self.own.at(range.start),
            Some(sums) => {
                let size = self.own.dtype.accumulator().size();
                sums.start.wrapping_add((range.start - sums.first) * size)
            }
        }
    }

    /// Sums a range that I carry over all neighbours.
    ///
    /// # Safety
    /// They have met with this range in place, what I carry is mine alone since, and its sum has not been sent.
    pub(super) unsafe fn sum_up(&self, range: &Range<usize>, op: Op) {
        let sources: Vec<*const u8> = self.places(range).into_iter().map(<*mut u8>::cast_const).collect();
        // SAFETY: the caller's promise; the sums have room for all that I carry.
        unsafe { reduce::partial(&sources, self.sum_of(range), range.len(), self.own.dtype, op) };
    }
}

/// Members in ascending order, each once.
pub(super) fn each_once(mut members: Vec<usize>) -> Vec<usize> {
    members.sort_unstable();
    members.dedup();
    members
}
