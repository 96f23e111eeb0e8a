//! Which tensors share a bucket, and where each of them lies in it. Pure planning: a bucket knows no algorithm.
//!
//! ```text
//! bucket  [ tensor 7 | . | tensor 5 | tensor 3 | . | used 7, 5, 3 ]        . is padding, always zero
//! ```
//! Behind the tensors lies a number for each of them: 1 where this rank has a value for it in this round, 0 where not. It
//! is reduced with the tensors, so that everybody knows without a further message which of them nobody used. Where buckets
//! are encoded these numbers would not survive, and travel by themselves.

use crate::buffer::Place;
use crate::digest::digest;
use crate::dtype::DType;
use crate::{Error, Result};

/// Tensors begin at multiples of this many bytes: no cache line has two writers, and every instruction set is content.
const ALIGN: usize = 128;

/// A tensor that will lie in a bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// The name of its parameter, for messages and for state.
    pub name: String,
    /// How many elements.
    pub count: usize,
    /// How many rows, where it is a matrix in memory; else 1.
    pub rows: usize,
    /// Their type.
    pub dtype: DType,
    /// Where its bucket must be.
    pub place: Place,
}

impl Tensor {
    fn bytes(&self) -> usize {
        self.count * self.dtype.size()
    }
}

/// A tensor's place in a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// Which tensor, as a place in the list of all.
    pub tensor: usize,
    /// Its first element.
    pub offset: usize,
}

/// Tensors of one type in one place that are communicated together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bucket {
    /// The type of all elements.
    pub dtype: DType,
    /// Where it is.
    pub place: Place,
    /// The tensors in it, in the order in which they become ready.
    pub slots: Vec<Slot>,
    /// Where the numbers that tell which tensors are used begin, one for each slot.
    pub used: usize,
    /// Elements in all.
    pub count: usize,
    /// Whether it waits for the end of backward: its tensors get several gradients in one.
    pub late: bool,
}

impl Bucket {
    /// Its length in bytes.
    pub fn bytes(&self) -> usize {
        self.count * self.dtype.size()
    }
}

/// How large buckets are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Bytes of the first one, which is small so that communication begins early. Each of those after it may be twice as
    /// large as the one before: a layer that is larger than the first must not make all the others wait for a full one.
    pub first: usize,
    /// Bytes of a full one.
    pub rest: usize,
}

impl Sizes {
    /// Sizes for buckets of `bytes`.
    pub fn new(bytes: usize) -> Result<Self> {
        match bytes {
            0 => Err(Error::invalid("bucket_bytes is 0, but a bucket must hold something; try: 8388608, or \"auto\"")),
            _ => Ok(Sizes { first: bytes.min(1 << 20), rest: bytes }),
        }
    }

    /// How many bytes a bucket may have, by its place.
    fn of(self, bucket: usize) -> usize {
        let doubled = self.first.saturating_mul(1 << bucket.min(32));
        doubled.min(self.rest)
    }

    /// Tensors of fewer bytes are crumbs: they go with what becomes ready after them. In a bucket that is nearly full, the
    /// bias of the next layer would make all before it wait for that layer; alone, it would be a message of its own.
    fn crumb(self) -> usize {
        self.first / 16
    }
}

/// How buckets must be made for what is done with them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grain {
    /// Tensors begin at multiples of this many elements, so that no block of a codec holds two of them.
    pub block: usize,
    /// Whether the numbers that tell which tensors are used lie in the buckets.
    pub used_inside: bool,
}

impl Grain {
    /// Tensors begin at multiples of this many elements: whole lines, and whole blocks.
    fn step(self, dtype: DType) -> usize {
        let line = ALIGN / dtype.size();
        (1..=line).map(|times| times * self.block).find(|step| step.is_multiple_of(line)).unwrap_or(line * self.block)
    }
}

impl Default for Grain {
    fn default() -> Self {
        Grain { block: 1, used_inside: true }
    }
}

/// All buckets, in the order in which they go out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// The buckets.
    pub buckets: Vec<Bucket>,
    /// For each tensor its bucket and its slot there.
    pub homes: Vec<(usize, usize)>,
}

