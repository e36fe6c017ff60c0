//! Integer panels: unpacked weight rows times quantised activation rows.
//!
//! Of each block of 32 values the byte products are summed in 32 bits, exactly, and enter an f32 sum with the product
//! of both scales; the weights' minima meet the activations' sums in a second, short dot product. As in
//! [`float`](super::float), every sum has the same order whatever the tile's shape.
//!
//! The processor multiplies unsigned by signed bytes. Unsigned forms fit; for the signed one the 256-bit kernels move
//! the weight's sign to the activation, and the 512-bit kernel adds 128 to the weight and takes it out again.

use super::Output;
use super::activations::Layout;
use super::unpack::Form;
use crate::cpu::simd::{Isa, Level};

/// A few unpacked weight rows: codes `cols` apart, scales and minima `stride` apart and padded with zeros.
#[derive(Clone, Copy)]
pub(super) struct Panel {
    pub(super) form: Form,
    pub(super) rows: usize,
    pub(super) codes: *const u8,
    pub(super) scales: *const f32,
    pub(super) minima: *const f32,
    pub(super) stride: usize,
}

impl Panel {
    /// The panel without its first `r` rows.
    ///
    /// # Safety
    /// It has as many.
    #[inline(always)]
    unsafe fn skip(self, r: usize, cols: usize) -> Panel {
        // SAFETY: inside the panel by the caller's promise.
        unsafe {
            Panel {
                rows: self.rows - r,
                codes: self.codes.add(r * cols),
                scales: self.scales.add(r * self.stride),
                minima: self.minima.add(r * self.stride),
                ..self
            }
        }
    }
}

/// Quantised activation rows, `layout.words` apart.
#[derive(Clone, Copy)]
pub(super) struct Input {
    pub(super) words: *const f32,
    pub(super) rows: usize,
    pub(super) layout: Layout,
}

/// Multiplies a panel with every activation row into columns `first ..` of the output.
///
/// # Safety
/// The panel and the input hold what they say, and nobody else touches those columns.
pub(super) unsafe fn panel(isa: Isa, panel: Panel, input: Input, first: usize, out: Output<'_>) {
    // SAFETY: the caller's promises; `isa` proves the instruction set of the branch.
    unsafe {
        match isa.level() {
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => x86::panel_avx512(panel, input, first, out),
            #[cfg(target_arch = "x86_64")]
            Level::AvxVnni => x86::panel_avxvnni(panel, input, first, out),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => x86::panel_avx2(panel, input, first, out),
            _ => panel_of::<Portable, 1, 1>(panel, input, first, out),
        }
    }
}

/// A tile kernel for one instruction set.
trait Kernel {
    /// Dot products of the panel's first `R` rows with `T` activation rows from `words` on.
    ///
    /// # Safety
    /// The rows exist, and the processor has the kernel's instruction set.
    unsafe fn tile<const R: usize, const T: usize, const SIGNED: bool, const SUB16: bool>(
        panel: Panel,
        words: *const f32,
        layout: Layout,
    ) -> [[f32; R]; T];
}

/// Chooses the kernel for the panel's form once, then tiles: `R` by `T` where there is enough, else four rows by one.
#[inline(always)]
unsafe fn panel_of<K: Kernel, const R: usize, const T: usize>(
    panel: Panel,
    input: Input,
    first: usize,
    out: Output<'_>,
) {
    // SAFETY: the caller's promises.
    unsafe {
        match (panel.form.signed, panel.form.sub) {
            (true, _) => tiles::<K, R, T, true, false>(panel, input, first, out),
            (false, 16) => tiles::<K, R, T, false, true>(panel, input, first, out),
            (false, _) => tiles::<K, R, T, false, false>(panel, input, first, out),
        }
    }
}

