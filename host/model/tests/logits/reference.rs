//! A plain f64 interpreter of graphs: no cache, no batching, no speed. One sequence from position 0, all rows at once.

use opencoti_compute::graph::{
    Activation, DeltaInputs, Experts, Graph, HeadMap, KvGeometry, Op, Rope, RopePairing, RopeScaling, RowIndex,
    StateLayerId, Value, WeightId,
};
use opencoti_compute::weights::Weight;

type Matrix = Vec<Vec<f64>>;

/// Mistakes that no change of a graph can make.
#[derive(Clone, Copy)]
pub(crate) struct Mistakes {
    /// What stands for GELU.
    pub(crate) gelu: fn(f64) -> f64,
    /// Delta nets compare values to what their memory answers before it fades.
    pub(crate) decay_after_error: bool,
    /// Weights of experts go to what they read instead of what they make.
    pub(crate) weighted_inputs: bool,
}

impl Default for Mistakes {
    fn default() -> Mistakes {
        Mistakes { gelu: gelu_tanh, decay_after_error: false, weighted_inputs: false }
    }
}

/// Logits of every row of `tokens`, or hidden states where the graph has no logits, as f32, one row after the other.
pub(crate) fn logits(graph: &Graph, weights: &[Weight], tokens: &[u32]) -> Vec<f32> {
    interpret(graph, weights, tokens, tokens.len(), Mistakes::default())
}

/// The same of a pair of texts, of which the second begins at row `second`.
pub(crate) fn pair(graph: &Graph, weights: &[Weight], tokens: &[u32], second: usize) -> Vec<f32> {
    interpret(graph, weights, tokens, second, Mistakes::default())
}

/// The same with mistakes.
pub(crate) fn logits_with_mistakes(graph: &Graph, weights: &[Weight], tokens: &[u32], mistakes: Mistakes) -> Vec<f32> {
    interpret(graph, weights, tokens, tokens.len(), mistakes)
}

fn interpret(graph: &Graph, weights: &[Weight], tokens: &[u32], second: usize, mistakes: Mistakes) -> Vec<f32> {
    let values = vec![Matrix::new(); graph.widths.len()];
    let mut run = Run { graph, weights, second, values, caches: vec![], mistakes };
    run.caches.resize(graph.kv_layers.len(), (Matrix::new(), Matrix::new()));
    for op in &graph.ops {
        run.step(op, tokens);
    }
    run.value(graph.logits.or(graph.hidden).expect("results")).iter().flatten().map(|&v| v as f32).collect()
}

struct Run<'a> {
    graph: &'a Graph,
    weights: &'a [Weight],
    /// First row of token type 1.
    second: usize,
    values: Vec<Matrix>,
    /// Keys and values of each attention layer.
    caches: Vec<(Matrix, Matrix)>,
    mistakes: Mistakes,
}

