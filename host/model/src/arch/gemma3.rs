//! `gemma3`: Gemma 3 text models (270M, 1B, 4B, 12B, 27B).
//!
//! Norms before and after both halves of a block, a norm on every query and key head, GeGLU, embeddings scaled by the root of
//! their width, and a sliding window in five layers of six. Window layers have their own rope base and no context extension.
//! Norm weights in the file include the `1 +` of the reference and are plain factors here.

use opencoti_compute::graph::{Activation, Graph, Rope, RopePairing, RopeScaling};

use super::block::{Attention, Block, Norms, QkNorm};
use super::builder::ArchBuilder;
use crate::error::ModelError;
use crate::gguf::GgufFile;
use crate::hparams::{HParams, HeadParams};

/// Layers of which the last is global, when the file does not say.
const DEFAULT_PERIOD: usize = 6;
/// The 27B model is told by its depth: it scales scores by the width per head, not by the head size.
const BLOCKS_OF_27B: usize = 62;

pub(super) fn build(file: &GgufFile, hp: &HParams) -> Result<Graph, ModelError> {
    let mut b = ArchBuilder::new(file);
    let table = b.matrix("token_embd.weight", hp.embedding_length, hp.vocab_size)?;
    let mut attention = |head: HeadParams, window: Option<usize>, base: f32, scaling: RopeScaling| {
        let rope = Rope { pairing: RopePairing::Neox, n_rot: head.n_rot, base, scaling, freq_divisors: None };
        let rope = Some(b.graph.rope(rope));
        Attention { head, window, rope, qk_norm: QkNorm::PerHead, scale: score_scale(hp, head, BLOCKS_OF_27B) }
    };
    let global = attention(hp.head, None, hp.rope_base, hp.rope_scaling);
    let sliding = attention(hp.head_swa, hp.sliding_window, hp.rope_base_swa, RopeScaling::None);
    let mut x = b.graph.embed(table, (hp.embedding_length as f32).sqrt());
    for pass in hp.passes() {
        let attention = if hp.window(pass.block, Some(DEFAULT_PERIOD)).is_some() { sliding } else { global };
        let block = Block { norms: Norms::AROUND, activation: Activation::GeluTanh, ..Block::llama(attention) };
        x = b.block(hp, pass, x, &block)?;
    }
    b.finish(x, table, hp)
}

/// Over the root of the head size; of the width per head in the largest model, told by its depth.
pub(super) fn score_scale(hp: &HParams, head: HeadParams, blocks_of_largest: usize) -> f32 {
    let width = match hp.block_count == blocks_of_largest {
        true => hp.embedding_length as f32 / hp.layers[0].n_heads as f32,
        false => head.key as f32,
    };
    hp.attention_scale.unwrap_or(1.0 / width.sqrt())
}
