//! Collectives in processes on the doubles: the bits of the CPU, on all schedules of streams, with few launches, and nothing
//! left behind.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]
#![cfg(target_os = "linux")]

mod support;

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use offbeat_core::codec::{KNOWN, by_name};
use offbeat_core::coding::mix;
use offbeat_core::dtype::{DType, Op};
use offbeat_core::graph::{Graph, Peers};
use offbeat_cuda::compressed::{Compressed, Residuals};
use offbeat_cuda::gossip::Gossip;
use offbeat_cuda::kernels::IMAGES;
use offbeat_cuda::queue::Kind;

use support::Ranks;
use support::process::{Elsewhere, Forgets, Process, count, setting};
use support::reference::{self, Coding, Kept};
use support::twins;

const LIMIT: Duration = Duration::from_secs(30);
const TYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// The tensors of a bucket: each begins at a block of every codec, and ends anywhere.
const SPANS: [Range<usize>; 4] = [0..1500, 2048..2049, 4096..9001, 10_240..10_240 + 2048];
const COUNT: usize = 12_288;

#[test]
fn all_collectives_give_the_bits_of_the_cpu_whatever_the_hosts() {
    for hosts in [&[1][..], &[1, 1], &[1, 1, 1], &[2, 2], &[3, 1]] {
        Ranks::of("all", hosts).succeed();
    }
}

#[test]
fn every_schedule_of_streams_gives_the_same_bits() {
    for schedule in 0..4 {
        Ranks::of("some", &[1, 1]).with("FAKECUDA_SCHED", schedule).succeed();
        Ranks::of("some", &[2, 1]).with("FAKECUDA_SCHED", schedule).succeed();
    }
}

/// Streams of our own do not wait by chance: without the wait before or after the work some schedule shows it.
#[test]
fn a_forgotten_wait_is_found_by_a_schedule() {
    for (forgets, schedule) in [("before", 1), ("after", 2)] {
        let said = Ranks::of("forgets", &[1, 1]).with("FORGETS", forgets).with("FAKECUDA_SCHED", schedule).run();
        assert!(said.iter().any(|said| !said.ok && said.text.contains("other bits")), "{forgets} goes unseen");
    }
}

#[test]
fn means_weighted_by_factors_have_the_bits_of_the_cpu() {
    // on a ring of hosts of different sizes ranks do not count the same
    Ranks::of("gossip", &[2, 1, 1, 1]).succeed();
}

#[test]
fn a_step_is_few_launches_and_waits_for_nothing_on_the_host() {
    Ranks::of("counts", &[1, 1, 1]).with("KERNELS", 3).with("GROUPS", 2).succeed();
    Ranks::of("counts", &[2, 2]).with("KERNELS", 4).with("GROUPS", 4).succeed();
}

#[test]
fn memory_of_the_host_can_stand_in_for_that_of_the_device() {
    Ranks::of("all", &[1, 1]).with("FAKECUDA_IDENTITY", 1).succeed();
}

#[test]
fn memory_needs_no_pools_and_the_current_device_stays_as_it_was() {
    Ranks::of("some", &[1, 1]).with("FAKECUDA_POOLS", 0).with("FAKECUDA_DEVICES", 2).succeed();
}

#[test]
fn the_embedded_kernels_are_those_that_are_called() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../kernels/ptx");
    assert_eq!(IMAGES.is_empty(), !folder.is_dir());
    let declared = |twin: &twins::Twin| IMAGES.iter().any(|(file, ptx)| *file == twin.file && twin.is_declared_in(ptx));
    let missing: Vec<String> =
        twins::twins().into_iter().filter(|twin| !declared(twin)).map(|twin| twin.name).collect();
    assert!(IMAGES.is_empty() || missing.is_empty(), "no PTX, or with other arguments: {missing:?}");
}

