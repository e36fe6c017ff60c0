//! Model graphs: descriptions over a small set of operations.
//!
//! A graph is a list of operations in execution order. Every [`Value`] is a matrix of activations in f32, one row a
//! token; how many rows is known only when a step runs. Weights and rope tables are named here and bound when the
//! model is loaded. Fusing, memory planning and threading are the executor's business.

use std::collections::HashMap;

/// An activation: `rows of the step x width` in f32.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Value(pub u32);

/// Index of a weight among [`Graph::weights`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct WeightId(pub u32);

/// Index of a rope description among [`Graph::ropes`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct RopeId(pub u32);

/// Index of an attention layer among [`Graph::kv_layers`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct KvLayerId(pub u32);

/// Index of a recurrent layer among [`Graph::state_layers`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct StateLayerId(pub u32);

/// A weight by its name in the model file and the shape the graph needs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WeightDecl {
    /// Tensor name, for example `blk.0.attn_q.weight`.
    pub name: String,
    /// Length of a row (ne0 of the file).
    pub cols: usize,
    /// Rows, those of all experts together; 1 for a vector.
    pub rows: usize,
    /// Matrices of equal size that lie one after the other; 1 unless it is a stack of experts.
    pub experts: usize,
}

/// Some rows of every expert in a stack, which a product multiplies with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Experts {
    /// The stack.
    pub stack: WeightId,
    /// The first of each expert's rows.
    pub first: usize,
    /// How many from there on.
    pub rows: usize,
    /// A factor of each expert's products.
    pub scale: Option<WeightId>,
}

/// How rope pairs the elements of a head.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RopePairing {
    /// `(x[2i], x[2i+1])`.
    Norm,
    /// `(x[i], x[i + n_rot/2])`.
    Neox,
}

/// Context extension applied to the base frequencies.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum RopeScaling {
    /// Frequencies as they are.
    None,
    /// Every angle divided by the factor.
    Linear { factor: f32 },
    /// YaRN (arXiv 2309.00071), with the ramp between `beta_fast` and `beta_slow`.
    Yarn { factor: f32, original_context: u32, ext_factor: f32, attn_factor: f32, beta_fast: f32, beta_slow: f32 },
    /// Llama 3: divisor by wavelength.
    Llama3 { factor: f32, low: f32, high: f32, original_context: u32 },
    /// LongRoPE (arXiv 2402.13753): the divisors of the frequencies are all of the extension, and cosine and sine are
    /// multiplied by `attn_factor`.
    LongRope { original_context: u32, attn_factor: f32 },
}

/// A rotary embedding.
#[derive(Clone, PartialEq, Debug)]
pub struct Rope {
    /// Element pairing.
    pub pairing: RopePairing,
    /// Leading elements of a head that rotate; even.
    pub n_rot: usize,
    /// Base of the frequencies.
    pub base: f32,
    /// Context extension.
    pub scaling: RopeScaling,
    /// Optional divisors of the `n_rot / 2` base frequencies.
    pub freq_divisors: Option<WeightId>,
}

/// Activation function.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Activation {
    /// `x * sigmoid(x)`.
    Silu,
    /// The tanh form of GELU.
    GeluTanh,
    /// GELU itself, `x * (1 + erf(x / sqrt 2)) / 2`.
    GeluErf,
    /// The hyperbolic tangent.
    Tanh,
    /// `1 / (1 + e^-x)`.
    Sigmoid,
}

/// What of a row chooses a row of a table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RowIndex {
    /// Its position.
    Position,
    /// Its token type: which part of a pair of texts it belongs to.
    TokenType,
}

/// Which key head a value head of a delta net reads, with `r` value heads for each of `n` key heads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HeadMap {
    /// Value head `h` reads key head `h / r`.
    Grouped,
    /// Value head `h` reads key head `h % n`.
    Tiled,
}

