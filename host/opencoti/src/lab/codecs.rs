//! `lab codecs`: the error of what is stored, on keys and values that the model really writes, layer by layer.

use std::path::PathBuf;

use anyhow::{Result, bail};
use opencoti_kv::GroupConfig;
use opencoti_plugin_api::PAGE_TOKENS;
use opencoti_plugin_api::host::Codec;
use opencoti_plugin_api::kv_codec::Side;
use opencoti_registry::Registry;
use serde_json::{Value, json};

use super::attention::AttentionError;
use super::capture::{self, Layer};
use super::gates::{Finding, Metrics};
use super::report::{self, Column, Shape, plain};
use super::table::KvTable;
use super::tiles::{self, Decoded};
use super::{Options as Common, calibrate};
use crate::measure::codecs::{self, Pair};
use crate::measure::cost;
use crate::measure::stats;
use crate::settings::Settings;
use crate::{boot, kv};

/// What is run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Tokens of the text; whole pages of them count.
    pub tokens: usize,
    /// Positions whose queries are asked.
    pub queries: usize,
    /// Table of means and factors that rows are prepared with.
    pub table: Option<PathBuf>,
    /// What is taken of it.
    pub with: With,
    /// Leading tokens that stay exact.
    pub sink: usize,
}

/// What of a table is applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum With {
    /// The mean of keys is taken off.
    Mean,
    /// Channels are evened out.
    Scale,
    /// Both.
    Both,
}

/// What is done to rows before a codec gets them, and undone behind it.
#[derive(Clone, Copy)]
struct Prepare<'a> {
    table: Option<&'a KvTable>,
    with: With,
    sink: usize,
}

impl Prepare<'_> {
    /// Offsets and factors of a head's keys or values: what is stored is `(x - offset) * factor`.
    fn head(&self, layer: &Layer, side: Side, head: usize) -> (Vec<f32>, Vec<f32>) {
        let dim = match side {
            Side::K => layer.geometry.k_head_dim,
            Side::V => layer.geometry.v_head_dim,
        };
        let Some(table) = self.table.map(|table| &table.groups[layer.group].layers[layer.place]) else {
            return (vec![0.0; dim], vec![1.0; dim]);
        };
        let of_head = |values: &[f32]| values[head * dim..][..dim].to_vec();
        let offset = match side {
            Side::K if self.with != With::Scale => of_head(&table.k_mean),
            _ => vec![0.0; dim],
        };
        let factor = match (self.with, side) {
            (With::Mean, _) => vec![1.0; dim],
            (_, Side::K) => of_head(&table.k_scale),
            (_, Side::V) => of_head(&table.v_scale),
        };
        (offset, factor)
    }

    /// Rows of a head through a codec and back. The offset is not added again: no softmax sees it.
    fn round_trip(&self, layer: &Layer, codec: &Codec, head: usize, rows: &[f32]) -> Result<Decoded> {
        let (offset, factor) = self.head(layer, codec.side(), head);
        let mut stored = rows.to_vec();
        for row in stored.chunks_exact_mut(offset.len()) {
            row.iter_mut().zip(&offset).zip(&factor).for_each(|((x, o), f)| *x = (*x - o) * f);
        }
        let mut decoded = tiles::round_trip(codec, &stored)?;
        let exact = (self.sink * offset.len()).min(decoded.rows.len());
        decoded.rows[..exact].copy_from_slice(&stored[..exact]);
        for row in decoded.rows.chunks_exact_mut(offset.len()) {
            row.iter_mut().zip(&factor).for_each(|(x, f)| *x /= f);
        }
        Ok(decoded)
    }
}

const COLUMNS: [Column; 11] = [
    plain("bits", "bits/value"),
    plain("bytes", "bytes/token"),
    plain("mse_k", "K error"),
    plain("logit_mse", "logit error"),
    plain("slope", "slope"),
    plain("attention_tv", "attention TV"),
    plain("attention_tv_worst", "worst layer"),
    plain("mse_v", "V error"),
    plain("output_mse", "output error"),
    plain("encode_ns", "encode ns"),
    plain("decode_ns", "decode ns"),
];

