//! What the hybrids of Qwen have in common: gated delta nets in most blocks, gated attention in the others.
//!
//! A block is `x += mixer(norm(x))`, `x += ffn(norm(x))`; the norm before the feed-forward is called `post_attention_norm`.
//! Norm weights in the file include the `1 +` of the reference (but for `ssm_norm`, which never had it). Rope turns the leading
//! part of a head; its sections for pictures are equal for text, so that it is plain half-split rope.

use opencoti_compute::graph::{
    Activation, DeltaInputs, Graph, HeadMap, KvGeometry, RopeId, RopePairing, StateGeometry, Value,
};

use super::builder::ArchBuilder;
use super::moe::Moe;
use crate::error::ModelError;
use crate::gguf::GgufFile;
use crate::hparams::{HParams, Keys};
use crate::layer_plan::Pass;

/// Every so many blocks one attends, when the file does not say.
const DEFAULT_INTERVAL: usize = 4;
/// More f32 words than a block of any model keeps.
const MOST_STATE_WORDS: usize = u32::MAX as usize;
/// Epsilon of the length of keys and queries of delta nets; fixed in the reference.
const L2_EPS: f32 = 1e-6;

/// How the architectures differ.
pub(super) struct Family {
    /// Prefix of the keys.
    pub(super) name: &'static str,
    /// Which key head a value head of a delta net reads.
    pub(super) map: HeadMap,
    /// The feed-forward of a block.
    pub(super) ffn: fn(&mut ArchBuilder<'_>, &HParams, usize, Value) -> Result<Value, ModelError>,
}

/// Sizes of the delta nets.
#[derive(Clone, Copy)]
struct DeltaParams {
    k_heads: usize,
    v_heads: usize,
    k_dim: usize,
    v_dim: usize,
    taps: usize,
}

impl DeltaParams {
    /// Width of all keys, K.
    fn keys(&self) -> usize {
        self.k_heads * self.k_dim
    }

    /// Width of all values, V.
    fn values(&self) -> usize {
        self.v_heads * self.v_dim
    }
}

/// A hybrid model under construction.
struct Hybrid<'a> {
    family: &'a Family,
    delta: DeltaParams,
    rope: RopeId,
}

pub(super) fn build(file: &GgufFile, hp: &HParams, family: &Family) -> Result<Graph, ModelError> {
    let mut b = ArchBuilder::new(file);
    let table = b.matrix("token_embd.weight", hp.embedding_length, hp.vocab_size)?;
    b.ignore_drafting_blocks(hp);
    let rope = b.rope(hp, RopePairing::Neox)?;
    let keys = Keys::of(file, family.name);
    let recurrent = recurrent_blocks(file, &keys, hp.block_count)?;
    let hybrid = Hybrid { family, delta: DeltaParams::read(&keys)?, rope };
    let mut x = b.graph.embed(table, 1.0);
    for pass in hp.passes() {
        x = hybrid.block(&mut b, hp, pass, x, recurrent[pass.block])?;
    }
    b.finish(x, table, hp)
}

