//! Whole graphs against a plain f64 forward pass.

use std::sync::Arc;

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::*;
use crate::graph::{Activation, GraphBuilder, Rope, RopePairing, RopeScaling, Value};
use crate::quant::WeightType;
use opencoti_weights::samples::{random_floats, random_rows};

/// For graphs without attention.
pub(super) struct NoAttention;

impl AttentionKernels for NoAttention {
    unsafe fn append(&self, _: Worker<'_>, _: LayerStep<'_>, _: &[f32], _: &[f32]) -> Result<(), String> {
        Err("this graph has no cache".into())
    }

    unsafe fn seal(&self, _: Worker<'_>, _: LayerStep<'_>) -> Result<(), String> {
        Err("this graph has no cache".into())
    }

    unsafe fn attend(&self, _: Worker<'_>, _: LayerStep<'_>, _: &Attend<'_>) -> Result<(), String> {
        Err("this graph has no cache".into())
    }
}

const E: usize = 96;
const F: usize = 160;
const VOCAB: usize = 50;
const PLACES: usize = 60;

/// Every operation but the cache's.
fn build() -> Graph {
    graph(|_, x| x)
}

/// The same with a head over chosen outputs.
fn build_with_chosen_logits() -> Graph {
    graph(GraphBuilder::select_logits)
}

fn graph(choose: impl Fn(&mut GraphBuilder, Value) -> Value) -> Graph {
    let mut b = GraphBuilder::new();
    let table = b.weight("token_embd.weight", E, VOCAB);
    let rope = Rope {
        pairing: RopePairing::Neox,
        n_rot: 16,
        base: 1e4,
        scaling: RopeScaling::None,
        freq_divisors: Some(b.vector("rope_freqs.weight", 8)),
    };
    let rope = b.rope(rope);
    let x = b.embed(table, 3.0);
    let (places, types) = (b.weight("position_embd.weight", E, PLACES), b.weight("token_types.weight", E, 2));
    let (place, ty) = (b.embed_by(places, RowIndex::Position), b.embed_by(types, RowIndex::TokenType));
    let (x, types) = (b.add(x, place), ty);
    let x = b.add(x, types);
    let (layer_norm, layer_bias) = (b.vector("layer_norm.weight", E), b.vector("layer_norm.bias", E));
    let x = b.layer_norm(x, layer_norm, layer_bias, 1e-5);
    let norm = b.vector("norm", E);
    let head_norm = b.vector("head_norm", 32);
    let a = b.rms_norm(x, norm, 1e-5);
    let (qk, bias) = (b.weight("qk", E, 2 * E), b.vector("qk.bias", 2 * E));
    let qk = b.linear(a, qk, Some(bias));
    let (q, k) = (b.columns(qk, 0, E), b.columns(qk, E, E));
    let q = b.head_norm(q, Some(head_norm), 1e-5, 32);
    let q = b.rotate(q, 32, rope);
    let k = b.head_norm(k, None, 1e-5, 32);
    let k = b.gate(k, q);
    let x = b.add(q, k);
    let f = b.rms_norm(x, norm, 1e-5);
    let (gate, up, down) = (b.weight("gate", E, F), b.weight("up", E, F), b.weight("down", F, E));
    let (g, u) = (b.matmul(f, gate), b.matmul(f, up));
    let silu = b.gated_act(g, u, Activation::Silu);
    let gelu = b.gated_act(u, g, Activation::GeluTanh);
    let erf = b.gated_act(g, u, Activation::GeluErf);
    let plain = b.act(u, Activation::GeluErf);
    let tanh = b.act(g, Activation::Tanh);
    let both = b.add(silu, gelu);
    let both = b.add(both, erf);
    let both = b.add(both, plain);
    let both = b.add(both, tanh);
    let parts = b.columns(f, 0, 5);
    let both = b.gate(both, parts);
    let f = b.matmul(both, down);
    let x = b.add(x, f);
    let x = gated_heads(&mut b, x);
    let x = b.select_outputs(x);
    let x = b.rms_norm(x, norm, 1e-5);
    let chosen = choose(&mut b, x);
    let logits = b.matmul(chosen, table);
    let logits = b.scale(logits, 0.5);
    let logits = b.soft_cap(logits, 30.0);
    b.finish(x, logits)
}