#[test]
#[ignore = "a rank of the other tests"]
fn rank() {
    let images = twins::register();
    let last = setting("FAKECUDA_DEVICES").parse::<i32>().unwrap_or(1) - 1;
    let elsewhere = Elsewhere::enter(last);
    let process = Process::start(images, LIMIT).unwrap();
    match setting("CASE").as_str() {
        "all" => {
            for codec in KNOWN {
                for dtype in TYPES {
                    compressed(&process, codec.name(), dtype, &SPANS, COUNT);
                }
            }
            for count in [0, 1, 700, 2500] {
                compressed(&process, "minmax8", DType::F32, &[], count);
            }
            plain(&process);
            gossip(&process, Peers::All);
            gossip(&process, Peers::Ring);
        }
        "some" => {
            compressed(&process, "qsgd", DType::F32, &SPANS, COUNT);
            compressed(&process, "onebit", DType::BF16, &SPANS, COUNT);
            plain(&process);
            gossip(&process, Peers::Ring);
        }
        "gossip" => gossip(&process, Peers::Ring),
        "counts" => counts(&process),
        "forgets" => forgets(&process),
        other => panic!("no case {other:?}"),
    }
    drop(process);
    elsewhere.leave(last);
}

fn everyone(process: &Process, count: usize, dtype: DType, seed: u64) -> Vec<Vec<u8>> {
    let world = process.layout.hosts.iter().map(Vec::len).sum();
    (0..world).map(|rank| reference::values(rank, count, dtype, seed)).collect()
}

/// The elements of tensors, without what lies between.
fn inside(bytes: &[u8], spans: &[Range<usize>], size: usize) -> Vec<u8> {
    spans.iter().flat_map(|span| bytes[span.start * size..span.end * size].to_vec()).collect()
}

/// Two steps with error feedback, of which the second sends what the first has lost.
fn compressed(process: &Process, codec: &str, dtype: DType, spans: &[Range<usize>], count: usize) {
    let codec = by_name(codec).unwrap();
    let whole = [Range { start: 0, end: count }];
    let (given, spans) = (spans, if spans.is_empty() { whole.as_slice() } else { spans });
    let block = |at: usize| mix(9, at as u64);
    let numbers: Vec<u64> =
        if given.is_empty() { Vec::new() } else { (0..count.div_ceil(codec.block())).map(block).collect() };
    let group = process.lane.group();
    let plan = Arc::new(Compressed::build(group, codec, (count, dtype, Op::Mean), given, &numbers).unwrap());
    let zeros = vec![0; count * 4];
    let (shares, kept_shares) = process.tensor(&zeros, DType::F32).unwrap();
    let (results, kept_results) = process.tensor(&zeros, DType::F32).unwrap();
    let (counter, odd) = process.tensor(&[0; 4], DType::U32).unwrap();
    let kept = Residuals { shares: shares.address(), results: results.address() };
    let mut expected = Kept::none(process.layout.hosts.len(), count);
    let hosts = process.layout.hosts.len();
    for step in 0..2 {
        let mut data = everyone(process, count, dtype, step);
        if step == 1 && count > 2000 {
            // a block that is not finite, on one rank
            let infinite =
                if dtype == DType::F32 { f32::INFINITY.to_le_bytes()[..].to_vec() } else { vec![0x80, 0x7f] };
            let first = &mut data[0];
            first[5 * dtype.size()..5 * dtype.size() + infinite.len()].copy_from_slice(&infinite);
        }
        let kind = Kind::Compressed { plan: Arc::clone(&plan), stream: 77 + step, kept, odd: counter.address() };
        let found = process.through(kind, &data[process.rank], dtype).unwrap();
        if hosts == 1 {
            // nothing is encoded, and the sum is NCCL's
            continue;
        }
        let coding = Coding { codec, spans, numbers: &numbers, stream: 77 + step };
        let wanted = coding.mean(&process.layout, &data, dtype, Some(&mut expected));
        let size = dtype.size();
        assert!(
            inside(&found, spans, size) == inside(&wanted, spans, size),
            "other bits: {codec:?} of {count} {dtype} on {:?}, step {step}",
            process.layout.hosts
        );
    }
    // what is kept of results lies with who summed them, and no value of it is another than on the CPU
    let kept = process.read(kept_results).unwrap();
    let pairs = kept.chunks_exact(4).zip(&expected.results);
    for (found, wanted) in pairs {
        let found = f32::from_le_bytes(found.try_into().unwrap());
        assert!(found == 0.0 || found.to_bits() == wanted.to_bits(), "{found} for {wanted}: {codec:?} {dtype}");
    }
    let marked = u32::from_le_bytes(process.read(odd).unwrap().try_into().unwrap());
    assert!(
        hosts == 1 || count <= 2000 || process.rank > 0 || marked > 0,
        "{codec:?} {dtype}: a block that is not finite"
    );
    drop((kept_shares, shares, results, counter));
}

