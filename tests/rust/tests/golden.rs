//! The golden vectors in tests/golden: the code must give exactly these bytes, with the wide instructions of the processor
//! and without, and so must the description of the arithmetic in docs/codecs.md, written down a second time.
//! `cargo test -p offbeat-tests --test golden -- --ignored` writes them anew.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use offbeat_core::codec::{Codec, Int4, KNOWN, LowRank, MinMax8, OneBit, Portable, Qsgd, Salt, TopK};
use offbeat_tests::arithmetic;
use offbeat_tests::reference::mix;
use proptest::collection::vec;
use proptest::prelude::*;

const STREAM: u64 = 0x0123_4567_89ab_cdef;
const RATIO: f64 = 0.05;
/// Seed and count of a case that only top-k has, over three blocks of its places. Its values are made where they are needed:
/// stored, they would outweigh all others.
const BLOCKS: (u64, usize) = (13, 2 * TopK::BLOCK + 3);
/// Matrices: one with nothing left of earlier rounds, and two beyond the columns and rows that are summed by themselves.
const SHAPES: [(&str, (usize, usize, usize)); 3] =
    [("ordinary", (37, 53, 3)), ("wide", (4, 1100, 2)), ("tall", (140, 30, 3))];

/// Some input: values, and the residual that is added to them.
struct Case {
    name: &'static str,
    seed: u64,
    values: Vec<f32>,
    residual: Vec<f32>,
}

/// A number from −1 to 1.
fn unit(seed: u64, at: usize) -> f32 {
    (mix(seed, at as u64) >> 40) as f32 / 8_388_608.0 - 1.0
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let mut add = |name, count: usize, value: &dyn Fn(usize, f32) -> f32| {
        let seed = cases.len() as u64 + 1;
        let values = (0..count).map(|at| value(at, unit(seed, at))).collect();
        let residual = (0..count).map(|at| unit(seed + 1000, at) * 0.25).collect();
        cases.push(Case { name, seed, values, residual });
    };
    // cubes: most numbers are small, as in gradients
    add("ordinary", 4500, &|_, unit| unit * unit * unit);
    add("empty", 0, &|_, unit| unit);
    add("one", 1, &|_, unit| unit);
    add("odd_length", 131, &|_, unit| unit * 1e-3);
    add("same", 300, &|_, _| -0.3);
    add("zeros", 300, &|at, _| if at % 3 == 0 { -0.0 } else { 0.0 });
    add("positive", 300, &|_, unit| 3.0 + unit);
    add("offset", 600, &|_, unit| 1e6 + unit);
    add("outlier", 600, &|at, unit| if at == 77 { 1e6 } else { unit * 1e-3 });
    add("huge", 600, &|at, unit| if at < 300 { unit * 3.4e38 } else { 3.3e38 + unit * 1e37 });
    add("denormal", 600, &|at, unit| {
        if at < 300 { f32::from_bits((unit.abs() * 5000.0) as u32) } else { unit * 1e-37 }
    });
    add("not_finite", 2600, &|at, unit| match at {
        5 => f32::NAN,
        700 => f32::INFINITY,
        2599 => f32::NEG_INFINITY,
        _ => unit,
    });
    cases
}

fn blocks(codec: &dyn Codec) -> Vec<u64> {
    (0..4500usize.div_ceil(codec.block()).min(64) as u64).map(|block| block * block + 5).collect()
}

/// Values in little-endian, every NaN with the same bits.
fn bytes_of(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| if value.is_nan() { f32::NAN } else { *value }.to_le_bytes()).collect()
}

/// A file, and the sections that it has.
#[derive(Default)]
struct File {
    bytes: Vec<u8>,
    sections: String,
}

impl File {
    fn add(&mut self, case: &str, what: &str, bytes: &[u8]) {
        let comma = if self.sections.is_empty() { "" } else { ",\n" };
        let (offset, length) = (self.bytes.len(), bytes.len());
        write!(
            self.sections,
            r#"{comma}      {{"case": "{case}", "what": "{what}", "offset": {offset}, "bytes": {length}}}"#
        )
        .unwrap();
        self.bytes.extend(bytes);
    }
}

