//! `y = x·Wᵀ (+ b)` for weights of any type; quantised weights are never expanded whole.
//!
//! Each worker owns a contiguous range of output columns (rows of `W`). Weights of the usual quantised types are packed when
//! the model is loaded ([`packed`]): rows interleaved by the width of a vector, in about as many bytes. The others are
//! taken in panels of a few rows that fit a worker's L2 cache, brought to f32 there and used for every activation row.
//!
//! **Precision** is a property of the weight type ([`precision`]), never of the batch size, so decode and prefill
//! agree, and a row's result does not depend on the rows that come with it:
//! - [`Precision::Float`]: f32 activations times f32, f16 or bf16 weights, and times the dequantised values of the
//!   rarer quantised types ([`float`]).
//! - [`Precision::Q16`]: activations rounded to sixteen bits in blocks of 32, once per input, times the integer codes
//!   of Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K to Q6_K, IQ4_NL and IQ4_XS ([`packed`]). Products are as exact as in f32: real models
//!   diverge by less than 1e-7 nats. With eight bits, as llama.cpp has them, small ones diverged by up to 3e-3, and AVX2
//!   gained nothing, AVX-512 a quarter in prefill.

mod activations;
mod float;
mod format;
mod packed;
mod words;

pub use activations::{quantize_activations, quantized_words};
pub use packed::{Packed, Part, matmul_packed};

use std::marker::PhantomData;
use std::ops::Range;

use crate::quant::{QuantError, WeightType, dequantize_row};
use crate::simd::Isa;

/// A weight matrix as the file stores it: `rows` rows of `cols` values, row after row.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    ty: WeightType,
    rows: usize,
    cols: usize,
    row_bytes: usize,
    data: &'a [u8],
}

impl<'a> Matrix<'a> {
    /// A view of `data`.
    ///
    /// # Errors
    /// When `cols` is no whole number of the type's blocks, or `data` has another size.
    pub fn new(ty: WeightType, rows: usize, cols: usize, data: &'a [u8]) -> Result<Self, QuantError> {
        let row_bytes = ty.row_bytes(cols)?;
        let too_large = QuantError::TooLarge { ty: ty.name(), len: cols };
        let expected = row_bytes.checked_mul(rows).ok_or(too_large)?;
        if data.len() != expected {
            return Err(QuantError::ByteLength {
                ty: ty.name(),
                len: rows.saturating_mul(cols),
                expected,
                found: data.len(),
            });
        }
        Ok(Matrix { ty, rows, cols, row_bytes, data })
    }

    /// Storage type.
    pub fn ty(&self) -> WeightType {
        self.ty
    }

    /// Rows: width of the output.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns: width of the input.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Rows `first .. first + rows` as a matrix of their own.
    pub fn part(&self, first: usize, rows: usize) -> Matrix<'a> {
        Matrix { rows, data: &self.data[first * self.row_bytes..(first + rows) * self.row_bytes], ..*self }
    }

    /// Bytes of row `r`.
    pub fn row(&self, r: usize) -> &'a [u8] {
        &self.data[r * self.row_bytes..(r + 1) * self.row_bytes]
    }

    /// Values of row `r` in f32. `dst.len()` must be [`cols`](Self::cols).
    pub fn dequantize_row(&self, r: usize, dst: &mut [f32]) {
        dequantize_row(self.ty, self.row(r), dst).expect("the constructor checked the row's length");
    }
}

/// Rows of output that several workers fill, each its own columns.
#[derive(Clone, Copy)]
pub struct Output<'a> {
    data: *mut f32,
    rows: usize,
    width: usize,
    bias: Option<&'a [f32]>,
    owner: PhantomData<&'a mut [f32]>,
}

// SAFETY: workers write disjoint columns (the promise of `put`'s callers) and nobody reads before their barrier.
unsafe impl Send for Output<'_> {}
// SAFETY: as above.
unsafe impl Sync for Output<'_> {}

