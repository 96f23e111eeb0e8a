//! Who of a group is on which host, and who carries which part of the data between hosts. Pure functions.

use std::ops::Range;

/// The members of a group by host. Members are places in the group's list of ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Members of each host in ascending order; hosts in the order of their first member.
    pub hosts: Vec<Vec<usize>>,
}

impl Layout {
    /// The layout of a group of `ranks` in a world made of `teams`.
    pub fn new(ranks: &[u32], teams: &[Vec<u32>]) -> Self {
        let mut hosts: Vec<Vec<usize>> = teams
            .iter()
            .map(|team| (0..ranks.len()).filter(|member| team.contains(&ranks[*member])).collect())
            .filter(|host: &Vec<usize>| !host.is_empty())
            .collect();
        hosts.sort_by_key(|host| host[0]);
        Layout { hosts }
    }

    /// The layout of a group in which every member counts as a host of its own.
    pub fn flat(ranks: &[u32]) -> Self {
        Layout { hosts: (0..ranks.len()).map(|member| vec![member]).collect() }
    }

    /// The layout of a group whose members are numbered host by host, on hosts of so many.
    pub fn of_sizes(sizes: &[usize]) -> Self {
        let mut next = 0..;
        Layout { hosts: sizes.iter().map(|size| next.by_ref().take(*size).collect()).collect() }
    }

    /// The host of a member, and its seat there.
    pub fn seat(&self, member: usize) -> (usize, usize) {
        self.hosts
            .iter()
            .enumerate()
            .find_map(|(host, members)| members.iter().position(|m| *m == member).map(|seat| (host, seat)))
            .unwrap_or_default()
    }

    /// Who on `host` stands opposite to the given seat of another host.
    pub fn opposite(&self, host: usize, seat: usize) -> usize {
        let members = &self.hosts[host];
        members[seat % members.len()]
    }

    /// Cuts `0..count` into parts so that on every host exactly one member carries each part. With the same number of
    /// ranks on every host these are the equal shares of the ranks; otherwise shares are cut where any host's share ends.
    pub fn parts(&self, count: usize, align: usize) -> Vec<Part> {
        let mut cuts: Vec<usize> =
            self.hosts.iter().flat_map(|h| (0..=h.len()).map(|i| cut(count, h.len(), i, align))).collect();
        cuts.sort_unstable();
        cuts.dedup();
        cuts.windows(2)
            .map(|pair| {
                let carrier = |host: &Vec<usize>| {
                    let seat = (0..host.len()).find(|seat| cut(count, host.len(), seat + 1, align) > pair[0]);
                    host[seat.unwrap_or(host.len() - 1)]
                };
                Part { range: pair[0]..pair[1], carriers: self.hosts.iter().map(carrier).collect() }
            })
            .collect()
    }
}

/// A part of the data that one member of each host carries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// The elements.
    pub range: Range<usize>,
    /// The member of each host that carries them.
    pub carriers: Vec<usize>,
}

/// Where the `at`-th of `ways` nearly equal shares of `count` elements begins, at a multiple of `align`.
pub fn cut(count: usize, ways: usize, at: usize, align: usize) -> usize {
    if at >= ways {
        return count;
    }
    let units = count.div_ceil(align);
    ((units * at).div_ceil(ways) * align).min(count)
}

/// The `at`-th of `ways` nearly equal shares.
pub fn share(count: usize, ways: usize, at: usize, align: usize) -> Range<usize> {
    cut(count, ways, at, align)..cut(count, ways, at + 1, align)
}

/// Whether ranges follow each other without a gap, from 0 to `count`.
#[cfg(test)]
pub(crate) fn is_gapless<'a>(ranges: impl IntoIterator<Item = &'a Range<usize>>, count: usize) -> bool {
    let mut at = 0;
    ranges.into_iter().all(|range| std::mem::replace(&mut at, range.end) == range.start) && at == count
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn hosts_are_sorted_by_their_first_member() {
        let teams = [vec![0, 3], vec![1], vec![2, 4]];
        let layout = Layout::new(&[1, 2, 3, 4], &teams);
        assert_eq!(layout.hosts, [vec![0], vec![1, 3], vec![2]]);
        assert_eq!((layout.seat(3), layout.opposite(1, 5)), ((1, 1), 3));
    }

    #[test]
    fn equal_hosts_carry_equal_shares() {
        let layout = Layout { hosts: vec![vec![0, 1], vec![2, 3]] };
        let parts = layout.parts(100, 1);
        assert_eq!(parts[0], Part { range: 0..50, carriers: vec![0, 2] });
        assert_eq!(parts[1], Part { range: 50..100, carriers: vec![1, 3] });
    }

    proptest! {
        #[test]
        fn every_element_has_one_carrier_on_every_host(
            sizes in proptest::collection::vec(1usize..5, 1..5), count in 0usize..500, align in 1usize..40,
        ) {
            let layout = Layout::of_sizes(&sizes);
            let mut at = 0;
            for part in layout.parts(count, align) {
                prop_assert_eq!(part.range.start, at);
                prop_assert!(part.range.end > at);
                at = part.range.end;
                prop_assert!(at == count || at.is_multiple_of(align));
                for (carrier, host) in part.carriers.iter().zip(&layout.hosts) {
                    prop_assert!(host.contains(carrier));
                }
            }
            prop_assert_eq!(at, count);
        }

        #[test]
        fn shares_cover_everything_in_order(count in 0usize..10_000, ways in 1usize..9, align in 1usize..64) {
            let mut at = 0;
            for way in 0..ways {
                let share = share(count, ways, way, align);
                prop_assert_eq!(share.start, at);
                prop_assert!(share.end >= at);
                at = share.end;
            }
            prop_assert_eq!(at, count);
        }
    }
}
