//! Quantised weight rows as byte codes with scales and minima: the form in which [`integer`](super::integer) multiplies.
//!
//! Value `i` of sub-block `s` is `scale[s]·code[i] + min[s]`, for sub-blocks of 32 or 16 values. A constant that a
//! format takes from its codes (8 in Q4_0, 32 in Q6_K) goes into the minimum, so that codes are small and unsigned;
//! only Q8_0, with codes of a whole byte, keeps them signed.

use crate::cpu::simd::{Isa, Level};
use crate::quant::k::{q3_scale, scale_min};
use crate::quant::{WeightType, f16_to_f32};

/// How a type's codes are to be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Form {
    /// Codes are −128 ..= 127 and minima zero; else 0 ..= 63 with minima.
    pub(super) signed: bool,
    /// Values with a common scale and minimum: 16 or 32.
    pub(super) sub: usize,
}

/// The integer form of a type, `None` for those that are multiplied in f32.
pub(super) fn form(ty: WeightType) -> Option<Form> {
    match ty {
        WeightType::Q4_0 | WeightType::Q4_1 | WeightType::Q5_0 | WeightType::Q5_1 => {
            Some(Form { signed: false, sub: 32 })
        }
        WeightType::Q4_K | WeightType::Q5_K => Some(Form { signed: false, sub: 32 }),
        WeightType::Q2_K | WeightType::Q3_K | WeightType::Q6_K => Some(Form { signed: false, sub: 16 }),
        WeightType::Q8_0 => Some(Form { signed: true, sub: 32 }),
        _ => None,
    }
}

/// Rows to unpack into: codes `cols` apart, scales and minima for each sub-block `stride` apart. What lies between the
/// sub-blocks of one row and the next row stays as it is, and so do the minima of a signed form.
pub(super) struct Rows<'a> {
    pub(super) codes: &'a mut [u8],
    pub(super) scales: &'a mut [f32],
    pub(super) minima: &'a mut [f32],
    pub(super) cols: usize,
    pub(super) stride: usize,
}

/// Unpacks rows of a type that has a [`form`], `row_bytes` each.
pub(super) fn unpack(isa: Isa, ty: WeightType, bytes: &[u8], row_bytes: usize, rows: Rows<'_>) {
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,f16c")]
    fn avx2(ty: WeightType, bytes: &[u8], row_bytes: usize, rows: Rows<'_>) {
        unpack_rows::<true>(ty, bytes, row_bytes, rows);
    }
    match isa.level() {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `isa` proves that the processor has AVX2 and F16C.
        Level::Avx2 | Level::AvxVnni | Level::Avx512 => unsafe { avx2(ty, bytes, row_bytes, rows) },
        _ => unpack_rows::<false>(ty, bytes, row_bytes, rows),
    }
}

/// Runs a block function over rows. A macro, not a function that takes one: a call through `Fn` would be compiled
/// apart, without the instruction set of the caller.
macro_rules! per_block {
    ($bytes:expr, $row_bytes:expr, $rows:expr, $block:path) => {{
        let Rows { codes, scales, minima, cols, stride } = $rows;
        let side = scales.chunks_exact_mut(stride).zip(minima.chunks_exact_mut(stride));
        for ((bytes, codes), (scales, minima)) in
            $bytes.chunks_exact($row_bytes).zip(codes.chunks_exact_mut(cols)).zip(side)
        {
            let (bytes, codes) = (bytes.as_chunks().0, codes.as_chunks_mut().0);
            let (scales, minima) = (scales.as_chunks_mut().0, minima.as_chunks_mut().0);
            for (((b, c), s), m) in bytes.iter().zip(codes).zip(scales).zip(minima) {
                $block(b, c, s, m);
            }
        }
    }};
}

