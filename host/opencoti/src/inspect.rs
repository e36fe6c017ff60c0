//! `opencoti model` and `opencoti check`.

use std::path::Path;

use anyhow::{Context, Result};
use opencoti_compute::graph::KvGeometry;
use opencoti_kv::GroupConfig;
use opencoti_model::demands::Demands;
use opencoti_model::synth::{Preset, Quant};
use opencoti_model::{LoadOptions, Model};
use opencoti_plugin_api::PAGE_TOKENS;
use opencoti_plugin_api::kv_codec::Side;
use opencoti_registry::Registry;
use serde_json::{Map, Value, json};

use crate::memory::show;
use crate::settings::Settings;
use crate::{boot, kv, plugins};

/// What keys and values of one choice of codecs take.
struct Cost {
    /// The choice, for people.
    codecs: String,
    /// What it takes, or why the codecs can't store this model.
    bytes: Result<Bytes, String>,
}

/// Bytes of keys and values.
#[derive(Clone, Copy, Default, PartialEq, Debug)]
struct Bytes {
    /// A token's, in layers that see all tokens.
    full: f64,
    /// A token's, in layers that see a window.
    window: f64,
    /// All that a sequence can have in these.
    window_limit: f64,
}

impl Bytes {
    fn add(&mut self, geometry: KvGeometry, layers: usize, k_tile: usize, v_tile: usize) {
        let bytes = ((k_tile + v_tile) * geometry.n_kv_heads * layers) as f64 / PAGE_TOKENS as f64;
        match geometry.window {
            None => self.full += bytes,
            Some(window) => {
                self.window += bytes;
                self.window_limit += bytes * window as f64;
            }
        }
    }

    fn of_groups(groups: &[GroupConfig]) -> Bytes {
        let mut bytes = Bytes::default();
        for g in groups {
            bytes.add(g.geometry, g.n_layers, g.k.layout().tile_bytes, g.v.layout().tile_bytes);
        }
        bytes
    }
}

impl std::fmt::Display for Bytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Bytes { full, window, window_limit } = *self;
        if window == 0.0 {
            return f.write_str(&show(full));
        }
        write!(f, "{} and {} in windows, which hold {} at most", show(full), show(window), show(window_limit))
    }
}

/// Inspects a model file, or the made-up model of a preset, `NAME` or `NAME:QUANTISATION`. Codecs come from the plugins the
/// settings load.
pub fn model(settings: &Settings, file: &Path, as_json: bool) -> Result<()> {
    let model = load(settings, file)?;
    let registry = plugins::load(settings)?;
    let configured = configured(settings, &registry, &model);
    let costs = costs(&model, &registry);
    if as_json {
        println!("{}", serde_json::to_string_pretty(&to_json(&model, &configured, &costs))?);
        return Ok(());
    }
    print_facts(&model);
    println!("\nKV a token in all layers, with the codecs that are set:");
    print_cost(&configured);
    println!("\nWith K and V in the same codec:");
    costs.iter().for_each(print_cost);
    Ok(())
}

fn load(settings: &Settings, file: &Path) -> Result<Model> {
    let options = LoadOptions { repeat_layers: settings.repeat_layers.clone(), context: None };
    let Some(name) = file.to_str().filter(|_| !file.exists()) else { return Ok(Model::inspect(file, &options)?) };
    let (name, quant) = name.split_once(':').unwrap_or((name, "q4_k_m"));
    // What looks like a path is one: its error is that of the file.
    let Ok(preset) = Preset::of(name) else { return Ok(Model::inspect(file, &options)?) };
    let spec = preset.spec(quant.parse::<Quant>()?, None)?;
    let folder = tempfile::tempdir().context("no temporary folder for the model's header")?;
    let header = folder.path().join(format!("{name}.gguf"));
    spec.write_header(&header).with_context(|| format!("{} could not be written", header.display()))?;
    Ok(Model::inspect(&header, &options)?)
}

fn print_facts(model: &Model) {
    let (h, sizes, demands) = (&model.hparams, &model.sizes, Demands::of(&model.graph, &model.weights));
    let line = |what: &str, text: String| println!("{what:<14} {text}");
    line("name", model.name.clone().unwrap_or_else(|| "(none)".to_owned()));
    line("architecture", model.architecture.to_owned());
    line("weights", format!("{} ({})", sizes.parameters, sizes.file_type));
    let of_experts = match h.expert_count {
        0 => String::new(),
        n => format!(", with {} of {n} experts", h.expert_used_count),
    };
    let (active, read) = (demands.active_parameters, show(demands.active_bytes as f64));
    line("active", format!("{active} a token{of_experts}; {read} to read"));
    let (tensors, disk) = (show(sizes.tensor_bytes as f64), show(sizes.file_bytes as f64));
    line("bytes", format!("{tensors} in tensors, {disk} on disk"));
    line("layers", h.block_count.to_string());
    line("width", h.embedding_length.to_string());
    line("context", h.context_length.to_string());
    line("tokenizer", format!("{}, {} tokens", model.tokenizer.model(), model.tokenizer.n_vocab()));
    let pooling = h.pooling.map_or("not said".to_owned(), |p| format!("{p:?}").to_lowercase());
    line("pooling", pooling);
    line("chat template", if model.chat_templates.default.is_some() { "yes" } else { "none" }.to_owned());
    for cache in &demands.caches {
        let g = cache.geometry;
        let window = g.window.map_or("full attention".to_owned(), |w| format!("window {w}"));
        let heads = format!("{} KV heads, head sizes {} (K) and {} (V)", g.n_kv_heads, g.k_head_dim, g.v_head_dim);
        line("cache group", format!("{} layers, {heads}, {window}", cache.layers));
    }
    if h.nextn_blocks > 0 {
        line("NextN", format!("{} blocks behind the trunk, unused until drafting", h.nextn_blocks));
    }
    if demands.state_bytes > 0 {
        let layers = model.graph.state_layers.len();
        line("state", format!("{layers} recurrent layers, {} a sequence", show(demands.state_bytes as f64)));
    }
}

