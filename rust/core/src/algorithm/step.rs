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

/// Steps of which one begins what the other ends.
const PAIRS: [[&str; 2]; 2] = [["Momentum", "Gradient"], ["Difference", "Outer"]];

/// Makes sure that what a step begins is ended before it is begun again: between a `Momentum` and the next its `Gradient`,
/// between a `Difference` and the next its `Outer`.
pub(super) fn check_pairs(list: &[Step]) -> Result<()> {
    let mut open = [false; PAIRS.len()];
    for (pair, begins) in list.iter().filter_map(Step::side) {
        if open[pair] == begins {
            return Err(unpaired(pair, begins));
        }
        open[pair] = begins;
    }
    open.iter().position(|open| *open).map_or(Ok(()), |pair| Err(unpaired(pair, true)))
}

fn unpaired(pair: usize, begins: bool) -> Error {
    let [first, last] = PAIRS[pair];
    let missing =
        if begins { format!("{first} without {last} after") } else { format!("{last} without {first} before") };
    Error::invalid(format!("the step {missing} it; try: [{first}(), AllReduce(), {last}()]"))
}

/// The step of a list that the `at`-th ends: the last `Momentum` before a `Gradient`, the last `Difference` before an
/// `Outer`.
pub fn begun(list: &[Step], at: usize) -> Result<usize> {
    let pair = usize::from(matches!(list[at], Step::Outer { .. }));
    let is_it = |step: &Step| step.side() == Some((pair, true));
    list[..at].iter().rposition(is_it).ok_or_else(|| unpaired(pair, false))
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

    /// Of which pair it is, and whether it begins what the other ends.
    fn side(&self) -> Option<(usize, bool)> {
        match self {
            Step::Momentum { .. } => Some((0, true)),
            Step::Gradient => Some((0, false)),
            Step::Difference => Some((1, true)),
            Step::Outer { .. } => Some((1, false)),
            _ => None,
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
