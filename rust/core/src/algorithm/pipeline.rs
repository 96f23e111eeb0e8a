//! A pipeline: an algorithm built for one bucket, a closed list of steps that runs without Python.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::all_reduce::{AllReduce, Kept};
use super::apply::Apply;
use super::carrier::{Carried, Carrier, Storage, Trip};
use super::low_rank::LowRank;
use super::memory::{Keeper, Memory, Saved};
use super::momentum::Momentum;
use super::outer::{Difference, Outer};
use super::replicas::Replicas;
use super::select::Select;
use super::step::{begun, check_pairs};
use super::weigh::Weigh;
use super::{Description, Step, What, When};
use crate::bucket::{Bucket, Tensor};
use crate::buffer::{Buffer, Shaped};
use crate::call::Call;
use crate::coding::Tally;
use crate::dtype::{DType, Op};
use crate::event::{Event, Output};
use crate::graph::Graph;
use crate::group::{Group, Terms, Work};
use crate::{Error, Result, reduce};

/// One run of a pipeline.
pub struct Round<'a> {
    /// The bucket.
    pub buffer: Buffer,
    /// In which it is exchanged.
    pub group: &'a Group,
    /// On which terms.
    pub terms: &'a Terms<'a>,
    /// What must have happened before, where the bucket is on a device.
    pub after: &'a [Arc<dyn Event>],
    /// Its number.
    pub step: u64,
    /// How many samples this rank has seen since the last one, for `Weigh`.
    pub samples: f64,
    /// What is counted.
    pub tally: &'a Arc<Tally>,
    /// Is told from when to when a function of the user's ran.
    pub ran: &'a dyn Fn(u64, u64),
}

impl Round<'_> {
    /// The whole bucket as a tensor of one dimension.
    pub(super) fn tensor(&self) -> Shaped {
        Shaped { buffer: self.buffer, shape: vec![self.buffer.count as u64] }
    }

    /// Makes a call of the group, on this thread. The memory in it is the pipeline's and stays until it is over.
    pub(super) fn call(&self, call: Call) -> Result<Output> {
        self.group.run_on(Work { call, keep: None }, self.terms)
    }
}

/// A step, ready to run on its bucket.
struct Stage {
    work: Kind,
    /// Locked while it runs, and by whoever saves or loads between rounds.
    memories: Mutex<Vec<Memory>>,
}

enum Kind {
    /// Where gradients travel as momentum: the number of the stage that keeps it.
    AllReduce(AllReduce, Option<usize>),
    HostReduce,
    Difference(Difference),
    /// Ends what the stage with this number has begun.
    Outer(Outer, usize),
    Gossip(Graph),
    Replicas(Replicas),
    Momentum(Momentum),
    /// Ends what the stage with this number has begun.
    Gradient(usize),
    /// The all-reduce beside it does its work, with what this stage keeps.
    Fused,
    Select(Select),
    LowRank(LowRank),
    Weigh(Weigh),
    Apply(Apply),
}

/// The steps of an algorithm for one bucket.
#[derive(Default)]
pub struct Pipeline {
    warmup: u64,
    /// The stages of the warm-up, then all others.
    stages: Vec<Stage>,
    /// How many are of the warm-up.
    first: usize,
    /// Where the bucket is on a device: what does the same there, in the warm-up and after it.
    carried: Option<[Box<dyn Carried>; 2]>,
}

