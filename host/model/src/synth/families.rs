//! Keys and tensors of each family, by its shape.

use opencoti_compute::quant::WeightType;

use super::{Fill, Quant, Spec};
use crate::gguf::{Array, Value};

/// What makes one model another.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) family: Family,
    pub(super) arch: &'static str,
    pub(super) layers: usize,
    pub(super) width: usize,
    pub(super) attention: Attention,
    /// Width of the dense feed-forward.
    pub(super) ff: usize,
    pub(super) vocabulary: usize,
    pub(super) context: usize,
    /// Whether the embedding table is the head.
    pub(super) tied: bool,
    pub(super) eps: f32,
    pub(super) experts: Option<Experts>,
}

/// Heads of attention; of window layers where they differ.
#[derive(Clone, Copy, Debug)]
pub(super) struct Attention {
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) head: usize,
    pub(super) base: f32,
    /// Elements of a head that rotate.
    pub(super) rotated: usize,
}

/// Routed experts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Experts {
    pub(super) count: usize,
    pub(super) used: usize,
    pub(super) width: usize,
    /// Width of the one that serves every token; 0 for none.
    pub(super) shared: usize,
}

/// What a family has beside attention and feed-forward.
#[derive(Clone, Copy, Debug)]
pub(super) enum Family {
    Llama,
    Qwen2,
    Qwen3,
    /// With the window of five layers in six.
    Gemma3 {
        window: usize,
    },
    /// With the KV heads of full layers, whose heads are 512 wide.
    Gemma4(Gemma4, usize),
    Hybrid(DeltaNet),
}

/// Parts of Gemma 4.
#[derive(Clone, Copy, Debug)]
pub(super) struct Gemma4 {
    pub(super) window: usize,
    pub(super) period: usize,
    /// Last layers, which have no keys and values of their own.
    pub(super) shared: usize,
    /// Whether these have feed-forwards of twice the width.
    pub(super) wide: bool,
    /// Width of the inputs that each layer gets; 0 for none.
    pub(super) per_layer: usize,
    /// Whether full layers have a projection for values.
    pub(super) own_values: bool,
}

/// Layers of gated delta nets, and full attention in every `period`-th.
#[derive(Clone, Copy, Debug)]
pub(super) struct DeltaNet {
    pub(super) k_heads: usize,
    pub(super) v_heads: usize,
    pub(super) head: usize,
    pub(super) taps: usize,
    pub(super) period: usize,
}

/// A tensor whose type is not chosen yet.
pub(super) struct Draft {
    pub(super) name: String,
    pub(super) dims: Vec<usize>,
    pub(super) fill: Fill,
    /// The type, if no quantisation changes it.
    pub(super) kept: Option<WeightType>,
}

/// Width of Gemma 4's full heads.
const FULL_HEAD: usize = 512;

impl Shape {
    /// The first layers of it.
    pub(super) fn cut(&self, layers: usize) -> Shape {
        let mut shape = Shape { layers, ..*self };
        if let Family::Gemma4(parts, _) = &mut shape.family {
            parts.shared = parts.shared.saturating_sub(self.layers - layers);
        }
        shape
    }

    pub(super) fn spec(&self, name: &str, quant: Quant) -> Spec {
        let mut list = List { shape: *self, keys: Vec::new(), drafts: Vec::new() };
        list.common_keys(name, quant);
        list.top();
        for l in 0..self.layers {
            match self.family {
                Family::Llama | Family::Qwen2 | Family::Qwen3 => list.plain_layer(l),
                Family::Gemma3 { .. } => list.gemma3_layer(l),
                Family::Gemma4(parts, kv_full) => list.gemma4_layer(l, parts, kv_full),
                Family::Hybrid(net) => list.hybrid_layer(l, net),
            }
        }
        list.family_keys();
        Spec { keys: list.keys, tensors: quant.assign(list.drafts, self.layers, self.tied) }
    }

    /// Whether layer `l` is full attention, where every `period`-th is; the last one of Gemma 4 always is.
    fn is_full(&self, l: usize, period: usize) -> bool {
        let last = matches!(self.family, Family::Gemma4(..)) && l + 1 == self.layers;
        (l + 1).is_multiple_of(period) || last
    }
}

