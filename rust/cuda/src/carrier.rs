//! The steps of a model's buckets on a device: core's [`Carrier`], on a queue and streams of torch's.

use std::any::Any;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use offbeat_core::algorithm::{
    self, Apply, Carried, Keeper, LEFT, Lent, Step, Storage, Trip, numbers, selection, spans,
};
use offbeat_core::bucket::{Bucket, Tensor};
use offbeat_core::buffer::Buffer;
use offbeat_core::codec::Codec;
use offbeat_core::coding::mix;
use offbeat_core::dtype::{DType, Op};
use offbeat_core::event::Event;
use offbeat_core::graph::Graph;
use offbeat_core::{Error, Result};

use crate::compressed::{Compressed, Residuals};
use crate::gossip::Gossip;
use crate::memory::Piece;
use crate::pinned::Words;
use crate::queue::{Kind, Lane, Work};
use crate::select::Select;
use crate::stream::{Address, Mark, Stream};

/// For how many rounds blocks that are not finite are counted by themselves.
const ROUNDS: u64 = 64;

/// How long the end of a carrier waits for what is under way before that is given up.
const PARTING: Duration = Duration::from_secs(5);

/// Gives memory of torch's for a bucket, all zero, which the stream with this handle uses too.
pub type Allocate = Box<dyn Fn(&Bucket, u64) -> Result<Arc<dyn Lent>> + Send + Sync>;

/// Who carries steps on a device.
pub struct Carrier {
    lane: Arc<Lane>,
    allocate: Allocate,
    odd: Arc<Odd>,
}

impl Carrier {
    /// One for the buckets of one model. Other models have others.
    pub fn new(lane: Lane, allocate: Allocate) -> Result<Self> {
        let words = Words::new(lane.group().stream.device(), ROUNDS as usize)?;
        let lane = Arc::new(lane);
        let odd = Odd { words, newest: Mutex::default(), lane: Arc::clone(&lane) };
        Ok(Carrier { lane, allocate, odd: Arc::new(odd) })
    }

    /// A member's tensor to all, after what is enqueued on a stream of the caller's, which waits for it.
    ///
    /// # Safety
    /// The tensor stays until the stream has come past this.
    pub unsafe fn broadcast(&self, buffer: Buffer, root: usize, stream: u64) -> Result<()> {
        let after = algorithm::Carrier::mark(self, stream)?;
        let work = Work { kind: Kind::Broadcast { root }, buffer, what: "a broadcast of buffers".to_owned() };
        let done = self.lane.enqueue_all(&[work], &[after])?;
        algorithm::Carrier::wait(self, stream, &done)
    }

    fn torch(&self, stream: u64) -> Arc<Stream> {
        // SAFETY: the handle is of torch's current stream on this device, and torch never destroys its streams.
        unsafe { Stream::borrow(self.lane.group().stream.device(), stream) }
    }

    fn stage(&self, step: &Step, bucket: &Bucket, tensors: &[Tensor], memory: &Storage) -> Result<Option<Stage>> {
        let (group, count, dtype) = (self.lane.group(), bucket.count, bucket.dtype);
        Ok(Some(match step {
            Step::AllReduce { op, codec: None, .. } => Stage::Plain(*op),
            Step::AllReduce { op, codec: Some(codec), feedback, seed, .. } => {
                takes(*codec, dtype)?;
                let (spans, numbers) = (spans(bucket, tensors), numbers(bucket, tensors, codec.block()));
                let plan = Compressed::build(group, *codec, (count, dtype, *op), &spans, &numbers)?;
                let traffic = plan.traffic(group);
                let zeros = vec![0; count * size_of::<f32>()];
                let kept = match feedback {
                    true => Some([group.upload(&zeros)?, group.upload(&zeros)?]),
                    false => None,
                };
                Stage::Coded { plan: Arc::new(plan), seed: *seed, kept, traffic }
            }
            Step::Gossip { peers, seed } => {
                let graph = Graph::new(*peers, group.layout.hosts.len(), *seed)?;
                Stage::Gossip(Arc::new(Gossip::build(group, graph, count, dtype)?))
            }
            Step::HostReduce if group.layout.hosts.iter().all(|members| members.len() == 1) => return Ok(None),
            Step::HostReduce => Stage::Gossip(Arc::new(Gossip::inside(group, count, dtype)?)),
            Step::Select { ratio, .. } => {
                let plan = Select::build(group, &selection(*ratio, bucket, tensors)?, count, dtype)?;
                Stage::Select { plan: Arc::new(plan), left: group.upload(&vec![0; count * size_of::<f32>()])? }
            }
            Step::Apply { function, states } => {
                let numbers = Bucket { dtype: DType::F32, ..bucket.clone() };
                let state =
                    |name: &String| Ok((name.clone(), Storage::Lent(algorithm::Carrier::allocate(self, &numbers)?)));
                let states = states.iter().map(state).collect::<Result<_>>()?;
                Stage::Apply { apply: Apply::new(function, bucket, tensors, memory), states }
            }
            other => return Err(cannot(other.name(), group.stream.device().ordinal())),
        }))
    }
}

