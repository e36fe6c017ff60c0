//! `qwen35moe`: Qwen 3.5 and 3.6 with experts.
//!
//! `qwen35` with a feed-forward of experts whose weights sum to one, and one expert that serves every token behind a gate of its
//! own.

use opencoti_compute::graph::{Graph, HeadMap};

use super::hybrid::{self, Family};
use crate::error::ModelError;
use crate::gguf::GgufFile;
use crate::hparams::HParams;

const FAMILY: Family = Family { name: "qwen35moe", map: HeadMap::Tiled, ffn: hybrid::experts };

pub(super) fn build(file: &GgufFile, hp: &HParams) -> Result<Graph, ModelError> {
    hybrid::build(file, hp, &FAMILY)
}
