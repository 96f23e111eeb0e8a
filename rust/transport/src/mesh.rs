//! A rank's links to all others, chosen and built once.
//!
//! 1. Every rank leaves its card in the store and reads all others.
//! 2. Of two ranks, the higher one dials. Ranks under one host label try shared memory first; the outcome goes through the
//!    store, so that all ranks agree on the teams: either all ranks of a host can reach each other's memory, or they count
//!    as single ranks and use TCP, with the reason.
//! 3. All other pairs get TCP streams.
//! 4. Everyone tells everyone that it is ready; nobody returns before all have. The store is not needed after that.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::address::{self, Selector};
use crate::error::{Error, Kind, Result};
use crate::frame::{FrameKind, Header};
use crate::handshake::Purpose;
use crate::host::Identity;
use crate::inbox::Switchboard;
use crate::late::Late;
use crate::link::{Hub, Link, LinkKind};
use crate::linking::{
    Attached, Lobby, attach_to_lower, check_cards, dial_lower, run, run_or_hear, streams_for, teams, watch_process,
};
use crate::outbox::{Outgoing, Payload};
use crate::pool::Pool;
use crate::rendezvous::{self, Card, Store};
use crate::roster::Roster;
use crate::shm::arena::{Arena, Mapping, Piece};
use crate::shm::attach::{self, Neighbour};
use crate::shm::team;
use crate::socket::Socket;
use crate::tcp::{self, Door};
use crate::trace::Recorder;
use crate::watchdog::Watch;
use crate::{Interrupt, fork};

/// How to link.
#[derive(Clone, Debug)]
pub struct Options {
    /// For everyone to come and link.
    pub connect_timeout: Duration,
    /// After how long a silent host counts as gone.
    pub timeout: Duration,
    /// The job's secret; rank 0 makes one up and spreads it through the store otherwise.
    pub token: Option<Vec<u8>>,
    /// Which interfaces to use, see [`Selector`].
    pub interface: String,
    /// An address that all ranks can reach, to choose an interface by.
    pub reach: Option<String>,
    /// The label of this rank's host instead of its own.
    pub host: Option<String>,
    /// Whether to try shared memory.
    pub shared_memory: bool,
    /// The size of this rank's arena; pages that are not used cost nothing.
    pub shared_bytes: u64,
    /// TCP streams for each pair; chosen by the round trip otherwise.
    pub streams: Option<u8>,
    /// The version of the package.
    pub version: String,
}

/// How long the last frames may take to be written when a rank leaves.
const FLUSH: Duration = Duration::from_secs(5);

/// The group of stories that end the linking. Those of the world's group do not: others may be in its first calls already.
const LINKING: u64 = u64::MAX;

/// Characters of an exception that the other ranks quote.
const LONGEST_CAUSE: usize = 4096;

/// A rank's links to all others.
pub struct Mesh {
    me: u32,
    runtime: Handle,
    hub: Arc<Hub>,
    links: RwLock<Vec<Link>>,
    teams: Vec<Vec<u32>>,
    neighbours: HashMap<u32, Neighbour>,
    arena: Arc<Arena>,
    control: Arc<Piece>,
    tasks: Vec<JoinHandle<()>>,
}