#[inline(always)]
fn unpack_rows<const AVX2: bool>(ty: WeightType, bytes: &[u8], row_bytes: usize, rows: Rows<'_>) {
    match ty {
        WeightType::Q4_0 => per_block!(bytes, row_bytes, rows, q4_0::<AVX2>),
        WeightType::Q4_1 => per_block!(bytes, row_bytes, rows, q4_1::<AVX2>),
        WeightType::Q5_0 => per_block!(bytes, row_bytes, rows, q5_0::<AVX2>),
        WeightType::Q5_1 => per_block!(bytes, row_bytes, rows, q5_1::<AVX2>),
        WeightType::Q8_0 => per_block!(bytes, row_bytes, rows, q8_0::<AVX2>),
        WeightType::Q2_K => per_block!(bytes, row_bytes, rows, q2_k::<AVX2>),
        WeightType::Q3_K => per_block!(bytes, row_bytes, rows, q3_k::<AVX2>),
        WeightType::Q4_K => per_block!(bytes, row_bytes, rows, q4_k::<AVX2>),
        WeightType::Q5_K => per_block!(bytes, row_bytes, rows, q5_k::<AVX2>),
        WeightType::Q6_K => per_block!(bytes, row_bytes, rows, q6_k::<AVX2>),
        _ => unreachable!("{ty} has no integer form"),
    }
}

/// The half-precision scale at `at`; by the processor's instruction where it is there.
#[inline(always)]
fn f16_at<const AVX2: bool>(b: &[u8], at: usize) -> f32 {
    let bits = u16::from_le_bytes([b[at], b[at + 1]]);
    #[cfg(target_arch = "x86_64")]
    if AVX2 {
        use std::arch::x86_64::{_mm_cvtph_ps, _mm_cvtsi32_si128, _mm_cvtss_f32};
        // SAFETY: only `unpack` chooses `AVX2`, on a processor that has F16C, too.
        return unsafe { _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(bits.into()))) };
    }
    f16_to_f32(bits)
}

/// Bytes `at .. at + N`.
#[inline(always)]
fn bytes<const N: usize>(b: &[u8], at: usize) -> &[u8; N] {
    b[at..].first_chunk().expect("blocks have their type's length")
}

/// Eight bytes from `at` on, the first one lowest. Where a loop over bytes is not turned into vector code,
/// codes are unpacked eight at a time in ordinary registers.
#[inline(always)]
fn word(b: &[u8], at: usize) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&b[at..at + 8]);
    u64::from_le_bytes(bytes)
}

/// Stores eight codes from `at` on.
#[inline(always)]
fn put(codes: &mut [u8], at: usize, word: u64) {
    codes[at..at + 8].copy_from_slice(&word.to_le_bytes());
}

/// A byte's value in all eight bytes of a word.
const fn each(byte: u8) -> u64 {
    0x0101_0101_0101_0101 * byte as u64
}

/// Sixteen bytes of nibbles: the low ones, then the high ones.
#[inline(always)]
fn nibbles(packed: &[u8; 16], codes: &mut [u8; 32]) {
    for i in 0..16 {
        codes[i] = packed[i] & 15;
        codes[16 + i] = packed[i] >> 4;
    }
}

/// The same with a mask of 32 fifth bits.
#[inline(always)]
fn nibbles_and_fifth_bits<const AVX2: bool>(packed: &[u8; 16], mask: &[u8; 4], codes: &mut [u8; 32]) {
    nibbles(packed, codes);
    let fifth = fifth_bits::<AVX2>(mask);
    for i in 0..32 {
        codes[i] |= fifth[i];
    }
}

/// Each bit of the mask as bit 4 of a byte of its own.
#[inline(always)]
fn fifth_bits<const AVX2: bool>(mask: &[u8; 4]) -> [u8; 32] {
    let mut fifth = [0; 32];
    #[cfg(target_arch = "x86_64")]
    if AVX2 {
        use std::arch::x86_64::*;
        // SAFETY: only `unpack` chooses `AVX2`, on a processor that has it; 32 bytes are stored into as many.
        unsafe {
            // Byte `i` of the mask, eight times, then one bit of each.
            let spread = _mm256_setr_epi64x(0, 0x0101_0101_0101_0101, 0x0202_0202_0202_0202, 0x0303_0303_0303_0303);
            let bit = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64.cast_signed());
            let bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(i32::from_le_bytes(*mask)), spread);
            let set = _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit), bit);
            _mm256_storeu_si256(fifth.as_mut_ptr().cast(), _mm256_and_si256(set, _mm256_set1_epi8(16)));
        }
        return fifth;
    }
    for i in 0..32 {
        fifth[i] = (mask[i / 8] >> (i % 8) & 1) << 4;
    }
    fifth
}

