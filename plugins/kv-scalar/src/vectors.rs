//! Vectors of integers, and conversions, on each instruction set: what kernels of this crate need beyond [`Isa`].

use opencoti_kv_common::isa::{Isa, Portable};

/// Operations on vectors.
///
/// # Safety
/// Every function may only run, inlined, inside a function that enables the features of the set. Pointers are valid for
/// what is read or written and need no alignment.
pub(crate) unsafe trait Vectors: Isa {
    /// A vector of as many 32-bit integers.
    type W: Copy;
    /// A vector of twice as many 16-bit integers.
    type H: Copy;
    /// `a * b`.
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    /// `LANES` little-endian half floats.
    unsafe fn half_floats(p: *const u8) -> Self::V;
    /// `LANES` little-endian bfloats.
    unsafe fn bfloats(p: *const u8) -> Self::V;

    /// Zeros.
    unsafe fn zero() -> Self::W;
    /// `a + b`.
    unsafe fn add(a: Self::W, b: Self::W) -> Self::W;
    /// As floats.
    unsafe fn floats(w: Self::W) -> Self::V;
    /// Sums of the products of neighbours: lane `i` is `a[2i] * b[2i] + a[2i + 1] * b[2i + 1]`.
    unsafe fn products(a: Self::H, b: Self::H) -> Self::W;
    /// Reads `2 * LANES` values.
    unsafe fn load_short(p: *const i16) -> Self::H;
    /// Writes the nearest integers of `2 * LANES` values, which fit, times `scale`.
    unsafe fn round(p: *const f32, scale: f32, to: *mut i16);
    /// Two values, again and again.
    unsafe fn splat_pair(p: *const i16) -> Self::H;
    /// Makes neighbours of the values of `a` and `b`, in an order that [`Vectors::in_order`] undoes.
    unsafe fn pair(a: Self::H, b: Self::H) -> [Self::H; 2];
    /// What became of the two vectors of [`Vectors::pair`], a lane for each pair, in the order of the values.
    unsafe fn in_order(v: [Self::V; 2]) -> [Self::V; 2];
    /// As floats, in order.
    unsafe fn widen(h: Self::H) -> [Self::V; 2];
    /// `a | b`.
    unsafe fn or(a: Self::H, b: Self::H) -> Self::H;
    /// `a - b`, the same for all lanes.
    unsafe fn less(a: Self::H, b: i16) -> Self::H;

    // Below, `part` counts vectors of `2 * LANES` codes in a block of 32.

    /// Signed bytes from `p`.
    unsafe fn signed(p: *const u8) -> Self::H;
    /// Codes of a block of sixteen bytes: the low four bits of each, then the high ones.
    unsafe fn nibbles(p: *const u8, part: usize) -> Self::H;
    /// Bits of a word, each moved to bit 4 of its lane.
    unsafe fn fifth_bits(word: u32, part: usize) -> Self::H;
    /// The pairs of bits of codes of a q6_0 block, moved to bits 4 and 5: eight bytes hold those of codes `j`, `j + 16`,
    /// `j + 8` and `j + 24` from bit 0 up.
    unsafe fn bit_pairs(p: *const u8, part: usize) -> Self::H;
}

/// Eight unaligned values.
///
/// # Safety
/// They are readable.
#[inline(always)]
unsafe fn eight<T: Copy>(p: *const u8) -> [T; 8] {
    // SAFETY: the caller's promise.
    unsafe { p.cast::<[T; 8]>().read_unaligned() }
}

// SAFETY: needs no features.
unsafe impl Vectors for Portable {
    type W = [i32; 8];
    type H = [i16; 16];
    #[inline(always)]
    unsafe fn mul(a: [f32; 8], b: [f32; 8]) -> [f32; 8] {
        std::array::from_fn(|i| a[i] * b[i])
    }

