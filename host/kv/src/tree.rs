//! The tree of prefixes that the cache holds: of running sequences, idle ones and snapshots alike, at every token.
//!
//! It is made when somebody asks. The cache itself needs no tree: which sequence shares most of a prompt is found by comparing
//! with each, and eviction goes by sequences, whose references free the pages that nobody else holds.

use crate::cache::Cache;
use crate::prefix::common_prefix;
use crate::sequence::{Phase, Sequence};

/// A run of tokens that the same sequences have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrefixNode {
    /// The node whose run it goes on with, an index into the list.
    pub parent: Option<usize>,
    /// Position of its first token.
    pub from: usize,
    /// First position after it.
    pub to: usize,
    /// Sequences that have it.
    pub sequences: usize,
    /// Of these, how many run or are kept by a pool.
    pub live: usize,
    /// Of these, snapshots.
    pub snapshots: usize,
    /// How often another sequence began with one of these.
    pub hits: u64,
}

impl Cache {
    /// The tree, each node behind its parent.
    pub fn prefix_tree(&self) -> Vec<PrefixNode> {
        let mut sequences: Vec<&Sequence> = self.sequences.iter().map(|(_, s)| s).filter(|s| s.committed > 0).collect();
        sequences.sort_by(|a, b| written(a).cmp(written(b)));
        let mut nodes = Vec::new();
        grow(&mut nodes, &sequences, 0, None);
        nodes
    }
}

fn written(sequence: &Sequence) -> &[u32] {
    &sequence.tokens[..sequence.committed]
}

/// Adds the nodes below `parent`: `sequences` are sorted and equal up to `from`.
fn grow(nodes: &mut Vec<PrefixNode>, sequences: &[&Sequence], from: usize, parent: Option<usize>) {
    // What ends here is shorter than its equals and stands first.
    let longer = &sequences[sequences.partition_point(|s| s.committed == from)..];
    for group in longer.chunk_by(|a, b| a.tokens[from] == b.tokens[from]) {
        let (Some(first), Some(last)) = (group.first(), group.last()) else { continue };
        let to = from + common_prefix(&written(first)[from..], &written(last)[from..]);
        let count = |holds: fn(&Sequence) -> bool| group.iter().filter(|s| holds(s)).count();
        nodes.push(PrefixNode {
            parent,
            from,
            to,
            sequences: group.len(),
            live: count(|s| s.phase == Phase::Live),
            snapshots: count(|s| s.is_snapshot),
            hits: group.iter().map(|s| s.hits).sum(),
        });
        let node = nodes.len() - 1;
        grow(nodes, group, to, Some(node));
    }
}
