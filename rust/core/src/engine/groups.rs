//! How groups are made and closed: everyone tells everyone which ranks it means, and where its neighbours find it.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError};

use offbeat_transport::Interrupt;
use offbeat_transport::mesh::Mesh;
use offbeat_transport::shm::arena::Piece;
use offbeat_transport::shm::step::Patience;
use offbeat_transport::shm::team::{self, Team};

use super::Engine;
use crate::buffer::{Buffer, Shaped};
use crate::call::Call;
use crate::config::Tuning;
use crate::dtype::DType;
use crate::group::{Group, Members, Terms, Work};
use crate::topology::Layout;
use crate::{Error, Kind, Result};

/// Between hosts so many buckets are under way at once. Two run dry together now and then, when both wait for the last pieces
/// of others; a fourth takes more of the processors than it gives to the wire.
const LANES: usize = 3;

impl Engine {
    /// Makes a group. Every rank of the world calls this, members or not, with the same ranks.
    pub fn group(&self, ranks: &[u32], interrupt: Option<&Interrupt<'_>>) -> Result<Group> {
        self.make_group(ranks, false, self.config.tuning, &Terms { interrupt, ..Terms::default() })
    }

    /// The lanes for the training of one model: groups of all ranks, [`LANES`] where buckets cross between hosts. Until the
    /// scheduler has seen the first round, calls have the time of a first step: ranks may still load and compile. In flat
    /// ones every rank counts as a host of its own.
    pub fn lanes(&self, flat: bool, interrupt: Option<&Interrupt<'_>>) -> Result<Vec<Group>> {
        let several_hosts = self.world.hosts() > 1;
        (0..if several_hosts { LANES } else { 1 }).map(|_| self.lane(flat, interrupt)).collect()
    }

    /// One of these: a device keeps the wire busy by itself.
    pub fn lane(&self, flat: bool, interrupt: Option<&Interrupt<'_>>) -> Result<Group> {
        let ranks: Vec<u32> = (0..self.world_size()).collect();
        let limit = self.config.first_step_timeout;
        let terms = Terms { interrupt, limit: Some(limit), purpose: None };
        let group = self.make_group(&ranks, flat, self.config.tuning.of_lanes(), &terms)?;
        group.set_limit(limit);
        Ok(group)
    }

    fn make_group(&self, ranks: &[u32], flat: bool, tuning: Tuning, terms: &Terms<'_>) -> Result<Group> {
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
        // on one host both give the same sums, and shared memory is faster
        let layout = match Layout::new(&ranks, self.mesh.teams()) {
            layout if flat && layout.hosts.len() > 1 => Layout::flat(&ranks),
            layout => layout,
        };
        // groups are numbered in the order of the calls that make them, also when several threads make some
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        let me = ranks.iter().position(|rank| *rank == self.rank());
        let control = match me.map(|me| layout.hosts[layout.seat(me).0].len()) {
            Some(2..) => Some(self.mesh.arena().allocate(team::CONTROL)?),
            _ => None,
        };
        control.iter().for_each(team::prepare);
        // everyone tells everyone where its control block is, if it has neighbours, and which ranks it means
        let mut card: Vec<u64> = vec![control.as_ref().map_or(0, Piece::offset) as u64];
        card.extend(ranks.iter().map(|rank| u64::from(*rank)));
        let buffer = Buffer::host(card.as_mut_ptr().cast(), card.len(), DType::U64);
        let tensor = Shaped { buffer, shape: vec![card.len() as u64] };
        let cards = self.world.run_on(Work { call: Call::AllGather { tensor }, keep: None }, terms)?;
        let mut controls = BTreeMap::new();
        for (rank, theirs) in cards.iter().enumerate() {
            let words: Vec<u64> =
                theirs.bytes().chunks_exact(8).filter_map(|w| w.try_into().ok().map(u64::from_le_bytes)).collect();
            match words.split_first() {
                Some((place, members)) if *members == card[1..] => controls.insert(rank as u32, *place as usize),
                _ => return Err(self.different_groups(rank as u32, &ranks, words.get(1..).unwrap_or_default())),
            };
        }
        let id = *next;
        *next += 1;
        let team = make_team(&self.mesh, &layout, &ranks, &controls)?;
        let members = Members { ranks, layout, team, control };
        let group = Group::new(Arc::clone(&self.mesh), id, members, self.config.timeout, tuning);
        self.groups.lock().unwrap_or_else(PoisonError::into_inner).insert(id, group.clone());
        Ok(group)
    }

    /// Closes a group: its last call, which every member makes. It ends the group's thread, and gives back its shared
    /// memory once no neighbour can touch that any more; a group that failed keeps it until the shutdown. Other ranks
    /// just forget the group. A second call does nothing.
    pub fn close_group(&self, group: &Group, interrupt: Option<&Interrupt<'_>>) -> Result<()> {
        if group.is_closed() {
            return Ok(());
        }
        if group.ranks().contains(&self.rank()) {
            group.run(Work { call: Call::Close, keep: None }, interrupt)?;
        }
        self.groups.lock().unwrap_or_else(PoisonError::into_inner).remove(&group.id());
        Ok(())
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
}

/// The members of a group on this host, if there are several.
pub(super) fn make_team(
    mesh: &Mesh,
    layout: &Layout,
    ranks: &[u32],
    controls: &BTreeMap<u32, usize>,
) -> Result<Option<Team>> {
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
