//! Codecs on one core, 64 MiB of f32, against a copy of the input.
//!
//! What counts is the ratio to the copy, and on a shared machine a copy takes longer at one time than at another. So each
//! round measures the copy and then the codec, and the table has the shortest time of both with their ratio, and the median
//! of the rounds' ratios. Criterion would measure one after the other.
//!
//! `cargo bench --bench codec -- minmax8` measures one codec only, `-- portable` those without wide instructions, and
//! `-- cached` takes 128 KiB instead, which stay in the cache: what the arithmetic costs.

#![allow(clippy::print_stdout, reason = "a bench prints its results")]

use std::hint::black_box;
use std::time::Instant;

use offbeat_core::codec::{Codec, Int4, KNOWN, LowRank, MinMax8, OneBit, Portable, Qsgd, Salt, TopK};

const ROUNDS: usize = 31;

/// Numbers as gradients are: of both signs, most of them small.
fn values(count: usize) -> Vec<f32> {
    let mut state = 1u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    (0..count).map(|_| (next() + next() + next()) * 1e-3).collect()
}

fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers[numbers.len() / 2]
}

fn seconds(act: impl FnOnce()) -> f64 {
    let start = Instant::now();
    act();
    start.elapsed().as_secs_f64()
}

struct Room {
    values: Vec<f32>,
    copy: Vec<f32>,
    out: Vec<f32>,
    residual: Vec<f32>,
    /// How often in a round.
    times: usize,
}

impl Room {
    fn measure(&mut self, name: &str, what: &str, mut act: impl FnMut(&mut Room)) {
        act(self);
        let (mut copies, mut times) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            let count = self.times;
            copies.push(seconds(|| {
                (0..count).for_each(|_| black_box(&mut self.copy).copy_from_slice(black_box(&self.values)));
            }));
            times.push(seconds(|| (0..count).for_each(|_| act(black_box(self)))));
        }
        let ratio = median(times.iter().zip(&copies).map(|(time, copy)| time / copy).collect());
        let least = |times: Vec<f64>| times.into_iter().fold(f64::MAX, f64::min);
        let (time, copy) = (least(times), least(copies));
        let speed = (self.times * self.values.len() * 4) as f64 / time / 1e9;
        println!(
            "{name:16} {what:16} {:7.2} ms {speed:6.2} GB/s   copy {:6.2} ms   ratio {:5.2}, median {ratio:5.2}",
            time * 1e3,
            copy * 1e3,
            time / copy
        );
    }
}

fn main() {
    let mut asked: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    let cached = asked.iter().any(|asked| asked == "cached");
    asked.retain(|asked| asked != "cached");
    // a codec by its name is the one with wide instructions, unless `portable` is asked for as well
    let with_portable = asked.is_empty() || asked.iter().any(|asked| asked.contains("portable"));
    let is_asked = |name: &str| {
        (with_portable || !name.starts_with("portable"))
            && (asked.is_empty() || asked.iter().any(|asked| name.contains(asked.as_str())))
    };
    let portable: [&dyn Codec; 4] = [&Portable(MinMax8), &Portable(Int4), &Portable(Qsgd), &Portable(OneBit)];
    let named = KNOWN.iter().map(|codec| (codec.name().to_owned(), *codec));
    let portable = portable.iter().map(|codec| (format!("portable {}", codec.name()), *codec));
    let (count, times) = if cached { (32 << 10, 16) } else { (16 << 20, 1) };
    let values = values(count);
    let mut room = Room { copy: values.clone(), out: values.clone(), residual: vec![0.0; count], values, times };
    for (name, codec) in named.chain(portable) {
        if !is_asked(&name) {
            continue;
        }
        let salt = Salt { stream: 1, ..Salt::default() };
        let mut bytes = vec![0u8; codec.encoded_len(count)];
        println!("{name}: {:.4} of the bytes", bytes.len() as f64 / (count * 4) as f64);
        room.measure(&name, "encode", |room| codec.encode(&room.values, salt, black_box(&mut bytes)));
        room.measure(&name, "decode", |room| codec.decode(black_box(&bytes), &mut room.out));
        room.measure(&name, "decode_add", |room| codec.decode_add(black_box(&bytes), &mut room.out));
        room.measure(&name, "encode_residual", |room| {
            codec.encode_residual(&room.values, &mut room.residual, salt, black_box(&mut bytes));
        });
        room.residual.fill(0.0);
        room.out.copy_from_slice(&room.values);
    }
    if is_asked("top_k") {
        top_k(&mut room);
    }
    if is_asked("low_rank") {
        low_rank(&mut room);
    }
}

fn top_k(room: &mut Room) {
    let Ok(top) = TopK::new(room.values.len(), 0.01) else { return };
    let mut bytes = vec![0u8; top.encoded_len()];
    println!("top_k: {:.4} of the bytes", bytes.len() as f64 / (room.values.len() * 4) as f64);
    room.measure("top_k", "encode", |room| top.encode(&room.values, black_box(&mut bytes)));
    room.measure("top_k", "decode", |room| assert!(top.decode(black_box(&bytes), &mut room.out).is_ok()));
    room.measure("top_k", "decode_add", |room| assert!(top.decode_add(black_box(&bytes), &mut room.out).is_ok()));
    room.measure("top_k", "encode_residual", |room| {
        top.encode_residual(&room.values, &mut room.residual, black_box(&mut bytes));
    });
    room.residual.fill(0.0);
}

fn low_rank(room: &mut Room) {
    // no power of two, and about square
    let rows = room.values.len().isqrt() * 49 / 50;
    let cols = room.values.len() / rows;
    let all = rows * cols;
    for rank in [1, 4, 32] {
        let Ok(shape) = LowRank::new(rows, cols, rank) else { return };
        let (mut p, mut q) = (vec![0f32; shape.left_len()], vec![0f32; shape.right_len()]);
        shape.start(1, &mut q);
        let name = format!("low_rank {rank}");
        println!("{name}: {:.4} of the bytes", (p.len() + q.len()) as f64 / all as f64);
        room.measure(&name, "left", |room| {
            shape.left(&room.values[..all], &room.residual[..all], &q, black_box(&mut p));
        });
        room.measure(&name, "orthonormalise", |_| shape.orthonormalise(black_box(&mut p)));
        room.measure(&name, "right", |room| {
            shape.right(&room.values[..all], &room.residual[..all], &p, black_box(&mut q));
        });
        room.measure(&name, "finish", |room| {
            assert!(shape.finish(&mut room.out[..all], &mut room.residual[..all], &p, &q, &q));
        });
        room.residual.fill(0.0);
        room.out.copy_from_slice(&room.values);
    }
}
