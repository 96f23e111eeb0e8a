//! The end of a round whose buckets are on a device. The host does not wait for it, so what there is to know of the round
//! becomes known in a later one: whether anything was not finite, and what other ranks say of theirs.

use offbeat_transport::Interrupt;

use super::built::Built;
use super::{Shared, State};
use crate::Result;
use crate::algorithm::{Carrier, Stream, What};
use crate::call::Call;
use crate::event::{Event, Queue, Ticket};
use crate::group::Work;

/// For how many rounds it is looked whether anything was not finite.
const REMEMBERED: u64 = 32;

#[derive(Default)]
pub(super) struct Afterwards {
    /// What was told to the other ranks at the end of the last round, if nobody has waited for it.
    pending: Option<Ticket>,
    /// Whether some rank has found something that was not finite: heard since the last round, and known in this.
    heard: bool,
    known: bool,
    /// The rounds from which the optimizer has made a step. Only those matter: a step may have been left out.
    stepped: Vec<u64>,
}

impl Shared {
    /// When all buckets are enqueued: lets a stream wait for them, and looks what has become of earlier rounds.
    pub(super) fn join(&self, built: &Built, carrier: &dyn Carrier, stream: Stream, state: &mut State) -> Result<()> {
        let joined = carrier.check().and_then(|()| match &built.streams {
            Some(streams) => streams.join(stream, carrier),
            None => Ok(()),
        });
        joined.map_err(|error| {
            state.failed = Some(error.clone());
            self.abandon(&error)
        })?;
        let (mut bad, step) = (0, state.step);
        state.afterwards.stepped.retain(|round| {
            let found = carrier.non_finite(*round);
            bad += found;
            found == 0 && round + REMEMBERED > step
        });
        self.tally.add(0, 0, bad);
        if self.description.what != What::Gradients {
            // nobody is told of weights: each rank knows of what it has met itself
            state.afterwards.known = bad > 0;
        }
        Ok(())
    }

    /// Tells all ranks what travels beside the buckets, and hears what they have told in the round before. Waits for the
    /// answer only if this rank needs it now.
    pub(super) fn tell(
        &self,
        built: &std::sync::Arc<Built>,
        call: Call,
        waits: bool,
        interrupt: Option<&Interrupt<'_>>,
    ) -> Result<()> {
        let told = self.hear(built, interrupt).and_then(|()| {
            let keep: Box<dyn std::any::Any + Send> = Box::new(std::sync::Arc::clone(built));
            self.lanes[0].enqueue(Work { call, keep: Some(keep) }, None)
        });
        let told = told.and_then(|ticket| match waits {
            true => ticket.wait(None, interrupt).map(|()| ticket),
            false => Ok(ticket),
        });
        match told {
            Ok(ticket) => {
                let afterwards = &mut self.state().afterwards;
                afterwards.known = std::mem::take(&mut afterwards.heard);
                afterwards.pending = Some(ticket);
                Ok(())
            }
            Err(error) => {
                // the buckets of this round wait for ranks that are not there any more
                if let Some(carrier) = &self.carrier {
                    carrier.abandon(&error);
                }
                Err(error)
            }
        }
    }

    /// Waits for what was told in the round before, which is long there.
    pub(super) fn hear(&self, built: &Built, interrupt: Option<&Interrupt<'_>>) -> Result<()> {
        let Some(pending) = self.state().afterwards.pending.take() else { return Ok(()) };
        pending.wait(None, interrupt)?;
        self.state().afterwards.heard |= built.was_non_finite();
        Ok(())
    }

    /// Before the optimizer makes a step from the last round: whether it is known that one was made from something that is
    /// not finite.
    pub(super) fn step_begins(&self) -> bool {
        let mut state = self.state();
        let round = state.step.saturating_sub(1);
        if !state.afterwards.stepped.contains(&round) {
            state.afterwards.stepped.push(round);
        }
        state.afterwards.known
    }
}
