//! Gradients as the momentum that they make, and back: the arithmetic, wherever it is done.

use std::ops::Range;
use std::sync::Arc;

/// The momentum that a gradient makes of what there was.
#[inline(always)]
pub(crate) fn made(gradient: f32, momentum: f32, beta: f32) -> f32 {
    beta * momentum + (1.0 - beta) * gradient
}

/// Values are new momentum: they become the gradients that make it of the old, which it replaces. A bad round leaves the
/// momentum as it was.
pub(crate) fn settle(values: &mut [f32], momentum: &mut [f32], beta: f32) {
    for (value, momentum) in values.iter_mut().zip(momentum) {
        let new = *value;
        *value = (new - beta * *momentum) / (1.0 - beta);
        *momentum = if new.is_finite() { new } else { *momentum };
    }
}

/// The momentum of a tensor whose gradients travel as that. Memory of the caller's that outlives the call.
#[derive(Clone, Debug)]
pub struct Momenta {
    /// A number for each element.
    pub values: *mut f32,
    /// How much of it stays, for each span of the tensor.
    pub betas: Arc<[f32]>,
}

// SAFETY: it is an address; whoever makes it promises (`Work`) that the memory outlives the call, which alone uses it.
unsafe impl Send for Momenta {}
// SAFETY: as above.
unsafe impl Sync for Momenta {}

impl Momenta {
    /// The momentum of some elements.
    ///
    /// # Safety
    /// The range is inside of the tensor, and nobody else uses its elements meanwhile.
    #[allow(clippy::mut_from_ref, reason = "it is an address, and the caller promises")]
    pub(crate) unsafe fn of(&self, range: &Range<usize>) -> &mut [f32] {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.values.add(range.start), range.len()) }
    }
}
