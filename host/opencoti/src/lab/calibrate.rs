//! `lab calibrate`: means and factors of a model's keys and values, from what it writes on a text.
//!
//! A codec that rotates spreads its error evenly over the channels, so small channels drown. The error of a logit is
//! `sum over c of E[q_c^2] / s_c^2` times `sum over c of s_c^2 E[k_c^2]`, up to a constant, when channel `c` of keys is multiplied by
//! `s_c` before and queries divided by it; by Cauchy and Schwarz it is least for `s_c = (E[q_c^2] / E[k_c^2])^(1/4)`. Values
//! have no queries; there a channel's share of the output is taken as even.

use std::path::PathBuf;

use anyhow::Result;
use opencoti_compute::graph::{Graph, KvGeometry, Op, Rope, RopePairing};
use opencoti_registry::Registry;

use super::Options as Common;
use super::capture::{self, Layer};
use super::table::{GroupTable, KvTable, LayerTable};
use crate::settings::Settings;
use crate::{fingerprint, measure};

/// Least and greatest factor: beyond them a channel of no energy would drown the others.
const LIMITS: (f64, f64) = (1.0 / 16.0, 16.0);

/// What is run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// The table's file.
    pub out: PathBuf,
    /// Tokens of the text.
    pub tokens: usize,
}

/// Sums over the tokens of one channel.
#[derive(Clone, Copy, Default, Debug)]
struct Channel {
    n: f64,
    sum: f64,
    squares: f64,
}

impl Channel {
    fn add(&mut self, value: f32) {
        self.n += 1.0;
        self.sum += f64::from(value);
        self.squares += f64::from(value).powi(2);
    }

    fn mean(&self) -> f64 {
        self.sum / self.n
    }

    /// Mean square about the mean.
    fn variance(&self) -> f64 {
        (self.squares / self.n - self.mean().powi(2)).max(0.0)
    }

    fn mean_square(&self) -> f64 {
        self.squares / self.n
    }
}

/// Writes the table; there are no gates.
///
/// # Errors
/// What kept it from being made.
pub fn run(settings: &Settings, registry: &Registry, common: &Common, own: &Options) -> Result<bool> {
    // A query of every eighth position is plenty: each has many heads.
    let captured = capture::run(settings, registry, common, own.tokens, own.tokens / 8)?;
    let model = &captured.model;
    let name = model.name.clone().unwrap_or_else(|| "model".to_owned());
    let groups = groups(&model.graph, &captured.layers);
    let table = KvTable::new(name, digest(model), own.tokens, groups);
    measure::write(&own.out, &format!("{}\n", serde_json::to_string(&table)?))?;
    for group in &table.groups {
        let spread = |scales: &[f32]| {
            let (least, most) = scales.iter().fold((f32::MAX, 0f32), |(l, m), &s| (l.min(s), m.max(s)));
            format!("{least:.3} to {most:.3}")
        };
        println!(
            "width {}: {} layers, factors of keys {}, of values {}",
            group.width,
            group.layers.len(),
            spread(&group.k_scale),
            spread(&group.v_scale)
        );
    }
    Ok(true)
}