impl Mesh {
    /// Links to all ranks of the world.
    pub fn connect(
        runtime: &Handle,
        store: Option<&dyn Store>,
        me: u32,
        world: u32,
        options: &Options,
        interrupt: Option<&Interrupt<'_>>,
    ) -> Result<Self> {
        let began = Instant::now();
        let deadline = began + options.connect_timeout;
        let _inside = runtime.enter();
        let (arena, private) = Arena::as_large_as_can_be(options.shared_bytes)?;
        let control = Arc::new(arena.allocate(team::CONTROL)?);
        team::prepare(&control);
        let identity = Identity::here(options.host.as_deref());
        let mut card = Card {
            version: options.version.clone(),
            rank: me,
            pid: std::process::id(),
            host: identity.host,
            machine: identity.machine,
            addresses: Vec::new(),
            port: 0,
            socket: Err("switched off (OFFBEAT_SHM=0)".to_owned()),
        };
        let Some(store) = store.filter(|_| world > 1) else {
            return Ok(Mesh {
                me,
                runtime: runtime.clone(),
                hub: Arc::new(Hub::new(Roster::new(me, vec![card]), 1, 0)),
                links: RwLock::new(vec![Link::to_myself()]),
                teams: vec![vec![me]],
                neighbours: HashMap::new(),
                arena,
                control,
                tasks: Vec::new(),
            });
        };

        let token = rendezvous::agree_on_token(store, me, options.token.as_deref(), deadline)?;
        let interfaces = address::interfaces()?;
        let route = options.reach.as_deref().and_then(address::route_to);
        card.addresses = address::offered(&interfaces, &Selector::parse(&options.interface)?, route)?;
        let share = options.shared_memory && private.is_none();
        let memory = share.then(|| (Arc::clone(&arena), control.offset()));
        let door = Door { token, me, world, patience: options.timeout, memory };
        let (arrived, arrivals) = mpsc::unbounded_channel();
        let (port, listener) = tcp::listen()?;
        card.port = port;
        let mut tasks = vec![runtime.spawn(tcp::accept_tcp(listener, door.clone(), arrived.clone()))];
        if let Some(why) = private {
            card.socket = Err(why);
        } else if share {
            match attach::listen() {
                Ok((name, listener)) => {
                    card.socket = Ok(name);
                    tasks.push(runtime.spawn(tcp::accept_unix(listener, door.clone(), arrived)));
                }
                Err(error) => card.socket = Err(error.message),
            }
        }

        let ranks: Vec<u32> = (0..world).collect();
        let cards = rendezvous::exchange(store, "card", me, &card.to_bytes(), &ranks, deadline, &|_| Ok(()))?;
        let cards = cards.iter().map(|bytes| Card::from_bytes(bytes)).collect::<Result<Vec<_>>>()?;
        check_cards(&cards)?;
        let late = Late::new(store, &cards, me, &interfaces);

        let mut lobby = Lobby { arrivals, attached: HashMap::new(), streams: HashMap::new() };
        let (attached, failures) = run(runtime, interrupt, attach_to_lower(&door, &cards, deadline))?;
        let report = postcard::to_stdvec(&failures).unwrap_or_default();
        let check = |rank| runtime.block_on(late.check(&[rank]));
        let reports = rendezvous::exchange(store, "attached", me, &report, &ranks, deadline, &check)?;
        let mut reasons: HashMap<(u32, u32), String> = HashMap::new();
        for (rank, report) in ranks.iter().zip(&reports) {
            let failed: Vec<(u32, String)> = postcard::from_bytes(report).unwrap_or_default();
            reasons.extend(failed.into_iter().map(|(lower, why)| ((lower, *rank), why)));
        }
        let hosts: Vec<&str> = cards.iter().map(|c| c.host.as_str()).collect();
        let teams = teams(&hosts, |lower, higher| reasons.contains_key(&(lower, higher)));

        let my_team = teams.iter().find(|team| team.contains(&me)).cloned().unwrap_or_default();
        let tcp_peers: Vec<u32> = ranks.iter().copied().filter(|r| !my_team.contains(r)).collect();
        let choose = {
            let given = options.streams;
            move |round_trip| Purpose::Stream { number: 0, of: given.unwrap_or_else(|| streams_for(round_trip)) }
        };
        let dial = async {
            let dialed = dial_lower(&door, &cards, &interfaces, &tcp_peers, choose, deadline).await?;
            let attached_to = my_team.iter().copied().filter(|r| *r > me);
            let streams_from = tcp_peers.iter().copied().filter(|r| *r > me);
            lobby.wait(&cards, (attached_to.collect(), streams_from.collect()), &late, deadline, began).await?;
            Ok(dialed)
        };
        let dialed = run_or_hear(runtime, &late, interrupt, dial)?;

        let hub = Arc::new(Hub::new(Roster::new(me, cards), my_team.len(), teams.len() - 1));
        let mut mesh = Mesh {
            me,
            runtime: runtime.clone(),
            hub,
            links: RwLock::new(Vec::new()),
            teams,
            neighbours: HashMap::new(),
            arena,
            control,
            tasks,
        };
        mesh.start_links(attached, dialed, lobby, &reasons, my_team);
        for rank in ranks.iter().filter(|r| **r != me) {
            mesh.tell(*rank, Header::bare(FrameKind::Ready), &[]);
        }
        let what = || "linking to all ranks".to_owned();
        let warned = Cell::new(false);
        let watch = Watch {
            roster: &mesh.hub.roster,
            group: LINKING,
            members: &ranks,
            began,
            limit: options.connect_timeout,
            warned: &warned,
            interrupt,
            what: &what,
        };
        let linked = loop {
            let late = mesh.hub.roster.still_linking();
            if late.is_empty() {
                // one may have gone before it was ready
                break mesh.hub.roster.verdict(LINKING, &ranks, Vec::new);
            }
            if let Err(error) = watch.check(|| late.clone()) {
                break Err(error);
            }
        };
        if let Err(error) = linked {
            // this rank ends too, and must not be taken for the one that began it
            let story = mesh.poison(LINKING, &ranks, &error);
            mesh.poison(0, &ranks, &story);
            mesh.leave("it could not link to all ranks");
            return Err(story);
        }
        Ok(mesh)
    }

