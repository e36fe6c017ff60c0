//! Products of weights packed by rows ([`format`](super::format)) with activations quantised to sixteen bits.
//!
//! One kernel serves every format, instruction set and number of activation rows: [`tile`]. It reads a group of weight rows
//! once, brings forth two columns of each at a time and multiplies them with those of a few activation rows.

use std::marker::PhantomData;
use std::ops::Range;

use super::activations::{BLOCK, Layout};
use super::format::{Codes, Format, IQ4_LEVELS, Minima, Parts, Scales, Scheme, format, put_codes, with_scheme};
use super::words::{Plain, Words};
use super::{Matrix, Output};
use crate::memory::{Arena, Block, LINE};
use crate::quant::WeightType;
use crate::simd::{Isa, Lanes, Level};

/// Bytes of packed weights that are multiplied with many activation rows in turn: a good part of a usual L2 cache.
const PANEL_BYTES: usize = 192 << 10;
/// Most rows of a group.
const MAX_LANES: usize = 16;

/// A weight matrix, packed for one instruction set.
pub struct Packed {
    ty: WeightType,
    rows: usize,
    cols: usize,
    isa: Isa,
    lanes: usize,
    group_bytes: usize,
    data: Block,
}

impl Packed {
    /// Bytes that `rows` rows of `cols` values take; `None` for types that are multiplied in f32. `cols` is a whole number of
    /// the type's blocks.
    pub fn bytes_for(isa: Isa, ty: WeightType, rows: usize, cols: usize) -> Option<usize> {
        Some(rows.div_ceil(lanes(isa)) * group_bytes(isa, format(ty)?, cols))
    }

    /// Such rows in `data`, which has [`bytes_for`](Self::bytes_for) them, to be filled by [`fill`](Part::fill).
    pub fn new(isa: Isa, ty: WeightType, rows: usize, cols: usize, data: Block) -> Packed {
        let format = format(ty).expect("only types with a format are packed");
        assert_eq!(Some(data.len()), Packed::bytes_for(isa, ty, rows, cols), "memory of a packed weight");
        Packed { ty, rows, cols, isa, lanes: lanes(isa), group_bytes: group_bytes(isa, format, cols), data }
    }

    /// The whole of `w`, packed by this thread; `None` for types that are multiplied in f32.
    ///
    /// # Errors
    /// When there is no memory for it.
    pub fn of(isa: Isa, w: &Matrix<'_>) -> std::io::Result<Option<Packed>> {
        let Some(bytes) = Packed::bytes_for(isa, w.ty(), w.rows(), w.cols()) else { return Ok(None) };
        let mut packed = Packed::new(isa, w.ty(), w.rows(), w.cols(), Arena::new(bytes)?.take(bytes));
        packed.parts(usize::MAX).for_each(|mut part| part.fill(w));
        Ok(Some(packed))
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

    /// Rows in a group; a product is best cut between groups.
    pub fn lanes(&self) -> usize {
        self.lanes
    }

    /// Bytes of packed weights.
    pub fn bytes(&self) -> usize {
        self.data.len()
    }

    /// Parts of about `bytes` bytes that threads can fill independently.
    pub fn parts(&mut self, bytes: usize) -> impl Iterator<Item = Part<'_>> {
        let groups = (bytes / self.group_bytes.max(1)).max(1);
        let (lanes, group_bytes) = (self.lanes, self.group_bytes);
        let step = groups.saturating_mul(group_bytes).max(1);
        self.data.chunks_mut(step).enumerate().map(move |(i, data)| Part {
            first_row: i * groups * lanes,
            lanes,
            group_bytes,
            data,
        })
    }

    fn group(&self, g: usize) -> *const u8 {
        self.data[g * self.group_bytes..].as_ptr()
    }
}

/// Rows of a group.
fn lanes(isa: Isa) -> usize {
    if isa.level() == Level::Avx512 { 16 } else { 8 }
}

/// Bytes of a group of rows, whole cache lines.
fn group_bytes(isa: Isa, format: Format, cols: usize) -> usize {
    assert!(cols.is_multiple_of(format.cols()), "a row of {cols} is not whole blocks of {}", format.cols());
    (cols / format.cols() * format.block_bytes() * lanes(isa)).next_multiple_of(LINE)
}

