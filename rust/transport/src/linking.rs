//! The steps of linking: who dials whom, what came of it, and who has not come. [`crate::mesh`] takes them in order.

use std::cell::Cell;
use std::collections::HashMap;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::runtime::Handle;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::task::{JoinHandle, JoinSet};

use crate::Interrupt;
use crate::address;
use crate::error::{Error, Kind, Result};
use crate::handshake::{KEPT, Purpose};
use crate::late::{LOOK, Late};
use crate::link::Hub;
use crate::rendezvous::Card;
use crate::shm::attach::{self, Neighbour};
use crate::socket::Socket;
use crate::tcp::{self, Arrival, Door};

/// Several streams help where one cannot fill the wire: when the round trip is long, one window or one loss holds it up.
pub(crate) fn streams_for(round_trip: Duration) -> u8 {
    match round_trip.as_millis() {
        ..8 => 1,
        8..20 => 4,
        _ => 8,
    }
}

/// The ranks that share memory: those under one label, if every pair of them attached.
pub(crate) fn teams(hosts: &[&str], failed: impl Fn(u32, u32) -> bool) -> Vec<Vec<u32>> {
    let mut by_host: Vec<(&str, Vec<u32>)> = Vec::new();
    for (rank, host) in hosts.iter().enumerate() {
        match by_host.iter_mut().find(|(label, _)| label == host) {
            Some((_, ranks)) => ranks.push(rank as u32),
            None => by_host.push((host, vec![rank as u32])),
        }
    }
    let mut teams = Vec::new();
    for (_, ranks) in by_host {
        let pairs = ranks.iter().flat_map(|a| ranks.iter().map(move |b| (*a, *b)));
        if pairs.filter(|(a, b)| a < b).any(|(a, b)| failed(a, b)) {
            teams.extend(ranks.into_iter().map(|rank| vec![rank]));
        } else {
            teams.push(ranks);
        }
    }
    teams.sort_by_key(|team| team[0]);
    teams
}

pub(crate) fn check_cards(cards: &[Card]) -> Result<()> {
    let first = &cards[0];
    for (rank, card) in cards.iter().enumerate() {
        if card.version != first.version {
            return Err(Error::of_rank(
                Kind::Mismatch,
                rank as u32,
                &card.host,
                format!(
                    "{} has offbeat {} and {} has {}; try: the same version and the same OFFBEAT_ variables on every host",
                    first.name(),
                    first.version,
                    card.name(),
                    card.version
                ),
            ));
        }
    }
    Ok(())
}

/// Runs a future on this thread, and lets the caller's signal handlers run now and then.
pub(crate) fn run<T>(
    runtime: &Handle,
    interrupt: Option<&Interrupt<'_>>,
    work: impl Future<Output = Result<T>>,
) -> Result<T> {
    runtime.block_on(async {
        tokio::pin!(work);
        loop {
            tokio::select! {
                done = &mut work => return done,
                () = tokio::time::sleep(Duration::from_millis(100)) => interrupt.map_or(Ok(()), |check| check())?,
            }
        }
    })
}

/// As [`run`], while ranks may refuse each other, or end. Who learns of it leaves the story in the store; the others would
/// wait until the deadline.
pub(crate) fn run_or_hear<T>(
    runtime: &Handle,
    late: &Late<'_>,
    interrupt: Option<&Interrupt<'_>>,
    work: impl Future<Output = Result<T>>,
) -> Result<T> {
    let looked = Cell::new(Instant::now());
    let look = || {
        interrupt.map_or(Ok(()), |check| check())?;
        if looked.get().elapsed() < LOOK {
            return Ok(());
        }
        looked.set(Instant::now());
        late.hear()
    };
    run(runtime, Some(&look), work).map_err(|error| late.tell(error))
}

/// How long attaching to one neighbour may take.
const ATTACH_TIME: Duration = Duration::from_secs(5);

pub(crate) type Attached = HashMap<u32, (Socket, Neighbour)>;

