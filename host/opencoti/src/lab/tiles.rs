//! Rows through a codec and back.

use std::time::Instant;

use anyhow::{Context, Result};
use opencoti_plugin_api::PAGE_TOKENS;
use opencoti_plugin_api::host::Codec;
use opencoti_plugin_api::kv_codec::Side;

/// Alignment that codecs are promised, in bytes.
#[repr(align(64))]
#[derive(Clone, Copy)]
struct Line {
    _bytes: [u8; 64],
}

/// Rows of one head as a codec gives them back, in the plain basis.
pub struct Decoded {
    /// As many rows as were encoded.
    pub rows: Vec<f32>,
    /// Seconds for encoding.
    pub encode_seconds: f64,
    /// Seconds for decoding, transforms not included.
    pub decode_seconds: f64,
}

/// Encodes whole pages of rows and decodes them again.
///
/// # Errors
/// What the codec refuses.
pub fn round_trip(codec: &Codec, rows: &[f32]) -> Result<Decoded> {
    let dim = codec.head_dim();
    let page = PAGE_TOKENS * dim;
    let mut tile = vec![Line { _bytes: [0; 64] }; codec.layout().tile_bytes.div_ceil(64)];
    let tile = tile.as_mut_ptr().cast::<u8>();
    let mut out = vec![0.0; rows.len() / page * page];
    let (mut encode_seconds, mut decode_seconds) = (0.0, 0.0);
    for (rows, out) in rows.chunks_exact(page).zip(out.chunks_exact_mut(page)) {
        let start = Instant::now();
        // SAFETY: the tile has `tile_bytes` and is nobody else's; a page of rows lies `dim` apart.
        unsafe { codec.encode_page(tile, rows.as_ptr(), dim) }.with_context(|| failed(codec))?;
        encode_seconds += start.elapsed().as_secs_f64();
        let start = Instant::now();
        // SAFETY: as above; the whole tile was written.
        unsafe { codec.decode_page(tile, 0, PAGE_TOKENS, out.as_mut_ptr(), dim) }.with_context(|| failed(codec))?;
        decode_seconds += start.elapsed().as_secs_f64();
    }
    match codec.side() {
        Side::K => keys_to_plain(codec, &mut out)?,
        Side::V => {
            // SAFETY: `out` has that many rows, `dim` apart.
            let done = unsafe { codec.transform_output(out.as_mut_ptr(), out.len() / dim, dim) };
            done.with_context(|| failed(codec))?;
        }
    }
    Ok(Decoded { rows: out, encode_seconds, decode_seconds })
}

/// Keys in the codec's basis are read through transformed queries alone: what unit queries read are the plain values.
fn keys_to_plain(codec: &Codec, rows: &mut [f32]) -> Result<()> {
    if !codec.is_rotated() {
        return Ok(());
    }
    let dim = codec.head_dim();
    let mut units = vec![0.0; dim * dim];
    units.iter_mut().step_by(dim + 1).for_each(|one| *one = 1.0);
    // SAFETY: `units` has `dim` rows, `dim` apart.
    unsafe { codec.transform_query(units.as_mut_ptr(), dim, dim) }.with_context(|| failed(codec))?;
    let mut plain = vec![0.0; dim];
    for row in rows.chunks_exact_mut(dim) {
        for (value, unit) in plain.iter_mut().zip(units.chunks_exact(dim)) {
            *value = unit.iter().zip(&*row).map(|(a, b)| a * b).sum();
        }
        row.copy_from_slice(&plain);
    }
    Ok(())
}

fn failed(codec: &Codec) -> String {
    format!("codec `{}` for {} heads of {}", codec.name(), codec.side(), codec.head_dim())
}
