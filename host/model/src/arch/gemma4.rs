//! `gemma4`: Gemma 4 text models, dense (12B, 31B), with experts (26B-A4B) and elastic (E2B, E4B).
//!
//! Norms before and after both halves of a block, on every query, key and value head, and a factor on the residual stream at
//! the end of a block. Window layers and global ones differ in head size, KV heads and rope; in a global head only the first
//! pairs turn, which the file says by rope divisors of 1e30. Scores are not scaled: the norms' weights are trained for that.
//! A global layer without a value projection takes the raw keys, before norm and rope, as values.
//!
//! Models with experts have a dense branch beside them in every block. Elastic models have an input of its own for each layer
//! and token, and trailing layers that only read: the keys and values of the last owning layer of their kind. No row but those
//! whose output is wanted is needed behind the last layer that owns keys and values, so the rows are selected there.

use opencoti_compute::graph::{
    Activation, Graph, KvGeometry, KvLayerId, Rope, RopeId, RopePairing, RopeScaling, Value,
};

use super::builder::ArchBuilder;
use super::moe::Moe;
use crate::error::ModelError;
use crate::gguf::GgufFile;
use crate::hparams::{HParams, HeadParams};
use crate::layer_plan::Pass;

pub(super) fn build(file: &GgufFile, hp: &HParams) -> Result<Graph, ModelError> {
    refuse_encoders(file)?;
    let shape = Shape::read(file, hp)?;
    let mut b = ArchBuilder::new(file);
    let table = b.matrix("token_embd.weight", hp.embedding_length, hp.vocab_size)?;
    let kinds = Kinds::new(&mut b, hp)?;
    let x = b.graph.embed(table, (hp.embedding_length as f32).sqrt());
    let caches = vec![None; hp.block_count];
    let mut model = Forward { b, hp, shape, kinds, caches, x, layer_inputs: None };
    model.layer_inputs = model.layer_inputs()?;
    let passes: Vec<Pass> = hp.passes().collect();
    let last_owner = passes.iter().rposition(|pass| pass.block < model.shape.owners);
    for (i, pass) in passes.iter().enumerate() {
        model.block(pass.block, Some(i) == last_owner)?;
    }
    model.b.finish(model.x, table, hp)
}

/// What this architecture's own keys say.
struct Shape {
    /// Blocks that write keys and values; those behind them read.
    owners: usize,
    /// Width of a layer's own input, P; 0 if there is none.
    layer_input: usize,
    /// Which blocks use the window.
    sliding: Vec<bool>,
}

impl Shape {
    fn read(file: &GgufFile, hp: &HParams) -> Result<Shape, ModelError> {
        let (meta, blocks) = (file.metadata(), hp.block_count);
        let size = |key: &str| Ok::<_, ModelError>(meta.u32(&format!("gemma4.{key}"))?.unwrap_or(0) as usize);
        let missing = |key: &str, what: &str| meta.missing(&format!("gemma4.{key}"), what);
        let Some(pattern) = &hp.sliding_pattern else {
            return Err(missing("attention.sliding_window_pattern", "one flag for each layer").into());
        };
        let sliding: Vec<bool> = (0..blocks).map(|l| pattern.is_sliding(l)).collect();
        if hp.sliding_window.is_none() && sliding.contains(&true) {
            return Err(missing("attention.sliding_window", "the window of the layers that have one").into());
        }
        let shared = size("attention.shared_kv_layers")?;
        let owners = blocks.saturating_sub(shared);
        let shape = Shape { owners, layer_input: size("embedding_length_per_layer_input")?, sliding };
        for l in owners..blocks {
            let source = shape.source(l).map(|source| hp.layers[source].n_kv_heads);
            if source != Some(hp.layers[l].n_kv_heads) {
                let key = "gemma4.attention.shared_kv_layers".to_owned();
                let detail = format!(
                    "is {shared}, but before the last {shared} of {blocks} layers none has the window and the KV heads of layer {l}"
                );
                return Err(ModelError::Key { file: file.name().to_owned(), key, detail });
            }
        }
        Ok(shape)
    }

    /// The block whose keys and values block `l` reads: its own, or those of the last owner of its kind.
    fn source(&self, l: usize) -> Option<usize> {
        match l < self.owners {
            true => Some(l),
            false => self.sliding[..self.owners].iter().rposition(|&sliding| sliding == self.sliding[l]),
        }
    }
}

/// What differs between window layers and global ones.
#[derive(Clone, Copy)]
struct Kind {
    head: HeadParams,
    window: Option<usize>,
    rope: RopeId,
}

struct Kinds {
    global: Kind,
    sliding: Kind,
}

