//! What goes wrong on the doubles: every error names the rank and what to try, nobody hangs, and nothing is left behind.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]
#![allow(clippy::print_stdout, reason = "a rank tells the test what it found")]
#![cfg(target_os = "linux")]

mod support;

use std::sync::Arc;
use std::time::{Duration, Instant};

use offbeat_core::Result;
use offbeat_core::buffer::{Buffer, Place};
use offbeat_core::codec::by_name;
use offbeat_core::dtype::{DType, Op};
use offbeat_cuda::compressed::{Compressed, Residuals};
use offbeat_cuda::library;
use offbeat_cuda::queue::Kind;

use support::process::{Forgets, Process, place, setting, spread};
use support::{Ranks, Said, doubles, folder_with, twins};

/// All must have ended in good order; the texts of their errors.
fn errors(said: &[Said]) -> Vec<String> {
    let error = |said: &Said| {
        assert!(said.ok && !said.text.contains("panicked"), "{}", said.text);
        let line = said.text.lines().find_map(|line| line.split_once("ERROR ").map(|(_, text)| text.to_owned()));
        line.unwrap_or_default()
    };
    said.iter().map(error).collect()
}

fn assert_says(error: &str, words: &[&str]) {
    for word in words {
        assert!(error.contains(word), "no {word:?} in {error:?}");
    }
}

#[test]
fn memory_that_runs_out_names_rank_bucket_and_what_to_try() {
    // three tables and a tensor are there by then; the first scratch memory of a step is not
    let said = Ranks::of("steps", &[1, 1]).with_on(1, "FAKECUDA_FAIL", "cuMemAllocAsync:5:2").run();
    let errors = errors(&said);
    assert_says(
        &errors[1],
        &["Unsupported", "bucket 3 in step 7", "rank 1", "cuda:0", "out of memory", "try: smaller buckets"],
    );
    assert_says(&errors[0], &["Timeout", "rank 0", "bucket 3 in step 7", "[0, 1]", "try:"]);
    said.iter().for_each(|said| said.assert_no_leak("out of memory"));
}

#[test]
fn what_nccl_refuses_is_told_in_its_words() {
    let said = Ranks::of("steps", &[1, 1]).with_on(0, "FAKENCCL_FAIL", "ncclSend:3:2").run();
    assert_says(
        &errors(&said)[0],
        &["rank 0", "bucket 3 in step 7", "unhandled system error", "NCCL error 2", "try: NCCL_DEBUG"],
    );
    said.iter().for_each(|said| said.assert_no_leak("ncclSend"));
}

#[test]
fn what_nccl_finds_in_the_background_ends_the_work() {
    let said = Ranks::of("steps", &[1, 1]).with_on(1, "FAKENCCL_FAIL", "work:5:6").run();
    assert_says(&errors(&said)[1], &["PeerLost", "rank 1", "NCCL error 6", "asked to fail", "try:"]);
    said.iter().for_each(|said| said.assert_no_leak("work"));
}

#[test]
fn ranks_that_call_different_things_find_out() {
    let said = Ranks::of("differ", &[1, 1]).run();
    let errors = errors(&said);
    assert!(
        errors.iter().any(|error| error.contains("Mismatch") && error.contains("ncclAllReduce of 100")),
        "{errors:?}"
    );
    assert!(errors.iter().all(|error| error.contains("try:")), "{errors:?}");
}

#[test]
fn a_rank_that_does_not_come_is_not_waited_for_for_ever() {
    let said = Ranks::of("absent", &[1, 1]).run();
    assert_says(&errors(&said)[0], &["Timeout", "rank 0", "connecting ranks [0, 1]", "try: look which rank is late"]);
    let said = Ranks::of("silent", &[1, 1]).run();
    assert_says(&errors(&said)[0], &["Timeout", "rank 0", "bucket 3 in step 7", "try: look which rank is late"]);
    said.iter().for_each(|said| said.assert_no_leak("silent"));
}

#[test]
fn memory_of_another_place_is_refused_and_an_illegal_address_is_told() {
    let said = Ranks::of("places", &[1]).run();
    assert_says(&errors(&said)[0], &["CUDA_ERROR_ILLEGAL_ADDRESS", "rank 0", "try: CUDA_LAUNCH_BLOCKING=1"]);
}

/// What the report says, with some libraries, and without a panic.
fn report(libraries: impl Into<std::path::PathBuf>, variables: &[(&str, &str)]) -> String {
    let mut ranks = Ranks::of("report", &[1]).libraries(libraries);
    for (name, value) in variables {
        ranks = ranks.with(name, value);
    }
    let said = ranks.run().remove(0);
    assert!(said.ok && !said.text.contains("panicked"), "{}", said.text);
    let line = said.text.lines().find_map(|line| line.split_once("REPORT ").map(|(_, text)| text.to_owned()));
    line.unwrap_or_else(|| panic!("no report: {}", said.text))
}

