//! The formats: codes of a normalised, rotated group.
//!
//! The values of such a group are nearly independent and normal, so turbo2, turbo3 and turbo4 take the levels of least squared
//! error for the normal distribution (Lloyd and Max); turbo8 takes even steps up to the group's largest value. The
//! levels of turbo4 are the right ones for the variance 1 of the group; older public code had some for 0.6 to 0.7 of
//! the deviation, with twice the error.

use opencoti_kv_common::lanes::{look_up, pack, unpack};
use opencoti_kv_common::rotation::MAX_GROUP;
use opencoti_kv_common::{Fit, GroupFormat, Isa};

/// Root of 128: the levels of 2 and 3 bits are published for the coordinates of unit vectors of 128 values.
const ROOT_128: f32 = 11.313_708;
/// Positive levels for 2, 3 and 4 bits, ascending; the negative ones mirror them.
const LEVELS_2: [f32; 2] = [0.039_994 * ROOT_128, 0.133_462 * ROOT_128];
const LEVELS_3: [f32; 4] = [0.021_460 * ROOT_128, 0.065_717 * ROOT_128, 0.117_832 * ROOT_128, 0.190_685 * ROOT_128];
const LEVELS_4: [f32; 8] = [0.128_395, 0.388_048, 0.656_759, 0.942_340, 1.256_231, 1.618_046, 2.069_017, 2.732_59];

/// Codes of `BITS` bits (2 or 3: the ascending index of the level; 4: its magnitude's index, and bit 3 where it is
/// negative), packed in lanes.
pub(crate) struct Levels<const BITS: usize>;

/// Bytes: even steps of the largest magnitude, 127.5 is zero.
pub(crate) struct Bytes;

/// All levels of `2 * HALF`, ascending.
const fn mirrored<const HALF: usize, const ALL: usize>(positive: [f32; HALF]) -> [f32; ALL] {
    let mut all = [0.0; ALL];
    let mut i = 0;
    while i < HALF {
        (all[HALF + i], all[HALF - 1 - i]) = (positive[i], -positive[i]);
        i += 1;
    }
    all
}

/// Boundaries between neighbouring levels.
const fn midpoints<const ALL: usize, const BETWEEN: usize>(levels: [f32; ALL]) -> [f32; BETWEEN] {
    let mut between = [0.0; BETWEEN];
    let mut i = 0;
    while i < BETWEEN {
        between[i] = (levels[i] + levels[i + 1]) / 2.0;
        i += 1;
    }
    between
}

const ALL_2: [f32; 4] = mirrored(LEVELS_2);
const ALL_3: [f32; 8] = mirrored(LEVELS_3);
/// For a look-up by three bits of which the third is the next code's.
const TWICE_2: [f32; 8] = [ALL_2[0], ALL_2[1], ALL_2[2], ALL_2[3], ALL_2[0], ALL_2[1], ALL_2[2], ALL_2[3]];
const ALL_4: [f32; 16] = mirrored(LEVELS_4);

/// Index of the nearest of `levels` for each value, the higher one on a boundary, and the fit of those levels.
#[inline(always)]
fn nearest<const BETWEEN: usize>(levels: &[f32], between: &[f32; BETWEEN], y: &[f32], indices: &mut [u8]) -> Fit {
    let (mut product, mut square) = ([0f32; 8], [0f32; 8]);
    for (y, indices) in y.as_chunks::<8>().0.iter().zip(indices.as_chunks_mut::<8>().0) {
        let mut index = [0u32; 8];
        for boundary in between {
            for i in 0..8 {
                index[i] += u32::from(y[i] >= *boundary);
            }
        }
        for i in 0..8 {
            let level = levels[index[i] as usize];
            product[i] += y[i] * level;
            square[i] += level * level;
            indices[i] = index[i] as u8;
        }
    }
    Fit::Levels { product: product.iter().sum(), square: square.iter().sum() }
}

impl<const BITS: usize> Levels<BITS> {
    #[inline(always)]
    fn indices(y: &[f32], indices: &mut [u8]) -> Fit {
        match BITS {
            2 => nearest(&ALL_2, const { &midpoints::<4, 3>(ALL_2) }, y, indices),
            3 => nearest(&ALL_3, const { &midpoints::<8, 7>(ALL_3) }, y, indices),
            _ => nearest(&ALL_4, const { &midpoints::<16, 15>(ALL_4) }, y, indices),
        }
    }

    /// Between the ascending index and the code that is stored; its own inverse.
    #[inline(always)]
    fn recoded(index: u8) -> u8 {
        match (BITS, index >= 8) {
            (4, true) => index - 8,
            (4, false) => 15 - index,
            _ => index,
        }
    }

    /// The ascending index of a stored code.
    fn index(code: u8) -> u8 {
        match (BITS, code >= 8) {
            (4, true) => 15 - code,
            (4, false) => code + 8,
            _ => code,
        }
    }
}

impl<const BITS: usize> GroupFormat for Levels<BITS> {
    fn code_bytes(n: usize) -> usize {
        n * BITS / 8
    }

