//! Sums of two sources in place, by type, against a copy of as many bytes.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use offbeat_core::dtype::{DType, Op};
use offbeat_core::reduce;

const BYTES: usize = 1 << 20;

fn sums(c: &mut Criterion) {
    let mut group = c.benchmark_group("reduce/two sources of 1 MiB into both");
    group.throughput(Throughput::Bytes(BYTES as u64));
    let (mut a, mut b) = (vec![0u64; BYTES / 8], vec![0u64; BYTES / 8]);
    let (a, b): (*mut u8, *mut u8) = (a.as_mut_ptr().cast(), b.as_mut_ptr().cast());
    for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16, DType::I8] {
        group.bench_function(BenchmarkId::from_parameter(dtype), |bench| {
            // SAFETY: both vectors live until the end of this function and hold `BYTES` bytes.
            bench.iter(|| unsafe {
                reduce::reduce(&[a.cast_const(), b.cast_const()], &[a, b], BYTES / dtype.size(), dtype, Op::Sum, None);
            });
        });
    }
    group.bench_function("copy", |bench| {
        // SAFETY: as above; the two do not overlap.
        bench.iter(|| unsafe { std::ptr::copy_nonoverlapping(a, b, BYTES) });
    });
}

criterion_group!(benches, sums);
criterion_main!(benches);
