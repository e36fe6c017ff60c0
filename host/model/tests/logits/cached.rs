//! Running a model as the engine does: the CPU executor over the paged cache, with keys and values kept as plain f32.

use opencoti_compute::cpu::attention::Attention;
use opencoti_compute::cpu::executor::{Config, Executor};
use opencoti_kv::{BatchItem, Cache, CacheConfig, GroupConfig, Outputs, SeqId, StateConfig};
use opencoti_model::Model;
use opencoti_plugin_api::conformance::reference;
use opencoti_plugin_api::kv_codec::Side;

/// A model with its cache.
pub(crate) struct Runner {
    executor: Executor,
    cache: Cache,
}

/// Most rows of a step.
const MAX_ROWS: usize = 128;

impl Runner {
    /// Room for four sequences.
    pub(crate) fn new(model: &Model, threads: usize) -> Runner {
        let config = Config { threads, max_rows: MAX_ROWS, max_outputs: MAX_ROWS };
        let executor =
            Executor::new(model.graph.clone(), model.weights.clone(), Box::new(Attention::new(&model.graph)), config)
                .expect("an executor");
        let codecs = reference::plain().expect("the reference codec");
        let codec = |side, head_dim| codecs.open("f32", "{}", side, head_dim).expect("opens");
        let group = |group: opencoti_compute::graph::CacheGroup| GroupConfig {
            name: "kv".to_owned(),
            k: codec(Side::K, group.geometry.k_head_dim),
            v: codec(Side::V, group.geometry.v_head_dim),
            geometry: group.geometry,
            n_layers: group.layers.len(),
            stage: None,
        };
        let cache = Cache::new(CacheConfig {
            groups: model.graph.cache_groups().into_iter().map(group).collect(),
            capacity_tokens: 1024,
            slots: 4,
            window_sequences: None,
            recent_sequences: 0,
            step_tokens: MAX_ROWS,
            rollback_tokens: 64,
            whole_texts: model.graph.bidirectional,
            snapshots: 0,
            states: StateConfig { rollback: 64, ..StateConfig::of(&model.graph) },
        });
        Runner { executor, cache: cache.expect("a cache") }
    }

    /// A new sequence.
    pub(crate) fn create(&mut self) -> SeqId {
        self.cache.create()
    }

    /// Cuts a sequence to its first `n` tokens.
    pub(crate) fn truncate(&mut self, seq: SeqId, n: usize) {
        assert_eq!(self.cache.truncate(seq, n).expect("known"), n);
    }

    /// The mistake of going back with the matrices of delta nets but not with the inputs of convolutions.
    pub(crate) fn truncate_without_inputs(&mut self, seq: SeqId, n: usize) {
        let plane = |cache: &Cache| cache.planes(seq).expect("known").last().expect("tokens").1;
        let last = plane(&self.cache);
        self.truncate(seq, n);
        let (now, view) = (plane(&self.cache), self.cache.state_view().expect("recurrent layers"));
        let mut at = 0;
        for layer in &self.executor.graph().state_layers {
            // SAFETY: inside two planes, of which nothing has been written since and nobody reads now.
            unsafe { view.plane(last).add(at).copy_to(view.plane(now).add(at), layer.conv) };
            at += layer.words();
        }
    }

    /// One step: each sequence goes on with its tokens. Logits of all rows of each.
    pub(crate) fn step(&mut self, batch: &[(SeqId, &[u32])]) -> Vec<Vec<f32>> {
        self.step_for(batch, Outputs::All)
    }

    /// The same for the outputs that are wanted of each.
    pub(crate) fn step_for(&mut self, batch: &[(SeqId, &[u32])], outputs: Outputs) -> Vec<Vec<f32>> {
        let items: Vec<_> = batch.iter().map(|&(seq, tokens)| BatchItem { seq, tokens, outputs }).collect();
        let planned = self.cache.plan(&items).expect("a plan");
        let results = self.executor.run(&planned.step).expect("runs");
        let mut next = 0..results.rows();
        let logits = planned.rows.iter().map(|rows| {
            let of_item = next.by_ref().take(outputs.rows(rows.len()));
            of_item.flat_map(|i| results.logits(i).to_vec()).collect()
        });
        let logits = logits.collect();
        self.cache.commit(planned.id).expect("ends");
        logits
    }

    /// Hidden states of whole texts in one step, of all rows of each.
    pub(crate) fn hidden(&mut self, texts: &[&[u32]]) -> Vec<Vec<f32>> {
        let seqs: Vec<SeqId> = texts.iter().map(|_| self.cache.create()).collect();
        let items: Vec<_> =
            seqs.iter().zip(texts).map(|(&seq, &tokens)| BatchItem { seq, tokens, outputs: Outputs::Hidden }).collect();
        let planned = self.cache.plan(&items).expect("a plan");
        let outputs = self.executor.run(&planned.step).expect("runs");
        let of = |rows: &std::ops::Range<u32>| rows.clone().flat_map(|r| outputs.hidden(r as usize).to_vec()).collect();
        let hidden = planned.rows.iter().map(of).collect();
        self.cache.commit(planned.id).expect("ends");
        seqs.into_iter().for_each(|seq| self.cache.release(seq).expect("ends"));
        hidden
    }

    /// What the head of an encoder makes of a pair of texts, of which the second begins at a row.
    pub(crate) fn score(&mut self, tokens: &[u32], second: usize) -> Vec<f32> {
        let seq = self.cache.create();
        let mut planned = self.cache.plan(&[BatchItem { seq, tokens, outputs: Outputs::First }]).expect("a plan");
        planned.step.token_types = (0..tokens.len()).map(|row| u32::from(row >= second)).collect();
        let scores = self.executor.run(&planned.step).expect("runs").logits(0).to_vec();
        self.cache.commit(planned.id).expect("ends");
        scores
    }
}
