//! The reference codec, which has no kernels of its own and goes through the host's; it also counts, and panics when asked to.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use opencoti_plugin_api::Error;
use opencoti_plugin_api::conformance::reference::PlainRows;
use opencoti_plugin_api::export::{About, Plugin, kv_codec_root};
use opencoti_plugin_api::host::{CodecPlugin, Host, Instance, NoSink};
use opencoti_plugin_api::kv_codec::{CodecName, Facts, KvCodec, KvCodecs, OpenParams, Rows, RowsMut};

/// Tiles of `counted` that were decoded, by any test.
pub(crate) static DECODED: AtomicUsize = AtomicUsize::new(0);

pub(crate) struct Plain;

pub(crate) struct PlainCodec {
    rows: PlainRows,
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
        Ok(PlainCodec { rows: PlainRows::new(params.head_dim)?, counted: params.codec == "counted", panics })
    }
}

impl KvCodec for PlainCodec {
    fn facts(&self) -> Facts {
        self.rows.facts()
    }

    fn append(&self, tile: &mut [u8], first_slot: usize, rows: Rows) -> Result<(), Error> {
        assert_ne!(self.panics, Some("append"), "asked to");
        self.rows.append(tile, first_slot, rows)
    }

    fn decode_page(&self, tile: &[u8], first_slot: usize, rows: RowsMut) -> Result<(), Error> {
        assert_ne!(self.panics, Some("decode"), "asked to");
        if self.counted {
            DECODED.fetch_add(1, Ordering::SeqCst);
        }
        self.rows.decode_page(tile, first_slot, rows)
    }
}
