//! Mistakes in delta nets, gated attention and short convolutions.

use opencoti_compute::graph::{Activation, Graph, HeadMap, Op, Value};

use super::{Change, Mistake};

pub(super) const ROWS: &[Mistake] = &[
    Mistake {
        what: "value heads in groups instead of in turns over the key heads",
        models: &["qwen35", "qwen35-ends-recurrent", "qwen35moe"],
        change: Change::Graph(|g| {
            for op in &mut g.ops {
                if let Op::DeltaNet { map, .. } = op {
                    *map = HeadMap::Grouped;
                }
            }
        }),
    },
    Mistake {
        what: "a memory that fades after it was asked",
        models: &["qwen35", "qwen35-ends-recurrent"],
        change: Change::Interpreter(|m| m.decay_after_error = true),
    },
    Mistake { what: "gate before the norm", models: &["qwen35"], change: Change::Graph(gate_before_norm) },
    Mistake {
        what: "one added to the norm of delta nets",
        models: &["qwen35"],
        change: Change::Graph(add_one_to_delta_norm),
    },
    Mistake {
        what: "lengths of keys and queries without an epsilon",
        models: &["qwen35-ends-recurrent"],
        change: Change::Graph(|g| {
            for op in &mut g.ops {
                if let Op::L2Norm { eps, .. } = op {
                    *eps = 0.0;
                }
            }
        }),
    },
    Mistake {
        what: "full rotation of heads that rotate in part",
        models: &["qwen35"],
        change: Change::Graph(|g| g.ropes[0].n_rot = 32),
    },
    Mistake {
        what: "attention without its gate",
        models: &["qwen35"],
        change: Change::Graph(|g| {
            for op in &mut g.ops {
                if let Op::Gate { out, x, .. } = *op {
                    *op = Op::Scale { out, x, factor: 0.5 };
                }
            }
        }),
    },
    Mistake {
        what: "value heads in turns over the key heads instead of in groups",
        models: &["qwen3next"],
        change: Change::Graph(|g| {
            for op in &mut g.ops {
                if let Op::DeltaNet { map, .. } = op {
                    *map = HeadMap::Tiled;
                }
            }
        }),
    },
    Mistake {
        what: "shared expert without its gate",
        models: &["qwen35moe", "qwen3next"],
        change: Change::Graph(|g| {
            let widths = g.widths.clone();
            for op in &mut g.ops {
                if let Op::Gate { out, x, gate } = *op
                    && widths[gate.0 as usize] == 1
                {
                    *op = Op::Scale { out, x, factor: 1.0 };
                }
            }
        }),
    },
    Mistake {
        what: "no activation behind the convolution",
        models: &["qwen35"],
        change: Change::Graph(|g| {
            for op in &mut g.ops {
                if let Op::Act { out, x, act: Activation::Silu } = *op {
                    *op = Op::Scale { out, x, factor: 1.0 };
                }
            }
        }),
    },
    Mistake {
        what: "the gates before and after a short convolution exchanged",
        models: &["lfm2"],
        change: Change::Graph(|g| {
            let third = g.widths[0];
            for op in &mut g.ops {
                if let Op::Columns { start, group, .. } = op
                    && *group == 3 * third
                    && *start < 2 * third
                {
                    *start = third - *start;
                }
            }
        }),
    },
];

fn is_delta_norm(g: &Graph, op: &Op) -> bool {
    matches!(op, Op::RmsNorm { weight: Some(w), .. } if g.weights[w.0 as usize].name.ends_with("ssm_norm.weight"))
}

fn gate_before_norm(g: &mut Graph) {
    for at in 0..g.ops.len() - 1 {
        if is_delta_norm(g, &g.ops[at])
            && let (Op::RmsNorm { out: normed, x, weight, eps, group }, Op::GatedAct { out, gate, act, .. }) =
                (g.ops[at].clone(), g.ops[at + 1].clone())
        {
            g.ops[at] = Op::GatedAct { out: normed, gate, up: x, act };
            g.ops[at + 1] = Op::RmsNorm { out, x: normed, weight, eps, group };
        }
    }
}

fn add_one_to_delta_norm(g: &mut Graph) {
    for op in std::mem::take(&mut g.ops) {
        match op {
            Op::RmsNorm { out, x, weight, eps, group } if is_delta_norm(g, &op) => {
                let width = g.width(out);
                let mut norm = |weight| {
                    g.widths.push(width);
                    let out = Value(g.widths.len() as u32 - 1);
                    g.ops.push(Op::RmsNorm { out, x, weight, eps, group });
                    out
                };
                let (a, b) = (norm(weight), norm(None));
                g.ops.push(Op::Add { out, a, b });
            }
            other => g.ops.push(other),
        }
    }
}
