//! Plain floats and the first generation of blocks: 32 values with one f16 scale, and for the `_1` types an f16
//! minimum. Codes of 4 and 5 bits keep values 0..16 in the low nibbles and 16..32 in the high ones; a fifth bit
//! lies in a 32-bit mask.

use super::{bf16_to_f32, f16_at, f16_to_f32, u32_at};

#[inline(always)]
pub(super) fn f32_row(src: &[u8], dst: &mut [f32]) {
    for (b, v) in src.as_chunks::<4>().0.iter().zip(dst) {
        *v = f32::from_le_bytes(*b);
    }
}

#[inline(always)]
pub(super) fn f16_row(src: &[u8], dst: &mut [f32]) {
    for (b, v) in src.as_chunks::<2>().0.iter().zip(dst) {
        *v = f16_to_f32(u16::from_le_bytes(*b));
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c")]
pub(super) fn f16_row_f16c(src: &[u8], dst: &mut [f32]) {
    use std::arch::x86_64::{_mm_loadu_si128, _mm256_cvtph_ps, _mm256_storeu_ps};
    let (halves, rest) = src.as_chunks::<16>();
    let (values, last) = dst.as_chunks_mut::<8>();
    for (h, v) in halves.iter().zip(values) {
        // SAFETY: 16 bytes are read, 8 values written, and neither needs alignment.
        unsafe { _mm256_storeu_ps(v.as_mut_ptr(), _mm256_cvtph_ps(_mm_loadu_si128(h.as_ptr().cast()))) };
    }
    f16_row(rest, last);
}

#[inline(always)]
pub(super) fn bf16_row(src: &[u8], dst: &mut [f32]) {
    for (b, v) in src.as_chunks::<2>().0.iter().zip(dst) {
        *v = bf16_to_f32(u16::from_le_bytes(*b));
    }
}

/// `d`, 16 bytes of codes; value = d·(code − 8).
#[inline(always)]
pub(super) fn q4_0(b: &[u8; 18], v: &mut [f32; 32]) {
    let d = f16_at(b, 0);
    for i in 0..16 {
        v[i] = d * f32::from((b[2 + i] & 15) as i8 - 8);
        v[i + 16] = d * f32::from((b[2 + i] >> 4) as i8 - 8);
    }
}

/// `d`, `m`, 16 bytes of codes; value = d·code + m.
#[inline(always)]
pub(super) fn q4_1(b: &[u8; 20], v: &mut [f32; 32]) {
    let (d, m) = (f16_at(b, 0), f16_at(b, 2));
    for i in 0..16 {
        v[i] = d * f32::from(b[4 + i] & 15) + m;
        v[i + 16] = d * f32::from(b[4 + i] >> 4) + m;
    }
}

/// `d`, fifth bits, 16 bytes of codes; value = d·(code − 16).
#[inline(always)]
pub(super) fn q5_0(b: &[u8; 22], v: &mut [f32; 32]) {
    let (d, high) = (f16_at(b, 0), u32_at(b, 2));
    for i in 0..16 {
        let (lo, hi) = fifth_bits(high, i);
        v[i] = d * f32::from((b[6 + i] & 15 | lo) as i8 - 16);
        v[i + 16] = d * f32::from((b[6 + i] >> 4 | hi) as i8 - 16);
    }
}

/// `d`, `m`, fifth bits, 16 bytes of codes; value = d·code + m.
#[inline(always)]
pub(super) fn q5_1(b: &[u8; 24], v: &mut [f32; 32]) {
    let (d, m, high) = (f16_at(b, 0), f16_at(b, 2), u32_at(b, 4));
    for i in 0..16 {
        let (lo, hi) = fifth_bits(high, i);
        v[i] = d * f32::from(b[8 + i] & 15 | lo) + m;
        v[i + 16] = d * f32::from(b[8 + i] >> 4 | hi) + m;
    }
}

/// Bits `i` and `i + 16` of the mask, each moved to bit 4.
#[inline(always)]
fn fifth_bits(mask: u32, i: usize) -> (u8, u8) {
    ((mask >> i << 4) as u8 & 16, (mask >> (i + 12)) as u8 & 16)
}

/// `d`, 32 signed bytes; value = d·code.
#[inline(always)]
pub(super) fn q8_0(b: &[u8; 34], v: &mut [f32; 32]) {
    let d = f16_at(b, 0);
    for i in 0..32 {
        v[i] = f32::from(b[2 + i] as i8) * d;
    }
}