const SHAPE: Shape = Shape {
    name: "codecs",
    columns: &COLUMNS,
    plotted: plain("output_mse", "relative squared error of attention outputs"),
    gates: &["attention_tv<=0.2"],
};

/// What was found of one layer.
#[derive(Clone, Copy, Debug)]
struct LayerError {
    mse_k: f64,
    mse_v: f64,
    attention: AttentionError,
    /// Nanoseconds a value.
    encode_ns: f64,
    decode_ns: f64,
}

/// Runs it; whether every gate was passed.
///
/// # Errors
/// What kept it from being run.
pub fn run(settings: &Settings, registry: &Registry, common: &Common, own: &Options) -> Result<bool> {
    let pairs = codecs::pairs(settings, &common.kv)?;
    let gates = SHAPE.gates(common, &pairs)?;
    let captured = capture::run(settings, registry, common, own.tokens, own.queries)?;
    let graph = &captured.model.graph;
    let table = match &own.table {
        Some(path) => Some(KvTable::read(path, &calibrate::digest(&captured.model), graph)?),
        None => None,
    };
    let prepare = Prepare { table: table.as_ref(), with: own.with, sink: own.sink };
    let mut findings = Vec::new();
    let mut by_layer = Vec::new();
    for pair in &pairs {
        let groups = kv::groups(&pair.settings, registry, graph)?;
        let errors = errors(&captured.layers, &groups, prepare, boot::threads(settings))?;
        findings.push(finding(pair, &groups, &errors));
        by_layer.push(json!({"kv": pair.label, "layers": errors.iter().map(layer_json).collect::<Vec<_>>()}));
    }
    let facts = json!({
        "model": settings.model.as_ref().map(|path| path.display().to_string()),
        "tokens": own.tokens / PAGE_TOKENS * PAGE_TOKENS,
        "queries": own.queries,
        "sink": own.sink,
        "table": own.table.as_ref().map(|path| path.display().to_string()),
        "layers": by_layer,
    });
    report::show(&SHAPE, common, facts, &findings, &gates)
}

/// Errors of all layers, `threads` of them at a time.
fn errors(layers: &[Layer], groups: &[GroupConfig], prepare: Prepare<'_>, threads: usize) -> Result<Vec<LayerError>> {
    let share = layers.len().div_ceil(threads.max(1));
    std::thread::scope(|scope| {
        let work =
            |part: &'_ [Layer]| part.iter().map(|l| error(l, &groups[l.group], prepare)).collect::<Result<Vec<_>>>();
        let workers: Vec<_> = layers.chunks(share).map(|part| scope.spawn(move || work(part))).collect();
        let mut all = Vec::with_capacity(layers.len());
        for worker in workers {
            match worker.join() {
                Ok(found) => all.extend(found?),
                Err(_) => bail!("a thread broke off"),
            }
        }
        Ok(all)
    })
}

fn error(layer: &Layer, codecs: &GroupConfig, prepare: Prepare<'_>) -> Result<LayerError> {
    let g = layer.geometry;
    let (mut k_sums, mut v_sums) = (Squares::default(), Squares::default());
    let (mut encode, mut decode) = (0.0, 0.0);
    let mut attention = AttentionError::default();
    let mut values = 0;
    for head in 0..g.n_kv_heads {
        let k = head_rows(&layer.k, g.n_kv_heads, g.k_head_dim, head);
        let v = head_rows(&layer.v, g.n_kv_heads, g.v_head_dim, head);
        let k_found = prepare.round_trip(layer, &codecs.k, head, &k)?;
        let v_found = prepare.round_trip(layer, &codecs.v, head, &v)?;
        k_sums.add_without_mean(&k, &k_found.rows, g.k_head_dim);
        v_sums.add(&v, &v_found.rows);
        attention.add_head(layer, head, [&k, &v], [&k_found.rows, &v_found.rows]);
        encode += k_found.encode_seconds + v_found.encode_seconds;
        decode += k_found.decode_seconds + v_found.decode_seconds;
        values += k_found.rows.len() + v_found.rows.len();
    }
    let ns = |seconds: f64| 1e9 * seconds / values as f64;
    let (encode_ns, decode_ns) = (ns(encode), ns(decode));
    Ok(LayerError { mse_k: k_sums.ratio(), mse_v: v_sums.ratio(), attention, encode_ns, decode_ns })
}

