//! The largest numbers of many, by absolute value, and where they are. `list.rs` has their encoding.
//!
//! The smallest that is sent is found without a sort ([`threshold`]). Of equal ones the first are taken, so it is always as
//! many as were asked for.
//!
//! Counting all keys takes longer than reading them. So a few are looked at first, to guess a key that somewhat more have
//! than are sent; those that reach it are gathered in one pass, and only among them is counted. Where the guess was wrong,
//! all are counted after all: it decides how long it takes, and nothing else.

use super::lanes::{Lanes, Loop, widest};
use super::salt::draw;
use super::threshold::{GROUP, each_group_from, key, reaches, threshold};
use crate::{Error, Result};

/// Numbers that are looked at to guess which are large.
const SAMPLE: usize = 8192;
/// From how many numbers on, and up to which share of them, guessing pays.
const MANY: usize = 1 << 16;
const FEW: usize = 16;

/// How many of how many are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TopK {
    pub(super) count: usize,
    pub(super) chosen: usize,
}

impl TopK {
    /// A share of `count` numbers, rounded up; at least one.
    pub fn new(count: usize, ratio: f64) -> Result<Self> {
        if !(ratio > 0.0 && ratio <= 1.0) {
            return Err(Error::invalid(format!("ratio {ratio} is not over 0 and up to 1; try: 0.01")));
        }
        if u32::try_from(count).is_err() {
            return Err(Error::unsupported(format!("{count} numbers have indices over 32 bits; try: smaller tensors")));
        }
        // 0.07 · 100 is a little over 7
        let chosen = (count as f64 * ratio * (1.0 - 1e-12)).ceil() as usize;
        Ok(TopK { count, chosen: chosen.clamp(1, count.max(1)).min(count) })
    }

    /// How many are sent.
    pub fn chosen(&self) -> usize {
        self.chosen
    }

    /// Where the largest numbers are, in ascending order.
    pub fn select(&self, values: &[f32]) -> Vec<u32> {
        let mut indices = Vec::with_capacity(self.chosen);
        let (least, mut equal) = threshold(values, self.chosen);
        each_group_from(values, least, |start, group| {
            for (index, key) in (start as u32..).zip(group.iter().map(|value| key(*value))) {
                if key > least || key == least && equal > 0 {
                    equal -= usize::from(key == least);
                    indices.push(index);
                }
            }
        });
        indices
    }

    /// Encodes the largest numbers.
    pub fn encode(&self, values: &[f32], out: &mut [u8]) {
        let mut large = Large::default();
        if let Some(least) = self.guess(|at| values[at]) {
            widest(Gather { values, least, large: &mut large });
        }
        self.write(&large, values, out);
    }

    /// Encodes the largest numbers of `values + residual`, and leaves all others in `residual`. Where a sum is not finite
    /// the residual stays as it was.
    pub fn encode_residual(&self, values: &[f32], residual: &mut [f32], out: &mut [u8]) {
        let least = self.guess(|at| values[at] + residual[at]).unwrap_or(key(f32::INFINITY));
        // the residual becomes the sum, and what it must become again is set aside
        let (mut large, mut kept) = (Large::default(), Vec::new());
        widest(Add { values, residual, least, large: &mut large, kept: &mut kept });
        self.write(&large, residual, out);
        self.each(out, residual, |left, _| *left = 0.0);
        kept.into_iter().for_each(|(at, old)| residual[at] = old);
    }

    /// A key that somewhat more numbers should have than are sent, if it pays to guess one.
    fn guess(&self, value: impl Fn(usize) -> f32) -> Option<i32> {
        if self.count < MANY || self.chosen > self.count / FEW {
            return None;
        }
        // one of each stretch, anywhere in it: what repeats in the data shall not repeat in the sample
        let stretch = self.count / SAMPLE;
        let place = |at: usize| at * stretch + draw(0, at as u64) as usize % stretch;
        let mut sample: Vec<i32> = (0..SAMPLE).map(|at| key(value(place(at)))).collect();
        // half as many again, and four deviations of what a sample says
        let share = (self.chosen * SAMPLE).div_ceil(self.count);
        let above = share + share / 2 + 4 * share.isqrt() + 4;
        Some(*sample.select_nth_unstable(SAMPLE - 1 - above.min(SAMPLE - 1)).1)
    }

