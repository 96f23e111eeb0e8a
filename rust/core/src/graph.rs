//! Communication graphs: with whom a node averages in a round, and with which weights. Pure functions of the kind of graph,
//! the number of nodes, the node, the step and a seed, so that all ranks know every round without a word.
//!
//! A node is a host, since the ranks of a host average among themselves first; where every rank is a host of its own, nodes
//! are ranks. Peers are mutual: if a is a peer of b in a round, b is one of a.
//!
//! | peers | of node r in step c, n nodes | exact average |
//! |---|---|---|
//! | all | everybody | every round |
//! | ring | r − 1 and r + 1 | never, except n ≤ 3 |
//! | shift_one | of the other half, one further each step | every n/2 rounds for n ≤ 4 |
//! | exponential | n = 2^k: r XOR 2^(c mod k) | every k rounds |
//! | | other n: r + 1, 3, 7, 15 … for even r, in turn | never, but close |
//! | random | a seeded perfect matching | never |
//!
//! With an odd number of nodes a matching leaves one out, in turn.
//!
//! For n that is no power of two there is a sequence of matchings with an exact average too, of twice the length: first inside
//! of 2^k nodes and among the rest, then across, then inside again. It is not used: while training every step adds new
//! differences, and what counts is how much of them is left on average over all rounds to come. Summed over the rounds that
//! is 2.25 (n = 6) and 2.49 (n = 12) of what came in for that sequence, 1.70 and 1.84 for random matchings, and 1.53 and
//! 1.70 for these hops. The directed one-peer graph (from r − 2^c, to r + 2^c) has 1.59 and 1.77, and its peers are not
//! mutual.
//!
//! **Weights** are those of Metropolis over ranks: ranks i ≠ j that average in a round get 1/max(nᵢ, nⱼ), where nᵢ counts the
//! ranks on the node of i and on its peers, and i itself gets what is left. As a matrix over ranks that is symmetric and
//! doubly stochastic, whatever the number of ranks of each node, so a round preserves the sum over all ranks. It is 1/2 in a
//! matching and 1/3 on a ring where all nodes are alike, and the mean of all ranks involved whenever all of them see the same.

use crate::coding::mix;
use crate::{Error, Result};

/// A rule that says who averages with whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Peers {
    /// Everybody with everybody.
    All = 1,
    /// Everybody with the nodes before and after it.
    Ring = 2,
    /// Every node of the first half with one of the second, which is one further in each step.
    ShiftOne = 3,
    /// Pairs whose distance doubles from step to step.
    Exponential = 4,
    /// Random pairs.
    Random = 5,
}

impl Peers {
    /// All of them.
    pub const ALL: [Peers; 5] = [Peers::All, Peers::Ring, Peers::ShiftOne, Peers::Exponential, Peers::Random];

    /// The name.
    pub fn name(self) -> &'static str {
        match self {
            Peers::All => "all",
            Peers::Ring => "ring",
            Peers::ShiftOne => "shift_one",
            Peers::Exponential => "exponential",
            Peers::Random => "random",
        }
    }

    /// The rule with a name.
    pub fn from_name(name: &str) -> Result<Self> {
        Peers::ALL.into_iter().find(|peers| peers.name() == name).ok_or_else(|| {
            let known: Vec<&str> = Peers::ALL.iter().map(|peers| peers.name()).collect();
            Error::invalid(format!("unknown peers {name:?}; try: {}", known.join(", ")))
        })
    }

    /// The rule with a number, as [`Peers`] as u8 gives it.
    pub fn from_code(code: u8) -> Option<Self> {
        Peers::ALL.into_iter().find(|peers| *peers as u8 == code)
    }
}

/// Who averages with whom in every step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Graph {
    peers: Peers,
    nodes: usize,
    seed: u64,
}

