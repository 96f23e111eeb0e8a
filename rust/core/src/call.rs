//! A call as a value: what to do, on what. Checked and described before anybody is bothered with it.

use crate::buffer::{Buffer, Shaped};
use crate::codec::Codec;
use crate::coding::Coding;
use crate::describe::{CallKind, Description};
use crate::dtype::{DType, Op};
use crate::graph::Graph;
use crate::{Error, Result};

/// A collective call. `root`, `dst` and `src` are global ranks.
pub enum Call {
    /// Reduce over all ranks, in place.
    AllReduce {
        /// Input and output.
        tensor: Shaped,
        /// The operation.
        op: Op,
        /// How it is encoded between hosts.
        coding: Option<Coding>,
    },
    /// Reduce over the ranks of each host, in place; nothing crosses between hosts.
    HostReduce {
        /// Input and output.
        tensor: Shaped,
        /// The operation.
        op: Op,
    },
    /// Reduce to one rank, in place there.
    Reduce {
        /// Input, and output on `dst`.
        tensor: Shaped,
        /// Who gets the result.
        dst: u32,
        /// The operation.
        op: Op,
    },
    /// One rank's data to all.
    Broadcast {
        /// Input on `src`, output elsewhere.
        tensor: Shaped,
        /// Whose data.
        src: u32,
    },
    /// Everyone's tensor to everyone.
    AllGather {
        /// Mine.
        tensor: Shaped,
    },
    /// Everyone's tensor to one rank.
    Gather {
        /// Mine.
        tensor: Shaped,
        /// Who gets them.
        dst: u32,
    },
    /// One tensor of a rank's list to each.
    Scatter {
        /// On `src`, one for each rank.
        tensors: Option<Vec<Shaped>>,
        /// Whose list.
        src: u32,
        /// Where mine goes.
        out: Shaped,
    },
    /// The sum of everyone's tensor for me.
    ReduceScatter {
        /// One for each rank.
        tensors: Vec<Shaped>,
        /// The operation.
        op: Op,
    },
    /// A tensor from each rank to each rank.
    AllToAll {
        /// One for each rank.
        tensors: Vec<Shaped>,
    },
    /// The mean with the peers of a step, weighted as the graph says; hosts average among their ranks first.
    Gossip {
        /// Input, and output unless there is another.
        tensor: Shaped,
        /// Where the result goes, if the input is to stay as it is.
        out: Option<Shaped>,
        /// Who averages with whom; its nodes are the group's hosts.
        graph: Graph,
        /// The step, which decides who the peers are.
        step: u64,
    },
    /// A tensor to each of some ranks, and one from each of them, which do the same: the tensors that came, in this order.
    Exchange {
        /// What goes to whom. Several may get the same memory.
        blocks: Vec<(u32, Shaped)>,
        /// The step, so that ranks that are in different ones find out.
        step: u64,
    },
    /// Wait for all.
    Barrier,
    /// The last call of a group: wait for all, and give back what it holds.
    Close,
}

impl Call {
    /// Checks the call against its group; nothing has been sent yet.
    pub fn check(&self, ranks: &[u32], me: u32) -> Result<()> {
        let member = |rank: u32| match ranks.contains(&rank) {
            true => Ok(()),
            false => Err(Error::invalid(format!(
                "rank {rank} is not in the group {ranks:?}; try: a global rank of a member"
            ))),
        };
        let one_each = |tensors: &[Shaped]| match tensors.len() == ranks.len() {
            true => Ok(()),
            false => Err(Error::invalid(format!(
                "{} tensors for {} ranks; try: one tensor for each rank of the group",
                tensors.len(),
                ranks.len()
            ))),
        };
        match self {
            Call::AllReduce { tensor, op, coding } => {
                op.check(tensor.buffer.dtype)?;
                coding.as_ref().map_or(Ok(()), |coding| check_codec(coding.codec, tensor.buffer.dtype, *op))
            }
            Call::HostReduce { tensor, op } => op.check(tensor.buffer.dtype),
            Call::Reduce { tensor, dst, op } => {
                op.check(tensor.buffer.dtype)?;
                member(*dst)
            }
            Call::Broadcast { src, .. } => member(*src),
            Call::Gather { dst, .. } => member(*dst),
            Call::Scatter { tensors, src, out } => {
                member(*src)?;
                match tensors {
                    Some(tensors) if me == *src => {
                        one_each(tensors)?;
                        one_dtype(tensors.iter().chain([out]))
                    }
                    None if me == *src => Err(Error::invalid(
                        "scatter without tensors on src; try: a list of one tensor for each rank there",
                    )),
                    _ => Ok(()),
                }
            }
            Call::ReduceScatter { tensors, op } => {
                one_each(tensors)?;
                one_dtype(tensors.iter())?;
                tensors.iter().try_for_each(|tensor| op.check(tensor.buffer.dtype))
            }
            Call::AllToAll { tensors } => one_each(tensors).and(one_dtype(tensors.iter())),
            Call::Gossip { tensor, out, .. } => check_gossip(tensor, out.as_ref()),
            Call::Exchange { blocks, .. } => {
                blocks.iter().try_for_each(|(to, _)| member(*to))?;
                one_dtype(blocks.iter().map(|(_, block)| block))?;
                let again = |at: usize| blocks[..at].iter().any(|(to, _)| *to == blocks[at].0);
                match (0..blocks.len()).find(|at| blocks[*at].0 == me || again(*at)) {
                    None => Ok(()),
                    Some(at) => Err(Error::invalid(format!(
                        "exchange: rank {} is named twice, or is this rank; try: every other rank at most once",
                        blocks[at].0
                    ))),
                }
            }
            Call::AllGather { .. } | Call::Barrier | Call::Close => Ok(()),
        }
    }

