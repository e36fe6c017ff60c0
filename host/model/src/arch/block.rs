//! A transformer block as data: most architectures differ in where their norms stand, how positions enter and which activation
//! they use, and say so here. What differs in kind (experts, recurrent layers) takes the pieces it shares.

use opencoti_compute::graph::{Activation, KvGeometry, RopeId, Value};

use super::builder::ArchBuilder;
use super::moe::Moe;
use crate::error::ModelError;
use crate::hparams::{HParams, HeadParams};
use crate::layer_plan::Pass;

/// Self-attention with keys and values of its own.
#[derive(Clone, Copy)]
pub(super) struct Attention {
    /// Sizes of a head.
    pub(super) head: HeadParams,
    /// Keys that a query sees, its own included; `None` for all before it.
    pub(super) window: Option<usize>,
    /// `None` where positions do not enter.
    pub(super) rope: Option<RopeId>,
    /// Norm of queries and keys before they are rotated.
    pub(super) qk_norm: QkNorm,
    /// Factor of the scores.
    pub(super) scale: f32,
}

/// Norm of queries and keys, with weights `attn_q_norm` and `attn_k_norm`.
#[derive(Clone, Copy)]
pub(super) enum QkNorm {
    /// There is none.
    None,
    /// Every head by itself, one weight for all.
    PerHead,
    /// All heads together.
    WholeRow,
}

impl Attention {
    /// Global rotated attention, scores over the root of the head size unless the file says otherwise.
    pub(super) fn global(hp: &HParams, rope: RopeId) -> Attention {
        let scale = hp.attention_scale.unwrap_or(1.0 / (hp.head.key as f32).sqrt());
        Attention { head: hp.head, window: None, rope: Some(rope), qk_norm: QkNorm::None, scale }
    }
}

/// Which norms a block has, by the names of their weights.
#[derive(Clone, Copy)]
pub(super) struct Norms {
    /// Of the input of the attention.
    pub(super) attention_in: Option<&'static str>,
    /// Of the result of the attention.
    pub(super) attention_out: Option<&'static str>,
    /// Of the input of the feed-forward.
    pub(super) ffn_in: Option<&'static str>,
    /// Of the result of the feed-forward.
    pub(super) ffn_out: Option<&'static str>,
}

impl Norms {
    /// Of inputs: Llama and most of its descendants.
    pub(super) const BEFORE: Norms =
        Norms { attention_in: Some("attn_norm"), attention_out: None, ffn_in: Some("ffn_norm"), ffn_out: None };
    /// Of inputs and results: Gemma 2 and later.
    pub(super) const AROUND: Norms =
        Norms { attention_out: Some("post_attention_norm"), ffn_out: Some("post_ffw_norm"), ..Norms::BEFORE };
    /// Of results alone: OLMo 2.
    pub(super) const AFTER: Norms = Norms { attention_in: None, ffn_in: None, ..Norms::AROUND };
}

/// A block of attention and a gated feed-forward, or experts of it where the model has them.
#[derive(Clone, Copy)]
pub(super) struct Block {
    /// The first half.
    pub(super) attention: Attention,
    /// Before and behind the halves.
    pub(super) norms: Norms,
    /// Of the gate in the second half.
    pub(super) activation: Activation,
    /// Factor of what each half adds to the residual stream; 1 for none.
    pub(super) residual_scale: f32,
}

impl Block {
    /// Norms of inputs and SwiGLU, as Llama has them.
    pub(super) fn llama(attention: Attention) -> Block {
        Block { attention, norms: Norms::BEFORE, activation: Activation::Silu, residual_scale: 1.0 }
    }
}

