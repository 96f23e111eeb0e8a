//! Who carries, sums and sends which part of the data, and where encoded values lie. Pure functions, alike on every rank.
//!
//! As on the CPU, on every host one member carries each part of the data ([`Layout::parts`]), and the hosts share the summing
//! of each part. A [`Segment`] is what one member of each host carries and one host sums. Kernels work on tiles, at most
//! 2048 elements of one tensor; the records of a segment's tiles follow each other, so a segment travels in one piece.

use std::ops::Range;

use offbeat_core::codec::Codec;
use offbeat_core::topology::{Layout, share};

/// Elements of a tile: a multiple of every codec's block.
const TILE: usize = 2048;
/// Segments begin at multiples of this many elements, and of the codec's block.
const ALIGN: usize = 512;
/// Records of a tile, and values of a segment, begin at multiples of this, where loads of every width may.
const LINE: usize = 16;

/// What a warp of a kernel works on, as kernels declare it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Tile {
    /// The first element, in values and residuals.
    pub value: u64,
    /// The first byte in records; where values are mixed, the first element of each source.
    pub record: u64,
    /// Elements.
    pub count: u32,
    /// Which tensor, for kernels that ask.
    pub span: u32,
}

/// A run of elements that one member of each host carries, and one host sums.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The elements.
    pub range: Range<usize>,
    /// The member of each host that carries them.
    pub carriers: Vec<usize>,
    /// The host that sums them.
    pub owner: usize,
    /// Where its records are.
    pub records: Range<usize>,
    /// Which tiles are its.
    pub tiles: Range<usize>,
}

/// The plan of an exchange of some data.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// In the order of the elements.
    pub segments: Vec<Segment>,
    /// Those of all segments, in this order.
    pub tiles: Vec<Tile>,
    /// Bytes of all records.
    pub bytes: usize,
}

impl Plan {
    /// The plan for `count` elements, of which those in `spans` (all if there are none) are values.
    pub fn coded(layout: &Layout, count: usize, spans: &[Range<usize>], codec: &dyn Codec) -> Self {
        let align = ALIGN.next_multiple_of(codec.block()).max(codec.block());
        let mut plan = Plan::default();
        for part in layout.parts(count, align) {
            for owner in 0..layout.hosts.len() {
                let part_of = share(part.range.len(), layout.hosts.len(), owner, align);
                let range = part.range.start + part_of.start..part.range.start + part_of.end;
                plan.add(range, &part.carriers, owner, spans, &|count| codec.encoded_len(count));
            }
        }
        plan
    }

    /// The plan for `count` elements that travel as they are and are not summed by an owner.
    pub fn plain(layout: &Layout, count: usize) -> Self {
        let mut plan = Plan::default();
        for part in layout.parts(count, ALIGN) {
            plan.add(part.range, &part.carriers, 0, &[], &|_| 0);
        }
        plan
    }

    /// The plan for `count` elements, of which those in `spans` are values, that every host tells to others.
    pub fn told(layout: &Layout, count: usize, spans: &[Range<usize>], codec: Option<&dyn Codec>) -> Self {
        let align = ALIGN.next_multiple_of(codec.map_or(1, Codec::block));
        let length = |count: usize| codec.map_or(count * size_of::<f32>(), |codec| codec.encoded_len(count));
        let mut plan = Plan::default();
        for part in layout.parts(count, align) {
            plan.add(part.range, &part.carriers, 0, spans, &length);
        }
        plan
    }

    fn add(
        &mut self,
        range: Range<usize>,
        carriers: &[usize],
        owner: usize,
        spans: &[Range<usize>],
        length: &dyn Fn(usize) -> usize,
    ) {
        if range.is_empty() {
            return;
        }
        let (bytes, tiles) = (self.bytes, self.tiles.len());
        for (span, piece) in pieces(&range, spans) {
            for first in piece.clone().step_by(TILE) {
                let count = TILE.min(piece.end - first);
                self.tiles.push(Tile {
                    value: first as u64,
                    record: self.bytes as u64,
                    count: count as u32,
                    span: span as u32,
                });
                self.bytes += length(count).next_multiple_of(LINE);
            }
        }
        let (records, tiles) = (bytes..self.bytes, tiles..self.tiles.len());
        self.segments.push(Segment { range, carriers: carriers.to_vec(), owner, records, tiles });
    }

