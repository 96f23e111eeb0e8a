//! The description of a call, small enough to travel with every frame: what ranks compare before they believe a byte.

use std::fmt;

use offbeat_transport::frame::{NOTE, Note};

use crate::codec::{self, Codec};
use crate::digest::digest;
use crate::dtype::{DType, Op};
use crate::graph::{Graph, Peers};

/// The kind of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
#[expect(missing_docs, reason = "the names say it")]
pub enum CallKind {
    AllReduce = 1,
    Reduce = 2,
    Broadcast = 3,
    AllGather = 4,
    Gather = 5,
    Scatter = 6,
    ReduceScatter = 7,
    AllToAll = 8,
    Barrier = 9,
    Message = 10,
    Close = 11,
    Gossip = 12,
    HostReduce = 13,
    Exchange = 14,
}

impl CallKind {
    const ALL: [(CallKind, &'static str); 14] = [
        (CallKind::AllReduce, "all_reduce"),
        (CallKind::Reduce, "reduce"),
        (CallKind::Broadcast, "broadcast"),
        (CallKind::AllGather, "all_gather"),
        (CallKind::Gather, "gather"),
        (CallKind::Scatter, "scatter"),
        (CallKind::ReduceScatter, "reduce_scatter"),
        (CallKind::AllToAll, "all_to_all"),
        (CallKind::Barrier, "barrier"),
        (CallKind::Message, "send"),
        (CallKind::Close, "close"),
        (CallKind::Gossip, "gossip"),
        (CallKind::HostReduce, "host_reduce"),
        (CallKind::Exchange, "exchange"),
    ];

    fn name(code: u8) -> &'static str {
        CallKind::ALL.iter().find(|(kind, _)| *kind as u8 == code).map_or("?", |(_, name)| name)
    }
}

/// Dimensions that a note has room for; longer shapes are folded into the last one.
const DIMENSIONS: usize = 8;
/// A dimension in which ranks may differ.
const FREE: u64 = u64::MAX;
/// No root.
const NOBODY: u32 = u32::MAX;

/// What a call is, as all ranks must see it alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Description {
    kind: u8,
    dtype: u8,
    op: u8,
    codec: u8,
    dimensions: u8,
    /// Which rule chooses peers, and a hash of its seed.
    peers: u8,
    seed: u32,
    root: u32,
    /// A hash of a list of shapes, or the step of a call between peers.
    extra: u64,
    shape: [u64; DIMENSIONS],
}

impl Description {
    /// A call with nothing but a kind.
    pub fn new(kind: CallKind) -> Self {
        Description {
            kind: kind as u8,
            dtype: 0,
            op: 0,
            codec: 0,
            dimensions: u8::MAX,
            peers: 0,
            seed: 0,
            root: NOBODY,
            extra: 0,
            shape: [0; DIMENSIONS],
        }
    }

    /// On elements of a type.
    pub fn dtype(mut self, dtype: DType) -> Self {
        self.dtype = dtype as u8;
        self
    }

    /// With an operation.
    pub fn op(mut self, op: Op) -> Self {
        self.op = op as u8;
        self
    }

    /// Through a codec.
    pub fn codec(mut self, codec: Option<&dyn Codec>) -> Self {
        self.codec = codec.map_or(0, Codec::code);
        self
    }

    /// From or to one rank.
    pub fn root(mut self, rank: u32) -> Self {
        self.root = rank;
        self
    }

    /// Between the peers of a graph.
    pub fn graph(mut self, graph: &Graph) -> Self {
        self.peers = graph.rule() as u8;
        // random peers alone depend on it
        let seed = if graph.rule() == Peers::Random { graph.seed() } else { 0 };
        self.seed = (seed ^ (seed >> 32)) as u32;
        self
    }

    /// In a step, which decides who talks to whom.
    pub fn step(mut self, step: u64) -> Self {
        self.extra = step;
        self
    }

    /// On tensors of a shape.
    pub fn shape(mut self, shape: &[u64]) -> Self {
        self.dimensions = shape.len().min(DIMENSIONS) as u8;
        self.shape = [0; DIMENSIONS];
        for (at, dimension) in shape.iter().enumerate() {
            let place = &mut self.shape[at.min(DIMENSIONS - 1)];
            *place = if at < DIMENSIONS { *dimension } else { place.wrapping_mul(*dimension) };
        }
        self
    }

    /// On tensors of a shape whose first dimension may differ from rank to rank.
    pub fn rows_of(self, shape: &[u64]) -> Self {
        let mut description = self.shape(shape);
        if !shape.is_empty() {
            description.shape[0] = FREE;
        }
        description
    }

