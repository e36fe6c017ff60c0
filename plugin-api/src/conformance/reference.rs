//! The reference codec: f32 rows, one after the other, as they are.
//!
//! It is what the host's own tests store keys and values in, so that what is left of a difference is arithmetic; authors may
//! compare with it, or wrap [`PlainRows`] to build on.

use std::sync::Arc;

use crate::PAGE_TOKENS;
use crate::error::Error;
use crate::export::{About, Plugin, kv_codec_root};
use crate::host::{CodecPlugin, Host, Instance, NoSink};
use crate::kv_codec::{CodecName, Facts, KvCodec, KvCodecs, OpenParams, Rows, RowsMut};

/// Bytes of a value.
const BYTES: usize = size_of::<f32>();
/// Longest row: what keeps a tile within reason.
const MAX_HEAD_DIM: usize = 1 << 16;

/// The plugin `plain`, with the one codec `f32`. It has no kernels of its own, so the host's are used.
pub struct Plain;

/// The plugin [`Plain`], loaded in this process.
///
/// # Errors
/// The host can't load it; only a mistake in this crate can be the cause.
pub fn plain() -> Result<CodecPlugin, Error> {
    CodecPlugin::new(Instance::create(kv_codec_root::<Plain>(), "{}", Arc::new(NoSink))?)
}

impl Plugin for Plain {
    const ABOUT: About = About {
        name: "plain",
        version: "1.0.0",
        license: env!("CARGO_PKG_LICENSE"),
        summary: "rows as they are",
        capabilities: "",
        config_schema: "",
    };

    fn create(_: Host, _: &serde_json::Value) -> Result<Self, Error> {
        Ok(Plain)
    }
}

impl KvCodecs for Plain {
    type Codec = PlainRows;

    fn codecs(&self) -> &'static [CodecName] {
        &[CodecName { name: "f32", summary: "rows as they are" }]
    }

    fn open(&self, params: &OpenParams) -> Result<PlainRows, Error> {
        if params.codec != "f32" {
            return Err(Error::unsupported(format!("plain has no codec `{}`; it has f32", params.codec)));
        }
        if params.options.as_object().is_none_or(|o| !o.is_empty()) {
            return Err(Error::unsupported(format!("codec options are {}, expected none", params.options)));
        }
        PlainRows::new(params.head_dim)
    }
}

/// The codec: a tile is 128 rows of f32, little-endian.
#[derive(Clone, Copy, Debug)]
pub struct PlainRows {
    head_dim: usize,
}

impl PlainRows {
    /// For rows of `head_dim` values.
    ///
    /// # Errors
    /// Rows of nothing, or longer than any model has.
    pub fn new(head_dim: usize) -> Result<PlainRows, Error> {
        match head_dim {
            1..=MAX_HEAD_DIM => Ok(PlainRows { head_dim }),
            _ => Err(Error::unsupported(format!("head size {head_dim} is beyond 1..={MAX_HEAD_DIM}"))),
        }
    }
}

impl KvCodec for PlainRows {
    fn facts(&self) -> Facts {
        Facts {
            head_dim: self.head_dim,
            tile_bytes: PAGE_TOKENS * self.head_dim * BYTES,
            bits_per_value: 32.0,
            rotated: false,
            stage_tokens: 0,
        }
    }

    fn append(&self, tile: &mut [u8], first_slot: usize, rows: Rows) -> Result<(), Error> {
        let slots = tile.chunks_exact_mut(self.head_dim * BYTES).skip(first_slot);
        for (slot, row) in slots.zip(rows.iter()) {
            slot.as_chunks_mut().0.iter_mut().zip(row).for_each(|(bytes, x)| *bytes = x.to_le_bytes());
        }
        Ok(())
    }

    fn decode_page(&self, tile: &[u8], first_slot: usize, mut rows: RowsMut) -> Result<(), Error> {
        let slots = tile.chunks_exact(self.head_dim * BYTES).skip(first_slot);
        for (i, slot) in (0..rows.len()).zip(slots) {
            rows.row(i).iter_mut().zip(slot.as_chunks().0).for_each(|(x, bytes)| *x = f32::from_le_bytes(*bytes));
        }
        Ok(())
    }
}
