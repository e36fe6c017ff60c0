//! Safe handling of whole pages, for the checks.

use crate::PAGE_TOKENS;
use crate::host::Codec;

/// A tile as the host allocates it: 64-byte aligned, with whatever bytes were there before.
pub(super) struct Tile {
    blocks: Vec<Block>,
    len: usize,
}

/// 64 bytes aligned as the host aligns tiles and prepared queries.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(super) struct Block(#[expect(dead_code, reason = "read and written through pointers")] [u8; 64]);

impl Block {
    pub(super) fn filled(byte: u8) -> Self {
        Block([byte; 64])
    }
}

impl Tile {
    /// A tile full of `garbage`.
    pub(super) fn new(codec: &Codec, garbage: u8) -> Self {
        let len = codec.layout().tile_bytes;
        Tile { blocks: vec![Block::filled(garbage); len.div_ceil(64)], len }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        // SAFETY: the blocks are at least `len` initialised bytes.
        unsafe { core::slice::from_raw_parts(self.blocks.as_ptr().cast(), self.len) }
    }

    fn as_mut_ptr(&mut self) -> *mut u8 {
        self.blocks.as_mut_ptr().cast()
    }

    /// Appends `rows` (whole rows) from `first_slot` on.
    pub(super) fn append(&mut self, codec: &Codec, first_slot: usize, rows: &[f32]) -> Result<(), String> {
        let (d, n) = (codec.head_dim(), rows.len() / codec.head_dim());
        assert!(first_slot + n <= PAGE_TOKENS);
        // SAFETY: a whole tile of this codec, and `n` rows.
        unsafe { codec.append(self.as_mut_ptr(), first_slot, n, rows.as_ptr(), d) }
            .map_err(|e| format!("`append` failed: {}", e.message))
    }

    /// Encodes a page of rows.
    pub(super) fn encode(&mut self, codec: &Codec, rows: &[f32]) -> Result<(), String> {
        assert_eq!(rows.len(), PAGE_TOKENS * codec.head_dim());
        // SAFETY: a whole tile of this codec, and a page of rows.
        unsafe { codec.encode_page(self.as_mut_ptr(), rows.as_ptr(), codec.head_dim()) }
            .map_err(|e| format!("`encode_page` failed: {}", e.message))
    }

    /// Decodes `n` slots into rows `stride` apart; what is between them is left as `gap`.
    pub(super) fn decode_apart(
        &self,
        codec: &Codec,
        first_slot: usize,
        n: usize,
        stride: usize,
        gap: f32,
    ) -> Result<Vec<f32>, String> {
        assert!(first_slot + n <= PAGE_TOKENS && stride >= codec.head_dim());
        let mut rows = vec![gap; n * stride];
        // SAFETY: a whole tile of this codec, and space for `n` rows.
        unsafe { codec.decode_page(self.bytes().as_ptr(), first_slot, n, rows.as_mut_ptr(), stride) }
            .map_err(|e| format!("`decode_page` failed: {}", e.message))?;
        Ok(rows)
    }

    /// Decodes `n` slots.
    pub(super) fn decode(&self, codec: &Codec, first_slot: usize, n: usize) -> Result<Vec<f32>, String> {
        self.decode_apart(codec, first_slot, n, codec.head_dim(), f32::NAN)
    }
}

/// Query rows in the codec's domain.
pub(super) fn into_domain(codec: &Codec, mut rows: Vec<f32>) -> Result<Vec<f32>, String> {
    let d = codec.head_dim();
    // SAFETY: whole rows of our own.
    unsafe { codec.transform_query(rows.as_mut_ptr(), rows.len() / d, d) }
        .map_err(|e| format!("`transform_query` failed: {}", e.message))?;
    Ok(rows)
}

/// Output rows in the plain basis.
pub(super) fn out_of_domain(codec: &Codec, mut rows: Vec<f32>) -> Result<Vec<f32>, String> {
    let d = codec.head_dim();
    // SAFETY: whole rows of our own.
    unsafe { codec.transform_output(rows.as_mut_ptr(), rows.len() / d, d) }
        .map_err(|e| format!("`transform_output` failed: {}", e.message))?;
    Ok(rows)
}

/// `n` roughly normal values (a sum of uniform ones), the same for the same seed.
pub(super) fn normal(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut uniform = || {
        // The xorshift64* generator of Vigna.
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        (state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    // Twelve uniform values of variance 1/12 have variance 1 together.
    (0..n).map(|_| (0..12).map(|_| uniform()).sum()).collect()
}

pub(super) fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum()
}

/// Root of summed squared differences over summed squares of `a`.
pub(super) fn relative_error(a: &[f32], b: &[f32]) -> f64 {
    let squares: f64 = a.iter().zip(b).map(|(x, y)| (f64::from(*x) - f64::from(*y)).powi(2)).sum();
    (squares / dot(a, a)).sqrt()
}

/// Same bits: two decodings of the same bytes may not differ, NaN included.
pub(super) fn same(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(x, y)| x.to_bits() == y.to_bits())
}