impl Pipeline {
    /// Builds what a description says for a bucket of some tensors, which lies in `memory`. Where that is not the host's,
    /// `carrier` carries the steps.
    pub fn build(
        description: &Description,
        bucket: &Bucket,
        tensors: &[Tensor],
        memory: &Storage,
        group: &Group,
        carrier: Option<&dyn Carrier>,
    ) -> Result<Self> {
        let Description { what, when, every, warmup, first, steps } = description;
        // gradients stay where they are where weights are exchanged instead
        if steps.is_empty() && *what != What::Gradients {
            return Err(Error::invalid("a sync without steps; try: Sync([AllReduce(\"mean\")])"));
        }
        if *warmup > 0 && first.is_empty() {
            return Err(Error::invalid("a warm-up without steps; try: warmup() that returns [AllReduce(\"mean\")]"));
        }
        let weights = matches!(what, What::Weights | What::Updates) && *when != When::Bucket;
        if !weights && (*what, *when, *every) != (What::Gradients, When::Bucket, 1) {
            return Err(Error::unsupported(format!(
                "this version communicates gradients as buckets become ready, in every step, or weights at other times, not \
                 {what:?} {when:?} every {every}; try: what=\"gradients\", when=\"bucket\", every=1, and weights in sync()"
            )));
        }
        if let Some(step) = first.iter().chain(steps).find(|step| step.takes_weights() && !weights) {
            return Err(Error::invalid(format!(
                "the step {} works on weights and these are gradients; try: it among the steps of sync()",
                step.name()
            )));
        }
        first.iter().chain(steps).try_for_each(|step| check(step, bucket.dtype, tensors))?;
        [first, steps].into_iter().try_for_each(|list| check_pairs(list))?;
        let mut pipeline = Pipeline { warmup: *warmup, first: first.len(), ..Pipeline::default() };
        if let Some(carrier) = carrier {
            let build = |steps| carrier.build(steps, bucket, tensors, memory);
            pipeline.carried = Some([build(first)?, build(steps)?]);
            return Ok(pipeline);
        }
        for list in [first, steps] {
            for at in 0..list.len() {
                let stage = pipeline.stage((list, at), bucket, tensors, memory, group)?;
                pipeline.stages.push(stage);
            }
        }
        let (hosts, (host, _)) = group.seats();
        if bucket.dtype == DType::F32 && hosts.len() > 1 && hosts[host].len() == 1 {
            pipeline.fuse();
        }
        Ok(pipeline)
    }

    /// Lets an all-reduce that stands alone between `Momentum` and `Gradient` do their work as it encodes and decodes: memory
    /// is gone over once and not three times. The bits are the same.
    fn fuse(&mut self) {
        for at in 0..self.stages.len().saturating_sub(2) {
            let [first, second, third] = &mut self.stages[at..at + 3] else { continue };
            if let (Kind::Momentum(momentum), Kind::AllReduce(step, of), Kind::Gradient(begun)) =
                (&first.work, &mut second.work, &third.work)
                && *begun == at
                && step.is_coded()
            {
                step.make_momentum(momentum.betas());
                *of = Some(at);
                (first.work, third.work) = (Kind::Fused, Kind::Fused);
            }
        }
    }

    fn stage(
        &self,
        (list, at): (&[Step], usize),
        bucket: &Bucket,
        tensors: &[Tensor],
        memory: &Storage,
        group: &Group,
    ) -> Result<Stage> {
        // all stages of this list before
        let before = self.stages.len() - at;
        let (work, memories) = match &list[at] {
            Step::AllReduce { op, codec, feedback, seed, .. } => {
                let (stage, memories) = AllReduce::build(*op, *codec, *feedback, *seed, bucket, tensors)?;
                let buffer = Buffer::host(memory.start(), bucket.count, bucket.dtype);
                stage.call(buffer, 0, &Arc::default(), Kept::default()).check(group.ranks(), group.me())?;
                (Kind::AllReduce(stage, None), memories)
            }
            Step::Momentum { betas } => {
                let (stage, memories) = Momentum::build(betas, bucket, tensors);
                (Kind::Momentum(stage), memories)
            }
            Step::HostReduce => (Kind::HostReduce, Vec::new()),
            Step::Difference => {
                let (stage, memories) = Difference::build(bucket, tensors);
                (Kind::Difference(stage), memories)
            }
            Step::Outer { lr, momentum } => {
                let (stage, memories) = Outer::build(*lr, *momentum, bucket, tensors);
                (Kind::Outer(stage, before + begun(list, at)?), memories)
            }
            Step::Gossip { peers, seed } => (Kind::Gossip(Graph::new(*peers, group.hosts(), *seed)?), Vec::new()),
            Step::Replicas { peers, codec, gamma, seed } => {
                let (stage, memories) = Replicas::build(*peers, *codec, *gamma, *seed, bucket, tensors, group)?;
                (Kind::Replicas(stage), memories)
            }
            Step::Gradient => (Kind::Gradient(before + begun(list, at)?), Vec::new()),
            Step::Select { ratio, .. } => {
                let (stage, memories) = Select::build(*ratio, bucket, tensors)?;
                (Kind::Select(stage), memories)
            }
            Step::LowRank { rank, rate, seed, .. } => {
                let (stage, memories) = LowRank::build(*rank, *rate, *seed, bucket, tensors)?;
                (Kind::LowRank(stage), memories)
            }
            Step::Weigh => (Kind::Weigh(Weigh::build(bucket, tensors)), Vec::new()),
            Step::Apply { function, states } => {
                let arena = group.mesh().arena();
                let allocate = |bytes: usize| arena.allocate(bytes.max(1));
                let memories = Apply::memories(states, bucket, tensors, allocate)?;
                (Kind::Apply(Apply::new(function, bucket, tensors, memory)), memories)
            }
        };
        Ok(Stage { work, memories: Mutex::new(memories) })
    }