/// Keys and tensors as they are written down.
struct List {
    shape: Shape,
    keys: Vec<(String, Value)>,
    drafts: Vec<Draft>,
}

impl List {
    fn key(&mut self, name: &str, value: Value) {
        self.keys.push((format!("{}.{name}", self.shape.arch), value));
    }

    fn sizes(&mut self, sizes: &[(&str, usize)]) {
        for &(name, size) in sizes {
            self.key(name, Value::U32(size as u32));
        }
    }

    fn numbers(&mut self, numbers: &[(&str, f32)]) {
        for &(name, number) in numbers {
            self.key(name, Value::F32(number));
        }
    }

    fn common_keys(&mut self, name: &str, quant: Quant) {
        let Shape { arch, layers, width, attention, ff, vocabulary, context, eps, experts, .. } = self.shape;
        let text = |text: &str| Value::Str(text.to_owned());
        for (key, value) in [
            ("general.architecture", text(arch)),
            ("general.name", text(&format!("{name} (made up)"))),
            ("general.file_type", Value::U32(quant.file_type())),
            ("general.quantization_version", Value::U32(2)),
            ("tokenizer.ggml.model", text("none")),
        ] {
            self.keys.push((key.to_owned(), value));
        }
        self.sizes(&[
            ("vocab_size", vocabulary),
            ("block_count", layers),
            ("context_length", context),
            ("embedding_length", width),
            ("attention.head_count", attention.heads),
        ]);
        self.numbers(&[("attention.layer_norm_rms_epsilon", eps), ("rope.freq_base", attention.base)]);
        if let Some(Experts { count, used, width, shared }) = experts {
            self.sizes(&[("expert_count", count), ("expert_used_count", used), ("expert_feed_forward_length", width)]);
            if shared > 0 {
                self.sizes(&[("expert_shared_feed_forward_length", shared)]);
            }
        }
        let elastic = matches!(self.shape.family, Family::Gemma4(Gemma4 { wide: true, .. }, _));
        if ff > 0 && !elastic {
            self.sizes(&[("feed_forward_length", ff)]);
        }
    }

    fn family_keys(&mut self) {
        let Attention { kv_heads, head, rotated, .. } = self.shape.attention;
        match self.shape.family {
            Family::Gemma4(parts, kv_full) => return self.gemma4_keys(parts, kv_full),
            Family::Gemma3 { window } => {
                self.sizes(&[("attention.sliding_window", window)]);
                self.numbers(&[("rope.freq_base_swa", 1e4)]);
                // 4B and larger were extended.
                if window == 1024 {
                    self.key("rope.scaling.type", Value::Str("linear".to_owned()));
                    self.numbers(&[("rope.scaling.factor", 8.0)]);
                }
            }
            Family::Hybrid(net) => self.delta_net_keys(net),
            Family::Llama | Family::Qwen2 | Family::Qwen3 => {}
        }
        self.sizes(&[
            ("attention.head_count_kv", kv_heads),
            ("attention.key_length", head),
            ("attention.value_length", head),
            ("rope.dimension_count", rotated),
        ]);
    }

    fn gemma4_keys(&mut self, parts: Gemma4, kv_full: usize) {
        let (shape, Attention { kv_heads, head, .. }) = (self.shape, self.shape.attention);
        let swa: Vec<bool> = (0..shape.layers).map(|l| !shape.is_full(l, parts.period)).collect();
        let kv = swa.iter().map(|&swa| if swa { kv_heads } else { kv_full } as u32).collect();
        self.key("attention.head_count_kv", Value::Array(Array::U32(kv)));
        self.key("attention.sliding_window_pattern", Value::Array(Array::Bool(swa)));
        self.sizes(&[
            ("attention.key_length", FULL_HEAD),
            ("attention.value_length", FULL_HEAD),
            ("attention.key_length_swa", head),
            ("attention.value_length_swa", head),
            ("attention.sliding_window", parts.window),
            ("attention.shared_kv_layers", parts.shared),
            ("embedding_length_per_layer_input", parts.per_layer),
            ("rope.dimension_count", FULL_HEAD),
            ("rope.dimension_count_swa", head),
        ]);
        self.numbers(&[("final_logit_softcapping", 30.0), ("rope.freq_base_swa", 1e4)]);
        if parts.wide {
            let widths = (0..shape.layers).map(|l| self.gemma4_ff(l, parts) as u32).collect();
            self.key("feed_forward_length", Value::Array(Array::U32(widths)));
        }
    }

