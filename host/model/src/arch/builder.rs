//! What architectures share: checked access to the tensors of a file, and the blocks that most of them are made of.

use std::collections::HashSet;

use opencoti_compute::graph::{
    Activation, Graph, GraphBuilder, Rope, RopeId, RopePairing, RopeScaling, Value, WeightId,
};
use opencoti_compute::quant::WeightType;

use crate::error::ModelError;
use crate::gguf::GgufFile;
use crate::hparams::{HParams, HeadParams, LONG_FACTORS, LayerParams, SHORT_FACTORS};
use crate::layer_plan::Pass;
use crate::weights::find_weight;

/// A [`GraphBuilder`] that knows the file: each weight is looked up and its shape checked before it enters the graph.
pub(super) struct ArchBuilder<'a> {
    pub(super) graph: GraphBuilder,
    pub(super) file: &'a GgufFile,
    /// Tensors that the architecture knows and that are no weights of the graph.
    known: HashSet<String>,
}

impl<'a> ArchBuilder<'a> {
    pub(super) fn new(file: &'a GgufFile) -> Self {
        ArchBuilder { graph: GraphBuilder::new(), file, known: HashSet::new() }
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.file.tensor(name).is_some()
    }

    fn has_matrix(&self, name: &str, cols: usize, rows: usize) -> bool {
        self.file.tensor(name).is_some_and(|t| t.info().dims == [cols, rows])
    }

    /// Elements of a tensor, if the file has it.
    pub(super) fn elements(&self, name: &str) -> Option<usize> {
        self.file.tensor(name).map(|tensor| tensor.info().elements())
    }

    /// A mandatory matrix of `rows` rows of `cols` elements.
    pub(super) fn matrix(&mut self, name: &str, cols: usize, rows: usize) -> Result<WeightId, ModelError> {
        find_weight(self.file, name, &[cols, rows])?;
        Ok(self.graph.weight(name, cols, rows))
    }

    /// A mandatory stack of `experts` matrices of `rows` rows of `cols` elements.
    pub(super) fn expert_stack(
        &mut self,
        name: &str,
        cols: usize,
        rows: usize,
        experts: usize,
    ) -> Result<WeightId, ModelError> {
        find_weight(self.file, name, &[cols, rows, experts])?;
        Ok(self.graph.expert_stack(name, cols, rows, experts))
    }

    /// A mandatory vector.
    pub(super) fn vector(&mut self, name: &str, len: usize) -> Result<WeightId, ModelError> {
        self.matrix(name, len, 1)
    }

    /// A vector that files may lack.
    pub(super) fn optional_vector(&mut self, name: &str, len: usize) -> Result<Option<WeightId>, ModelError> {
        self.has(name).then(|| self.vector(name, len)).transpose()
    }

    /// The value of a tensor of one f32, if the file has it: a constant of the graph.
    pub(super) fn factor(&mut self, name: &str) -> Result<Option<f32>, ModelError> {
        self.ignore(name);
        self.has(name).then(|| scalar(self.file, name)).transpose()
    }

    /// Takes a tensor for known that no operation reads.
    pub(super) fn ignore(&mut self, name: &str) {
        self.known.insert(name.to_owned());
    }

    /// The rope of full-attention layers, with the divisors of its frequencies if the file has them. Of the two sets of
    /// LongRoPE a model takes one for all it serves: keys of a sequence are rotated once, long before its length is known.
    pub(super) fn rope(&mut self, hp: &HParams, pairing: RopePairing) -> Result<RopeId, ModelError> {
        let n_rot = hp.head.n_rot;
        let freq_divisors = match hp.rope_scaling {
            RopeScaling::LongRope { .. } => {
                let factors = if hp.long_context { LONG_FACTORS } else { SHORT_FACTORS };
                Some(self.vector(factors, n_rot / 2)?)
            }
            _ => self.optional_vector("rope_freqs.weight", n_rot / 2)?,
        };
        Ok(self.graph.rope(Rope { pairing, n_rot, base: hp.rope_base, scaling: hp.rope_scaling, freq_divisors }))
    }

