//! Exact tokens: codecs are compared with as many of them.

use anyhow::Result;
use opencoti_compute::graph::Graph;
use opencoti_plugin_api::PAGE_TOKENS;
use opencoti_registry::Registry;
use serde_json::{Value, json};

use crate::kv;
use crate::measure::codecs::Pair;

/// Gives all pairs the same exact tokens: a page of the newest, where the settings leave it to the codecs and one can't do
/// without. Returns what they have, for the results. What an exact tail hides is no merit of a codec.
///
/// # Errors
/// Codecs that can't be opened for the model.
pub fn equalise(pairs: &mut [Pair], registry: &Registry, graph: &Graph) -> Result<Value> {
    let mut staged = false;
    for pair in pairs.iter() {
        let groups = kv::groups(&pair.settings, registry, graph)?;
        staged |= groups.iter().any(|g| [&g.k, &g.v].iter().any(|codec| codec.layout().stage_tokens > 0));
    }
    let left_to_codecs = pairs.iter().all(|pair| pair.settings.kv_stage_tokens < 0);
    if staged && left_to_codecs {
        eprintln!(
            "a codec encodes pages as a whole, so every pair keeps its newest {PAGE_TOKENS} tokens exact; \
             `--cache-stage-tokens` asks for more"
        );
        pairs.iter_mut().for_each(|pair| pair.settings.kv_stage_tokens = PAGE_TOKENS as i32);
    }
    let first = pairs.first().map(|pair| &pair.settings);
    Ok(json!({
        "newest": first.map(|s| s.kv_stage_tokens.max(0)),
        "sink": first.map(|s| s.kv_stage_sink),
    }))
}