/// Rows of one head of a layer, together.
fn head_rows(rows: &[f32], heads: usize, dim: usize, head: usize) -> Vec<f32> {
    rows.chunks_exact(heads * dim).flat_map(|row| &row[head * dim..][..dim]).copied().collect()
}

/// Squares of errors and of what they are errors of.
#[derive(Default)]
struct Squares {
    error: f64,
    exact: f64,
}

impl Squares {
    fn add(&mut self, exact: &[f32], found: &[f32]) {
        for (&a, &b) in exact.iter().zip(found) {
            self.error += (f64::from(a) - f64::from(b)).powi(2);
            self.exact += f64::from(a).powi(2);
        }
    }

    /// Without the mean of every channel: what is added to all keys of a head is added to all its logits, and no softmax
    /// sees it.
    fn add_without_mean(&mut self, exact: &[f32], found: &[f32], dim: usize) {
        let n = (found.len() / dim) as f64;
        for channel in 0..dim {
            let column = |rows: &[f32], i: usize| f64::from(rows[i * dim + channel]);
            let (mut e, mut e2, mut x, mut x2) = (0.0, 0.0, 0.0, 0.0);
            for i in 0..found.len() / dim {
                let (a, b) = (column(exact, i), column(found, i));
                e += b - a;
                e2 += (b - a) * (b - a);
                x += a;
                x2 += a * a;
            }
            self.error += e2 - e * e / n;
            self.exact += x2 - x * x / n;
        }
    }

    fn ratio(&self) -> f64 {
        self.error / self.exact
    }
}

fn finding(pair: &Pair, groups: &[GroupConfig], errors: &[LayerError]) -> Finding {
    let each = |value: fn(&LayerError) -> f64| -> Vec<f64> { errors.iter().map(value).collect() };
    let mean = |value: fn(&LayerError) -> f64| stats::mean(&each(value));
    let metrics = Metrics::from([
        ("bits", cost::bits_per_value(groups)),
        ("bytes", groups.iter().map(kv::bytes_per_token).sum()),
        ("mse_k", mean(|e| e.mse_k)),
        ("logit_mse", mean(|e| e.attention.logit_mse())),
        ("slope", mean(|e| e.attention.slope())),
        ("attention_tv", mean(|e| e.attention.tv())),
        ("attention_tv_worst", stats::quantile(&each(|e| e.attention.tv()), 1.0)),
        ("mse_v", mean(|e| e.mse_v)),
        ("output_mse", mean(|e| e.attention.output_mse())),
        ("encode_ns", mean(|e| e.encode_ns)),
        ("decode_ns", mean(|e| e.decode_ns)),
    ]);
    Finding { label: pair.label.clone(), is_reference: false, metrics }
}

fn layer_json(error: &LayerError) -> Value {
    json!({
        "mse_k": error.mse_k,
        "logit_mse": error.attention.logit_mse(),
        "slope": error.attention.slope(),
        "attention_tv": error.attention.tv(),
        "mse_v": error.mse_v,
        "output_mse": error.attention.output_mse(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_heads_rows_are_taken_out_of_all_heads() {
        assert_eq!(head_rows(&[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], 2, 2, 1), [2.0, 3.0, 6.0, 7.0]);
    }

    #[test]
    fn a_mean_that_a_codec_takes_off_is_no_error_of_keys() {
        let mut sums = Squares::default();
        let exact = [10.0, 1.0, 12.0, -1.0];
        sums.add_without_mean(&exact, &[0.0, 1.0, 2.0, -1.0], 2);
        assert_eq!(sums.ratio(), 0.0);
        let mut sums = Squares::default();
        sums.add_without_mean(&exact, &[10.5, 1.0, 11.5, -1.0], 2);
        assert!((sums.ratio() - 0.5 / 4.0).abs() < 1e-12);
    }
}
