//! The steps of a model's buckets on a device: core's [`Carrier`], on a queue and streams of torch's.

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use offbeat_core::algorithm::{
    self, Apply, Carried, FACTOR, Keeper, LEFT, Lent, Mixing, Step, Storage, Trip, begun, factoring, numbers,
    selection, spans,
};
use offbeat_core::bucket::{Bucket, Tensor};
use offbeat_core::buffer::Buffer;
use offbeat_core::codec::Codec;
use offbeat_core::coding::mix;
use offbeat_core::dtype::{DType, Op};
use offbeat_core::event::Event;
use offbeat_core::graph::Graph;
use offbeat_core::{Error, Result};

use crate::collective::Group;
use crate::compressed::{Compressed, Residuals};
use crate::gossip::Gossip;
use crate::kernels::Way;
use crate::low_rank::LowRank;
use crate::memory::Piece;
use crate::momentum::Momentum;
use crate::odd::Odd;
use crate::outer::{Difference, Outer};
use crate::queue::{Kind, Lane, Work};
use crate::replicas::Replicas;
use crate::select::Select;
use crate::stream::{Address, Mark, Stream};

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
        let lane = Arc::new(lane);
        let odd = Arc::new(Odd::new(&lane)?);
        Ok(Carrier { lane, allocate, odd })
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

    /// The `at`-th of some steps, after those that are built.
    fn stage(
        &self,
        (steps, at): (&[Step], usize),
        bucket: &Bucket,
        tensors: &[Tensor],
        memory: &Storage,
        built: &[(usize, Stage)],
    ) -> Result<Option<Stage>> {
        let (group, count, dtype) = (self.lane.group(), bucket.count, bucket.dtype);
        let begun = || begun(steps, at).map(|number| built.iter().find(|it| it.0 == number).map(|it| &it.1));
        Ok(Some(match &steps[at] {
            Step::AllReduce { op, codec: None, .. } => Stage::Plain(*op),
            Step::AllReduce { op, codec: Some(codec), feedback, seed, .. } => {
                takes(*codec, dtype)?;
                let (spans, numbers) = (spans(bucket, tensors), numbers(bucket, tensors, codec.block()));
                let plan = Compressed::build(group, *codec, (count, dtype, *op), &spans, &numbers)?;
                let traffic = plan.traffic(group);
                let kept = match feedback {
                    true => Some([group.zeros(count)?, group.zeros(count)?]),
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
            Step::Momentum { betas } => {
                let betas: Vec<f32> = bucket.slots.iter().map(|slot| betas[slot.tensor]).collect();
                let momentum = Momentum::build(group, count, &spans(bucket, tensors), &betas)?;
                Stage::Momentum(Arc::new(momentum), Way::There)
            }
            step @ Step::Gradient => match begun()? {
                Some(Stage::Momentum(momentum, _)) => Stage::Momentum(Arc::clone(momentum), Way::Back),
                _ => return Err(unbegun(step)),
            },
            Step::Difference => Stage::Difference(Arc::new(Difference::build(group, count, &spans(bucket, tensors))?)),
            step @ Step::Outer { lr, momentum } => match begun()? {
                Some(Stage::Difference(begun)) => Stage::Outer(Outer::build(group, count, begun, *lr, *momentum)?),
                _ => return Err(unbegun(step)),
            },
            Step::Replicas { peers, codec, gamma, seed } => {
                let ranks: Vec<u32> = group.layout.hosts.iter().map(|members| members.len() as u32).collect();
                let mixing = Mixing::new(*peers, *gamma, &ranks, group.host().0)?;
                let numbers = codec.map(|codec| numbers(bucket, tensors, codec.block())).unwrap_or_default();
                let bucket = ((count, dtype), spans(bucket, tensors));
                let replicas = Replicas::build(group, mixing, *codec, bucket.0, &bucket.1, &numbers)?;
                Stage::Replicas(replicas, *seed)
            }
            Step::Select { ratio, .. } => {
                Stage::Select(Select::build(group, &selection(*ratio, bucket, tensors)?, count, dtype)?)
            }
            Step::LowRank { rank, rate, seed, .. } => {
                let parts = factoring(*rank, *rate, *seed, bucket, tensors)?;
                Stage::LowRank(LowRank::build(group, &parts, count, dtype)?)
            }
            Step::Weigh => {
                let message = "ranks that count by their samples on a GPU, which would wait for the sum of these; try: \
                               weighted=False, and each rank's loss times ranks · its samples / all samples";
                return Err(Error::unsupported(message));
            }
            Step::Apply { function, states } => {
                let numbers = Bucket { dtype: DType::F32, ..bucket.clone() };
                let state =
                    |name: &String| Ok((name.clone(), Storage::Lent(algorithm::Carrier::allocate(self, &numbers)?)));
                let states = states.iter().map(state).collect::<Result<_>>()?;
                Stage::Apply { apply: Apply::new(function, bucket, tensors, memory), states }
            }
        }))
    }
}

fn unbegun(step: &Step) -> Error {
    Error::invalid(format!("the step {} ends what another step has not begun; try: report this", step.name()))
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
        (self.allocate)(bucket, self.lane.group().stream.handle())
    }

    fn build(&self, steps: &[Step], bucket: &Bucket, tensors: &[Tensor], memory: &Storage) -> Result<Box<dyn Carried>> {
        let mut stages = Vec::new();
        for number in 0..steps.len() {
            let stage = self.stage((steps, number), bucket, tensors, memory, &stages)?;
            stages.extend(stage.map(|stage| (number, stage)));
        }
        let (lane, odd, spans) = (Arc::clone(&self.lane), Arc::clone(&self.odd), spans(bucket, tensors));
        Ok(Box::new(List { lane, odd, stages, spans }))
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
    Momentum(Arc<Momentum>, Way),
    Difference(Arc<Difference>),
    Outer(Outer),
    /// With where its random numbers begin.
    Replicas(Replicas, u64),
    Select(Select),
    LowRank(LowRank),
    Apply {
        apply: Apply,
        /// By name, in memory of torch's: the function may hold on to it.
        states: Vec<(String, Storage)>,
    },
}

impl Stage {
    /// What it keeps, mostly for each element: its name, whose it is, and where it lies.
    fn pieces(&self) -> Vec<(&str, Keeper, Address)> {
        match self {
            Stage::Coded { kept: Some([shares, results]), .. } => {
                vec![("shares", Keeper::Carrier, shares.address()), ("results", Keeper::Carrier, results.address())]
            }
            Stage::Momentum(it, Way::There) => vec![("momentum", Keeper::All, it.kept.address())],
            Stage::Difference(it) => vec![("anchor", Keeper::All, it.anchor.address())],
            Stage::Outer(it) => it.speed.iter().map(|speed| ("momentum", Keeper::All, speed.address())).collect(),
            Stage::Replicas(it, _) => {
                it.names().iter().zip(&it.copies).map(|(name, copy)| (*name, Keeper::Each, copy.address())).collect()
            }
            Stage::Select(it) => vec![(LEFT, Keeper::Each, it.left.address())],
            Stage::LowRank(it) => {
                vec![(LEFT, Keeper::Each, it.left.address()), (FACTOR, Keeper::All, it.factors.address())]
            }
            Stage::Apply { states, .. } => {
                states.iter().map(|(name, memory)| (name.as_str(), Keeper::Each, memory.start() as Address)).collect()
            }
            Stage::Plain(_) | Stage::Gossip(_) | Stage::Coded { .. } | Stage::Momentum(_, Way::Back) => Vec::new(),
        }
    }

    /// What lets it begin with the weights in a bucket, if that is anything to it.
    fn begin(&self) -> Option<Kind<'_>> {
        match self {
            // SAFETY: the bucket stays until the work is done.
            Stage::Difference(it) => Some(enqueues(|group, buffer| unsafe { it.begin(group, buffer) })),
            // SAFETY: as above.
            Stage::Replicas(it, _) => Some(enqueues(|group, buffer| unsafe { it.begin(group, buffer) })),
            _ => None,
        }
    }
}

