//! Float kernels of attention on decoded tiles, and the online softmax.
//!
//! Vectors never pass through a closure (`map`, `from_fn`): a closure that is not inlined lacks the instruction set's
//! features and costs more than the arithmetic.

#[cfg(target_arch = "x86_64")]
use crate::cpu::simd::{F32x8, F32x16};
use crate::cpu::simd::{Isa, Lanes, Level, Portable};
use crate::cpu::vecmath::exp;

/// Tokens whose products are in registers together.
const QUAD: usize = 4;
/// Query rows kept in the first-level cache while keys pass.
const ROW_BLOCK: usize = 16;
/// Tokens whose values are added to a row at a time.
const OCTET: usize = 8;

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

per_isa! {
    /// `out[r * stride + t] = q_r . k_t` for `n_tokens` rows of `k`; rows of `q` and `k` are `d` values long and dense.
    scores(q: &[f32], k: &[f32], d: usize, n_tokens: usize, out: &mut [f32], stride: usize)
        = scores_body::<F32x16>, scores_body::<F32x8>, scores_body::<Portable>
}
per_isa! {
    /// `acc_r += sum over t of weights[r * stride + t] * v_t` for `n_tokens` rows of `v`; rows of `v` and `acc` are `d`
    /// values long and dense.
    accumulate(weights: &[f32], stride: usize, v: &[f32], d: usize, n_tokens: usize, acc: &mut [f32])
        = accumulate_body::<F32x16>, accumulate_body::<F32x8>, accumulate_body::<Portable>
}
per_isa! {
    /// Turns a row's scores of some keys into weights `exp(s - max)`, and brings what was summed up before to the new
    /// maximum. `cap` soft-caps the scores first.
    softmax(scores: &mut [f32], cap: Option<f32>, state: &mut Softmax, acc: &mut [f32])
        = softmax_body, softmax_body, softmax_body
}

/// Running maximum and sum of weights of one query row.
#[derive(Clone, Copy, Debug)]
pub(super) struct Softmax {
    pub(super) max: f32,
    pub(super) sum: f32,
}

impl Softmax {
    /// Nothing seen yet.
    pub(super) const EMPTY: Softmax = Softmax { max: f32::NEG_INFINITY, sum: 0.0 };
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
unsafe fn accumulate_body<L: Lanes>(
    weights: &[f32],
    stride: usize,
    v: &[f32],
    d: usize,
    n_tokens: usize,
    acc: &mut [f32],
) {
    assert!(v.len() >= n_tokens * d);
    let whole = n_tokens / OCTET * OCTET;
    for t in (0..whole).step_by(OCTET) {
        for (r, acc) in acc.chunks_exact_mut(d).enumerate() {
            // SAFETY: instruction set by the caller.
            unsafe { add_weighted::<L, OCTET>(&weights[r * stride + t..], &v[t * d..], acc) }
        }
    }
    for t in whole..n_tokens {
        for (r, acc) in acc.chunks_exact_mut(d).enumerate() {
            // SAFETY: instruction set by the caller.
            unsafe { add_weighted::<L, 1>(&weights[r * stride + t..], &v[t * d..], acc) }
        }
    }
}

/// `acc += sum of w[t] * v[t]` over `T` tokens.
#[inline(always)]
unsafe fn add_weighted<L: Lanes, const T: usize>(w: &[f32], v: &[f32], acc: &mut [f32]) {
    let d = acc.len();
    assert!(w.len() >= T && v.len() >= T * d);
    let whole = d / L::N * L::N;
    // SAFETY: lengths as asserted; instruction set by the caller.
    unsafe {
        let mut lanes = [L::zero(); T];
        for t in 0..T {
            lanes[t] = L::splat(w[t]);
        }
        for i in (0..whole).step_by(L::N) {
            let mut sum = L::load(acc.as_ptr().add(i));
            for t in 0..T {
                sum = sum.add_product(lanes[t], L::load(v.as_ptr().add(t * d + i)));
            }
            sum.store(acc.as_mut_ptr().add(i));
        }
    }
    for i in whole..d {
        for t in 0..T {
            acc[i] += w[t] * v[t * d + i];
        }
    }
}

/// # Safety
/// None; `unsafe` only to have the type of the other bodies.
#[inline(always)]
unsafe fn softmax_body(scores: &mut [f32], cap: Option<f32>, state: &mut Softmax, acc: &mut [f32]) {
    if let Some(cap) = cap {
        // cap · tanh(s / cap), from the exponential.
        for s in scores.iter_mut() {
            *s = cap - 2.0 * cap / (1.0 + exp(2.0 / cap * *s));
        }
    }
    let max = max_of(scores, state.max);
    if max == f32::NEG_INFINITY {
        return scores.fill(0.0);
    }
    if max > state.max {
        let factor = exp(state.max - max);
        acc.iter_mut().for_each(|a| *a *= factor);
        *state = Softmax { max, sum: state.sum * factor };
    }
    let mut sums = [0.0; 16];
    let (chunks, rest) = scores.as_chunks_mut::<16>();
    for chunk in chunks {
        for (s, sum) in chunk.iter_mut().zip(&mut sums) {
            *s = exp(*s - max);
            *sum += *s;
        }
    }
    for s in rest {
        *s = exp(*s - max);
        state.sum += *s;
    }
    state.sum += sums.iter().sum::<f32>();
}

/// Largest value, at least `start`; in sixteen lanes, which a compiler does not do by itself.
#[inline(always)]
fn max_of(values: &[f32], start: f32) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let (chunks, rest) = values.as_chunks::<16>();
    let mut lanes = [start; 16];
    for chunk in chunks {
        for (max, &v) in lanes.iter_mut().zip(chunk) {
            *max = larger(*max, v);
        }
    }
    lanes.iter().chain(rest).fold(start, |a, &b| larger(a, b))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(n: usize, seed: usize) -> Vec<f32> {
        (0..n).map(|i| ((i * 37 + seed * 11) % 101) as f32 / 50.0 - 1.0).collect()
    }

