//! Hyperparameters common to the architectures, read from `{architecture}.*` keys and checked for sense.
//!
//! Per-layer fields may be one value or an array. Nothing here allocates more than a few words a layer, and there can be no
//! more layers than tensors.

use opencoti_compute::graph::RopeScaling;

use crate::error::ModelError;
use crate::gguf::{GgufFile, Metadata, Value};
use crate::layer_plan::{Pass, RepeatLayers};

/// Divisors of rope frequencies beyond the original context, in files with LongRoPE.
pub(crate) const LONG_FACTORS: &str = "rope_factors_long.weight";
/// Divisors of rope frequencies within the original context.
pub(crate) const SHORT_FACTORS: &str = "rope_factors_short.weight";
/// Base of rope frequencies when a file does not say.
const DEFAULT_ROPE_BASE: f32 = 10_000.0;

/// Architectures with layer norms in place of RMS norms.
const LAYER_NORMED: [&str; 1] = ["bert"];

/// The common hyperparameters.
#[derive(Clone, Debug, PartialEq)]
pub struct HParams {
    /// Transformer blocks of the trunk.
    pub block_count: usize,
    /// Blocks behind the trunk that draft tokens (NextN).
    pub nextn_blocks: usize,
    /// Context length the model was trained for, in tokens.
    pub context_length: usize,
    /// Width of the residual stream, E.
    pub embedding_length: usize,
    /// Rows of the embedding table, V.
    pub vocab_size: usize,
    /// Per layer, what may differ between layers.
    pub layers: Vec<LayerParams>,
    /// Head sizes of full-attention layers.
    pub head: HeadParams,
    /// Head sizes of sliding-window layers; those of full layers unless the file says otherwise.
    pub head_swa: HeadParams,
    /// Epsilon of the norms.
    pub rms_eps: f32,
    /// Sliding window W in tokens, the query's own included; `None` if the model has none.
    pub sliding_window: Option<usize>,
    /// Which layers use the window, if the file says.
    pub sliding_pattern: Option<SlidingPattern>,
    /// Whether a model with LongRoPE serves sequences beyond its original context, for which it has divisors of its own.
    pub long_context: bool,
    /// Base of the rope frequencies of full layers.
    pub rope_base: f32,
    /// Base of the rope frequencies of sliding-window layers.
    pub rope_base_swa: f32,
    /// Context extension of full layers.
    pub rope_scaling: RopeScaling,
    /// Factor of the attention scores, if the file overrides the architecture's.
    pub attention_scale: Option<f32>,
    /// Soft cap of attention scores.
    pub attention_softcap: Option<f32>,
    /// Soft cap of the logits.
    pub final_softcap: Option<f32>,
    /// Experts of the feed-forward; 0 for a dense model.
    pub expert_count: usize,
    /// Blocks that run twice.
    pub repeat: RepeatLayers,
    /// Experts that a token gets; 0 for a dense model, else at most [`expert_count`](Self::expert_count).
    pub expert_used_count: usize,
    /// Width of an expert's feed-forward, if the file says.
    pub expert_feed_forward: Option<usize>,
    /// Width of the feed-forward of the expert that serves every token, if there is one.
    pub shared_expert_feed_forward: Option<usize>,
    /// Whether tokens see only what is before them, if the file says.
    pub causal: Option<bool>,
    /// How embeddings are pooled, if the file says.
    pub pooling: Option<PoolingType>,
}

/// What is made of the hidden states of a text (`{arch}.pooling_type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolingType {
    /// Nothing: a vector a token.
    None,
    /// Their mean.
    Mean,
    /// The first one.
    Cls,
    /// The last one.
    Last,
    /// The scores that a head gives to the first one.
    Rank,
}

/// What may differ between layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerParams {
    /// Query heads.
    pub n_heads: usize,
    /// KV heads; divides the query heads. 0 in a layer without attention.
    pub n_kv_heads: usize,
    /// Width of the feed-forward; may be 0 where there are experts.
    pub feed_forward: usize,
}

