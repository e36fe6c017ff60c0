//! Token-wise codecs of rotated groups: a group of channels is normalised, rotated and stored as codes and one scale.
//!
//! # Layout of a tile
//! Two planes: the codes of slot 0 group 0, slot 0 group 1, …, slot 1 group 0, …; behind them the scales, f16, in the
//! same order. A format says how many bytes the codes of a group take and what they mean.

use std::marker::PhantomData;

use opencoti_plugin_api::cpu_tiles::{CpuTiles, CpuTilesOf, CpuTilesVtbl, Scores, ScoresMut};
use opencoti_plugin_api::kv_codec::{Facts, KvCodec, OpenParams, Rows, RowsMut, Side};
use opencoti_plugin_api::{Error, PAGE_TOKENS};

use crate::isa::{Isa, Level, Portable};
use crate::options::Options;
use crate::rotation::{MAX_GROUP, SignedRotation};
use crate::scale::{Fit, ScaleRule};
use crate::tiles::{self, DecodeRows, MAX_HEAD_DIM, as_floats, as_floats_mut};

/// Bytes of a scale.
const SCALE: usize = 2;
/// Largest finite half float.
const MAX_HALF: f32 = 65504.0;

/// How the codes of a group are chosen, stored and read. Values are those of a normalised group: of mean square 1.
pub trait GroupFormat: 'static {
    /// Whether the format's levels leave the scale open, so that the option `scale` means something.
    const OPEN_SCALE: bool = true;

    /// Bytes of the codes of a group of `n` values.
    fn code_bytes(n: usize) -> usize;

    /// Chooses and writes the codes of `y`.
    fn encode(y: &[f32], codes: &mut [u8]) -> Fit;

    /// Writes the levels of the codes times `scale`. Any bytes decode to some values.
    ///
    /// # Safety
    /// As [`Isa`]; `codes` has the bytes of `out.len()` values.
    unsafe fn decode<I: Isa>(codes: &[u8], scale: f32, out: &mut [f32]);

    /// Appends the codes of `n` values in the order of public code.
    fn public_codes(codes: &[u8], n: usize, out: &mut Vec<u8>);
}

/// Where things lie in a tile, and how rows get there.
#[derive(Debug)]
struct Shape {
    head_dim: usize,
    rotation: SignedRotation,
    rule: ScaleRule,
    /// Groups in a row.
    groups: usize,
    /// Bytes of the codes of a group.
    code_bytes: usize,
    /// Where the scales begin.
    scales_at: usize,
    /// One over the root of a group's size: what makes a stored scale that of normalised values.
    unit: f32,
}

impl Shape {
    fn new(head_dim: usize, rotation: SignedRotation, rule: ScaleRule, code_bytes: usize) -> Self {
        let groups = head_dim / rotation.group();
        let unit = 1.0 / (rotation.group() as f32).sqrt();
        Shape { head_dim, rotation, rule, groups, code_bytes, scales_at: PAGE_TOKENS * groups * code_bytes, unit }
    }

    fn tile_bytes(&self) -> usize {
        self.scales_at + PAGE_TOKENS * self.groups * SCALE
    }

    /// Codes and scale of group `g` of the row in `slot`.
    #[inline(always)]
    fn group<'a>(&self, tile: &'a [u8], slot: usize, g: usize) -> (&'a [u8], [u8; SCALE]) {
        let index = slot * self.groups + g;
        let scale = &tile[self.scales_at + index * SCALE..][..SCALE];
        (&tile[index * self.code_bytes..][..self.code_bytes], [scale[0], scale[1]])
    }
}

/// The functions of one format on one instruction set, which they need at run time.
struct Kernels {
    encode: unsafe fn(&Shape, &mut [u8], usize, &[f32]),
    decode: unsafe fn(&Shape, &[u8], usize, RowsMut),
    score: unsafe fn(&Shape, &[f32], &[u8], usize, RowsMut),
    accumulate: unsafe fn(&Shape, Rows, &[u8], usize, RowsMut),
    public_codes: fn(&[u8], usize, &mut Vec<u8>),
}