/// The digest by which a table knows its model.
pub fn digest(model: &opencoti_model::Model) -> String {
    // The name may change, the weights may not.
    fingerprint::of(model, "").digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn groups(graph: &Graph, layers: &[Layer]) -> Vec<GroupTable> {
    let group = |(index, group): (usize, opencoti_compute::graph::CacheGroup)| {
        let of_group: Vec<&Layer> = group.layers.iter().map(|l| &layers[l.0 as usize]).collect();
        let ropes = group.layers.iter().map(|l| rope(graph, l.0)).collect::<Vec<_>>();
        debug_assert!(of_group.iter().all(|layer| layer.group == index));
        let KvGeometry { n_kv_heads, k_head_dim, v_head_dim, .. } = group.geometry;
        let mut k_all = vec![(0.0, 0.0); k_head_dim];
        let mut v_all = vec![(0.0, 0.0); v_head_dim];
        let tables = of_group.iter().zip(&ropes).map(|(layer, rope)| {
            let k = channels(&layer.k, n_kv_heads * k_head_dim);
            let v = channels(&layer.v, n_kv_heads * v_head_dim);
            let q = query_squares(layer);
            let k_energy: Vec<(f64, f64)> = q.iter().zip(&k).map(|(&q, k)| (q, k.variance())).collect();
            let v_energy: Vec<(f64, f64)> = v.iter().map(|v| (1.0, v.mean_square())).collect();
            add_heads(&mut k_all, &k_energy);
            add_heads(&mut v_all, &v_energy);
            let heads = |energy: &[(f64, f64)], dim: usize, rope: Option<&Rope>| -> Vec<f32> {
                energy.chunks_exact(dim).flat_map(|head| factors(&in_pairs(head, rope))).collect()
            };
            LayerTable {
                k_mean: k.iter().map(|k| k.mean() as f32).collect(),
                k_scale: heads(&k_energy, k_head_dim, *rope),
                v_scale: heads(&v_energy, v_head_dim, None),
            }
        });
        let layers: Vec<LayerTable> = tables.collect();
        GroupTable {
            width: n_kv_heads * k_head_dim,
            n_kv_heads,
            k_head_dim,
            v_head_dim,
            k_scale: factors(&in_pairs(&k_all, ropes.first().copied().flatten())),
            v_scale: factors(&v_all),
            layers,
        }
    };
    graph.cache_groups().into_iter().enumerate().map(group).collect()
}

/// The rope of a layer's queries, if they rotate.
fn rope(graph: &Graph, layer: u32) -> Option<&Rope> {
    graph.ops.iter().find_map(|op| match op {
        Op::Attend { layer: l, rope, .. } if l.0 == layer => rope.map(|r| &graph.ropes[r.0 as usize]),
        _ => None,
    })
}

fn channels(rows: &[f32], width: usize) -> Vec<Channel> {
    let mut channels = vec![Channel::default(); width];
    for row in rows.chunks_exact(width) {
        channels.iter_mut().zip(row).for_each(|(channel, &value)| channel.add(value));
    }
    channels
}

/// Mean squares of queries, each head's among those of the KV head that it reads.
fn query_squares(layer: &Layer) -> Vec<f64> {
    let KvGeometry { n_kv_heads, k_head_dim, .. } = layer.geometry;
    let mut channels = vec![Channel::default(); n_kv_heads * k_head_dim];
    for query in &layer.queries {
        let heads = query.row.len() / k_head_dim / n_kv_heads;
        for (h, head) in query.row.chunks_exact(k_head_dim).enumerate() {
            let of_kv = &mut channels[h / heads * k_head_dim..][..k_head_dim];
            of_kv.iter_mut().zip(head).for_each(|(channel, &value)| channel.add(value));
        }
    }
    channels.iter().map(Channel::mean_square).collect()
}

fn add_heads(all: &mut [(f64, f64)], energy: &[(f64, f64)]) {
    for head in energy.chunks_exact(all.len()) {
        all.iter_mut().zip(head).for_each(|(all, one)| *all = (all.0 + one.0, all.1 + one.1));
    }
}

/// Both channels that rotate together get what they have together: then the factors suit keys at any position.
fn in_pairs(energy: &[(f64, f64)], rope: Option<&Rope>) -> Vec<(f64, f64)> {
    let mut energy = energy.to_vec();
    let Some(rope) = rope else { return energy };
    let half = rope.n_rot / 2;
    for i in 0..half {
        let (a, b) = match rope.pairing {
            RopePairing::Norm => (2 * i, 2 * i + 1),
            RopePairing::Neox => (i, i + half),
        };
        let mean = ((energy[a].0 + energy[b].0) / 2.0, (energy[a].1 + energy[b].1) / 2.0);
        (energy[a], energy[b]) = (mean, mean);
    }
    energy
}

/// `(E[q^2] / E[k^2])^(1/4)` of each channel, with a geometric mean of 1.
fn factors(energy: &[(f64, f64)]) -> Vec<f32> {
    let logs: Vec<f64> =
        energy.iter().map(|&(q, k)| (q.max(f64::MIN_POSITIVE) / k.max(f64::MIN_POSITIVE)).ln() / 4.0).collect();
    let mean = logs.iter().sum::<f64>() / logs.len() as f64;
    logs.iter().map(|log| (log - mean).exp().clamp(LIMITS.0, LIMITS.1) as f32).collect()
}

#[cfg(test)]
mod tests {
    use std::f32::consts::{FRAC_1_SQRT_2, SQRT_2};

    use opencoti_compute::graph::RopeScaling;

    use super::*;

    #[test]
    fn factors_even_out_what_queries_see_of_keys() {
        // Keys four times as large as in the other channel, and queries as large.
        let found = factors(&[(1.0, 16.0), (1.0, 1.0)]);
        assert!((found[0] - FRAC_1_SQRT_2).abs() < 1e-6 && (found[1] - SQRT_2).abs() < 1e-6, "{found:?}");
        assert_eq!(factors(&[(3.0, 3.0), (5.0, 5.0)]), [1.0, 1.0]);
        assert_eq!(factors(&[(1.0, 0.0), (1.0, 1.0)]), [16.0, 1.0 / 16.0], "a silent channel stays within limits");
    }

    #[test]
    fn channels_that_rotate_together_have_one_factor() {
        let energy = [(1.0, 1.0), (3.0, 1.0), (5.0, 1.0), (7.0, 1.0), (9.0, 1.0)];
        let rope = |pairing| Rope { n_rot: 4, base: 10000.0, pairing, scaling: RopeScaling::None, freq_divisors: None };
        let q = |pairing| in_pairs(&energy, Some(&rope(pairing))).iter().map(|e| e.0).collect::<Vec<f64>>();
        assert_eq!(q(RopePairing::Norm), [2.0, 2.0, 6.0, 6.0, 9.0]);
        assert_eq!(q(RopePairing::Neox), [3.0, 5.0, 3.0, 5.0, 9.0]);
    }

    #[test]
    fn a_channels_variance_is_about_its_mean() {
        let channels = channels(&[10.0, 1.0, 14.0, -1.0], 2);
        assert_eq!((channels[0].mean(), channels[0].variance()), (12.0, 4.0));
        assert_eq!((channels[1].mean(), channels[1].mean_square()), (0.0, 1.0));
    }
}
