//! Kernels of formats of integer codes: products in 16-bit integers, summed up in 32 bits.
//!
//! A query is rounded to 16 bits by the largest of its values, and so are the weights of a tile, times the scales of one
//! block each, by the largest of these. The error is 2^-16 of that largest value, a hundredth of what the finest of these
//! formats leaves in keys and values.

use std::mem::MaybeUninit;

use opencoti_kv_common::tiles::MAX_HEAD_DIM;
use opencoti_plugin_api::PAGE_TOKENS;
use opencoti_plugin_api::kv_codec::{Rows, RowsMut};

use super::{Shape, by_rows, totals};
use crate::formats::{BLOCK, Codes};
use crate::vectors::Vectors;

/// Largest rounded value.
const MOST: f32 = 32767.0;
/// Most rows that a kernel takes together.
const ROWS: usize = 6;
/// Most blocks in a tile.
const BLOCKS: usize = PAGE_TOKENS * MAX_HEAD_DIM / BLOCK;

/// A prepared query: 16-bit values, the factor that makes them f32 again, and the sum of each block.
pub(super) fn query_bytes(shape: &Shape) -> usize {
    let sums = shape.head_dim / BLOCK;
    (shape.head_dim * size_of::<i16>() + (1 + sums) * size_of::<f32>()).next_multiple_of(64)
}

/// The factor that makes rounded values f32 again, from the largest magnitude; NaN if some value is not finite.
#[inline(always)]
fn step(values: &[f32]) -> f32 {
    let (chunks, rest) = values.as_chunks::<8>();
    let (mut largest, mut spoilt) = ([0.0f32; 8], [0.0f32; 8]);
    for chunk in chunks {
        for i in 0..8 {
            largest[i] = if chunk[i].abs() > largest[i] { chunk[i].abs() } else { largest[i] };
            spoilt[i] += chunk[i] * 0.0;
        }
    }
    let largest = largest.iter().chain(rest).fold(0.0f32, |m, v| m.max(v.abs()));
    let spoilt: f32 = spoilt.iter().sum::<f32>() + rest.iter().map(|v| v * 0.0).sum::<f32>();
    largest / MOST + spoilt
}

/// The inverse of a step, for rounding; of none it is zero.
#[inline(always)]
fn inverse(step: f32) -> f32 {
    let inverse = 1.0 / step;
    if inverse.is_finite() { inverse } else { 0.0 }
}

#[inline(always)]
pub(super) unsafe fn prepare<I: Vectors>(shape: &Shape, row: &[f32], prepared: &mut [u8]) {
    let d = shape.head_dim;
    assert!(row.len() == d && prepared.len() >= query_bytes(shape) && prepared.as_ptr().cast::<f32>().is_aligned());
    let step = step(row);
    // SAFETY: there is room for as many values, the factor and the sums; features by the caller.
    unsafe {
        let values: *mut i16 = prepared.as_mut_ptr().cast();
        for i in (0..d).step_by(2 * I::LANES) {
            I::round(row.as_ptr().add(i), inverse(step), values.add(i));
        }
        let floats: *mut f32 = values.add(d).cast();
        *floats = step;
        for (b, block) in row.chunks_exact(BLOCK).enumerate() {
            *floats.add(1 + b) = block.iter().sum();
        }
    }
}

/// Factors of the blocks of some slots, as f32.
struct Factors {
    scales: [MaybeUninit<f32>; BLOCKS],
    minima: [MaybeUninit<f32>; BLOCKS],
}

impl Factors {
    const fn new() -> Factors {
        Factors { scales: [const { MaybeUninit::uninit() }; BLOCKS], minima: [const { MaybeUninit::uninit() }; BLOCKS] }
    }
}

/// Some slots of a tile.
struct Slots<'a> {
    codes: &'a [u8],
    high: &'a [u8],
    /// Of each block, blocks of a slot side by side.
    scales: &'a [f32],
    /// The same; empty in formats without a minimum.
    minima: &'a [f32],
    /// Blocks in a slot.
    blocks: usize,
}

