//! The stored corpus of the fuzz targets, through the same functions. `cargo test -- --ignored` writes the seeds anew.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};

use offbeat_core::codec::{Float16, KNOWN, Salt, TopK};
use offbeat_core::describe::{CallKind, Description};
use offbeat_core::dtype::{DType, Op};
use offbeat_core::transport::frame::{FrameKind, Header, MAX_PAYLOAD};
use offbeat_core::transport::handshake;
use offbeat_core::transport::rendezvous::Card;
use offbeat_core::{Error, Kind};
use offbeat_tests::decoders;

fn corpus() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus")
}

#[test]
fn every_decoder_survives_its_corpus() {
    for (name, decode) in decoders::ALL {
        let directory = corpus().join(name);
        let files = std::fs::read_dir(&directory).unwrap_or_else(|e| panic!("{}: {e}", directory.display()));
        let mut count = 0;
        for file in files {
            let path = file.unwrap().path();
            let bytes = std::fs::read(&path).unwrap();
            let survived = std::panic::catch_unwind(|| decode(&bytes));
            assert!(survived.is_ok(), "{} broke on {}", name, path.display());
            count += 1;
        }
        assert!(count >= 5, "only {count} files in {}", directory.display());
    }
}

#[test]
fn every_decoder_has_a_fuzz_target() {
    let targets = corpus().join("../fuzz_targets");
    let mut names: Vec<String> = std::fs::read_dir(targets)
        .unwrap()
        .map(|file| file.unwrap().path().file_stem().unwrap().to_string_lossy().into_owned())
        .collect();
    names.sort_unstable();
    let mut known: Vec<&str> = decoders::ALL.iter().map(|(name, _)| *name).collect();
    known.sort_unstable();
    assert_eq!(names, known);
}

