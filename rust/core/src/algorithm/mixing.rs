//! With whom a host exchanges differences to copies, how much each counts, and which copies there are. Pure, and the same
//! wherever the weights are.

use crate::graph::{Graph, Peers};
use crate::{Error, Result};

/// A host's part in gossip by differences (`replicas.rs`).
#[derive(Clone, Debug, PartialEq)]
pub struct Mixing {
    /// Where weights go.
    pub rule: Rule,
    /// The peer hosts in ascending order, and how much each counts.
    pub peers: Vec<(usize, f32)>,
    /// How much this host counts itself.
    pub own: f32,
}

/// Where the weights go from what peers are known to have.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rule {
    /// Difference compression; places of the left and the right neighbour among the peers.
    Ring(usize, usize),
    /// CHOCO, with its consensus step.
    Choco(f32),
}

impl Mixing {
    /// That of a host, where each has so many ranks.
    pub fn new(peers: Peers, gamma: Option<f64>, ranks: &[u32], host: usize) -> Result<Self> {
        let hosts = ranks.len();
        let mix = Graph::new(peers, hosts, 0)?.fixed(ranks, host)?;
        let weight = |node: usize| mix.terms.iter().find(|term| term.node == node).map_or(0.0, |term| term.weight());
        let peer_hosts = mix.terms.iter().map(|term| term.node).filter(|node| *node != host);
        let of_peers: Vec<(usize, f32)> = peer_hosts.map(|node| (node, weight(node) as f32)).collect();
        let place = |node: usize| of_peers.iter().position(|(peer, _)| *peer == node).unwrap_or_default();
        let rule = match gamma {
            None if peers != Peers::Ring => {
                return Err(Error::invalid(format!(
                    "difference compression with peers {:?}, which would take a copy of each; try: peers=\"ring\", or a \
                     gamma for CHOCO",
                    peers.name()
                )));
            }
            None => Rule::Ring(place((host + hosts - 1) % hosts), place((host + 1) % hosts)),
            Some(gamma) if gamma > 0.0 && gamma <= 1.0 => Rule::Choco(gamma as f32),
            Some(gamma) => {
                return Err(Error::invalid(format!("a consensus step gamma of {gamma}; try: over 0 and up to 1")));
            }
        };
        Ok(Mixing { rule, peers: of_peers, own: weight(host) as f32 })
    }

    /// The names of what is kept.
    pub fn copies(&self) -> &'static [&'static str] {
        match self.rule {
            Rule::Ring(..) => &["own", "left", "right"],
            Rule::Choco(_) => &["own", "sum"],
        }
    }

    /// How much the left and the right neighbour of a ring draw; of two hosts each is both, and counts once.
    pub fn draws(&self) -> (f32, f32) {
        match self.rule {
            Rule::Ring(left, right) if left == right => (self.weight(left), 0.0),
            Rule::Ring(left, right) => (self.weight(left), self.weight(right)),
            Rule::Choco(_) => (0.0, 0.0),
        }
    }

    fn weight(&self, place: usize) -> f32 {
        self.peers.get(place).map_or(0.0, |(_, weight)| *weight)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_two_hosts_each_is_both_neighbours_of_the_other() {
        let two = Mixing::new(Peers::Ring, None, &[1, 1], 1).unwrap();
        assert_eq!((two.rule, two.draws(), two.own), (Rule::Ring(0, 0), (0.5, 0.0), 0.5));
        let four = Mixing::new(Peers::Ring, None, &[1; 4], 0).unwrap();
        assert_eq!((four.rule, four.peers.len()), (Rule::Ring(1, 0), 2));
        let third = 1.0 / 3.0;
        assert_eq!(four.draws(), (third, third));
        let alone = Mixing::new(Peers::Ring, None, &[3], 0).unwrap();
        assert!(alone.peers.is_empty());
        assert_eq!(alone.draws(), (0.0, 0.0));
    }

    #[test]
    fn only_choco_takes_other_graphs_and_a_step_that_converges() {
        assert!(Mixing::new(Peers::All, None, &[1; 3], 0).is_err());
        assert!(Mixing::new(Peers::All, Some(0.0), &[1; 3], 0).is_err());
        let all = Mixing::new(Peers::All, Some(0.5), &[2, 1, 1], 0).unwrap();
        assert_eq!((all.rule, all.copies()), (Rule::Choco(0.5), &["own", "sum"][..]));
        assert_eq!((all.own, all.peers), (0.5, vec![(1, 0.25), (2, 0.25)]));
    }
}