/// Wrappers of the generic kernels that enable one set's features.
macro_rules! on {
    ($isa:ident $(, $features:literal)?) => {{
        $(#[target_feature(enable = $features)])?
        unsafe fn on_encode<F: GroupFormat>(shape: &Shape, tile: &mut [u8], slot: usize, row: &[f32]) {
            encode::<F>(shape, tile, slot, row)
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn on_decode<F: GroupFormat>(shape: &Shape, tile: &[u8], first: usize, rows: RowsMut) {
            // SAFETY: the features are those of the set.
            unsafe { tiles::decode::<$isa>(&RowsOf::<F>(shape, PhantomData), tile, first, rows) }
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn on_score<F: GroupFormat>(shape: &Shape, q: &[f32], tile: &[u8], first: usize, scores: RowsMut) {
            // SAFETY: the features are those of the set.
            unsafe { tiles::score::<$isa>(&RowsOf::<F>(shape, PhantomData), q, tile, first, scores) }
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn on_accumulate<F: GroupFormat>(shape: &Shape, w: Rows, tile: &[u8], first: usize, acc: RowsMut) {
            // SAFETY: the features are those of the set.
            unsafe { tiles::accumulate::<$isa>(&RowsOf::<F>(shape, PhantomData), w, tile, first, acc) }
        }
        &Kernels {
            encode: on_encode::<F>,
            decode: on_decode::<F>,
            score: on_score::<F>,
            accumulate: on_accumulate::<F>,
            public_codes: F::public_codes,
        }
    }};
}

impl Kernels {
    /// The kernels of a format. `level` must be one that the processor runs.
    fn of<F: GroupFormat>(level: Level) -> &'static Kernels {
        #[cfg(target_arch = "x86_64")]
        use crate::isa::{Avx2, Avx512};
        match level {
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => on!(Avx512, "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => on!(Avx2, "avx2,fma,f16c"),
            _ => on!(Portable),
        }
    }
}

/// Norm of a group in eight partial sums, so that it is vectorised the same everywhere.
#[inline(always)]
fn norm(x: &[f32]) -> f32 {
    let mut sums = [0f32; 8];
    for eight in x.as_chunks::<8>().0 {
        for i in 0..8 {
            sums[i] += eight[i] * eight[i];
        }
    }
    sums.iter().sum::<f32>().sqrt()
}

/// What a group with infinities, NaNs or huge values is taken for: NaNs are 0, the others end where f16 does.
#[cold]
fn tame(x: &mut [f32]) {
    for v in x {
        *v = if v.is_nan() { 0.0 } else { v.clamp(-MAX_HALF, MAX_HALF) };
    }
}

#[inline(always)]
fn encode<F: GroupFormat>(shape: &Shape, tile: &mut [u8], slot: usize, row: &[f32]) {
    let n = shape.rotation.group();
    let (codes, scales) = tile.split_at_mut(shape.scales_at);
    let mut space = [0.0; MAX_GROUP];
    let y = &mut space[..n];
    for (g, x) in row.chunks_exact(n).enumerate() {
        y.copy_from_slice(x);
        let mut size = norm(y);
        if !size.is_finite() {
            tame(y);
            size = norm(y);
        }
        let unit = if size < 1e-10 { 0.0 } else { (n as f32).sqrt() / size };
        y.iter_mut().for_each(|v| *v *= unit);
        shape.rotation.forward(y);
        let index = slot * shape.groups + g;
        let fit = F::encode(y, &mut codes[index * shape.code_bytes..][..shape.code_bytes]);
        let scale = if unit == 0.0 { 0.0 } else { shape.rule.scale(fit, size, n) };
        let bits = half::f16::from_f32(scale.min(MAX_HALF)).to_le_bytes();
        scales[index * SCALE..][..SCALE].copy_from_slice(&bits);
    }
}

/// The rows of a format's tiles.
struct RowsOf<'a, F>(&'a Shape, PhantomData<F>);

impl<F: GroupFormat> DecodeRows for RowsOf<'_, F> {
    #[inline(always)]
    fn head_dim(&self) -> usize {
        self.0.head_dim
    }

    #[inline(always)]
    unsafe fn decode<I: Isa>(&self, tile: &[u8], slot: usize, out: &mut [f32]) {
        let n = self.0.rotation.group();
        // `chunks_exact` would divide, which takes as long as half a group.
        for g in 0..self.0.groups {
            let (out, (codes, scale)) = (&mut out[g * n..][..n], self.0.group(tile, slot, g));
            // SAFETY: features by the caller; the codes are those of a group.
            unsafe { F::decode::<I>(codes, I::half(u16::from_le_bytes(scale)) * self.0.unit, out) }
        }
    }
}

/// A format at a head size.
pub struct GroupCodec {
    shape: Shape,
    kernels: &'static Kernels,
}

impl GroupCodec {
    /// Opens format `F` for what `params` name, with the kernels of `level`, which the processor must run. `family` names
    /// the codecs in refusals.
    ///
    /// # Errors
    /// Head sizes other than 64, 96 and multiples of 128, and options that are not understood.
    pub fn open<F: GroupFormat>(params: &OpenParams, family: &str, level: Level) -> Result<Self, Error> {
        let head_dim = params.head_dim;
        let rotation = SignedRotation::new(head_dim).filter(|_| head_dim <= MAX_HEAD_DIM).ok_or_else(|| {
            Error::unsupported(format!(
                "the head size is {head_dim}, expected 64, 96 or a multiple of 128 up to {MAX_HEAD_DIM} for codec `{}`",
                params.codec
            ))
        })?;
        if level > Level::detect() {
            return Err(Error::unsupported(format!("this processor does not run {level:?} kernels")));
        }
        let rule = match F::OPEN_SCALE {
            true => rule(params, family)?,
            false => {
                Options::new(&params.options, &format!("`{}`", params.codec), &[])?;
                ScaleRule::Norm
            }
        };
        let code_bytes = F::code_bytes(rotation.group());
        Ok(GroupCodec { shape: Shape::new(head_dim, rotation, rule, code_bytes), kernels: Kernels::of::<F>(level) })
    }

    /// The row in slot `slot` as public code lays it out: for each group the scale, then the codes.
    pub fn public_row(&self, tile: &[u8], slot: usize) -> Vec<u8> {
        let mut out = Vec::new();
        for g in 0..self.shape.groups {
            let (codes, scale) = self.shape.group(tile, slot, g);
            out.extend_from_slice(&scale);
            (self.kernels.public_codes)(codes, self.shape.rotation.group(), &mut out);
        }
        out
    }
}

/// The rule that the options name, or the default of the side.
///
/// Keys: softmax is hurt by a common slope of all logits more than by noise of the same power, which differs from key to
/// key. Values: the least squared error; their slope is that of a sum which the next norm scales anyway.
fn rule(params: &OpenParams, family: &str) -> Result<ScaleRule, Error> {
    use ScaleRule::{LeastSquares, Norm, Unbiased};
    let mut choices = [("unbiased", Unbiased), ("least-squares", LeastSquares), ("norm", Norm)];
    if params.side == Side::V {
        choices.swap(0, 1);
    }
    Options::new(&params.options, family, &["scale"])?.choice("scale", &choices)
}

impl KvCodec for GroupCodec {
    fn facts(&self) -> Facts {
        let values = PAGE_TOKENS * self.shape.head_dim;
        Facts {
            head_dim: self.shape.head_dim,
            tile_bytes: self.shape.tile_bytes(),
            bits_per_value: (self.shape.tile_bytes() * 8) as f32 / values as f32,
            rotated: true,
            stage_tokens: 0,
        }
    }

    fn append(&self, tile: &mut [u8], first_slot: usize, rows: Rows) -> Result<(), Error> {
        for (i, row) in rows.iter().enumerate() {
            // SAFETY: `open` checked that the processor runs these kernels.
            unsafe { (self.kernels.encode)(&self.shape, tile, first_slot + i, row) };
        }
        Ok(())
    }

    fn decode_page(&self, tile: &[u8], first_slot: usize, rows: RowsMut) -> Result<(), Error> {
        // SAFETY: as above.
        unsafe { (self.kernels.decode)(&self.shape, tile, first_slot, rows) };
        Ok(())
    }

    fn transform_query(&self, mut rows: RowsMut) -> Result<(), Error> {
        (0..rows.len()).for_each(|i| self.shape.rotation.forward(rows.row(i)));
        Ok(())
    }

    fn transform_output(&self, mut rows: RowsMut) -> Result<(), Error> {
        (0..rows.len()).for_each(|i| self.shape.rotation.inverse(rows.row(i)));
        Ok(())
    }

    fn cpu_tiles() -> Option<CpuTilesOf<Self>> {
        Some(CpuTilesVtbl::of::<Self>())
    }
}

impl CpuTiles for GroupCodec {
    fn query_bytes(&self) -> usize {
        self.shape.head_dim * size_of::<f32>()
    }

    fn prepare_query(&self, rows: Rows, prepared: &mut [u8]) -> Result<(), Error> {
        let prepared = as_floats_mut(prepared)?;
        for (to, row) in prepared.chunks_exact_mut(self.shape.head_dim).zip(rows.iter()) {
            to.copy_from_slice(row);
            self.shape.rotation.forward(to);
        }
        Ok(())
    }

    fn score(&self, prepared: &[u8], tile: &[u8], first_slot: usize, scores: ScoresMut) -> Result<(), Error> {
        // SAFETY: `open` checked that the processor runs these kernels.
        unsafe { (self.kernels.score)(&self.shape, as_floats(prepared)?, tile, first_slot, scores) };
        Ok(())
    }

    fn accumulate(&self, weights: Scores, tile: &[u8], first_slot: usize, acc: RowsMut) -> Result<(), Error> {
        // SAFETY: as above.
        unsafe { (self.kernels.accumulate)(&self.shape, weights, tile, first_slot, acc) };
        Ok(())
    }
}
