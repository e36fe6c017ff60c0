//! The conformance kit finds each defect it is there to find.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use opencoti_plugin_api::conformance::{Outcome, Plan, Report, check, reference};
use opencoti_plugin_api::cpu_tiles::{CpuTiles, CpuTilesOf, CpuTilesVtbl, Scores, ScoresMut};
use opencoti_plugin_api::export::{About, Plugin, kv_codec_root};
use opencoti_plugin_api::host::{CodecPlugin, Host, Instance, NoSink};
use opencoti_plugin_api::kv_codec::{CodecName, Facts, KvCodec, KvCodecs, OpenParams, Rows, RowsMut, Side};
use opencoti_plugin_api::{Error, PAGE_TOKENS};

/// A codec of f32 rows, backwards, with the defect its config names.
struct Suspect {
    defect: String,
    opened: AtomicUsize,
}

struct Codec {
    head_dim: usize,
    defect: String,
    number: usize,
}

impl Plugin for Suspect {
    const ABOUT: About =
        About { name: "suspect", version: "1.0.0", license: "MIT", summary: "", capabilities: "", config_schema: "" };

    fn create(_: Host, config: &serde_json::Value) -> Result<Self, Error> {
        let defect = config["defect"].as_str().unwrap_or_default().to_owned();
        Ok(Suspect { defect, opened: AtomicUsize::new(0) })
    }
}

impl KvCodecs for Suspect {
    type Codec = Codec;

    fn codecs(&self) -> &'static [CodecName] {
        &[CodecName { name: "suspect", summary: "" }]
    }

    fn open(&self, params: &OpenParams) -> Result<Codec, Error> {
        if params.codec != "suspect" && self.defect != "any name" {
            return Err(Error::unsupported("no such codec"));
        }
        if params.head_dim == 0 && self.defect != "plain error" {
            return Err(Error::unsupported("no rows of nothing"));
        }
        if params.head_dim == 0 {
            return Err(Error::new("no rows of nothing"));
        }
        if params.side == Side::V && self.defect == "no values" {
            return Err(Error::unsupported("keys only"));
        }
        let number = self.opened.fetch_add(1, Ordering::Relaxed);
        Ok(Codec { head_dim: params.head_dim, defect: self.defect.clone(), number })
    }
}

impl Codec {
    fn has(&self, defect: &str) -> bool {
        self.defect == defect
    }

    fn value(&self, tile: &[u8], slot: usize, i: usize) -> f32 {
        let at = (slot * self.head_dim + i) * 4;
        f32::from_ne_bytes(tile[at..at + 4].try_into().unwrap())
    }

    fn set(&self, tile: &mut [u8], slot: usize, i: usize, x: f32) {
        let at = (slot * self.head_dim + i) * 4;
        tile[at..at + 4].copy_from_slice(&x.to_ne_bytes());
    }
}

impl KvCodec for Codec {
    fn facts(&self) -> Facts {
        let extra = if self.has("other layout") { self.number * 2 } else { 0 };
        Facts {
            head_dim: self.head_dim,
            tile_bytes: PAGE_TOKENS * self.head_dim * 4 + extra,
            bits_per_value: if self.has("too many bits") { 40.0 } else { 32.0 },
            rotated: true,
            stage_tokens: 0,
        }
    }

    fn append(&self, tile: &mut [u8], first_slot: usize, rows: Rows) -> Result<(), Error> {
        for (r, row) in rows.iter().enumerate() {
            for (i, x) in row.iter().rev().enumerate() {
                let x = match self.defect.as_str() {
                    "no zero" => x + 0.01,
                    "pieces" if first_slot > 0 => x + 1e-6,
                    "lossy" => 0.0,
                    "odd" if x.is_nan() => return Err(Error::new("not a number")),
                    "keeps garbage" => x + f32::from(tile[0]) * 1e-3,
                    _ => *x,
                };
                self.set(tile, first_slot + r, i, x);
            }
        }
        if self.has("touches earlier") && first_slot == 25 {
            self.set(tile, 3, 0, 9.0);
        }
        Ok(())
    }

    fn decode_page(&self, tile: &[u8], first_slot: usize, mut rows: RowsMut) -> Result<(), Error> {
        let shift = usize::from(self.has("sub-range") && first_slot > 0);
        for r in 0..rows.len() {
            let slot = (first_slot + r - shift).min(PAGE_TOKENS - 1);
            for (i, to) in rows.row(r).iter_mut().enumerate() {
                *to = self.value(tile, slot, i);
            }
        }
        Ok(())
    }

