//! The options `table` and `prepare` of either side of the KV cache: what is done to the channels before any codec sees
//! them, from a table of `opencoti lab calibrate`.
//!
//! They stand among the codec's options, but the codec never gets them: the host prepares rows and queries itself, so
//! that every codec can have it, also that of a third party.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use opencoti_compute::channels::{Channels, LayerChannels};
use opencoti_compute::graph::KvGeometry;
use opencoti_kv::Cache;
use opencoti_model::Model;
use opencoti_plugin_api::kv_codec::Side;
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use crate::lab::{KvTable, LayerTable, digest};
use crate::settings::Settings;

/// The options' names.
pub const OPTIONS: [&str; 2] = ["table", "prepare"];

/// What of a table is applied.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Parts {
    mean: bool,
    scale: bool,
}

/// One side's table.
struct Asked {
    table: KvTable,
    parts: Parts,
    /// For state files.
    name: String,
}

/// Channels of every layer of every cache group.
#[derive(Clone, Debug, Default)]
pub struct Prepared {
    /// In the order of the groups; empty when no table is asked for.
    groups: Vec<Vec<LayerChannels>>,
    name: String,
}

impl Prepared {
    /// What the settings ask for, for a model.
    ///
    /// # Errors
    /// An option that is not understood, or a table that can't be read or is another model's.
    pub fn read(settings: &Settings, model: &Model) -> Result<Prepared> {
        let k = asked(&settings.kv_k_options.0, Side::K, model)?;
        let v = asked(&settings.kv_v_options.0, Side::V, model)?;
        if k.is_none() && v.is_none() {
            return Ok(Prepared::default());
        }
        let mut groups = Vec::new();
        for (g, group) in model.graph.cache_groups().iter().enumerate() {
            let layer = |place: usize| -> Result<LayerChannels> {
                let of = |asked: &Option<Asked>, side| {
                    let asked = asked.as_ref().map(|a| (a, &a.table.groups[g].layers[place]));
                    asked.map(|(a, layer)| channels(layer, a.parts, side, group.geometry)).transpose()
                };
                Ok(LayerChannels { k: of(&k, Side::K)?, v: of(&v, Side::V)? })
            };
            groups.push((0..group.layers.len()).map(layer).collect::<Result<_>>()?);
        }
        let of = |side: &str, asked: Option<Asked>| asked.map(|a| format!("{side} {}", a.name));
        let name = [of("K", k), of("V", v)].into_iter().flatten().collect::<Vec<_>>().join(", ");
        Ok(Prepared { groups, name })
    }

    /// For people; empty when no table is asked for.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Lets a new cache prepare its channels.
    ///
    /// # Errors
    /// Groups of another model.
    pub fn apply(self, cache: &mut Cache) -> Result<()> {
        for (g, layers) in self.groups.into_iter().enumerate() {
            cache.use_channels(g, &self.name, layers)?;
        }
        Ok(())
    }
}

/// Reads a side's options.
fn asked(options: &Map<String, Value>, side: Side, model: &Model) -> Result<Option<Asked>> {
    let key = match side {
        Side::K => "kv.k_options",
        Side::V => "kv.v_options",
    };
    let parts = parts(options.get("prepare"), side).with_context(|| format!("`{key}`"))?;
    let path = match options.get("table") {
        None if options.contains_key("prepare") => bail!("`{key}` has `prepare` but no `table` to take it from"),
        None => return Ok(None),
        Some(Value::String(path)) => path,
        Some(other) => bail!("`{key}.table` is {other}, expected the file of a table of `opencoti lab calibrate`"),
    };
    let read = || {
        let table = KvTable::read(Path::new(path), &digest(model), &model.graph)?;
        anyhow::Ok((table, Sha256::digest(std::fs::read(path)?)))
    };
    let (table, hash) = read().with_context(|| format!("`{key}.table`"))?;
    let hash: String = hash[..6].iter().map(|b| format!("{b:02x}")).collect();
    let what = match parts {
        Parts { mean: true, scale: true } => "mean and scale",
        Parts { mean: true, .. } => "mean",
        _ => "scale",
    };
    Ok(Some(Asked { table, parts, name: format!("{what} of table {hash}") }))
}

/// The option `prepare`: by default all that a table has.
fn parts(option: Option<&Value>, side: Side) -> Result<Parts> {
    let (both, mean, scale) = (
        Parts { mean: side == Side::K, scale: true },
        Parts { mean: true, scale: false },
        Parts { mean: false, scale: true },
    );
    match (option.map(|o| (o, o.as_str())), side) {
        (None, _) => Ok(both),
        (Some((_, Some("both"))), Side::K) => Ok(both),
        (Some((_, Some("mean"))), Side::K) => Ok(mean),
        (Some((_, Some("scale"))), _) => Ok(scale),
        (Some((other, _)), Side::K) => bail!("`prepare` is {other}, expected \"both\", \"mean\" or \"scale\""),
        (Some((other, _)), Side::V) => {
            bail!("`prepare` is {other}, expected \"scale\": a table has no means of values")
        }
    }
}

fn channels(layer: &LayerTable, parts: Parts, side: Side, g: KvGeometry) -> Result<Arc<Channels>> {
    let (offsets, factors, dim) = match side {
        Side::K => (parts.mean.then(|| layer.k_mean.clone()), &layer.k_scale, g.k_head_dim),
        Side::V => (None, &layer.v_scale, g.v_head_dim),
    };
    let factors = parts.scale.then(|| factors.clone());
    let channels = Channels::new(g.n_kv_heads, dim, offsets, factors).map_err(anyhow::Error::msg)?;
    Ok(Arc::new(channels))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn values_have_no_mean_to_take_off() {
        assert_eq!(parts(None, Side::K).unwrap(), Parts { mean: true, scale: true });
        assert_eq!(parts(None, Side::V).unwrap(), Parts { mean: false, scale: true });
        assert_eq!(parts(Some(&json!("mean")), Side::K).unwrap(), Parts { mean: true, scale: false });
        let refused = parts(Some(&json!("mean")), Side::V).unwrap_err().to_string();
        assert!(refused.contains("no means of values"), "{refused}");
        let refused = parts(Some(&json!(1)), Side::K).unwrap_err().to_string();
        assert!(refused.contains("`prepare` is 1"), "{refused}");
    }

    #[test]
    fn a_layers_channels_are_what_the_parts_take_of_it() {
        let layer = LayerTable { k_mean: vec![1.0, 2.0], k_scale: vec![2.0, 4.0], v_scale: vec![8.0, 8.0] };
        let geometry = KvGeometry { n_kv_heads: 1, k_head_dim: 2, v_head_dim: 2, window: None };
        let stored = |mean, scale, side| {
            let mut row = [3.0, 3.0];
            channels(&layer, Parts { mean, scale }, side, geometry).unwrap().store(0, &mut row);
            row
        };
        assert_eq!(stored(true, true, Side::K), [4.0, 4.0]);
        assert_eq!(stored(true, false, Side::K), [2.0, 1.0]);
        assert_eq!(stored(false, true, Side::K), [6.0, 12.0]);
        assert_eq!(stored(true, true, Side::V), [24.0, 24.0]);
    }
}
