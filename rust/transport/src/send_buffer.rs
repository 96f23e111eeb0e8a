//! How much of a stream's data the kernel may hold until it is acknowledged. Pure; `socket.rs` asks for it.

use std::time::Duration;

/// The smallest and the largest buffer of a stream that follows its rate.
const LEAST: usize = 48 << 10;
const LARGEST: usize = 768 << 10;

/// So many bytes are written between two looks at a stream's rate.
pub(crate) const BETWEEN_LOOKS: usize = 256 << 10;

/// What a send buffer holds beyond a round trip: as long as a busy machine may keep us from the processor.
const HICCUP: Duration = Duration::from_millis(10);

/// The send buffer to begin with on each of a link's streams, where so many links share the host's wire, if not the kernel's
/// own: enough for the wire, and not much more, since what is beyond that lies in queues, where all links meet. The kernel
/// doubles it for its own use, and gives at most what `net.core.wmem_max` allows.
pub(crate) fn first(streams: usize, links: usize) -> Option<usize> {
    match (streams, links) {
        (0..=1, 0..=3) => Some(256 << 10),
        (0..=1, _) => Some(128 << 10),
        (2..=4, _) => Some(512 << 10),
        // many streams mean a long way: only the kernel's own, growing buffer fills it
        _ => None,
    }
}

/// Whether the buffer follows the stream's rate. Streams that share a wire keep what they have: the rate of each is its share
/// of the wire, which follows from its buffer, so one that has little would never get more.
pub(crate) fn follows_rate(streams: usize, links: usize) -> bool {
    streams * links <= 1
}

/// The buffer for a stream of this rate in bytes per second, which has `now`: what travels in a round trip, and what keeps the
/// wire busy in a hiccup. More would lie in queues, for long on a slow wire: they drop what is too much for them, and
/// acknowledgements wait in them too, so that a stream in the other direction that begins later takes long to get its share.
/// One low measurement counts for half.
pub(crate) fn fitting(rate: u64, round_trip: Duration, now: usize) -> usize {
    let bytes = rate as f64 * (round_trip + HICCUP).as_secs_f64();
    (bytes as usize).max(now / 2).clamp(LEAST, LARGEST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_fit_the_rate_and_shrink_by_half() {
        let (trip, now) = (Duration::from_millis(2), 256 << 10);
        for (rate, fits) in [(0, 128 << 10), (5_000_000, 128 << 10), (25_000_000, 300_000), (125_000_000, 768 << 10)] {
            assert_eq!(fitting(rate, trip, now), fits, "{rate} bytes per second");
        }
        assert_eq!(fitting(25_000_000, Duration::from_millis(10), now), 500_000);
        assert_eq!(fitting(0, trip, 0), LEAST);
    }

    #[test]
    fn streams_that_share_a_wire_keep_their_buffers() {
        assert_eq!((first(1, 1), follows_rate(1, 1)), (Some(256 << 10), true));
        assert_eq!((first(1, 3), follows_rate(1, 3)), (Some(256 << 10), false));
        assert_eq!((first(4, 1), follows_rate(4, 1)), (Some(512 << 10), false), "so do streams of one link");
        assert_eq!((first(8, 1), follows_rate(8, 1)), (None, false), "far away the kernel's own buffer grows");
    }
}
