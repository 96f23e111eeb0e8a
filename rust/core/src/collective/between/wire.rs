//! How values travel between hosts, and how they are folded into sums.

use std::ops::Range;

use offbeat_transport::pool::Block;

use super::Context;
use crate::coding::{Coding, Leg};
use crate::dtype::{DType, Op};
use crate::reduce;

/// How values look on the wire and in sums.
pub(super) struct Wire {
    dtype: DType,
    op: Op,
    divisor: Option<u32>,
    coding: Option<Coding>,
    /// Whether each host has one rank only, and so sends its values as they are; else it sends accumulators.
    pub(super) raw: Vec<bool>,
}

impl Wire {
    pub(super) fn new(
        context: &Context<'_>,
        dtype: DType,
        op: Op,
        divisor: Option<u32>,
        coding: Option<Coding>,
    ) -> Self {
        Wire { dtype, op, divisor, coding, raw: context.layout.hosts.iter().map(|host| host.len() == 1).collect() }
    }

    /// Whether values are encoded for the wire.
    pub(super) fn is_coded(&self) -> bool {
        self.coding.is_some()
    }

    /// The type that a host's sum is kept and, without a codec, sent in.
    pub(super) fn sent_as(&self, host: usize) -> DType {
        if self.raw[host] { self.dtype } else { self.dtype.accumulator() }
    }

    /// Bytes of a host's sum of a range.
    pub(super) fn sum_len(&self, host: usize, range: &Range<usize>) -> usize {
        self.coding.as_ref().map_or(range.len() * self.sent_as(host).size(), |coding| coding.encoded_len(range))
    }

    /// Bytes of the result of a range.
    pub(super) fn result_len(&self, range: &Range<usize>) -> usize {
        self.coding.as_ref().map_or(range.len() * self.dtype.size(), |coding| coding.encoded_len(range))
    }

    /// Folds a host's sum of a range, as it travels, into `acc`; the first host's begins it.
    ///
    /// # Safety
    /// `bytes` is [`Wire::sum_len`] long and `acc` holds accumulators for the range.
    pub(super) unsafe fn fold(&self, acc: *mut u8, host: usize, bytes: *const u8, range: &Range<usize>) {
        let count = range.len();
        // SAFETY: the caller's promise; accumulators of types with a codec are f32.
        unsafe {
            match &self.coding {
                Some(coding) => {
                    let encoded = std::slice::from_raw_parts(bytes, coding.encoded_len(range));
                    let acc = std::slice::from_raw_parts_mut(acc.cast::<f32>(), count);
                    if host == 0 { coding.decode(encoded, range, acc) } else { coding.decode_add(encoded, range, acc) }
                }
                None if host == 0 => reduce::widen(bytes, acc, count, self.sent_as(host)),
                None => reduce::fold(acc, bytes, count, self.sent_as(host), self.op),
            }
        }
    }

    /// Sums what two hosts have, in their order, straight into the targets: one pass over memory instead of three. Does
    /// nothing and says so where values are encoded, travel in another type than they are kept in, or are not aligned.
    ///
    /// # Safety
    /// Both hold `count` elements in [`Wire::sent_as`] and the targets as many; a target may be one of the two, else they
    /// do not overlap.
    pub(super) unsafe fn sum_pair(&self, pair: [*const u8; 2], targets: &[*mut u8], count: usize) -> bool {
        let plain = self.coding.is_none() && (0..self.raw.len()).all(|host| self.sent_as(host) == self.dtype);
        let aligned = pair.iter().all(|start| start.addr().is_multiple_of(self.dtype.size()));
        if !plain || !aligned || targets.is_empty() {
            return false;
        }
        // SAFETY: the caller's promise, and both are aligned.
        unsafe { reduce::reduce(&pair, targets, count, self.dtype, self.op, self.divisor) };
        true
    }