/// Groups of a packed matrix that are to be filled.
pub struct Part<'a> {
    first_row: usize,
    lanes: usize,
    group_bytes: usize,
    data: &'a mut [u8],
}

impl Part<'_> {
    /// Packs the part's rows of `w`, which has the type and shape of the packed matrix.
    pub fn fill(&mut self, w: &Matrix<'_>) {
        let format = format(w.ty()).expect("only types with a format are packed");
        let (lanes, mut parts) = (self.lanes, Parts::EMPTY);
        for (g, group) in self.data.chunks_exact_mut(self.group_bytes).enumerate() {
            let first = self.first_row + g * lanes;
            for row in first..(first + lanes).min(w.rows()) {
                let blocks = w.row(row).chunks_exact(w.ty().block_bytes());
                for (block, to) in blocks.zip(group.chunks_exact_mut(format.block_bytes() * lanes)) {
                    parts.read(w.ty(), block);
                    put_block(&parts, format, to, row - first, lanes);
                }
            }
        }
    }
}

/// Writes one row's block among those of its group.
fn put_block(parts: &Parts, format: Format, to: &mut [u8], lane: usize, lanes: usize) {
    let (head, runs) = to.split_at_mut(format.head_bytes() * lanes);
    for (factor, to) in parts.head.chunks_exact(2).zip(head.chunks_exact_mut(2 * lanes)) {
        to[2 * lane..2 * lane + 2].copy_from_slice(factor);
    }
    let n = format.scale_bytes();
    for (run, to) in runs.chunks_exact_mut(format.run_bytes() * lanes).enumerate() {
        let (side, to) = to.split_at_mut(format.side_bytes() * lanes);
        let small = parts.scales[run * n..][..n].iter().chain(&parts.minima[run * n..][..n]);
        for (value, to) in small.zip(side.chunks_exact_mut(lanes)) {
            to[lane] = *value;
        }
        let codes = parts.codes[run * 32..].first_chunk().expect("a run has 32 columns");
        put_codes(codes, format.codes, to, lane, lanes);
    }
}

/// Product with activations quantised by [`quantize_activations`](super::quantize_activations),
/// [`quantized_words`](super::quantized_words) a row: rows `rows` of `w` give columns of `out`, of which the first one belongs
/// to row `origin`. Cutting elsewhere than at multiples of [`lanes`](Packed::lanes) costs a group twice.
///
/// # Safety
/// No other thread touches these columns.
pub unsafe fn matmul_packed(w: &Packed, x: &[f32], rows: Range<usize>, origin: usize, out: Output<'_>) {
    let layout = Layout::new(w.cols);
    let fits = origin <= rows.start && rows.end <= w.rows && rows.end <= origin + out.width;
    assert!(fits && x.len() == out.rows * layout.words, "shapes of a product");
    if rows.is_empty() {
        return;
    }
    let job = Job { w, x, layout, rows, origin, out };
    // SAFETY: the shapes were checked; `isa` proves the instruction set of the branch.
    unsafe {
        match w.isa.level() {
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => x86::avx512(job),
            #[cfg(target_arch = "x86_64")]
            Level::AvxVnni => x86::avxvnni(job),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => x86::avx2(job),
            _ => with_scheme!(w.ty, S => job.run::<Plain, S, 2>()),
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::super::format::with_scheme;
    use super::super::words::{Words256, Words512};
    use super::Job;

    /// # Safety
    /// See [`Job::run`](super::Job::run).
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) unsafe fn avx2(job: Job<'_>) {
        // SAFETY: passed on.
        unsafe { with_scheme!(job.w.ty, S => job.run::<Words256<false>, S, 4>()) }
    }

    /// # Safety
    /// See [`Job::run`](super::Job::run).
    #[target_feature(enable = "avx2,fma,f16c,avxvnni")]
    pub(super) unsafe fn avxvnni(job: Job<'_>) {
        // SAFETY: passed on.
        unsafe { with_scheme!(job.w.ty, S => job.run::<Words256<true>, S, 4>()) }
    }

    /// # Safety
    /// See [`Job::run`](super::Job::run).
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
    pub(super) unsafe fn avx512(job: Job<'_>) {
        // SAFETY: passed on.
        unsafe { with_scheme!(job.w.ty, S => job.run::<Words512, S, 8>()) }
    }
}

/// One worker's part of a product.
struct Job<'a> {
    w: &'a Packed,
    x: &'a [f32],
    layout: Layout,
    rows: Range<usize>,
    origin: usize,
    out: Output<'a>,
}