impl Kinds {
    fn new(b: &mut ArchBuilder<'_>, hp: &HParams) -> Result<Kinds, ModelError> {
        let divisors = b.vector("rope_freqs.weight", hp.head.n_rot / 2)?;
        let (pairing, base) = (RopePairing::Neox, hp.rope_base);
        let (n_rot, scaling) = (hp.head.n_rot, hp.rope_scaling);
        let rope = b.graph.rope(Rope { pairing, n_rot, base, scaling, freq_divisors: Some(divisors) });
        let global = Kind { head: hp.head, window: None, rope };
        let (n_rot, base, scaling) = (hp.head_swa.n_rot, hp.rope_base_swa, RopeScaling::None);
        let rope = b.graph.rope(Rope { pairing, n_rot, base, scaling, freq_divisors: None });
        Ok(Kinds { global, sliding: Kind { head: hp.head_swa, window: hp.sliding_window, rope } })
    }
}

/// The graph as far as it has come.
struct Forward<'a> {
    b: ArchBuilder<'a>,
    hp: &'a HParams,
    shape: Shape,
    kinds: Kinds,
    /// The latest keys and values of each block.
    caches: Vec<Option<KvLayerId>>,
    /// The residual stream.
    x: Value,
    /// The layers' own inputs, one layer after the other in each row.
    layer_inputs: Option<Value>,
}