/// Tries shared memory with every lower rank under the same label: what worked, and why the rest did not.
pub(crate) async fn attach_to_lower(
    door: &Door,
    cards: &[Card],
    deadline: Instant,
) -> Result<(Attached, Vec<(u32, String)>)> {
    let (mut attached, mut failures) = (HashMap::new(), Vec::new());
    let mine = &cards[door.me as usize];
    for card in cards.iter().filter(|c| c.rank < door.me && c.host == mine.host) {
        let attempt = async {
            let unshared = |rank: u32, why: &str| Error::unsupported(format!("rank {rank} cannot share: {why}"));
            if let Err(why) = &mine.socket {
                return Err(unshared(mine.rank, why));
            }
            let socket = match &card.socket {
                Ok(name) => attach::connect(name)?,
                Err(why) => return Err(unshared(card.rank, why)),
            };
            let Some((arena, control)) = &door.memory else { return Err(unshared(mine.rank, "it has no memory")) };
            tcp::introduce(&socket, door, card.rank, |_| Purpose::Attach).await?;
            socket.write_all(&[KEPT]).await.map_err(|e| Error::io("the neighbour hung up", e))?;
            let neighbour = attach::swap(&socket, arena, *control).await?;
            Ok((socket, neighbour))
        };
        // a neighbour that hangs must leave time for TCP
        let limit = deadline.saturating_duration_since(Instant::now()).min(ATTACH_TIME);
        match tokio::time::timeout(limit, attempt).await {
            Ok(Ok(neighbour)) => {
                attached.insert(card.rank, neighbour);
            }
            Ok(Err(error)) => failures.push((card.rank, error.message)),
            Err(_) => failures.push((card.rank, "no answer on its Unix socket".to_owned())),
        }
    }
    Ok((attached, failures))
}

/// Dials every lower rank that is not in my team; the first stream tells how many more there should be.
pub(crate) async fn dial_lower(
    door: &Door,
    cards: &[Card],
    interfaces: &[address::Interface],
    peers: &[u32],
    choose: impl Fn(Duration) -> Purpose + Copy + Send + Sync + 'static,
    deadline: Instant,
) -> Result<HashMap<u32, Vec<Socket>>> {
    let mut dials = JoinSet::new();
    for card in peers.iter().filter(|r| **r < door.me).map(|r| &cards[*r as usize]) {
        let same_machine = card.machine == cards[door.me as usize].machine;
        let addresses = address::candidates(interfaces, &card.addresses, card.port, same_machine);
        let (door, card) = (door.clone(), card.clone());
        dials.spawn(async move {
            let unreachable = |error: Error| unreachable_peer(&card, door.me, &error);
            let (first, address, purpose) =
                tcp::dial(&door, card.rank, &addresses, choose, deadline).await.map_err(unreachable)?;
            let Purpose::Stream { of, .. } = purpose else { return Ok((card.rank, vec![first])) };
            let mut sockets = vec![first];
            for number in 1..of {
                let purpose = move |_| Purpose::Stream { number, of };
                let (socket, ..) =
                    tcp::dial(&door, card.rank, &[address], purpose, deadline).await.map_err(unreachable)?;
                sockets.push(socket);
            }
            Ok((card.rank, sockets))
        });
    }
    let mut dialed = HashMap::new();
    while let Some(done) = dials.join_next().await {
        let (rank, sockets) = done.map_err(|e| Error::io("a dialing task ended", e))??;
        dialed.insert(rank, sockets);
    }
    Ok(dialed)
}

fn unreachable_peer(card: &Card, me: u32, error: &Error) -> Error {
    let (name, tried) = (card.name(), &error.message);
    let message = match error.kind {
        Kind::Unauthorized => format!(
            "rank {me} and {name} do not accept each other ({tried}); try: give every rank the same OFFBEAT_TOKEN, or none"
        ),
        _ => format!(
            "rank {me} could not reach {name} at {tried}; try: choose an interface that both hosts share with \
             OFFBEAT_SOCKET_IFNAME (as 10.0.0.0/8 or eth0), open the firewall between them, and run `offbeat doctor`; \
             where it was refused the rank may have ended: read its output"
        ),
    };
    Error::of_rank(error.kind, card.rank, &card.host, message)
}

/// Connections from higher ranks, until all have come.
pub(crate) struct Lobby {
    pub(crate) arrivals: UnboundedReceiver<Arrival>,
    pub(crate) attached: Attached,
    pub(crate) streams: HashMap<u32, Vec<Option<Socket>>>,
}

