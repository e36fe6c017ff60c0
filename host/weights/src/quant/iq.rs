//! The IQ family: codes are indices into codebooks ("grids") of eight or four small magnitudes, with signs stored
//! apart, or (IQ4) into one table of 16 unevenly spaced levels.

use super::iq_grids::{IQ1, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS};
use super::{f16_at, f16_to_f32, u16_at, u32_at};

/// The levels of IQ4_NL and IQ4_XS.
pub const IQ4_LEVELS: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// What IQ1 types add to or take from each ternary digit.
const IQ1_DELTA: f32 = 0.125;

/// Eight signs from seven stored bits: the number of minus signs is always even.
#[inline(always)]
fn even_signs(seven: u32) -> u8 {
    let seven = (seven & 127) as u8;
    seven | (seven.count_ones() as u8 & 1) << 7
}

/// `scale·grid` with the signs of the bits.
#[inline(always)]
fn signed<const N: usize>(scale: f32, grid: &[u8; N], signs: u8, v: &mut [f32]) {
    for i in 0..N {
        let x = scale * f32::from(grid[i]);
        v[i] = if signs >> i & 1 == 1 { -x } else { x };
    }
}

/// `d`, eight groups of 32 values: four grid indices, then 4×7 sign bits and a 4-bit scale.
#[inline(always)]
pub(super) fn iq2_xxs(b: &[u8; 66], v: &mut [f32; 256]) {
    let d = f16_at(b, 0);
    for (g, group) in v.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let at = 2 + g * 8;
        let word = u32_at(b, at + 4);
        let scale = d * (0.5 + (word >> 28) as f32) * 0.25;
        for (j, run) in group.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            signed(scale, &IQ2_XXS[usize::from(b[at + j])], even_signs(word >> (7 * j)), run);
        }
    }
}

/// `d`, 32 words of 9 index and 7 sign bits, 16 scale nibbles.
#[inline(always)]
pub(super) fn iq2_xs(b: &[u8; 74], v: &mut [f32; 256]) {
    let d = f16_at(b, 0);
    for (n, run) in v.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let word = u16_at(b, 2 + n * 2);
        let scale = d * (0.5 + f32::from(nibble(&b[66..], n / 2))) * 0.25;
        signed(scale, &IQ2_XS[usize::from(word & 511)], even_signs(u32::from(word >> 9)), run);
    }
}

/// `d`, 32 low index bytes, 32 sign bytes, 32 upper pairs of index bits, 16 scale nibbles.
#[inline(always)]
pub(super) fn iq2_s(b: &[u8; 82], v: &mut [f32; 256]) {
    let d = f16_at(b, 0);
    for (n, run) in v.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let high = b[66 + n / 4] >> (n % 4 * 2) & 3;
        let index = usize::from(b[2 + n]) | usize::from(high) << 8;
        let scale = d * (0.5 + f32::from(nibble(&b[74..], n / 2))) * 0.25;
        signed(scale, &IQ2_S[index], b[34 + n], run);
    }
}

/// `d`, 64 grid indices, eight words of 4×7 sign bits and a 4-bit scale.
#[inline(always)]
pub(super) fn iq3_xxs(b: &[u8; 98], v: &mut [f32; 256]) {
    let d = f16_at(b, 0);
    for (n, run) in v.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let word = u32_at(b, 66 + n / 4 * 4);
        let scale = d * (0.5 + (word >> 28) as f32) * 0.5;
        let signs = even_signs(word >> (n % 4 * 7));
        signed(scale, &IQ3_XXS[usize::from(b[2 + n * 2])], signs, &mut run[..4]);
        signed(scale, &IQ3_XXS[usize::from(b[3 + n * 2])], signs >> 4, &mut run[4..]);
    }
}

