//! send and recv: many tags and sizes, short and long, over shared memory and TCP, in any order of tags.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]

use offbeat_core::Kind;
use offbeat_core::dtype::DType;
use offbeat_tests::reference::{Values, fill};
use offbeat_tests::tensor::{Memory, Tensor};
use offbeat_tests::{ALWAYS_SHORT, NEVER_SHORT, Rank, Setup, TINY, spawn};

fn data(from: usize, tag: u64, count: usize) -> Vec<u8> {
    fill(DType::I32, Values::Finite, tag * 8 + from as u64, count)
}

fn send(rank: &Rank, to: usize, tag: u64, count: usize) {
    let memory = Memory::ALL[(tag % 3) as usize];
    let tensor = Tensor::new(rank, memory, DType::I32, &data(rank.rank, tag, count));
    rank.engine().send(&tensor.view(), to as u32, tag, None).unwrap_or_else(|e| panic!("send {tag}: {e}"));
}

fn recv(rank: &Rank, from: usize, tag: u64, count: usize) {
    let memory = Memory::ALL[(tag / 3 % 3) as usize];
    let tensor = Tensor::new(rank, memory, DType::I32, &vec![0; count * 4]);
    rank.engine().recv(&tensor.view(), from as u32, tag, None).unwrap_or_else(|e| panic!("recv {tag}: {e}"));
    assert_eq!(tensor.bytes(), data(from, tag, count), "tag {tag} from rank {from}");
}

const COUNTS: [usize; 12] = [0, 1, 7, 23, 24, 25, 47, 48, 49, 64, 1000, 5000];

#[test]
fn many_tags_and_sizes_between_all_pairs() {
    for layout in [&["a", "a", "b"][..], &["a", "b", "c"], &["a", "a", "a"]] {
        for tuning in [TINY, NEVER_SHORT, ALWAYS_SHORT] {
            Setup::new(layout, tuning).streams(2).spawn(|rank| {
                let world = rank.world();
                let others: Vec<usize> = (0..world).filter(|other| *other != rank.rank).collect();
                // everybody sends to everybody at once, while another thread receives
                std::thread::scope(|scope| {
                    let rank = &*rank;
                    for to in others.clone() {
                        scope.spawn(move || {
                            COUNTS.iter().enumerate().for_each(|(tag, count)| send(rank, to, tag as u64, *count));
                        });
                    }
                    for from in others {
                        scope.spawn(move || {
                            COUNTS.iter().enumerate().for_each(|(tag, count)| recv(rank, from, tag as u64, *count));
                        });
                    }
                });
            });
        }
    }
}

#[test]
fn tags_are_received_in_any_order_and_one_tag_keeps_its_own() {
    for layout in [["a", "a"], ["a", "b"]] {
        spawn(&layout, TINY, |rank| {
            if rank.rank == 0 {
                // short messages run ahead, whatever the receiver does
                (0..20).for_each(|tag| send(rank, 1, tag, 5));
                for step in 0..10u8 {
                    let tensor = Tensor::new(rank, Memory::Plain, DType::U8, &[step]);
                    rank.engine().send(&tensor.view(), 1, u64::MAX, None).unwrap();
                }
                // long ones wait, each in a thread of its own
                std::thread::scope(|scope| {
                    let rank = &*rank;
                    (100..106).for_each(|tag| drop(scope.spawn(move || send(rank, 1, tag, 3000))));
                });
            } else {
                (0..20).rev().for_each(|tag| recv(rank, 0, tag, 5));
                for step in 0..10u8 {
                    let tensor = Tensor::new(rank, Memory::Plain, DType::U8, &[0]);
                    rank.engine().recv(&tensor.view(), 0, u64::MAX, None).unwrap();
                    assert_eq!(tensor.bytes(), [step]);
                }
                (100..106).rev().for_each(|tag| recv(rank, 0, tag, 3000));
            }
        });
    }
}

#[test]
fn different_shapes_and_types_are_a_mismatch_on_the_receiver_and_for_long_messages_on_both() {
    for layout in [["a", "a"], ["a", "b"]] {
        spawn(&layout, TINY, |rank| {
            let tensor = |dtype: DType, shape: Vec<u64>| {
                let bytes = vec![0; shape.iter().product::<u64>() as usize * dtype.size()];
                Tensor::shaped(rank, Memory::Plain, dtype, shape, &bytes)
            };
            let cases = [
                (tensor(DType::F32, vec![4]), tensor(DType::F32, vec![2, 2])),
                (tensor(DType::F32, vec![4]), tensor(DType::I32, vec![4])),
                (tensor(DType::F32, vec![500]), tensor(DType::F32, vec![501])),
                (tensor(DType::F32, vec![500]), tensor(DType::F32, vec![3])),
                (tensor(DType::F32, vec![3]), tensor(DType::F32, vec![500])),
            ];
            for (tag, (sent, expected)) in cases.iter().enumerate() {
                let result = match rank.rank {
                    0 => rank.engine().send(&sent.view(), 1, tag as u64, None),
                    _ => rank.engine().recv(&expected.view(), 0, tag as u64, None),
                };
                let short = sent.bytes().len() <= TINY.eager;
                if rank.rank == 0 && short {
                    result.unwrap();
                    continue;
                }
                let error = result.unwrap_err();
                assert_eq!((error.kind, error.rank), (Kind::Mismatch, Some(0)), "{error}");
                assert!(error.message.contains("rank 0") && error.message.contains("rank 1"), "{error}");
            }
            // messages are no group: the next one is fine
            if rank.rank == 0 { send(rank, 1, 99, 100) } else { recv(rank, 0, 99, 100) }
        });
    }
}

#[test]
fn nobody_sends_to_itself_or_to_strangers() {
    spawn(&["a", "b"], TINY, |rank| {
        let tensor = Tensor::new(rank, Memory::Plain, DType::U8, &[1]);
        for peer in [rank.rank as u32, 2, u32::MAX] {
            assert_eq!(rank.engine().send(&tensor.view(), peer, 0, None).unwrap_err().kind, Kind::InvalidArgument);
            assert_eq!(rank.engine().recv(&tensor.view(), peer, 0, None).unwrap_err().kind, Kind::InvalidArgument);
        }
    });
}
