//! How ranks find each other: every rank leaves a card in a store and reads the cards of all others.
//!
//! The store is torch's in a job and memory in tests. It is used while linking only; no later failure needs it.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::error::{Error, Kind, Result};
use crate::handshake::Token;

/// A key-value store that all ranks see.
pub trait Store: Send + Sync {
    /// Sets a key.
    fn set(&self, key: &str, value: &[u8]) -> Result<()>;
    /// Waits at most `wait` for a key; `None` when it did not come.
    fn get(&self, key: &str, wait: Duration) -> Result<Option<Vec<u8>>>;
}

/// What a rank tells the others about itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Card {
    /// The version of the package, and the settings that all ranks must share.
    pub version: String,
    /// The rank.
    pub rank: u32,
    /// Its process.
    pub pid: u32,
    /// Its host's label.
    pub host: String,
    /// Its machine, see [`crate::host::Identity`].
    pub machine: u64,
    /// Addresses to dial, best first.
    pub addresses: Vec<IpAddr>,
    /// The port that it listens on.
    pub port: u16,
    /// The abstract Unix socket that it listens on, or why its memory cannot be shared.
    pub socket: Result<String, String>,
}

impl Card {
    /// How messages name this rank.
    pub fn name(&self) -> String {
        format!("rank {} (host {}, pid {})", self.rank, self.host, self.pid)
    }

    /// The card as bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        postcard::to_stdvec(self).unwrap_or_default()
    }

    /// Reads a card.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        postcard::from_bytes(bytes).map_err(|e| {
            Error::new(
                Kind::BadFrame,
                format!("unreadable card in the store: {e}; try: install the same offbeat on every host"),
            )
        })
    }
}

/// Spreads the job token: rank 0 makes one, unless a secret was given to every rank.
pub fn agree_on_token(store: &dyn Store, rank: u32, given: Option<&[u8]>, deadline: Instant) -> Result<Token> {
    if let Some(secret) = given {
        return Ok(Token::new(secret));
    }
    if rank == 0 {
        let token = Token::random()?;
        store.set("token", token.secret())?;
        return Ok(token);
    }
    let mut found = collect(store, &[("token".to_owned(), 0)], deadline, &|_| Ok(()))?;
    Ok(Token::new(&found.remove(0)))
}

/// Leaves a value under `topic` and reads those of the other `ranks`. Now and then `check` is asked about a rank that is
/// waited for.
pub fn exchange(
    store: &dyn Store,
    topic: &str,
    rank: u32,
    mine: &[u8],
    ranks: &[u32],
    deadline: Instant,
    check: &dyn Fn(u32) -> Result<()>,
) -> Result<Vec<Vec<u8>>> {
    store.set(&format!("{topic}/{rank}"), mine)?;
    let keys: Vec<_> = ranks.iter().map(|r| (format!("{topic}/{r}"), *r)).collect();
    collect(store, &keys, deadline, check)
}

/// Waits for all keys, and names the ranks whose key did not come.
fn collect(
    store: &dyn Store,
    keys: &[(String, u32)],
    deadline: Instant,
    check: &dyn Fn(u32) -> Result<()>,
) -> Result<Vec<Vec<u8>>> {
    let began = Instant::now();
    let mut values = Vec::with_capacity(keys.len());
    for (at, (key, rank)) in keys.iter().enumerate() {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if let Some(value) = store.get(key, left.min(Duration::from_millis(500)))? {
                values.push(value);
                break;
            }
            if left.is_zero() {
                return Err(missing(store, &keys[at..], began.elapsed()));
            }
            check(*rank)?;
        }
    }
    Ok(values)
}

fn missing(store: &dyn Store, keys: &[(String, u32)], waited: Duration) -> Error {
    let absent = keys.iter().filter(|(key, _)| !matches!(store.get(key, Duration::ZERO), Ok(Some(_))));
    let ranks: Vec<u32> = absent.map(|(_, rank)| *rank).collect();
    let names: Vec<String> = ranks.iter().take(8).map(ToString::to_string).collect();
    let dots = if ranks.len() > 8 { ", …" } else { "" };
    Error {
        rank: ranks.first().copied(),
        ..Error::new(
            Kind::Timeout,
            format!(
                "{} of the world did not come within {:.1} s: {}{dots}; try: look at their output, compare WORLD_SIZE \
                 with the number of processes started, or raise connect_timeout (OFFBEAT_CONNECT_TIMEOUT)",
                if ranks.len() == 1 { "one rank" } else { "ranks" },
                waited.as_secs_f64(),
                names.join(", ")
            ),
        )
    }
}

/// A store in memory, for ranks that are threads of one process.
#[derive(Default)]
pub struct MemoryStore {
    values: Mutex<HashMap<String, Vec<u8>>>,
    changed: Condvar,
}

impl Store for MemoryStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        let mut values = self.values.lock().unwrap_or_else(PoisonError::into_inner);
        values.insert(key.to_owned(), value.to_vec());
        self.changed.notify_all();
        Ok(())
    }

    fn get(&self, key: &str, wait: Duration) -> Result<Option<Vec<u8>>> {
        let values = self.values.lock().unwrap_or_else(PoisonError::into_inner);
        let (values, _) = self
            .changed
            .wait_timeout_while(values, wait, |values| !values.contains_key(key))
            .unwrap_or_else(PoisonError::into_inner);
        Ok(values.get(key).cloned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_missing_rank_is_named() {
        let store = MemoryStore::default();
        store.set("card/1", b"x").unwrap();
        let error = exchange(&store, "card", 0, b"y", &[1, 2, 3], Instant::now(), &|_| Ok(())).unwrap_err();
        assert_eq!((error.kind, error.rank), (Kind::Timeout, Some(2)));
        assert!(error.message.contains("2, 3") && error.message.contains("try:"), "{error}");
    }

    proptest! {
        #[test]
        fn a_card_from_garbage_is_an_error_or_a_card(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(card) = Card::from_bytes(&bytes) {
                prop_assert_eq!(Card::from_bytes(&card.to_bytes()).unwrap(), card);
            }
            let _ = Error::from_bytes(&bytes);
        }
    }
}
