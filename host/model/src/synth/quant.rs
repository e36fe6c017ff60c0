//! Which type each tensor of a quantised file has.
//!
//! The mixes are those that llama.cpp's quantiser makes (facts of `llama-quant.cpp`): Q4_K_M gives the values of attention and
//! the last product of feed-forwards more bits in some layers, and every mix but F16 gives them to the head.

use std::str::FromStr;

use opencoti_compute::quant::WeightType;

use super::families::Draft;
use super::{SynthError, Tensor};
use crate::gguf::TensorType;

/// A quantisation by the name that files have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(non_camel_case_types, reason = "the names that users know")]
pub enum Quant {
    /// Half precision.
    F16,
    /// Eight bits.
    Q8_0,
    /// Four bits in blocks of 32.
    Q4_0,
    /// Four bits in blocks of 256, six where it matters most.
    Q4_K_M,
}

impl Quant {
    const ALL: [(Quant, &str, u32); 4] =
        [(Quant::F16, "f16", 1), (Quant::Q8_0, "q8_0", 7), (Quant::Q4_0, "q4_0", 2), (Quant::Q4_K_M, "q4_k_m", 15)];

    /// Its number in `general.file_type`.
    pub(super) fn file_type(self) -> u32 {
        Quant::ALL.iter().find(|(q, ..)| *q == self).map_or(0, |(.., id)| *id)
    }

    /// The tensors with their types. `tied` says that the embedding table is the head, too.
    pub(super) fn assign(self, drafts: Vec<Draft>, layers: usize, tied: bool) -> Vec<Tensor> {
        let values = drafts.iter().filter(|d| is_values(&d.name)).count();
        let mut value = 0;
        let mut typed = |draft: Draft| {
            let Draft { name, dims, fill, kept } = draft;
            let more = if is_values(&name) {
                value += 1;
                more_bits(value - 1, values)
            } else {
                name.contains("ffn_down") && layer(&name).is_some_and(|l| more_bits(l, layers))
            };
            let head = name == "output.weight" || tied && name.ends_with("token_embd.weight");
            let ty = kept.unwrap_or_else(|| fitting(self.of(head, more), dims[0]));
            Tensor { name, dims, ty: TensorType::from(ty), fill }
        };
        drafts.into_iter().map(&mut typed).collect()
    }

    fn of(self, head: bool, more: bool) -> WeightType {
        match self {
            Quant::F16 => WeightType::F16,
            Quant::Q8_0 => WeightType::Q8_0,
            Quant::Q4_0 if head => WeightType::Q6_K,
            Quant::Q4_0 => WeightType::Q4_0,
            Quant::Q4_K_M if head || more => WeightType::Q6_K,
            Quant::Q4_K_M => WeightType::Q4_K,
        }
    }
}

impl FromStr for Quant {
    type Err = SynthError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let named = Quant::ALL.iter().find(|(_, name, _)| name.eq_ignore_ascii_case(text));
        named.map(|(quant, ..)| *quant).ok_or_else(|| SynthError::Quant {
            found: text.to_owned(),
            known: Quant::ALL.map(|(_, name, _)| name).join(", "),
        })
    }
}

fn is_values(name: &str) -> bool {
    name.ends_with("attn_v.weight") || name.ends_with("attn_qkv.weight")
}

fn layer(name: &str) -> Option<usize> {
    name.strip_prefix("blk.")?.split('.').next()?.parse().ok()
}

/// The first and the last eighth, and every third between.
fn more_bits(i: usize, n: usize) -> bool {
    i < n / 8 || i >= 7 * n / 8 || (i - n / 8) % 3 == 2
}

/// The type, or one of smaller blocks where rows are no whole number of its own.
fn fitting(ty: WeightType, cols: usize) -> WeightType {
    let smaller = match ty {
        WeightType::Q4_K => WeightType::Q5_0,
        WeightType::Q6_K => WeightType::Q8_0,
        other => other,
    };
    let mut candidates = [ty, smaller, WeightType::F16].into_iter();
    candidates.find(|ty| cols.is_multiple_of(ty.block_len())).unwrap_or(WeightType::F32)
}
