//! What the core logs goes to standard error, behind the rank. Installed by the first `Runtime`, never at import.

use std::io::Write;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use log::{LevelFilter, Log, Metadata, Record};

static RANK: AtomicU32 = AtomicU32::new(0);

struct Stderr;

impl Log for Stderr {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("offbeat")
    }

    fn log(&self, record: &Record<'_>) {
        if self.enabled(record.metadata()) {
            let (rank, level) = (RANK.load(Ordering::Relaxed), record.level().as_str().to_lowercase());
            // nothing can be done about a closed standard error, and nothing should
            let _ = writeln!(std::io::stderr(), "offbeat: rank {rank}: {level}: {}", record.args());
        }
    }

    fn flush(&self) {}
}

/// Logs for `rank` from now on; `OFFBEAT_DEBUG` is one of WARN (the default), INFO, DEBUG, TRACE, OFF.
pub(crate) fn install(rank: u32) {
    static ONCE: OnceLock<()> = OnceLock::new();
    RANK.store(rank, Ordering::Relaxed);
    ONCE.get_or_init(|| {
        let level =
            std::env::var("OFFBEAT_DEBUG").ok().and_then(|level| level.parse().ok()).unwrap_or(LevelFilter::Warn);
        // another logger in this process (there is none in the wheel) would stay in charge
        if log::set_logger(&Stderr).is_ok() {
            log::set_max_level(level);
        }
    });
}
