//! From names in the settings to opened codecs, and what they cost for a model.

use anyhow::{Context, Result};
use opencoti_compute::graph::{CacheGroup, Graph};
use opencoti_kv::{GroupConfig, StageConfig};
use opencoti_plugin_api::PAGE_TOKENS;
use opencoti_plugin_api::host::Codec;
use opencoti_plugin_api::kv_codec::Side;
use opencoti_registry::Registry;
use serde_json::{Map, Value, json};

use crate::channels;
use crate::settings::{Rotation, Settings};

/// Name of a group in messages and metrics.
fn group_name(group: &CacheGroup, same_kind_before: usize) -> String {
    let kind = if group.geometry.window.is_some() { "swa" } else { "kv" };
    match same_kind_before {
        0 => kind.to_owned(),
        n => format!("{kind}{}", n + 1),
    }
}

/// The options of a side's codec: the user's table, with the rotation that the settings ask for.
fn options(settings: &Settings, side: Side) -> Map<String, Value> {
    let (codec, table) = match side {
        Side::K => (&settings.kv_k, &settings.kv_k_options),
        Side::V => (&settings.kv_v, &settings.kv_v_options),
    };
    let mut options = table.0.clone();
    options.retain(|key, _| !channels::OPTIONS.contains(&key.as_str()));
    let rotate = match settings.kv_rotation {
        Rotation::None => false,
        Rotation::Hadamard => is_quantised_scalar(codec) || is_half(codec),
        Rotation::Auto => is_quantised_scalar(codec),
    };
    if rotate {
        options.entry("rotation").or_insert_with(|| json!("hadamard"));
    }
    options
}

/// The codec's name without the plugin that may stand before a `/`.
fn bare(codec: &str) -> &str {
    codec.rsplit('/').next().unwrap_or(codec)
}

/// A 16-bit float.
fn is_half(codec: &str) -> bool {
    matches!(bare(codec), "f16" | "bf16")
}

/// `q8_0`, `q4_0` and the like.
fn is_quantised_scalar(codec: &str) -> bool {
    let name = bare(codec);
    let digits = name.strip_prefix('q').and_then(|rest| rest.split_once('_'));
    digits.is_some_and(|(bits, kind)| bits.parse::<u8>().is_ok() && kind.parse::<u8>().is_ok())
}

/// Opens the settings' codecs for every cache group of a model.
pub fn groups(settings: &Settings, registry: &Registry, graph: &Graph) -> Result<Vec<GroupConfig>> {
    let mut named: Vec<GroupConfig> = Vec::new();
    for group in graph.cache_groups() {
        let windowed = group.geometry.window.is_some();
        let before = named.iter().filter(|g| g.geometry.window.is_some() == windowed).count();
        let k = open(settings, registry, Side::K, group.geometry.k_head_dim)?;
        let v = open(settings, registry, Side::V, group.geometry.v_head_dim)?;
        let stage = stage(settings, registry, graph, &k, &v)?;
        named.push(GroupConfig {
            name: group_name(&group, before),
            geometry: group.geometry,
            n_layers: group.layers.len(),
            k,
            v,
            stage,
        });
    }
    Ok(named)
}

/// Newest tokens that are exact for codecs that encode pages as a whole, where the settings say nothing.
const STAGE_TOKENS: usize = 512;

/// The exact tokens of a group with these codecs, if it has any. A model that reads texts as a whole has none, but where
/// a codec can't do without.
fn stage(settings: &Settings, registry: &Registry, graph: &Graph, k: &Codec, v: &Codec) -> Result<Option<StageConfig>> {
    let needed = [k, v].iter().any(|codec| codec.layout().stage_tokens > 0);
    let tokens = match settings.kv_stage_tokens {
        -1 if needed => STAGE_TOKENS,
        -1 => 0,
        tokens => usize::try_from(tokens).ok().with_context(|| {
            format!("`kv.stage.tokens` is {tokens}, expected a number of tokens, or -1 to leave it to the codecs")
        })?,
    };
    let sink = settings.kv_stage_sink as usize;
    if !needed && (graph.bidirectional || tokens == 0 && sink == 0) {
        return Ok(None);
    }
    let name = &settings.kv_stage_codec;
    let (plugin, codec) = registry.codec(name).context("`kv.stage.codec`")?;
    let open = |of: &Codec| {
        let opened = plugin.open(&codec, "{}", of.side(), of.head_dim());
        opened.with_context(|| format!("`kv.stage.codec = \"{name}\"` of plugin `{}`", plugin.instance().name()))
    };
    Ok(Some(StageConfig { tokens, sink, k: open(k)?, v: open(v)? }))
}

