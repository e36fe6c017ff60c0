//! The K family: super-blocks of 256 values in sub-blocks of 16 or 32, whose scales (and minima) are small
//! integers under one f16 `d` (and `dmin`).

use super::f16_at;

/// 16 bytes of scale and minimum nibbles, 64 bytes of 2-bit codes, `d`, `dmin`; sub-blocks of 16.
#[inline(always)]
pub(super) fn q2_k(b: &[u8; 84], v: &mut [f32; 256]) {
    let (d, dmin) = (f16_at(b, 80), f16_at(b, 82));
    for (n, sub) in v.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let scale = d * f32::from(b[n] & 15);
        let min = dmin * f32::from(b[n] >> 4);
        let (at, shift) = two_bit_place(n);
        for (i, v) in sub.iter_mut().enumerate() {
            *v = scale * f32::from(b[16 + at + i] >> shift & 3) - min;
        }
    }
}

/// Where sub-block `n` of 16 lies among 2-bit codes: its first byte and the shift. Each run of 32 bytes
/// holds four runs of 32 values, one per pair of bits.
#[inline(always)]
fn two_bit_place(n: usize) -> (usize, usize) {
    (n / 8 * 32 + n % 2 * 16, n / 2 % 4 * 2)
}

/// 32 bytes of third bits (set: no offset), 64 bytes of 2-bit codes, 12 bytes of 6-bit scales, `d`; sub-blocks of 16.
#[inline(always)]
pub(super) fn q3_k(b: &[u8; 110], v: &mut [f32; 256]) {
    let d = f16_at(b, 108);
    let packed = &b[96..108];
    for (n, sub) in v.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let scale = d * f32::from(q3_scale(packed, n));
        let (at, shift) = two_bit_place(n);
        for (i, v) in sub.iter_mut().enumerate() {
            let third = b[n % 2 * 16 + i] >> (n / 2) & 1;
            *v = scale * f32::from((b[32 + at + i] >> shift & 3 | third << 2) as i8 - 4);
        }
    }
}

/// Scale of sub-block `n` (0..16) from the 12 packed bytes of Q3_K: six bits less 32, the lower four in nibbles, the
/// upper two in the last four bytes.
#[inline(always)]
pub fn q3_scale(packed: &[u8], n: usize) -> i8 {
    let low = packed[n % 8] >> (n / 8 * 4) & 15;
    let high = packed[8 + n % 4] >> (n / 4 * 2) & 3;
    (low | high << 4) as i8 - 32
}

/// Scale and minimum of sub-block `n` (0..8) from the 12 packed bytes of Q4_K and Q5_K: six bits each, the first
/// four pairs in whole bytes, the other four from nibbles and the upper bits of the first eight bytes.
#[inline(always)]
pub fn scale_min(packed: &[u8], n: usize) -> (u8, u8) {
    if n < 4 {
        return (packed[n] & 63, packed[n + 4] & 63);
    }
    let nibbles = packed[n + 4];
    (nibbles & 15 | packed[n - 4] >> 6 << 4, nibbles >> 4 | packed[n] >> 6 << 4)
}

/// `d`, `dmin`, 12 bytes of scales and minima, 128 bytes of 4-bit codes; sub-blocks of 32.
#[inline(always)]
pub(super) fn q4_k(b: &[u8; 144], v: &mut [f32; 256]) {
    let (d, dmin) = (f16_at(b, 0), f16_at(b, 2));
    for (n, sub) in v.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (scale, min) = scale_min(&b[4..16], n);
        let (scale, min) = (d * f32::from(scale), dmin * f32::from(min));
        let (at, shift) = (16 + n / 2 * 32, n % 2 * 4);
        for (i, v) in sub.iter_mut().enumerate() {
            *v = scale * f32::from(b[at + i] >> shift & 15) - min;
        }
    }
}

/// As Q4_K with 32 bytes of fifth bits before the codes: bit `n` of byte `i` belongs to value `i` of sub-block `n`.
#[inline(always)]
pub(super) fn q5_k(b: &[u8; 176], v: &mut [f32; 256]) {
    let (d, dmin) = (f16_at(b, 0), f16_at(b, 2));
    for (n, sub) in v.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (scale, min) = scale_min(&b[4..16], n);
        let (scale, min) = (d * f32::from(scale), dmin * f32::from(min));
        let (at, shift) = (48 + n / 2 * 32, n % 2 * 4);
        for (i, v) in sub.iter_mut().enumerate() {
            let fifth = b[16 + i] >> n & 1;
            *v = scale * f32::from(b[at + i] >> shift & 15 | fifth << 4) - min;
        }
    }
}

/// 128 bytes of low nibbles, 64 bytes of upper pairs of bits, 16 signed scales, `d`; sub-blocks of 16,
/// value = d·scale·(code − 32).
#[inline(always)]
pub(super) fn q6_k(b: &[u8; 210], v: &mut [f32; 256]) {
    let d = f16_at(b, 208);
    for (n, sub) in v.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let scale = d * f32::from(b[192 + n] as i8);
        let (half, quarter, within) = (n / 8, n / 2 % 4, n % 2 * 16);
        let low = half * 64 + quarter % 2 * 32 + within;
        let high = 128 + half * 32 + within;
        for (i, v) in sub.iter_mut().enumerate() {
            let code = b[low + i] >> (quarter / 2 * 4) & 15 | (b[high + i] >> (quarter * 2) & 3) << 4;
            *v = scale * f32::from(code as i8 - 32);
        }
    }
}
