//! The graphs of the architectures against the logits of transformers, run by a plain f64 interpreter: what is checked is the
//! description, not an executor. Then single mistakes, each of which must be seen.

mod common;

use common::{Fixture, NAMES, fixture, max_diff, reference};
use opencoti_compute::graph::{Activation, Graph, Op, RopePairing, RopeScaling};
use opencoti_model::Model;
use opencoti_model::arch::Architecture;
use opencoti_model::gguf::write::GgufWriter;
use opencoti_model::gguf::{GgufFile, Value};
use opencoti_model::hparams::{HParams, SlidingPattern};

/// Largest difference that is no mistake: f32 in the reference.
const TOLERANCE: f32 = 2e-4;

fn diff(model: &Model, fixture: &Fixture) -> f32 {
    max_diff(&reference::logits(&model.graph, &model.weights, &fixture.tokens), &fixture.logits)
}

/// The difference after a change of hyperparameters.
fn diff_with(name: &str, change: impl Fn(&mut HParams)) -> f32 {
    let fixture = fixture(name);
    let mut hparams = fixture.model.hparams.clone();
    change(&mut hparams);
    let arch = Architecture::of(&fixture.model.file).expect("known");
    let model = Model::build(fixture.model.file.clone(), arch, hparams).expect("builds");
    diff(&model, &fixture)
}

/// The difference after a change of the graph.
fn diff_with_graph(name: &str, change: impl Fn(&mut Graph)) -> f32 {
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

/// A copy of a file with its tensors passed through `change`: name, dimensions and bytes in, the same (or others) out.
fn rewrite(file: &GgufFile, change: impl Fn(GgufWriter, &str) -> Option<GgufWriter>) -> (tempfile::TempDir, GgufFile) {
    let mut writer = GgufWriter::new();
    for (key, value) in file.metadata().iter() {
        writer = writer.key(key, value.clone());
    }
    for info in file.tensors() {
        let tensor = file.tensor(&info.name).expect("listed");
        writer = match change(writer.clone(), &info.name) {
            Some(changed) => changed,
            None => writer.tensor(&info.name, &info.dims, info.ty, tensor.bytes().to_vec()),
        };
    }
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("rewritten.gguf");
    writer.write_to(&path).expect("written");
    let file = GgufFile::open(&path).expect("valid");
    (dir, file)
}

fn load(file: GgufFile) -> Result<Model, String> {
    let arch = Architecture::of(&file).map_err(|e| e.to_string())?;
    let hparams = HParams::read(&file, arch.name).map_err(|e| e.to_string())?;
    Model::build(file, arch, hparams).map_err(|e| e.to_string())
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

/// The refusal of a tiny llama whose tensors were passed through `change`.
fn refusal(change: impl Fn(GgufWriter, &str) -> Option<GgufWriter>) -> String {
    let (_dir, file) = rewrite(&fixture("llama").model.file, change);
    load(file).expect_err("must be refused")
}

#[test]
fn a_missing_tensor_is_named_with_its_dimensions() {
    for (tensor, dims) in [
        ("token_embd.weight", "{64, 320}"),
        ("output_norm.weight", "{64}"),
        ("blk.2.ffn_down.weight", "{96, 64}"),
        ("blk.0.attn_k.weight", "{64, 32}"),
        ("blk.1.ffn_norm.weight", "{64}"),
    ] {
        let message = refusal(|writer, name| (name == tensor).then_some(writer));
        assert!(
            message.contains(&format!("tensor {tensor:?} is missing; expected one of dimensions {dims}")),
            "{message}"
        );
    }
}

#[test]
fn a_tensor_of_another_shape_or_type_is_refused() {
    let zeros = |n: usize| vec![0.0f32; n];
    let message =
        refusal(|w, name| (name == "blk.1.attn_q.weight").then(|| w.f32_tensor(name, &[64, 32], &zeros(64 * 32))));
    assert!(
        message.ends_with("tensor \"blk.1.attn_q.weight\" has dimensions {64, 32}, expected {64, 64}"),
        "{message}"
    );
    let message = refusal(|w, name| {
        let integers = || w.clone().tensor(name, &[64], opencoti_model::gguf::TensorType::I32, vec![0; 256]);
        (name == "output_norm.weight").then(integers)
    });
    assert!(message.contains("is of type I32, which no operation takes"), "{message}");
}

#[test]
fn block_tensors_without_a_place_are_refused() {
    let message = refusal(|w, name| {
        (name == "output_norm.weight")
            .then(|| w.f32_tensor(name, &[64], &[1.0; 64]).f32_tensor("blk.0.attn_q_norm.weight", &[16], &[1.0; 16]))
    });
    assert!(message.contains("\"blk.0.attn_q_norm.weight\" has no place in this architecture"), "{message}");
}

/// The refusal of a tiny llama with one key set to another value.
fn refusal_of_key(key: &str, value: Value) -> String {
    let original = fixture("llama").model.file;
    let mut writer = GgufWriter::new();
    for (name, old) in original.metadata().iter() {
        writer = writer.key(name, if name == key { value.clone() } else { old.clone() });
    }
    if original.metadata().get(key).is_none() {
        writer = writer.key(key, value);
    }
    for info in original.tensors() {
        writer = writer.tensor(
            &info.name,
            &info.dims,
            info.ty,
            original.tensor(&info.name).expect("listed").bytes().to_vec(),
        );
    }
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("changed.gguf");
    writer.write_to(&path).expect("written");
    load(GgufFile::open(&path).expect("valid")).expect_err("must be refused")
}

#[test]
fn senseless_hyperparameters_are_refused_by_key() {
    for (key, value, word) in [
        (
            "general.architecture",
            Value::Str("mamba".into()),
            "the architecture \"mamba\" is not supported; known are gemma3, llama",
        ),
        ("general.architecture", Value::U32(1), "expected a string"),
        ("llama.block_count", Value::U32(4_000_000_000), "says 4000000000 blocks, but the file has only"),
        ("llama.block_count", Value::U32(0), "expected at least 1"),
        ("llama.block_count", Value::U32(2), "\"blk.2."),
        ("llama.block_count", Value::U32(4), "\"blk.3.attn_norm.weight\" is missing"),
        ("llama.attention.head_count", Value::U32(0), "is 0 in layer 0"),
        ("llama.attention.head_count_kv", Value::U32(3), "does not divide the 4 query heads"),
        ("llama.attention.head_count_kv", Value::I32(-1), "expected an integer"),
        ("llama.attention.key_length", Value::U32(0), "expected at least 1"),
        ("llama.attention.key_length", Value::U32(u32::MAX), "expected the head size"),
        ("llama.attention.value_length", Value::U32(u32::MAX), "expected {64, "),
        ("llama.rope.dimension_count", Value::U32(7), "expected an even number"),
        ("llama.rope.dimension_count", Value::U32(8), "expected the head size 16"),
        ("llama.rope.freq_base", Value::F32(f32::NAN), "expected a finite number"),
        ("llama.rope.scaling.type", Value::Str("longrope".into()), "supported are none, linear, yarn and llama3"),
        ("llama.rope.scaling.type", Value::Str("yarn".into()), "yarn scaling needs it"),
        ("llama.attention.layer_norm_rms_epsilon", Value::F32(-1.0), "expected a number above 0"),
        ("llama.expert_count", Value::U32(8), "llama with experts"),
        ("llama.vocab_size", Value::U32(100), "expected {64, 100}"),
    ] {
        let message = refusal_of_key(key, value.clone());
        assert!(message.contains(word), "{key} = {value:?}: {message}");
    }
}
