//! The same buckets on all ranks: new ones, what ranks make sure of before they exchange them, and what they call one.

use offbeat_transport::Interrupt;

use super::built::{Built, grain};
use super::{Scheduler, Shared};
use crate::algorithm::Saved;
use crate::bucket::{Plan, Sizes};
use crate::buffer::{Buffer, Shaped};
use crate::call::Call;
use crate::dtype::{DType, Op};
use crate::{Error, Kind, Result};

impl Scheduler {
    /// Makes new buckets, between rounds. All ranks follow rank 0's order and sizes; a tensor is late if it is on any rank.
    /// Values in the old buckets are the caller's to keep.
    pub fn rebucket(
        &self,
        order: &[usize],
        late: &[bool],
        sizes: Sizes,
        interrupt: Option<&Interrupt<'_>>,
    ) -> Result<()> {
        let shared = &*self.0;
        if let Some(error) = &shared.state().failed {
            return Err(error.clone());
        }
        if shared.built().readiness.has_begun() {
            return Err(Error::invalid(
                "buckets cannot change while gradients are exchanged; try: after backward() has returned",
            ));
        }
        let mut agreed: Vec<u64> = [sizes.first, sizes.rest].iter().chain(order).map(|value| *value as u64).collect();
        let first = Some(shared.limits.first);
        shared.call(Call::Broadcast { tensor: words(&mut agreed), src: 0 }, first, interrupt)?;
        let mut late: Vec<u64> = late.iter().map(|late| u64::from(*late)).collect();
        shared.call(Call::AllReduce { tensor: words(&mut late), op: Op::Max, coding: None }, first, interrupt)?;
        let sizes = Sizes { first: agreed[0] as usize, rest: agreed[1] as usize };
        let order: Vec<usize> = agreed[2..].iter().map(|tensor| *tensor as usize).collect();
        let late: Vec<bool> = late.iter().map(|late| *late != 0).collect();
        let plan = Plan::new(&shared.tensors, &order, &late, sizes, grain(&shared.description, &shared.tensors))?;
        shared.agree_on(&plan, interrupt)?;
        shared.hear(&shared.built(), interrupt)?;
        // the old memory goes first, where the caller has let go of it
        let kept = shared.built().movable()?;
        shared.replace(Built::default());
        let carrier = shared.carrier.as_deref();
        let built = Built::new(plan, &shared.tensors, &shared.description, &shared.lanes[0], carrier)?;
        for (tensor, Saved { name, values, .. }) in kept {
            built.restore(tensor, &name, &values, &shared.tensors)?;
        }
        shared.replace(built);
        Ok(())
    }
}

impl Shared {
    /// Makes sure that all ranks have made the same plan.
    fn agree_on(&self, plan: &Plan, interrupt: Option<&Interrupt<'_>>) -> Result<()> {
        let mut mine = [plan.hash(&self.tensors)];
        let gather = Call::AllGather { tensor: words(&mut mine) };
        let hashes = self.call(gather, Some(self.limits.first), interrupt)?;
        let differs = hashes.iter().position(|theirs| theirs.bytes() != mine[0].to_le_bytes());
        match differs {
            None => Ok(()),
            Some(member) => {
                let card = self.mesh().roster().card(member as u32);
                let error = Error::of_rank(
                    Kind::Mismatch,
                    card.rank,
                    &card.host,
                    format!("{} has planned other buckets; try: the same version and model on every rank", card.name()),
                );
                Err(self.abandon(&error))
            }
        }
    }

    /// A bucket of a step, by the names of its parameters.
    pub(super) fn label(&self, plan: &Plan, bucket: usize, step: u64) -> String {
        let slots = &plan.buckets[bucket].slots;
        let names: Vec<&str> = slots.iter().take(3).map(|slot| self.tensors[slot.tensor].name.as_str()).collect();
        let more = match slots.len() - names.len() {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        format!("bucket {bucket} ({}{more}) of step {step}", names.join(", "))
    }
}

fn words(values: &mut [u64]) -> Shaped {
    let buffer = Buffer::host(values.as_mut_ptr().cast(), values.len(), DType::U64);
    Shaped { buffer, shape: vec![values.len() as u64] }
}