impl Graph {
    /// The graph of some nodes. `seed` counts for random peers only. One node is alone in every graph.
    pub fn new(peers: Peers, nodes: usize, seed: u64) -> Result<Self> {
        if nodes == 0 {
            return Err(Error::invalid("a graph without nodes; try: at least one host"));
        }
        if peers == Peers::ShiftOne && nodes > 1 && !nodes.is_multiple_of(2) {
            return Err(Error::invalid(format!(
                "peers \"shift_one\" of {nodes} hosts, of which one half has more than the other; try: an even number of \
                 hosts, or peers=\"exponential\""
            )));
        }
        Ok(Graph { peers, nodes, seed })
    }

    /// The rule.
    pub fn rule(&self) -> Peers {
        self.peers
    }

    /// How many nodes it has.
    pub fn nodes(&self) -> usize {
        self.nodes
    }

    /// Where random peers come from.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// The same rule over another number of nodes, for those that are left when some are lost: nodes are then places in the
    /// list of the living, which is for the caller to agree on. Where halves become unequal, one is left out in turn.
    pub fn over(&self, nodes: usize) -> Self {
        Graph { nodes: nodes.max(1), ..*self }
    }

    /// The peers of a node in a step, among the `living`, a list in ascending order. Nobody for a node that is not in it.
    pub fn among(&self, living: &[usize], node: usize, step: u64) -> Vec<usize> {
        let Ok(place) = living.binary_search(&node) else { return Vec::new() };
        self.over(living.len()).peers(place, step).into_iter().map(|peer| living[peer]).collect()
    }

    /// The peers of a node in a step, in ascending order, without itself.
    pub fn peers(&self, node: usize, step: u64) -> Vec<usize> {
        let n = self.nodes;
        if n == 1 || node >= n {
            return Vec::new();
        }
        match self.peers {
            Peers::All => (0..n).filter(|peer| *peer != node).collect(),
            Peers::Ring => {
                let mut both = vec![(node + n - 1) % n, (node + 1) % n];
                both.sort_unstable();
                both.dedup();
                both
            }
            Peers::Exponential if n.is_power_of_two() => {
                vec![node ^ (1 << (step % u64::from(n.ilog2())))]
            }
            Peers::ShiftOne | Peers::Exponential | Peers::Random => self.matched(node, step).into_iter().collect(),
        }
    }

    /// The peer of a node in a matching; none for the one that is left out.
    fn matched(&self, node: usize, step: u64) -> Option<usize> {
        let left_out = (!self.nodes.is_multiple_of(2)).then_some((step % self.nodes as u64) as usize);
        if left_out == Some(node) {
            return None;
        }
        // places without the one that is left out, and back
        let place = |node: usize| if left_out.is_some_and(|out| node > out) { node - 1 } else { node };
        let node_at = |place: usize| if left_out.is_some_and(|out| place >= out) { place + 1 } else { place };
        let places = self.nodes - usize::from(left_out.is_some());
        let peer = match self.peers {
            Peers::ShiftOne => shift_one(places, place(node), step),
            Peers::Exponential => hop(places, place(node), step),
            Peers::All | Peers::Ring | Peers::Random => drawn(places, place(node), mix(self.seed, step)),
        };
        Some(node_at(peer))
    }

    /// The peers of a node in any step, in ascending order: a graph that stays the same, for those that need one.
    fn neighbours(&self, node: usize) -> Vec<usize> {
        let n = self.nodes;
        let mut found: Vec<usize> = match self.peers {
            Peers::Exponential if n.is_power_of_two() => (0..n.ilog2()).map(|bit| node ^ (1 << bit)).collect(),
            Peers::Exponential => {
                let hops = (0..=n.ilog2()).map(|bit| (1 << bit) % n);
                hops.flat_map(|hop| [(node + hop) % n, (node + n - hop) % n]).filter(|peer| *peer != node).collect()
            }
            _ => self.peers(node, 0),
        };
        found.sort_unstable();
        found.dedup();
        found
    }

    /// How a node mixes its own value with those of its peers in a step. `masses` are the ranks of each node.
    pub fn mix(&self, masses: &[u32], node: usize, step: u64) -> Mix {
        blend(masses, node, |node| self.peers(node, step))
    }