impl Run<'_> {
    fn value(&self, v: Value) -> &Matrix {
        &self.values[v.0 as usize]
    }

    /// One row of a weight.
    fn row(&self, id: WeightId, row: usize) -> Vec<f64> {
        let matrix = self.weights[id.0 as usize].matrix();
        let mut values = vec![0f32; matrix.cols()];
        matrix.dequantize_row(row, &mut values);
        values.into_iter().map(f64::from).collect()
    }

    fn vector(&self, id: WeightId) -> Vec<f64> {
        self.row(id, 0)
    }

    /// `x * W^T + bias`, a column of the result at a time.
    fn product(&self, x: &Matrix, weight: WeightId, bias: Option<WeightId>) -> Matrix {
        let bias = bias.map(|b| self.vector(b));
        let columns = self.weights[weight.0 as usize].rows();
        let mut out = vec![Vec::with_capacity(columns); x.len()];
        for column in 0..columns {
            let w = self.row(weight, column);
            let b = bias.as_ref().map_or(0.0, |b| b[column]);
            out.iter_mut().zip(x).for_each(|(out, x)| out.push(dot(&w, x) + b));
        }
        out
    }

    /// The products of each row's experts, one after the other in the order of its choices.
    fn expert_product(&self, x: Value, route: Value, experts: Experts) -> Matrix {
        let (width, k) = (self.graph.width(x), self.graph.width(route) / 2);
        let id = experts.stack.0 as usize;
        let rows_each = self.weights[id].rows() / self.graph.weights[id].experts;
        let scales = experts.scale.map(|s| self.vector(s));
        let one = |x: &[f64], expert: usize| -> Vec<f64> {
            let scale = scales.as_ref().map_or(1.0, |s| s[expert]);
            let first = expert * rows_each + experts.first;
            (first..first + experts.rows).map(|r| scale * dot(&self.row(experts.stack, r), x)).collect()
        };
        let rows = self.value(x).iter().zip(self.value(route));
        rows.map(|(x, route)| {
            // One input for all, or one for each.
            let input = |j: usize| {
                let weighted = self.mistakes.weighted_inputs && x.len() == width;
                let factor = if weighted { route[k + j] } else { 1.0 };
                x[j * width % x.len()..][..width].iter().map(|v| factor * v).collect::<Vec<f64>>()
            };
            (0..k).flat_map(|j| one(&input(j), route[j] as usize)).collect()
        })
        .collect()
    }

    fn activate(&self, act: Activation, x: f64) -> f64 {
        match act {
            Activation::Silu => silu(x),
            Activation::GeluTanh => (self.mistakes.gelu)(x),
            Activation::Sigmoid => sigmoid(x),
            Activation::GeluErf => 0.5 * x * (1.0 + erf(x / 2f64.sqrt())),
            Activation::Tanh => x.tanh(),
        }
    }

    fn step(&mut self, op: &Op, tokens: &[u32]) {
        let (out, result) = match *op {
            Op::Embed { out, table, scale } => {
                let row = |&t: &u32| self.row(table, t as usize).iter().map(|v| v * f64::from(scale)).collect();
                (out, tokens.iter().map(row).collect())
            }
            Op::EmbedBy { out, table, index } => {
                let index = |row: usize| match index {
                    RowIndex::Position => row,
                    RowIndex::TokenType => usize::from(row >= self.second),
                };
                (out, (0..tokens.len()).map(|row| self.row(table, index(row))).collect())
            }
            Op::LayerNorm { out, x, weight, bias, eps } => {
                let (weight, bias) = (self.vector(weight), self.vector(bias));
                (out, map_rows(self.value(x), |row| layer_norm(row, &weight, &bias, eps)))
            }
            Op::RmsNorm { out, x, weight, eps, group } => {
                let weight = weight.map_or_else(|| vec![1.0; group], |w| self.vector(w));
                (out, map_rows(self.value(x), |row| row.chunks(group).flat_map(|c| rms(c, &weight, eps)).collect()))
            }
            Op::MatMul { out, x, weight, bias } => (out, self.product(self.value(x), weight, bias)),
            Op::Rope { out, x, head_dim, rope } => {
                let table = self.frequencies(&self.graph.ropes[rope.0 as usize]);
                let rope = &self.graph.ropes[rope.0 as usize];
                let rows = self.value(x).iter().enumerate();
                (
                    out,
                    rows.map(|(p, row)| row.chunks(head_dim).flat_map(|h| rotate(h, p, rope, &table)).collect())
                        .collect(),
                )
            }
            Op::Append { layer, k, v } => {
                self.caches[layer.0 as usize] = (self.value(k).clone(), self.value(v).clone());
                return;
            }
            Op::Attend { out, q, layer, rope, scale, softcap } => {
                let geometry = self.graph.kv_layers[layer.0 as usize];
                let rope = rope.map(|r| &self.graph.ropes[r.0 as usize]);
                let rotated = match rope {
                    None => self.value(q).clone(),
                    Some(rope) => {
                        let table = self.frequencies(rope);
                        let rows = self.value(q).iter().enumerate();
                        rows.map(|(p, row)| {
                            row.chunks(geometry.k_head_dim).flat_map(|h| rotate(h, p, rope, &table)).collect()
                        })
                        .collect()
                    }
                };
                let (k, v) = &self.caches[layer.0 as usize];
                let causal = !self.graph.bidirectional;
                (out, attend(&rotated, k, v, geometry, causal, f64::from(scale), softcap.map(f64::from)))
            }
            Op::GatedAct { out, gate, up, act } => {
                (out, zip_rows(self.value(gate), self.value(up), |g, u| self.activate(act, g) * u))
            }
            Op::Act { out, x, act } => (out, map_elements(self.value(x), |v| self.activate(act, v))),
            Op::Add { out, a, b } => (out, zip_rows(self.value(a), self.value(b), |a, b| a + b)),
            Op::Scale { out, x, factor } => (out, map_elements(self.value(x), |v| v * f64::from(factor))),
            Op::SoftCap { out, x, cap } => {
                let cap = f64::from(cap);
                (out, map_elements(self.value(x), |v| cap * (v / cap).tanh()))
            }
            Op::SelectOutputs { out, x } | Op::SelectLogits { out, x } => (out, self.value(x).clone()),
            Op::Columns { out, x, group, start } => {
                let width = self.graph.width(out) / (self.graph.width(x) / group);
                let part = |row: &[f64]| row.chunks(group).flat_map(|g| g[start..start + width].to_vec()).collect();
                (out, map_rows(self.value(x), part))
            }
            Op::Concat { out, a, b } => {
                let rows = self.value(a).iter().zip(self.value(b));
                (out, rows.map(|(a, b)| [a.as_slice(), b].concat()).collect())
            }
            Op::Mul { out, a, b } => (out, zip_rows(self.value(a), self.value(b), |a, b| a * b)),
            Op::L2Norm { out, x, eps, group } => {
                let norm = |h: &[f64]| {
                    let length = (dot(h, h) + f64::from(eps)).sqrt();
                    h.iter().map(|v| v / length).collect::<Vec<f64>>()
                };
                (out, map_rows(self.value(x), |row| row.chunks(group).flat_map(norm).collect()))
            }
            Op::Decay { out, x, bias, rate } => {
                let (bias, rate) = (self.vector(bias), self.vector(rate));
                let decay = |(i, x): (usize, &f64)| rate[i] * (x + bias[i]).exp().ln_1p();
                (out, map_rows(self.value(x), |row| row.iter().enumerate().map(decay).collect()))
            }
            Op::ShortConv { out, x, weight, .. } => (out, self.short_conv(self.value(x), weight)),
            Op::DeltaNet { out, q, k, v, decay, beta, layer, map, scale } => {
                (out, self.delta_net(DeltaInputs { q, k, v, decay, beta }, layer, map, f64::from(scale)))
            }
            Op::Gate { out, x, gate } => {
                let part = self.graph.width(x) / self.graph.width(gate);
                let gates = map_rows(self.value(gate), |g| (0..g.len() * part).map(|i| sigmoid(g[i / part])).collect());
                (out, zip_rows(self.value(x), &gates, |x, g| x * g))
            }
            Op::Route { out, logits, renorm } => {
                let k = self.graph.width(out) / 2;
                (out, map_rows(self.value(logits), |row| route(row, k, renorm)))
            }
            Op::ExpertMatMul { out, x, route, experts } => (out, self.expert_product(x, route, experts)),
            Op::Combine { out, x, route } => {
                let width = self.graph.width(out);
                let rows = self.value(x).iter().zip(self.value(route));
                let sum = |(x, route): (&Vec<f64>, &Vec<f64>)| {
                    let (k, ones) = (route.len() / 2, vec![1.0; route.len()]);
                    let weights = if self.mistakes.weighted_inputs { &ones[k..] } else { &route[k..] };
                    (0..width).map(|i| weights.iter().enumerate().map(|(j, w)| w * x[j * width + i]).sum()).collect()
                };
                (out, rows.map(sum).collect())
            }
        };
        self.values[out.0 as usize] = result;
    }

    /// Every channel by itself over the last rows, with zeros before the first.
    fn short_conv(&self, x: &Matrix, weight: WeightId) -> Matrix {
        let taps: Matrix = (0..x[0].len()).map(|channel| self.row(weight, channel)).collect();
        let sum = |t: usize, channel: usize| {
            let taps = taps[channel].iter().rev().enumerate();
            taps.filter_map(|(back, w)| Some(w * x[t.checked_sub(back)?][channel])).sum()
        };
        (0..x.len()).map(|t| (0..taps.len()).map(|channel| sum(t, channel)).collect()).collect()
    }

    /// The recurrence, one value head after the other.
    fn delta_net(&self, inputs: DeltaInputs, layer: StateLayerId, map: HeadMap, scale: f64) -> Matrix {
        let DeltaInputs { q, k, v, decay, beta } = inputs;
        let v_heads = self.graph.width(decay);
        let v_dim = self.graph.width(v) / v_heads;
        let k_dim = self.graph.state_layers[layer.0 as usize].recurrent / self.graph.width(v);
        let k_heads = self.graph.width(k) / k_dim;
        let mut out = vec![Vec::new(); self.value(v).len()];
        for h in 0..v_heads {
            let key_head = match map {
                HeadMap::Grouped => h / (v_heads / k_heads),
                HeadMap::Tiled => h % k_heads,
            };
            let key = |x: Value, t: usize| self.value(x)[t][key_head * k_dim..(key_head + 1) * k_dim].to_vec();
            let mut state = vec![vec![0.0; k_dim]; v_dim];
            for (t, out) in out.iter_mut().enumerate() {
                let (q, k) = (key(q, t), key(k, t));
                let (fade, beta) = (self.value(decay)[t][h].exp(), self.value(beta)[t][h]);
                for (column, v) in state.iter_mut().zip(&self.value(v)[t][h * v_dim..]) {
                    let unfaded = dot(column, &k);
                    column.iter_mut().for_each(|s| *s *= fade);
                    let known = if self.mistakes.decay_after_error { unfaded } else { dot(column, &k) };
                    column.iter_mut().zip(&k).for_each(|(s, k)| *s += k * beta * (v - known));
                    out.push(scale * dot(column, &q));
                }
            }
        }
        out
    }

    /// Frequency of each pair, and the factor of both cosine and sine.
    fn frequencies(&self, rope: &Rope) -> (Vec<f64>, f64) {
        let half = rope.n_rot / 2;
        let divisors = rope.freq_divisors.map_or_else(|| vec![1.0; half], |d| self.vector(d));
        let n_rot = rope.n_rot as f64;
        let base = f64::from(rope.base);
        let plain = (0..half).map(|i| base.powf(-2.0 * i as f64 / n_rot) / divisors[i]);
        match rope.scaling {
            RopeScaling::None => (plain.collect(), 1.0),
            RopeScaling::Linear { factor } => (plain.map(|f| f / f64::from(factor)).collect(), 1.0),
            RopeScaling::Yarn { factor, original_context, ext_factor, attn_factor, beta_fast, beta_slow } => {
                let factor = f64::from(factor);
                let corrected = |beta: f32| {
                    let turns = f64::from(original_context) / (2.0 * std::f64::consts::PI * f64::from(beta));
                    n_rot * turns.ln() / (2.0 * base.ln())
                };
                let low = corrected(beta_fast).floor().max(0.0);
                let high = corrected(beta_slow).ceil().min(n_rot - 1.0);
                let kept = |i: usize| {
                    let ramp = ((i as f64 - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
                    (1.0 - ramp) * f64::from(ext_factor)
                };
                let mixed = plain.enumerate().map(|(i, f)| f / factor * (1.0 - kept(i)) + f * kept(i)).collect();
                (mixed, (0.1 * factor.ln() + 1.0) * f64::from(attn_factor))
            }
            RopeScaling::LongRope { attn_factor, .. } => (plain.collect(), f64::from(attn_factor)),
            RopeScaling::Llama3 { factor, low, high, original_context } => {
                let (factor, low, high) = (f64::from(factor), f64::from(low), f64::from(high));
                let divide = |f: f64| {
                    let turns = f64::from(original_context) * f / (2.0 * std::f64::consts::PI);
                    let s = ((turns - low) / (high - low)).clamp(0.0, 1.0);
                    f * ((1.0 - s) / factor + s)
                };
                (plain.map(divide).collect(), 1.0)
            }
        }
    }
}

fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

/// GELU by its tanh form.
pub(crate) fn gelu_tanh(x: f64) -> f64 {
    0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x)).tanh())
}

