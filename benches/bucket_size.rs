//! How long a step takes by bucket size: ranks as threads with real engines and a simulated backward.
//!
//! ```text
//! cargo bench --bench bucket_size -- [--ranks 2] [--hosts 1,2] [--megabytes 100] [--backward 60] [--compute work|wait]
//!                                    [--sizes 256K,1M,…] [--steps 5] [--output FILE]
//! ```
//! Every number of hosts is a layout of its own: ranks under one label share memory, others talk TCP over loopback. The
//! best size over all layouts goes into a profile that `offbeat.init(profile=…)` takes. With `--compute work` (the default)
//! backward is so much work for a core that is shared with the communication, as on a CPU; with `wait` it only takes its
//! time, as on a GPU.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a bench that cannot run should stop")]
#![allow(clippy::print_stdout, reason = "this is a program for people")]

use std::fmt::Write as _;
use std::hint::black_box;
use std::io::{IsTerminal, Write as _};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use offbeat_core::algorithm::{Description, Step};
use offbeat_core::bucket::{Bucket, Sizes, Tensor};
use offbeat_core::buffer::Place;
use offbeat_core::config::Config;
use offbeat_core::dtype::{DType, Op};
use offbeat_core::engine::Engine;
use offbeat_core::scheduler::Scheduler;
use offbeat_core::transport::rendezvous::MemoryStore;

/// What `bucket_bytes` is by default; another size must be faster by `MARGIN`.
const DEFAULT: usize = 8 << 20;
const MARGIN: f64 = 0.02;
/// Steps after each change that do not count.
const SKIP: usize = 2;
/// How often all sizes are tried: a machine is not always equally busy.
const PASSES: usize = 3;
const BLOCKS: usize = 5;
const HEIGHT: usize = 8;
const COLUMN: usize = 8;

#[derive(Clone, Debug)]
struct Options {
    ranks: usize,
    hosts: Vec<usize>,
    megabytes: f64,
    backward: Duration,
    works: bool,
    sizes: Vec<usize>,
    steps: usize,
    output: PathBuf,
}

impl Options {
    /// A sweep worth looking at.
    fn full() -> Self {
        let target = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
        Options {
            ranks: 2,
            hosts: vec![1, 2],
            megabytes: 100.0,
            backward: Duration::from_millis(60),
            works: true,
            sizes: (18..=26).map(|bits| 1 << bits).collect(),
            steps: 5,
            output: target.parent().unwrap_or(&target).join("offbeat-profile.json"),
        }
    }

    /// Only to see that it runs, in `cargo test --benches`.
    fn quick() -> Self {
        Options {
            megabytes: 1.0,
            backward: Duration::from_millis(1),
            sizes: vec![64 << 10, 256 << 10],
            steps: 2,
            output: PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("offbeat-profile.json"),
            ..Options::full()
        }
    }

    /// From the command line; `None` if it asks for another bench. Cargo hands all benches the same arguments, so what is
    /// not ours is named and left out.
    fn parse(arguments: impl Iterator<Item = String>) -> Option<Self> {
        let arguments: Vec<String> = arguments.collect();
        let bench = arguments.iter().any(|argument| argument == "--bench");
        let mut options = if bench { Options::full() } else { Options::quick() };
        let mut rest = arguments.iter();
        while let Some(argument) = rest.next() {
            let (name, inline) = match argument.split_once('=') {
                Some((name, value)) => (name, Some(value.to_owned())),
                None => (argument.as_str(), None),
            };
            let mut value = || inline.clone().or_else(|| rest.next().cloned()).unwrap_or_default();
            match name {
                "--bench" | "--test" | "--nocapture" => {}
                "--ranks" => options.ranks = number(name, &value()),
                "--hosts" => options.hosts = value().split(',').map(|hosts| number(name, hosts)).collect(),
                "--megabytes" => options.megabytes = number(name, &value()),
                "--backward" => options.backward = Duration::from_secs_f64(number::<f64>(name, &value()) / 1e3),
                "--compute" => options.works = value() != "wait",
                "--sizes" => options.sizes = value().split(',').map(size).collect(),
                "--steps" => options.steps = number::<usize>(name, &value()).max(1),
                "--output" => options.output = PathBuf::from(value()),
                _ if name.starts_with("--") => eprintln!("bucket_size: {name} is not one of its options"),
                filter if "bucket_size".contains(filter) => {}
                _ => return None,
            }
        }
        let fits = |hosts: &usize| (1..=options.ranks).contains(hosts);
        assert!(options.hosts.iter().all(fits), "--hosts must be from 1 to the number of ranks");
        Some(options)
    }
}

