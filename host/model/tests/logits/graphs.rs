//! The graphs of the architectures against the logits of transformers, run by a plain f64 interpreter: what is checked is the
//! description, not an executor.

use opencoti_model::gguf::Value;
use opencoti_model::gguf::write::GgufWriter;
use opencoti_model::{LoadOptions, Model};

use crate::fixture::path;
use crate::rewrite::{load, rewrite};
use crate::{Fixture, NAMES, TOLERANCE, fixture, max_diff, reference};

pub(crate) fn diff(model: &Model, fixture: &Fixture) -> f32 {
    max_diff(&reference::logits(&model.graph, &model.weights, &fixture.tokens), &fixture.logits)
}

#[test]
fn every_tiny_model_agrees_with_transformers() {
    for &name in NAMES {
        let fixture = fixture(name);
        assert_eq!(fixture.logits.len(), fixture.tokens.len() * fixture.vocab, "{name}");
        let diff = diff(&fixture.model, &fixture);
        assert!(diff <= TOLERANCE, "{name}: {diff}");
    }
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

#[test]
fn llama_3_scaling_by_keys_is_that_by_divisors() {
    let fixture = fixture("llama-rope-freqs");
    let (_dir, keyed) = rewrite(&fixture.model.file, |writer, tensor| {
        let number =
            |writer: GgufWriter, key: &str, v: f32| writer.key(&format!("llama.rope.scaling.{key}"), Value::F32(v));
        (tensor == "rope_freqs.weight").then(|| {
            let writer = writer
                .str("llama.rope.scaling.type", "llama3")
                .key("llama.rope.scaling.original_context_length", Value::U32(32));
            let numbers = [("factor", 8.0), ("low_freq_factor", 1.0), ("high_freq_factor", 4.0)];
            numbers.into_iter().fold(writer, |writer, (key, v)| number(writer, key, v))
        })
    });
    let model = load(keyed).expect("loads");
    assert_eq!(model.graph.ropes[0].freq_divisors, None);
    let diff = diff(&model, &fixture);
    assert!(diff <= TOLERANCE, "{diff}");
}

#[test]
fn the_served_context_decides_between_the_divisors_of_longrope() {
    let factors = |context: Option<usize>| {
        let options = LoadOptions { context, ..LoadOptions::default() };
        let model = Model::load_with(&path("phi3-long.gguf"), &options, |_| {}).expect("loads");
        let divisors = model.graph.ropes[0].freq_divisors.expect("divisors");
        model.graph.weights[divisors.0 as usize].name.clone()
    };
    // Trained for 128 tokens, 32 before the extension.
    assert_eq!(factors(None), "rope_factors_long.weight");
    assert_eq!(factors(Some(33)), "rope_factors_long.weight");
    assert_eq!(factors(Some(32)), "rope_factors_short.weight");
}
