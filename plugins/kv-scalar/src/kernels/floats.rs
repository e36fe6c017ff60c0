//! Kernels of formats whose codes are the values: f32 arithmetic.

use opencoti_plugin_api::PAGE_TOKENS;
use opencoti_plugin_api::kv_codec::{Rows, RowsMut};

use super::{Shape, by_rows, totals};
use crate::formats::{BLOCK, Floats};
use crate::vectors::Vectors;

/// A prepared query is the row.
pub(super) fn query_bytes(shape: &Shape) -> usize {
    (shape.head_dim * size_of::<f32>()).next_multiple_of(64)
}

#[inline(always)]
pub(super) unsafe fn prepare<I: Vectors>(_shape: &Shape, row: &[f32], prepared: &mut [u8]) {
    for (to, x) in prepared.as_chunks_mut().0.iter_mut().zip(row) {
        *to = x.to_ne_bytes();
    }
}

/// Some slots of a tile.
struct Slots<'a> {
    tile: &'a [u8],
    /// Blocks in a slot.
    blocks: usize,
}

impl<'a> Slots<'a> {
    /// Slots `first .. first + n` of a tile.
    #[inline(always)]
    fn new<F: Floats>(shape: &Shape, tile: &'a [u8], first: usize, n: usize) -> Self {
        assert!(first + n <= PAGE_TOKENS);
        let blocks = shape.head_dim / BLOCK;
        Slots { tile: &tile[shape.fields::<F>(first * blocks, n * blocks).codes], blocks }
    }

    /// Values `LANES * part ..` of a block of a slot.
    ///
    /// # Safety
    /// The slot is among those of [`Slots::new`] with the same types, and the block in it; features by the caller.
    #[inline(always)]
    unsafe fn values<F: Floats, I: Vectors>(&self, slot: usize, block: usize, part: usize) -> I::V {
        // SAFETY: the caller's promise.
        unsafe { F::values::<I>(self.tile.as_ptr().add((slot * self.blocks + block) * F::CODES), part) }
    }
}

#[inline(always)]
pub(super) unsafe fn decode<F: Floats, I: Vectors>(shape: &Shape, tile: &[u8], first: usize, mut rows: RowsMut) {
    let slots = Slots::new::<F>(shape, tile, first, rows.len());
    for slot in 0..rows.len() {
        let row = rows.row(slot);
        assert!(row.len() == slots.blocks * BLOCK);
        for block in 0..slots.blocks {
            for part in 0..BLOCK / I::LANES {
                // SAFETY: slot and block are there, and the row is as long as its blocks; features by the caller.
                unsafe {
                    let to = row.as_mut_ptr().add(block * BLOCK + part * I::LANES);
                    I::store(to, slots.values::<F, I>(slot, block, part));
                }
            }
        }
    }
}

#[inline(always)]
pub(super) unsafe fn score<F: Floats, I: Vectors>(
    shape: &Shape,
    prepared: &[u8],
    tile: &[u8],
    first: usize,
    mut scores: RowsMut,
) {
    let (n_rows, n, bytes) = (scores.len(), scores.width(), query_bytes(shape));
    assert!(prepared.len() >= n_rows * bytes && prepared.as_ptr().cast::<f32>().is_aligned());
    let slots = Slots::new::<F>(shape, tile, first, n);
    // SAFETY: rows and slots are there; features by the caller.
    unsafe {
        by_rows!(n_rows, |row, R| {
            let q = prepared[row * bytes..].as_ptr().cast();
            score_rows::<F, I, R>(&slots, q, bytes / size_of::<f32>(), n, &mut scores, row);
        });
    }
}

/// Scores of `R` rows from `row`, of two tokens at a time.
///
/// # Safety
/// `q` leads to those rows, `stride` apart, and `slots` has `n` slots; features by the caller.
#[inline(always)]
unsafe fn score_rows<F: Floats, I: Vectors, const R: usize>(
    slots: &Slots,
    q: *const f32,
    stride: usize,
    n: usize,
    scores: &mut RowsMut,
    row: usize,
) {
    for t in (0..n - n % 2).step_by(2) {
        // SAFETY: passed on.
        let products = unsafe { dots::<F, I, R, 2>(slots, q, stride, t) };
        for (r, products) in products.iter().enumerate() {
            scores.row(row + r)[t..t + 2].copy_from_slice(products);
        }
    }
    if !n.is_multiple_of(2) {
        // SAFETY: passed on.
        let products = unsafe { dots::<F, I, R, 1>(slots, q, stride, n - 1) };
        for (r, product) in products.iter().enumerate() {
            scores.row(row + r)[n - 1] = product[0];
        }
    }
}