    /// Checks the call against the number of hosts of its group.
    pub(crate) fn check_hosts(&self, hosts: usize) -> Result<()> {
        match self {
            Call::Gossip { graph, .. } if graph.nodes() != hosts => Err(Error::invalid(format!(
                "gossip: a graph of {} nodes in a group on {hosts} hosts; try: one node for each host",
                graph.nodes()
            ))),
            _ => Ok(()),
        }
    }

    /// What all ranks must agree on.
    pub fn describe(&self) -> Description {
        let of = |kind, tensor: &Shaped| Description::new(kind).dtype(tensor.buffer.dtype);
        match self {
            Call::AllReduce { tensor, op, coding } => {
                let codec = coding.as_ref().map(|coding| coding.codec);
                of(CallKind::AllReduce, tensor).shape(&tensor.shape).op(*op).codec(codec)
            }
            Call::HostReduce { tensor, op } => of(CallKind::HostReduce, tensor).shape(&tensor.shape).op(*op),
            Call::Reduce { tensor, dst, op } => of(CallKind::Reduce, tensor).shape(&tensor.shape).op(*op).root(*dst),
            Call::Broadcast { tensor, src } => of(CallKind::Broadcast, tensor).shape(&tensor.shape).root(*src),
            Call::AllGather { tensor } => of(CallKind::AllGather, tensor).rows_of(&tensor.shape),
            Call::Gather { tensor, dst } => of(CallKind::Gather, tensor).rows_of(&tensor.shape).root(*dst),
            Call::Scatter { src, out, .. } => of(CallKind::Scatter, out).root(*src),
            Call::ReduceScatter { tensors, op } => {
                let call = tensors.first().map_or(Description::new(CallKind::ReduceScatter), |first| {
                    of(CallKind::ReduceScatter, first).shape(&first.shape)
                });
                call.op(*op).list_of(tensors.iter().map(|tensor| tensor.shape.as_slice()))
            }
            Call::AllToAll { tensors } => {
                tensors.first().map_or(Description::new(CallKind::AllToAll), |first| of(CallKind::AllToAll, first))
            }
            Call::Gossip { tensor, graph, step, .. } => {
                of(CallKind::Gossip, tensor).shape(&tensor.shape).graph(graph).step(*step)
            }
            // whoever has no peers in a step is in the same call; shapes and types travel with the tensors
            Call::Exchange { step, .. } => Description::new(CallKind::Exchange).step(*step),
            Call::Barrier => Description::new(CallKind::Barrier),
            Call::Close => Description::new(CallKind::Close),
        }
    }
}

fn check_codec(codec: &dyn Codec, dtype: DType, op: Op) -> Result<()> {
    if !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
        return Err(Error::invalid(format!(
            "codec {:?} does not take {dtype}; try: float32, float16 or bfloat16 tensors, or no codec",
            codec.name()
        )));
    }
    if !matches!(op, Op::Sum | Op::Mean) {
        return Err(Error::invalid(format!(
            "codec {:?} works with sum and mean, not {op}; try: no codec",
            codec.name()
        )));
    }
    Ok(())
}

fn check_gossip(tensor: &Shaped, out: Option<&Shaped>) -> Result<()> {
    let Buffer { start, dtype, .. } = tensor.buffer;
    if !dtype.is_float() {
        return Err(Error::invalid(format!(
            "gossip averages floating-point numbers, not {dtype}; try: .to(torch.float32)"
        )));
    }
    let Some(out) = out else { return Ok(()) };
    if out.shape != tensor.shape || out.buffer.dtype != dtype {
        return Err(Error::invalid(format!(
            "gossip: {dtype}{:?} into an out of {}{:?}; try: the same shape and type",
            tensor.shape, out.buffer.dtype, out.shape
        )));
    }
    let (a, b, bytes) = (start as usize, out.buffer.start as usize, tensor.buffer.bytes());
    if bytes > 0 && a < b + bytes && b < a + bytes {
        return Err(Error::invalid("gossip: out overlaps the tensor; try: no out, which is in place, or other memory"));
    }
    Ok(())
}

fn one_dtype<'a>(mut tensors: impl Iterator<Item = &'a Shaped>) -> Result<()> {
    let Some(first) = tensors.next() else { return Ok(()) };
    match tensors.find(|tensor| tensor.buffer.dtype != first.buffer.dtype) {
        None => Ok(()),
        Some(other) => Err(Error::invalid(format!(
            "tensors of one call have different types, {} and {}; try: convert them first",
            first.buffer.dtype, other.buffer.dtype
        ))),
    }
}

/// An empty tensor, for calls without data.
pub(crate) fn nothing() -> Buffer {
    Buffer::host(std::ptr::NonNull::<u64>::dangling().as_ptr().cast(), 0, DType::U8)
}
