//! `qwen3moe`: Qwen 3 with experts (30B-A3B, 235B-A22B).
//!
//! Qwen 3 whose feed-forwards are all made of experts, with weights that sum to one; none of them serves every token.

use opencoti_compute::graph::Graph;

use super::qwen3;
use crate::error::ModelError;
use crate::gguf::GgufFile;
use crate::hparams::HParams;

pub(super) fn build(file: &GgufFile, hp: &HParams) -> Result<Graph, ModelError> {
    if hp.expert_count == 0 {
        return Err(ModelError::Key {
            file: file.name().to_owned(),
            key: "qwen3moe.expert_count".to_owned(),
            detail: "is 0 or missing, expected the number of experts".to_owned(),
        });
    }
    qwen3::build(file, hp)
}
