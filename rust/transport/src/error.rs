//! What can go wrong, in one type that every rank can raise, print and send.
//!
//! An error is a story: it names the rank and host at fault and ends with what to try. A rank that fails sends its
//! story to the others of the group, so that all of them raise the same one.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The class of an error; each is a Python exception of the same name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    /// A rank died, was cut off, or left while others needed it.
    PeerLost,
    /// A rank raised an exception and told the others.
    PeerFailed,
    /// A deadline passed; the peer may be alive but slow.
    Timeout,
    /// Ranks called different things.
    Mismatch,
    /// A proven peer sent something that is not our protocol.
    BadFrame,
    /// A peer could not prove the job token.
    Unauthorized,
    /// A value was NaN or infinite where that must not be.
    NonFinite,
    /// The runtime is not there: before `init`, after `shutdown`, or in a forked child.
    NotInitialized,
    /// A valid request that this build or machine cannot serve.
    Unsupported,
    /// A request that makes no sense.
    InvalidArgument,
    /// A signal handler raised in the caller's thread while it waited.
    Interrupted,
}

impl Kind {
    /// The name of the Python exception.
    pub fn name(self) -> &'static str {
        match self {
            Kind::PeerLost => "PeerLost",
            Kind::PeerFailed => "PeerFailed",
            Kind::Timeout => "Timeout",
            Kind::Mismatch => "Mismatch",
            Kind::BadFrame => "BadFrame",
            Kind::Unauthorized => "Unauthorized",
            Kind::NonFinite => "NonFinite",
            Kind::NotInitialized => "NotInitialized",
            Kind::Unsupported => "Unsupported",
            Kind::InvalidArgument => "InvalidArgument",
            Kind::Interrupted => "Interrupted",
        }
    }
}

/// A failure that names who, where and what to try.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Error {
    /// The class of the error.
    pub kind: Kind,
    /// The rank at fault, where one is.
    pub rank: Option<u32>,
    /// The host of that rank, or empty.
    pub host: String,
    /// For `PeerFailed`: what the peer said of itself. Otherwise empty.
    pub cause: String,
    /// The whole story in one or two sentences.
    pub message: String,
}

/// Shorthand for results of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An error of a kind that blames no rank in particular.
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        Error { kind, rank: None, host: String::new(), cause: String::new(), message: message.into() }
    }

    /// An error that blames one rank.
    pub fn of_rank(kind: Kind, rank: u32, host: &str, message: impl Into<String>) -> Self {
        Error { rank: Some(rank), host: host.to_owned(), ..Error::new(kind, message) }
    }

    /// A request that makes no sense.
    pub fn invalid(message: impl Into<String>) -> Self {
        Error::new(Kind::InvalidArgument, message)
    }

    /// A request that cannot be served here.
    pub fn unsupported(message: impl Into<String>) -> Self {
        Error::new(Kind::Unsupported, message)
    }

    /// An operating-system error while doing `what`.
    pub fn io(what: &str, error: impl fmt::Display) -> Self {
        Error::new(Kind::Unsupported, format!("{what}: {error}"))
    }

    /// The bytes of the story, to be told to other ranks.
    pub fn to_bytes(&self) -> Vec<u8> {
        postcard::to_stdvec(self).unwrap_or_default()
    }

    /// Reads a story that another rank told.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        postcard::from_bytes(bytes).map_err(|e| Error::new(Kind::BadFrame, format!("unreadable error report: {e}")))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.kind.name(), self.message)
    }
}

impl std::error::Error for Error {}
