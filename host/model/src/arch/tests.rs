//! Graphs of made-up files: what the keys say must be in the graph.

use proptest::prelude::*;

use opencoti_compute::graph::{Graph, KvGeometry, Op, RopeScaling};

use crate::gguf::write::GgufWriter;
use crate::gguf::{Array, GgufFile, Value};
use crate::{Model, ModelError};

const EMBEDDING: usize = 8;
const HEADS: usize = 2;
const HEAD: usize = 6;
const WIDTH: usize = 6;
const VOCAB: usize = 3;

/// A gemma3 of zeros with `blocks` blocks of one KV head each.
fn gemma3(blocks: usize) -> GgufWriter {
    let kv_heads = vec![1; blocks];
    gemma3_with_kv_heads(&kv_heads).key("gemma3.attention.head_count_kv", Value::U32(1))
}

/// A gemma3 whose blocks have the given numbers of KV heads; the key that says so is left to the caller.
fn gemma3_with_kv_heads(kv_heads: &[usize]) -> GgufWriter {
    let size = |v: usize| Value::U32(v as u32);
    let mut w = GgufWriter::new()
        .str("general.architecture", "gemma3")
        .str("tokenizer.ggml.model", "none")
        .key("gemma3.block_count", size(kv_heads.len()))
        .key("gemma3.context_length", size(64))
        .key("gemma3.embedding_length", size(EMBEDDING))
        .key("gemma3.feed_forward_length", size(WIDTH))
        .key("gemma3.attention.head_count", size(HEADS))
        .key("gemma3.attention.key_length", size(HEAD))
        .key("gemma3.attention.layer_norm_rms_epsilon", Value::F32(1e-6))
        .key("gemma3.rope.freq_base", Value::F32(1e6));
    w = zeros(w, "token_embd", &[EMBEDDING, VOCAB]);
    w = zeros(w, "output_norm", &[EMBEDDING]);
    for (l, kv) in kv_heads.iter().enumerate() {
        let tensors: [(&str, &[usize]); 13] = [
            ("attn_norm", &[EMBEDDING]),
            ("attn_q", &[EMBEDDING, HEADS * HEAD]),
            ("attn_k", &[EMBEDDING, kv * HEAD]),
            ("attn_v", &[EMBEDDING, kv * HEAD]),
            ("attn_q_norm", &[HEAD]),
            ("attn_k_norm", &[HEAD]),
            ("attn_output", &[HEADS * HEAD, EMBEDDING]),
            ("post_attention_norm", &[EMBEDDING]),
            ("ffn_norm", &[EMBEDDING]),
            ("ffn_gate", &[EMBEDDING, WIDTH]),
            ("ffn_up", &[EMBEDDING, WIDTH]),
            ("ffn_down", &[WIDTH, EMBEDDING]),
            ("post_ffw_norm", &[EMBEDDING]),
        ];
        for (name, dims) in tensors {
            w = zeros(w, &format!("blk.{l}.{name}"), dims);
        }
    }
    w
}

fn zeros(writer: GgufWriter, name: &str, dims: &[usize]) -> GgufWriter {
    writer.f32_tensor(&format!("{name}.weight"), dims, &vec![0.0; dims.iter().product()])
}

fn load(writer: &GgufWriter) -> Result<Model, ModelError> {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("made.gguf");
    writer.write_to(&path).expect("written");
    Model::load(&path)
}

fn windows(graph: &Graph) -> Vec<Option<usize>> {
    graph.kv_layers.iter().map(|g| g.window).collect()
}

fn score_scale(graph: &Graph) -> f32 {
    let mut scales = graph.ops.iter().filter_map(|op| match op {
        Op::Attend { scale, .. } => Some(*scale),
        _ => None,
    });
    scales.next_back().expect("attention")
}