fn of_codec(codec: &dyn Codec, cases: &[Case]) -> File {
    let mut file = File::default();
    let numbers = blocks(codec);
    let salt = Salt { stream: STREAM, blocks: &numbers, first: 0 };
    for Case { name, values, residual, .. } in cases {
        let mut encoded = vec![0; codec.encoded_len(values.len())];
        let (mut decoded, mut left) = (vec![0.0; values.len()], residual.clone());
        codec.encode(values, salt, &mut encoded);
        codec.decode(&encoded, &mut decoded);
        file.add(name, "encoded", &encoded);
        file.add(name, "decoded", &bytes_of(&decoded));
        codec.encode_residual(values, &mut left, salt, &mut encoded);
        file.add(name, "encoded with residual", &encoded);
        file.add(name, "residual after", &bytes_of(&left));
    }
    file
}

fn of_top_k(cases: &[Case]) -> File {
    let mut file = File::default();
    for Case { name, values, residual, .. } in cases {
        let top = TopK::new(values.len(), RATIO).unwrap();
        let (mut encoded, mut left) = (vec![0; top.encoded_len()], residual.clone());
        top.encode(values, &mut encoded);
        file.add(name, "encoded", &encoded);
        top.encode_residual(values, &mut left, &mut encoded);
        file.add(name, "encoded with residual", &encoded);
        file.add(name, "residual after", &bytes_of(&left));
    }
    let (seed, count) = BLOCKS;
    let values: Vec<f32> = (0..count).map(|at| unit(seed, at)).map(|unit| unit * unit * unit).collect();
    let top = TopK::new(count, RATIO).unwrap();
    let mut encoded = vec![0; top.encoded_len()];
    top.encode(&values, &mut encoded);
    file.add("blocks", "encoded", &encoded);
    file
}

fn of_low_rank(cases: &[Case]) -> File {
    let mut file = File::default();
    for (name, (rows, cols, rank)) in SHAPES {
        let (m, shape) = (&cases[0].values[..rows * cols], LowRank::new(rows, cols, rank).unwrap());
        let (mut p, mut q) = (vec![0.0; shape.left_len()], vec![0.0; shape.right_len()]);
        let (mut out, mut left) = (m.to_vec(), vec![0.0; m.len()]);
        if name != "ordinary" {
            left.copy_from_slice(&cases[0].residual[..m.len()]);
        }
        shape.start(STREAM, &mut q);
        let mut add = |what: &str, values: &[f32]| file.add(name, what, &bytes_of(values));
        add("q at the start", &q);
        shape.left(m, &left, &q, &mut p);
        add("p", &p);
        shape.orthonormalise(&mut p);
        add("p orthonormal", &p);
        shape.right(m, &left, &p, &mut q);
        add("q", &q);
        assert!(shape.finish(&mut out, &mut left, &p, &q, &q));
        add("product", &out);
        add("residual after", &left);
    }
    file
}

/// All files, and the index that describes them.
fn files() -> BTreeMap<String, Vec<u8>> {
    let cases = cases();
    let mut files = BTreeMap::new();
    let mut index =
        String::from("{\n  \"numbers\": \"little-endian; f32, u32 starts and u16 places of top_k\",\n  \"files\": {\n");
    let mut input = File::default();
    for Case { name, values, residual, .. } in &cases {
        input.add(name, "values", &bytes_of(values));
        input.add(name, "residual before", &bytes_of(residual));
    }
    let mut add = |name: &str, about: &str, file: File, end: &str| {
        let File { bytes, sections } = file;
        write!(index, "    \"{name}.bin\": {{{about}\"sections\": [\n{sections}\n    ]}}{end}\n").unwrap();
        files.insert(format!("{name}.bin"), bytes);
    };
    let described: Vec<String> =
        cases.iter().map(|case| format!("\"{}\": [{}, {}]", case.name, case.seed, case.values.len())).collect();
    add("inputs", &format!("\"seed and count\": {{{}}},\n      ", described.join(", ")), input, ",");
    for codec in KNOWN {
        let about = format!(
            "\"codec\": \"{}\", \"code\": {}, \"block\": {}, \"stream\": \"{STREAM:016x}\", \"blocks\": {:?},\n      ",
            codec.name(),
            codec.code(),
            codec.block(),
            blocks(codec)
        );
        add(codec.name(), &about, of_codec(codec, &cases), ",");
    }
    let about = format!("\"ratio\": {RATIO}, \"blocks\": [{}, {}], ", BLOCKS.0, BLOCKS.1);
    add("top_k", &about, of_top_k(&cases), ",");
    let shapes: Vec<String> =
        SHAPES.map(|(name, (rows, cols, rank))| format!("\"{name}\": [{rows}, {cols}, {rank}]")).to_vec();
    let about = format!("\"rows, columns and rank\": {{{}}}, \"key\": \"{STREAM:016x}\", ", shapes.join(", "));
    add("low_rank", &about, of_low_rank(&cases), "");
    index.push_str("  }\n}\n");
    files.insert("index.json".to_owned(), index.into_bytes());
    files
}

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../golden")
}

