//! Both sides of a connection prove the job token before any length from the wire is believed.
//!
//! ```text
//! dialer    HELLO  magic, version, nonce D                        every message has a fixed size
//! listener  REPLY  magic, version, nonce L, rank, proof of (D, L, rank)
//! dialer    INTRO  rank, rank dialed, purpose, proof of (D, L, all before)
//! listener  one byte: welcome
//! dialer    one byte: kept; of several addresses that answered, only one connection is
//! ```
//! A proof is HMAC-SHA-256 under the token; the two sides' proofs differ in a label, so none can be reflected. The rank in
//! REPLY tells a dialer that it reached the rank it meant and not another host with the same private address.

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use crate::error::{Error, Kind, Result};
use crate::frame::part;

/// Spoken by both sides; ranks with another number refuse each other.
pub const VERSION: u16 = 1;
const MAGIC: [u8; 4] = *b"OFBT";
/// Bytes of each message.
pub const HELLO: usize = 40;
/// Bytes of the listener's answer.
pub const REPLY: usize = 76;
/// Bytes of the dialer's introduction.
pub const INTRO: usize = 44;
/// The listener's last byte.
pub const WELCOME: u8 = 0x57;
/// The dialer's last byte.
pub const KEPT: u8 = 0x4b;

/// The secret of a job.
#[derive(Clone)]
pub struct Token(Vec<u8>);

/// A number used once.
pub type Nonce = [u8; 32];

impl Token {
    /// A token from a secret of any length.
    pub fn new(secret: &[u8]) -> Self {
        Token(secret.to_vec())
    }

    /// A fresh random token.
    pub fn random() -> Result<Self> {
        Ok(Token(nonce()?.to_vec()))
    }

    /// The secret itself, to be spread through the store.
    pub fn secret(&self) -> &[u8] {
        &self.0
    }

    fn mac(&self, label: &[u8], parts: &[&[u8]]) -> Hmac<Sha256> {
        let mut mac = match Hmac::<Sha256>::new_from_slice(&self.0) {
            Ok(mac) => mac,
            Err(_) => unreachable!("HMAC takes keys of every length"),
        };
        mac.update(label);
        parts.iter().for_each(|part| mac.update(part));
        mac
    }
}

/// A fresh nonce from the operating system.
pub fn nonce() -> Result<Nonce> {
    let mut nonce = Nonce::default();
    getrandom::fill(&mut nonce).map_err(|e| Error::io("no random numbers from the operating system", e))?;
    Ok(nonce)
}

/// Who dials whom, and what for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Intro {
    /// The dialing rank.
    pub from: u32,
    /// The rank that it means to reach.
    pub to: u32,
    /// What the connection is for.
    pub purpose: Purpose,
}

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Shared memory: descriptors are passed, then control frames.
    Attach,
    /// One of `of` parallel streams; number 0 carries the control frames too.
    Stream {
        /// Its number.
        number: u8,
        /// How many there are.
        of: u8,
    },
}

/// The dialer's first message.
pub fn hello(dialer: &Nonce) -> [u8; HELLO] {
    let mut out = [0; HELLO];
    out[..4].copy_from_slice(&MAGIC);
    out[4..6].copy_from_slice(&VERSION.to_le_bytes());
    out[8..].copy_from_slice(dialer);
    out
}

/// The listener reads HELLO: the dialer's nonce.
pub fn read_hello(bytes: &[u8; HELLO]) -> Result<Nonce> {
    check_version(bytes)?;
    Ok(part(&bytes[8..]))
}

/// The listener's answer.
pub fn reply(token: &Token, dialer: &Nonce, listener: &Nonce, rank: u32) -> [u8; REPLY] {
    let mut out = [0; REPLY];
    out[..4].copy_from_slice(&MAGIC);
    out[4..6].copy_from_slice(&VERSION.to_le_bytes());
    out[8..40].copy_from_slice(listener);
    out[40..44].copy_from_slice(&rank.to_le_bytes());
    let proof = token.mac(b"offbeat listener", &[dialer, listener, &rank.to_le_bytes()]).finalize();
    out[44..].copy_from_slice(&proof.into_bytes());
    out
}

