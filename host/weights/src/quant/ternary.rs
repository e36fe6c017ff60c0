//! Ternary types: 256 values of −1, 0, 1 under one f16 scale.

use super::f16_at;

/// Powers of three by which a packed byte is multiplied (mod 256) to bring a digit to the top.
const POWERS: [u8; 5] = [1, 3, 9, 27, 81];

/// Five digits a byte: 32 bytes (digit-major, 160 values), 16 bytes (80 values), 4 bytes of four digits (16 values), `d`.
///
/// A byte holds `ceil(256·n/243)` for a five-digit number `n`, so a digit is the carry of a multiplication by three.
#[inline(always)]
pub(super) fn tq1_0(b: &[u8; 54], v: &mut [f32; 256]) {
    let d = f16_at(b, 52);
    let mut at = 0;
    for (bytes, digits) in [(&b[0..32], 5), (&b[32..48], 5), (&b[48..52], 4)] {
        for power in &POWERS[..digits] {
            for byte in bytes {
                let digit = (u16::from(byte.wrapping_mul(*power)) * 3) >> 8;
                v[at] = d * f32::from(digit as i8 - 1);
                at += 1;
            }
        }
    }
}

/// 64 bytes of 2-bit codes (each run of 32 bytes holds four runs of 32 values), `d`; value = d·(code − 1).
#[inline(always)]
pub(super) fn tq2_0(b: &[u8; 66], v: &mut [f32; 256]) {
    let d = f16_at(b, 64);
    for (n, run) in v.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (at, shift) = (n / 4 * 32, n % 4 * 2);
        for (i, v) in run.iter_mut().enumerate() {
            *v = d * f32::from((b[at + i] >> shift & 3) as i8 - 1);
        }
    }
}
