//! What a rank did and when: spans of time, kept in rings that are always on.
//!
//! A trace is wanted when something was slow or hangs, and then it is too late to switch it on. So recording must cost
//! nothing that anybody notices: a span is copied under a lock that is held for that copy only, and nothing is allocated.
//! That takes 16 ns, 55 ns with two threads that do nothing else, and reading the clock twice another 100 ns
//! (benches/micro/trace.rs).
//! Frames have a ring of their own, because there are so many more of them: a large model would push its own steps out.

use std::sync::{Mutex, PoisonError};

use crate::frame::Header;

/// How many spans each of the two rings holds.
pub const CAPACITY: usize = 1 << 15;

/// Frames with less payload than this leave no span.
pub const LEAST_PAYLOAD: usize = 4 << 10;

/// Nanoseconds of the monotonic clock, which is the same one for all processes of a boot (see [`crate::host::clock`]).
pub fn now() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// What took the time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// The forward pass.
    Forward,
    /// The backward pass.
    Backward,
    /// The backward pass is over and waits for communication.
    Wait,
    /// A bucket is ready, but the communication thread is not there yet.
    Queued {
        /// The bucket's number in its model.
        bucket: u32,
    },
    /// The pipeline of a bucket runs.
    Reduce {
        /// The bucket's number in its model.
        bucket: u32,
    },
    /// A frame is being written to a stream.
    Send {
        /// The rank it is for.
        peer: u32,
    },
    /// A frame is being read from a stream.
    Receive {
        /// The rank it is from.
        peer: u32,
    },
    /// A step of a pipeline that the user wrote in Python.
    Python {
        /// The bucket's number in its model.
        bucket: u32,
    },
}

impl What {
    /// How files name it.
    pub fn name(self) -> &'static str {
        match self {
            What::Forward => "forward",
            What::Backward => "backward",
            What::Wait => "wait",
            What::Queued { .. } => "queued",
            What::Reduce { .. } => "reduce",
            What::Send { .. } => "send",
            What::Receive { .. } => "receive",
            What::Python { .. } => "python",
        }
    }

    /// The bucket or the peer, 0 where there is neither.
    pub fn id(self) -> u32 {
        match self {
            What::Forward | What::Backward | What::Wait => 0,
            What::Queued { bucket } | What::Reduce { bucket } | What::Python { bucket } => bucket,
            What::Send { peer } | What::Receive { peer } => peer,
        }
    }

    /// The reverse of [`What::name`] and [`What::id`].
    pub fn from_name(name: &str, id: u32) -> Option<Self> {
        [
            What::Forward,
            What::Backward,
            What::Wait,
            What::Queued { bucket: id },
            What::Reduce { bucket: id },
            What::Send { peer: id },
            What::Receive { peer: id },
            What::Python { bucket: id },
        ]
        .into_iter()
        .find(|what| what.name() == name)
    }

    fn is_frame(self) -> bool {
        matches!(self, What::Send { .. } | What::Receive { .. })
    }
}

/// Something that took time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// What it was.
    pub what: What,
    /// The model; of a frame, the group, or the tag of a message.
    pub model: u32,
    /// The step of the model; of a frame, the number of the call in its group.
    pub step: u64,
    /// When it began, see [`now`].
    pub begin: u64,
    /// When it ended.
    pub end: u64,
    /// Bytes that were worked on; of a frame, its payload.
    pub bytes: u64,
}

impl Span {
    /// A frame whose last byte has just been written or read.
    pub(crate) fn of_frame(what: What, header: &Header, begin: u64) -> Self {
        let (model, bytes) = (header.group as u32, u64::from(header.length));
        Span { what, model, step: header.sequence, begin, end: now(), bytes }
    }
}

/// Keeps the last spans of every kind. All methods may be called by any thread at any time, also while a call hangs: the
/// locks are leaves, and nobody waits for anything under them.
#[derive(Default)]
pub struct Recorder {
    frames: Mutex<Ring>,
    others: Mutex<Ring>,
}

impl Recorder {
    /// Keeps a span, in place of the oldest one of its ring if that is full.
    pub fn record(&self, span: Span) {
        let ring = if span.what.is_frame() { &self.frames } else { &self.others };
        ring.lock().unwrap_or_else(PoisonError::into_inner).push(span);
    }

    /// All spans that are kept, in the order in which they ended.
    pub fn spans(&self) -> Vec<Span> {
        let mut spans = Vec::new();
        self.each_ring(|ring| {
            spans.extend_from_slice(&ring.spans[ring.oldest..]);
            spans.extend_from_slice(&ring.spans[..ring.oldest]);
        });
        // each ring is in order but for spans that threads recorded at the same moment, which makes this quick
        spans.sort_by_key(|span| span.end);
        spans
    }

    /// How many spans gave way to newer ones.
    pub fn dropped(&self) -> u64 {
        let mut dropped = 0;
        self.each_ring(|ring| dropped += ring.dropped);
        dropped
    }

