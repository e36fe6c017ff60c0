//! Types a tensor in a file may have: the weight types that executors know, and plain numbers beside them.

use opencoti_compute::quant::WeightType;

/// Type of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TensorType {
    /// A type that executors can compute with.
    Weight(WeightType),
    /// 64-bit float; only listed.
    F64,
    /// 8-bit integer; only listed.
    I8,
    /// 16-bit integer; only listed.
    I16,
    /// 32-bit integer; only listed.
    I32,
    /// 64-bit integer; only listed.
    I64,
}

impl TensorType {
    const PLAIN: [TensorType; 5] = [TensorType::I8, TensorType::I16, TensorType::I32, TensorType::I64, TensorType::F64];

    /// The type with this number, or `None` if it is not one that a model file may use.
    pub fn from_id(id: u32) -> Option<TensorType> {
        let plain = || TensorType::PLAIN.into_iter().find(|ty| ty.id() == id);
        WeightType::from_ggml_id(id).map(TensorType::Weight).or_else(plain)
    }

    /// What is known of a number that [`TensorType::from_id`] does not take, for the error message.
    pub(super) fn why_not(id: u32) -> &'static str {
        match id {
            4 | 5 => "a removed type (Q4_2 or Q4_3); convert the model again",
            9 | 15 => "a type for intermediate results (Q8_1 or Q8_K) that no model file may use",
            31..=33 | 36..=38 => "a removed type repacked for one processor; use the plain Q4_0 or IQ4_NL file",
            _ => "unknown to this version; use a file quantised to a type listed in the documentation",
        }
    }

    /// The type if executors can compute with it.
    pub fn weight_type(self) -> Option<WeightType> {
        match self {
            TensorType::Weight(ty) => Some(ty),
            _ => None,
        }
    }

    /// Number in the file (ggml's numbering), name, elements and bytes of a block.
    fn facts(self) -> (u32, &'static str, usize, usize) {
        match self {
            TensorType::Weight(ty) => (ty.ggml_id(), ty.name(), ty.block_len(), ty.block_bytes()),
            TensorType::I8 => (24, "I8", 1, 1),
            TensorType::I16 => (25, "I16", 1, 2),
            TensorType::I32 => (26, "I32", 1, 4),
            TensorType::I64 => (27, "I64", 1, 8),
            TensorType::F64 => (28, "F64", 1, 8),
        }
    }

    /// Number in the file.
    pub fn id(self) -> u32 {
        self.facts().0
    }

    /// Name, as in file names and listings.
    pub fn name(self) -> &'static str {
        self.facts().1
    }

    /// Elements in a block; 1 for plain types.
    pub fn block_elems(self) -> usize {
        self.facts().2
    }

    /// Bytes of a block.
    pub fn block_bytes(self) -> usize {
        self.facts().3
    }
}

impl From<WeightType> for TensorType {
    fn from(ty: WeightType) -> Self {
        TensorType::Weight(ty)
    }
}

impl std::fmt::Display for TensorType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_round_trip() {
        let types = WeightType::all().map(TensorType::from).chain(TensorType::PLAIN);
        for ty in types {
            assert_eq!(TensorType::from_id(ty.id()), Some(ty));
        }
        assert_eq!((TensorType::I16.id(), TensorType::I16.block_bytes(), TensorType::F64.name()), (25, 2, "F64"));
    }

    #[test]
    fn intermediate_and_removed_types_are_not_accepted() {
        for id in [4, 5, 9, 15, 31, 32, 33, 36, 37, 38, 1000] {
            assert_eq!(TensorType::from_id(id), None, "{id}");
        }
    }
}
