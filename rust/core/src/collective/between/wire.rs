//! How values travel between hosts, and how they are folded into sums.

use offbeat_transport::pool::Block;

use super::Context;
use crate::codec::Codec;
use crate::dtype::{DType, Op};
use crate::reduce;

/// How values look on the wire and in sums.
pub(super) struct Wire {
    dtype: DType,
    op: Op,
    divisor: Option<u32>,
    codec: Option<&'static dyn Codec>,
    /// Whether each host has one rank only, and so sends its values as they are; else it sends accumulators.
    pub(super) raw: Vec<bool>,
}

impl Wire {
    pub(super) fn new(
        context: &Context<'_>,
        dtype: DType,
        op: Op,
        divisor: Option<u32>,
        codec: Option<&'static dyn Codec>,
    ) -> Self {
        Wire { dtype, op, divisor, codec, raw: context.layout.hosts.iter().map(|host| host.len() == 1).collect() }
    }

    /// Whether values are encoded for the wire.
    pub(super) fn is_coded(&self) -> bool {
        self.codec.is_some()
    }

    /// The type that a host's sum is kept and, without a codec, sent in.
    pub(super) fn sent_as(&self, host: usize) -> DType {
        if self.raw[host] { self.dtype } else { self.dtype.accumulator() }
    }

    /// Bytes of a host's sum of `count` elements.
    pub(super) fn sum_len(&self, host: usize, count: usize) -> usize {
        self.codec.map_or(count * self.sent_as(host).size(), |codec| codec.encoded_len(count))
    }

    /// Bytes of a result.
    pub(super) fn result_len(&self, count: usize) -> usize {
        self.codec.map_or(count * self.dtype.size(), |codec| codec.encoded_len(count))
    }

    /// Folds a host's sum, as it travels, into `acc`; the first host's begins it.
    ///
    /// # Safety
    /// `bytes` is [`Wire::sum_len`] long and `acc` holds `count` accumulators.
    pub(super) unsafe fn fold(&self, acc: *mut u8, host: usize, bytes: *const u8, count: usize) {
        // SAFETY: the caller's promise; accumulators of types with a codec are f32.
        unsafe {
            match self.codec {
                Some(codec) => {
                    let encoded = std::slice::from_raw_parts(bytes, codec.encoded_len(count));
                    let acc = std::slice::from_raw_parts_mut(acc.cast::<f32>(), count);
                    if host == 0 { codec.decode(encoded, acc) } else { codec.decode_add(encoded, acc) }
                }
                None if host == 0 => reduce::widen(bytes, acc, count, self.sent_as(host)),
                None => reduce::fold(acc, bytes, count, self.sent_as(host), self.op),
            }
        }
    }

    /// Ends a sum: writes it to the targets, and gives the bytes that tell it to others if there is a codec.
    ///
    /// # Safety
    /// `acc` holds `count` accumulators, the targets as many elements.
    pub(super) unsafe fn seal(
        &self,
        context: &Context<'_>,
        acc: *mut u8,
        targets: &[*mut u8],
        count: usize,
    ) -> Option<Block> {
        // SAFETY: the caller's promise; accumulators of types with a codec are f32.
        unsafe {
            let Some(codec) = self.codec else {
                reduce::seal(acc, targets, count, self.dtype, self.divisor);
                return None;
            };
            let values = std::slice::from_raw_parts_mut(acc.cast::<f32>(), count);
            if let Some(divisor) = self.divisor {
                values.iter_mut().for_each(|value| *value /= divisor as f32);
            }
            let mut encoded = context.mesh.pool().take(codec.encoded_len(count));
            encoded.set_len(codec.encoded_len(count));
            codec.encode(values, &mut encoded);
            codec.decode(&encoded, values);
            reduce::seal(acc, targets, count, self.dtype, None);
            Some(encoded)
        }
    }

    /// Writes a result that an owner sent to the targets.
    ///
    /// # Safety
    /// `bytes` is [`Wire::result_len`] long, the targets hold `count` elements.
    pub(super) unsafe fn accept(&self, context: &Context<'_>, bytes: &[u8], targets: &[*mut u8], count: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            if let Some(codec) = self.codec {
                let mut acc = scratch(context, count * 4);
                let values = std::slice::from_raw_parts_mut(acc.as_mut_ptr().cast::<f32>(), count);
                codec.decode(bytes, values);
                reduce::seal(acc.as_mut_ptr(), targets, count, self.dtype, None);
            } else {
                targets.iter().for_each(|to| std::ptr::copy_nonoverlapping(bytes.as_ptr(), *to, bytes.len()));
            }
        }
    }

    /// A host's sum as it travels, in memory of its own.
    ///
    /// # Safety
    /// `sum` holds `count` elements of [`Wire::sent_as`], aligned.
    pub(super) unsafe fn encode(&self, context: &Context<'_>, host: usize, sum: *const u8, count: usize) -> Block {
        let mut out = context.mesh.pool().take(self.sum_len(host, count));
        out.set_len(self.sum_len(host, count));
        // SAFETY: the caller's promise; accumulators of types with a codec are f32.
        unsafe {
            match self.codec {
                Some(codec) if self.sent_as(host) == DType::F32 => {
                    codec.encode(std::slice::from_raw_parts(sum.cast::<f32>(), count), &mut out);
                }
                Some(codec) => {
                    let mut wide = scratch(context, count * 4);
                    reduce::widen(sum, wide.as_mut_ptr(), count, self.dtype);
                    codec.encode(std::slice::from_raw_parts(wide.as_ptr().cast::<f32>(), count), &mut out);
                }
                None => std::ptr::copy_nonoverlapping(sum, out.as_mut_ptr(), out.len()),
            }
        }
        out
    }
}

/// Room for accumulators, aligned to eight bytes as the allocator aligns everything of this size.
pub(super) fn scratch(context: &Context<'_>, bytes: usize) -> Block {
    let mut block = context.mesh.pool().take(bytes.max(8));
    block.set_len(bytes.max(8));
    debug_assert_eq!(block.as_ptr() as usize % 8, 0);
    block
}
