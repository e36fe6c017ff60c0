//! The graphs of the architectures against the logits of transformers, run by a plain f64 interpreter: what is checked is the
//! description, not an executor. Then single mistakes, each of which must be seen.

use opencoti_compute::graph::{Activation, Graph, Op, RopePairing, RopeScaling};
use opencoti_model::Model;
use opencoti_model::arch::Architecture;
use opencoti_model::hparams::{HParams, SlidingPattern};

use crate::rewrite::{load, rewrite};
use crate::{Fixture, NAMES, TOLERANCE, fixture, max_diff, reference};

pub(crate) fn diff(model: &Model, fixture: &Fixture) -> f32 {
    max_diff(&reference::logits(&model.graph, &model.weights, &fixture.tokens), &fixture.logits)
}

/// The difference after a change of hyperparameters.
pub(crate) fn diff_with(name: &str, change: impl Fn(&mut HParams)) -> f32 {
    let fixture = fixture(name);
    let mut hparams = fixture.model.hparams.clone();
    change(&mut hparams);
    let arch = Architecture::of(&fixture.model.file).expect("known");
    let model = Model::build(fixture.model.file.clone(), arch, hparams).expect("builds");
    diff(&model, &fixture)
}

/// The difference after a change of the graph.
pub(crate) fn diff_with_graph(name: &str, change: impl Fn(&mut Graph)) -> f32 {
    let mut fixture = fixture(name);
    change(&mut fixture.model.graph);
    diff(&fixture.model, &fixture)
}

#[test]
fn every_tiny_model_agrees_with_transformers() {
    for name in NAMES {
        let fixture = fixture(name);
        assert_eq!(fixture.logits.len(), fixture.tokens.len() * fixture.vocab, "{name}");
        let diff = diff(&fixture.model, &fixture);
        assert!(diff <= TOLERANCE, "{name}: {diff}");
    }
}

#[test]
fn a_window_off_by_one_is_seen() {
    for window in [7, 9] {
        assert!(diff_with("gemma3", |hp| hp.sliding_window = Some(window)) > 0.1);
    }
}

#[test]
fn a_pattern_off_by_one_is_seen() {
    for period in [5, 7] {
        assert!(diff_with("gemma3", |hp| hp.sliding_pattern = Some(SlidingPattern::Period(period))) > 0.1);
    }
}

#[test]
fn one_rope_base_for_all_gemma_layers_is_seen() {
    assert!(diff_with("gemma3", |hp| hp.rope_base_swa = hp.rope_base) > 0.01);
    assert!(diff_with("gemma3", |hp| hp.rope_base = hp.rope_base_swa) > 0.01);
}

#[test]
fn a_missing_context_extension_is_seen() {
    for name in ["llama-yarn", "llama-linear", "gemma3-linear-capped"] {
        assert!(diff_with(name, |hp| hp.rope_scaling = RopeScaling::None) > 10.0 * TOLERANCE, "{name}");
    }
    assert!(diff_with_graph("llama-rope-freqs", |g| g.ropes[0].freq_divisors = None) > 10.0 * TOLERANCE);
}

#[test]
fn context_extension_of_window_layers_is_seen() {
    let extend_all = |g: &mut Graph| {
        let scaling = g.ropes.iter().map(|r| r.scaling).find(|s| *s != RopeScaling::None).expect("one is extended");
        g.ropes.iter_mut().for_each(|r| r.scaling = scaling);
    };
    assert!(diff_with_graph("gemma3-linear-capped", extend_all) > 10.0 * TOLERANCE);
}

#[test]
fn the_other_rope_pairing_is_seen() {
    assert!(diff_with_graph("llama", |g| g.ropes[0].pairing = RopePairing::Neox) > 0.1);
    assert!(diff_with_graph("gemma3", |g| g.ropes.iter_mut().for_each(|r| r.pairing = RopePairing::Norm)) > 0.1);
}

#[test]
fn the_other_activation_is_seen() {
    let swap = |g: &mut Graph| {
        for op in &mut g.ops {
            if let Op::GatedAct { act, .. } = op {
                *act = match act {
                    Activation::Silu => Activation::GeluTanh,
                    Activation::GeluTanh => Activation::Silu,
                };
            }
        }
    };
    assert!(diff_with_graph("llama", swap) > 10.0 * TOLERANCE);
    assert!(diff_with_graph("gemma3", swap) > 10.0 * TOLERANCE);
}

#[test]
fn a_missing_bias_embedding_scale_or_cap_is_seen() {
    let no_bias = |g: &mut Graph| {
        for op in &mut g.ops {
            if let Op::MatMul { bias, .. } = op {
                *bias = None;
            }
        }
    };
    assert!(diff_with_graph("llama-bias-untied", no_bias) > 0.1);
    let no_scale = |g: &mut Graph| {
        for op in &mut g.ops {
            if let Op::Embed { scale, .. } = op {
                *scale = 1.0;
            }
        }
    };
    assert!(diff_with_graph("gemma3", no_scale) > 0.1);
    assert!(diff_with("gemma3-linear-capped", |hp| hp.final_softcap = None) > 10.0 * TOLERANCE);
}

#[test]
fn another_epsilon_or_score_scale_is_seen() {
    assert!(diff_with("llama", |hp| hp.rms_eps *= 100.0) > TOLERANCE);
    assert!(diff_with("gemma3", |hp| hp.attention_scale = Some(1.0 / 12f32.sqrt())) > 10.0 * TOLERANCE);
}

#[test]
fn a_fused_qkv_projection_is_the_three_in_one() {
    for name in ["llama-bias-untied", "gemma3"] {
        let fixture = fixture(name);
        let original = &fixture.model.file;
        let (_dir, fused) = rewrite(original, |writer, tensor| {
            let (block, part) =
                tensor.rsplit_once(".attn_q.").map(|(b, kind)| (b.to_owned(), kind.to_owned())).unwrap_or_default();
            if tensor.contains(".attn_k.") || tensor.contains(".attn_v.") {
                return Some(writer);
            }
            let parts: Vec<_> = ["attn_q", "attn_k", "attn_v"]
                .iter()
                .filter_map(|p| original.tensor(&format!("{block}.{p}.{part}")))
                .collect();
            let [q, k, v] = parts.as_slice() else { return None };
            let mut dims = q.info().dims.clone();
            *dims.last_mut()? += k.info().dims.last()? + v.info().dims.last()?;
            let bytes = [q.bytes(), k.bytes(), v.bytes()].concat();
            Some(writer.tensor(&format!("{block}.attn_qkv.{part}"), &dims, q.info().ty, bytes))
        });
        assert!(fused.tensor("blk.0.attn_qkv.weight").is_some() && fused.tensor("blk.0.attn_k.weight").is_none());
        let diff = diff(&load(fused).expect("loads"), &fixture);
        assert!(diff <= TOLERANCE, "{name}: {diff}");
    }
}

#[test]
fn a_scale_beside_a_weight_multiplies_its_product() {
    let fixture = fixture("llama");
    let (_dir, scaled) = rewrite(&fixture.model.file, |writer, tensor| {
        (tensor == "blk.1.ffn_up.weight").then(|| {
            let up = fixture.model.file.tensor(tensor).expect("there");
            let halved: Vec<f32> =
                up.bytes().chunks_exact(4).map(|b| 0.5 * f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
            writer.f32_tensor(tensor, &up.info().dims, &halved).f32_tensor("blk.1.ffn_up.scale", &[1], &[2.0])
        })
    });
    let diff = diff(&load(scaled).expect("loads"), &fixture);
    assert!(diff <= TOLERANCE, "{diff}");
}
