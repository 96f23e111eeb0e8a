//! Whole blocks from rank to rank: all_gather, gather, scatter, all_to_all, reduce_scatter.
//!
//! Neighbours read blocks straight from each other's shared memory: everyone publishes a table of what it has and for
//! whom, all meet, everyone copies what is for it, and all meet again so that the memory is free. Between hosts a block is
//! a frame with its shape and frames with its pieces. In all_gather a block crosses to another host once, to the member
//! opposite, which publishes it there.

use std::collections::HashMap;

use offbeat_transport::outbox::Payload;
use offbeat_transport::pool::Block;

use super::staged::Staged;
use super::{Context, Stage};
use crate::buffer::{Buffer, Owned, Shaped};
use crate::dtype::{DType, Op};
use crate::{Error, Result, reduce};

/// A block for a neighbour, or for all of them.
struct Item {
    /// The member whose block it is.
    origin: usize,
    /// Whom it is for; none for all.
    to: Option<usize>,
    block: Shaped,
}

/// Every member's block, in the order of the members.
pub(crate) fn all_gather(context: &mut Context<'_>, mine: Shaped) -> Result<Vec<Owned>> {
    let layout = context.layout;
    let (host, seat) = layout.seat(context.me);
    let others = || (0..layout.hosts.len()).filter(move |other| *other != host);
    for other in others() {
        send_block(context, layout.opposite(other, seat), &mine);
    }
    let expected: Vec<usize> = others()
        .flat_map(|other| layout.hosts[other].iter().enumerate())
        .filter(|(their_seat, _)| layout.opposite(host, *their_seat) == context.me)
        .map(|(_, member)| *member)
        .collect();
    context.compare_neighbours()?;
    context.look_outward(0.0);
    let mut blocks = receive_blocks(context, &expected)?;
    if layout.hosts[host].len() > 1 {
        let mut items = vec![Item { origin: context.me, to: None, block: mine.clone() }];
        for (origin, block) in &mut blocks {
            let shaped = Shaped { shape: block.shape.clone(), buffer: block.buffer() };
            items.push(Item { origin: *origin, to: None, block: shaped });
        }
        blocks.extend(share(context, &items)?);
    }
    blocks.insert(context.me, copy_of(&mine));
    context.drain()?;
    in_order(blocks, 0..context.ranks.len())
}

/// Sends blocks to members and receives one from each of `expected`; a block for myself is copied.
pub(crate) fn exchange(
    context: &mut Context<'_>,
    outgoing: &[(usize, Shaped)],
    expected: &[usize],
) -> Result<HashMap<usize, Owned>> {
    let layout = context.layout;
    let (host, _) = layout.seat(context.me);
    let neighbour = |member: usize| layout.hosts[host].contains(&member);
    let mut items = Vec::new();
    let mut blocks = HashMap::new();
    for (to, block) in outgoing {
        if *to == context.me {
            blocks.insert(context.me, copy_of(block));
        } else if neighbour(*to) {
            items.push(Item { origin: context.me, to: Some(*to), block: block.clone() });
        } else {
            send_block(context, *to, block);
        }
    }
    if layout.hosts[host].len() > 1 {
        blocks.extend(share(context, &items)?);
    }
    let remote: Vec<usize> = expected.iter().copied().filter(|member| !neighbour(*member)).collect();
    blocks.extend(receive_blocks(context, &remote)?);
    if let Some(absent) = expected.iter().find(|member| !blocks.contains_key(member)) {
        return Err(context.bad_frame(context.ranks[*absent], "it has no block for us"));
    }
    context.drain()?;
    Ok(blocks)
}

/// One block from each of some members, in their order.
pub(crate) fn in_order(mut blocks: HashMap<usize, Owned>, members: impl Iterator<Item = usize>) -> Result<Vec<Owned>> {
    members
        .map(|m| blocks.remove(&m).ok_or_else(|| Error::io("gathering", format!("no block of member {m}"))))
        .collect()
}

