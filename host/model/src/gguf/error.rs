//! Errors of the GGUF reader: each names the file, and the key or tensor at fault.

use std::path::PathBuf;

/// Why a GGUF file was refused. Every message is one sentence for the person who owns the file.
#[derive(Debug, thiserror::Error)]
pub enum GgufError {
    /// The file could not be opened or mapped.
    #[error("cannot read the model file {}: {source}", path.display())]
    Io {
        /// The file asked for.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The first bytes are not those of a GGUF file.
    #[error("{file} is not a GGUF file: {found}")]
    NotGguf {
        /// File name.
        file: String,
        /// What the file seems to be.
        found: String,
    },
    /// The file was written for a big-endian machine.
    #[error(
        "{file} is a big-endian GGUF file (version {version}); convert it to little-endian, for example with gguf_convert_endian"
    )]
    BigEndian {
        /// File name.
        file: String,
        /// Version after swapping the bytes.
        version: u32,
    },
    /// A version this reader does not know.
    #[error("{file} has GGUF version {version}; versions 2 and 3 can be read, so convert the model again")]
    Version {
        /// File name.
        file: String,
        /// Version found.
        version: u32,
    },
    /// The file ends inside of something.
    #[error("{file} is truncated: {what} needs {needed} bytes at offset {offset}, but the file has {len}")]
    Truncated {
        /// File name.
        file: String,
        /// What was being read.
        what: String,
        /// Where it starts.
        offset: usize,
        /// How many bytes it needs.
        needed: u64,
        /// Length of the file.
        len: usize,
    },
    /// The header is inconsistent outside of any one key or tensor.
    #[error("{file}: {detail}")]
    Header {
        /// File name.
        file: String,
        /// What is wrong.
        detail: String,
    },
    /// A metadata key is damaged, of the wrong type or missing.
    #[error("{file}: key {key:?} {detail}")]
    Key {
        /// File name.
        file: String,
        /// The key.
        key: String,
        /// What is wrong with it, read after the key.
        detail: String,
    },
    /// A tensor's description is damaged or impossible.
    #[error("{file}: tensor {tensor:?} {detail}")]
    Tensor {
        /// File name.
        file: String,
        /// The tensor.
        tensor: String,
        /// What is wrong with it, read after the name.
        detail: String,
    },
    /// The parts of a split model do not belong together, or one is missing.
    #[error("{file}: {detail}")]
    Split {
        /// The part at fault.
        file: String,
        /// What is wrong.
        detail: String,
    },
}
