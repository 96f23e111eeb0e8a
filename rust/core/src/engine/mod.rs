//! One rank's engine: the runtime, the links, the groups and the shared memory. Owns all threads; dropping it ends them.

mod groups;

use std::cell::Cell;
use std::collections::BTreeMap;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use offbeat_transport::link::Link;
use offbeat_transport::mesh::{Mesh, Options};
use offbeat_transport::rendezvous::Store;
use offbeat_transport::shm::arena::Piece;
use offbeat_transport::trace::Recorder;
use offbeat_transport::watchdog::Watch;
use offbeat_transport::{Interrupt, fork};
use tokio::runtime::Runtime;

use crate::algorithm::{Carrier, Description};
use crate::background::{self, Agreed, Background, Council, Ending, Launch};
use crate::bucket::{Sizes, Tensor};
use crate::buffer::Shaped;
use crate::config::Config;
use crate::event::guarded;
use crate::group::{Group, Members};
use crate::message;
use crate::scheduler::{Limits, Scheduler};
use crate::topology::Layout;
use crate::{Error, Kind, Result};

/// How long a shutdown waits for a call that is under way.
const LAST_CALL: Duration = Duration::from_secs(1);

/// One rank's engine.
pub struct Engine {
    runtime: ManuallyDrop<Runtime>,
    mesh: Arc<Mesh>,
    config: Config,
    world: Group,
    /// All groups that are not closed, to end them with the engine; the key is their number.
    groups: Mutex<BTreeMap<u64, Group>>,
    /// The background threads of models, to end them before leaving.
    backgrounds: Mutex<Vec<Ending>>,
    /// Where those that are there agree when groups have failed; held while they do.
    council: Mutex<Council>,
    /// The number of the next group, held while one is made.
    next: Mutex<u64>,
    down: AtomicBool,
}

impl Engine {
    /// Links this rank to all others. `store` may be none in a world of one.
    pub fn connect(
        config: Config,
        store: Option<&dyn Store>,
        rank: u32,
        world: u32,
        interrupt: Option<&Interrupt<'_>>,
    ) -> Result<Self> {
        if world == 0 || rank >= world {
            return Err(Error::invalid(format!("rank {rank} in a world of {world}; try: 0 ≤ rank < world size")));
        }
        if world > 1 && store.is_none() {
            return Err(Error::invalid("a world of several ranks needs a store; try: start it with torchrun"));
        }
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads((cores / 4).clamp(1, 4))
            .thread_name("offbeat-io")
            .enable_all()
            .build()
            .map_err(|e| Error::io("cannot start the I/O threads", e))?;
        // ranks that cut data differently would misread each other: they must not link
        let options =
            Options { version: format!("{} {:?}", config.options.version, config.tuning), ..config.options.clone() };
        let mesh = Arc::new(Mesh::connect(runtime.handle(), store, rank, world, &options, interrupt)?);
        let ranks: Vec<u32> = (0..world).collect();
        let layout = Layout::new(&ranks, mesh.teams());
        let controls: BTreeMap<u32, usize> =
            ranks.iter().filter_map(|rank| mesh.memory_of(*rank).map(|(_, control)| (*rank, control))).collect();
        let team = groups::make_team(&mesh, &layout, &ranks, &controls)?;
        let members = Members { ranks, layout, team, control: None };
        let world = Group::new(Arc::clone(&mesh), 0, members, config.timeout, config.tuning);
        let groups = Mutex::new(BTreeMap::from([(0, world.clone())]));
        let council = Mutex::new(Council::new(&mesh, config.tuning.chunk));
        Ok(Engine {
            runtime: ManuallyDrop::new(runtime),
            mesh,
            config,
            world,
            groups,
            backgrounds: Mutex::default(),
            council,
            next: Mutex::new(1),
            down: AtomicBool::new(false),
        })
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        self.mesh.me()
    }

    /// How many ranks there are.
    pub fn world_size(&self) -> u32 {
        self.mesh.world()
    }

    /// The ranks under the same host label as this one, in ascending order.
    pub fn local_ranks(&self) -> Vec<u32> {
        let host = self.host();
        (0..self.world_size()).filter(|rank| self.mesh.roster().card(*rank).host == host).collect()
    }

    /// The label of this rank's host.
    pub fn host(&self) -> &str {
        &self.mesh.roster().card(self.rank()).host
    }

    /// What a rank says of itself: host and process.
    pub fn who(&self, rank: u32) -> (String, u32) {
        let card = self.mesh.roster().card(rank);
        (card.host.clone(), card.pid)
    }

    /// Calls `look` with the link to each rank.
    pub fn each_link(&self, look: impl FnMut(u32, &Link)) {
        self.mesh.each_link(look);
    }

    /// What happened when; whoever does something that takes time records it here.
    pub fn trace(&self) -> &Arc<Recorder> {
        self.mesh.trace()
    }

    /// The group of all ranks.
    pub fn world(&self) -> &Group {
        &self.world
    }

    /// Starts a scheduler for the tensors of a model on its lanes. `model` is a number for the trace.
    pub fn scheduler(
        &self,
        lanes: Vec<Group>,
        model: u32,
        tensors: Vec<Tensor>,
        description: Description,
        sizes: Sizes,
    ) -> Result<Scheduler> {
        self.scheduler_on(None, lanes, model, tensors, description, sizes)
    }

