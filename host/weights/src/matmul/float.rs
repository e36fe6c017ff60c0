//! f32 panels: a few weight rows, dequantised or stored as f32, times activation rows.
//!
//! A tile of `R` weight rows by `T` activation rows keeps its `R·T` sums in registers over the whole length, so each
//! vector that is loaded is used `T` or `R` times. Every sum runs over the same lanes in the same order whatever the
//! tile's shape: a row's result does not depend on how many rows come with it.

use super::Output;
use crate::simd::{Isa, Lanes, Level, Portable};

/// Activation rows in f32: row `t` starts at `t * cols`.
#[derive(Clone, Copy)]
pub(super) struct FloatInput<'a> {
    pub(super) x: &'a [f32],
    pub(super) rows: usize,
    pub(super) cols: usize,
}

/// Multiplies `n` weight rows at `weights`, `cols` apart and unaligned, with every activation row, into columns
/// `first ..` of the output.
///
/// # Safety
/// `weights` is valid for `n * input.cols` elements, and nobody else touches those columns.
pub(super) unsafe fn panel(
    isa: Isa,
    weights: *const f32,
    n: usize,
    input: FloatInput<'_>,
    first: usize,
    out: Output<'_>,
) {
    // SAFETY: the caller's promises; `isa` proves the instruction set of the branch.
    unsafe {
        match isa.level() {
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => panel_avx512(weights, n, input, first, out),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 | Level::AvxVnni => panel_avx2(weights, n, input, first, out),
            _ => panel_of::<Portable, 2>(weights, n, input, first, out),
        }
    }
}

/// # Safety
/// See [`panel`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn panel_avx512(weights: *const f32, n: usize, input: FloatInput<'_>, first: usize, out: Output<'_>) {
    // SAFETY: the caller's promises.
    unsafe { panel_of::<crate::simd::F32x16, 6>(weights, n, input, first, out) }
}

/// # Safety
/// See [`panel`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn panel_avx2(weights: *const f32, n: usize, input: FloatInput<'_>, first: usize, out: Output<'_>) {
    // SAFETY: the caller's promises.
    unsafe { panel_of::<crate::simd::F32x8, 3>(weights, n, input, first, out) }
}

/// Activation tiles outside, so that one stays in L1 while the panel passes by.
#[inline(always)]
unsafe fn panel_of<S: Lanes, const T: usize>(
    weights: *const f32,
    n: usize,
    input: FloatInput<'_>,
    first: usize,
    out: Output<'_>,
) {
    let mut t = 0;
    while t + T <= input.rows {
        // SAFETY: `T` more activation rows exist; the rest is the caller's promise.
        unsafe { rows_of::<S, T>(weights, n, input, t, first, out) };
        t += T;
    }
    while t + 2 <= input.rows {
        // SAFETY: as above with two rows.
        unsafe { rows_of::<S, 2>(weights, n, input, t, first, out) };
        t += 2;
    }
    if t < input.rows {
        // SAFETY: as above with one row.
        unsafe { rows_of::<S, 1>(weights, n, input, t, first, out) };
    }
}

#[inline(always)]
unsafe fn rows_of<S: Lanes, const T: usize>(
    weights: *const f32,
    n: usize,
    input: FloatInput<'_>,
    t: usize,
    first: usize,
    out: Output<'_>,
) {
    let x = input.x[t * input.cols..(t + T) * input.cols].as_ptr();
    let mut r = 0;
    while r + 4 <= n {
        // SAFETY: four more weight rows and `T` activation rows exist.
        let sums = unsafe { tile::<S, 4, T>(weights.add(r * input.cols), x, input.cols) };
        // SAFETY: the columns are the caller's.
        unsafe { out.put(sums, t, first + r) };
        r += 4;
    }
    while r < n {
        // SAFETY: one more weight row exists.
        let sums = unsafe { tile::<S, 1, T>(weights.add(r * input.cols), x, input.cols) };
        // SAFETY: the columns are the caller's.
        unsafe { out.put(sums, t, first + r) };
        r += 1;
    }
}

/// Dot products of `R` weight rows with `T` activation rows, both `cols` apart.
#[inline(always)]
unsafe fn tile<S: Lanes, const R: usize, const T: usize>(w: *const f32, x: *const f32, cols: usize) -> [[f32; R]; T] {
    let whole = cols / S::N * S::N;
    // SAFETY: offsets stay below `R * cols` and `T * cols`; the instruction set is the caller's promise.
    unsafe {
        let mut acc = [[S::zero(); R]; T];
        let mut k = 0;
        while k < whole {
            let mut xs = [S::zero(); T];
            for t in 0..T {
                xs[t] = S::load(x.add(t * cols + k));
            }
            for r in 0..R {
                let w = S::load(w.add(r * cols + k));
                for t in 0..T {
                    acc[t][r] = acc[t][r].add_product(w, xs[t]);
                }
            }
            k += S::N;
        }
        let mut sums = [[0.0; R]; T];
        for t in 0..T {
            for r in 0..R {
                let rest: f32 =
                    (whole..cols).map(|k| w.add(r * cols + k).read_unaligned() * x.add(t * cols + k).read()).sum();
                sums[t][r] = acc[t][r].sum() + rest;
            }
        }
        sums
    }
}
