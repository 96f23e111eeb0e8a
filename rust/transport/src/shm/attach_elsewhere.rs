//! Without Linux nobody attaches: the same names as in `attach.rs`, and a reason.

use std::sync::Arc;

use tokio::net::UnixListener;

use super::arena::{Arena, Mapping};
use crate::error::{Error, Result};
use crate::socket::Socket;

/// A neighbour's memory; there is never one.
pub(crate) struct Neighbour {
    pub(crate) memory: Arc<Mapping>,
    pub(crate) control: usize,
}

fn reason() -> Error {
    Error::unsupported("shared memory between ranks needs Linux")
}

pub(crate) fn listen() -> Result<(String, UnixListener)> {
    Err(reason())
}

pub(crate) fn connect(_: &str) -> Result<Socket> {
    Err(reason())
}

pub(crate) async fn swap(_: &Socket, _: &Arena, _: usize) -> Result<Neighbour> {
    Err(reason())
}