fn rotate(head: &[f64], position: usize, rope: &Rope, (frequencies, magnitude): &(Vec<f64>, f64)) -> Vec<f64> {
    let mut out = head.to_vec();
    for (i, f) in frequencies.iter().enumerate() {
        let (a, b) = match rope.pairing {
            RopePairing::Norm => (2 * i, 2 * i + 1),
            RopePairing::Neox => (i, i + rope.n_rot / 2),
        };
        let (sin, cos) = (position as f64 * f).sin_cos();
        out[a] = magnitude * (head[a] * cos - head[b] * sin);
        out[b] = magnitude * (head[a] * sin + head[b] * cos);
    }
    out
}

fn attend(q: &Matrix, k: &Matrix, v: &Matrix, g: KvGeometry, causal: bool, scale: f64, softcap: Option<f64>) -> Matrix {
    let row = |(p, q): (usize, &Vec<f64>)| {
        let heads: Vec<&[f64]> = q.chunks(g.k_head_dim).collect();
        let sharing = heads.len() / g.n_kv_heads;
        let first = g.window.map_or(0, |w| (p + 1).saturating_sub(w));
        let last = if causal { p } else { k.len() - 1 };
        let head = |(h, q): (usize, &&[f64])| {
            let (k0, v0) = (h / sharing * g.k_head_dim, h / sharing * g.v_head_dim);
            let score = |t: usize| {
                let s = scale * dot(q, &k[t][k0..k0 + g.k_head_dim]);
                softcap.map_or(s, |cap| cap * (s / cap).tanh())
            };
            let scores: Vec<f64> = (first..=last).map(score).collect();
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let exps: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
            let sum: f64 = exps.iter().sum();
            let element = |i: usize| exps.iter().enumerate().map(|(t, e)| e * v[first + t][v0 + i]).sum::<f64>() / sum;
            (0..g.v_head_dim).map(element).collect::<Vec<f64>>()
        };
        heads.iter().enumerate().flat_map(head).collect()
    };
    q.iter().enumerate().map(row).collect()
}