/// The sum of all members' blocks for me. Hosts sum among themselves first: one block crosses for each pair of a host and
/// a member elsewhere.
pub(crate) fn reduce_scatter(
    context: &mut Context<'_>,
    blocks: &[Shaped],
    op: Op,
    divisor: Option<u32>,
) -> Result<Owned> {
    let layout = context.layout;
    let (host, seat) = layout.seat(context.me);
    let mine = &blocks[context.me];
    let dtype = mine.buffer.dtype;
    let acc_size = dtype.accumulator().size();
    let neighbours = layout.hosts[host].len();
    // one rank on a host sends its values as they are; several send accumulators
    let sent_as = |host: usize| if layout.hosts[host].len() == 1 { dtype } else { dtype.accumulator() };

    let buffers: Vec<Buffer> = blocks.iter().map(|block| block.buffer).collect();
    let staged = if neighbours > 1 { Some(context.stage_all(&buffers)?) } else { None };
    let bases: Vec<usize> = match &staged {
        None => Vec::new(),
        Some((staged, _)) => {
            let note = context.note;
            context.team()?.begin(&note, staged.place() as u64);
            context.meet_and_compare()?;
            let team = context.team()?;
            (0..team.len()).map(|member| team.place(member) as usize).collect()
        }
    };
    let mut own: Option<Block> = None;
    for (to, block) in blocks.iter().enumerate() {
        let (to_host, to_seat) = layout.seat(to);
        if layout.opposite(host, to_seat) != context.me || (to_host == host && to != context.me) {
            continue;
        }
        let count = block.buffer.count;
        let mut sum = context.scratch(count * acc_size);
        // SAFETY: neighbours' blocks stay as they are until the next meeting; the sum has room for accumulators.
        unsafe {
            if let Some((_, starts)) = &staged {
                let team = context.team()?;
                let address = |(member, base): (usize, &usize)| {
                    team.address(member, base + starts[to], block.buffer.bytes()).map(<*mut u8>::cast_const)
                };
                let sources = bases.iter().enumerate().map(address).collect::<Result<Vec<_>>>()?;
                reduce::partial(&sources, sum.as_mut_ptr(), count, dtype, op);
            } else if to == context.me {
                reduce::widen(block.buffer.start, sum.as_mut_ptr(), count, dtype);
            } else {
                std::ptr::copy_nonoverlapping(block.buffer.start.cast_const(), sum.as_mut_ptr(), block.buffer.bytes());
            }
        }
        if to == context.me {
            own = Some(sum);
        } else {
            send_pieces(context, to, Stage::Scatter, &sum[..count * sent_as(host).size()]);
        }
    }
    if neighbours > 1 {
        context.meet()?;
    }
    let count = mine.buffer.count;
    let hosts = layout.hosts.len();
    let lens: HashMap<usize, usize> = (0..hosts)
        .filter(|other| *other != host)
        .map(|other| (layout.opposite(other, seat), count * sent_as(other).size()))
        .collect();
    let sums = receive_pieces(context, Stage::Scatter, &lens)?;
    let mut acc = context.scratch(count * acc_size);
    for other in 0..hosts {
        let bytes = match &own {
            Some(own) if other == host => &**own,
            _ => sums.get(&layout.opposite(other, seat)).map_or(&[][..], Vec::as_slice),
        };
        let kind = if other == host { dtype.accumulator() } else { sent_as(other) };
        // SAFETY: every sum has the length of `count` elements of its kind.
        unsafe {
            match other {
                0 => reduce::widen(bytes.as_ptr(), acc.as_mut_ptr(), count, kind),
                _ => reduce::fold(acc.as_mut_ptr(), bytes.as_ptr(), count, kind, op),
            }
        }
    }
    let mut result = Owned::new(dtype, mine.shape.clone());
    // SAFETY: both hold `count` elements.
    unsafe { reduce::seal(acc.as_mut_ptr(), &[result.buffer().start], count, dtype, divisor) };
    context.drain()?;
    Ok(result)
}

fn copy_of(block: &Shaped) -> Owned {
    let mut copy = Owned::new(block.buffer.dtype, block.shape.clone());
    if block.buffer.bytes() > 0 {
        // SAFETY: both are `bytes` long; the copy is fresh memory.
        unsafe {
            let (from, to) = (block.buffer.start.cast_const(), copy.bytes_mut().as_mut_ptr());
            std::ptr::copy_nonoverlapping(from, to, block.buffer.bytes());
        }
    }
    copy
}

/// A shape as it travels: dtype, number of dimensions, dimensions.
fn encode_shape(block: &Shaped) -> Vec<u8> {
    let mut bytes = vec![block.buffer.dtype as u8, block.shape.len() as u8];
    block.shape.iter().for_each(|dimension| bytes.extend(dimension.to_le_bytes()));
    bytes
}