fn number<T: std::str::FromStr>(name: &str, text: &str) -> T {
    text.trim().parse().unwrap_or_else(|_| panic!("{name} {text:?} is not a number"))
}

fn size(text: &str) -> usize {
    let text = text.trim();
    let units = [('K', 10), ('M', 20), ('G', 30)];
    match units.iter().find_map(|(unit, bits)| Some((text.strip_suffix(*unit)?, bits))) {
        Some((count, bits)) => number::<usize>("--sizes", count) << bits,
        None => number("--sizes", text),
    }
}

/// Tensors like those of a transformer, most elements in a few large ones.
fn model(megabytes: f64) -> Vec<Tensor> {
    let parameters = megabytes * 1e6 / 4.0;
    let d = ((parameters / (12 * BLOCKS) as f64).sqrt() as usize).max(1);
    let block = [d, d, 3 * d * d, 3 * d, d * d, d, d, d, 4 * d * d, 4 * d, 4 * d * d, d];
    (0..BLOCKS)
        .flat_map(|_| block)
        .enumerate()
        .map(|(at, count)| Tensor {
            name: format!("tensor {at}"),
            count,
            rows: 1,
            dtype: DType::F32,
            place: Place::Host,
        })
        .collect()
}

/// So much arithmetic that it cannot be left out.
fn work(turns: u64) {
    let mut value = 1.0f64;
    for _ in 0..turns {
        value = black_box(value * 1.000_000_1);
    }
    black_box(value);
}

/// How many turns of `work` a core does in a second when it has nothing else to do.
fn turns_per_second() -> f64 {
    let turns = 2_000_000;
    let once = || {
        let began = Instant::now();
        work(turns);
        began.elapsed().as_secs_f64()
    };
    turns as f64 / (0..10).map(|_| once()).fold(f64::INFINITY, f64::min)
}

/// Backward: tensors become ready at even times, the last ones first.
fn backward(scheduler: &Scheduler, tensors: usize, length: Duration, turns: Option<f64>) {
    let began = Instant::now();
    for (done, tensor) in (0..tensors).rev().enumerate() {
        match turns {
            Some(turns) => work((turns * length.as_secs_f64() / tensors as f64) as u64),
            None => {
                std::thread::sleep((length.mul_f64((done + 1) as f64 / tensors as f64)).saturating_sub(began.elapsed()))
            }
        }
        scheduler.mark_ready(tensor).unwrap();
    }
}

/// The median of a size, or the earlier size that gives the same buckets.
#[derive(Clone, Copy, Debug)]
enum Measured {
    Seconds(f64),
    SameAs(usize),
}

/// One rank's part in the sweep of a layout.
fn sweep(engine: &Engine, options: &Options, turns: Option<f64>, show: impl Fn(usize, usize)) -> Vec<Measured> {
    let steps = vec![Step::AllReduce { op: Op::Mean, codec: None, feedback: false, seed: 0, hierarchical: true }];
    let description = Description::of_gradients(steps);
    let tensors = model(options.megabytes);
    let count = tensors.len();
    let group = engine.lanes(false, None).unwrap();
    let scheduler = engine.scheduler(group, 0, tensors, description, Sizes::new(DEFAULT).unwrap()).unwrap();
    // the first round is observed only
    backward(&scheduler, count, Duration::ZERO, turns);
    scheduler.finish(None).unwrap();
    let order: Vec<usize> = (0..count).rev().collect();
    let mut plans: Vec<Vec<Bucket>> = Vec::new();
    let mut times = vec![Vec::new(); options.sizes.len()];
    for turn in 0..PASSES * options.sizes.len() {
        let at = turn % options.sizes.len();
        show(turn, options.sizes[at]);
        scheduler.rebucket(&order, &vec![false; count], Sizes::new(options.sizes[at]).unwrap(), None).unwrap();
        plans.push(scheduler.buckets().into_iter().map(|(bucket, _)| bucket).collect());
        if plans[..at].contains(&plans[at]) {
            continue;
        }
        let mut last = Instant::now();
        for step in 0..SKIP + options.steps {
            backward(&scheduler, count, options.backward, turns);
            scheduler.finish(None).unwrap();
            let now = Instant::now();
            if step >= SKIP {
                times[at].push((now - last).as_secs_f64());
            }
            last = now;
        }
    }
    let judge = |(at, mut times): (usize, Vec<f64>)| {
        times.sort_by(f64::total_cmp);
        match plans[..at].iter().position(|plan| *plan == plans[at]) {
            Some(first) => Measured::SameAs(options.sizes[first]),
            None => Measured::Seconds(times[times.len() / 2]),
        }
    };
    times.into_iter().enumerate().map(judge).collect()
}

