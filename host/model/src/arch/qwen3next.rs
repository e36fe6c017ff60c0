//! `qwen3next`: Qwen3-Next.
//!
//! A hybrid of gated delta nets and gated attention with experts and a shared expert. Value heads are in groups, one for each
//! key head, as the reference has them.

use opencoti_compute::graph::{Graph, HeadMap};

use super::hybrid::{self, Family};
use crate::error::ModelError;
use crate::gguf::GgufFile;
use crate::hparams::HParams;

const FAMILY: Family = Family { name: "qwen3next", map: HeadMap::Grouped, ffn: hybrid::experts };

pub(super) fn build(file: &GgufFile, hp: &HParams) -> Result<Graph, ModelError> {
    hybrid::build(file, hp, &FAMILY)
}
