//! The harness of the tests in which N ranks are N threads of one process.
//!
//! - [`world`]: starts the ranks, gives each an engine, and fails loudly instead of hanging
//! - [`tensor`]: memory with canaries around it, plain or shared, and the calls on it
//! - [`reference`]: what collectives must compute, written down a second time
//! - [`mixing`]: what gossip must compute, likewise
//! - [`arithmetic`]: what codecs must compute, likewise
//! - [`decoders`]: one function for each reader of bytes from outside, run by fuzzers and by the stored corpus alike
//! - [`sources`]: the sources of a crate as text, for the rules that no compiler checks

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a harness fails tests by panicking")]

pub mod arithmetic;
pub mod decoders;
pub mod mixing;
pub mod reference;
pub mod sources;
pub mod tensor;
pub mod world;

pub use tensor::{Memory, Tensor};
pub use world::{Rank, Setup, spawn};

use offbeat_core::config::Tuning;

/// Sizes so small that little data takes every way: slots, staged segments, several chunks, exchange and scatter.
pub const TINY: Tuning = Tuning { inline: 64, segment: 256, chunk: 96, exchange: 384, eager: 192 };
/// Nothing is short: everything is staged, scattered and offered.
pub const NEVER_SHORT: Tuning = Tuning { inline: 0, segment: 128, chunk: 64, exchange: 0, eager: 0 };
/// Everything is short: slots and exchanges only, one frame for each block.
pub const ALWAYS_SHORT: Tuning =
    Tuning { inline: 16 << 10, segment: 512 << 10, chunk: 128 << 10, exchange: 1 << 20, eager: 1 << 20 };

/// Who is on which host, for every way in which ranks and hosts can be mixed.
pub const LAYOUTS: [&[&str]; 12] = [
    &["a"],
    &["a", "a"],
    &["a", "a", "a"],
    &["a", "a", "a", "a"],
    &["a", "a", "a", "a", "a"],
    &["a", "b"],
    &["a", "b", "c"],
    &["a", "b", "c", "d"],
    &["a", "b", "c", "d", "e"],
    &["a", "a", "b", "b"],
    &["a", "a", "b"],
    &["a", "b", "a", "b", "c"],
];