    /// The same with all peers that a node ever has, in every step.
    pub fn fixed(&self, masses: &[u32], node: usize) -> Result<Mix> {
        if matches!(self.peers, Peers::ShiftOne | Peers::Random) && self.nodes > 2 {
            return Err(Error::invalid(format!(
                "peers {:?} are others in every step, and copies are kept of those that stay; try: peers=\"ring\", \
                 \"exponential\" or \"all\"",
                self.peers.name()
            )));
        }
        Ok(blend(masses, node, |node| self.neighbours(node)))
    }
}

/// The weights of Metropolis over ranks.
fn blend(masses: &[u32], node: usize, peers_of: impl Fn(usize) -> Vec<usize>) -> Mix {
    let mass = |node: usize| u64::from(masses.get(node).copied().unwrap_or(1));
    let around = |node: usize| mass(node) + peers_of(node).into_iter().map(mass).sum::<u64>();
    let (mine, peers) = (around(node), peers_of(node));
    let mut terms: Vec<Term> = peers
        .iter()
        .map(|peer| Term { node: *peer, factor: 1.0 / mine.max(around(*peer)) as f64, mass: mass(*peer) })
        .collect();
    let given: f64 = terms.iter().map(Term::weight).sum();
    let divisor = peers.iter().all(|peer| around(*peer) <= mine).then_some(mine as u32);
    let factor = divisor.map_or((1.0 - given) / mass(node) as f64, |divisor| 1.0 / f64::from(divisor));
    let place = terms.partition_point(|term| term.node < node);
    terms.insert(place, Term { node, factor, mass: mass(node) });
    Mix { terms, divisor }
}

/// What a node's new value is made of.
#[derive(Clone, Debug, PartialEq)]
pub struct Mix {
    /// The node itself and its peers, in ascending order.
    pub terms: Vec<Term>,
    /// What the sum over all ranks of all terms is divided by, if all of them count the same.
    pub divisor: Option<u32>,
}

/// One node's part in a [`Mix`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Term {
    /// The node.
    pub node: usize,
    /// What the sum over its ranks is multiplied by.
    pub factor: f64,
    /// How many ranks it has.
    pub mass: u64,
}

impl Term {
    /// What the mean over its ranks is multiplied by: the node's entry in the mixing matrix.
    pub fn weight(&self) -> f64 {
        self.factor * self.mass as f64
    }
}

/// BAGUA's pairs: node r of the first half of n and node ((c + r) mod n/2) + n/2.
fn shift_one(n: usize, node: usize, step: u64) -> usize {
    let half = n / 2;
    let shift = (step % half as u64) as usize;
    if node < half { (shift + node) % half + half } else { (node - half + half - shift) % half }
}

/// Pairs of an even node and an odd one that is 1, 3, 7, 15 … further: about twice as far in each step.
fn hop(n: usize, node: usize, step: u64) -> usize {
    let hops = u64::from(n.ilog2());
    let distance = ((2usize << (step % hops)) - 1) % n;
    if node.is_multiple_of(2) { (node + distance) % n } else { (node + n - distance) % n }
}