    fn delta_net_keys(&mut self, net: DeltaNet) {
        if self.shape.arch != "qwen3next" {
            self.key("rope.dimension_sections", Value::Array(Array::I32(vec![11, 11, 10, 0])));
        }
        self.sizes(&[
            ("ssm.conv_kernel", net.taps),
            ("ssm.state_size", net.head),
            ("ssm.group_count", net.k_heads),
            ("ssm.time_step_rank", net.v_heads),
            ("ssm.inner_size", net.v_heads * net.head),
            ("full_attention_interval", net.period),
        ]);
    }

    /// A matrix or a stack, of standard deviation `gain / √columns`.
    fn matrix(&mut self, name: String, dims: &[usize], gain: f32) {
        let fill = Fill::Random(gain / (dims[0] as f32).sqrt());
        self.drafts.push(Draft { name, dims: dims.to_vec(), fill, kept: None });
    }

    fn floats(&mut self, name: String, dims: &[usize], fill: Fill) {
        self.drafts.push(Draft { name, dims: dims.to_vec(), fill, kept: Some(WeightType::F32) });
    }

    fn norm(&mut self, name: String, len: usize, value: f32) {
        self.floats(name, &[len], Fill::Constant(value));
    }

    fn top(&mut self) {
        let Shape { width, vocabulary, tied, layers, .. } = self.shape;
        // A table that is the head, too, has the deviation of a head.
        let gain = if tied { 1.0 } else { 0.5 * (width as f32).sqrt() };
        self.matrix("token_embd.weight".into(), &[width, vocabulary], gain);
        self.norm("output_norm.weight".into(), width, 1.0);
        if !tied {
            self.matrix("output.weight".into(), &[width, vocabulary], 1.0);
        }
        match self.shape.family {
            Family::Gemma4(Gemma4 { per_layer, .. }, _) => {
                // A quarter of the pairs rotates.
                let divisors = (0..FULL_HEAD / 2).map(|i| if i < FULL_HEAD / 8 { 1.0 } else { 1e30 }).collect();
                self.floats("rope_freqs.weight".into(), &[FULL_HEAD / 2], Fill::Values(divisors));
                if per_layer > 0 {
                    self.matrix("per_layer_token_embd.weight".into(), &[per_layer * layers, vocabulary], 1.0);
                    let fill = Fill::Random(1.0 / (width as f32).sqrt());
                    let (name, dims) = ("per_layer_model_proj.weight".into(), vec![width, per_layer * layers]);
                    self.drafts.push(Draft { name, dims, fill, kept: Some(WeightType::BF16) });
                    self.norm("per_layer_proj_norm.weight".into(), per_layer, 1.0);
                }
            }
            Family::Llama if vocabulary == 128_256 => {
                self.norm("rope_freqs.weight".into(), self.shape.attention.rotated / 2, 1.0);
            }
            _ => {}
        }
    }

    /// `attn_q`, `attn_k`, `attn_v` and `attn_output`.
    fn attention(&mut self, l: usize, gain: f32) {
        let (width, Attention { heads, kv_heads, head, .. }) = (self.shape.width, self.shape.attention);
        self.matrix(format!("blk.{l}.attn_q.weight"), &[width, heads * head], 1.0);
        self.matrix(format!("blk.{l}.attn_k.weight"), &[width, kv_heads * head], 1.0);
        self.matrix(format!("blk.{l}.attn_v.weight"), &[width, kv_heads * head], 1.0);
        self.matrix(format!("blk.{l}.attn_output.weight"), &[heads * head, width], gain);
    }

    fn head_norms(&mut self, l: usize, head: usize, value: f32) {
        self.norm(format!("blk.{l}.attn_q_norm.weight"), head, value);
        self.norm(format!("blk.{l}.attn_k_norm.weight"), head, value);
    }

