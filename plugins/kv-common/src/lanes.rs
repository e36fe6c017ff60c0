//! Codes of a few bits in eight lanes, and tables of eight values that they index.
//!
//! A *chunk* is 64 codes of `BITS` bits in `8 * BITS` bytes: lane `l` is the `BITS` bytes from `BITS * l` on, lowest bits
//! first, and holds codes `l`, `8 + l`, …, `56 + l`. So one shift and one permutation decode eight neighbouring values.
//! A *half chunk* is 32 codes in four such lanes; lane `l` holds codes `l`, `4 + l`, …, `28 + l`.

/// Bits in a code at most.
const MAX_BITS: usize = 4;
/// Codes in a lane.
const IN_LANE: usize = 8;

/// Packs codes below `2^BITS` into chunks; the last may be a half one. `bytes` holds `codes.len() * BITS / 8` bytes.
#[inline(always)]
pub fn pack<const BITS: usize>(codes: &[u8], bytes: &mut [u8]) {
    for (codes, bytes) in codes.chunks(64).zip(bytes.chunks_mut(8 * BITS)) {
        let lanes = codes.len() / IN_LANE;
        for (l, bytes) in bytes.chunks_exact_mut(BITS).enumerate() {
            let lane = (0..IN_LANE).fold(0u32, |lane, i| lane | u32::from(codes[lanes * i + l]) << (BITS * i));
            bytes.copy_from_slice(&lane.to_le_bytes()[..BITS]);
        }
    }
}

/// Code `i` of what [`pack`] packed from `n` codes.
pub fn unpack<const BITS: usize>(bytes: &[u8], n: usize, i: usize) -> u8 {
    let (chunk, at) = (i / 64, i % 64);
    let lanes = (n - 64 * chunk).min(64) / IN_LANE;
    let mut lane = [0; MAX_BITS];
    lane[..BITS].copy_from_slice(&bytes[8 * BITS * chunk + BITS * (at % lanes)..][..BITS]);
    (u32::from_le_bytes(lane) >> (BITS * (at / lanes))) as u8 & ((1 << BITS) - 1)
}

/// Table look-up in eight lanes on one instruction set.
///
/// # Safety
/// Every function may only run, inlined, inside a function that enables the features of the set.
#[expect(clippy::missing_safety_doc, reason = "every function has the safety section of the trait")]
pub unsafe trait Lanes {
    /// Eight lanes of 32 bits.
    type Codes: Copy;
    /// Eight floats.
    type Floats: Copy;

    /// Eight floats times `scale`.
    unsafe fn scaled(values: &[f32; 8], scale: f32) -> Self::Floats;
    /// The lanes of a chunk: `8 * BYTES` bytes from `bytes` on. Only the lowest `8 * BYTES` bits of each are defined.
    unsafe fn spread<const BYTES: usize>(bytes: &[u8]) -> Self::Codes;
    /// Every lane shifted down by `BITS`, as a constant.
    unsafe fn next<const BITS: i32>(codes: Self::Codes) -> Self::Codes;
    /// The table's entry of the lowest three bits of each lane.
    unsafe fn look_up(table: Self::Floats, codes: Self::Codes) -> Self::Floats;
    /// Negates where bit 3 of the lane is set.
    unsafe fn negate_by_bit_3(values: Self::Floats, codes: Self::Codes) -> Self::Floats;
    /// Writes eight signed 16-bit numbers times `step`, two in each word, the first of them in the lower half.
    unsafe fn put_pairs(pairs: [u32; 4], step: f32, to: &mut [f32; 8]);
    /// Writes eight floats, any alignment.
    unsafe fn put(values: Self::Floats, to: &mut [f32; 8]);
}