/// Runs a layout and gives, for each size, the time of its slowest rank.
fn run(options: &Options, hosts: usize, turns: Option<f64>) -> Vec<Measured> {
    let store = Arc::new(MemoryStore::default());
    let bar = std::io::stderr().is_terminal();
    let rank = |rank: usize| {
        let mut config = Config::default();
        config.options.host = Some(format!("host-{}", rank * hosts / options.ranks));
        config.options.interface = "lo".to_owned();
        let engine = Engine::connect(config, Some(&*store), rank as u32, options.ranks as u32, None).unwrap();
        let results = sweep(&engine, options, turns, |turn, size| {
            if rank == 0 && bar {
                let (done, left) = ("#".repeat(turn), ".".repeat(PASSES * options.sizes.len() - turn));
                eprint!("\r\x1b[K[{done}{left}] {}: buckets of {}", title(options, hosts), size_text(size));
            } else if rank == 0 && turn < options.sizes.len() {
                eprintln!("{}: buckets of {}", title(options, hosts), size_text(size));
            }
        });
        // nobody leaves while others may still be in their last step
        let call = offbeat_core::call::Call::Barrier;
        engine.world().run(offbeat_core::group::Work { call, keep: None }, None).unwrap();
        results
    };
    let results: Vec<Vec<Measured>> = std::thread::scope(|scope| {
        let rank = &rank;
        let ranks: Vec<_> = (0..options.ranks).map(|at| scope.spawn(move || rank(at))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    if bar {
        eprint!("\r\x1b[K");
    }
    let slowest = |at: usize| {
        results.iter().map(|of_rank| of_rank[at]).reduce(|a, b| match (a, b) {
            (Measured::Seconds(a), Measured::Seconds(b)) => Measured::Seconds(a.max(b)),
            (same, _) => same,
        })
    };
    (0..options.sizes.len()).filter_map(slowest).collect()
}

fn title(options: &Options, hosts: usize) -> String {
    let link = if hosts == 1 { "shared memory" } else { "TCP over loopback" };
    let plural = if hosts == 1 { "" } else { "s" };
    format!("{} ranks on {hosts} host{plural} ({link})", options.ranks)
}

/// The seconds of each size; those that were not tried take the time of the one that they are the same as.
fn filled(sizes: &[usize], results: &[Measured]) -> Vec<f64> {
    let mut seconds: Vec<f64> = Vec::new();
    for result in results {
        seconds.push(match result {
            Measured::Seconds(value) => *value,
            Measured::SameAs(size) => seconds[sizes.iter().position(|known| known == size).unwrap_or(0)],
        });
    }
    seconds
}

/// The size whose worst layout is least worse than that layout's best. The default stays unless another is faster.
fn choose(sizes: &[usize], layouts: &[Vec<f64>]) -> usize {
    let worst = |at: usize| {
        let ratio = |of: &Vec<f64>| of[at] / of.iter().copied().fold(f64::INFINITY, f64::min);
        layouts.iter().map(ratio).fold(0.0, f64::max)
    };
    let best = (0..sizes.len()).min_by(|a, b| worst(*a).total_cmp(&worst(*b))).unwrap_or(0);
    match sizes.iter().position(|size| *size == DEFAULT) {
        Some(default) if worst(best) >= (1.0 - MARGIN) * worst(default) => DEFAULT,
        _ => sizes[best],
    }
}

fn table(sizes: &[usize], results: &[Measured]) -> String {
    let seconds = filled(sizes, results);
    let fastest = seconds.iter().copied().fold(f64::INFINITY, f64::min);
    let mut text = String::from("    bucket      step\n");
    for ((size, result), value) in sizes.iter().zip(results).zip(&seconds) {
        let more = match result {
            Measured::SameAs(other) => format!("same buckets as with {}", size_text(*other)),
            Measured::Seconds(_) if *value == fastest => "fastest".to_owned(),
            Measured::Seconds(_) => format!("+{:.1} %", 100.0 * (value / fastest - 1.0)),
        };
        let _ = writeln!(text, "{:>10} {:>6.2} ms  {more}", size_text(*size), 1e3 * value);
    }
    text
}

fn curve(sizes: &[usize], seconds: &[f64]) -> String {
    let least = seconds.iter().copied().fold(f64::INFINITY, f64::min);
    let most = seconds.iter().copied().fold(0.0, f64::max);
    let scale = if most > least { (HEIGHT - 1) as f64 / (most - least) } else { 0.0 };
    let mut text = String::new();
    for row in 0..HEIGHT {
        let label = match row {
            0 => format!("{:.2} ms", 1e3 * most),
            _ if row == HEIGHT - 1 => format!("{:.2} ms", 1e3 * least),
            _ => String::new(),
        };
        let mark = |value: &f64| if ((most - value) * scale).round() as usize == row { "*" } else { "" };
        let marks: String = seconds.iter().map(|value| format!("{:^COLUMN$}", mark(value))).collect();
        let _ = writeln!(text, "{}", format!("{label:>10} |{marks}").trim_end());
    }
    let names: String = sizes.iter().map(|size| format!("{:^COLUMN$}", size_text(*size).replace("iB", ""))).collect();
    let _ = writeln!(text, "{:>10} +{}\n{:>10}  {}", "", "-".repeat(COLUMN * sizes.len()), "", names.trim_end());
    text
}

fn size_text(size: usize) -> String {
    match size {
        0x10_0000.. => format!("{} MiB", size as f64 / f64::from(1 << 20)),
        1024.. => format!("{} KiB", size as f64 / 1024.0),
        _ => format!("{size} B"),
    }
}

/// The profile; `measured` is the mean over layouts.
fn profile(options: &Options, best: usize, layouts: &[Vec<f64>]) -> String {
    let pairs = |seconds: &dyn Fn(usize) -> f64| {
        let pair = |(at, size): (usize, &usize)| format!("[{size}, {:.9}]", seconds(at));
        format!("[{}]", options.sizes.iter().enumerate().map(pair).collect::<Vec<_>>().join(", "))
    };
    let mean = |at: usize| layouts.iter().map(|of| of[at]).sum::<f64>() / layouts.len() as f64;
    let each = |(hosts, of): (&usize, &Vec<f64>)| format!("\"{}\": {}", title(options, *hosts), pairs(&|at| of[at]));
    let details = options.hosts.iter().zip(layouts).map(each).collect::<Vec<_>>().join(",\n    ");
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let processor = read("/proc/cpuinfo");
    let processor = processor.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or_default();
    let plain = |text: &str| text.trim_matches([' ', '\t', ':', '\n']).replace(['"', '\\'], "");
    format!(
        "{{\n  \"offbeat_profile\": 1,\n  \"bucket_bytes\": {best},\n  \"measured\": {},\n  \"layouts\": {{\n    {details}\n  \
         }},\n  \"made_by\": \"cargo bench --bench bucket_size {}\",\n  \"machine\": {{\"system\": \"{} {}\", \"processor\": \
         \"{}\", \"cores\": {}}}\n}}\n",
        pairs(&mean),
        env!("CARGO_PKG_VERSION"),
        std::env::consts::OS,
        plain(&read("/proc/sys/kernel/osrelease")),
        plain(processor),
        std::thread::available_parallelism().map_or(1, usize::from),
    )
}

fn main() {
    let Some(options) = Options::parse(std::env::args().skip(1)) else { return };
    let turns = options.works.then(turns_per_second);
    let tensors = model(options.megabytes);
    println!(
        "step time by bucket size: {} tensors, {:.1} MB, backward of {:?} ({}), median of {} × {} steps on the slowest rank\n",
        tensors.len(),
        tensors.iter().map(|tensor| tensor.count * 4).sum::<usize>() as f64 / 1e6,
        options.backward,
        if options.works { "work for the core" } else { "waiting" },
        PASSES,
        options.steps,
    );
    let mut layouts = Vec::new();
    for hosts in &options.hosts {
        let results = run(&options, *hosts, turns);
        let seconds = filled(&options.sizes, &results);
        println!("{}\n\n{}", title(&options, *hosts), table(&options.sizes, &results));
        println!("{}", curve(&options.sizes, &seconds));
        layouts.push(seconds);
    }
    let best = choose(&options.sizes, &layouts);
    std::fs::write(&options.output, profile(&options, best, &layouts)).expect("the profile could not be written");
    println!("best for all layouts: buckets of {}", size_text(best));
    println!("profile: {} (for offbeat.init(profile=…) or OFFBEAT_PROFILE)", options.output.display());
    let _ = std::io::stdout().flush();
}
