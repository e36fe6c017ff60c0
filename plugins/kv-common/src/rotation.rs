//! The signed rotation of the turbo and trellis codecs: random signs, a Hadamard transform, random signs again.
//!
//! It spreads every channel evenly over a *group* of channels, so that a group of a unit vector looks like independent
//! normal values of variance `1 / group`, whatever the vector was. A head of `128 m` values is `m` groups of 128; a head
//! of 64 or 96 is one group. 96 is no power of two: its transform is a Hadamard matrix of order 12 (Paley's second
//! construction over the field of 5) times one of order 8.

use crate::wht::wht;

/// Largest group.
pub const MAX_GROUP: usize = 128;

/// Signs before the transform, entry 0 in the lowest bit; 1 is +1. First draw of NumPy's
/// `default_rng(42).choice([-1, 1], 128)`, as in public TurboQuant code.
const FIRST: u128 = signs(
    b"01100101001111111010100111011000011011010110010111100000101111010010001000100011100111001101101001101010111101011011000001101101",
);
/// Signs behind the transform: the second draw.
const SECOND: u128 = signs(
    b"11110110100010001100101010010111110001000000111010111001000000111010000101010011010110100001001010111001010110010101101010000010",
);

const fn signs(digits: &[u8; MAX_GROUP]) -> u128 {
    let (mut bits, mut i) = (0, 0);
    while i < MAX_GROUP {
        bits |= ((digits[i] - b'0') as u128) << i;
        i += 1;
    }
    bits
}

/// A Hadamard matrix of order 12, symmetric: `C x [[1, 1], [1, -1]] + I x [[1, -1], [-1, -1]]` with the conference matrix
/// `C` of order 6 whose core is the quadratic character of the field of 5.
const ORDER_12: [[f32; 12]; 12] = order_12();

const fn order_12() -> [[f32; 12]; 12] {
    // 0 for 0, 1 for squares modulo 5, -1 for the others.
    let character = [0f32, 1.0, -1.0, -1.0, 1.0];
    let (on, off) = ([[1f32, -1.0], [-1.0, -1.0]], [[1f32, 1.0], [1.0, -1.0]]);
    let mut h = [[0.0; 12]; 12];
    let mut i = 0;
    while i < 144 {
        let (row, column) = (i / 12, i % 12);
        let (r, c) = (row / 2, column / 2);
        h[row][column] = if r == c {
            on[row % 2][column % 2]
        } else {
            let conference = if r == 0 || c == 0 { 1.0 } else { character[(5 + r - c) % 5] };
            conference * off[row % 2][column % 2]
        };
        i += 1;
    }
    h
}

/// The rotation of rows of one head size.
#[derive(Clone, Debug)]
pub struct SignedRotation {
    group: usize,
    first: [f32; MAX_GROUP],
    second: [f32; MAX_GROUP],
}

impl SignedRotation {
    /// The rotation of rows of `head_dim` values; `None` unless that is 64, 96 or a multiple of 128.
    pub fn new(head_dim: usize) -> Option<Self> {
        let group = match head_dim {
            64 | 96 => head_dim,
            d if d > 0 && d.is_multiple_of(MAX_GROUP) => MAX_GROUP,
            _ => return None,
        };
        let unpacked = |bits: u128| std::array::from_fn(|i| if bits >> i & 1 == 1 { 1.0 } else { -1.0 });
        Some(SignedRotation { group, first: unpacked(FIRST), second: unpacked(SECOND) })
    }

    /// Values in a group.
    pub fn group(&self) -> usize {
        self.group
    }

    /// Brings a row, or whole groups of one, into the rotated basis.
    pub fn forward(&self, row: &mut [f32]) {
        self.apply(row, &self.first, &self.second);
    }

    /// Back from the rotated basis.
    pub fn inverse(&self, row: &mut [f32]) {
        self.apply(row, &self.second, &self.first);
    }

    fn apply(&self, row: &mut [f32], before: &[f32; MAX_GROUP], after: &[f32; MAX_GROUP]) {
        for group in row.chunks_exact_mut(self.group) {
            group.iter_mut().zip(before).for_each(|(x, s)| *x *= s);
            match self.group {
                96 => hadamard_96(group),
                n => wht(group, n),
            }
            group.iter_mut().zip(after).for_each(|(x, s)| *x *= s);
        }
    }
}

/// Orthonormal Hadamard transform of 96 values, symmetric and so its own inverse.
fn hadamard_96(x: &mut [f32]) {
    wht(x, 8);
    let mut out = [[0.0; 8]; 12];
    let scale = 1.0 / 12f32.sqrt();
    for (to, signs) in out.iter_mut().zip(&ORDER_12) {
        for (eight, sign) in x.as_chunks::<8>().0.iter().zip(signs) {
            to.iter_mut().zip(eight).for_each(|(to, v)| *to += sign * v);
        }
        to.iter_mut().for_each(|v| *v *= scale);
    }
    x.copy_from_slice(out.as_flattened());
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{RngExt, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    fn row(rng: &mut ChaCha8Rng, d: usize) -> Vec<f32> {
        (0..d).map(|_| rng.random_range(-1.0..1.0)).collect()
    }

    fn dot(a: &[f32], b: &[f32]) -> f64 {
        a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
    }

    #[test]
    fn going_there_and_back_gives_the_row_and_products_stay() {
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        for d in [64, 96, 128, 256, 512] {
            let rotation = SignedRotation::new(d).unwrap();
            let (q, k) = (row(&mut rng, d), row(&mut rng, d));
            let (mut rq, mut rk) = (q.clone(), k.clone());
            rotation.forward(&mut rq);
            rotation.forward(&mut rk);
            let scale = (dot(&q, &q) * dot(&k, &k)).sqrt();
            assert!((dot(&rq, &rk) - dot(&q, &k)).abs() < 1e-5 * scale, "{d}");
            rotation.inverse(&mut rq);
            assert!(q.iter().zip(&rq).all(|(a, b)| (a - b).abs() < 1e-5), "{d}");
        }
    }

    #[test]
    fn a_channel_is_spread_evenly_over_its_group_and_no_further() {
        for d in [64, 96, 256] {
            let rotation = SignedRotation::new(d).unwrap();
            let group = rotation.group();
            for c in [0, 1, group - 1] {
                let mut x = vec![0.0; d];
                x[c] = 1.0;
                rotation.forward(&mut x);
                let size = 1.0 / (group as f32).sqrt();
                assert!(x[..group].iter().all(|v| (v.abs() - size).abs() < 1e-6), "{d} {c}");
                assert!(x[group..].iter().all(|v| *v == 0.0));
            }
        }
    }

    #[test]
    fn the_signs_are_those_of_public_code() {
        assert_eq!(FIRST, 0xb60d_af56_5b39_c444_bd07_a6b6_1b95_fca6);
        assert_eq!(SECOND, 0x415a_9a9d_485a_ca85_c09d_7023_e953_116f);
    }

    #[test]
    fn other_head_sizes_have_no_rotation() {
        assert!([0, 32, 80, 160, 192, 576].iter().all(|&d| SignedRotation::new(d).is_none()));
    }
}