#[test]
fn whatever_is_missing_is_one_line_and_no_panic() {
    assert_eq!(report(doubles(), &[]), "driver for CUDA 12.0, 1 device; NCCL 2.20.5 (the system's)");
    assert_eq!(
        report(doubles(), &[("FAKECUDA_DEVICES", "2")]),
        "driver for CUDA 12.0, 2 devices; NCCL 2.20.5 (the system's)"
    );

    let nowhere = std::env::temp_dir().join("offbeat-no-such-folder");
    assert_says(&report(nowhere, &[]), &["no CUDA: libcuda.so.1 is not there; try: install the NVIDIA driver"]);
    let driver_only = folder_with("driver-only", "libcuda.so.1", None);
    assert_says(
        &report(driver_only, &[]),
        &["1 device; no NCCL: libnccl.so.2 is not there; try: a torch built for CUDA"],
    );
    let old = folder_with("functions-missing", "libcuda.so.1", Some("extern \"C\" int cuInit(unsigned) { return 0; }"));
    assert_says(&report(old, &[]), &["no CUDA: libcuda.so.1 has no cu", "try: update the NVIDIA driver"]);

    assert_says(&report(doubles(), &[("FAKECUDA_VERSION", "11080")]), &["knows CUDA 11.8 only; try: update"]);
    assert_says(
        &report(doubles(), &[("FAKECUDA_DEVICES", "0")]),
        &["driver for CUDA 12.0, but no CUDA", "try: nvidia-smi"],
    );
    assert_says(&report(doubles(), &[("FAKENCCL_VERSION", "21403")]), &["NCCL 2.14.3", "too old; try: 2.18 or later"]);
    assert_says(
        &report(doubles(), &[("OFFBEAT_NCCL", "/no/such.so")]),
        &["OFFBEAT_NCCL=/no/such.so does not load", "try:"],
    );
    let empty = folder_with("nccl-empty", "libempty.so", Some("int nothing;")).join("libempty.so");
    assert_says(
        &report(doubles(), &[("OFFBEAT_NCCL", &empty.to_string_lossy())]),
        &["no NCCL: it has no nccl", "try:"],
    );
}

#[test]
#[ignore = "a rank of the other tests"]
fn rank() {
    let case = setting("CASE");
    if case == "report" {
        let whole = library::report(true);
        let brief = library::report(false);
        println!("REPORT {whole}");
        // without devices the same, as far as it goes
        assert!(whole.starts_with(brief.split(';').next().unwrap_or_default()), "{brief}");
        return;
    }
    if case == "absent" && place().0 == 1 {
        return;
    }
    let limit = Duration::from_secs(2);
    let began = Instant::now();
    let result = Process::start(twins::register(), limit).and_then(|process| match case.as_str() {
        "steps" => steps(&process),
        "differ" => {
            let data = vec![0; 4 * (100 + process.rank)];
            process.through(Kind::AllReduce(Op::Sum), &data, DType::F32).map(drop)
        }
        "absent" => Ok(()),
        "silent" => silent(&process),
        "places" => places(&process),
        other => panic!("no case {other:?}"),
    });
    if let Err(error) = result {
        println!("ERROR {error}");
    }
    assert!(began.elapsed() < Duration::from_secs(60), "hangs");
}

/// Steps until one fails.
fn steps(process: &Process) -> Result<()> {
    let codec = by_name("minmax8")?;
    let plan = Arc::new(Compressed::build(process.lane.group(), codec, (5000, DType::F32, Op::Mean), &[], &[])?);
    for step in 0..3 {
        let kind = Kind::Compressed { plan: Arc::clone(&plan), stream: step, kept: Residuals::default(), odd: 0 };
        process.through(kind, &vec![0; 20_000], DType::F32)?;
    }
    Ok(())
}

/// One rank connects and then does nothing until the other has given up.
fn silent(process: &Process) -> Result<()> {
    if process.rank == 1 {
        spread("given up", Vec::new);
        return Ok(());
    }
    let result = process.through(Kind::AllReduce(Op::Sum), &[0; 400], DType::F32);
    // what failed stays so
    let again = process.through(Kind::AllReduce(Op::Sum), &[0; 400], DType::F32);
    assert_eq!(result.as_ref().unwrap_err().kind, again.unwrap_err().kind);
    spread("given up", Vec::new);
    result.map(drop)
}

fn places(process: &Process) -> Result<()> {
    let (piece, buffer) = process.tensor(&[0; 4000], DType::F32)?;
    let refused = |place: Place| {
        let error = process.enqueue(Kind::AllReduce(Op::Sum), Buffer { place, ..buffer }, Forgets::Nothing);
        error.map(drop).unwrap_err().message
    };
    assert_says(&refused(Place::Host), &["a tensor on the CPU", "try: tensor.to(\"cuda:0\")"]);
    drop(piece);
    // an address that is nobody's shows in whatever is called next, as on a device
    let group = process.lane.group();
    let tiles = offbeat_cuda::kernels::Tiles { address: 64, count: 1 };
    let codec = by_name("minmax8")?;
    // SAFETY: not safe at all: the double finds out.
    unsafe { group.kernels.decode(&group.stream, codec, 64, tiles, (64, DType::F32))? };
    group.stream.drain()
}