/// Geometry of one attention layer's keys and values. Layers of equal geometry form a cache group.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct KvGeometry {
    /// KV heads; query head `h` reads KV head `h / (n_heads / n_kv_heads)`.
    pub n_kv_heads: usize,
    /// Width of a key head.
    pub k_head_dim: usize,
    /// Width of a value head.
    pub v_head_dim: usize,
    /// A query at `p` sees keys `k` with `p - k < window`; `None` sees all before it.
    pub window: Option<usize>,
}

/// What a sequence keeps of one recurrent layer, in f32 words.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct StateGeometry {
    /// The newest inputs of a short convolution.
    pub conv: usize,
    /// The recurrent state itself.
    pub recurrent: usize,
}

impl StateGeometry {
    /// Words of the layer in a plane.
    pub fn words(self) -> usize {
        self.conv + self.recurrent
    }
}

/// One operation. `out` is always a new value.
#[derive(Clone, PartialEq, Debug)]
pub enum Op {
    /// `out = scale * table[token]`.
    Embed { out: Value, table: WeightId, scale: f32 },
    /// `out = table[index of the row]`: learned positions, token types.
    EmbedBy { out: Value, table: WeightId, index: RowIndex },
    /// Root-mean-square norm over every run of `group` elements of a row (`group` = width for a whole row, the head
    /// size for a per-head norm, then with one weight for all heads). No weight: plain division.
    RmsNorm { out: Value, x: Value, weight: Option<WeightId>, eps: f32, group: usize },
    /// Layer norm of whole rows: `(x - mean) / sqrt(variance + eps) * weight + bias`.
    LayerNorm { out: Value, x: Value, weight: WeightId, bias: WeightId, eps: f32 },
    /// `out = x * W^T (+ bias)`.
    MatMul { out: Value, x: Value, weight: WeightId, bias: Option<WeightId> },
    /// Rotates every head of `x` at its row's position.
    Rope { out: Value, x: Value, head_dim: usize, rope: RopeId },
    /// Writes the rows' keys (rotated already) and values where the plan says.
    Append { layer: KvLayerId, k: Value, v: Value },
    /// Attention over the plan's segments. `q` is *not* rotated: each segment says at which position the query meets
    /// its keys, and the executor rotates it by `rope` accordingly. Scores are `scale * q.k`, soft-capped if asked.
    Attend { out: Value, q: Value, layer: KvLayerId, rope: Option<RopeId>, scale: f32, softcap: Option<f32> },
    /// `out = act(gate) * up`.
    GatedAct { out: Value, gate: Value, up: Value, act: Activation },
    /// `out = act(x)`.
    Act { out: Value, x: Value, act: Activation },
    /// `out = a + b`.
    Add { out: Value, a: Value, b: Value },
    /// `out = factor * x`.
    Scale { out: Value, x: Value, factor: f32 },
    /// `out = cap * tanh(x / cap)`.
    SoftCap { out: Value, x: Value, cap: f32 },
    /// Keeps the rows that the step asks outputs for; everything after works on those alone.
    SelectOutputs { out: Value, x: Value },
    /// Of the output rows, keeps those that the step asks logits for: embeddings need hidden states alone, and a head over
    /// a large vocabulary is much work.
    SelectLogits { out: Value, x: Value },
    /// From every run of `group` elements of a row those from `start` on, as many as fill `out` evenly (parts of a fused
    /// projection; `group` is the width where each part is in one piece, less where heads interleave their parts).
    Columns { out: Value, x: Value, group: usize, start: usize },
    /// `out = x * sigmoid(gate)`; each element of `gate` serves `width(x) / width(gate)` elements of `x` in a run.
    Gate { out: Value, x: Value, gate: Value },
    /// Chooses the `k` experts of the largest logits for each row, of equal ones the first. `out` holds `k` experts by
    /// number, the largest first, then as many weights: their shares of the softmax over all experts, which `renorm`
    /// makes sum to one.
    Route { out: Value, logits: Value, renorm: bool },
    /// For each row and each expert that `route` chose for it a row of products with that expert's rows. `x` has one row
    /// for all of these, or one for each, which an earlier product made.
    ExpertMatMul { out: Value, x: Value, route: Value, experts: Experts },
    /// For each row the sum of its experts' rows of `x`, each times its weight in `route`.
    Combine { out: Value, x: Value, route: Value },
    /// Every row of `a` followed by that of `b`.
    Concat { out: Value, a: Value, b: Value },
    /// `out = a ⊙ b`.
    Mul { out: Value, a: Value, b: Value },
    /// `x / sqrt(Σx² + eps)` over every run of `group` elements of a row.
    L2Norm { out: Value, x: Value, eps: f32, group: usize },
    /// Logarithm of the factor by which a memory fades: `out = rate ⊙ softplus(x + bias)`; rates are negative.
    Decay { out: Value, x: Value, bias: WeightId, rate: WeightId },
    /// Causal convolution of every channel by itself over the last rows of its sequence: `weight` has a row of taps for each
    /// channel, the last one for the current row. Its memory is the layer's `conv` words: the last inputs, oldest first.
    ShortConv { out: Value, x: Value, weight: WeightId, layer: StateLayerId },
    /// Gated delta net. The memory of a value head is a matrix `S` of as many rows as its key head `k` has elements and as
    /// many columns as its `v`; heads lie one after the other in the layer's `recurrent` words. For every row in turn
    /// `S ← e^decay S`, `S ← S + k (beta (v - Sᵀk))ᵀ`, `out = scale Sᵀq`. `decay` and `beta` have an element a value head.
    DeltaNet {
        out: Value,
        q: Value,
        k: Value,
        v: Value,
        decay: Value,
        beta: Value,
        layer: StateLayerId,
        map: HeadMap,
        scale: f32,
    },
}

