//! A codec plugin without kernels of its own, to go through the host's, and one that panics.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use opencoti_plugin_api::export::{About, Plugin, kv_codec_root};
use opencoti_plugin_api::host::{CodecPlugin, Host, Instance, NoSink};
use opencoti_plugin_api::kv_codec::{CodecName, Facts, KvCodec, KvCodecs, OpenParams, Rows, RowsMut};
use opencoti_plugin_api::{Error, PAGE_TOKENS};

/// Tiles of `counted` that were decoded, by any test.
pub(crate) static DECODED: AtomicUsize = AtomicUsize::new(0);

pub(crate) struct Plain;

pub(crate) struct PlainCodec {
    head_dim: usize,
    counted: bool,
    panics: Option<&'static str>,
}

pub(crate) fn plugin() -> CodecPlugin {
    CodecPlugin::new(Instance::create(kv_codec_root::<Plain>(), "{}", Arc::new(NoSink)).unwrap()).unwrap()
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
        let panics = match params.codec.as_str() {
            "panics-in-append" => Some("append"),
            "panics-in-decode" => Some("decode"),
            _ => None,
        };
        Ok(PlainCodec { head_dim: params.head_dim, counted: params.codec == "counted", panics })
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
        assert_ne!(self.panics, Some("append"), "asked to");
        for (slot, row) in (first_slot..).zip(rows.iter()) {
            let to = &mut tile[slot * self.head_dim * 4..][..self.head_dim * 4];
            to.chunks_exact_mut(4).zip(row).for_each(|(to, v)| to.copy_from_slice(&v.to_le_bytes()));
        }
        Ok(())
    }

    fn decode_page(&self, tile: &[u8], first_slot: usize, mut rows: RowsMut) -> Result<(), Error> {
        assert_ne!(self.panics, Some("decode"), "asked to");
        if self.counted {
            DECODED.fetch_add(1, Ordering::SeqCst);
        }
        for i in 0..rows.len() {
            let from = &tile[(first_slot + i) * self.head_dim * 4..][..self.head_dim * 4];
            for (to, v) in rows.row(i).iter_mut().zip(from.as_chunks().0) {
                *to = f32::from_le_bytes(*v);
            }
        }
        Ok(())
    }
}
