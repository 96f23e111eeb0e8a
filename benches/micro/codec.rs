//! Codecs on one core: encode, decode and decode-and-add, by bytes of input, against a copy.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use offbeat_core::codec::{BFloat16, Codec, Float16};

const COUNT: usize = 1 << 20;

fn codecs(c: &mut Criterion) {
    let mut group = c.benchmark_group("codec/4 MiB of f32");
    group.throughput(Throughput::Bytes(4 * COUNT as u64));
    let values: Vec<f32> = (0..COUNT).map(|i| (i as f32 * 0.001).sin()).collect();
    let mut out = vec![0f32; COUNT];
    for codec in [&Float16 as &dyn Codec, &BFloat16] {
        let mut bytes = vec![0u8; codec.encoded_len(COUNT)];
        group
            .bench_function(BenchmarkId::new(codec.name(), "encode"), |b| b.iter(|| codec.encode(&values, &mut bytes)));
        group.bench_function(BenchmarkId::new(codec.name(), "decode"), |b| b.iter(|| codec.decode(&bytes, &mut out)));
        group.bench_function(BenchmarkId::new(codec.name(), "decode_add"), |b| {
            b.iter(|| codec.decode_add(&bytes, &mut out));
        });
    }
    group.bench_function("copy", |b| b.iter(|| out.copy_from_slice(&values)));
}

criterion_group!(benches, codecs);
criterion_main!(benches);
