//! `phi3`: Phi-3 mini and medium, Phi-3.5 mini, Phi-4 and Phi-4 mini.
//!
//! Llama with half-split rope; queries, keys and values come from one projection, gate and up from another (the shared pieces read
//! both forms). Phi-4 mini rotates three quarters of a head. Long-context files carry two sets of rope divisors. A sliding window
//! is that of all layers.

use opencoti_compute::graph::{Graph, RopePairing};

use super::block::{Attention, Block};
use super::builder::ArchBuilder;
use crate::error::ModelError;
use crate::gguf::GgufFile;
use crate::hparams::HParams;

pub(super) fn build(file: &GgufFile, hp: &HParams) -> Result<Graph, ModelError> {
    let mut b = ArchBuilder::new(file);
    let table = b.matrix("token_embd.weight", hp.embedding_length, hp.vocab_size)?;
    let rope = b.rope(hp, RopePairing::Neox)?;
    let global = Attention::global(hp, rope);
    let mut x = b.graph.embed(table, 1.0);
    for pass in hp.passes() {
        let block = Block::llama(Attention { window: hp.window(pass.block, None), ..global });
        x = b.block(hp, pass, x, &block)?;
    }
    b.finish(x, table, hp)
}
