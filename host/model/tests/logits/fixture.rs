//! The tiny models and what they must answer.

use std::path::PathBuf;

use opencoti_model::Model;

/// A tiny model with the logits that transformers computes for it.
pub(crate) struct Fixture {
    /// The model, as its file says.
    pub(crate) model: Model,
    /// Token ids.
    pub(crate) tokens: Vec<u32>,
    /// Logits of all positions, of encoders their hidden states, one row after the other.
    pub(crate) logits: Vec<f32>,
    /// Width of a row of logits.
    pub(crate) vocab: usize,
}

/// Every tiny model by name.
pub(crate) const NAMES: &[&str] = &[
    "llama",
    "llama-bias-untied",
    "llama-rope-freqs",
    "llama-yarn",
    "llama-linear",
    "llama-head-128",
    "llama-head-96",
    "llama-9-heads",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3-yarn",
    "gemma2",
    "gemma3",
    "gemma3-linear-capped",
    "gemma4",
    "gemma4-elastic",
    "gemma4-moe",
    "phi3",
    "phi3-long",
    "phi3-short",
    "smollm3",
    "olmo2",
    "olmo3",
    "granite",
    "granitemoe",
    "qwen3moe",
    "llama-experts",
    "qwen35",
    "qwen35-ends-recurrent",
    "qwen35moe",
    "qwen3next",
    "lfm2",
];

/// Path of a fixture file.
pub(crate) fn path(file: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(file)
}

/// The JSON beside a tiny model.
pub(crate) fn facts(name: &str) -> serde_json::Value {
    let json = std::fs::read_to_string(path(&format!("{name}.json"))).expect("the ids");
    serde_json::from_str(&json).expect("json")
}

/// Loads a tiny model.
pub(crate) fn fixture(name: &str) -> Fixture {
    let model = Model::load(&path(&format!("{name}.gguf"))).unwrap_or_else(|e| panic!("{name}: {e}"));
    let json = facts(name);
    let tokens = json["tokens"].as_array().expect("ids").iter().map(|t| t.as_u64().expect("id") as u32).collect();
    let vocab = json["vocab_size"].as_u64().expect("a size") as usize;
    let bytes = std::fs::read(path(&format!("{name}.logits"))).expect("the logits");
    let logits = bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
    Fixture { model, tokens, logits, vocab }
}

/// Largest absolute difference; infinite if the lengths differ or a number is not finite.
pub(crate) fn max_diff(a: &[f32], b: &[f32]) -> f32 {
    if a.len() != b.len() || a.iter().chain(b).any(|v| !v.is_finite()) {
        return f32::INFINITY;
    }
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}