impl Plan {
    /// Puts tensors into buckets. `order` names each tensor once, in the order in which they become ready; `late` are
    /// those whose value is final only at the end of backward.
    ///
    /// A bucket takes tensors of its kind until the next one would make it larger than it may be. A tensor that is larger
    /// than any gets one of its own. Buckets go out in the order in which their last tensors become ready.
    pub fn new(tensors: &[Tensor], order: &[usize], late: &[bool], sizes: Sizes, grain: Grain) -> Result<Self> {
        let mut seen = vec![false; tensors.len()];
        for &tensor in order {
            match seen.get_mut(tensor) {
                Some(seen) if !*seen => *seen = true,
                _ => return Err(disorder(order.len(), tensors.len())),
            }
        }
        if order.len() != tensors.len() || late.len() != tensors.len() {
            return Err(disorder(order.len(), tensors.len()));
        }
        let mut groups: Vec<Vec<Turn>> =
            kinds(tensors, order, late).iter().flat_map(|kind| gathered(kind, tensors, sizes)).collect();
        groups.sort_by_key(|group| group.last().map(|turn| turn.number));
        let mut homes = vec![(0, 0); tensors.len()];
        let mut buckets = Vec::with_capacity(groups.len());
        for group in &groups {
            for (slot, turn) in group.iter().enumerate() {
                homes[turn.tensor] = (buckets.len(), slot);
            }
            buckets.push(laid_out(group, tensors, late, grain));
        }
        Ok(Plan { buckets, homes })
    }

    /// The tensors in the order in which their buckets go out: what another rank needs to make the same plan.
    pub fn order(&self) -> Vec<usize> {
        self.buckets.iter().flat_map(|bucket| bucket.slots.iter().map(|slot| slot.tensor)).collect()
    }

    /// A number that differs between plans that differ.
    pub fn hash(&self, tensors: &[Tensor]) -> u64 {
        let mut bytes = Vec::new();
        for bucket in &self.buckets {
            bytes.extend([bucket.dtype as u8, u8::from(bucket.late)]);
            bytes.extend((bucket.count as u64).to_le_bytes());
            for slot in &bucket.slots {
                bytes.extend(tensors[slot.tensor].name.as_bytes());
                bytes.extend((slot.offset as u64).to_le_bytes());
            }
        }
        digest(&bytes)
    }
}

/// When a tensor becomes ready, among all.
#[derive(Clone, Copy, Debug)]
struct Turn {
    number: usize,
    tensor: usize,
}

/// The tensors that can share buckets, in the order in which they become ready; those that are late come after all others.
fn kinds(tensors: &[Tensor], order: &[usize], late: &[bool]) -> Vec<Vec<Turn>> {
    let (at_once, at_end): (Vec<usize>, Vec<usize>) = order.iter().partition(|tensor| !late[**tensor]);
    let mut kinds: Vec<Vec<Turn>> = Vec::new();
    for (number, tensor) in at_once.into_iter().chain(at_end).enumerate() {
        let of = |tensor: usize| (tensors[tensor].dtype, tensors[tensor].place, late[tensor]);
        let turn = Turn { number, tensor };
        match kinds.iter_mut().find(|kind| of(kind[0].tensor) == of(tensor)) {
            Some(kind) => kind.push(turn),
            None => kinds.push(vec![turn]),
        }
    }
    kinds
}

/// Tensors of one kind by buckets.
fn gathered(kind: &[Turn], tensors: &[Tensor], sizes: Sizes) -> Vec<Vec<Turn>> {
    let bytes = |turns: &[Turn]| turns.iter().map(|turn| tensors[turn.tensor].bytes()).sum::<usize>();
    let mut groups: Vec<Vec<Turn>> = Vec::new();
    for portion in portions(kind, tensors, sizes) {
        let limit = sizes.of(groups.len().saturating_sub(1));
        match groups.last_mut() {
            Some(group) if bytes(group) + bytes(portion) <= limit => group.extend(portion),
            _ => groups.push(portion.to_vec()),
        }
    }
    groups
}

