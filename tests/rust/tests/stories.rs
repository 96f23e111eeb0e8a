//! When one rank fails and another one over it: who is named.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]

use std::sync::Barrier;
use std::time::Duration;

use offbeat_core::Kind;
use offbeat_core::call::Call;
use offbeat_tests::tensor::run;
use offbeat_tests::{Setup, TINY};

const LAYOUTS: [&[&str]; 4] =
    [&["a", "a", "a", "a"], &["a", "b", "c", "d"], &["a", "a", "b", "b"], &["a", "b", "a", "a"]];

#[test]
fn the_first_that_failed_is_named_and_not_who_failed_over_it() {
    for layout in LAYOUTS {
        let met = Barrier::new(4);
        Setup::new(layout, TINY).spawn(move |rank| {
            let world = rank.engine().world();
            let other = rank.engine().group(&[0, 1, 2, 3], None).unwrap();
            let without = rank.engine().group(&[0, 1, 2], None).unwrap();
            met.wait();
            match rank.rank {
                3 => rank.engine().fail("ValueError: no"),
                2 => {
                    let error = run(world, Call::Barrier).unwrap_err();
                    rank.engine().fail(&format!("PeerFailed: {error}"));
                }
                // one is in a call all the time, the other comes when it has heard of both
                1 => assert_eq!(run(world, Call::Barrier).unwrap_err().rank, Some(3)),
                _ => {}
            }
            met.wait();
            if rank.rank < 2 {
                // both failures are on their way
                std::thread::sleep(Duration::from_millis(200));
                for group in [world, &other] {
                    let error = run(group, Call::Barrier).unwrap_err();
                    assert_eq!((error.kind, error.rank), (Kind::PeerFailed, Some(3)), "{layout:?}: {error}");
                    assert!(error.cause == "ValueError: no", "{layout:?}: {error}");
                }
                // what the first was no member of has failed with the second, which quotes it
                let error = run(&without, Call::Barrier).unwrap_err();
                assert_eq!((error.kind, error.rank), (Kind::PeerFailed, Some(2)), "{layout:?}: {error}");
                assert!(error.cause.contains("rank 3") && error.cause.contains("ValueError: no"), "{error}");
            }
            met.wait();
        });
    }
}
