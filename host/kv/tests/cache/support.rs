//! The reference codec under several names, and small caches.

use std::sync::Arc;

use opencoti_compute::graph::KvGeometry;
use opencoti_kv::{
    BatchItem, Cache, CacheConfig, GroupConfig, KvError, Outputs, Planned, SeqId, StageConfig, StateConfig,
};
use opencoti_plugin_api::Error;
use opencoti_plugin_api::conformance::reference::PlainRows;
use opencoti_plugin_api::export::{About, Plugin, kv_codec_root};
use opencoti_plugin_api::host::{Codec, CodecPlugin, Host, Instance, NoSink};
use opencoti_plugin_api::kv_codec::{CodecName, Facts, KvCodec, KvCodecs, OpenParams, Rows, RowsMut, Side};

struct Plain;

struct PlainCodec {
    rows: PlainRows,
    stage_tokens: u32,
}

impl Plugin for Plain {
    const ABOUT: About = About {
        name: "plain",
        version: "1.2.3",
        license: "MIT",
        summary: "floats as they are",
        capabilities: "",
        config_schema: "",
    };

    fn create(_: Host, _: &serde_json::Value) -> Result<Self, Error> {
        Ok(Plain)
    }
}

impl KvCodecs for Plain {
    type Codec = PlainCodec;

    fn codecs(&self) -> &'static [CodecName] {
        &[
            CodecName { name: "f32", summary: "floats" },
            CodecName { name: "other", summary: "floats by another name" },
            CodecName { name: "staged", summary: "wants the newest tokens exact" },
        ]
    }

    fn open(&self, params: &OpenParams) -> Result<PlainCodec, Error> {
        let stage_tokens = if params.codec == "staged" { 128 } else { 0 };
        Ok(PlainCodec { rows: PlainRows::new(params.head_dim)?, stage_tokens })
    }
}

impl KvCodec for PlainCodec {
    fn facts(&self) -> Facts {
        Facts { stage_tokens: self.stage_tokens, ..self.rows.facts() }
    }

    fn append(&self, tile: &mut [u8], first_slot: usize, rows: Rows) -> Result<(), Error> {
        self.rows.append(tile, first_slot, rows)
    }

    fn decode_page(&self, tile: &[u8], first_slot: usize, rows: RowsMut) -> Result<(), Error> {
        self.rows.decode_page(tile, first_slot, rows)
    }
}

/// A codec of the test plugin, opened.
pub(crate) fn codec(name: &str, options: &str, side: Side, head_dim: usize) -> Codec {
    let instance = Instance::create(kv_codec_root::<Plain>(), "{}", Arc::new(NoSink)).unwrap();
    CodecPlugin::new(instance).unwrap().open(name, options, side, head_dim).unwrap()
}

/// A group of two KV heads of size 4.
pub(crate) fn group(name: &str, n_layers: usize, window: Option<usize>) -> GroupConfig {
    GroupConfig {
        name: name.to_owned(),
        geometry: KvGeometry { n_kv_heads: 2, k_head_dim: 4, v_head_dim: 4, window },
        n_layers,
        k: codec("f32", "{}", Side::K, 4),
        v: codec("f32", "{}", Side::V, 4),
        stage: None,
    }
}

/// The same with `tokens` exact tokens at its end and `sink` at its beginning, encoded as a whole where they are not.
pub(crate) fn staged_group(name: &str, window: Option<usize>, tokens: usize, sink: usize) -> GroupConfig {
    let stage = StageConfig { tokens, sink, k: codec("f32", "{}", Side::K, 4), v: codec("f32", "{}", Side::V, 4) };
    GroupConfig {
        k: codec("staged", "{}", Side::K, 4),
        v: codec("staged", "{}", Side::V, 4),
        stage: Some(stage),
        ..group(name, 1, window)
    }
}

/// Sizes for the given groups: room for 2048 tokens.
pub(crate) fn config(groups: Vec<GroupConfig>) -> CacheConfig {
    CacheConfig {
        groups,
        capacity_tokens: 2048,
        slots: 4,
        window_sequences: None,
        recent_sequences: 4,
        step_tokens: 512,
        rollback_tokens: 1,
        whole_texts: false,
        snapshots: 0,
        states: StateConfig::default(),
    }
}

/// A cache of one full group.
pub(crate) fn full_cache() -> Cache {
    Cache::new(config(vec![group("kv", 2, None)])).unwrap()
}

/// A cache of one full group in which every token of a sequence sees every other.
pub(crate) fn encoder_cache() -> Cache {
    Cache::new(CacheConfig { whole_texts: true, ..config(vec![group("kv", 2, None)]) }).unwrap()
}

/// A cache of a full group and one with a window.
pub(crate) fn swa_cache(window: usize) -> Cache {
    Cache::new(config(vec![group("kv", 1, None), group("swa", 2, Some(window))])).unwrap()
}

/// `n` tokens that count up from `first`.
pub(crate) fn tokens(first: u32, n: usize) -> Vec<u32> {
    (first..).take(n).collect()
}

/// Plans a step of several sequences.
pub(crate) fn plan(cache: &mut Cache, batch: &[(SeqId, &[u32])]) -> Result<Planned, KvError> {
    let batch: Vec<BatchItem> =
        batch.iter().map(|&(seq, tokens)| BatchItem { seq, tokens, outputs: Outputs::Last }).collect();
    let planned = cache.plan(&batch)?;
    cache.check().unwrap();
    planned.step.check(planned.step.groups.len()).unwrap();
    Ok(planned)
}

/// Appends tokens to one sequence in steps of at most 512.
pub(crate) fn feed(cache: &mut Cache, seq: SeqId, tokens: &[u32]) {
    for chunk in tokens.chunks(512) {
        let planned = plan(cache, &[(seq, chunk)]).unwrap();
        cache.commit(planned.id).unwrap();
        cache.check().unwrap();
    }
}

/// The plan of a step as text.
pub(crate) fn text(planned: &Planned) -> String {
    let groups = planned.step.groups.iter().enumerate();
    groups.map(|(i, plan)| format!("group {i}\n{plan}")).collect()
}
