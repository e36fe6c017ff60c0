//! Tables of what is known about a model's keys and values: what `lab calibrate` writes.
//!
//! A table says, for every layer, the mean of its keys and factors that even out its channels. Stored are `(k - k_mean) * k_scale` and
//! `v * v_scale`; queries and outputs are divided by the factors, and the mean is never added back, since what is added to
//! all keys of a head is added to all its logits. A table belongs to one model; groups of layers are told apart by the width of
//! their keys.

use std::path::Path;

use anyhow::{Context, Result, bail};
use opencoti_compute::graph::{Graph, KvGeometry};
use serde::{Deserialize, Serialize};

/// Marks a table's file.
const FORMAT: &str = "opencoti-kv-table";
/// Version of the format.
const VERSION: u32 = 1;

/// A table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KvTable {
    format: String,
    version: u32,
    /// Name of the model, for people.
    pub model: String,
    /// Digest of the model, hexadecimal.
    pub digest: String,
    /// Tokens that it was made of.
    pub tokens: usize,
    /// Layers of each geometry, in the order of the graph's cache groups.
    pub groups: Vec<GroupTable>,
}

/// Layers of one geometry.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GroupTable {
    /// Values of a token's keys in one layer: heads times their size. Names the group.
    pub width: usize,
    /// KV heads.
    pub n_kv_heads: usize,
    /// Values of a key head.
    pub k_head_dim: usize,
    /// Values of a value head.
    pub v_head_dim: usize,
    /// Factors of keys for all heads of all layers, `k_head_dim`.
    pub k_scale: Vec<f32>,
    /// Factors of values for all heads of all layers, `v_head_dim`.
    pub v_scale: Vec<f32>,
    /// Each layer's own.
    pub layers: Vec<LayerTable>,
}

/// One layer: a value for each channel of each KV head, head after head.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerTable {
    /// Mean of keys.
    pub k_mean: Vec<f32>,
    /// Factors of keys.
    pub k_scale: Vec<f32>,
    /// Factors of values.
    pub v_scale: Vec<f32>,
}

impl KvTable {
    /// A table for a model.
    pub fn new(model: String, digest: String, tokens: usize, groups: Vec<GroupTable>) -> KvTable {
        KvTable { format: FORMAT.to_owned(), version: VERSION, model, digest, tokens, groups }
    }

    /// Reads a table for the model with this digest and graph.
    ///
    /// # Errors
    /// A file that is no table, or one for something else.
    pub fn read(path: &Path, digest: &str, graph: &Graph) -> Result<KvTable> {
        let shown = path.display();
        let text = std::fs::read_to_string(path).with_context(|| format!("{shown} can't be read"))?;
        let table: KvTable =
            serde_json::from_str(&text).with_context(|| format!("{shown} is no table of `opencoti lab calibrate`"))?;
        if table.format != FORMAT || table.version != VERSION {
            let (format, version) = (&table.format, table.version);
            bail!("{shown} is a `{format}` of version {version}, expected `{FORMAT}` of version {VERSION}");
        }
        if table.digest != digest {
            bail!("{shown} is a table for another model (`{}`); calibrate this one", table.model);
        }
        table.check(graph).with_context(|| format!("{shown}"))?;
        Ok(table)
    }

    fn check(&self, graph: &Graph) -> Result<()> {
        let groups = graph.cache_groups();
        if groups.len() != self.groups.len() {
            bail!("the table has {} groups of layers, the model {}", self.groups.len(), groups.len());
        }
        for (table, group) in self.groups.iter().zip(&groups) {
            table.check(group.geometry, group.layers.len())?;
        }
        Ok(())
    }
}

impl GroupTable {
    fn check(&self, geometry: KvGeometry, layers: usize) -> Result<()> {
        let KvGeometry { n_kv_heads, k_head_dim, v_head_dim, .. } = geometry;
        let found = (self.n_kv_heads, self.k_head_dim, self.v_head_dim, self.layers.len());
        if found != (n_kv_heads, k_head_dim, v_head_dim, layers) || self.width != n_kv_heads * k_head_dim {
            bail!(
                "the group of width {} has {found:?} heads, key and value sizes and layers, the model {:?}",
                self.width,
                (n_kv_heads, k_head_dim, v_head_dim, layers)
            );
        }
        let of = |name: &str, values: &[f32], len: usize, factor: bool| {
            let wrong = |v: &f32| !v.is_finite() || (factor && *v <= 0.0);
            match (values.len() == len, values.iter().find(|v| wrong(v))) {
                (false, _) => bail!("`{name}` of width {} has {} values, expected {len}", self.width, values.len()),
                (_, Some(value)) => bail!("`{name}` of width {} has the value {value}", self.width),
                _ => Ok(()),
            }
        };
        of("k_scale", &self.k_scale, k_head_dim, true)?;
        of("v_scale", &self.v_scale, v_head_dim, true)?;
        for layer in &self.layers {
            of("k_mean", &layer.k_mean, n_kv_heads * k_head_dim, false)?;
            of("k_scale", &layer.k_scale, n_kv_heads * k_head_dim, true)?;
            of("v_scale", &layer.v_scale, n_kv_heads * v_head_dim, true)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GEOMETRY: KvGeometry = KvGeometry { n_kv_heads: 2, k_head_dim: 2, v_head_dim: 1, window: None };

    fn group() -> GroupTable {
        let layer = LayerTable { k_mean: vec![0.5; 4], k_scale: vec![1.0; 4], v_scale: vec![2.0; 2] };
        GroupTable {
            width: 4,
            n_kv_heads: 2,
            k_head_dim: 2,
            v_head_dim: 1,
            k_scale: vec![1.0; 2],
            v_scale: vec![1.0],
            layers: vec![layer],
        }
    }

    #[test]
    fn a_table_must_have_the_models_sizes_and_factors_that_divide() {
        assert!(group().check(GEOMETRY, 1).is_ok());
        let refused = |change: &dyn Fn(&mut GroupTable)| {
            let mut changed = group();
            change(&mut changed);
            changed.check(GEOMETRY, 1).unwrap_err().to_string()
        };
        assert!(refused(&|g| g.width = 8).contains("width 8"));
        assert!(refused(&|g| g.layers.clear()).contains("(2, 2, 1, 0)"));
        assert!(refused(&|g| g.k_scale.push(1.0)).contains("has 3 values, expected 2"));
        assert!(refused(&|g| g.layers[0].v_scale[1] = 0.0).contains("`v_scale` of width 4 has the value 0"));
        assert!(refused(&|g| g.layers[0].k_mean[0] = f32::NAN).contains("`k_mean`"));
    }
}
