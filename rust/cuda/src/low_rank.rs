//! The step `LowRank` on a device: the mean over all ranks, of matrices as two thin factors (PowerSGD).
//!
//! ```text
//! values, with what is left of earlier rounds ─▶ P = M·Q; all else as it is      3 kernels
//!        ─▶ their mean over all ranks                                            one all-reduce
//!        ─▶ P orthonormal ─▶ Q = Mᵀ·P                                            2 kernels
//!        ─▶ its mean over all ranks                                              one all-reduce
//!        ─▶ P·Qᵀ, and what is left by the rank's own Q; all else as it is        3 kernels
//! ```
//! The kernels have the bits of the CPU; NCCL adds up in an order of its own. A bucket without matrices, or with nothing
//! else, has fewer kernels.

use std::ops::Range;

use offbeat_core::Result;
use offbeat_core::algorithm::{FACTOR, Part};
use offbeat_core::buffer::Buffer;
use offbeat_core::dtype::{DType, Op};

use crate::collective::{Group, Table};
use crate::kernels::low_rank::{Blocks, Factors, Tables, Values};
use crate::kernels::{Stacked, Tiles};
use crate::memory::Piece;
use crate::plan::{Tile, tiles};
use crate::stream::Address;

/// Factors of matrices, built for one bucket.
pub struct LowRank {
    count: usize,
    dtype: DType,
    tables: Tables,
    /// What the tables lie in.
    _held: ([Table; 3], Piece),
    /// What travels whole, on its way there and back.
    whole: [Table; 2],
    /// Numbers of P and of what travels whole, and of Q.
    lens: (usize, usize),
    /// What was left of earlier runs, for each element.
    pub(crate) left: Piece,
    /// The Q of all matrices, and where they begin.
    pub(crate) factors: Piece,
    starts: Piece,
    /// Where each slot has what is left of it, and its Q.
    places: Vec<[Range<usize>; 2]>,
    /// Bytes before and after factoring.
    traffic: (u64, u64),
}

impl LowRank {
    /// Builds it for tensors in a bucket of `count` elements.
    pub fn build(group: &Group, parts: &[Part], count: usize, dtype: DType) -> Result<Self> {
        let blocks = Blocks::new(parts);
        // SAFETY: matrices are numbers without gaps between them.
        let bytes = unsafe {
            std::slice::from_raw_parts(blocks.matrices.as_ptr().cast(), size_of_val(blocks.matrices.as_slice()))
        };
        let matrices = group.upload(bytes)?;
        let [rows, columns, products] =
            [&blocks.rows, &blocks.columns, &blocks.products].map(|tiles| group.upload_tiles(tiles));
        let (rows, columns, products) = (rows?, columns?, products?);
        let tables = Tables {
            matrices: Tiles { address: matrices.address(), count: blocks.matrices.len() as u32 },
            rows: rows.tiles,
            columns: columns.tiles,
            products: products.tiles,
        };
        let (mut starts, mut places, mut end) = (vec![0f32; blocks.lens.1], Vec::new(), 0);
        for part in parts {
            let of_q = end..end + part.second_len();
            if let Some(shape) = part.shape {
                shape.start(part.key, &mut starts[of_q.clone()]);
            }
            end = of_q.end;
            places.push([part.range.start..part.range.start + part.left_len(), of_q]);
        }
        let starts: Vec<u8> = starts.into_iter().flat_map(f32::to_le_bytes).collect();
        let [there, back] = ways(&blocks.whole).map(|tiles| group.upload_tiles(&tiles));
        let sizes =
            parts.iter().map(|part| (part.range.len() as u64 * 4, (part.first_len() + part.second_len()) as u64 * 4));
        Ok(LowRank {
            count,
            dtype,
            tables,
            _held: ([rows, columns, products], matrices),
            whole: [there?, back?],
            lens: blocks.lens,
            left: group.zeros(count)?,
            factors: group.zeros(blocks.lens.1)?,
            starts: group.upload(&starts)?,
            places,
            traffic: sizes.fold((0, 0), |sum, it| (sum.0 + it.0, sum.1 + it.1)),
        })
    }

