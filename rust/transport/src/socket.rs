//! A connected stream, TCP or Unix, that one task reads while another writes.

use std::io::{self, ErrorKind, IoSlice};
use std::os::fd::AsRawFd;
use std::time::Duration;

use bytes::BufMut;
use socket2::{SockRef, TcpKeepalive};
use tokio::net::{TcpStream, UnixStream};

use crate::fork::ClosedInChild;

/// The send buffer to ask for, if not the kernel's own: enough for the wire at that distance, and not much more. The kernel
/// doubles it for its own use, and gives at most what `net.core.wmem_max` allows.
///
/// Near peers have one stream each, and are written to in turns. Where the round trip is long enough for several streams
/// (`linking::streams_for`), they share what the wire holds: eight of 20 kB for each millisecond fill 1.3 Gbit/s. As much for
/// each as for a single one would lie in queues: four hosts at 100 Mbit/s, 1 ms apart, lost frames by it, and took 1.12 times
/// as long as the wire needs, instead of 1.08.
fn send_buffer(round_trip: Duration) -> Option<usize> {
    match round_trip.as_micros() as usize {
        ..=2_000 => Some(512 << 10),
        near @ ..20_000 => Some((near * 20).min(208 << 10)),
        _ => None,
    }
}

/// A connected stream. Field order matters: the registration goes before the descriptor is closed.
#[derive(Debug)]
pub(crate) struct Socket {
    _registered: ClosedInChild,
    stream: Stream,
}

#[derive(Debug)]
enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

/// Does one system call once the socket is ready for it, again and again until it does not block.
macro_rules! when_ready {
    ($self:ident, $ready:ident, $stream:ident => $call:expr) => {
        loop {
            let result = match &$self.stream {
                Stream::Tcp($stream) => {
                    $stream.$ready().await?;
                    $call
                }
                Stream::Unix($stream) => {
                    $stream.$ready().await?;
                    $call
                }
            };
            match result {
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                result => break result,
            }
        }
    };
}

