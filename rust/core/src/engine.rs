//! One rank's engine: the runtime, the links, the groups and the shared memory. Owns all threads; dropping it ends them.

use std::collections::BTreeMap;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use offbeat_transport::link::Link;
use offbeat_transport::mesh::{Mesh, Options};
use offbeat_transport::rendezvous::Store;
use offbeat_transport::roster::Watch;
use offbeat_transport::shm::arena::Piece;
use offbeat_transport::shm::step::Patience;
use offbeat_transport::shm::team::{self, Team};
use offbeat_transport::{Interrupt, fork};
use tokio::runtime::Runtime;

use crate::buffer::{Buffer, Shaped};
use crate::call::Call;
use crate::config::Config;
use crate::dtype::DType;
use crate::group::{Group, Work};
use crate::message;
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
    /// All groups made so far, to close them; the key is their number.
    groups: Mutex<BTreeMap<u64, Group>>,
    making: Mutex<()>,
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
        let team = make_team(&mesh, &layout, &ranks, &controls)?;
        let world = Group::new(Arc::clone(&mesh), 0, ranks, layout, team, None, config.timeout, config.tuning);
        let groups = Mutex::new(BTreeMap::from([(0, world.clone())]));
        Ok(Engine {
            runtime: ManuallyDrop::new(runtime),
            mesh,
            config,
            world,
            groups,
            making: Mutex::default(),
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

    /// The group of all ranks.
    pub fn world(&self) -> &Group {
        &self.world
    }

    /// Makes a group. Every rank of the world calls this, members or not, with the same ranks.
    pub fn group(&self, ranks: &[u32], interrupt: Option<&Interrupt<'_>>) -> Result<Group> {
        let mut ranks = ranks.to_vec();
        ranks.sort_unstable();
        if ranks.is_empty()
            || ranks.windows(2).any(|pair| pair[0] == pair[1])
            || ranks.iter().any(|r| *r >= self.world_size())
        {
            return Err(Error::invalid(format!(
                "a group of {ranks:?} in a world of {}; try: different ranks from 0 to {}",
                self.world_size(),
                self.world_size() - 1
            )));
        }
        let layout = Layout::new(&ranks, self.mesh.teams());
        // groups are numbered in the order of the calls that make them, also when several threads make some
        let _one_at_a_time = self.making.lock().unwrap_or_else(PoisonError::into_inner);
        let control = Arc::new(self.mesh.arena().allocate(team::CONTROL)?);
        team::prepare(&control);
        // everyone tells everyone where its control block is, and which ranks it means
        let mut card: Vec<u64> = vec![control.offset() as u64];
        card.extend(ranks.iter().map(|rank| u64::from(*rank)));
        let buffer = Buffer::host(card.as_mut_ptr().cast(), card.len(), DType::U64);
        let tensor = Shaped { buffer, shape: vec![card.len() as u64] };
        let cards = self.world.run(Work { call: Call::AllGather { tensor }, keep: None }, interrupt)?;
        let mut controls = BTreeMap::new();
        for (rank, theirs) in cards.iter().enumerate() {
            let words: Vec<u64> =
                theirs.bytes().chunks_exact(8).filter_map(|w| w.try_into().ok().map(u64::from_le_bytes)).collect();
            match words.split_first() {
                Some((place, members)) if *members == card[1..] => controls.insert(rank as u32, *place as usize),
                _ => return Err(self.different_groups(rank as u32, &ranks, words.get(1..).unwrap_or_default())),
            };
        }
        let member = ranks.contains(&self.rank());
        let team = if member { make_team(&self.mesh, &layout, &ranks, &controls)? } else { None };
        let mut groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        let id = groups.keys().next_back().map_or(1, |last| last + 1);
        let (mesh, timeout, tuning) = (Arc::clone(&self.mesh), self.config.timeout, self.config.tuning);
        let group = Group::new(mesh, id, ranks, layout, team, Some(control), timeout, tuning);
        groups.insert(id, group.clone());
        Ok(group)
    }

    fn different_groups(&self, rank: u32, mine: &[u32], theirs: &[u64]) -> Error {
        let roster = self.mesh.roster();
        Error::of_rank(
            Kind::Mismatch,
            rank,
            &roster.card(rank).host,
            format!(
                "{} makes a group of {mine:?} and {} one of {theirs:?}; try: make the same groups in the same order on \
                 every rank of the world, members or not",
                roster.card(self.rank()).name(),
                roster.card(rank).name()
            ),
        )
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
        act(&Watch {
            roster: self.mesh.roster(),
            group: message::MESSAGES,
            members: &[peer],
            deadline: Instant::now() + self.config.timeout,
            patience: self.config.timeout,
            interrupt,
            what: &|| format!("{what} rank {peer}"),
        })
    }

    /// Tells all ranks why this one is about to die.
    pub fn fail(&self, cause: &str) {
        if !fork::in_child() && !self.down.load(Ordering::Relaxed) {
            self.mesh.fail(cause);
        }
    }

    /// Says goodbye and ends all links. A second call does nothing.
    pub fn shutdown(&self, why: &str) {
        if fork::in_child() || self.down.swap(true, Ordering::SeqCst) {
            return;
        }
        let groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        groups.values().for_each(Group::close);
        groups.values().for_each(|group| group.finish(LAST_CALL));
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

/// The members of a group on this host, if there are several.
fn make_team(mesh: &Mesh, layout: &Layout, ranks: &[u32], controls: &BTreeMap<u32, usize>) -> Result<Option<Team>> {
    let Some(me) = ranks.iter().position(|rank| *rank == mesh.me()) else { return Ok(None) };
    let (host, seat) = layout.seat(me);
    let members = &layout.hosts[host];
    if members.len() == 1 {
        return Ok(None);
    }
    let seats = members
        .iter()
        .map(|member| {
            let rank = ranks[*member];
            let memory = mesh.memory_of(rank).map(|(memory, _)| memory);
            let memory = memory.ok_or_else(|| Error::io("shared memory", format!("rank {rank} is not attached")))?;
            Ok((rank, memory, controls.get(&rank).copied().unwrap_or_default()))
        })
        .collect::<Result<Vec<_>>>()?;
    let machine = mesh.roster().card(mesh.me()).machine;
    let neighbours = (0..mesh.world()).filter(|rank| mesh.roster().card(*rank).machine == machine).count();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    Ok(Some(Team::new(seat, seats, Patience::new(neighbours, cores))?))
}
