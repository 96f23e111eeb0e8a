//! Reduction among the ranks of one host, in shared memory.
//!
//! Short data lies in the members' slots: they meet once, and everyone sums everything for itself.
//!
//! Long data is reduced where it lies. After the members have met, each owns a share of the elements: it reads that share
//! from every member's buffer, sums, and writes the result back into all of them; nobody else touches that share. They
//! meet again, and are done. Nothing is sent, and every byte is read once and written once.
//!
//! ```text
//!            share 0   share 1
//! buffer 0  [=======] [.......]      member 0 reads and writes the columns "=",
//! buffer 1  [=======] [.......]      member 1 the columns "."
//! ```
//! A tensor outside of shared memory is staged: its owner copies a segment in, all meet, reduce, and the owner copies the
//! result out. Two halves of a staging area are used in turn, so that one meeting serves both the end of a segment and the
//! beginning of the next.

use offbeat_transport::shm::arena::Piece;

use super::Context;
use crate::Result;
use crate::buffer::Buffer;
use crate::dtype::Op;
use crate::reduce;
use crate::topology::share;

/// Set in a place that is a staging area and not the tensor itself.
const STAGED: u64 = 1 << 63;
/// Shares begin at multiples of this many bytes, so that no two members write to one cache line.
const LINE: usize = 128;

/// Reduces `buffer` over the team. The result goes to every member, or to one of them (a place in the team).
pub(crate) fn all_reduce(
    context: &mut Context<'_>,
    buffer: Buffer,
    op: Op,
    divisor: Option<u32>,
    only: Option<usize>,
) -> Result<()> {
    if buffer.bytes() <= context.tuning.inline {
        return short(context, buffer, op, divisor, only);
    }
    // whole lines, so that both halves of a staging area are aligned to every type
    let segment_bytes = (context.tuning.segment / LINE).max(1) * LINE;
    let (staging, place): (Option<Piece>, u64) = match context.place_of(buffer) {
        Some(place) => (None, place as u64),
        None => {
            let piece = context.mesh.arena().allocate(2 * segment_bytes)?;
            let place = piece.offset() as u64 | STAGED;
            (Some(piece), place)
        }
    };
    let size = buffer.dtype.size();
    let segment = segment_bytes / size;
    let copy_in = |range: std::ops::Range<usize>, half: usize| {
        if let Some(piece) = &staging {
            // SAFETY: the half is ours until the next meeting and holds a segment; the tensor is the caller's to lend.
            unsafe {
                let to = piece.start().add(half * segment_bytes);
                std::ptr::copy_nonoverlapping(buffer.at(range.start), to, range.len() * size);
            }
        }
    };
    let copy_out = |range: std::ops::Range<usize>, half: usize| {
        if let Some(piece) = &staging {
            // SAFETY: all members have met since they wrote to this half.
            unsafe {
                let from = piece.start().add(half * segment_bytes);
                std::ptr::copy_nonoverlapping(from, buffer.at(range.start), range.len() * size);
            }
        }
    };

    copy_in(0..segment.min(buffer.count), 0);
    let note = context.note;
    context.team()?.begin(&note, place);
    context.meet_and_compare()?;

    let team = context.team()?;
    let (me, members) = (team.me(), team.len());
    let places: Vec<u64> = (0..members).map(|member| team.place(member)).collect();
    // when every tensor is in shared memory there is nothing to stage and one segment is enough
    let segment = if places.iter().any(|place| place & STAGED != 0) { segment } else { buffer.count };
    let receives = |member: usize| only.is_none_or(|only| only == member);
    let mut starts = vec![std::ptr::null_mut::<u8>(); members];
    let mut targets = Vec::with_capacity(members);
    let mut from = 0;
    while from < buffer.count {
        let range = from..(from + segment).min(buffer.count);
        let half = (from / segment) % 2;
        let mine = share(range.len(), members, me, LINE / size);
        let team = context.team()?;
        for (member, place) in places.iter().enumerate() {
            let offset = (place & !STAGED) as usize;
            let begin = if place & STAGED != 0 { offset + half * segment_bytes } else { offset + range.start * size };
            starts[member] = team.address(member, begin, range.len() * size)?.wrapping_add(mine.start * size);
        }
        targets.clear();
        targets.extend(starts.iter().enumerate().filter(|(member, _)| receives(*member)).map(|(_, start)| *start));
        let sources: Vec<*const u8> = starts.iter().map(|start| start.cast_const()).collect();
        // SAFETY: all members have met with their data in place, and this share is mine alone until the next meeting.
        unsafe { reduce::reduce(&sources, &targets, mine.len(), buffer.dtype, op, divisor) };
        let next = range.end..(range.end + segment).min(buffer.count);
        copy_in(next, 1 - half);
        context.meet()?;
        if receives(me) {
            copy_out(range.clone(), half);
        }
        from = range.end;
    }
    Ok(())
}

fn short(context: &mut Context<'_>, buffer: Buffer, op: Op, divisor: Option<u32>, only: Option<usize>) -> Result<()> {
    let sources = post_short(context, buffer)?;
    let team = context.team()?;
    if only.is_none_or(|only| only == team.me()) {
        // SAFETY: the slots hold everyone's data until the call after the next; the target is the caller's tensor.
        unsafe { reduce::reduce(&sources, &[buffer.start], buffer.count, buffer.dtype, op, divisor) };
    }
    Ok(())
}

/// Puts short data into my slot, meets, and gives the addresses of everyone's.
pub(crate) fn post_short(context: &mut Context<'_>, buffer: Buffer) -> Result<Vec<*const u8>> {
    let note = context.note;
    let team = context.team()?;
    let room = team.begin(&note, 0);
    if buffer.bytes() > 0 {
        // SAFETY: the slot is ours until the meeting and has room; the tensor is readable.
        unsafe { std::ptr::copy_nonoverlapping(buffer.start, room.as_mut_ptr(), buffer.bytes()) };
    }
    context.meet_and_compare()?;
    let team = context.team()?;
    Ok((0..team.len()).map(|member| team.inline(member)).collect())
}
