//! An opened codec.

use opencoti_kv_common::options::no_codec;
use opencoti_kv_common::tiles::MAX_HEAD_DIM;
use opencoti_kv_common::{Level, Options, block_size, wht};
use opencoti_plugin_api::cpu_tiles::{CpuTiles, CpuTilesOf, CpuTilesVtbl, Scores, ScoresMut};
use opencoti_plugin_api::device_source::{DeviceSourceOf, DeviceSourceVtbl, HasDeviceSource, Source};
use opencoti_plugin_api::kv_codec::{Facts, KvCodec, OpenParams, Rows, RowsMut};
use opencoti_plugin_api::{Error, PAGE_TOKENS};

use crate::formats::{BLOCK, Bf16, Codes, F16, Floats, Format, Q4_0, Q5_0, Q5_1, Q6_0, Q8_0};
use crate::kernels::{Kernels, Shape};

/// A format at a head size, rotated or not.
pub struct ScalarCodec {
    shape: Shape,
    kernels: &'static Kernels,
    /// Block size of the rotation in front.
    rotation: Option<usize>,
    /// Its type in the device source.
    device_type: String,
}

impl ScalarCodec {
    /// Opens what `params` name, with the kernels of `level`, which the processor must run.
    pub fn open(params: &OpenParams, level: Level) -> Result<Self, Error> {
        let d = params.head_dim;
        if d == 0 || !d.is_multiple_of(BLOCK) || d > MAX_HEAD_DIM {
            return Err(Error::unsupported(format!(
                "the head size is {d}, expected a multiple of {BLOCK} up to {MAX_HEAD_DIM} for codec `{}`",
                params.codec
            )));
        }
        if level > Level::detect() {
            return Err(Error::unsupported(format!("this processor does not run {level:?} kernels")));
        }
        let rotation = rotation(&params.options)?.then(|| block_size(d));
        let (shape, kernels) = match params.codec.as_str() {
            F16::NAME => of_floats::<F16>(d, level),
            Bf16::NAME => of_floats::<Bf16>(d, level),
            Q8_0::NAME => of_codes::<Q8_0>(d, level),
            Q6_0::NAME => of_codes::<Q6_0>(d, level),
            Q5_1::NAME => of_codes::<Q5_1>(d, level),
            Q5_0::NAME => of_codes::<Q5_0>(d, level),
            Q4_0::NAME => of_codes::<Q4_0>(d, level),
            other => return Err(no_codec("kv-scalar", other, crate::CODECS)),
        };
        let format = device_format(&params.codec);
        let device_type = format!("opencoti_kv_scalar::Codec<{format}, {d}, {}>", rotation.unwrap_or(0));
        Ok(ScalarCodec { shape, kernels, rotation, device_type })
    }

    /// The row in slot `slot` as ggml lays it out, block by block. f16 and bf16 rows are plain little-endian values.
    pub fn ggml_row(&self, tile: &[u8], slot: usize) -> Vec<u8> {
        let mut out = Vec::new();
        (self.kernels.ggml_row)(&self.shape, tile, slot, &mut out);
        out
    }

    fn rotate(&self, mut rows: RowsMut) -> Result<(), Error> {
        if let Some(block) = self.rotation {
            (0..rows.len()).for_each(|i| wht(rows.row(i), block));
        }
        Ok(())
    }
}

fn of_floats<F: Floats>(head_dim: usize, level: Level) -> (Shape, &'static Kernels) {
    (Shape::of::<F>(head_dim), Kernels::of_floats::<F>(level))
}

fn of_codes<F: Codes>(head_dim: usize, level: Level) -> (Shape, &'static Kernels) {
    (Shape::of::<F>(head_dim), Kernels::of_codes::<F>(level))
}

/// The codecs on CUDA devices.
const CUDA: &str = include_str!("device/scalar.cuh");

/// A format's name in the device source: `opencoti_kv_scalar::Q8_0` for `q8_0`.
fn device_format(codec: &str) -> String {
    let (first, rest) = codec.split_at(codec.len().min(1));
    format!("opencoti_kv_scalar::{}{rest}", first.to_uppercase())
}

