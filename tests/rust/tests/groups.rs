//! Subgroups, several groups from several threads, and work under way.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]

use std::sync::Arc;
use std::time::Duration;

use offbeat_core::call::Call;
use offbeat_core::dtype::{DType, Op};
use offbeat_core::event::{Event, Output, Queue, Ticket};
use offbeat_core::group::{Group, Work};
use offbeat_core::{Error, Kind};
use offbeat_tests::reference::{self, Values, difference, fill, hosts};
use offbeat_tests::tensor::{Memory, Tensor, all_reduce, contents, enqueue, run};
use offbeat_tests::{LAYOUTS, Rank, Setup, TINY, spawn};

fn value(rank: usize, salt: usize, count: usize) -> Vec<u8> {
    fill(DType::F32, Values::Finite, (salt * 32 + rank) as u64, count)
}

/// What an all_reduce in a group must give.
fn sum(layout: &[String], ranks: &[u32], salt: usize, count: usize) -> Vec<u8> {
    let labels: Vec<&str> = ranks.iter().map(|rank| layout[*rank as usize].as_str()).collect();
    let inputs: Vec<Vec<u8>> = ranks.iter().map(|rank| value(*rank as usize, salt, count)).collect();
    reference::reduce(&hosts(&labels), &inputs, DType::F32, Op::Sum)
}

fn reduce_in(rank: &Rank, group: &Group, salt: usize, count: usize) {
    let tensor = Tensor::new(rank, Memory::ALL[salt % 3], DType::F32, &value(rank.rank, salt, count));
    run(group, all_reduce(&tensor, Op::Sum, None)).unwrap_or_else(|e| panic!("group {:?}: {e}", group.ranks()));
    let expected = sum(&rank.layout, group.ranks(), salt, count);
    assert_eq!(difference(DType::F32, &tensor.bytes(), &expected), None, "group {:?}", group.ranks());
}

const SUBSETS: [&[u32]; 6] = [&[0, 2, 4], &[1, 3], &[4, 0], &[2], &[0, 1, 2, 3, 4], &[1, 2, 4]];

#[test]
fn subgroups_of_every_kind() {
    for layout in LAYOUTS.iter().filter(|layout| layout.len() == 5) {
        spawn(layout, TINY, |rank| {
            let groups: Vec<Group> = SUBSETS.iter().map(|ranks| rank.engine().group(ranks, None).unwrap()).collect();
            for (salt, count) in [1, 5, 100, 777].into_iter().enumerate() {
                for group in &groups {
                    if group.ranks().contains(&(rank.rank as u32)) {
                        reduce_in(rank, group, salt, count);
                    }
                }
            }
            // roots are global ranks, in a subgroup too
            let group = &groups[0];
            let tensor = Tensor::new(rank, Memory::Plain, DType::F32, &value(rank.rank, 9, 50));
            let result = run(group, Call::Broadcast { tensor: tensor.view(), src: 4 });
            if group.ranks().contains(&(rank.rank as u32)) {
                result.unwrap();
                assert_eq!(tensor.bytes(), value(4, 9, 50));
                let error = run(group, Call::Broadcast { tensor: tensor.view(), src: 1 }).unwrap_err();
                assert_eq!(error.kind, Kind::InvalidArgument);
            } else {
                assert_eq!(result.unwrap_err().kind, Kind::InvalidArgument);
            }
        });
    }
}

#[test]
fn several_groups_from_several_threads_in_any_order() {
    for layout in LAYOUTS.iter().filter(|layout| layout.len() == 5) {
        spawn(layout, TINY, |rank| {
            let groups: Vec<Group> = SUBSETS.iter().map(|ranks| rank.engine().group(ranks, None).unwrap()).collect();
            let me = rank.rank as u32;
            std::thread::scope(|scope| {
                let mut mine: Vec<&Group> = groups.iter().filter(|group| group.ranks().contains(&me)).collect();
                let turn = rank.rank % mine.len();
                mine.rotate_left(turn);
                for group in mine {
                    let rank = &*rank;
                    scope.spawn(move || (0..40).for_each(|salt| reduce_in(rank, group, salt, 1 + salt * 7 % 300)));
                }
            });
            reduce_in(rank, rank.engine().world(), 1, 10);
        });
    }
}