fn enqueues<'a>(work: impl Fn(&Group, Buffer) -> Result<()> + 'a) -> Kind<'a> {
    Kind::Step(Box::new(work))
}

/// Steps of an algorithm, built for one bucket.
struct List {
    lane: Arc<Lane>,
    odd: Arc<Odd>,
    /// With their numbers in the algorithm.
    stages: Vec<(usize, Stage)>,
    /// The elements of each slot.
    spans: Vec<Range<usize>>,
}

impl List {
    fn work<'a>(&self, stage: &'a Stage, trip: &Trip<'a>) -> Work<'a> {
        let step = trip.step;
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
            Stage::Momentum(it, way) => {
                // SAFETY: the bucket stays until the work is done.
                enqueues(|group, buffer| unsafe { it.run(group, buffer, *way) })
            }
            // SAFETY: as above.
            Stage::Difference(it) => enqueues(|group, buffer| unsafe { it.run(group, buffer) }),
            Stage::Outer(it) => {
                let odd = self.odd.address(step);
                // SAFETY: as above; the words outlive all work (`Odd`).
                enqueues(move |group, buffer| unsafe { it.run(group, buffer, odd) })
            }
            Stage::Replicas(it, seed) => {
                let (odd, stream, traffic) = (self.odd.address(step), mix(*seed, step), it.traffic());
                trip.tally.add(traffic.0, traffic.1, 0);
                // SAFETY: as above.
                enqueues(move |group, buffer| unsafe { it.run(group, buffer, step, stream, odd) })
            }
            Stage::Select(it) => {
                let (odd, traffic) = (self.odd.address(step), it.traffic());
                trip.tally.add(traffic.0, traffic.1, 0);
                // SAFETY: as above.
                enqueues(move |group, buffer| unsafe { it.run(group, buffer, odd) })
            }
            Stage::LowRank(it) => {
                let (odd, traffic) = (self.odd.address(step), it.traffic());
                trip.tally.add(traffic.0, traffic.1, 0);
                // SAFETY: as above.
                enqueues(move |group, buffer| unsafe { it.run(group, buffer, odd) })
            }
            // called when it is its turn, and enqueues what it does
            Stage::Apply { apply, states } => {
                let ran = trip.ran;
                enqueues(move |group, _| {
                    let states = states.iter().map(|(name, memory)| (name.as_str(), memory.clone())).collect();
                    apply.call(states, (step, Some(group.stream.handle())), ran)
                })
            }
        };
        Work { kind, buffer: trip.buffer, what: trip.what.to_owned() }
    }

    /// What is kept: (step, name, whose it is), and where.
    fn pieces(&self) -> impl Iterator<Item = ((usize, &str, Keeper), Address)> {
        self.stages.iter().flat_map(|(number, stage)| {
            stage.pieces().into_iter().map(move |(name, keeper, place)| ((*number, name, keeper), place))
        })
    }

    fn address(&self, at: usize) -> Result<Address> {
        let place = self.pieces().nth(at).map(|(_, place)| place);
        place.ok_or_else(|| Error::invalid(format!("nothing is kept under number {at}; try: report this")))
    }
}

