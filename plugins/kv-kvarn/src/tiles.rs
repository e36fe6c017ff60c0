//! Attention on encoded tiles.
//!
//! A query in the codec's basis meets a tile of keys as `score_t = other_t * (sum_r (q_r * scale_r) * code_rt + sum_r q_r *
//! zero_r)`, and weights meet a tile of values as `out_c += other_c * (sum_t (w_t * scale_t) * code_tc + sum_t w_t *
//! zero_t)`: both are a product of some rows of floats with a matrix of codes ([`Product`]), with factors for the rows before it
//! and for the columns after it. Codes are unpacked once for all query rows. Nothing here may pass through a closure that the
//! compiler does not inline: it would lack the instruction set's features.

use opencoti_plugin_api::PAGE_TOKENS;
use opencoti_plugin_api::kv_codec::{Rows, RowsMut};

use crate::balance::SIDE;
use crate::codec::{KvarnCodec, Parts, Record, half};
use crate::pack::unpack;

/// Most query rows in a product.
const GROUP: usize = 4;
/// Columns that a product covers at a time.
const COLUMNS: usize = 32;

/// Codes of a slice, a row of [`SIDE`] bytes each.
type Codes = [u8; SIDE * SIDE];

/// Rows of floats that meet the rows of a matrix of codes: `n` rows of `GROUP` are used.
type Weights = [[f32; SIDE]; GROUP];

/// A product on one instruction set.
///
/// # Safety
/// It may only run, inlined, inside a function that enables the features of the set.
pub(crate) unsafe trait Product {
    /// As [`unpack`].
    unsafe fn unpack<const BITS: usize>(row: &[u8], codes: &mut [u8]);

    /// `out[i][c] = sum over r of weights[i][r] * codes[r][c]` for `n` rows of weights, the codes' rows `rows`, and
    /// [`COLUMNS`] columns from `column` on.
    unsafe fn product(
        codes: &Codes,
        rows: std::ops::Range<usize>,
        column: usize,
        weights: &Weights,
        n: usize,
        out: &mut Weights,
    );
}

/// Plain Rust.
pub(crate) struct Portable;

// SAFETY: needs no features.
unsafe impl Product for Portable {
    #[inline(always)]
    unsafe fn unpack<const BITS: usize>(row: &[u8], codes: &mut [u8]) {
        unpack::<BITS>(row, codes);
    }

    #[inline(always)]
    unsafe fn product(
        codes: &Codes,
        rows: std::ops::Range<usize>,
        column: usize,
        weights: &Weights,
        n: usize,
        out: &mut Weights,
    ) {
        for (weights, out) in weights.iter().zip(out).take(n) {
            let mut sums = [0.0; COLUMNS];
            for r in rows.clone() {
                let codes = &codes[r * SIDE + column..][..COLUMNS];
                for (sum, &code) in sums.iter_mut().zip(codes) {
                    *sum += weights[r] * f32::from(code);
                }
            }
            out[column..][..COLUMNS].copy_from_slice(&sums);
        }
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) use x86::Avx2;

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;
    use std::ops::Range;

    use super::{COLUMNS, Codes, GROUP, Product, SIDE, Weights};
    use crate::pack::unpack;

    /// AVX2 and FMA.
    pub(crate) struct Avx2;

    /// Values in a vector.
    const LANES: usize = 8;

    // SAFETY: as the trait says, inlined into functions with the features only.
    unsafe impl Product for Avx2 {
        #[inline(always)]
        unsafe fn unpack<const BITS: usize>(row: &[u8], codes: &mut [u8]) {
            // SAFETY: features by the caller; the lengths are those of the row.
            unsafe {
                match (BITS, codes.len()) {
                    (8, _) => unpack::<BITS>(row, codes),
                    // Of nibbles the compiler makes good vectors itself, once it knows their number.
                    (4, 128) => unpack::<BITS>(&row[..64], &mut codes[..128]),
                    (_, 128) => unpack_fixed::<BITS, 128, 16>(row, codes),
                    (_, 64) => unpack_fixed::<BITS, 64, 8>(row, codes),
                    _ => unpack::<BITS>(row, codes),
                }
            }
        }

        #[inline(always)]
        unsafe fn product(
            codes: &Codes,
            rows: Range<usize>,
            column: usize,
            weights: &Weights,
            n: usize,
            out: &mut Weights,
        ) {
            // SAFETY: features by the caller. Four rows of sums take eight registers at half the columns.
            unsafe {
                match n {
                    1 => block::<1, 4>(codes, rows, column, weights, out),
                    2 => block::<2, 4>(codes, rows, column, weights, out),
                    3 => block::<3, 4>(codes, rows, column, weights, out),
                    _ => {
                        block::<4, 2>(codes, rows.clone(), column, weights, out);
                        block::<4, 2>(codes, rows, column + COLUMNS / 2, weights, out);
                    }
                }
            }
        }
    }