    fn transform_query(&self, mut rows: RowsMut) -> Result<(), Error> {
        for r in 0..rows.len() {
            rows.row(r).reverse();
            if self.has("scales") {
                rows.row(r).iter_mut().for_each(|x| *x *= 2.0);
            }
        }
        Ok(())
    }

    fn transform_output(&self, mut rows: RowsMut) -> Result<(), Error> {
        for r in 0..rows.len() {
            rows.row(r).reverse();
            if self.has("scales") {
                rows.row(r).iter_mut().for_each(|x| *x *= 0.5);
            }
        }
        Ok(())
    }

    fn cpu_tiles() -> Option<CpuTilesOf<Self>> {
        Some(CpuTilesVtbl::of::<Self>())
    }
}

impl CpuTiles for Codec {
    fn query_bytes(&self) -> usize {
        (self.head_dim * 4).next_multiple_of(64)
    }

    fn prepare_query(&self, rows: Rows, prepared: &mut [u8]) -> Result<(), Error> {
        for (row, to) in rows.iter().zip(prepared.chunks_exact_mut(self.query_bytes())) {
            row.iter().rev().zip(to.chunks_exact_mut(4)).for_each(|(x, b)| b.copy_from_slice(&x.to_ne_bytes()));
        }
        Ok(())
    }

    fn score(&self, prepared: &[u8], tile: &[u8], first_slot: usize, mut scores: ScoresMut) -> Result<(), Error> {
        for r in 0..scores.len() {
            let query = &prepared[r * self.query_bytes()..];
            for (t, score) in scores.row(r).iter_mut().enumerate() {
                let q = |i: usize| f32::from_ne_bytes(query[i * 4..i * 4 + 4].try_into().unwrap());
                *score = (0..self.head_dim).map(|i| q(i) * self.value(tile, first_slot + t, i)).sum();
                if self.has("scores") {
                    *score *= 1.5;
                }
            }
        }
        Ok(())
    }

    fn accumulate(&self, weights: Scores, tile: &[u8], first_slot: usize, mut acc: RowsMut) -> Result<(), Error> {
        for r in 0..acc.len() {
            for (i, a) in acc.row(r).iter_mut().enumerate() {
                if self.has("overwrites") {
                    *a = 0.0;
                }
                *a += weights
                    .row(r)
                    .iter()
                    .enumerate()
                    .map(|(t, w)| w * self.value(tile, first_slot + t, i))
                    .sum::<f32>();
            }
        }
        Ok(())
    }
}

fn report(defect: &str) -> Report {
    let config = format!("{{\"defect\":\"{defect}\"}}");
    let instance = Instance::create(kv_codec_root::<Suspect>(), &config, Arc::new(NoSink)).unwrap();
    let plugin = CodecPlugin::new(instance).unwrap();
    check(&plugin, &Plan { head_dims: vec![8, 64], ..Plan::default() })
}

#[test]
fn the_reference_codec_passes_without_an_error() {
    let report = check(&reference::plain().unwrap(), &Plan { head_dims: vec![1, 3, 64, 512], ..Plan::default() });
    assert!(report.failures().is_empty(), "{report}");
    let exact = report.cases.iter().filter(|c| c.outcome == Outcome::Passed { error: 0.0 }).count();
    assert_eq!(exact, 8, "{report}");
}

#[test]
fn a_right_codec_passes_every_case() {
    let report = report("");
    assert!(report.failures().is_empty(), "{report}");
    let passed = report.cases.iter().filter(|c| c.outcome == Outcome::Passed { error: 0.0 }).count();
    assert_eq!(passed, 4, "two sides of two head sizes: {report}");
}

#[test]
fn each_defect_is_found_and_named() {
    let defects = [
        ("any name", "was opened, expected an error"),
        ("plain error", "status 1, expected 3 (unsupported)"),
        ("no values", "none of the head sizes and options is supported"),
        ("too many bits", "`bits_per_value` is 40"),
        ("other layout", "opened again it has"),
        ("no zero", "a page of zeros does not come back as zeros"),
        ("lossy", "relative error of 1.000"),
        ("keeps garbage", "encodes otherwise into a tile with other bytes"),
        ("pieces", "pieces differs from one encoded at once"),
        ("touches earlier", "slots change when later ones are written again"),
        ("sub-range", "decode otherwise alone than within the page"),
        ("scales", "it is not orthonormal"),
        ("odd", "not a number"),
        ("scores", "`score` of slot"),
        ("overwrites", "`accumulate` of slots"),
    ];
    for (defect, expected) in defects {
        let report = report(defect);
        let found = report.failures().iter().any(|c| matches!(&c.outcome, Outcome::Failed(m) if m.contains(expected)));
        assert!(found, "{defect}: expected a failure with {expected:?} in\n{report}");
    }
}
