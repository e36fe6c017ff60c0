//! Mistakes of dense decoders.

use opencoti_compute::graph::{Activation, Graph, Op, RopeId, RopePairing, RopeScaling, Value};
use opencoti_model::hparams::SlidingPattern;

use super::Change::{Graph as InGraph, HParams as InHParams, Interpreter};
use super::{Mistake, is_norm, skip, swap_gate_and_up};

pub(super) const ROWS: &[Mistake] = &[
    Mistake {
        what: "interleaved and half-split rope confused",
        models: &[
            "llama",
            "mistral",
            "qwen2",
            "qwen3",
            "gemma2",
            "gemma3",
            "phi3",
            "phi3-long",
            "smollm3",
            "olmo2",
            "granite",
        ],
        change: InGraph(|g| g.ropes.iter_mut().for_each(|r| r.pairing = other_pairing(r.pairing))),
    },
    Mistake {
        what: "a window of one key too many",
        models: &["mistral", "gemma2", "gemma3", "phi3", "olmo3"],
        change: InHParams(|hp| hp.sliding_window = Some(9)),
    },
    Mistake {
        what: "a window of one key too few",
        models: &["mistral", "gemma2", "gemma3", "phi3", "olmo3"],
        change: InHParams(|hp| hp.sliding_window = Some(7)),
    },
    Mistake {
        what: "a global layer too early",
        models: &["gemma3"],
        change: InHParams(|hp| hp.sliding_pattern = Some(SlidingPattern::Period(5))),
    },
    Mistake {
        what: "a global layer too late",
        models: &["gemma3"],
        change: InHParams(|hp| hp.sliding_pattern = Some(SlidingPattern::Period(7))),
    },
    Mistake {
        what: "windows in the wrong half of the layers",
        models: &["gemma2"],
        change: InHParams(|hp| hp.sliding_pattern = Some(SlidingPattern::Layers(vec![false, true, false]))),
    },
    Mistake {
        what: "the rope base of global layers in window layers",
        models: &["gemma3"],
        change: InHParams(|hp| hp.rope_base_swa = hp.rope_base),
    },
    Mistake {
        what: "the rope base of window layers in global layers",
        models: &["gemma3"],
        change: InHParams(|hp| hp.rope_base = hp.rope_base_swa),
    },
    Mistake {
        what: "no context extension",
        models: &["llama-yarn", "llama-linear", "gemma3-linear-capped", "qwen3-yarn", "olmo3"],
        change: InHParams(|hp| hp.rope_scaling = RopeScaling::None),
    },
    Mistake {
        what: "context extension of window layers",
        models: &["gemma3-linear-capped", "olmo3"],
        change: InGraph(|g| {
            let scaling = g.ropes.iter().map(|r| r.scaling).find(|s| *s != RopeScaling::None).expect("an extension");
            g.ropes.iter_mut().for_each(|r| r.scaling = scaling);
        }),
    },
    Mistake {
        what: "no divisors of the rope frequencies",
        models: &["llama-rope-freqs", "phi3-long", "phi3-short"],
        change: InGraph(|g| g.ropes[0].freq_divisors = None),
    },
    Mistake {
        what: "divisors of short contexts for long ones",
        models: &["phi3-long"],
        change: InHParams(|hp| hp.long_context = false),
    },
    Mistake {
        what: "divisors of long contexts for short ones",
        models: &["phi3-short"],
        change: InHParams(|hp| hp.long_context = true),
    },
    Mistake {
        what: "no magnitude of LongRoPE",
        models: &["phi3-long"],
        change: InGraph(|g| g.ropes[0].scaling = RopeScaling::None),
    },
    Mistake {
        what: "the whole head rotated",
        models: &["phi3-long"],
        change: InGraph(|g| {
            g.ropes[0].freq_divisors = None;
            g.ropes[0].n_rot = g.kv_layers[0].k_head_dim;
        }),
    },
    Mistake { what: "a layer without positions rotated", models: &["smollm3"], change: InGraph(rotate_all_layers) },
    Mistake { what: "no biases", models: &["llama-bias-untied", "qwen2"], change: InGraph(drop_biases) },
    Mistake {
        what: "no norm of queries",
        models: &["qwen3", "gemma3", "olmo2", "olmo3"],
        change: InGraph(|g| skip(g, |g, op| is_norm(g, op, "attn_q_norm"))),
    },
    Mistake {
        what: "no norm of keys",
        models: &["qwen3", "gemma3", "olmo2", "olmo3"],
        change: InGraph(|g| skip(g, |g, op| is_norm(g, op, "attn_k_norm"))),
    },
    Mistake {
        what: "keys normed after they are rotated",
        models: &["qwen3", "gemma3", "olmo2"],
        change: InGraph(|g| swap_with_next(g, "attn_k_norm")),
    },
    Mistake {
        what: "queries and keys normed head by head",
        models: &["olmo2", "olmo3"],
        change: InGraph(|g| {
            let head = g.kv_layers[0].k_head_dim;
            for_norms(g, &["attn_q_norm", "attn_k_norm"], |op| {
                if let Op::RmsNorm { group, .. } = op {
                    *group = head;
                }
            });
        }),
    },
    Mistake {
        what: "no norm behind the attention",
        models: &["gemma2", "gemma3", "olmo2", "olmo3"],
        change: InGraph(|g| skip(g, |g, op| is_norm(g, op, "post_attention_norm"))),
    },
    Mistake {
        what: "no norm behind the feed-forward",
        models: &["gemma2", "gemma3", "olmo2", "olmo3"],
        change: InGraph(|g| skip(g, |g, op| is_norm(g, op, "post_ffw_norm"))),
    },
    Mistake {
        what: "the sum normed instead of what is added",
        models: &["gemma2", "gemma3", "olmo2", "olmo3"],
        change: InGraph(|g| swap_with_next(g, "post_attention_norm")),
    },
    Mistake {
        what: "the norms around the feed-forward confused",
        models: &["gemma2", "gemma3"],
        change: InGraph(|g| swap_weights(g, "ffn_norm", "post_ffw_norm")),
    },
    Mistake {
        what: "SiLU and GELU confused",
        models: &["llama", "gemma2", "gemma3"],
        change: InGraph(swap_activations),
    },
    Mistake {
        what: "GELU by the error function",
        models: &["gemma2", "gemma3"],
        change: Interpreter(|m| m.gelu = gelu_erf),
    },
    Mistake { what: "gate and up confused", models: &["phi3", "llama"], change: InGraph(swap_gate_and_up) },
    Mistake { what: "no cap of scores", models: &["gemma2"], change: InHParams(|hp| hp.attention_softcap = None) },
    Mistake {
        what: "no cap of logits",
        models: &["gemma2", "gemma3-linear-capped"],
        change: InHParams(|hp| hp.final_softcap = None),
    },
    Mistake {
        what: "no factor of embeddings",
        models: &["gemma2", "gemma3", "granite"],
        change: InGraph(|g| {
            for op in &mut g.ops {
                if let Op::Embed { scale, .. } = op {
                    *scale = 1.0;
                }
            }
        }),
    },
    Mistake {
        what: "no factor of what a block adds",
        models: &["granite"],
        change: InGraph(|g| {
            let logits = g.logits;
            skip(g, |_, op| matches!(op, Op::Scale { out, .. } if Some(*out) != logits));
        }),
    },
    Mistake {
        what: "no divisor of logits",
        models: &["granite"],
        change: InGraph(|g| {
            let logits = g.logits;
            skip(g, |_, op| matches!(op, Op::Scale { out, .. } if Some(*out) == logits));
        }),
    },
    Mistake {
        what: "scores over the root of the head size",
        models: &["granite"],
        change: InHParams(|hp| hp.attention_scale = None),
    },
    Mistake {
        what: "scores over the root of the width per head",
        models: &["qwen3", "gemma3"],
        change: InHParams(|hp| {
            hp.attention_scale = Some((hp.embedding_length as f32 / hp.layers[0].n_heads as f32).powf(-0.5));
        }),
    },
    Mistake { what: "another epsilon", models: &["llama"], change: InHParams(|hp| hp.rms_eps *= 100.0) },
];