    #[inline(always)]
    fn encode(y: &[f32], codes: &mut [u8]) -> Fit {
        let mut space = [0; MAX_GROUP];
        let indices = &mut space[..y.len()];
        let fit = Self::indices(y, indices);
        indices.iter_mut().for_each(|i| *i = Self::recoded(*i));
        pack::<BITS>(indices, codes);
        fit
    }

    #[inline(always)]
    unsafe fn decode<I: Isa>(codes: &[u8], scale: f32, out: &mut [f32]) {
        // SAFETY: features by the caller.
        unsafe {
            match BITS {
                2 => look_up::<I, BITS, 2>(&TWICE_2, scale, codes, out),
                3 => look_up::<I, BITS, 3>(&ALL_3, scale, codes, out),
                _ => look_up::<I, BITS, 4>(&LEVELS_4, scale, codes, out),
            }
        }
    }

    /// turbo2: four codes a byte. turbo3: the lower bits of the codes so, then the highest ones, eight a byte. turbo4: two a
    /// byte. Lower elements in lower bits.
    fn public_codes(codes: &[u8], n: usize, out: &mut Vec<u8>) {
        let indices: Vec<u8> = (0..n).map(|i| Self::index(unpack::<BITS>(codes, n, i))).collect();
        let mut planes = |bits: usize, of: fn(u8) -> u8| {
            for some in indices.chunks(8 / bits) {
                out.push(some.iter().rev().fold(0, |byte, i| byte << bits | of(*i)));
            }
        };
        match BITS {
            2 => planes(2, |i| i),
            3 => {
                planes(2, |i| i & 3);
                planes(1, |i| i >> 2);
            }
            _ => planes(4, |i| i),
        }
    }
}

impl GroupFormat for Bytes {
    const OPEN_SCALE: bool = false;

    fn code_bytes(n: usize) -> usize {
        n
    }

    #[inline(always)]
    fn encode(y: &[f32], codes: &mut [u8]) -> Fit {
        let largest = y.iter().fold(0f32, |m, v| m.max(v.abs()));
        let steps = if largest == 0.0 { 0.0 } else { 127.5 / largest };
        for (code, v) in codes.iter_mut().zip(y) {
            *code = (v * steps + 127.5).round_ties_even() as u8;
        }
        Fit::Fixed(largest / (y.len() as f32).sqrt())
    }

    #[inline(always)]
    unsafe fn decode<I: Isa>(codes: &[u8], scale: f32, out: &mut [f32]) {
        let step = scale * (out.len() as f32).sqrt() / 127.5;
        for (to, &code) in out.iter_mut().zip(codes) {
            *to = (f32::from(code) - 127.5) * step;
        }
    }

    fn public_codes(codes: &[u8], _: usize, out: &mut Vec<u8>) {
        out.extend_from_slice(codes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{RngExt, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    /// The index by a search for the level of least distance; the higher one of two.
    fn searched(levels: &[f32], y: f32) -> u8 {
        let mut best = 0;
        for (i, level) in levels.iter().enumerate() {
            if (level - y).abs() <= (levels[best] - y).abs() {
                best = i;
            }
        }
        best as u8
    }

    fn check<const BITS: usize, const BETWEEN: usize>(levels: &[f32], between: [f32; BETWEEN]) {
        let mut rng = ChaCha8Rng::seed_from_u64(BITS as u64);
        for _ in 0..1 << 18 {
            let y: [f32; 8] = std::array::from_fn(|_| rng.random_range(-4.0..4.0));
            let mut indices = [0; 8];
            Levels::<BITS>::indices(&y, &mut indices);
            for (y, i) in y.iter().zip(indices) {
                let (found, expected) = (levels[usize::from(i)], levels[usize::from(searched(levels, *y))]);
                assert!((found - y).abs() <= (expected - y).abs() + 1e-6, "{y}: {found} instead of {expected}");
            }
        }
        let mut y = [0.0; 8];
        for (i, boundary) in between.into_iter().enumerate() {
            let mut indices = [0; 8];
            y.fill(boundary);
            Levels::<BITS>::indices(&y, &mut indices);
            assert_eq!(indices, [i as u8 + 1; 8], "a value on a boundary takes the higher index");
        }
    }

    #[test]
    fn counting_boundaries_finds_the_nearest_level() {
        check::<2, 3>(&ALL_2, midpoints(ALL_2));
        check::<3, 7>(&ALL_3, midpoints(ALL_3));
        check::<4, 15>(&ALL_4, midpoints(ALL_4));
    }

    #[test]
    fn stored_codes_of_four_bits_are_sign_and_magnitude() {
        for index in 0..16 {
            let code = Levels::<4>::recoded(index);
            assert_eq!(Levels::<4>::index(code), index);
            let level = LEVELS_4[usize::from(code & 7)] * if code >= 8 { -1.0 } else { 1.0 };
            assert_eq!(level, ALL_4[usize::from(index)]);
        }
    }
}