/// Operands of [`GraphBuilder::delta_net`].
#[derive(Clone, Copy, Debug)]
pub struct DeltaInputs {
    /// Normalised queries.
    pub q: Value,
    /// Normalised keys.
    pub k: Value,
    /// Values.
    pub v: Value,
    /// Logarithm of the decay, an element a value head.
    pub decay: Value,
    /// How far a row corrects, an element a value head.
    pub beta: Value,
}

/// Layers that share pages: one page-table entry serves them all.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CacheGroup {
    /// The geometry that all its layers have.
    pub geometry: KvGeometry,
    /// Its layers in model order.
    pub layers: Vec<KvLayerId>,
}

/// A model as operations, with what they refer to.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Graph {
    /// Operations in execution order.
    pub ops: Vec<Op>,
    /// Width of each value.
    pub widths: Vec<usize>,
    /// Weights in the order of their ids.
    pub weights: Vec<WeightDecl>,
    /// Ropes in the order of their ids.
    pub ropes: Vec<Rope>,
    /// Attention layers in the order of their ids.
    pub kv_layers: Vec<KvGeometry>,
    /// Recurrent layers in the order of their ids.
    pub state_layers: Vec<StateGeometry>,
    /// Last hidden state of the output rows, after the final norm.
    pub hidden: Option<Value>,
    /// Logits of the output rows, or of those that [`Op::SelectLogits`] kept. An encoder has none; one with a head that
    /// ranks texts has that head's scores here.
    pub logits: Option<Value>,
    /// Every token of a text sees every other (encoders): a text is computed in one step, as a whole.
    pub bidirectional: bool,
}

impl Graph {
    /// Width of a value.
    pub fn width(&self, value: Value) -> usize {
        self.widths[value.0 as usize]
    }

    /// Words of a state plane: what a sequence keeps of all recurrent layers; 0 for a model without any.
    pub fn state_words(&self) -> usize {
        self.state_layers.iter().map(|layer| layer.words()).sum()
    }

    /// Where a layer's words begin in a plane: layers lie in order, each with its convolution's part first.
    pub fn state_offset(&self, layer: StateLayerId) -> usize {
        self.state_layers[..layer.0 as usize].iter().map(|layer| layer.words()).sum()
    }

    /// Token types that the model knows; 0 if it has none.
    pub fn token_types(&self) -> usize {
        let table = |op: &Op| match *op {
            Op::EmbedBy { table, index: RowIndex::TokenType, .. } => Some(self.weights[table.0 as usize].rows),
            _ => None,
        };
        self.ops.iter().find_map(table).unwrap_or(0)
    }

