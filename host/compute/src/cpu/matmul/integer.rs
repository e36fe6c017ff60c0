//! Integer panels: unpacked weight rows times quantised activation rows.
//!
//! Of each block of 32 values the products of codes are summed in 32 bits, exactly, and enter an f32 sum with the
//! product of both scales; the weights' minima meet the activations' sums in a second, short dot product. As in
//! [`float`](super::float), every sum has the same order whatever the tile's shape.
//!
//! Vectors never pass through a closure (`map`, `from_fn`): one that is not inlined lacks the instruction set's features,
//! and took a quarter of the time.

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
                        std::slice::from_raw_parts(row.cast::<i16>(), layout.cols),
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
        unsafe { panel_of::<Lanes256<false>, 2, 4>(panel, input, first, out) }
    }

    /// # Safety
    /// See [`panel`](super::panel).
    #[target_feature(enable = "avx2,fma,avxvnni")]
    pub(super) unsafe fn panel_avxvnni(panel: Panel, input: Input, first: usize, out: Output<'_>) {
        // SAFETY: the caller's promises.
        unsafe { panel_of::<Lanes256<true>, 2, 4>(panel, input, first, out) }
    }

    /// # Safety
    /// See [`panel`](super::panel).
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    pub(super) unsafe fn panel_avx512(panel: Panel, input: Input, first: usize, out: Output<'_>) {
        // SAFETY: the caller's promises.
        unsafe { panel_of::<Lanes512, 4, 4>(panel, input, first, out) }
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
                for r in 0..R {
                    let minima = S::load(panel.minima.add(r * panel.stride + k));
                    for t in 0..T {
                        let sums = S::load(words.add(t * layout.words + at + k));
                        acc[t][r] = acc[t][r].add_product(minima, sums);
                    }
                }
            }
            k += S::N;
        }
        acc
    }

    /// The sum of each vector's elements.
    #[inline(always)]
    unsafe fn totals<S: Lanes, const R: usize, const T: usize>(acc: [[S; R]; T]) -> [[f32; R]; T] {
        let mut totals = [[0.0; R]; T];
        for t in 0..T {
            for r in 0..R {
                // SAFETY: the instruction set is there by the caller's promise.
                totals[t][r] = unsafe { acc[t][r].sum() };
            }
        }
        totals
    }

    /// 256-bit products, with the 16-bit dot product instruction or without.
    struct Lanes256<const VNNI: bool>;

    impl<const VNNI: bool> Lanes256<VNNI> {
        /// `sum` and the products of 16 codes, two a lane.
        #[inline(always)]
        unsafe fn add_dot(sum: __m256i, w: __m256i, a: __m256i) -> __m256i {
            // SAFETY: the processor has AVX2, and AVX-VNNI where `VNNI` says so, by the caller's promise.
            unsafe {
                if VNNI { _mm256_dpwssd_avx_epi32(sum, w, a) } else { _mm256_add_epi32(sum, _mm256_madd_epi16(w, a)) }
            }
        }

        /// Sixteen codes of a weight row, in 16 bits.
        #[inline(always)]
        unsafe fn codes<const SIGNED: bool>(codes: *const u8) -> __m256i {
            // SAFETY: sixteen readable bytes and AVX2 by the caller's promise.
            unsafe {
                let bytes = _mm_loadu_si128(codes.cast());
                if SIGNED { _mm256_cvtepi8_epi16(bytes) } else { _mm256_cvtepu8_epi16(bytes) }
            }
        }
    }

    impl<const VNNI: bool> Kernel for Lanes256<VNNI> {
        #[inline(always)]
        unsafe fn tile<const R: usize, const T: usize, const SIGNED: bool, const SUB16: bool>(
            panel: Panel,
            words: *const f32,
            layout: Layout,
        ) -> [[f32; R]; T] {
            // SAFETY: rows have `cols` codes and a scale for each sub-block, and the instruction set is there, all by
            // the caller's promise.
            unsafe {
                let zero = _mm256_setzero_si256();
                let mut acc = [[F32x8::zero(); R]; T];
                for b in 0..layout.cols / 32 {
                    let mut w = [[zero; 2]; R];
                    for r in 0..R {
                        let codes = panel.codes.add(r * layout.cols + b * 32);
                        w[r] = [Self::codes::<SIGNED>(codes), Self::codes::<SIGNED>(codes.add(16))];
                    }
                    for t in 0..T {
                        let row = words.add(t * layout.words);
                        let a: *const __m256i = row.add(b * 16).cast();
                        let a = [_mm256_loadu_si256(a), _mm256_loadu_si256(a.add(1))];
                        let scale = _mm256_set1_ps(*row.add(layout.scales + b));
                        for r in 0..R {
                            let scales = panel.scales.add(r * panel.stride);
                            let first = Self::add_dot(zero, w[r][0], a[0]);
                            if SUB16 {
                                let second = Self::add_dot(zero, w[r][1], a[1]);
                                for (dot, s) in [(first, 2 * b), (second, 2 * b + 1)] {
                                    let scale = F32x8(_mm256_mul_ps(_mm256_set1_ps(*scales.add(s)), scale));
                                    acc[t][r] = acc[t][r].add_product(F32x8(_mm256_cvtepi32_ps(dot)), scale);
                                }
                            } else {
                                let dot = Self::add_dot(first, w[r][1], a[1]);
                                let scale = F32x8(_mm256_mul_ps(_mm256_set1_ps(*scales.add(b)), scale));
                                acc[t][r] = acc[t][r].add_product(F32x8(_mm256_cvtepi32_ps(dot)), scale);
                            }
                        }
                    }
                }
                if !SIGNED {
                    acc = add_minima::<F32x8, R, T, SUB16>(acc, panel, words, layout);
                }
                totals(acc)
            }
        }
    }

    /// 512-bit products with the 16-bit dot product instruction.
    struct Lanes512;

    impl Kernel for Lanes512 {
        #[inline(always)]
        unsafe fn tile<const R: usize, const T: usize, const SIGNED: bool, const SUB16: bool>(
            panel: Panel,
            words: *const f32,
            layout: Layout,
        ) -> [[f32; R]; T] {
            // SAFETY: rows have `cols` codes and a scale for each sub-block, and the instruction set is there, all by
            // the caller's promise.
            unsafe {
                let mut acc = [[F32x16::zero(); R]; T];
                for b in 0..layout.cols / 32 {
                    let (mut w, mut scales) = ([_mm512_setzero_si512(); R], [_mm512_setzero_ps(); R]);
                    for r in 0..R {
                        let codes = _mm256_loadu_si256(panel.codes.add(r * layout.cols + b * 32).cast());
                        w[r] = if SIGNED { _mm512_cvtepi8_epi16(codes) } else { _mm512_cvtepu8_epi16(codes) };
                        let s = panel.scales.add(r * panel.stride);
                        scales[r] = if SUB16 {
                            // Eight lanes hold the first sixteen values, eight the others.
                            _mm512_mask_blend_ps(
                                0xFF00,
                                _mm512_set1_ps(*s.add(2 * b)),
                                _mm512_set1_ps(*s.add(2 * b + 1)),
                            )
                        } else {
                            _mm512_set1_ps(*s.add(b))
                        };
                    }
                    for t in 0..T {
                        let row = words.add(t * layout.words);
                        let a = _mm512_loadu_si512(row.add(b * 16).cast());
                        let scale = _mm512_set1_ps(*row.add(layout.scales + b));
                        for r in 0..R {
                            let dot = _mm512_cvtepi32_ps(_mm512_dpwssd_epi32(_mm512_setzero_si512(), w[r], a));
                            let scale = F32x16(_mm512_mul_ps(scales[r], scale));
                            acc[t][r] = acc[t][r].add_product(F32x16(dot), scale);
                        }
                    }
                }
                if !SIGNED {
                    acc = add_minima::<F32x16, R, T, SUB16>(acc, panel, words, layout);
                }
                totals(acc)
            }
        }
    }
}