    /// Ends the sum of a range: writes it to the targets, and gives the bytes that tell it to others if it is coded.
    ///
    /// # Safety
    /// `acc` holds accumulators for the range, the targets as many elements; this rank sums the range.
    pub(super) unsafe fn seal(
        &self,
        context: &Context<'_>,
        acc: *mut u8,
        targets: &[*mut u8],
        range: &Range<usize>,
    ) -> Option<Block> {
        let count = range.len();
        // SAFETY: the caller's promise; accumulators of types with a codec are f32.
        unsafe {
            let Some(coding) = &self.coding else {
                reduce::seal(acc, targets, count, self.dtype, self.divisor);
                return None;
            };
            let values = std::slice::from_raw_parts_mut(acc.cast::<f32>(), count);
            if let Some(divisor) = self.divisor {
                values.iter_mut().for_each(|value| *value /= divisor as f32);
            }
            let mut encoded = context.mesh.pool().take_filled(coding.encoded_len(range));
            coding.encode(values, range, Leg::Result, 0, &mut encoded);
            let mut decoded = context.scratch(count * 4);
            let room = std::slice::from_raw_parts_mut(decoded.as_mut_ptr().cast::<f32>(), count);
            coding.decode(&encoded, range, room);
            coding.tally.compare(values, std::slice::from_raw_parts(decoded.as_ptr().cast::<f32>(), count));
            reduce::seal(decoded.as_mut_ptr(), targets, count, self.dtype, None);
            // momentum is only there where a rank is alone on its host, and its tensor is f32
            if let ([target], DType::F32) = (targets, self.dtype) {
                coding.settle(range, std::slice::from_raw_parts_mut(target.cast::<f32>(), count));
            }
            Some(encoded)
        }
    }

    /// Writes the result of a range that an owner sent to the targets.
    ///
    /// # Safety
    /// `bytes` is [`Wire::result_len`] long, the targets hold the elements of the range.
    pub(super) unsafe fn accept(&self, context: &Context<'_>, bytes: &[u8], targets: &[*mut u8], range: &Range<usize>) {
        let count = range.len();
        // SAFETY: the caller's promise.
        unsafe {
            let Some(coding) = &self.coding else {
                targets.iter().for_each(|to| std::ptr::copy_nonoverlapping(bytes.as_ptr(), *to, bytes.len()));
                return;
            };
            if let ([target], DType::F32) = (targets, self.dtype) {
                let values = std::slice::from_raw_parts_mut(target.cast::<f32>(), count);
                coding.decode(bytes, range, values);
                coding.settle(range, values);
                return;
            }
            let mut acc = context.scratch(count * 4);
            coding.decode(bytes, range, std::slice::from_raw_parts_mut(acc.as_mut_ptr().cast::<f32>(), count));
            reduce::seal(acc.as_mut_ptr(), targets, count, self.dtype, None);
        }
    }

    /// My host's sum of a range as it travels, in memory of its own. With residuals: to be called once for each range.
    ///
    /// # Safety
    /// `sum` holds the range in [`Wire::sent_as`], aligned; this rank carries the range.
    pub(super) unsafe fn encode(
        &self,
        context: &Context<'_>,
        host: usize,
        sum: *const u8,
        range: &Range<usize>,
    ) -> Block {
        let count = range.len();
        let mut out = context.mesh.pool().take_filled(self.sum_len(host, range));
        let author = context.ranks[context.layout.hosts[host][0]];
        // SAFETY: the caller's promise; accumulators of types with a codec are f32.
        unsafe {
            match &self.coding {
                Some(coding) if self.sent_as(host) == DType::F32 => {
                    let values = std::slice::from_raw_parts(sum.cast::<f32>(), count);
                    coding.encode(values, range, Leg::Share, author, &mut out);
                }
                Some(coding) => {
                    let mut wide = context.scratch(count * 4);
                    reduce::widen(sum, wide.as_mut_ptr(), count, self.dtype);
                    let values = std::slice::from_raw_parts(wide.as_ptr().cast::<f32>(), count);
                    coding.encode(values, range, Leg::Share, author, &mut out);
                }
                None => std::ptr::copy_nonoverlapping(sum, out.as_mut_ptr(), out.len()),
            }
        }
        out
    }
}
