//! Settings that are read once, here, and handed down.

use std::time::Duration;

use offbeat_transport::mesh::Options;

use crate::{Error, Result};

/// Sizes at which ways change; options, so that tests can make small data take every way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuning {
    /// Up to this many bytes, neighbours exchange data in their slots: one meeting instead of two.
    pub inline: usize,
    /// Bytes that a rank stages at a time when its tensor is not in shared memory.
    pub segment: usize,
    /// Bytes of a frame between hosts, encoded or not; sums of half precision travel in twice as many.
    pub chunk: usize,
    /// Up to this many bytes in all, everyone sends everything to everyone: one delay instead of two.
    pub exchange: usize,
    /// A broadcast runs ahead of a receiver that has not come by this many bytes; a message up to this long is sent
    /// before anybody has asked for it.
    pub eager: usize,
}

impl Default for Tuning {
    fn default() -> Self {
        Tuning { inline: 16 << 10, segment: 512 << 10, chunk: 64 << 10, exchange: 64 << 10, eager: 256 << 10 }
    }
}

impl Tuning {
    /// For the lanes of a model. There other buckets are under way, so delays hide behind each other, and bytes do not.
    pub fn of_lanes(self) -> Self {
        Tuning { exchange: self.exchange / 4, ..self }
    }
}

/// Everything that an engine is told.
#[derive(Clone, Debug)]
pub struct Config {
    /// For linking.
    pub options: Options,
    /// For a call.
    pub timeout: Duration,
    /// For the first training step, which may compile and warm up.
    pub first_step_timeout: Duration,
    /// Sizes.
    pub tuning: Tuning,
}

impl Default for Config {
    fn default() -> Self {
        let options = Options {
            connect_timeout: Duration::from_secs(60),
            timeout: Duration::from_secs(30),
            token: None,
            interface: String::new(),
            reach: None,
            host: None,
            shared_memory: cfg!(target_os = "linux"),
            shared_bytes: memory_of_host().max(1 << 36),
            streams: None,
            version: env!("CARGO_PKG_VERSION").to_owned(),
        };
        Config {
            timeout: options.timeout,
            first_step_timeout: Duration::from_secs(300),
            options,
            tuning: Tuning::default(),
        }
    }
}

/// What an arena can at most use; only the pages in use exist.
fn memory_of_host() -> u64 {
    let pages = std::fs::read_to_string("/proc/meminfo").ok();
    let kilobytes = pages.as_deref().and_then(|text| text.split_whitespace().nth(1)?.parse::<u64>().ok());
    kilobytes.unwrap_or(0) << 10
}

impl Config {
    /// The defaults, changed by the environment that `get` reads.
    pub fn from_environment(get: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let mut config = Config::default();
        let get = |name: &str| get(name).filter(|value| !value.is_empty());
        if let Some(value) = get("OFFBEAT_SHM") {
            config.options.shared_memory &= flag("OFFBEAT_SHM", &value)?;
        }
        if let Some(value) = get("OFFBEAT_SHARED_BYTES") {
            let bytes = number("OFFBEAT_SHARED_BYTES", &value, 1 << 20..=1 << 46)?;
            config.options.shared_bytes = bytes as u64;
        }
        if let Some(value) = get("OFFBEAT_STREAMS") {
            config.options.streams = Some(number("OFFBEAT_STREAMS", &value, 1..=64)? as u8);
        }
        if let Some(value) = get("OFFBEAT_CHUNK_BYTES") {
            config.tuning.chunk = number("OFFBEAT_CHUNK_BYTES", &value, 1 << 10..=1 << 20)?;
        }
        if let Some(value) = get("OFFBEAT_SEGMENT_BYTES") {
            config.tuning.segment = number("OFFBEAT_SEGMENT_BYTES", &value, 4 << 10..=1 << 30)?;
        }
        config.options.host = get("OFFBEAT_HOST");
        Ok(config)
    }
}

fn flag(name: &str, value: &str) -> Result<bool> {
    match value {
        "1" | "true" | "yes" | "on" => Ok(true),
        "0" | "false" | "no" | "off" => Ok(false),
        _ => Err(Error::invalid(format!("{name}={value:?} is not a switch; try: 0 or 1"))),
    }
}

fn number(name: &str, value: &str, range: std::ops::RangeInclusive<usize>) -> Result<usize> {
    value.trim().parse().ok().filter(|n| range.contains(n)).ok_or_else(|| {
        Error::invalid(format!("{name}={value:?}; try: a whole number from {} to {}", range.start(), range.end()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_values_say_what_to_try() {
        for (name, value) in [("OFFBEAT_SHM", "maybe"), ("OFFBEAT_STREAMS", "0"), ("OFFBEAT_CHUNK_BYTES", "many")] {
            let error = Config::from_environment(|n| (n == name).then(|| value.to_owned())).unwrap_err();
            assert!(error.message.contains(name) && error.message.contains("try:"), "{error}");
        }
    }

    #[test]
    fn the_environment_counts() {
        let config = Config::from_environment(|name| (name == "OFFBEAT_SHM").then(|| "0".to_owned())).unwrap();
        assert!(!config.options.shared_memory);
        assert_eq!(Config::from_environment(|_| None).unwrap().tuning, Tuning::default());
    }
}
