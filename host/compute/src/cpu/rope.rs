//! Rotary embedding: frequencies of a [`Rope`] description, angles of a position, rotation of a head.

use std::f64::consts::PI;

use crate::graph::{Rope, RopePairing, RopeScaling};

/// A rope with its frequencies worked out.
#[derive(Debug, Clone, PartialEq)]
pub struct Rotary {
    pairing: RopePairing,
    /// Angle per position of each of the `n_rot / 2` pairs.
    frequencies: Vec<f64>,
    /// Factor on cosine and sine (YaRN; else 1).
    magnitude: f64,
}

impl Rotary {
    /// The frequencies of `rope`; `divisors` are the values of its `freq_divisors`, one a pair, if it has any.
    pub fn new(rope: &Rope, divisors: Option<&[f32]>) -> Rotary {
        let base = f64::from(rope.base);
        let plain = |i: usize| {
            let divisor = divisors.map_or(1.0, |d| f64::from(d[i]));
            base.powf(-2.0 * i as f64 / rope.n_rot as f64) / divisor
        };
        let frequencies: Vec<f64> = (0..rope.n_rot / 2).map(plain).collect();
        let (frequencies, magnitude) = scaled(rope, frequencies);
        Rotary { pairing: rope.pairing, frequencies, magnitude }
    }

    /// Leading elements of a head that rotate.
    pub fn n_rot(&self) -> usize {
        self.frequencies.len() * 2
    }

    /// Angle per position of each pair.
    pub fn frequencies(&self) -> &[f64] {
        &self.frequencies
    }

    /// Factor on cosine and sine.
    pub fn magnitude(&self) -> f64 {
        self.magnitude
    }

    /// Writes the `n_rot / 2` cosines of `position`, then as many sines, to `table` (`n_rot` elements).
    ///
    /// Angles are in f64: in f32 they would be off by thousandths of a radian at position 100,000.
    pub fn angles(&self, position: u32, table: &mut [f32]) {
        let (cos, sin) = table.split_at_mut(self.frequencies.len());
        for ((c, s), f) in cos.iter_mut().zip(sin).zip(&self.frequencies) {
            let (sine, cosine) = (f64::from(position) * f).sin_cos();
            *c = (cosine * self.magnitude) as f32;
            *s = (sine * self.magnitude) as f32;
        }
    }

    /// Rotates the leading elements of one head by a table from [`angles`](Self::angles).
    pub fn rotate(&self, table: &[f32], head: &mut [f32]) {
        let pairs = self.frequencies.len();
        let (cos, sin) = table.split_at(pairs);
        match self.pairing {
            RopePairing::Norm => {
                for ((pair, &c), &s) in head.as_chunks_mut::<2>().0.iter_mut().zip(cos).zip(sin) {
                    let [a, b] = *pair;
                    *pair = [a * c - b * s, a * s + b * c];
                }
            }
            RopePairing::Neox => {
                let (first, second) = head[..2 * pairs].split_at_mut(pairs);
                for i in 0..pairs {
                    let (a, b) = (first[i], second[i]);
                    first[i] = a * cos[i] - b * sin[i];
                    second[i] = a * sin[i] + b * cos[i];
                }
            }
        }
    }
}

/// Applies the context extension: new frequencies and the factor on cosine and sine.
fn scaled(rope: &Rope, mut f: Vec<f64>) -> (Vec<f64>, f64) {
    match rope.scaling {
        RopeScaling::None => (f, 1.0),
        RopeScaling::Linear { factor } => {
            f.iter_mut().for_each(|f| *f /= f64::from(factor));
            (f, 1.0)
        }
        RopeScaling::Yarn { factor, original_context, ext_factor, attn_factor, beta_fast, beta_slow } => {
            let (factor, ext) = (f64::from(factor), f64::from(ext_factor));
            let (lo, hi) = yarn_ramp(rope, f64::from(original_context), f64::from(beta_fast), f64::from(beta_slow));
            for (i, f) in f.iter_mut().enumerate() {
                let ramp = ((i as f64 - lo) / (hi - lo).max(0.001)).clamp(0.0, 1.0);
                let keep = (1.0 - ramp) * ext;
                *f = *f / factor * (1.0 - keep) + *f * keep;
            }
            // Without extrapolation YaRN is linear scaling, which leaves the magnitude alone.
            let magnitude = if ext == 0.0 { 1.0 } else { 0.1 * factor.ln() + 1.0 };
            (f, magnitude * f64::from(attn_factor))
        }
        RopeScaling::LongRope { attn_factor, .. } => (f, f64::from(attn_factor)),
        RopeScaling::Llama3 { factor, low, high, original_context } => {
            let (factor, low, high) = (f64::from(factor), f64::from(low), f64::from(high));
            for f in &mut f {
                // Turns that a pair makes within the original context: few turns are slowed, many are kept.
                let turns = f64::from(original_context) * *f / (2.0 * PI);
                let smooth = ((turns - low) / (high - low)).clamp(0.0, 1.0);
                *f /= 1.0 / ((1.0 - smooth) / factor + smooth);
            }
            (f, 1.0)
        }
    }
}

