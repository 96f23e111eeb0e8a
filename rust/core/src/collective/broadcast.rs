//! broadcast: one rank's data to all.
//!
//! One rank of each host receives: the root on its own, elsewhere the member opposite to the root. Short data goes from
//! the root to each of them (a star, one delay). Long data goes along a chain of hosts, chunk by chunk, so that every
//! up-link sends it once: S bytes and the time of S, however many hosts. A sender runs ahead of a receiver that has not
//! come by no more than `Tuning::eager` bytes. On each host the receiver's neighbours then copy from its shared memory.

use offbeat_transport::outbox::Payload;

use super::staged::Staged;
use super::{Context, Stage};
use crate::Result;
use crate::buffer::Buffer;

/// Who gets the data from whom: `from` is none on the root, `to` are the members to pass it on to.
#[derive(Debug, PartialEq, Eq)]
struct Place {
    from: Option<usize>,
    to: Vec<usize>,
}

/// The places of the receivers, in the order of the hosts from the root's on.
fn place(receivers: &[usize], me: usize, short: bool) -> Place {
    let at = receivers.iter().position(|member| *member == me).unwrap_or(0);
    let rest = || receivers[1..].to_vec();
    match (short, at) {
        (true, 0) => Place { from: None, to: rest() },
        (true, _) => Place { from: Some(receivers[0]), to: Vec::new() },
        (false, at) => {
            let next = receivers.get(at + 1).copied();
            Place { from: at.checked_sub(1).map(|before| receivers[before]), to: next.into_iter().collect() }
        }
    }
}

/// Broadcasts `buffer` from `root`.
pub(crate) fn run(context: &mut Context<'_>, buffer: Buffer, root: usize) -> Result<()> {
    let layout = context.layout;
    let (host, _) = layout.seat(context.me);
    let (root_host, root_seat) = layout.seat(root);
    let hosts = layout.hosts.len();
    let receivers: Vec<usize> = (0..hosts).map(|step| layout.opposite((root_host + step) % hosts, root_seat)).collect();
    let at = (host + hosts - root_host) % hosts;
    let receiver = receivers[at];
    let short = hosts == 2 || (hosts - 1) * buffer.bytes() <= context.tuning.exchange;
    context.announce()?;
    context.look_outward(if short { 0.0 } else { at as f32 / hosts as f32 });
    if hosts > 1 && receiver == context.me {
        relay(context, buffer, place(&receivers, context.me, short))?;
    }
    if layout.hosts[host].len() > 1 {
        share(context, buffer, receiver)?;
    }
    context.agree()?;
    context.drain()
}

/// Receives the data chunk by chunk and passes it on.
fn relay(context: &mut Context<'_>, buffer: Buffer, place: Place) -> Result<()> {
    let (chunk, bytes) = (context.tuning.chunk, buffer.bytes());
    let pieces = bytes.div_ceil(chunk).max(1);
    let eager = (context.tuning.eager / chunk).max(1);
    if let Some(from) = place.from
        && pieces > eager
    {
        context.send(from, Stage::Here, 0, Payload::Empty);
    }
    // pieces may come in any order on several streams; they are passed on as they come
    for step in 0..pieces {
        let index = match place.from {
            None => step,
            Some(from) => {
                let (_, delivery) = context.receive(|| vec![from])?;
                let (index, len) = (delivery.header.index as usize, delivery.payload.len());
                let begin = index * chunk;
                if index >= pieces || len != chunk.min(bytes - begin) || delivery.header.stage != Stage::Block as u8 {
                    return Err(context.bad_frame(delivery.from, "not a piece of this broadcast"));
                }
                // SAFETY: the piece lies inside of the tensor, as checked, and nobody else touches it during the call.
                unsafe { std::ptr::copy_nonoverlapping(delivery.payload.as_ptr(), buffer.start.add(begin), len) };
                index
            }
        };
        if step == eager && pieces > eager {
            context.hear(&place.to, Stage::Here)?;
        }
        let begin = index * chunk;
        for to in &place.to {
            // SAFETY: the piece is complete and stays as it is until this call ends.
            let payload = unsafe { context.lend(buffer.start.wrapping_add(begin), chunk.min(bytes - begin)) };
            context.send(*to, Stage::Block, index, payload);
        }
    }
    Ok(())
}

/// The neighbours copy from the one that has the data.
fn share(context: &mut Context<'_>, buffer: Buffer, from: usize) -> Result<()> {
    let bytes = buffer.bytes();
    let staged = if from == context.me { Some(context.stage(buffer)?) } else { None };
    let (note, place) = (context.note, staged.as_ref().map_or(0, Staged::place));
    context.team()?.begin(&note, place as u64);
    context.meet_and_compare()?;
    let source = context.layout.seat(from).1;
    let team = context.team()?;
    if team.me() != source && bytes > 0 {
        let start = team.address(source, team.place(source) as usize, bytes)?;
        // SAFETY: the source's data is complete and stays until the next meeting; my tensor is the call's to write.
        unsafe { std::ptr::copy_nonoverlapping(start.cast_const(), buffer.start, bytes) };
    }
    context.meet()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_for_short_and_a_chain_for_long_data() {
        let receivers = [2, 4, 0];
        assert_eq!(place(&receivers, 2, true), Place { from: None, to: vec![4, 0] });
        assert_eq!(place(&receivers, 0, true), Place { from: Some(2), to: vec![] });
        assert_eq!(place(&receivers, 2, false), Place { from: None, to: vec![4] });
        assert_eq!(place(&receivers, 4, false), Place { from: Some(2), to: vec![0] });
        assert_eq!(place(&receivers, 0, false), Place { from: Some(4), to: vec![] });
    }
}
