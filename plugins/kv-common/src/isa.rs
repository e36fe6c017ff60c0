//! Instruction sets: what the kernels need of one, and the single place that finds out which the processor has.

/// Which kernels to use.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Level {
    /// Plain Rust.
    Portable,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ and VL, beside the former.
    Avx512,
}

impl Level {
    /// The best one this processor runs.
    pub fn detect() -> Level {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::is_x86_feature_detected as has;
            if has!("avx2") && has!("fma") && has!("f16c") {
                let wide = has!("avx512f") && has!("avx512bw") && has!("avx512dq") && has!("avx512vl");
                return if wide { Level::Avx512 } else { Level::Avx2 };
            }
        }
        Level::Portable
    }

    /// Every level this processor runs, the portable one first.
    pub fn available() -> Vec<Level> {
        let best = Level::detect();
        [Level::Portable, Level::Avx2, Level::Avx512].into_iter().filter(|&l| l <= best).collect()
    }
}

/// Vectors of f32 and half-float conversion on one instruction set.
///
/// # Safety
/// Every function may only run, inlined, inside a function that enables the features of the set.
#[expect(clippy::missing_safety_doc, reason = "every function has the safety section of the trait")]
pub unsafe trait Isa: crate::lanes::Lanes {
    /// A vector.
    type V: Copy;
    /// Values in a vector; divides 32.
    const LANES: usize;

    /// All lanes `x`.
    unsafe fn splat(x: f32) -> Self::V;
    /// Reads `LANES` values, any alignment.
    unsafe fn load(p: *const f32) -> Self::V;
    /// Writes `LANES` values, any alignment.
    unsafe fn store(p: *mut f32, v: Self::V);
    /// `a * b + c`.
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// Sum of the lanes of each vector.
    unsafe fn sums(v: [Self::V; 4]) -> [f32; 4];
    /// A half float.
    unsafe fn half(bits: u16) -> f32;
    /// Half floats, little endian; `bytes` is `2 * out.len()` long.
    unsafe fn halves(bytes: &[u8], out: &mut [f32]);
}

/// Plain Rust.
pub struct Portable;

// SAFETY: needs no features.
unsafe impl Isa for Portable {
    type V = [f32; 8];
    const LANES: usize = 8;

    #[inline(always)]
    unsafe fn splat(x: f32) -> [f32; 8] {
        [x; 8]
    }

    #[inline(always)]
    unsafe fn load(p: *const f32) -> [f32; 8] {
        // SAFETY: the caller's promise.
        unsafe { p.cast::<[f32; 8]>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn store(p: *mut f32, v: [f32; 8]) {
        // SAFETY: the caller's promise.
        unsafe { p.cast::<[f32; 8]>().write_unaligned(v) }
    }

    #[inline(always)]
    unsafe fn fma(a: [f32; 8], b: [f32; 8], c: [f32; 8]) -> [f32; 8] {
        std::array::from_fn(|i| a[i] * b[i] + c[i])
    }

    #[inline(always)]
    unsafe fn sums(v: [[f32; 8]; 4]) -> [f32; 4] {
        v.map(|v| ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])))
    }

    /// Moves exponent and mantissa into place and corrects the exponent's bias by a product, which also makes
    /// subnormals normal; infinities and NaNs get all exponent bits.
    #[inline(always)]
    unsafe fn half(bits: u16) -> f32 {
        let magnitude = u32::from(bits & 0x7fff) << 13;
        let finite = (f32::from_bits(magnitude) * f32::from_bits((127 + 112) << 23)).to_bits();
        let special = if bits & 0x7c00 == 0x7c00 { magnitude | 0x7f80_0000 } else { finite };
        f32::from_bits(special | u32::from(bits & 0x8000) << 16)
    }

    #[inline(always)]
    unsafe fn halves(bytes: &[u8], out: &mut [f32]) {
        for (b, o) in bytes.chunks_exact(2).zip(out) {
            // SAFETY: needs no features.
            *o = unsafe { Self::half(u16::from_le_bytes([b[0], b[1]])) };
        }
    }
}

