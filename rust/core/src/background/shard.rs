//! A shard of the server: its values, and what its owner knows of the members.

use std::collections::BTreeMap;

/// Elements that are summed together.
const CHUNK: usize = 1024;

/// What members have said of this rank's shard after a checkpoint was loaded; it is served when all have.
#[derive(Default)]
pub(super) struct Opening {
    pub(super) accounts: BTreeMap<u32, (u64, Vec<f32>)>,
    pub(super) bases: BTreeMap<u32, Vec<f32>>,
}

impl Opening {
    /// Whether all members that are there have said it. Who has not pushed yet has not been answered either, so nothing is
    /// known of what it has.
    pub(super) fn is_complete(&self, living: &[u32], me: u32, coded: bool) -> bool {
        living.iter().all(|rank| match self.accounts.get(rank) {
            Some((clock, _)) => !coded || *clock == 0 || *rank == me || self.bases.contains_key(rank),
            None => false,
        })
    }
}

/// A shard that this rank serves.
pub(super) struct Owned {
    pub(super) values: Vec<f32>,
    /// Everybody's account, in a bounded server. The values are their mean once somebody is answered.
    pub(super) accounts: BTreeMap<u32, Vec<f32>>,
    /// What each member has, where answers are encoded.
    pub(super) replicas: BTreeMap<u32, Vec<f32>>,
    /// How far each member has come.
    pub(super) clocks: BTreeMap<u32, u64>,
    /// Who waits for an answer, and how far it has come.
    pub(super) waiting: Vec<(u32, u64)>,
}

/// Adds changes to an account; the same on both sides, to the last bit.
pub(super) fn add(account: &mut [f32], changes: &[f32]) {
    account.iter_mut().zip(changes).for_each(|(account, change)| *account += change);
}

impl Owned {
    /// A shard with these values, and accounts of some members.
    pub(super) fn new(values: Vec<f32>, accounts: &[u32]) -> Self {
        let accounts = accounts.iter().map(|rank| (*rank, values.clone())).collect();
        Owned { values, accounts, replicas: BTreeMap::new(), clocks: BTreeMap::new(), waiting: Vec::new() }
    }

    /// Adds what a member has changed, which had come so far.
    pub(super) fn take(&mut self, from: u32, clock: u64, changes: &[f32], living: &[u32]) {
        let part = 1.0 / living.len() as f32;
        match self.accounts.get_mut(&from) {
            Some(account) => add(account, changes),
            None => self.values.iter_mut().zip(changes).for_each(|(value, change)| *value += change * part),
        }
        self.clocks.insert(from, clock);
    }

    /// Begins with what members have said. Accounts are kept in a bounded server only.
    pub(super) fn open(&mut self, opening: Opening, living: &[u32], bounded: bool) {
        let is_there = |rank: &u32| living.binary_search(rank).is_ok();
        self.replicas = opening.bases.into_iter().filter(|(rank, _)| is_there(rank)).collect();
        let accounts = opening.accounts.into_iter().filter(|(rank, _)| is_there(rank));
        for (rank, (clock, account)) in accounts {
            self.clocks.insert(rank, clock);
            self.accounts.insert(rank, account);
        }
        self.settle();
        if !bounded {
            self.accounts.clear();
        }
    }

    /// Makes the values the mean of the accounts, where those are kept. Equal ones have exactly that as their mean.
    pub(super) fn settle(&mut self) {
        if self.accounts.is_empty() {
            return;
        }
        let (count, mut sums) = (self.accounts.len() as f64, [0f64; CHUNK]);
        for (chunk, values) in self.values.chunks_mut(CHUNK).enumerate() {
            let sums = &mut sums[..values.len()];
            sums.fill(0.0);
            for account in self.accounts.values() {
                let part = &account[chunk * CHUNK..][..values.len()];
                sums.iter_mut().zip(part).for_each(|(sum, x)| *sum += f64::from(*x));
            }
            values.iter_mut().zip(sums).for_each(|(value, sum)| *value = (*sum / count) as f32);
        }
    }

    /// Goes on without a member: accounts begin anew, with the values as they are.
    pub(super) fn without(&mut self, rank: u32) {
        self.settle();
        self.accounts.remove(&rank);
        self.accounts.values_mut().for_each(|account| account.copy_from_slice(&self.values));
        self.waiting.retain(|(waiting, _)| *waiting != rank);
        self.replicas.remove(&rank);
    }
}
