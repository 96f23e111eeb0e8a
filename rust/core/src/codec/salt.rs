//! Where the randomness of stochastic codecs comes from: counters, not state.
//!
//! The generator is the finalizer of splitmix64 over (key, counter). It is five integer operations on 64 bits, which every
//! processor does exactly and a vector unit does in parallel, it passes the usual batteries of tests as a sequence, and
//! without a state nothing has to be kept, checkpointed or drawn in order.

/// What stochastic codecs draw their random numbers from, and all others ignore.
///
/// A number depends on (stream, number of the block, position in the block) and on nothing else, so cutting or ordering
/// the data in another way changes no bit.
#[derive(Clone, Copy, Debug, Default)]
pub struct Salt<'a> {
    /// A hash of everything that is not a place in the data: seed, step, stage and rank.
    pub stream: u64,
    /// A number for each block of the values: a hash of the parameter's name and the block's index in the parameter. If
    /// there are none, blocks are counted from `first` on.
    pub blocks: &'a [u64],
    /// The number of the first block.
    pub first: u64,
}

impl Salt<'_> {
    /// The number of a block.
    pub fn block(&self, index: usize) -> u64 {
        self.blocks.get(index).copied().unwrap_or(self.first.wrapping_add(index as u64))
    }

    /// The key of a block, from which [`draw`] makes its numbers.
    #[inline(always)]
    pub(super) fn key(&self, index: usize) -> u64 {
        finalize(self.stream ^ finalize(self.block(index).wrapping_add(STEP)))
    }
}

/// The golden ratio, by which counters of splitmix64 go on.
pub(crate) const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// The finalizer of splitmix64.
#[inline(always)]
pub(crate) const fn finalize(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The `counter`-th 64 random bits of a key.
#[inline(always)]
pub(super) const fn draw(key: u64, counter: u64) -> u64 {
    finalize(key.wrapping_add((counter + 1).wrapping_mul(STEP)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_are_those_of_splitmix64() {
        // the first numbers of the published generator with seed 1234567
        let expected = [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423];
        assert_eq!([0, 1, 2].map(|counter| draw(1_234_567, counter)), expected);
    }

    #[test]
    fn keys_differ_by_stream_and_by_block() {
        let salt = Salt { stream: 1, blocks: &[7, 8], first: 0 };
        let mut keys =
            [salt.key(0), salt.key(1), salt.key(2), Salt { stream: 2, ..salt }.key(0), Salt::default().key(0)];
        assert_eq!(salt.key(0), Salt { stream: 1, blocks: &[7], first: 0 }.key(0));
        keys.sort_unstable();
        assert!(keys.windows(2).all(|pair| pair[0] != pair[1]));
    }
}
