//! Finding the sequence with the longest common prefix.
//!
//! A comparison with every sequence: right for a few hundred of them. Whatever replaces it has to answer the same
//! question, [`longest`].

use crate::sequence::{SeqId, Sequence};

/// The first `tokens` tokens of a sequence, which another one may begin with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Prefix {
    /// Whose they are.
    pub donor: SeqId,
    /// How many.
    pub tokens: usize,
}

/// The candidate that shares most of `tokens`, of equals the one used last. `feasible` says how many of the tokens in
/// common a candidate can really share.
pub(crate) fn longest<'a>(
    candidates: impl Iterator<Item = (SeqId, &'a Sequence)>,
    tokens: &[u32],
    feasible: impl Fn(&Sequence, usize) -> usize,
) -> Option<Prefix> {
    candidates
        .map(|(donor, sequence)| {
            let common = common_prefix(&sequence.tokens[..sequence.committed], tokens);
            (feasible(sequence, common), sequence.last_used, donor)
        })
        .filter(|&(tokens, ..)| tokens > 0)
        .max()
        .map(|(tokens, _, donor)| Prefix { donor, tokens })
}

/// Number of equal leading elements.
pub(crate) fn common_prefix(a: &[u32], b: &[u32]) -> usize {
    const BLOCK: usize = 64;
    let n = a.len().min(b.len());
    let (a, b) = (&a[..n], &b[..n]);
    let equal = a.chunks(BLOCK).zip(b.chunks(BLOCK)).take_while(|(x, y)| x == y).count();
    let start = (equal * BLOCK).min(n);
    start + a[start..].iter().zip(&b[start..]).take_while(|(x, y)| x == y).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_common_prefix_ends_at_the_first_difference() {
        let a: Vec<u32> = (0..200).collect();
        for n in [0, 1, 63, 64, 65, 127, 128, 199] {
            let mut b = a.clone();
            b[n] = 999;
            assert_eq!(common_prefix(&a, &b), n);
        }
        assert_eq!(common_prefix(&a, &a), 200);
        assert_eq!(common_prefix(&a, &a[..100]), 100);
        assert_eq!(common_prefix(&a, &[]), 0);
    }
}
