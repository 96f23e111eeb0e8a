//! A codec with what it keeps: the coding of a model's flat snapshot.

use std::ops::Range;
use std::sync::Arc;

use super::keeping::{Kept, Room};
use crate::codec::Codec;
use crate::coding::{Coding, Leg, Residuals, Tally, mix};

/// Encodes ranges of a model.
pub(super) struct Coder {
    coding: Coding,
    /// What was lost of what this rank sent; as long as the model.
    shares: Vec<f32>,
    /// What was lost of results that were made here.
    results: Vec<f32>,
    feedback: bool,
}

// SAFETY: the addresses in `coding` are set for the time of a call, and point to the vectors beside it.
unsafe impl Send for Coder {}

impl Coder {
    pub(super) fn new(codec: &'static dyn Codec, spans: &[Range<usize>], count: usize, tally: Arc<Tally>) -> Self {
        let coding = Coding { spans: spans.into(), tally, ..Coding::plain(codec) };
        Coder { coding, shares: vec![0.0; count], results: vec![0.0; count], feedback: true }
    }

    pub(super) fn with_feedback(self, feedback: bool) -> Self {
        Coder { feedback, ..self }
    }

    /// Forgets what was lost.
    pub(super) fn forget(&mut self) {
        self.shares.fill(0.0);
        self.results.fill(0.0);
    }

    /// What was lost of shares and of results, where it is kept.
    pub(super) fn save(&self) -> Vec<Kept> {
        let lost = [("shares", &self.shares), ("results", &self.results)];
        let lost = lost.into_iter().filter(|_| self.feedback);
        lost.map(|(label, values)| Kept::of_elements(label, values)).collect()
    }

    /// Where what was saved under a label belongs.
    pub(super) fn room(&mut self, label: &str) -> Option<Room<'_>> {
        match label {
            "shares" if self.feedback => Some(Room::of_elements(&mut self.shares)),
            "results" if self.feedback => Some(Room::of_elements(&mut self.results)),
            _ => None,
        }
    }

    fn encode(&mut self, values: &[f32], range: &Range<usize>, leg: Leg, host: u32, round: u64) -> Vec<u8> {
        self.coding.stream = mix(0, round);
        let residuals = Residuals { shares: self.shares.as_mut_ptr(), results: self.results.as_mut_ptr() };
        self.coding.residuals = self.feedback.then_some(residuals);
        let mut body = vec![0; self.coding.encoded_len(range)];
        // SAFETY: the values are those of the range; the residuals are as long as the model, and ours alone.
        unsafe { self.coding.encode(values, range, leg, host, &mut body) };
        self.coding.residuals = None;
        body
    }

    /// What this rank has to send of a range.
    pub(super) fn encode_share(&mut self, values: &[f32], range: &Range<usize>, rank: u32, round: u64) -> Vec<u8> {
        self.encode(values, range, Leg::Share, rank, round)
    }

    /// Adds what was lost of shares of a range to numbers that are sent in full.
    pub(super) fn make_up(&mut self, values: &mut [f32], range: &Range<usize>) {
        let lost = &mut self.shares[range.clone()];
        values.iter_mut().zip(lost).for_each(|(value, lost)| *value += std::mem::take(lost));
    }

    /// What was computed here, for all.
    pub(super) fn encode_result(&mut self, values: &[f32], range: &Range<usize>, round: u64) -> Vec<u8> {
        self.encode(values, range, Leg::Result, 0, round)
    }

    /// As [`Coder::encode_result`], for values that make up for losses by themselves.
    pub(super) fn encode_difference(&mut self, values: &[f32], range: &Range<usize>, round: u64) -> Vec<u8> {
        let feedback = std::mem::replace(&mut self.feedback, false);
        let body = self.encode(values, range, Leg::Result, 0, round);
        self.feedback = feedback;
        body
    }

    /// Decodes and adds. What has a wrong length is left out.
    pub(super) fn decode_add(&self, body: &[u8], range: &Range<usize>, out: &mut [f32]) {
        if body.len() == self.coding.encoded_len(range) {
            self.coding.decode_add(body, range, out);
        } else {
            log::warn!("a letter of {} bytes for {range:?} was left out", body.len());
        }
    }
}