/// Half floats, as floats.
#[inline(always)]
unsafe fn floats<'a, I: Vectors>(halves: &[u8], space: &'a mut [MaybeUninit<f32>]) -> &'a [f32] {
    let count = halves.len() / 2;
    assert!(count <= space.len());
    let (whole, out) = (count / I::LANES * I::LANES, space.as_mut_ptr().cast::<f32>());
    // SAFETY: there are `count` of both, and all are written; features by the caller.
    unsafe {
        for i in (0..whole).step_by(I::LANES) {
            I::store(out.add(i), I::half_floats(halves.as_ptr().add(2 * i)));
        }
        for i in whole..count {
            *out.add(i) = I::half(u16::from_le_bytes([halves[2 * i], halves[2 * i + 1]]));
        }
        std::slice::from_raw_parts(out, count)
    }
}

impl<'a> Slots<'a> {
    /// Slots `first .. first + n` of a tile.
    #[inline(always)]
    unsafe fn new<F: Codes, I: Vectors>(
        shape: &Shape,
        tile: &'a [u8],
        first: usize,
        n: usize,
        factors: &'a mut Factors,
    ) -> Self {
        assert!(first + n <= PAGE_TOKENS);
        let blocks = shape.head_dim / BLOCK;
        let at = shape.fields::<F>(first * blocks, n * blocks);
        // SAFETY: features by the caller.
        let (scales, minima) = unsafe {
            (floats::<I>(&tile[at.scale], &mut factors.scales), floats::<I>(&tile[at.min], &mut factors.minima))
        };
        Slots { codes: &tile[at.codes], high: &tile[at.high], scales, minima, blocks }
    }

    /// Codes `2 * LANES * part ..` of a block, counted through the slots.
    ///
    /// # Safety
    /// The block is in the slots of [`Slots::new`] with the same types; features by the caller.
    #[inline(always)]
    unsafe fn codes<F: Codes, I: Vectors>(&self, block: usize, part: usize) -> I::H {
        // SAFETY: the caller's promise.
        unsafe {
            F::codes::<I>(self.codes.as_ptr().add(block * F::CODES), self.high.as_ptr().add(block * F::HIGH), part)
        }
    }
}

#[inline(always)]
pub(super) unsafe fn decode<F: Codes, I: Vectors>(shape: &Shape, tile: &[u8], first: usize, mut rows: RowsMut) {
    let mut factors = Factors::new();
    // SAFETY: features by the caller.
    let slots = unsafe { Slots::new::<F, I>(shape, tile, first, rows.len(), &mut factors) };
    for slot in 0..rows.len() {
        let row = rows.row(slot);
        assert!(row.len() == slots.blocks * BLOCK);
        for block in 0..slots.blocks {
            let at = slot * slots.blocks + block;
            // SAFETY: the block is there, and the row is as long as its blocks; features by the caller.
            unsafe {
                let scale = I::splat(slots.scales[at]);
                for part in 0..BLOCK / (2 * I::LANES) {
                    let to = row.as_mut_ptr().add(block * BLOCK + 2 * part * I::LANES);
                    let [low, high] = I::widen(slots.codes::<F, I>(at, part));
                    if F::MIN > 0 {
                        let minimum = I::splat(slots.minima[at]);
                        I::store(to, I::fma(low, scale, minimum));
                        I::store(to.add(I::LANES), I::fma(high, scale, minimum));
                    } else {
                        I::store(to, I::mul(low, scale));
                        I::store(to.add(I::LANES), I::mul(high, scale));
                    }
                }
            }
        }
    }
}

#[inline(always)]
pub(super) unsafe fn score<F: Codes, I: Vectors>(
    shape: &Shape,
    prepared: &[u8],
    tile: &[u8],
    first: usize,
    mut scores: RowsMut,
) {
    let (n_rows, n, mut factors) = (scores.len(), scores.width(), Factors::new());
    assert!(prepared.len() >= n_rows * query_bytes(shape) && prepared.as_ptr().cast::<f32>().is_aligned());
    // SAFETY: features by the caller; rows are within `prepared` as asserted.
    unsafe {
        let slots = Slots::new::<F, I>(shape, tile, first, n, &mut factors);
        by_rows!(n_rows, |row, R| {
            let queries = Queries {
                first: prepared[row * query_bytes(shape)..].as_ptr(),
                bytes: query_bytes(shape),
                d: shape.head_dim,
            };
            if R <= 3 {
                score_rows::<F, I, R, 2>(&slots, &queries, n, &mut scores, row);
            } else {
                score_rows::<F, I, R, 1>(&slots, &queries, n, &mut scores, row);
            }
        });
    }
}

