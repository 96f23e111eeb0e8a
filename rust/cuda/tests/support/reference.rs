//! What collectives are to give, stated once more: by core's codecs and sums, over the data of all ranks in one place.

use std::ops::Range;

use offbeat_core::codec::{Codec, Salt};
use offbeat_core::coding::mix;
use offbeat_core::dtype::{DType, Op};
use offbeat_core::graph::Graph;
use offbeat_core::reduce;
use offbeat_core::topology::Layout;

/// A rank's data: numbers that any other rank can make too, as bytes of a type.
pub fn values(rank: usize, count: usize, dtype: DType, seed: u64) -> Vec<u8> {
    let number = |at: usize| {
        let bits = mix(mix(seed, rank as u64), at as u64);
        let wild = if bits.is_multiple_of(97) { 30.0 } else { 1.0 };
        ((bits >> 40) as f32 / (1u64 << 24) as f32 - 0.5) * wild
    };
    let mut wide: Vec<f32> = (0..count).map(number).collect();
    let mut bytes = vec![0; count * dtype.size()];
    // SAFETY: as many numbers as there is room for.
    unsafe { reduce::seal(wide.as_mut_ptr().cast(), &[bytes.as_mut_ptr()], count, dtype, None) };
    bytes
}

/// The sum of a host's ranks, in f32.
fn host_sum(members: &[usize], data: &[Vec<u8>], count: usize, dtype: DType) -> Vec<f32> {
    let sources: Vec<*const u8> = members.iter().map(|member| data[*member].as_ptr()).collect();
    let mut sum = vec![0f32; count];
    // SAFETY: all are as long.
    unsafe {
        match sources.as_slice() {
            [one] => reduce::widen(*one, sum.as_mut_ptr().cast(), count, dtype),
            many => reduce::partial(many, sum.as_mut_ptr().cast(), count, dtype, Op::Sum),
        }
    }
    sum
}

fn narrow(mut wide: Vec<f32>, dtype: DType, divisor: Option<u32>) -> Vec<u8> {
    let mut bytes = vec![0; wide.len() * dtype.size()];
    // SAFETY: as many numbers as there is room for.
    unsafe { reduce::seal(wide.as_mut_ptr().cast(), &[bytes.as_mut_ptr()], wide.len(), dtype, divisor) };
    bytes
}

/// What an all-reduce with a codec keeps: of each host's shares, and of the results.
pub struct Kept {
    pub shares: Vec<Vec<f32>>,
    pub results: Vec<f32>,
}

impl Kept {
    pub fn none(hosts: usize, count: usize) -> Self {
        Kept { shares: vec![vec![0.0; count]; hosts], results: vec![0.0; count] }
    }
}

/// How values are encoded.
pub struct Coding<'a> {
    pub codec: &'static dyn Codec,
    pub spans: &'a [Range<usize>],
    pub numbers: &'a [u64],
    pub stream: u64,
}

impl Coding<'_> {
    /// What is left of some values after encoding and decoding, tensor by tensor; what lies between stays.
    fn through(&self, values: &[f32], author: u64, kept: Option<&mut [f32]>) -> Vec<f32> {
        let (mut out, block) = (values.to_vec(), self.codec.block());
        let mut nothing = vec![0.0; values.len()];
        let feedback = kept.is_some();
        let kept = kept.unwrap_or(&mut nothing);
        for span in self.spans {
            let mut record = vec![0; self.codec.encoded_len(span.len())];
            let first = span.start / block;
            let blocks = if self.numbers.is_empty() { &[][..] } else { &self.numbers[first..span.end.div_ceil(block)] };
            let salt = Salt { stream: mix(self.stream, author), blocks, first: first as u64 };
            match feedback {
                true => self.codec.encode_residual(&values[span.clone()], &mut kept[span.clone()], salt, &mut record),
                false => self.codec.encode(&values[span.clone()], salt, &mut record),
            }
            self.codec.decode(&record, &mut out[span.clone()]);
        }
        out
    }

    /// The mean over all ranks: hosts are encoded, summed in order, divided, and encoded again.
    pub fn mean(&self, layout: &Layout, data: &[Vec<u8>], dtype: DType, mut kept: Option<&mut Kept>) -> Vec<u8> {
        let count = data[0].len() / dtype.size();
        let mut sum: Vec<f32> = Vec::new();
        for (host, members) in layout.hosts.iter().enumerate() {
            let share = host_sum(members, data, count, dtype);
            let author = members[0] as u64 + 1;
            let share = self.through(&share, author, kept.as_mut().map(|kept| kept.shares[host].as_mut_slice()));
            match host {
                0 => sum = share,
                _ => sum.iter_mut().zip(share).for_each(|(sum, share)| *sum += share),
            }
        }
        sum.iter_mut().for_each(|value| *value /= data.len() as f32);
        let result = self.through(&sum, 0, kept.map(|kept| kept.results.as_mut_slice()));
        narrow(result, dtype, None)
    }
}

/// What a host's ranks have after gossip.
pub fn gossip(layout: &Layout, data: &[Vec<u8>], dtype: DType, graph: Graph, host: usize, step: u64) -> Vec<u8> {
    let count = data[0].len() / dtype.size();
    let masses: Vec<u32> = layout.hosts.iter().map(|members| members.len() as u32).collect();
    let blend = graph.mix(&masses, host, step);
    let mut sum: Vec<f32> = Vec::new();
    for (at, term) in blend.terms.iter().enumerate() {
        let mut part = host_sum(&layout.hosts[term.node], data, count, dtype);
        if blend.divisor.is_none() {
            part.iter_mut().for_each(|value| *value *= term.factor as f32);
        }
        match at {
            0 => sum = part,
            _ => sum.iter_mut().zip(part).for_each(|(sum, part)| *sum += part),
        }
    }
    narrow(sum, dtype, blend.divisor)
}