/// The small operations of recurrent layers: interleaved columns, lengths, decays, gates.
fn gated_heads(b: &mut GraphBuilder, x: Value) -> Value {
    let (first, second) = (b.head_columns(x, 16, 0, 6), b.head_columns(x, 16, 6, 10));
    let apart = b.concat(first, second);
    let unit = b.l2_norm(apart, 1e-6, 24);
    let (bias, rate) = (b.vector("dt", E), b.vector("a", E));
    let fade = b.decay(unit, bias, rate);
    let gate = b.act(fade, Activation::Sigmoid);
    let y = b.mul(unit, gate);
    let y = b.gated_act(y, x, Activation::Sigmoid);
    let y = b.act(y, Activation::GeluTanh);
    let y = b.act(y, Activation::Silu);
    b.add(x, y)
}

fn bind(graph: &Graph, matrices: WeightType, seed: u64) -> Vec<Weight> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let weight = |d: &crate::graph::WeightDecl| {
        if d.rows == 1 {
            let values: Vec<f32> = random_floats(d.cols, &mut rng).iter().map(|v| 1.0 + 0.2 * v).collect();
            return Weight::from_f32(1, d.cols, &values).unwrap();
        }
        let bytes = random_rows(matrices, d.rows, d.cols, &mut rng);
        Weight::new(matrices, d.rows, d.cols, Arc::new(bytes)).unwrap()
    };
    graph.weights.iter().map(weight).collect()
}

fn executor(graph: Graph, weights: Vec<Weight>, threads: usize) -> Executor {
    let config = Config { threads, max_rows: 16, max_outputs: 8 };
    Executor::new(graph, weights, Box::new(NoAttention), config).unwrap()
}

fn step(tokens: &[u32], outputs: &[u32]) -> Step {
    let positions = (0..tokens.len() as u32).map(|p| 7 + 3 * p).collect();
    let token_types = (0..tokens.len() as u32).map(|p| p % 2).collect();
    Step { tokens: tokens.to_vec(), positions, token_types, outputs: outputs.to_vec(), ..Step::default() }
}

