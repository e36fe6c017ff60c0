//! Planes of recurrent state kept by hand: one after every token of every sequence, so that any of them can be taken up again.

use std::collections::HashMap;
use std::ops::Range;
use std::ptr::NonNull;

use opencoti_compute::graph::Graph;
use opencoti_compute::plan::{StateRun, StateView, StateWrite, Step};
use opencoti_kv::SeqId;

/// Planes there are; no test has more tokens.
const PLANES: usize = 256;

pub(crate) struct Planes {
    /// Words of a plane.
    words: usize,
    memory: Vec<f32>,
    used: u32,
    /// The plane after each token.
    after: HashMap<SeqId, Vec<u32>>,
}

impl Planes {
    /// For a model with recurrent layers.
    pub(crate) fn new(graph: &Graph) -> Option<Planes> {
        let words = graph.state_words();
        let memory = vec![f32::NAN; words * PLANES];
        (words > 0).then(|| Planes { words, memory, used: 0, after: HashMap::new() })
    }

    /// Names the planes of a step in which these sequences have these rows.
    pub(crate) fn plan(&mut self, step: &mut Step, rows: impl Iterator<Item = (SeqId, Range<u32>)>) {
        for (seq, rows) in rows {
            let after = self.after.entry(seq).or_default();
            let from = after.last().copied();
            let new = self.used..self.used + rows.len() as u32;
            self.used = new.end;
            after.extend(new.clone());
            let to = (1..).zip(new).map(|(after, plane)| StateWrite { after, plane }).collect();
            step.state_runs.push(StateRun { rows, from, to });
        }
        let base = NonNull::new(self.memory.as_mut_ptr()).expect("memory");
        step.states = Some(StateView { base, plane_words: self.words, n_planes: PLANES });
    }

    /// Goes back to the first `n` tokens of a sequence.
    pub(crate) fn truncate(&mut self, seq: SeqId, n: usize) {
        self.after.get_mut(&seq).expect("known").truncate(n);
    }

    /// The mistake of going back with the matrices of delta nets but not with the inputs of convolutions.
    pub(crate) fn truncate_without_inputs(&mut self, seq: SeqId, n: usize, graph: &Graph) {
        let last = *self.after[&seq].last().expect("tokens") as usize * self.words;
        self.truncate(seq, n);
        let now = *self.after[&seq].last().expect("tokens") as usize * self.words;
        let mut at = 0;
        for layer in &graph.state_layers {
            self.memory.copy_within(last + at..last + at + layer.conv, now + at);
            at += layer.words();
        }
    }
}