    /// Unpacks a row of `N` codes, `STEP` at a time: 16, or 8 where the planes of single bits are no longer.
    #[inline(always)]
    unsafe fn unpack_fixed<const BITS: usize, const N: usize, const STEP: usize>(row: &[u8], codes: &mut [u8]) {
        assert!(row.len() == N * BITS / 8 && codes.len() == N && N / 8 >= STEP);
        // SAFETY: the assertion bounds every access; features by the caller.
        unsafe {
            for column in (0..N).step_by(STEP) {
                let row = row.as_ptr();
                let bits = match BITS {
                    2 => field::<2, 0, N, STEP>(row, column),
                    4 => field::<4, 0, N, STEP>(row, column),
                    3 => _mm_or_si128(
                        field::<2, 0, N, STEP>(row, column),
                        field::<1, 2, N, STEP>(row.add(N / 4), column),
                    ),
                    5 => _mm_or_si128(
                        field::<4, 0, N, STEP>(row, column),
                        field::<1, 4, N, STEP>(row.add(N / 2), column),
                    ),
                    _ => _mm_or_si128(
                        field::<4, 0, N, STEP>(row, column),
                        field::<2, 4, N, STEP>(row.add(N / 2), column),
                    ),
                };
                match STEP {
                    16 => _mm_storeu_si128(codes.as_mut_ptr().add(column).cast(), bits),
                    _ => _mm_storel_epi64(codes.as_mut_ptr().add(column).cast(), bits),
                }
            }
        }
    }

    /// Bits `SHIFT .. SHIFT + WIDTH` of the codes of `STEP` columns, from their plane.
    #[inline(always)]
    unsafe fn field<const WIDTH: usize, const SHIFT: i32, const N: usize, const STEP: usize>(
        plane: *const u8,
        column: usize,
    ) -> __m128i {
        let bytes = N * WIDTH / 8;
        // SAFETY: `STEP` bytes of the plane, which is a multiple of them long; features by the caller.
        unsafe {
            let from = plane.add(column % bytes);
            let values = if STEP == 16 { _mm_loadu_si128(from.cast()) } else { _mm_loadl_epi64(from.cast()) };
            let by = _mm_cvtsi32_si128((column / bytes * WIDTH) as i32);
            let mask = _mm_set1_epi8(((1u16 << WIDTH) - 1) as i8);
            _mm_slli_epi16::<SHIFT>(_mm_and_si128(_mm_srl_epi16(values, by), mask))
        }
    }

    /// `N` rows of weights and `V` vectors of columns.
    #[inline(always)]
    unsafe fn block<const N: usize, const V: usize>(
        codes: &Codes,
        rows: Range<usize>,
        column: usize,
        weights: &Weights,
        out: &mut Weights,
    ) {
        assert!(N <= GROUP && rows.end <= SIDE && column + V * LANES <= SIDE);
        // SAFETY: the assertion bounds every access; features by the caller.
        unsafe {
            let mut sums = [[_mm256_setzero_ps(); V]; N];
            for r in rows {
                let row = codes.as_ptr().add(r * SIDE + column);
                let mut x = [_mm256_setzero_ps(); V];
                for v in 0..V {
                    let bytes = _mm_loadl_epi64(row.add(v * LANES).cast());
                    x[v] = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes));
                }
                for i in 0..N {
                    let weight = _mm256_broadcast_ss(&weights[i][r]);
                    for v in 0..V {
                        sums[i][v] = _mm256_fmadd_ps(weight, x[v], sums[i][v]);
                    }
                }
            }
            for i in 0..N {
                for v in 0..V {
                    _mm256_storeu_ps(out[i].as_mut_ptr().add(column + v * LANES), sums[i][v]);
                }
            }
        }
    }
}

/// Unpacks rows of a slice.
///
/// # Safety
/// As [`Product`].
#[inline(always)]
unsafe fn unpack_rows<P: Product, const BITS: usize>(
    record: &Record,
    parts: &Parts,
    rows: std::ops::Range<usize>,
    codes: &mut Codes,
) {
    for r in rows {
        let packed = &parts.codes[r * record.row_bytes..][..record.row_bytes];
        // SAFETY: features by the caller.
        unsafe { P::unpack::<BITS>(packed, &mut codes[r * SIDE..][..record.columns]) }
    }
}