/// Reads codes of `BITS` bits: two and three index the table, four have a sign in their highest bit and index the table by
/// the others. A table for two bits is four values, twice. `bytes` is what [`pack`] packed from `out.len()` codes; what is
/// written is the table's value times `scale`.
///
/// # Safety
/// As [`Lanes`].
#[inline(always)]
pub unsafe fn look_up<L: Lanes, const BITS: usize, const SHIFT: i32>(
    table: &[f32; 8],
    scale: f32,
    bytes: &[u8],
    out: &mut [f32],
) {
    assert!(bytes.len() * 8 == out.len() * BITS && SHIFT as usize == BITS);
    let (chunks, rest) = out.as_chunks_mut::<64>();
    for (out, bytes) in chunks.iter_mut().zip(bytes.chunks_exact(8 * BITS)) {
        // SAFETY: features by the caller.
        unsafe {
            let table = L::scaled(table, scale);
            let mut codes = L::spread::<BITS>(bytes);
            for eight in out.as_chunks_mut::<8>().0 {
                let values = L::look_up(table, codes);
                let values = if BITS == 4 { L::negate_by_bit_3(values, codes) } else { values };
                L::put(values, eight);
                codes = L::next::<SHIFT>(codes);
            }
        }
    }
    // A half chunk, of a head size of 96 alone.
    let bytes = &bytes[chunks.len() * 8 * BITS..];
    for (i, to) in rest.iter_mut().enumerate() {
        let code = unpack::<BITS>(bytes, 32, i);
        let value = table[usize::from(code & 7)] * scale;
        *to = if BITS == 4 && code >= 8 { -value } else { value };
    }
}

// SAFETY: needs no features.
unsafe impl Lanes for crate::isa::Portable {
    type Codes = [u32; 8];
    type Floats = [f32; 8];

    #[inline(always)]
    unsafe fn scaled(values: &[f32; 8], scale: f32) -> [f32; 8] {
        values.map(|v| v * scale)
    }

    #[inline(always)]
    unsafe fn spread<const BYTES: usize>(bytes: &[u8]) -> [u32; 8] {
        let mut lanes = [0; 8];
        for (lane, bytes) in lanes.iter_mut().zip(bytes.chunks_exact(BYTES)) {
            *lane = bytes.iter().rev().fold(0, |lane, b| lane << 8 | u32::from(*b));
        }
        lanes
    }

    #[inline(always)]
    unsafe fn next<const BITS: i32>(codes: [u32; 8]) -> [u32; 8] {
        codes.map(|c| c >> BITS)
    }

    #[inline(always)]
    unsafe fn look_up(table: [f32; 8], codes: [u32; 8]) -> [f32; 8] {
        codes.map(|c| table[(c & 7) as usize])
    }

    #[inline(always)]
    unsafe fn negate_by_bit_3(values: [f32; 8], codes: [u32; 8]) -> [f32; 8] {
        std::array::from_fn(|i| f32::from_bits(values[i].to_bits() ^ (codes[i] & 8) << 28))
    }

    #[inline(always)]
    unsafe fn put_pairs(pairs: [u32; 4], step: f32, to: &mut [f32; 8]) {
        for (to, pair) in to.as_chunks_mut::<2>().0.iter_mut().zip(pairs) {
            *to = [f32::from(pair as i16) * step, f32::from((pair >> 16) as i16) * step];
        }
    }

    #[inline(always)]
    unsafe fn put(values: [f32; 8], to: &mut [f32; 8]) {
        *to = values;
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::Lanes;
    use crate::isa::{Avx2, Avx512};
    use std::arch::x86_64::*;

    // SAFETY: as the trait says, inlined into functions with the features only.
    unsafe impl Lanes for Avx2 {
        type Codes = __m256i;
        type Floats = __m256;

        #[inline(always)]
        unsafe fn scaled(values: &[f32; 8], scale: f32) -> __m256 {
            // SAFETY: features by the caller.
            unsafe { _mm256_mul_ps(_mm256_loadu_ps(values.as_ptr()), _mm256_set1_ps(scale)) }
        }

        #[inline(always)]
        unsafe fn spread<const BYTES: usize>(bytes: &[u8]) -> __m256i {
            assert!(bytes.len() >= 8 * BYTES);
            let p = bytes.as_ptr();
            // SAFETY: features by the caller; no more than the asserted bytes are read.
            unsafe {
                match BYTES {
                    2 => _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast())),
                    3 => {
                        let low = _mm_loadu_si128(p.cast());
                        let high = _mm_loadu_si128(p.add(8).cast());
                        let order = _mm256_setr_epi8(
                            0, 1, 2, -1, 3, 4, 5, -1, 6, 7, 8, -1, 9, 10, 11, -1, // bytes 0 to 11
                            4, 5, 6, -1, 7, 8, 9, -1, 10, 11, 12, -1, 13, 14, 15, -1, // bytes 12 to 23
                        );
                        _mm256_shuffle_epi8(_mm256_set_m128i(high, low), order)
                    }
                    4 => _mm256_loadu_si256(p.cast()),
                    _ => unreachable!("lanes have two to four bytes"),
                }
            }
        }

