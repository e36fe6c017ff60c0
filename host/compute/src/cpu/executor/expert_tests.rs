//! Feed-forwards of experts against a plain f64 computation.

use std::sync::Arc;

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::tests::NoAttention;
use super::*;
use crate::graph::{Activation, Experts, GraphBuilder};
use crate::quant::WeightType;
use opencoti_weights::samples::{random_floats, random_rows};

const E: usize = 256;
const F: usize = 256;
/// More than are gathered at once.
const MAX_ROWS: usize = 150;

/// One layer of experts; a token's router logits are the first elements of its embedding.
#[derive(Clone, Copy)]
struct Layer {
    experts: usize,
    used: usize,
    renorm: bool,
    act: Activation,
    /// Gate and up rows in one stack.
    fused: bool,
    /// A factor of each expert's output.
    scaled: bool,
    /// Behind the selection of the output rows instead of before it.
    selected: bool,
}

const PLAIN: Layer =
    Layer { experts: 6, used: 2, renorm: true, act: Activation::Silu, fused: false, scaled: false, selected: false };

impl Layer {
    fn graph(&self, vocabulary: usize) -> Graph {
        let mut b = GraphBuilder::new();
        let table = b.weight("table", E, vocabulary);
        let mut stack = |name: &str, cols, rows| b.expert_stack(name, cols, rows, self.experts);
        let (gate, up) = if self.fused {
            let both = stack("gate_up", E, 2 * F);
            (both, both)
        } else {
            (stack("gate", E, F), stack("up", E, F))
        };
        let down = stack("down", F, E);
        let part = |stack, first, rows, scale| Experts { stack, first, rows, scale };
        let x = b.embed(table, 1.0);
        let x = if self.selected { b.select_outputs(x) } else { x };
        let logits = b.columns(x, 0, self.experts);
        let route = b.route(logits, self.used, self.renorm);
        let g = b.expert_matmul(x, route, part(gate, 0, F, None));
        let u = b.expert_matmul(x, route, part(up, if self.fused { F } else { 0 }, F, None));
        let h = b.gated_act(g, u, self.act);
        let scale = self.scaled.then(|| b.vector("scale", self.experts));
        let y = b.expert_matmul(h, route, part(down, 0, E, scale));
        let y = b.combine(y, route);
        let y = if self.selected { y } else { b.select_outputs(y) };
        b.finish(y, y)
    }

    /// What the layer makes of one embedding.
    fn reference(&self, x: &[f32], weights: &[Vec<f32>]) -> Vec<f64> {
        let product = |stack: usize, rows_each: usize, row: usize, x: &[f64]| -> f64 {
            let (expert, row) = (row / rows_each, row % rows_each);
            let start = (expert * rows_each + row) * x.len();
            weights[stack][start..start + x.len()].iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum()
        };
        let x: Vec<f64> = x.iter().map(|v| f64::from(*v)).collect();
        let mut order: Vec<usize> = (0..self.experts).collect();
        order.sort_by(|a, b| x[*b].total_cmp(&x[*a]));
        let total: f64 = order[..if self.renorm { self.used } else { self.experts }].iter().map(|e| x[*e].exp()).sum();
        let down = if self.fused { 2 } else { 3 };
        let mut y = vec![0.0; E];
        for &e in &order[..self.used] {
            let row = |i: usize| match self.fused {
                true => (product(1, 2 * F, e * 2 * F + i, &x), product(1, 2 * F, e * 2 * F + F + i, &x)),
                false => (product(1, F, e * F + i, &x), product(2, F, e * F + i, &x)),
            };
            let h: Vec<f64> = (0..F).map(row).map(|(g, u)| activation(self.act, g) * u).collect();
            let scale = if self.scaled { f64::from(weights[down + 1][e]) } else { 1.0 };
            let weight = x[e].exp() / total * scale;
            y.iter_mut().enumerate().for_each(|(o, y)| *y += weight * product(down, E, e * E + o, &h));
        }
        y
    }
}

fn activation(act: Activation, x: f64) -> f64 {
    match act {
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::GeluTanh => {
            0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
        }
        other => unreachable!("no layer here has {other:?}"),
    }
}