fn cannot(step: &str, device: u32) -> Error {
    Error::unsupported(format!(
        "the step {step} is not carried on a GPU by this version, and the model is on cuda:{device}; try: model.cpu(), or an \
         algorithm whose steps are: allreduce, bytegrad, qsgd, topk, local_sgd, decentralized"
    ))
}

fn takes(codec: &dyn Codec, dtype: DType) -> Result<()> {
    match dtype {
        DType::F32 | DType::F16 | DType::BF16 => Ok(()),
        _ => Err(Error::unsupported(format!(
            "codec {:?} does not take {dtype}; try: float32, float16 or bfloat16 parameters, or no codec",
            codec.name()
        ))),
    }
}

impl algorithm::Carrier for Carrier {
    fn allocate(&self, bucket: &Bucket) -> Result<Arc<dyn Lent>> {
        (self.allocate)(bucket, self.lane.group().stream.raw() as u64)
    }

    fn build(&self, steps: &[Step], bucket: &Bucket, tensors: &[Tensor], memory: &Storage) -> Result<Box<dyn Carried>> {
        let mut stages = Vec::new();
        for (number, step) in steps.iter().enumerate() {
            stages.extend(self.stage(step, bucket, tensors, memory)?.map(|stage| (number, stage)));
        }
        Ok(Box::new(List { lane: Arc::clone(&self.lane), odd: Arc::clone(&self.odd), stages }))
    }

    fn mark(&self, stream: algorithm::Stream) -> Result<Arc<dyn Event>> {
        Ok(Arc::new(self.torch(stream).mark()?))
    }

    fn wait(&self, stream: algorithm::Stream, event: &dyn Event) -> Result<()> {
        match event.as_any().and_then(<dyn Any>::downcast_ref::<Mark>) {
            Some(mark) => self.torch(stream).wait(mark),
            None => event.wait(None, None),
        }
    }

    fn non_finite(&self, round: u64) -> u64 {
        self.odd.of(round)
    }

    fn set_limit(&self, limit: Duration) {
        self.lane.set_limit(limit);
    }

    fn check(&self) -> Result<()> {
        self.lane.group().communicator.check()
    }

    fn abandon(&self, error: &Error) {
        let told = self.lane.group().communicator.abort(error.clone());
        log::debug!("work on the device is given up: {told}");
    }
}

/// Blocks that were not finite, of each of the last rounds.
struct Odd {
    words: Words,
    newest: Mutex<u64>,
    /// Whose kernels count.
    lane: Arc<Lane>,
}

impl Drop for Odd {
    fn drop(&mut self) {
        // kernels count in memory that goes now
        if let Err(error) = self.lane.drain(PARTING) {
            log::warn!("{}", error.message);
        }
    }
}

impl Odd {
    /// Where kernels of a round count.
    fn address(&self, round: u64) -> u64 {
        let mut newest = self.newest.lock().unwrap_or_else(PoisonError::into_inner);
        if *newest != round {
            *newest = round;
            self.words.clear((round % ROUNDS) as usize);
        }
        self.words.address((round % ROUNDS) as usize)
    }

    fn of(&self, round: u64) -> u64 {
        let newest = *self.newest.lock().unwrap_or_else(PoisonError::into_inner);
        if round + ROUNDS <= newest { 0 } else { u64::from(self.words.get((round % ROUNDS) as usize)) }
    }
}

