//! Small products of f32 matrices in scratch memory.

use crate::cpu::simd::{Isa, Lanes, Level, Portable};

/// Matrices on the right and results have rows of a multiple of this many elements.
pub(super) const GRAIN: usize = 32;

/// Left factor: element `(r, i)` lies at `data[r * row + i * col]`.
#[derive(Clone, Copy)]
pub(super) struct Left<'a> {
    pub(super) data: &'a [f32],
    pub(super) row: usize,
    pub(super) col: usize,
}

/// `out = keep * out + left * right`, with `rows` rows of `out` and `len` of `right`, both `width` wide. What `out` held is
/// not looked at if `keep` is zero.
pub(super) fn product(
    isa: Isa,
    left: Left<'_>,
    right: &[f32],
    width: usize,
    (rows, len): (usize, usize),
    keep: f32,
    out: &mut [f32],
) {
    assert!(width.is_multiple_of(GRAIN) && right.len() >= len * width && out.len() >= rows * width);
    let last = rows.saturating_sub(1) * left.row + len.saturating_sub(1) * left.col;
    assert!(rows * len == 0 || last < left.data.len());
    // SAFETY: all three are as large as the loops need, as was just checked; `isa` proves the instruction set.
    unsafe {
        match isa.level() {
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => avx512(left, right.as_ptr(), width, rows, len, keep, out.as_mut_ptr()),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 | Level::AvxVnni => avx2(left, right.as_ptr(), width, rows, len, keep, out.as_mut_ptr()),
            _ => product_of::<Portable, 4>(left, right.as_ptr(), width, rows, len, keep, out.as_mut_ptr()),
        }
    }
}

/// # Safety
/// See [`product_of`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn avx512(l: Left<'_>, r: *const f32, width: usize, rows: usize, len: usize, keep: f32, out: *mut f32) {
    // SAFETY: the caller's promises.
    unsafe { product_of::<crate::cpu::simd::F32x16, 8>(l, r, width, rows, len, keep, out) }
}

/// # Safety
/// See [`product_of`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn avx2(l: Left<'_>, r: *const f32, width: usize, rows: usize, len: usize, keep: f32, out: *mut f32) {
    // SAFETY: the caller's promises.
    unsafe { product_of::<crate::cpu::simd::F32x8, 4>(l, r, width, rows, len, keep, out) }
}

/// Tiles of `R` rows by two vectors; the rows that are left one at a time.
///
/// # Safety
/// The matrices have the sizes that [`product`] checks, and the processor has the instruction set of `S`.
#[inline(always)]
unsafe fn product_of<S: Lanes, const R: usize>(
    left: Left<'_>,
    right: *const f32,
    width: usize,
    rows: usize,
    len: usize,
    keep: f32,
    out: *mut f32,
) {
    let mut column = 0;
    while column < width {
        let mut row = 0;
        // SAFETY: rows below `rows` and columns below `width` exist in `out`, and in `left` and `right` for `len` terms.
        unsafe {
            while row + R <= rows {
                let l = left.data.as_ptr().add(row * left.row);
                tile::<S, R>(l, left, right.add(column), width, len, keep, out.add(row * width + column));
                row += R;
            }
            while row < rows {
                let l = left.data.as_ptr().add(row * left.row);
                tile::<S, 1>(l, left, right.add(column), width, len, keep, out.add(row * width + column));
                row += 1;
            }
        }
        column += 2 * S::N;
    }
}

#[inline(always)]
unsafe fn tile<S: Lanes, const R: usize>(
    l: *const f32,
    left: Left<'_>,
    right: *const f32,
    width: usize,
    len: usize,
    keep: f32,
    out: *mut f32,
) {
    // SAFETY: the caller's promise: `R` rows and two vectors of columns are there.
    unsafe {
        let mut sums = [[S::zero(); 2]; R];
        if keep != 0.0 {
            let keep = S::splat(keep);
            for r in 0..R {
                for c in 0..2 {
                    sums[r][c] = sums[r][c].add_product(S::load(out.add(r * width + c * S::N)), keep);
                }
            }
        }
        for i in 0..len {
            let x = [S::load(right.add(i * width)), S::load(right.add(i * width + S::N))];
            for r in 0..R {
                let factor = S::splat(*l.add(r * left.row + i * left.col));
                for c in 0..2 {
                    sums[r][c] = sums[r][c].add_product(factor, x[c]);
                }
            }
        }
        for r in 0..R {
            for c in 0..2 {
                sums[r][c].store(out.add(r * width + c * S::N));
            }
        }
    }
}