    /// The cache groups: layers by geometry, in order of first appearance.
    pub fn cache_groups(&self) -> Vec<CacheGroup> {
        let mut groups: Vec<CacheGroup> = Vec::new();
        for (i, &geometry) in self.kv_layers.iter().enumerate() {
            let layer = KvLayerId(i as u32);
            match groups.iter_mut().find(|g| g.geometry == geometry) {
                Some(group) => group.layers.push(layer),
                None => groups.push(CacheGroup { geometry, layers: vec![layer] }),
            }
        }
        groups
    }
}

/// Builds a [`Graph`]; each method appends one operation and returns its value.
///
/// Methods panic when widths do not match: an architecture checks the file's hyperparameters before it builds.
#[derive(Default)]
pub struct GraphBuilder {
    graph: Graph,
    weight_ids: HashMap<String, WeightId>,
}

impl GraphBuilder {
    /// An empty graph.
    pub fn new() -> Self {
        Self::default()
    }

    /// Names a matrix of `rows` rows of `cols` elements; the same name gives the same id.
    pub fn weight(&mut self, name: impl Into<String>, cols: usize, rows: usize) -> WeightId {
        self.declare(WeightDecl { name: name.into(), cols, rows, experts: 1 })
    }

    /// Names a stack of `experts` matrices of `rows` rows of `cols` elements.
    pub fn expert_stack(&mut self, name: impl Into<String>, cols: usize, rows: usize, experts: usize) -> WeightId {
        let rows = rows.checked_mul(experts).expect("a stack that a file can hold");
        self.declare(WeightDecl { name: name.into(), cols, rows, experts })
    }

    fn declare(&mut self, decl: WeightDecl) -> WeightId {
        if let Some(&id) = self.weight_ids.get(&decl.name) {
            assert_eq!(self.graph.weights[id.0 as usize], decl, "one name declared with two shapes");
            return id;
        }
        let id = WeightId(self.graph.weights.len() as u32);
        self.weight_ids.insert(decl.name.clone(), id);
        self.graph.weights.push(decl);
        id
    }

    /// Names a vector.
    pub fn vector(&mut self, name: impl Into<String>, len: usize) -> WeightId {
        self.weight(name, len, 1)
    }

    /// Adds a rotary embedding.
    pub fn rope(&mut self, rope: Rope) -> RopeId {
        assert!(rope.n_rot.is_multiple_of(2));
        self.graph.ropes.push(rope);
        RopeId(self.graph.ropes.len() as u32 - 1)
    }

    /// Adds an attention layer's cache.
    pub fn kv_layer(&mut self, geometry: KvGeometry) -> KvLayerId {
        self.graph.kv_layers.push(geometry);
        KvLayerId(self.graph.kv_layers.len() as u32 - 1)
    }

    /// Adds a recurrent layer's state.
    pub fn state_layer(&mut self, geometry: StateGeometry) -> StateLayerId {
        self.graph.state_layers.push(geometry);
        StateLayerId(self.graph.state_layers.len() as u32 - 1)
    }

    fn value(&mut self, width: usize) -> Value {
        self.graph.widths.push(width);
        Value(self.graph.widths.len() as u32 - 1)
    }

    fn width(&self, value: Value) -> usize {
        self.graph.width(value)
    }

    fn decl(&self, weight: WeightId) -> &WeightDecl {
        &self.graph.weights[weight.0 as usize]
    }

    /// Token embedding times `scale`.
    pub fn embed(&mut self, table: WeightId, scale: f32) -> Value {
        let out = self.value(self.decl(table).cols);
        self.graph.ops.push(Op::Embed { out, table, scale });
        out
    }

    /// A row of `table` by what `index` says of each row.
    pub fn embed_by(&mut self, table: WeightId, index: RowIndex) -> Value {
        let out = self.value(self.decl(table).cols);
        self.graph.ops.push(Op::EmbedBy { out, table, index });
        out
    }