    fn start_links(
        &mut self,
        attached: Attached,
        mut dialed: HashMap<u32, Vec<Socket>>,
        mut lobby: Lobby,
        reasons: &HashMap<(u32, u32), String>,
        my_team: Vec<u32>,
    ) {
        let mut attached: HashMap<_, _> = attached.into_iter().chain(lobby.attached.drain()).collect();
        let mut links = Vec::new();
        for rank in 0..self.world() {
            let roster = &self.hub.roster;
            let link = if rank == self.me {
                Link::to_myself()
            } else if my_team.contains(&rank)
                && let Some((socket, neighbour)) = attached.remove(&rank)
            {
                self.tasks.extend(watch_process(&self.runtime, &self.hub, rank, &socket));
                self.neighbours.insert(rank, neighbour);
                let why = format!("same host {}, attaching proven", roster.card(rank).host);
                Link::start(&self.runtime, &self.hub, rank, LinkKind::SharedMemory, why, vec![socket])
            } else {
                let sockets = dialed.remove(&rank).or_else(|| lobby.take_streams(rank)).unwrap_or_default();
                let pair = (self.me.min(rank), self.me.max(rank));
                let why = if roster.card(rank).host != roster.card(self.me).host {
                    "another host".to_owned()
                } else if let Some(reason) = reasons.get(&pair) {
                    format!("same host, but no shared memory: {reason}")
                } else {
                    "same host, but other ranks there have no shared memory".to_owned()
                };
                Link::start(&self.runtime, &self.hub, rank, LinkKind::Tcp, why, sockets)
            };
            links.push(link);
        }
        self.links = RwLock::new(links);
    }

    /// This rank.
    pub fn me(&self) -> u32 {
        self.me
    }

    /// How many ranks there are.
    pub fn world(&self) -> u32 {
        self.teams.iter().map(|team| team.len() as u32).sum()
    }

    /// The ranks that share memory, in ascending order, sorted by their first rank. A rank on its own is a team of one.
    pub fn teams(&self) -> &[Vec<u32>] {
        &self.teams
    }

    /// Who is still there.
    pub fn roster(&self) -> &Roster {
        &self.hub.roster
    }

    /// Where frames arrive.
    pub fn board(&self) -> &Switchboard {
        &self.hub.board
    }