/// Prepared rows.
struct Queries {
    first: *const u8,
    /// Bytes of a row.
    bytes: usize,
    /// Values in a row.
    d: usize,
}

impl Queries {
    /// # Safety
    /// The row is there.
    #[inline(always)]
    unsafe fn values(&self, r: usize) -> *const i16 {
        // SAFETY: the caller's promise.
        unsafe { self.first.add(r * self.bytes).cast() }
    }

    /// The factor of the values, then the sums of blocks.
    ///
    /// # Safety
    /// The row is there.
    #[inline(always)]
    unsafe fn floats(&self, r: usize) -> *const f32 {
        // SAFETY: the caller's promise.
        unsafe { self.values(r).add(self.d).cast() }
    }
}

/// Scores of `R` rows from `row`, of `T` tokens at a time.
///
/// # Safety
/// `queries` leads to those rows, and `slots` has `n` slots; features by the caller.
#[inline(always)]
unsafe fn score_rows<F: Codes, I: Vectors, const R: usize, const T: usize>(
    slots: &Slots,
    queries: &Queries,
    n: usize,
    scores: &mut RowsMut,
    row: usize,
) {
    for t in (0..n - n % T).step_by(T) {
        // SAFETY: passed on.
        let products = unsafe { dots::<F, I, R, T>(slots, queries, t) };
        for (r, products) in products.iter().enumerate() {
            scores.row(row + r)[t..t + T].copy_from_slice(products);
        }
    }
    for t in n - n % T..n {
        // SAFETY: passed on.
        let products = unsafe { dots::<F, I, R, 1>(slots, queries, t) };
        for (r, product) in products.iter().enumerate() {
            scores.row(row + r)[t] = product[0];
        }
    }
}

/// Products of `R` queries with the keys in `T` slots from `t`.
///
/// # Safety
/// As [`score_rows`], and the slots are there.
#[inline(always)]
unsafe fn dots<F: Codes, I: Vectors, const R: usize, const T: usize>(
    slots: &Slots,
    queries: &Queries,
    t: usize,
) -> [[f32; T]; R] {
    let blocks = slots.blocks;
    // SAFETY: the caller's promise.
    unsafe {
        let mut sums = [[I::splat(0.0); T]; R];
        for block in 0..blocks {
            let mut products = [[I::zero(); T]; R];
            for part in 0..BLOCK / (2 * I::LANES) {
                let mut keys = [slots.codes::<F, I>(t * blocks + block, part); T];
                for i in 1..T {
                    keys[i] = slots.codes::<F, I>((t + i) * blocks + block, part);
                }
                for r in 0..R {
                    let q = I::load_short(queries.values(r).add(block * BLOCK + 2 * part * I::LANES));
                    for i in 0..T {
                        products[r][i] = I::add(products[r][i], I::products(q, keys[i]));
                    }
                }
            }
            for i in 0..T {
                let scale = I::splat(*slots.scales.get_unchecked((t + i) * blocks + block));
                for r in 0..R {
                    sums[r][i] = I::fma(I::floats(products[r][i]), scale, sums[r][i]);
                }
            }
        }
        let mut out = totals::<I, R, T>(&sums);
        for r in 0..R {
            let floats = queries.floats(r);
            for i in 0..T {
                out[r][i] *= *floats;
                if F::MIN > 0 {
                    for block in 0..blocks {
                        out[r][i] += slots.minima[(t + i) * blocks + block] * *floats.add(1 + block);
                    }
                }
            }
        }
        out
    }
}

/// The weights of a group of rows for one block of each token, rounded, and what goes with them.
struct Weights {
    /// Rounded products of weights and scales.
    rounded: [[i16; PAGE_TOKENS]; ROWS],
    /// What makes them f32 again.
    steps: [f32; ROWS],
    /// Sums of weights times minima.
    minima: [f32; ROWS],
}

