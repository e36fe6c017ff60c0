//! `gemma2`: Gemma 2 (2B, 9B, 27B).
//!
//! As Gemma 3, but without norms of queries and keys, with a window in every other layer, one rope for all layers, and soft caps of
//! scores and logits. Norm weights in the file include the `1 +` of the reference.

use opencoti_compute::graph::{Activation, Graph, RopePairing};

use super::block::{Attention, Block, Norms};
use super::builder::ArchBuilder;
use super::gemma3::score_scale;
use crate::error::ModelError;
use crate::gguf::GgufFile;
use crate::hparams::HParams;

/// What files before the key existed leave out.
const DEFAULT_WINDOW: usize = 4096;
/// Layers of which the last is global, when the file does not say.
const DEFAULT_PERIOD: usize = 2;
/// The 27B model is told by its depth: it scales scores by the width per head, not by the head size.
const BLOCKS_OF_27B: usize = 46;

pub(super) fn build(file: &GgufFile, hp: &HParams) -> Result<Graph, ModelError> {
    let hp = &HParams { sliding_window: hp.sliding_window.or(Some(DEFAULT_WINDOW)), ..hp.clone() };
    let mut b = ArchBuilder::new(file);
    let table = b.matrix("token_embd.weight", hp.embedding_length, hp.vocab_size)?;
    let rope = b.rope(hp, RopePairing::Neox)?;
    let global = Attention { scale: score_scale(hp, hp.head, BLOCKS_OF_27B), ..Attention::global(hp, rope) };
    let mut x = b.graph.embed(table, (hp.embedding_length as f32).sqrt());
    for pass in hp.passes() {
        let attention = Attention { window: hp.window(pass.block, Some(DEFAULT_PERIOD)), ..global };
        let block = Block { norms: Norms::AROUND, activation: Activation::GeluTanh, ..Block::llama(attention) };
        x = b.block(hp, pass, x, &block)?;
    }
    b.finish(x, table, hp)
}