impl Socket {
    /// A TCP stream that notices within about `patience` that the peer's host or the cable is gone. The peer's kernel
    /// answers for a process that is merely slow, so a slow rank is not taken for a dead one.
    pub(crate) fn tcp(stream: TcpStream, patience: Duration) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        let socket = SockRef::from(&stream);
        let probe = (patience / 4).max(Duration::from_secs(1));
        socket.set_tcp_keepalive(&TcpKeepalive::new().with_time(probe).with_interval(probe).with_retries(3))?;
        #[cfg(target_os = "linux")]
        socket.set_tcp_user_timeout(Some(patience.max(Duration::from_secs(2))))?;
        let socket = Socket { _registered: ClosedInChild::new(stream.as_raw_fd()), stream: Stream::Tcp(stream) };
        socket.limit_unacknowledged()?;
        Ok(socket)
    }

    /// Bounds what is sent and not yet acknowledged. When both directions are busy, acknowledgements wait behind data in the
    /// other side's queue; left to itself, the stream with the largest window fills that queue and starves the others
    /// (four hosts that send in a ring at 500 Mbit/s took 1.9 times as long as the wire needs, and 1.4 times with this).
    /// Over long distances the kernel's own, growing buffer is needed to fill the wire.
    fn limit_unacknowledged(&self) -> io::Result<()> {
        let (Some(round_trip), Stream::Tcp(stream)) = (self.round_trip(), &self.stream) else { return Ok(()) };
        match send_buffer(round_trip) {
            Some(bytes) => SockRef::from(stream).set_send_buffer_size(bytes),
            None => Ok(()),
        }
    }

    /// A Unix stream.
    pub(crate) fn unix(stream: UnixStream) -> Self {
        Socket { _registered: ClosedInChild::new(stream.as_raw_fd()), stream: Stream::Unix(stream) }
    }

    /// The Unix stream inside, to pass descriptors over.
    pub(crate) fn as_unix(&self) -> Option<&UnixStream> {
        match &self.stream {
            Stream::Unix(stream) => Some(stream),
            Stream::Tcp(_) => None,
        }
    }

    /// The addresses of both ends, empty for Unix.
    pub(crate) fn addresses(&self) -> (String, String) {
        let text = |address: io::Result<std::net::SocketAddr>| match address {
            Ok(address) => crate::address::plain(address).to_string(),
            Err(_) => String::new(),
        };
        match &self.stream {
            Stream::Tcp(stream) => (text(stream.local_addr()), text(stream.peer_addr())),
            Stream::Unix(_) => Default::default(),
        }
    }

    /// The round trip as the kernel measured it when the connection was made: unlike a clock around our own messages, it
    /// does not count the time that busy processes wait for a processor.
    #[cfg(target_os = "linux")]
    pub(crate) fn round_trip(&self) -> Option<Duration> {
        let Stream::Tcp(stream) = &self.stream else { return None };
        // SAFETY: zero is a valid `tcp_info`: it is made of integers.
        let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
        let mut len = size_of::<libc::tcp_info>() as libc::socklen_t;
        // SAFETY: the descriptor is open, and the kernel writes at most `len` bytes to `info`.
        let result = unsafe {
            let info = (&raw mut info).cast();
            libc::getsockopt(stream.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_INFO, info, &raw mut len)
        };
        (result == 0).then(|| Duration::from_micros(u64::from(info.tcpi_rtt)))
    }

    #[cfg(not(target_os = "linux"))]
    pub(crate) fn round_trip(&self) -> Option<Duration> {
        None
    }

    /// Reads what is there, at least one byte, into the free part of `buffer`; 0 is the end of the stream.
    pub(crate) async fn read_some(&self, buffer: &mut impl BufMut) -> io::Result<usize> {
        when_ready!(self, readable, stream => stream.try_read_buf(buffer))
    }

    /// Reads exactly `N` bytes. A stream that ends before the first of them was aborted.
    pub(crate) async fn read_array<const N: usize>(&self) -> io::Result<[u8; N]> {
        let mut array = [0; N];
        let mut free = &mut array[..];
        while free.has_remaining_mut() {
            if self.read_some(&mut free).await? == 0 {
                let kind = if free.len() == N { ErrorKind::ConnectionAborted } else { ErrorKind::UnexpectedEof };
                return Err(kind.into());
            }
        }
        Ok(array)
    }

    /// Writes some of what `next` gives. It is called anew for each attempt and its memory is touched during that call
    /// only, so the owner may take it back between attempts.
    pub(crate) async fn write_some<F>(&self, mut next: F) -> io::Result<usize>
    where
        F: FnMut(&mut dyn FnMut(&[IoSlice<'_>]) -> io::Result<usize>) -> io::Result<usize>,
    {
        when_ready!(self, writable, stream => next(&mut |slices| stream.try_write_vectored(slices)))
    }

    /// Writes all bytes.
    pub(crate) async fn write_all(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let written = self.write_some(|write| write(&[IoSlice::new(bytes)])).await?;
            bytes = &bytes[written..];
        }
        Ok(())
    }

    /// Says that nothing more will be written.
    pub(crate) fn finish_writing(&self) {
        let result = match &self.stream {
            Stream::Tcp(stream) => SockRef::from(stream).shutdown(std::net::Shutdown::Write),
            Stream::Unix(stream) => SockRef::from(stream).shutdown(std::net::Shutdown::Write),
        };
        if let Err(error) = result {
            log::debug!("shutting a stream down: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_share_what_the_wire_holds() {
        let kilobytes = |millis: f64| send_buffer(Duration::from_secs_f64(millis / 1e3)).map(|bytes| bytes >> 10);
        assert_eq!(kilobytes(0.1), Some(512));
        assert_eq!(kilobytes(2.2), Some(42));
        assert_eq!(kilobytes(10.0), Some(195));
        assert_eq!(kilobytes(15.0), Some(208));
        assert_eq!(kilobytes(80.0), None);
    }
}
