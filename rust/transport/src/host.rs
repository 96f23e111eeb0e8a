//! Who shares a machine: the kernel's boot id and the network namespace, unless `OFFBEAT_HOST` says otherwise.

use sha2::{Digest, Sha256};

/// What makes two ranks neighbours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The label under which a rank counts as being on a host, and which messages show.
    pub host: String,
    /// A digest of (boot id, network namespace): whether two ranks really share a machine, whatever the label says.
    pub machine: u64,
}

impl Identity {
    /// This process's identity; `label` is `OFFBEAT_HOST`.
    pub fn here(label: Option<&str>) -> Self {
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let namespace = std::fs::read_link("/proc/self/ns/net").map(|p| p.display().to_string()).unwrap_or_default();
        let name = hostname();
        // without a boot id (not Linux) the name is the best there is
        let mut hash = Sha256::new();
        for part in [boot.trim(), &namespace, if boot.is_empty() { &name } else { "" }] {
            hash.update(part.as_bytes());
            hash.update([0]);
        }
        let machine = u64::from_le_bytes(crate::frame::part(&hash.finalize()[..8]));
        let host = match label {
            Some(label) => label.to_owned(),
            // two namespaces of one machine have the same name and must not count as one host
            None => format!("{name}/{:04x}", machine & 0xffff),
        };
        Identity { host, machine }
    }
}

/// Which clock [`crate::trace::now`] reads: processes for which this text is the same read the same one. That is the boot
/// and the time namespace, because a container may count from another moment than its host.
pub fn clock() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let boot = if boot.is_empty() { hostname() } else { boot.trim().to_owned() };
    match std::fs::read_link("/proc/self/ns/time") {
        Ok(namespace) => format!("{boot} {}", namespace.display()),
        Err(_) => boot,
    }
}

/// The machine's own name.
pub fn hostname() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}
