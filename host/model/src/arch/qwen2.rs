//! `qwen2`: Qwen 2 and 2.5, dense.
//!
//! Llama with half-split rope and biases on queries, keys and values. Biases of keys are large (up to hundreds), so they are added
//! in f32.

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
    let block = Block::llama(Attention::global(hp, rope));
    let mut x = b.graph.embed(table, 1.0);
    for pass in hp.passes() {
        require_biases(&mut b, hp, pass.block)?;
        x = b.block(hp, pass, x, &block)?;
    }
    b.finish(x, table, hp)
}

/// The shared projections take a bias where the file has one; here every block must.
fn require_biases(b: &mut ArchBuilder<'_>, hp: &HParams, l: usize) -> Result<(), ModelError> {
    if b.has(&format!("blk.{l}.attn_qkv.bias")) {
        return Ok(());
    }
    let layer = hp.layers[l];
    for (name, width) in [
        ("attn_q", layer.n_heads * hp.head.key),
        ("attn_k", layer.n_kv_heads * hp.head.key),
        ("attn_v", layer.n_kv_heads * hp.head.value),
    ] {
        b.vector(&format!("blk.{l}.{name}.bias"), width)?;
    }
    Ok(())
}
