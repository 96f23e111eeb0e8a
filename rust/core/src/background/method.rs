//! What is exchanged, as it is described; and the exchange that is built of that, once.

use std::ops::Range;
use std::sync::Arc;

use super::coder::Coder;
use super::exchange::Exchange;
use super::{average, gossip, server, stepwise};
use crate::codec::Codec;
use crate::coding::Tally;
use crate::graph::{Graph, Peers};
use crate::{Error, Result};

/// What is exchanged, and with whom.
#[derive(Clone, Copy, Debug)]
pub enum Method {
    /// The mean of all members.
    Average {
        /// How differences to the last mean are encoded.
        codec: Option<&'static dyn Codec>,
    },
    /// The mean of pairs.
    Gossip {
        /// Who meets whom.
        peers: Peers,
        /// For random pairs.
        seed: u64,
        /// Whether weights travel in 8 bits, modulo the distance between ranks.
        modular: bool,
    },
    /// The weighted mean with the peers of a graph, in rounds that the training threads number alike.
    Stepwise {
        /// Who meets whom.
        peers: Peers,
        /// For random pairs.
        seed: u64,
        /// Whether weights travel in 8 bits, modulo the distance between ranks.
        modular: bool,
    },
    /// Updates to the owners of shards, and their values back.
    Server {
        /// How both are encoded.
        codec: Option<&'static dyn Codec>,
        /// Whether what the codec loses of updates is kept and sent later.
        feedback: bool,
        /// Whether an owner answers only when all members have come as far as who asks.
        bounded: bool,
    },
}

impl Method {
    /// The codec whose blocks tensors are laid out by.
    pub(super) fn codec(&self) -> Option<&'static dyn Codec> {
        match self {
            Method::Average { codec } | Method::Server { codec, .. } => *codec,
            Method::Gossip { .. } | Method::Stepwise { .. } => None,
        }
    }

    /// The exchange of a member, on snapshots with values in these places, of so many elements and in grains of so many.
    pub(super) fn build(
        self,
        (me, members): (u32, &[u32]),
        (spans, count, grain): (&[Range<usize>], usize, usize),
        tally: &Arc<Tally>,
    ) -> Result<Box<dyn Exchange>> {
        let coder = |codec| Coder::new(codec, spans, count, Arc::clone(tally));
        Ok(match self {
            Method::Average { codec } => Box::new(average::Average::new(count, grain, codec.map(coder))),
            Method::Gossip { peers, seed, modular } => {
                if matches!(peers, Peers::All | Peers::Ring) {
                    let name = peers.name();
                    return Err(Error::invalid(format!(
                        "peers={name:?} are no pairs; try: \"random\", \"exponential\" or \"shift_one\""
                    )));
                }
                let graph = Graph::new(peers, members.len(), seed)?;
                Box::new(gossip::Gossip::new(members, graph, count, modular, Arc::clone(tally)))
            }
            Method::Stepwise { peers, seed, modular } => {
                // over those that are left, of which there may be any number
                let graph = Graph::new(peers, 1, seed)?;
                Box::new(stepwise::Stepwise::new(members, graph, count, modular, Arc::clone(tally)))
            }
            Method::Server { codec, feedback, bounded } => {
                let coder = codec.map(coder).map(|coder| coder.with_feedback(feedback));
                Box::new(server::Server::new(members, me, count, grain, coder, bounded))
            }
        })
    }
}
