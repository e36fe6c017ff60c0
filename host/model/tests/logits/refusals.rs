//! Files that do not fit their architecture.

use opencoti_model::arch::Architecture;
use opencoti_model::gguf::write::GgufWriter;
use opencoti_model::gguf::{Array, GgufFile, TensorType, Value};
use proptest::prelude::*;

use crate::fixture::path;
use crate::rewrite::{load, rewrite, with_key};
use crate::{NAMES, fixture};

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
fn a_qwen2_without_a_bias_is_refused() {
    let without = |name: &'static str| {
        let (_dir, file) = rewrite(&fixture("qwen2").model.file, |writer, tensor| (tensor == name).then_some(writer));
        load(file).expect_err("must be refused")
    };
    for (name, dims) in [("blk.0.attn_q.bias", "{64}"), ("blk.1.attn_k.bias", "{32}"), ("blk.1.attn_v.bias", "{32}")] {
        let message = without(name);
        let expected = format!("tensor {name:?} is missing; expected one of dimensions {dims}");
        assert!(message.contains(&expected), "{message}");
    }
}

#[test]
fn a_longrope_model_without_its_factors_is_refused() {
    let (_dir, file) = rewrite(&fixture("phi3-long").model.file, |writer, tensor| {
        (tensor == "rope_factors_long.weight").then(|| writer.str("phi3.rope.scaling.type", "longrope"))
    });
    let message = load(file).expect_err("must be refused");
    assert!(message.contains("\"rope_factors_long.weight\" is missing"), "{message}");
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
        let integers = || w.clone().tensor(name, &[64], TensorType::I32, vec![0; 256]);
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
    let (_dir, file) = with_key(&fixture("llama").model.file, key, value);
    load(file).expect_err("must be refused")
}

#[test]
fn senseless_hyperparameters_are_refused_by_key() {
    for (key, value, word) in [
        (
            "general.architecture",
            Value::Str("mamba".into()),
            "the architecture \"mamba\" is not supported; known are bert, gemma2, gemma3",
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
        (
            "llama.rope.scaling.type",
            Value::Str("dynamic".into()),
            "supported are none, linear, yarn, llama3 and longrope",
        ),
        ("llama.rope.scaling.type", Value::Str("yarn".into()), "yarn scaling needs it"),
        ("llama.attention.layer_norm_rms_epsilon", Value::F32(-1.0), "expected a number above 0"),
        ("llama.expert_count", Value::U32(8), "is 0, expected 1 to the 8 experts"),
        ("llama.vocab_size", Value::U32(100), "expected {64, 100}"),
    ] {
        let message = refusal_of_key(key, value.clone());
        assert!(message.contains(word), "{key} = {value:?}: {message}");
    }
}

/// Keys that shape a graph, of one architecture or another.
const KEYS: [&str; 28] = [
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.key_length_swa",
    "attention.value_length",
    "attention.value_length_swa",
    "attention.scale",
    "attention.shared_kv_layers",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "embedding_length_per_layer_input",
    "expert_count",
    "expert_feed_forward_length",
    "expert_used_count",
    "rope.dimension_count",
    "rope.dimension_count_swa",
    "rope.freq_base",
    "rope.scaling.attn_factor",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "embedding_scale",
    "logit_scale",
];

fn any_value() -> impl Strategy<Value = Value> {
    let kinds = ["none", "linear", "yarn", "llama3", "longrope"];
    prop_oneof![
        prop_oneof![0u32..70, any::<u32>()].prop_map(Value::U32),
        any::<i32>().prop_map(Value::I32),
        any::<f32>().prop_map(Value::F32),
        any::<bool>().prop_map(Value::Bool),
        prop::sample::select(kinds.to_vec()).prop_map(|kind| Value::Str(kind.into())),
        prop::collection::vec(0u32..9, 0..4).prop_map(|v| Value::Array(Array::U32(v))),
        prop::collection::vec(any::<bool>(), 0..4).prop_map(|v| Value::Array(Array::Bool(v))),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn senseless_keys_never_panic(
        name in prop::sample::select(NAMES),
        key in prop::sample::select(&KEYS[..]),
        value in any_value(),
    ) {
        let file = GgufFile::open(&path(&format!("{name}.gguf"))).expect("valid");
        let arch = Architecture::of(&file).expect("known").name;
        let (_dir, changed) = with_key(&file, &format!("{arch}.{key}"), value);
        if let Ok(model) = load(changed) {
            prop_assert_eq!(model.weights.len(), model.graph.weights.len());
        }
    }
}
