//! Weights bound to a graph: typed bytes that stay where the model file put them.

use std::sync::Arc;

use crate::cpu::matmul::Matrix;
use crate::quant::{QuantError, WeightType};

/// Whatever keeps a tensor's bytes in place: a range of a mapped file, a vector.
pub type SharedBytes = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// One weight: `rows` rows of `cols` values of one type.
#[derive(Clone)]
pub struct Weight {
    ty: WeightType,
    rows: usize,
    cols: usize,
    bytes: SharedBytes,
}

impl Weight {
    /// Binds a tensor's bytes.
    ///
    /// # Errors
    /// When `cols` is no whole number of the type's blocks, or the bytes are not those of `rows * cols` values.
    pub fn new(ty: WeightType, rows: usize, cols: usize, bytes: SharedBytes) -> Result<Weight, QuantError> {
        Matrix::new(ty, rows, cols, (*bytes).as_ref())?;
        Ok(Weight { ty, rows, cols, bytes })
    }

    /// A weight of f32 values in memory.
    ///
    /// # Errors
    /// When there are not `rows * cols` values.
    pub fn from_f32(rows: usize, cols: usize, values: &[f32]) -> Result<Weight, QuantError> {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Weight::new(WeightType::F32, rows, cols, Arc::new(bytes))
    }

    /// Storage type.
    pub fn ty(&self) -> WeightType {
        self.ty
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Length of a row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Its bytes, row by row.
    pub fn bytes(&self) -> &[u8] {
        (*self.bytes).as_ref()
    }

    /// The weight as a matrix.
    ///
    /// # Panics
    /// When the owner hands out other bytes than it did before.
    pub fn matrix(&self) -> Matrix<'_> {
        Matrix::new(self.ty, self.rows, self.cols, (*self.bytes).as_ref()).expect("checked when bound")
    }

    /// All values in f32.
    pub fn to_f32(&self) -> Vec<f32> {
        let matrix = self.matrix();
        let mut values = vec![0.0; self.rows * self.cols];
        for (r, row) in values.chunks_exact_mut(self.cols.max(1)).enumerate() {
            matrix.dequantize_row(r, row);
        }
        values
    }
}

impl std::fmt::Debug for Weight {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}x{}", self.ty, self.rows, self.cols)
    }
}