enum Stage {
    Plain(Op),
    Coded {
        plan: Arc<Compressed>,
        seed: u64,
        /// What is kept of shares and of results.
        kept: Option<[Piece; 2]>,
        traffic: (u64, u64),
    },
    Gossip(Arc<Gossip>),
    Select {
        plan: Arc<Select>,
        left: Piece,
    },
    Apply {
        apply: Apply,
        /// By name, in memory of torch's: the function may hold on to it.
        states: Vec<(String, Storage)>,
    },
}

/// Steps of an algorithm, built for one bucket.
struct List {
    lane: Arc<Lane>,
    odd: Arc<Odd>,
    /// With their numbers in the algorithm.
    stages: Vec<(usize, Stage)>,
}

impl List {
    fn work<'a>(&self, stage: &'a Stage, trip: &Trip<'a>) -> Work<'a> {
        let kind = match stage {
            Stage::Plain(op) => Kind::AllReduce(*op),
            Stage::Gossip(plan) => Kind::Gossip { plan: Arc::clone(plan), step: trip.step },
            Stage::Coded { plan, seed, kept, traffic } => {
                trip.tally.add(traffic.0, traffic.1, 0);
                let kept = kept.as_ref().map_or_else(Residuals::default, |[shares, results]| Residuals {
                    shares: shares.address(),
                    results: results.address(),
                });
                let odd = self.odd.address(trip.step);
                Kind::Compressed { plan: Arc::clone(plan), stream: mix(*seed, trip.step), kept, odd }
            }
            Stage::Apply { apply, states } => {
                let states = states.iter().map(|(name, memory)| (name.as_str(), memory.clone())).collect();
                Kind::Apply { apply, states, step: trip.step, ran: trip.ran }
            }
            Stage::Select { plan, left } => {
                let traffic = plan.traffic();
                trip.tally.add(traffic.0, traffic.1, 0);
                Kind::Select { plan: Arc::clone(plan), left: left.address(), odd: self.odd.address(trip.step) }
            }
        };
        Work { kind, buffer: trip.buffer, what: trip.what.to_owned() }
    }

    /// What is kept: (step, name, whose it is), and where.
    fn pieces(&self) -> impl Iterator<Item = ((usize, &str, Keeper), Address)> {
        self.stages.iter().flat_map(|(number, stage)| {
            let kept = match stage {
                Stage::Coded { kept: Some([shares, results]), .. } => {
                    let of = |name, piece: &Piece| (name, Keeper::Carrier, piece.address());
                    vec![of("shares", shares), of("results", results)]
                }
                Stage::Select { left, .. } => vec![(LEFT, Keeper::Each, left.address())],
                Stage::Apply { states, .. } => states
                    .iter()
                    .map(|(name, memory)| (name.as_str(), Keeper::Each, memory.start() as Address))
                    .collect(),
                _ => Vec::new(),
            };
            kept.into_iter().map(move |(name, keeper, place)| ((*number, name, keeper), place))
        })
    }

    fn place(&self, at: usize) -> Result<Address> {
        let place = self.pieces().nth(at).map(|(_, place)| place);
        place.ok_or_else(|| Error::invalid(format!("nothing is kept under number {at}; try: report this")))
    }
}

impl Carried for List {
    fn enqueue(&self, trip: &Trip<'_>) -> Result<Arc<dyn Event>> {
        let works: Vec<Work> = self.stages.iter().map(|(_, stage)| self.work(stage, trip)).collect();
        Ok(Arc::new(self.lane.enqueue_all(&works, trip.after)?))
    }

    fn kept(&self) -> Vec<(usize, String, Keeper)> {
        self.pieces().map(|((step, name, keeper), _)| (step, name.to_owned(), keeper)).collect()
    }

    fn read(&self, at: usize, range: Range<usize>) -> Result<Vec<f32>> {
        let (size, place) = (size_of::<f32>(), self.place(at)?);
        let mut bytes = vec![0; range.len() * size];
        // SAFETY: what is kept has a number for each element of the bucket.
        unsafe { self.lane.group().stream.download(place + (range.start * size) as u64, &mut bytes)? };
        let number = |bytes: &[u8]| bytes.try_into().map(f32::from_le_bytes).unwrap_or_default();
        Ok(bytes.chunks_exact(size).map(number).collect())
    }

    fn write(&self, at: usize, first: usize, values: &[f32]) -> Result<()> {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let place = self.place(at)? + (first * size_of::<f32>()) as u64;
        // SAFETY: as above.
        unsafe { self.lane.group().stream.upload(&bytes, place) }
    }
}