fn other_pairing(pairing: RopePairing) -> RopePairing {
    match pairing {
        RopePairing::Norm => RopePairing::Neox,
        RopePairing::Neox => RopePairing::Norm,
    }
}

fn rotate_all_layers(g: &mut Graph) {
    let rope = RopeId(0);
    let rotated: Vec<Value> =
        g.ops.iter().filter_map(|op| if let Op::Rope { out, .. } = op { Some(*out) } else { None }).collect();
    let mut ops = Vec::new();
    for mut op in std::mem::take(&mut g.ops) {
        match &mut op {
            Op::Attend { rope: r, .. } => *r = Some(rope),
            Op::Append { layer, k, .. } if !rotated.contains(k) => {
                let out = Value(g.widths.len() as u32);
                g.widths.push(g.widths[k.0 as usize]);
                ops.push(Op::Rope { out, x: *k, head_dim: g.kv_layers[layer.0 as usize].k_head_dim, rope });
                *k = out;
            }
            _ => {}
        }
        ops.push(op);
    }
    g.ops = ops;
}

fn drop_biases(g: &mut Graph) {
    for op in &mut g.ops {
        if let Op::MatMul { bias, .. } = op {
            *bias = None;
        }
    }
}

fn for_norms(g: &mut Graph, names: &[&str], change: impl Fn(&mut Op)) {
    for i in 0..g.ops.len() {
        if names.iter().any(|name| is_norm(g, &g.ops[i], name)) {
            change(&mut g.ops[i]);
        }
    }
}

