//! A connected stream, TCP or Unix, that one task reads while another writes.

use std::io::{self, ErrorKind, IoSlice};
use std::os::fd::{AsRawFd, RawFd};
#[cfg(target_os = "linux")]
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;

use bytes::BufMut;
use socket2::{SockRef, TcpKeepalive};
use tokio::net::{TcpStream, UnixStream};

use crate::fork::ClosedInChild;

/// As good as no bound. Linux paces a socket once it has one, whatever it is.
#[cfg(target_os = "linux")]
static PACE: u64 = 1 << 40;

/// What the reader of a long payload takes at a time.
const MOUTHFUL: usize = 64 << 10;

/// A payload that comes with its header, or soon after it: two system calls would cost more than being woken once more.
const SHORT: usize = 8 << 10;

/// For how many bytes the reader of a payload is woken when so many of it are left: a mouthful, or all of them; for any if
/// the whole is short.
pub(crate) fn mouthful(length: usize, left: usize) -> usize {
    if length > SHORT { left.min(MOUTHFUL) } else { 1 }
}

/// So often a stream is looked at while its peer's host may stay silent.
const LOOKS: u32 = 8;

/// Whether a host has been silent for too long, but for the looks that it takes to be sure.
fn is_silent(unanswered: Unanswered, patience: Duration) -> bool {
    unanswered.waits && unanswered.since >= patience - 2 * (patience / LOOKS)
}

/// What the kernel has counted of a stream.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Counted {
    /// Bytes that were acknowledged.
    pub(crate) acked: u64,
    /// For how long there were bytes to be acknowledged.
    pub(crate) busy: Duration,
}

/// How long the other end has left bytes of ours unanswered.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Unanswered {
    /// Whether bytes, or probes of a peer that takes no bytes now, wait for an acknowledgement.
    pub(crate) waits: bool,
    /// For how long no acknowledgement has come.
    pub(crate) since: Duration,
}

/// A connected stream. Field order matters: the registration goes before the descriptor is closed.
#[derive(Debug)]
pub(crate) struct Socket {
    _registered: ClosedInChild,
    stream: Stream,
    /// How long the peer's host may stay silent.
    patience: Duration,
    /// How many bytes wake the reader.
    #[cfg(target_os = "linux")]
    wakes: AtomicI32,
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
    fn new(descriptor: RawFd, stream: Stream, patience: Duration) -> Self {
        Socket {
            _registered: ClosedInChild::new(descriptor),
            stream,
            patience,
            #[cfg(target_os = "linux")]
            wakes: AtomicI32::new(1),
        }
    }

