//! The kernels, once for every format and instruction set, and the table a codec picks at opening.
//!
//! Vectors never pass through a closure (`map`, `from_fn`): a closure that is not inlined lacks the instruction set's
//! features and costs more than the arithmetic.

use std::mem::MaybeUninit;

use opencoti_plugin_api::PAGE_TOKENS;
use opencoti_plugin_api::kv_codec::{Rows, RowsMut};

use crate::codec::MAX_HEAD_DIM;
use crate::formats::{BLOCK, Block, Fields, Format, Row};
use crate::isa::{Isa, Level, Portable};

/// Tokens decoded at a time.
const TOKENS: usize = 8;
/// Tokens in the registers of [`dots`].
const QUAD: usize = 4;

/// Where the planes of a tile lie.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    /// Values in a row; a multiple of 32 up to [`MAX_HEAD_DIM`].
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
            unsafe { decode::<F, $isa>(shape, tile, first, rows) }
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn on_score<F: Format>(shape: &Shape, q: &[f32], tile: &[u8], first: usize, scores: RowsMut) {
            // SAFETY: the features are those of the set.
            unsafe { score::<F, $isa>(shape, q, tile, first, scores) }
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn on_accumulate<F: Format>(shape: &Shape, weights: Rows, tile: &[u8], first: usize, acc: RowsMut) {
            // SAFETY: the features are those of the set.
            unsafe { accumulate::<F, $isa>(shape, weights, tile, first, acc) }
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
        use crate::isa::{Avx2, Avx512};
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

#[inline(always)]
unsafe fn decode<F: Format, I: Isa>(shape: &Shape, tile: &[u8], first: usize, mut rows: RowsMut) {
    for i in 0..rows.len() {
        // SAFETY: the row has the fields of all its blocks.
        unsafe { F::decode::<I>(shape.row::<F>(tile, first + i), rows.row(i)) }
    }
}

/// Decoded rows of [`TOKENS`] tokens, in the first-level cache.
struct Decoded(MaybeUninit<[f32; TOKENS * MAX_HEAD_DIM]>);

impl Decoded {
    /// `TOKENS * head_dim` zeros.
    #[inline(always)]
    fn zeroed(&mut self, head_dim: usize) -> &mut [f32] {
        assert!(head_dim <= MAX_HEAD_DIM);
        let data = self.0.as_mut_ptr().cast::<f32>();
        // SAFETY: within the array by the assertion, and zeroed before the slice is made.
        unsafe {
            data.write_bytes(0, TOKENS * head_dim);
            std::slice::from_raw_parts_mut(data, TOKENS * head_dim)
        }
    }
}

/// `scores[r][t] = q_r . k_(first + t)`; `q` is dense.
#[inline(always)]
unsafe fn score<F: Format, I: Isa>(shape: &Shape, q: &[f32], tile: &[u8], first: usize, mut scores: RowsMut) {
    let d = shape.head_dim;
    let (n_rows, n_tokens) = (scores.len(), scores.width());
    let mut space = Decoded(MaybeUninit::uninit());
    let k = space.zeroed(d);
    for t in (0..n_tokens).step_by(TOKENS) {
        let n = TOKENS.min(n_tokens - t);
        for (i, k) in k.chunks_exact_mut(d).enumerate().take(n) {
            // SAFETY: the row has the fields of all its blocks.
            unsafe { F::decode::<I>(shape.row::<F>(tile, first + t + i), k) }
        }
        for (quad, k) in k.chunks_exact(QUAD * d).enumerate().take(n.div_ceil(QUAD)) {
            let at = t + quad * QUAD;
            let mut r = 0;
            while r + 2 <= n_rows {
                // SAFETY: features by the caller.
                let [a, b] = unsafe { dots::<I, 2>(&q[r * d..][..2 * d], k, d) };
                put(scores.row(r), at, a);
                put(scores.row(r + 1), at, b);
                r += 2;
            }
            if r < n_rows {
                // SAFETY: features by the caller.
                let [a] = unsafe { dots::<I, 1>(&q[r * d..][..d], k, d) };
                put(scores.row(r), at, a);
            }
        }
    }
}

#[inline(always)]
fn put(row: &mut [f32], at: usize, sums: [f32; QUAD]) {
    for (to, sum) in row[at..].iter_mut().zip(sums) {
        *to = sum;
    }
}

/// Products of `R` rows of `q` with four rows of `k`, each `d` values long.
#[inline(always)]
unsafe fn dots<I: Isa, const R: usize>(q: &[f32], k: &[f32], d: usize) -> [[f32; QUAD]; R] {
    assert!(q.len() == R * d && k.len() == QUAD * d && d.is_multiple_of(I::LANES));
    // SAFETY: the assertion bounds every access; features by the caller.
    unsafe {
        let mut sums = [[I::splat(0.0); QUAD]; R];
        for i in (0..d).step_by(I::LANES) {
            let mut rows = [I::splat(0.0); R];
            for r in 0..R {
                rows[r] = I::load(q.as_ptr().add(r * d + i));
            }
            for t in 0..QUAD {
                let k = I::load(k.as_ptr().add(t * d + i));
                for r in 0..R {
                    sums[r][t] = I::fma(rows[r], k, sums[r][t]);
                }
            }
        }
        let mut out = [[0.0; QUAD]; R];
        for r in 0..R {
            out[r] = I::sums(sums[r]);
        }
        out
    }
}

/// `acc_r += sum over t of weights[r][t] * v_(first + t)`.
#[inline(always)]
unsafe fn accumulate<F: Format, I: Isa>(shape: &Shape, weights: Rows, tile: &[u8], first: usize, mut acc: RowsMut) {
    let (d, n_tokens) = (shape.head_dim, weights.width());
    let mut space = Decoded(MaybeUninit::uninit());
    let v = space.zeroed(d);
    for t in (0..n_tokens).step_by(TOKENS) {
        let n = TOKENS.min(n_tokens - t);
        for (i, v) in v.chunks_exact_mut(d).enumerate().take(n) {
            // SAFETY: the row has the fields of all its blocks.
            unsafe { F::decode::<I>(shape.row::<F>(tile, first + t + i), v) }
        }
        // Rows of an earlier round may hold infinities, which a weight of zero would turn into NaN.
        v[n * d..].fill(0.0);
        for r in 0..weights.len() {
            let mut w = [0.0; TOKENS];
            w[..n].copy_from_slice(&weights.row(r)[t..][..n]);
            // SAFETY: features by the caller.
            unsafe { add_weighted::<I>(&w, v, acc.row(r)) }
        }
    }
}

/// `acc += sum over t of w[t] * v[t]`.
#[inline(always)]
unsafe fn add_weighted<I: Isa>(w: &[f32; TOKENS], v: &[f32], acc: &mut [f32]) {
    let d = acc.len();
    assert!(v.len() == TOKENS * d && d.is_multiple_of(I::LANES));
    // SAFETY: the assertion bounds every access; features by the caller.
    unsafe {
        let mut lanes = [I::splat(0.0); TOKENS];
        for t in 0..TOKENS {
            lanes[t] = I::splat(w[t]);
        }
        for i in (0..d).step_by(I::LANES) {
            let to = acc.as_mut_ptr().add(i);
            let mut sum = I::load(to);
            for t in 0..TOKENS {
                sum = I::fma(lanes[t], I::load(v.as_ptr().add(t * d + i)), sum);
            }
            I::store(to, sum);
        }
    }
}