#[inline(always)]
pub(super) unsafe fn accumulate<F: Codes, I: Vectors>(
    shape: &Shape,
    weights: Rows,
    tile: &[u8],
    first: usize,
    mut acc: RowsMut,
) {
    let (n_rows, n, mut factors) = (weights.len(), weights.width(), Factors::new());
    assert!(acc.len() == n_rows && acc.width() == shape.head_dim);
    if n == 0 {
        return;
    }
    // SAFETY: features by the caller.
    let slots = unsafe { Slots::new::<F, I>(shape, tile, first, n, &mut factors) };
    let (mut scales, mut minima) = ([0.0; PAGE_TOKENS], [0.0; PAGE_TOKENS]);
    let mut rounded = Weights { rounded: [[0; PAGE_TOKENS]; ROWS], steps: [0.0; ROWS], minima: [0.0; ROWS] };
    for block in 0..slots.blocks {
        let of_block = |factors: &[f32], to: &mut [f32; PAGE_TOKENS]| {
            for (to, slot) in to.iter_mut().zip(factors.chunks_exact(slots.blocks)) {
                *to = slot[block];
            }
        };
        of_block(slots.scales, &mut scales);
        of_block(slots.minima, &mut minima);
        // SAFETY: slots and rows are there; features by the caller.
        unsafe {
            by_rows!(n_rows, |row, R| {
                for r in 0..R {
                    round_weights::<F, I>(weights.row(row + r), &scales, &minima, &mut rounded, r);
                }
                accumulate_rows::<F, I, R>(&slots, &rounded, n, block, &mut acc, row);
            });
        }
    }
}

/// Rounds the weights of row `r` of a group.
#[inline(always)]
unsafe fn round_weights<F: Codes, I: Vectors>(
    weights: &[f32],
    scales: &[f32; PAGE_TOKENS],
    minima: &[f32; PAGE_TOKENS],
    out: &mut Weights,
    r: usize,
) {
    let mut scaled = [0.0; PAGE_TOKENS];
    for ((to, w), s) in scaled.iter_mut().zip(weights).zip(scales) {
        *to = w * s;
    }
    let step = step(&scaled);
    for t in (0..PAGE_TOKENS).step_by(2 * I::LANES) {
        // SAFETY: both have as many values; features by the caller.
        unsafe { I::round(scaled.as_ptr().add(t), inverse(step), out.rounded[r].as_mut_ptr().add(t)) };
    }
    out.steps[r] = step;
    if F::MIN > 0 {
        out.minima[r] = weights.iter().zip(minima).map(|(w, m)| w * m).sum();
    }
}

/// Adds the values of one block of each token to `R` rows from `row`.
///
/// # Safety
/// There are `n` slots, at least one, and rows of their blocks; features by the caller.
#[inline(always)]
unsafe fn accumulate_rows<F: Codes, I: Vectors, const R: usize>(
    slots: &Slots,
    weights: &Weights,
    n: usize,
    block: usize,
    acc: &mut RowsMut,
    row: usize,
) {
    for part in 0..BLOCK / (2 * I::LANES) {
        // SAFETY: the caller's promise.
        unsafe {
            let mut sums = [[I::zero(); 2]; R];
            for t in (0..n).step_by(2) {
                // The last of an odd number of slots goes with itself; the second weight is zero there.
                let second = (t + 1).min(n - 1);
                let codes = I::pair(
                    slots.codes::<F, I>(t * slots.blocks + block, part),
                    slots.codes::<F, I>(second * slots.blocks + block, part),
                );
                for r in 0..R {
                    let pair = I::splat_pair(weights.rounded[r].as_ptr().add(t));
                    for i in 0..2 {
                        sums[r][i] = I::add(sums[r][i], I::products(codes[i], pair));
                    }
                }
            }
            for r in 0..R {
                let to = acc.row(row + r).as_mut_ptr().add(block * BLOCK + 2 * part * I::LANES);
                let in_order = I::in_order([I::floats(sums[r][0]), I::floats(sums[r][1])]);
                let (step, minimum) = (I::splat(weights.steps[r]), I::splat(weights.minima[r]));
                for i in 0..2 {
                    let to = to.add(i * I::LANES);
                    let sum = I::fma(in_order[i], step, I::load(to));
                    I::store(to, if F::MIN > 0 { I::fma(minimum, I::splat(1.0), sum) } else { sum });
                }
            }
        }
    }
}
