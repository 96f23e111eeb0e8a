//! Weights in 8 bits, modulo the distance between ranks (after Moniqua): what two ranks have in common need not travel.
//!
//! A block of 1024 numbers has a step of its own, a power of two. The sender rounds each number to a multiple k of the step
//! and sends k mod 256; the receiver takes the k that is nearest to its own number. That is the right one as long as both are
//! less than 127 steps apart, and then both know the very same number, k times the step, exactly. A hash over all k tells
//! when it is not: then the numbers are asked for in full.
//!
//! Each rank makes its steps from what it has seen: 127 of them are at least twice the largest difference to a peer, where
//! older differences count less and less. The error of a number is at most half a step.

use super::keeping::{Kept, Room};
use crate::coding::mix;

/// Numbers with one step.
const BLOCK: usize = 1024;
/// Multiples that a code tells apart.
const CODES: f32 = 256.0;
/// How far apart two ranks may be, in steps.
const REACH: f32 = 127.0;
/// What is left of an old difference after another exchange.
const FADE: f32 = 0.9;
/// Steps are powers of two with these exponents.
const LEAST: i32 = -120;
const LARGEST: i32 = 100;

/// Codes, and the numbers that they stand for.
pub(super) struct Modular {
    /// The largest difference to a peer that was seen in each block; none before the first exchange.
    differences: Vec<f32>,
    seen: bool,
}

/// The exponent of the smallest power of two that is not under `value`.
fn exponent(value: f32) -> i32 {
    if value <= 0.0 || !value.is_finite() {
        return LEAST;
    }
    (value.log2().ceil() as i32).clamp(LEAST, LARGEST)
}

fn power(exponent: i32) -> f32 {
    f32::from_bits(((exponent + 127) as u32) << 23)
}

impl Modular {
    pub(super) fn new(count: usize) -> Self {
        Modular { differences: vec![0.0; count.div_ceil(BLOCK)], seen: false }
    }

    /// Bytes of the codes of so many numbers.
    pub(super) fn encoded_len(count: usize) -> usize {
        count + count.div_ceil(BLOCK)
    }

    /// Whether anything is known of how far ranks are apart.
    pub(super) fn is_ready(&self) -> bool {
        self.seen
    }

    /// What is known of it, if anything is.
    pub(super) fn save(&self) -> Option<Kept> {
        self.seen.then(|| Kept { label: "differences", block: BLOCK, values: self.differences.clone() })
    }