impl<'a> Output<'a> {
    /// Rows of `width` columns, row after row; `bias` is added to every row and has `width` elements.
    pub fn new(data: &'a mut [f32], width: usize, bias: Option<&'a [f32]>) -> Self {
        assert!(width > 0 && data.len().is_multiple_of(width), "an output of {} is not rows of {width}", data.len());
        let rows = data.len() / width;
        // SAFETY: the borrow covers the rows for as long as the output lives.
        unsafe { Output::shared(data.as_mut_ptr(), rows, width, bias) }
    }

    /// `rows` rows at `data` that other workers write, too.
    ///
    /// # Safety
    /// `data` is valid for `rows * width` elements for as long as the output lives.
    pub unsafe fn shared(data: *mut f32, rows: usize, width: usize, bias: Option<&'a [f32]>) -> Self {
        assert!(bias.is_none_or(|b| b.len() == width), "a bias has one element a column");
        Output { rows, width, bias, data, owner: PhantomData }
    }

    /// Stores the sums of a tile whose first element is row `t`, column `o`.
    ///
    /// # Safety
    /// No other thread touches these columns.
    #[inline(always)]
    unsafe fn put<const R: usize, const T: usize>(&self, sums: [[f32; R]; T], t: usize, o: usize) {
        assert!(t + T <= self.rows && o + R <= self.width);
        for (dt, sums) in sums.iter().enumerate() {
            for (r, &sum) in sums.iter().enumerate() {
                let bias = self.bias.map_or(0.0, |b| b[o + r]);
                // SAFETY: inside the output, checked above; the columns are the caller's.
                unsafe { *self.data.add((t + dt) * self.width + o + r) = sum + bias };
            }
        }
    }
}

impl Output<'_> {
    /// Stores a run of row `t` from column `o` on.
    ///
    /// # Safety
    /// No other thread touches these columns.
    #[inline(always)]
    unsafe fn put_run(&self, t: usize, o: usize, sums: &[f32]) {
        assert!(t < self.rows && o + sums.len() <= self.width);
        // SAFETY: inside the output, checked above; the columns are the caller's.
        let to = unsafe { std::slice::from_raw_parts_mut(self.data.add(t * self.width + o), sums.len()) };
        match self.bias {
            None => to.copy_from_slice(sums),
            Some(bias) => to.iter_mut().zip(sums).zip(&bias[o..]).for_each(|((to, sum), bias)| *to = sum + bias),
        }
    }
}

/// How a product treats its activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Precision {
    /// As f32.
    Float,
    /// Quantised by [`quantize_activations`].
    Q16,
}

/// The precision of products with weights of type `ty`.
pub fn precision(ty: WeightType) -> Precision {
    if format::format(ty).is_some() { Precision::Q16 } else { Precision::Float }
}

/// What one worker needs besides its registers; grows to its largest panel and stays.
#[derive(Default)]
pub struct Scratch {
    floats: Vec<f32>,
}

/// Bytes of an unpacked panel that serves many activation rows: a good part of a usual L2 cache.
const PANEL_BYTES: usize = 192 << 10;
/// The same where few rows use it: they shall find it in L1.
const SMALL_PANEL_BYTES: usize = 12 << 10;

/// Weight rows in a panel whose unpacked rows take `row_bytes`.
fn panel_rows(activation_rows: usize, row_bytes: usize) -> usize {
    let bytes = if activation_rows < 4 { SMALL_PANEL_BYTES } else { PANEL_BYTES };
    (bytes / row_bytes.max(1) / 4 * 4).clamp(4, 32)
}

/// A weight as products take it.
#[derive(Clone, Copy)]
pub enum Operand<'a> {
    /// As the file has it, multiplied in f32.
    Plain(Matrix<'a>),
    /// Packed, multiplied with quantised activations.
    Packed(&'a Packed),
}

impl Operand<'_> {
    /// Product of the rows `rows` with `x`, in the form that the weight's [`precision`] asks for: columns of `out`, of which
    /// the first one belongs to row `origin`.
    ///
    /// # Safety
    /// No other thread touches these columns.
    pub unsafe fn multiply(
        self,
        isa: Isa,
        x: &[f32],
        rows: Range<usize>,
        origin: usize,
        out: Output<'_>,
        scratch: &mut Scratch,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Operand::Packed(w) => matmul_packed(w, x, rows, origin, out),
                Operand::Plain(w) => {
                    let part = w.part(origin, out.width);
                    matmul_float(isa, &part, x, rows.start - origin..rows.end - origin, out, scratch);
                }
            }
        }
    }
}