    #[test]
    fn products_and_sums_are_right_for_every_width_and_count() {
        for isa in Isa::available() {
            for d in [8, 20, 64, 80] {
                for (n_rows, n) in [(1, 1), (2, 7), (3, 8), (17, 9)] {
                    let (q, k, w) = (values(n_rows * d, 1), values(n * d, 2), values(n_rows * (n + 2), 3));
                    let mut out = vec![0.0; n_rows * (n + 2)];
                    scores(isa, &q, &k, d, n, &mut out, n + 2);
                    let mut acc = values(n_rows * d, 4);
                    let start = acc.clone();
                    accumulate(isa, &w, n + 2, &k, d, n, &mut acc);
                    for r in 0..n_rows {
                        for t in 0..n {
                            let exact: f32 = (0..d).map(|i| q[r * d + i] * k[t * d + i]).sum();
                            assert!((out[r * (n + 2) + t] - exact).abs() < 1e-4);
                        }
                        for i in 0..d {
                            let exact: f32 = (0..n).map(|t| w[r * (n + 2) + t] * k[t * d + i]).sum();
                            assert!((acc[r * d + i] - start[r * d + i] - exact).abs() < 1e-4);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn softmax_in_pieces_equals_softmax_at_once() {
        for isa in Isa::available() {
            for cap in [None, Some(1.5f32)] {
                let scores: Vec<f32> = values(50, 5).iter().map(|v| v * 8.0).collect();
                let (mut state, mut acc) = (Softmax::EMPTY, [0.0f32]);
                for piece in [0..1, 1..20, 20..50] {
                    let mut weights = scores[piece].to_vec();
                    softmax(isa, &mut weights, cap, &mut state, &mut acc);
                    acc[0] += weights.iter().sum::<f32>();
                }
                let capped = |s: f32| cap.map_or(f64::from(s), |c| f64::from(c) * (f64::from(s / c)).tanh());
                let max = scores.iter().map(|&s| capped(s)).fold(f64::MIN, f64::max);
                let sum: f64 = scores.iter().map(|&s| (capped(s) - max).exp()).sum();
                assert!((f64::from(state.max) - max).abs() < 1e-5);
                assert!((f64::from(state.sum) / sum - 1.0).abs() < 1e-5);
                assert!((f64::from(acc[0]) / sum - 1.0).abs() < 1e-5);
            }
        }
    }
}
