//! One function for each reader of bytes from outside. Fuzzers (tests/fuzz) and the stored corpus run the same ones: none
//! may panic, whatever the bytes, and what is accepted must be what we would have written.

use offbeat_core::Error;
use offbeat_core::codec::{self, TopK};
use offbeat_core::collective::blocks::decode_shape;
use offbeat_core::config::Config;
use offbeat_core::describe::Description;
use offbeat_core::transport::address::{Interface, Selector};
use offbeat_core::transport::frame::{HEADER, Header, MAX_PAYLOAD, NOTE};
use offbeat_core::transport::handshake::{self, HELLO, INTRO, Intro, Nonce, Purpose, REPLY, Token};
use offbeat_core::transport::rendezvous::Card;

/// A reader of bytes.
pub type Decoder = fn(&[u8]);

/// All of them, under the names of their fuzz targets and corpus directories.
pub const ALL: [(&str, Decoder); 11] = [
    ("header", header),
    ("hello", hello),
    ("reply", reply),
    ("intro", intro),
    ("card", card),
    ("story", story),
    ("description", description),
    ("shape", shape),
    ("selector", selector),
    ("environment", environment),
    ("codec", codec),
];

const DIALER: Nonce = [1; 32];
const LISTENER: Nonce = [2; 32];

/// The first bytes, or zeros where there are too few.
fn padded<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut out = [0; N];
    let len = bytes.len().min(N);
    out[..len].copy_from_slice(&bytes[..len]);
    out
}

/// A valid message with some bits flipped; whether any were.
fn flipped<const N: usize>(valid: [u8; N], bytes: &[u8]) -> ([u8; N], bool) {
    let flips = padded::<N>(bytes);
    let mut out = valid;
    out.iter_mut().zip(flips).for_each(|(byte, flip)| *byte ^= flip);
    (out, flips != [0; N])
}

fn token() -> Token {
    Token::new(b"the token of this job")
}

/// The head of a frame.
pub fn header(bytes: &[u8]) {
    let bytes = padded::<HEADER>(bytes);
    if let Ok(header) = Header::decode(&bytes) {
        assert!(header.length as usize <= MAX_PAYLOAD);
        assert_eq!(header.encode(), bytes);
    }
}

/// The first message of a dialer.
pub fn hello(bytes: &[u8]) {
    let bytes = padded::<HELLO>(bytes);
    if let Ok(nonce) = handshake::read_hello(&bytes) {
        assert_eq!(nonce, bytes[8..]);
    }
}

/// The answer of a listener: only the untouched one is believed, and no other bytes are.
pub fn reply(bytes: &[u8]) {
    assert!(handshake::read_reply(&token(), &DIALER, &padded::<REPLY>(bytes)).is_err());
    let (mut message, mut changed) = flipped(handshake::reply(&token(), &DIALER, &LISTENER, 7), bytes);
    // two bytes are reserved, and may be anything
    changed &= bytes.iter().enumerate().any(|(at, flip)| *flip != 0 && at < REPLY && !(6..8).contains(&at));
    if !changed {
        message[6..8].fill(0);
    }
    assert_eq!(handshake::read_reply(&token(), &DIALER, &message).is_err(), changed);
}

/// The introduction of a dialer: as for [`reply`].
pub fn intro(bytes: &[u8]) {
    let read = |message: &[u8; INTRO]| handshake::read_intro(&token(), &DIALER, &LISTENER, message);
    assert!(read(&padded::<INTRO>(bytes)).is_err());
    for purpose in [Purpose::Attach, Purpose::Stream { number: 1, of: 4 }] {
        let who = Intro { from: 3, to: 0, purpose };
        let (message, changed) = flipped(handshake::intro(&token(), &DIALER, &LISTENER, &who), bytes);
        assert_eq!(read(&message).is_err(), changed);
    }
}

/// A card in the store.
pub fn card(bytes: &[u8]) {
    if let Ok(card) = Card::from_bytes(bytes) {
        assert!(card.name().contains("rank"));
        assert_eq!(Card::from_bytes(&card.to_bytes()), Ok(card));
    }
}

/// The story of a failure.
pub fn story(bytes: &[u8]) {
    if let Ok(error) = Error::from_bytes(bytes) {
        assert!(!error.to_string().is_empty());
        assert_eq!(Error::from_bytes(&error.to_bytes()), Ok(error));
    }
}

/// The description of a call; every note is one.
pub fn description(bytes: &[u8]) {
    let description = Description::decode(&padded::<NOTE>(bytes));
    assert!(!description.to_string().is_empty());
    assert!(description.get_shape().len() <= 8);
    let _ = description.get_dtype();
    assert_eq!(Description::decode(&description.encode()), description);
}

/// The shape of a block.
pub fn shape(bytes: &[u8]) {
    if let Some((dtype, shape)) = decode_shape(bytes) {
        assert_eq!(bytes.len(), 2 + shape.len() * 8);
        assert_eq!(bytes[0], dtype as u8);
        let count = shape.iter().try_fold(dtype.size() as u64, |product, d| product.checked_mul(*d));
        assert!(count.is_some_and(|count| count <= isize::MAX as u64));
    }
}

/// A choice of interfaces.
pub fn selector(bytes: &[u8]) {
    let of = |name: &str, ip: [u8; 4], prefix| Interface { name: name.to_owned(), ip: ip.into(), prefix };
    match Selector::parse(&String::from_utf8_lossy(bytes)) {
        Ok(selector) => {
            for interface in
                [of("lo", [127, 0, 0, 1], 8), of("eth0", [10, 0, 0, 1], 0), of("ib0", [192, 168, 0, 1], 32)]
            {
                selector.selects(&interface);
            }
        }
        Err(error) => assert!(error.message.contains("try:"), "{error}"),
    }
}

/// The environment: lines of NAME=value.
pub fn environment(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let get = |name: &str| {
        let mut values = text.lines().filter_map(|line| line.split_once('='));
        values.find(|(key, _)| *key == name).map(|(_, value)| value.to_owned())
    };
    match Config::from_environment(get) {
        Ok(config) => {
            assert!((1..=MAX_PAYLOAD).contains(&config.tuning.chunk) && config.tuning.segment > 0);
            assert!(config.options.streams != Some(0));
        }
        Err(error) => assert!(error.message.contains("OFFBEAT_"), "{error}"),
    }
}

/// Encoded data: a codec's number, a count, and bytes, of which as many are read as the count asks for. The length is
/// checked before anything is decoded, the bytes can be anything.
pub fn codec(bytes: &[u8]) {
    let [number, low, high] = padded::<3>(bytes);
    let count = usize::from(u16::from_le_bytes([low, high]) % 5000);
    let data = |length: usize| -> Vec<u8> {
        let rest = bytes.get(3..).filter(|rest| !rest.is_empty()).unwrap_or(&[0xff]);
        rest.iter().copied().cycle().take(length).collect()
    };
    let mut out = vec![1.0; count];
    if let Some(codec) = codec::by_code(number) {
        let data = data(codec.encoded_len(count));
        codec.decode(&data, &mut out);
        codec.decode_add(&data, &mut out);
        assert!(codec.non_finite(&data) <= count.div_ceil(codec.block()));
    } else if let Ok(top) = TopK::new(count, f64::from(number) / 256.0) {
        let data = data(top.encoded_len());
        let before = out.clone();
        if top.decode(&data, &mut out).is_err() {
            assert_eq!(out, before);
        }
        assert!(top.non_finite(&data) <= top.chosen());
    }
}