#[test]
fn groups_queued_in_different_orders_do_not_wait_for_each_other() {
    for layout in [&["a", "a", "a"][..], &["a", "b", "c"], &["a", "a", "b"]] {
        spawn(layout, TINY, |rank| {
            let groups: Vec<Group> = (0..3).map(|_| rank.engine().group(&[0, 1, 2], None).unwrap()).collect();
            let order: Vec<usize> = (0..3).map(|step| (step + rank.rank) % 3).collect();
            let tensors: Vec<Tensor> =
                (0..3).map(|salt| Tensor::new(rank, Memory::Plain, DType::F32, &value(rank.rank, salt, 90))).collect();
            let tickets: Vec<Ticket> = order
                .iter()
                .map(|at| enqueue(&groups[*at], all_reduce(&tensors[*at], Op::Sum, None)).unwrap())
                .collect();
            tickets.iter().for_each(|ticket| ticket.wait(Some(Duration::from_secs(20)), None).unwrap());
            for (salt, tensor) in tensors.iter().enumerate() {
                let expected = sum(&rank.layout, &[0, 1, 2], salt, 90);
                assert_eq!(difference(DType::F32, &tensor.bytes(), &expected), None);
            }
        });
    }
}

#[test]
fn many_calls_under_way_keep_their_order_and_mix_with_blocking_ones() {
    for layout in [&["a", "a", "a"][..], &["a", "b", "c"], &["a", "b", "a", "b"]] {
        spawn(layout, TINY, |rank| {
            let group = rank.engine().world();
            // one tensor through many calls: the result is right only if none overtakes another
            let twice = Tensor::new(rank, Memory::Shared, DType::U64, &1u64.to_le_bytes().repeat(70));
            let mut tickets = Vec::new();
            for step in 0..30 {
                tickets.push(enqueue(group, all_reduce(&twice, Op::Sum, None)).unwrap());
                // ranks differ in whether they block or not; the order of calls is the same
                if (step + rank.rank) % 3 == 0 {
                    reduce_in(rank, group, step, 40);
                    assert!(tickets.last().unwrap().done(), "a blocking call overtook a queued one");
                } else {
                    let tensor = Tensor::new(rank, Memory::Plain, DType::F32, &value(rank.rank, step, 40));
                    let call = all_reduce(&tensor, Op::Sum, None);
                    let work = Work { call, keep: Some(Box::new(SendTensor(tensor))) };
                    tickets.push(group.enqueue(work, None).unwrap());
                }
            }
            let gathered = enqueue(group, Call::AllGather { tensor: twice.view() }).unwrap();
            gathered.wait(Some(Duration::from_secs(20)), None).unwrap();
            assert!(tickets.iter().all(Event::done));
            let world = rank.world() as u64;
            let expected = (0..30).fold(1u64, |all, _| all.wrapping_mul(world)).to_le_bytes().repeat(70);
            assert_eq!(contents(&gathered.take()), vec![expected; rank.world()]);
        });
    }
}