/// Sizes of one head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadParams {
    /// Width of keys and queries.
    pub key: usize,
    /// Width of values.
    pub value: usize,
    /// Leading elements that rotate; even, at most `key`.
    pub n_rot: usize,
}

/// How the file says which layers use the sliding window.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SlidingPattern {
    /// Every layer but each `period`-th.
    Period(usize),
    /// One flag a layer, true for a sliding-window layer.
    Layers(Vec<bool>),
}

impl SlidingPattern {
    /// Whether layer `l` uses the window.
    pub fn is_sliding(&self, l: usize) -> bool {
        match self {
            SlidingPattern::Period(period) => l % period < period - 1,
            SlidingPattern::Layers(flags) => flags.get(l).copied().unwrap_or(false),
        }
    }
}

impl HParams {
    /// Window of layer `l`. Where the file does not say which layers have it, it is each but every `default_period`-th, or all.
    pub fn window(&self, l: usize, default_period: Option<usize>) -> Option<usize> {
        let sliding = match (&self.sliding_pattern, default_period) {
            (Some(pattern), _) => pattern.is_sliding(l),
            (None, Some(period)) => SlidingPattern::Period(period).is_sliding(l),
            (None, None) => true,
        };
        self.sliding_window.filter(|_| sliding)
    }

    /// Reads the keys with the prefix `arch`.
    ///
    /// # Errors
    /// A mandatory key is missing, or a value is of a wrong type, out of range or contradicts another.
    pub fn read(file: &GgufFile, arch: &str) -> Result<HParams, ModelError> {
        let keys = Keys::of(file, arch);
        let stored = keys.positive("block_count")?;
        let tensors = file.tensors().count();
        if stored > tensors {
            let detail = format!("says {stored} blocks, but the file has only {tensors} tensors");
            return Err(keys.error("block_count", detail));
        }
        let nextn_blocks = keys.size("nextn_predict_layers")?.unwrap_or(0);
        if nextn_blocks >= stored {
            let detail = format!("is {nextn_blocks}, expected less than the {stored} blocks of the file");
            return Err(keys.error("nextn_predict_layers", detail));
        }
        let block_count = stored - nextn_blocks;
        let embedding_length = keys.positive("embedding_length")?;
        let context_length = keys.positive("context_length")?;
        let layers = keys.layers(block_count)?;
        let head = keys.head("", &layers, embedding_length, None)?;
        let sliding_window = keys.size("attention.sliding_window")?.filter(|&w| w > 0);
        let mut hparams = HParams {
            block_count,
            nextn_blocks,
            context_length,
            long_context: false,
            embedding_length,
            vocab_size: keys.vocab_size(file)?,
            head,
            head_swa: keys.head("_swa", &layers, embedding_length, Some(head))?,
            layers,
            rms_eps: keys.norm_eps()?,
            sliding_window,
            sliding_pattern: keys.sliding_pattern(block_count)?,
            rope_base: keys.number("rope.freq_base")?.unwrap_or(DEFAULT_ROPE_BASE),
            rope_base_swa: keys.number("rope.freq_base_swa")?.unwrap_or(DEFAULT_ROPE_BASE),
            rope_scaling: keys.rope_scaling(file)?,
            attention_scale: keys.number("attention.scale")?,
            attention_softcap: keys.number("attn_logit_softcapping")?,
            final_softcap: keys.number("final_logit_softcapping")?,
            expert_count: keys.size("expert_count")?.unwrap_or(0),
            repeat: RepeatLayers::default(),
            expert_used_count: keys.expert_used_count()?,
            expert_feed_forward: keys.size("expert_feed_forward_length")?.filter(|&w| w > 0),
            shared_expert_feed_forward: keys.size("expert_shared_feed_forward_length")?.filter(|&w| w > 0),
            causal: keys.meta.bool(&keys.name("attention.causal"))?,
            pooling: keys.pooling()?,
        };
        hparams.serve(context_length);
        Ok(hparams)
    }