    /// A TCP stream that notices within about `patience` that the peer's host or the cable is gone: by keepalive while
    /// nothing is under way, else by [`Socket::silence`]. The peer's kernel answers for a process that is merely slow, or
    /// stopped, so that is not taken for a dead one.
    pub(crate) fn tcp(stream: TcpStream, patience: Duration) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        let socket = SockRef::from(&stream);
        let probe = (patience / 4).max(Duration::from_secs(1));
        socket.set_tcp_keepalive(&TcpKeepalive::new().with_time(probe).with_interval(probe).with_retries(3))?;
        let socket = Socket::new(stream.as_raw_fd(), Stream::Tcp(stream), patience.max(Duration::from_secs(2)));
        socket.pace();
        Ok(socket)
    }

    /// Comes back when the peer's host has left bytes unanswered for about as long as it may, and never if it does not.
    ///
    /// The kernel's own `TCP_USER_TIMEOUT` would not do: it also gives a peer up whose kernel answers but whose process takes
    /// nothing, because it is stopped or computes.
    pub(crate) async fn silence(&self) {
        let mut was_silent = false;
        while let Some(unanswered) = self.unanswered() {
            let is_silent = is_silent(unanswered, self.patience);
            // twice: after a rest the first bytes wait for their acknowledgement, and the last one is long ago
            if is_silent && was_silent {
                return self.abort();
            }
            was_silent = is_silent;
            tokio::time::sleep(self.patience / LOOKS).await;
        }
        std::future::pending().await
    }

    /// Nothing is read or written any more.
    fn abort(&self) {
        if let Stream::Tcp(stream) = &self.stream
            && let Err(error) = SockRef::from(stream).shutdown(std::net::Shutdown::Both)
        {
            log::debug!("shutting a silent stream down: {error}");
        }
    }

    /// Has the kernel send evenly, at its own estimate of what the path carries, and not in bursts as acknowledgements come.
    /// Those come in bursts themselves when both directions are busy, since they wait behind data; then one wire has a queue
    /// and another has nothing to send.
    #[cfg(target_os = "linux")]
    fn pace(&self) {
        let Stream::Tcp(stream) = &self.stream else { return };
        let (rate, len) = ((&raw const PACE).cast(), size_of_val(&PACE) as libc::socklen_t);
        // SAFETY: the descriptor is open, and the kernel reads `len` bytes of a constant.
        let result =
            unsafe { libc::setsockopt(stream.as_raw_fd(), libc::SOL_SOCKET, libc::SO_MAX_PACING_RATE, rate, len) };
        if result != 0 {
            log::debug!("a stream is not paced: {}", io::Error::last_os_error());
        }
    }

    #[cfg(not(target_os = "linux"))]
    fn pace(&self) {}

    /// Bounds what is sent and not yet acknowledged.
    pub(crate) fn bound(&self, bytes: usize) {
        let Stream::Tcp(stream) = &self.stream else { return };
        if let Err(error) = SockRef::from(stream).set_send_buffer_size(bytes) {
            log::debug!("the send buffer of a stream stays as it was: {error}");
        }
    }

    /// The name of what decides how a TCP stream grows.
    #[cfg(target_os = "linux")]
    pub(crate) fn control(&self) -> Option<Vec<u8>> {
        let Stream::Tcp(stream) = &self.stream else { return None };
        let name = SockRef::from(stream).tcp_congestion().ok()?;
        Some(name.into_iter().take_while(|byte| *byte != 0).collect())
    }

    /// Has a stream grow by the control of that name.
    #[cfg(target_os = "linux")]
    pub(crate) fn grow_by(&self, control: &[u8]) {
        let Stream::Tcp(stream) = &self.stream else { return };
        if let Err(error) = SockRef::from(stream).set_tcp_congestion(control) {
            log::debug!("the congestion control of a stream stays as it was: {error}");
        }
    }

    #[cfg(not(target_os = "linux"))]
    pub(crate) fn control(&self) -> Option<Vec<u8>> {
        None
    }

    #[cfg(not(target_os = "linux"))]
    pub(crate) fn grow_by(&self, _: &[u8]) {}

    /// Lets the reader sleep until so many bytes are there. A slow wire brings them in small frames, and being woken for
    /// each takes the processor from training: at 100 Mbit/s four times as often, for twice the processor time of a byte.
    #[cfg(target_os = "linux")]
    pub(crate) fn wake_for(&self, bytes: usize) {
        let Stream::Tcp(stream) = &self.stream else { return };
        let wanted = bytes as i32;
        if self.wakes.swap(wanted, Ordering::Relaxed) == wanted {
            return;
        }
        let (bytes, len) = ((&raw const wanted).cast(), size_of_val(&wanted) as libc::socklen_t);
        // SAFETY: the descriptor is open, and the kernel reads `len` bytes of `wanted`.
        let result = unsafe { libc::setsockopt(stream.as_raw_fd(), libc::SOL_SOCKET, libc::SO_RCVLOWAT, bytes, len) };
        if result != 0 {
            log::debug!("a reader is woken for every frame: {}", io::Error::last_os_error());
        }
    }

    #[cfg(not(target_os = "linux"))]
    pub(crate) fn wake_for(&self, _: usize) {}

    /// A Unix stream.
    pub(crate) fn unix(stream: UnixStream) -> Self {
        Socket::new(stream.as_raw_fd(), Stream::Unix(stream), Duration::MAX)
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

    /// The shortest round trip that the kernel has measured: unlike a clock around our own messages, it does not count the
    /// time that busy processes wait for a processor.
    #[cfg(target_os = "linux")]
    pub(crate) fn round_trip(&self) -> Option<Duration> {
        let info = self.info()?;
        // kernels before 4.6 do not know the shortest one
        let shortest = if info.tcpi_min_rtt > 0 { info.tcpi_min_rtt } else { info.tcpi_rtt };
        Some(Duration::from_micros(u64::from(shortest)))
    }

    /// What the kernel has counted of a TCP stream.
    #[cfg(target_os = "linux")]
    pub(crate) fn counted(&self) -> Option<Counted> {
        let info = self.info()?;
        Some(Counted { acked: info.tcpi_bytes_acked, busy: Duration::from_micros(info.tcpi_busy_time) })
    }

    /// What waits for an acknowledgement, and for how long none has come.
    #[cfg(target_os = "linux")]
    fn unanswered(&self) -> Option<Unanswered> {
        let info = self.info()?;
        let waits = info.tcpi_unacked > 0 || info.tcpi_probes > 0;
        Some(Unanswered { waits, since: Duration::from_millis(u64::from(info.tcpi_last_ack_recv)) })
    }

    #[cfg(target_os = "linux")]
    fn info(&self) -> Option<libc::tcp_info> {
        let Stream::Tcp(stream) = &self.stream else { return None };
        // SAFETY: zero is a valid `tcp_info`: it is made of integers.
        let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
        let mut len = size_of::<libc::tcp_info>() as libc::socklen_t;
        // SAFETY: the descriptor is open, and the kernel writes at most `len` bytes to `info`.
        let result = unsafe {
            let info = (&raw mut info).cast();
            libc::getsockopt(stream.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_INFO, info, &raw mut len)
        };
        (result == 0).then_some(info)
    }

    #[cfg(not(target_os = "linux"))]
    fn unanswered(&self) -> Option<Unanswered> {
        None
    }

    #[cfg(not(target_os = "linux"))]
    pub(crate) fn round_trip(&self) -> Option<Duration> {
        None
    }

    #[cfg(not(target_os = "linux"))]
    pub(crate) fn counted(&self) -> Option<Counted> {
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

    #[cfg(target_os = "linux")]
    #[tokio::test]
    async fn streams_are_paced_and_can_be_bounded() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let descriptor = stream.as_raw_fd();
        let socket = Socket::tcp(stream, Duration::from_secs(30)).unwrap();
        let (mut rate, mut len) = (0u64, size_of::<u64>() as libc::socklen_t);
        // SAFETY: the descriptor is open, and the kernel writes at most `len` bytes to `rate`.
        let result = unsafe {
            let rate = (&raw mut rate).cast();
            libc::getsockopt(descriptor, libc::SOL_SOCKET, libc::SO_MAX_PACING_RATE, rate, &raw mut len)
        };
        assert_eq!((result, rate), (0, PACE));
        socket.bound(64 << 10);
        let Stream::Tcp(stream) = &socket.stream else { panic!("a TCP stream") };
        assert_eq!(SockRef::from(stream).send_buffer_size().unwrap(), 2 * (64 << 10));
        socket.grow_by(b"reno");
        assert_eq!(socket.control().unwrap(), b"reno");
        assert!(socket.round_trip().unwrap() > Duration::ZERO);
        assert_eq!(socket.counted().unwrap().acked, 1, "the handshake alone");
    }

    #[test]
    fn a_host_is_silent_that_leaves_bytes_unanswered() {
        let patience = Duration::from_secs(8);
        let of = |waits, seconds| is_silent(Unanswered { waits, since: Duration::from_secs(seconds) }, patience);
        assert!(of(true, 6) && of(true, 100));
        assert!(!of(true, 5), "not for long enough");
        assert!(!of(false, 100), "there is nothing to answer");
    }

    #[cfg(target_os = "linux")]
    #[tokio::test]
    async fn a_peer_that_takes_nothing_is_not_silent() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (ours, theirs) = tokio::join!(TcpStream::connect(listener.local_addr().unwrap()), listener.accept());
        let socket = Socket::tcp(ours.unwrap(), Duration::from_secs(2)).unwrap();
        let (fill, kept) = (vec![0; 1 << 20], theirs.unwrap());
        let write = async {
            loop {
                socket.write_all(&fill).await.unwrap();
            }
        };
        let time = tokio::time::sleep(Duration::from_secs(5));
        tokio::select! { () = write => {}, () = socket.silence() => panic!("its kernel answers"), () = time => {} }
        drop(kept);
    }

    #[test]
    fn only_a_long_payload_lets_its_reader_sleep() {
        for (length, left, bytes) in [
            (0, 0, 1),
            (SHORT, SHORT, 1),
            (SHORT + 1, SHORT + 1, SHORT + 1),
            (MOUTHFUL, MOUTHFUL, MOUTHFUL),
            (MOUTHFUL + 1, MOUTHFUL + 1, MOUTHFUL),
            (MOUTHFUL + 1, 1, 1),
            (1 << 20, 1 << 20, MOUTHFUL),
            (1 << 20, 1000, 1000),
        ] {
            assert_eq!(mouthful(length, left), bytes, "{left} of {length}");
        }
    }

    #[cfg(target_os = "linux")]
    #[tokio::test]
    async fn a_reader_sleeps_until_enough_is_there_or_the_end() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (ours, theirs) = tokio::join!(TcpStream::connect(listener.local_addr().unwrap()), listener.accept());
        let patience = Duration::from_secs(30);
        let (reader, writer) =
            (Socket::tcp(ours.unwrap(), patience).unwrap(), Socket::tcp(theirs.unwrap().0, patience).unwrap());
        let soon = Duration::from_millis(50);
        let mut room = Vec::with_capacity(1 << 20);
        reader.wake_for(1000);
        // what is asked of a fresh socket counts as readable once, until a read finds nothing
        assert!(tokio::time::timeout(soon, reader.read_some(&mut room)).await.is_err());
        writer.write_all(&[1; 999]).await.unwrap();
        assert!(tokio::time::timeout(soon, reader.read_some(&mut room)).await.is_err(), "999 bytes are not 1000");
        writer.write_all(&[1; 1]).await.unwrap();
        assert_eq!(reader.read_some(&mut room).await.unwrap(), 1000);
        // fewer than it waits for, and then the end: nothing is kept from it
        writer.write_all(&[1; 10]).await.unwrap();
        writer.finish_writing();
        assert_eq!(reader.read_some(&mut room).await.unwrap(), 10);
        assert_eq!(reader.read_some(&mut room).await.unwrap(), 0);
        // less is asked for after it has come
        let (ours, theirs) = tokio::join!(TcpStream::connect(listener.local_addr().unwrap()), listener.accept());
        let (reader, writer) =
            (Socket::tcp(ours.unwrap(), patience).unwrap(), Socket::tcp(theirs.unwrap().0, patience).unwrap());
        reader.wake_for(1000);
        writer.write_all(&[1; 10]).await.unwrap();
        assert!(tokio::time::timeout(soon, reader.read_some(&mut room)).await.is_err());
        reader.wake_for(1);
        assert_eq!(reader.read_some(&mut room).await.unwrap(), 10);
    }
}