struct SendTensor(#[expect(dead_code, reason = "kept alive until the call is done")] Tensor);
// SAFETY: the tensor is only dropped by the group's thread.
unsafe impl Send for SendTensor {}

#[test]
fn work_begins_after_its_event() {
    spawn(&["a", "b"], TINY, |rank| {
        let group = rank.engine().world();
        let tensor = Tensor::new(rank, Memory::Plain, DType::U64, &1u64.to_le_bytes());
        let gate = Ticket::default();
        let work = Work { call: all_reduce(&tensor, Op::Sum, None), keep: None };
        let first = group.enqueue(work, Some(Arc::new(gate.clone()))).unwrap();
        let second = enqueue(group, all_reduce(&tensor, Op::Sum, None)).unwrap();
        assert_eq!(second.wait(Some(Duration::from_millis(50)), None).unwrap_err().kind, Kind::Timeout);
        assert!(!first.done() && tensor.bytes() == 1u64.to_le_bytes());
        gate.complete(Ok(Output::new()));
        second.wait(Some(Duration::from_secs(20)), None).unwrap();
        assert!(first.done());
        assert_eq!(tensor.bytes(), 4u64.to_le_bytes());
    });
}

#[test]
fn work_whose_event_failed_fails_on_every_rank() {
    for layout in [&["a", "b"][..], &["a", "a"]] {
        spawn(layout, TINY, |rank| {
            let group = rank.engine().world();
            let gate = Ticket::default();
            let story = if rank.rank == 0 { Err(Error::invalid("the kernel failed")) } else { Ok(Output::new()) };
            gate.complete(story);
            let tensor = Tensor::new(rank, Memory::Plain, DType::U64, &1u64.to_le_bytes());
            let work = Work { call: all_reduce(&tensor, Op::Sum, None), keep: None };
            let ticket = group.enqueue(work, Some(Arc::new(gate))).unwrap();
            let error = ticket.wait(Some(Duration::from_secs(5)), None).unwrap_err();
            assert!(error.message.contains("the kernel failed"), "{error}");
        });
    }
}

#[test]
fn different_groups_are_a_mismatch_and_nothing_is_left_behind() {
    for layout in [&["a", "a", "a"][..], &["a", "b", "c"], &["a", "b", "a"]] {
        spawn(layout, TINY, |rank| {
            let ranks: &[u32] = if rank.rank == 1 { &[0, 1] } else { &[0, 1, 2] };
            let Err(error) = rank.engine().group(ranks, None) else { panic!("a group of different ranks") };
            assert_eq!(error.kind, Kind::Mismatch);
            assert!(error.message.contains("[0, 1]") && error.message.contains("[0, 1, 2]"), "{error}");
            for wrong in [&[][..], &[0, 0], &[7]] {
                let Err(error) = rank.engine().group(wrong, None) else { panic!("a group of {wrong:?}") };
                assert_eq!(error.kind, Kind::InvalidArgument);
            }
            let group = rank.engine().group(&[2, 0], None).unwrap();
            if rank.rank != 1 {
                reduce_in(rank, &group, 3, 100);
            }
        });
    }
}

#[test]
fn calls_after_a_shutdown_are_refused() {
    Setup::new(&["a", "b"], TINY).spawn(|rank| {
        let group = rank.engine().world().clone();
        run(&group, Call::Barrier).unwrap();
        rank.engine().shutdown("the test is over");
        rank.engine().shutdown("a second time does nothing");
        assert_eq!(run(&group, Call::Barrier).unwrap_err().kind, Kind::NotInitialized);
        let Err(error) = enqueue(&group, Call::Barrier) else { panic!("a call was queued") };
        assert_eq!(error.kind, Kind::NotInitialized);
        rank.drop_engine();
        assert_eq!(run(&group, Call::Barrier).unwrap_err().kind, Kind::NotInitialized);
    });
}

/// The words of a call on a closed group.
fn refusal(group: &Group) -> Error {
    let error = run(group, Call::Barrier).unwrap_err();
    let Err(queued) = enqueue(group, Call::Barrier) else { panic!("a call was queued") };
    assert_eq!(queued, error);
    error
}

#[test]
fn closed_groups_end_after_what_is_queued_and_give_their_memory_back() {
    for layout in LAYOUTS.iter().filter(|layout| layout.len() == 5) {
        spawn(layout, TINY, |rank| {
            let engine = rank.engine();
            let place = || engine.shared(1 << 20).unwrap().offset();
            let before = place();
            for round in 0..25 {
                let groups: Vec<Group> = SUBSETS.iter().map(|ranks| engine.group(ranks, None).unwrap()).collect();
                for group in &groups {
                    let member = group.ranks().contains(&(rank.rank as u32));
                    let tensor = Tensor::new(rank, Memory::Shared, DType::F32, &value(rank.rank, round, 40));
                    let queued = member.then(|| enqueue(group, all_reduce(&tensor, Op::Sum, None)).unwrap());
                    engine.close_group(group, None).unwrap();
                    if let Some(queued) = queued {
                        assert!(queued.done());
                        let expected = sum(&rank.layout, group.ranks(), round, 40);
                        assert_eq!(difference(DType::F32, &tensor.bytes(), &expected), None);
                        let error = refusal(group);
                        assert_eq!(error.kind, Kind::InvalidArgument);
                        assert!(error.message.contains("closed") && error.message.contains("try:"), "{error}");
                    }
                }
                groups.iter().for_each(|group| engine.close_group(group, None).unwrap());
            }
            assert_eq!(place(), before);
            // the world is as it was, and lasts
            reduce_in(rank, engine.world(), 1, 100);
            assert_eq!(engine.close_group(engine.world(), None).unwrap_err().kind, Kind::InvalidArgument);
            reduce_in(rank, engine.world(), 2, 100);
        });
    }
}

#[test]
fn closing_is_a_call_that_all_members_make() {
    for layout in [&["a", "a", "a"][..], &["a", "b", "c"], &["a", "b", "a"]] {
        spawn(layout, TINY, |rank| {
            let engine = rank.engine();
            let group = engine.group(&[0, 1, 2], None).unwrap();
            let error = match rank.rank {
                1 => engine.close_group(&group, None).unwrap_err(),
                _ => run(&group, Call::Barrier).unwrap_err(),
            };
            assert_eq!(error.kind, Kind::Mismatch, "{error}");
            assert!(error.message.contains("close") && error.message.contains("barrier"), "{error}");
            if rank.rank == 1 {
                assert_eq!(refusal(&group).kind, Kind::InvalidArgument);
            } else {
                assert_eq!(engine.close_group(&group, None).unwrap_err(), error);
            }
            engine.close_group(&group, None).unwrap();
            let again = engine.group(&[0, 1, 2], None).unwrap();
            reduce_in(rank, &again, 3, 100);
            engine.close_group(&again, None).unwrap();
        });
    }
}
