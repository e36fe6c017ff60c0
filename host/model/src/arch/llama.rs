//! `llama`: Llama 2 and 3, SmolLM2, Mistral and their like.
//!
//! Pre-norm attention with interleaved rope (converters permute the rows of q and k for it), SwiGLU, no caps. Projections may
//! carry biases; Llama 3 files bring the divisors of their rope frequencies as a tensor.

use opencoti_compute::graph::{Activation, Graph, KvGeometry, Rope, RopeId, RopePairing, Value};

use super::builder::ArchBuilder;
use crate::error::ModelError;
use crate::gguf::GgufFile;
use crate::hparams::HParams;
use crate::layer_plan::Pass;

pub(super) fn build(file: &GgufFile, hp: &HParams) -> Result<Graph, ModelError> {
    check(file, hp)?;
    let mut b = ArchBuilder::new(file);
    let table = b.matrix("token_embd.weight", hp.embedding_length, hp.vocab_size)?;
    let freq_divisors = b.optional_vector("rope_freqs.weight", hp.head.n_rot / 2)?;
    let rope = b.graph.rope(Rope {
        pairing: RopePairing::Norm,
        n_rot: hp.head.n_rot,
        base: hp.rope_base,
        scaling: hp.rope_scaling,
        freq_divisors,
    });
    let mut x = b.graph.embed(table, 1.0);
    for pass in hp.passes() {
        x = block(&mut b, hp, pass, x, rope)?;
    }
    b.finish(x, table, hp)
}

fn block(b: &mut ArchBuilder<'_>, hp: &HParams, pass: Pass, x: Value, rope: RopeId) -> Result<Value, ModelError> {
    let l = pass.block;
    let (e, layer, head) = (hp.embedding_length, hp.layers[l], hp.head);
    let norm = b.vector(&format!("blk.{l}.attn_norm.weight"), e)?;
    let a = b.graph.rms_norm(x, norm, hp.rms_eps);
    let [q, k, v] = b.qkv(l, a, e, layer, head)?;
    let cache = b.graph.kv_layer(KvGeometry {
        n_kv_heads: layer.n_kv_heads,
        k_head_dim: head.key,
        v_head_dim: head.value,
        window: None,
    });
    let k = b.graph.rotate(k, head.key, rope);
    b.graph.append(cache, k, v);
    let scale = hp.attention_scale.unwrap_or(1.0 / (head.key as f32).sqrt());
    let attended = b.graph.attend(q, cache, Some(rope), scale, hp.attention_softcap);
    let (attended, x) = b.select_outputs_in_last_pass(pass, attended, x);
    let projected = b.linear(&format!("blk.{l}.attn_output"), attended, layer.n_heads * head.value, e)?;
    let x = b.graph.add(x, projected);

    let norm = b.vector(&format!("blk.{l}.ffn_norm.weight"), e)?;
    let a = b.graph.rms_norm(x, norm, hp.rms_eps);
    let ffn = b.gated_ffn(l, a, e, layer.feed_forward, Activation::Silu)?;
    Ok(b.graph.add(x, ffn))
}

/// Refuses what other members of the family do and this description does not.
fn check(file: &GgufFile, hp: &HParams) -> Result<(), ModelError> {
    let error = |key: &str, detail: String| {
        Err(ModelError::Key { file: file.name().to_owned(), key: format!("llama.{key}"), detail })
    };
    if hp.expert_count > 0 {
        return error("expert_count", format!("is {}; llama with experts (Mixtral) is not supported", hp.expert_count));
    }
    if hp.head.n_rot != hp.head.key {
        let detail = format!("is {}, expected the head size {}", hp.head.n_rot, hp.head.key);
        return error("rope.dimension_count", detail);
    }
    Ok(())
}
