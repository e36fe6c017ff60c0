//! Gemma 4: single mistakes in its graphs, each of which must be seen, and what its files may carry.

use opencoti_compute::graph::{Activation, Graph, KvLayerId, Op, Value};
use opencoti_model::gguf::Value as Key;
use opencoti_model::{LoadOptions, Model};

use crate::cached::Runner;
use crate::fixture::path;
use crate::graphs::{diff, diff_with, diff_with_graph};
use crate::rewrite::{load, rewrite, with_key};
use crate::{TOLERANCE, fixture, max_diff, reference};

const ALL: [&str; 2] = ["gemma4", "gemma4-elastic"];
/// Width of a layer's own input in the elastic model.
const LAYER_INPUT: usize = 16;

/// Values stored by the layers, each with what its norm reads and the normed key before it turns.
fn stored(graph: &Graph) -> Vec<(Value, Value, Value)> {
    let norm_of = |value: Value| {
        graph.ops.iter().find_map(|op| match *op {
            Op::RmsNorm { out, x, .. } if out == value => Some(x),
            _ => None,
        })
    };
    let unrotated = |value: Value| {
        graph.ops.iter().find_map(|op| match *op {
            Op::Rope { out, x, .. } if out == value => Some(x),
            _ => None,
        })
    };
    let of = |op: &Op| match *op {
        Op::Append { k, v, .. } => Some((v, norm_of(v).expect("normed"), unrotated(k).expect("rotated"))),
        _ => None,
    };
    graph.ops.iter().filter_map(of).collect()
}

#[test]
fn a_window_off_by_one_is_seen() {
    for name in ALL {
        for window in [7, 9] {
            assert!(diff_with(name, |hp| hp.sliding_window = Some(window)) > 0.1, "{name} {window}");
        }
    }
}

#[test]
fn scaled_scores_are_seen() {
    for name in ALL {
        assert!(diff_with(name, |hp| hp.attention_scale = Some(1.0 / 32f32.sqrt())) > 0.1, "{name}");
    }
}

#[test]
fn values_without_a_norm_are_seen() {
    for name in ALL {
        let change = |g: &mut Graph| {
            let stored = stored(g);
            for op in &mut g.ops {
                if let Op::Append { v, .. } = op {
                    *v = stored.iter().find(|s| s.0 == *v).expect("stored").1;
                }
            }
        };
        assert!(diff_with_graph(name, change) > 0.1, "{name}");
    }
}

#[test]
fn values_of_normed_keys_are_seen() {
    let change = |g: &mut Graph| {
        let stored = stored(g);
        // Layers without a value projection norm what the keys' norm reads.
        let key_norms: Vec<(Value, Value)> = g
            .ops
            .iter()
            .filter_map(|op| match *op {
                Op::RmsNorm { out, x, weight: Some(_), .. } => Some((x, out)),
                _ => None,
            })
            .collect();
        let mut changed = 0;
        for op in &mut g.ops {
            if let Op::RmsNorm { out, x, weight: None, .. } = op
                && stored.iter().any(|s| s.0 == *out)
                && let Some((_, normed)) = key_norms.iter().find(|(raw, _)| raw == x)
            {
                *x = *normed;
                changed += 1;
            }
        }
        assert_eq!(changed, 2, "the global layers");
    };
    assert!(diff_with_graph("gemma4", change) > 0.01);
}

#[test]
fn missing_layer_factors_are_seen() {
    let change = |g: &mut Graph| {
        for op in &mut g.ops {
            if let Op::Scale { factor, .. } = op {
                *factor = 1.0;
            }
        }
    };
    assert!(diff_with_graph("gemma4", change) > 0.1);
}

#[test]
fn turning_all_pairs_of_global_heads_is_seen() {
    for name in ALL {
        assert!(diff_with_graph(name, |g| g.ropes[0].freq_divisors = None) > 0.05, "{name}");
    }
}

#[test]
fn keys_of_another_layer_are_seen() {
    let change = |g: &mut Graph| {
        for op in &mut g.ops {
            if let Op::Attend { layer, .. } = op
                && *layer == KvLayerId(1)
            {
                *layer = KvLayerId(0);
            }
        }
    };
    assert!(diff_with_graph("gemma4-elastic", change) > 0.1);
}

#[test]
fn silu_on_layer_inputs_is_seen() {
    let change = |g: &mut Graph| {
        let widths = g.widths.clone();
        for op in &mut g.ops {
            if let Op::GatedAct { out, act, .. } = op
                && widths[out.0 as usize] == LAYER_INPUT
            {
                *act = Activation::Silu;
            }
        }
    };
    assert!(diff_with_graph("gemma4-elastic", change) > 0.01);
}

#[test]
fn gelu_by_the_error_function_is_seen() {
    for name in ALL {
        let fixture = fixture(name);
        let erf_gelu = |x: f64| 0.5 * x * (1.0 + erf(x / std::f64::consts::SQRT_2));
        let logits = reference::logits_with(&fixture.model.graph, &fixture.model.weights, &fixture.tokens, erf_gelu);
        assert!(max_diff(&logits, &fixture.logits) > 2.0 * TOLERANCE, "{name}");
    }
}

