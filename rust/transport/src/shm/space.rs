//! Which parts of an arena are free: offsets only, no memory is touched here.

use std::collections::BTreeMap;

/// Every allocation starts at a multiple of this: a cache line pair, and enough for any vector instruction.
pub const ALIGN: u64 = 128;
/// Long allocations start at a page, so that their pages can be given back.
pub const PAGE: u64 = 4096;

/// A first-fit allocator over `0..capacity`: low addresses are used again first, whose pages are already there.
#[derive(Debug)]
pub struct Space {
    /// Start and length of each free range; neighbours are always merged.
    free: BTreeMap<u64, u64>,
}

impl Space {
    /// Everything from `start` to `end` is free.
    pub fn new(start: u64, end: u64) -> Self {
        Space { free: BTreeMap::from([(start, end - start)]) }
    }

    /// The length that an allocation of `len` really takes.
    pub fn rounded(len: u64) -> u64 {
        let unit = if len >= PAGE { PAGE } else { ALIGN };
        len.max(1).div_ceil(unit) * unit
    }

    /// Takes `len` bytes (rounded up) and gives their offset.
    pub fn take(&mut self, len: u64) -> Option<u64> {
        let len = Self::rounded(len);
        let unit = if len >= PAGE { PAGE } else { ALIGN };
        let (start, room, offset) = self.free.iter().find_map(|(start, room)| {
            let offset = start.div_ceil(unit) * unit;
            (offset + len <= start + room).then_some((*start, *room, offset))
        })?;
        self.free.remove(&start);
        if offset > start {
            self.free.insert(start, offset - start);
        }
        if offset + len < start + room {
            self.free.insert(offset + len, start + room - offset - len);
        }
        Some(offset)
    }

    /// Gives back what [`Space::take`] gave for the same `len`.
    pub fn give(&mut self, offset: u64, len: u64) {
        let (mut start, mut end) = (offset, offset + Self::rounded(len));
        if let Some((before, room)) = self.free.range(..offset).next_back().map(|(s, r)| (*s, *r))
            && before + room == start
        {
            self.free.remove(&before);
            start = before;
        }
        if let Some(room) = self.free.remove(&end) {
            end += room;
        }
        self.free.insert(start, end - start);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn allocations_never_overlap_and_all_comes_back(sizes in proptest::collection::vec((0u64..20_000, any::<bool>()), 1..60)) {
            let mut space = Space::new(PAGE, 1 << 20);
            let mut held: Vec<(u64, u64)> = Vec::new();
            for (len, release) in sizes {
                if release && !held.is_empty() {
                    let (offset, len) = held.swap_remove(held.len() / 2);
                    space.give(offset, len);
                } else if let Some(offset) = space.take(len) {
                    let end = offset + Space::rounded(len);
                    prop_assert!(offset >= PAGE && end <= 1 << 20 && offset % ALIGN == 0);
                    for (other, other_len) in &held {
                        prop_assert!(end <= *other || other + Space::rounded(*other_len) <= offset);
                    }
                    held.push((offset, len));
                }
            }
            for (offset, len) in held {
                space.give(offset, len);
            }
            prop_assert_eq!(space.free, BTreeMap::from([(PAGE, (1 << 20) - PAGE)]));
        }
    }

    #[test]
    fn a_full_space_says_so() {
        let mut space = Space::new(0, PAGE);
        assert_eq!((space.take(PAGE), space.take(1)), (Some(0), None));
    }
}
