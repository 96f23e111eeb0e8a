//! Which pieces long data travels in between hosts, and who sums each. Pure, and the same on every rank.

use std::ops::Range;

use crate::topology::{Layout, cut};

/// A piece of the data that travels in one frame.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Chunk {
    pub(super) range: Range<usize>,
    /// The host that sums it; none where both of two do.
    pub(super) owner: Option<usize>,
    /// The member of each host that carries it.
    pub(super) carriers: Vec<usize>,
    /// In which slice of its part it lies.
    pub(super) slice: usize,
}

/// How much smaller the last chunks are. When nothing more is to be sent, the wire waits for the last chunk to be summed and
/// sent back, so that one should be short; if all were, frames would cost more than they carry.
const TAPER: usize = 4;

/// Cuts the data into chunks of at most so many elements, but for alignment, alike on every rank: each part into a multiple
/// of `hosts` chunks, owned in turn, and the end of it into smaller ones.
pub(super) fn chunks(layout: &Layout, count: usize, align: usize, slices: usize, most: usize) -> Vec<Chunk> {
    let hosts = layout.hosts.len();
    // a chunk of less than a block would be nothing for some owners and a block for others, always the same ones
    let most = most.max(align);
    let mut chunks = Vec::new();
    for part in layout.parts(count, align) {
        let len = part.range.len();
        let end = (2 * hosts * most).next_multiple_of(align).min(len);
        let (body, end) = ((len - end) / align * align, len - (len - end) / align * align);
        let mut cut_up = |first: usize, len: usize, most: usize| {
            let ways = len.div_ceil(hosts * most).max(1) * hosts;
            for at in 0..ways {
                let range = first + cut(len, ways, at, align)..first + cut(len, ways, at + 1, align);
                if !range.is_empty() {
                    let owner = (hosts > 2).then_some(at % hosts);
                    let slice = (range.start - part.range.start) * slices / part.range.len();
                    chunks.push(Chunk { range, owner, carriers: part.carriers.clone(), slice });
                }
            }
        };
        cut_up(part.range.start, body, most);
        cut_up(part.range.start + body, end, (most / TAPER).max(align));
    }
    chunks
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::is_gapless;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn chunks_cover_everything_once_and_owners_share_alike(
            sizes in proptest::collection::vec(1usize..4, 2..5), count in 1usize..20_000, slices in 1usize..5,
        ) {
            let layout = Layout::of_sizes(&sizes);
            let plan = chunks(&layout, count, 16, slices, 64);
            let mut owned = vec![0; sizes.len()];
            prop_assert!(is_gapless(plan.iter().map(|chunk| &chunk.range), count));
            for chunk in &plan {
                prop_assert!(chunk.slice < slices && chunk.range.len() <= 64 + 16, "{chunk:?}");
                prop_assert_eq!(chunk.owner.is_none(), sizes.len() == 2);
                owned[chunk.owner.unwrap_or(0)] += chunk.range.len();
            }
            if sizes.len() > 2 {
                // chunks of one turn among the owners differ by a block at most; a part has whole turns, its body and its
                // end one each that may have empty chunks, and its last block may be short
                let turns = plan.len() / sizes.len() + 3 * layout.parts(count, 16).len();
                let (least, most) = (owned.iter().min().unwrap(), owned.iter().max().unwrap());
                prop_assert!(most - least <= turns * 16, "{owned:?} in {} chunks", plan.len());
            }
        }
    }
}
