//! The table of tensor types: their numbers in the file and the sizes of their blocks (ggml block layouts).

/// Type of a tensor's elements. Quantised types store blocks of consecutive elements of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(non_camel_case_types, reason = "the names are those of the format")]
#[allow(missing_docs, reason = "the names are the documentation")]
pub enum GgmlType {
    F32,
    F16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    IQ2_XXS,
    IQ2_XS,
    IQ3_XXS,
    IQ1_S,
    IQ4_NL,
    IQ3_S,
    IQ2_S,
    IQ4_XS,
    I8,
    I16,
    I32,
    I64,
    F64,
    IQ1_M,
    BF16,
    TQ1_0,
    TQ2_0,
    MXFP4,
    NVFP4,
}

/// One row of the table: type, number in the file, name, elements a block, bytes a block.
type Row = (GgmlType, u32, &'static str, usize, usize);

const TABLE: &[Row] = &[
    (GgmlType::F32, 0, "F32", 1, 4),
    (GgmlType::F16, 1, "F16", 1, 2),
    (GgmlType::Q4_0, 2, "Q4_0", 32, 18),
    (GgmlType::Q4_1, 3, "Q4_1", 32, 20),
    (GgmlType::Q5_0, 6, "Q5_0", 32, 22),
    (GgmlType::Q5_1, 7, "Q5_1", 32, 24),
    (GgmlType::Q8_0, 8, "Q8_0", 32, 34),
    (GgmlType::Q2_K, 10, "Q2_K", 256, 84),
    (GgmlType::Q3_K, 11, "Q3_K", 256, 110),
    (GgmlType::Q4_K, 12, "Q4_K", 256, 144),
    (GgmlType::Q5_K, 13, "Q5_K", 256, 176),
    (GgmlType::Q6_K, 14, "Q6_K", 256, 210),
    (GgmlType::IQ2_XXS, 16, "IQ2_XXS", 256, 66),
    (GgmlType::IQ2_XS, 17, "IQ2_XS", 256, 74),
    (GgmlType::IQ3_XXS, 18, "IQ3_XXS", 256, 98),
    (GgmlType::IQ1_S, 19, "IQ1_S", 256, 50),
    (GgmlType::IQ4_NL, 20, "IQ4_NL", 32, 18),
    (GgmlType::IQ3_S, 21, "IQ3_S", 256, 110),
    (GgmlType::IQ2_S, 22, "IQ2_S", 256, 82),
    (GgmlType::IQ4_XS, 23, "IQ4_XS", 256, 136),
    (GgmlType::I8, 24, "I8", 1, 1),
    (GgmlType::I16, 25, "I16", 1, 2),
    (GgmlType::I32, 26, "I32", 1, 4),
    (GgmlType::I64, 27, "I64", 1, 8),
    (GgmlType::F64, 28, "F64", 1, 8),
    (GgmlType::IQ1_M, 29, "IQ1_M", 256, 56),
    (GgmlType::BF16, 30, "BF16", 1, 2),
    (GgmlType::TQ1_0, 34, "TQ1_0", 256, 54),
    (GgmlType::TQ2_0, 35, "TQ2_0", 256, 66),
    (GgmlType::MXFP4, 39, "MXFP4", 32, 17),
    (GgmlType::NVFP4, 40, "NVFP4", 64, 36),
];

impl GgmlType {
    /// The type with this number, or `None` if it is not one that a model file may use.
    pub fn from_id(id: u32) -> Option<GgmlType> {
        TABLE.iter().find(|row| row.1 == id).map(|row| row.0)
    }

    /// What is known of a number that [`GgmlType::from_id`] does not take, for the error message.
    pub(super) fn why_not(id: u32) -> &'static str {
        match id {
            4 | 5 => "a removed type (Q4_2 or Q4_3); convert the model again",
            9 | 15 => "a type for intermediate results (Q8_1 or Q8_K) that no model file may use",
            31..=33 | 36..=38 => {
                "a removed type repacked for one processor; use the plain Q4_0 or IQ4_NL file"
            }
            _ => {
                "unknown to this version; use a file quantised to a type listed in the documentation"
            }
        }
    }

    fn row(self) -> &'static Row {
        // The table has one row for each variant, in the order of declaration (a test checks it).
        &TABLE[self as usize]
    }

    /// Number in the file.
    pub fn id(self) -> u32 {
        self.row().1
    }

    /// Name, as in file names and listings.
    pub fn name(self) -> &'static str {
        self.row().2
    }

    /// Elements in a block; 1 for plain types.
    pub fn block_elems(self) -> usize {
        self.row().3
    }

    /// Bytes of a block.
    pub fn block_bytes(self) -> usize {
        self.row().4
    }
}

impl std::fmt::Display for GgmlType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_order_and_round_trips() {
        for (index, &(ty, id, name, elems, bytes)) in TABLE.iter().enumerate() {
            assert_eq!(ty as usize, index, "{name}");
            assert_eq!(GgmlType::from_id(id), Some(ty));
            assert_eq!(
                (ty.id(), ty.name(), ty.block_elems(), ty.block_bytes()),
                (id, name, elems, bytes)
            );
        }
    }

    #[test]
    fn intermediate_and_removed_types_are_not_accepted() {
        for id in [4, 5, 9, 15, 31, 32, 33, 36, 37, 38, 1000] {
            assert_eq!(GgmlType::from_id(id), None, "{id}");
        }
    }
}