/// Pair indices between which YaRN goes from keeping frequencies to interpolating them: where a pair turns
/// `beta_fast` and `beta_slow` times within the original context.
fn yarn_ramp(rope: &Rope, original_context: f64, beta_fast: f64, beta_slow: f64) -> (f64, f64) {
    let n_rot = rope.n_rot as f64;
    let pair_of = |turns: f64| n_rot * (original_context / (2.0 * PI * turns)).ln() / (2.0 * f64::from(rope.base).ln());
    (pair_of(beta_fast).floor().max(0.0), pair_of(beta_slow).ceil().min(n_rot - 1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rope(pairing: RopePairing, n_rot: usize, base: f32) -> Rope {
        Rope { pairing, n_rot, base, scaling: RopeScaling::None, freq_divisors: None }
    }

    fn rotated(rotary: &Rotary, position: u32) -> Vec<f32> {
        let mut head: Vec<f32> = (1..=8).map(|x| x as f32).collect();
        let mut table = vec![0.0; rotary.n_rot()];
        rotary.angles(position, &mut table);
        rotary.rotate(&table, &mut head);
        head
    }

    fn assert_close(found: &[f32], expected: &[f64], tolerance: f64) {
        assert_eq!(found.len(), expected.len());
        for (f, e) in found.iter().zip(expected) {
            assert!((f64::from(*f) - e).abs() <= tolerance, "{found:?} is not {expected:?}");
        }
    }

    #[test]
    fn pairings_and_partial_rotation_match_the_golden_vectors() {
        let norm = [-1.272233, -1.838865, 1.683929, 4.707907, 4.817777, 6.147278, 6.975969, 8.020964];
        let neox = [-1.695593, 0.137552, 2.788682, 3.975982, -4.808842, 6.323059, 7.086837, 8.011964];
        let partial = [-1.413353, 1.879118, -2.828857, 4.058191, 5.0, 6.0, 7.0, 8.0];
        assert_close(&rotated(&Rotary::new(&rope(RopePairing::Norm, 8, 1e4), None), 3), &norm, 2e-6);
        assert_close(&rotated(&Rotary::new(&rope(RopePairing::Neox, 8, 1e4), None), 3), &neox, 2e-6);
        assert_close(&rotated(&Rotary::new(&rope(RopePairing::Neox, 4, 1e4), None), 3), &partial, 2e-6);
    }

    #[test]
    fn a_divisor_of_1e30_stops_a_pair() {
        let rotary = Rotary::new(&rope(RopePairing::Neox, 8, 1e6), Some(&[1.0, 1e30, 1e30, 1e30]));
        assert_close(&rotated(&rotary, 3), &[-1.695593, 2.0, 3.0, 4.0, -4.808842, 6.0, 7.0, 8.0], 2e-6);
    }

    #[test]
    fn yarn_matches_the_golden_vector() {
        let scaling = RopeScaling::Yarn {
            factor: 4.0,
            original_context: 32768,
            ext_factor: 1.0,
            attn_factor: 1.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
        };
        let rope = Rope { scaling, ..rope(RopePairing::Neox, 128, 1e6) };
        assert_eq!(yarn_ramp(&rope, 32768.0, 32.0, 1.0), (23.0, 40.0));
        let rotary = Rotary::new(&rope, None);
        let expected = [1.0, 0.0133352, 0.00537532, 0.00106436, 0.000246258, 0.0000444570];
        for (i, e) in [0, 20, 24, 30, 35, 40].into_iter().zip(expected) {
            assert!((rotary.frequencies()[i] / e - 1.0).abs() < 1e-5, "pair {i}: {}", rotary.frequencies()[i]);
        }
        assert!((rotary.magnitude() - 1.1386294).abs() < 1e-6);
    }

    #[test]
    fn linear_scaling_divides_every_angle() {
        let linear = Rope { scaling: RopeScaling::Linear { factor: 8.0 }, ..rope(RopePairing::Neox, 8, 1e4) };
        let (scaled, plain) = (Rotary::new(&linear, None), Rotary::new(&rope(RopePairing::Neox, 8, 1e4), None));
        assert_eq!(rotated(&scaled, 24), rotated(&plain, 3));
    }

    #[test]
    fn longrope_divides_frequencies_by_its_factors_and_multiplies_what_it_rotates() {
        let scaling = RopeScaling::LongRope { original_context: 4096, attn_factor: 1.19 };
        let rotary = Rotary::new(&Rope { scaling, ..rope(RopePairing::Neox, 8, 1e4) }, Some(&[1.0, 2.0, 4.0, 8.0]));
        let plain = Rotary::new(&rope(RopePairing::Neox, 8, 1e4), None);
        for (i, divisor) in [1.0, 2.0, 4.0, 8.0].into_iter().enumerate() {
            assert_eq!(rotary.frequencies()[i], plain.frequencies()[i] / divisor);
        }
        let expected: Vec<f64> = (1..=8).map(|x| 1.19 * f64::from(x)).collect();
        assert_close(&rotated(&rotary, 0), &expected, 2e-6);
    }

    #[test]
    fn llama3_scaling_keeps_fast_pairs_and_slows_slow_ones() {
        let scaling = RopeScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original_context: 8192 };
        let rope = Rope { scaling, ..rope(RopePairing::Norm, 128, 5e5) };
        let (scaled, plain) =
            (Rotary::new(&rope, None), Rotary::new(&Rope { scaling: RopeScaling::None, ..rope }, None));
        let ratio = |i: usize| plain.frequencies()[i] / scaled.frequencies()[i];
        assert!((ratio(0) - 1.0).abs() < 1e-12 && (ratio(63) - 8.0).abs() < 1e-12);
        // Pair 32: wavelength 2π·√(5e5) = 4443, so s = (8192/4443 − 1)/3 and the divisor 1/((1 − s)/8 + s).
        let s = (8192.0 / (2.0 * PI * 5e5f64.sqrt()) - 1.0) / 3.0;
        assert!((ratio(32) - 1.0 / ((1.0 - s) / 8.0 + s)).abs() < 1e-6);
    }
}