/// Reads a shape that travelled, if it is one of a tensor that could be.
pub fn decode_shape(bytes: &[u8]) -> Option<(DType, Vec<u64>)> {
    let (head, dimensions) = bytes.split_at_checked(2)?;
    let dtype = DType::from_code(head[0])?;
    if dimensions.len() != usize::from(head[1]) * 8 {
        return None;
    }
    let word = |chunk: &[u8]| chunk.try_into().map(u64::from_le_bytes).ok();
    let shape = dimensions.chunks_exact(8).map(word).collect::<Option<Vec<u64>>>()?;
    // a product that overflows cannot be a tensor, and must not become a small allocation
    let count = shape.iter().try_fold(dtype.size() as u64, |product, d| product.checked_mul(*d))?;
    (count <= isize::MAX as u64).then_some((dtype, shape))
}

fn send_block(context: &mut Context<'_>, to: usize, block: &Shaped) {
    let shape = encode_shape(block);
    // SAFETY: `shape` is a slice of ours.
    let payload = unsafe { context.copy(shape.as_ptr(), shape.len()) };
    context.send(to, Stage::Shape, 0, payload);
    let piece = context.tuning.chunk;
    let bytes = block.buffer.bytes();
    for (index, from) in (0..bytes).step_by(piece).enumerate() {
        let start = block.buffer.start.wrapping_add(from);
        // SAFETY: the block is an input of this call, which ends after all that was lent has left.
        let payload = unsafe { context.lend(start, piece.min(bytes - from)) };
        context.send(to, Stage::Block, index, payload);
    }
}

fn send_pieces(context: &Context<'_>, to: usize, stage: Stage, bytes: &[u8]) {
    if bytes.is_empty() {
        context.send(to, stage, 0, Payload::Empty);
    }
    for (index, piece) in bytes.chunks(context.tuning.chunk).enumerate() {
        // SAFETY: `piece` is a slice.
        let payload = unsafe { context.copy(piece.as_ptr(), piece.len()) };
        context.send(to, stage, index, payload);
    }
}

/// Receives from each member the number of bytes that it must send.
fn receive_pieces(
    context: &mut Context<'_>,
    stage: Stage,
    lens: &HashMap<usize, usize>,
) -> Result<HashMap<usize, Vec<u8>>> {
    let mut done: HashMap<usize, Vec<u8>> = lens.iter().map(|(member, len)| (*member, vec![0; *len])).collect();
    let chunk = context.tuning.chunk;
    let mut left: HashMap<usize, usize> = lens.iter().map(|(m, len)| (*m, len.div_ceil(chunk).max(1))).collect();
    while !left.is_empty() {
        let missing: Vec<usize> = left.keys().copied().collect();
        let (from, delivery) = context.receive(|| missing.clone())?;
        let begin = delivery.header.index as usize * chunk;
        let room = done.get_mut(&from).and_then(|bytes| bytes.get_mut(begin..begin + delivery.payload.len()));
        let (Some(room), Some(count), true) = (room, left.get_mut(&from), delivery.header.stage == stage as u8) else {
            return Err(context.bad_frame(delivery.from, "a piece outside of its block"));
        };
        room.copy_from_slice(&delivery.payload);
        *count -= 1;
        if *count == 0 {
            left.remove(&from);
        }
    }
    Ok(done)
}

/// A block that is arriving; pieces may overtake the shape on another stream.
#[derive(Default)]
struct Arriving {
    block: Option<Owned>,
    early: Vec<(usize, Block)>,
    filled: usize,
}

/// Receives one block from each of some members on other hosts.
fn receive_blocks(context: &mut Context<'_>, from: &[usize]) -> Result<HashMap<usize, Owned>> {
    let mut arriving: HashMap<usize, Arriving> = from.iter().map(|member| (*member, Arriving::default())).collect();
    let mut done = HashMap::new();
    let piece = context.tuning.chunk;
    while !arriving.is_empty() {
        let missing: Vec<usize> = arriving.keys().copied().collect();
        let (from, delivery) = context.receive(|| missing.clone())?;
        let rank = delivery.from;
        let Some(state) = arriving.get_mut(&from) else {
            return Err(context.bad_frame(rank, "a block that nobody waits for"));
        };
        if delivery.header.stage == Stage::Shape as u8 {
            let Some((dtype, shape)) = decode_shape(&delivery.payload) else {
                return Err(context.bad_frame(rank, "an unreadable shape"));
            };
            state.block = Some(Owned::new(dtype, shape));
        } else {
            state.early.push((delivery.header.index as usize * piece, delivery.payload));
        }
        let Some(block) = &mut state.block else { continue };
        for (begin, payload) in state.early.drain(..) {
            match block.bytes_mut().get_mut(begin..begin + payload.len()) {
                Some(room) => room.copy_from_slice(&payload),
                None => return Err(context.bad_frame(rank, "a piece outside of its block")),
            }
            state.filled += payload.len();
        }
        if state.filled == block.bytes().len()
            && let Some(Arriving { block: Some(block), .. }) = arriving.remove(&from)
        {
            done.insert(from, block);
        }
    }
    Ok(done)
}

