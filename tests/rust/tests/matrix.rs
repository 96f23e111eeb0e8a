//! Every collective on every type, operation, length, layout and kind of memory, against the reference, bit by bit.
//!
//! The same inputs go through three sets of sizes, so the same result is demanded of every way: slots, staged segments,
//! straight reduction, exchange, scatter and gather, stars and chains.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock};

use offbeat_core::call::Call;
use offbeat_core::config::Tuning;
use offbeat_core::dtype::{DType, Op};
use offbeat_tests::reference::{self, Values, difference, fill, hosts, ops};
use offbeat_tests::tensor::{Memory, Tensor, all_reduce, contents, run};
use offbeat_tests::{ALWAYS_SHORT, LAYOUTS, NEVER_SHORT, Rank, Setup, TINY};

type Key = (DType, Op, usize);
/// References of one layout, computed once by whichever rank needs one first.
type Cache = Arc<Mutex<HashMap<Key, Arc<OnceLock<Vec<u8>>>>>>;

fn seed(dtype: DType, op: Op, count: usize, rank: usize) -> u64 {
    reference::mix(dtype as u64 * 100 + op as u64, count as u64 * 16 + rank as u64)
}

fn input(dtype: DType, op: Op, count: usize, rank: usize) -> Vec<u8> {
    fill(dtype, Values::Odd, seed(dtype, op, count, rank), count)
}

fn expected(cache: &Cache, layout: &[String], (dtype, op, count): Key) -> Arc<OnceLock<Vec<u8>>> {
    let cell = Arc::clone(cache.lock().unwrap().entry((dtype, op, count)).or_default());
    cell.get_or_init(|| {
        let inputs: Vec<Vec<u8>> = (0..layout.len()).map(|rank| input(dtype, op, count, rank)).collect();
        let labels: Vec<&str> = layout.iter().map(String::as_str).collect();
        reference::reduce(&hosts(&labels), &inputs, dtype, op)
    });
    cell
}

/// Lengths in elements: a few of every kind, and those around every size at which a way changes.
fn lengths(tuning: Tuning, dtype: DType) -> Vec<usize> {
    let mut lengths = vec![0, 1, 2, 7, 64, 1000];
    for bytes in [tuning.inline, tuning.segment, 2 * tuning.segment, tuning.chunk, tuning.exchange, tuning.eager] {
        let at = bytes / dtype.size();
        lengths.extend([at.saturating_sub(1), at, at + 1].into_iter().filter(|n| *n <= 1100));
    }
    lengths.sort_unstable();
    lengths.dedup();
    lengths
}

fn check(what: &dyn Fn() -> String, dtype: DType, got: &[u8], expected: &[u8]) {
    if let Some(difference) = difference(dtype, got, expected) {
        panic!("{}: {difference}", what());
    }
}

/// Calls `each` with every (dtype, op, count, memory): all types, operations and lengths, the kinds of memory in turn.
fn sweep(tuning: Tuning, thin: usize, mut each: impl FnMut(DType, Op, usize, Memory)) {
    let mut turn = 0;
    for (d, dtype) in DType::ALL.into_iter().enumerate() {
        for (o, op) in ops(dtype).into_iter().enumerate() {
            for (l, count) in lengths(tuning, dtype).into_iter().enumerate() {
                // a thinned sweep still meets every pair of type and length, and of operation and length
                if (d + o + l).is_multiple_of(thin) {
                    each(dtype, op, count, Memory::ALL[turn % 3]);
                }
                turn += 1;
            }
        }
    }
}

fn reductions(rank: &Rank, tuning: Tuning, cache: &Cache) {
    let (me, world) = (rank.rank, rank.world());
    let group = rank.engine().world();
    let (mut src, thin) = (0, if tuning == TINY { 1 } else { 3 });
    sweep(tuning, thin, |dtype, op, count, memory| {
        let what = |call: &str| format!("{call}({dtype}, {op}, {count} elements, {memory:?}) under {tuning:?}");
        let mine = input(dtype, op, count, me);
        let cell = expected(cache, &rank.layout, (dtype, op, count));
        let expected = cell.get().unwrap();
        let tensor = Tensor::new(rank, memory, dtype, &mine);
        run(group, all_reduce(&tensor, op, None)).unwrap_or_else(|e| panic!("{}: {e}", what("all_reduce")));
        check(&|| what("all_reduce"), dtype, &tensor.bytes(), expected);

        src = (src + 1) % world;
        if !(count + src).is_multiple_of(2) {
            return;
        }
        let tensor = Tensor::new(rank, memory, dtype, &mine);
        let call = Call::Reduce { tensor: tensor.view(), dst: src as u32, op };
        run(group, call).unwrap_or_else(|e| panic!("{}: {e}", what("reduce")));
        let wanted = if me == src { expected } else { &mine };
        check(&|| what("reduce"), dtype, &tensor.bytes(), wanted);
    });
}