impl Hybrid<'_> {
    fn block(
        &self,
        b: &mut ArchBuilder<'_>,
        hp: &HParams,
        pass: Pass,
        x: Value,
        recurrent: bool,
    ) -> Result<Value, ModelError> {
        let (l, e) = (pass.block, hp.embedding_length);
        let a = b.block_norm(hp, pass, x, Some("attn_norm"))?;
        let (mixed, projection, width) = match recurrent {
            true => (self.delta_net(b, hp, l, a)?, "ssm_out", self.delta.values()),
            false => (self.attention(b, hp, l, a)?, "attn_output", hp.layers[l].n_heads * hp.head.value),
        };
        let (mixed, x) = b.select_outputs_in_last_pass(pass, mixed, x);
        let projected = b.linear(&format!("blk.{l}.{projection}"), mixed, width, e)?;
        let x = b.graph.add(x, projected);

        let a = b.block_norm(hp, pass, x, Some("post_attention_norm"))?;
        let ffn = (self.family.ffn)(b, hp, l, a)?;
        Ok(b.graph.add(x, ffn))
    }

    /// Attention whose result is gated element by element. Rows of `attn_q` are query and gate of each head in turn.
    fn attention(&self, b: &mut ArchBuilder<'_>, hp: &HParams, l: usize, a: Value) -> Result<Value, ModelError> {
        let (e, layer, head) = (hp.embedding_length, hp.layers[l], hp.head);
        if head.value != head.key {
            let detail =
                format!("is {}, expected the key length {}, as gates are as wide as values", head.value, head.key);
            return Err(b.key_error("attention.value_length", detail));
        }
        let n_kv_heads = b.kv_heads(l, layer)?;
        let both = b.linear(&format!("blk.{l}.attn_q"), a, e, (2 * layer.n_heads).saturating_mul(head.key))?;
        let q = b.graph.head_columns(both, 2 * head.key, 0, head.key);
        let gate = b.graph.head_columns(both, 2 * head.key, head.key, head.key);
        let k = b.linear(&format!("blk.{l}.attn_k"), a, e, n_kv_heads * head.key)?;
        let v = b.linear(&format!("blk.{l}.attn_v"), a, e, n_kv_heads * head.value)?;
        let q = b.head_norm(hp, &format!("blk.{l}.attn_q_norm.weight"), q, Some(head.key))?;
        let k = b.head_norm(hp, &format!("blk.{l}.attn_k_norm.weight"), k, Some(head.key))?;
        let geometry = KvGeometry { n_kv_heads, k_head_dim: head.key, v_head_dim: head.value, window: None };
        let cache = b.graph.kv_layer(geometry);
        let k = b.graph.rotate(k, head.key, self.rope);
        b.graph.append(cache, k, v);
        let scale = hp.attention_scale.unwrap_or(1.0 / (head.key as f32).sqrt());
        let attended = b.graph.attend(q, cache, Some(self.rope), scale, hp.attention_softcap);
        Ok(b.graph.gate(attended, gate))
    }

    /// A gated delta net over a short convolution of its keys, queries and values.
    fn delta_net(&self, b: &mut ArchBuilder<'_>, hp: &HParams, l: usize, a: Value) -> Result<Value, ModelError> {
        let DeltaParams { v_heads, k_dim, v_dim, taps, .. } = self.delta;
        let (keys, values) = (self.delta.keys(), self.delta.values());
        let channels = 2 * keys + values;
        let (mixed, z) = self.mixed_and_gate(b, hp, l, a)?;
        let layer =
            b.graph.state_layer(StateGeometry { conv: (taps - 1) * channels, recurrent: v_heads * k_dim * v_dim });
        let conv = b.matrix(&format!("blk.{l}.ssm_conv1d.weight"), taps, channels)?;
        let mixed = b.graph.short_conv(mixed, conv, layer);
        let mixed = b.graph.act(mixed, Activation::Silu);
        let [q, k] = [0, keys].map(|start| b.graph.columns(mixed, start, keys));
        let v = b.graph.columns(mixed, 2 * keys, values);
        let [q, k] = [q, k].map(|x| b.graph.l2_norm(x, L2_EPS, k_dim));

        let (alpha, beta) = self.alpha_and_beta(b, hp, l, a)?;
        let (dt, rate) =
            (b.vector(&format!("blk.{l}.ssm_dt.bias"), v_heads)?, b.vector(&format!("blk.{l}.ssm_a"), v_heads)?);
        let decay = b.graph.decay(alpha, dt, rate);
        let beta = b.graph.act(beta, Activation::Sigmoid);
        let inputs = DeltaInputs { q, k, v, decay, beta };
        let o = b.graph.delta_net(inputs, layer, self.family.map, 1.0 / (k_dim as f32).sqrt());
        let norm = b.vector(&format!("blk.{l}.ssm_norm.weight"), v_dim)?;
        let o = b.graph.head_norm(o, Some(norm), hp.rms_eps, v_dim);
        Ok(b.graph.gated_act(z, o, Activation::Silu))
    }

    /// Queries, keys and values side by side, and the gate of the result. The first files of Qwen3-Next have all four in one
    /// projection, in which they take turns for each key head.
    fn mixed_and_gate(
        &self,
        b: &mut ArchBuilder<'_>,
        hp: &HParams,
        l: usize,
        a: Value,
    ) -> Result<(Value, Value), ModelError> {
        let (e, keys, values) = (hp.embedding_length, self.delta.keys(), self.delta.values());
        let fused = format!("blk.{l}.ssm_in");
        if !b.has(&format!("{fused}.weight")) {
            let mixed = b.linear(&format!("blk.{l}.attn_qkv"), a, e, 2 * keys + values)?;
            return Ok((mixed, b.linear(&format!("blk.{l}.attn_gate"), a, e, values)?));
        }
        let all = b.linear(&fused, a, e, 2 * (keys + values))?;
        let (k_dim, per_key_head) = (self.delta.k_dim, values / self.delta.k_heads);
        let group = 2 * (k_dim + per_key_head);
        let [q, k] = [0, k_dim].map(|start| b.graph.head_columns(all, group, start, k_dim));
        let v = b.graph.head_columns(all, group, 2 * k_dim, per_key_head);
        let z = b.graph.head_columns(all, group, 2 * k_dim + per_key_head, per_key_head);
        let qk = b.graph.concat(q, k);
        Ok((b.graph.concat(qk, v), z))
    }

    /// What the decay and the strength of a correction come from; Qwen3-Next has both in one projection, in which they take
    /// turns for each key head.
    fn alpha_and_beta(
        &self,
        b: &mut ArchBuilder<'_>,
        hp: &HParams,
        l: usize,
        a: Value,
    ) -> Result<(Value, Value), ModelError> {
        let (e, v_heads) = (hp.embedding_length, self.delta.v_heads);
        let fused = format!("blk.{l}.ssm_ba");
        if !b.has(&format!("{fused}.weight")) {
            let alpha = b.linear(&format!("blk.{l}.ssm_alpha"), a, e, v_heads)?;
            return Ok((alpha, b.linear(&format!("blk.{l}.ssm_beta"), a, e, v_heads)?));
        }
        let both = b.linear(&fused, a, e, 2 * v_heads)?;
        let r = v_heads / self.delta.k_heads;
        let [beta, alpha] = [0, r].map(|start| b.graph.head_columns(both, 2 * r, start, r));
        Ok((alpha, beta))
    }
}

