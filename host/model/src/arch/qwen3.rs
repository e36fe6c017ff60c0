//! `qwen3`: Qwen 3, dense.
//!
//! Llama with half-split rope and a norm on every query and key head, before it is rotated.

use opencoti_compute::graph::{Graph, RopePairing};

use super::block::{Attention, Block, QkNorm};
use super::builder::ArchBuilder;
use crate::error::ModelError;
use crate::gguf::GgufFile;
use crate::hparams::HParams;

pub(super) fn build(file: &GgufFile, hp: &HParams) -> Result<Graph, ModelError> {
    let mut b = ArchBuilder::new(file);
    let table = b.matrix("token_embd.weight", hp.embedding_length, hp.vocab_size)?;
    let rope = b.rope(hp, RopePairing::Neox)?;
    let block = Block::llama(Attention { qk_norm: QkNorm::PerHead, ..Attention::global(hp, rope) });
    let mut x = b.graph.embed(table, 1.0);
    for pass in hp.passes() {
        x = b.block(hp, pass, x, &block)?;
    }
    b.finish(x, table, hp)
}