    /// Layer norm of whole rows.
    pub fn layer_norm(&mut self, x: Value, weight: WeightId, bias: WeightId, eps: f32) -> Value {
        let width = self.width(x);
        for vector in [weight, bias] {
            assert_eq!(self.decl(vector).cols, width, "norm `{}`", self.decl(vector).name);
        }
        let out = self.value(width);
        self.graph.ops.push(Op::LayerNorm { out, x, weight, bias, eps });
        out
    }

    /// Norm of whole rows.
    pub fn rms_norm(&mut self, x: Value, weight: WeightId, eps: f32) -> Value {
        let group = self.width(x);
        self.norm(x, Some(weight), eps, group)
    }

    /// Norm of every head by itself.
    pub fn head_norm(&mut self, x: Value, weight: Option<WeightId>, eps: f32, head_dim: usize) -> Value {
        self.norm(x, weight, eps, head_dim)
    }

    fn norm(&mut self, x: Value, weight: Option<WeightId>, eps: f32, group: usize) -> Value {
        let width = self.width(x);
        assert!(width.is_multiple_of(group));
        if let Some(w) = weight {
            assert_eq!(self.decl(w).cols, group, "norm weight `{}`", self.decl(w).name);
        }
        let out = self.value(width);
        self.graph.ops.push(Op::RmsNorm { out, x, weight, eps, group });
        out
    }

    /// `x * W^T`.
    pub fn matmul(&mut self, x: Value, weight: WeightId) -> Value {
        self.linear(x, weight, None)
    }

    /// `x * W^T + bias`.
    pub fn linear(&mut self, x: Value, weight: WeightId, bias: Option<WeightId>) -> Value {
        let decl = self.decl(weight);
        assert_eq!(decl.cols, self.width(x), "input of `{}`", decl.name);
        let rows = decl.rows;
        if let Some(b) = bias {
            assert_eq!(self.decl(b).cols, rows, "bias `{}`", self.decl(b).name);
        }
        let out = self.value(rows);
        self.graph.ops.push(Op::MatMul { out, x, weight, bias });
        out
    }

    /// Rotates heads at their row's own position.
    pub fn rotate(&mut self, x: Value, head_dim: usize, rope: RopeId) -> Value {
        assert!(self.width(x).is_multiple_of(head_dim) && self.graph.ropes[rope.0 as usize].n_rot <= head_dim);
        let out = self.value(self.width(x));
        self.graph.ops.push(Op::Rope { out, x, head_dim, rope });
        out
    }

    /// Stores keys (already rotated) and values of a layer.
    pub fn append(&mut self, layer: KvLayerId, k: Value, v: Value) {
        let g = self.graph.kv_layers[layer.0 as usize];
        assert_eq!(self.width(k), g.n_kv_heads * g.k_head_dim);
        assert_eq!(self.width(v), g.n_kv_heads * g.v_head_dim);
        self.graph.ops.push(Op::Append { layer, k, v });
    }

    /// Attention of unrotated queries over a layer's cache; the result is `n_heads * v_head_dim` wide.
    pub fn attend(
        &mut self,
        q: Value,
        layer: KvLayerId,
        rope: Option<RopeId>,
        scale: f32,
        softcap: Option<f32>,
    ) -> Value {
        let g = self.graph.kv_layers[layer.0 as usize];
        let n_heads = self.width(q) / g.k_head_dim;
        assert!(self.width(q).is_multiple_of(g.k_head_dim) && n_heads.is_multiple_of(g.n_kv_heads));
        let out = self.value(n_heads * g.v_head_dim);
        self.graph.ops.push(Op::Attend { out, q, layer, rope, scale, softcap });
        out
    }

    /// `act(gate) * up`.
    pub fn gated_act(&mut self, gate: Value, up: Value, act: Activation) -> Value {
        assert_eq!(self.width(gate), self.width(up));
        let out = self.value(self.width(gate));
        self.graph.ops.push(Op::GatedAct { out, gate, up, act });
        out
    }

    /// `act(x)`.
    pub fn act(&mut self, x: Value, act: Activation) -> Value {
        let out = self.value(self.width(x));
        self.graph.ops.push(Op::Act { out, x, act });
        out
    }

