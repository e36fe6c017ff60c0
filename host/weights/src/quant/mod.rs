//! Weight types of GGUF files: their block layouts and the way back to f32.
//!
//! A quantised row is a run of fixed-size blocks; each block holds a few scales and packed codes for
//! [`WeightType::block_len`] values. The layouts are ggml's (`ggml-common.h`, and `gguf/quants.py` of the
//! `gguf` Python package, against whose output every type here is tested bit for bit). One file per family:
//! [`legacy`] (32 values, one scale), [`k`] (256 values, two levels of scales), [`iq`] (codebooks),
//! [`ternary`], [`mx`] (4-bit floats).
//!
//! [`dequantize_row`] is the checked entry; every byte pattern is a valid block, so nothing behind the length
//! checks can fail.

pub mod iq;
mod iq_grids;
pub mod k;
pub mod legacy;
pub mod mx;
pub mod ternary;

/// A length that does not fit a weight type.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum QuantError {
    /// The row does not divide into blocks.
    #[error("a {ty} row of {len} values is not a whole number of blocks; its length must be a multiple of {block}")]
    RowLength { ty: &'static str, len: usize, block: usize },
    /// The row's size in bytes does not fit an address.
    #[error("a {ty} row of {len} values is too large for this machine's address space")]
    TooLarge { ty: &'static str, len: usize },
    /// Bytes and values do not belong together.
    #[error("{len} values of {ty} take {expected} bytes, but {found} bytes were given")]
    ByteLength { ty: &'static str, len: usize, expected: usize, found: usize },
}

/// Storage type of a weight tensor, named as in GGUF.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(non_camel_case_types, reason = "the names that GGUF files and their users know")]
pub enum WeightType {
    F32,
    F16,
    BF16,
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
    IQ1_S,
    IQ1_M,
    IQ2_XXS,
    IQ2_XS,
    IQ2_S,
    IQ3_XXS,
    IQ3_S,
    IQ4_NL,
    IQ4_XS,
    TQ1_0,
    TQ2_0,
    MXFP4,
    NVFP4,
}

/// What is known of a type: GGUF's number and name, values and bytes of a block.
struct Facts {
    ty: WeightType,
    ggml_id: u32,
    name: &'static str,
    block_len: usize,
    block_bytes: usize,
}

const fn facts(ty: WeightType, ggml_id: u32, name: &'static str, block_len: usize, block_bytes: usize) -> Facts {
    Facts { ty, ggml_id, name, block_len, block_bytes }
}

/// In the order of the enum's variants.
static FACTS: [Facts; 26] = {
    use WeightType::*;
    [
        facts(F32, 0, "F32", 1, 4),
        facts(F16, 1, "F16", 1, 2),
        facts(BF16, 30, "BF16", 1, 2),
        facts(Q4_0, 2, "Q4_0", 32, 18),
        facts(Q4_1, 3, "Q4_1", 32, 20),
        facts(Q5_0, 6, "Q5_0", 32, 22),
        facts(Q5_1, 7, "Q5_1", 32, 24),
        facts(Q8_0, 8, "Q8_0", 32, 34),
        facts(Q2_K, 10, "Q2_K", 256, 84),
        facts(Q3_K, 11, "Q3_K", 256, 110),
        facts(Q4_K, 12, "Q4_K", 256, 144),
        facts(Q5_K, 13, "Q5_K", 256, 176),
        facts(Q6_K, 14, "Q6_K", 256, 210),
        facts(IQ1_S, 19, "IQ1_S", 256, 50),
        facts(IQ1_M, 29, "IQ1_M", 256, 56),
        facts(IQ2_XXS, 16, "IQ2_XXS", 256, 66),
        facts(IQ2_XS, 17, "IQ2_XS", 256, 74),
        facts(IQ2_S, 22, "IQ2_S", 256, 82),
        facts(IQ3_XXS, 18, "IQ3_XXS", 256, 98),
        facts(IQ3_S, 21, "IQ3_S", 256, 110),
        facts(IQ4_NL, 20, "IQ4_NL", 32, 18),
        facts(IQ4_XS, 23, "IQ4_XS", 256, 136),
        facts(TQ1_0, 34, "TQ1_0", 256, 54),
        facts(TQ2_0, 35, "TQ2_0", 256, 66),
        facts(MXFP4, 39, "MXFP4", 32, 17),
        facts(NVFP4, 40, "NVFP4", 64, 36),
    ]
};

impl WeightType {
    /// Every type, in the order of the enum.
    pub fn all() -> impl Iterator<Item = WeightType> {
        FACTS.iter().map(|f| f.ty)
    }

    /// The type with this number in a GGUF tensor header, `None` for numbers that are no weight type
    /// (integers, f64, activation-only blocks, numbers that ggml retired or that do not exist).
    pub fn from_ggml_id(id: u32) -> Option<WeightType> {
        FACTS.iter().find(|f| f.ggml_id == id).map(|f| f.ty)
    }

    /// The number of this type in a GGUF tensor header.
    pub fn ggml_id(self) -> u32 {
        self.facts().ggml_id
    }

    /// The name as GGUF spells it, `"Q4_K"` for example.
    pub fn name(self) -> &'static str {
        self.facts().name
    }

    /// Values in one block.
    pub fn block_len(self) -> usize {
        self.facts().block_len
    }

    /// Bytes of one block.
    pub fn block_bytes(self) -> usize {
        self.facts().block_bytes
    }

    /// Bytes of a row of `len` values.
    ///
    /// # Errors
    /// When `len` is not a multiple of [`block_len`](Self::block_len), or the size overflows.
    pub fn row_bytes(self, len: usize) -> Result<usize, QuantError> {
        let f = self.facts();
        if !len.is_multiple_of(f.block_len) {
            return Err(QuantError::RowLength { ty: f.name, len, block: f.block_len });
        }
        (len / f.block_len).checked_mul(f.block_bytes).ok_or(QuantError::TooLarge { ty: f.name, len })
    }

    /// Whether values are stored as plain floats, one after the other.
    pub fn is_float(self) -> bool {
        matches!(self, WeightType::F32 | WeightType::F16 | WeightType::BF16)
    }

    fn facts(self) -> &'static Facts {
        &FACTS[self as usize]
    }
}