fn print_cost(cost: &Cost) {
    match &cost.bytes {
        Ok(bytes) => println!("  {:<12} {bytes}", cost.codecs),
        Err(e) => println!("  {:<12} {e}", cost.codecs),
    }
}

fn to_json(model: &Model, configured: &Cost, costs: &[Cost]) -> Value {
    let demands = Demands::of(&model.graph, &model.weights);
    let per_codec = |part: fn(&Bytes) -> f64| -> Map<String, Value> {
        let value = |c: &Cost| c.bytes.as_ref().map_or_else(|e| json!({"refused": e}), |b| json!(part(b)));
        costs.iter().map(|c| (c.codecs.clone(), value(c))).collect()
    };
    let caches = demands.caches.iter().map(|c| {
        let g = c.geometry;
        json!({
            "layers": c.layers,
            "kv_heads": g.n_kv_heads,
            "k_head_dim": g.k_head_dim,
            "v_head_dim": g.v_head_dim,
            "window": g.window,
        })
    });
    let set = configured.bytes.as_ref().map_or_else(
        |e| json!({"codecs": configured.codecs, "refused": e}),
        |b| {
            json!({
                "codecs": configured.codecs,
                "full_bytes_per_token": b.full,
                "window_bytes_per_token": b.window,
                "window_bytes_at_most": b.window_limit,
            })
        },
    );
    json!({
        "name": model.name,
        "architecture": model.architecture,
        "parameters": model.sizes.parameters,
        "active_parameters": demands.active_parameters,
        "active_bytes": demands.active_bytes,
        "experts": model.hparams.expert_count,
        "experts_used": model.hparams.expert_used_count,
        "tensor_bytes": model.sizes.tensor_bytes,
        "file_bytes": model.sizes.file_bytes,
        "file_type": model.sizes.file_type.to_string(),
        "layers": model.hparams.block_count,
        "width": model.hparams.embedding_length,
        "context": model.hparams.context_length,
        "vocabulary": model.hparams.vocab_size,
        "chat_template": model.chat_templates.default.is_some(),
        "nextn_blocks": model.hparams.nextn_blocks,
        "caches": caches.collect::<Vec<_>>(),
        "state_bytes_per_sequence": demands.state_bytes,
        "kv": set,
        "kv_bytes_per_token": per_codec(|b| b.full + b.window),
        "kv_full_bytes_per_token": per_codec(|b| b.full),
        "kv_window_bytes_per_token": per_codec(|b| b.window),
        "kv_window_bytes_at_most": per_codec(|b| b.window_limit),
    })
}

/// The codecs that the settings name, with their options.
fn configured(settings: &Settings, registry: &Registry, model: &Model) -> Cost {
    let groups = kv::groups(settings, registry, &model.graph).map_err(|e| format!("{e:#}"));
    let codecs = match (settings.kv_k.as_str(), settings.kv_v.as_str()) {
        (k, v) if k == v => k.to_owned(),
        (k, v) => format!("{k}/{v}"),
    };
    Cost { codecs, bytes: groups.map(|groups| Bytes::of_groups(&groups)) }
}

fn costs(model: &Model, registry: &Registry) -> Vec<Cost> {
    let offers = registry.describe();
    let codecs = offers.iter().flat_map(|p| &p.codecs).map(|c| c.name.clone());
    codecs.map(|codecs| Cost { bytes: cost(model, registry, &codecs), codecs }).collect()
}

fn cost(model: &Model, registry: &Registry, codec: &str) -> Result<Bytes, String> {
    let (plugin, name) = registry.codec(codec).map_err(|e| e.to_string())?;
    let mut bytes = Bytes::default();
    for group in model.graph.cache_groups() {
        let g = group.geometry;
        let tile = |side, head_dim| {
            let opened = plugin.open(&name, "{}", side, head_dim).map_err(|e| e.message)?;
            Ok::<usize, String>(opened.layout().tile_bytes)
        };
        bytes.add(g, group.layers.len(), tile(Side::K, g.k_head_dim)?, tile(Side::V, g.v_head_dim)?);
    }
    Ok(bytes)
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
