//! An opened codec: shapes, encoding and decoding.

use std::cell::RefCell;

use half::f16;
use opencoti_kv_common::options::no_codec;
use opencoti_kv_common::tiles::{MAX_HEAD_DIM, as_floats, as_floats_mut};
use opencoti_kv_common::{Level, Options, block_size, wht};
use opencoti_plugin_api::cpu_tiles::{CpuTiles, CpuTilesOf, CpuTilesVtbl, Scores, ScoresMut};
use opencoti_plugin_api::kv_codec::{Facts, KvCodec, OpenParams, Rows, RowsMut, Side};
use opencoti_plugin_api::{Error, PAGE_TOKENS};

use crate::balance::{Bounds, Factors, SIDE, balance};
use crate::pack::{pack, row_bytes, unpack};
use crate::tiles;

/// Channels of a slice.
pub const SLICE: usize = SIDE;
/// What a head size is a multiple of.
const MULTIPLE: usize = 32;
/// Ranges tried for the grid of a row, each narrower by [`NARROWER`] of the whole.
const RANGES: usize = 21;
const NARROWER: f32 = 0.03;
/// The least step of a grid.
const LEAST_STEP: f32 = 1e-10;
/// What half floats hold; exact tokens are kept in them.
const LARGEST: f32 = 65504.0;

thread_local! {
    /// A page of rotated rows, and a slice of it by its own rows.
    static SCRATCH: RefCell<(Vec<f32>, Vec<f32>)> = const { RefCell::new((Vec::new(), Vec::new())) };
}

/// How a page is encoded.
#[derive(Clone, Copy, Debug)]
struct Encoder {
    bounds: Bounds,
    /// Ranges tried for each row.
    ranges: usize,
    /// Whether the magnitude of a tile is shared between the axes, so that none leaves half floats.
    share: bool,
}

/// A KVarN codec for one side and head size.
pub struct KvarnCodec {
    pub(crate) bits: usize,
    pub(crate) side: Side,
    pub(crate) head_dim: usize,
    encoder: Encoder,
    kernels: Kernels,
}

/// A slice's place in a tile, and its record's parts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Record {
    /// First channel.
    pub(crate) channel: usize,
    /// Rows and columns of the matrix.
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    /// Bytes of a row of codes.
    pub(crate) row_bytes: usize,
    /// First byte in the tile.
    pub(crate) start: usize,
}

/// A record's bytes.
pub(crate) struct Parts<'a> {
    pub(crate) codes: &'a [u8],
    pub(crate) scale: &'a [[u8; 2]],
    pub(crate) zero: &'a [[u8; 2]],
    pub(crate) other: &'a [[u8; 2]],
}

impl Record {
    fn bytes(&self) -> usize {
        self.rows * self.row_bytes + 2 * (2 * self.rows + self.columns)
    }

    pub(crate) fn parts<'a>(&self, tile: &'a [u8]) -> Parts<'a> {
        let (codes, axes) = tile[self.start..][..self.bytes()].split_at(self.rows * self.row_bytes);
        let (scale, axes) = axes.as_chunks::<2>().0.split_at(self.rows);
        let (zero, other) = axes.split_at(self.rows);
        Parts { codes, scale, zero, other }
    }
}

/// The functions of one width on one instruction set; they need that set at run time.
#[derive(Clone, Copy)]
struct Kernels {
    encode: unsafe fn(&[f32], &Record, usize, &Encoder, &mut [u8]),
    decode: unsafe fn(&KvarnCodec, &[u8], usize, RowsMut),
    score: unsafe fn(&KvarnCodec, &[f32], &[u8], usize, RowsMut),
    accumulate: unsafe fn(&KvarnCodec, Rows, &[u8], usize, RowsMut),
}

