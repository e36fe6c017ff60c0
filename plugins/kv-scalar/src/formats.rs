//! The formats: how 32 values become a block and back.
//!
//! The block formats are ggml's (q6_0: ik_llama.cpp's): same fields, same bits, same rounding. `m` below is the signed
//! value of largest magnitude, the first on a tie. Scales are stored as f16; codes are chosen by the exact scale.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::vectors::Vectors;

/// Values in a block.
pub const BLOCK: usize = 32;

/// The fields of a block, or of all blocks of a row; a field that a format lacks is empty.
pub(crate) struct Fields<T> {
    /// Low bits of the codes, or whole values.
    pub(crate) codes: T,
    /// High bits of the codes.
    pub(crate) high: T,
    /// The minimum, f16.
    pub(crate) min: T,
    /// The scale, f16.
    pub(crate) scale: T,
}

/// Fields of one block, to write.
pub(crate) type Block<'a> = Fields<&'a mut [u8]>;
/// Fields of all blocks of a row, to read.
pub(crate) type Row<'a> = Fields<&'a [u8]>;

/// A format. The constants are bytes of each field in a block.
pub(crate) trait Format: 'static {
    /// Name by which a config selects it.
    const NAME: &'static str;
    /// Bytes of codes.
    const CODES: usize;
    /// Bytes of high bits.
    const HIGH: usize = 0;
    /// Bytes of the minimum.
    const MIN: usize = 0;
    /// Bytes of the scale.
    const SCALE: usize = 2;

    /// Encodes a block.
    fn encode(x: &[f32; BLOCK], block: Block);
}

/// A format whose codes are the values.
pub(crate) trait Floats: Format {
    /// Values `LANES * part ..` of the block at `p`. Any bytes give some numbers.
    ///
    /// # Safety
    /// As [`Vectors`]; a block is readable.
    unsafe fn values<I: Vectors>(p: *const u8, part: usize) -> I::V;
}

/// A format of integer codes: a value is `code * scale`, and the minimum on top where there is one.
pub(crate) trait Codes: Format {
    /// Codes `2 * LANES * part ..` of the block whose fields start at the pointers, at most 128 in magnitude for any bytes.
    ///
    /// # Safety
    /// As [`Vectors`]; the fields of a block are readable.
    unsafe fn codes<I: Vectors>(codes: *const u8, high: *const u8, part: usize) -> I::H;
}

/// The signed value of largest magnitude, the first on a tie; NaNs are passed over.
fn extreme(x: &[f32; BLOCK]) -> f32 {
    x.iter().fold(0.0, |m: f32, &v| if v.abs() > m.abs() { v } else { m })
}

fn inverse(d: f32) -> f32 {
    if d == 0.0 { 0.0 } else { 1.0 / d }
}

fn put_half(field: &mut [u8], value: f32) {
    field.copy_from_slice(&f16::from_f32(value).to_le_bytes());
}

/// Codes below 2^(bits of `limit`) from values that are scaled to be non-negative; truncates.
fn codes(x: &[f32; BLOCK], scaled: impl Fn(f32) -> f32, limit: u8) -> [u8; BLOCK] {
    x.map(|v| (scaled(v) as u8).min(limit))
}

/// Byte `j` holds the low four bits of codes `j` and `j + 16`.
fn put_nibbles(field: &mut [u8], q: &[u8; BLOCK]) {
    for (j, byte) in field.iter_mut().enumerate() {
        *byte = (q[j] & 15) | (q[j + 16] & 15) << 4;
    }
}

/// Bit `j` of a little-endian word is bit 4 of code `j`.
fn put_fifth_bits(field: &mut [u8], q: &[u8; BLOCK]) {
    let bits = q.iter().enumerate().fold(0u32, |bits, (j, q)| bits | u32::from(q >> 4) << j);
    field.copy_from_slice(&bits.to_le_bytes());
}

/// IEEE binary16.
pub(crate) struct F16;
/// bfloat16.
pub(crate) struct Bf16;
/// `d = |m| / 127`, codes `-127 ..= 127`.
pub(crate) struct Q8_0;
/// `d = m / -32`, codes `0 ..= 63` around 32.
pub(crate) struct Q6_0;
/// `d = (max - min) / 31`, codes `0 ..= 31` above the minimum.
pub(crate) struct Q5_1;
/// `d = m / -16`, codes `0 ..= 31` around 16.
pub(crate) struct Q5_0;
/// `d = m / -8`, codes `0 ..= 15` around 8.
pub(crate) struct Q4_0;

