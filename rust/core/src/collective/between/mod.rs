//! Reduction between hosts.
//!
//! **Exchange**, for short data: the ranks of a host sum among themselves, and every rank sends its host's sum to its
//! opposite on every other host. One delay; (n−1)·S bytes for n hosts.
//!
//! **Scatter and gather**, for long data: on every host one member carries each part of the data (`Layout::parts`), so all
//! ranks of a host talk for their share. A part is cut into chunks that the hosts own in turn. Carriers send their host's
//! sum of a chunk to its owner (scatter), which adds the hosts in ascending order and sends the result back (gather). Both
//! go on at once, chunk by chunk. 2(n−1)/n·S bytes, two delays. With two hosts there is a better way with as many bytes:
//! both send everything and both sum, in one delay.
//!
//! Steps of a rank with neighbours, for long data:
//! 1. slice by slice: meet, sum the slice of my parts over all neighbours' buffers, send the chunks in it
//! 2. fold what comes, write results into all neighbours' buffers (my parts are mine alone)
//! 3. meet
//!
//! A **codec** works between hosts only: what travels is encoded, sums are in f32, results are encoded once more, and
//! everybody (the owner too) decodes the same bytes. An exchange does the same to its sums, so that the result does not
//! depend on the way.

mod chunks;
mod scatter;
mod wire;

use offbeat_transport::pool::Block;

pub(crate) use scatter::scatter_gather;
use wire::Wire;

use super::{Context, Stage, local};
use crate::Result;
use crate::buffer::Buffer;
use crate::coding::Coding;
use crate::dtype::Op;
use crate::reduce;

/// Everyone hears every host's sum and adds them up for itself.
pub(crate) fn exchange(
    context: &mut Context<'_>,
    buffer: Buffer,
    op: Op,
    divisor: Option<u32>,
    coding: Option<Coding>,
    only: Option<usize>,
) -> Result<()> {
    let wire = Wire::new(context, buffer.dtype, op, divisor, coding);
    let (host, seat) = context.layout.seat(context.me);
    let (count, whole) = (buffer.count, 0..buffer.count);
    let mut sum = context.scratch(count * buffer.dtype.accumulator().size());
    let own = if wire.raw[host] {
        buffer.start.cast_const()
    } else {
        let sources = local::post_short(context, buffer)?;
        // SAFETY: the slots hold everyone's data until the call after the next, and the scratch has room.
        unsafe { reduce::partial(&sources, sum.as_mut_ptr(), count, buffer.dtype, op) };
        sum.as_ptr()
    };
    // SAFETY: `own` holds the host's sum in the type it is sent in.
    let own = unsafe { wire.encode(context, host, own, &whole) };
    let hosts = context.layout.hosts.len();
    for other in (0..hosts).filter(|h| *h != host) {
        let members = &context.layout.hosts[other];
        let mine = &context.layout.hosts[host];
        // every member there hears from the one opposite to it; with fewer ranks there some of us are opposite to nobody
        for (there, member) in members.iter().enumerate() {
            if there % mine.len() == seat {
                // SAFETY: an owned block of bytes.
                let payload = unsafe { context.copy(own.as_ptr(), own.len()) };
                context.send(*member, Stage::Scatter, 0, payload);
            }
        }
    }
    let mut sums: Vec<Option<Block>> = (0..hosts).map(|_| None).collect();
    sums[host] = Some(own);
    while sums.iter().any(Option::is_none) {
        let absent = |sums: &[Option<Block>]| -> Vec<usize> {
            let hosts = sums.iter().enumerate().filter(|(_, sum)| sum.is_none());
            hosts.map(|(h, _)| context.layout.opposite(h, seat)).collect()
        };
        let missing = absent(&sums);
        let (from, delivery) = context.receive(|| missing.clone())?;
        let from_host = context.layout.seat(from).0;
        let expected = wire.sum_len(from_host, &whole);
        if delivery.header.stage != Stage::Scatter as u8 || delivery.payload.len() != expected {
            return Err(context.bad_frame(delivery.from, "not the sum of its host"));
        }
        sums[from_host] = Some(delivery.payload);
    }
    if only.is_none_or(|only| only == context.me) {
        let mut acc = context.scratch(count * buffer.dtype.accumulator().size());
        for (host, sum) in sums.iter().enumerate() {
            if let Some(sum) = sum {
                // SAFETY: lengths were checked; the accumulator has room.
                unsafe { wire.fold(acc.as_mut_ptr(), host, sum.as_ptr(), &whole) };
            }
        }
        // SAFETY: the target is the caller's tensor.
        unsafe { wire.seal(context, acc.as_mut_ptr(), &[buffer.start], &whole) };
    }
    Ok(())
}