    /// `a + b`.
    pub fn add(&mut self, a: Value, b: Value) -> Value {
        assert_eq!(self.width(a), self.width(b));
        let out = self.value(self.width(a));
        self.graph.ops.push(Op::Add { out, a, b });
        out
    }

    /// `factor * x`.
    pub fn scale(&mut self, x: Value, factor: f32) -> Value {
        let out = self.value(self.width(x));
        self.graph.ops.push(Op::Scale { out, x, factor });
        out
    }

    /// `cap * tanh(x / cap)`.
    pub fn soft_cap(&mut self, x: Value, cap: f32) -> Value {
        let out = self.value(self.width(x));
        self.graph.ops.push(Op::SoftCap { out, x, cap });
        out
    }

    /// Goes on with the rows that need outputs.
    pub fn select_outputs(&mut self, x: Value) -> Value {
        let out = self.value(self.width(x));
        self.graph.ops.push(Op::SelectOutputs { out, x });
        out
    }

    /// Goes on with those of the output rows that need logits.
    pub fn select_logits(&mut self, x: Value) -> Value {
        let out = self.value(self.width(x));
        self.graph.ops.push(Op::SelectLogits { out, x });
        out
    }

    /// Columns `start .. start + width`.
    pub fn columns(&mut self, x: Value, start: usize, width: usize) -> Value {
        let group = self.width(x);
        self.head_columns(x, group, start, width)
    }

    /// Columns `start .. start + width` of every run of `group` columns.
    pub fn head_columns(&mut self, x: Value, group: usize, start: usize, width: usize) -> Value {
        assert!(start + width <= group && self.width(x).is_multiple_of(group));
        let out = self.value(self.width(x) / group * width);
        self.graph.ops.push(Op::Columns { out, x, group, start });
        out
    }

    /// Rows of `a` followed by those of `b`.
    pub fn concat(&mut self, a: Value, b: Value) -> Value {
        let out = self.value(self.width(a) + self.width(b));
        self.graph.ops.push(Op::Concat { out, a, b });
        out
    }

    /// `a ⊙ b`.
    pub fn mul(&mut self, a: Value, b: Value) -> Value {
        assert_eq!(self.width(a), self.width(b));
        let out = self.value(self.width(a));
        self.graph.ops.push(Op::Mul { out, a, b });
        out
    }

    /// Every head to length 1.
    pub fn l2_norm(&mut self, x: Value, eps: f32, head_dim: usize) -> Value {
        assert!(self.width(x).is_multiple_of(head_dim));
        let out = self.value(self.width(x));
        self.graph.ops.push(Op::L2Norm { out, x, eps, group: head_dim });
        out
    }

    /// `rate ⊙ softplus(x + bias)`.
    pub fn decay(&mut self, x: Value, bias: WeightId, rate: WeightId) -> Value {
        let width = self.width(x);
        assert!([bias, rate].iter().all(|w| self.decl(*w).cols == width), "`{}`", self.decl(bias).name);
        let out = self.value(width);
        self.graph.ops.push(Op::Decay { out, x, bias, rate });
        out
    }

    /// Causal convolution of each channel over the last rows; the layer keeps what the next rows need.
    pub fn short_conv(&mut self, x: Value, weight: WeightId, layer: StateLayerId) -> Value {
        let (width, taps) = (self.width(x), self.decl(weight).cols);
        assert_eq!(self.decl(weight).rows, width, "channels of `{}`", self.decl(weight).name);
        assert_eq!(self.graph.state_layers[layer.0 as usize].conv, (taps - 1) * width);
        let out = self.value(width);
        self.graph.ops.push(Op::ShortConv { out, x, weight, layer });
        out
    }

