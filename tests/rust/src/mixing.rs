//! What gossip must compute, written down a second time: who averages with whom, with which weights, and in which order.

use offbeat_core::dtype::DType;
use offbeat_core::graph::{Graph, Peers};

use crate::reference::{read_f32, write_f32};

/// The peers of a node. Random pairs are drawn by the code under test; its own tests say what is asked of them.
pub fn peers(graph: &Graph, node: usize, step: u64) -> Vec<usize> {
    let n = graph.nodes();
    let mut found: Vec<usize> = match graph.rule() {
        Peers::Random => return graph.peers(node, step),
        _ if n == 1 => Vec::new(),
        Peers::All => (0..n).collect(),
        Peers::Ring => vec![(node + 1) % n, (node + n - 1) % n],
        // the peer of a node in the second half is the one in the first half whose peer it is
        Peers::ShiftOne => {
            let of_first = |r: usize| (step as usize + r) % (n / 2) + n / 2;
            if node < n / 2 { vec![of_first(node)] } else { (0..n / 2).filter(|r| of_first(*r) == node).collect() }
        }
        Peers::Exponential if n.is_power_of_two() => vec![node ^ (1 << (step as usize % n.trailing_zeros() as usize))],
        Peers::Exponential => {
            // an odd number leaves one out in turn
            let nodes: Vec<usize> = (0..n).filter(|r| n.is_multiple_of(2) || *r as u64 != step % n as u64).collect();
            let distances: Vec<usize> = [1, 3, 7, 15, 31].into_iter().filter(|d| *d < nodes.len()).collect();
            let distance = distances[step as usize % distances.len()];
            let pairs = (0..nodes.len()).step_by(2).map(|at| (nodes[at], nodes[(at + distance) % nodes.len()]));
            pairs.flat_map(|(a, b)| [(a, b), (b, a)]).filter(|(a, _)| *a == node).map(|(_, b)| b).collect()
        }
    };
    found.retain(|peer| *peer != node);
    found.sort_unstable();
    found.dedup();
    found
}

/// What the ranks of a host hold after a round.
pub fn gossip(
    graph: &Graph,
    step: u64,
    hosts: &[Vec<usize>],
    inputs: &[Vec<u8>],
    dtype: DType,
    host: usize,
) -> Vec<u8> {
    let around = |host: usize| -> usize {
        hosts[host].len() + peers(graph, host, step).iter().map(|peer| hosts[*peer].len()).sum::<usize>()
    };
    let mut nodes = peers(graph, host, step);
    let alike = nodes.iter().all(|peer| around(*peer) <= around(host));
    let share = |peer: usize| 1.0 / around(host).max(around(peer)) as f64;
    let given: f64 = nodes.iter().map(|peer| share(*peer) * hosts[*peer].len() as f64).sum();
    let factor = |node: usize| if node == host { (1.0 - given) / hosts[host].len() as f64 } else { share(node) };
    nodes.push(host);
    nodes.sort_unstable();
    let mut out = Vec::new();
    for at in 0..inputs[0].len() / dtype.size() {
        if dtype == DType::F64 {
            let get = |rank: usize| f64::from_le_bytes(inputs[rank][at * 8..at * 8 + 8].try_into().unwrap());
            let sum = |node: &usize| hosts[*node][1..].iter().fold(get(hosts[*node][0]), |sum, rank| sum + get(*rank));
            let value = match alike {
                true => nodes.iter().map(sum).reduce(|a, b| a + b).unwrap() / around(host) as f64,
                false => nodes.iter().map(|node| sum(node) * factor(*node)).reduce(|a, b| a + b).unwrap(),
            };
            out.extend(value.to_le_bytes());
        } else {
            let get = |rank: usize| read_f32(dtype, &inputs[rank], at);
            let sum = |node: &usize| hosts[*node][1..].iter().fold(get(hosts[*node][0]), |sum, rank| sum + get(*rank));
            let value = match alike {
                true => nodes.iter().map(sum).reduce(|a, b| a + b).unwrap() / around(host) as f32,
                false => nodes.iter().map(|node| sum(node) * factor(*node) as f32).reduce(|a, b| a + b).unwrap(),
            };
            write_f32(dtype, value, &mut out);
        }
    }
    out
}