/// The `k` largest of the logits by number, then their weights.
fn route(logits: &[f64], k: usize, renorm: bool) -> Vec<f64> {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
    let exps: Vec<f64> = logits.iter().map(|l| (l - logits[order[0]]).exp()).collect();
    let (sum, chosen) = (exps.iter().sum::<f64>(), &order[..k]);
    let kept = if renorm { (chosen.iter().map(|e| exps[*e]).sum::<f64>() / sum).max(6.1e-5) } else { 1.0 };
    chosen.iter().map(|e| *e as f64).chain(chosen.iter().map(|e| exps[*e] / sum / kept)).collect()
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn rms(x: &[f64], weight: &[f64], eps: f32) -> Vec<f64> {
    let mean = dot(x, x) / x.len() as f64;
    let factor = 1.0 / (mean + f64::from(eps)).sqrt();
    x.iter().zip(weight).map(|(x, w)| x * factor * w).collect()
}

fn layer_norm(x: &[f64], weight: &[f64], bias: &[f64], eps: f32) -> Vec<f64> {
    let n = x.len() as f64;
    let mean = x.iter().sum::<f64>() / n;
    let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n;
    let factor = 1.0 / (variance + f64::from(eps)).sqrt();
    x.iter().zip(weight.iter().zip(bias)).map(|(x, (w, b))| (x - mean) * factor * w + b).collect()
}

/// The error function by its Taylor series; beyond 5 it is 1 to twelve places.
fn erf(x: f64) -> f64 {
    if x.abs() > 5.0 {
        return x.signum();
    }
    let (mut term, mut sum) = (x, x);
    for n in 1..120 {
        term *= -x * x / f64::from(n);
        sum += term / f64::from(2 * n + 1);
    }
    2.0 / std::f64::consts::PI.sqrt() * sum
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn map_rows(x: &Matrix, f: impl Fn(&[f64]) -> Vec<f64>) -> Matrix {
    x.iter().map(|row| f(row)).collect()
}

fn map_elements(x: &Matrix, f: impl Fn(f64) -> f64) -> Matrix {
    map_rows(x, |row| row.iter().map(|&v| f(v)).collect())
}

fn zip_rows(a: &Matrix, b: &Matrix, f: impl Fn(f64, f64) -> f64) -> Matrix {
    a.iter().zip(b).map(|(a, b)| a.iter().zip(b).map(|(&a, &b)| f(a, b)).collect()).collect()
}
