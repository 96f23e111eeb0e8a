//! The vocabulary of algorithms.

use std::sync::Arc;

use super::apply::Function;
use crate::codec::Codec;
use crate::dtype::Op;
use crate::graph::Peers;
use crate::{Error, Result};

/// One word of an algorithm: what is done with a bucket.
#[derive(Clone, Debug)]
pub enum Step {
    /// Reduces the bucket over all ranks.
    AllReduce {
        /// The operation.
        op: Op,
        /// The encoding between hosts.
        codec: Option<&'static dyn Codec>,
        /// Whether what the codec loses is kept and sent later.
        feedback: bool,
        /// Where the codec's random numbers begin.
        seed: u64,
        /// Whether the ranks of a host sum among themselves first; otherwise all ranks in ascending order.
        hierarchical: bool,
    },
    /// Averages the bucket over the ranks of each host; nothing crosses between hosts.
    HostReduce,
    /// Weights become how far they are from the anchor, which all ranks have alike.
    Difference,
    /// What the last `Difference` step has made of weights, averaged, moves the anchor; weights become that.
    Outer {
        /// The learning rate.
        lr: f64,
        /// How much of the momentum stays.
        momentum: f64,
    },
    /// The mean with this round's peers.
    Gossip {
        /// Who they are.
        peers: Peers,
        /// Where random peers come from.
        seed: u64,
    },
    /// The mean with the peers, of which everybody keeps copies, by encoded differences to these.
    Replicas {
        /// Who they are.
        peers: Peers,
        /// The encoding.
        codec: Option<&'static dyn Codec>,
        /// The consensus step of CHOCO; none for difference compression on a ring.
        gamma: Option<f64>,
        /// Where the codec's random numbers begin.
        seed: u64,
    },
    /// A gradient becomes the momentum that it makes.
    Momentum {
        /// How much of the momentum stays, for each tensor.
        betas: Arc<[f32]>,
    },
    /// The momentum of the last `Momentum` step becomes the gradient again that would have made it.
    Gradient,
    /// The mean over all ranks of the largest elements of each tensor; the others are kept and sent later.
    Select {
        /// The share of the elements that is sent.
        ratio: f64,
        /// Whether the ranks of a host sum among themselves first.
        hierarchical: bool,
    },
    /// The mean over all ranks, of matrices as two thin factors; what these lack is kept and sent later.
    LowRank {
        /// Columns of a factor.
        rank: usize,
        /// How many times smaller the factors of a matrix must be to be worth it.
        rate: f64,
        /// Where the first factors begin.
        seed: u64,
        /// Whether the ranks of a host sum among themselves first.
        hierarchical: bool,
    },
    /// What a rank has counts by its share of the samples.
    Weigh,
    /// A function of the user's.
    Apply {
        /// The function.
        function: Arc<dyn Function>,
        /// Names of what it keeps for each element.
        states: Vec<String>,
    },
}

/// The step of a list that the `at`-th ends: the last `Momentum` before a `Gradient`, the last `Difference` before an
/// `Outer`.
pub fn begun(list: &[Step], at: usize) -> Result<usize> {
    let ends_difference = matches!(list[at], Step::Outer { .. });
    let is_it = |step: &Step| match ends_difference {
        true => matches!(step, Step::Difference),
        false => matches!(step, Step::Momentum { .. }),
    };
    let missing = match ends_difference {
        true => "the step Outer without Difference before it; try: [Difference(), AllReduce(), Outer()]",
        false => "the step Gradient without Momentum before it; try: [Momentum(), AllReduce(), Gradient()]",
    };
    list[..at].iter().rposition(is_it).ok_or_else(|| Error::invalid(missing))
}

impl Step {
    /// What it is called in messages.
    pub fn name(&self) -> &'static str {
        match self {
            Step::AllReduce { .. } => "all_reduce",
            Step::HostReduce => "host_reduce",
            Step::Difference => "difference",
            Step::Outer { .. } => "outer",
            Step::Gossip { .. } => "gossip",
            Step::Replicas { .. } => "replicas",
            Step::Momentum { .. } => "momentum",
            Step::Gradient => "gradient",
            Step::Select { .. } => "select",
            Step::LowRank { .. } => "low_rank",
            Step::Weigh => "weigh",
            Step::Apply { .. } => "apply",
        }
    }

    pub(super) fn codec(&self) -> Option<&'static dyn Codec> {
        match self {
            Step::AllReduce { codec, .. } | Step::Replicas { codec, .. } => *codec,
            _ => None,
        }
    }

    /// Whether hosts matter to its sums, where it has any.
    pub(super) fn hierarchical(&self) -> Option<bool> {
        match self {
            Step::AllReduce { hierarchical, .. }
            | Step::Select { hierarchical, .. }
            | Step::LowRank { hierarchical, .. } => Some(*hierarchical),
            _ => None,
        }
    }

    /// Whether numbers beside the tensors are summed with them, and nothing is lost.
    pub(super) fn keeps_sums(&self) -> bool {
        matches!(self, Step::AllReduce { codec: None, .. } | Step::HostReduce | Step::Weigh)
    }

    /// Whether it makes sense for weights only.
    pub(super) fn takes_weights(&self) -> bool {
        matches!(self, Step::Difference | Step::Outer { .. } | Step::Gossip { .. } | Step::Replicas { .. })
    }
}
