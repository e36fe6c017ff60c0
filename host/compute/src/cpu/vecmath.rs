//! Row functions of the executor: norms, gated activations, soft caps, sums.
//!
//! They are plain loops that the compiler turns into vector code, compiled once for each instruction set.

use super::simd::{Isa, Level};

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
    // 0.5·(1 + tanh(z)) = sigmoid(2z) with z = √(2/π)·(x + 0.044715·x³).
    const TWO_SQRT_2_OVER_PI: f32 = 1.595_769;
    for ((o, &g), u) in out.iter_mut().zip(gate).zip(up) {
        *o = g * sigmoid(TWO_SQRT_2_OVER_PI * (g + 0.044715 * g * g * g)) * u;
    }
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
    let part = x.len() / gate.len();
    if part == 1 {
        for ((o, x), g) in out.iter_mut().zip(x).zip(gate) {
            *o = x * sigmoid(*g);
        }
        return;
    }
    for ((out, x), g) in out.chunks_exact_mut(part).zip(x.chunks_exact(part)).zip(gate) {
        scale_loop(x, sigmoid(*g), out);
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