    /// The same for tensors that are on a device, where `carrier` carries the steps; it wants one lane.
    pub fn scheduler_on(
        &self,
        carrier: Option<Arc<dyn Carrier>>,
        lanes: Vec<Group>,
        model: u32,
        tensors: Vec<Tensor>,
        description: Description,
        sizes: Sizes,
    ) -> Result<Scheduler> {
        let limits = Limits { first: self.config.first_step_timeout, rest: self.config.timeout };
        Scheduler::start(lanes, model, tensors, description, sizes, limits, carrier)
    }

    /// Prepares the exchanges in the background of a model whose tensors have so many elements each, between the members of
    /// a group that is used for nothing else in the background.
    pub fn background(
        &self,
        group: &Group,
        counts: &[usize],
        description: background::Description,
    ) -> Result<Background> {
        self.background_on(None, group, counts, description)
    }

    /// The same for a model on a device, whose snapshots a ferry takes to the host.
    pub fn background_on(
        &self,
        launch: Option<Launch<'_>>,
        group: &Group,
        counts: &[usize],
        description: background::Description,
    ) -> Result<Background> {
        let (members, limits) = ((group.id(), group.ranks()), (self.config.tuning.chunk, self.config.timeout));
        let made = Background::new(&self.mesh, members, counts, description, launch, limits)?;
        self.backgrounds.lock().unwrap_or_else(PoisonError::into_inner).push(made.ending());
        Ok(made)
    }

    fn council(&self) -> MutexGuard<'_, Council> {
        self.council.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Before calls in groups whose outcome all that are left must see alike, whoever is lost meanwhile. Every rank does so.
    pub fn convene(&self) {
        self.council().convene();
    }

    /// These calls have ended well here.
    pub fn settled(&self) {
        self.council().settled();
    }

    /// One of these calls has failed because a rank is gone: hands in some bytes, and gives those of all ranks that are
    /// there, see [`Agreed`]. With `patient` the others may take the time of a first step.
    pub fn gather_living(&self, value: &[u8], patient: bool, interrupt: Option<&Interrupt<'_>>) -> Result<Agreed> {
        let limit = if patient { self.config.first_step_timeout } else { self.config.timeout };
        guarded(|| self.council().gather(value, limit, interrupt))
    }

    /// Memory that the ranks of this host reduce in without a copy; uninitialised.
    pub fn shared(&self, bytes: usize) -> Result<Piece> {
        self.mesh.arena().allocate(bytes)
    }

    /// Sends a tensor to a rank.
    pub fn send(&self, block: &Shaped, to: u32, tag: u64, interrupt: Option<&Interrupt<'_>>) -> Result<()> {
        self.with_peer("send to", to, interrupt, |watch| {
            message::send(&self.mesh, self.config.tuning, to, tag, block, watch)
        })
    }

    /// Receives a tensor from a rank.
    pub fn recv(&self, block: &Shaped, from: u32, tag: u64, interrupt: Option<&Interrupt<'_>>) -> Result<()> {
        self.with_peer("recv from", from, interrupt, |watch| {
            message::recv(&self.mesh, self.config.tuning, from, tag, block, watch)
        })
    }

    fn with_peer(
        &self,
        what: &str,
        peer: u32,
        interrupt: Option<&Interrupt<'_>>,
        act: impl FnOnce(&Watch<'_>) -> Result<()>,
    ) -> Result<()> {
        if fork::in_child() || self.down.load(Ordering::Relaxed) {
            return Err(Error::new(
                Kind::NotInitialized,
                "there is no runtime here; try: offbeat.init() in this process",
            ));
        }
        if peer >= self.world_size() || peer == self.rank() {
            return Err(Error::invalid(format!(
                "{what} rank {peer} on rank {} in a world of {}; try: another rank of the world",
                self.rank(),
                self.world_size()
            )));
        }
        let watch = Watch {
            roster: self.mesh.roster(),
            group: message::MESSAGES,
            members: &[peer],
            began: Instant::now(),
            limit: self.config.timeout,
            warned: &Cell::new(false),
            interrupt,
            what: &|| format!("{what} rank {peer}"),
        };
        guarded(|| act(&watch))
    }

    /// Tells all ranks why this one is about to die.
    pub fn fail(&self, cause: &str) {
        if !fork::in_child() && !self.down.load(Ordering::Relaxed) {
            self.pass_on(&self.groups.lock().unwrap_or_else(PoisonError::into_inner));
            self.mesh.fail(cause);
        }
    }

    /// Whoever goes because another rank failed says so first: the others may hear of this before they hear of that.
    fn pass_on(&self, groups: &BTreeMap<u64, Group>) {
        groups.values().for_each(Group::pass_on);
    }

    /// Says goodbye and ends all links. A second call does nothing.
    pub fn shutdown(&self, why: &str) {
        if fork::in_child() || self.down.swap(true, Ordering::SeqCst) {
            return;
        }
        let backgrounds = std::mem::take(&mut *self.backgrounds.lock().unwrap_or_else(PoisonError::into_inner));
        backgrounds.iter().for_each(|ending| ending.end(LAST_CALL));
        let groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        groups.values().for_each(Group::cancel);
        groups.values().for_each(|group| group.finish(LAST_CALL));
        self.pass_on(&groups);
        self.mesh.leave(why);
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.shutdown("its engine was dropped");
        // SAFETY: the runtime is taken once, here.
        let runtime = unsafe { ManuallyDrop::take(&mut self.runtime) };
        if fork::in_child() {
            // its threads are in the parent; waiting for them would never end
            std::mem::forget(runtime);
        } else {
            runtime.shutdown_background();
        }
    }
}