    /// The tiles of some segments with `record` counted in elements from where `places` puts each segment.
    pub fn placed(&self, segments: &[(usize, usize)]) -> Vec<Tile> {
        let tiles = segments.iter().flat_map(|(at, place)| {
            let segment = &self.segments[*at];
            let of = move |tile: &Tile| tile.value as usize - segment.range.start + place;
            self.tiles[segment.tiles.clone()].iter().map(move |tile| Tile { record: of(tile) as u64, ..*tile })
        });
        tiles.collect()
    }
}

/// The tiles of all tensors of a bucket, for work that exchanges nothing; records are where values are.
pub fn tiles(spans: &[Range<usize>]) -> Vec<Tile> {
    let mut plan = Plan::default();
    plan.add(0..spans.last().map_or(0, |span| span.end), &[], 0, spans, &|_| 0);
    plan.placed(&[(0, 0)])
}

/// Puts segments one after the other, each at a place that loads of every width may begin at: (segment, place) of each, and
/// how many elements that takes.
pub fn places(segments: impl Iterator<Item = (usize, usize)>) -> (Vec<(usize, usize)>, usize) {
    let mut end = 0;
    let put = |(segment, len): (usize, usize)| {
        let place = end;
        end += len.next_multiple_of(LINE);
        (segment, place)
    };
    let places = segments.map(put).collect();
    (places, end)
}

/// The parts of a range that hold values, and which span each is of.
fn pieces(range: &Range<usize>, spans: &[Range<usize>]) -> Vec<(usize, Range<usize>)> {
    if spans.is_empty() {
        return vec![(0, range.clone())];
    }
    let first = spans.partition_point(|span| span.end <= range.start);
    let inside = spans.iter().enumerate().skip(first).take_while(|(_, span)| span.start < range.end);
    inside.map(|(at, span)| (at, span.start.max(range.start)..span.end.min(range.end))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use offbeat_core::codec::KNOWN;

    #[test]
    fn every_value_is_in_one_tile_of_one_tensor_and_records_do_not_overlap() {
        for codec in KNOWN {
            let block = codec.block().max(1);
            let spans = [0..700, (2 * block).max(1024)..9000.max(2 * block), 12_288..12_289];
            for sizes in [&[1, 1][..], &[1, 1, 1], &[2, 2], &[3, 2], &[1, 4, 2]] {
                let plan = Plan::coded(&Layout::of_sizes(sizes), 12_289, &spans, codec);
                let mut values: Vec<usize> = Vec::new();
                let mut end = 0;
                for segment in &plan.segments {
                    assert!(segment.range.start.is_multiple_of(block));
                    assert_eq!(segment.records.start, end);
                    for tile in &plan.tiles[segment.tiles.clone()] {
                        let range = tile.value as usize..tile.value as usize + tile.count as usize;
                        let span = &spans[tile.span as usize];
                        assert!(range.start >= span.start && range.end <= span.end, "{codec:?} {tile:?}");
                        assert!((range.start - span.start).is_multiple_of(block) || range.start.is_multiple_of(block));
                        assert!(range.start >= segment.range.start && range.end <= segment.range.end);
                        assert!(tile.record as usize >= end && tile.record.is_multiple_of(16));
                        end = tile.record as usize + codec.encoded_len(tile.count as usize);
                        values.extend(range);
                    }
                    end = segment.records.end;
                    assert!(end.is_multiple_of(16));
                }
                assert_eq!(values, spans.iter().cloned().flatten().collect::<Vec<_>>());
                assert_eq!(end, plan.bytes);
            }
        }
    }

    #[test]
    fn hosts_share_the_summing_and_members_the_carrying() {
        let plan = Plan::coded(&Layout::of_sizes(&[2, 2]), 8192, &[], KNOWN[2]);
        let owners: Vec<(usize, Vec<usize>)> = plan.segments.iter().map(|s| (s.owner, s.carriers.clone())).collect();
        assert_eq!(owners, [(0, vec![0, 2]), (1, vec![0, 2]), (0, vec![1, 3]), (1, vec![1, 3])]);
        assert!(Plan::coded(&Layout::of_sizes(&[1, 1]), 0, &[], KNOWN[2]).segments.is_empty());
    }

    #[test]
    fn placed_segments_keep_apart() {
        let plan = Plan::plain(&Layout::of_sizes(&[2, 1]), 3000);
        let (placed, len) = places([(0, 1537), (1, 10)].into_iter());
        assert_eq!((placed.clone(), len), (vec![(0, 0), (1, 1552)], 1568));
        let tiles = plan.placed(&placed);
        let second = plan.segments[1].tiles.start;
        assert_eq!(tiles[second].record, 1552);
        assert_eq!(tiles[second].value as usize, plan.segments[1].range.start);
    }
}
