//! Which address to offer and which to dial: decided here, in pure functions over the list of interfaces.
//!
//! A rank offers every address that its peers might route to, best first. A dialer tries them in the order of
//! [`candidates`]; the handshake proves that the right rank answered, so a wrong guess costs time and never correctness.

use std::net::{IpAddr, Ipv6Addr, SocketAddr, UdpSocket};

use crate::error::{Error, Result};

/// One address of one interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    /// The name, e.g. `eth0`.
    pub name: String,
    /// The address.
    pub ip: IpAddr,
    /// Bits of the network part.
    pub prefix: u8,
}

/// The interfaces of this host that are up.
pub fn interfaces() -> Result<Vec<Interface>> {
    let found = if_addrs::get_if_addrs().map_err(|e| Error::io("cannot list network interfaces", e))?;
    let prefix = |addr: &if_addrs::IfAddr| match addr {
        if_addrs::IfAddr::V4(v4) => v4.prefixlen,
        if_addrs::IfAddr::V6(v6) => v6.prefixlen,
    };
    Ok(found
        .into_iter()
        .filter(|i| i.is_oper_up() || i.is_loopback())
        .map(|i| Interface { prefix: prefix(&i.addr), ip: i.ip(), name: i.name })
        .collect())
}

/// A choice of interfaces in NCCL's grammar, plus CIDR: `eth,ib` (prefixes), `=eth0` (exact), `^docker` (all but),
/// `10.0.0.0/8`, `^=lo,172.17.0.0/16`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selector {
    exclude: bool,
    exact: bool,
    patterns: Vec<Pattern>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Pattern {
    Name(String),
    Network(IpAddr, u8),
}

impl Selector {
    /// Reads a selector; the empty text selects everything but loopback and docker bridges.
    pub fn parse(text: &str) -> Result<Self> {
        let mut rest = text.trim();
        if rest.is_empty() {
            return Ok(Selector::default());
        }
        let exclude = rest.starts_with('^');
        rest = rest.strip_prefix('^').unwrap_or(rest);
        let exact = rest.starts_with('=');
        rest = rest.strip_prefix('=').unwrap_or(rest);
        let patterns = rest.split(',').map(|p| Pattern::parse(p.trim(), text)).collect::<Result<Vec<_>>>()?;
        Ok(Selector { exclude, exact, patterns })
    }

    /// Whether an interface is selected.
    pub fn selects(&self, interface: &Interface) -> bool {
        if self.patterns.is_empty() {
            let bridge = interface.name.starts_with("docker") || interface.name.starts_with("br-");
            return !interface.ip.is_loopback() && !bridge;
        }
        let hit = self.patterns.iter().any(|pattern| match pattern {
            Pattern::Name(name) if self.exact => interface.name == *name,
            Pattern::Name(name) => interface.name.starts_with(name.as_str()),
            Pattern::Network(network, prefix) => in_network(interface.ip, *network, *prefix),
        });
        hit != self.exclude && !(self.exclude && interface.ip.is_loopback())
    }

    /// Whether this is a list of what to take, so that an empty result is the user's mistake.
    fn is_inclusive(&self) -> bool {
        !self.patterns.is_empty() && !self.exclude
    }
}

impl Pattern {
    fn parse(text: &str, whole: &str) -> Result<Self> {
        let wrong = |why: &str| {
            Error::invalid(format!(
                "interface selector {whole:?}: {why}; try: eth0, =eth0, ^docker or 10.0.0.0/8, comma-separated"
            ))
        };
        if text.is_empty() {
            return Err(wrong("an empty name"));
        }
        let Some((network, prefix)) = text.split_once('/') else {
            return Ok(Pattern::Name(text.to_owned()));
        };
        let network: IpAddr = network.parse().map_err(|_| wrong("not an address before the slash"))?;
        let bits = if network.is_ipv4() { 32 } else { 128 };
        match prefix.parse::<u8>() {
            Ok(prefix) if prefix <= bits => Ok(Pattern::Network(network, prefix)),
            _ => Err(wrong("not a prefix length after the slash")),
        }
    }
}

/// Whether `ip` lies in `network/prefix`.
pub fn in_network(ip: IpAddr, network: IpAddr, prefix: u8) -> bool {
    match (ip, network) {
        (IpAddr::V4(ip), IpAddr::V4(network)) => {
            let drop = 32 - u32::from(prefix.min(32));
            ip.to_bits().checked_shr(drop).unwrap_or(0) == network.to_bits().checked_shr(drop).unwrap_or(0)
        }
        (IpAddr::V6(ip), IpAddr::V6(network)) => {
            let drop = 128 - u32::from(prefix.min(128));
            ip.to_bits().checked_shr(drop).unwrap_or(0) == network.to_bits().checked_shr(drop).unwrap_or(0)
        }
        _ => false,
    }
}

/// The addresses that a rank offers to others, best first: the one that routes to `reach`, then the other selected ones,
/// then loopback, which only ranks on the same machine will dial.
pub fn offered(all: &[Interface], selector: &Selector, route: Option<IpAddr>) -> Result<Vec<IpAddr>> {
    let selected: Vec<&Interface> = all.iter().filter(|i| selector.selects(i)).collect();
    if selected.is_empty() && selector.is_inclusive() {
        let have: Vec<String> = all.iter().map(|i| format!("{} {}", i.name, i.ip)).collect();
        return Err(Error::invalid(format!(
            "no network interface is selected; this host has {}; try: OFFBEAT_SOCKET_IFNAME with one of these",
            have.join(", ")
        )));
    }
    let mut addresses: Vec<IpAddr> = selected.iter().map(|i| i.ip).filter(|ip| !is_link_local(*ip)).collect();
    addresses.sort_by_key(|ip| (Some(*ip) != route, ip.is_loopback(), ip.is_ipv6()));
    let loopback = all.iter().map(|i| i.ip).filter(|ip| ip.is_loopback() && !addresses.contains(ip));
    let loopback: Vec<IpAddr> = loopback.collect();
    addresses.extend(loopback);
    Ok(addresses)
}

