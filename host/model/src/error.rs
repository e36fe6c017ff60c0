//! Errors of loading a model.

use std::fmt;

use crate::gguf::{GgufError, strip_trailing_ones};
use crate::layer_plan::RepeatLayersError;
use crate::safetensors::FolderError;
use crate::tokenizer::TokenizerError;

/// Why a model could not be loaded. Every message is one sentence that names the file and the key or tensor.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The container is damaged, or a key has a wrong type.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// A folder that holds no model that can be read.
    #[error(transparent)]
    Folder(#[from] FolderError),
    /// No architecture of this name is built in.
    #[error("{file}: the architecture {found:?} is not supported; known are {known}")]
    UnknownArchitecture {
        /// File name.
        file: String,
        /// Value of `general.architecture`.
        found: String,
        /// Names that would be accepted.
        known: String,
    },
    /// A hyperparameter is out of range or contradicts another.
    #[error("{file}: key {key:?} {detail}")]
    Key {
        /// File name.
        file: String,
        /// The key.
        key: String,
        /// What is wrong with it, read after the key.
        detail: String,
    },
    /// A tensor that the architecture needs is not there.
    #[error("{file}: tensor {tensor:?} is missing; expected one of dimensions {expected}")]
    MissingTensor {
        /// File name.
        file: String,
        /// Name of the tensor.
        tensor: String,
        /// Its dimensions, the fastest first.
        expected: Dims,
    },
    /// A tensor has other dimensions than the hyperparameters say.
    #[error("{file}: tensor {tensor:?} has dimensions {found}, expected {expected}")]
    Shape {
        /// File name.
        file: String,
        /// Name of the tensor.
        tensor: String,
        /// Its dimensions, the fastest first.
        found: Dims,
        /// What the hyperparameters ask for.
        expected: Dims,
    },
    /// The blocks to repeat do not suit the model.
    #[error("{file}: blocks can't be repeated as asked: {source}")]
    RepeatLayers {
        /// File name.
        file: String,
        /// What is wrong with the plan.
        source: RepeatLayersError,
    },
    /// The file's vocabulary contradicts itself or is of an unknown kind.
    #[error("{file}: {source}")]
    Tokenizer {
        /// File name.
        file: String,
        /// What is wrong with it.
        source: TokenizerError,
    },
    /// A tensor cannot be used as the graph would have to.
    #[error("{file}: tensor {tensor:?} {detail}")]
    Tensor {
        /// File name.
        file: String,
        /// Name of the tensor.
        tensor: String,
        /// What is wrong with it, read after the name.
        detail: String,
    },
}

/// Dimensions as messages write them: `{576, 1536}`, the fastest first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dims(pub Vec<usize>);

impl Dims {
    /// Dimensions without trailing ones, which are never compared.
    pub(crate) fn of(dims: &[usize]) -> Dims {
        Dims(strip_trailing_ones(dims).to_vec())
    }
}

impl fmt::Display for Dims {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dims: Vec<String> = self.0.iter().map(ToString::to_string).collect();
        write!(f, "{{{}}}", dims.join(", "))
    }
}