#[test]
fn every_sixth_gemma3_layer_is_global_unless_the_file_says_otherwise() {
    let window = Value::U32(5);
    let base = || gemma3(7).key("gemma3.attention.sliding_window", window.clone());
    let s = Some(5);
    assert_eq!(windows(&load(&base()).unwrap().graph), [s, s, s, s, s, None, s]);

    let pattern = "gemma3.attention.sliding_window_pattern";
    assert_eq!(windows(&load(&base().key(pattern, Value::U32(2))).unwrap().graph), [s, None, s, None, s, None, s]);
    let flags = vec![true, true, false, false, true, true, false];
    let expected: Vec<_> = flags.iter().map(|&f| f.then_some(5)).collect();
    let as_bools = base().key(pattern, Value::Array(Array::Bool(flags.clone())));
    assert_eq!(windows(&load(&as_bools).unwrap().graph), expected);
    let as_bytes = base().key(pattern, Value::Array(Array::U8(flags.iter().map(|&f| f.into()).collect())));
    assert_eq!(windows(&load(&as_bytes).unwrap().graph), expected);

    let short = load(&base().key(pattern, Value::Array(Array::Bool(vec![true])))).unwrap_err().to_string();
    assert!(short.contains("one flag for each of the 7 layers"), "{short}");
    let zero = load(&base().key(pattern, Value::U32(0))).unwrap_err().to_string();
    assert!(zero.contains("a period of at least 1"), "{zero}");
}

#[test]
fn a_gemma3_without_a_window_has_global_layers_only() {
    assert_eq!(windows(&load(&gemma3(2)).unwrap().graph), [None, None]);
}

#[test]
fn a_window_as_long_as_the_context_is_none() {
    let with_window = |w: u32| gemma3(2).key("gemma3.attention.sliding_window", Value::U32(w));
    assert_eq!(windows(&load(&with_window(63)).unwrap().graph), [Some(63), Some(63)]);
    let graph = load(&with_window(64)).unwrap().graph;
    assert_eq!(windows(&graph), [None, None]);
    let bases: Vec<_> = graph.ropes.iter().map(|r| r.base).collect();
    assert_eq!(bases, [1e6, 1e4], "what else makes a window layer stays");
}

#[test]
fn only_global_layers_extend_their_context() {
    let writer = gemma3(1)
        .str("gemma3.rope.scaling.type", "linear")
        .key("gemma3.rope.scaling.factor", Value::F32(8.0))
        .key("gemma3.rope.freq_base_swa", Value::F32(5e3));
    let ropes = load(&writer).unwrap().graph.ropes;
    let facts: Vec<_> = ropes.iter().map(|r| (r.base, r.scaling)).collect();
    assert_eq!(facts, [(1e6, RopeScaling::Linear { factor: 8.0 }), (5e3, RopeScaling::None)]);
}

#[test]
fn the_27b_model_scales_scores_by_the_width_per_head() {
    let expected = |width: f32| 1.0 / width.sqrt();
    assert_eq!(score_scale(&load(&gemma3(2)).unwrap().graph), expected(HEAD as f32));
    let width_per_head = (EMBEDDING / HEADS) as f32;
    assert_eq!(score_scale(&load(&gemma3(62)).unwrap().graph), expected(width_per_head));
    let stated = gemma3(62).key("gemma3.attention.scale", Value::F32(0.25));
    assert_eq!(score_scale(&load(&stated).unwrap().graph), 0.25);
}

#[test]
fn kv_heads_may_differ_between_layers() {
    let kv_heads = [1, 2, 2];
    let key = Value::Array(Array::I32(vec![1, 2, 2]));
    let graph = load(&gemma3_with_kv_heads(&kv_heads).key("gemma3.attention.head_count_kv", key)).unwrap().graph;
    let geometry = |n_kv_heads| KvGeometry { n_kv_heads, k_head_dim: HEAD, v_head_dim: HEAD, window: None };
    assert_eq!(graph.kv_layers, kv_heads.map(geometry));
    assert_eq!(graph.cache_groups().len(), 2);
}