    /// Prepares for sequences of up to `context` tokens, or the trained length if that is less.
    pub fn serve(&mut self, context: usize) {
        let longest = context.min(self.context_length);
        self.long_context = match self.rope_scaling {
            RopeScaling::LongRope { original_context, .. } => longest > original_context as usize,
            _ => false,
        };
    }

    /// The runs of stored blocks, in order. What is a matter of weights, of the kind of layer and of its sizes goes by
    /// [`Pass::block`]; keys, values and states belong to the pass.
    pub fn passes(&self) -> impl Iterator<Item = Pass> + use<> {
        self.repeat.passes(self.block_count)
    }
}

/// The keys of one architecture, without their prefix.
pub(crate) struct Keys<'a> {
    meta: &'a Metadata,
    arch: &'a str,
}

impl<'a> Keys<'a> {
    /// The keys that begin with `arch`.
    pub(crate) fn of(file: &'a GgufFile, arch: &'a str) -> Self {
        Keys { meta: file.metadata(), arch }
    }

    /// A key with its prefix.
    pub(crate) fn name(&self, key: &str) -> String {
        format!("{}.{key}", self.arch)
    }

    /// A refusal of a key.
    pub(crate) fn error(&self, key: &str, detail: String) -> ModelError {
        ModelError::Key { file: self.meta.file().to_owned(), key: self.name(key), detail }
    }

    /// A size, if the key is there.
    pub(crate) fn size(&self, key: &str) -> Result<Option<usize>, ModelError> {
        Ok(self.meta.u32(&self.name(key))?.map(|v| v as usize))
    }

    /// A mandatory size, at least 1.
    pub(crate) fn positive(&self, key: &str) -> Result<usize, ModelError> {
        match self.size(key)? {
            Some(0) => Err(self.meta.unexpected(&self.name(key), "at least 1").into()),
            Some(size) => Ok(size),
            None => Err(self.meta.missing(&self.name(key), "a positive integer").into()),
        }
    }

    /// A number above 0, if the key is there. Converters write 0 for "off" in some optional fields, so 0 counts as absent.
    pub(crate) fn number(&self, key: &str) -> Result<Option<f32>, ModelError> {
        match self.meta.f32(&self.name(key))? {
            Some(v) if v < 0.0 => Err(self.meta.unexpected(&self.name(key), "a number above 0").into()),
            other => Ok(other.filter(|&v| v > 0.0)),
        }
    }

    /// A mandatory number above 0.
    pub(crate) fn required_number(&self, key: &str) -> Result<f32, ModelError> {
        let number = self.number(key)?;
        number.ok_or_else(|| self.meta.missing(&self.name(key), "a number above 0").into())
    }

    /// A boolean, if the key is there.
    pub(crate) fn flag(&self, key: &str) -> Result<Option<bool>, ModelError> {
        Ok(self.meta.bool(&self.name(key))?)
    }

    fn expert_used_count(&self) -> Result<usize, ModelError> {
        let (count, used) = (self.size("expert_count")?.unwrap_or(0), self.size("expert_used_count")?.unwrap_or(0));
        match count {
            0 => Ok(0),
            _ if (1..=count).contains(&used) => Ok(used),
            _ => Err(self.error("expert_used_count", format!("is {used}, expected 1 to the {count} experts"))),
        }
    }

    /// The epsilon of RMS norms; architectures with layer norms have another key.
    fn norm_eps(&self) -> Result<f32, ModelError> {
        match LAYER_NORMED.contains(&self.arch) {
            true => self.required_number("attention.layer_norm_epsilon"),
            false => self.required_number("attention.layer_norm_rms_epsilon"),
        }
    }

    fn pooling(&self) -> Result<Option<PoolingType>, ModelError> {
        let Some(number) = self.meta.u32(&self.name("pooling_type"))? else { return Ok(None) };
        match number {
            0 => Ok(Some(PoolingType::None)),
            1 => Ok(Some(PoolingType::Mean)),
            2 => Ok(Some(PoolingType::Cls)),
            3 => Ok(Some(PoolingType::Last)),
            4 => Ok(Some(PoolingType::Rank)),
            other => {
                let detail = format!("is {other}, expected 0 (none), 1 (mean), 2 (cls), 3 (last) or 4 (rank)");
                Err(self.error("pooling_type", detail))
            }
        }
    }

