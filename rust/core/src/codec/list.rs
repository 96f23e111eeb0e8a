//! Lists of selected numbers, as they travel.
//!
//! Numbers are taken in blocks of 65,536, in which a place has two bytes. The encoding of `count` numbers of which `chosen`
//! are sent has a fixed size, a multiple of four:
//!
//! | bytes | is |
//! |---|---|
//! | 4·chosen | f32 values, in ascending order of their indices |
//! | 4·(blocks − 1) | u32 starts: how many of the chosen lie before the second block, the third, ... |
//! | 2·chosen | u16 places in their blocks, in the order of the values |
//! | 2 if chosen is odd | zeros |
//!
//! Where all are sent the values say it all, and nothing follows them. Starts are 1/65,536 of the tensor: where less than
//! 1/32,768 is chosen, indices of four bytes would be shorter, and nobody would notice.

use super::TopK;
use crate::{Error, Kind, Result};

/// Numbers of a block.
const BLOCK: usize = TopK::BLOCK;

/// The places of a block, and the values for them.
type Entries<'a> = (&'a [[u8; 2]], &'a [[u8; 4]]);

impl TopK {
    /// Numbers of a block: as many as a place of two bytes tells apart.
    pub const BLOCK: usize = 1 << 16;

    /// Whether all are sent: then an encoding has values only.
    pub fn is_whole(&self) -> bool {
        self.chosen == self.count
    }

    /// Bytes of the starts.
    fn starts_len(&self) -> usize {
        4 * self.count.div_ceil(BLOCK).saturating_sub(1)
    }

    /// Bytes of an encoding.
    pub fn encoded_len(&self) -> usize {
        let places = if self.is_whole() { 0 } else { self.starts_len() + (2 * self.chosen).next_multiple_of(4) };
        4 * self.chosen + places
    }

    /// Writes indices, in ascending order, and values.
    pub(super) fn list(&self, chosen: impl Iterator<Item = (u32, f32)>, out: &mut [u8]) {
        let (sent, rest) = out.split_at_mut(4 * self.chosen);
        let (starts, rest) = rest.split_at_mut(self.starts_len());
        let (places, padding) = rest.split_at_mut(2 * self.chosen);
        padding.fill(0);
        let mut starts = starts.as_chunks_mut::<4>().0.iter_mut();
        let room = sent.as_chunks_mut::<4>().0.iter_mut().zip(places.as_chunks_mut::<2>().0);
        let mut end = BLOCK;
        for (before, ((index, value), (sent, place))) in chosen.zip(room).enumerate() {
            while index as usize >= end {
                starts.next().into_iter().for_each(|start| *start = (before as u32).to_le_bytes());
                end += BLOCK;
            }
            (*sent, *place) = (value.to_le_bytes(), (index as u16).to_le_bytes());
        }
        starts.for_each(|start| *start = (self.chosen as u32).to_le_bytes());
    }

    /// Decodes: zero where nothing was sent. Fails, and changes nothing, if the list is not one of ours.
    pub fn decode(&self, bytes: &[u8], out: &mut [f32]) -> Result<()> {
        self.check(bytes, out.len())?;
        if !self.is_whole() {
            out.fill(0.0);
        }
        self.each(bytes, out, |to, value| *to = value);
        Ok(())
    }

    /// Decodes and adds to `out`, as [`TopK::decode`].
    pub fn decode_add(&self, bytes: &[u8], out: &mut [f32]) -> Result<()> {
        self.check(bytes, out.len())?;
        self.each(bytes, out, |to, value| *to += value);
        Ok(())
    }

    /// How many numbers of an encoding are not finite.
    pub fn non_finite(&self, bytes: &[u8]) -> usize {
        let values = bytes.as_chunks().0.iter().take(self.chosen);
        values.filter(|value| !f32::from_le_bytes(**value).is_finite()).count()
    }

