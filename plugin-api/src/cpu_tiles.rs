//! Extension `opencoti.codec.cpu-tiles/1`: a codec's own CPU kernels.
//!
//! Without it the host decodes a tile into scratch and goes on with its generic kernels. With it the codec scores and
//! accumulates on the encoded bytes. Query rows are those of all heads that share a KV head, of as many tokens as the
//! plan groups, so one pass over a tile serves them all.

use core::ffi::c_void;

use opencoti_plugin_api_derive::AbiLayout;

use crate::error::{Error, Status};
use crate::kv_codec::{KvCodec, Rows, RowsMut};
use crate::text::TextBuf;

/// Id of this extension.
pub const CPU_TILES_ID: &str = "opencoti.codec.cpu-tiles/1";

/// Functions of the extension; `codec` is an opened codec. Frozen: a change is a new id.
#[repr(C)]
#[derive(Clone, Copy, AbiLayout)]
pub struct CpuTilesVtbl {
    /// Bytes of this struct.
    pub size: usize,
    /// `[any-thread]` Bytes of one prepared query row; a multiple of 64, the same for the life of the codec. Keys only.
    pub query_bytes: unsafe extern "C" fn(codec: *mut c_void) -> usize,
    /// `[worker, re-entrant]` Prepares `n` query rows (scaled and at their rope position, in the plain basis) for
    /// `score`. `prepared` is 64-byte aligned and holds `n * query_bytes` bytes. Keys only.
    pub prepare_query: unsafe extern "C" fn(
        codec: *mut c_void,
        rows: *const f32,
        n: u32,
        stride: usize,
        prepared: *mut u8,
        error: *mut TextBuf,
    ) -> Status,
    /// `[worker, re-entrant]` `scores[r * scores_stride + t] = q_r . k_(first_slot + t)` for `n_tokens` slots. Keys only.
    pub score: unsafe extern "C" fn(
        codec: *mut c_void,
        prepared: *const u8,
        n_rows: u32,
        tile: *const u8,
        first_slot: u32,
        n_tokens: u32,
        scores: *mut f32,
        scores_stride: usize,
        error: *mut TextBuf,
    ) -> Status,
    /// `[worker, re-entrant]` `acc_r += sum over t of weights[r * weights_stride + t] * v_(first_slot + t)`, in the
    /// codec's domain; the host calls `transform_output` once at the end. Values only.
    pub accumulate: unsafe extern "C" fn(
        codec: *mut c_void,
        weights: *const f32,
        weights_stride: usize,
        n_rows: u32,
        tile: *const u8,
        first_slot: u32,
        n_tokens: u32,
        acc: *mut f32,
        acc_stride: usize,
        error: *mut TextBuf,
    ) -> Status,
}

/// The table of a codec type; made by [`CpuTilesVtbl::of`], so that it can't be of another type.
pub struct CpuTilesOf<C: ?Sized> {
    pub(crate) table: &'static CpuTilesVtbl,
    pub(crate) query_bytes: fn(&C) -> usize,
}

/// The extension, as an author writes it.
pub trait CpuTiles: KvCodec {
    /// Bytes of one prepared query row; a multiple of 64. Asked once, when the codec is opened for keys.
    fn query_bytes(&self) -> usize;

    /// Prepares query rows for [`CpuTiles::score`]; `prepared` is 64-byte aligned.
    fn prepare_query(&self, rows: Rows, prepared: &mut [u8]) -> Result<(), Error>;

    /// Scores `scores.width` slots from `first_slot` for each prepared row.
    fn score(&self, prepared: &[u8], tile: &[u8], first_slot: usize, scores: ScoresMut) -> Result<(), Error>;

    /// Adds weighted values of `weights.width` slots from `first_slot`.
    fn accumulate(&self, weights: Scores, tile: &[u8], first_slot: usize, acc: RowsMut) -> Result<(), Error>;
}

/// Scores of some rows over some slots; the width of a row is the number of slots.
pub type Scores<'a> = Rows<'a>;
/// [`Scores`] to write to.
pub type ScoresMut<'a> = RowsMut<'a>;