/// A length for the block that goes from one rank to another; some are empty.
fn ragged(count: usize, from: usize, to: usize) -> usize {
    if (from + to).is_multiple_of(4) { count } else { count * (from + 2 * to + 1) / 7 }
}

fn scattered_sums(rank: &Rank, tuning: Tuning) {
    let (me, world) = (rank.rank, rank.world());
    let labels: Vec<&str> = rank.layout.iter().map(String::as_str).collect();
    let blocks = |dtype: DType, op: Op, count: usize, from: usize| -> Vec<Vec<u8>> {
        (0..world).map(|to| input(dtype, op, ragged(count, to, to), from * 8 + to)).collect()
    };
    sweep(tuning, 4, |dtype, op, count, memory| {
        let tensors: Vec<Tensor> =
            blocks(dtype, op, count, me).iter().map(|block| Tensor::new(rank, memory, dtype, block)).collect();
        let call = Call::ReduceScatter { tensors: tensors.iter().map(Tensor::view).collect(), op };
        let what = || format!("reduce_scatter({dtype}, {op}, {count} elements, {memory:?}) under {tuning:?}");
        let got = contents(&run(rank.engine().world(), call).unwrap_or_else(|e| panic!("{}: {e}", what())));
        let for_me: Vec<Vec<u8>> = (0..world).map(|from| blocks(dtype, op, count, from).swap_remove(me)).collect();
        check(&what, dtype, &got[0], &reference::reduce(&hosts(&labels), &for_me, dtype, op));
        for (tensor, block) in tensors.iter().zip(blocks(dtype, op, count, me)) {
            assert_eq!(tensor.bytes(), block, "{} changed its input", what());
        }
    });
}

fn copies(rank: &Rank, tuning: Tuning) {
    let (me, world) = (rank.rank, rank.world());
    let group = rank.engine().world();
    let mut turn = 0;
    for dtype in DType::ALL {
        for count in lengths(tuning, dtype) {
            let memory = Memory::ALL[turn % 3];
            let root = turn % world;
            turn += 1;
            let what =
                |call: &str| format!("{call}({dtype}, {count} elements, {memory:?}, root {root}) under {tuning:?}");
            let give =
                |call: Call, name: &str| contents(&run(group, call).unwrap_or_else(|e| panic!("{}: {e}", what(name))));
            let data = |from: usize, to: usize, count: usize| input(dtype, Op::Sum, count, from * 8 + to);
            let tensor = |bytes: &[u8]| Tensor::new(rank, memory, dtype, bytes);

            let whole = tensor(&data(me, 0, count));
            give(Call::Broadcast { tensor: whole.view(), src: root as u32 }, "broadcast");
            assert_eq!(whole.bytes(), data(root, 0, count), "{}", what("broadcast"));

            let row = |from: usize| data(from, 1, ragged(count, from, from));
            let mine = tensor(&row(me));
            let rows: Vec<Vec<u8>> = (0..world).map(row).collect();
            assert_eq!(give(Call::AllGather { tensor: mine.view() }, "all_gather"), rows, "{}", what("all_gather"));
            let got = give(Call::Gather { tensor: mine.view(), dst: root as u32 }, "gather");
            assert_eq!(got, if me == root { rows } else { Vec::new() }, "{}", what("gather"));
            assert_eq!(mine.bytes(), row(me), "gather changed its input");

            let part = |from: usize, to: usize| data(from, to, ragged(count, from, to));
            let list: Vec<Tensor> = (0..world).map(|to| tensor(&part(me, to))).collect();
            let views = || list.iter().map(Tensor::view).collect();
            let out = tensor(&vec![0; part(root, me).len()]);
            let tensors = (me == root).then(views);
            give(Call::Scatter { tensors, src: root as u32, out: out.view() }, "scatter");
            assert_eq!(out.bytes(), part(root, me), "{}", what("scatter"));
            let parts: Vec<Vec<u8>> = (0..world).map(|from| part(from, me)).collect();
            assert_eq!(give(Call::AllToAll { tensors: views() }, "all_to_all"), parts, "{}", what("all_to_all"));
            give(Call::Barrier, "barrier");
        }
    }
}

fn on_all_layouts(act: impl Fn(&Rank, Tuning, &Cache) + Send + Sync + Copy + 'static) {
    for layout in LAYOUTS {
        let cache = Cache::default();
        for tuning in [TINY, NEVER_SHORT, ALWAYS_SHORT] {
            let cache = Arc::clone(&cache);
            Setup::new(layout, tuning).spawn(move |rank| act(rank, tuning, &cache));
        }
    }
}

#[test]
fn reductions_on_every_layout() {
    on_all_layouts(reductions);
}

#[test]
fn scattered_sums_on_every_layout() {
    on_all_layouts(|rank, tuning, _| scattered_sums(rank, tuning));
}

#[test]
fn copies_on_every_layout() {
    on_all_layouts(|rank, tuning, _| copies(rank, tuning));
}