impl ArchBuilder<'_> {
    /// A block over the residual stream `x`.
    pub(super) fn block(&mut self, hp: &HParams, pass: Pass, x: Value, block: &Block) -> Result<Value, ModelError> {
        let (l, e, width) = (pass.block, hp.embedding_length, hp.layers[pass.block].feed_forward);
        self.block_with(hp, pass, x, block, |b, a| match hp.expert_count {
            0 => b.gated_ffn(l, a, e, width, block.activation),
            _ => b.moe_ffn(l, a, a, e, Moe::of(hp, l, block.activation)),
        })
    }

    /// A block with another feed-forward, a function of the normed residual stream.
    pub(super) fn block_with(
        &mut self,
        hp: &HParams,
        pass: Pass,
        x: Value,
        block: &Block,
        ffn: impl FnOnce(&mut Self, Value) -> Result<Value, ModelError>,
    ) -> Result<Value, ModelError> {
        let x = self.attention_half(hp, pass, x, block)?;
        let a = self.block_norm(hp, pass, x, block.norms.ffn_in)?;
        let added = ffn(self, a)?;
        let added = self.block_norm(hp, pass, added, block.norms.ffn_out)?;
        Ok(self.residual(x, added, block.residual_scale))
    }

    /// The first half of a block: the residual stream behind its attention.
    pub(super) fn attention_half(
        &mut self,
        hp: &HParams,
        pass: Pass,
        x: Value,
        block: &Block,
    ) -> Result<Value, ModelError> {
        let a = self.block_norm(hp, pass, x, block.norms.attention_in)?;
        let attended = self.attend(hp, pass.block, a, &block.attention)?;
        let (attended, x) = self.select_outputs_in_last_pass(pass, attended, x);
        let width = hp.layers[pass.block].n_heads * block.attention.head.value;
        let output = format!("blk.{}.attn_output", pass.block);
        let projected = self.linear(&output, attended, width, hp.embedding_length)?;
        let normed = self.block_norm(hp, pass, projected, block.norms.attention_out)?;
        Ok(self.residual(x, normed, block.residual_scale))
    }

    /// Self-attention of block `l` over its (normed) input, before the output projection.
    pub(super) fn attend(
        &mut self,
        hp: &HParams,
        l: usize,
        a: Value,
        attention: &Attention,
    ) -> Result<Value, ModelError> {
        let Attention { head, window, rope, qk_norm, scale } = *attention;
        // A window that no sequence outgrows is none: its layers share pages with global ones.
        let window = window.filter(|&w| w < hp.context_length);
        let layer = hp.layers[l];
        let [q, k, v] = self.qkv(l, a, hp.embedding_length, layer, head)?;
        let group = |heads: usize| match qk_norm {
            QkNorm::None => None,
            QkNorm::PerHead => Some(head.key),
            QkNorm::WholeRow => Some(heads * head.key),
        };
        let q = self.head_norm(hp, &format!("blk.{l}.attn_q_norm.weight"), q, group(layer.n_heads))?;
        let k = self.head_norm(hp, &format!("blk.{l}.attn_k_norm.weight"), k, group(layer.n_kv_heads))?;
        let geometry =
            KvGeometry { n_kv_heads: layer.n_kv_heads, k_head_dim: head.key, v_head_dim: head.value, window };
        let cache = self.graph.kv_layer(geometry);
        let k = rope.map_or(k, |rope| self.graph.rotate(k, head.key, rope));
        self.graph.append(cache, k, v);
        Ok(self.graph.attend(q, cache, rope, scale, hp.attention_softcap))
    }

    /// The norm of every run of `group` elements, if there is one.
    pub(super) fn head_norm(
        &mut self,
        hp: &HParams,
        weight: &str,
        x: Value,
        group: Option<usize>,
    ) -> Result<Value, ModelError> {
        let Some(group) = group else { return Ok(x) };
        let weight = self.vector(weight, group)?;
        Ok(self.graph.head_norm(x, Some(weight), hp.rms_eps, group))
    }

    /// The norm of this name, where the architecture has one.
    pub(super) fn block_norm(
        &mut self,
        hp: &HParams,
        pass: Pass,
        x: Value,
        name: Option<&str>,
    ) -> Result<Value, ModelError> {
        let Some(name) = name else { return Ok(x) };
        let weight = self.vector(&format!("blk.{}.{name}.weight", pass.block), hp.embedding_length)?;
        Ok(self.graph.rms_norm(x, weight, hp.rms_eps))
    }

    /// `x + scale * y`.
    fn residual(&mut self, x: Value, y: Value, scale: f32) -> Value {
        let y = if scale == 1.0 { y } else { self.graph.scale(y, scale) };
        self.graph.add(x, y)
    }
}