/// Columns of a product are best cut between workers at multiples of this, whatever the weight.
pub const GRAIN: usize = 16;

/// Product with f32 activations, `x` being rows of `w.cols()`: columns `columns` of `out`.
///
/// # Safety
/// No other thread touches these columns.
pub unsafe fn matmul_float(
    isa: Isa,
    w: &Matrix<'_>,
    x: &[f32],
    columns: Range<usize>,
    out: Output<'_>,
    scratch: &mut Scratch,
) {
    assert!(columns.end <= w.rows && out.width == w.rows && x.len() == out.rows * w.cols, "shapes of a product");
    let input = float::FloatInput { x, rows: out.rows, cols: w.cols };
    let step = panel_rows(out.rows, w.cols * size_of::<f32>());
    let mut first = columns.start;
    while first < columns.end {
        let n = step.min(columns.end - first);
        let weights = float_panel(w, first, n, scratch);
        // SAFETY: `float_panel` gives `n` rows; the rest is the caller's promise.
        unsafe { float::panel(isa, weights, n, input, first, out) };
        first += n;
    }
}

/// Rows `first .. first + n` in f32: in place where they are stored so, else dequantised.
fn float_panel(w: &Matrix<'_>, first: usize, n: usize, scratch: &mut Scratch) -> *const f32 {
    if w.ty == WeightType::F32 && cfg!(target_endian = "little") {
        return w.data[first * w.row_bytes..(first + n) * w.row_bytes].as_ptr().cast();
    }
    if scratch.floats.len() < n * w.cols {
        scratch.floats.resize(n * w.cols, 0.0);
    }
    for (r, row) in scratch.floats.chunks_exact_mut(w.cols).take(n).enumerate() {
        w.dequantize_row(first + r, row);
    }
    scratch.floats.as_ptr()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Arena;
    use crate::samples::{random_floats, random_rows};
    use rand::SeedableRng;
    use rand_chacha::ChaCha8Rng;

    /// `x·Wᵀ + b` in f64, and the sum of the magnitudes of its terms, which scales the error of any f32 sum.
    fn reference(w: &Matrix<'_>, x: &[f32], bias: &[f32]) -> Vec<(f64, f64)> {
        let mut row = vec![0.0; w.cols()];
        let mut out = vec![(0.0, 0.0); x.len() / w.cols() * w.rows()];
        for o in 0..w.rows() {
            w.dequantize_row(o, &mut row);
            for (t, x) in x.chunks(w.cols()).enumerate() {
                let terms = row.iter().zip(x).map(|(a, b)| f64::from(*a) * f64::from(*b));
                let (sum, size) = terms.fold((0.0, 0.0), |(s, m), v| (s + v, m + v.abs()));
                out[t * w.rows() + o] = (sum + f64::from(bias[o]), size);
            }
        }
        out
    }

    #[test]
    fn float_products_of_every_type_match_f64_on_every_instruction_set() {
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        for ty in WeightType::all() {
            let cols = if ty.is_float() { 107 } else { 256.max(ty.block_len() * 3) / ty.block_len() * ty.block_len() };
            let (rows, batch) = (39, 11);
            let data = random_rows(ty, rows, cols, &mut rng);
            let w = Matrix::new(ty, rows, cols, &data).unwrap();
            let (x, bias) = (random_floats(batch * cols, &mut rng), random_floats(rows, &mut rng));
            let expected = reference(&w, &x, &bias);
            for isa in Isa::available() {
                let mut y = vec![f32::NAN; batch * rows];
                let out = Output::new(&mut y, rows, Some(&bias));
                // SAFETY: one thread.
                unsafe { matmul_float(isa, &w, &x, 0..rows, out, &mut Scratch::default()) };
                for (i, (y, (e, size))) in y.iter().zip(&expected).enumerate() {
                    assert!((f64::from(*y) - e).abs() <= 1e-6 * size.max(1.0), "{ty} {isa:?} element {i}: {y} {e}");
                }
            }
        }
    }

    /// Quantised rows, and the values they stand for.
    fn quantized(isa: Isa, x: &[f32], cols: usize) -> (Vec<f32>, Vec<f32>) {
        let layout = activations::Layout::new(cols);
        let (mut words, mut values) = (Vec::new(), Vec::new());
        for x in x.chunks(cols) {
            let mut row = vec![0.0; quantized_words(cols)];
            quantize_activations(isa, x, &mut row);
            let codes: &[i16] = bytemuck::cast_slice(&row[..cols / 2]);
            values.extend(codes.iter().enumerate().map(|(i, c)| f32::from(*c) * row[layout.scales + i / 32]));
            words.extend(row);
        }
        (words, values)
    }

    #[test]
    fn integer_products_match_f64_over_the_same_codes_on_every_instruction_set() {
        let mut rng = ChaCha8Rng::seed_from_u64(4);
        for ty in WeightType::all().filter(|ty| precision(*ty) == Precision::Q16) {
            // An odd number of blocks of 32 where the type allows it.
            let cols = if ty.block_len() == 32 { 7 * 32 } else { 3 * 256 };
            let (rows, batch) = (43, 11);
            let data = random_rows(ty, rows, cols, &mut rng);
            let w = Matrix::new(ty, rows, cols, &data).unwrap();
            let (x, bias) = (random_floats(batch * cols, &mut rng), random_floats(rows, &mut rng));
            for isa in Isa::available() {
                let (words, values) = quantized(isa, &x, cols);
                let expected = reference(&w, &values, &bias);
                let mut y = vec![f32::NAN; batch * rows];
                let out = Output::new(&mut y, rows, Some(&bias));
                // SAFETY: one thread.
                unsafe { matmul_packed(&Packed::of(isa, &w).unwrap().unwrap(), &words, 0..rows, 0, out) };
                for (i, (y, (e, size))) in y.iter().zip(&expected).enumerate() {
                    assert!((f64::from(*y) - e).abs() <= 4e-6 * size.max(1.0), "{ty} {isa:?} element {i}: {y} {e}");
                }
            }
        }
    }

    #[test]
    fn an_integer_product_of_a_row_alone_gives_the_bits_it_gives_in_a_batch() {
        let mut rng = ChaCha8Rng::seed_from_u64(5);
        let (rows, cols, batch) = (21, 256, 9);
        for ty in [WeightType::Q8_0, WeightType::Q4_1, WeightType::Q6_K] {
            let data = random_rows(ty, rows, cols, &mut rng);
            let w = Matrix::new(ty, rows, cols, &data).unwrap();
            for isa in Isa::available() {
                let (words, _) = quantized(isa, &random_floats(batch * cols, &mut rng), cols);
                let packed = Packed::of(isa, &w).unwrap().unwrap();
                let product = |x: &[f32], columns: Range<usize>, y: &mut [f32]| {
                    // SAFETY: one thread.
                    unsafe { matmul_packed(&packed, x, columns, 0, Output::new(y, rows, None)) }
                };
                let mut together = vec![0.0; batch * rows];
                product(&words, 0..rows, &mut together);
                for t in 0..batch {
                    let (row, mut alone) = (&words[t * words.len() / batch..][..words.len() / batch], vec![0.0; rows]);
                    product(row, 0..5, &mut alone);
                    product(row, 5..rows, &mut alone);
                    assert_eq!(alone, together[t * rows..(t + 1) * rows]);
                }
            }
        }
    }

    #[test]
    fn a_part_of_the_rows_is_a_product_of_its_own() {
        let mut rng = ChaCha8Rng::seed_from_u64(6);
        let (rows, cols) = (75, 64);
        let data = random_rows(WeightType::Q5_0, rows, cols, &mut rng);
        let w = Matrix::new(WeightType::Q5_0, rows, cols, &data).unwrap();
        for isa in Isa::available() {
            let (words, _) = quantized(isa, &random_floats(3 * cols, &mut rng), cols);
            let whole = Packed::of(isa, &w).unwrap().unwrap();
            for (first, n) in [(0, 75), (8, 16), (5, 3), (30, 45), (74, 1)] {
                let part = Packed::of(isa, &w.part(first, n)).unwrap().unwrap();
                let (mut found, mut expected) = (vec![f32::NAN; 3 * n], vec![f32::NAN; 3 * n]);
                // SAFETY: one thread.
                unsafe {
                    matmul_packed(&whole, &words, first..first + n, first, Output::new(&mut found, n, None));
                    matmul_packed(&part, &words, 0..n, 0, Output::new(&mut expected, n, None));
                }
                assert_eq!(found, expected, "{isa:?}: rows {first}..{}", first + n);
            }
        }
    }

    #[test]
    fn packing_in_parts_is_packing_at_once() {
        let mut rng = ChaCha8Rng::seed_from_u64(7);
        let data = random_rows(WeightType::Q6_K, 37, 256, &mut rng);
        let w = Matrix::new(WeightType::Q6_K, 37, 256, &data).unwrap();
        let isa = Isa::detect();
        let (words, _) = quantized(isa, &random_floats(256, &mut rng), 256);
        let bytes = Packed::bytes_for(isa, w.ty(), 37, 256).unwrap();
        let mut parts = Packed::new(isa, w.ty(), 37, 256, Arena::new(bytes).unwrap().take(bytes));
        assert!(parts.parts(1).count() > 1);
        parts.parts(1).for_each(|mut part| part.fill(&w));
        let product = |packed: &Packed| {
            let mut y = vec![f32::NAN; 37];
            // SAFETY: one thread.
            unsafe { matmul_packed(packed, &words, 0..37, 0, Output::new(&mut y, 37, None)) };
            y
        };
        assert_eq!(product(&parts), product(&Packed::of(isa, &w).unwrap().unwrap()));
    }

    #[test]
    fn a_row_alone_gives_the_bits_it_gives_in_a_batch() {
        let mut rng = ChaCha8Rng::seed_from_u64(2);
        let (rows, cols, batch) = (21, 96, 9);
        let data = random_rows(WeightType::Q5_1, rows, cols, &mut rng);
        let w = Matrix::new(WeightType::Q5_1, rows, cols, &data).unwrap();
        let x = random_floats(batch * cols, &mut rng);
        let isa = Isa::detect();
        let product = |x: &[f32], columns: Range<usize>, y: &mut [f32]| {
            // SAFETY: one thread.
            unsafe { matmul_float(isa, &w, x, columns, Output::new(y, rows, None), &mut Scratch::default()) }
        };
        let mut together = vec![0.0; batch * rows];
        product(&x, 0..rows, &mut together);
        for t in 0..batch {
            let mut alone = vec![0.0; rows];
            product(&x[t * cols..(t + 1) * cols], 0..5, &mut alone);
            product(&x[t * cols..(t + 1) * cols], 5..rows, &mut alone);
            assert_eq!(alone, together[t * rows..(t + 1) * rows]);
        }
    }

    #[test]
    fn workers_share_the_columns() {
        let mut rng = ChaCha8Rng::seed_from_u64(3);
        let (rows, cols) = (70, 64);
        let data = random_rows(WeightType::Q8_0, rows, cols, &mut rng);
        let w = Matrix::new(WeightType::Q8_0, rows, cols, &data).unwrap();
        let x = random_floats(4 * cols, &mut rng);
        let isa = Isa::detect();
        let run = |workers: usize| {
            let mut y = vec![f32::NAN; 4 * rows];
            let out = Output::new(&mut y, rows, None);
            std::thread::scope(|scope| {
                for worker in 0..workers {
                    let (x, columns) = (&x, rows * worker / workers..rows * (worker + 1) / workers);
                    // SAFETY: shares are disjoint.
                    scope.spawn(move || unsafe { matmul_float(isa, &w, x, columns, out, &mut Scratch::default()) });
                }
            });
            y
        };
        assert_eq!(run(1), run(3));
    }

    #[test]
    fn a_matrix_of_the_wrong_size_is_refused() {
        assert!(Matrix::new(WeightType::Q8_0, 2, 64, &[0; 135]).is_err());
        assert!(Matrix::new(WeightType::Q8_0, 2, 63, &[0; 136]).is_err());
        assert!(Matrix::new(WeightType::F32, usize::MAX, 64, &[]).is_err());
    }
}