impl Job<'_> {
    /// Takes weights in panels that stay in a cache while activation rows go by, `T` at a time and the rest in smaller tiles.
    ///
    /// # Safety
    /// Shapes fit, no other thread touches the columns, and the processor has the instruction set of `V`.
    #[inline(always)]
    unsafe fn run<V: Words, S: Scheme, const T: usize>(self) {
        let panel = (PANEL_BYTES / self.w.group_bytes.max(1)).max(1);
        let (mut first, end) = (self.rows.start / V::ROWS, self.rows.end.div_ceil(V::ROWS));
        while first < end {
            let groups = first..(first + panel).min(end);
            let (mut t, rows) = (0, self.out.rows);
            // SAFETY: passed on; rows are inside the input.
            unsafe {
                while t + T <= rows {
                    self.rows::<V, S, T>(groups.clone(), t);
                    t += T;
                }
                while T > 4 && t + 4 <= rows {
                    self.rows::<V, S, 4>(groups.clone(), t);
                    t += 4;
                }
                while T > 2 && t + 2 <= rows {
                    self.rows::<V, S, 2>(groups.clone(), t);
                    t += 2;
                }
                while t < rows {
                    self.rows::<V, S, 1>(groups.clone(), t);
                    t += 1;
                }
            }
            first = groups.end;
        }
    }

    /// Activation rows `t .. t + T` with the weights of some groups.
    ///
    /// # Safety
    /// As for [`run`](Self::run), and the rows exist.
    #[inline(always)]
    unsafe fn rows<V: Words, S: Scheme, const T: usize>(&self, groups: Range<usize>, t: usize) {
        debug_assert_eq!(V::ROWS, self.w.lanes);
        for g in groups {
            // SAFETY: passed on; the group is inside the weights.
            unsafe {
                let x = self.x.as_ptr().add(t * self.layout.words);
                let sums = tile::<V, S, T>(self.w.group(g), x, self.layout);
                let mut lanes = [[0.0; MAX_LANES]; T];
                for (sums, lanes) in sums.iter().zip(&mut lanes) {
                    sums.store(lanes.as_mut_ptr());
                }
                let first = g * V::ROWS;
                let rows = first.max(self.rows.start)..(first + V::ROWS).min(self.rows.end);
                for (i, lanes) in lanes.iter().enumerate() {
                    self.out.put_run(t + i, rows.start - self.origin, &lanes[rows.start - first..rows.end - first]);
                }
            }
        }
    }
}

/// Sizes of a scheme's parts in bytes a row, known when a kernel is compiled.
struct Bytes<S>(PhantomData<S>);

impl<S: Scheme> Bytes<S> {
    const DMIN: usize = S::FORMAT.head_bytes() - 2;
    const HEAD: usize = S::FORMAT.head_bytes();
    const SCALES: usize = S::FORMAT.scale_bytes();
    const SIDE: usize = S::FORMAT.side_bytes();
    const RUN: usize = S::FORMAT.run_bytes();
    /// Runs of 32 columns in a block.
    const RUNS: usize = S::FORMAT.cols() / BLOCK;
    /// Whether each half of a run has a scale of its own.
    const HALVES: bool = S::FORMAT.sub() == 16;
}

/// Some activation rows at a run of 32 columns.
#[derive(Clone, Copy)]
struct Rows {
    /// The run's codes in the first row.
    codes: *const i16,
    /// The run's scale in the first row.
    scale: *const f32,
    /// The sum of the run's values, or of their first half, in the first row.
    sum: *const f32,
    /// From a row to the next, in f32 words.
    words: usize,
}

