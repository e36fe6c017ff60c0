//! Reader of GGUF, the container of weights and metadata (versions 2 and 3, little-endian), whole or split into parts.
//!
//! A file is: magic `GGUF`, version, tensor count, key count; then the keys, the tensor infos (name, dimensions, type, offset),
//! padding to `general.alignment`, and the tensor data. Facts follow the public GGUF specification.
//!
//! Two levels:
//! - [`Gguf::parse`] reads the header of one file out of a byte slice. It copies the metadata and checks every count, offset and
//!   size against the bytes that are there, so nothing it returns can point outside the slice. It does not touch tensor data.
//! - [`GgufFile::open`] maps a file, or all the parts of a split one, and hands out tensors as slices of the mapping.
//!
//! Everything read here comes from outside: no input may panic, overflow, recurse without bound or allocate more than a small
//! multiple of the file's own size.

mod cursor;
mod error;
mod file;
mod header;
mod metadata;
mod split;
mod tensor_type;
#[cfg(test)]
mod tests;
mod value;
pub mod write;

pub use error::GgufError;
pub(crate) use file::map_file;
pub use file::{GgufFile, TensorData};
pub(crate) use header::strip_trailing_ones;
pub use header::{Gguf, TensorInfo};
pub use metadata::Metadata;
pub use tensor_type::TensorType;
pub use value::{Array, Value, ValueType};

/// `general.alignment` when the key is absent.
pub const DEFAULT_ALIGNMENT: usize = 32;
