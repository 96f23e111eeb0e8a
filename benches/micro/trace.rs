//! What recording a span costs: alone, with the clock read for it, and with two threads at once.

use criterion::{Criterion, criterion_group, criterion_main};
use offbeat_core::transport::trace::{CAPACITY, Recorder, Span, What, now};

fn span(what: What, begin: u64) -> Span {
    Span { what, model: 0, step: 1, begin, end: begin + 1, bytes: 1 << 20 }
}

fn record(c: &mut Criterion) {
    let mut group = c.benchmark_group("trace");
    group.bench_function("now", |bench| bench.iter(now));
    let recorder = Recorder::default();
    // a full ring, as it is for most of a job's life
    (0..CAPACITY as u64).for_each(|begin| recorder.record(span(What::Wait, begin)));
    group.bench_function("record", |bench| bench.iter(|| recorder.record(span(What::Wait, 7))));
    group.bench_function("now twice and record", |bench| {
        bench.iter(|| {
            let begin = now();
            recorder.record(Span { end: now(), ..span(What::Wait, begin) });
        });
    });
    group.bench_function("record, two threads", |bench| {
        bench.iter_custom(|times| {
            let began = std::time::Instant::now();
            std::thread::scope(|scope| {
                for bucket in 0..2 {
                    let recorder = &recorder;
                    scope.spawn(move || (0..times).for_each(|t| recorder.record(span(What::Reduce { bucket }, t))));
                }
            });
            began.elapsed()
        });
    });
    group.bench_function("all spans", |bench| bench.iter(|| recorder.spans().len()));
}

criterion_group!(benches, record);
criterion_main!(benches);
