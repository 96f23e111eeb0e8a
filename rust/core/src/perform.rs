//! What each kind of call does: which collective, with which roots and blocks.

use crate::buffer::{Owned, Shaped};
use crate::call::{Call, nothing};
use crate::collective::{Context, all_reduce, blocks, broadcast, gossip};
use crate::dtype::Op;
use crate::event::Output;
use crate::{Error, Kind, Result};

/// Does what a call says.
pub(crate) fn perform(context: &mut Context<'_>, call: &Call) -> Result<Output> {
    let place = |context: &Context<'_>, rank: u32| context.ranks.iter().position(|r| *r == rank).unwrap_or_default();
    let everyone: Vec<usize> = match call {
        Call::AllToAll { .. } | Call::Gather { .. } => (0..context.ranks.len()).collect(),
        _ => Vec::new(),
    };
    match call {
        Call::Barrier => all_reduce::run(context, nothing(), Op::Bor, None, None).map(|()| Output::new()),
        Call::Close => {
            all_reduce::run(context, nothing(), Op::Bor, None, None)?;
            context.part().map(|()| Output::new())
        }
        Call::AllReduce { tensor, op, coding } => {
            all_reduce::run(context, tensor.buffer, *op, coding.clone(), None).map(|()| Output::new())
        }
        Call::HostReduce { tensor, op } => all_reduce::in_host(context, tensor.buffer, *op).map(|()| Output::new()),
        Call::Reduce { tensor, dst, op } => {
            let only = place(context, *dst);
            all_reduce::run(context, tensor.buffer, *op, None, Some(only)).map(|()| Output::new())
        }
        Call::Broadcast { tensor, src } => {
            let root = place(context, *src);
            broadcast::run(context, tensor.buffer, root).map(|()| Output::new())
        }
        Call::AllGather { tensor } => blocks::all_gather(context, tensor.clone()),
        Call::ReduceScatter { tensors, op } => {
            let divisor = (*op == Op::Mean).then_some(context.ranks.len() as u32);
            blocks::reduce_scatter(context, tensors, *op, divisor).map(|mine| vec![mine])
        }
        Call::AllToAll { tensors } => {
            let outgoing: Vec<(usize, Shaped)> = tensors.iter().cloned().enumerate().collect();
            let received = blocks::exchange(context, &outgoing, &everyone)?;
            blocks::in_order(received, everyone.into_iter())
        }
        Call::Gossip { tensor, out, graph, step } => {
            let out = out.as_ref().map(|out| out.buffer);
            let result = gossip::run(context, tensor.buffer, out, graph, *step);
            result.map(|()| Output::new()).map_err(|error| context.earliest_story(error))
        }
        Call::Exchange { blocks, .. } => {
            let outgoing: Vec<(usize, Shaped)> =
                blocks.iter().map(|(to, block)| (place(context, *to), block.clone())).collect();
            let peers: Vec<usize> = outgoing.iter().map(|(peer, _)| *peer).collect();
            let received = blocks::exchange(context, &outgoing, &peers);
            let received = received.map_err(|error| context.earliest_story(error))?;
            blocks::in_order(received, peers.into_iter())
        }
        Call::Gather { tensor, dst } => {
            let dst = place(context, *dst);
            let expected = if dst == context.me { everyone } else { Vec::new() };
            context.announce()?;
            let received = blocks::exchange(context, &[(dst, tensor.clone())], &expected)?;
            context.agree()?;
            blocks::in_order(received, expected.into_iter())
        }
        Call::Scatter { tensors, src, out } => {
            let src = place(context, *src);
            let outgoing: Vec<(usize, Shaped)> = match tensors {
                Some(tensors) if src == context.me => tensors.iter().cloned().enumerate().collect(),
                _ => Vec::new(),
            };
            context.announce()?;
            let mut received = blocks::exchange(context, &outgoing, &[src])?;
            if let Some(block) = received.remove(&src) {
                deliver(context, &block, out, src)?;
            }
            context.agree()?;
            Ok(Output::new())
        }
    }
}

fn deliver(context: &Context<'_>, block: &Owned, out: &Shaped, src: usize) -> Result<()> {
    if block.shape != out.shape || block.dtype != out.buffer.dtype {
        return Err(Error::of_rank(
            Kind::Mismatch,
            context.ranks[src],
            "",
            format!(
                "scatter: rank {} sends {}{:?} to rank {}, whose out is {}{:?}; try: the same shape on both sides",
                context.ranks[src], block.dtype, block.shape, context.ranks[context.me], out.buffer.dtype, out.shape
            ),
        ));
    }
    let bytes = block.bytes();
    if !bytes.is_empty() {
        // SAFETY: shapes and types are equal, so the tensor is as long as the block.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), out.buffer.start, bytes.len()) };
    }
    Ok(())
}
