//! What an exchange keeps from round to round, to be saved and to go on with. It belongs to tensors: where they lie in the
//! snapshot may be another place when it is loaded.

use std::ops::Range;

use crate::{Error, Result};

/// Numbers that an exchange keeps, one for each `block` elements of the snapshot.
#[derive(Debug)]
pub(super) struct Kept {
    pub(super) label: &'static str,
    pub(super) block: usize,
    pub(super) values: Vec<f32>,
}

impl Kept {
    /// A number for each element.
    pub(super) fn of_elements(label: &'static str, values: &[f32]) -> Self {
        Kept { label, block: 1, values: values.to_vec() }
    }
}

/// Where numbers belong that were saved: as in [`Kept`].
pub(super) struct Room<'a> {
    pub(super) block: usize,
    pub(super) values: &'a mut [f32],
}

impl<'a> Room<'a> {
    /// A number for each element.
    pub(super) fn of_elements(values: &'a mut [f32]) -> Self {
        Room { block: 1, values }
    }
}

/// All that an exchange keeps at a moment.
#[derive(Debug)]
pub(super) struct Holdings {
    pub(super) round: u64,
    pub(super) living: usize,
    pub(super) kept: Vec<Kept>,
}

/// What a tensor has of all that is kept: labels and numbers.
pub type Labelled = Vec<(&'static str, Vec<f32>)>;

/// A rank's state of its exchanges, as it is saved.
#[derive(Debug)]
pub struct Saved {
    /// The number of the next round, or how far this rank had come when it last pushed.
    pub round: u64,
    /// Members that are there, with this one.
    pub living: usize,
    /// What is kept of each tensor.
    pub tensors: Vec<Labelled>,
}

impl Saved {
    pub(super) fn new(holdings: Holdings, spans: &[Range<usize>]) -> Self {
        let of = |span: &Range<usize>| {
            let part = |kept: &Kept| (kept.label, kept.values[blocks(span, kept.block)].to_vec());
            holdings.kept.iter().filter(|_| !span.is_empty()).map(part).collect()
        };
        Saved { round: holdings.round, living: holdings.living, tensors: spans.iter().map(of).collect() }
    }
}

/// At which rounds ranks were that go on with what they have saved.
#[derive(Clone, Copy, Debug)]
pub struct Rounds {
    /// This one.
    pub mine: u64,
    /// Those that had come least far.
    pub least: u64,
    /// Those that had come furthest.
    pub most: u64,
}

/// The numbers that belong to a tensor.
fn blocks(span: &Range<usize>, block: usize) -> Range<usize> {
    span.start / block..span.end.div_ceil(block)
}

/// Puts a tensor's numbers back. Where several elements share one it is the largest, since tensors may share it too.
pub(super) fn put(room: Room<'_>, span: &Range<usize>, values: &[f32]) -> Result<()> {
    if span.is_empty() {
        return Ok(());
    }
    let into = &mut room.values[blocks(span, room.block)];
    if room.block > 1 {
        let largest = values.iter().copied().fold(0f32, f32::max);
        let same = into.len() == values.len();
        for (at, number) in into.iter_mut().enumerate() {
            *number = number.max(if same { values[at] } else { largest });
        }
        return Ok(());
    }
    if into.len() != values.len() {
        return Err(Error::invalid(format!(
            "{} numbers were kept of a tensor of {} elements; try: a checkpoint of the same model",
            values.len(),
            into.len()
        )));
    }
    into.copy_from_slice(values);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_of_a_tensor_fits_another_layout() {
        let numbers: Vec<f32> = (0..40).map(|at| at as f32).collect();
        let kept = vec![
            Kept::of_elements("elements", &numbers),
            Kept { label: "blocks", block: 16, values: vec![3.0, 1.0, 2.0] },
        ];
        let saved = Saved::new(Holdings { round: 7, living: 2, kept }, &[0..10, 16..40, 40..40]);
        assert_eq!((saved.round, saved.living), (7, 2));
        assert_eq!(saved.tensors[0], [("elements", numbers[..10].to_vec()), ("blocks", vec![3.0])]);
        assert_eq!(saved.tensors[1], [("elements", numbers[16..].to_vec()), ("blocks", vec![1.0, 2.0])]);
        assert!(saved.tensors[2].is_empty());

        // the second one comes first now, and shares its last block with the first
        let (mut elements, mut by_block) = (vec![0.0; 34], vec![0.0; 3]);
        for (span, labelled) in [24..34, 0..24].iter().zip(&saved.tensors) {
            put(Room::of_elements(&mut elements), span, &labelled[0].1).unwrap();
            put(Room { block: 16, values: &mut by_block }, span, &labelled[1].1).unwrap();
        }
        assert_eq!(elements, [&numbers[16..], &numbers[..10]].concat());
        assert_eq!(by_block, [1.0, 3.0, 3.0]);
        // another number of blocks: the largest stands for all
        let mut other = vec![0.0; 3];
        put(Room { block: 16, values: &mut other }, &(8..40), &[1.0, 2.0]).unwrap();
        assert_eq!(other, [2.0, 2.0, 2.0]);
        assert!(put(Room::of_elements(&mut elements), &(0..10), &[1.0]).is_err());
    }
}