    /// Gated delta net; the result is as wide as the values.
    pub fn delta_net(&mut self, inputs: DeltaInputs, layer: StateLayerId, map: HeadMap, scale: f32) -> Value {
        let DeltaInputs { q, k, v, decay, beta } = inputs;
        let (width, v_heads) = (self.width(v), self.width(decay));
        let state = self.graph.state_layers[layer.0 as usize].recurrent;
        assert!(self.width(q) == self.width(k) && self.width(beta) == v_heads && width.is_multiple_of(v_heads));
        let k_dim = state / width;
        assert!(state == k_dim * width && self.width(k).is_multiple_of(k_dim));
        assert!(v_heads.is_multiple_of(self.width(k) / k_dim));
        let out = self.value(width);
        self.graph.ops.push(Op::DeltaNet { out, q, k, v, decay, beta, layer, map, scale });
        out
    }

    /// `x * sigmoid(gate)`, the gate as wide as `x` or with one element for each of its equal parts.
    pub fn gate(&mut self, x: Value, gate: Value) -> Value {
        assert!(self.width(x).is_multiple_of(self.width(gate)));
        let out = self.value(self.width(x));
        self.graph.ops.push(Op::Gate { out, x, gate });
        out
    }

    /// The `k` experts of each row, and their weights.
    pub fn route(&mut self, logits: Value, k: usize, renorm: bool) -> Value {
        assert!(k > 0 && k <= self.width(logits), "{k} of {} experts", self.width(logits));
        let out = self.value(2 * k);
        self.graph.ops.push(Op::Route { out, logits, renorm });
        out
    }

    /// `x` times rows of its experts: a row of products for each.
    pub fn expert_matmul(&mut self, x: Value, route: Value, experts: Experts) -> Value {
        let decl = self.decl(experts.stack);
        assert_eq!(decl.cols, self.width(x), "input of `{}`", decl.name);
        assert!(experts.first + experts.rows <= decl.rows / decl.experts, "rows of `{}`", decl.name);
        if let Some(scale) = experts.scale {
            assert_eq!(self.decl(scale).cols, decl.experts, "`{}`", self.decl(scale).name);
        }
        let out = self.value(experts.rows);
        self.graph.ops.push(Op::ExpertMatMul { out, x, route, experts });
        out
    }

    /// The weighted sum over each row's experts.
    pub fn combine(&mut self, x: Value, route: Value) -> Value {
        let out = self.value(self.width(x));
        self.graph.ops.push(Op::Combine { out, x, route });
        out
    }

    /// Ends the graph with its two results.
    pub fn finish(mut self, hidden: Value, logits: Value) -> Graph {
        self.graph.hidden = Some(hidden);
        self.graph.logits = Some(logits);
        self.graph
    }

    /// Ends the graph of an encoder, in which tokens see each other in both directions, with its hidden states and what a
    /// head makes of them.
    pub fn finish_encoder(mut self, hidden: Value, scores: Option<Value>) -> Graph {
        self.graph.hidden = Some(hidden);
        self.graph.logits = scores;
        self.graph.bidirectional = true;
        self.graph
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_of_equal_geometry_share_a_cache_group() {
        let full = KvGeometry { n_kv_heads: 1, k_head_dim: 32, v_head_dim: 32, window: None };
        let swa = KvGeometry { window: Some(8), ..full };
        let mut b = GraphBuilder::new();
        for geometry in [swa, swa, full, swa] {
            b.kv_layer(geometry);
        }
        let groups = b.graph.cache_groups();
        assert_eq!(groups.len(), 2);
        assert_eq!(groups[0].layers, [KvLayerId(0), KvLayerId(1), KvLayerId(3)]);
        assert_eq!(groups[1].layers, [KvLayerId(2)]);
    }

    #[test]
    fn a_state_plane_holds_the_layers_in_order() {
        let mut b = GraphBuilder::new();
        b.state_layer(StateGeometry { conv: 3, recurrent: 4 });
        let second = b.state_layer(StateGeometry { conv: 2, recurrent: 0 });
        assert_eq!((b.graph.state_offset(second), b.graph.state_words()), (7, 9));
    }

    #[test]
    fn a_weight_named_twice_is_one_weight() {
        let mut b = GraphBuilder::new();
        assert_eq!(b.weight("token_embd.weight", 8, 16), b.weight("token_embd.weight", 8, 16));
        assert_eq!(b.graph.weights.len(), 1);
    }
}