    /// Where what was saved belongs; from then on something is known.
    pub(super) fn room(&mut self, label: &str) -> Option<Room<'_>> {
        self.seen |= label == "differences";
        (label == "differences").then_some(Room { block: BLOCK, values: &mut self.differences })
    }

    /// Notes how far a peer's numbers are from one's own.
    pub(super) fn learn(&mut self, mine: &[f32], theirs: &[f32]) {
        self.seen = true;
        for (old, (mine, theirs)) in self.differences.iter_mut().zip(mine.chunks(BLOCK).zip(theirs.chunks(BLOCK))) {
            let new = mine.iter().zip(theirs).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
            *old = (*old * FADE).max(new);
        }
    }

    /// Encodes numbers, and rounds them to what the codes stand for. None if they are not finite, or too large for their
    /// steps.
    pub(super) fn encode(&self, values: &[f32], rounded: &mut [f32]) -> Option<(Vec<u8>, u64)> {
        let mut body = Vec::with_capacity(Self::encoded_len(values.len()));
        let mut hash = 0;
        for ((block, rounded), difference) in values.chunks(BLOCK).zip(rounded.chunks_mut(BLOCK)).zip(&self.differences)
        {
            let largest = block.iter().fold(0f32, |most, x| most.max(x.abs()));
            if block.iter().any(|x| !x.is_finite()) {
                return None;
            }
            // multiples up to 2^22 are exact in f32, and their rounding is
            let e = exponent(2.0 * difference / REACH).max(exponent(largest) - 22);
            let step = power(e);
            body.push((e + 128) as u8);
            for (x, rounded) in block.iter().zip(rounded) {
                let k = (x / step).round_ties_even();
                *rounded = k * step;
                let k = k as i32;
                body.push(k as u8);
                hash = mix(hash, k as u32 as u64);
            }
        }
        Some((body, hash))
    }

    /// The numbers that codes stand for, from numbers near to them. False if they are not the sender's.
    pub(super) fn decode(body: &[u8], hash: u64, near: &[f32], out: &mut [f32]) -> bool {
        if body.len() != Self::encoded_len(near.len()) {
            return false;
        }
        let mut own = 0;
        for ((codes, near), out) in body.chunks(BLOCK + 1).zip(near.chunks(BLOCK)).zip(out.chunks_mut(BLOCK)) {
            let e = i32::from(codes[0]) - 128;
            if !(LEAST..=LARGEST).contains(&e) {
                return false;
            }
            let step = power(e);
            for ((code, near), out) in codes[1..].iter().zip(near).zip(out) {
                let (code, mine) = (f32::from(*code), near / step);
                let k = code + CODES * ((mine - code) / CODES).round_ties_even();
                *out = k * step;
                own = mix(own, k as i32 as u32 as u64);
            }
        }
        own == hash
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn pair(count: usize, seed: u64, distance: f32) -> (Vec<f32>, Vec<f32>) {
        let random = |n: u64| (mix(seed, n) >> 40) as f32 / (1u64 << 24) as f32 * 2.0 - 1.0;
        let mine: Vec<f32> = (0..count as u64).map(|n| random(n) * 3.0).collect();
        let theirs = mine.iter().enumerate().map(|(n, x)| x + distance * random(n as u64 + (1 << 32))).collect();
        (mine, theirs)
    }

    proptest! {
        #[test]
        fn numbers_come_back_within_half_a_step(seed: u64, count in 1usize..3000, power in -12i32..2) {
            let distance = 2f32.powi(power);
            let (mine, theirs) = pair(count, seed, distance);
            let mut modular = Modular::new(count);
            modular.learn(&mine, &theirs);
            let (mut rounded, mut out) = (vec![0.0; count], vec![0.0; count]);
            let (body, hash) = modular.encode(&mine, &mut rounded).unwrap();
            prop_assert_eq!(body.len(), Modular::encoded_len(count));
            prop_assert!(Modular::decode(&body, hash, &theirs, &mut out));
            prop_assert_eq!(&out, &rounded, "both sides know the same numbers");
            // a step is at most twice what the distance asks for, or what f32 can hold of the largest number
            let bound = (2.0 * 2.0 * distance / REACH).max(4.0 * 2f32.powi(-22)) / 2.0 * 1.001;
            for (x, y) in mine.iter().zip(&out) {
                prop_assert!((x - y).abs() <= bound, "{} and {}: over {}", x, y, bound);
            }
        }
    }

    #[test]
    fn a_peer_that_is_too_far_away_is_noticed() {
        let (mine, theirs) = pair(2500, 3, 0.01);
        let mut modular = Modular::new(mine.len());
        modular.learn(&mine, &theirs);
        let (mut rounded, mut out) = (vec![0.0; mine.len()], vec![0.0; mine.len()]);
        let (body, hash) = modular.encode(&mine, &mut rounded).unwrap();
        let mut far = theirs.clone();
        far[1700] += 0.1;
        assert!(!Modular::decode(&body, hash, &far, &mut out));
        assert!(!Modular::decode(&body[1..], hash, &theirs, &mut out), "a wrong length");
    }

    #[test]
    fn equal_ranks_and_bad_numbers() {
        let values = vec![0.0, 1.0, -1e-20, 1e20];
        let mut modular = Modular::new(4);
        assert!(!modular.is_ready());
        modular.learn(&values, &values);
        let (mut rounded, mut out) = (vec![0.0; 4], vec![0.0; 4]);
        let (body, hash) = modular.encode(&values, &mut rounded).unwrap();
        assert!(Modular::decode(&body, hash, &values, &mut out));
        assert_eq!((out[0], out[3]), (0.0, 1e20));
        assert!(modular.encode(&[f32::NAN; 4], &mut rounded).is_none());
    }
}
