//! Running a model as the engine does: the CPU executor over the paged cache, with keys and values kept as plain f32.

use std::sync::Arc;

use opencoti_compute::cpu::attention::Attention;
use opencoti_compute::cpu::executor::{Config, Executor};
use opencoti_kv::{BatchItem, Cache, CacheConfig, GroupConfig, Outputs, SeqId};
use opencoti_model::Model;
use opencoti_plugin_api::export::{About, Plugin, kv_codec_root};
use opencoti_plugin_api::host::{Codec, CodecPlugin, Host, Instance, NoSink};
use opencoti_plugin_api::kv_codec::{CodecName, Facts, KvCodec, KvCodecs, OpenParams, Rows, RowsMut, Side};
use opencoti_plugin_api::{Error, PAGE_TOKENS};

/// A model with its cache.
pub(crate) struct Runner {
    executor: Executor,
    cache: Cache,
}

/// Most rows of a step.
const MAX_ROWS: usize = 128;

impl Runner {
    /// Room for four sequences.
    pub(crate) fn new(model: &Model, threads: usize) -> Runner {
        let config = Config { threads, max_rows: MAX_ROWS, max_outputs: MAX_ROWS };
        let executor =
            Executor::new(model.graph.clone(), model.weights.clone(), Box::new(Attention::new(&model.graph)), config)
                .expect("an executor");
        let group = |group: opencoti_compute::graph::CacheGroup| GroupConfig {
            name: "kv".to_owned(),
            k: codec(Side::K, group.geometry.k_head_dim),
            v: codec(Side::V, group.geometry.v_head_dim),
            geometry: group.geometry,
            n_layers: group.layers.len(),
        };
        let cache = Cache::new(CacheConfig {
            groups: model.graph.cache_groups().into_iter().map(group).collect(),
            capacity_tokens: 1024,
            slots: 4,
            recent_sequences: 0,
            step_tokens: MAX_ROWS,
            rollback_tokens: 64,
        });
        Runner { executor, cache: cache.expect("a cache") }
    }

    /// A new sequence.
    pub(crate) fn create(&mut self) -> SeqId {
        self.cache.create()
    }

    /// Cuts a sequence to its first `n` tokens.
    pub(crate) fn truncate(&mut self, seq: SeqId, n: usize) {
        assert_eq!(self.cache.truncate(seq, n).expect("known"), n);
    }

    /// One step: each sequence goes on with its tokens. Logits of all rows of each.
    pub(crate) fn step(&mut self, batch: &[(SeqId, &[u32])]) -> Vec<Vec<f32>> {
        self.step_for(batch, Outputs::All)
    }

    /// The same for the outputs that are wanted of each.
    pub(crate) fn step_for(&mut self, batch: &[(SeqId, &[u32])], outputs: Outputs) -> Vec<Vec<f32>> {
        let items: Vec<_> = batch.iter().map(|&(seq, tokens)| BatchItem { seq, tokens, outputs }).collect();
        let planned = self.cache.plan(&items).expect("a plan");
        let results = self.executor.run(&planned.step).expect("runs");
        let mut next = 0..results.rows();
        let count = |rows: &std::ops::Range<u32>| match outputs {
            Outputs::None => 0,
            Outputs::Last => 1,
            Outputs::All => rows.len(),
        };
        let logits = planned.rows.iter().map(|rows| {
            let of_item = next.by_ref().take(count(rows));
            of_item.flat_map(|i| results.logits(i).to_vec()).collect()
        });
        let logits = logits.collect();
        self.cache.commit(planned.id).expect("ends");
        logits
    }
}

/// Keys and values as they are, so that what is left of a difference is arithmetic.
struct Plain;

struct PlainCodec {
    head_dim: usize,
}

impl Plugin for Plain {
    const ABOUT: About = About {
        name: "plain",
        version: "1.0.0",
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
        &[CodecName { name: "f32", summary: "floats" }]
    }

    fn open(&self, params: &OpenParams) -> Result<PlainCodec, Error> {
        Ok(PlainCodec { head_dim: params.head_dim })
    }
}

impl KvCodec for PlainCodec {
    fn facts(&self) -> Facts {
        Facts {
            head_dim: self.head_dim,
            tile_bytes: PAGE_TOKENS * self.head_dim * 4,
            bits_per_value: 32.0,
            rotated: false,
            stage_tokens: 0,
        }
    }

    fn append(&self, tile: &mut [u8], first_slot: usize, rows: Rows) -> Result<(), Error> {
        let slots = tile.chunks_exact_mut(self.head_dim * 4).skip(first_slot);
        for (slot, row) in slots.zip(rows.iter()) {
            for (bytes, value) in slot.chunks_exact_mut(4).zip(row) {
                bytes.copy_from_slice(&value.to_le_bytes());
            }
        }
        Ok(())
    }

    fn decode_page(&self, tile: &[u8], first_slot: usize, mut rows: RowsMut) -> Result<(), Error> {
        let slots = tile.chunks_exact(self.head_dim * 4).skip(first_slot);
        for (i, slot) in (0..rows.len()).zip(slots) {
            for (value, bytes) in rows.row(i).iter_mut().zip(slot.chunks_exact(4)) {
                *value = f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
            }
        }
        Ok(())
    }
}

fn codec(side: Side, head_dim: usize) -> Codec {
    let instance = Instance::create(kv_codec_root::<Plain>(), "{}", Arc::new(NoSink)).expect("a plugin");
    CodecPlugin::new(instance).expect("codecs").open("f32", "{}", side, head_dim).expect("opens")
}
