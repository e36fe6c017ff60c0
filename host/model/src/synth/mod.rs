//! Made-up models: the exact shapes of real ones with random weights, for measurements and for what depends on shapes alone.
//!
//! A [`Spec`] lists the keys and tensors of a [preset](presets) with the types that a quantisation gives them. It is written
//! whole, at the speed of the disk, or as a header with a hole behind it, which is enough to inspect a model of any size. The
//! same spec and seed give the same bytes. There is no vocabulary (`tokenizer.ggml.model` is `none`), and the output is noise.
//!
//! Quantised blocks are random bytes with scales set so that a tensor of `n` columns has mean 0 and standard deviation
//! `gain / √n`: activations stay finite, and routers choose experts about evenly.

mod blocks;
mod families;
mod presets;
mod quant;

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

pub use self::presets::{PRESETS, Preset};
pub use self::quant::Quant;

use self::blocks::Pools;
use crate::gguf::write::{align, header};
use crate::gguf::{DEFAULT_ALIGNMENT, TensorType, Value};

/// What a tensor is filled with.
#[derive(Clone, Debug, PartialEq)]
enum Fill {
    /// Mean 0 and this standard deviation.
    Random(f32),
    /// One value.
    Constant(f32),
    /// These.
    Values(Vec<f32>),
}

/// A tensor to be written.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Name in the file.
    pub name: String,
    /// Dimensions, the fastest first.
    pub dims: Vec<usize>,
    /// Type of its elements.
    pub ty: TensorType,
    fill: Fill,
}

impl Tensor {
    /// Elements.
    pub fn elements(&self) -> usize {
        self.dims.iter().product()
    }

    /// Bytes in the file, without padding.
    pub fn bytes(&self) -> usize {
        self.elements() / self.ty.block_elems() * self.ty.block_bytes()
    }
}

/// A made-up model.
#[derive(Clone, Debug, PartialEq)]
pub struct Spec {
    keys: Vec<(String, Value)>,
    tensors: Vec<Tensor>,
}

/// Why a made-up model can't be had.
#[derive(Debug, thiserror::Error)]
pub enum SynthError {
    /// No preset of this name.
    #[error("there is no preset {found:?}; known are {known}")]
    Preset {
        /// What was asked for.
        found: String,
        /// All names.
        known: String,
    },
    /// No quantisation of this name.
    #[error("there is no quantisation {found:?}; known are {known}")]
    Quant {
        /// What was asked for.
        found: String,
        /// All names.
        known: String,
    },
    /// A number of layers that the shape does not have.
    #[error("{name} has 1 to {most} layers, not {found}")]
    Layers {
        /// The preset.
        name: &'static str,
        /// What was asked for.
        found: usize,
        /// What it has.
        most: usize,
    },
}

impl Spec {
    /// The tensors in file order.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    fn header(&self) -> Vec<u8> {
        let tensors = self.tensors.iter().map(|t| (t.name.as_str(), t.dims.as_slice(), t.ty, t.bytes()));
        header(3, DEFAULT_ALIGNMENT, &self.keys, tensors)
    }

    /// Bytes of the file.
    pub fn file_bytes(&self) -> u64 {
        let data = |sum, t: &Tensor| align(sum, DEFAULT_ALIGNMENT) + t.bytes();
        self.tensors.iter().fold(align(self.header().len(), DEFAULT_ALIGNMENT), data) as u64
    }

    /// Writes the model.
    ///
    /// # Errors
    /// What the system says.
    pub fn write(&self, path: &Path, seed: u64) -> std::io::Result<()> {
        let mut out = BufWriter::with_capacity(1 << 20, File::create(path)?);
        let mut at = self.header().len();
        out.write_all(&self.header())?;
        let mut pools = Pools::new(seed);
        for (i, tensor) in self.tensors.iter().enumerate() {
            let start = align(at, DEFAULT_ALIGNMENT);
            out.write_all(&[0; DEFAULT_ALIGNMENT][..start - at])?;
            match &tensor.fill {
                Fill::Random(deviation) => pools.write(&mut out, tensor, *deviation, i)?,
                Fill::Constant(value) => write_floats(&mut out, std::iter::repeat_n(value, tensor.elements()))?,
                Fill::Values(values) => write_floats(&mut out, values.iter())?,
            }
            at = start + tensor.bytes();
        }
        out.into_inner().map_err(std::io::IntoInnerError::into_error)?.sync_data()
    }

    /// Writes the header alone, with a hole where the weights would be: the file takes no room on disk, and reads as zeros.
    ///
    /// # Errors
    /// What the system says.
    pub fn write_header(&self, path: &Path) -> std::io::Result<()> {
        let mut out = File::create(path)?;
        out.write_all(&self.header())?;
        out.set_len(self.file_bytes())
    }
}

fn write_floats<'a>(out: &mut impl Write, mut values: impl Iterator<Item = &'a f32>) -> std::io::Result<()> {
    values.try_for_each(|v| out.write_all(&v.to_le_bytes()))
}

#[cfg(test)]
mod tests;