/// By its Maclaurin series; the arguments of tiny models are small.
fn erf(x: f64) -> f64 {
    let (mut sum, mut term) = (x, x);
    for n in 1..80 {
        term *= -x * x / f64::from(n);
        sum += term / f64::from(2 * n + 1);
    }
    std::f64::consts::FRAC_2_SQRT_PI * sum
}

#[test]
fn a_missing_cap_of_the_logits_is_seen() {
    for name in ALL {
        assert!(diff_with(name, |hp| hp.final_softcap = None) > 10.0 * TOLERANCE, "{name}");
    }
}

#[test]
fn readers_have_no_cache_and_work_on_output_rows_alone() {
    let graph = fixture("gemma4-elastic").model.graph;
    let windows: Vec<_> = graph.kv_layers.iter().map(|g| g.window).collect();
    assert_eq!(windows, [Some(8), Some(8), None]);
    let last_append = graph.ops.iter().rposition(|op| matches!(op, Op::Append { .. })).expect("one");
    let selected = graph.ops.iter().position(|op| matches!(op, Op::SelectOutputs { .. })).expect("one");
    assert_eq!(selected, last_append + 1);
    assert_eq!(read(&graph), [0, 1, 2, 1, 1, 2]);
}

#[test]
fn a_reader_takes_the_latest_pass_of_its_source_that_ran_before_it() {
    // Blocks 0 1 2 3 1 2 3 4 5.
    let options = LoadOptions { repeat_layers: "1-4".parse().expect("a plan"), ..LoadOptions::default() };
    let model = Model::load_with(&path("gemma4-elastic.gguf"), &options, |_| {}).expect("loads");
    assert_eq!(read(&model.graph), [0, 1, 2, 1, 3, 4, 3, 3, 4]);
    let tokens = fixture("gemma4-elastic").tokens;
    let mut runner = Runner::new(&model, 2);
    let seq = runner.create();
    let found: Vec<f32> = tokens.chunks(9).flat_map(|chunk| runner.step(&[(seq, chunk)]).concat()).collect();
    assert!(max_diff(&found, &reference::logits(&model.graph, &model.weights, &tokens)) <= TOLERANCE);
}

/// The caches that attention reads, in order.
fn read(graph: &Graph) -> Vec<u32> {
    let layers = graph.ops.iter().filter_map(|op| match op {
        Op::Attend { layer, .. } => Some(layer.0),
        _ => None,
    });
    layers.collect()
}

#[test]
fn keys_and_values_that_old_files_carry_for_readers_are_ignored() {
    let fixture = fixture("gemma4-elastic");
    let (_dir, old) = rewrite(&fixture.model.file, |writer, tensor| {
        let (block, _) = tensor.split_once(".attn_q.")?;
        let reader = ["blk.3", "blk.4", "blk.5"].contains(&block);
        let q = fixture.model.file.tensor(tensor)?;
        let writer = writer.tensor(tensor, &q.info().dims, q.info().ty, q.bytes().to_vec());
        reader.then(|| {
            writer
                .f32_tensor(&format!("{block}.attn_k.weight"), &[48, 32], &[0.5; 48 * 32])
                .f32_tensor(&format!("{block}.attn_v.weight"), &[48, 32], &[0.5; 48 * 32])
                .f32_tensor(&format!("{block}.attn_k_norm.weight"), &[32], &[0.5; 32])
        })
    });
    assert!(old.tensor("blk.3.attn_v.weight").is_some());
    let diff = diff(&load(old).expect("loads"), &fixture);
    assert!(diff <= TOLERANCE, "{diff}");
}

#[test]
fn files_that_do_not_fit_are_refused_by_name() {
    let elastic = fixture("gemma4-elastic").model.file;
    let refusal = |key: &str, value: Key| {
        let (_dir, file) = with_key(&elastic, key, value);
        load(file).expect_err("must be refused")
    };
    for shared in [5, 6, 400] {
        let message = refusal("gemma4.attention.shared_kv_layers", Key::U32(shared));
        assert!(
            message.contains(&format!("is {shared}, but before the last {shared} of 6 layers none has")),
            "{message}"
        );
    }
    let message = refusal("gemma4.embedding_length_per_layer_input", Key::U32(u32::MAX));
    assert!(message.contains("\"per_layer_token_embd.weight\" has dimensions {96, 160}"), "{message}");
    let (_dir, file) = rewrite(&elastic, |writer, tensor| {
        (tensor == "output_norm.weight")
            .then(|| writer.f32_tensor(tensor, &[48], &[1.0; 48]).f32_tensor("v.patch_embd.weight", &[4], &[1.0; 4]))
    });
    let message = load(file).expect_err("must be refused");
    assert!(message.contains("\"v.patch_embd.weight\" belongs to an image or audio encoder"), "{message}");
}