impl DeltaParams {
    fn read(keys: &Keys<'_>) -> Result<DeltaParams, ModelError> {
        let (k_heads, v_heads) = (keys.positive("ssm.group_count")?, keys.positive("ssm.time_step_rank")?);
        let (k_dim, inner) = (keys.positive("ssm.state_size")?, keys.positive("ssm.inner_size")?);
        let taps = keys.positive("ssm.conv_kernel")?;
        if !v_heads.is_multiple_of(k_heads) {
            let detail = format!("is {v_heads}, expected a multiple of the {k_heads} key heads");
            return Err(keys.error("ssm.time_step_rank", detail));
        }
        if !inner.is_multiple_of(v_heads) {
            let detail = format!("is {inner}, expected a multiple of the {v_heads} value heads");
            return Err(keys.error("ssm.inner_size", detail));
        }
        let twice_keys = k_heads.checked_mul(k_dim).and_then(|keys| keys.checked_mul(2));
        let conv = twice_keys.and_then(|keys| keys.checked_add(inner)?.checked_mul(taps));
        let words = conv.and_then(|conv| conv.checked_add(inner.checked_mul(k_dim)?));
        if words.is_none_or(|words| words > MOST_STATE_WORDS) {
            let detail = format!("is {k_dim}, which with the other sizes makes a state that no memory can hold");
            return Err(keys.error("ssm.state_size", detail));
        }
        Ok(DeltaParams { k_heads, v_heads, k_dim, v_dim: inner / v_heads, taps })
    }
}

/// Experts whose weights sum to one, and one that serves every token behind a gate of its own.
pub(super) fn experts(b: &mut ArchBuilder<'_>, hp: &HParams, l: usize, x: Value) -> Result<Value, ModelError> {
    let act = Activation::Silu;
    let chosen = b.moe_ffn(l, x, x, hp.embedding_length, Moe::of(hp, l, act))?;
    let Some(width) = hp.shared_expert_feed_forward else { return Ok(chosen) };
    let shared = b.shared_expert(l, x, hp.embedding_length, width, act)?;
    Ok(b.graph.add(chosen, shared))
}

/// Whether each block is recurrent: as the file lists, or all but every n-th.
fn recurrent_blocks(file: &GgufFile, keys: &Keys<'_>, blocks: usize) -> Result<Vec<bool>, ModelError> {
    let (list, interval) = ("attention.recurrent_layers", "full_attention_interval");
    if let Some(flags) = file.metadata().bools(&keys.name(list))? {
        return match flags.len() < blocks {
            true => {
                Err(keys.error(list, format!("has {} flags, expected one for each of {blocks} blocks", flags.len())))
            }
            false => Ok(flags),
        };
    }
    let interval = match keys.size(interval)? {
        Some(_) => keys.positive(interval)?,
        None => DEFAULT_INTERVAL,
    };
    Ok((1..=blocks).map(|n| !n.is_multiple_of(interval)).collect())
}
