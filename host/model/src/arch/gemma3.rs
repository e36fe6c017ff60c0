//! `gemma3`: Gemma 3 text models (270M, 1B, 4B, 12B, 27B).
//!
//! Norms before and after both halves of a block, a norm on every query and key head, GeGLU, embeddings scaled by the root of
//! their width, and a sliding window in five layers of six. Window layers have their own rope base and no context extension.
//! Norm weights in the file include the `1 +` of the reference and are plain factors here.

use opencoti_compute::graph::{Activation, Graph, KvGeometry, Rope, RopeId, RopePairing, RopeScaling, Value};

use super::builder::ArchBuilder;
use crate::error::ModelError;
use crate::gguf::GgufFile;
use crate::hparams::{HParams, HeadParams, SlidingPattern};
use crate::layer_plan::Pass;

/// Layers of which the last is global, when the file does not say.
const DEFAULT_PERIOD: usize = 6;
/// The 27B model is told by its depth: it scales scores by the width per head, not by the head size.
const BLOCKS_OF_27B: usize = 62;

/// What differs between window layers and global ones.
#[derive(Clone, Copy)]
struct Kind {
    head: HeadParams,
    window: Option<usize>,
    rope: RopeId,
}

pub(super) fn build(file: &GgufFile, hp: &HParams) -> Result<Graph, ModelError> {
    let mut b = ArchBuilder::new(file);
    let table = b.matrix("token_embd.weight", hp.embedding_length, hp.vocab_size)?;
    let mut rope = |head: HeadParams, base: f32, scaling: RopeScaling| {
        b.graph.rope(Rope { pairing: RopePairing::Neox, n_rot: head.n_rot, base, scaling, freq_divisors: None })
    };
    let global = Kind { head: hp.head, window: None, rope: rope(hp.head, hp.rope_base, hp.rope_scaling) };
    let sliding = Kind {
        head: hp.head_swa,
        window: hp.sliding_window,
        rope: rope(hp.head_swa, hp.rope_base_swa, RopeScaling::None),
    };
    let pattern = hp.sliding_pattern.clone().unwrap_or(SlidingPattern::Period(DEFAULT_PERIOD));
    let mut x = b.graph.embed(table, (hp.embedding_length as f32).sqrt());
    for pass in hp.passes() {
        let kind = if hp.sliding_window.is_some() && pattern.is_sliding(pass.block) { sliding } else { global };
        x = block(&mut b, hp, pass, x, kind)?;
    }
    b.finish(x, table, hp)
}

fn block(b: &mut ArchBuilder<'_>, hp: &HParams, pass: Pass, x: Value, kind: Kind) -> Result<Value, ModelError> {
    let l = pass.block;
    let (e, eps, layer, head) = (hp.embedding_length, hp.rms_eps, hp.layers[l], kind.head);
    let norm = b.vector(&format!("blk.{l}.attn_norm.weight"), e)?;
    let a = b.graph.rms_norm(x, norm, eps);
    let [q, k, v] = b.qkv(l, a, e, layer, head)?;
    let q_norm = b.vector(&format!("blk.{l}.attn_q_norm.weight"), head.key)?;
    let k_norm = b.vector(&format!("blk.{l}.attn_k_norm.weight"), head.key)?;
    let q = b.graph.head_norm(q, Some(q_norm), eps, head.key);
    let k = b.graph.head_norm(k, Some(k_norm), eps, head.key);
    let cache = b.graph.kv_layer(KvGeometry {
        n_kv_heads: layer.n_kv_heads,
        k_head_dim: head.key,
        v_head_dim: head.value,
        window: kind.window,
    });
    let k = b.graph.rotate(k, head.key, kind.rope);
    b.graph.append(cache, k, v);
    let scale = score_scale(hp, l, head);
    let attended = b.graph.attend(q, cache, Some(kind.rope), scale, hp.attention_softcap);
    let (attended, x) = b.select_outputs_in_last_pass(pass, attended, x);
    let projected = b.linear(&format!("blk.{l}.attn_output"), attended, layer.n_heads * head.value, e)?;
    let post = b.vector(&format!("blk.{l}.post_attention_norm.weight"), e)?;
    let normed = b.graph.rms_norm(projected, post, eps);
    let x = b.graph.add(x, normed);

    let norm = b.vector(&format!("blk.{l}.ffn_norm.weight"), e)?;
    let a = b.graph.rms_norm(x, norm, eps);
    let ffn = b.gated_ffn(l, a, e, layer.feed_forward, Activation::GeluTanh)?;
    let post = b.vector(&format!("blk.{l}.post_ffw_norm.weight"), e)?;
    let normed = b.graph.rms_norm(ffn, post, eps);
    Ok(b.graph.add(x, normed))
}

fn score_scale(hp: &HParams, l: usize, head: HeadParams) -> f32 {
    let width = match hp.block_count {
        BLOCKS_OF_27B => hp.embedding_length as f32 / hp.layers[l].n_heads as f32,
        _ => head.key as f32,
    };
    hp.attention_scale.unwrap_or(1.0 / width.sqrt())
}