    /// The entries of each block, of an encoding that is not whole. None for a block whose starts are out of order or
    /// beyond the end.
    fn blocks<'a>(&self, bytes: &'a [u8]) -> impl Iterator<Item = Option<Entries<'a>>> + use<'a> {
        let (values, rest) = bytes.split_at(4 * self.chosen);
        let (starts, rest) = rest.split_at(self.starts_len());
        let (values, places) = (values.as_chunks().0, rest[..2 * self.chosen].as_chunks().0);
        let starts = starts.as_chunks().0.iter().map(|start| u32::from_le_bytes(*start) as usize);
        let ends = starts.clone().chain([self.chosen]);
        let ranges = [0].into_iter().chain(starts).zip(ends).map(|(start, end)| start..end);
        ranges.map(|range| Some((places.get(range.clone())?, values.get(range)?)))
    }

    /// Hands out each value of an encoding with the number that it is for.
    pub(super) fn each(&self, bytes: &[u8], out: &mut [f32], act: impl Fn(&mut f32, f32)) {
        if self.is_whole() {
            let values = bytes.as_chunks().0.iter().map(|value| f32::from_le_bytes(*value));
            out.iter_mut().zip(values).for_each(|(to, value)| act(to, value));
            return;
        }
        for (block, out) in self.blocks(bytes).zip(out.chunks_mut(BLOCK)) {
            let (places, values) = block.unwrap_or_default();
            for (place, value) in places.iter().zip(values) {
                act(&mut out[usize::from(u16::from_le_bytes(*place))], f32::from_le_bytes(*value));
            }
        }
    }

    /// What comes from the wire is believed only if it is what we would have written.
    fn check(&self, bytes: &[u8], count: usize) -> Result<()> {
        if bytes.len() == self.encoded_len() && count == self.count && (self.is_whole() || self.is_in_order(bytes)) {
            return Ok(());
        }
        Err(Error::new(
            Kind::BadFrame,
            format!("a list that does not hold {} of {count} numbers in the order of their places", self.chosen),
        ))
    }

    /// Whether starts are in order, and places in each block, none of them beyond its end, and zeros after the last.
    fn is_in_order(&self, bytes: &[u8]) -> bool {
        let number = |place: &[u8; 2]| u16::from_le_bytes(*place);
        let mut left = self.count;
        let in_order = self.blocks(bytes).all(|block| {
            let Some((places, _)) = block else { return false };
            // without branches: what is sent to us nearly always is in order
            let pairs = places.iter().zip(places.get(1..).unwrap_or_default());
            let ascend = pairs.fold(true, |ascend, (one, next)| ascend & (number(one) < number(next)));
            let fits = places.last().is_none_or(|last| usize::from(number(last)) < left);
            left = left.saturating_sub(BLOCK);
            ascend & fits
        });
        in_order && bytes[6 * self.chosen + self.starts_len()..].iter().all(|byte| *byte == 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::salt::draw;
    use proptest::collection::vec;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in vec(any::<u8>(), 0..400), count in 1usize..60, ratio in 0.01f64..=1.0) {
            let top = TopK::new(count, ratio).unwrap();
            let mut out = vec![0.0; count];
            if top.decode(&bytes, &mut out).is_ok() {
                prop_assert_eq!(bytes.len(), top.encoded_len());
            }
        }

        #[test]
        fn a_list_is_believed_if_we_would_have_written_it(
            last in 1usize..6, starts in vec(0u32..6, 2), places in vec(0u16..6, 2..5), sorted in any::<bool>(), padding in 0u8..2,
        ) {
            let (mut starts, mut places) = (starts, places);
            if sorted {
                starts.sort_unstable();
                places.sort_unstable();
            }
            let top = TopK { count: 2 * BLOCK + last, chosen: places.len() };
            let padding = &[padding, 0][..places.len() % 2 * 2];
            let bytes = list(&starts, &places, padding);
            let block = |at: usize| starts.iter().filter(|start| **start as usize <= at).count();
            let indices: Vec<usize> = places.iter().enumerate().map(|(at, place)| block(at) * BLOCK + usize::from(*place)).collect();
            let ours = starts.is_sorted()
                && starts.iter().all(|start| *start as usize <= places.len())
                && indices.is_sorted_by(|one, next| one < next)
                && indices.iter().all(|index| *index < top.count)
                && padding.iter().all(|byte| *byte == 0);
            prop_assert_eq!(top.check(&bytes, top.count).is_ok(), ours);
            if ours {
                let mut again = vec![0xa5; top.encoded_len()];
                top.list(indices.iter().map(|index| *index as u32).zip((1..).map(|value| value as f32)), &mut again);
                prop_assert_eq!(again, bytes);
            }
        }
    }

    /// A list with values 1, 2, ..., and no more than it is told.
    fn list(starts: &[u32], places: &[u16], padding: &[u8]) -> Vec<u8> {
        let values = (1..=places.len()).flat_map(|value| (value as f32).to_le_bytes());
        let starts = starts.iter().flat_map(|start| start.to_le_bytes());
        values
            .chain(starts)
            .chain(places.iter().flat_map(|place| place.to_le_bytes()))
            .chain(padding.to_vec())
            .collect()
    }

    #[test]
    fn lists_that_nobody_wrote_are_refused_and_change_nothing() {
        // three of 65,536 · 2 + 3, in three blocks
        let top = TopK { count: 2 * BLOCK + 3, chosen: 3 };
        let refused = |bytes: &[u8]| {
            let mut out = vec![1.0; top.count];
            for result in [top.decode(bytes, &mut out), top.decode_add(bytes, &mut out)] {
                assert!(result.is_err_and(|error| error.kind == Kind::BadFrame));
            }
            out.iter().all(|value| *value == 1.0)
        };
        let good = list(&[1, 2], &[7, 7, 2], &[0, 0]);
        let mut out = vec![1.0; top.count];
        top.decode(&good, &mut out).unwrap();
        assert_eq!((out[7], out[BLOCK + 7], out[2 * BLOCK + 2], out.iter().sum::<f32>()), (1.0, 2.0, 3.0, 6.0));
        // starts: backwards, beyond the end, beyond it and back
        for starts in [[2, 1], [1, 4], [4, 1], [u32::MAX, 2], [4, 4]] {
            assert!(refused(&list(&starts, &[7, 8, 2], &[0, 0])), "{starts:?}");
        }
        // places: twice the same, backwards, beyond the end, beyond it in the second block
        for (starts, places) in
            [([2, 2], [7, 7, 2]), ([0, 2], [8, 7, 2]), ([1, 2], [7, 7, 3]), ([0, 0], [1, 2, 3]), ([0, 0], [0, 2, 1])]
        {
            assert!(refused(&list(&starts, &places, &[0, 0])), "{starts:?} {places:?}");
        }
        // what follows: something, nothing, too much
        for padding in [&[1, 0][..], &[0, 1], &[], &[0], &[0; 4]] {
            assert!(refused(&list(&[1, 2], &[7, 7, 2], padding)), "{padding:?}");
        }
        // any length but one; the right list for another tensor
        assert!((0..good.len()).all(|length| refused(&good[..length])));
        assert!(top.decode(&good, &mut out[1..]).is_err());
        // blocks before the last have room for every place
        assert!(top.decode(&list(&[1, 2], &[u16::MAX, u16::MAX, 0], &[0, 0]), &mut out).is_ok());
        // starts that lead beyond the end and back again where nothing is missed
        let wide = TopK { count: 4 * BLOCK, chosen: 7 };
        let mut out = vec![1.0; wide.count];
        let places = [0, 1, 2, 3, 4, 5, 6];
        assert!(wide.decode(&list(&[3, 100, 3], &places, &[0, 0]), &mut out).is_err());
        assert!(wide.decode(&list(&[3, 3, 3], &places, &[0, 0]), &mut out).is_ok());
    }

    /// Encodes and decodes, with and without residuals, and looks at the bytes themselves.
    fn round_trip(values: &[f32], top: TopK) {
        let chosen = top.select(values);
        let starts =
            (1..values.len().div_ceil(BLOCK)).map(|block| chosen.partition_point(|at| *at < (block * BLOCK) as u32));
        let mut expected: Vec<u8> = chosen.iter().flat_map(|at| values[*at as usize].to_le_bytes()).collect();
        if chosen.len() < values.len() {
            expected.extend(starts.flat_map(|start| (start as u32).to_le_bytes()));
            expected.extend(chosen.iter().flat_map(|at| (*at as u16).to_le_bytes()));
            expected.resize(expected.len().next_multiple_of(4), 0);
        }
        let mut bytes = vec![0xa5; top.encoded_len()];
        top.encode(values, &mut bytes);
        assert!(bytes == expected, "{} of {}", top.chosen, top.count);
        let (mut sparse, mut back, mut left) =
            (vec![0f32; values.len()], vec![7.0; values.len()], vec![0.0; values.len()]);
        chosen.iter().for_each(|at| sparse[*at as usize] = values[*at as usize]);
        top.decode(&bytes, &mut back).unwrap();
        assert!(back == sparse);
        bytes.fill(0xa5);
        top.encode_residual(values, &mut left, &mut bytes);
        assert!(bytes == expected);
        top.decode_add(&bytes, &mut left).unwrap();
        assert!(left == values);
    }

    #[test]
    fn lists_round_trip_whatever_the_blocks() {
        let number = |at: usize| (draw(3, at as u64) >> 40) as f32 / 8_388_608.0 - 1.0;
        for count in [2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 3] {
            let values: Vec<f32> = (0..count).map(number).collect();
            for chosen in [1, 2, count / 100, count / 3, count - 1, count].into_iter().filter(|chosen| *chosen > 0) {
                let top = TopK { count, chosen };
                round_trip(&values, top);
                let places = if chosen == count { 0 } else { 4 * ((count - 1) / BLOCK) + (chosen + chosen % 2) * 2 };
                assert_eq!(top.encoded_len(), 4 * chosen + places);
            }
            // all of it in the last block, and in the first
            for at in [count - 1, 0] {
                let mut values = vec![0f32; count];
                values[at] = -1.0;
                round_trip(&values, TopK { count, chosen: 1 });
            }
        }
    }

    #[test]
    fn few_of_many_round_trip() {
        let count = 10_000_000;
        let mut values = vec![0f32; count];
        for place in 0..40 {
            values[draw(5, place) as usize % count] = 1.0 + place as f32;
        }
        // some are zeros, and all of these in the first block
        for ratio in [1e-7, 2e-6, 1e-5] {
            round_trip(&values, TopK::new(count, ratio).unwrap());
        }
    }
}
