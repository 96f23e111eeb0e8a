//! Groups of ranks and the collectives between them. Knows no Python and no CUDA.
//!
//! # Layout, from the outside in
//!
//! - [`engine`]: one rank's engine; owns the threads
//! - [`scheduler`]: buckets go out while backward goes on; [`readiness`]: which are complete
//! - [`algorithm`]: what is done with a bucket; [`bucket`]: which tensors share one (pure)
//! - [`background`]: exchanges on snapshots, while training goes on
//! - [`group`]: a group's calls, in order; [`call`], [`describe`]: a call as a value, and what ranks compare of it
//! - [`collective`]: what each call does; `message`: send and recv
//! - [`codec`]: numbers as fewer bytes; [`coding`]: how a call uses one; [`reduce`]: sums on the CPU
//! - [`topology`]: who is on which host and carries what (pure); [`graph`]: who averages with whom (pure)
//! - [`buffer`], [`dtype`], [`event`]: what everything works on, and how one waits for it
//! - [`config`]: settings, read once; [`digest`]: whether two ranks hold the same bytes

pub mod algorithm;
pub mod background;
pub mod bucket;
pub mod buffer;
pub mod call;
pub mod codec;
pub mod coding;
pub mod collective;
pub mod config;
pub mod describe;
pub mod digest;
pub mod dtype;
pub mod engine;
pub mod event;
pub mod graph;
pub mod group;
mod message;
pub mod momentum;
mod perform;
pub mod readiness;
pub mod reduce;
pub mod scheduler;
pub mod topology;

pub use offbeat_transport as transport;
pub use offbeat_transport::{Error, Interrupt, Kind, Result};