/// What is not divided between buckets: a tensor with the crumbs before it, or crumbs that are as much as one. Crumbs do not
/// wait for a tensor that is larger than a bucket: they were measured to take its memory once more, while its gradient is made.
fn portions<'a>(kind: &'a [Turn], tensors: &[Tensor], sizes: Sizes) -> impl Iterator<Item = &'a [Turn]> {
    let bytes = |turn: &Turn| tensors[turn.tensor].bytes();
    let mut so_far = 0;
    kind.chunk_by(move |turn, next| {
        so_far += bytes(turn);
        let goes_on = so_far < sizes.crumb() && bytes(next) <= sizes.rest;
        so_far *= usize::from(goes_on);
        goes_on
    })
}

/// A bucket of these tensors, one after the other.
fn laid_out(group: &[Turn], tensors: &[Tensor], late: &[bool], grain: Grain) -> Bucket {
    let Tensor { dtype, place, .. } = tensors[group[0].tensor];
    let step = grain.step(dtype);
    let mut end = 0usize;
    let slots = group.iter().map(|&Turn { tensor, .. }| {
        let offset = end.next_multiple_of(step);
        end = offset + tensors[tensor].count;
        Slot { tensor, offset }
    });
    let slots: Vec<Slot> = slots.collect();
    let used = end.next_multiple_of(step);
    let count = used + if grain.used_inside { slots.len() } else { 0 };
    Bucket { dtype, place, slots, used, count, late: late[group[0].tensor] }
}

