//! `opencoti model` and `opencoti check`.

use std::path::Path;

use anyhow::Result;
use opencoti_model::Model;
use opencoti_plugin_api::PAGE_TOKENS;
use opencoti_plugin_api::kv_codec::Side;
use opencoti_registry::Registry;
use serde_json::{Value, json};

use crate::memory::show;
use crate::settings::Settings;
use crate::{boot, plugins};

/// What KV costs a token with one codec for both sides.
struct Cost {
    codec: String,
    /// Bytes a token, or why the codec can't store this model.
    bytes: Result<f64, String>,
}

/// Inspects a model file. Codecs come from the plugins the settings load.
pub fn model(settings: &Settings, file: &Path, as_json: bool) -> Result<()> {
    let model = Model::load(file)?;
    let registry = plugins::load(settings)?;
    let costs = costs(&model, &registry);
    if as_json {
        println!("{}", serde_json::to_string_pretty(&to_json(&model, &costs))?);
        return Ok(());
    }
    let h = &model.hparams;
    let line = |what: &str, text: String| println!("{what:<14} {text}");
    line("name", model.name.clone().unwrap_or_else(|| "(none)".to_owned()));
    line("architecture", model.architecture.to_owned());
    line("weights", format!("{} ({})", model.sizes.parameters, model.sizes.file_type));
    line(
        "bytes",
        format!(
            "{} in tensors, {} on disk",
            show(model.sizes.tensor_bytes as f64),
            show(model.sizes.file_bytes as f64)
        ),
    );
    line("layers", h.block_count.to_string());
    line("width", h.embedding_length.to_string());
    line("context", h.context_length.to_string());
    line("tokenizer", format!("{}, {} tokens", model.tokenizer.model(), model.tokenizer.n_vocab()));
    let pooling = h.pooling.map_or("not said".to_owned(), |p| format!("{p:?}").to_lowercase());
    line("pooling", pooling);
    line("chat template", if model.chat_templates.default.is_some() { "yes" } else { "none" }.to_owned());
    for group in model.graph.cache_groups() {
        let g = group.geometry;
        let window = g.window.map_or("full attention".to_owned(), |w| format!("window {w}"));
        line(
            "cache group",
            format!(
                "{} layers, {} KV heads, head sizes {} (K) and {} (V), {window}",
                group.layers.len(),
                g.n_kv_heads,
                g.k_head_dim,
                g.v_head_dim
            ),
        );
    }
    if h.nextn_blocks > 0 {
        line("NextN", format!("{} blocks behind the trunk, unused until drafting", h.nextn_blocks));
    }
    let states = model.graph.state_layers.len();
    if states > 0 {
        let bytes = (model.graph.state_words() * size_of::<f32>()) as f64;
        line("state", format!("{states} recurrent layers, {} a sequence", show(bytes)));
    }
    println!("\nKV a token, K and V in the same codec, all layers:");
    for cost in &costs {
        match &cost.bytes {
            Ok(bytes) => println!("  {:<12} {}", cost.codec, show(*bytes)),
            Err(e) => println!("  {:<12} {e}", cost.codec),
        }
    }
    Ok(())
}

fn to_json(model: &Model, costs: &[Cost]) -> Value {
    let kv: serde_json::Map<String, Value> = costs
        .iter()
        .map(|c| (c.codec.clone(), c.bytes.as_ref().map_or_else(|e| json!({"refused": e}), |b| json!(b))))
        .collect();
    json!({
        "name": model.name,
        "architecture": model.architecture,
        "parameters": model.sizes.parameters,
        "tensor_bytes": model.sizes.tensor_bytes,
        "file_bytes": model.sizes.file_bytes,
        "file_type": model.sizes.file_type.to_string(),
        "layers": model.hparams.block_count,
        "width": model.hparams.embedding_length,
        "context": model.hparams.context_length,
        "vocabulary": model.hparams.vocab_size,
        "chat_template": model.chat_templates.default.is_some(),
        "kv_bytes_per_token": kv,
        "state_bytes_per_sequence": model.graph.state_words() * size_of::<f32>(),
        "nextn_blocks": model.hparams.nextn_blocks,
    })
}

fn costs(model: &Model, registry: &Registry) -> Vec<Cost> {
    let offers = registry.describe();
    let codecs = offers.iter().flat_map(|p| &p.codecs).map(|c| c.name.clone());
    codecs.map(|codec| Cost { bytes: cost(model, registry, &codec), codec }).collect()
}

fn cost(model: &Model, registry: &Registry, codec: &str) -> Result<f64, String> {
    let (plugin, name) = registry.codec(codec).map_err(|e| e.to_string())?;
    let mut bytes = 0;
    for group in model.graph.cache_groups() {
        let g = group.geometry;
        for (side, head_dim) in [(Side::K, g.k_head_dim), (Side::V, g.v_head_dim)] {
            let opened = plugin.open(&name, "{}", side, head_dim).map_err(|e| e.message)?;
            bytes += opened.layout().tile_bytes * g.n_kv_heads * group.layers.len();
        }
    }
    Ok(bytes as f64 / PAGE_TOKENS as f64)
}

/// Validates a config: loads plugins and model, checks everything, takes no memory and no port.
pub fn check(settings: &Settings) -> Result<()> {
    let registry = plugins::load(settings)?;
    for plugin in registry.describe() {
        println!("  {:<14} {} {} ({})", "plugin", plugin.name, plugin.version, plugin.kind);
    }
    let prepared = boot::prepare(settings, &registry, |_| {})?;
    print!("{}", prepared.summary);
    println!("The config is valid.");
    Ok(())
}
