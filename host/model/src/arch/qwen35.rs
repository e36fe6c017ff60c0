//! `qwen35`: dense Qwen 3.5 and 3.6.
//!
//! A hybrid of gated delta nets and gated attention with SwiGLU. Converters reorder value heads so that they take turns over
//! the key heads.

use opencoti_compute::graph::{Activation, Graph, HeadMap, Value};

use super::builder::ArchBuilder;
use super::hybrid::{self, Family};
use crate::error::ModelError;
use crate::gguf::GgufFile;
use crate::hparams::HParams;

const FAMILY: Family = Family { name: "qwen35", map: HeadMap::Tiled, ffn };

pub(super) fn build(file: &GgufFile, hp: &HParams) -> Result<Graph, ModelError> {
    hybrid::build(file, hp, &FAMILY)
}

fn ffn(b: &mut ArchBuilder<'_>, hp: &HParams, l: usize, x: Value) -> Result<Value, ModelError> {
    b.gated_ffn(l, x, hp.embedding_length, hp.layers[l].feed_forward, Activation::Silu)
}
