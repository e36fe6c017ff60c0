//! What a file was quantised to, as people name it.

use std::collections::HashMap;
use std::fmt;

use crate::error::ModelError;
use crate::gguf::{GgufFile, TensorType};

/// The kind of quantisation of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileType {
    /// By the name of `general.file_type`, for example `Q4_K_M`.
    Named(&'static str),
    /// The file does not say, or says a number without a name: the type that holds most of its bytes.
    Mostly(TensorType),
}

/// Numbers and names of `general.file_type` (llama.cpp's `LLAMA_FTYPE`).
const NAMES: [(u32, &str); 34] = [
    (0, "F32"),
    (1, "F16"),
    (2, "Q4_0"),
    (3, "Q4_1"),
    (7, "Q8_0"),
    (8, "Q5_0"),
    (9, "Q5_1"),
    (10, "Q2_K"),
    (11, "Q3_K_S"),
    (12, "Q3_K_M"),
    (13, "Q3_K_L"),
    (14, "Q4_K_S"),
    (15, "Q4_K_M"),
    (16, "Q5_K_S"),
    (17, "Q5_K_M"),
    (18, "Q6_K"),
    (19, "IQ2_XXS"),
    (20, "IQ2_XS"),
    (21, "Q2_K_S"),
    (22, "IQ3_XS"),
    (23, "IQ3_XXS"),
    (24, "IQ1_S"),
    (25, "IQ4_NL"),
    (26, "IQ3_S"),
    (27, "IQ3_M"),
    (28, "IQ2_S"),
    (29, "IQ2_M"),
    (30, "IQ4_XS"),
    (31, "IQ1_M"),
    (32, "BF16"),
    (36, "TQ1_0"),
    (37, "TQ2_0"),
    (38, "MXFP4_MOE"),
    (39, "NVFP4"),
];

impl FileType {
    pub(crate) fn of(file: &GgufFile) -> Result<FileType, ModelError> {
        let number = file.metadata().u32("general.file_type")?;
        if let Some((_, name)) = NAMES.iter().find(|(n, _)| Some(*n) == number) {
            return Ok(FileType::Named(name));
        }
        let mut bytes: HashMap<TensorType, usize> = HashMap::new();
        for tensor in file.tensors() {
            *bytes.entry(tensor.ty).or_default() += tensor.range.len();
        }
        let most = bytes.into_iter().max_by_key(|&(ty, bytes)| (bytes, ty.id()));
        Ok(FileType::Mostly(most.map_or(TensorType::I8, |(ty, _)| ty)))
    }
}

impl fmt::Display for FileType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FileType::Named(name) => f.write_str(name),
            FileType::Mostly(ty) => write!(f, "mostly {ty}"),
        }
    }
}