    /// Buffers for reuse.
    pub fn pool(&self) -> &Pool {
        &self.hub.pool
    }

    /// What happened on the links, and whatever else is recorded in it.
    pub fn trace(&self) -> &Arc<Recorder> {
        &self.hub.trace
    }

    /// This rank's shared memory.
    pub fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    /// The memory of a rank of my team, and the offset of its control block for the world.
    pub fn memory_of(&self, rank: u32) -> Option<(Arc<Mapping>, usize)> {
        if rank == self.me {
            return Some((Arc::clone(self.arena.mapping()), self.control.offset()));
        }
        self.neighbours.get(&rank).map(|n| (Arc::clone(&n.memory), n.control))
    }

    /// Calls `look` with the link to each rank.
    pub fn each_link(&self, mut look: impl FnMut(u32, &Link)) {
        let links = self.links.read().unwrap_or_else(PoisonError::into_inner);
        links.iter().enumerate().for_each(|(rank, link)| look(rank as u32, link));
    }

    /// Sends a frame; never blocks.
    pub fn send(&self, to: u32, frame: Outgoing) {
        let links = self.links.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(link) = links.get(to as usize) {
            link.send(frame);
        }
    }

    /// Sends a short frame with a copy of `bytes`.
    pub fn tell(&self, to: u32, header: Header, bytes: &[u8]) {
        let payload = if bytes.is_empty() {
            Payload::Empty
        } else {
            let mut block = self.hub.pool.take(bytes.len());
            block.extend_from_slice(bytes);
            Payload::Owned(block)
        };
        self.send(to, Outgoing { header, payload });
    }

    /// A group has failed here: tells its members, and gives the story that stands.
    pub fn poison(&self, group: u64, members: &[u32], error: &Error) -> Error {
        let story = self.hub.roster.poison(group, error);
        let header = Header { group, ..Header::bare(FrameKind::Poison) };
        // that this rank shuts down is told by its goodbye, and is no story of the others
        for rank in members.iter().filter(|r| **r != self.me && story.kind != Kind::NotInitialized) {
            self.tell(*rank, header, &story.to_bytes());
        }
        story
    }

    /// Tells everyone why this rank is about to die.
    pub fn fail(&self, cause: &str) {
        // the end of a long text is where the exception is
        let cause = match cause.char_indices().rev().nth(LONGEST_CAUSE) {
            Some((at, _)) => &cause[at..],
            None => cause,
        };
        let card = self.hub.roster.card(self.me);
        let message = format!("{} raised {cause}; try: fix it there, the other ranks only report it", card.name());
        let story = Error { cause: cause.to_owned(), ..Error::of_rank(Kind::PeerFailed, self.me, &card.host, message) };
        for rank in (0..self.world()).filter(|r| *r != self.me) {
            self.tell(rank, Header::bare(FrameKind::Failed), &story.to_bytes());
        }
    }

    /// Says goodbye and waits, for a short while, until everything is written.
    pub fn leave(&self, why: &str) {
        for rank in (0..self.world()).filter(|r| *r != self.me) {
            self.tell(rank, Header::bare(FrameKind::Goodbye), why.as_bytes());
        }
        self.hub.roster.close();
        let mut links = self.links.write().unwrap_or_else(PoisonError::into_inner);
        let writers: Vec<_> = links.iter_mut().flat_map(Link::close).collect();
        drop(links);
        let flush = async {
            for writer in writers {
                let _ = writer.await;
            }
        };
        if self.runtime.block_on(async { tokio::time::timeout(FLUSH, flush).await }).is_err() {
            log::warn!("rank {} left before everything it sent was taken by its peers", self.me);
        }
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

impl Drop for Mesh {
    fn drop(&mut self) {
        if !fork::in_child() {
            self.hub.roster.close();
            self.tasks.iter().for_each(JoinHandle::abort);
        }
    }
}
