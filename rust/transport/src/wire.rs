//! How a host's streams share its wire.
//!
//! Left to itself, TCP does badly on a slow wire where all hosts send to all others at once. Acknowledgements wait behind data,
//! and Cubic takes that delay for a busy network: it leaves its slow start early, now and then with next to nothing of the
//! wire. From then on the kernel, which packs a millisecond of a stream's own pace into a packet, makes packets that are the
//! smaller the more streams there are, and both ends and all between work for each. So what a stream may have under way is
//! bounded, and up to that bound it grows until bytes are lost and not until they are late (Reno).
//!
//! Where the wire is fast, queues are short and packets large anyway, and there the system's own control sends more evenly.
//! Measurements of both are in BENCHMARKS.md.

use crate::socket::{Counted, Socket};

/// From so many bytes per second on a host's wire is fast: between 500 Mbit/s, where streams are better off growing to their
/// bound, and 1 Gbit/s, where they are not.
const FAST: u64 = 80_000_000;

/// So many bytes are written between two looks at a stream's rate.
const BETWEEN_LOOKS: usize = 1 << 20;

/// Whether the bytes of a stream that are sent and not yet acknowledged are bounded, on a link of so many streams. Many mean a
/// long way: only the kernel's own, growing buffer fills it, and its own control knows when to stop.
fn is_bounded(streams: usize) -> bool {
    streams <= 4
}

/// The send buffer of each of a link's bounded streams, where so many links share the host's wire: enough for the wire, and
/// not much more, since what is beyond that lies in queues, where all links meet. The kernel doubles it for its own use, and
/// gives at most what `net.core.wmem_max` allows.
fn send_buffer(streams: usize, links: usize, is_fast: bool) -> usize {
    match (streams, links) {
        (0..=1, 0..=1) if is_fast => 768 << 10,
        (0..=1, 2..=3) => 256 << 10,
        (0..=1, 4..) => 128 << 10,
        _ => 512 << 10,
    }
}

/// Whether the host's wire is fast, by what one of the streams that share it did between two looks.
fn is_fast(before: &Counted, after: &Counted, sharing: usize) -> bool {
    let (acked, busy) = (after.acked.saturating_sub(before.acked), after.busy.saturating_sub(before.busy));
    acked as f64 * sharing as f64 > FAST as f64 * busy.as_secs_f64()
}

/// Looks at a stream's rate until it is known to be fast.
pub(crate) struct Gauge {
    streams: usize,
    links: usize,
    /// Bytes written since the last look, and what had been counted then.
    written: usize,
    before: Counted,
    /// The congestion control of a fast one.
    control: Vec<u8>,
}

impl Gauge {
    /// Prepares one of a link's streams for a slow wire that so many links share; `None` where there is nothing to see.
    pub(crate) fn new(socket: &Socket, streams: usize, links: usize) -> Option<Self> {
        if !is_bounded(streams) {
            return None;
        }
        let (before, control) = (socket.counted()?, socket.control()?);
        socket.bound(send_buffer(streams, links, false));
        socket.grow_by(b"reno");
        Some(Gauge { streams, links, written: 0, before, control })
    }

    /// So many bytes were written. Whether there is more to see.
    pub(crate) fn wrote(&mut self, bytes: usize, socket: &Socket) -> bool {
        self.written += bytes;
        if self.written < BETWEEN_LOOKS {
            return true;
        }
        self.written = 0;
        let Some(counted) = socket.counted() else { return false };
        let fast = is_fast(&self.before, &counted, self.streams * self.links);
        self.before = counted;
        if fast {
            socket.bound(send_buffer(self.streams, self.links, true));
            socket.grow_by(&self.control);
        }
        !fast
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[cfg(target_os = "linux")]
    #[tokio::test]
    async fn near_streams_grow_to_their_bound_until_they_are_fast() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (ours, theirs) =
            tokio::join!(tokio::net::TcpStream::connect(listener.local_addr().unwrap()), listener.accept());
        let socket = Socket::tcp(ours.unwrap(), Duration::from_secs(30)).unwrap();
        let (control, peer) = (socket.control().unwrap(), theirs.unwrap().0);
        assert!(Gauge::new(&socket, 8, 3).is_none());
        assert_eq!(socket.control().unwrap(), control, "far away it is the system's own");
        let mut gauge = Gauge::new(&socket, 1, 1).unwrap();
        assert_eq!(socket.control().unwrap(), b"reno");
        assert!(gauge.wrote(BETWEEN_LOOKS, &socket), "nothing was acknowledged yet");
        let bytes = vec![0; 64 << 20];
        let write = async {
            while gauge.wrote(bytes.len(), &socket) {
                socket.write_all(&bytes).await.unwrap();
            }
        };
        let read = async {
            let mut room = vec![0; 1 << 20];
            loop {
                peer.readable().await.unwrap();
                let _ = peer.try_read(&mut room);
            }
        };
        tokio::select! { () = write => {}, () = read => {} }
        assert_eq!(socket.control().unwrap(), control, "loopback is fast");
    }

    #[test]
    fn buffers_are_the_smaller_the_more_links_share_the_wire() {
        let buffers = [1, 2, 3, 4, 30].map(|links| send_buffer(1, links, false) >> 10);
        assert_eq!(buffers, [512, 256, 256, 128, 128]);
        assert_eq!(send_buffer(1, 1, true), 768 << 10);
        assert_eq!(send_buffer(4, 3, true), 512 << 10, "a longer way");
        assert!(is_bounded(4) && !is_bounded(8));
    }

    #[test]
    fn a_wire_is_fast_if_its_streams_are_together() {
        let counted = |acked, busy| Counted { acked, busy: Duration::from_millis(busy) };
        let (before, after) = (counted(1_000_000, 500), counted(3_000_000, 550));
        assert!(!is_fast(&before, &after, 1), "320 Mbit/s");
        assert!(is_fast(&before, &after, 3), "960 Mbit/s");
        assert!(!is_fast(&before, &before, 3), "nothing was sent");
    }
}