impl Lobby {
    pub(crate) async fn wait(
        &mut self,
        cards: &[Card],
        (attach, stream): (Vec<u32>, Vec<u32>),
        late: &Late<'_>,
        deadline: Instant,
        began: Instant,
    ) -> Result<()> {
        loop {
            let incomplete = |r: &&u32| !self.streams.get(r).is_some_and(|s| s.iter().all(Option::is_some));
            let unattached = attach.iter().filter(|r| !self.attached.contains_key(r));
            let missing: Vec<u32> = stream.iter().filter(incomplete).chain(unattached).copied().collect();
            let Some(first) = missing.first() else { return Ok(()) };
            let limit = deadline.saturating_duration_since(Instant::now());
            match tokio::time::timeout(limit.min(LOOK * 2), self.arrivals.recv()).await {
                Ok(Some(arrival)) => self.seat(arrival),
                Err(_) if !limit.is_zero() => late.check(&missing).await?,
                Ok(None) | Err(_) => {
                    let card = &cards[*first as usize];
                    return Err(Error::of_rank(
                        Kind::Timeout,
                        card.rank,
                        &card.host,
                        format!(
                            "{} did not link within {:.1} s; try: read its output, open the firewall between the hosts, or \
                             raise connect_timeout (OFFBEAT_CONNECT_TIMEOUT)",
                            card.name(),
                            began.elapsed().as_secs_f64()
                        ),
                    ));
                }
            }
        }
    }

    fn seat(&mut self, arrival: Arrival) {
        match (arrival.intro.purpose, arrival.neighbour) {
            (Purpose::Attach, Some(neighbour)) => {
                self.attached.insert(arrival.intro.from, (arrival.socket, neighbour));
            }
            (Purpose::Attach, None) => {}
            (Purpose::Stream { number, of }, _) => {
                let streams = self.streams.entry(arrival.intro.from).or_default();
                streams.resize_with(usize::from(of), || None);
                streams[usize::from(number)] = Some(arrival.socket);
            }
        }
    }

    pub(crate) fn take_streams(&mut self, rank: u32) -> Option<Vec<Socket>> {
        self.streams.remove(&rank).map(|streams| streams.into_iter().flatten().collect())
    }
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn watch_process(_: &Handle, _: &Arc<Hub>, _: u32, _: &Socket) -> Option<JoinHandle<()>> {
    None
}

/// Watches a neighbour's process: its sockets may live on in children that it forked, its process does not.
#[cfg(target_os = "linux")]
pub(crate) fn watch_process(runtime: &Handle, hub: &Arc<Hub>, rank: u32, socket: &Socket) -> Option<JoinHandle<()>> {
    let pid = socket.as_unix()?.peer_cred().ok()?.pid()?;
    let pid = rustix::process::Pid::from_raw(pid)?;
    let descriptor = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::NONBLOCK).ok()?;
    let hub = Arc::clone(hub);
    Some(runtime.spawn(async move {
        // SAFETY: the descriptor is owned by the `AsyncFd`, which keeps it open for as long as it is registered.
        let Ok(process) = (unsafe { tokio::io::unix::AsyncFd::register(descriptor) }) else { return };
        if process.readable().await.is_ok() {
            // a goodbye or the story of a failure may still be on its way
            tokio::time::sleep(Duration::from_millis(200)).await;
            hub.roster.lost(rank, "its process ended without a goodbye (killed or crashed?)");
        }
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_a_team_only_if_all_pairs_attached() {
        let hosts = ["a", "b", "a", "b", "a"];
        assert_eq!(teams(&hosts, |_, _| false), [vec![0, 2, 4], vec![1, 3]]);
        assert_eq!(teams(&hosts, |low, high| (low, high) == (0, 4)), [vec![0], vec![1, 3], vec![2], vec![4]]);
    }

    #[test]
    fn long_round_trips_get_more_streams() {
        assert_eq!(streams_for(Duration::from_micros(80)), 1);
        assert_eq!(streams_for(Duration::from_millis(10)), 4);
        assert_eq!(streams_for(Duration::from_millis(80)), 8);
    }
}