impl Forward<'_> {
    /// `x` normed by the weights `name`.
    fn norm(&mut self, name: &str, x: Value) -> Result<Value, ModelError> {
        let weight = self.b.vector(&format!("{name}.weight"), self.hp.embedding_length)?;
        Ok(self.b.graph.rms_norm(x, weight, self.hp.rms_eps))
    }

    /// Every head of `x` normed by the weights `name`.
    fn head_norm(&mut self, name: &str, x: Value, width: usize) -> Result<Value, ModelError> {
        let weight = self.b.vector(&format!("{name}.weight"), width)?;
        Ok(self.b.graph.head_norm(x, Some(weight), self.hp.rms_eps, width))
    }

    /// Adds `update`, normed by the weights `name`, to the residual stream.
    fn add_normed(&mut self, name: &str, update: Value) -> Result<(), ModelError> {
        let normed = self.norm(name, update)?;
        self.x = self.b.graph.add(self.x, normed);
        Ok(())
    }

    /// What each layer adds of its own: a row of a table by token, and a projection of the embedding.
    fn layer_inputs(&mut self) -> Result<Option<Value>, ModelError> {
        let (e, width) = (self.hp.embedding_length, self.shape.layer_input);
        if width == 0 {
            return Ok(None);
        }
        let all = width * self.hp.block_count;
        let table = self.b.matrix("per_layer_token_embd.weight", all, self.hp.vocab_size)?;
        let by_token = self.b.graph.embed(table, (width as f32).sqrt());
        let projected = self.b.linear("per_layer_model_proj", self.x, e, all)?;
        let projected = self.b.graph.scale(projected, 1.0 / (e as f32).sqrt());
        let normed = self.head_norm("per_layer_proj_norm", projected, width)?;
        let sum = self.b.graph.add(by_token, normed);
        Ok(Some(self.b.graph.scale(sum, std::f32::consts::FRAC_1_SQRT_2)))
    }

    /// Runs block `l`; with `select`, goes on with the output rows as soon as the block's keys and values are written.
    fn block(&mut self, l: usize, select: bool) -> Result<(), ModelError> {
        self.attention(l, select)?;
        self.feed_forward(l)?;
        self.layer_input(l)?;
        if let Some(factor) = self.b.factor(&format!("blk.{l}.layer_output_scale.weight"))? {
            self.x = self.b.graph.scale(self.x, factor);
        }
        Ok(())
    }

    fn attention(&mut self, l: usize, select: bool) -> Result<(), ModelError> {
        let (e, n_heads) = (self.hp.embedding_length, self.hp.layers[l].n_heads);
        let Kind { head, rope, .. } = self.kind(l);
        let mut a = self.norm(&format!("blk.{l}.attn_norm"), self.x)?;
        let cache = self.cache(l, a)?;
        if select {
            a = self.b.graph.select_outputs(a);
            self.x = self.b.graph.select_outputs(self.x);
            self.layer_inputs = self.layer_inputs.map(|inputs| self.b.graph.select_outputs(inputs));
        }
        let q = self.b.linear(&format!("blk.{l}.attn_q"), a, e, n_heads * head.key)?;
        let q = self.head_norm(&format!("blk.{l}.attn_q_norm"), q, head.key)?;
        let scale = self.hp.attention_scale.unwrap_or(1.0);
        let attended = self.b.graph.attend(q, cache, Some(rope), scale, self.hp.attention_softcap);
        let projected = self.b.linear(&format!("blk.{l}.attn_output"), attended, n_heads * head.value, e)?;
        self.add_normed(&format!("blk.{l}.post_attention_norm"), projected)
    }

    fn kind(&self, l: usize) -> Kind {
        if self.shape.sliding[l] { self.kinds.sliding } else { self.kinds.global }
    }

    /// The cache that block `l` reads, with the block's own keys and values of `a` written if it owns any.
    fn cache(&mut self, l: usize, a: Value) -> Result<KvLayerId, ModelError> {
        if l < self.shape.owners {
            let cache = self.own_cache(l, a)?;
            self.caches[l] = Some(cache);
            return Ok(cache);
        }
        // Older files carry these for every layer.
        for unused in ["attn_k", "attn_k_norm", "attn_v"] {
            self.b.ignore(&format!("blk.{l}.{unused}.weight"));
        }
        let cache = self.shape.source(l).and_then(|source| self.caches[source]);
        Ok(cache.expect("the shape was checked, and owners run first"))
    }

    fn own_cache(&mut self, l: usize, a: Value) -> Result<KvLayerId, ModelError> {
        let (e, eps, n_kv_heads) = (self.hp.embedding_length, self.hp.rms_eps, self.hp.layers[l].n_kv_heads);
        let Kind { head, window, rope } = self.kind(l);
        let raw = self.b.linear(&format!("blk.{l}.attn_k"), a, e, n_kv_heads * head.key)?;
        let k = self.head_norm(&format!("blk.{l}.attn_k_norm"), raw, head.key)?;
        let v = match self.b.has(&format!("blk.{l}.attn_v.weight")) || head.value != head.key {
            true => self.b.linear(&format!("blk.{l}.attn_v"), a, e, n_kv_heads * head.value)?,
            false => raw,
        };
        let (k_head_dim, v_head_dim) = (head.key, head.value);
        let cache = self.b.graph.kv_layer(KvGeometry { n_kv_heads, k_head_dim, v_head_dim, window });
        let k = self.b.graph.rotate(k, head.key, rope);
        let v = self.b.graph.head_norm(v, None, eps, head.value);
        self.b.graph.append(cache, k, v);
        Ok(cache)
    }

    fn feed_forward(&mut self, l: usize) -> Result<(), ModelError> {
        let (e, width) = (self.hp.embedding_length, self.hp.layers[l].feed_forward);
        let a = self.norm(&format!("blk.{l}.ffn_norm"), self.x)?;
        let mut y = self.b.gated_ffn(l, a, e, width, Activation::GeluTanh)?;
        if self.hp.expert_count > 0 {
            let dense = self.norm(&format!("blk.{l}.post_ffw_norm_1"), y)?;
            let experts = self.experts(l)?;
            y = self.b.graph.add(dense, experts);
        }
        self.add_normed(&format!("blk.{l}.post_ffw_norm"), y)
    }

    /// What the experts make of the residual stream. The router has a norm of its own, with a factor for each element.
    fn experts(&mut self, l: usize) -> Result<Value, ModelError> {
        let e = self.hp.embedding_length;
        let factors = self.b.vector(&format!("blk.{l}.ffn_gate_inp.scale"), e)?;
        let seen = self.b.graph.rms_norm(self.x, factors, self.hp.rms_eps);
        let seen = self.b.graph.scale(seen, 1.0 / (e as f32).sqrt());
        let a = self.norm(&format!("blk.{l}.pre_ffw_norm_2"), self.x)?;
        let y = self.b.moe_ffn(l, seen, a, e, Moe::of(self.hp, l, Activation::GeluTanh))?;
        self.norm(&format!("blk.{l}.post_ffw_norm_2"), y)
    }

    /// Adds what the layer makes of its own input.
    fn layer_input(&mut self, l: usize) -> Result<(), ModelError> {
        let Some(inputs) = self.layer_inputs else { return Ok(()) };
        let (e, width) = (self.hp.embedding_length, self.shape.layer_input);
        let gate = self.b.linear(&format!("blk.{l}.inp_gate"), self.x, e, width)?;
        let input = self.b.graph.columns(inputs, l * width, width);
        let gated = self.b.graph.gated_act(gate, input, Activation::GeluTanh);
        let projected = self.b.linear(&format!("blk.{l}.proj"), gated, width, e)?;
        self.add_normed(&format!("blk.{l}.post_norm"), projected)
    }
}

/// Refuses files that hold more than the text model: nothing here would read it.
fn refuse_encoders(file: &GgufFile) -> Result<(), ModelError> {
    let encoder = |name: &str| ["v.", "a.", "mm."].iter().any(|prefix| name.starts_with(prefix));
    match file.tensors().find(|tensor| encoder(&tensor.name)) {
        None => Ok(()),
        Some(tensor) => Err(ModelError::Tensor {
            file: file.name().to_owned(),
            tensor: tensor.name.clone(),
            detail: "belongs to an image or audio encoder; expected the file of a text model alone".to_owned(),
        }),
    }
}