    /// On a list of tensors, of which all shapes count.
    pub fn list_of<'a>(mut self, shapes: impl Iterator<Item = &'a [u64]>) -> Self {
        let words = shapes.flat_map(|shape| [&[shape.len() as u64], shape].concat());
        self.extra = digest(&words.flat_map(u64::to_le_bytes).collect::<Vec<u8>>());
        self
    }

    /// The shape of a message that carries one.
    pub fn get_shape(&self) -> Vec<u64> {
        self.shape[..usize::from(self.dimensions).min(DIMENSIONS)].to_vec()
    }

    /// The element type of a message that carries one.
    pub fn get_dtype(&self) -> Option<DType> {
        DType::from_code(self.dtype)
    }

    /// As it travels.
    pub fn encode(&self) -> Note {
        let mut note = [0; NOTE];
        note[..6].copy_from_slice(&[self.kind, self.dtype, self.op, self.codec, self.dimensions, self.peers]);
        note[8..12].copy_from_slice(&self.root.to_le_bytes());
        note[12..20].copy_from_slice(&self.extra.to_le_bytes());
        for (place, dimension) in note[20..84].chunks_exact_mut(8).zip(self.shape) {
            place.copy_from_slice(&dimension.to_le_bytes());
        }
        note[84..88].copy_from_slice(&self.seed.to_le_bytes());
        note
    }

    /// Reads what travelled; every note is some description.
    pub fn decode(note: &Note) -> Self {
        let word = |at: usize| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(&note[at..at + 8]);
            u64::from_le_bytes(bytes)
        };
        let mut shape = [0; DIMENSIONS];
        shape.iter_mut().enumerate().for_each(|(at, dimension)| *dimension = word(20 + at * 8));
        Description {
            kind: note[0],
            dtype: note[1],
            op: note[2],
            codec: note[3],
            dimensions: note[4],
            peers: note[5],
            seed: u32::from_le_bytes([note[84], note[85], note[86], note[87]]),
            root: u32::from_le_bytes([note[8], note[9], note[10], note[11]]),
            extra: word(12),
            shape,
        }
    }
}

impl fmt::Display for Description {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut words = Vec::new();
        if let Some(dtype) = DType::from_code(self.dtype) {
            let shape: Vec<String> =
                self.get_shape().iter().map(|d| if *d == FREE { "*".to_owned() } else { d.to_string() }).collect();
            let shape = if self.dimensions == u8::MAX { String::new() } else { format!("[{}]", shape.join(", ")) };
            words.push(format!("{dtype}{shape}"));
        }
        if let Some(op) = Op::from_code(self.op) {
            words.push(op.to_string());
        }
        if self.codec != 0 {
            words.push(format!("codec {}", codec::by_code(self.codec).map_or("?", Codec::name)));
        }
        if self.root != NOBODY {
            words.push(format!("rank {}", self.root));
        }
        if self.peers != 0 {
            words.push(format!("peers {}", Peers::from_code(self.peers).map_or("?", Peers::name)));
        }
        if self.seed != 0 {
            words.push(format!("seed #{:x}", self.seed));
        }
        if [CallKind::Gossip as u8, CallKind::Exchange as u8].contains(&self.kind) {
            words.push(format!("step {}", self.extra));
        } else if self.extra != 0 {
            words.push(format!("list of shapes #{:x}", self.extra));
        }
        write!(f, "{}({})", CallKind::name(self.kind), words.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn reads_like_the_call() {
        let call = Description::new(CallKind::Reduce).dtype(DType::F32).op(Op::Sum).root(3).shape(&[2, 5]);
        assert_eq!(call.to_string(), "reduce(float32[2, 5], sum, rank 3)");
        assert_eq!(
            Description::new(CallKind::AllGather).dtype(DType::I8).rows_of(&[4, 2]).to_string(),
            "all_gather(int8[*, 2])"
        );
        assert_eq!(Description::new(CallKind::Barrier).to_string(), "barrier()");
        let graph = Graph::new(Peers::Random, 4, 10).unwrap();
        let call = Description::new(CallKind::Gossip).dtype(DType::F16).shape(&[3]).graph(&graph).step(7);
        assert_eq!(call.to_string(), "gossip(float16[3], peers random, seed #a, step 7)");
    }

    #[test]
    fn a_scalar_is_not_an_empty_tensor() {
        let call = Description::new(CallKind::AllReduce).dtype(DType::F32);
        assert_ne!(call.shape(&[]).encode(), call.shape(&[0]).encode());
        assert_ne!(call.shape(&[2, 3]).encode(), call.shape(&[3, 2]).encode());
    }

    proptest! {
        #[test]
        fn any_note_is_readable(bytes in proptest::collection::vec(any::<u8>(), NOTE)) {
            let mut note = [0; NOTE];
            note.copy_from_slice(&bytes);
            let description = Description::decode(&note);
            let _ = description.to_string();
            prop_assert_eq!(Description::decode(&description.encode()), description);
        }
    }
}
