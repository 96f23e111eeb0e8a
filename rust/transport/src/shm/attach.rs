//! Neighbours pass each other their arenas over an abstract Unix socket, and prove that the mapping works.
//!
//! After the handshake both sides send (length, control offset, cookie) with the memfd, map what they got, compare the
//! cookie, and answer with one byte. Anything else, and the pair falls back to TCP with the reason.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::SocketAddr;
use std::sync::Arc;

use rustix::fs::SealFlags;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};
use tokio::io::Interest;
use tokio::net::{UnixListener, UnixStream};

use super::arena::{Arena, COOKIE, Mapping};
use crate::error::{Error, Result};
use crate::frame::part;
use crate::socket::Socket;

const OFFER: usize = 16 + COOKIE;
const YES: u8 = 1;

/// A neighbour's memory, and where its control block for the world is.
pub(crate) struct Neighbour {
    pub(crate) memory: Arc<Mapping>,
    pub(crate) control: usize,
}

/// Listens under a fresh abstract name, which exists in this network namespace only.
pub(crate) fn listen() -> Result<(String, UnixListener)> {
    let failed = |e| Error::io("cannot listen on an abstract Unix socket", e);
    let name: String = crate::handshake::nonce()?[..12].iter().map(|b| format!("{b:02x}")).collect();
    let name = format!("offbeat-{name}");
    let address = SocketAddr::from_abstract_name(&name).map_err(failed)?;
    let listener = std::os::unix::net::UnixListener::bind_addr(&address).map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    Ok((name, UnixListener::from_std(listener).map_err(failed)?))
}

/// Connects to a neighbour's abstract socket.
pub(crate) fn connect(name: &str) -> Result<Socket> {
    let failed = |e| Error::io("cannot connect to its abstract Unix socket (another network namespace?)", e);
    let address = SocketAddr::from_abstract_name(name).map_err(failed)?;
    let stream = std::os::unix::net::UnixStream::connect_addr(&address).map_err(failed)?;
    stream.set_nonblocking(true).map_err(failed)?;
    Ok(Socket::unix(UnixStream::from_std(stream).map_err(failed)?))
}

/// Exchanges arenas over a proven connection. An error is the reason for falling back; the other side learns it too.
pub(crate) async fn swap(socket: &Socket, arena: &Arena, control: usize) -> Result<Neighbour> {
    let stream = socket.as_unix().ok_or_else(|| Error::io("attaching", "not a Unix socket"))?;
    send(stream, arena, control).await?;
    let got = receive(stream).await;
    let verdict = if got.is_ok() { YES } else { 0 };
    let lost = |e| Error::io("the neighbour hung up while attaching", e);
    socket.write_all(&[verdict]).await.map_err(lost)?;
    let [theirs] = socket.read_array::<1>().await.map_err(lost)?;
    let neighbour = got?;
    if theirs != YES {
        return Err(Error::io("attaching", "the neighbour could not map our memory"));
    }
    Ok(neighbour)
}

async fn send(stream: &UnixStream, arena: &Arena, control: usize) -> Result<()> {
    let mut offer = [0; OFFER];
    offer[..8].copy_from_slice(&(arena.mapping().len() as u64).to_le_bytes());
    offer[8..16].copy_from_slice(&(control as u64).to_le_bytes());
    offer[16..].copy_from_slice(&arena.mapping().cookie());
    let memory = arena.descriptor().ok_or_else(|| Error::io("passing shared memory", "it is private"))?;
    let result = stream
        .async_io(Interest::WRITABLE, || {
            let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut ancillary = SendAncillaryBuffer::new(&mut room);
            let descriptors = [memory.as_fd()];
            ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
            Ok(rustix::net::sendmsg(stream, &[IoSlice::new(&offer)], &mut ancillary, SendFlags::NOSIGNAL)?)
        })
        .await;
    match result {
        Ok(OFFER) => Ok(()),
        Ok(sent) => Err(Error::io("passing shared memory", format!("only {sent} bytes were taken"))),
        Err(error) => Err(Error::io("passing shared memory", error)),
    }
}

async fn receive(stream: &UnixStream) -> Result<Neighbour> {
    let mut offer = [0; OFFER];
    let (count, memory): (usize, Option<OwnedFd>) = stream
        .async_io(Interest::READABLE, || {
            let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut ancillary = RecvAncillaryBuffer::new(&mut room);
            let got = rustix::net::recvmsg(
                stream,
                &mut [IoSliceMut::new(&mut offer)],
                &mut ancillary,
                RecvFlags::CMSG_CLOEXEC,
            )?;
            let memory = ancillary.drain().find_map(|message| match message {
                RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
                _ => None,
            });
            Ok((got.bytes, memory))
        })
        .await
        .map_err(|e| Error::io("receiving shared memory", e))?;
    let memory = memory.filter(|_| count == OFFER);
    let memory = memory.ok_or_else(|| Error::io("receiving shared memory", "no descriptor came"))?;
    let len = u64::from_le_bytes(part(&offer[..8]));
    let refused = |why: &str| Error::io("refusing shared memory", why);
    let seals = rustix::fs::fcntl_get_seals(&memory).map_err(|e| Error::io("reading seals", e))?;
    let size = rustix::fs::fstat(&memory).map_err(|e| Error::io("reading its size", e))?.st_size as u64;
    if !seals.contains(SealFlags::SHRINK) || size != len {
        return Err(refused("it is not sealed at its length"));
    }
    let mapping = Mapping::new(&memory, len as usize)?;
    if mapping.cookie() != part::<COOKIE>(&offer[16..]) {
        return Err(refused("the cookie differs"));
    }
    Ok(Neighbour { memory: Arc::new(mapping), control: u64::from_le_bytes(part(&offer[8..16])) as usize })
}
