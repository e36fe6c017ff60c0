//! Row functions of the executor: norms, gated activations, soft caps, sums.
//!
//! They are plain loops that the compiler turns into vector code, compiled once for each instruction set.

use super::simd::{Isa, Level};
use crate::graph::Activation;

/// Wraps a loop in one function per instruction set and one that chooses.
macro_rules! per_isa {
    ($(#[$doc:meta])* $name:ident($($arg:ident: $ty:ty),*) = $body:ident) => {
        $(#[$doc])*
        pub fn $name(isa: Isa, $($arg: $ty),*) {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
            fn avx512($($arg: $ty),*) {
                $body($($arg),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2")]
            fn avx2($($arg: $ty),*) {
                $body($($arg),*)
            }
            match isa.level() {
                #[cfg(target_arch = "x86_64")]
                // SAFETY: `isa` proves that the processor has the instruction set.
                Level::Avx512 => unsafe { avx512($($arg),*) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: as above.
                Level::Avx2 | Level::AvxVnni => unsafe { avx2($($arg),*) },
                _ => $body($($arg),*),
            }
        }
    };
}

per_isa! {
    /// `out = x / sqrt(mean(x²) + eps) ⊙ weight` over the whole slice; no weight counts as ones.
    rms_norm(x: &[f32], weight: Option<&[f32]>, eps: f32, out: &mut [f32]) = rms_norm_loop
}
per_isa! {
    /// `out = (x - mean) / sqrt(variance + eps) ⊙ weight + bias` over the whole slice.
    layer_norm(x: &[f32], weight: &[f32], bias: &[f32], eps: f32, out: &mut [f32]) = layer_norm_loop
}
per_isa! {
    /// `out = act(x)`.
    activate(act: Activation, x: &[f32], out: &mut [f32]) = activate_loop
}
per_isa! {
    /// `out = out ⊙ x`.
    multiply(x: &[f32], out: &mut [f32]) = multiply_loop
}
per_isa! {
    /// `out = silu(gate) ⊙ up`.
    gated_silu(gate: &[f32], up: &[f32], out: &mut [f32]) = gated_silu_loop
}
per_isa! {
    /// `out = gelu(gate) ⊙ up`, the tanh form in f32.
    gated_gelu(gate: &[f32], up: &[f32], out: &mut [f32]) = gated_gelu_loop
}
per_isa! {
    /// `out = cap · tanh(x / cap)`.
    soft_cap(x: &[f32], cap: f32, out: &mut [f32]) = soft_cap_loop
}
per_isa! {
    /// `out = a + b`.
    add(a: &[f32], b: &[f32], out: &mut [f32]) = add_loop
}
per_isa! {
    /// `out = factor · x`.
    scale(x: &[f32], factor: f32, out: &mut [f32]) = scale_loop
}
per_isa! {
    /// `out += factor · x`.
    add_scaled(x: &[f32], factor: f32, out: &mut [f32]) = add_scaled_loop
}
per_isa! {
    /// `out = x ⊙ sigmoid(gate)`, each element of the gate for an equal part of `x`.
    gate(x: &[f32], gate: &[f32], out: &mut [f32]) = gate_loop
}
per_isa! {
    /// `out = a ⊙ b`.
    mul(a: &[f32], b: &[f32], out: &mut [f32]) = mul_loop
}
per_isa! {
    /// `out += a ⊙ b`.
    add_product(a: &[f32], b: &[f32], out: &mut [f32]) = add_product_loop
}
per_isa! {
    /// `out = x / sqrt(Σx² + eps)` over the whole slice.
    l2_norm(x: &[f32], eps: f32, out: &mut [f32]) = l2_norm_loop
}
per_isa! {
    /// `out = rate ⊙ softplus(x + bias)`.
    decay(x: &[f32], bias: &[f32], rate: &[f32], out: &mut [f32]) = decay_loop
}
per_isa! {
    /// `out ⊙= factor · e^(top - x)`.
    scale_by_exp(top: f32, x: &[f32], factor: f32, out: &mut [f32]) = scale_by_exp_loop
}

#[inline(always)]
fn rms_norm_loop(x: &[f32], weight: Option<&[f32]>, eps: f32, out: &mut [f32]) {
    let factor = 1.0 / (sum_of_squares(x) / x.len() as f32 + eps).sqrt();
    match weight {
        Some(weight) => {
            for ((o, x), w) in out.iter_mut().zip(x).zip(weight) {
                *o = x * factor * w;
            }
        }
        None => scale_loop(x, factor, out),
    }
}

#[inline(always)]
fn layer_norm_loop(x: &[f32], weight: &[f32], bias: &[f32], eps: f32, out: &mut [f32]) {
    let n = x.len() as f32;
    let mean = sum(x) / n;
    for (o, x) in out.iter_mut().zip(x) {
        *o = x - mean;
    }
    let factor = 1.0 / (sum_of_squares(out) / n + eps).sqrt();
    for ((o, w), b) in out.iter_mut().zip(weight).zip(bias) {
        *o = *o * factor * w + b;
    }
}

#[inline(always)]
fn activate_loop(act: Activation, x: &[f32], out: &mut [f32]) {
    match act {
        Activation::Silu => map(x, out, |x| x * sigmoid(x)),
        Activation::GeluTanh => map(x, out, gelu_tanh),
        Activation::GeluErf => map(x, out, gelu_erf),
        Activation::Sigmoid => map(x, out, sigmoid),
        Activation::Tanh => map(x, out, |x| 2.0 * sigmoid(2.0 * x) - 1.0),
    }
}

#[inline(always)]
fn map(x: &[f32], out: &mut [f32], f: impl Fn(f32) -> f32) {
    for (o, x) in out.iter_mut().zip(x) {
        *o = f(*x);
    }
}

#[inline(always)]
fn multiply_loop(x: &[f32], out: &mut [f32]) {
    for (o, x) in out.iter_mut().zip(x) {
        *o *= x;
    }
}

#[inline(always)]
fn sum(x: &[f32]) -> f32 {
    let (chunks, rest) = x.as_chunks::<16>();
    let mut acc = [0.0f32; 16];
    for chunk in chunks {
        for i in 0..16 {
            acc[i] += chunk[i];
        }
    }
    acc.iter().sum::<f32>() + rest.iter().sum::<f32>()
}

/// In sixteen partial sums: quick, and more exact than one running sum.
#[inline(always)]
fn sum_of_squares(x: &[f32]) -> f32 {
    let (chunks, rest) = x.as_chunks::<16>();
    let mut acc = [0.0f32; 16];
    for chunk in chunks {
        for i in 0..16 {
            acc[i] += chunk[i] * chunk[i];
        }
    }
    acc.iter().sum::<f32>() + rest.iter().map(|v| v * v).sum::<f32>()
}

#[inline(always)]
fn gated_silu_loop(gate: &[f32], up: &[f32], out: &mut [f32]) {
    for ((o, g), u) in out.iter_mut().zip(gate).zip(up) {
        *o = g * sigmoid(*g) * u;
    }
}

#[inline(always)]
fn gated_gelu_loop(gate: &[f32], up: &[f32], out: &mut [f32]) {
    for ((o, &g), u) in out.iter_mut().zip(gate).zip(up) {
        *o = gelu_tanh(g) * u;
    }
}

/// 0.5·(1 + tanh(z)) = sigmoid(2z) with z = √(2/π)·(x + 0.044715·x³).
#[inline(always)]
fn gelu_tanh(x: f32) -> f32 {
    const TWO_SQRT_2_OVER_PI: f32 = 1.595_769;
    x * sigmoid(TWO_SQRT_2_OVER_PI * (x + 0.044715 * x * x * x))
}

/// x·Φ(x). The smaller tail of the normal distribution, erfc(|x|/√2)/2, is a polynomial in 1/(1 + p·|x|/√2) times exp(-x²/2)
/// (Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26; error of erf below 1.5e-7).
#[inline(always)]
fn gelu_erf(x: f32) -> f32 {
    const P_OVER_SQRT_2: f32 = 0.231_641_9;
    let t = 1.0 / (1.0 + P_OVER_SQRT_2 * x.abs());
    let poly = 1.061_405_4;
    let poly = poly * t - 1.453_152;
    let poly = poly * t + 1.421_413_8;
    let poly = poly * t - 0.284_496_72;
    let poly = poly * t + 0.254_829_6;
    let tail = 0.5 * poly * t * exp(-0.5 * x * x);
    x * if x < 0.0 { tail } else { 1.0 - tail }
}

#[inline(always)]
fn soft_cap_loop(x: &[f32], cap: f32, out: &mut [f32]) {
    let twice_inverse = 2.0 / cap;
    for (o, x) in out.iter_mut().zip(x) {
        *o = cap * (2.0 * sigmoid(twice_inverse * x) - 1.0);
    }
}

#[inline(always)]
fn add_loop(a: &[f32], b: &[f32], out: &mut [f32]) {
    for ((o, a), b) in out.iter_mut().zip(a).zip(b) {
        *o = a + b;
    }
}

#[inline(always)]
fn scale_loop(x: &[f32], factor: f32, out: &mut [f32]) {
    for (o, x) in out.iter_mut().zip(x) {
        *o = x * factor;
    }
}

#[inline(always)]
fn add_scaled_loop(x: &[f32], factor: f32, out: &mut [f32]) {
    for (o, x) in out.iter_mut().zip(x) {
        *o += x * factor;
    }
}

#[inline(always)]
fn gate_loop(x: &[f32], gate: &[f32], out: &mut [f32]) {
    if x.len() == gate.len() {
        for ((o, x), g) in out.iter_mut().zip(x).zip(gate) {
            *o = x * sigmoid(*g);
        }
        return;
    }
    let part = x.len() / gate.len();
    for ((out, x), g) in out.chunks_exact_mut(part).zip(x.chunks_exact(part)).zip(gate) {
        scale_loop(x, sigmoid(*g), out);
    }
}

#[inline(always)]
fn mul_loop(a: &[f32], b: &[f32], out: &mut [f32]) {
    for ((o, a), b) in out.iter_mut().zip(a).zip(b) {
        *o = a * b;
    }
}

#[inline(always)]
fn add_product_loop(a: &[f32], b: &[f32], out: &mut [f32]) {
    for ((o, a), b) in out.iter_mut().zip(a).zip(b) {
        *o += a * b;
    }
}

#[inline(always)]
fn l2_norm_loop(x: &[f32], eps: f32, out: &mut [f32]) {
    scale_loop(x, 1.0 / (sum_of_squares(x) + eps).sqrt(), out);
}

/// A few elements a row: exact rather than quick. For large x the logarithm vanishes in rounding by itself.
#[inline(always)]
fn decay_loop(x: &[f32], bias: &[f32], rate: &[f32], out: &mut [f32]) {
    for (((o, x), b), r) in out.iter_mut().zip(x).zip(bias).zip(rate) {
        let x = x + b;
        *o = r * (x.max(0.0) + (-x.abs()).exp().ln_1p());
    }
}

#[inline(always)]
fn scale_by_exp_loop(top: f32, x: &[f32], factor: f32, out: &mut [f32]) {
    for (o, x) in out.iter_mut().zip(x) {
        *o *= factor * exp(top - x);
    }
}

#[inline(always)]
fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// e^x to two units in the last place, without branches; clamped to the normal range of f32.
///
/// Range reduction to |r| ≤ ln2/2 with ln2 in two parts, then the polynomial of Cephes' `expf`.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // Adding 1.5·2²³ rounds to a whole number and leaves it in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let x = x.clamp(-87.33, 88.37);
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = x - n * 0.693_359_4 + n * 2.121_944_4e-4;
    let p = 1.987_569_1e-4;
    let p = p * r + 1.398_199_9e-3;
    let p = p * r + 8.333_452e-3;
    let p = p * r + 4.166_579_6e-2;
    let p = p * r + 1.666_666_5e-1;
    let p = p * r + 0.5;
    let power = f32::from_bits((shifted.to_bits() << 23).wrapping_add(127 << 23));
    (p * r * r + r + 1.0) * power
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(found: &[f32], expected: &[f64], tolerance: f64) {
        assert_eq!(found.len(), expected.len());
        for (f, e) in found.iter().zip(expected) {
            assert!((f64::from(*f) - e).abs() <= tolerance, "{found:?} is not {expected:?}");
        }
    }

    #[test]
    fn activations_match_the_golden_vectors_on_every_instruction_set() {
        for isa in Isa::available() {
            let mut out = [0.0; 5];
            gated_gelu(isa, &[-2.0, -0.5, 0.5, 1.0, 3.0], &[1.0; 5], &mut out);
            close(&out, &[-0.0454023, -0.1542860, 0.3457140, 0.8411920, 2.9963626], 5e-7);
            let mut out = [0.0; 3];
            gated_silu(isa, &[-2.0, 0.5, 1.0], &[1.0, 1.0, 2.0], &mut out);
            close(&out, &[-0.2384058, 0.3112297, 2.0 * 0.7310586], 2e-7);
            soft_cap(isa, &[-300.0, 0.0, 15.0], 30.0, &mut out);
            close(&out, &[-30.0, 0.0, 30.0 * 0.5f64.tanh()], 4e-6);
        }
    }

    #[test]
    fn a_gate_serves_equal_parts_of_a_row() {
        let half = 1.0 / (1.0 + (-0.5f64).exp());
        for isa in Isa::available() {
            let mut out = [0.0; 4];
            gate(isa, &[1.0, 2.0, 3.0, 4.0], &[0.5, 0.0], &mut out);
            close(&out, &[half, 2.0 * half, 1.5, 2.0], 3e-7);
            gate(isa, &[1.0, 2.0, 3.0, 4.0], &[0.5, 0.0, 0.5, 0.0], &mut out);
            close(&out, &[half, 1.0, 3.0 * half, 2.0], 3e-7);
            add_scaled(isa, &[1.0; 4], 2.0, &mut out);
            close(&out, &[half + 2.0, 3.0, 3.0 * half + 2.0, 4.0], 4e-7);
        }
    }

    #[test]
    fn the_rms_norm_matches_the_golden_vector() {
        for isa in Isa::available() {
            let mut out = [0.0; 4];
            rms_norm(isa, &[1.0, 2.0, 3.0, 4.0], Some(&[1.0, 0.5, 2.0, 1.0]), 1e-6, &mut out);
            close(&out, &[0.365148, 0.365148, 2.190890, 1.460593], 1e-6);
            let x: Vec<f32> = (0..37).map(|i| (i as f32 * 0.7).sin()).collect();
            let mean = x.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / 37.0;
            let expected: Vec<f64> = x.iter().map(|v| f64::from(*v) / (mean + 1e-5).sqrt()).collect();
            let mut out = vec![0.0; 37];
            rms_norm(isa, &x, None, 1e-5, &mut out);
            close(&out, &expected, 1e-6);
        }
    }

    #[test]
    fn the_layer_norm_takes_off_the_mean_and_adds_the_bias() {
        for isa in Isa::available() {
            let x: Vec<f32> = (0..37).map(|i| (i as f32 * 0.7).sin() + 3.0).collect();
            let weight: Vec<f32> = (0..37).map(|i| 1.0 + 0.01 * i as f32).collect();
            let bias: Vec<f32> = (0..37).map(|i| 0.1 * i as f32).collect();
            let mean = x.iter().map(|v| f64::from(*v)).sum::<f64>() / 37.0;
            let variance = x.iter().map(|v| (f64::from(*v) - mean).powi(2)).sum::<f64>() / 37.0;
            let of = |i: usize| (f64::from(x[i]) - mean) / (variance + 1e-12).sqrt();
            let expected: Vec<f64> = (0..37).map(|i| of(i) * f64::from(weight[i]) + f64::from(bias[i])).collect();
            let mut out = vec![0.0; 37];
            layer_norm(isa, &x, &weight, &bias, 1e-12, &mut out);
            close(&out, &expected, 3e-6);
        }
    }

    #[test]
    fn plain_activations_match_the_golden_vectors() {
        // x·Φ(x) to eight places.
        let erf =
            [-4.049_694e-3, -0.045_500_26, -0.158_655_25, -0.154_268_77, 0.0, 0.345_731_23, 0.841_344_75, 2.995_950_3];
        let x = [-3.0, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 3.0];
        for isa in Isa::available() {
            let mut out = [0.0; 8];
            activate(isa, Activation::GeluErf, &x, &mut out);
            close(&out, &erf, 5e-7);
            activate(isa, Activation::Tanh, &x, &mut out);
            close(&out, &x.map(|x| f64::from(x).tanh()), 3e-7);
            let mut gated = [0.0; 8];
            gated_gelu(isa, &x, &[1.0; 8], &mut gated);
            activate(isa, Activation::GeluTanh, &x, &mut out);
            assert_eq!(out, gated);
            activate(isa, Activation::Silu, &x, &mut out);
            multiply(isa, &[2.0; 8], &mut out);
            close(&out, &x.map(|x| 2.0 * f64::from(x) / (1.0 + f64::from(-x).exp())), 1e-6);
        }
    }

    #[test]
    fn exp_is_exact_to_three_units_and_keeps_to_the_normal_range() {
        for i in -87_000..88_000 {
            let x = i as f32 / 1000.0;
            let expected = f64::from(x).exp();
            assert!((f64::from(exp(x)) / expected - 1.0).abs() < 3.0 * f64::from(f32::EPSILON), "exp({x})");
        }
        assert!(exp(f32::NEG_INFINITY) < 1.3e-38 && exp(f32::INFINITY).is_finite() && exp(f32::NAN).is_nan());
        assert_eq!(exp(0.0), 1.0);
    }
}