/// The forward pass of one row in f64, operation by operation as `graph.rs` words them.
fn oracle(graph: &Graph, weights: &[Weight], step: &Step, row: usize) -> Vec<f64> {
    let (token, position) = (step.tokens[row], step.positions[row]);
    let weight = |w: WeightId| weights[w.0 as usize].to_f32().into_iter().map(f64::from).collect::<Vec<f64>>();
    let mut values: Vec<Vec<f64>> = vec![Vec::new(); graph.widths.len()];
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    let erf = |x: f64| 1.0 - libm_erfc(x);
    let gelu_erf = |x: f64| 0.5 * x * (1.0 + erf(x / 2f64.sqrt()));
    let gelu = |x: f64| 0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh());
    let activation = |act: Activation, x: f64| match act {
        Activation::Silu => x * sigmoid(x),
        Activation::GeluTanh => gelu(x),
        Activation::GeluErf => gelu_erf(x),
        Activation::Tanh => x.tanh(),
        Activation::Sigmoid => sigmoid(x),
    };
    for op in &graph.ops {
        let of = |v: Value| values[v.0 as usize].clone();
        let pairs = |a: Value, b: Value| of(a).into_iter().zip(of(b)).collect::<Vec<_>>();
        let result = match *op {
            Op::Embed { table, scale, .. } => {
                weight(table).chunks(E).nth(token as usize).unwrap().iter().map(|v| v * f64::from(scale)).collect()
            }
            Op::EmbedBy { table, index, .. } => {
                weight(table).chunks(E).nth(step.index(index, row) as usize).unwrap().to_vec()
            }
            Op::LayerNorm { x, weight: w, bias, eps, .. } => {
                let (x, w, b) = (of(x), weight(w), weight(bias));
                let mean = x.iter().sum::<f64>() / x.len() as f64;
                let variance = x.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / x.len() as f64;
                let scale = 1.0 / (variance + f64::from(eps)).sqrt();
                x.iter().zip(w.iter().zip(&b)).map(|(x, (w, b))| (x - mean) * scale * w + b).collect()
            }
            Op::RmsNorm { x, weight: w, eps, group, .. } => {
                let w = w.map_or(vec![1.0; group], weight);
                let norm = |x: &[f64]| {
                    let mean = x.iter().map(|v| v * v).sum::<f64>() / group as f64;
                    let scale = 1.0 / (mean + f64::from(eps)).sqrt();
                    x.iter().zip(&w).map(|(v, w)| v * scale * w).collect::<Vec<f64>>()
                };
                of(x).chunks(group).flat_map(norm).collect()
            }
            Op::MatMul { x, weight: w, bias, .. } => {
                let x = of(x);
                let mut y: Vec<f64> =
                    weight(w).chunks(x.len()).map(|w| w.iter().zip(&x).map(|(w, x)| w * x).sum()).collect();
                if let Some(b) = bias {
                    y.iter_mut().zip(weight(b)).for_each(|(y, b)| *y += b);
                }
                y
            }
            Op::Rope { x, head_dim, rope, .. } => {
                let rope = &graph.ropes[rope.0 as usize];
                let divisors = weight(rope.freq_divisors.unwrap());
                let mut x = of(x);
                for head in x.chunks_mut(head_dim) {
                    for i in 0..rope.n_rot / 2 {
                        let frequency = f64::from(rope.base).powf(-2.0 * i as f64 / rope.n_rot as f64) / divisors[i];
                        let (sin, cos) = (f64::from(position) * frequency).sin_cos();
                        let (a, b) = (head[i], head[i + rope.n_rot / 2]);
                        (head[i], head[i + rope.n_rot / 2]) = (a * cos - b * sin, a * sin + b * cos);
                    }
                }
                x
            }
            Op::GatedAct { gate, up, act, .. } => {
                pairs(gate, up).into_iter().map(|(g, u)| activation(act, g) * u).collect()
            }
            Op::Act { x, act, .. } => of(x).iter().map(|&v| activation(act, v)).collect(),
            Op::Add { a, b, .. } => pairs(a, b).into_iter().map(|(a, b)| a + b).collect(),
            Op::Scale { x, factor, .. } => of(x).iter().map(|v| v * f64::from(factor)).collect(),
            Op::SoftCap { x, cap, .. } => of(x).iter().map(|v| f64::from(cap) * (v / f64::from(cap)).tanh()).collect(),
            Op::SelectOutputs { x, .. } | Op::SelectLogits { x, .. } => of(x),
            Op::Columns { out, x, group, start } => {
                let width = graph.width(out) / (graph.width(x) / group);
                of(x).chunks(group).flat_map(|g| g[start..start + width].to_vec()).collect()
            }
            Op::Concat { a, b, .. } => [of(a), of(b)].concat(),
            Op::Mul { a, b, .. } => pairs(a, b).into_iter().map(|(a, b)| a * b).collect(),
            Op::L2Norm { x, eps, group, .. } => {
                let norm = |x: &[f64]| {
                    let length = (x.iter().map(|v| v * v).sum::<f64>() + f64::from(eps)).sqrt();
                    x.iter().map(|v| v / length).collect::<Vec<f64>>()
                };
                of(x).chunks(group).flat_map(norm).collect()
            }
            Op::Decay { x, bias, rate, .. } => {
                let gates = weight(bias).into_iter().zip(weight(rate));
                of(x).iter().zip(gates).map(|(x, (b, r))| r * (x + b).exp().ln_1p()).collect()
            }
            Op::Gate { x, gate, .. } => {
                let (x, gate) = (of(x), of(gate));
                let part = x.len() / gate.len();
                x.iter().enumerate().map(|(i, x)| x * sigmoid(gate[i / part])).collect()
            }
            Op::Append { .. } | Op::Attend { .. } => unreachable!("no attention in this graph"),
            Op::ShortConv { .. } | Op::DeltaNet { .. } => unreachable!("no memory in this graph"),
            Op::Route { .. } | Op::ExpertMatMul { .. } | Op::Combine { .. } => unreachable!("no experts in this graph"),
        };
        values[compile::output(op).unwrap().0 as usize] = result;
    }
    values[graph.logits.unwrap().0 as usize].clone()
}