/// Dot products of the rows of one group with `T` activation rows from `x` on.
///
/// # Safety
/// `group` and the rows hold what `layout` and the scheme say, and the processor has the instruction set of `V`.
#[inline(always)]
unsafe fn tile<V: Words, S: Scheme, const T: usize>(group: *const u8, x: *const f32, layout: Layout) -> [V::Floats; T] {
    // SAFETY: all reads are inside the group and the rows, by the caller's promise.
    unsafe {
        let mut totals = [V::Floats::zero(); T];
        let (mut at, mut run) = (group, 0);
        while run < layout.cols / BLOCK {
            let (d, dmin) = (V::halves(at), V::halves(at.add(Bytes::<S>::DMIN * V::ROWS)));
            at = at.add(Bytes::<S>::HEAD * V::ROWS);
            let end = run + Bytes::<S>::RUNS;
            while run < end {
                // Rows of a batch find the weights in a cache, but the first.
                if T <= 2 {
                    prefetch::<V, S>(at);
                }
                let sums = if Bytes::<S>::HALVES { layout.sums16 + 2 * run } else { layout.sums32 + run };
                let rows = Rows {
                    codes: x.add(run * BLOCK / 2).cast(),
                    scale: x.add(layout.scales + run),
                    sum: x.add(sums),
                    words: layout.words,
                };
                totals = add_run::<V, S, T>(totals, d, dmin, at, rows);
                at = at.add(Bytes::<S>::RUN * V::ROWS);
                run += 1;
            }
        }
        totals
    }
}

/// Bytes that weights are fetched ahead of their use: what memory brings in the time it takes to answer.
const AHEAD: usize = 1024;

/// Fetches what lies [`AHEAD`] of a run that begins at `at`.
#[inline(always)]
fn prefetch<V: Words, S: Scheme>(at: *const u8) {
    let mut line = 0;
    while line < Bytes::<S>::RUN * V::ROWS {
        V::prefetch(at.wrapping_add(AHEAD + line));
        line += LINE;
    }
}

/// Adds the products of a run of 32 columns, which begins at `at`.
///
/// # Safety
/// As for [`tile`].
#[inline(always)]
unsafe fn add_run<V: Words, S: Scheme, const T: usize>(
    totals: [V::Floats; T],
    d: V::Floats,
    dmin: V::Floats,
    at: *const u8,
    rows: Rows,
) -> [V::Floats; T] {
    // SAFETY: passed on; minima lie behind scales, codes behind both.
    unsafe {
        let minima = at.add(Bytes::<S>::SCALES * V::ROWS);
        let codes = at.add(Bytes::<S>::SIDE * V::ROWS);
        let first = half_run::<V, S, T, 0>(codes, rows, [V::nothing(); T]);
        if !Bytes::<S>::HALVES {
            let sums = half_run::<V, S, T, 1>(codes, rows, first);
            return add_scaled::<V, S, T>(totals, sums, d, dmin, at, minima, rows);
        }
        let second = half_run::<V, S, T, 1>(codes, rows, [V::nothing(); T]);
        let totals = add_scaled::<V, S, T>(totals, first, d, dmin, at, minima, rows);
        let rows = Rows { sum: rows.sum.add(1), ..rows };
        add_scaled::<V, S, T>(totals, second, d, dmin, at.add(V::ROWS), minima.add(V::ROWS), rows)
    }
}

/// Adds the products of half a run, 16 columns. Written out pair by pair, so that every shift is a constant.
///
/// # Safety
/// As for [`tile`].
#[inline(always)]
unsafe fn half_run<V: Words, S: Scheme, const T: usize, const H: usize>(
    codes: *const u8,
    rows: Rows,
    mut sums: [V::Sums; T],
) -> [V::Sums; T] {
    macro_rules! pairs {
        ($($pair:literal)+) => {$(
            let pair = weights::<V, S>(codes, const { 8 * H + $pair });
            for t in 0..T {
                let x = rows.codes.add(t * 2 * rows.words + const { 2 * (8 * H + $pair) });
                sums[t] = pair.add_products(V::pair(x), sums[t]);
            }
        )+};
    }
    // SAFETY: passed on.
    unsafe {
        pairs!(0 1 2 3 4 5 6 7);
    }
    sums
}

