//! Random layouts and random sequences of calls, each against the reference.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]

use offbeat_core::call::Call;
use offbeat_core::config::Tuning;
use offbeat_core::dtype::{DType, Op};
use offbeat_core::event::Event;
use offbeat_core::graph::{Graph, Peers};
use offbeat_tests::reference::{self, Values, difference, fill, hosts, ops};
use offbeat_tests::tensor::{Memory, Tensor, contents, enqueue, run};
use offbeat_tests::{Rank, Setup, mixing};
use proptest::prelude::*;

/// One call, the same on every rank.
#[derive(Clone, Debug)]
struct Step {
    kind: u8,
    dtype: DType,
    op: usize,
    count: usize,
    root: usize,
    memory: Memory,
    queued: bool,
}

fn step() -> impl Strategy<Value = Step> {
    let lengths = prop_oneof![3 => 0usize..40, 2 => 40usize..400, 1 => 400usize..6000];
    let memory = prop_oneof![Just(Memory::Plain), Just(Memory::Shared), Just(Memory::Mixed)];
    (0u8..11, 0usize..13, 0usize..8, lengths, 0usize..5, memory, any::<bool>()).prop_map(
        |(kind, dtype, op, count, root, memory, queued)| Step {
            kind,
            dtype: DType::ALL[dtype],
            op,
            count,
            root,
            memory,
            queued,
        },
    )
}

fn tuning() -> impl Strategy<Value = Tuning> {
    (0usize..400, 128usize..4000, 64usize..3000, 0usize..3000, 0usize..5000)
        .prop_map(|(inline, segment, chunk, exchange, eager)| Tuning { inline, segment, chunk, exchange, eager })
}

fn perform(rank: &Rank, number: usize, step: &Step) {
    let (me, world, dtype, group) = (rank.rank, rank.world(), step.dtype, rank.engine().world());
    let labels: Vec<&str> = rank.layout.iter().map(String::as_str).collect();
    let op = ops(dtype)[step.op % ops(dtype).len()];
    let root = step.root % world;
    let data =
        |from: usize, to: usize, count: usize| fill(dtype, Values::Odd, ((number * 8 + from) * 8 + to) as u64, count);
    let length = |from: usize, to: usize| step.count * (1 + (from * 3 + to) % 4) / 4;
    let tensor = |bytes: &[u8]| Tensor::new(rank, step.memory, dtype, bytes);
    let go = |call: Call| {
        let output = if step.queued {
            enqueue(group, call).and_then(|ticket| ticket.wait(None, None).map(|()| ticket.take()))
        } else {
            run(group, call)
        };
        contents(&output.unwrap_or_else(|e| panic!("step {number} {step:?}: {e}")))
    };
    let sum = |to: usize, count: usize| {
        let inputs: Vec<Vec<u8>> = (0..world).map(|from| data(from, to, count)).collect();
        reference::reduce(&hosts(&labels), &inputs, dtype, op)
    };
    let same = |got: &[u8], expected: &[u8]| {
        let difference = difference(dtype, got, expected);
        assert_eq!(difference, None, "step {number} {step:?} ({op})");
    };
    let everyone = || 0..world;
    let whole = tensor(&data(me, 0, step.count));
    let list: Vec<Tensor> = everyone().map(|to| tensor(&data(me, to, length(me, to)))).collect();
    let views = || list.iter().map(Tensor::view).collect::<Vec<_>>();
    match step.kind {
        0 => {
            go(Call::AllReduce { tensor: whole.view(), op, coding: None });
            same(&whole.bytes(), &sum(0, step.count));
        }
        1 => {
            go(Call::Reduce { tensor: whole.view(), dst: root as u32, op });
            same(&whole.bytes(), &if me == root { sum(0, step.count) } else { data(me, 0, step.count) });
        }
        2 => {
            go(Call::Broadcast { tensor: whole.view(), src: root as u32 });
            same(&whole.bytes(), &data(root, 0, step.count));
        }
        3 | 4 => {
            let mine = &list[0];
            let rows: Vec<Vec<u8>> = everyone().map(|from| data(from, 0, length(from, 0))).collect();
            let to_all = step.kind == 3;
            let tensor = mine.view();
            let got = go(if to_all { Call::AllGather { tensor } } else { Call::Gather { tensor, dst: root as u32 } });
            assert_eq!(got, if to_all || me == root { rows } else { Vec::new() }, "step {number} {step:?}");
        }
        5 => {
            let out = tensor(&vec![0; length(root, me) * dtype.size()]);
            let tensors = (me == root).then(views);
            go(Call::Scatter { tensors, src: root as u32, out: out.view() });
            same(&out.bytes(), &data(root, me, length(root, me)));
        }
        6 => {
            // the same shapes on every rank
            let list: Vec<Tensor> = everyone().map(|to| tensor(&data(me, to, length(to, to)))).collect();
            let got = go(Call::ReduceScatter { tensors: list.iter().map(Tensor::view).collect(), op });
            same(&got[0], &sum(me, length(me, me)));
        }
        7 => {
            let parts: Vec<Vec<u8>> = everyone().map(|from| data(from, me, length(from, me))).collect();
            assert_eq!(go(Call::AllToAll { tensors: views() }), parts, "step {number} {step:?}");
        }
        8 if dtype.is_float() => {
            let graph = graph_of(step, hosts(&labels).len());
            let inputs: Vec<Vec<u8>> = everyone().map(|from| data(from, 0, step.count)).collect();
            let my_host = hosts(&labels).iter().position(|host| host.contains(&me)).unwrap();
            go(Call::Gossip { tensor: whole.view(), out: None, graph, step: number as u64 });
            same(&whole.bytes(), &mixing::gossip(&graph, number as u64, &hosts(&labels), &inputs, dtype, my_host));
        }
        9 => {
            let peers = graph_of(step, world).peers(me, number as u64);
            let blocks = peers.iter().map(|to| (*to as u32, list[*to].view())).collect();
            let parts: Vec<Vec<u8>> = peers.iter().map(|from| data(*from, me, length(*from, me))).collect();
            assert_eq!(go(Call::Exchange { blocks, step: number as u64 }), parts, "step {number} {step:?}");
        }
        _ => drop(go(Call::Barrier)),
    }
}

fn graph_of(step: &Step, nodes: usize) -> Graph {
    Graph::new(Peers::ALL[step.root % 5], nodes, step.root as u64)
        .unwrap_or_else(|_| Graph::new(Peers::Random, nodes, 1).unwrap())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, max_shrink_iters: 40, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_sequence_of_calls_on_any_layout(
        layout in proptest::collection::vec(proptest::sample::select(vec!["a", "b", "c"]), 1..6),
        tuning in tuning(),
        streams in 1u8..4,
        steps in proptest::collection::vec(step(), 1..40),
    ) {
        Setup::new(&layout, tuning).streams(streams).spawn(move |rank| {
            steps.iter().enumerate().for_each(|(number, step)| perform(rank, number, step));
        });
    }
}

#[test]
fn mean_is_among_the_operations_of_floats_only() {
    assert!(DType::ALL.into_iter().all(|dtype| ops(dtype).contains(&Op::Mean) == dtype.is_float()));
    assert!(
        DType::ALL
            .into_iter()
            .all(|dtype| Op::ALL.into_iter().all(|op| op.check(dtype).is_ok() == ops(dtype).contains(&op)))
    );
}