        #[inline(always)]
        unsafe fn next<const BITS: i32>(codes: __m256i) -> __m256i {
            // SAFETY: features by the caller.
            unsafe { _mm256_srli_epi32::<BITS>(codes) }
        }

        #[inline(always)]
        unsafe fn look_up(table: __m256, codes: __m256i) -> __m256 {
            // SAFETY: features by the caller.
            unsafe { _mm256_permutevar8x32_ps(table, codes) }
        }

        #[inline(always)]
        unsafe fn negate_by_bit_3(values: __m256, codes: __m256i) -> __m256 {
            // SAFETY: features by the caller.
            unsafe {
                let signs = _mm256_and_ps(_mm256_castsi256_ps(_mm256_slli_epi32::<28>(codes)), _mm256_set1_ps(-0.0));
                _mm256_xor_ps(values, signs)
            }
        }

        #[inline(always)]
        unsafe fn put_pairs(pairs: [u32; 4], step: f32, to: &mut [f32; 8]) {
            let [a, b, c, d] = pairs.map(u32::cast_signed);
            // SAFETY: features by the caller.
            unsafe {
                let values = _mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(_mm_setr_epi32(a, b, c, d)));
                _mm256_storeu_ps(to.as_mut_ptr(), _mm256_mul_ps(values, _mm256_set1_ps(step)));
            }
        }

        #[inline(always)]
        unsafe fn put(values: __m256, to: &mut [f32; 8]) {
            // SAFETY: features by the caller.
            unsafe { _mm256_storeu_ps(to.as_mut_ptr(), values) }
        }
    }

    // SAFETY: the features of AVX-512 include those of AVX2.
    unsafe impl Lanes for Avx512 {
        type Codes = __m256i;
        type Floats = __m256;

        #[inline(always)]
        unsafe fn scaled(values: &[f32; 8], scale: f32) -> __m256 {
            // SAFETY: passed on.
            unsafe { Avx2::scaled(values, scale) }
        }

        #[inline(always)]
        unsafe fn spread<const BYTES: usize>(bytes: &[u8]) -> __m256i {
            // SAFETY: passed on.
            unsafe { Avx2::spread::<BYTES>(bytes) }
        }

        #[inline(always)]
        unsafe fn next<const BITS: i32>(codes: __m256i) -> __m256i {
            // SAFETY: passed on.
            unsafe { Avx2::next::<BITS>(codes) }
        }

        #[inline(always)]
        unsafe fn look_up(table: __m256, codes: __m256i) -> __m256 {
            // SAFETY: passed on.
            unsafe { Avx2::look_up(table, codes) }
        }

        #[inline(always)]
        unsafe fn negate_by_bit_3(values: __m256, codes: __m256i) -> __m256 {
            // SAFETY: passed on.
            unsafe { Avx2::negate_by_bit_3(values, codes) }
        }

        #[inline(always)]
        unsafe fn put_pairs(pairs: [u32; 4], step: f32, to: &mut [f32; 8]) {
            // SAFETY: passed on.
            unsafe { Avx2::put_pairs(pairs, step, to) }
        }

        #[inline(always)]
        unsafe fn put(values: __m256, to: &mut [f32; 8]) {
            // SAFETY: passed on.
            unsafe { Avx2::put(values, to) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_codes_come_back_in_their_order() {
        fn check<const BITS: usize>() {
            for n in [64, 96, 128] {
                let codes: Vec<u8> = (0..n).map(|i| (i * 7 + i / 8) as u8 & ((1 << BITS) - 1)).collect();
                let mut bytes = vec![0xff; n * BITS / 8];
                pack::<BITS>(&codes, &mut bytes);
                let back: Vec<u8> = (0..n).map(|i| unpack::<BITS>(&bytes, n, i)).collect();
                assert_eq!(codes, back);
            }
        }
        check::<2>();
        check::<3>();
        check::<4>();
    }
}