impl Carried for List {
    fn enqueue(&self, trip: &Trip<'_>) -> Result<Arc<dyn Event>> {
        let works: Vec<Work> = self.stages.iter().map(|(_, stage)| self.work(stage, trip)).collect();
        Ok(Arc::new(self.lane.enqueue_all(&works, trip.after)?))
    }

    fn begin(&self, buffer: Buffer, after: &[Arc<dyn Event>]) -> Result<Arc<dyn Event>> {
        let begin = |kind| Work { kind, buffer, what: "the first weights of a bucket".to_owned() };
        let works: Vec<Work<'_>> = self.stages.iter().filter_map(|(_, stage)| stage.begin()).map(begin).collect();
        Ok(Arc::new(self.lane.enqueue_all(&works, after)?))
    }

    fn kept(&self) -> Vec<(usize, String, Keeper)> {
        self.pieces().map(|((step, name, keeper), _)| (step, name.to_owned(), keeper)).collect()
    }

    fn place(&self, at: usize, slot: usize) -> Range<usize> {
        let owner =
            self.stages.iter().flat_map(|(_, stage)| stage.pieces().into_iter().map(move |it| (stage, it.0))).nth(at);
        match owner {
            Some((Stage::LowRank(it), name)) => it.place(name, slot),
            _ => self.spans[slot].clone(),
        }
    }

    fn read(&self, at: usize, range: Range<usize>) -> Result<Vec<f32>> {
        let (size, place) = (size_of::<f32>(), self.address(at)?);
        let mut bytes = vec![0; range.len() * size];
        // SAFETY: `place` said where the numbers are.
        unsafe { self.lane.group().stream.download(place + (range.start * size) as u64, &mut bytes)? };
        let number = |bytes: &[u8]| bytes.try_into().map(f32::from_le_bytes).unwrap_or_default();
        Ok(bytes.chunks_exact(size).map(number).collect())
    }

    fn write(&self, at: usize, first: usize, values: &[f32]) -> Result<()> {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let place = self.address(at)? + (first * size_of::<f32>()) as u64;
        // SAFETY: as above.
        unsafe { self.lane.group().stream.upload(&bytes, place) }
    }
}