impl std::fmt::Display for WeightType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// Writes the values of the row `src` of type `ty` to `dst`; `dst.len()` is the row's length.
///
/// # Errors
/// When `dst` is not a whole number of blocks, or `src` is not exactly the bytes of that many values.
pub fn dequantize_row(ty: WeightType, src: &[u8], dst: &mut [f32]) -> Result<(), QuantError> {
    let expected = ty.row_bytes(dst.len())?;
    if src.len() != expected {
        return Err(QuantError::ByteLength { ty: ty.name(), len: dst.len(), expected, found: src.len() });
    }
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c") {
        // SAFETY: the processor has AVX2 and F16C, checked above.
        unsafe { dequantize_avx2(ty, src, dst) };
        return Ok(());
    }
    dequantize_blocks(ty, src, dst);
    Ok(())
}

/// [`dequantize_blocks`] compiled for AVX2: the same arithmetic, so the same bits, in wider registers. Only rows of
/// f16 have an instruction of their own.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c")]
fn dequantize_avx2(ty: WeightType, src: &[u8], dst: &mut [f32]) {
    match ty {
        WeightType::F16 => legacy::f16_row_f16c(src, dst),
        _ => dequantize_blocks(ty, src, dst),
    }
}

/// Runs a block function over a row. A macro, not a function that takes one: a call through `Fn` would be compiled
/// apart, without the instruction set of the caller.
macro_rules! per_block {
    ($src:expr, $dst:expr, $block:path) => {
        for (bytes, values) in $src.as_chunks().0.iter().zip($dst.as_chunks_mut().0) {
            $block(bytes, values);
        }
    };
}

/// Dispatch over whole blocks; the lengths were checked.
#[inline(always)]
fn dequantize_blocks(ty: WeightType, src: &[u8], dst: &mut [f32]) {
    match ty {
        WeightType::F32 => legacy::f32_row(src, dst),
        WeightType::F16 => legacy::f16_row(src, dst),
        WeightType::BF16 => legacy::bf16_row(src, dst),
        WeightType::Q4_0 => per_block!(src, dst, legacy::q4_0),
        WeightType::Q4_1 => per_block!(src, dst, legacy::q4_1),
        WeightType::Q5_0 => per_block!(src, dst, legacy::q5_0),
        WeightType::Q5_1 => per_block!(src, dst, legacy::q5_1),
        WeightType::Q8_0 => per_block!(src, dst, legacy::q8_0),
        WeightType::Q2_K => per_block!(src, dst, k::q2_k),
        WeightType::Q3_K => per_block!(src, dst, k::q3_k),
        WeightType::Q4_K => per_block!(src, dst, k::q4_k),
        WeightType::Q5_K => per_block!(src, dst, k::q5_k),
        WeightType::Q6_K => per_block!(src, dst, k::q6_k),
        WeightType::IQ1_S => per_block!(src, dst, iq::iq1_s),
        WeightType::IQ1_M => per_block!(src, dst, iq::iq1_m),
        WeightType::IQ2_XXS => per_block!(src, dst, iq::iq2_xxs),
        WeightType::IQ2_XS => per_block!(src, dst, iq::iq2_xs),
        WeightType::IQ2_S => per_block!(src, dst, iq::iq2_s),
        WeightType::IQ3_XXS => per_block!(src, dst, iq::iq3_xxs),
        WeightType::IQ3_S => per_block!(src, dst, iq::iq3_s),
        WeightType::IQ4_NL => per_block!(src, dst, iq::iq4_nl),
        WeightType::IQ4_XS => per_block!(src, dst, iq::iq4_xs),
        WeightType::TQ1_0 => per_block!(src, dst, ternary::tq1_0),
        WeightType::TQ2_0 => per_block!(src, dst, ternary::tq2_0),
        WeightType::MXFP4 => per_block!(src, dst, mx::mxfp4),
        WeightType::NVFP4 => per_block!(src, dst, mx::nvfp4),
    }
}

