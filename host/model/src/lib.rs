//! What a model file holds and what it means: the GGUF container, weights, tokenizer, chat template and, per architecture,
//! the graph description an executor runs.

pub mod arch;
pub mod chat;
pub mod demands;
mod error;
mod file_type;
pub mod gguf;
pub mod hparams;
pub mod layer_plan;
mod model;
pub mod safetensors;
pub mod synth;
pub mod tokenizer;
mod tokenizer_keys;
mod weights;

pub use error::{Dims, ModelError};
pub use file_type::FileType;
pub use model::{ChatTemplates, LoadOptions, LoadStage, Model, Sizes};