/// `d`, 64 low index bytes, 64 ninth bits, 32 sign bytes, 8 scale nibbles.
#[inline(always)]
pub(super) fn iq3_s(b: &[u8; 110], v: &mut [f32; 256]) {
    let d = f16_at(b, 0);
    for (n, run) in v.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let scale = d * f32::from(1 + 2 * nibble(&b[106..], n / 4));
        let ninth = |i: usize| usize::from(b[66 + i / 8] >> (i % 8) & 1) << 8;
        let index = |i: usize| usize::from(b[2 + i]) | ninth(i);
        let signs = b[74 + n];
        signed(scale, &IQ3_S[index(2 * n)], signs, &mut run[..4]);
        signed(scale, &IQ3_S[index(2 * n + 1)], signs >> 4, &mut run[4..]);
    }
}

/// Nibble `n` of packed bytes, low nibble first.
#[inline(always)]
fn nibble(packed: &[u8], n: usize) -> u8 {
    packed[n / 2] >> (n % 2 * 4) & 15
}

/// `scale·(digit ± 0.125)` for the eight ternary digits of a grid entry.
#[inline(always)]
fn ternary(scale: f32, index: usize, minus: bool, v: &mut [f32; 8]) {
    let delta = if minus { -IQ1_DELTA } else { IQ1_DELTA };
    for (v, digit) in v.iter_mut().zip(&IQ1[index]) {
        *v = scale * (f32::from(*digit) + delta);
    }
}

/// `d`, 32 low index bytes, eight words: 4×3 upper index bits, a 3-bit scale, the sign of the delta.
#[inline(always)]
pub(super) fn iq1_s(b: &[u8; 50], v: &mut [f32; 256]) {
    let d = f16_at(b, 0);
    for (n, run) in v.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let word = u16_at(b, 34 + n / 4 * 2);
        let scale = d * f32::from(2 * (word >> 12 & 7) + 1);
        let index = usize::from(b[2 + n]) | usize::from(word >> (n % 4 * 3) & 7) << 8;
        ternary(scale, index, word & 0x8000 != 0, run);
    }
}

/// 32 low index bytes, 32 nibbles (three upper index bits, the sign of the delta), four words of 4×3 scale bits
/// whose top nibbles together are the f16 `d`.
#[inline(always)]
pub(super) fn iq1_m(b: &[u8; 56], v: &mut [f32; 256]) {
    let word = |i: usize| u16_at(b, 48 + i * 2);
    let d = f16_to_f32(word(0) >> 12 | word(1) >> 12 << 4 | word(2) >> 12 << 8 | word(3) >> 12 << 12);
    for (n, run) in v.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let scale = d * f32::from(2 * (word(n / 8) >> (n / 2 % 4 * 3) & 7) + 1);
        let high = nibble(&b[32..48], n);
        ternary(scale, usize::from(b[n]) | usize::from(high & 7) << 8, high & 8 != 0, run);
    }
}

/// `d`, 16 bytes of codes: values 0..16 in the low nibbles, 16..32 in the high ones.
#[inline(always)]
pub(super) fn iq4_nl(b: &[u8; 18], v: &mut [f32; 32]) {
    levels(f16_at(b, 0), &b[2..18], v);
}

/// `d`, eight upper pairs of scale bits, eight lower nibbles, 128 bytes of codes; groups of 32.
#[inline(always)]
pub(super) fn iq4_xs(b: &[u8; 136], v: &mut [f32; 256]) {
    let (d, upper) = (f16_at(b, 0), u16_at(b, 2));
    for (g, group) in v.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let scale = nibble(&b[4..8], g) | ((upper >> (2 * g) & 3) as u8) << 4;
        levels(d * f32::from(scale as i8 - 32), &b[8 + g * 16..24 + g * 16], group);
    }
}

#[inline(always)]
fn levels(scale: f32, codes: &[u8], v: &mut [f32; 32]) {
    for (i, code) in codes.iter().enumerate() {
        v[i] = scale * f32::from(IQ4_LEVELS[usize::from(code & 15)]);
        v[i + 16] = scale * f32::from(IQ4_LEVELS[usize::from(code >> 4)]);
    }
}
