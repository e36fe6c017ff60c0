//! Mistakes of Gemma 4: dense, with experts, elastic.

use opencoti_compute::graph::{Activation, Graph, KvLayerId, Op, Value};

use super::Change::{Graph as InGraph, HParams as InHParams, Interpreter};
use super::dense::gelu_erf;
use super::{Mistake, is_norm, skip};

const ALL: &[&str] = &["gemma4", "gemma4-elastic", "gemma4-moe"];

pub(super) const ROWS: &[Mistake] = &[
    Mistake { what: "a window of one key too many", models: ALL, change: InHParams(|hp| hp.sliding_window = Some(9)) },
    Mistake { what: "a window of one key too few", models: ALL, change: InHParams(|hp| hp.sliding_window = Some(7)) },
    Mistake {
        what: "scores scaled by the root of the head size",
        models: ALL,
        change: InHParams(|hp| hp.attention_scale = Some(1.0 / (hp.head.key as f32).sqrt())),
    },
    Mistake { what: "values without a norm", models: ALL, change: InGraph(|g| skip(g, is_value_norm)) },
    Mistake {
        what: "values of normed keys where there is no value projection",
        models: &["gemma4", "gemma4-moe"],
        change: InGraph(values_of_normed_keys),
    },
    Mistake {
        what: "no factor on the residual stream at the end of a block",
        models: ALL,
        change: InGraph(|g| skip(g, |g, op| matches!(op, Op::Scale { x, .. } if is_sum(g, *x)))),
    },
    Mistake {
        what: "all pairs of a global head turn",
        models: ALL,
        change: InGraph(|g| g.ropes.iter_mut().for_each(|r| r.freq_divisors = None)),
    },
    Mistake { what: "no cap on the logits", models: ALL, change: InHParams(|hp| hp.final_softcap = None) },
    Mistake { what: "GELU by the error function", models: ALL, change: Interpreter(|m| m.gelu = gelu_erf) },
    Mistake {
        what: "keys and values of another layer of the same kind",
        models: &["gemma4-elastic"],
        change: InGraph(read_the_first_window_layer),
    },
    Mistake {
        what: "SiLU on the gate of the layer inputs",
        models: &["gemma4-elastic"],
        change: InGraph(silu_on_layer_inputs),
    },
    Mistake {
        what: "layer inputs without the table of tokens",
        models: &["gemma4-elastic"],
        change: InGraph(|g| table_of_tokens_by(g, 0.0)),
    },
    Mistake {
        what: "the table of layer inputs without the root of its width",
        models: &["gemma4-elastic"],
        change: InGraph(|g| table_of_tokens_by(g, 1.0)),
    },
    Mistake {
        what: "a router that sees what the experts see",
        models: &["gemma4-moe"],
        change: InGraph(|g| reroute(g, |g, seen| normed_for_experts(g, source(g, source(g, seen))))),
    },
    Mistake {
        what: "a router without the root of the width",
        models: &["gemma4-moe"],
        change: InGraph(|g| reroute(g, source)),
    },
    Mistake {
        what: "weights of a token's experts that do not sum to one",
        models: &["gemma4-moe"],
        change: InGraph(|g| {
            g.ops.iter_mut().for_each(|op| {
                if let Op::Route { renorm, .. } = op {
                    *renorm = false;
                }
            });
        }),
    },
    Mistake {
        what: "no factors of experts",
        models: &["gemma4-moe"],
        change: InGraph(|g| {
            g.ops.iter_mut().for_each(|op| {
                if let Op::ExpertMatMul { experts, .. } = op {
                    experts.scale = None;
                }
            });
        }),
    },
    Mistake {
        what: "the norms of the dense branch and of the experts swapped",
        models: &["gemma4-moe"],
        change: InGraph(swap_branch_norms),
    },
];

/// The norm that makes a layer's values.
fn is_value_norm(g: &Graph, op: &Op) -> bool {
    let Op::RmsNorm { out, weight: None, .. } = op else { return false };
    g.ops.iter().any(|op| matches!(op, Op::Append { v, .. } if v == out))
}