    /// `x * W^T`, from `{prefix}.weight`; with `{prefix}.scale` (a factor of the product that NVFP4 files carry) and
    /// `{prefix}.bias` if the file has them.
    pub(super) fn linear(&mut self, prefix: &str, x: Value, cols: usize, rows: usize) -> Result<Value, ModelError> {
        let weight = self.matrix(&format!("{prefix}.weight"), cols, rows)?;
        let bias = self.optional_vector(&format!("{prefix}.bias"), rows)?;
        let scale = format!("{prefix}.scale");
        if !self.has(&scale) {
            return Ok(self.graph.linear(x, weight, bias));
        }
        if bias.is_some() {
            let detail = format!("cannot be combined with a {prefix}.bias; use a file without one of them");
            return Err(tensor_error(self.file, &scale, detail));
        }
        let factor = scalar(self.file, &scale)?;
        let product = self.graph.matmul(x, weight);
        Ok(self.graph.scale(product, factor))
    }

    /// KV heads of a block that attends.
    pub(super) fn kv_heads(&self, l: usize, layer: LayerParams) -> Result<usize, ModelError> {
        match layer.n_kv_heads {
            0 => Err(self.key_error("attention.head_count_kv", format!("is 0 in layer {l}, expected at least 1"))),
            heads => Ok(heads),
        }
    }

    /// Queries, keys and values of block `l`, from three projections or from one fused one (rows q, k, v).
    pub(super) fn qkv(
        &mut self,
        l: usize,
        x: Value,
        embedding: usize,
        layer: LayerParams,
        head: HeadParams,
    ) -> Result<[Value; 3], ModelError> {
        let (n_heads, n_kv_heads) = (layer.n_heads, self.kv_heads(l, layer)?);
        let widths = [n_heads * head.key, n_kv_heads * head.key, n_kv_heads * head.value];
        let fused = format!("blk.{l}.attn_qkv");
        if self.has(&format!("{fused}.weight")) {
            let [q, k, v] = widths;
            // Too large a sum fails the check of the tensor's shape.
            let rows = q.saturating_add(k).saturating_add(v);
            let all = self.linear(&fused, x, embedding, rows)?;
            return Ok([(0, q), (q, k), (q + k, v)].map(|(start, width)| self.graph.columns(all, start, width)));
        }
        let mut out = [x; 3];
        for ((value, name), width) in out.iter_mut().zip(["attn_q", "attn_k", "attn_v"]).zip(widths) {
            *value = self.linear(&format!("blk.{l}.{name}"), x, embedding, width)?;
        }
        Ok(out)
    }

    /// `down(act(gate x) * (up x))` of block `l`, from two projections or from a fused one (`ffn_up` with rows gate, up).
    pub(super) fn gated_ffn(
        &mut self,
        l: usize,
        x: Value,
        embedding: usize,
        width: usize,
        act: Activation,
    ) -> Result<Value, ModelError> {
        self.gated_ffn_named(l, "", x, embedding, width, act)
    }

    /// The same with `kind` behind the names of the weights.
    pub(super) fn gated_ffn_named(
        &mut self,
        l: usize,
        kind: &str,
        x: Value,
        embedding: usize,
        width: usize,
        act: Activation,
    ) -> Result<Value, ModelError> {
        let up = format!("blk.{l}.ffn_up{kind}");
        let [gate, up] = match self.has_matrix(&format!("{up}.weight"), embedding, width.saturating_mul(2)) {
            true => {
                let both = self.linear(&up, x, embedding, 2 * width)?;
                [0, width].map(|start| self.graph.columns(both, start, width))
            }
            false => [
                self.linear(&format!("blk.{l}.ffn_gate{kind}"), x, embedding, width)?,
                self.linear(&up, x, embedding, width)?,
            ],
        };
        let gated = self.graph.gated_act(gate, up, act);
        self.linear(&format!("blk.{l}.ffn_down{kind}"), gated, width, embedding)
    }

    /// Goes on with the output rows alone behind the last attention: nothing later reads other rows.
    pub(super) fn select_outputs_in_last_pass(&mut self, pass: Pass, attended: Value, x: Value) -> (Value, Value) {
        match pass.last {
            true => (self.graph.select_outputs(attended), self.graph.select_outputs(x)),
            false => (attended, x),
        }
    }

    /// The refusal of a key of the file's architecture.
    pub(super) fn key_error(&self, key: &str, detail: String) -> ModelError {
        let arch = self.file.metadata().str("general.architecture").ok().flatten().unwrap_or_default();
        ModelError::Key { file: self.file.name().to_owned(), key: format!("{arch}.{key}"), detail }
    }

