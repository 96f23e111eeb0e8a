//! Frames leave spans on both sides of a link, long ones only, and bytes are counted.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]

use offbeat_core::dtype::DType;
use offbeat_core::transport::trace::{LEAST_PAYLOAD, What, now};
use offbeat_tests::{ALWAYS_SHORT, Memory, Rank, Tensor, spawn};

/// Rank 0 sends a message to rank 1.
fn message(rank: &Rank, tag: u64, bytes: usize) {
    let tensor = Tensor::new(rank, Memory::Plain, DType::U8, &vec![7; bytes]);
    match rank.rank {
        0 => rank.engine().send(&tensor.view(), 1, tag, None).unwrap(),
        _ => rank.engine().recv(&tensor.view(), 0, tag, None).unwrap(),
    }
}

#[test]
fn long_frames_leave_spans() {
    spawn(&["a", "b"], ALWAYS_SHORT, |rank| {
        let before = now();
        // nothing is sent before the other has looked at the clock
        let ready = Tensor::new(rank, Memory::Plain, DType::U8, &[1]);
        match rank.rank {
            0 => rank.engine().recv(&ready.view(), 1, 4, None).unwrap(),
            _ => rank.engine().send(&ready.view(), 0, 4, None).unwrap(),
        }
        message(rank, 5, LEAST_PAYLOAD - 1);
        message(rank, 6, LEAST_PAYLOAD);
        // `send` does not wait for the writing task
        while rank.engine().trace().spans().is_empty() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        let spans = rank.engine().trace().spans();
        let what = if rank.rank == 0 { What::Send { peer: 1 } } else { What::Receive { peer: 0 } };
        let found: Vec<_> = spans.iter().map(|span| (span.what, span.model, span.bytes)).collect();
        assert_eq!(found, [(what, 6, LEAST_PAYLOAD as u64)]);
        assert!(before <= spans[0].begin && spans[0].begin <= spans[0].end && spans[0].end <= now());
        assert_eq!(rank.engine().trace().dropped(), 0);

        let mut traffic = (0, 0);
        rank.engine().each_link(|peer, link| {
            if peer as usize != rank.rank {
                traffic = link.traffic();
            }
        });
        let counted = if rank.rank == 0 { traffic.0 } else { traffic.1 };
        assert!(counted > 2 * LEAST_PAYLOAD as u64 && counted < 3 * LEAST_PAYLOAD as u64, "{counted}");
    });
}
