//! `granite`: Granite 3 and 4, dense.
//!
//! Llama with four factors from the file: of the embeddings, of what each half of a block adds, of the scores (a common key) and,
//! as a divisor, of the logits. Granite 4 files may switch rope off.

use opencoti_compute::graph::{Graph, RopePairing};

use super::block::{Attention, Block};
use super::builder::ArchBuilder;
use crate::error::ModelError;
use crate::gguf::GgufFile;
use crate::hparams::{HParams, Keys};

pub(super) fn build(file: &GgufFile, hp: &HParams) -> Result<Graph, ModelError> {
    let keys = Keys::of(file, "granite");
    let factor = |key: &str| Ok::<f32, ModelError>(keys.number(key)?.unwrap_or(1.0));
    if hp.expert_count > 0 {
        let detail = format!("is {}; granite with experts is not supported", hp.expert_count);
        return Err(keys.error("expert_count", detail));
    }
    let mut b = ArchBuilder::new(file);
    let table = b.matrix("token_embd.weight", hp.embedding_length, hp.vocab_size)?;
    let rope = b.rope(hp, RopePairing::Norm)?;
    // Hybrids of the family were trained without positions and say so by this key.
    let rotated = keys.flag("rope.scaling.finetuned")?.unwrap_or(true);
    let attention = Attention { rope: rotated.then_some(rope), ..Attention::global(hp, rope) };
    let block = Block { residual_scale: factor("residual_scale")?, ..Block::llama(attention) };
    let mut x = b.graph.embed(table, factor("embedding_scale")?);
    for pass in hp.passes() {
        x = b.block(hp, pass, x, &block)?;
    }
    let (hidden, logits) = b.head(x, table, hp)?;
    let logits = b.graph.scale(logits, 1.0 / keys.required_number("logit_scale")?);
    b.end(hidden, logits)
}