    /// Runs all steps on a bucket, on this thread. On a device they are enqueued, and the event is their end.
    pub fn run(&self, round: &Round<'_>) -> Result<Option<Arc<dyn Event>>> {
        if let Some([first, rest]) = &self.carried {
            let Round { buffer, step, after, tally, ran, .. } = *round;
            let what = round.terms.purpose.map_or_else(String::new, |purpose| purpose());
            let carried = if step < self.warmup { first } else { rest };
            return carried.enqueue(&Trip { buffer, step, what: &what, after, tally, ran }).map(Some);
        }
        let stages = if round.step < self.warmup { 0..self.first } else { self.first..self.stages.len() };
        self.stages[stages].iter().try_for_each(|stage| self.run_stage(stage, round))?;
        Ok(None)
    }

    fn run_stage(&self, stage: &Stage, round: &Round<'_>) -> Result<()> {
        // held until the step is over, which uses the memory behind it
        let mut memories = stage.memories();
        match &stage.work {
            Kind::AllReduce(step, of) => {
                let mut momentum = of.map(|number| self.stages[number].memories());
                step.run(round, &mut memories, momentum.as_mut().map(|kept| &mut kept[0]))
            }
            Kind::Select(step) => step.run(round, &mut memories[0]),
            Kind::LowRank(step) => step.run(round, &mut memories),
            Kind::Weigh(step) => step.run(round),
            Kind::Apply(step) => step.run(round, &memories),
            Kind::HostReduce => round.call(Call::HostReduce { tensor: round.tensor(), op: Op::Mean }).map(drop),
            Kind::Gossip(graph) => {
                let call = Call::Gossip { tensor: round.tensor(), out: None, graph: *graph, step: round.step };
                round.call(call).map(drop)
            }
            Kind::Replicas(step) => step.run(round, &mut memories),
            Kind::Difference(step) => {
                step.run(round, &mut memories[0]);
                Ok(())
            }
            Kind::Outer(step, begun) => {
                step.run(round, &mut self.stages[*begun].memories()[0], &mut memories);
                Ok(())
            }
            Kind::Momentum(step) => {
                step.forward(round, &mut memories[0]);
                Ok(())
            }
            Kind::Fused => Ok(()),
            Kind::Gradient(begun) => {
                if let Stage { work: Kind::Momentum(step), .. } = &self.stages[*begun] {
                    step.back(round, &mut self.stages[*begun].memories()[0]);
                }
                Ok(())
            }
        }
    }

    /// Takes the weights in a bucket, which all ranks have alike, as where anchors and copies begin. On a device that is
    /// enqueued after some events, and the event is its end.
    pub fn begin(&self, buffer: Buffer, after: &[Arc<dyn Event>]) -> Result<Option<Arc<dyn Event>>> {
        if let Some([first, rest]) = &self.carried {
            first.begin(buffer, after)?;
            return rest.begin(buffer, after).map(Some);
        }
        for stage in &self.stages {
            if matches!(stage.work, Kind::Difference(_) | Kind::Replicas(_)) {
                stage.memories().iter_mut().for_each(|memory| memory.take(buffer));
            }
        }
        Ok(None)
    }

    /// What steps keep of a slot.
    pub fn saved(&self, slot: usize) -> Result<Vec<Saved>> {
        let mut saved = Vec::new();
        for (carried, at, (number, name, keeper)) in self.kept() {
            let values = carried.read(at, carried.place(at, slot))?;
            saved.push(Saved { name: format!("{number}.{name}"), keeper, values });
        }
        for (number, stage) in self.stages.iter().enumerate() {
            saved.extend(stage.memories().iter_mut().map(|memory| Saved {
                name: format!("{number}.{}", memory.name),
                keeper: memory.keeper,
                values: memory.slot(slot).to_vec(),
            }));
        }
        Ok(saved)
    }

