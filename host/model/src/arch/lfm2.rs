//! `lfm2`: Liquid's LFM2.
//!
//! Blocks with no KV heads have a short convolution in place of attention: a projection makes `B`, `C` and `x`, and
//! `C ⊙ conv(B ⊙ x)` goes on. The others attend with a norm on every query and key head. SwiGLU; the final norm is called
//! `token_embd_norm`.

use opencoti_compute::graph::{Activation, Graph, RopePairing, StateGeometry, Value};

use super::block::{Attention, QkNorm};
use super::builder::ArchBuilder;
use crate::error::ModelError;
use crate::gguf::GgufFile;
use crate::hparams::{HParams, Keys};
use crate::layer_plan::Pass;

pub(super) fn build(file: &GgufFile, hp: &HParams) -> Result<Graph, ModelError> {
    let taps = taps(file)?;
    let mut b = ArchBuilder::new(file);
    let table = b.matrix("token_embd.weight", hp.embedding_length, hp.vocab_size)?;
    let rope = b.rope(hp, RopePairing::Neox)?;
    let attention = Attention { qk_norm: QkNorm::PerHead, window: hp.sliding_window, ..Attention::global(hp, rope) };
    let mut x = b.graph.embed(table, 1.0);
    for pass in hp.passes() {
        x = block(&mut b, hp, pass, x, &attention, taps)?;
    }
    let (hidden, logits) = b.head("token_embd_norm", x, table, hp)?;
    b.end(hidden, logits)
}

fn block(
    b: &mut ArchBuilder<'_>,
    hp: &HParams,
    pass: Pass,
    x: Value,
    attention: &Attention,
    taps: usize,
) -> Result<Value, ModelError> {
    let (l, e) = (pass.block, hp.embedding_length);
    let a = b.block_norm(hp, pass, x, Some("attn_norm"))?;
    let (mixed, projection, width) = match hp.layers[l].n_kv_heads {
        0 => (short_conv(b, hp, l, a, taps)?, "shortconv.out_proj", e),
        _ => (b.attend(hp, l, a, attention)?, "attn_output", hp.layers[l].n_heads * hp.head.value),
    };
    let (mixed, x) = b.select_outputs_in_last_pass(pass, mixed, x);
    let projected = b.linear(&format!("blk.{l}.{projection}"), mixed, width, e)?;
    let x = b.graph.add(x, projected);
    let a = b.block_norm(hp, pass, x, Some("ffn_norm"))?;
    let ffn = b.gated_ffn(l, a, e, hp.layers[l].feed_forward, Activation::Silu)?;
    Ok(b.graph.add(x, ffn))
}

fn short_conv(b: &mut ArchBuilder<'_>, hp: &HParams, l: usize, a: Value, taps: usize) -> Result<Value, ModelError> {
    let e = hp.embedding_length;
    let all = b.linear(&format!("blk.{l}.shortconv.in_proj"), a, e, 3 * e)?;
    let [before, after, x] = [0, e, 2 * e].map(|start| b.graph.columns(all, start, e));
    let x = b.graph.mul(before, x);
    let weight = b.matrix(&format!("blk.{l}.shortconv.conv.weight"), taps, e)?;
    let layer = b.graph.state_layer(StateGeometry { conv: (taps - 1) * e, recurrent: 0 });
    let x = b.graph.short_conv(x, weight, layer);
    Ok(b.graph.mul(after, x))
}

/// Rows that a convolution looks at. Files whose attention looks ahead are encoders of other tasks.
fn taps(file: &GgufFile) -> Result<usize, ModelError> {
    let keys = Keys::of(file, "lfm2");
    if keys.flag("attention.causal")? == Some(false) {
        let detail = "is false; only causal models of this architecture are supported";
        return Err(keys.error("attention.causal", detail.to_owned()));
    }
    keys.positive("shortconv.l_cache")
}
