//! What a model file holds and what it means: the GGUF container, weights, tokenizer, chat template and, per architecture,
//! the graph description an executor runs.

pub mod gguf;