    /// What carried steps keep: by whom it is read, its place there, and (step, name, keeper).
    fn kept(&self) -> impl Iterator<Item = (&dyn Carried, usize, (usize, String, Keeper))> {
        let lists = self.carried.iter().flatten().zip([0, self.first]);
        lists.flat_map(|(carried, before)| {
            let kept = carried.kept().into_iter().enumerate();
            kept.map(move |(at, (step, name, keeper))| (&**carried, at, (before + step, name, keeper)))
        })
    }

    /// Takes over what [`Pipeline::saved`] gave. `wrong` is told how many numbers there should have been, if not so many.
    pub fn restore(&self, slot: usize, name: &str, values: &[f32], wrong: &dyn Fn(usize) -> Error) -> Result<()> {
        let is_it = |kept: &(usize, String, Keeper)| format!("{}.{}", kept.0, kept.1) == name;
        for (carried, at, _) in self.kept().filter(|(.., kept)| is_it(kept)) {
            let place = carried.place(at, slot);
            if place.len() != values.len() {
                return Err(wrong(place.len()));
            }
            carried.write(at, place.start, values)?;
        }
        for (number, stage) in self.stages.iter().enumerate() {
            for memory in stage.memories().iter_mut().filter(|memory| format!("{number}.{}", memory.name) == name) {
                let room = memory.slot(slot);
                if room.len() != values.len() {
                    return Err(wrong(room.len()));
                }
                room.copy_from_slice(values);
            }
        }
        Ok(())
    }
}

impl Stage {
    fn memories(&self) -> MutexGuard<'_, Vec<Memory>> {
        self.memories.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether a step makes sense, wherever the bucket is.
fn check(step: &Step, dtype: DType, tensors: &[Tensor]) -> Result<()> {
    match step {
        // these take all, or say themselves what they do not take
        Step::AllReduce { .. } | Step::HostReduce | Step::Gossip { .. } | Step::Apply { .. } => return Ok(()),
        Step::Momentum { betas } => Momentum::check(betas, tensors)?,
        Step::Outer { lr, momentum } => Outer::check(*lr, *momentum)?,
        _ => {}
    }
    match dtype {
        DType::F32 | DType::F16 | DType::BF16 => Ok(()),
        _ => Err(Error::invalid(format!(
            "the step {} does not take {dtype}; try: float32, float16 or bfloat16 parameters, or another algorithm",
            step.name()
        ))),
    }
}

/// Lets `work` at some elements of a bucket as f32, whatever their type.
pub(super) fn with_floats<T>(buffer: Buffer, range: Range<usize>, work: impl FnOnce(&mut [f32]) -> T) -> T {
    let (start, count) = (buffer.at(range.start), range.len());
    if buffer.dtype == DType::F32 {
        // SAFETY: the bucket is aligned, and nobody but its pipeline uses it while that runs.
        return work(unsafe { std::slice::from_raw_parts_mut(start.cast::<f32>(), count) });
    }
    let mut values = widened(buffer, range);
    let result = work(&mut values);
    // SAFETY: as above.
    unsafe { reduce::seal(values.as_mut_ptr().cast(), &[start], count, buffer.dtype, None) };
    result
}

/// Lets `work` read some elements of a bucket as f32, whatever their type.
pub(super) fn read_floats<T>(buffer: Buffer, range: Range<usize>, work: impl FnOnce(&[f32]) -> T) -> T {
    if buffer.dtype == DType::F32 {
        return with_floats(buffer, range, |values| work(values));
    }
    work(&widened(buffer, range))
}

/// Some elements of a bucket of short floats.
fn widened(buffer: Buffer, range: Range<usize>) -> Vec<f32> {
    let mut values = vec![0f32; range.len()];
    // SAFETY: nobody but its pipeline uses the bucket while that runs; the accumulators of short floats are f32, and there
    // are as many.
    unsafe { reduce::widen(buffer.at(range.start), values.as_mut_ptr().cast(), range.len(), buffer.dtype) };
    values
}