#[inline(always)]
unsafe fn tiles<K: Kernel, const R: usize, const T: usize, const SIGNED: bool, const SUB16: bool>(
    panel: Panel,
    input: Input,
    first: usize,
    out: Output<'_>,
) {
    let mut t = 0;
    // SAFETY: the loops stay inside the panel and the input; the rest is the caller's promise.
    unsafe {
        while t + T <= input.rows {
            rows::<K, R, T, SIGNED, SUB16>(panel, input, t, first, out);
            t += T;
        }
        while t < input.rows {
            rows::<K, 4, 1, SIGNED, SUB16>(panel, input, t, first, out);
            t += 1;
        }
    }
}

#[inline(always)]
unsafe fn rows<K: Kernel, const R: usize, const T: usize, const SIGNED: bool, const SUB16: bool>(
    panel: Panel,
    input: Input,
    t: usize,
    first: usize,
    out: Output<'_>,
) {
    let (layout, mut r) = (input.layout, 0);
    // SAFETY: the loops stay inside the panel; the rest is the caller's promise.
    unsafe {
        let words = input.words.add(t * layout.words);
        while r + R <= panel.rows {
            out.put(K::tile::<R, T, SIGNED, SUB16>(panel.skip(r, layout.cols), words, layout), t, first + r);
            r += R;
        }
        while r < panel.rows {
            out.put(K::tile::<1, T, SIGNED, SUB16>(panel.skip(r, layout.cols), words, layout), t, first + r);
            r += 1;
        }
    }
}

/// Plain Rust.
struct Portable;

