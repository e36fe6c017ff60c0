//! Instruction sets and the few vector operations that float kernels are written in.
//!
//! A kernel is one generic function over [`Lanes`], marked `#[inline(always)]` and called from one
//! `#[target_feature]` function per instruction set, into which it is inlined whole.

/// An instruction set that kernels are written for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Plain Rust.
    Portable,
    /// AVX2, FMA and F16C.
    Avx2,
    /// The same with 256-bit integer dot products (AVX-VNNI).
    AvxVnni,
    /// AVX-512 F, BW, DQ, VL and VNNI.
    Avx512,
}

/// Proof that this processor has the instruction set of its [`Level`]: made by detection only, so that code holding
/// one may call kernels compiled for that level.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Isa(Level);

impl Isa {
    /// The best set that this processor has.
    pub fn detect() -> Isa {
        Isa::available().last().copied().unwrap_or(Isa(Level::Portable))
    }

    /// Every set that this processor has, from plain to best.
    pub fn available() -> Vec<Isa> {
        #[allow(unused_mut, reason = "only x86-64 has more than the portable one")]
        let mut sets = vec![Isa(Level::Portable)];
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c") {
            sets.push(Isa(Level::Avx2));
            if is_x86_feature_detected!("avxvnni") {
                sets.push(Isa(Level::AvxVnni));
            }
            if is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512vnni")
            {
                sets.push(Isa(Level::Avx512));
            }
        }
        sets
    }

    /// Which set it is.
    pub fn level(self) -> Level {
        self.0
    }
}

/// A vector of f32.
///
/// # Safety
/// Every function may be called only on a processor that has the instruction set of the implementation; pointers
/// must be valid for `N` elements and need no alignment.
pub unsafe trait Lanes: Copy {
    /// Elements.
    const N: usize;

    /// All zero.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn zero() -> Self;

    /// All `x`.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn splat(x: f32) -> Self;

    /// `N` elements from memory.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn load(p: *const f32) -> Self;

    /// `N` elements to memory.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn store(self, p: *mut f32);

    /// `self + a * b`.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn add_product(self, a: Self, b: Self) -> Self;

    /// `self * other`.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn times(self, other: Self) -> Self;

    /// Sum of the elements.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn sum(self) -> f32;

    /// Sums of four vectors, each of its own elements.
    ///
    /// # Safety
    /// See the trait.
    #[inline(always)]
    unsafe fn sums(v: [Self; 4]) -> [f32; 4] {
        // SAFETY: passed on. No closure, which might not be inlined.
        unsafe { [v[0].sum(), v[1].sum(), v[2].sum(), v[3].sum()] }
    }
}

/// Eight elements in plain Rust.
#[derive(Clone, Copy)]
pub struct Portable(pub [f32; 8]);

// SAFETY: needs no instruction set; reads `N` elements without alignment.
unsafe impl Lanes for Portable {
    const N: usize = 8;

    #[inline(always)]
    unsafe fn zero() -> Self {
        Portable([0.0; 8])
    }

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        Portable([x; 8])
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: valid for eight elements by the caller's promise.
        unsafe { p.cast::<[f32; 8]>().write_unaligned(self.0) }
    }

    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        // SAFETY: valid for eight elements by the caller's promise.
        Portable(unsafe { p.cast::<[f32; 8]>().read_unaligned() })
    }

    #[inline(always)]
    unsafe fn add_product(mut self, a: Self, b: Self) -> Self {
        for i in 0..8 {
            self.0[i] += a.0[i] * b.0[i];
        }
        self
    }

    #[inline(always)]
    unsafe fn times(mut self, other: Self) -> Self {
        for i in 0..8 {
            self.0[i] *= other.0[i];
        }
        self
    }

    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        let [a, b, c, d, e, f, g, h] = self.0;
        ((a + e) + (c + g)) + ((b + f) + (d + h))
    }
}

