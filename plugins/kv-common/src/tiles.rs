//! Scores and weighted sums over the rows of a tile, for any codec that can decode a row.
//!
//! A tile is read once for all query rows: a few tokens are decoded into a buffer of the first-level cache and multiplied
//! with every row there. Everything is f32 arithmetic, so that results equal decode-then-attend up to the order of sums.
//!
//! Vectors never pass through a closure (`map`, `from_fn`): a closure that is not inlined lacks the instruction set's
//! features and costs more than the arithmetic.

use std::mem::MaybeUninit;

use opencoti_plugin_api::Error;
use opencoti_plugin_api::kv_codec::{Rows, RowsMut};

use crate::isa::Isa;

/// Largest head size; bounds the kernels' buffers.
pub const MAX_HEAD_DIM: usize = 1024;

/// Tokens decoded at a time.
const TOKENS: usize = 8;
/// Tokens in the registers of [`dots`].
const QUAD: usize = 4;

/// Decoding of the rows of a tile.
pub trait DecodeRows {
    /// Values in a row; a multiple of 32 up to [`MAX_HEAD_DIM`].
    fn head_dim(&self) -> usize;

    /// Decodes the row in `slot` to `out`. Any bytes decode to some values.
    ///
    /// # Safety
    /// As [`Isa`]; `tile` is a whole tile and `out` a row.
    unsafe fn decode<I: Isa>(&self, tile: &[u8], slot: usize, out: &mut [f32]);
}

/// Decodes rows from `first` on.
///
/// # Safety
/// As [`Isa`].
#[inline(always)]
pub unsafe fn decode<I: Isa>(decoder: &impl DecodeRows, tile: &[u8], first: usize, mut rows: RowsMut) {
    for i in 0..rows.len() {
        // SAFETY: passed on.
        unsafe { decoder.decode::<I>(tile, first + i, rows.row(i)) }
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
///
/// # Safety
/// As [`Isa`].
#[inline(always)]
pub unsafe fn score<I: Isa>(decoder: &impl DecodeRows, q: &[f32], tile: &[u8], first: usize, mut scores: RowsMut) {
    let d = decoder.head_dim();
    let (n_rows, n_tokens) = (scores.len(), scores.width());
    let mut space = Decoded(MaybeUninit::uninit());
    let k = space.zeroed(d);
    for t in (0..n_tokens).step_by(TOKENS) {
        let n = TOKENS.min(n_tokens - t);
        for (i, k) in k.chunks_exact_mut(d).enumerate().take(n) {
            // SAFETY: passed on.
            unsafe { decoder.decode::<I>(tile, first + t + i, k) }
        }
        for (quad, k) in k.chunks_exact(QUAD * d).enumerate().take(n.div_ceil(QUAD)) {
            let at = t + quad * QUAD;
            let mut r = 0;
            while r < n_rows {
                // SAFETY: features by the caller.
                unsafe {
                    // Four rows are two pairs rather than three and one.
                    r += match n_rows - r {
                        1 => put_dots::<I, 1>(r, q, k, d, at, &mut scores),
                        2 | 4 => put_dots::<I, 2>(r, q, k, d, at, &mut scores),
                        _ => put_dots::<I, 3>(r, q, k, d, at, &mut scores),
                    };
                }
            }
        }
    }
}

/// Scores of rows `r .. r + R` and four keys, from slot `at` on; gives `R`.
#[inline(always)]
unsafe fn put_dots<I: Isa, const R: usize>(
    r: usize,
    q: &[f32],
    k: &[f32],
    d: usize,
    at: usize,
    scores: &mut RowsMut,
) -> usize {
    // SAFETY: features by the caller.
    let sums = unsafe { dots::<I, R>(&q[r * d..][..R * d], k, d) };
    for (i, sums) in sums.into_iter().enumerate() {
        for (to, sum) in scores.row(r + i)[at..].iter_mut().zip(sums) {
            *to = sum;
        }
    }
    R
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
///
/// # Safety
/// As [`Isa`].
#[inline(always)]
pub unsafe fn accumulate<I: Isa>(
    decoder: &impl DecodeRows,
    weights: Rows,
    tile: &[u8],
    first: usize,
    mut acc: RowsMut,
) {
    let (d, n_tokens) = (decoder.head_dim(), weights.width());
    let mut space = Decoded(MaybeUninit::uninit());
    let v = space.zeroed(d);
    for t in (0..n_tokens).step_by(TOKENS) {
        let n = TOKENS.min(n_tokens - t);
        for (i, v) in v.chunks_exact_mut(d).enumerate().take(n) {
            // SAFETY: passed on.
            unsafe { decoder.decode::<I>(tile, first + t + i, v) }
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

/// `acc += sum over t of w[t] * v[t]`, 32 values at a time, so that sums of several vectors run side by side.
#[inline(always)]
unsafe fn add_weighted<I: Isa>(w: &[f32; TOKENS], v: &[f32], acc: &mut [f32]) {
    const AT_ONCE: usize = 32;
    const MOST: usize = 4;
    let d = acc.len();
    let n = AT_ONCE / I::LANES;
    assert!(v.len() == TOKENS * d && d.is_multiple_of(AT_ONCE) && n <= MOST);
    // SAFETY: the assertion bounds every access; features by the caller.
    unsafe {
        for i in (0..d).step_by(AT_ONCE) {
            let to = acc.as_mut_ptr().add(i);
            let mut sums = [I::splat(0.0); MOST];
            for u in 0..n {
                sums[u] = I::load(to.add(u * I::LANES));
            }
            for t in 0..TOKENS {
                let w = I::splat(w[t]);
                for u in 0..n {
                    sums[u] = I::fma(w, I::load(v.as_ptr().add(t * d + i + u * I::LANES)), sums[u]);
                }
            }
            for u in 0..n {
                I::store(to.add(u * I::LANES), sums[u]);
            }
        }
    }
}

/// Prepared queries as f32.
///
/// # Errors
/// When the host does not align them to 64 bytes, as the ABI promises.
pub fn as_floats(prepared: &[u8]) -> Result<&[f32], Error> {
    // SAFETY: every bit pattern is an f32.
    match unsafe { prepared.align_to() } {
        ([], floats, []) => Ok(floats),
        _ => Err(Error::new("the space for prepared queries is not aligned to 64 bytes")),
    }
}

/// [`as_floats`] to write to.
///
/// # Errors
/// As [`as_floats`].
pub fn as_floats_mut(prepared: &mut [u8]) -> Result<&mut [f32], Error> {
    // SAFETY: every bit pattern is an f32, and every f32 is four bytes.
    match unsafe { prepared.align_to_mut() } {
        ([], floats, []) => Ok(floats),
        _ => Err(Error::new("the space for prepared queries is not aligned to 64 bytes")),
    }
}