/// The layer's results for every embedding of `table` against the reference, in one step of all and in steps of one
/// row, with `threads` workers.
fn check(layer: Layer, ty: WeightType, table: &[f32], threads: usize) {
    let rows = table.len() / E;
    let graph = layer.graph(rows);
    let mut rng = ChaCha8Rng::seed_from_u64(3);
    let weights: Vec<Weight> = graph
        .weights
        .iter()
        .map(|d| match d.name.as_str() {
            "table" => Weight::from_f32(d.rows, d.cols, table).unwrap(),
            "scale" => Weight::from_f32(1, d.cols, &random_floats(d.cols, &mut rng)).unwrap(),
            _ => Weight::new(ty, d.rows, d.cols, Arc::new(random_rows(ty, d.rows, d.cols, &mut rng))).unwrap(),
        })
        .collect();
    let values: Vec<Vec<f32>> = weights.iter().map(Weight::to_f32).collect();
    let config = Config { threads, max_rows: MAX_ROWS, max_outputs: MAX_ROWS };
    let mut executor = Executor::new(graph, weights, Box::new(NoAttention), config).unwrap();
    let step = |tokens: Vec<u32>| Step {
        positions: vec![0; tokens.len()],
        outputs: (0..tokens.len() as u32).rev().collect(),
        tokens,
        ..Step::default()
    };
    let all = step((0..rows as u32).collect());
    let mut together: Vec<Vec<f32>> = {
        let outputs = executor.run(&all).unwrap();
        (0..rows).map(|i| outputs.logits(i).to_vec()).collect()
    };
    together.reverse();
    let tolerance = if precision(ty) == Precision::Float { 2e-5 } else { 1e-3 };
    for (row, found) in together.iter().enumerate() {
        let expected = layer.reference(&table[row * E..(row + 1) * E], &values);
        let size = (expected.iter().map(|v| v * v).sum::<f64>() / E as f64).sqrt();
        for (f, e) in found.iter().zip(&expected) {
            assert!(
                (f64::from(*f) - e).abs() < tolerance * size,
                "{ty}, {threads} threads, row {row}: {f} {e} of {size}"
            );
        }
    }
    for row in [0, rows / 2, rows - 1] {
        let alone = executor.run(&step(vec![row as u32])).unwrap();
        assert_eq!(alone.logits(0), together[row], "{ty}: row {row} alone");
    }
}

fn embeddings(rows: usize, seed: u64) -> Vec<f32> {
    random_floats(rows * E, &mut ChaCha8Rng::seed_from_u64(seed))
}

#[test]
fn experts_of_every_weight_type_match_f64_and_rows_alone_give_the_same_bits() {
    for (i, ty) in WeightType::all().enumerate() {
        check(Layer { experts: 3, ..PLAIN }, ty, &embeddings(7, i as u64), 1 + i % 3);
    }
}

#[test]
fn every_form_of_the_layer_matches_f64() {
    let table = embeddings(9, 40);
    let gelu = Activation::GeluTanh;
    for layer in [
        Layer { renorm: false, ..PLAIN },
        Layer { act: gelu, fused: true, ..PLAIN },
        Layer { scaled: true, ..PLAIN },
        Layer { act: gelu, fused: true, scaled: true, renorm: false, used: 3, ..PLAIN },
        Layer { selected: true, ..PLAIN },
        Layer { used: 1, ..PLAIN },
        Layer { used: 6, ..PLAIN },
        Layer { used: 6, renorm: false, ..PLAIN },
    ] {
        check(layer, WeightType::F32, &table, 2);
        check(layer, WeightType::Q4_K, &table, 2);
    }
}

#[test]
fn one_expert_for_all_rows_and_experts_without_rows_are_right() {
    let mut rng = ChaCha8Rng::seed_from_u64(41);
    for favourite in [0, 2, 5] {
        let mut table = embeddings(MAX_ROWS, 42);
        for row in table.chunks_exact_mut(E) {
            row[favourite] = 5.0;
            // The second choice is any but 1, which nobody takes.
            row[1] = -5.0;
            row[[0, 3, 4][rng.random_range(0..3)]] += 3.0;
        }
        check(PLAIN, WeightType::Q8_0, &table, 3);
        check(Layer { used: 1, ..PLAIN }, WeightType::BF16, &table, 2);
    }
}

#[test]
fn more_workers_than_experts_share_one_row() {
    for ty in [WeightType::Q6_K, WeightType::F16] {
        check(Layer { used: 1, ..PLAIN }, ty, &embeddings(3, 43), 7);
    }
}

#[test]
fn rows_of_another_routing_are_refused() {
    let mut b = GraphBuilder::new();
    let table = b.weight("table", E, 4);
    let stack = b.expert_stack("stack", E, E, 4);
    let experts = Experts { stack, first: 0, rows: E, scale: None };
    let x = b.embed(table, 1.0);
    let logits = b.columns(x, 0, 4);
    let (one, two) = (b.route(logits, 1, true), b.route(logits, 2, true));
    let y = b.expert_matmul(x, one, experts);
    let y = b.expert_matmul(y, two, experts);
    let y = b.combine(y, two);
    let y = b.select_outputs(y);
    let error = compile::compile(&b.finish(y, y), &[Precision::Float; 2]).unwrap_err().to_string();
    assert!(error.contains("reads rows of another routing"), "{error}");
}
