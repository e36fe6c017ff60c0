//! The online softmax: scores become weights page by page, and what was summed up before is brought to the new maximum.
//!
//! Scores are in units of ln 2 (queries come multiplied by log2 e), so that weights are powers of two. They lie in one of
//! two ways: a row's scores side by side, for few rows, or those of [`COLUMNS`] rows of one token side by side, for many.
//! Loops are plain and turned into vectors by the compiler.

use super::kernels::per_isa;
use crate::cpu::simd::{Isa, Level};

/// Rows whose scores of one token lie side by side.
pub(super) const COLUMNS: usize = 16;

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

/// What [`columns`] works on, a value for each row.
pub(super) struct Columns {
    /// First token that the row sees.
    pub(super) start: [u32; COLUMNS],
    /// The token behind the last one.
    pub(super) end: [u32; COLUMNS],
    /// Maxima so far.
    pub(super) max: [f32; COLUMNS],
    /// Sums so far.
    pub(super) sum: [f32; COLUMNS],
    /// Answer: factors for what was summed up before.
    pub(super) factor: [f32; COLUMNS],
}

per_isa! {
    /// Turns a row's scores of some keys into weights `2^(s - max)`, and brings what was summed up before to the new
    /// maximum. `cap` soft-caps the scores first; it is in units of 1.
    row(scores: &mut [f32], cap: Option<f32>, state: &mut Softmax, acc: &mut [f32]) = row_body, row_body, row_body
}
per_isa! {
    /// The same for [`COLUMNS`] rows: the scores of token `t` are the first of `scores[t * stride..]`. Weights of tokens that
    /// a row does not see are zero.
    columns(scores: &mut [f32], stride: usize, cap: Option<f32>, rows: &mut Columns)
        = columns_body, columns_body, columns_body
}

/// 2^x, clamped to the normal range of f32: to three units in the last place.
#[inline(always)]
pub(super) fn exp2(x: f32) -> f32 {
    // Adding 1.5·2²³ rounds to a whole number and leaves it in the low bits.
    const ROUND: f32 = 12_582_912.0;
    // Comparisons in this order let a NaN through.
    let x = if x < -126.0 { -126.0 } else { x };
    let x = if x > 126.0 { 126.0 } else { x };
    let shifted = x + ROUND;
    let f = x - (shifted - ROUND);
    // Least relative error on |f| ≤ 1/2, but exact at zero.
    let p = 1.327_647_2e-3;
    let p = p * f + 9.675_542e-3;
    let p = p * f + 5.550_713e-2;
    let p = p * f + 0.240_221_2;
    let p = p * f + 0.693_146_94;
    let p = p * f + 1.0;
    p * f32::from_bits((shifted.to_bits() << 23).wrapping_add(127 << 23))
}

/// cap · tanh(s / cap) of a score in units of ln 2, by the exponential.
#[inline(always)]
fn soft_cap(s: f32, cap: f32) -> f32 {
    let in_units = cap * std::f32::consts::LOG2_E;
    in_units - 2.0 * in_units / (1.0 + exp2(2.0 / cap * s))
}

#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    if b > a { b } else { a }
}

/// # Safety
/// None; `unsafe` only to have the type of the other bodies.
#[inline(always)]
unsafe fn row_body(scores: &mut [f32], cap: Option<f32>, state: &mut Softmax, acc: &mut [f32]) {
    if let Some(cap) = cap {
        scores.iter_mut().for_each(|s| *s = soft_cap(*s, cap));
    }
    let max = max_of(scores, state.max);
    if max == f32::NEG_INFINITY {
        return scores.fill(0.0);
    }
    if max > state.max {
        let factor = exp2(state.max - max);
        acc.iter_mut().for_each(|a| *a *= factor);
        *state = Softmax { max, sum: state.sum * factor };
    }
    let mut sums = [0.0; 16];
    let (chunks, rest) = scores.as_chunks_mut::<16>();
    for chunk in chunks {
        for (s, sum) in chunk.iter_mut().zip(&mut sums) {
            *s = exp2(*s - max);
            *sum += *s;
        }
    }
    for s in rest {
        *s = exp2(*s - max);
        state.sum += *s;
    }
    state.sum += sums.iter().sum::<f32>();
}

/// Largest value, at least `start`; in sixteen lanes, which a compiler does not do by itself.
#[inline(always)]
fn max_of(values: &[f32], start: f32) -> f32 {
    let (chunks, rest) = values.as_chunks::<16>();
    let mut lanes = [start; 16];
    for chunk in chunks {
        for (max, &v) in lanes.iter_mut().zip(chunk) {
            *max = larger(*max, v);
        }
    }
    lanes.iter().chain(rest).fold(start, |a, &b| larger(a, b))
}