    fn layers(&self, count: usize) -> Result<Vec<LayerParams>, ModelError> {
        let per_layer = |key: &str| self.meta.per_layer_u32(&self.name(key), count);
        let required = |key: &str| {
            per_layer(key)?.ok_or_else(|| self.meta.missing(&self.name(key), "an integer, or one for each layer"))
        };
        let heads = required("attention.head_count")?;
        let kv_heads = per_layer("attention.head_count_kv")?.unwrap_or_else(|| heads.clone());
        // A model of experts alone has none.
        let dense = self.size("expert_count")?.unwrap_or(0) == 0;
        let widths = match per_layer("feed_forward_length")? {
            None if !dense => vec![0; count],
            _ => required("feed_forward_length")?,
        };
        let layers = (0..count).map(|l| LayerParams {
            n_heads: heads[l] as usize,
            n_kv_heads: kv_heads[l] as usize,
            feed_forward: widths[l] as usize,
        });
        layers.enumerate().map(|(l, layer)| self.check_layer(l, layer, dense)).collect()
    }

    fn check_layer(&self, l: usize, layer: LayerParams, dense: bool) -> Result<LayerParams, ModelError> {
        let LayerParams { n_heads, n_kv_heads, feed_forward } = layer;
        for (key, size) in [("attention.head_count", n_heads), ("feed_forward_length", feed_forward)] {
            if size == 0 && (dense || key != "feed_forward_length") {
                return Err(self.error(key, format!("is 0 in layer {l}, expected at least 1")));
            }
        }
        if n_kv_heads > 0 && !n_heads.is_multiple_of(n_kv_heads) {
            let detail = format!("is {n_kv_heads} in layer {l}, which does not divide the {n_heads} query heads");
            return Err(self.error("attention.head_count_kv", detail));
        }
        Ok(layer)
    }

    /// Head sizes; `suffix` is empty for full layers and `_swa` for sliding-window ones, which default to the former.
    fn head(
        &self,
        suffix: &str,
        layers: &[LayerParams],
        embedding: usize,
        default: Option<HeadParams>,
    ) -> Result<HeadParams, ModelError> {
        let sized = |key: &str| -> Result<Option<usize>, ModelError> {
            match self.size(&format!("{key}{suffix}"))? {
                Some(0) => Err(self.error(&format!("{key}{suffix}"), "is 0, expected at least 1".to_owned())),
                size => Ok(size),
            }
        };
        let even = || match layers.iter().find(|l| !embedding.is_multiple_of(l.n_heads)) {
            None => Ok(embedding / layers[0].n_heads),
            Some(l) => Err(self.error(
                "attention.key_length",
                format!("is missing, and {} heads do not divide the embedding length {embedding}", l.n_heads),
            )),
        };
        let key = match (sized("attention.key_length")?, default) {
            (Some(size), _) => size,
            (None, Some(full)) => full.key,
            (None, None) => even()?,
        };
        let value = sized("attention.value_length")?.or(default.map(|d| d.value)).unwrap_or(key);
        let n_rot_key = format!("rope.dimension_count{suffix}");
        let n_rot = self.size(&n_rot_key)?.or(default.filter(|d| d.key == key).map(|d| d.n_rot)).unwrap_or(key);
        if n_rot == 0 || n_rot > key || !n_rot.is_multiple_of(2) {
            let detail = format!("is {n_rot}, expected an even number from 2 to the head size {key}");
            return Err(self.error(&n_rot_key, detail));
        }
        Ok(HeadParams { key, value, n_rot })
    }

