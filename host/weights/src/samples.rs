//! Random weights and activations, for tests.

use rand::RngExt;
use rand_chacha::ChaCha8Rng;

use crate::quant::{WeightType, dequantize_row};

/// Random rows of any type whose values are finite and of ordinary size.
///
/// # Panics
/// If `cols` is no whole number of the type's blocks.
pub fn random_rows(ty: WeightType, rows: usize, cols: usize, rng: &mut ChaCha8Rng) -> Vec<u8> {
    let (block, len) = (ty.block_bytes(), ty.block_len());
    let mut values = vec![0.0; len];
    let mut data = Vec::new();
    while data.len() < ty.row_bytes(cols).unwrap() * rows {
        let bytes: Vec<u8> = (0..block).map(|_| rng.random()).collect();
        dequantize_row(ty, &bytes, &mut values).unwrap();
        let peak = values.iter().fold(0.0f32, |a, v| if v.is_finite() { a.max(v.abs()) } else { f32::INFINITY });
        if peak < 4.0 {
            data.extend(bytes);
        }
    }
    data
}

/// Numbers between −1 and 1.
pub fn random_floats(n: usize, rng: &mut ChaCha8Rng) -> Vec<f32> {
    (0..n).map(|_| rng.random_range(-1.0..1.0)).collect()
}
