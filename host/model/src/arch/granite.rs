//! `granite` and `granitemoe`: Granite 3 and 4, dense and with experts.
//!
//! Llama with four factors from the file: of the embeddings, of what each half of a block adds, of the scores (a common key) and,
//! as a divisor, of the logits. Granite 4 files may switch rope off.

use opencoti_compute::graph::{Graph, RopePairing};

use super::block::{Attention, Block};
use super::builder::ArchBuilder;
use crate::error::ModelError;
use crate::gguf::GgufFile;
use crate::hparams::{HParams, Keys};

/// Dense models.
pub(super) fn build(file: &GgufFile, hp: &HParams) -> Result<Graph, ModelError> {
    let keys = Keys::of(file, "granite");
    if hp.expert_count > 0 {
        let detail = format!("is {}; files of granite with experts say granitemoe", hp.expert_count);
        return Err(keys.error("expert_count", detail));
    }
    build_with(file, hp, &keys)
}

/// Models with experts, none of which serves every token.
pub(super) fn build_experts(file: &GgufFile, hp: &HParams) -> Result<Graph, ModelError> {
    let keys = Keys::of(file, "granitemoe");
    if hp.expert_count == 0 {
        return Err(keys.error("expert_count", "is 0 or missing, expected the number of experts".to_owned()));
    }
    if let Some(width) = hp.shared_expert_feed_forward {
        let detail = format!("is {width}; granite with a shared expert is not supported");
        return Err(keys.error("expert_shared_feed_forward_length", detail));
    }
    build_with(file, hp, &keys)
}

fn build_with(file: &GgufFile, hp: &HParams, keys: &Keys<'_>) -> Result<Graph, ModelError> {
    let factor = |key: &str| Ok::<f32, ModelError>(keys.number(key)?.unwrap_or(1.0));
    let mut b = ArchBuilder::new(file);
    let table = b.matrix("token_embd.weight", hp.embedding_length, hp.vocab_size)?;
    let rope = b.rope(hp, RopePairing::Norm)?;
    // Models that were trained without positions say so by this key.
    let rotated = keys.flag("rope.scaling.finetuned")?.unwrap_or(true);
    let attention = Attention { rope: rotated.then_some(rope), ..Attention::global(hp, rope) };
    let block = Block { residual_scale: factor("residual_scale")?, ..Block::llama(attention) };
    let mut x = b.graph.embed(table, factor("embedding_scale")?);
    for pass in hp.passes() {
        x = b.block(hp, pass, x, &block)?;
    }
    let (hidden, logits) = b.head("output_norm", x, table, hp)?;
    let logits = b.graph.scale(logits, 1.0 / keys.required_number("logit_scale")?);
    b.end(hidden, logits)
}