/// # Safety
/// As [`row_body`].
#[inline(always)]
unsafe fn columns_body(scores: &mut [f32], stride: usize, cap: Option<f32>, rows: &mut Columns) {
    let n = scores.len().div_ceil(stride) as u32;
    if let Some(cap) = cap {
        for token in scores.chunks_mut(stride) {
            token[..COLUMNS].iter_mut().for_each(|s| *s = soft_cap(*s, cap));
        }
    }
    if rows.start.iter().any(|&s| s > 0) || rows.end.iter().any(|&e| e < n) {
        for (t, token) in scores.chunks_mut(stride).enumerate() {
            for (i, s) in token[..COLUMNS].iter_mut().enumerate() {
                let seen = (t as u32 >= rows.start[i]) & ((t as u32) < rows.end[i]);
                *s = if seen { *s } else { f32::NEG_INFINITY };
            }
        }
    }
    let mut max = rows.max;
    for token in scores.chunks(stride) {
        for (max, &s) in max.iter_mut().zip(&token[..COLUMNS]) {
            *max = larger(*max, s);
        }
    }
    // Where nothing was seen yet any finite number will do.
    let finite = max.map(|m| if m == f32::NEG_INFINITY { 0.0 } else { m });
    let mut sum = [0.0; COLUMNS];
    for token in scores.chunks_mut(stride) {
        for i in 0..COLUMNS {
            let weight = exp2(token[i] - finite[i]);
            token[i] = if token[i] == f32::NEG_INFINITY { 0.0 } else { weight };
            sum[i] += token[i];
        }
    }
    for i in 0..COLUMNS {
        rows.factor[i] = exp2(rows.max[i] - finite[i]);
        rows.sum[i] = rows.sum[i] * rows.factor[i] + sum[i];
    }
    rows.max = max;
}

#[cfg(test)]
mod tests {
    use std::f64::consts::LN_2;

    use super::*;

    fn values(n: usize, seed: usize) -> Vec<f32> {
        (0..n).map(|i| (((i * 37 + seed * 11) % 101) as f32 / 50.0 - 1.0) * 12.0).collect()
    }

    /// Maximum in units of ln 2, and sum of weights, of scores in units of ln 2.
    fn exact(scores: impl Iterator<Item = f32> + Clone, cap: Option<f32>) -> (f64, f64) {
        let capped = |s: f32| {
            let s = f64::from(s) * LN_2;
            cap.map_or(s, |c| f64::from(c) * (s / f64::from(c)).tanh()) / LN_2
        };
        let max = scores.clone().map(capped).fold(f64::NEG_INFINITY, f64::max);
        (max, scores.map(|s| (capped(s) - max).exp2()).sum())
    }

    fn check(state: Softmax, acc: f32, (max, sum): (f64, f64)) {
        assert!((f64::from(state.max) - max).abs() < 2e-5, "{state:?} {max}");
        assert!((f64::from(state.sum) / sum - 1.0).abs() < 1e-5, "{state:?} {sum}");
        assert!((f64::from(acc) / sum - 1.0).abs() < 1e-5);
    }

    #[test]
    fn powers_of_two_are_exact_to_three_units_and_keep_to_the_normal_range() {
        for i in -126_000..126_000 {
            let x = i as f32 / 1000.0;
            assert!((f64::from(exp2(x)) / f64::from(x).exp2() - 1.0).abs() < 3.0 * f64::from(f32::EPSILON), "2^{x}");
        }
        assert!(exp2(f32::NEG_INFINITY) < 1.3e-38 && exp2(f32::INFINITY).is_finite() && exp2(f32::NAN).is_nan());
        assert_eq!(exp2(0.0), 1.0);
    }

    #[test]
    fn softmax_in_pieces_equals_softmax_at_once() {
        for isa in Isa::available() {
            for cap in [None, Some(1.5f32)] {
                let scores = values(50, 5);
                let (mut state, mut acc) = (Softmax::EMPTY, [0.0f32]);
                for piece in [0..1, 1..20, 20..50] {
                    let mut weights = scores[piece].to_vec();
                    row(isa, &mut weights, cap, &mut state, &mut acc);
                    acc[0] += weights.iter().sum::<f32>();
                }
                check(state, acc[0], exact(scores.iter().copied(), cap));
            }
        }
    }

    #[test]
    fn columns_see_what_their_rows_see() {
        const STRIDE: usize = COLUMNS + 3;
        for isa in Isa::available() {
            for cap in [None, Some(1.5f32)] {
                let mut rows = Columns {
                    start: [0; COLUMNS],
                    end: [0; COLUMNS],
                    max: [f32::NEG_INFINITY; COLUMNS],
                    sum: [0.0; COLUMNS],
                    factor: [0.0; COLUMNS],
                };
                let (mut seen, mut acc) = (vec![Vec::new(); COLUMNS], [0.0; COLUMNS]);
                for (page, n) in [20, 1, 9].into_iter().enumerate() {
                    let scores = values(n * STRIDE, page);
                    for i in 0..COLUMNS {
                        // Row 0 sees nothing, row 1 nothing of the first page, row 2 all.
                        let (start, end) = match i {
                            0 => (0, 0),
                            1 => (0, if page == 0 { 0 } else { n }),
                            2 => (0, n),
                            _ => (i % 5, (i + 3).min(n)),
                        };
                        (rows.start[i], rows.end[i]) = (start as u32, end as u32);
                        seen[i].extend((start..end.max(start)).map(|t| scores[t * STRIDE + i]));
                    }
                    let mut weights = scores.clone();
                    columns(isa, &mut weights, STRIDE, cap, &mut rows);
                    for i in 0..COLUMNS {
                        let sum: f32 = (0..n).map(|t| weights[t * STRIDE + i]).sum();
                        acc[i] = acc[i] * rows.factor[i] + sum;
                    }
                    let untouched = |at: &usize| at % STRIDE >= COLUMNS;
                    assert!((0..scores.len()).filter(untouched).all(|at| scores[at] == weights[at]));
                }
                assert!(rows.max[0] == f32::NEG_INFINITY && rows.sum[0] == 0.0 && acc[0] == 0.0);
                for i in 1..COLUMNS {
                    let state = Softmax { max: rows.max[i], sum: rows.sum[i] };
                    check(state, acc[i], exact(seen[i].iter().copied(), cap));
                }
            }
        }
    }
}