#[inline(always)]
fn halves(axis: &[[u8; 2]]) -> [f32; SIDE] {
    let mut out = [0.0; SIDE];
    for (to, &bytes) in out.iter_mut().zip(axis) {
        *to = half(bytes);
    }
    out
}

/// `scores[i][t] = q_i . k_(first + t)`; `queries` are dense and in the codec's basis.
///
/// # Safety
/// As [`Product`].
#[inline(always)]
pub(crate) unsafe fn score<P: Product, const BITS: usize>(
    codec: &KvarnCodec,
    queries: &[f32],
    tile: &[u8],
    first: usize,
    mut scores: RowsMut,
) {
    let (n_rows, n_tokens) = (scores.len(), scores.width());
    let codes = &mut [0; SIDE * SIDE];
    for record in codec.records() {
        let parts = record.parts(tile);
        // SAFETY: features by the caller.
        unsafe { unpack_rows::<P, BITS>(&record, &parts, 0..record.rows, codes) };
        let (scale, zero, other) = (halves(parts.scale), halves(parts.zero), halves(parts.other));
        for start in (0..n_rows).step_by(GROUP) {
            let n = GROUP.min(n_rows - start);
            let mut weights: Weights = [[0.0; SIDE]; GROUP];
            let mut shift = [0.0; GROUP];
            for i in 0..n {
                let q = &queries[(start + i) * codec.head_dim + record.channel..][..record.rows];
                shift[i] = weigh(q, &scale, &zero, &mut weights[i]);
            }
            let mut out: Weights = [[0.0; SIDE]; GROUP];
            for column in (first / COLUMNS * COLUMNS..first + n_tokens).step_by(COLUMNS) {
                // SAFETY: features by the caller.
                unsafe { P::product(codes, 0..record.rows, column, &weights, n, &mut out) };
            }
            for i in 0..n {
                let sums = out[i][first..].iter().zip(&other[first..]);
                let scores = scores.row(start + i).iter_mut().zip(sums);
                match record.channel {
                    0 => scores.for_each(|(score, (sum, other))| *score = (sum + shift[i]) * other),
                    _ => scores.for_each(|(score, (sum, other))| *score += (sum + shift[i]) * other),
                }
            }
        }
    }
}

/// Takes the rows' scales into their weights; the sum of weights times zeros.
#[inline(always)]
fn weigh(x: &[f32], scale: &[f32], zero: &[f32], weights: &mut [f32]) -> f32 {
    const LANES: usize = 8;
    for ((to, x), scale) in weights.iter_mut().zip(x).zip(scale) {
        *to = x * scale;
    }
    let mut sums = [0.0; LANES];
    for (x, zero) in x.chunks(LANES).zip(zero.chunks(LANES)) {
        for ((sum, x), zero) in sums.iter_mut().zip(x).zip(zero) {
            *sum += x * zero;
        }
    }
    sums.iter().sum()
}

/// `acc_i += sum over t of weights[i][t] * v_(first + t)`, in the codec's basis.
///
/// # Safety
/// As [`Product`].
#[inline(always)]
pub(crate) unsafe fn accumulate<P: Product, const BITS: usize>(
    codec: &KvarnCodec,
    given: Rows,
    tile: &[u8],
    first: usize,
    mut acc: RowsMut,
) {
    let tokens = first..first + given.width();
    debug_assert!(tokens.end <= PAGE_TOKENS);
    let codes = &mut [0; SIDE * SIDE];
    for record in codec.records() {
        let parts = record.parts(tile);
        // SAFETY: features by the caller.
        unsafe { unpack_rows::<P, BITS>(&record, &parts, tokens.clone(), codes) };
        let (scale, zero, other) = (halves(parts.scale), halves(parts.zero), halves(parts.other));
        for start in (0..given.len()).step_by(GROUP) {
            let n = GROUP.min(given.len() - start);
            let mut weights: Weights = [[0.0; SIDE]; GROUP];
            let mut shift = [0.0; GROUP];
            for i in 0..n {
                let weights = &mut weights[i][first..];
                shift[i] = weigh(given.row(start + i), &scale[first..], &zero[first..], weights);
            }
            let mut out: Weights = [[0.0; SIDE]; GROUP];
            for column in (0..record.columns).step_by(COLUMNS) {
                // SAFETY: features by the caller.
                unsafe { P::product(codes, tokens.clone(), column, &weights, n, &mut out) };
            }
            for i in 0..n {
                let acc = &mut acc.row(start + i)[record.channel..][..record.columns];
                for ((acc, sum), other) in acc.iter_mut().zip(&out[i]).zip(&other) {
                    *acc += (sum + shift[i]) * other;
                }
            }
        }
    }
}
