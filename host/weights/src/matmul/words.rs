//! Vectors of 16-bit words in which packed weights are multiplied, one pair of words a weight row.

use crate::quant::f16_to_f32;
use crate::simd::{Lanes, Portable};

/// A vector of pairs of 16-bit words, one pair for each of [`ROWS`](Words::ROWS) weight rows.
///
/// # Safety
/// Every function may be called only on a processor that has the instruction set of the implementation; pointers must be
/// valid for what is read and need no alignment.
pub(super) trait Words: Copy {
    /// Sums of products, one 32-bit integer a row.
    type Sums: Copy;
    /// Numbers, one a row.
    type Floats: Lanes;

    /// Weight rows.
    const ROWS: usize;

    /// Fetches the cache line of `p`, which need not be valid.
    #[inline(always)]
    fn prefetch(_p: *const u8) {}

    /// A vector from memory: four bytes a row.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn load(p: *const u8) -> Self;

    /// The same two words in every row.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn pair(p: *const i16) -> Self;

    /// Every word shifted left, and to the right if `by` is negative; zeros come in.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn shift(self, by: i32) -> Self;

    /// Every word shifted right by eight; its sign comes in.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn high_byte(self) -> Self;

    /// The bits of `mask` in every word.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn and(self, mask: i16) -> Self;

    /// Bits of either.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn or(self, other: Self) -> Self;

    /// The entry of `table` that every word, less than 16, names. The first entry must be 0.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn look_up(self, table: &[u8; 16]) -> Self;

    /// No products yet.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn nothing() -> Self::Sums;

    /// `sums` and, in each row, the products of this vector's two words with those of `other`.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn add_products(self, other: Self, sums: Self::Sums) -> Self::Sums;

    /// Sums as numbers.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn floats(sums: Self::Sums) -> Self::Floats;

    /// Half-precision numbers, one a row.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn halves(p: *const u8) -> Self::Floats;

    /// Whole numbers of 0 to 255, one a row.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn unsigned(p: *const u8) -> Self::Floats;

    /// Whole numbers of −128 to 127, one a row.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn signed(p: *const u8) -> Self::Floats;
}

/// Eight rows in plain Rust.
#[derive(Clone, Copy)]
pub(super) struct Plain([[i16; 2]; 8]);

impl Plain {
    #[inline(always)]
    fn map(self, f: impl Fn(i16) -> i16) -> Self {
        Plain(self.0.map(|pair| pair.map(&f)))
    }
}

/// Eight numbers from eight elements at `p`.
///
/// # Safety
/// `p` is valid for eight elements.
#[inline(always)]
unsafe fn numbers<T: Copy>(p: *const u8, f: impl Fn(T) -> f32) -> Portable {
    // SAFETY: valid by the caller's promise.
    Portable(unsafe { p.cast::<[T; 8]>().read_unaligned() }.map(f))
}

impl Words for Plain {
    type Sums = [i32; 8];
    type Floats = Portable;

    const ROWS: usize = 8;

    #[inline(always)]
    unsafe fn load(p: *const u8) -> Self {
        // SAFETY: 32 bytes by the caller's promise.
        Plain(unsafe { p.cast::<[[[u8; 2]; 2]; 8]>().read_unaligned() }.map(|pair| pair.map(i16::from_le_bytes)))
    }

    #[inline(always)]
    unsafe fn pair(p: *const i16) -> Self {
        // SAFETY: two words by the caller's promise.
        Plain([unsafe { p.cast::<[i16; 2]>().read_unaligned() }; 8])
    }

    #[inline(always)]
    unsafe fn shift(self, by: i32) -> Self {
        self.map(|word| if by < 0 { (word.cast_unsigned() >> -by).cast_signed() } else { word << by })
    }

    #[inline(always)]
    unsafe fn high_byte(self) -> Self {
        self.map(|word| word >> 8)
    }

    #[inline(always)]
    unsafe fn and(self, mask: i16) -> Self {
        self.map(|word| word & mask)
    }

    #[inline(always)]
    unsafe fn or(mut self, other: Self) -> Self {
        for (pair, other) in self.0.iter_mut().zip(other.0) {
            *pair = [pair[0] | other[0], pair[1] | other[1]];
        }
        self
    }

    #[inline(always)]
    unsafe fn look_up(self, table: &[u8; 16]) -> Self {
        self.map(|word| table[(word & 15) as usize].into())
    }