    /// Encodes the largest of all values; if these are among the large ones, only those are looked at.
    fn write(&self, large: &Large, values: &[f32], out: &mut [u8]) {
        if self.is_whole() {
            out.as_chunks_mut().0.iter_mut().zip(values).for_each(|(sent, value)| *sent = value.to_le_bytes());
        } else if large.values.len() >= self.chosen {
            let among = TopK { count: large.values.len(), chosen: self.chosen };
            let places = among.select(&large.values).into_iter().map(|at| at as usize);
            self.list(places.map(|at| (large.indices[at], large.values[at])), out);
        } else {
            let all = self.select(values).into_iter();
            self.list(all.map(|index| (index, values[index as usize])), out);
        }
    }
}

/// Numbers that are large, and where, in ascending order.
#[derive(Default)]
struct Large {
    indices: Vec<u32>,
    values: Vec<f32>,
}

impl Large {
    /// Takes those of a group that have a key of `least` or more.
    #[inline(always)]
    fn take(&mut self, start: usize, group: &[f32], least: i32) {
        // without branches, which nobody could foretell
        let (mut indices, mut values, mut count) = ([0u32; GROUP], [0f32; GROUP], 0);
        for (index, value) in (start as u32..).zip(group) {
            (indices[count % GROUP], values[count % GROUP]) = (index, *value);
            count += usize::from(key(*value) >= least);
        }
        self.indices.extend_from_slice(&indices[..count.min(GROUP)]);
        self.values.extend_from_slice(&values[..count.min(GROUP)]);
    }
}

/// Gathers the large ones of some values.
struct Gather<'a> {
    values: &'a [f32],
    least: i32,
    large: &'a mut Large,
}

impl Loop for Gather<'_> {
    #[inline(always)]
    fn run<V: Lanes>(self) {
        each_group_from(self.values, self.least, |start, group| self.large.take(start, group, self.least));
    }
}

/// Adds values to residuals, and gathers the large sums. Where one is not finite, its place and the residual are kept.
struct Add<'a> {
    values: &'a [f32],
    residual: &'a mut [f32],
    least: i32,
    large: &'a mut Large,
    kept: &'a mut Vec<(usize, f32)>,
}

impl Loop for Add<'_> {
    #[inline(always)]
    fn run<V: Lanes>(mut self) {
        let ((values, last), count) = (self.values.as_chunks::<GROUP>(), self.residual.len() / GROUP * GROUP);
        let (groups, rest) = std::mem::take(&mut self.residual).split_at_mut(count);
        for (at, (values, residual)) in values.iter().zip(groups.as_chunks_mut::<GROUP>().0).enumerate() {
            let mut sums = *residual;
            sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
            if reaches(&sums, self.least) {
                self.look(at * GROUP, &sums, residual);
            }
            *residual = sums;
        }
        let mut sums = [0f32; GROUP];
        let sums = &mut sums[..rest.len()];
        sums.iter_mut().zip(&*rest).zip(last).for_each(|((sum, residual), value)| *sum = residual + value);
        self.look(count, sums, rest);
        rest.copy_from_slice(sums);
    }
}