#[cfg(target_arch = "x86_64")]
pub use x86::{F32x8, F32x16};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::Lanes;
    use std::arch::x86_64::*;

    /// Eight elements, AVX2 and FMA.
    #[derive(Clone, Copy)]
    pub struct F32x8(pub __m256);

    // SAFETY: only AVX, AVX2 and FMA instructions, loads without alignment.
    unsafe impl Lanes for F32x8 {
        const N: usize = 8;

        #[inline(always)]
        unsafe fn zero() -> Self {
            // SAFETY: the processor has AVX by the caller's promise.
            F32x8(unsafe { _mm256_setzero_ps() })
        }

        #[inline(always)]
        unsafe fn splat(x: f32) -> Self {
            // SAFETY: the processor has AVX by the caller's promise.
            F32x8(unsafe { _mm256_set1_ps(x) })
        }

        #[inline(always)]
        unsafe fn store(self, p: *mut f32) {
            // SAFETY: AVX, and a pointer valid for eight elements, by the caller's promise.
            unsafe { _mm256_storeu_ps(p, self.0) }
        }

        #[inline(always)]
        unsafe fn sums(v: [Self; 4]) -> [f32; 4] {
            // SAFETY: the processor has AVX by the caller's promise; the array holds four elements.
            unsafe {
                let pairs = _mm256_hadd_ps(_mm256_hadd_ps(v[0].0, v[1].0), _mm256_hadd_ps(v[2].0, v[3].0));
                let mut sums = [0.0; 4];
                let halves = (_mm256_castps256_ps128(pairs), _mm256_extractf128_ps::<1>(pairs));
                _mm_storeu_ps(sums.as_mut_ptr(), _mm_add_ps(halves.0, halves.1));
                sums
            }
        }

        #[inline(always)]
        unsafe fn load(p: *const f32) -> Self {
            // SAFETY: AVX, and a pointer valid for eight elements, by the caller's promise.
            F32x8(unsafe { _mm256_loadu_ps(p) })
        }

        #[inline(always)]
        unsafe fn add_product(self, a: Self, b: Self) -> Self {
            // SAFETY: the processor has FMA by the caller's promise.
            F32x8(unsafe { _mm256_fmadd_ps(a.0, b.0, self.0) })
        }

        #[inline(always)]
        unsafe fn times(self, other: Self) -> Self {
            // SAFETY: the processor has AVX by the caller's promise.
            F32x8(unsafe { _mm256_mul_ps(self.0, other.0) })
        }

        #[inline(always)]
        unsafe fn sum(self) -> f32 {
            // SAFETY: the processor has AVX by the caller's promise.
            unsafe {
                let four = _mm_add_ps(_mm256_castps256_ps128(self.0), _mm256_extractf128_ps::<1>(self.0));
                let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
                _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
            }
        }
    }

    /// Sixteen elements, AVX-512 F.
    #[derive(Clone, Copy)]
    pub struct F32x16(pub __m512);

    // SAFETY: only AVX-512 F instructions, loads without alignment.
    unsafe impl Lanes for F32x16 {
        const N: usize = 16;

        #[inline(always)]
        unsafe fn zero() -> Self {
            // SAFETY: the processor has AVX-512 F by the caller's promise.
            F32x16(unsafe { _mm512_setzero_ps() })
        }

        #[inline(always)]
        unsafe fn splat(x: f32) -> Self {
            // SAFETY: the processor has AVX-512 F by the caller's promise.
            F32x16(unsafe { _mm512_set1_ps(x) })
        }

        #[inline(always)]
        unsafe fn store(self, p: *mut f32) {
            // SAFETY: AVX-512 F, and a pointer valid for sixteen elements, by the caller's promise.
            unsafe { _mm512_storeu_ps(p, self.0) }
        }

        #[inline(always)]
        unsafe fn load(p: *const f32) -> Self {
            // SAFETY: AVX-512 F, and a pointer valid for sixteen elements, by the caller's promise.
            F32x16(unsafe { _mm512_loadu_ps(p) })
        }

        #[inline(always)]
        unsafe fn add_product(self, a: Self, b: Self) -> Self {
            // SAFETY: the processor has AVX-512 F by the caller's promise.
            F32x16(unsafe { _mm512_fmadd_ps(a.0, b.0, self.0) })
        }

        #[inline(always)]
        unsafe fn times(self, other: Self) -> Self {
            // SAFETY: the processor has AVX-512 F by the caller's promise.
            F32x16(unsafe { _mm512_mul_ps(self.0, other.0) })
        }

        #[inline(always)]
        unsafe fn sum(self) -> f32 {
            // SAFETY: the processor has AVX-512 F by the caller's promise.
            unsafe { _mm512_reduce_add_ps(self.0) }
        }
    }
}