/// The pairs of a random order of n nodes: the first with the second, the third with the fourth, and so on.
fn drawn(n: usize, node: usize, seed: u64) -> usize {
    let mut order: Vec<usize> = (0..n).collect();
    for last in (1..n).rev() {
        let random = u128::from(mix(seed, last as u64)) * (last as u128 + 1);
        order.swap(last, (random >> 64) as usize);
    }
    let place = order.iter().position(|other| *other == node).unwrap_or_default();
    order[place ^ 1]
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    type Matrix = Vec<Vec<f64>>;

    /// The mixing matrix over ranks of a round; the ranks of a node follow each other.
    fn over_ranks(graph: &Graph, masses: &[u32], step: u64) -> Matrix {
        let nodes: Vec<usize> =
            masses.iter().enumerate().flat_map(|(node, mass)| std::iter::repeat_n(node, *mass as usize)).collect();
        let row = |node: &usize| {
            let mix = graph.mix(masses, *node, step);
            let factor = |other: &usize| mix.terms.iter().find(|term| term.node == *other).map_or(0.0, |t| t.factor);
            nodes.iter().map(factor).collect()
        };
        nodes.iter().map(row).collect()
    }

    fn of_nodes(peers: Peers, nodes: usize, step: u64) -> Matrix {
        over_ranks(&Graph::new(peers, nodes, 7).unwrap(), &vec![1; nodes], step)
    }

    fn product(a: &Matrix, b: &Matrix) -> Matrix {
        let entry = |row: &Vec<f64>, at: usize| row.iter().zip(b).map(|(x, other)| x * other[at]).sum();
        a.iter().map(|row| (0..b.len()).map(|at| entry(row, at)).collect()).collect()
    }

    /// How much of a difference between nodes is left after some rounds, in the worst case: the norm of their product
    /// without its mean, by power iteration.
    fn left_after(rounds: &[Matrix]) -> f64 {
        let n = rounds[0].len();
        let all = rounds[1..].iter().fold(rounds[0].clone(), |all, next| product(next, &all));
        let mut squared = vec![vec![0.0; n]; n];
        for (i, row) in squared.iter_mut().enumerate() {
            for (j, entry) in row.iter_mut().enumerate() {
                *entry = all.iter().map(|of| (of[i] - 1.0 / n as f64) * (of[j] - 1.0 / n as f64)).sum();
            }
        }
        let mut vector: Vec<f64> = (0..n).map(|at| (at as f64 * 1.7 + 0.3).sin()).collect();
        let mut norm = 0.0;
        for _ in 0..3000 {
            vector = squared.iter().map(|row| row.iter().zip(&vector).map(|(a, b)| a * b).sum()).collect();
            norm = vector.iter().map(|x: &f64| x * x).sum::<f64>().sqrt();
            if norm < 1e-20 {
                return 0.0;
            }
            vector.iter_mut().for_each(|x| *x /= norm);
        }
        norm.sqrt()
    }

    fn close(a: f64, b: f64) -> bool {
        (a - b).abs() < 1e-3
    }

    #[test]
    fn names_and_numbers_lead_back() {
        for peers in Peers::ALL {
            assert_eq!(Peers::from_name(peers.name()).unwrap(), peers);
            assert_eq!(Peers::from_code(peers as u8), Some(peers));
        }
        let error = Peers::from_name("star").unwrap_err();
        assert!(error.message.contains("\"star\"") && error.message.contains("exponential"), "{error}");
        assert_eq!(Peers::from_code(99), None);
    }

    #[test]
    fn halves_must_be_equal_and_one_is_alone() {
        let error = Graph::new(Peers::ShiftOne, 5, 0).unwrap_err();
        assert!(error.message.contains("5 hosts") && error.message.contains("try:"), "{error}");
        assert!(Graph::new(Peers::All, 0, 0).is_err());
        for peers in Peers::ALL {
            let alone = Graph::new(peers, 1, 3).unwrap();
            assert_eq!(alone.peers(0, 9), []);
            let mix = alone.mix(&[4], 0, 9);
            assert_eq!((mix.terms.len(), mix.divisor, mix.terms[0].weight()), (1, Some(4), 1.0));
        }
    }

    #[test]
    fn weights_are_what_the_literature_says() {
        let weights = |peers, nodes| -> Vec<f64> {
            Graph::new(peers, nodes, 0).unwrap().mix(&[1; 9], 0, 1).terms.iter().map(Term::weight).collect()
        };
        assert_eq!(weights(Peers::Ring, 5), [1.0 / 3.0; 3]);
        assert_eq!(weights(Peers::Ring, 2), [0.5; 2], "a neighbour on both sides counts once");
        assert_eq!(weights(Peers::All, 4), [0.25; 4]);
        assert_eq!(weights(Peers::Exponential, 6), [0.5; 2]);
        // a pair of hosts with three ranks and one weighs them three to one
        let mix = Graph::new(Peers::Ring, 2, 0).unwrap().mix(&[3, 1], 1, 0);
        assert_eq!((mix.terms[0].weight(), mix.terms[1].weight(), mix.divisor), (0.75, 0.25, Some(4)));
    }

    #[test]
    fn the_second_eigenvalue_of_the_ring() {
        for (nodes, expected) in [(3, 0.0), (4, 0.333), (8, 0.805), (16, 0.949), (32, 0.987)] {
            let left = left_after(&[of_nodes(Peers::Ring, nodes, 0)]);
            assert!(close(left, expected), "{nodes}: {left}");
        }
    }

    #[test]
    fn what_a_cycle_of_shift_one_leaves() {
        for (nodes, expected) in [(2, 0.0), (4, 0.0), (8, 0.354), (16, 0.575), (32, 0.748)] {
            let cycle: Vec<Matrix> = (0..nodes as u64 / 2).map(|step| of_nodes(Peers::ShiftOne, nodes, step)).collect();
            let left = left_after(&cycle);
            assert!(close(left, expected), "{nodes}: {left}");
        }
    }

    #[test]
    fn the_hypercube_is_exact_after_log_n_rounds_wherever_it_begins() {
        for nodes in [2usize, 4, 8, 16, 32, 64] {
            let rounds = nodes.ilog2() as u64;
            for begin in [0, 1, 5, u64::MAX - 100] {
                let cycle: Vec<Matrix> =
                    (begin..begin + rounds).map(|step| of_nodes(Peers::Exponential, nodes, step)).collect();
                let all = cycle[1..].iter().fold(cycle[0].clone(), |all, next| product(next, &all));
                // powers of two: the average is exact, not nearly so
                assert!(all.iter().flatten().all(|entry| *entry == 1.0 / nodes as f64), "{nodes} from {begin}");
            }
        }
    }

    #[test]
    fn every_graph_brings_all_nodes_together() {
        for nodes in 2..20usize {
            for peers in Peers::ALL.into_iter().filter(|peers| *peers != Peers::ShiftOne || nodes % 2 == 0) {
                let rounds: Vec<Matrix> = (0..8 * nodes as u64).map(|step| of_nodes(peers, nodes, step)).collect();
                let left = left_after(&rounds);
                // the slowest of them is the ring
                assert!(left < 0.2, "{} of {nodes}: {left}", peers.name());
                if matches!(peers, Peers::Exponential | Peers::Random) {
                    let left = left_after(&rounds[..3 * (nodes.ilog2() as usize + 1)]);
                    assert!(left < 0.25, "{} of {nodes} in few rounds: {left}", peers.name());
                }
            }
        }
    }

    /// What is left, on average over all rounds to come and from all that one begins with, of differences that come in anew
    /// in every round: the sum over the rounds of the squared norm of what is left, for each direction.
    fn standing(peers: Peers, nodes: usize, phases: u64) -> f64 {
        let mut total = 0.0;
        for begin in 0..phases {
            let mut all: Matrix =
                (0..nodes).map(|i| (0..nodes).map(|j| f64::from(u8::from(i == j))).collect()).collect();
            for step in begin..begin + 60 {
                let left = all.iter().flatten().map(|entry| (entry - 1.0 / nodes as f64).powi(2)).sum::<f64>();
                total += left / (nodes as f64 - 1.0) / phases as f64;
                all = product(&of_nodes(peers, nodes, step), &all);
            }
        }
        total
    }

    #[test]
    fn hops_leave_less_than_random_pairs() {
        for (nodes, hops, random) in [(6, 1.53, 1.70), (12, 1.70, 1.84)] {
            let got = (standing(Peers::Exponential, nodes, 12), standing(Peers::Random, nodes, 200));
            assert!((got.0 - hops).abs() < 0.01 && (got.1 - random).abs() < 0.05, "{nodes}: {got:?}");
        }
    }

    #[test]
    fn random_matchings_bring_every_pair_together_and_leave_everybody_out_in_turn() {
        for nodes in [2usize, 3, 8, 9] {
            let graph = Graph::new(Peers::Random, nodes, 11).unwrap();
            let mut met = vec![vec![0; nodes]; nodes];
            let rounds = 200 * nodes as u64;
            for step in 0..rounds {
                for (node, counts) in met.iter_mut().enumerate() {
                    graph.peers(node, step).into_iter().for_each(|peer| counts[peer] += 1);
                }
            }
            let even = nodes % 2 == 0;
            let usual = rounds as f64 / if even { nodes as f64 - 1.0 } else { nodes as f64 };
            for (node, counts) in met.iter().enumerate() {
                assert_eq!(
                    counts.iter().sum::<u64>(),
                    if even { rounds } else { rounds / nodes as u64 * (nodes as u64 - 1) }
                );
                for (_, count) in counts.iter().enumerate().filter(|(peer, _)| *peer != node) {
                    assert!((*count as f64 - usual).abs() < 0.35 * usual, "{nodes}: {count} of {usual}");
                }
            }
        }
        let of =
            |seed| (0..50).map(|step| Graph::new(Peers::Random, 8, seed).unwrap().peers(0, step)).collect::<Vec<_>>();
        assert_eq!(of(1), of(1));
        assert_ne!(of(1), of(2));
    }

    #[test]
    fn survivors_have_a_graph_of_their_own() {
        let graph = Graph::new(Peers::ShiftOne, 6, 0).unwrap();
        let living = [0, 2, 3, 5, 7];
        let mut left_out = Vec::new();
        for step in 0..5 {
            for node in living {
                let peers = graph.among(&living, node, step);
                assert!(peers.iter().all(|peer| living.contains(peer) && graph.among(&living, *peer, step) == [node]));
                left_out.extend(peers.is_empty().then_some(node));
            }
        }
        assert_eq!(left_out, living, "one in each step");
        assert_eq!(graph.among(&living, 1, 0), [], "a lost one has no peers");
        assert_eq!(graph.among(&[3], 3, 0), []);
    }

    proptest! {
        #[test]
        fn peers_are_mutual_and_a_matching_keeps_everybody_busy_at_most_once(
            nodes in 1usize..40, step in any::<u64>(), seed in any::<u64>(),
        ) {
            for peers in Peers::ALL {
                // as survivors have it, where an odd number is no error
                let graph = Graph { peers, nodes: 1, seed }.over(nodes);
                let mut alone = 0;
                for node in 0..nodes {
                    let of_node = graph.peers(node, step);
                    prop_assert!(of_node.windows(2).all(|pair| pair[0] < pair[1]) && !of_node.contains(&node));
                    prop_assert!(of_node.iter().all(|peer| *peer < nodes && graph.peers(*peer, step).contains(&node)));
                    prop_assert!(matches!(peers, Peers::All | Peers::Ring) || of_node.len() <= 1);
                    alone += usize::from(of_node.is_empty());
                }
                prop_assert_eq!(alone, match peers {
                    _ if nodes == 1 => 1,
                    Peers::All | Peers::Ring => 0,
                    Peers::ShiftOne | Peers::Exponential | Peers::Random => nodes % 2,
                });
            }
        }

        #[test]
        fn the_matrix_over_ranks_is_symmetric_and_doubly_stochastic(
            masses in proptest::collection::vec(1u32..6, 1..12), step in any::<u64>(), seed in any::<u64>(),
        ) {
            for peers in Peers::ALL {
                let graph = Graph { peers, nodes: masses.len(), seed };
                let matrix = over_ranks(&graph, &masses, step);
                for (i, row) in matrix.iter().enumerate() {
                    prop_assert!((row.iter().sum::<f64>() - 1.0).abs() < 1e-12);
                    prop_assert!(row[i] > 0.0);
                    for (j, entry) in row.iter().enumerate() {
                        prop_assert!(*entry >= 0.0 && (entry - matrix[j][i]).abs() < 1e-15, "{} {i} {j}", peers.name());
                    }
                }
                for node in 0..masses.len() {
                    let mix = graph.mix(&masses, node, step);
                    let alike = mix.terms.iter().all(|term| (term.factor - mix.terms[0].factor).abs() < 1e-12);
                    prop_assert_eq!(mix.divisor.is_some(), alike);
                    prop_assert!((mix.terms.iter().map(Term::weight).sum::<f64>() - 1.0).abs() < 1e-12);
                }
            }
        }
    }
}