#[test]
fn the_head_is_the_embedding_table_unless_the_file_has_one() {
    let logits_weight = |graph: &Graph| {
        let Some(Op::MatMul { weight, .. }) = graph.ops.last() else { panic!("ends with the head") };
        graph.weights[weight.0 as usize].name.clone()
    };
    assert_eq!(logits_weight(&load(&gemma3(1)).unwrap().graph), "token_embd.weight");
    let untied = zeros(gemma3(1), "output", &[EMBEDDING, VOCAB]);
    assert_eq!(logits_weight(&load(&untied).unwrap().graph), "output.weight");
}

#[test]
fn caps_enter_the_graph() {
    let writer = gemma3(1)
        .key("gemma3.final_logit_softcapping", Value::F32(30.0))
        .key("gemma3.attn_logit_softcapping", Value::F32(50.0));
    let graph = load(&writer).unwrap().graph;
    assert!(matches!(graph.ops.last(), Some(Op::SoftCap { cap, .. }) if *cap == 30.0));
    assert!(graph.ops.iter().any(|op| matches!(op, Op::Attend { softcap: Some(cap), .. } if *cap == 50.0)));
}

#[test]
fn a_model_knows_its_name_templates_and_sizes() {
    let writer = gemma3(1)
        .str("general.name", "Made up")
        .str("tokenizer.chat_template", "default")
        .str("tokenizer.chat_template.tool_use", "tools");
    let model = load(&writer).unwrap();
    assert_eq!(model.name.as_deref(), Some("Made up"));
    assert_eq!(model.chat_templates.default.as_deref(), Some("default"));
    assert_eq!(model.chat_templates.named, [("tool_use".to_owned(), "tools".to_owned())]);
    assert_eq!(model.sizes.tensor_bytes, 4 * model.sizes.parameters);
    assert_eq!(model.sizes.file_type.to_string(), "mostly F32");
    let named = load(&gemma3(1).key("general.file_type", Value::U32(15))).unwrap();
    assert_eq!(named.sizes.file_type.to_string(), "Q4_K_M");
}

#[test]
fn a_file_without_an_architecture_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("bare.gguf");
    GgufWriter::new().write_to(&path).unwrap();
    let file = GgufFile::open(&path).unwrap();
    let message = super::Architecture::of(&file).unwrap_err().to_string();
    assert!(message.contains("\"general.architecture\" is missing"), "{message}");
}

/// Keys that shape a graph.
const KEYS: [&str; 17] = [
    "block_count",
    "context_length",
    "embedding_length",
    "vocab_size",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.key_length_swa",
    "attention.value_length_swa",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.dimension_count_swa",
    "rope.scaling.factor",
];

fn any_value() -> impl Strategy<Value = Value> {
    let size = || prop_oneof![0u32..20, Just(u32::MAX), Just(1 << 31), any::<u32>()];
    prop_oneof![
        size().prop_map(Value::U32),
        any::<i32>().prop_map(Value::I32),
        any::<f32>().prop_map(Value::F32),
        any::<bool>().prop_map(Value::Bool),
        prop::collection::vec(size(), 0..4).prop_map(|v| Value::Array(Array::U32(v))),
        prop::collection::vec(any::<bool>(), 0..4).prop_map(|v| Value::Array(Array::Bool(v))),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn senseless_keys_never_panic(
        changes in prop::collection::vec((prop::sample::select(&KEYS[..]), any_value()), 1..4),
        fused in any::<bool>(),
    ) {
        let mut writer = gemma3(2);
        if fused {
            writer = zeros(writer, "blk.0.attn_qkv", &[EMBEDDING, (HEADS + 2) * HEAD]);
        }
        for (key, value) in changes {
            writer = writer.set_key(&format!("gemma3.{key}"), value);
        }
        if let Ok(model) = load(&writer) {
            prop_assert_eq!(model.weights.len(), model.graph.weights.len());
        }
    }

    #[test]
    fn damaged_models_never_panic(edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4)) {
        let mut bytes = gemma3(2).to_bytes();
        for (at, byte) in edits {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("damaged.gguf");
        std::fs::write(&path, bytes).expect("written");
        let _ = Model::load(&path);
    }
}
