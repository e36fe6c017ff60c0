//! The merge loop that byte-pair and SentencePiece tokenizers share: repeatedly join the adjacent pair with the best
//! rank, leftmost first among equals, until no pair has one.
//!
//! A heap of candidates over a linked list of symbols makes it O(n log n) in the length of the text, so one line of a
//! megabyte costs no more per character than a short word. Candidates are not removed when a symbol changes; a stale
//! one is recognised when it comes up, because symbols only ever grow.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// The id of a symbol that is no token (yet).
pub(super) const NO_TOKEN: u32 = u32::MAX;

const NONE: usize = usize::MAX;

/// A run of the text that is one symbol so far. `len` is 0 once it was joined to its left neighbour.
#[derive(Clone, Copy, Debug)]
pub(super) struct Symbol {
    pub start: usize,
    pub len: usize,
    pub token: u32,
    prev: usize,
    next: usize,
}

impl Symbol {
    fn end(&self) -> usize {
        self.start + self.len
    }
}

/// What joining two neighbours gives: lower ranks are joined first.
#[derive(Clone, Copy, Debug)]
pub(super) struct Merge {
    pub rank: u32,
    pub token: u32,
}

/// A pair waiting to be joined. The derived order is the order of joining: rank, then position.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    rank: u32,
    left: usize,
    right: usize,
    len: usize,
    token: u32,
}

/// The working memory of the merge loop, kept between fragments so that encoding a text allocates only to grow.
#[derive(Default)]
pub(super) struct Merger {
    symbols: Vec<Symbol>,
    heap: BinaryHeap<Reverse<Candidate>>,
}

impl Merger {
    /// Forgets the previous text.
    pub(super) fn clear(&mut self) {
        self.symbols.clear();
        self.heap.clear();
    }

    /// Appends the next symbol of the text: `len` > 0 units that follow those before it.
    pub(super) fn push(&mut self, len: usize, token: u32) {
        let index = self.symbols.len();
        let start = self.symbols.last().map_or(0, Symbol::end);
        if let Some(last) = self.symbols.last_mut() {
            last.next = index;
        }
        let prev = index.checked_sub(1).unwrap_or(NONE);
        self.symbols.push(Symbol { start, len, token, prev, next: NONE });
    }

    /// Joins pairs until `pair` knows no merge for any two neighbours.
    pub(super) fn run(&mut self, pair: impl Fn(&Symbol, &Symbol) -> Option<Merge>) {
        for left in 0..self.symbols.len().saturating_sub(1) {
            self.consider(left, left + 1, &pair);
        }
        while let Some(Reverse(candidate)) = self.heap.pop() {
            if self.is_current(&candidate) {
                self.join(&candidate, &pair);
            }
        }
    }

    /// The symbols that are left, in text order.
    pub(super) fn symbols(&self) -> impl Iterator<Item = &Symbol> {
        self.symbols.iter().filter(|symbol| symbol.len > 0)
    }

    fn consider(&mut self, left: usize, right: usize, pair: &impl Fn(&Symbol, &Symbol) -> Option<Merge>) {
        let (l, r) = (&self.symbols[left], &self.symbols[right]);
        if let Some(Merge { rank, token }) = pair(l, r) {
            self.heap.push(Reverse(Candidate { rank, left, right, len: l.len + r.len, token }));
        }
    }

    fn is_current(&self, candidate: &Candidate) -> bool {
        let left = &self.symbols[candidate.left];
        left.len > 0 && left.next == candidate.right && left.len + self.symbols[candidate.right].len == candidate.len
    }

    fn join(&mut self, candidate: &Candidate, pair: &impl Fn(&Symbol, &Symbol) -> Option<Merge>) {
        let next = self.symbols[candidate.right].next;
        self.symbols[candidate.right].len = 0;
        let left = &mut self.symbols[candidate.left];
        left.len = candidate.len;
        left.token = candidate.token;
        left.next = next;
        let prev = left.prev;
        if prev != NONE {
            self.consider(prev, candidate.left, pair);
        }
        if next != NONE {
            self.symbols[next].prev = candidate.left;
            self.consider(candidate.left, next, pair);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every symbol is one unit; a merge of two symbols is allowed while the result is at most `limit` units long.
    fn lengths(n: usize, limit: usize) -> Vec<usize> {
        let mut merger = Merger::default();
        for _ in 0..n {
            merger.push(1, NO_TOKEN);
        }
        merger.run(|l, r| (l.len + r.len <= limit).then_some(Merge { rank: 0, token: 0 }));
        merger.symbols().map(|s| s.len).collect()
    }

    #[test]
    fn equal_ranks_join_leftmost_first() {
        assert_eq!(lengths(5, 2), [2, 2, 1]);
        assert_eq!(lengths(0, 2), [0; 0]);
        assert_eq!(lengths(1, 2), [1]);
    }

    #[test]
    fn lower_ranks_join_before_leftmost_ones() {
        let mut merger = Merger::default();
        for token in [1, 2, 3] {
            merger.push(1, token);
        }
        merger.run(|l, r| match (l.token, r.token) {
            (1, 2) => Some(Merge { rank: 9, token: 12 }),
            (2, 3) => Some(Merge { rank: 4, token: 23 }),
            _ => None,
        });
        assert_eq!(merger.symbols().map(|s| s.token).collect::<Vec<_>>(), [1, 23]);
    }

    #[test]
    fn a_million_symbols_merge_in_well_under_quadratic_time() {
        assert_eq!(lengths(1 << 20, 8).len(), 1 << 17);
    }
}
