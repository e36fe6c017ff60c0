//! Mistakes with experts.

use opencoti_compute::graph::{Graph, Op};

use super::Change::{Graph as InGraph, HParams as InHParams, Interpreter};
use super::Mistake;

const ALL: &[&str] = &["qwen3moe", "llama-experts", "granitemoe"];

pub(super) const ROWS: &[Mistake] = &[
    Mistake {
        what: "weights of experts that do not sum to one",
        models: ALL,
        change: InGraph(|g| {
            for op in &mut g.ops {
                if let Op::Route { renorm, .. } = op {
                    *renorm = false;
                }
            }
        }),
    },
    Mistake { what: "an expert more", models: ALL, change: InHParams(|hp| hp.expert_used_count += 1) },
    Mistake { what: "an expert less", models: ALL, change: InHParams(|hp| hp.expert_used_count -= 1) },
    Mistake { what: "gate and up of experts confused", models: ALL, change: InGraph(super::swap_gate_and_up) },
    Mistake { what: "weights on what experts read", models: ALL, change: Interpreter(|m| m.weighted_inputs = true) },
    Mistake { what: "a router that reads the residual stream", models: ALL, change: InGraph(route_by_residual) },
];

fn route_by_residual(g: &mut Graph) {
    let residual_of = |normed| {
        g.ops.iter().find_map(|op| match *op {
            Op::RmsNorm { out, x, .. } if out == normed => Some(x),
            _ => None,
        })
    };
    let changed = g.ops.iter().map(|op| match *op {
        Op::MatMul { out, x, weight, bias } if g.weights[weight.0 as usize].name.contains("ffn_gate_inp") => {
            Op::MatMul { out, x: residual_of(x).expect("a norm"), weight, bias }
        }
        ref op => op.clone(),
    });
    g.ops = changed.collect();
}