impl Format for F16 {
    const NAME: &'static str = "f16";
    const CODES: usize = 64;
    const SCALE: usize = 0;

    fn encode(x: &[f32; BLOCK], block: Block) {
        let mut halves = [f16::ZERO; BLOCK];
        halves.convert_from_f32_slice(x);
        for (to, h) in block.codes.as_chunks_mut().0.iter_mut().zip(halves) {
            *to = h.to_le_bytes();
        }
    }
}

impl Floats for F16 {
    #[inline(always)]
    unsafe fn values<I: Vectors>(p: *const u8, part: usize) -> I::V {
        // SAFETY: passed on.
        unsafe { I::half_floats(p.add(2 * I::LANES * part)) }
    }
}

impl Format for Bf16 {
    const NAME: &'static str = "bf16";
    const CODES: usize = 64;
    const SCALE: usize = 0;

    fn encode(x: &[f32; BLOCK], block: Block) {
        let mut halves = [bf16::ZERO; BLOCK];
        halves.convert_from_f32_slice(x);
        for (to, h) in block.codes.as_chunks_mut().0.iter_mut().zip(halves) {
            *to = h.to_le_bytes();
        }
    }
}

impl Floats for Bf16 {
    #[inline(always)]
    unsafe fn values<I: Vectors>(p: *const u8, part: usize) -> I::V {
        // SAFETY: passed on.
        unsafe { I::bfloats(p.add(2 * I::LANES * part)) }
    }
}

impl Format for Q8_0 {
    const NAME: &'static str = "q8_0";
    const CODES: usize = 32;

    fn encode(x: &[f32; BLOCK], block: Block) {
        let d = extreme(x).abs() / 127.0;
        let id = inverse(d);
        put_half(block.scale, d);
        for (to, v) in block.codes.iter_mut().zip(x) {
            *to = ((v * id).round() as i8).cast_unsigned();
        }
    }
}

impl Codes for Q8_0 {
    #[inline(always)]
    unsafe fn codes<I: Vectors>(codes: *const u8, _high: *const u8, part: usize) -> I::H {
        // SAFETY: passed on.
        unsafe { I::signed(codes.add(2 * I::LANES * part)) }
    }
}

impl Q6_0 {
    /// Encodes with `d` the exact block maximum over -32; gives the codes.
    pub(crate) fn encode_plain(x: &[f32; BLOCK], block: &mut Block) -> [u8; BLOCK] {
        let d = extreme(x) / -32.0;
        let id = inverse(d);
        let q = codes(x, |v| v * id + 32.5, 63);
        put_half(block.scale, d);
        put_nibbles(block.codes, &q);
        for j in 0..8 {
            let pair = |j: usize| q[j] >> 4 | (q[j + 16] >> 4) << 2;
            block.high[j] = pair(j) | pair(j + 8) << 4;
        }
        q
    }

    /// The same codes with `d` refitted to them by least squares with weights `x^2`.
    pub(crate) fn encode_refit(x: &[f32; BLOCK], block: &mut Block) {
        let codes = Self::encode_plain(x, block);
        let (mut with_x, mut with_q) = (0.0, 0.0);
        for (&x, q) in x.iter().zip(codes) {
            let (w, q) = (x * x, f32::from(q) - 32.0);
            with_x += w * x * q;
            with_q += w * q * q;
        }
        let d = with_x / with_q;
        if d.is_finite() {
            put_half(block.scale, d);
        }
    }
}

impl Format for Q6_0 {
    const NAME: &'static str = "q6_0";
    const CODES: usize = 16;
    const HIGH: usize = 8;

    fn encode(x: &[f32; BLOCK], mut block: Block) {
        Self::encode_refit(x, &mut block);
    }
}

impl Codes for Q6_0 {
    #[inline(always)]
    unsafe fn codes<I: Vectors>(codes: *const u8, high: *const u8, part: usize) -> I::H {
        // SAFETY: passed on.
        unsafe { I::less(I::or(I::nibbles(codes, part), I::bit_pairs(high, part)), 32) }
    }
}