/// Adds sums of products to totals, scaled, with what the minima contribute.
///
/// # Safety
/// As for [`tile`].
#[inline(always)]
unsafe fn add_scaled<V: Words, S: Scheme, const T: usize>(
    mut totals: [V::Floats; T],
    sums: [V::Sums; T],
    d: V::Floats,
    dmin: V::Floats,
    scales: *const u8,
    minima: *const u8,
    rows: Rows,
) -> [V::Floats; T] {
    // SAFETY: passed on.
    unsafe {
        let (scale, min) = (scale::<V, S>(d, scales), min::<V, S>(dmin, minima));
        for t in 0..T {
            let x_scale = V::Floats::splat(*rows.scale.add(t * rows.words));
            let x_sum = *rows.sum.add(t * rows.words);
            totals[t] = add_block::<V, S>(totals[t], V::floats(sums[t]).times(x_scale), scale, min, x_sum);
        }
        totals
    }
}

/// The codes of columns `2 * pair` and `2 * pair + 1` of every row.
///
/// # Safety
/// `codes` begins a run of 32 columns, and the processor has the instruction set of `V`.
#[inline(always)]
unsafe fn weights<V: Words, S: Scheme>(codes: *const u8, pair: usize) -> V {
    // SAFETY: inside the run, by the caller's promise.
    unsafe {
        match S::FORMAT.codes {
            Codes::Nibble => field::<V>(codes, 0, 4, pair, 0).and(15),
            Codes::Table => field::<V>(codes, 0, 4, pair, 0).and(15).look_up(&IQ4_LEVELS),
            Codes::Fifth => {
                let fifth = field::<V>(codes, 4, 16, pair, 4).and(0x10);
                field::<V>(codes, 0, 4, pair, 0).and(15).or(fifth)
            }
            Codes::Sixth => {
                let upper = field::<V>(codes, 4, 8, pair, 4).and(0x30);
                field::<V>(codes, 0, 4, pair, 0).and(15).or(upper)
            }
            // To the upper byte, whose sign then fills the word.
            Codes::Byte => field::<V>(codes, 0, 2, pair, 8).high_byte(),
        }
    }
}

/// The words that hold a pair's codes, shifted so that these begin at bit `at`. Vectors from `first` on hold `per_vector`
/// pairs each.
///
/// # Safety
/// As for [`weights`].
#[inline(always)]
unsafe fn field<V: Words>(codes: *const u8, first: usize, per_vector: usize, pair: usize, at: i32) -> V {
    let bit = (pair % per_vector * (16 / per_vector)) as i32;
    // SAFETY: passed on.
    unsafe { V::load(codes.add((first + pair / per_vector) * 4 * V::ROWS)).shift(at - bit) }
}

/// The factor of a run's codes.
///
/// # Safety
/// `small` points to the rows' small scales, if there are any, and the processor has the instruction set of `V`.
#[inline(always)]
unsafe fn scale<V: Words, S: Scheme>(d: V::Floats, small: *const u8) -> V::Floats {
    // SAFETY: passed on.
    unsafe {
        match S::FORMAT.scales {
            Scales::Plain => d,
            Scales::Unsigned { .. } => d.times(V::unsigned(small)),
            Scales::Signed { .. } => d.times(V::signed(small)),
        }
    }
}

/// What is added to a run's scaled codes, or taken from them if it is a product.
///
/// # Safety
/// `small` points to the rows' small minima, if there are any, and the processor has the instruction set of `V`.
#[inline(always)]
unsafe fn min<V: Words, S: Scheme>(dmin: V::Floats, small: *const u8) -> V::Floats {
    // SAFETY: passed on.
    unsafe {
        match S::FORMAT.minima {
            Minima::Unsigned => dmin.times(V::unsigned(small)),
            _ => dmin,
        }
    }
}

/// Adds the scaled products of a run to a total.
///
/// # Safety
/// The processor has the instruction set of `V`.
#[inline(always)]
unsafe fn add_block<V: Words, S: Scheme>(
    total: V::Floats,
    products: V::Floats,
    scale: V::Floats,
    min: V::Floats,
    x_sum: f32,
) -> V::Floats {
    // SAFETY: passed on.
    unsafe {
        match S::FORMAT.minima {
            Minima::None => total.add_product(scale, products),
            Minima::Offset(offset) => {
                let shifted = products.add_product(V::Floats::splat(-f32::from(offset)), V::Floats::splat(x_sum));
                total.add_product(scale, shifted)
            }
            Minima::Plain => total.add_product(scale, products).add_product(min, V::Floats::splat(x_sum)),
            Minima::Unsigned => total.add_product(scale, products).add_product(min, V::Floats::splat(-x_sum)),
        }
    }
}
