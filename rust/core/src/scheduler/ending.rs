//! The end of a round: waiting for its buckets and what came of them; or giving it up.

use std::sync::atomic::Ordering;
use std::sync::{MutexGuard, PoisonError};

use offbeat_transport::trace::{self, What};
use offbeat_transport::{Interrupt, SLICE, fork};

use super::built::Built;
use super::{Scheduler, Shared, State};
use crate::algorithm::{self, Saved, Stream};
use crate::call::Call;
use crate::dtype::Op;
use crate::{Error, Kind, Result};

impl Scheduler {
    /// Ends the round: waits until all buckets are done. Gives the tensors that are absent here but have a value now,
    /// because some other rank used them.
    pub fn finish(&self, interrupt: Option<&Interrupt<'_>>) -> Result<Vec<usize>> {
        self.finish_on(0, interrupt)
    }

    /// The same, where buckets are on a device: waits until all buckets are enqueued, and lets a stream wait for the rest.
    pub fn finish_on(&self, stream: Stream, interrupt: Option<&Interrupt<'_>>) -> Result<Vec<usize>> {
        if fork::in_child() {
            return Err(Error::new(
                Kind::NotInitialized,
                "this process was forked from a rank and cannot train with it; try: train in the parent",
            ));
        }
        let shared = &*self.0;
        let built = shared.built();
        let missing = built.readiness.missing();
        if let Some(first) = missing.first() {
            return Err(Error::invalid(format!(
                "{} tensors are not ready, {} among them",
                missing.len(),
                shared.tensors[*first].name
            )));
        }
        for tensor in built.readiness.late() {
            shared.marked(&built, built.readiness.mark_late(tensor), tensor)?;
        }
        let began = trace::now();
        let mut state = shared.wait_for_buckets(&built, interrupt)?;
        if let Some(carrier) = shared.carrier.as_deref() {
            shared.join(&built, carrier, stream, &mut state)?;
        }
        let non_finite = shared.tally.count().non_finite;
        let apart = built.apart(non_finite > state.non_finite);
        state.non_finite = non_finite;
        // weights always have a value, and nobody waits for ranks that are not its peers
        if let Some(tensor) = apart.filter(|_| shared.description.what == algorithm::What::Gradients) {
            let (waits, step) = (!state.absent.is_empty(), state.step);
            drop(state);
            let call = match shared.description.stays_inside(step) {
                true => Call::HostReduce { tensor, op: Op::Bor },
                false => Call::AllReduce { tensor, op: Op::Bor, coding: None },
            };
            match &shared.carrier {
                None => drop(shared.call(call, None, interrupt)?),
                Some(_) => shared.tell(&built, call, waits, interrupt)?,
            }
            state = shared.state();
        }
        let ended = trace::now();
        shared.exposed.fetch_add(ended - began, Ordering::Relaxed);
        shared.record(What::Wait, state.step, began, ended, 0);
        let absent = std::mem::take(&mut state.absent);
        // also where the first round was not that of step 0, because training went on from a checkpoint
        shared.lanes.iter().for_each(|group| group.set_limit(shared.limits.rest));
        if let Some(carrier) = &shared.carrier {
            carrier.set_limit(shared.limits.rest);
        }
        state.done.fill(0);
        state.step += 1;
        built.reset();
        drop(state);
        let has_value = |tensor: usize| {
            let (used, dtype) = built.used(tensor);
            // SAFETY: the number is not under way any more.
            unsafe { std::slice::from_raw_parts(used, dtype.size()) }.iter().any(|byte| *byte != 0)
        };
        let mut gained = Vec::new();
        for (tensor, kept) in absent {
            if has_value(tensor) {
                gained.push(tensor);
                continue;
            }
            // nobody takes the result, so what has left for it comes back
            for Saved { name, values, .. } in kept {
                built.restore(tensor, &name, &values, &shared.tensors)?;
            }
        }
        if shared.carrier.is_some() {
            built.turn();
        }
        Ok(gained)
    }

    /// Forgets a round that backward has not ended (it raised). What has gone out cannot be called back, so then the group
    /// is given up, and all ranks are told why.
    pub fn reset(&self, why: &str) -> Result<()> {
        let built = self.0.built();
        let mut state = self.0.state();
        if let Some(error) = &state.failed {
            return Err(error.clone());
        }
        let lanes = 0..self.0.lanes.len().min(built.plan.buckets.len());
        let on_its_way = state.done() > 0 || lanes.into_iter().any(|bucket| built.readiness.is_complete(bucket));
        if !state.held && on_its_way {
            drop(state);
            let card = self.0.mesh().roster().card(self.0.mesh().me());
            let message = format!(
                "{} has sent a part of its gradients and not the rest: {why}; try: let an exception in backward end the \
                 process, or wrap the optimizer again on every rank",
                card.name()
            );
            let error =
                Error { cause: why.to_owned(), ..Error::of_rank(Kind::PeerFailed, card.rank, &card.host, message) };
            return Err(self.0.abandon(&error));
        }
        state.absent.clear();
        built.reset();
        Ok(())
    }
}

impl Shared {
    /// Lets buckets go that wait for the end of backward, and waits until all are done.
    fn wait_for_buckets(&self, built: &Built, interrupt: Option<&Interrupt<'_>>) -> Result<MutexGuard<'_, State>> {
        let is_under_way = |state: &State| state.failed.is_none() && state.done() < built.plan.buckets.len();
        let mut state = self.state();
        state.held = false;
        self.bell.notify_all();
        while is_under_way(&state) {
            state = self.bell.wait_timeout(state, SLICE).unwrap_or_else(PoisonError::into_inner).0;
            if let Some(interrupt) = interrupt.filter(|_| is_under_way(&state)) {
                drop(state);
                if let Err(error) = interrupt() {
                    // the others wait for buckets of ours that will never come
                    self.abandon(&error);
                    return Err(error);
                }
                state = self.state();
            }
        }
        if let Some(error) = &state.failed {
            return Err(error.clone());
        }
        Ok(state)
    }

    /// Gives up all lanes: every rank raises the story.
    pub(super) fn abandon(&self, error: &Error) -> Error {
        let mut stories = self.lanes.iter().map(|group| group.abandon(error));
        let story = stories.next();
        stories.for_each(drop);
        let story = story.unwrap_or_else(|| error.clone());
        if let Some(carrier) = &self.carrier {
            carrier.abandon(&story);
        }
        story
    }
}