/// Whether the options ask for a rotation.
fn rotation(options: &serde_json::Value) -> Result<bool, Error> {
    Options::new(options, "scalar", &["rotation"])?.choice("rotation", &[("none", false), ("hadamard", true)])
}

/// The ABI promises space for prepared queries that is aligned to 64 bytes; kernels rely on four.
fn check_aligned(prepared: &[u8]) -> Result<(), Error> {
    if prepared.as_ptr().cast::<f32>().is_aligned() {
        return Ok(());
    }
    Err(Error::new("the space for prepared queries is not aligned to 64 bytes"))
}

impl KvCodec for ScalarCodec {
    fn facts(&self) -> Facts {
        let values = PAGE_TOKENS * self.shape.head_dim;
        Facts {
            head_dim: self.shape.head_dim,
            tile_bytes: self.shape.tile_bytes,
            bits_per_value: (self.shape.tile_bytes * 8) as f32 / values as f32,
            rotated: self.rotation.is_some(),
            stage_tokens: 0,
        }
    }

    fn append(&self, tile: &mut [u8], first_slot: usize, rows: Rows) -> Result<(), Error> {
        let Some(block) = self.rotation else {
            for (i, row) in rows.iter().enumerate() {
                (self.kernels.encode)(&self.shape, tile, first_slot + i, row);
            }
            return Ok(());
        };
        let mut rotated = [0.0; MAX_HEAD_DIM];
        let rotated = &mut rotated[..self.shape.head_dim];
        for (i, row) in rows.iter().enumerate() {
            rotated.copy_from_slice(row);
            wht(rotated, block);
            (self.kernels.encode)(&self.shape, tile, first_slot + i, rotated);
        }
        Ok(())
    }

    fn decode_page(&self, tile: &[u8], first_slot: usize, rows: RowsMut) -> Result<(), Error> {
        // SAFETY: `open` checked that the processor runs these kernels.
        unsafe { (self.kernels.decode)(&self.shape, tile, first_slot, rows) };
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

    fn device_sources() -> Option<DeviceSourceOf<Self>> {
        Some(DeviceSourceVtbl::of::<Self>())
    }
}

impl HasDeviceSource for ScalarCodec {
    fn device_source(&self, language: &str) -> Option<Source<'_>> {
        (language == "cuda-c++/1").then_some(Source { text: CUDA, name: &self.device_type })
    }
}

impl CpuTiles for ScalarCodec {
    fn query_bytes(&self) -> usize {
        (self.kernels.query_bytes)(&self.shape)
    }

    fn prepare_query(&self, rows: Rows, prepared: &mut [u8]) -> Result<(), Error> {
        check_aligned(prepared)?;
        let mut rotated = [0.0; MAX_HEAD_DIM];
        let rotated = &mut rotated[..self.shape.head_dim];
        for (to, row) in prepared.chunks_exact_mut(self.query_bytes()).zip(rows.iter()) {
            rotated.copy_from_slice(row);
            if let Some(block) = self.rotation {
                wht(rotated, block);
            }
            // SAFETY: `open` checked that the processor runs these kernels.
            unsafe { (self.kernels.prepare)(&self.shape, rotated, to) };
        }
        Ok(())
    }

    fn score(&self, prepared: &[u8], tile: &[u8], first_slot: usize, scores: ScoresMut) -> Result<(), Error> {
        check_aligned(prepared)?;
        // SAFETY: `open` checked that the processor runs these kernels.
        unsafe { (self.kernels.score)(&self.shape, prepared, tile, first_slot, scores) };
        Ok(())
    }

    fn accumulate(&self, weights: Scores, tile: &[u8], first_slot: usize, acc: RowsMut) -> Result<(), Error> {
        // SAFETY: `open` checked that the processor runs these kernels.
        unsafe { (self.kernels.accumulate)(&self.shape, weights, tile, first_slot, acc) };
        Ok(())
    }
}