    /// Takes the tensors of blocks behind the trunk for known: they draft tokens, which nothing does yet.
    pub(super) fn ignore_drafting_blocks(&mut self, hp: &HParams) {
        let blocks = hp.block_count..hp.block_count + hp.nextn_blocks;
        let drafts = |name: &str| {
            let block = name.strip_prefix("blk.").and_then(|rest| rest.split('.').next()?.parse().ok());
            block.is_some_and(|block: usize| blocks.contains(&block))
        };
        let names = self.file.tensors().map(|t| t.name.as_str());
        self.known.extend(names.filter(|name| drafts(name)).map(str::to_owned));
    }

    /// Ends the graph with final norm and head over the output rows of `x`; see [`end`](Self::end).
    pub(super) fn finish(mut self, x: Value, table: WeightId, hparams: &HParams) -> Result<Graph, ModelError> {
        let (hidden, logits) = self.head("output_norm", x, table, hparams)?;
        self.end(hidden, logits)
    }

    /// The last hidden state of the output rows of `x`, normed by the weight of that name, and their logits. The embedding
    /// table is the head if the file has no other.
    pub(super) fn head(
        &mut self,
        norm: &str,
        x: Value,
        table: WeightId,
        hparams: &HParams,
    ) -> Result<(Value, Value), ModelError> {
        let norm = self.vector(&format!("{norm}.weight"), hparams.embedding_length)?;
        let hidden = self.graph.rms_norm(x, norm, hparams.rms_eps);
        let chosen = self.graph.select_logits(hidden);
        let logits = match self.has("output.weight") {
            true => self.linear("output", chosen, hparams.embedding_length, hparams.vocab_size)?,
            false => self.graph.matmul(chosen, table),
        };
        let logits = match hparams.final_softcap {
            Some(cap) => self.graph.soft_cap(logits, cap),
            None => logits,
        };
        Ok((hidden, logits))
    }

    /// Ends the graph. Refuses files with block tensors that have no place in it.
    pub(super) fn end(self, hidden: Value, logits: Value) -> Result<Graph, ModelError> {
        let graph = self.graph.finish(hidden, logits);
        refuse_unused_block_tensors(self.file, &graph, &self.known)?;
        Ok(graph)
    }

    /// The graph of an encoder, with the scores that a head makes of its hidden states. Refuses files as [`finish`](Self::finish)
    /// does.
    pub(super) fn finish_encoder(self, hidden: Value, scores: Option<Value>) -> Result<Graph, ModelError> {
        let graph = self.graph.finish_encoder(hidden, scores);
        refuse_unused_block_tensors(self.file, &graph, &self.known)?;
        Ok(graph)
    }
}

/// The value of a tensor of one f32.
pub(super) fn scalar(file: &GgufFile, name: &str) -> Result<f32, ModelError> {
    let (ty, tensor) = find_weight(file, name, &[1])?;
    match (ty, <[u8; 4]>::try_from(tensor.bytes())) {
        (WeightType::F32, Ok(bytes)) => Ok(f32::from_le_bytes(bytes)),
        (ty, _) => Err(tensor_error(file, name, format!("is of type {ty}, expected F32"))),
    }
}

fn tensor_error(file: &GgufFile, tensor: &str, detail: String) -> ModelError {
    ModelError::Tensor { file: file.name().to_owned(), tensor: tensor.to_owned(), detail }
}

/// Refuses a file with tensors of blocks that the graph leaves out: it is of another variant of the architecture, and would
/// load and answer nonsense. Factors are folded into the graph, and rotation tables of old files are recomputed.
fn refuse_unused_block_tensors(file: &GgufFile, graph: &Graph, known: &HashSet<String>) -> Result<(), ModelError> {
    let used: HashSet<&str> = graph.weights.iter().map(|w| w.name.as_str()).collect();
    let harmless = |name: &str| {
        [".scale", ".input_scale", ".attn_rot_embd.weight", ".rotary_emb.inv_freq"].iter().any(|s| name.ends_with(s))
    };
    let unused = file
        .tensors()
        .map(|t| t.name.as_str())
        .find(|name| name.starts_with("blk.") && !used.contains(name) && !known.contains(*name) && !harmless(name));
    match unused {
        None => Ok(()),
        Some(name) => {
            let detail =
                "has no place in this architecture; the file holds another variant, or more blocks than it says";
            Err(tensor_error(file, name, detail.to_owned()))
        }
    }
}