    #[inline(always)]
    unsafe fn nothing() -> Self::Sums {
        [0; 8]
    }

    #[inline(always)]
    unsafe fn add_products(self, other: Self, mut sums: Self::Sums) -> Self::Sums {
        for ((sum, a), b) in sums.iter_mut().zip(self.0).zip(other.0) {
            *sum += i32::from(a[0]) * i32::from(b[0]) + i32::from(a[1]) * i32::from(b[1]);
        }
        sums
    }

    #[inline(always)]
    unsafe fn floats(sums: Self::Sums) -> Self::Floats {
        Portable(sums.map(|sum| sum as f32))
    }

    #[inline(always)]
    unsafe fn halves(p: *const u8) -> Self::Floats {
        // SAFETY: passed on.
        unsafe { numbers(p, |half: [u8; 2]| f16_to_f32(u16::from_le_bytes(half))) }
    }

    #[inline(always)]
    unsafe fn unsigned(p: *const u8) -> Self::Floats {
        // SAFETY: passed on.
        unsafe { numbers(p, |byte: u8| byte.into()) }
    }

    #[inline(always)]
    unsafe fn signed(p: *const u8) -> Self::Floats {
        // SAFETY: passed on.
        unsafe { numbers(p, |byte: i8| byte.into()) }
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{Words256, Words512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::Words;
    use crate::simd::{F32x8, F32x16};
    use std::arch::x86_64::*;

    /// Eight rows, with AVX2 or, where `VNNI` says so, AVX-VNNI.
    #[derive(Clone, Copy)]
    pub(crate) struct Words256<const VNNI: bool>(__m256i);

    // For all below, the caller promises the instruction set and that pointers are valid.
    impl<const VNNI: bool> Words for Words256<VNNI> {
        type Sums = __m256i;
        type Floats = F32x8;

        const ROWS: usize = 8;

        #[inline(always)]
        fn prefetch(p: *const u8) {
            // SAFETY: SSE is part of every x86-64; a prefetch faults nowhere.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
        }

        #[inline(always)]
        unsafe fn load(p: *const u8) -> Self {
            // SAFETY: AVX2 and 32 bytes.
            Words256(unsafe { _mm256_loadu_si256(p.cast()) })
        }

        #[inline(always)]
        unsafe fn pair(p: *const i16) -> Self {
            // SAFETY: AVX2 and two words.
            Words256(unsafe { _mm256_set1_epi32(p.cast::<i32>().read_unaligned()) })
        }

        #[inline(always)]
        unsafe fn shift(self, by: i32) -> Self {
            // SAFETY: AVX2.
            Words256(unsafe {
                match by < 0 {
                    true => _mm256_srl_epi16(self.0, _mm_cvtsi32_si128(-by)),
                    false => _mm256_sll_epi16(self.0, _mm_cvtsi32_si128(by)),
                }
            })
        }

        #[inline(always)]
        unsafe fn high_byte(self) -> Self {
            // SAFETY: AVX2.
            Words256(unsafe { _mm256_srai_epi16::<8>(self.0) })
        }

        #[inline(always)]
        unsafe fn and(self, mask: i16) -> Self {
            // SAFETY: AVX2.
            Words256(unsafe { _mm256_and_si256(self.0, _mm256_set1_epi16(mask)) })
        }

        #[inline(always)]
        unsafe fn or(self, other: Self) -> Self {
            // SAFETY: AVX2.
            Words256(unsafe { _mm256_or_si256(self.0, other.0) })
        }

        #[inline(always)]
        unsafe fn look_up(self, table: &[u8; 16]) -> Self {
            // SAFETY: AVX2. Upper bytes are zero and find the first entry, which is zero, too.
            Words256(unsafe {
                let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
                _mm256_shuffle_epi8(table, self.0)
            })
        }

        #[inline(always)]
        unsafe fn nothing() -> Self::Sums {
            // SAFETY: AVX2.
            unsafe { _mm256_setzero_si256() }
        }

        #[inline(always)]
        unsafe fn add_products(self, other: Self, sums: Self::Sums) -> Self::Sums {
            // SAFETY: AVX2, or AVX-VNNI.
            unsafe {
                match VNNI {
                    true => _mm256_dpwssd_avx_epi32(sums, self.0, other.0),
                    false => _mm256_add_epi32(sums, _mm256_madd_epi16(self.0, other.0)),
                }
            }
        }

        #[inline(always)]
        unsafe fn floats(sums: Self::Sums) -> Self::Floats {
            // SAFETY: AVX2.
            F32x8(unsafe { _mm256_cvtepi32_ps(sums) })
        }

        #[inline(always)]
        unsafe fn halves(p: *const u8) -> Self::Floats {
            // SAFETY: F16C and 16 bytes.
            F32x8(unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) })
        }

        #[inline(always)]
        unsafe fn unsigned(p: *const u8) -> Self::Floats {
            // SAFETY: AVX2 and eight bytes.
            F32x8(unsafe { _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast()))) })
        }

        #[inline(always)]
        unsafe fn signed(p: *const u8) -> Self::Floats {
            // SAFETY: AVX2 and eight bytes.
            F32x8(unsafe { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p.cast()))) })
        }
    }

    /// Sixteen rows, with AVX-512 F, BW and VNNI.
    #[derive(Clone, Copy)]
    pub(crate) struct Words512(__m512i);

    impl Words for Words512 {
        type Sums = __m512i;
        type Floats = F32x16;

        const ROWS: usize = 16;

        #[inline(always)]
        fn prefetch(p: *const u8) {
            // SAFETY: SSE is part of every x86-64; a prefetch faults nowhere.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
        }

        #[inline(always)]
        unsafe fn load(p: *const u8) -> Self {
            // SAFETY: AVX-512 and 64 bytes.
            Words512(unsafe { _mm512_loadu_si512(p.cast()) })
        }

        #[inline(always)]
        unsafe fn pair(p: *const i16) -> Self {
            // SAFETY: AVX-512 and two words.
            Words512(unsafe { _mm512_set1_epi32(p.cast::<i32>().read_unaligned()) })
        }

        #[inline(always)]
        unsafe fn shift(self, by: i32) -> Self {
            // SAFETY: AVX-512 BW.
            Words512(unsafe {
                match by < 0 {
                    true => _mm512_srl_epi16(self.0, _mm_cvtsi32_si128(-by)),
                    false => _mm512_sll_epi16(self.0, _mm_cvtsi32_si128(by)),
                }
            })
        }

        #[inline(always)]
        unsafe fn high_byte(self) -> Self {
            // SAFETY: AVX-512 BW.
            Words512(unsafe { _mm512_srai_epi16::<8>(self.0) })
        }

        #[inline(always)]
        unsafe fn and(self, mask: i16) -> Self {
            // SAFETY: AVX-512 BW.
            Words512(unsafe { _mm512_and_si512(self.0, _mm512_set1_epi16(mask)) })
        }

        #[inline(always)]
        unsafe fn or(self, other: Self) -> Self {
            // SAFETY: AVX-512.
            Words512(unsafe { _mm512_or_si512(self.0, other.0) })
        }

        #[inline(always)]
        unsafe fn look_up(self, table: &[u8; 16]) -> Self {
            // SAFETY: AVX-512 BW. Upper bytes are zero and find the first entry, which is zero, too.
            Words512(unsafe {
                let table = _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast()));
                _mm512_shuffle_epi8(table, self.0)
            })
        }

        #[inline(always)]
        unsafe fn nothing() -> Self::Sums {
            // SAFETY: AVX-512.
            unsafe { _mm512_setzero_si512() }
        }

        #[inline(always)]
        unsafe fn add_products(self, other: Self, sums: Self::Sums) -> Self::Sums {
            // SAFETY: AVX-512 VNNI.
            unsafe { _mm512_dpwssd_epi32(sums, self.0, other.0) }
        }

        #[inline(always)]
        unsafe fn floats(sums: Self::Sums) -> Self::Floats {
            // SAFETY: AVX-512.
            F32x16(unsafe { _mm512_cvtepi32_ps(sums) })
        }

        #[inline(always)]
        unsafe fn halves(p: *const u8) -> Self::Floats {
            // SAFETY: AVX-512 and 32 bytes.
            F32x16(unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) })
        }

        #[inline(always)]
        unsafe fn unsigned(p: *const u8) -> Self::Floats {
            // SAFETY: AVX-512 and 16 bytes.
            F32x16(unsafe { _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast()))) })
        }

        #[inline(always)]
        unsafe fn signed(p: *const u8) -> Self::Floats {
            // SAFETY: AVX-512 and 16 bytes.
            F32x16(unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast()))) })
        }
    }
}
