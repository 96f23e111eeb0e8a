//! A number that tells whether two ranks hold the same bytes. Not a secret, and not stored.

/// The digest of some bytes: multiply and rotate, eight bytes at a time.
pub fn digest(bytes: &[u8]) -> u64 {
    const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
    let mix = |hash: u64, word: u64| (hash ^ word).wrapping_mul(FACTOR).rotate_left(29);
    let (words, rest) = bytes.as_chunks::<8>();
    let hash = words.iter().fold(bytes.len() as u64, |hash, word| mix(hash, u64::from_le_bytes(*word)));
    let mut last = [0; 8];
    last[..rest.len()].copy_from_slice(rest);
    mix(mix(hash, u64::from_le_bytes(last)), FACTOR)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_changed_bit_and_any_swap_is_seen(mut bytes in proptest::collection::vec(any::<u8>(), 1..100), at in any::<usize>()) {
            let before = digest(&bytes);
            let at = at % bytes.len();
            bytes[at] ^= 1 << (at % 8);
            prop_assert_ne!(digest(&bytes), before);
            bytes[at] ^= 1 << (at % 8);
            prop_assert_eq!(digest(&bytes), before);
            bytes.push(0);
            prop_assert_ne!(digest(&bytes), before);
        }
    }

    #[test]
    fn the_order_counts() {
        assert_ne!(digest(&[1u8, 0, 0, 0, 0, 0, 0, 0, 2]), digest(&[2u8, 0, 0, 0, 0, 0, 0, 0, 1]));
    }
}