/// Products of `R` rows of `q`, `stride` apart, with the keys in `T` slots from `t`.
///
/// # Safety
/// Rows and slots are there; features by the caller.
#[inline(always)]
unsafe fn dots<F: Floats, I: Vectors, const R: usize, const T: usize>(
    slots: &Slots,
    q: *const f32,
    stride: usize,
    t: usize,
) -> [[f32; T]; R] {
    // SAFETY: the caller's promise.
    unsafe {
        let mut sums = [[I::splat(0.0); T]; R];
        for block in 0..slots.blocks {
            for part in 0..BLOCK / I::LANES {
                let q = q.add(block * BLOCK + part * I::LANES);
                let mut keys = [I::splat(0.0); T];
                for i in 0..T {
                    keys[i] = slots.values::<F, I>(t + i, block, part);
                }
                for r in 0..R {
                    let q = I::load(q.add(r * stride));
                    for i in 0..T {
                        sums[r][i] = I::fma(q, keys[i], sums[r][i]);
                    }
                }
            }
        }
        totals::<I, R, T>(&sums)
    }
}

#[inline(always)]
pub(super) unsafe fn accumulate<F: Floats, I: Vectors>(
    shape: &Shape,
    weights: Rows,
    tile: &[u8],
    first: usize,
    mut acc: RowsMut,
) {
    let (n_rows, n) = (weights.len(), weights.width());
    assert!(acc.len() == n_rows && acc.width() == shape.head_dim);
    let slots = Slots::new::<F>(shape, tile, first, n);
    // SAFETY: slots and rows are there; features by the caller.
    unsafe {
        by_rows!(n_rows, |row, R| {
            if R <= 2 {
                accumulate_rows::<F, I, R, 4>(&slots, weights, &mut acc, row);
            } else {
                accumulate_rows::<F, I, R, 2>(&slots, weights, &mut acc, row);
            }
        });
    }
}

/// Adds to `R` rows from `row`, of which `N` vectors are in registers at a time, or a block if that is fewer.
///
/// # Safety
/// `slots` has as many slots as `weights` has columns, and `acc` rows of their blocks.
#[inline(always)]
unsafe fn accumulate_rows<F: Floats, I: Vectors, const R: usize, const N: usize>(
    slots: &Slots,
    weights: Rows,
    acc: &mut RowsMut,
    row: usize,
) {
    let (vectors, n) = (BLOCK / I::LANES, weights.width());
    let together = if N < vectors { N } else { vectors };
    let (mut w, mut to) = ([std::ptr::null(); R], [std::ptr::null_mut::<f32>(); R]);
    for r in 0..R {
        w[r] = weights.row(row + r).as_ptr();
        to[r] = acc.row(row + r).as_mut_ptr();
    }
    for block in 0..slots.blocks {
        for part in (0..vectors).step_by(together) {
            let at = block * BLOCK + part * I::LANES;
            // SAFETY: the caller's promise; weights and rows were found above.
            unsafe {
                let mut sums = [[I::splat(0.0); N]; R];
                for r in 0..R {
                    for i in 0..together {
                        sums[r][i] = I::load(to[r].add(at + i * I::LANES));
                    }
                }
                for t in 0..n {
                    let mut values = [I::splat(0.0); N];
                    for i in 0..together {
                        values[i] = slots.values::<F, I>(t, block, part + i);
                    }
                    for r in 0..R {
                        let w = I::splat(*w[r].add(t));
                        for i in 0..together {
                            sums[r][i] = I::fma(w, values[i], sums[r][i]);
                        }
                    }
                }
                for r in 0..R {
                    for i in 0..together {
                        I::store(to[r].add(at + i * I::LANES), sums[r][i]);
                    }
                }
            }
        }
    }
}