    /// Forgets all spans, also those that were dropped.
    pub fn clear(&self) {
        self.each_ring(|ring| {
            ring.spans.clear();
            (ring.oldest, ring.dropped) = (0, 0);
        });
    }

    fn each_ring(&self, mut look: impl FnMut(&mut Ring)) {
        for ring in [&self.frames, &self.others] {
            look(&mut ring.lock().unwrap_or_else(PoisonError::into_inner));
        }
    }
}

struct Ring {
    spans: Vec<Span>,
    /// Where the oldest span is, and the next one goes once the ring is full.
    oldest: usize,
    dropped: u64,
}

impl Default for Ring {
    fn default() -> Self {
        // reserved at once, so that no push ever copies the others; pages that are not used yet do not exist
        Ring { spans: Vec::with_capacity(CAPACITY), oldest: 0, dropped: 0 }
    }
}

impl Ring {
    fn push(&mut self, span: Span) {
        if self.spans.len() < CAPACITY {
            self.spans.push(span);
            return;
        }
        self.spans[self.oldest] = span;
        self.oldest = (self.oldest + 1) % CAPACITY;
        self.dropped += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(what: What, end: u64) -> Span {
        Span { what, model: 0, step: 0, begin: end.saturating_sub(1), end, bytes: 0 }
    }

    fn ends(recorder: &Recorder) -> Vec<u64> {
        recorder.spans().iter().map(|span| span.end).collect()
    }

    #[test]
    fn a_full_ring_drops_the_oldest() {
        let recorder = Recorder::default();
        let (all, extra) = (CAPACITY as u64 + 1000, 1000);
        (0..all).for_each(|end| recorder.record(span(What::Reduce { bucket: 1 }, end)));
        assert_eq!(ends(&recorder), (extra..all).collect::<Vec<_>>());
        assert_eq!(recorder.dropped(), extra);
        (all..all + CAPACITY as u64).for_each(|end| recorder.record(span(What::Wait, end)));
        assert_eq!(ends(&recorder), (all..all + CAPACITY as u64).collect::<Vec<_>>());
        assert_eq!(recorder.dropped(), extra + CAPACITY as u64);
    }

    #[test]
    fn exactly_full_drops_nothing_and_clear_begins_anew() {
        let recorder = Recorder::default();
        (0..CAPACITY as u64).for_each(|end| recorder.record(span(What::Forward, end)));
        assert_eq!((recorder.spans().len(), recorder.dropped()), (CAPACITY, 0));
        recorder.record(span(What::Forward, 1 << 40));
        recorder.clear();
        assert_eq!((recorder.spans().len(), recorder.dropped()), (0, 0));
        recorder.record(span(What::Forward, 7));
        assert_eq!(ends(&recorder), [7]);
    }

    #[test]
    fn frames_do_not_push_steps_out() {
        let recorder = Recorder::default();
        recorder.record(span(What::Wait, 5));
        let frames = 2 * CAPACITY as u64;
        (0..frames).for_each(|end| recorder.record(span(What::Send { peer: 1 }, 10 + end)));
        let spans = recorder.spans();
        assert_eq!((spans.len(), spans[0].what), (CAPACITY + 1, What::Wait));
        assert_eq!(recorder.dropped(), CAPACITY as u64);
    }

    #[test]
    fn several_writers_and_a_reader() {
        let (writers, each) = (4, 20_000);
        let recorder = Recorder::default();
        std::thread::scope(|scope| {
            for writer in 0..writers {
                let recorder = &recorder;
                scope.spawn(move || {
                    for number in 0..each {
                        let end = number + 1;
                        recorder.record(Span {
                            model: writer,
                            step: number,
                            ..span(What::Reduce { bucket: writer }, end)
                        });
                    }
                });
            }
            for _ in 0..20 {
                // no span is ever seen half written
                assert!(recorder.spans().iter().all(|s| s.what.id() == s.model && s.step + 1 == s.end));
            }
        });
        let spans = recorder.spans();
        assert_eq!(spans.len(), CAPACITY);
        assert_eq!(recorder.dropped(), u64::from(writers) * each - CAPACITY as u64);
        for writer in 0..writers {
            let steps: Vec<u64> = spans.iter().filter(|s| s.model == writer).map(|s| s.step).collect();
            let last = steps.len() as u64;
            assert_eq!(steps, (each - last..each).collect::<Vec<_>>());
        }
    }

    #[test]
    fn names_lead_back() {
        for name in ["forward", "backward", "wait"] {
            assert_eq!(What::from_name(name, 3).map(|what| (what.name(), what.id())), Some((name, 0)));
        }
        for name in ["queued", "reduce", "send", "receive", "python"] {
            assert_eq!(What::from_name(name, 3).map(|what| (what.name(), what.id())), Some((name, 3)));
        }
        assert_eq!(What::from_name("reduction", 3), None);
    }

    #[test]
    fn the_clock_goes_forward() {
        let before = now();
        std::thread::sleep(std::time::Duration::from_millis(2));
        assert!(now() - before >= 2_000_000);
    }
}