#[test]
fn every_row_operation_matches_f64_whatever_the_threads() {
    let graph = build();
    let weights = bind(&graph, WeightType::F32, 5);
    let step = step(&[3, 49, 0, 17, 17], &[0, 3, 4]);
    for threads in [1, 2, 4] {
        let mut executor = executor(graph.clone(), weights.clone(), threads);
        let outputs = executor.run(&step).unwrap();
        assert_eq!(outputs.rows(), 3);
        for (i, row) in [0usize, 3, 4].into_iter().enumerate() {
            let expected = oracle(&graph, &weights, &step, row);
            for (found, expected) in outputs.logits(i).iter().zip(&expected) {
                assert!(
                    (f64::from(*found) - expected).abs() < 1e-4,
                    "{threads} threads, row {row}: {found} {expected}"
                );
            }
        }
    }
}

/// The complementary error function by its continued fraction or its series.
fn libm_erfc(x: f64) -> f64 {
    let z = x.abs();
    let tail = match z < 2.0 {
        true => {
            let mut term = z;
            let mut sum = z;
            for n in 1..60 {
                term *= -z * z / f64::from(n);
                sum += term / f64::from(2 * n + 1);
            }
            1.0 - 2.0 / std::f64::consts::PI.sqrt() * sum
        }
        false => {
            let fraction = (1..80).rev().fold(0.0, |f, k| f64::from(k) / 2.0 / (z + f));
            (-z * z).exp() / std::f64::consts::PI.sqrt() / (z + fraction)
        }
    };
    if x < 0.0 { 2.0 - tail } else { tail }
}

#[test]
fn outputs_without_logits_have_their_hidden_state_and_may_be_as_many_as_tokens() {
    let all = build();
    let graph = build_with_chosen_logits();
    let weights = bind(&all, WeightType::F32, 5);
    let tokens: Vec<u32> = (0..16).collect();
    let mut whole = executor(all, weights.clone(), 2);
    let mut chosen = executor(graph, weights, 2);
    let rows: Vec<u32> = (0..16).collect();
    let mut step_chosen = step(&tokens, &rows);
    step_chosen.logits = vec![2, 15];
    let found = chosen.run(&step_chosen).unwrap();
    assert_eq!(found.rows(), 16);
    for first in [0, 8] {
        let rows: Vec<u32> = (first..first + 8).collect();
        let some = step(&tokens, &rows);
        let expected = whole.run(&some).unwrap();
        for (i, row) in rows.iter().map(|&r| r as usize).enumerate() {
            assert_eq!(found.hidden(row), expected.hidden(i));
            match row {
                2 | 15 => assert_eq!(found.logits(row), expected.logits(i)),
                _ => assert!(found.logits(row).is_empty()),
            }
        }
    }
    step_chosen.logits = vec![2, 16];
    assert!(chosen.run(&step_chosen).unwrap_err().to_string().contains("output with logits 16"));
    step_chosen.logits = (0..9).collect();
    assert!(chosen.run(&step_chosen).unwrap_err().to_string().contains("9 outputs with logits"));
}

#[test]
fn positions_and_token_types_beyond_their_tables_are_refused() {
    let graph = build();
    let weights = bind(&graph, WeightType::F32, 8);
    let mut executor = executor(graph, weights, 1);
    let mut far = step(&[1, 2], &[0]);
    far.positions[1] = PLACES as u32;
    assert_eq!(executor.run(&far).unwrap_err().to_string(), "row 1 has position 60, but the model knows only 60");
    let mut third = step(&[1, 2], &[0]);
    third.token_types[0] = 2;
    assert_eq!(executor.run(&third).unwrap_err().to_string(), "row 0 has token type 2, but the model knows only 2");
}