#[cfg(target_arch = "x86_64")]
pub use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::Isa;
    use std::arch::x86_64::*;

    /// AVX2, FMA, F16C.
    pub struct Avx2;
    /// AVX-512.
    pub struct Avx512;

    // SAFETY: as the trait says, inlined into functions with the features only.
    unsafe impl Isa for Avx2 {
        type V = __m256;
        const LANES: usize = 8;

        #[inline(always)]
        unsafe fn splat(x: f32) -> __m256 {
            // SAFETY: features by the caller.
            unsafe { _mm256_set1_ps(x) }
        }

        #[inline(always)]
        unsafe fn load(p: *const f32) -> __m256 {
            // SAFETY: features and pointer by the caller.
            unsafe { _mm256_loadu_ps(p) }
        }

        #[inline(always)]
        unsafe fn store(p: *mut f32, v: __m256) {
            // SAFETY: features and pointer by the caller.
            unsafe { _mm256_storeu_ps(p, v) }
        }

        #[inline(always)]
        unsafe fn fma(a: __m256, b: __m256, c: __m256) -> __m256 {
            // SAFETY: features by the caller.
            unsafe { _mm256_fmadd_ps(a, b, c) }
        }

        #[inline(always)]
        unsafe fn sums(v: [__m256; 4]) -> [f32; 4] {
            // SAFETY: features by the caller; the array holds four values.
            unsafe {
                let pairs = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
                let sums = _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps::<1>(pairs));
                let mut out = [0.0; 4];
                _mm_storeu_ps(out.as_mut_ptr(), sums);
                out
            }
        }

        #[inline(always)]
        unsafe fn half(bits: u16) -> f32 {
            // SAFETY: features by the caller.
            unsafe { _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(bits)))) }
        }

        #[inline(always)]
        unsafe fn halves(bytes: &[u8], out: &mut [f32]) {
            for (b, o) in bytes.chunks_exact(16).zip(out.chunks_exact_mut(8)) {
                // SAFETY: features by the caller; 16 bytes are read and 8 values written.
                unsafe { _mm256_storeu_ps(o.as_mut_ptr(), _mm256_cvtph_ps(_mm_loadu_si128(b.as_ptr().cast()))) }
            }
        }
    }

    // SAFETY: as above.
    unsafe impl Isa for Avx512 {
        type V = __m512;
        const LANES: usize = 16;

        #[inline(always)]
        unsafe fn splat(x: f32) -> __m512 {
            // SAFETY: features by the caller.
            unsafe { _mm512_set1_ps(x) }
        }

        #[inline(always)]
        unsafe fn load(p: *const f32) -> __m512 {
            // SAFETY: features and pointer by the caller.
            unsafe { _mm512_loadu_ps(p) }
        }

        #[inline(always)]
        unsafe fn store(p: *mut f32, v: __m512) {
            // SAFETY: features and pointer by the caller.
            unsafe { _mm512_storeu_ps(p, v) }
        }

        #[inline(always)]
        unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
            // SAFETY: features by the caller.
            unsafe { _mm512_fmadd_ps(a, b, c) }
        }

        #[inline(always)]
        unsafe fn sums(v: [__m512; 4]) -> [f32; 4] {
            // SAFETY: features by the caller.
            unsafe { Avx2::sums(v.map(|v| _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v)))) }
        }

        #[inline(always)]
        unsafe fn half(bits: u16) -> f32 {
            // SAFETY: features by the caller.
            unsafe { Avx2::half(bits) }
        }

        #[inline(always)]
        unsafe fn halves(bytes: &[u8], out: &mut [f32]) {
            for (b, o) in bytes.chunks_exact(32).zip(out.chunks_exact_mut(16)) {
                // SAFETY: features by the caller; 32 bytes are read and 16 values written.
                unsafe { _mm512_storeu_ps(o.as_mut_ptr(), _mm512_cvtph_ps(_mm256_loadu_si256(b.as_ptr().cast()))) }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_portable_half_conversion_is_exact_for_all_bit_patterns() {
        for bits in 0..=u16::MAX {
            // SAFETY: portable.
            let ours = unsafe { Portable::half(bits) };
            let theirs = half::f16::from_bits(bits).to_f32();
            assert!(ours.to_bits() == theirs.to_bits() || (ours.is_nan() && theirs.is_nan()), "{bits:#06x}");
        }
    }
}