    #[inline(always)]
    unsafe fn half_floats(p: *const u8) -> [f32; 8] {
        // SAFETY: the caller's promise.
        unsafe {
            let bits = eight::<[u8; 2]>(p).map(u16::from_le_bytes);
            let mut out = [0.0; 8];
            for i in 0..8 {
                out[i] = Self::half(bits[i]);
            }
            out
        }
    }

    #[inline(always)]
    unsafe fn bfloats(p: *const u8) -> [f32; 8] {
        // SAFETY: the caller's promise.
        unsafe { eight(p) }.map(|bytes| f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16))
    }

    #[inline(always)]
    unsafe fn zero() -> [i32; 8] {
        [0; 8]
    }

    #[inline(always)]
    unsafe fn add(a: [i32; 8], b: [i32; 8]) -> [i32; 8] {
        std::array::from_fn(|i| a[i].wrapping_add(b[i]))
    }

    #[inline(always)]
    unsafe fn floats(w: [i32; 8]) -> [f32; 8] {
        w.map(|w| w as f32)
    }

    #[inline(always)]
    unsafe fn products(a: [i16; 16], b: [i16; 16]) -> [i32; 8] {
        let product = |i: usize| i32::from(a[i]) * i32::from(b[i]);
        std::array::from_fn(|i| product(2 * i).wrapping_add(product(2 * i + 1)))
    }

    #[inline(always)]
    unsafe fn load_short(p: *const i16) -> [i16; 16] {
        // SAFETY: the caller's promise.
        unsafe { p.cast::<[i16; 16]>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn round(p: *const f32, scale: f32, to: *mut i16) {
        // SAFETY: the caller's promise.
        unsafe {
            let rounded = p.cast::<[f32; 16]>().read_unaligned().map(|v| (v * scale).round_ties_even() as i16);
            to.cast::<[i16; 16]>().write_unaligned(rounded);
        }
    }

    #[inline(always)]
    unsafe fn splat_pair(p: *const i16) -> [i16; 16] {
        // SAFETY: the caller's promise.
        let pair = unsafe { p.cast::<[i16; 2]>().read_unaligned() };
        std::array::from_fn(|i| pair[i % 2])
    }

    #[inline(always)]
    unsafe fn pair(a: [i16; 16], b: [i16; 16]) -> [[i16; 16]; 2] {
        let of = |first: usize| std::array::from_fn(|i| if i % 2 == 0 { a[first + i / 2] } else { b[first + i / 2] });
        [of(0), of(8)]
    }

    #[inline(always)]
    unsafe fn in_order(v: [[f32; 8]; 2]) -> [[f32; 8]; 2] {
        v
    }

    #[inline(always)]
    unsafe fn widen(h: [i16; 16]) -> [[f32; 8]; 2] {
        [std::array::from_fn(|i| f32::from(h[i])), std::array::from_fn(|i| f32::from(h[i + 8]))]
    }

    #[inline(always)]
    unsafe fn or(a: [i16; 16], b: [i16; 16]) -> [i16; 16] {
        std::array::from_fn(|i| a[i] | b[i])
    }

    #[inline(always)]
    unsafe fn less(a: [i16; 16], b: i16) -> [i16; 16] {
        a.map(|a| a - b)
    }

    #[inline(always)]
    unsafe fn signed(p: *const u8) -> [i16; 16] {
        // SAFETY: the caller's promise.
        unsafe { p.cast::<[i8; 16]>().read() }.map(i16::from)
    }

    #[inline(always)]
    unsafe fn nibbles(p: *const u8, part: usize) -> [i16; 16] {
        // SAFETY: the caller's promise.
        unsafe { p.cast::<[u8; 16]>().read() }.map(|b| i16::from(if part == 0 { b & 15 } else { b >> 4 }))
    }

    #[inline(always)]
    unsafe fn fifth_bits(word: u32, part: usize) -> [i16; 16] {
        std::array::from_fn(|i| ((word >> (16 * part + i) & 1) << 4) as i16)
    }

    #[inline(always)]
    unsafe fn bit_pairs(p: *const u8, part: usize) -> [i16; 16] {
        // SAFETY: the caller's promise.
        let bytes = unsafe { p.cast::<[u8; 8]>().read() };
        std::array::from_fn(|i| i16::from(bytes[i % 8] >> (2 * part + 4 * (i / 8)) & 3) << 4)
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    //! Bodies consist of intrinsics alone: their features, and the reach of pointers, are the caller's promise.
    #![allow(clippy::undocumented_unsafe_blocks, reason = "one promise for all, said above")]

    use std::arch::x86_64::*;

    use opencoti_kv_common::isa::{Avx2, Avx512};

    use super::Vectors;

    /// Functions of a trait that are one expression of intrinsics.
    macro_rules! inlined {
        ($(fn $name:ident($($arg:ident: $ty:ty),*) -> $out:ty = $body:expr;)*) => {
            $(#[inline(always)]
            unsafe fn $name($($arg: $ty),*) -> $out {
                unsafe { $body }
            })*
        };
    }

    // SAFETY: as the trait says, inlined into functions with the features only.
    unsafe impl Vectors for Avx2 {
        type W = __m256i;
        type H = __m256i;
        inlined! {
            fn mul(a: __m256, b: __m256) -> __m256 = _mm256_mul_ps(a, b);
            fn half_floats(p: *const u8) -> __m256 = _mm256_cvtph_ps(_mm_loadu_si128(p.cast()));
            fn bfloats(p: *const u8) -> __m256 =
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()))));
            fn zero() -> __m256i = _mm256_setzero_si256();
            fn add(a: __m256i, b: __m256i) -> __m256i = _mm256_add_epi32(a, b);
            fn floats(w: __m256i) -> __m256 = _mm256_cvtepi32_ps(w);
            fn products(a: __m256i, b: __m256i) -> __m256i = _mm256_madd_epi16(a, b);
            fn load_short(p: *const i16) -> __m256i = _mm256_loadu_si256(p.cast());
            fn splat_pair(p: *const i16) -> __m256i = _mm256_set1_epi32(p.cast::<i32>().read_unaligned());
            fn pair(a: __m256i, b: __m256i) -> [__m256i; 2] = [_mm256_unpacklo_epi16(a, b), _mm256_unpackhi_epi16(a, b)];
            fn in_order(v: [__m256; 2]) -> [__m256; 2] =
                [_mm256_permute2f128_ps::<0x20>(v[0], v[1]), _mm256_permute2f128_ps::<0x31>(v[0], v[1])];
            fn widen(h: __m256i) -> [__m256; 2] = [
                _mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(_mm256_castsi256_si128(h))),
                _mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(_mm256_extracti128_si256::<1>(h)))
            ];
            fn or(a: __m256i, b: __m256i) -> __m256i = _mm256_or_si256(a, b);
            fn less(a: __m256i, b: i16) -> __m256i = _mm256_sub_epi16(a, _mm256_set1_epi16(b));
            fn signed(p: *const u8) -> __m256i = _mm256_cvtepi8_epi16(_mm_loadu_si128(p.cast()));
        }

        #[inline(always)]
        unsafe fn round(p: *const f32, scale: f32, to: *mut i16) {
            unsafe {
                let scale = _mm256_set1_ps(scale);
                let low = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(p), scale));
                let high = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(p.add(8)), scale));
                let packed = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi32(low, high));
                _mm256_storeu_si256(to.cast(), packed);
            }
        }

        #[inline(always)]
        unsafe fn nibbles(p: *const u8, part: usize) -> __m256i {
            unsafe {
                let bytes = _mm256_cvtepu8_epi16(_mm_loadu_si128(p.cast()));
                if part == 0 { _mm256_and_si256(bytes, _mm256_set1_epi16(15)) } else { _mm256_srli_epi16::<4>(bytes) }
            }
        }

        #[inline(always)]
        unsafe fn fifth_bits(word: u32, part: usize) -> __m256i {
            unsafe {
                let places =
                    _mm256_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, -32768);
                let bits = _mm256_and_si256(_mm256_set1_epi16((word >> (16 * part)) as i16), places);
                _mm256_and_si256(_mm256_cmpeq_epi16(bits, places), _mm256_set1_epi16(16))
            }
        }

        #[inline(always)]
        unsafe fn bit_pairs(p: *const u8, part: usize) -> __m256i {
            unsafe {
                let words = _mm_slli_epi16::<4>(_mm_cvtepu8_epi16(_mm_loadl_epi64(p.cast())));
                let first = _mm_srl_epi16(words, _mm_cvtsi32_si128(2 * part as i32));
                let both = _mm256_set_m128i(_mm_srli_epi16::<4>(first), first);
                _mm256_and_si256(both, _mm256_set1_epi16(0x30))
            }
        }
    }

    // SAFETY: as above.
    unsafe impl Vectors for Avx512 {
        type W = __m512i;
        type H = __m512i;
        inlined! {
            fn mul(a: __m512, b: __m512) -> __m512 = _mm512_mul_ps(a, b);
            fn half_floats(p: *const u8) -> __m512 = _mm512_cvtph_ps(_mm256_loadu_si256(p.cast()));
            fn bfloats(p: *const u8) -> __m512 =
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()))));
            fn zero() -> __m512i = _mm512_setzero_si512();
            fn add(a: __m512i, b: __m512i) -> __m512i = _mm512_add_epi32(a, b);
            fn floats(w: __m512i) -> __m512 = _mm512_cvtepi32_ps(w);
            fn products(a: __m512i, b: __m512i) -> __m512i = _mm512_madd_epi16(a, b);
            fn load_short(p: *const i16) -> __m512i = _mm512_loadu_si512(p.cast());
            fn splat_pair(p: *const i16) -> __m512i = _mm512_set1_epi32(p.cast::<i32>().read_unaligned());
            fn pair(a: __m512i, b: __m512i) -> [__m512i; 2] = [_mm512_unpacklo_epi16(a, b), _mm512_unpackhi_epi16(a, b)];
            fn widen(h: __m512i) -> [__m512; 2] = [
                _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm512_castsi512_si256(h))),
                _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm512_extracti64x4_epi64::<1>(h)))
            ];
            fn or(a: __m512i, b: __m512i) -> __m512i = _mm512_or_si512(a, b);
            fn less(a: __m512i, b: i16) -> __m512i = _mm512_sub_epi16(a, _mm512_set1_epi16(b));
            fn signed(p: *const u8) -> __m512i = _mm512_cvtepi8_epi16(_mm256_loadu_si256(p.cast()));
            fn nibbles(p: *const u8, _part: usize) -> __m512i = both(Avx2::nibbles(p, 0), Avx2::nibbles(p, 1));
            fn fifth_bits(word: u32, _part: usize) -> __m512i = both(Avx2::fifth_bits(word, 0), Avx2::fifth_bits(word, 1));
            fn bit_pairs(p: *const u8, _part: usize) -> __m512i = both(Avx2::bit_pairs(p, 0), Avx2::bit_pairs(p, 1));
        }

        #[inline(always)]
        unsafe fn round(p: *const f32, scale: f32, to: *mut i16) {
            unsafe {
                Avx2::round(p, scale, to);
                Avx2::round(p.add(16), scale, to.add(16));
            }
        }

        #[inline(always)]
        unsafe fn in_order(v: [__m512; 2]) -> [__m512; 2] {
            unsafe {
                let first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
                let second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
                [_mm512_permutex2var_ps(v[0], first, v[1]), _mm512_permutex2var_ps(v[0], second, v[1])]
            }
        }
    }

    /// Two halves of a vector.
    #[inline(always)]
    unsafe fn both(low: __m256i, high: __m256i) -> __m512i {
        unsafe { _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high) }
    }
}