#[test]
fn rows_alone_and_together_give_the_same_bits_for_quantised_weights() {
    let graph = build();
    let mut rng = ChaCha8Rng::seed_from_u64(6);
    for ty in [WeightType::Q4_1, WeightType::Q8_0, WeightType::IQ4_NL] {
        let weights = bind(&graph, ty, 7);
        let mut executor = executor(graph.clone(), weights, 3);
        let tokens: Vec<u32> = (0..7).map(|_| rng.random_range(0..VOCAB as u32)).collect();
        let all = step(&tokens, &[0, 1, 2, 3, 4, 5, 6]);
        let together: Vec<Vec<f32>> = {
            let outputs = executor.run(&all).unwrap();
            (0..7).map(|i| outputs.logits(i).to_vec()).collect()
        };
        for row in 0..7 {
            let mut alone = step(&tokens[row..row + 1], &[0]);
            alone.positions = vec![all.positions[row]];
            alone.token_types = vec![all.token_types[row]];
            assert_eq!(executor.run(&alone).unwrap().logits(0), together[row], "{ty} row {row}");
        }
    }
}

#[test]
fn quantised_weights_give_the_logits_of_their_values() {
    let graph = build();
    let step = step(&[3, 49], &[0, 1]);
    for ty in [WeightType::Q4_1, WeightType::Q5_0, WeightType::Q8_0, WeightType::MXFP4] {
        let weights = bind(&graph, ty, 7);
        let mut executor = executor(graph.clone(), weights.clone(), 2);
        let outputs = executor.run(&step).unwrap();
        for row in 0..2 {
            let expected = oracle(&graph, &weights, &step, row);
            let size = (expected.iter().map(|v| v * v).sum::<f64>() / expected.len() as f64).sqrt();
            let found = outputs.logits(row).iter().map(|v| f64::from(*v));
            let error = found.zip(&expected).map(|(f, e)| (f - e).powi(2)).sum::<f64>() / expected.len() as f64;
            assert!(error.sqrt() < 1e-4 * size, "{ty} row {row}: error {} of {size}", error.sqrt());
        }
    }
}

#[test]
fn a_step_that_does_not_fit_is_refused_in_one_sentence() {
    let graph = build();
    let weights = bind(&graph, WeightType::F32, 8);
    let mut executor = executor(graph, weights, 1);
    let refusal = |e: &mut Executor, s: &Step| e.run(s).unwrap_err().to_string();
    assert_eq!(refusal(&mut executor, &step(&[1; 17], &[])), "a step has 17 tokens, but this executor was made for 16");
    assert_eq!(
        refusal(&mut executor, &step(&[1; 9], &[0, 1, 2, 3, 4, 5, 6, 7, 8])),
        "a step has 9 outputs, but this executor was made for 8"
    );
    assert_eq!(
        refusal(&mut executor, &step(&[1, 50], &[1])),
        "token 50 of row 1 is outside the model's vocabulary of 50"
    );
    assert!(refusal(&mut executor, &step(&[1, 2], &[5, 1])).contains("output row 5"));
    let mut torn = step(&[1, 2], &[0]);
    torn.positions.pop();
    assert!(refusal(&mut executor, &torn).contains("positions"));
    assert_eq!(executor.run(&step(&[], &[])).unwrap().rows(), 0);
}

#[test]
fn a_weight_of_another_shape_is_named() {
    let graph = build();
    let mut weights = bind(&graph, WeightType::F32, 9);
    weights[0] = Weight::from_f32(2, 3, &[0.0; 6]).unwrap();
    let config = Config { threads: 1, max_rows: 1, max_outputs: 1 };
    let error = Executor::new(graph, weights, Box::new(NoAttention), config).err().unwrap();
    assert_eq!(error.to_string(), "tensor `token_embd.weight` is 2x3, but the graph needs 50x96");
}