/// Five-bit codes, from 0.
///
/// # Safety
/// As [`Codes::codes`].
#[inline(always)]
unsafe fn five_bits<I: Vectors>(codes: *const u8, high: *const u8, part: usize) -> I::H {
    // SAFETY: passed on; the high bits are a word.
    unsafe {
        let word = u32::from_le_bytes(high.cast::<[u8; 4]>().read());
        I::or(I::nibbles(codes, part), I::fifth_bits(word, part))
    }
}

impl Format for Q5_1 {
    const NAME: &'static str = "q5_1";
    const CODES: usize = 16;
    const HIGH: usize = 4;
    const MIN: usize = 2;

    fn encode(x: &[f32; BLOCK], block: Block) {
        let (min, max) = x.iter().fold((f32::MAX, f32::MIN), |(lo, hi), &v| (lo.min(v), hi.max(v)));
        let d = (max - min) / 31.0;
        let id = inverse(d);
        put_half(block.scale, d);
        put_half(block.min, min);
        let q = codes(x, |v| (v - min) * id + 0.5, 31);
        put_nibbles(block.codes, &q);
        put_fifth_bits(block.high, &q);
    }
}

impl Codes for Q5_1 {
    #[inline(always)]
    unsafe fn codes<I: Vectors>(codes: *const u8, high: *const u8, part: usize) -> I::H {
        // SAFETY: passed on.
        unsafe { five_bits::<I>(codes, high, part) }
    }
}

impl Format for Q5_0 {
    const NAME: &'static str = "q5_0";
    const CODES: usize = 16;
    const HIGH: usize = 4;

    fn encode(x: &[f32; BLOCK], block: Block) {
        let d = extreme(x) / -16.0;
        let id = inverse(d);
        put_half(block.scale, d);
        let q = codes(x, |v| v * id + 16.5, 31);
        put_nibbles(block.codes, &q);
        put_fifth_bits(block.high, &q);
    }
}

impl Codes for Q5_0 {
    #[inline(always)]
    unsafe fn codes<I: Vectors>(codes: *const u8, high: *const u8, part: usize) -> I::H {
        // SAFETY: passed on.
        unsafe { I::less(five_bits::<I>(codes, high, part), 16) }
    }
}

impl Format for Q4_0 {
    const NAME: &'static str = "q4_0";
    const CODES: usize = 16;

    fn encode(x: &[f32; BLOCK], block: Block) {
        let d = extreme(x) / -8.0;
        let id = inverse(d);
        put_half(block.scale, d);
        put_nibbles(block.codes, &codes(x, |v| v * id + 8.5, 15));
    }
}

impl Codes for Q4_0 {
    #[inline(always)]
    unsafe fn codes<I: Vectors>(codes: *const u8, _high: *const u8, part: usize) -> I::H {
        // SAFETY: passed on.
        unsafe { I::less(I::nibbles(codes, part), 8) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn q6_0_encodes_the_golden_vector_with_and_without_refit() {
        let x: [f32; BLOCK] = std::array::from_fn(|i| ((95 * i + 95) % 127) as f32 / 16.0 - 63.0 / 16.0);
        let bytes = |refit: bool| {
            let (mut codes, mut high, mut d) = ([0; 16], [0; 8], [0; 2]);
            let mut block = Block { codes: &mut codes, high: &mut high, min: &mut [], scale: &mut d };
            if refit {
                Q6_0::encode_refit(&x, &mut block);
            } else {
                Q6_0::encode_plain(&x, &mut block);
            }
            d.iter().chain(&high).chain(&codes).map(|b| format!("{b:02x}")).collect::<String>()
        };
        let codes = "55aaff0055aaff0020202020203131313131313131424242";
        assert_eq!(bytes(false), format!("e0af{codes}"));
        assert_eq!(bytes(true), format!("ecaf{codes}"));
    }

    #[test]
    fn the_first_of_two_extremes_wins() {
        let mut x = [0.0; BLOCK];
        (x[3], x[4]) = (-2.0, 2.0);
        assert_eq!(extreme(&x), -2.0);
    }
}
