//! What ranks make sure of before they exchange buckets, and what they call a bucket.

use offbeat_transport::Interrupt;

use super::Shared;
use crate::bucket::Plan;
use crate::buffer::{Buffer, Shaped};
use crate::call::Call;
use crate::dtype::DType;
use crate::{Error, Kind, Result};

impl Shared {
    /// Makes sure that all ranks have made the same plan.
    pub(super) fn agree_on(&self, plan: &Plan, interrupt: Option<&Interrupt<'_>>) -> Result<()> {
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

pub(super) fn words(values: &mut [u64]) -> Shaped {
    let buffer = Buffer::host(values.as_mut_ptr().cast(), values.len(), DType::U64);
    Shaped { buffer, shape: vec![values.len() as u64] }
}