/// Sums of whole numbers are exact in any order.
fn plain(process: &Process) {
    let world: usize = process.layout.hosts.iter().map(Vec::len).sum();
    for (dtype, op) in [(DType::F32, Op::Sum), (DType::F32, Op::Mean), (DType::I64, Op::Max), (DType::F32, Op::Sum)] {
        let number = |rank: usize, at: usize| ((at % 50) * world * (rank + 1)) as f32;
        let bytes = |of: &dyn Fn(usize) -> f32| -> Vec<u8> {
            match dtype {
                DType::I64 => (0..1001).flat_map(|at| (of(at) as i64).to_le_bytes()).collect(),
                _ => (0..1001).flat_map(|at| of(at).to_le_bytes()).collect(),
            }
        };
        let sum = |at: usize| (0..world).map(|rank| number(rank, at)).sum::<f32>();
        let wanted = match op {
            Op::Max => bytes(&|at| number(world - 1, at)),
            Op::Mean => bytes(&|at| sum(at) / world as f32),
            _ => bytes(&sum),
        };
        let mine = bytes(&|at| number(process.rank, at));
        assert!(process.through(Kind::AllReduce(op), &mine, dtype).unwrap() == wanted, "other bits: {op} of {dtype}");
    }
    let root = world - 1;
    let found = process.through(Kind::Broadcast { root }, &[process.rank as u8; 333], DType::U8).unwrap();
    assert_eq!(found, [root as u8; 333]);
}

fn gossip(process: &Process, peers: Peers) {
    let graph = Graph::new(peers, process.layout.hosts.len(), 5).unwrap();
    let (host, _) = process.layout.seat(process.rank);
    for dtype in TYPES {
        let plan = Arc::new(Gossip::build(process.lane.group(), graph, 3001, dtype).unwrap());
        for step in 0..2 {
            let data = everyone(process, 3001, dtype, step);
            let kind = Kind::Gossip { plan: Arc::clone(&plan), step };
            let found = process.through(kind, &data[process.rank], dtype).unwrap();
            let wanted = reference::gossip(&process.layout, &data, dtype, graph, host, step);
            assert!(found == wanted, "other bits: gossip of {dtype} on {:?}, {peers:?}", process.layout.hosts);
        }
    }
}

/// ByteGrad on a bucket of four tensors: what one step costs when the one before it has made all that is kept.
fn counts(process: &Process) {
    let codec = by_name("minmax8").unwrap();
    let plan = Compressed::build(process.lane.group(), codec, (COUNT, DType::F32, Op::Mean), &SPANS, &[]).unwrap();
    let plan = Arc::new(plan);
    let data = reference::values(process.rank, COUNT, DType::F32, 1);
    let (piece, buffer) = process.tensor(&data, DType::F32).unwrap();
    let step = || {
        let kind = Kind::Compressed { plan: Arc::clone(&plan), stream: 1, kept: Residuals::default(), odd: 0 };
        process.enqueue(kind, buffer, Forgets::Nothing).unwrap()
    };
    drop(step());
    let look = || {
        let of = |what: &str| count("libcuda.so.1", "fakecuda_count", what);
        let groups = count("libnccl.so.2", "fakenccl_count", "groups");
        [of("kernels"), groups, of("host synchronizations"), of("cuMemAllocAsync"), of("cuEventCreate")]
    };
    let before = look();
    drop(step());
    let after = look();
    let spent: Vec<i64> = before.iter().zip(after).map(|(before, after)| after - before).collect();
    let [kernels, groups] = ["KERNELS", "GROUPS"].map(|name| setting(name).parse::<i64>().unwrap());
    // two marks: before the work, and after it
    assert_eq!(spent, [kernels, groups, 0, 0, 2]);
    process.read(buffer).unwrap();
    drop(piece);
}

fn forgets(process: &Process) {
    let forgets = if setting("FORGETS") == "before" { Forgets::Before } else { Forgets::After };
    let (piece, buffer) = process.tensor(&1f32.to_le_bytes().repeat(100), DType::F32).unwrap();
    let done = process.enqueue(Kind::AllReduce(Op::Sum), buffer, forgets).unwrap();
    let found = process.read(buffer).unwrap();
    drop((done, piece));
    assert!(found == 2f32.to_le_bytes().repeat(100), "other bits");
}
