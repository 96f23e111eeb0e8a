//! all_reduce of f32 with ranks as threads: one host in shared memory, and hosts over loopback at several chunk sizes.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use offbeat_benches::World;
use offbeat_core::config::Tuning;

fn one_host(c: &mut Criterion) {
    let world = World::new(&["a", "a"], Tuning::default());
    let mut group = c.benchmark_group("all_reduce/one host, 2 ranks");
    for bytes in [1 << 10, 64 << 10, 1 << 20, 16 << 20] {
        group.throughput(Throughput::Bytes(bytes as u64));
        group.bench_function(BenchmarkId::from_parameter(bytes), |b| {
            b.iter_custom(|repetitions| world.all_reduce(bytes / 4, repetitions));
        });
    }
}

fn chunk_size(c: &mut Criterion) {
    let mut group = c.benchmark_group("all_reduce/3 hosts over loopback, 4 MiB, by chunk bytes");
    group.sample_size(10);
    for chunk in [32 << 10, 128 << 10, 512 << 10] {
        let world = World::new(&["a", "b", "c"], Tuning { chunk, ..Tuning::default() });
        group.bench_function(BenchmarkId::from_parameter(chunk), |b| {
            b.iter_custom(|repetitions| world.all_reduce(1 << 20, repetitions));
        });
    }
}

criterion_group!(benches, one_host, chunk_size);
criterion_main!(benches);