impl Kernel for Portable {
    #[inline(always)]
    unsafe fn tile<const R: usize, const T: usize, const SIGNED: bool, const SUB16: bool>(
        panel: Panel,
        words: *const f32,
        layout: Layout,
    ) -> [[f32; R]; T] {
        let sub = if SUB16 { 16 } else { 32 };
        let subs = layout.cols / sub;
        let mut sums = [[0.0; R]; T];
        for t in 0..T {
            for r in 0..R {
                // SAFETY: the rows exist by the caller's promise, with the lengths that the layout says.
                let (w, ws, wm, a, scales, a_sums) = unsafe {
                    let row = words.add(t * layout.words);
                    let at = if SUB16 { layout.sums16 } else { layout.sums32 };
                    (
                        std::slice::from_raw_parts(panel.codes.add(r * layout.cols), layout.cols),
                        std::slice::from_raw_parts(panel.scales.add(r * panel.stride), subs),
                        std::slice::from_raw_parts(panel.minima.add(r * panel.stride), subs),
                        std::slice::from_raw_parts(row.cast::<i8>(), layout.cols),
                        std::slice::from_raw_parts(row.add(layout.scales), layout.cols / 32),
                        std::slice::from_raw_parts(row.add(at), subs),
                    )
                };
                let mut sum = 0.0;
                for (s, (w, a)) in w.chunks_exact(sub).zip(a.chunks_exact(sub)).enumerate() {
                    let weight = |w: u8| if SIGNED { i32::from(w as i8) } else { i32::from(w) };
                    let dot: i32 = w.iter().zip(a).map(|(w, a)| weight(*w) * i32::from(*a)).sum();
                    sum += dot as f32 * (ws[s] * scales[s * sub / 32]);
                }
                if !SIGNED {
                    sum += wm.iter().zip(a_sums).map(|(m, s)| m * s).sum::<f32>();
                }
                sums[t][r] = sum;
            }
        }
        sums
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{Input, Kernel, Layout, Output, Panel, panel_of};
    use crate::cpu::simd::{F32x8, F32x16, Lanes};
    use std::arch::x86_64::*;

    /// # Safety
    /// See [`panel`](super::panel).
    #[target_feature(enable = "avx2,fma")]
    pub(super) unsafe fn panel_avx2(panel: Panel, input: Input, first: usize, out: Output<'_>) {
        // SAFETY: the caller's promises.
        unsafe { panel_of::<Bytes256<false>, 2, 4>(panel, input, first, out) }
    }

    /// # Safety
    /// See [`panel`](super::panel).
    #[target_feature(enable = "avx2,fma,avxvnni")]
    pub(super) unsafe fn panel_avxvnni(panel: Panel, input: Input, first: usize, out: Output<'_>) {
        // SAFETY: the caller's promises.
        unsafe { panel_of::<Bytes256<true>, 2, 4>(panel, input, first, out) }
    }

    /// # Safety
    /// See [`panel`](super::panel).
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    pub(super) unsafe fn panel_avx512(panel: Panel, input: Input, first: usize, out: Output<'_>) {
        // SAFETY: the caller's promises.
        unsafe { panel_of::<Bytes512, 4, 4>(panel, input, first, out) }
    }

    /// Adds the products of minima and sums: `n` vectors of `S`, the last one padded with zeros.
    #[inline(always)]
    unsafe fn add_minima<S: Lanes, const R: usize, const T: usize, const SUB16: bool>(
        mut acc: [[S; R]; T],
        panel: Panel,
        words: *const f32,
        layout: Layout,
    ) -> [[S; R]; T] {
        let (at, subs) = if SUB16 { (layout.sums16, layout.cols / 16) } else { (layout.sums32, layout.cols / 32) };
        let mut k = 0;
        while k < subs {
            // SAFETY: minima and sums are padded to whole vectors.
            unsafe {
                let minima: [S; R] = std::array::from_fn(|r| S::load(panel.minima.add(r * panel.stride + k)));
                for t in 0..T {
                    let sums = S::load(words.add(t * layout.words + at + k));
                    for r in 0..R {
                        acc[t][r] = acc[t][r].add_product(minima[r], sums);
                    }
                }
            }
            k += S::N;
        }
        acc
    }

    /// 256-bit products, with the byte dot product instruction or without.
    struct Bytes256<const VNNI: bool>;

    impl<const VNNI: bool> Bytes256<VNNI> {
        /// Sums of four products each; `u` unsigned (at most 128), `s` signed.
        #[inline(always)]
        unsafe fn dot(u: __m256i, s: __m256i) -> __m256i {
            // SAFETY: the processor has AVX2, and AVX-VNNI where `VNNI` says so, by the caller's promise.
            unsafe {
                if VNNI {
                    _mm256_dpbusd_avx_epi32(_mm256_setzero_si256(), u, s)
                } else {
                    // Pairs cannot overflow 16 bits: 2 · 128 · 127 is the most.
                    _mm256_madd_epi16(_mm256_maddubs_epi16(u, s), _mm256_set1_epi16(1))
                }
            }
        }
    }

    impl<const VNNI: bool> Kernel for Bytes256<VNNI> {
        #[inline(always)]
        unsafe fn tile<const R: usize, const T: usize, const SIGNED: bool, const SUB16: bool>(
            panel: Panel,
            words: *const f32,
            layout: Layout,
        ) -> [[f32; R]; T] {
            // SAFETY: rows have `cols` codes and a scale for each sub-block, and the instruction set is there, all by
            // the caller's promise.
            unsafe {
                let mut acc = [[F32x8::zero(); R]; T];
                for b in 0..layout.cols / 32 {
                    let w: [__m256i; R] =
                        std::array::from_fn(|r| _mm256_loadu_si256(panel.codes.add(r * layout.cols + b * 32).cast()));
                    let scales: [__m256; R] = std::array::from_fn(|r| {
                        let s = panel.scales.add(r * panel.stride);
                        if SUB16 {
                            _mm256_set_m128(_mm_set1_ps(*s.add(2 * b + 1)), _mm_set1_ps(*s.add(2 * b)))
                        } else {
                            _mm256_set1_ps(*s.add(b))
                        }
                    });
                    for t in 0..T {
                        let row = words.add(t * layout.words);
                        let a = _mm256_loadu_si256(row.cast::<u8>().add(b * 32).cast());
                        let scale = _mm256_set1_ps(*row.add(layout.scales + b));
                        for r in 0..R {
                            let dot = if SIGNED {
                                Self::dot(_mm256_abs_epi8(w[r]), _mm256_sign_epi8(a, w[r]))
                            } else {
                                Self::dot(w[r], a)
                            };
                            let scale = F32x8(_mm256_mul_ps(scales[r], scale));
                            acc[t][r] = acc[t][r].add_product(F32x8(_mm256_cvtepi32_ps(dot)), scale);
                        }
                    }
                }
                if !SIGNED {
                    acc = add_minima::<F32x8, R, T, SUB16>(acc, panel, words, layout);
                }
                acc.map(|row| row.map(|v| v.sum()))
            }
        }
    }

    /// 512-bit products with the byte dot product instruction, two blocks at a time.
    struct Bytes512;

    impl Bytes512 {
        /// The scales of two blocks from `s` on, each over its values' sums.
        #[inline(always)]
        unsafe fn two_scales(s: *const f32) -> __m512 {
            // SAFETY: two readable elements and AVX-512 by the caller's promise.
            unsafe {
                let pair = _mm512_castpd_ps(_mm512_set1_pd(s.cast::<f64>().read_unaligned()));
                let lanes = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
                _mm512_permutexvar_ps(lanes, pair)
            }
        }

        /// The scales of four half blocks from `s` on.
        #[inline(always)]
        unsafe fn four_scales(s: *const f32) -> __m512 {
            // SAFETY: four readable elements and AVX-512 by the caller's promise.
            unsafe {
                let lanes = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
                _mm512_permutexvar_ps(lanes, _mm512_broadcast_f32x4(_mm_loadu_ps(s)))
            }
        }
    }

    impl Kernel for Bytes512 {
        #[inline(always)]
        unsafe fn tile<const R: usize, const T: usize, const SIGNED: bool, const SUB16: bool>(
            panel: Panel,
            words: *const f32,
            layout: Layout,
        ) -> [[f32; R]; T] {
            // SAFETY: rows have `cols` codes and padded scales, and the instruction set is there, by the caller's
            // promise. Half of the last vector is masked out when the number of blocks is odd.
            unsafe {
                let mut acc = [[F32x16::zero(); R]; T];
                let top = _mm512_set1_epi8(-128);
                let mut b = 0;
                while b < layout.cols / 32 {
                    let mask: __mmask64 = if b + 1 < layout.cols / 32 { !0 } else { 0xFFFF_FFFF };
                    let w: [__m512i; R] = std::array::from_fn(|r| {
                        let w = _mm512_maskz_loadu_epi8(mask, panel.codes.add(r * layout.cols + b * 32).cast());
                        if SIGNED { _mm512_xor_si512(w, top) } else { w }
                    });
                    let scales: [__m512; R] = std::array::from_fn(|r| {
                        let s = panel.scales.add(r * panel.stride);
                        if SUB16 { Self::four_scales(s.add(2 * b)) } else { Self::two_scales(s.add(b)) }
                    });
                    for t in 0..T {
                        let row = words.add(t * layout.words);
                        let a = _mm512_maskz_loadu_epi8(mask, row.cast::<i8>().add(b * 32));
                        let scale = Self::two_scales(row.add(layout.scales + b));
                        let start = if SIGNED {
                            let shift = _mm512_dpbusd_epi32(_mm512_setzero_si512(), top, a);
                            _mm512_sub_epi32(_mm512_setzero_si512(), shift)
                        } else {
                            _mm512_setzero_si512()
                        };
                        for r in 0..R {
                            let dot = _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(start, w[r], a));
                            let scale = F32x16(_mm512_mul_ps(scales[r], scale));
                            acc[t][r] = acc[t][r].add_product(F32x16(dot), scale);
                        }
                    }
                    b += 2;
                }
                if !SIGNED {
                    acc = add_minima::<F32x16, R, T, SUB16>(acc, panel, words, layout);
                }
                acc.map(|row| row.map(|v| v.sum()))
            }
        }
    }
}