#[test]
fn the_code_gives_the_golden_vectors() {
    let mut size = 0;
    for (name, bytes) in files() {
        let stored = std::fs::read(golden().join(&name)).unwrap_or_else(|e| panic!("{name}: {e}"));
        let same = stored.iter().zip(&bytes).take_while(|(a, b)| a == b).count();
        assert!(
            stored == bytes,
            "{name} differs from byte {same} on; lengths are {} and {}",
            stored.len(),
            bytes.len()
        );
        size += stored.len();
    }
    assert!(size < 1 << 20, "{size} bytes");
    let count = std::fs::read_dir(golden()).unwrap().count();
    assert_eq!(count, files().len(), "a file that nobody wrote, or none");
}

#[test]
fn portable_code_gives_the_same() {
    let cases = cases();
    let pairs: [(&dyn Codec, &dyn Codec); 4] = [
        (&MinMax8, &Portable(MinMax8)),
        (&Int4, &Portable(Int4)),
        (&Qsgd, &Portable(Qsgd)),
        (&OneBit, &Portable(OneBit)),
    ];
    for (wide, portable) in pairs {
        assert!(of_codec(wide, &cases).bytes == of_codec(portable, &cases).bytes, "{}", wide.name());
    }
}

#[test]
fn the_documented_arithmetic_gives_the_same() {
    for codec in KNOWN {
        let numbers = blocks(codec);
        for Case { name, values, residual, .. } in cases() {
            let wanted: Vec<f32> = values.iter().zip(&residual).map(|(value, residual)| value + residual).collect();
            for values in [values, wanted] {
                let what = format!("{} of {name}", codec.name());
                let (mut bytes, mut back) = (vec![0; codec.encoded_len(values.len())], vec![0.0; values.len()]);
                codec.encode(&values, Salt { stream: STREAM, blocks: &numbers, first: 0 }, &mut bytes);
                codec.decode(&bytes, &mut back);
                assert!(bytes == arithmetic::encode(codec.name(), &values, STREAM, &numbers), "encoding {what}");
                let expected = arithmetic::decode(codec.name(), &bytes, values.len());
                assert!(bytes_of(&back) == bytes_of(&expected), "decoding {what}");
            }
        }
    }
}

proptest! {
    #[test]
    fn and_does_so_for_any_values(
        values in prop_oneof![
            vec(any::<u32>().prop_map(f32::from_bits), 0..5000),
            vec(any::<u32>().prop_map(|bits| f32::from_bits(bits & 0xbfff_ffff)), 0..5000),
            vec(-1f32..1.0, 0..5000),
            vec(0.5f32..0.50001, 0..600),
            vec(-3.4e38f32..3.4e38, 0..600),
        ],
        stream in any::<u64>(), number in any::<u64>(),
    ) {
        for codec in KNOWN.into_iter().filter(|codec| codec.block() > 1) {
            let (mut bytes, mut back) = (vec![0; codec.encoded_len(values.len())], vec![0.0; values.len()]);
            codec.encode(&values, Salt { stream, blocks: &[number], first: 0 }, &mut bytes);
            codec.decode(&bytes, &mut back);
            prop_assert!(bytes == arithmetic::encode(codec.name(), &values, stream, &[number]), "{}", codec.name());
            prop_assert!(bytes_of(&back) == bytes_of(&arithmetic::decode(codec.name(), &bytes, values.len())));
        }
    }
}

#[test]
#[ignore = "writes tests/golden anew"]
fn write_golden() {
    std::fs::create_dir_all(golden()).unwrap();
    for (name, bytes) in files() {
        std::fs::write(golden().join(name), bytes).unwrap();
    }
}
