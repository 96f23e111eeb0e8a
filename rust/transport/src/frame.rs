//! Frames: what travels on a stream once both sides have proven the token.
//!
//! ```text
//! 0      kind      u8         12     sequence  u64 LE
//! 1      stage     u8         20     index     u32 LE
//! 2..4   zero                 24     length    u32 LE, of the payload, at most MAX_PAYLOAD
//! 4      group     u64 LE     28..   note      NOTE bytes, then the payload
//! ```
//! The note describes the call that a frame belongs to. The transport carries it and compares nothing; the receiver of a
//! frame checks it against its own call before it believes the payload (docs/wire.md).

use crate::error::{Error, Kind, Result};

/// Bytes of a call's description in every frame.
pub const NOTE: usize = 88;
/// Bytes of a frame before its payload.
pub const HEADER: usize = 28 + NOTE;
/// The largest payload of one frame; longer data travels as several frames.
pub const MAX_PAYLOAD: usize = 1 << 22;

/// A call's description, opaque to the transport.
pub type Note = [u8; NOTE];

/// What a frame is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum FrameKind {
    /// A piece of a collective.
    Data = 1,
    /// A whole message from `send`.
    Message = 2,
    /// `send` announces a long message and waits.
    Offer = 3,
    /// `recv` asks for the offered message.
    Accept = 4,
    /// A piece of an accepted message.
    Piece = 5,
    /// The receiver has taken an offered message out of the sender's shared memory.
    Taken = 6,
    /// The sender has linked to everyone.
    Ready = 7,
    /// A group has failed; the payload is the story.
    Poison = 8,
    /// The sending rank is about to die of an exception; the payload is the story.
    Failed = 9,
    /// The sending rank leaves; the payload says why.
    Goodbye = 10,
    /// A piece of a letter between the background threads of a model.
    Letter = 11,
}

impl FrameKind {
    fn from_byte(byte: u8) -> Option<Self> {
        use FrameKind::*;
        [Data, Message, Offer, Accept, Piece, Taken, Ready, Poison, Failed, Goodbye, Letter]
            .into_iter()
            .find(|kind| *kind as u8 == byte)
    }
}

/// Everything of a frame but its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// What the frame is for.
    pub kind: FrameKind,
    /// The stage of a collective; free for its use.
    pub stage: u8,
    /// The group of a collective, or the tag of a message.
    pub group: u64,
    /// The number of the call in its group, or of the message.
    pub sequence: u64,
    /// Which piece of the stage this is.
    pub index: u32,
    /// Bytes of payload that follow.
    pub length: u32,
    /// The call's description.
    pub note: Note,
}

impl Header {
    /// A header with nothing but a kind.
    pub fn bare(kind: FrameKind) -> Self {
        Header { kind, stage: 0, group: 0, sequence: 0, index: 0, length: 0, note: [0; NOTE] }
    }

    /// The header as it travels.
    pub fn encode(&self) -> [u8; HEADER] {
        let mut out = [0; HEADER];
        out[0] = self.kind as u8;
        out[1] = self.stage;
        out[4..12].copy_from_slice(&self.group.to_le_bytes());
        out[12..20].copy_from_slice(&self.sequence.to_le_bytes());
        out[20..24].copy_from_slice(&self.index.to_le_bytes());
        out[24..28].copy_from_slice(&self.length.to_le_bytes());
        out[28..].copy_from_slice(&self.note);
        out
    }

    /// Reads a header; anything that we would not have written is a `BadFrame`.
    pub fn decode(bytes: &[u8; HEADER]) -> Result<Self> {
        let kind = FrameKind::from_byte(bytes[0]).ok_or_else(|| bad(format!("unknown kind {}", bytes[0])))?;
        if bytes[2..4] != [0, 0] {
            return Err(bad("reserved bytes are not zero".to_owned()));
        }
        let length = u32::from_le_bytes(part(&bytes[24..28]));
        if length as usize > MAX_PAYLOAD {
            return Err(bad(format!("length {length} is over the limit of {MAX_PAYLOAD}")));
        }
        Ok(Header {
            kind,
            stage: bytes[1],
            group: u64::from_le_bytes(part(&bytes[4..12])),
            sequence: u64::from_le_bytes(part(&bytes[12..20])),
            index: u32::from_le_bytes(part(&bytes[20..24])),
            length,
            note: part(&bytes[28..]),
        })
    }
}

fn bad(what: String) -> Error {
    Error::new(Kind::BadFrame, what)
}

/// A fixed-size copy of a slice whose length the caller has fixed.
pub(crate) fn part<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(bytes);
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn decode_never_panics_and_accepts_only_what_encode_writes(bytes in any::<[u8; 32]>(), kind in 0u8..13) {
            let mut header = [0u8; HEADER];
            header[..32].copy_from_slice(&bytes);
            header[0] = kind;
            if let Ok(decoded) = Header::decode(&header) {
                prop_assert_eq!(decoded.encode(), header);
            }
        }

        #[test]
        fn round_trip(stage: u8, group: u64, sequence: u64, index: u32, length in 0..=MAX_PAYLOAD as u32) {
            let header = Header { stage, group, sequence, index, length, note: [7; NOTE], ..Header::bare(FrameKind::Data) };
            prop_assert_eq!(Header::decode(&header.encode()), Ok(header));
        }
    }

    #[test]
    fn an_enormous_length_is_refused() {
        let mut bytes = Header::bare(FrameKind::Message).encode();
        bytes[24..28].copy_from_slice(&(MAX_PAYLOAD as u32 + 1).to_le_bytes());
        assert_eq!(Header::decode(&bytes).unwrap_err().kind, Kind::BadFrame);
    }
}