    /// The three products of a feed-forward, `kind` behind their names.
    fn feed_forward(&mut self, l: usize, kind: &str, ff: usize) {
        let width = self.shape.width;
        self.matrix(format!("blk.{l}.ffn_gate{kind}.weight"), &[width, ff], 1.0);
        self.matrix(format!("blk.{l}.ffn_up{kind}.weight"), &[width, ff], 1.0);
        self.matrix(format!("blk.{l}.ffn_down{kind}.weight"), &[ff, width], 1.0);
    }

    fn experts(&mut self, l: usize, experts: Experts) {
        let (width, Experts { count, width: ff, shared, .. }) = (self.shape.width, experts);
        let router = Fill::Random(1.0 / (width as f32).sqrt());
        self.floats(format!("blk.{l}.ffn_gate_inp.weight"), &[width, count], router.clone());
        self.matrix(format!("blk.{l}.ffn_gate_exps.weight"), &[width, ff, count], 1.0);
        self.matrix(format!("blk.{l}.ffn_up_exps.weight"), &[width, ff, count], 1.0);
        self.matrix(format!("blk.{l}.ffn_down_exps.weight"), &[ff, width, count], 1.0);
        if shared > 0 {
            self.floats(format!("blk.{l}.ffn_gate_inp_shexp.weight"), &[width], router);
            self.feed_forward(l, "_shexp", shared);
        }
    }

    fn dense_or_experts(&mut self, l: usize) {
        match self.shape.experts {
            Some(experts) => self.experts(l, experts),
            None => self.feed_forward(l, "", self.shape.ff),
        }
    }

    fn plain_layer(&mut self, l: usize) {
        let Shape { family, width, attention: Attention { heads, kv_heads, head, .. }, .. } = self.shape;
        self.norm(format!("blk.{l}.attn_norm.weight"), width, 1.0);
        self.attention(l, 0.5);
        match family {
            Family::Qwen2 => {
                for (name, heads) in [("q", heads), ("k", kv_heads), ("v", kv_heads)] {
                    self.floats(format!("blk.{l}.attn_{name}.bias"), &[heads * head], Fill::Random(0.1));
                }
            }
            Family::Qwen3 => self.head_norms(l, head, 1.0),
            _ => {}
        }
        self.norm(format!("blk.{l}.ffn_norm.weight"), width, 1.0);
        self.dense_or_experts(l);
    }

    fn gemma3_layer(&mut self, l: usize) {
        let (width, ff, head) = (self.shape.width, self.shape.ff, self.shape.attention.head);
        self.norm(format!("blk.{l}.attn_norm.weight"), width, 1.0);
        self.attention(l, 1.0);
        self.head_norms(l, head, 1.0);
        self.norm(format!("blk.{l}.post_attention_norm.weight"), width, 0.25);
        self.norm(format!("blk.{l}.ffn_norm.weight"), width, 1.0);
        self.feed_forward(l, "", ff);
        self.norm(format!("blk.{l}.post_ffw_norm.weight"), width, 0.5);
    }

    fn gemma4_ff(&self, l: usize, parts: Gemma4) -> usize {
        let doubled = parts.wide && l >= self.shape.layers - parts.shared;
        if doubled { 2 * self.shape.ff } else { self.shape.ff }
    }

