//! A call as a value: what to do, on what. Checked and described before anybody is bothered with it.

use crate::buffer::{Buffer, Shaped};
use crate::codec::Codec;
use crate::describe::{CallKind, Description};
use crate::dtype::{DType, Op};
use crate::{Error, Result};

/// A collective call. `root`, `dst` and `src` are global ranks.
pub enum Call {
    /// Reduce over all ranks, in place.
    AllReduce {
        /// Input and output.
        tensor: Shaped,
        /// The operation.
        op: Op,
        /// The codec between hosts.
        codec: Option<&'static dyn Codec>,
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
    /// Wait for all.
    Barrier,
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
            Call::AllReduce { tensor, op, codec } => {
                op.check(tensor.buffer.dtype)?;
                codec.map_or(Ok(()), |codec| check_codec(codec, tensor.buffer.dtype, *op))
            }
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
                    None if me == *src => Err(Error::invalid("scatter: src must give one tensor for each rank")),
                    _ => Ok(()),
                }
            }
            Call::ReduceScatter { tensors, op } => {
                one_each(tensors)?;
                one_dtype(tensors.iter())?;
                tensors.iter().try_for_each(|tensor| op.check(tensor.buffer.dtype))
            }
            Call::AllToAll { tensors } => one_each(tensors).and(one_dtype(tensors.iter())),
            Call::AllGather { .. } | Call::Barrier => Ok(()),
        }
    }

    /// What all ranks must agree on.
    pub fn describe(&self) -> Description {
        let of = |kind, tensor: &Shaped| Description::new(kind).dtype(tensor.buffer.dtype);
        match self {
            Call::AllReduce { tensor, op, codec } => {
                of(CallKind::AllReduce, tensor).shape(&tensor.shape).op(*op).codec(*codec)
            }
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
            Call::Barrier => Description::new(CallKind::Barrier),
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
