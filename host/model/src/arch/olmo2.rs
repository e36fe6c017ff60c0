//! `olmo2`: OLMo 2 and 3.
//!
//! Norms of the results of attention and feed-forward alone, none of their inputs; queries and keys are normed over all heads
//! together. OLMo 3 adds a window in three layers of four, whose rope is not extended.

use opencoti_compute::graph::{Graph, Rope, RopePairing, RopeScaling};

use super::block::{Attention, Block, Norms, QkNorm};
use super::builder::ArchBuilder;
use crate::error::ModelError;
use crate::gguf::GgufFile;
use crate::hparams::HParams;

/// Layers of which the last is global, in files with a window that do not say.
const DEFAULT_PERIOD: usize = 4;

pub(super) fn build(file: &GgufFile, hp: &HParams) -> Result<Graph, ModelError> {
    let mut b = ArchBuilder::new(file);
    let table = b.matrix("token_embd.weight", hp.embedding_length, hp.vocab_size)?;
    let rope = b.rope(hp, RopePairing::Neox)?;
    let global = Attention { qk_norm: QkNorm::WholeRow, ..Attention::global(hp, rope) };
    let sliding = hp.sliding_window.map(|window| {
        let n_rot = hp.head.n_rot;
        let plain = RopeScaling::None;
        let rope = Rope { pairing: RopePairing::Neox, n_rot, base: hp.rope_base, scaling: plain, freq_divisors: None };
        Attention { window: Some(window), rope: Some(b.graph.rope(rope)), ..global }
    });
    let mut x = b.graph.embed(table, 1.0);
    for pass in hp.passes() {
        let attention = sliding.filter(|_| hp.window(pass.block, Some(DEFAULT_PERIOD)).is_some()).unwrap_or(global);
        x = b.block(hp, pass, x, &Block { norms: Norms::AFTER, ..Block::llama(attention) })?;
    }
    b.finish(x, table, hp)
}