/// Wrappers of the generic kernels that enable one set's features.
macro_rules! on {
    ($product:ty, $bits:literal $(, $features:literal)?) => {{
        $(#[target_feature(enable = $features)])?
        unsafe fn on_encode(tile: &[f32], record: &Record, bits: usize, encoder: &Encoder, out: &mut [u8]) {
            encode(tile, record, bits, encoder, out)
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn on_decode(codec: &KvarnCodec, tile: &[u8], first: usize, rows: RowsMut) {
            decode::<$bits>(codec, tile, first, rows)
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn on_score(codec: &KvarnCodec, queries: &[f32], tile: &[u8], first: usize, scores: RowsMut) {
            // SAFETY: the features are those of the set.
            unsafe { tiles::score::<$product, $bits>(codec, queries, tile, first, scores) }
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn on_accumulate(codec: &KvarnCodec, weights: Rows, tile: &[u8], first: usize, acc: RowsMut) {
            // SAFETY: the features are those of the set.
            unsafe { tiles::accumulate::<$product, $bits>(codec, weights, tile, first, acc) }
        }
        Kernels { encode: on_encode, decode: on_decode, score: on_score, accumulate: on_accumulate }
    }};
}

impl Kernels {
    fn of(bits: usize, level: Level) -> Kernels {
        macro_rules! at {
            ($bits:literal) => {
                match level {
                    #[cfg(target_arch = "x86_64")]
                    Level::Avx2 | Level::Avx512 => on!(tiles::Avx2, $bits, "avx2,fma,f16c"),
                    _ => on!(tiles::Portable, $bits),
                }
            };
        }
        match bits {
            2 => at!(2),
            3 => at!(3),
            4 => at!(4),
            5 => at!(5),
            6 => at!(6),
            _ => at!(8),
        }
    }
}

impl KvarnCodec {
    /// Opens what `params` name, with the kernels of `level`, which the processor must run.
    pub fn open(params: &OpenParams, level: Level) -> Result<Self, Error> {
        let d = params.head_dim;
        if d == 0 || !d.is_multiple_of(MULTIPLE) || d > MAX_HEAD_DIM {
            return Err(Error::unsupported(format!(
                "the head size is {d}, expected a multiple of {MULTIPLE} up to {MAX_HEAD_DIM} for codec `{}`",
                params.codec
            )));
        }
        if level > Level::detect() {
            return Err(Error::unsupported(format!("this processor does not run {level:?} kernels")));
        }
        let Some(codec) = crate::CODECS.iter().find(|c| c.name == params.codec) else {
            return Err(no_codec("kv-kvarn", &params.codec, crate::CODECS));
        };
        let bits = codec.name.bytes().last().map_or(0, |digit| usize::from(digit - b'0'));
        let encoder = encoder(&params.options)?;
        Ok(KvarnCodec { bits, side: params.side, head_dim: d, encoder, kernels: Kernels::of(bits, level) })
    }

    /// The slices of a tile.
    pub(crate) fn records(&self) -> impl Iterator<Item = Record> + use<> {
        let (bits, side, head_dim) = (self.bits, self.side, self.head_dim);
        let mut start = 0;
        (0..head_dim).step_by(SLICE).map(move |channel| {
            let channels = SLICE.min(head_dim - channel);
            let (rows, columns) = match side {
                Side::K => (channels, PAGE_TOKENS),
                Side::V => (PAGE_TOKENS, channels),
            };
            let record = Record { channel, rows, columns, row_bytes: row_bytes(bits, columns), start };
            start += record.bytes();
            record
        })
    }

    /// Row `row` of slice `slice` as a string of bits: the code of column `c` is bits `bits * c ..`, least significant
    /// first. For comparison with other implementations.
    ///
    /// # Panics
    /// When there is no such row or slice.
    pub fn row(&self, tile: &[u8], slice: usize, row: usize) -> Vec<u8> {
        let record = self.records().nth(slice).expect("a slice of this head");
        let mut codes = vec![0; record.columns];
        let packed = &record.parts(tile).codes[row * record.row_bytes..][..record.row_bytes];
        unpack_row(self.bits, packed, &mut codes);
        let mut out = vec![0u8; record.row_bytes];
        for (c, code) in codes.iter().enumerate() {
            for bit in (0..self.bits).filter(|bit| code >> bit & 1 == 1) {
                let at = c * self.bits + bit;
                out[at / 8] |= 1 << (at % 8);
            }
        }
        out
    }

    /// Scales and zeros of the rows, and factors of the columns, of a slice.
    ///
    /// # Panics
    /// When there is no such slice.
    pub fn axes(&self, tile: &[u8], slice: usize) -> [Vec<f32>; 3] {
        let record = self.records().nth(slice).expect("a slice of this head");
        let Parts { scale, zero, other, .. } = record.parts(tile);
        [scale, zero, other].map(|axis| axis.iter().map(|&h| half(h)).collect())
    }

    fn rotate(&self, mut rows: RowsMut) -> Result<(), Error> {
        let block = block_size(self.head_dim);
        (0..rows.len()).for_each(|i| wht(rows.row(i), block));
        Ok(())
    }
}

/// Reads the codec's options.
fn encoder(options: &serde_json::Value) -> Result<Encoder, Error> {
    let options = Options::new(options, "KVarN", &["floor", "clip"])?;
    let wide = options.choice("floor", &[("wide", true), ("reference", false)])?;
    let ranges = options.choice("clip", &[("search", RANGES), ("none", 1)])?;
    Ok(Encoder { bounds: if wide { Bounds::WIDE } else { Bounds::REFERENCE }, ranges, share: wide })
}

impl KvCodec for KvarnCodec {
    fn facts(&self) -> Facts {
        let tile_bytes = self.records().map(|r| r.bytes()).sum();
        Facts {
            head_dim: self.head_dim,
            tile_bytes,
            bits_per_value: (tile_bytes * 8) as f32 / (PAGE_TOKENS * self.head_dim) as f32,
            rotated: true,
            stage_tokens: PAGE_TOKENS as u32,
        }
    }

    fn append(&self, tile: &mut [u8], first_slot: usize, rows: Rows) -> Result<(), Error> {
        match first_slot == 0 && rows.len() == PAGE_TOKENS {
            true => self.encode_page(tile, rows),
            false => Err(Error::unsupported(format!(
                "KVarN encodes pages of {PAGE_TOKENS} tokens as a whole, not {} from slot {first_slot}",
                rows.len()
            ))),
        }
    }

    fn encode_page(&self, tile: &mut [u8], rows: Rows) -> Result<(), Error> {
        if rows.len() != PAGE_TOKENS {
            let found = rows.len();
            return Err(Error::new(format!("a page of {found} rows, expected {PAGE_TOKENS}")));
        }
        SCRATCH.with_borrow_mut(|(rotated, slice)| {
            self.rotated_page(rows, rotated);
            for record in self.records() {
                self.gather(rotated, &record, slice);
                let out = &mut tile[record.start..][..record.bytes()];
                // SAFETY: `open` checked that the processor runs these kernels.
                unsafe { (self.kernels.encode)(slice, &record, self.bits, &self.encoder, out) };
            }
        });
        Ok(())
    }

    fn decode_page(&self, tile: &[u8], first_slot: usize, rows: RowsMut) -> Result<(), Error> {
        // SAFETY: `open` checked that the processor runs these kernels.
        unsafe { (self.kernels.decode)(self, tile, first_slot, rows) };
        Ok(())
    }

    fn transform_query(&self, rows: RowsMut) -> Result<(), Error> {
        self.rotate(rows)
    }

    fn transform_output(&self, rows: RowsMut) -> Result<(), Error> {
        self.rotate(rows)
    }

    fn cpu_tiles() -> Option<CpuTilesOf<Self>> {
        Some(CpuTilesVtbl::of::<Self>())
    }
}

impl CpuTiles for KvarnCodec {
    fn query_bytes(&self) -> usize {
        (self.head_dim * size_of::<f32>()).next_multiple_of(64)
    }

    fn prepare_query(&self, rows: Rows, prepared: &mut [u8]) -> Result<(), Error> {
        let block = block_size(self.head_dim);
        for (to, row) in as_floats_mut(prepared)?.chunks_exact_mut(self.head_dim).zip(rows.iter()) {
            to.copy_from_slice(row);
            wht(to, block);
        }
        Ok(())
    }

    fn score(&self, prepared: &[u8], tile: &[u8], first_slot: usize, scores: ScoresMut) -> Result<(), Error> {
        // SAFETY: `open` checked that the processor runs these kernels.
        unsafe { (self.kernels.score)(self, as_floats(prepared)?, tile, first_slot, scores) };
        Ok(())
    }

    fn accumulate(&self, weights: Scores, tile: &[u8], first_slot: usize, acc: RowsMut) -> Result<(), Error> {
        // SAFETY: `open` checked that the processor runs these kernels.
        unsafe { (self.kernels.accumulate)(self, weights, tile, first_slot, acc) };
        Ok(())
    }
}

impl KvarnCodec {
    /// The rows in the codec's basis. What is no number counts as zero, and what half floats do not hold as their largest:
    /// one odd value must not spread over its neighbours.
    fn rotated_page(&self, rows: Rows, rotated: &mut Vec<f32>) {
        let block = block_size(self.head_dim);
        rotated.clear();
        for row in rows.iter() {
            let start = rotated.len();
            rotated.extend(row.iter().map(|x| if x.is_nan() { 0.0 } else { x.clamp(-LARGEST, LARGEST) }));
            wht(&mut rotated[start..], block);
        }
    }

    /// The matrix of a slice, row after row.
    fn gather(&self, rotated: &[f32], record: &Record, slice: &mut Vec<f32>) {
        slice.clear();
        slice.resize(record.rows * record.columns, 0.0);
        let tokens = rotated.chunks_exact(self.head_dim).map(|row| &row[record.channel..]);
        for (t, token) in tokens.enumerate() {
            match self.side {
                Side::V => slice[t * record.columns..][..record.columns].copy_from_slice(&token[..record.columns]),
                Side::K => {
                    for (to, x) in slice[t..].iter_mut().step_by(record.columns).zip(&token[..record.rows]) {
                        *to = *x;
                    }
                }
            }
        }
    }
}

/// Balances and quantises a slice into its record.
#[inline(always)]
fn encode(tile: &[f32], record: &Record, bits: usize, encoder: &Encoder, out: &mut [u8]) {
    let factors = balance(tile, record.columns, &encoder.bounds);
    let by_column = factors.columns.map(|f| 1.0 / f);
    let mut grids = [Grid::default(); SIDE];
    let (codes_out, axes) = out.split_at_mut(record.rows * record.row_bytes);
    for (r, row) in tile.chunks_exact(record.columns).enumerate() {
        let by_row = 1.0 / factors.rows[r];
        let mut balanced = [0.0; SIDE];
        let balanced = &mut balanced[..record.columns];
        for ((to, x), by) in balanced.iter_mut().zip(row).zip(&by_column) {
            *to = x * by * by_row;
        }
        let mut codes = [0; SIDE];
        grids[r] = quantise(balanced, bits, encoder.ranges, &mut codes[..record.columns]);
        pack(bits, &codes[..record.columns], &mut codes_out[r * record.row_bytes..][..record.row_bytes]);
    }
    let levels = ((1u32 << bits) - 1) as f32;
    let shared = if encoder.share { share(&grids[..record.rows], &factors, record, levels) } else { 1.0 };
    let (scale, axes) = axes.as_chunks_mut::<2>().0.split_at_mut(record.rows);
    let (zero, other) = axes.split_at_mut(record.rows);
    for (r, grid) in grids[..record.rows].iter().enumerate() {
        let factor = factors.rows[r] * shared;
        scale[r] = f16::from_f32(grid.step * factor).to_le_bytes();
        zero[r] = f16::from_f32(grid.low * factor).to_le_bytes();
    }
    for (to, factor) in other.iter_mut().zip(&factors.columns) {
        *to = f16::from_f32(factor / shared).to_le_bytes();
    }
}

/// A power of two that moves from the columns' factors to the rows' grids, so that the largest of both are of one
/// magnitude: a tile's values can then be as small or large as products of half floats are.
fn share(grids: &[Grid], factors: &Factors, record: &Record, levels: f32) -> f32 {
    let reach = |(grid, factor): (&Grid, &f32)| (grid.low.abs().max(grid.step * levels)) * factor;
    let rows = grids.iter().zip(&factors.rows).map(reach).fold(0f32, f32::max);
    let columns = factors.columns[..record.columns].iter().fold(0f32, |most, &f| most.max(f));
    match rows > 0.0 && columns > 0.0 {
        true => ((columns.log2() - rows.log2()) / 2.0).round().exp2(),
        false => 1.0,
    }
}

/// The grid of a row: `low + step * code`.
#[derive(Clone, Copy, Default)]
struct Grid {
    low: f32,
    step: f32,
}

/// Chooses a grid for a row by the least squared error of `ranges` that are ever narrower around the mean, the first
/// of equals, and gives the codes.
#[inline(always)]
fn quantise(row: &[f32], bits: usize, ranges: usize, codes: &mut [u8]) -> Grid {
    let levels = ((1u32 << bits) - 1) as f32;
    let (mut low, mut high, mut sum) = (f32::INFINITY, f32::NEG_INFINITY, 0.0);
    for &x in row {
        low = low.min(x);
        high = high.max(x);
        sum += x;
    }
    let mean = sum / row.len() as f32;
    let grid = |narrower: f32| {
        let (low, high) = (mean + (low - mean) * narrower, mean + (high - mean) * narrower);
        Grid { low, step: ((high - low) / levels).max(LEAST_STEP) }
    };
    let mut best = Grid { low, step: ((high - low) / levels).max(LEAST_STEP) };
    if ranges > 1 {
        let mut least = error(row, &best, levels);
        for range in 1..ranges {
            let candidate = grid(1.0 - NARROWER * range as f32);
            let found = error(row, &candidate, levels);
            if found < least {
                (best, least) = (candidate, found);
            }
        }
    }
    let by_step = 1.0 / best.step;
    for (code, x) in codes.iter_mut().zip(row) {
        *code = ((x - best.low) * by_step).round_ties_even().clamp(0.0, levels) as u8;
    }
    best
}

/// Squared error of a row on a grid.
#[inline(always)]
fn error(row: &[f32], grid: &Grid, levels: f32) -> f32 {
    const LANES: usize = 8;
    let by_step = 1.0 / grid.step;
    let mut sums = [0.0; LANES];
    for x in row.as_chunks::<LANES>().0 {
        for l in 0..LANES {
            let code = ((x[l] - grid.low) * by_step).round_ties_even().clamp(0.0, levels);
            let d = x[l] - grid.low - code * grid.step;
            sums[l] += d * d;
        }
    }
    sums.iter().sum()
}

/// A half float.
pub(crate) fn half(bytes: [u8; 2]) -> f32 {
    f16::from_le_bytes(bytes).to_f32()
}

/// As [`unpack`], of a width known at run time.
fn unpack_row(bits: usize, row: &[u8], codes: &mut [u8]) {
    match bits {
        2 => unpack::<2>(row, codes),
        3 => unpack::<3>(row, codes),
        4 => unpack::<4>(row, codes),
        5 => unpack::<5>(row, codes),
        6 => unpack::<6>(row, codes),
        _ => unpack::<8>(row, codes),
    }
}

/// Decodes slots `first ..` into `rows`.
#[inline(always)]
fn decode<const BITS: usize>(codec: &KvarnCodec, tile: &[u8], first: usize, mut rows: RowsMut) {
    for record in codec.records() {
        match codec.side {
            Side::K => decode_keys::<BITS>(&record, tile, first, &mut rows),
            Side::V => decode_values::<BITS>(&record, tile, first, &mut rows),
        }
    }
}

#[inline(always)]
fn decode_values<const BITS: usize>(record: &Record, tile: &[u8], first: usize, rows: &mut RowsMut) {
    let parts = record.parts(tile);
    let mut other = [0.0; SIDE];
    parts.other.iter().zip(&mut other).for_each(|(&h, to)| *to = half(h));
    let mut codes = [0; SIDE];
    let codes = &mut codes[..record.columns];
    for i in 0..rows.len() {
        let t = first + i;
        let (scale, zero) = (half(parts.scale[t]), half(parts.zero[t]));
        unpack::<BITS>(&parts.codes[t * record.row_bytes..][..record.row_bytes], codes);
        let out = &mut rows.row(i)[record.channel..][..record.columns];
        for ((to, &code), other) in out.iter_mut().zip(&*codes).zip(&other) {
            *to = (f32::from(code) * scale + zero) * other;
        }
    }
}

/// Channels that are decoded together before they go to their tokens' rows.
const CHANNELS: usize = 16;

#[inline(always)]
fn decode_keys<const BITS: usize>(record: &Record, tile: &[u8], first: usize, rows: &mut RowsMut) {
    let parts = record.parts(tile);
    let mut other = [0.0; PAGE_TOKENS];
    parts.other.iter().zip(&mut other).for_each(|(&h, to)| *to = half(h));
    let n = rows.len();
    let mut block = [[0.0; PAGE_TOKENS]; CHANNELS];
    for channel in (0..record.rows).step_by(CHANNELS) {
        for (r, decoded) in (channel..).zip(&mut block) {
            let (scale, zero) = (half(parts.scale[r]), half(parts.zero[r]));
            let mut codes = [0; PAGE_TOKENS];
            unpack::<BITS>(&parts.codes[r * record.row_bytes..][..record.row_bytes], &mut codes);
            for t in first..first + n {
                decoded[t] = (f32::from(codes[t]) * scale + zero) * other[t];
            }
        }
        for i in 0..n {
            let out = &mut rows.row(i)[record.channel + channel..][..CHANNELS];
            for (to, decoded) in out.iter_mut().zip(&block) {
                *to = decoded[first + i];
            }
        }
    }
}
