//! The step `Select`: the mean over all ranks of the largest elements of each tensor.
//!
//! 1. The ranks of a host sum the bucket in shared memory, in full precision.
//! 2. Everyone adds what was left from earlier rounds and selects the largest elements of each tensor. The ranks of a host
//!    have the same sum and so select the same; each sends the lists of some of the tensors.
//! 3. Everyone gets all lists and adds them up, hosts in ascending order, so all end with the same bits.
//!
//! Of N elements a host sends 6·ratio·N bytes to every other host. What is left is kept on every rank of the host. Tensors
//! that are no matrices (biases, scales) are sent whole: they are few, and a late one costs more than it weighs.

use std::ops::Range;

use super::memory::{Keeper, Memory};
use super::pipeline::{Round, with_floats};
use crate::bucket::{Bucket, Tensor};
use crate::buffer::{Owned, Shaped};
use crate::call::Call;
use crate::codec::TopK;
use crate::coding::SAMPLE;
use crate::dtype::{DType, Op};
use crate::{Error, Kind, Result};

/// What is kept is called this.
pub const LEFT: &str = "left";

pub(super) struct Select {
    /// The elements of each slot, and how many of them are sent.
    spans: Vec<(Range<usize>, TopK)>,
}

/// The elements of each slot of a bucket, and how many of them are sent.
pub fn selection(ratio: f64, bucket: &Bucket, tensors: &[Tensor]) -> Result<Vec<(Range<usize>, TopK)>> {
    let span = |slot: &crate::bucket::Slot| {
        let Tensor { count, rows, .. } = tensors[slot.tensor];
        // asked for in either case: a wrong ratio is an error wherever it stands
        let (some, all) = (TopK::new(count, ratio)?, TopK::new(count, 1.0)?);
        Ok((slot.offset..slot.offset + count, if rows > 1 { some } else { all }))
    };
    bucket.slots.iter().map(span).collect()
}

/// Bytes that a rank sends to other hosts: what an all-reduce between these would of the values from which it has selected, and
/// its lists, of which every other host gets a copy.
pub fn list_traffic(values: u64, lists: u64, hosts: usize) -> (u64, u64) {
    let others = hosts as u64 - 1;
    (2 * others * values / hosts as u64, others * lists)
}

impl Select {
    pub(super) fn build(ratio: f64, bucket: &Bucket, tensors: &[Tensor]) -> Result<(Self, Vec<Memory>)> {
        let spans = selection(ratio, bucket, tensors)?;
        Ok((Select { spans }, vec![Memory::of_elements(LEFT, Keeper::Each, bucket, tensors)]))
    }

    pub(super) fn run(&self, round: &Round<'_>, left: &mut Memory) -> Result<()> {
        let world = round.group.ranks().len();
        let (hosts, seat) = round.group.seats();
        let shape = vec![round.buffer.count as u64];
        round.call(Call::HostReduce { tensor: Shaped { buffer: round.buffer, shape }, op: Op::Sum })?;
        let (lists, plain) = round.tally.time(|| self.encode(round, left, hosts[seat.0].len(), seat.1));
        let (plain, coded) = list_traffic(plain, lists.len() as u64, hosts.len());
        round.tally.add(plain, coded, 0);
        let mut mine = Owned::new(DType::U8, vec![lists.len() as u64]);
        mine.bytes_mut().copy_from_slice(&lists);
        let tensor = Shaped { shape: mine.shape.clone(), buffer: mine.buffer() };
        let everyones = round.call(Call::AllGather { tensor })?;
        for (host, members) in hosts.iter().enumerate() {
            let lists: Vec<&[u8]> = members.iter().map(|member| everyones[*member].bytes()).collect();
            round.tally.time(|| self.add(round, host == 0, &lists)).map_err(|error| {
                let rank = round.group.ranks()[members[0]];
                Error { rank: Some(rank), ..error }
            })?;
        }
        for (range, _) in &self.spans {
            with_floats(round.buffer, range.clone(), |values| {
                values.iter_mut().for_each(|value| *value /= world as f32);
            });
        }
        Ok(())
    }

    /// The slots whose lists a member of a host sends, out of so many members: about as many bytes each.
    fn of_seat(&self, members: usize, seat: usize) -> impl Iterator<Item = usize> {
        let total = self.spans.iter().map(|(_, top)| top.encoded_len()).sum::<usize>().max(1);
        let mut before = 0;
        let carrier = move |(_, top): &(Range<usize>, TopK)| {
            before += top.encoded_len();
            (before - top.encoded_len()) * members / total
        };
        self.spans.iter().map(carrier).enumerate().filter(move |(_, carrier)| *carrier == seat).map(|(slot, _)| slot)
    }

    /// Selects from all slots, and gives the lists that this rank sends, and the bytes from which these were selected.
    fn encode(&self, round: &Round<'_>, left: &mut Memory, members: usize, seat: usize) -> (Vec<u8>, u64) {
        let mut mine = self.of_seat(members, seat).peekable();
        let (mut lists, mut plain) = (Vec::new(), 0);
        for (slot, (range, top)) in self.spans.iter().enumerate() {
            let mut list = vec![0; top.encoded_len()];
            with_floats(round.buffer, range.clone(), |values| {
                let left = left.slot(slot);
                let sums = values.iter().zip(&*left).take(SAMPLE).map(|(value, left)| value + left);
                let exact: Vec<f32> = sums.collect();
                top.encode_residual(values, left, &mut list);
                round.tally.sample(exact.into_iter().zip(left.iter().copied()));
            });
            round.tally.add(0, 0, top.non_finite(&list) as u64);
            if mine.next_if_eq(&slot).is_some() {
                lists.extend_from_slice(&list);
                plain += range.len() as u64 * 4;
            }
        }
        (lists, plain)
    }

    /// Adds the lists of a host's members to the bucket; those of the first host begin it.
    fn add(&self, round: &Round<'_>, begin: bool, lists: &[&[u8]]) -> Result<()> {
        for (seat, list) in lists.iter().enumerate() {
            let mut rest = *list;
            for slot in self.of_seat(lists.len(), seat) {
                let (range, top) = &self.spans[slot];
                let (list, after) = rest.split_at_checked(top.encoded_len()).ok_or_else(short)?;
                rest = after;
                with_floats(round.buffer, range.clone(), |values| match begin {
                    true => top.decode(list, values),
                    false => top.decode_add(list, values),
                })?;
            }
            if !rest.is_empty() {
                return Err(short());
            }
        }
        Ok(())
    }
}

fn short() -> Error {
    Error::new(Kind::BadFrame, "lists of selected elements of another length; try: the same version on every rank")
}