    /// The length of the token list, or the key of a model without one, or what the embedding table says.
    fn vocab_size(&self, file: &GgufFile) -> Result<usize, ModelError> {
        if let Some(tokens) = self.meta.strings("tokenizer.ggml.tokens")?.filter(|tokens| !tokens.is_empty()) {
            return Ok(tokens.len());
        }
        match self.size("vocab_size")? {
            Some(size) => Ok(size),
            None => Ok(file.tensor("token_embd.weight").map_or(0, |t| t.info().dims.get(1).copied().unwrap_or(1))),
        }
    }

    fn sliding_pattern(&self, layers: usize) -> Result<Option<SlidingPattern>, ModelError> {
        let key = self.name("attention.sliding_window_pattern");
        match self.meta.get(&key) {
            None => Ok(None),
            Some(Value::Array(a)) if a.len() < layers => {
                Err(self.meta.unexpected(&key, &format!("one flag for each of the {layers} layers")).into())
            }
            Some(Value::Array(_)) => Ok(self.meta.bools(&key)?.map(SlidingPattern::Layers)),
            Some(_) => match self.meta.u32(&key)? {
                Some(0) => Err(self.meta.unexpected(&key, "a period of at least 1").into()),
                period => Ok(period.map(|p| SlidingPattern::Period(p as usize))),
            },
        }
    }

    fn rope_scaling(&self, file: &GgufFile) -> Result<RopeScaling, ModelError> {
        let key = |name: &str| format!("rope.scaling.{name}");
        // Files before `rope.scaling.*` wrote only the linear factor.
        let factor = self.number(&key("factor"))?.or(self.number("rope.scale_linear")?);
        // Files of Phi-3 say by their tensors alone that they have two sets of divisors.
        let unnamed = if file.tensor(LONG_FACTORS).is_some() { "longrope" } else { "linear" };
        let kind = self.meta.str(&self.name("rope.scaling.type"))?.unwrap_or(unnamed);
        let needed = |name: &str, value: Option<f32>| {
            value.ok_or_else(|| self.error(&key(name), format!("is missing; {kind} scaling needs it")))
        };
        let original = || match self.size(&key("original_context_length"))? {
            Some(length) if length > 0 => Ok(length as u32),
            _ => self.positive("context_length").map(|length| length as u32),
        };
        match kind {
            "none" => Ok(RopeScaling::None),
            "linear" => Ok(match factor {
                Some(factor) if factor != 1.0 => RopeScaling::Linear { factor },
                _ => RopeScaling::None,
            }),
            "yarn" => Ok(RopeScaling::Yarn {
                factor: needed("factor", factor)?,
                original_context: original()?,
                ext_factor: self.number(&key("yarn_ext_factor"))?.unwrap_or(1.0),
                attn_factor: self.number(&key("attn_factor"))?.unwrap_or(1.0),
                beta_fast: self.number(&key("yarn_beta_fast"))?.unwrap_or(32.0),
                beta_slow: self.number(&key("yarn_beta_slow"))?.unwrap_or(1.0),
            }),
            "llama3" => Ok(RopeScaling::Llama3 {
                factor: needed("factor", factor)?,
                low: needed("low_freq_factor", self.number(&key("low_freq_factor"))?)?,
                high: needed("high_freq_factor", self.number(&key("high_freq_factor"))?)?,
                original_context: original()?,
            }),
            "longrope" => {
                let (context, original_context) = (self.positive("context_length")?, original()?);
                let given = self.number(&key("attn_factor"))?;
                let attn_factor = given.unwrap_or_else(|| longrope_magnitude(context, original_context));
                Ok(RopeScaling::LongRope { original_context, attn_factor })
            }
            other => {
                let detail = format!("is {other:?}; supported are none, linear, yarn, llama3 and longrope");
                Err(self.error("rope.scaling.type", detail))
            }
        }
    }
}

/// What LongRoPE multiplies cosine and sine by, when a file leaves it to its lengths.
fn longrope_magnitude(context: usize, original_context: u32) -> f32 {
    let original = f64::from(original_context);
    let factor = context as f64 / original;
    if factor <= 1.0 || original <= 1.0 { 1.0 } else { (1.0 + factor.ln() / original.ln()).sqrt() as f32 }
}
