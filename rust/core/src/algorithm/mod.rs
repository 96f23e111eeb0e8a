//! Algorithms as plain descriptions, and the pipelines that are built from them.
//!
//! An algorithm says *what* is communicated, *when*, *every* how many steps, and through which *steps*. Python describes
//! it once; [`Pipeline::build`] checks the description once and gives a closed list of steps that runs without Python.
//! Rust files stand behind steps and codecs, not behind algorithms: what an algorithm computes is told where its list of
//! steps stands (`python/offbeat/algorithms.py`).

mod all_reduce;
mod apply;
mod carrier;
mod low_rank;
mod memory;
mod mixing;
mod momentum;
mod outer;
mod pipeline;
mod replicas;
mod select;
mod step;
mod weigh;

pub use all_reduce::numbers;
pub use apply::{Apply, Function, Room};
pub use carrier::{Carried, Carrier, Lent, Storage, Stream, Trip, meet};
pub use low_rank::{FACTOR, Part, factoring};
pub use memory::{Keeper, Saved, spans};
pub use mixing::{Mixing, Rule};
pub use pipeline::{Pipeline, Round};
pub use select::{LEFT, list_traffic, selection};
pub use step::{Step, begun};

use crate::bucket::Grain;
use crate::codec::Codec;
use crate::{Error, Result};

/// What is communicated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// The gradients of this backward.
    Gradients,
    /// The parameters themselves.
    Weights,
    /// The optimizer's momentum.
    Momentum,
    /// How far parameters have moved since the last exchange.
    Updates,
}

/// When it is communicated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// As each bucket becomes ready in backward.
    Bucket,
    /// Before forward, and applied after backward.
    BeforeForward,
    /// After the optimizer's step.
    AfterStep,
    /// All the time, beside the training.
    Background,
}

impl What {
    const NAMES: [(What, &'static str); 4] = [
        (What::Gradients, "gradients"),
        (What::Weights, "weights"),
        (What::Momentum, "momentum"),
        (What::Updates, "updates"),
    ];

    /// What has this name.
    pub fn from_name(name: &str) -> Result<Self> {
        by_name("what", &What::NAMES, name)
    }
}

impl When {
    const NAMES: [(When, &'static str); 4] = [
        (When::Bucket, "bucket"),
        (When::BeforeForward, "before_forward"),
        (When::AfterStep, "after_step"),
        (When::Background, "background"),
    ];

    /// The moment with this name.
    pub fn from_name(name: &str) -> Result<Self> {
        by_name("when", &When::NAMES, name)
    }
}

fn by_name<T: Copy>(field: &str, names: &[(T, &str)], name: &str) -> Result<T> {
    names.iter().find(|(_, known)| *known == name).map(|(value, _)| *value).ok_or_else(|| {
        let known: Vec<&str> = names.iter().map(|(_, name)| *name).collect();
        Error::invalid(format!("an algorithm with {field}={name:?}; try: {}", known.join(", ")))
    })
}

/// An algorithm as Python describes it.
#[derive(Clone, Debug)]
pub struct Description {
    /// What is communicated.
    pub what: What,
    /// When.
    pub when: When,
    /// Once in how many steps.
    pub every: u64,
    /// For how many rounds it does something else first.
    pub warmup: u64,
    /// Through which steps in these rounds, in this order.
    pub first: Vec<Step>,
    /// Through which steps in all others.
    pub steps: Vec<Step>,
}

impl Description {
    /// What exchanges gradients through these steps, as buckets become ready.
    pub fn of_gradients(steps: Vec<Step>) -> Self {
        Description { what: What::Gradients, when: When::Bucket, every: 1, warmup: 0, first: Vec::new(), steps }
    }

    fn all_steps(&self) -> impl Iterator<Item = &Step> + Clone {
        self.first.iter().chain(&self.steps)
    }

    /// Whether every rank counts as a host of its own in the sums.
    pub fn is_flat(&self) -> bool {
        let mut choices = self.all_steps().filter_map(Step::hierarchical).peekable();
        choices.peek().is_some() && choices.all(|hierarchical| !hierarchical)
    }

    /// Whether nothing crosses between hosts in a round: what one of them uses does not matter to the others.
    pub fn stays_inside(&self, round: u64) -> bool {
        let steps = if round < self.warmup { &self.first } else { &self.steps };
        !steps.is_empty() && steps.iter().all(|step| matches!(step, Step::HostReduce))
    }

    /// How buckets must be made for it.
    pub fn grain(&self) -> Grain {
        let block = self.all_steps().filter_map(Step::codec).map(Codec::block).max().unwrap_or(1);
        Grain { block, used_inside: self.all_steps().all(Step::keeps_sums) }
    }
}
