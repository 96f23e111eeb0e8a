//! Shared memory between the ranks of one host.
//!
//! Each rank owns an arena: one sealed memfd, mapped by all its neighbours while linking, so that no descriptor travels
//! later. Tensors, staging areas and the control blocks of groups are allocated in it ([`space`]); neighbours reach them
//! by offset. A [`team`] is the ranks of a group on one host; its members keep step by the protocol of [`step`].

//!
//! All of this needs Linux (memfd, abstract sockets, futexes). Elsewhere an arena is private memory, attaching fails with
//! that reason, and every rank is a host of its own.

pub mod arena;
#[cfg(target_os = "linux")]
pub(crate) mod attach;
#[cfg(not(target_os = "linux"))]
#[path = "attach_elsewhere.rs"]
pub(crate) mod attach;
pub mod space;
pub mod step;
pub mod team;