    fn gemma4_layer(&mut self, l: usize, parts: Gemma4, kv_full: usize) {
        let Shape { width, attention, layers, experts, .. } = self.shape;
        let full = self.shape.is_full(l, parts.period);
        let (head, kv_heads) = if full { (FULL_HEAD, kv_full) } else { (attention.head, attention.kv_heads) };
        self.norm(format!("blk.{l}.attn_norm.weight"), width, 1.0);
        self.matrix(format!("blk.{l}.attn_q.weight"), &[width, attention.heads * head], 1.0);
        self.norm(format!("blk.{l}.attn_q_norm.weight"), head, 0.3);
        if l < layers - parts.shared {
            self.matrix(format!("blk.{l}.attn_k.weight"), &[width, kv_heads * head], 1.0);
            self.norm(format!("blk.{l}.attn_k_norm.weight"), head, 0.3);
            if !full || parts.own_values {
                self.matrix(format!("blk.{l}.attn_v.weight"), &[width, kv_heads * head], 1.0);
            }
        }
        self.matrix(format!("blk.{l}.attn_output.weight"), &[attention.heads * head, width], 1.0);
        self.norm(format!("blk.{l}.post_attention_norm.weight"), width, 0.25);
        self.norm(format!("blk.{l}.layer_output_scale.weight"), 1, 1.0);
        self.norm(format!("blk.{l}.ffn_norm.weight"), width, 1.0);
        self.feed_forward(l, "", self.gemma4_ff(l, parts));
        self.norm(format!("blk.{l}.post_ffw_norm.weight"), width, 0.5);
        if let Some(experts) = experts {
            self.gemma4_experts(l, experts);
        }
        if parts.per_layer > 0 {
            self.matrix(format!("blk.{l}.inp_gate.weight"), &[width, parts.per_layer], 1.0);
            self.matrix(format!("blk.{l}.proj.weight"), &[parts.per_layer, width], 1.0);
            self.norm(format!("blk.{l}.post_norm.weight"), width, 0.5);
        }
    }

    fn gemma4_experts(&mut self, l: usize, experts: Experts) {
        let (width, Experts { count, width: ff, .. }) = (self.shape.width, experts);
        // The router reads a unit vector.
        self.floats(format!("blk.{l}.ffn_gate_inp.weight"), &[width, count], Fill::Random(1.0));
        self.norm(format!("blk.{l}.ffn_gate_inp.scale"), width, 1.0);
        for name in ["pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"] {
            self.norm(format!("blk.{l}.{name}.weight"), width, 1.0);
        }
        self.matrix(format!("blk.{l}.ffn_gate_up_exps.weight"), &[width, 2 * ff, count], 1.0);
        self.matrix(format!("blk.{l}.ffn_down_exps.weight"), &[ff, width, count], 1.0);
        self.norm(format!("blk.{l}.ffn_down_exps.scale"), count, 1.0);
    }

    fn hybrid_layer(&mut self, l: usize, net: DeltaNet) {
        let (width, Attention { heads, head, .. }) = (self.shape.width, self.shape.attention);
        self.norm(format!("blk.{l}.attn_norm.weight"), width, 1.0);
        self.norm(format!("blk.{l}.post_attention_norm.weight"), width, 1.0);
        if self.shape.is_full(l, net.period) {
            self.attention(l, 0.5);
            // Each query head is followed by its gate.
            if let Some(q) = self.drafts.iter_mut().rev().find(|d| d.name.ends_with("attn_q.weight")) {
                q.dims[1] = 2 * heads * head;
            }
            self.head_norms(l, head, 1.0);
        } else {
            self.delta_net(l, net);
        }
        self.dense_or_experts(l);
    }

    fn delta_net(&mut self, l: usize, net: DeltaNet) {
        let (width, DeltaNet { k_heads, v_heads, head, taps, .. }) = (self.shape.width, net);
        let (keys, values) = (k_heads * head, v_heads * head);
        self.matrix(format!("blk.{l}.attn_qkv.weight"), &[width, 2 * keys + values], 1.0);
        self.matrix(format!("blk.{l}.attn_gate.weight"), &[width, values], 1.0);
        self.floats(format!("blk.{l}.ssm_conv1d.weight"), &[taps, 2 * keys + values], Fill::Random(0.5));
        self.norm(format!("blk.{l}.ssm_dt.bias"), v_heads, -2.0);
        self.norm(format!("blk.{l}.ssm_a"), v_heads, -1.0);
        if self.shape.arch == "qwen3next" {
            self.matrix(format!("blk.{l}.ssm_ba.weight"), &[width, 2 * v_heads], 1.0);
        } else {
            self.matrix(format!("blk.{l}.ssm_beta.weight"), &[width, v_heads], 1.0);
            self.matrix(format!("blk.{l}.ssm_alpha.weight"), &[width, v_heads], 1.0);
        }
        self.norm(format!("blk.{l}.ssm_norm.weight"), head, 1.0);
        self.matrix(format!("blk.{l}.ssm_out.weight"), &[values, width], 0.5);
    }
}