fn values_of_normed_keys(g: &mut Graph) {
    let key_norms: Vec<(Value, Value)> = g
        .ops
        .iter()
        .filter(|op| is_norm(g, op, "attn_k_norm"))
        .filter_map(|op| match *op {
            Op::RmsNorm { out, x, .. } => Some((x, out)),
            _ => None,
        })
        .collect();
    for i in 0..g.ops.len() {
        let value_norm = is_value_norm(g, &g.ops[i]);
        if let Op::RmsNorm { x, .. } = &mut g.ops[i]
            && value_norm
            && let Some((_, normed)) = key_norms.iter().find(|(raw, _)| raw == x)
        {
            *x = *normed;
        }
    }
}

fn is_sum(g: &Graph, value: Value) -> bool {
    // The sum of the layer inputs is scaled too, and is no residual stream.
    g.width(value) == g.width(g.hidden.expect("a hidden state"))
        && g.ops.iter().any(|op| matches!(op, Op::Add { out, .. } if *out == value))
}

fn read_the_first_window_layer(g: &mut Graph) {
    for op in &mut g.ops {
        if let Op::Attend { layer, .. } = op
            && *layer == KvLayerId(1)
        {
            *layer = KvLayerId(0);
        }
    }
}

fn silu_on_layer_inputs(g: &mut Graph) {
    let part_of_row: Vec<Value> = g
        .ops
        .iter()
        .filter_map(|op| match *op {
            Op::Columns { out, .. } => Some(out),
            _ => None,
        })
        .collect();
    for op in &mut g.ops {
        if let Op::GatedAct { up, act, .. } = op
            && part_of_row.contains(up)
        {
            *act = Activation::Silu;
        }
    }
}

fn table_of_tokens_by(g: &mut Graph, factor: f32) {
    let weights = g.weights.clone();
    for op in &mut g.ops {
        if let Op::Embed { table, scale, .. } = op
            && weights[table.0 as usize].name == "per_layer_token_embd.weight"
        {
            *scale = factor;
        }
    }
}

/// Gives every router another input.
fn reroute(g: &mut Graph, input: impl Fn(&Graph, Value) -> Value) {
    let unchanged = g.clone();
    for op in &mut g.ops {
        if let Op::MatMul { x, weight, .. } = op
            && unchanged.weights[weight.0 as usize].name.ends_with("ffn_gate_inp.weight")
        {
            *x = input(&unchanged, *x);
        }
    }
}

/// What the norm or the factor that makes `value` reads.
fn source(g: &Graph, value: Value) -> Value {
    let source = g.ops.iter().find_map(|op| match *op {
        Op::Scale { out, x, .. } | Op::RmsNorm { out, x, .. } if out == value => Some(x),
        _ => None,
    });
    source.expect("scaled or normed")
}

/// `residual` as the experts see it.
fn normed_for_experts(g: &Graph, residual: Value) -> Value {
    let normed = g.ops.iter().find_map(|op| match *op {
        Op::RmsNorm { out, x, .. } if x == residual && is_norm(g, op, "pre_ffw_norm_2") => Some(out),
        _ => None,
    });
    normed.expect("normed for the experts")
}

fn swap_branch_norms(g: &mut Graph) {
    for i in 0..g.weights.len() {
        let name = g.weights[i].name.clone();
        let Some(block) = name.strip_suffix("post_ffw_norm_1.weight") else { continue };
        let other = format!("{block}post_ffw_norm_2.weight");
        let other = g.weights.iter().position(|w| w.name == other).expect("the experts' norm");
        for op in &mut g.ops {
            if let Op::RmsNorm { weight: Some(weight), .. } = op {
                match weight.0 as usize {
                    at if at == i => weight.0 = other as u32,
                    at if at == other => weight.0 = i as u32,
                    _ => {}
                }
            }
        }
    }
}