fn open(settings: &Settings, registry: &Registry, side: Side, head_dim: usize) -> Result<Codec> {
    let (name, key) = match side {
        Side::K => (&settings.kv_k, "kv.k"),
        Side::V => (&settings.kv_v, "kv.v"),
    };
    let (plugin, codec) = registry.codec(name).with_context(|| format!("`{key}`"))?;
    let options = Value::Object(options(settings, side)).to_string();
    plugin
        .open(&codec, &options, side, head_dim)
        .with_context(|| format!("`{key} = \"{name}\"` of plugin `{}`", plugin.instance().name()))
}

/// Bytes that a token costs in a group, all its layers together.
pub fn bytes_per_token(group: &GroupConfig) -> f64 {
    let tile = group.k.layout().tile_bytes + group.v.layout().tile_bytes;
    (tile * group.geometry.n_kv_heads * group.n_layers) as f64 / PAGE_TOKENS as f64
}

/// What is exact, for people; empty for a group without a stage.
pub fn stage_label(group: &GroupConfig) -> String {
    let Some(stage) = &group.stage else { return String::new() };
    let sink = match stage.sink {
        0 => String::new(),
        tokens => format!(" and the first {tokens}"),
    };
    format!(", the newest {} tokens{sink} in {}", stage.tokens, codec_label(&stage.k))
}

/// A codec with its options, for people.
pub fn codec_label(codec: &Codec) -> String {
    match codec.options() {
        "{}" => codec.name().to_owned(),
        options => format!("{} {options}", codec.name()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn automatic_rotation_is_for_quantised_scalar_codecs_alone() {
        for (codec, rotated) in
            [("q4_0", true), ("kv-scalar/q8_0", true), ("f16", false), ("bf16", false), ("turbo3", false), ("q", false)]
        {
            let settings = Settings { kv_k: codec.to_owned(), kv_v: "f16".to_owned(), ..Settings::with_defaults() };
            assert_eq!(options(&settings, Side::K).contains_key("rotation"), rotated, "{codec}");
            assert!(options(&settings, Side::V).is_empty());
        }
    }

    #[test]
    fn a_rotation_that_was_asked_for_is_not_imposed_on_codecs_that_rotate_themselves() {
        for (codec, rotated) in [("q4_0", true), ("f16", true), ("kv-scalar/bf16", true), ("turbo3", false)] {
            let kv_rotation = Rotation::Hadamard;
            let settings = Settings { kv_k: codec.to_owned(), kv_rotation, ..Settings::with_defaults() };
            assert_eq!(options(&settings, Side::K).contains_key("rotation"), rotated, "{codec}");
        }
    }

    #[test]
    fn a_table_is_for_the_host_and_no_codec_sees_it() {
        let mut settings = Settings::with_defaults();
        for (key, value) in [("table", "t.json"), ("prepare", "mean"), ("scale", "norm")] {
            settings.kv_k_options.0.insert(key.to_owned(), json!(value));
        }
        assert_eq!(Value::Object(options(&settings, Side::K)), json!({"scale": "norm"}));
    }

    #[test]
    fn the_users_own_rotation_stands() {
        let mut settings = Settings { kv_k: "q4_0".to_owned(), ..Settings::with_defaults() };
        settings.kv_k_options.0.insert("rotation".to_owned(), json!("none"));
        assert_eq!(options(&settings, Side::K)["rotation"], "none");
    }
}