/// The dialer reads REPLY: the listener's nonce and its rank, proven.
pub fn read_reply(token: &Token, dialer: &Nonce, bytes: &[u8; REPLY]) -> Result<(Nonce, u32)> {
    check_version(bytes)?;
    let listener: Nonce = part(&bytes[8..40]);
    let rank = u32::from_le_bytes(part(&bytes[40..44]));
    let mac = token.mac(b"offbeat listener", &[dialer, &listener, &rank.to_le_bytes()]);
    mac.verify_slice(&bytes[44..]).map_err(|_| wrong_token())?;
    Ok((listener, rank))
}

/// The dialer's introduction.
pub fn intro(token: &Token, dialer: &Nonce, listener: &Nonce, intro: &Intro) -> [u8; INTRO] {
    let mut out = [0; INTRO];
    out[..4].copy_from_slice(&intro.from.to_le_bytes());
    out[4..8].copy_from_slice(&intro.to.to_le_bytes());
    (out[8], out[9], out[10]) = match intro.purpose {
        Purpose::Attach => (1, 0, 0),
        Purpose::Stream { number, of } => (2, number, of),
    };
    let proof = token.mac(b"offbeat dialer", &[dialer, listener, &out[..12]]).finalize();
    out[12..].copy_from_slice(&proof.into_bytes());
    out
}

/// The listener reads INTRO, proven.
pub fn read_intro(token: &Token, dialer: &Nonce, listener: &Nonce, bytes: &[u8; INTRO]) -> Result<Intro> {
    let mac = token.mac(b"offbeat dialer", &[dialer, listener, &bytes[..12]]);
    mac.verify_slice(&bytes[12..]).map_err(|_| wrong_token())?;
    let purpose = match bytes[8..12] {
        [1, 0, 0, 0] => Purpose::Attach,
        [2, number, of, 0] if number < of => Purpose::Stream { number, of },
        _ => return Err(Error::new(Kind::BadFrame, "an introduction with an unknown purpose")),
    };
    let word = |at: usize| u32::from_le_bytes(part(&bytes[at..at + 4]));
    Ok(Intro { from: word(0), to: word(4), purpose })
}

fn check_version(bytes: &[u8]) -> Result<()> {
    if bytes[..4] != MAGIC {
        return Err(Error::new(Kind::Unauthorized, "it does not speak our protocol"));
    }
    let version = u16::from_le_bytes([bytes[4], bytes[5]]);
    if version != VERSION {
        return Err(Error::new(Kind::Unauthorized, format!("it speaks protocol {version}, we speak {VERSION}")));
    }
    Ok(())
}

fn wrong_token() -> Error {
    Error::new(Kind::Unauthorized, "it did not prove the job token")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const INTRO_OF_3: Intro = Intro { from: 3, to: 0, purpose: Purpose::Stream { number: 1, of: 4 } };

    #[test]
    fn both_sides_prove_the_token() {
        let token = Token::random().unwrap();
        let (d, l) = (nonce().unwrap(), nonce().unwrap());
        assert_eq!(read_hello(&hello(&d)).unwrap(), d);
        assert_eq!(read_reply(&token, &d, &reply(&token, &d, &l, 7)).unwrap(), (l, 7));
        assert_eq!(read_intro(&token, &d, &l, &intro(&token, &d, &l, &INTRO_OF_3)).unwrap(), INTRO_OF_3);
    }

    #[test]
    fn another_token_nonce_or_rank_is_refused() {
        let (token, other) = (Token::new(b"a"), Token::new(b"b"));
        let (d, l) = (nonce().unwrap(), nonce().unwrap());
        let refused = |r: Result<()>| assert_eq!(r.unwrap_err().kind, Kind::Unauthorized);
        refused(read_reply(&token, &d, &reply(&other, &d, &l, 7)).map(|_| ()));
        refused(read_reply(&token, &l, &reply(&token, &d, &l, 7)).map(|_| ()));
        refused(read_intro(&token, &d, &l, &intro(&other, &d, &l, &INTRO_OF_3)).map(|_| ()));
        let mut changed = intro(&token, &d, &l, &INTRO_OF_3);
        changed[0] ^= 1;
        refused(read_intro(&token, &d, &l, &changed).map(|_| ()));
    }

    proptest! {
        #[test]
        fn garbage_never_panics_and_never_passes(bytes in proptest::collection::vec(any::<u8>(), REPLY)) {
            let token = Token::new(b"secret");
            let n = [1; 32];
            let _ = read_hello(&part(&bytes[..HELLO]));
            prop_assert!(read_reply(&token, &n, &part(&bytes)).is_err());
            prop_assert!(read_intro(&token, &n, &n, &part(&bytes[..INTRO])).is_err());
        }
    }
}
