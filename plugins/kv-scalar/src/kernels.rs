//! The kernels, once for every format and instruction set, and the table a codec picks at opening.
//!
//! A tile's codes are brought into registers and multiplied there with several query rows; how many is a matter of the
//! sixteen registers of AVX2. Vectors never pass through a closure (`map`, `from_fn`): a closure that is not inlined lacks
//! the instruction set's features and costs more than the arithmetic.

mod codes;
mod floats;

use opencoti_kv_common::isa::{Level, Portable};
use opencoti_plugin_api::PAGE_TOKENS;
use opencoti_plugin_api::kv_codec::{Rows, RowsMut};

use crate::formats::{BLOCK, Block, Codes, Fields, Floats, Format, Row};
use crate::vectors::Vectors;

/// Where the planes of a tile lie.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    /// Values in a row; a multiple of 32 up to [`opencoti_kv_common::tiles::MAX_HEAD_DIM`].
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

/// The functions of one format on one instruction set. Unsafe ones need that set at run time.
pub(crate) struct Kernels {
    /// Encodes a row into a slot.
    pub(crate) encode: fn(&Shape, &mut [u8], usize, &[f32]),
    /// Decodes slots from the given one.
    pub(crate) decode: unsafe fn(&Shape, &[u8], usize, RowsMut),
    /// Bytes of a prepared query; a multiple of 64.
    pub(crate) query_bytes: fn(&Shape) -> usize,
    /// Prepares a query.
    pub(crate) prepare: unsafe fn(&Shape, &[f32], &mut [u8]),
    /// `scores[r][t] = q_r . k_(first + t)` of prepared queries.
    pub(crate) score: unsafe fn(&Shape, &[u8], &[u8], usize, RowsMut),
    /// `acc_r += sum over t of weights[r][t] * v_(first + t)`.
    pub(crate) accumulate: unsafe fn(&Shape, Rows, &[u8], usize, RowsMut),
    /// Appends a row as ggml lays it out.
    pub(crate) ggml_row: fn(&Shape, &[u8], usize, &mut Vec<u8>),
}

/// A table of kernels of a module, each in a wrapper that enables the features of one instruction set.
macro_rules! table {
    ($module:ident, $kind:ident, $isa:ident $(, $features:literal)?) => {{
        $(#[target_feature(enable = $features)])?
        unsafe fn decode<F: $kind>(shape: &Shape, tile: &[u8], first: usize, rows: RowsMut) {
            // SAFETY: the features are those of the set.
            unsafe { $module::decode::<F, $isa>(shape, tile, first, rows) }
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn prepare<F: $kind>(shape: &Shape, row: &[f32], prepared: &mut [u8]) {
            // SAFETY: the features are those of the set.
            unsafe { $module::prepare::<$isa>(shape, row, prepared) }
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn score<F: $kind>(shape: &Shape, prepared: &[u8], tile: &[u8], first: usize, scores: RowsMut) {
            // SAFETY: the features are those of the set.
            unsafe { $module::score::<F, $isa>(shape, prepared, tile, first, scores) }
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn accumulate<F: $kind>(shape: &Shape, weights: Rows, tile: &[u8], first: usize, acc: RowsMut) {
            // SAFETY: the features are those of the set.
            unsafe { $module::accumulate::<F, $isa>(shape, weights, tile, first, acc) }
        }
        &Kernels {
            encode: encode::<F>,
            decode: decode::<F>,
            query_bytes: $module::query_bytes,
            prepare: prepare::<F>,
            score: score::<F>,
            accumulate: accumulate::<F>,
            ggml_row: ggml_row::<F>,
        }
    }};
}

/// The function that finds the table of a format of one kind.
macro_rules! tables {
    ($name:ident, $module:ident, $kind:ident) => {
        /// The kernels of a format. `level` must be one that the processor runs.
        pub(crate) fn $name<F: $kind>(level: Level) -> &'static Kernels {
            #[cfg(target_arch = "x86_64")]
            use opencoti_kv_common::isa::{Avx2, Avx512};
            match level {
                #[cfg(target_arch = "x86_64")]
                Level::Avx512 => table!($module, $kind, Avx512, "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"),
                #[cfg(target_arch = "x86_64")]
                Level::Avx2 => table!($module, $kind, Avx2, "avx2,fma,f16c"),
                _ => table!($module, $kind, Portable),
            }
        }
    };
}

impl Kernels {
    tables!(of_floats, floats, Floats);
    tables!(of_codes, codes, Codes);
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

/// Calls a kernel for as many of the rows `$row ..` of `$n` as it takes together, until none is left.
macro_rules! by_rows {
    ($n:expr, |$row:ident, $count:ident| $call:expr) => {{
        let mut $row = 0;
        while $row < $n {
            macro_rules! take {
                ($rows:literal) => {{
                    const $count: usize = $rows;
                    $call;
                    $row += $count;
                }};
            }
            match $n - $row {
                1 => take!(1),
                2 => take!(2),
                3 | 5 => take!(3),
                4 | 7 | 8 => take!(4),
                _ => take!(6),
            }
        }
    }};
}

use by_rows;

/// The sum of each vector's lanes, four vectors at a time.
#[inline(always)]
unsafe fn totals<I: Vectors, const R: usize, const T: usize>(sums: &[[I::V; T]; R]) -> [[f32; T]; R] {
    let mut out = [[0.0; T]; R];
    let count = R * T;
    for first in (0..count).step_by(4) {
        let (mut four, n) = ([sums[0][0]; 4], (count - first).min(4));
        for i in 0..n {
            four[i] = sums[(first + i) / T][(first + i) % T];
        }
        // SAFETY: features by the caller.
        let four = unsafe { I::sums(four) };
        for i in 0..n {
            out[(first + i) / T][(first + i) % T] = four[i];
        }
    }
    out
}
