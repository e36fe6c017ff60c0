//! Models as Hugging Face publishes them: a folder with `config.json`, `model.safetensors` and `tokenizer.json`.
//!
//! The weights of the two containers lie alike, rows of little-endian floats, so nothing is converted: [`header`] finds the tensors
//! in the mapped file, [`bert`] gives them and the facts of the JSON files the names that a GGUF file would have, and everything
//! after sees a GGUF file. Only BERT encoders are read; larger models come as GGUF.
//!
//! Everything read here comes from outside, and is checked as in [`gguf`](crate::gguf).

mod bert;
mod header;

use std::path::Path;

pub use header::{Header, HeaderError, Tensor, parse_header};
use serde_json::Value;

use crate::gguf::{GgufError, GgufFile, map_file};

/// Largest JSON file that is read, in bytes: vocabularies take a few megabytes.
const MAX_JSON: u64 = 256 << 20;

/// Why a folder could not be read as a model. Every message is one sentence that names the file.
#[derive(Debug, thiserror::Error)]
pub enum FolderError {
    /// A file is missing or not readable.
    #[error(
        "{file} cannot be read: {source}; a model's folder holds config.json, model.safetensors and tokenizer.json"
    )]
    Io {
        /// The file.
        file: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file is no JSON, or says what cannot be.
    #[error("{file}: {detail}")]
    Json {
        /// The file.
        file: String,
        /// What is wrong.
        detail: String,
    },
    /// The weights' header is damaged.
    #[error("{file}: {source}")]
    Header {
        /// The file.
        file: String,
        /// What is wrong with it.
        source: HeaderError,
    },
    /// Facts that contradict each other once they are put together.
    #[error(transparent)]
    Model(#[from] GgufError),
}

/// Opens a folder as a model.
///
/// # Errors
/// See [`FolderError`].
pub fn open_folder(folder: &Path) -> Result<GgufFile, FolderError> {
    let weights = folder.join("model.safetensors");
    let config = Json::read(folder, "config.json")?;
    let name = weights.display().to_string();
    let map = map_file(&weights).map_err(|source| FolderError::Io { file: name.clone(), source })?;
    let header = parse_header(&map).map_err(|source| FolderError::Header { file: name, source })?;
    let header = bert::translate(folder, &config, header)?;
    Ok(GgufFile::from_foreign(&weights, map, header)?)
}

/// A JSON file and its name.
struct Json {
    file: String,
    value: Value,
}

impl Json {
    fn read(folder: &Path, name: &str) -> Result<Json, FolderError> {
        let path = folder.join(name);
        let file = path.display().to_string();
        let io = |source| FolderError::Io { file: file.clone(), source };
        let size = std::fs::metadata(&path).map_err(io)?.len();
        if size > MAX_JSON {
            let detail = format!("has {size} bytes, more than the {MAX_JSON} that are read");
            return Err(FolderError::Json { file, detail });
        }
        let bytes = std::fs::read(&path).map_err(io)?;
        match serde_json::from_slice(&bytes) {
            Ok(value) => Ok(Json { file, value }),
            Err(e) => Err(FolderError::Json { file, detail: format!("is not valid JSON: {e}") }),
        }
    }

    /// A file that need not be there.
    fn read_optional(folder: &Path, name: &str) -> Result<Option<Json>, FolderError> {
        folder.join(name).exists().then(|| Json::read(folder, name)).transpose()
    }

    fn error(&self, detail: String) -> FolderError {
        FolderError::Json { file: self.file.clone(), detail }
    }

    /// A positive integer.
    fn size(&self, key: &str) -> Result<u32, FolderError> {
        let value = self.value[key].as_u64().and_then(|v| u32::try_from(v).ok()).filter(|&v| v > 0);
        value.ok_or_else(|| self.error(format!("{key:?} is {}, expected a positive integer", self.value[key])))
    }

    fn text(&self, key: &str) -> Option<&str> {
        self.value[key].as_str()
    }

    fn bool(&self, key: &str) -> Option<bool> {
        self.value[key].as_bool()
    }
}
