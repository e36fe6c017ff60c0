//! The kernels of each format and instruction set, and the table a codec picks at opening.

use std::marker::PhantomData;

use opencoti_kv_common::isa::{Isa, Level, Portable};
use opencoti_kv_common::tiles::{self, DecodeRows};
use opencoti_plugin_api::PAGE_TOKENS;
use opencoti_plugin_api::kv_codec::{Rows, RowsMut};

use crate::formats::{BLOCK, Block, Fields, Format, Row};

/// Where the planes of a tile lie.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    /// Values in a row; a multiple of 32 up to [`tiles::MAX_HEAD_DIM`].
    pub(crate) head_dim: usize,
    /// Bytes of a tile.
    pub(crate) tile_bytes: usize,
}

impl Shape {
    pub(crate) fn of<F: Format>(head_dim: usize) -> Shape {
        let block_bytes = F::CODES + F::HIGH + F::MIN + F::SCALE;
        Shape { head_dim, tile_bytes: PAGE_TOKENS * head_dim / BLOCK * block_bytes }
    }

    /// Byte ranges of the fields of blocks `first .. first + n`, counted through the tile.
    #[inline(always)]
    fn fields<F: Format>(&self, first: usize, n: usize) -> Fields<std::ops::Range<usize>> {
        let tile_blocks = PAGE_TOKENS * self.head_dim / BLOCK;
        let field = |plane: usize, bytes: usize| {
            let start = tile_blocks * plane + first * bytes;
            start..start + n * bytes
        };
        Fields {
            codes: field(0, F::CODES),
            high: field(F::CODES, F::HIGH),
            min: field(F::CODES + F::HIGH, F::MIN),
            scale: field(F::CODES + F::HIGH + F::MIN, F::SCALE),
        }
    }

    #[inline(always)]
    pub(crate) fn row<'a, F: Format>(&self, tile: &'a [u8], slot: usize) -> Row<'a> {
        let blocks = self.head_dim / BLOCK;
        let at = self.fields::<F>(slot * blocks, blocks);
        Row { codes: &tile[at.codes], high: &tile[at.high], min: &tile[at.min], scale: &tile[at.scale] }
    }

    fn block<'a, F: Format>(&self, tile: &'a mut [u8], block: usize) -> Block<'a> {
        let at = self.fields::<F>(block, 1);
        let (codes, rest) = tile.split_at_mut(at.high.start - at.high.len() * block);
        let (high, rest) = rest.split_at_mut(at.min.start - at.min.len() * block - codes.len());
        let (min, scale) = rest.split_at_mut(at.scale.start - at.scale.len() * block - codes.len() - high.len());
        let part = |plane: &'a mut [u8], n: usize| &mut plane[block * n..][..n];
        Block {
            codes: part(codes, F::CODES),
            high: part(high, F::HIGH),
            min: part(min, F::MIN),
            scale: part(scale, F::SCALE),
        }
    }
}

/// The rows of a format's tiles.
struct RowsOf<'a, F>(&'a Shape, PhantomData<F>);

impl<F: Format> DecodeRows for RowsOf<'_, F> {
    #[inline(always)]
    fn head_dim(&self) -> usize {
        self.0.head_dim
    }

    #[inline(always)]
    unsafe fn decode<I: Isa>(&self, tile: &[u8], slot: usize, out: &mut [f32]) {
        // SAFETY: the row has the fields of all its blocks.
        unsafe { F::decode::<I>(self.0.row::<F>(tile, slot), out) }
    }
}

/// The functions of one format on one instruction set. All but `encode` need that set at run time.
pub(crate) struct Kernels {
    pub(crate) encode: fn(&Shape, &mut [u8], usize, &[f32]),
    pub(crate) decode: unsafe fn(&Shape, &[u8], usize, RowsMut),
    pub(crate) score: unsafe fn(&Shape, &[f32], &[u8], usize, RowsMut),
    pub(crate) accumulate: unsafe fn(&Shape, Rows, &[u8], usize, RowsMut),
    pub(crate) ggml_row: fn(&Shape, &[u8], usize, &mut Vec<u8>),
}

/// Wrappers of the generic kernels that enable one set's features.
macro_rules! on {
    ($isa:ident $(, $features:literal)?) => {{
        $(#[target_feature(enable = $features)])?
        unsafe fn on_decode<F: Format>(shape: &Shape, tile: &[u8], first: usize, rows: RowsMut) {
            // SAFETY: the features are those of the set.
            unsafe { tiles::decode::<$isa>(&RowsOf::<F>(shape, PhantomData), tile, first, rows) }
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn on_score<F: Format>(shape: &Shape, q: &[f32], tile: &[u8], first: usize, scores: RowsMut) {
            // SAFETY: the features are those of the set.
            unsafe { tiles::score::<$isa>(&RowsOf::<F>(shape, PhantomData), q, tile, first, scores) }
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn on_accumulate<F: Format>(shape: &Shape, weights: Rows, tile: &[u8], first: usize, acc: RowsMut) {
            // SAFETY: the features are those of the set.
            unsafe { tiles::accumulate::<$isa>(&RowsOf::<F>(shape, PhantomData), weights, tile, first, acc) }
        }
        &Kernels {
            encode: encode::<F>,
            decode: on_decode::<F>,
            score: on_score::<F>,
            accumulate: on_accumulate::<F>,
            ggml_row: ggml_row::<F>,
        }
    }};
}

impl Kernels {
    /// The kernels of a format. `level` must be one that the processor runs.
    pub(crate) fn of<F: Format>(level: Level) -> &'static Kernels {
        #[cfg(target_arch = "x86_64")]
        use opencoti_kv_common::isa::{Avx2, Avx512};
        match level {
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => on!(Avx512, "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => on!(Avx2, "avx2,fma,f16c"),
            _ => on!(Portable),
        }
    }
}

fn encode<F: Format>(shape: &Shape, tile: &mut [u8], slot: usize, row: &[f32]) {
    let first = slot * shape.head_dim / BLOCK;
    for (b, x) in row.as_chunks::<BLOCK>().0.iter().enumerate() {
        F::encode(x, shape.block::<F>(tile, first + b));
    }
}

/// Appends the blocks of a row as ggml stores them: scale, minimum, high bits, codes.
fn ggml_row<F: Format>(shape: &Shape, tile: &[u8], slot: usize, out: &mut Vec<u8>) {
    let row = shape.row::<F>(tile, slot);
    for b in 0..shape.head_dim / BLOCK {
        for (field, n) in [(row.scale, F::SCALE), (row.min, F::MIN), (row.high, F::HIGH), (row.codes, F::CODES)] {
            out.extend_from_slice(&field[b * n..][..n]);
        }
    }
}