#[inline(always)]
fn q4_0<const AVX2: bool>(b: &[u8; 18], codes: &mut [u8; 32], scale: &mut [f32; 1], min: &mut [f32; 1]) {
    let d = f16_at::<AVX2>(b, 0);
    (scale[0], min[0]) = (d, -8.0 * d);
    nibbles(bytes(b, 2), codes);
}

#[inline(always)]
fn q4_1<const AVX2: bool>(b: &[u8; 20], codes: &mut [u8; 32], scale: &mut [f32; 1], min: &mut [f32; 1]) {
    (scale[0], min[0]) = (f16_at::<AVX2>(b, 0), f16_at::<AVX2>(b, 2));
    nibbles(bytes(b, 4), codes);
}

#[inline(always)]
fn q5_0<const AVX2: bool>(b: &[u8; 22], codes: &mut [u8; 32], scale: &mut [f32; 1], min: &mut [f32; 1]) {
    let d = f16_at::<AVX2>(b, 0);
    (scale[0], min[0]) = (d, -16.0 * d);
    nibbles_and_fifth_bits::<AVX2>(bytes(b, 6), bytes(b, 2), codes);
}

#[inline(always)]
fn q5_1<const AVX2: bool>(b: &[u8; 24], codes: &mut [u8; 32], scale: &mut [f32; 1], min: &mut [f32; 1]) {
    (scale[0], min[0]) = (f16_at::<AVX2>(b, 0), f16_at::<AVX2>(b, 2));
    nibbles_and_fifth_bits::<AVX2>(bytes(b, 8), bytes(b, 4), codes);
}

#[inline(always)]
fn q8_0<const AVX2: bool>(b: &[u8; 34], codes: &mut [u8; 32], scale: &mut [f32; 1], _: &mut [f32; 1]) {
    scale[0] = f16_at::<AVX2>(b, 0);
    codes.copy_from_slice(&b[2..]);
}

#[inline(always)]
fn q2_k<const AVX2: bool>(b: &[u8; 84], codes: &mut [u8; 256], scales: &mut [f32; 16], minima: &mut [f32; 16]) {
    let (d, dmin) = (f16_at::<AVX2>(b, 80), f16_at::<AVX2>(b, 82));
    for n in 0..16 {
        scales[n] = d * f32::from(b[n] & 15);
        minima[n] = -dmin * f32::from(b[n] >> 4);
    }
    for half in 0..2 {
        for i in [0, 8, 16, 24] {
            let packed = word(b, 16 + half * 32 + i);
            for pair in 0..4 {
                put(codes, half * 128 + pair * 32 + i, packed >> (2 * pair) & each(3));
            }
        }
    }
}

#[inline(always)]
fn q3_k<const AVX2: bool>(b: &[u8; 110], codes: &mut [u8; 256], scales: &mut [f32; 16], minima: &mut [f32; 16]) {
    let d = f16_at::<AVX2>(b, 108);
    for n in 0..16 {
        scales[n] = d * f32::from(q3_scale(&b[96..108], n));
        minima[n] = -4.0 * scales[n];
    }
    for half in 0..2 {
        for i in [0, 8, 16, 24] {
            let (packed, high) = (word(b, 32 + half * 32 + i), word(b, i) >> (4 * half));
            for pair in 0..4 {
                let third = (high >> pair & each(1)) << 2;
                put(codes, half * 128 + pair * 32 + i, packed >> (2 * pair) & each(3) | third);
            }
        }
    }
}