    /// Bytes before and after factoring, in one run.
    pub fn traffic(&self) -> (u64, u64) {
        self.traffic
    }

    /// Where a slot has its numbers of what is kept under a name.
    pub(crate) fn place(&self, name: &str, slot: usize) -> Range<usize> {
        self.places[slot][usize::from(name == FACTOR)].clone()
    }

    /// Enqueues one run, in place. `odd` counts matrices that are not finite.
    ///
    /// # Safety
    /// The bucket and all that is named by its address stay until the group's stream has come past this.
    pub unsafe fn run(&self, group: &Group, buffer: Buffer, odd: Address) -> Result<()> {
        group.check_built(buffer, self.count, self.dtype)?;
        let (stream, kernels) = (&group.stream, &group.kernels);
        let (bucket, (first_len, second_len)) = ((buffer.start as Address, self.dtype), self.lens);
        let values = Values { start: bucket.0, dtype: bucket.1, left: self.left.address() };
        let first = group.scratch.take(first_len * size_of::<f32>())?;
        let [own, q] = [(); 2].map(|()| group.scratch.take(second_len * size_of::<f32>()));
        let (own, q) = (own?, q?);
        let finite = group.scratch.take(self.tables.matrices.count as usize * size_of::<u32>())?;
        let (p, kept) = (first.address(), self.factors.address());
        let one = |first: Address| Stacked { first, stride: 0, peers: 1 };
        let [there, back] = &self.whole;
        // SAFETY: the caller's promise; tables and scratch memory stay on this stream, and are as long as they say.
        unsafe {
            kernels.project(stream, values, &self.tables, (self.starts.address(), kept), p)?;
            kernels.mix(stream, (one(bucket.0), self.dtype), (0, 1.0), there.tiles, (p, DType::F32))?;
            mean(group, p, p, first_len)?;
            kernels.project_back(stream, values, &self.tables, (p, own.address()))?;
            mean(group, own.address(), q.address(), second_len)?;
            let factors = Factors { p, own: own.address(), q: q.address(), kept };
            kernels.multiply(stream, values, &self.tables, factors, (finite.address(), odd))?;
            kernels.mix(stream, (one(p), DType::F32), (0, 1.0), back.tiles, bucket)
        }
    }
}

/// Enqueues the mean of some f32 over all ranks.
unsafe fn mean(group: &Group, from: Address, to: Address, count: usize) -> Result<()> {
    if count == 0 {
        return Ok(());
    }
    group.communicator.group(&group.stream, "factors of all ranks", |calls| {
        // SAFETY: the caller's promise.
        unsafe { calls.all_reduce_to(from, to, count, DType::F32, Op::Mean) }
    })
}

/// Tiles of what travels whole, (first element, how many, first number beside P) of each: from the bucket, and back into it.
fn ways(whole: &[(usize, usize, usize)]) -> [Vec<Tile>; 2] {
    let there = whole.iter().flat_map(|(start, count, beside)| {
        let of = *start..*start + *count;
        let moved = move |tile: Tile| Tile { value: tile.value - *start as u64 + *beside as u64, ..tile };
        tiles(&[of]).into_iter().map(moved)
    });
    let there: Vec<Tile> = there.collect();
    let turned = |tile: &Tile| Tile { value: tile.record, record: tile.value, ..*tile };
    let back = there.iter().map(turned).collect();
    [there, back]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_travels_whole_comes_back_to_where_it_was() {
        let [there, back] = ways(&[(64, 3000, 10), (4096, 1, 3010)]);
        let of = |tiles: &[Tile]| tiles.iter().map(|it| (it.record, it.value, it.count)).collect::<Vec<_>>();
        assert_eq!(of(&there), [(64, 10, 2048), (2112, 2058, 952), (4096, 3010, 1)]);
        assert_eq!(of(&back), [(10, 64, 2048), (2058, 2112, 952), (3010, 4096, 1)]);
    }
}