type Seeds = Vec<(&'static str, Vec<u8>)>;

/// What every decoder is tried with, made from bytes that it accepts.
fn seeds_of(valid: &[u8]) -> Seeds {
    let mut long = valid.to_vec();
    long.extend([0; 16]);
    let mut last = valid.to_vec();
    last.iter_mut().next_back().into_iter().for_each(|byte| *byte ^= 1);
    vec![
        ("valid", valid.to_vec()),
        ("empty", Vec::new()),
        ("truncated", valid[..valid.len() / 2].to_vec()),
        ("one_short", valid[..valid.len().saturating_sub(1)].to_vec()),
        ("too_long", long),
        ("last_bit", last),
        ("zeros", vec![0; 128]),
        ("ones", vec![0xff; 128]),
        ("stranger", b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n".to_vec()),
    ]
}

fn frames() -> Seeds {
    let call =
        Description::new(CallKind::AllReduce).dtype(DType::F32).op(Op::Mean).codec(Some(&Float16)).shape(&[3, 4]);
    let header = Header { group: 3, sequence: 9, index: 2, note: call.encode(), ..Header::bare(FrameKind::Data) };
    let mut seeds = seeds_of(&header.encode());
    let with_length = |length: u32| {
        let mut bytes = header.encode().to_vec();
        bytes[24..28].copy_from_slice(&length.to_le_bytes());
        bytes
    };
    seeds.push(("longest", with_length(MAX_PAYLOAD as u32)));
    seeds.push(("enormous", with_length(MAX_PAYLOAD as u32 + 1)));
    seeds.push(("all_ones_length", with_length(u32::MAX)));
    let mut reserved = header.encode().to_vec();
    reserved[2] = 1;
    seeds.push(("reserved", reserved));
    for (name, kind) in [("kind_0", 0), ("kind_1", 1), ("kind_10", 10), ("kind_11", 11), ("kind_255", 255)] {
        let mut bytes = header.encode().to_vec();
        bytes[0] = kind;
        seeds.push((name, bytes));
    }
    seeds
}

fn shapes() -> Seeds {
    let shape = |dtype: u8, dimensions: &[u64]| {
        let mut bytes = vec![dtype, dimensions.len() as u8];
        dimensions.iter().for_each(|dimension| bytes.extend(dimension.to_le_bytes()));
        bytes
    };
    let mut seeds = seeds_of(&shape(DType::F32 as u8, &[2, 3]));
    seeds.push(("scalar", shape(DType::Bool as u8, &[])));
    seeds.push(("no_elements", shape(DType::F64 as u8, &[0, u64::MAX])));
    seeds.push(("overflow", shape(DType::F32 as u8, &[1 << 40, 1 << 40])));
    seeds.push(("largest", shape(DType::U8 as u8, &[isize::MAX as u64])));
    seeds.push(("one_too_many", shape(DType::U8 as u8, &[1 << 63])));
    seeds.push(("unknown_type", shape(14, &[1])));
    seeds.push(("many_dimensions", shape(DType::I8 as u8, &[1; 255])));
    seeds
}

fn codecs() -> Seeds {
    let values: Vec<f32> = (0..300).map(|at| (at as f32 * 0.7).sin()).collect();
    let seed = |number: u8, data: &[u8]| [&[number, 44, 1][..], data].concat();
    let mut seeds = Vec::new();
    for codec in KNOWN {
        let mut data = vec![0; codec.encoded_len(values.len())];
        codec.encode(&values, Salt::default(), &mut data);
        if seeds.is_empty() {
            seeds = seeds_of(&seed(codec.code(), &data));
        }
        seeds.push((codec.name(), seed(codec.code(), &data)));
    }
    let top = TopK::new(values.len(), 64.0 / 256.0).unwrap();
    let mut data = vec![0; top.encoded_len()];
    top.encode(&values, &mut data);
    seeds.push(("top_k", seed(64, &data)));
    seeds.push(("top_k_backwards", seed(64, &data.iter().rev().copied().collect::<Vec<u8>>())));
    // scales that are negative, infinite and NaN
    let scales = [-1f32, f32::INFINITY, f32::NAN, f32::MAX, -f32::MIN_POSITIVE, 1e-45];
    let scales: Vec<u8> = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
    let names = ["scales_1", "scales_2", "scales_3", "scales_4", "scales_5", "scales_6"];
    seeds.extend(names.into_iter().zip(1..).map(|(name, number)| (name, seed(number, &scales))));
    seeds
}

fn texts(valid: &[&'static str]) -> Seeds {
    let mut seeds = seeds_of(valid[0].as_bytes());
    for (name, text) in
        ["text_1", "text_2", "text_3", "text_4", "text_5", "text_6", "text_7", "text_8"].iter().zip(valid)
    {
        seeds.push((name, text.as_bytes().to_vec()));
    }
    seeds
}

fn seeds() -> BTreeMap<&'static str, Seeds> {
    let card = Card {
        version: "0.1.0".to_owned(),
        rank: 3,
        pid: 812,
        host: "b".to_owned(),
        machine: 0x1234_5678_9abc_def0,
        addresses: vec![IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)],
        port: 65_535,
        socket: Ok("offbeat-0123456789abcdef".to_owned()),
    };
    let mut cards = seeds_of(&card.to_bytes());
    cards.push((
        "no_addresses",
        Card { addresses: Vec::new(), socket: Err("switched off".to_owned()), ..card.clone() }.to_bytes(),
    ));
    // texts of characters that are 1 to 4 bytes long, whole and cut in the middle of one
    let wide = Card { host: "hö☃𝄞".to_owned(), ..card }.to_bytes();
    let mut cut = wide.clone();
    if let Some(byte) = cut.iter_mut().find(|byte| **byte == 0xf0) {
        *byte = b'x';
    }
    cards.push(("wide_text", wide));
    cards.push(("not_utf8", cut));
    // a string that claims to be longer than memory
    cards.push(("endless_string", vec![0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f, b'x']));
    let mut stories = seeds_of(&Error::of_rank(Kind::PeerLost, 3, "b", "rank 3 (host b, pid 812) is gone").to_bytes());
    stories.push(("no_rank", Error::invalid("no").to_bytes()));
    stories.push(("unknown_kind", vec![11, 0, 0, 0, 0]));
    let description = Description::new(CallKind::Reduce).dtype(DType::BF16).op(Op::Sum).root(7).rows_of(&[4, 2]);
    let token = handshake::Token::new(b"the token of this job");
    let intro = handshake::Intro { from: 3, to: 0, purpose: handshake::Purpose::Attach };
    let mut reserved = vec![0; handshake::REPLY];
    reserved[6] = 1;
    let mut replies = seeds_of(&handshake::reply(&token, &[3; 32], &[2; 32], 7));
    replies.push(("reserved", reserved));
    let mut hellos = seeds_of(&handshake::hello(&[1; 32]));
    let mut version = handshake::hello(&[1; 32]).to_vec();
    version[4] = 2;
    hellos.push(("other_version", version));
    BTreeMap::from([
        ("header", frames()),
        ("hello", hellos),
        ("reply", replies),
        ("intro", seeds_of(&handshake::intro(&token, &[3; 32], &[2; 32], &intro))),
        ("card", cards),
        ("story", stories),
        ("description", seeds_of(&description.encode())),
        ("shape", shapes()),
        ("codec", codecs()),
        ("selector", texts(&["eth0", "=eth0,ib0", "^docker", "10.0.0.0/8", "^=lo,fd00::/8", "1.2.3.4/33", ",", "/"])),
        (
            "environment",
            texts(&[
                "OFFBEAT_SHM=1\nOFFBEAT_STREAMS=4\nOFFBEAT_CHUNK_BYTES=65536\nOFFBEAT_HOST=a",
                "OFFBEAT_SHM=maybe",
                "OFFBEAT_STREAMS=0",
                "OFFBEAT_STREAMS=256",
                "OFFBEAT_CHUNK_BYTES=4194304",
                "OFFBEAT_CHUNK_BYTES=4194305",
                "OFFBEAT_SEGMENT_BYTES=5001",
                "OFFBEAT_SHARED_BYTES=99999999999999999999999",
            ]),
        ),
    ])
}

#[test]
#[ignore = "writes the seeds of tests/fuzz/corpus anew"]
fn write_seeds() {
    for (target, seeds) in seeds() {
        let directory = corpus().join(target);
        std::fs::create_dir_all(&directory).unwrap();
        for (name, bytes) in seeds {
            std::fs::write(directory.join(name), bytes).unwrap();
        }
    }
}