impl Add<'_> {
    #[inline(always)]
    fn look(&mut self, start: usize, sums: &[f32], residual: &[f32]) {
        self.large.take(start, sums, self.least);
        if reaches(sums, key(f32::INFINITY)) {
            let odd = sums.iter().zip(residual).enumerate().filter(|(_, (sum, _))| !sum.is_finite());
            self.kept.extend(odd.map(|(at, (_, old))| (start + at, *old)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    /// By sorting.
    fn expected(values: &[f32], chosen: usize) -> Vec<u32> {
        let mut order: Vec<u32> = (0..values.len() as u32).collect();
        order.sort_by_key(|index| std::cmp::Reverse(values[*index as usize].to_bits() & 0x7fff_ffff));
        order.truncate(chosen);
        order.sort_unstable();
        order
    }

    fn some_values() -> impl Strategy<Value = Vec<f32>> {
        prop_oneof![
            vec(-1f32..1.0, 0..3000),
            vec(any::<u32>().prop_map(f32::from_bits), 0..3000),
            // many equal ones
            vec((0i8..4).prop_map(f32::from), 0..3000),
            vec(Just(0f32), 0..300),
            vec(prop_oneof![20 => Just(1f32), 1 => Just(f32::NAN), 1 => Just(f32::INFINITY)], 0..600),
            // keys that differ in their last digit only
            vec((0x3f80_0000u32..0x3f80_0020).prop_map(f32::from_bits), 0..600),
        ]
    }

    proptest! {
        #[test]
        fn the_same_as_sorting(values in some_values(), ratio in 0.0001f64..=1.0) {
            let top = TopK::new(values.len(), ratio).unwrap();
            prop_assert_eq!(top.select(&values), expected(&values, top.chosen()));
        }

        #[test]
        fn guesses_change_nothing(kind in 0u8..5, ratio in 0.0005f64..0.06, key in any::<u64>()) {
            let count = MANY + (key % 1000) as usize;
            let number = |at: usize| (draw(key, at as u64) >> 40) as f32 / 8_388_608.0 - 1.0;
            let mut values: Vec<f32> = (0..count).map(number).collect();
            for (at, value) in values.iter_mut().enumerate() {
                *value *= match kind {
                    0 => 1.0,
                    // most of them zero, all of them alike, the large ones side by side, and one that is not finite
                    1 => f32::from(at % 97 == 0),
                    2 => 1.0 / *value,
                    3 => if at < count / 50 { 1e3 } else { 1.0 },
                    _ => if at == count / 3 { f32::INFINITY } else { 1.0 },
                };
                // adding a residual of zero leaves no negative zeros
                *value += 0.0;
            }
            let top = TopK::new(count, ratio).unwrap();
            let (mut bytes, mut alone) = (vec![0; top.encoded_len()], vec![0; top.encoded_len()]);
            top.encode(&values, &mut bytes);
            let chosen = top.select(&values);
            top.write(&Large::default(), &values, &mut alone);
            prop_assert_eq!(&bytes, &alone);
            let mut residual = vec![0f32; count];
            top.encode_residual(&values, &mut residual, &mut bytes);
            prop_assert_eq!(&bytes, &alone);
            for (at, residual) in residual.iter().enumerate() {
                let sent = chosen.binary_search(&(at as u32)).is_ok();
                prop_assert_eq!(*residual, if sent || !values[at].is_finite() { 0.0 } else { values[at] });
            }
        }

        #[test]
        fn lists_round_trip(values in some_values(), ratio in 0.0001f64..=1.0, before in -1f32..1.0) {
            let top = TopK::new(values.len(), ratio).unwrap();
            let mut bytes = vec![0; top.encoded_len()];
            top.encode(&values, &mut bytes);
            let (mut back, mut sum) = (vec![7.0; values.len()], vec![before; values.len()]);
            top.decode(&bytes, &mut back).unwrap();
            top.decode_add(&bytes, &mut sum).unwrap();
            let chosen = expected(&values, top.chosen());
            for (at, back) in back.iter().enumerate() {
                let sent = chosen.binary_search(&(at as u32)).is_ok();
                prop_assert_eq!(back.to_bits(), if sent { values[at].to_bits() } else { 0 });
                prop_assert!(sum[at].to_bits() == (before + back).to_bits() || sum[at].is_nan());
            }
        }

        #[test]
        fn what_is_not_sent_is_kept(rounds in vec(vec(-1f32..1.0, 300), 1..8), ratio in 0.01f64..0.5) {
            let top = TopK::new(300, ratio).unwrap();
            let mut residual = vec![0f32; 300];
            for values in &rounds {
                let wanted: Vec<f32> = values.iter().zip(&residual).map(|(value, residual)| value + residual).collect();
                let (mut bytes, mut alone) = (vec![0; top.encoded_len()], vec![0; top.encoded_len()]);
                top.encode_residual(values, &mut residual, &mut bytes);
                top.encode(&wanted, &mut alone);
                prop_assert_eq!(&bytes, &alone);
                // nothing is lost, not even in rounding
                let mut sum = residual.clone();
                top.decode_add(&bytes, &mut sum).unwrap();
                prop_assert_eq!(sum, wanted);
            }
        }
    }

    #[test]
    fn what_is_not_finite_is_sent_first_and_leaves_its_residual() {
        let top = TopK::new(4, 0.25).unwrap();
        let mut residual = [0.5, 1.0, 2.0, 3.0];
        let mut bytes = [0; 8];
        assert_eq!(top.encoded_len(), bytes.len());
        top.encode_residual(&[1.0, f32::NAN, 1.0, f32::INFINITY], &mut residual, &mut bytes);
        assert_eq!((top.select(&[1.0, f32::NAN, 1.0, f32::INFINITY]), top.non_finite(&bytes)), (vec![1], 1));
        assert_eq!(residual, [1.5, 1.0, 3.0, 3.0]);
    }

    #[test]
    fn shares_are_rounded_up_and_bad_ones_refused() {
        let of = |count, ratio| TopK::new(count, ratio).unwrap().chosen();
        assert_eq!(
            [of(100, 0.07), of(100, 0.001), of(101, 0.5), of(5, 1.0), of(0, 0.1), of(1, 1e-9)],
            [7, 1, 51, 5, 0, 1]
        );
        for ratio in [0.0, -0.1, 1.1, 2.0, f64::NAN] {
            assert!(TopK::new(10, ratio).is_err_and(|error| error.message.contains("ratio")));
        }
    }
}
