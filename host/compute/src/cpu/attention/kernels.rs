//! Products of attention on decoded tiles, in f32.
//!
//! Vectors never pass through a closure (`map`, `from_fn`): a closure that is not inlined lacks the instruction set's
//! features and costs more than the arithmetic.

#[cfg(target_arch = "x86_64")]
use crate::cpu::simd::{F32x8, F32x16};
use crate::cpu::simd::{Isa, Lanes, Level, Portable};

/// Tokens whose products are in registers together.
const QUAD: usize = 4;
/// Query rows kept in the first-level cache while keys pass.
const ROW_BLOCK: usize = 16;

/// Wraps a body in one function per instruction set and one that chooses.
macro_rules! per_isa {
    ($(#[$doc:meta])* $name:ident($($arg:ident: $ty:ty),*) = $wide:path, $avx2:path, $portable:path) => {
        $(#[$doc])*
        pub(super) fn $name(isa: Isa, $($arg: $ty),*) {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
            unsafe fn wide($($arg: $ty),*) {
                // SAFETY: the features of the body's instruction set are on.
                unsafe { $wide($($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            unsafe fn avx2($($arg: $ty),*) {
                // SAFETY: the features of the body's instruction set are on.
                unsafe { $avx2($($arg),*) }
            }
            // SAFETY: `isa` proves that the processor has the instruction set.
            unsafe {
                match isa.level() {
                    #[cfg(target_arch = "x86_64")]
                    Level::Avx512 => wide($($arg),*),
                    #[cfg(target_arch = "x86_64")]
                    Level::Avx2 | Level::AvxVnni => avx2($($arg),*),
                    _ => $portable($($arg),*),
                }
            }
        }
    };
}

pub(super) use per_isa;

per_isa! {
    /// `out[r * stride + t] = q_r . k_t` for `n_tokens` rows of `k`; rows of `q` and `k` are `d` values long and dense.
    scores(q: &[f32], k: &[f32], d: usize, n_tokens: usize, out: &mut [f32], stride: usize)
        = scores_body::<F32x16>, scores_body::<F32x8>, scores_body::<Portable>
}
per_isa! {
    /// `out += left · right`.
    add_product(left: Left<'_>, right: &[f32], right_stride: usize, out: &mut [f32], out_stride: usize, size: Size)
        = add_product_body::<F32x16>, add_product_body::<F32x8>, add_product_body::<Portable>
}
/// The left factor of a product: element `(i, k)` is `data[i * row + k * column]`.
#[derive(Clone, Copy)]
pub(super) struct Left<'a> {
    pub(super) data: &'a [f32],
    pub(super) row: usize,
    pub(super) column: usize,
}

/// Size of a product of an `m × k` with a `k × n` matrix.
#[derive(Clone, Copy)]
pub(super) struct Size {
    pub(super) m: usize,
    pub(super) n: usize,
    pub(super) k: usize,
}

#[inline(always)]
unsafe fn scores_body<L: Lanes>(q: &[f32], k: &[f32], d: usize, n_tokens: usize, out: &mut [f32], stride: usize) {
    let n_rows = q.len() / d;
    assert!(k.len() >= n_tokens * d && (n_rows == 0 || out.len() >= (n_rows - 1) * stride + n_tokens));
    for block in (0..n_rows).step_by(ROW_BLOCK) {
        let end = (block + ROW_BLOCK).min(n_rows);
        for t in (0..n_tokens).step_by(QUAD) {
            let n = QUAD.min(n_tokens - t);
            // A short last group repeats its last token.
            let k: [&[f32]; QUAD] = std::array::from_fn(|i| &k[(t + i.min(n - 1)) * d..][..d]);
            let mut put = |r: usize, sums: [f32; QUAD]| out[r * stride + t..][..n].copy_from_slice(&sums[..n]);
            let row = |r: usize| &q[r * d..][..d];
            let mut r = block;
            while r + 2 <= end {
                // SAFETY: instruction set by the caller.
                let [a, b] = unsafe { dots::<L, 2>([row(r), row(r + 1)], k, d) };
                put(r, a);
                put(r + 1, b);
                r += 2;
            }
            if r < end {
                // SAFETY: instruction set by the caller.
                let [a] = unsafe { dots::<L, 1>([row(r)], k, d) };
                put(r, a);
            }
        }
    }
}

/// Products of `R` query rows with four keys.
#[inline(always)]
unsafe fn dots<L: Lanes, const R: usize>(q: [&[f32]; R], k: [&[f32]; QUAD], d: usize) -> [[f32; QUAD]; R] {
    assert!(q.iter().chain(&k).all(|row| row.len() == d));
    let whole = d / L::N * L::N;
    // SAFETY: rows are `d` values long; instruction set by the caller.
    let mut out = unsafe {
        let mut sums = [[L::zero(); QUAD]; R];
        for i in (0..whole).step_by(L::N) {
            let mut rows = [L::zero(); R];
            for r in 0..R {
                rows[r] = L::load(q[r].as_ptr().add(i));
            }
            for t in 0..QUAD {
                let k = L::load(k[t].as_ptr().add(i));
                for r in 0..R {
                    sums[r][t] = sums[r][t].add_product(rows[r], k);
                }
            }
        }
        let mut out = [[0.0; QUAD]; R];
        for r in 0..R {
            out[r] = L::sums(sums[r]);
        }
        out
    };
    for i in whole..d {
        for r in 0..R {
            for t in 0..QUAD {
                out[r][t] += q[r][i] * k[t][i];
            }
        }
    }
    out
}

#[inline(always)]
unsafe fn add_product_body<L: Lanes>(
    left: Left<'_>,
    right: &[f32],
    right_stride: usize,
    out: &mut [f32],
    out_stride: usize,
    size: Size,
) {
    let Size { m, n, k } = size;
    if m == 0 || n == 0 || k == 0 {
        return;
    }
    assert!(left.data.len() > (m - 1) * left.row + (k - 1) * left.column);
    assert!(right.len() >= (k - 1) * right_stride + n && out.len() >= (m - 1) * out_stride + n);
    let mut i = 0;
    while i < m {
        let a = &left.data[i * left.row..];
        macro_rules! rows {
            ($count:literal, $vectors:literal) => {{
                // SAFETY: sizes as asserted; instruction set by the caller.
                unsafe {
                    let steps = (left.row, left.column, right_stride, out_stride);
                    row_band::<L, $count, $vectors>(
                        a.as_ptr(),
                        right.as_ptr(),
                        out.as_mut_ptr().add(i * out_stride),
                        steps,
                        n,
                        k,
                    );
                }
                i += $count;
            }};
        }
        match m - i {
            1 => rows!(1, 4),
            2 => rows!(2, 4),
            3 | 5 => rows!(3, 2),
            4 | 7 | 8 => rows!(4, 2),
            _ => rows!(6, 2),
        }
    }
}

/// `M` rows of a product, `V` vectors of them at a time. `steps` are from row to row and column to column of the left
/// factor, and from row to row of the right one and the result.
///
/// # Safety
/// The matrices are as large as `n` and `k` say; the processor has the instruction set of `L`.
#[inline(always)]
unsafe fn row_band<L: Lanes, const M: usize, const V: usize>(
    a: *const f32,
    b: *const f32,
    c: *mut f32,
    steps: (usize, usize, usize, usize),
    n: usize,
    k: usize,
) {
    let (row, column, b_step, c_step) = steps;
    let mut j = 0;
    // SAFETY: the caller's promise.
    unsafe {
        while j + V * L::N <= n {
            block::<L, M, V>(a, b.add(j), c.add(j), steps, k);
            j += V * L::N;
        }
        while j + L::N <= n {
            block::<L, M, 1>(a, b.add(j), c.add(j), steps, k);
            j += L::N;
        }
        for j in j..n {
            for i in 0..M {
                let mut sum = *c.add(i * c_step + j);
                for p in 0..k {
                    sum += *a.add(i * row + p * column) * *b.add(p * b_step + j);
                }
                *c.add(i * c_step + j) = sum;
            }
        }
    }
}

/// `M` rows and `V` vectors of columns, in registers.
///
/// # Safety
/// As [`row_band`].
#[inline(always)]
unsafe fn block<L: Lanes, const M: usize, const V: usize>(
    a: *const f32,
    b: *const f32,
    c: *mut f32,
    steps: (usize, usize, usize, usize),
    k: usize,
) {
    let (row, column, b_step, c_step) = steps;
    // SAFETY: the caller's promise.
    unsafe {
        let mut sums = [[L::zero(); V]; M];
        for i in 0..M {
            for v in 0..V {
                sums[i][v] = L::load(c.add(i * c_step + v * L::N));
            }
        }
        for p in 0..k {
            let mut right = [L::zero(); V];
            for v in 0..V {
                right[v] = L::load(b.add(p * b_step + v * L::N));
            }
            for i in 0..M {
                let left = L::splat(*a.add(i * row + p * column));
                for v in 0..V {
                    sums[i][v] = sums[i][v].add_product(left, right[v]);
                }
            }
        }
        for i in 0..M {
            for v in 0..V {
                sums[i][v].store(c.add(i * c_step + v * L::N));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(n: usize, seed: usize) -> Vec<f32> {
        (0..n).map(|i| ((i * 37 + seed * 11) % 101) as f32 / 50.0 - 1.0).collect()
    }

    #[test]
    fn products_are_right_for_every_width_and_count() {
        for isa in Isa::available() {
            for d in [8, 20, 64, 80] {
                for (n_rows, n) in [(1, 1), (2, 7), (3, 8), (17, 9)] {
                    let (q, k) = (values(n_rows * d, 1), values(n * d, 2));
                    let mut out = vec![0.0; n_rows * (n + 2)];
                    scores(isa, &q, &k, d, n, &mut out, n + 2);
                    for r in 0..n_rows {
                        for t in 0..n {
                            let exact: f32 = (0..d).map(|i| q[r * d + i] * k[t * d + i]).sum();
                            assert!((out[r * (n + 2) + t] - exact).abs() < 1e-4);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn blocked_products_add_what_plain_ones_do() {
        for isa in Isa::available() {
            for n in [1, 8, 20, 64, 83] {
                for (m, k) in [(1, 1), (2, 7), (3, 8), (5, 3), (13, 9), (32, 64)] {
                    let (b_step, c_step) = (n + 3, n + 1);
                    let (b, start) = (values(k * b_step, 2), values(m * c_step, 3));
                    for (row, column) in [(k + 2, 1), (1, m + 5)] {
                        let data = values(m * row + k * column, 1);
                        let mut out = start.clone();
                        let left = Left { data: &data, row, column };
                        add_product(isa, left, &b, b_step, &mut out, c_step, Size { m, n, k });
                        for (at, (found, start)) in out.iter().zip(&start).enumerate() {
                            let (i, j) = (at / c_step, at % c_step);
                            let term = |p: usize| data[i * row + p * column] * b[p * b_step + j];
                            let sum: f32 = if j < n { (0..k).map(term).sum() } else { 0.0 };
                            assert!((found - start - sum).abs() < 1e-4, "{m}x{k}x{n} at {i}, {j}");
                        }
                    }
                }
            }
        }
    }
}
