//! What a step keeps from round to round. It belongs to tensors and not to buckets: it is saved and loaded by their names,
//! and moves along when buckets change.

use std::ops::Range;
use std::sync::Arc;

use offbeat_transport::shm::arena::Piece;

use super::pipeline::with_floats;
use crate::bucket::{Bucket, Tensor};
use crate::buffer::Buffer;

/// Who has the numbers, which decides what becomes of them when ranks or buckets are not what they were.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keeper {
    /// Every rank has the same.
    All,
    /// Every rank has its own.
    Each,
    /// Whoever carries or sums an element has its number, and with other buckets somebody else does.
    Carrier,
}

/// A tensor's part of what a step keeps, to be saved or moved.
#[derive(Clone, Debug, PartialEq)]
pub struct Saved {
    /// The number of the step, and what the step calls it.
    pub name: String,
    /// Who has it.
    pub keeper: Keeper,
    /// The numbers.
    pub values: Vec<f32>,
}

/// The elements of each slot of a bucket.
pub fn spans(bucket: &Bucket, tensors: &[Tensor]) -> Vec<Range<usize>> {
    bucket.slots.iter().map(|slot| slot.offset..slot.offset + tensors[slot.tensor].count).collect()
}

/// Numbers of all tensors of a bucket.
pub(super) struct Memory {
    pub(super) name: String,
    pub(super) keeper: Keeper,
    store: Store,
    /// Where each slot of the bucket has its numbers.
    places: Vec<Range<usize>>,
}

enum Store {
    /// Pages that are never used do not exist.
    Own(Vec<f32>),
    /// For functions of the user's, which may hold on to it.
    Lent(Arc<Piece>),
}

impl Memory {
    /// A number for each element of the bucket.
    pub(super) fn of_elements(name: &str, keeper: Keeper, bucket: &Bucket, tensors: &[Tensor]) -> Self {
        let places = spans(bucket, tensors);
        Memory { name: name.to_owned(), keeper, store: Store::Own(vec![0.0; bucket.count]), places }
    }

    /// So many numbers for each slot.
    pub(super) fn of_slots(name: &str, keeper: Keeper, lens: impl IntoIterator<Item = usize>) -> Self {
        let mut end = 0;
        let place = |len: usize| {
            end += len;
            end - len..end
        };
        let places: Vec<Range<usize>> = lens.into_iter().map(place).collect();
        Memory { name: name.to_owned(), keeper, store: Store::Own(vec![0.0; end]), places }
    }

    /// The same in memory that others may hold on to; it is as long as `bucket` has elements, and zero.
    pub(super) fn lent(self, piece: Piece) -> Self {
        Memory { store: Store::Lent(Arc::new(piece)), ..self }
    }

    pub(super) fn piece(&self) -> Option<&Arc<Piece>> {
        match &self.store {
            Store::Own(_) => None,
            Store::Lent(piece) => Some(piece),
        }
    }

    /// Takes the values of a bucket, whose elements these numbers belong to.
    pub(super) fn take(&mut self, buffer: Buffer) {
        for slot in 0..self.places.len() {
            let range = self.places[slot].clone();
            with_floats(buffer, range, |values| self.slot(slot).copy_from_slice(values));
        }
    }

    /// All numbers.
    pub(super) fn values(&mut self) -> &mut [f32] {
        match &mut self.store {
            Store::Own(values) => values,
            // SAFETY: the piece is aligned, was filled when it was made, and is used by its pipeline only; who else holds
            // it was told that it may change.
            Store::Lent(piece) => unsafe {
                std::slice::from_raw_parts_mut(piece.start().cast::<f32>(), piece.len() / size_of::<f32>())
            },
        }
    }

    /// The numbers of a slot.
    pub(super) fn slot(&mut self, slot: usize) -> &mut [f32] {
        let place = self.places[slot].clone();
        &mut self.values()[place]
    }
}