/// IEEE half to single, exact, without a branch: moves the exponent by a multiplication, which also
/// normalises subnormals, and repairs infinities and NaNs.
#[inline(always)]
pub fn f16_to_f32(h: u16) -> f32 {
    let magnitude = f32::from_bits(u32::from(h & 0x7FFF) << 13) * f32::from_bits((127 + 112) << 23);
    let special = if h & 0x7C00 == 0x7C00 { 0x7F80_0000 } else { 0 };
    f32::from_bits(magnitude.to_bits() | special | u32::from(h & 0x8000) << 16)
}

/// bfloat16 to single: the upper half of the bits.
#[inline(always)]
pub fn bf16_to_f32(h: u16) -> f32 {
    f32::from_bits(u32::from(h) << 16)
}

/// Little-endian u16 at `at`.
#[inline(always)]
fn u16_at(b: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([b[at], b[at + 1]])
}

/// Little-endian u32 at `at`.
#[inline(always)]
fn u32_at(b: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]])
}

/// Half-precision scale at `at`.
#[inline(always)]
fn f16_at(b: &[u8], at: usize) -> f32 {
    f16_to_f32(u16_at(b, at))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn facts_stand_in_the_order_of_the_enum() {
        for (i, f) in FACTS.iter().enumerate() {
            assert_eq!(f.ty as usize, i, "{}", f.name);
            assert_eq!(WeightType::from_ggml_id(f.ggml_id), Some(f.ty));
            assert_eq!(format!("{:?}", f.ty), f.name);
        }
        for unknown in [4, 5, 9, 15, 24, 28, 31, 36, 41, u32::MAX] {
            assert_eq!(WeightType::from_ggml_id(unknown), None);
        }
    }

    #[test]
    fn every_half_converts_like_the_reference() {
        for h in 0..=u16::MAX {
            let (ours, reference) = (f16_to_f32(h), half::f16::from_bits(h).to_f32());
            assert!(ours.to_bits() == reference.to_bits() || (ours.is_nan() && reference.is_nan()), "{h:#06x}");
        }
    }

    #[test]
    fn a_row_that_is_no_whole_number_of_blocks_is_refused_by_name() {
        let error = WeightType::Q4_K.row_bytes(576).unwrap_err();
        assert_eq!(
            error.to_string(),
            "a Q4_K row of 576 values is not a whole number of blocks; its length must be a multiple of 256"
        );
        let mut dst = [0.0; 31];
        assert!(matches!(dequantize_row(WeightType::Q8_0, &[0; 34], &mut dst), Err(QuantError::RowLength { .. })));
        let mut dst = [0.0; 64];
        let error = dequantize_row(WeightType::Q8_0, &[0; 34], &mut dst).unwrap_err();
        assert_eq!(error.to_string(), "64 values of Q8_0 take 68 bytes, but 34 bytes were given");
        assert!(matches!(WeightType::F32.row_bytes(usize::MAX), Err(QuantError::TooLarge { .. })));
    }

    proptest! {
        #[test]
        fn any_bytes_of_the_right_length_dequantise_and_others_are_errors(
            index in 0..FACTS.len(), blocks in 0usize..4, slack in 0usize..3, seed in any::<u64>(),
        ) {
            use rand::{RngExt, SeedableRng};
            let f = &FACTS[index];
            let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(seed);
            let bytes: Vec<u8> = (0..blocks * f.block_bytes + slack).map(|_| rng.random()).collect();
            let mut values = vec![0.0; blocks * f.block_len];
            prop_assert_eq!(dequantize_row(f.ty, &bytes, &mut values).is_ok(), slack == 0);
        }
    }
}
