//! `smollm3`: SmolLM3.
//!
//! Llama in which every fourth layer leaves positions out.

use opencoti_compute::graph::{Graph, RopePairing};

use super::block::{Attention, Block};
use super::builder::ArchBuilder;
use crate::error::ModelError;
use crate::gguf::GgufFile;
use crate::hparams::HParams;

/// Layers of which the last is not rotated. Files do not say.
const PERIOD: usize = 4;

pub(super) fn build(file: &GgufFile, hp: &HParams) -> Result<Graph, ModelError> {
    let mut b = ArchBuilder::new(file);
    let table = b.matrix("token_embd.weight", hp.embedding_length, hp.vocab_size)?;
    let rope = b.rope(hp, RopePairing::Norm)?;
    let rotated = Attention::global(hp, rope);
    let mut x = b.graph.embed(table, 1.0);
    for pass in hp.passes() {
        let unrotated = (pass.block + 1).is_multiple_of(PERIOD);
        let block = Block::llama(if unrotated { Attention { rope: None, ..rotated } } else { rotated });
        x = b.block(hp, pass, x, &block)?;
    }
    b.finish(x, table, hp)
}