/// Puts the operation on the norm's result before the norm.
fn swap_with_next(g: &mut Graph, norm: &str) {
    let norms: Vec<usize> = (0..g.ops.len()).filter(|&i| is_norm(g, &g.ops[i], norm)).collect();
    for i in norms {
        let Op::RmsNorm { out: between, x, weight, eps, group } = g.ops[i] else { continue };
        let uses = |op: &Op| match op {
            Op::Rope { x, .. } => *x == between,
            Op::Add { a, b, .. } => *a == between || *b == between,
            _ => false,
        };
        let next = (i + 1..g.ops.len()).find(|&j| uses(&g.ops[j])).expect("it is used");
        let (first, last) = match g.ops[next] {
            Op::Rope { out, head_dim, rope, .. } => (Op::Rope { out: between, x, head_dim, rope }, out),
            Op::Add { out, a, b } => {
                let other = if a == between { b } else { a };
                (Op::Add { out: between, a: other, b: x }, out)
            }
            ref other => panic!("not expected: {other:?}"),
        };
        g.ops[i] = first;
        g.ops[next] = Op::RmsNorm { out: last, x: between, weight, eps, group };
    }
}

fn swap_weights(g: &mut Graph, one: &str, other: &str) {
    for w in &g.weights.clone() {
        if let Some(block) = w.name.strip_suffix(&format!(".{one}.weight")) {
            let at = |name: &str| g.weights.iter().position(|w| w.name == format!("{block}.{name}.weight"));
            let (a, b) = (at(one).expect("there"), at(other).expect("there"));
            for op in &mut g.ops {
                if let Op::RmsNorm { weight: Some(weight), .. } = op {
                    match weight.0 as usize {
                        i if i == a => weight.0 = b as u32,
                        i if i == b => weight.0 = a as u32,
                        _ => {}
                    }
                }
            }
        }
    }
}

fn swap_activations(g: &mut Graph) {
    for op in &mut g.ops {
        if let Op::GatedAct { act, .. } = op {
            *act = match act {
                Activation::Silu => Activation::GeluTanh,
                Activation::GeluTanh => Activation::Silu,
                other => panic!("no model here has {other:?}"),
            };
        }
    }
}

/// `x * Phi(x)`, the integral of the normal density by Simpson's rule.
pub(super) fn gelu_erf(x: f64) -> f64 {
    const STEPS: usize = 200;
    let density = |t: f64| (-t * t / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt();
    let h = x / STEPS as f64;
    let weight = |i: usize| match i {
        0 | STEPS => 1.0,
        i if i % 2 == 1 => 4.0,
        _ => 2.0,
    };
    let integral: f64 = (0..=STEPS).map(|i| weight(i) * density(i as f64 * h)).sum::<f64>() * h / 3.0;
    x * (0.5 + integral)
}
