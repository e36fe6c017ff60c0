//! `llama`: Llama 2 and 3, SmolLM2, Mistral and Mixtral, and their like.
//!
//! Pre-norm attention with interleaved rope (converters permute the rows of q and k for it), SwiGLU or experts of it, no caps.
//! Projections may carry biases; Llama 3 files bring the divisors of their rope frequencies as a tensor; a sliding window, where a
//! file has one (Mistral 7B v0.1), is that of all layers unless a pattern says otherwise.

use opencoti_compute::graph::{Graph, RopePairing};

use super::block::{Attention, Block};
use super::builder::ArchBuilder;
use crate::error::ModelError;
use crate::gguf::GgufFile;
use crate::hparams::HParams;

pub(super) fn build(file: &GgufFile, hp: &HParams) -> Result<Graph, ModelError> {
    check(file, hp)?;
    let mut b = ArchBuilder::new(file);
    let table = b.matrix("token_embd.weight", hp.embedding_length, hp.vocab_size)?;
    let rope = b.rope(hp, RopePairing::Norm)?;
    let global = Attention::global(hp, rope);
    let mut x = b.graph.embed(table, 1.0);
    for pass in hp.passes() {
        let block = Block::llama(Attention { window: hp.window(pass.block, None), ..global });
        x = b.block(hp, pass, x, &block)?;
    }
    b.finish(x, table, hp)
}

/// Refuses what other members of the family do and this description does not.
fn check(file: &GgufFile, hp: &HParams) -> Result<(), ModelError> {
    let error = |key: &str, detail: String| {
        Err(ModelError::Key { file: file.name().to_owned(), key: format!("llama.{key}"), detail })
    };
    if hp.head.n_rot != hp.head.key {
        let detail = format!("is {}, expected the head size {}", hp.head.n_rot, hp.head.key);
        return error("rope.dimension_count", detail);
    }
    Ok(())
}
