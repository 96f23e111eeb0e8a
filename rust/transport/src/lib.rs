//! Bytes between ranks. Knows no tensors, no Python, no CUDA.
//!
//! # Layout
//!
//! - [`error`]: the one error type, a story that ranks tell each other
//! - [`frame`]: what travels on a stream; [`handshake`]: what comes before the first frame
//! - [`address`], [`host`]: which address to dial, who shares a machine (pure decisions)
//! - [`rendezvous`]: how ranks find each other through a store
//! - [`mesh`]: links to all ranks, chosen and built once; `linking`, `tcp`, `link`, `socket` stand behind it
//! - [`outbox`], [`inbox`], [`pool`]: frames on their way out and in
//! - [`roster`]: who is still there; [`watchdog`]: what ends a wait, asked by every one
//! - [`trace`]: what happened when, always recorded
//! - `shm`: shared memory between the ranks of one host
//! - [`fork`]: what must not survive into forked children

pub mod address;
pub mod error;
pub mod fork;
pub mod frame;
pub mod handshake;
pub mod host;
pub mod inbox;
mod late;
pub mod link;
mod linking;
pub mod mesh;
pub mod outbox;
pub mod pool;
pub mod rendezvous;
pub mod roster;
pub mod shm;
mod socket;
mod strangers;
mod tcp;
pub mod trace;
pub mod watchdog;
mod wire;

pub use error::{Error, Kind, Result};

/// Lets the caller's signal handlers run; an error ends the wait.
pub type Interrupt<'a> = dyn Fn() -> Result<()> + 'a;

/// How long a blocked wait sleeps before it asks for the verdict again.
pub const SLICE: std::time::Duration = std::time::Duration::from_millis(20);