/// Publishes blocks to the neighbours and takes those that are for me.
fn share(context: &mut Context<'_>, items: &[Item]) -> Result<HashMap<usize, Owned>> {
    let mut staged: Vec<Staged> = Vec::new();
    let mut table: Vec<u8> = Vec::new();
    for item in items {
        let block = context.stage(item.block.buffer)?;
        let (place, bytes) = (block.place() as u64, item.block.buffer.bytes() as u64);
        staged.push(block);
        let shape = encode_shape(&item.block);
        let to = item.to.map_or(u64::MAX, |to| to as u64);
        for word in [item.origin as u64, to, place, bytes, shape.len() as u64] {
            table.extend(word.to_le_bytes());
        }
        table.extend(&shape);
    }
    let published = context.mesh.arena().allocate(8 + table.len())?;
    // SAFETY: the piece is fresh and has room for the length and the table.
    unsafe {
        published.start().cast::<u64>().write(table.len() as u64);
        std::ptr::copy_nonoverlapping(table.as_ptr(), published.start().add(8), table.len());
    }
    let note = context.note;
    context.team()?.begin(&note, published.offset() as u64);
    context.meet_and_compare()?;
    let (me, ranks) = (context.me, context.ranks);
    let mut blocks = HashMap::new();
    let team = context.team()?;
    let neighbours: Vec<usize> = (0..team.len()).filter(|member| *member != team.me()).collect();
    for neighbour in neighbours {
        let base = team.place(neighbour) as usize;
        // SAFETY: a published table stays as it is until the next meeting.
        let table = unsafe {
            let len = team.address(neighbour, base, 8)?.cast::<u64>().read() as usize;
            std::slice::from_raw_parts(team.address(neighbour, base + 8, len)?.cast_const(), len)
        };
        let unreadable =
            || Error::io("sharing blocks", format!("rank {} has an unreadable table", team.rank(neighbour)));
        let mut rest = table;
        while !rest.is_empty() {
            let (words, tail) = rest.split_at_checked(40).ok_or_else(unreadable)?;
            let word = |at: usize| words[at * 8..at * 8 + 8].try_into().map_or(0, u64::from_le_bytes) as usize;
            let (shape, tail) = tail.split_at_checked(word(4)).ok_or_else(unreadable)?;
            rest = tail;
            if word(1) != me && word(1) != usize::MAX {
                continue;
            }
            let (dtype, shape) = decode_shape(shape).ok_or_else(unreadable)?;
            let mut block = Owned::new(dtype, shape);
            if word(0) >= ranks.len() || block.bytes().len() != word(3) {
                return Err(unreadable());
            }
            let from = team.address(neighbour, word(2), word(3))?;
            // SAFETY: the block stays as it is until the next meeting; lengths were compared.
            unsafe { std::ptr::copy_nonoverlapping(from.cast_const(), block.bytes_mut().as_mut_ptr(), word(3)) };
            blocks.insert(word(0), block);
        }
    }
    context.meet()?;
    drop(staged);
    Ok(blocks)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_shape_from_garbage_is_none_or_sane(bytes in proptest::collection::vec(any::<u8>(), 0..40)) {
            if let Some((dtype, shape)) = decode_shape(&bytes) {
                let count: u64 = shape.iter().product();
                prop_assert!(count.checked_mul(dtype.size() as u64).is_some());
            }
        }
    }

    #[test]
    fn an_enormous_shape_is_refused() {
        let mut bytes = vec![DType::F32 as u8, 2];
        bytes.extend((1u64 << 40).to_le_bytes().repeat(2));
        assert_eq!(decode_shape(&bytes), None);
    }
}
