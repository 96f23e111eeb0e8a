//! The smallest of the largest numbers, by absolute value, without a sort.
//!
//! The bits of a float without its sign, taken as an integer, order absolute values, with NaN above infinity. This is its
//! key. The threshold is found as a number, eleven and twice ten bits at a time, by counting how many keys begin with each
//! digit.

/// Numbers that are looked at together: few, since most groups are passed over, and a hit costs looking at each.
pub(super) const GROUP: usize = 16;
/// Bits of the first digit of a key, and of the other two.
const FIRST: u32 = 11;
const NEXT: u32 = 10;

/// Orders by absolute value, and by nothing else.
#[inline(always)]
pub(super) fn key(value: f32) -> i32 {
    (value.to_bits() & 0x7fff_ffff) as i32
}

/// Whether any number of a group has a key of `least` or more.
#[inline(always)]
pub(super) fn reaches(group: &[f32], least: i32) -> bool {
    group.iter().fold(false, |any, value| any | (key(*value) >= least))
}

/// Hands out the groups in which there is a key of `least` or more, each with the index of its first number.
#[inline(always)]
pub(super) fn each_group_from(values: &[f32], least: i32, mut act: impl FnMut(usize, &[f32])) {
    let (groups, rest) = values.as_chunks::<GROUP>();
    for (at, group) in groups.iter().enumerate() {
        if reaches(group, least) {
            act(at * GROUP, group);
        }
    }
    act(groups.len() * GROUP, rest);
}

/// The smallest key that is sent, and how many of those that have it are.
pub(super) fn threshold(values: &[f32], chosen: usize) -> (i32, usize) {
    let mut search = Search { prefix: 0, shift: 31, wanted: chosen };
    let count = search.narrow(&count_first(values), FIRST);
    // where few begin like it, they are looked at instead of everything
    let few = (count <= values.len() / 8).then(|| {
        let mut keys = Vec::with_capacity(count);
        each_group_from(values, search.floor(), |_, group| {
            keys.extend(group.iter().map(|value| key(*value)).filter(|key| search.begins(*key)));
        });
        keys
    });
    for _ in 0..2 {
        let mut counts = [0; 1 << FIRST];
        let mut count = |key: i32| {
            if search.begins(key) {
                counts[(key >> (search.shift - NEXT)) as usize & ((1 << NEXT) - 1)] += 1;
            }
        };
        match &few {
            Some(keys) => keys.iter().for_each(|key| count(*key)),
            None => {
                each_group_from(values, search.floor(), |_, group| group.iter().for_each(|value| count(key(*value))))
            }
        }
        search.narrow(&counts, NEXT);
    }
    (search.prefix, search.wanted)
}

/// What is known of the threshold: how it begins, and the how-many-th from above it is of those that begin so.
struct Search {
    prefix: i32,
    shift: u32,
    wanted: usize,
}

impl Search {
    fn begins(&self, key: i32) -> bool {
        key >> self.shift == self.prefix
    }

    /// The smallest key that begins so.
    fn floor(&self) -> i32 {
        self.prefix << self.shift
    }

    /// Appends the next digit, of which there are as many as `counts` says; how many keys begin like this.
    fn narrow(&mut self, counts: &[u32; 1 << FIRST], bits: u32) -> usize {
        let mut digit = (1 << bits) - 1;
        while digit > 0 && (counts[digit] as usize) < self.wanted {
            self.wanted -= counts[digit] as usize;
            digit -= 1;
        }
        (self.prefix, self.shift) = (self.prefix << bits | digit as i32, self.shift - bits);
        counts[digit] as usize
    }
}

/// How many keys begin with each digit of 11 bits.
fn count_first(values: &[f32]) -> [u32; 1 << FIRST] {
    // neighbours often have the same digit, and adding to a number just written takes long
    let mut counts = [[0u32; 1 << FIRST]; 2];
    let (pairs, rest) = values.as_chunks::<2>();
    let digit = |value: f32| (key(value) >> (31 - FIRST)) as usize & ((1 << FIRST) - 1);
    for [a, b] in pairs {
        counts[0][digit(*a)] += 1;
        counts[1][digit(*b)] += 1;
    }
    rest.iter().for_each(|value| counts[0][digit(*value)] += 1);
    let [mut sums, others] = counts;
    sums.iter_mut().zip(others).for_each(|(sum, other)| *sum += other);
    sums
}