/// The addresses of a peer in the order to dial them: a shared network first, then as the peer offers them. Loopback is
/// dialed only on the same machine (and first there), never to another host.
pub fn candidates(mine: &[Interface], offered: &[IpAddr], port: u16, same_machine: bool) -> Vec<SocketAddr> {
    let shares_network = |ip: IpAddr| mine.iter().any(|i| in_network(ip, i.ip, i.prefix));
    let mut ips: Vec<IpAddr> = offered.iter().copied().filter(|ip| same_machine || !ip.is_loopback()).collect();
    ips.sort_by_key(|ip| (!ip.is_loopback(), !shares_network(*ip)));
    ips.into_iter().map(|ip| SocketAddr::new(ip, port)).collect()
}

/// The local address by which the kernel routes to `reach`, a host name or address. Sends nothing.
pub fn route_to(reach: &str) -> Option<IpAddr> {
    use std::net::ToSocketAddrs;
    let target = (reach, 9u16).to_socket_addrs().ok()?.next()?;
    let any: SocketAddr = if target.is_ipv4() { ([0, 0, 0, 0], 0).into() } else { (Ipv6Addr::UNSPECIFIED, 0).into() };
    let socket = UdpSocket::bind(any).ok()?;
    socket.connect(target).ok()?;
    Some(socket.local_addr().ok()?.ip())
}

/// An IPv4 address in IPv6 clothes, undressed.
pub(crate) fn plain(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

fn is_link_local(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn host() -> Vec<Interface> {
        let of = |name: &str, ip: &str, prefix| Interface { name: name.into(), ip: ip.parse().unwrap(), prefix };
        vec![
            of("lo", "127.0.0.1", 8),
            of("lo", "::1", 128),
            of("eth0", "10.1.0.5", 16),
            of("eth0", "fd00::5", 64),
            of("eth0", "fe80::1", 64),
            of("docker0", "172.17.0.1", 16),
            of("ib0", "192.168.9.5", 24),
        ]
    }

    fn selected(text: &str) -> Vec<String> {
        let selector = Selector::parse(text).unwrap();
        host().iter().filter(|i| selector.selects(i)).map(|i| i.ip.to_string()).collect()
    }

    #[test]
    fn nccl_grammar_and_cidr() {
        assert_eq!(selected("ib"), ["192.168.9.5"]);
        assert_eq!(selected("=ib"), [""; 0]);
        assert_eq!(selected("=ib0,docker0"), ["172.17.0.1", "192.168.9.5"]);
        assert_eq!(selected("^docker,eth"), ["192.168.9.5"]);
        assert_eq!(selected("10.0.0.0/8"), ["10.1.0.5"]);
        assert_eq!(selected("fd00::/8"), ["fd00::5"]);
        assert_eq!(selected("^172.16.0.0/12,eth0"), ["192.168.9.5"]);
        assert_eq!(selected(""), ["10.1.0.5", "fd00::5", "fe80::1", "192.168.9.5"]);
        assert_eq!(selected("lo"), ["127.0.0.1", "::1"]);
    }

    #[test]
    fn wrong_selectors_say_what_to_try() {
        for text in ["10.0.0.0/33", "ten/8", "eth0,", "fd00::/129", "^"] {
            let error = Selector::parse(text).unwrap_err();
            assert!(error.message.contains("try:"), "{error}");
        }
        assert!(offered(&host(), &Selector::parse("wlan").unwrap(), None).unwrap_err().message.contains("eth0"));
    }

    #[test]
    fn the_route_comes_first_and_loopback_last() {
        let route = "192.168.9.5".parse().ok();
        let offer = offered(&host(), &Selector::default(), route).unwrap();
        let text: Vec<String> = offer.iter().map(ToString::to_string).collect();
        assert_eq!(text, ["192.168.9.5", "10.1.0.5", "fd00::5", "127.0.0.1", "::1"]);
    }

    #[test]
    fn loopback_is_never_dialed_to_another_machine() {
        let offer: Vec<IpAddr> = ["172.20.0.9", "10.1.0.9", "127.0.0.1"].iter().map(|a| a.parse().unwrap()).collect();
        let text = |same| candidates(&host(), &offer, 7, same).iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(text(false), ["10.1.0.9:7", "172.20.0.9:7"]);
        assert_eq!(text(true)[0], "127.0.0.1:7");
    }

    proptest! {
        #[test]
        fn any_selector_text_parses_or_says_why(text in "[a-z0-9.:/^=, ]{0,24}") {
            if let Ok(selector) = Selector::parse(&text) {
                host().iter().for_each(|i| { selector.selects(i); });
            }
        }

        #[test]
        fn a_network_holds_its_own_address(ip: [u8; 4], prefix in 0u8..=32) {
            prop_assert!(in_network(IpAddr::from(ip), IpAddr::from(ip), prefix));
        }
    }
}
