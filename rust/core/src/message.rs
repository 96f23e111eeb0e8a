//! send and recv: messages between two ranks, matched by (sender, tag) in the order in which they were sent.
//!
//! A short message travels at once and waits at the receiver. A long one is offered first: between neighbours the receiver
//! copies it out of the sender's shared memory, between hosts it asks for the pieces. So a long message never waits in the
//! receiver's memory, and `send` returns when the receiver has it, or has asked for it and the kernel has the bytes.

use std::sync::atomic::{AtomicU64, Ordering};

use offbeat_transport::frame::{FrameKind, Header};
use offbeat_transport::inbox::{Channel, Delivery};
use offbeat_transport::mesh::Mesh;
use offbeat_transport::outbox::{Outgoing, Sends};
use offbeat_transport::shm::arena::Piece;
use offbeat_transport::watchdog::Watch;

use crate::buffer::Shaped;
use crate::config::Tuning;
use crate::describe::{CallKind, Description};
use crate::{Error, Kind, Result};

/// The group number under which messages ask for a verdict; no group has it.
pub(crate) const MESSAGES: u64 = u64::MAX;

static NUMBER: AtomicU64 = AtomicU64::new(1);

fn describe(block: &Shaped) -> Description {
    Description::new(CallKind::Message).dtype(block.buffer.dtype).shape(&block.shape)
}

/// Sends `block` to rank `to`.
pub(crate) fn send(mesh: &Mesh, tuning: Tuning, to: u32, tag: u64, block: &Shaped, watch: &Watch<'_>) -> Result<()> {
    watch.check(|| vec![to])?;
    let bytes = block.buffer.bytes();
    let header = Header { group: tag, note: describe(block).encode(), ..Header::bare(FrameKind::Message) };
    if bytes <= tuning.eager {
        // SAFETY: the block is the caller's, readable during the call.
        let copy = unsafe { std::slice::from_raw_parts(block.buffer.start.cast_const(), bytes) };
        mesh.tell(to, header, if bytes == 0 { &[] } else { copy });
        return Ok(());
    }
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let answers = mesh.board().open(Channel::Outgoing(to, number));
    let mut staging: Option<Piece> = None;
    if mesh.memory_of(to).is_some() {
        // a copy even of what is in shared memory already: the receiver may come for it after we have given up
        let piece = staging.insert(mesh.arena().allocate(bytes)?);
        // SAFETY: the piece is fresh and as long as the block.
        unsafe { std::ptr::copy_nonoverlapping(block.buffer.start.cast_const(), piece.start(), bytes) };
    }
    let place = staging.as_ref().map_or(u64::MAX, |piece| piece.offset() as u64);
    let offer = Header { kind: FrameKind::Offer, sequence: number, ..header };
    mesh.tell(to, offer, &place.to_le_bytes());
    let answer = answers.next(watch, || vec![to]).inspect_err(|_| {
        // the offer stands, and with it the memory
        std::mem::forget(staging.take());
    })?;
    if !answer.payload.is_empty() {
        return Err(Error::from_bytes(&answer.payload)?);
    }
    if staging.is_some() {
        return Ok(());
    }
    let mut sends = Sends::default();
    for (index, from) in (0..bytes).step_by(tuning.chunk).enumerate() {
        let start = block.buffer.start.wrapping_add(from).cast_const();
        // SAFETY: the block is the caller's, unchanged until all that was lent has left.
        let payload = unsafe { sends.lend(start, tuning.chunk.min(bytes - from)) };
        let header = Header { kind: FrameKind::Piece, index: index as u32, ..offer };
        mesh.send(to, Outgoing { header, payload });
    }
    sends.wait(watch)
}

/// Receives into `block` from rank `from`.
pub(crate) fn recv(mesh: &Mesh, tuning: Tuning, from: u32, tag: u64, block: &Shaped, watch: &Watch<'_>) -> Result<()> {
    let delivery = mesh.board().open(Channel::Mail(from, tag)).next(watch, || vec![from])?;
    let number = delivery.header.sequence;
    let answer = |kind: FrameKind, story: &[u8]| {
        mesh.tell(from, Header { sequence: number, ..Header::bare(kind) }, story);
    };
    let (sent, expected) = (Description::decode(&delivery.header.note), describe(block));
    let offered = delivery.header.kind == FrameKind::Offer;
    if sent != expected {
        let roster = mesh.roster();
        let message = format!(
            "{} sent {sent} under tag {tag} and {} receives {expected}; try: the same shape and type on both sides",
            roster.card(from).name(),
            roster.card(mesh.me()).name()
        );
        let error = Error::of_rank(Kind::Mismatch, from, &roster.card(from).host, message);
        if offered {
            answer(FrameKind::Taken, &error.to_bytes());
        }
        return Err(error);
    }
    if !offered {
        return copy_out(&delivery, 0, block);
    }
    let place = (*delivery.payload).try_into().map_or(u64::MAX, u64::from_le_bytes);
    let bytes = block.buffer.bytes();
    if let (Some((memory, _)), true) = (mesh.memory_of(from), place != u64::MAX) {
        let start = memory.at(place as usize, bytes)?;
        // SAFETY: the sender keeps its block as it is until it is told that it was taken.
        unsafe { std::ptr::copy_nonoverlapping(start.cast_const(), block.buffer.start, bytes) };
        answer(FrameKind::Taken, &[]);
        return Ok(());
    }
    let pieces = mesh.board().open(Channel::Incoming(from, number));
    answer(FrameKind::Accept, &[]);
    for _ in 0..bytes.div_ceil(tuning.chunk) {
        let piece = pieces.next(watch, || vec![from])?;
        copy_out(&piece, piece.header.index as usize * tuning.chunk, block)?;
    }
    Ok(())
}

fn copy_out(delivery: &Delivery, begin: usize, block: &Shaped) -> Result<()> {
    let len = delivery.payload.len();
    if begin + len > block.buffer.bytes() {
        return Err(Error::new(Kind::BadFrame, format!("rank {} sent more than it announced", delivery.from)));
    }
    if len > 0 {
        // SAFETY: the range lies inside of the caller's block, as checked.
        unsafe { std::ptr::copy_nonoverlapping(delivery.payload.as_ptr(), block.buffer.start.add(begin), len) };
    }
    Ok(())
}
