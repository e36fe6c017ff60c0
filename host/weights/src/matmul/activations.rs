//! Activations quantised to sixteen bits: blocks of 32 codes with one f32 scale, and the sums of their values.
//!
//! A row is kept in one run of f32-sized words, so that it lives in an executor's ordinary buffers: the codes, the
//! scales, the sums of each 32 values, the sums of each 16. Scales and sums are padded with zeros to whole vectors.

use crate::simd::{Isa, Level};

/// Values with a common scale.
pub(super) const BLOCK: usize = 32;

/// Scales and sums are padded to a multiple of this many.
pub(super) const PAD: usize = 16;

/// Where the parts of a quantised row of `cols` values lie, in f32 words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) cols: usize,
    pub(super) scales: usize,
    pub(super) sums32: usize,
    pub(super) sums16: usize,
    pub(super) words: usize,
}

impl Layout {
    /// `cols` must be a multiple of [`BLOCK`].
    pub(super) fn new(cols: usize) -> Layout {
        assert!(cols.is_multiple_of(BLOCK), "a row of {cols} does not divide into blocks of {BLOCK}");
        let (blocks, halves) = ((cols / BLOCK).next_multiple_of(PAD), (cols / 16).next_multiple_of(PAD));
        let scales = cols / 2;
        let sums32 = scales + blocks;
        let sums16 = sums32 + blocks;
        Layout { cols, scales, sums32, sums16, words: sums16 + halves }
    }
}

/// f32 words of a quantised row of `cols` values.
pub fn quantized_words(cols: usize) -> usize {
    Layout::new(cols).words
}

/// Quantises the row `x` into `row`, which has [`quantized_words`] elements.
pub fn quantize_activations(isa: Isa, x: &[f32], row: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    fn avx2(x: &[f32], row: &mut [f32]) {
        quantize(x, row);
    }
    match isa.level() {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `isa` proves that the processor has AVX2.
        Level::Avx2 | Level::AvxVnni | Level::Avx512 => unsafe { avx2(x, row) },
        _ => quantize(x, row),
    }
}

#[inline(always)]
fn quantize(x: &[f32], row: &mut [f32]) {
    let layout = Layout::new(x.len());
    assert_eq!(row.len(), layout.words, "words of a quantised row");
    let (codes, rest) = row.split_at_mut(layout.scales);
    rest.fill(0.0);
    let codes: &mut [i16] = bytemuck::cast_slice_mut(codes);
    for (b, (x, codes)) in x.as_chunks::<BLOCK>().0.iter().zip(codes.as_chunks_mut::<BLOCK>().0).enumerate() {
        // Magnitudes compare like their bits, and what is no number is the greatest.
        let peak = f32::from_bits(x.iter().fold(0, |m, v| m.max(v.abs().to_bits())));
        let scale = peak / 32767.0;
        let inverse = if peak > 0.0 { 32767.0 / peak } else { 0.0 };
        for i in 0..BLOCK {
            codes[i] = nearest(x[i] * inverse);
        }
        let sum = |codes: &[i16]| codes.iter().map(|c| i32::from(*c)).sum::<i32>() as f32 * scale;
        let (first, second) = (sum(&codes[..16]), sum(&codes[16..]));
        rest[b] = scale;
        rest[layout.sums32 - layout.scales + b] = first + second;
        rest[layout.sums16 - layout.scales + 2 * b] = first;
        rest[layout.sums16 - layout.scales + 2 * b + 1] = second;
    }
}

/// The nearest whole number, for |x| up to 32767: adding 1.5·2²³ leaves it in the low bits. What is infinite or no number
/// gives some code; its block's scale carries it into the result.
#[inline(always)]
fn nearest(x: f32) -> i16 {
    (x + 12_582_912.0).to_bits() as i16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_scales_and_sums_give_the_values_back() {
        let x: Vec<f32> = (0..96).map(|i| (i as f32 * 0.37).sin() * if i < 32 { 1e-3 } else { 5.0 }).collect();
        for isa in Isa::available() {
            let mut row = vec![f32::NAN; quantized_words(96)];
            quantize_activations(isa, &x, &mut row);
            let layout = Layout::new(96);
            let codes: &[i16] = bytemuck::cast_slice(&row[..layout.scales]);
            for b in 0..3 {
                let scale = row[layout.scales + b];
                let values: Vec<f32> = (0..32).map(|i| f32::from(codes[b * 32 + i]) * scale).collect();
                for (v, x) in values.iter().zip(&x[b * 32..]) {
                    assert!((v - x).abs() <= scale * 0.51, "{v} {x}");
                }
                let close = |sum: f32, values: &[f32]| (sum - values.iter().sum::<f32>()).abs() < 1e-4;
                assert!(close(row[layout.sums32 + b], &values));
                assert!(close(row[layout.sums16 + 2 * b], &values[..16]));
                assert!(close(row[layout.sums16 + 2 * b + 1], &values[16..]));
            }
            assert_eq!(row[layout.scales + 3..layout.sums32], [0.0; 13]);
        }
    }

    #[test]
    fn a_row_of_zeros_is_zero_and_what_is_not_finite_is_not_lost() {
        let mut row = vec![f32::NAN; quantized_words(32)];
        quantize_activations(Isa::detect(), &[0.0; 32], &mut row);
        assert!(row.iter().all(|v| *v == 0.0));
        for lost in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
            let mut x = [1.0; 32];
            x[3] = lost;
            quantize_activations(Isa::detect(), &x, &mut row);
            assert!(!row[Layout::new(32).scales].is_finite());
        }
    }
}