fn disorder(given: usize, wanted: usize) -> Error {
    Error::invalid(format!("an order of {given} tensors that does not name each of {wanted} once"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn tensor(name: usize, count: usize, dtype: DType) -> Tensor {
        Tensor { name: name.to_string(), count, rows: 1, dtype, place: Place::Host }
    }

    #[test]
    fn a_small_first_bucket_then_full_ones() {
        let tensors: Vec<Tensor> = (0..6).map(|at| tensor(at, 256, DType::F32)).collect();
        let order: Vec<usize> = (0..6).rev().collect();
        let sizes = Sizes { first: 1024, rest: 3000 };
        let plan = Plan::new(&tensors, &order, &[false; 6], sizes, Grain::default()).unwrap();
        let names: Vec<Vec<usize>> =
            plan.buckets.iter().map(|bucket| bucket.slots.iter().map(|slot| slot.tensor).collect()).collect();
        assert_eq!(names, [vec![5], vec![4, 3], vec![2, 1], vec![0]]);
        assert_eq!(plan.order(), order);
        assert_eq!(plan.homes[3], (1, 1));
    }

    #[test]
    fn buckets_grow_to_their_full_size() {
        // layers of 1.3 MB, none of which fits into the first bucket with another
        let tensors: Vec<Tensor> = (0..12).map(|at| tensor(at, [576, 576 * 576][at % 2], DType::F32)).collect();
        let order: Vec<usize> = (0..12).collect();
        let plan = Plan::new(&tensors, &order, &[false; 12], Sizes::new(8 << 20).unwrap(), Grain::default()).unwrap();
        let tensors_in: Vec<usize> = plan.buckets.iter().map(|bucket| bucket.slots.len()).collect();
        assert_eq!(tensors_in, [2, 2, 6, 2]);
    }

    #[test]
    fn crumbs_go_with_what_is_ready_after_them() {
        // biases and weights by turns; two layers would fit into a bucket but for a crumb's room
        let tensors: Vec<Tensor> = (0..16).map(|at| tensor(at, [128, 1 << 14][at % 2], DType::F32)).collect();
        let order: Vec<usize> = (0..16).collect();
        let sizes = Sizes { first: 66_000, rest: 132_700 };
        let plan = Plan::new(&tensors, &order, &[false; 16], sizes, Grain::default()).unwrap();
        let firsts: Vec<usize> = plan.buckets.iter().map(|bucket| bucket.slots[0].tensor).collect();
        assert_eq!(firsts, [0, 2, 4, 8, 12]);
        // none after them, and so many that they are as much as a tensor
        let tensors: Vec<Tensor> =
            (0..16).map(|at| tensor(at, [128, 1 << 14][usize::from(at == 0)], DType::F32)).collect();
        let plan = Plan::new(&tensors, &order, &[false; 16], sizes, Grain::default()).unwrap();
        let tensors_in: Vec<usize> = plan.buckets.iter().map(|bucket| bucket.slots.len()).collect();
        assert_eq!(tensors_in, [1, 15]);
    }

    #[test]
    fn buckets_go_out_when_their_last_tensor_is_ready() {
        let tensors = [tensor(0, 10, DType::F32), tensor(1, 10, DType::F16), tensor(2, 10, DType::F32)];
        let plan =
            Plan::new(&tensors, &[0, 1, 2], &[false; 3], Sizes::new(1 << 20).unwrap(), Grain::default()).unwrap();
        assert_eq!(plan.buckets.iter().map(|bucket| bucket.dtype).collect::<Vec<_>>(), [DType::F16, DType::F32]);
    }

    #[test]
    fn late_tensors_come_last_and_alone() {
        let tensors: Vec<Tensor> = (0..3).map(|at| tensor(at, 10, DType::F32)).collect();
        let plan =
            Plan::new(&tensors, &[0, 1, 2], &[true, false, false], Sizes::new(1 << 20).unwrap(), Grain::default())
                .unwrap();
        assert_eq!(plan.order(), [1, 2, 0]);
        assert_eq!(plan.buckets.iter().map(|bucket| bucket.late).collect::<Vec<_>>(), [false, true]);
    }

    #[test]
    fn wrong_orders_and_sizes_are_refused() {
        let tensors = [tensor(0, 10, DType::F32), tensor(1, 10, DType::F32)];
        for order in [vec![0], vec![0, 0], vec![0, 2], vec![0, 1, 1]] {
            assert!(Plan::new(&tensors, &order, &[false; 2], Sizes { first: 1, rest: 1 }, Grain::default()).is_err());
        }
        assert!(Sizes::new(0).unwrap_err().message.contains("try:"));
    }

    proptest! {
        #[test]
        fn every_tensor_has_one_aligned_place_of_its_own(
            specs in proptest::collection::vec((0usize..5000, 0usize..3, any::<bool>()), 1..40),
            rest in 1usize..20_000, seed in any::<u64>(), block in 1usize..300, used_inside in any::<bool>(),
        ) {
            let dtypes = [DType::F32, DType::F16, DType::F64];
            let tensors: Vec<Tensor> =
                specs.iter().enumerate().map(|(at, (count, kind, _))| tensor(at, *count, dtypes[*kind])).collect();
            let late: Vec<bool> = specs.iter().map(|(_, _, late)| *late).collect();
            let mut order: Vec<usize> = (0..tensors.len()).collect();
            order.sort_by_key(|at| (*at as u64 + 1).wrapping_mul(seed | 1));
            let (sizes, grain) = (Sizes::new(rest).unwrap(), Grain { block, used_inside });
            let plan = Plan::new(&tensors, &order, &late, sizes, grain).unwrap();
            for (at, bucket) in plan.buckets.iter().enumerate() {
                let mut end = 0;
                for (slot, place) in bucket.slots.iter().enumerate() {
                    prop_assert_eq!(plan.homes[place.tensor], (at, slot));
                    prop_assert!(place.offset >= end && (place.offset * bucket.dtype.size()).is_multiple_of(ALIGN));
                    prop_assert!(place.offset.is_multiple_of(block));
                    prop_assert_eq!((bucket.dtype, bucket.late), (tensors[place.tensor].dtype, late[place.tensor]));
                    end = place.offset + tensors[place.tensor].count;
                }
                let numbers = if used_inside { bucket.slots.len() } else { 0 };
                prop_assert!(bucket.used >= end && bucket.count == bucket.used + numbers);
                let bytes = bucket.slots.iter().map(|slot| tensors[slot.tensor].bytes());
                let (all, largest) = (bytes.clone().sum::<usize>(), bytes.max().unwrap());
                prop_assert!(all <= rest || all - largest < sizes.crumb().max(1));
            }
            let mut all = plan.order();
            prop_assert_eq!(Plan::new(&tensors, &all, &late, sizes, grain).unwrap().order().len(), all.len());
            all.sort_unstable();
            prop_assert_eq!(all, (0..tensors.len()).collect::<Vec<_>>());
        }
    }
}
