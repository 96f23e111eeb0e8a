//! Groups of ranks and the collectives between them. Knows no Python and no CUDA.
//!
//! # Layout, from the outside in
//!
//! - [`engine`]: one rank's engine; owns the threads
//! - [`group`]: a group's calls, in order; [`call`], [`describe`]: a call as a value, and what ranks compare of it
//! - [`collective`]: what each call does; `message`: send and recv
//! - [`codec`]: numbers as fewer bytes; [`reduce`]: sums on the CPU
//! - [`topology`]: who is on which host and carries what (pure)
//! - [`buffer`], [`dtype`], [`event`]: what everything works on, and how one waits for it
//! - [`config`]: settings, read once

pub mod buffer;
pub mod call;
pub mod codec;
pub mod collective;
pub mod config;
pub mod describe;
pub mod dtype;
pub mod engine;
pub mod event;
pub mod group;
mod message;
pub mod reduce;
pub mod topology;

pub use offbeat_transport as transport;
pub use offbeat_transport::{Error, Interrupt, Kind, Result};