/// Scales and minima of Q4_K and Q5_K.
#[inline(always)]
fn k_scales<const AVX2: bool>(b: &[u8], scales: &mut [f32; 8], minima: &mut [f32; 8]) {
    let (d, dmin) = (f16_at::<AVX2>(b, 0), f16_at::<AVX2>(b, 2));
    for n in 0..8 {
        let (scale, min) = scale_min(&b[4..16], n);
        scales[n] = d * f32::from(scale);
        minima[n] = -dmin * f32::from(min);
    }
}

#[inline(always)]
fn q4_k<const AVX2: bool>(b: &[u8; 144], codes: &mut [u8; 256], scales: &mut [f32; 8], minima: &mut [f32; 8]) {
    k_scales::<AVX2>(b, scales, minima);
    for run in 0..4 {
        for i in [0, 8, 16, 24] {
            let packed = word(b, 16 + run * 32 + i);
            put(codes, run * 64 + i, packed & each(15));
            put(codes, run * 64 + 32 + i, packed >> 4 & each(15));
        }
    }
}

#[inline(always)]
fn q5_k<const AVX2: bool>(b: &[u8; 176], codes: &mut [u8; 256], scales: &mut [f32; 8], minima: &mut [f32; 8]) {
    k_scales::<AVX2>(b, scales, minima);
    for run in 0..4 {
        for i in [0, 8, 16, 24] {
            let (packed, high) = (word(b, 48 + run * 32 + i), word(b, 16 + i) >> (2 * run));
            put(codes, run * 64 + i, packed & each(15) | (high & each(1)) << 4);
            put(codes, run * 64 + 32 + i, packed >> 4 & each(15) | (high >> 1 & each(1)) << 4);
        }
    }
}

#[inline(always)]
fn q6_k<const AVX2: bool>(b: &[u8; 210], codes: &mut [u8; 256], scales: &mut [f32; 16], minima: &mut [f32; 16]) {
    let d = f16_at::<AVX2>(b, 208);
    for n in 0..16 {
        scales[n] = d * f32::from(b[192 + n] as i8);
        minima[n] = -32.0 * scales[n];
    }
    for half in 0..2 {
        for i in [0, 8, 16, 24] {
            // A byte of low nibbles belongs to two values 64 apart, a byte of upper pairs to four 32 apart.
            let (first, second) = (word(b, half * 64 + i), word(b, half * 64 + 32 + i));
            let (high, to) = (word(b, 128 + half * 32 + i), half * 128 + i);
            put(codes, to, first & each(15) | (high & each(3)) << 4);
            put(codes, to + 32, second & each(15) | (high >> 2 & each(3)) << 4);
            put(codes, to + 64, first >> 4 & each(15) | (high >> 4 & each(3)) << 4);
            put(codes, to + 96, second >> 4 & each(15) | (high >> 6 & each(3)) << 4);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::matmul::tests::random_rows;
    use crate::quant::dequantize_row;
    use rand::SeedableRng;

    #[test]
    fn codes_scales_and_minima_give_the_dequantised_values() {
        let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(11);
        for ty in WeightType::all() {
            let Some(form) = form(ty) else { continue };
            let bytes = random_rows(ty, 2, 256, &mut rng);
            let mut expected = vec![0.0; 512];
            dequantize_row(ty, &bytes, &mut expected).unwrap();
            for isa in Isa::available() {
                let (mut codes, mut scales, mut minima) =
                    (vec![0; 512], vec![0.0; 512 / form.sub], vec![0.0; 512 / form.sub]);
                let (cols, stride) = (256, 256 / form.sub);
                let rows = Rows { codes: &mut codes, scales: &mut scales, minima: &mut minima, cols, stride };
                unpack(isa, ty, &bytes, bytes.len() / 2, rows);
                for (i, e) in expected.iter().enumerate() {
                    let code = if form.signed { f32::from(codes[i] as i8) } else { f32::from(codes[i]) };
                    assert!(form.signed || codes[i] < 64, "{ty}: a code beyond six bits");
                    let value = scales[i / form.sub] * code + minima[i / form.sub];
                    assert!((value - e).abs() <= 1e-5 * e.abs().max(1.0), "{ty} {isa:?} value {i}: {value} {e}");
                }
            }
        }
    }
}
