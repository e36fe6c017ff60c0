//! Weights on the card: packed in the order in which its kernels read them, in as many bytes as in the file.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use opencoti_compute::quant::WeightType;
use opencoti_compute::weights::Weight;

use crate::CudaError;
use crate::compile::Cache;
use crate::driver::{Args, Gpu, Mark, Memory};
use crate::kernels::ProductKernels;

/// How a weight type is packed: columns and bytes of a unit of 16 rows, as in weights.cuh.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Format {
    /// Type in the file; also the name of the format in the kernels.
    pub ty: WeightType,
    unit: usize,
    bytes: usize,
}

impl Format {
    /// The format of a type, if there are kernels for it.
    pub fn of(ty: WeightType) -> Option<Format> {
        let (unit, bytes) = match ty {
            WeightType::Q4_0 | WeightType::Q4_1 | WeightType::Q5_0 | WeightType::Q5_1 | WeightType::Q8_0 => {
                (64, 2 * 16 * ty.block_bytes())
            }
            WeightType::Q4_K | WeightType::Q5_K | WeightType::Q6_K => (256, 16 * ty.block_bytes()),
            WeightType::F16 | WeightType::BF16 | WeightType::F32 => (64, 2 * 16 * 64),
            _ => return None,
        };
        Some(Format { ty, unit, bytes })
    }

    /// Names of all formats.
    pub fn names() -> impl Iterator<Item = &'static str> {
        WeightType::all().filter(|ty| Format::of(*ty).is_some()).map(WeightType::name)
    }

    /// Units of a row of `cols` columns.
    pub fn units(&self, cols: usize) -> usize {
        cols.div_ceil(self.unit)
    }

    /// Bytes of a packed matrix.
    fn packed_bytes(&self, rows: usize, cols: usize) -> Option<usize> {
        rows.div_ceil(16).checked_mul(self.units(cols))?.checked_mul(self.bytes)
    }
}

/// A matrix on the card.
#[derive(Clone, Copy, Debug)]
pub struct Matrix {
    /// Its format.
    pub format: Format,
    /// Its address.
    pub at: u64,
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
}

/// Everything that a model's graph reads.
pub struct Weights {
    /// Packed matrices, by weight.
    pub matrices: HashMap<u32, Matrix>,
    /// f32 vectors, by weight.
    pub vectors: HashMap<u32, u64>,
    /// Kernels of the formats that occur.
    pub kernels: HashMap<WeightType, ProductKernels>,
    _memory: Memory,
}

/// Start of everything on the card, in bytes.
const ALIGN: usize = 256;
/// Bytes of the file that are on their way at a time.
const PIECE: usize = 64 << 20;

/// Told of bytes copied and of all bytes.
pub type Progress<'a> = &'a mut dyn FnMut(u64, u64);

impl Weights {
    /// Copies matrices and vectors, given by their numbers in `weights`, to the card.
    ///
    /// # Errors
    /// When a matrix is of a type without kernels, or memory does not suffice.
    pub fn new(
        gpu: &Arc<Gpu>,
        cache: &Cache,
        weights: &[Weight],
        names: &dyn Fn(u32) -> String,
        matrices: &[u32],
        vectors: &[u32],
        progress: Progress<'_>,
    ) -> Result<Weights, CudaError> {
        let mut end = 0usize;
        let too_large =
            || CudaError::Unsupported("the weights are larger than this machine's address space".to_owned());
        let mut place = |bytes: usize| -> Result<usize, CudaError> {
            let at = end;
            end = bytes.checked_next_multiple_of(ALIGN).and_then(|b| b.checked_add(at)).ok_or_else(too_large)?;
            Ok(at)
        };
        let mut places = Vec::new();
        for &id in matrices {
            let w = &weights[id as usize];
            let format = Format::of(w.ty()).ok_or_else(|| {
                let known: Vec<&str> = Format::names().collect();
                let (name, ty) = (names(id), w.ty());
                CudaError::Unsupported(format!(
                    "tensor `{name}` is {ty}, for which the CUDA kernels have no products (they have {})",
                    known.join(", ")
                ))
            })?;
            places.push((id, format, place(format.packed_bytes(w.rows(), w.cols()).ok_or_else(too_large)?)?));
        }
        let vector_places: Vec<usize> = vectors
            .iter()
            .map(|&id| place(weights[id as usize].rows() * weights[id as usize].cols() * 4))
            .collect::<Result<_, _>>()?;
        let memory = gpu.allocate(end, "the model's weights")?;
        let mut kernels = HashMap::new();
        for (_, format, _) in &places {
            if let Entry::Vacant(place) = kernels.entry(format.ty) {
                place.insert(ProductKernels::new(gpu, cache, format.ty.name())?);
            }
        }
        let total: u64 = matrices.iter().map(|&id| weights[id as usize].bytes().len() as u64).sum();
        let mut upload = Upload::new(gpu, total)?;
        let mut result = Weights { matrices: HashMap::new(), vectors: HashMap::new(), kernels, _memory: memory };
        for (id, format, offset) in places {
            let w = &weights[id as usize];
            let at = result._memory.at() + offset as u64;
            let matrix = Matrix { format, at, rows: w.rows(), cols: w.cols() };
            upload.matrix(w, &matrix, &result.kernels[&format.ty], progress)?;
            result.matrices.insert(id, matrix);
        }
        upload.finish()?;
        for (&id, offset) in vectors.iter().zip(vector_places) {
            let at = result._memory.at() + offset as u64;
            let values = weights[id as usize].to_f32();
            // SAFETY: the place was made for this vector; the copy is waited for before the values go.
            unsafe { gpu.upload(at, bytemuck::cast_slice(&values)) }?;
            gpu.synchronize()?;
            result.vectors.insert(id, at);
        }
        Ok(result)
    }
}

/// Two pieces of pinned memory and of the card's, used in turn: one is filled while the other is copied and packed.
struct Upload {
    gpu: Arc<Gpu>,
    host: [crate::driver::Pinned; 2],
    device: [Memory; 2],
    busy: [Option<Mark>; 2],
    turn: usize,
    done: u64,
    total: u64,
}

impl Upload {
    fn new(gpu: &Arc<Gpu>, total: u64) -> Result<Upload, CudaError> {
        let piece = || gpu.allocate(PIECE, "a buffer for weights");
        Ok(Upload {
            gpu: Arc::clone(gpu),
            host: [gpu.pinned(PIECE)?, gpu.pinned(PIECE)?],
            device: [piece()?, piece()?],
            busy: [None, None],
            turn: 0,
            done: 0,
            total,
        })
    }

    fn matrix(
        &mut self,
        w: &Weight,
        to: &Matrix,
        kernels: &ProductKernels,
        progress: Progress<'_>,
    ) -> Result<(), CudaError> {
        let bytes = w.bytes();
        if bytes.is_empty() {
            return Ok(());
        }
        let row_bytes = bytes.len() / w.rows();
        let tile_words = (to.format.units(w.cols()) * to.format.bytes / 4) as u64;
        if row_bytes * 16 > PIECE {
            return Err(CudaError::Unsupported(format!(
                "a tensor has rows of {row_bytes} bytes, more than can be packed"
            )));
        }
        // Whole row tiles.
        let rows_at_once = PIECE / row_bytes / 16 * 16;
        for first in (0..w.rows()).step_by(rows_at_once) {
            let n = rows_at_once.min(w.rows() - first);
            let (turn, from) = (self.turn, &bytes[first * row_bytes..(first + n) * row_bytes]);
            self.turn = 1 - turn;
            if let Some(mark) = self.busy[turn].take() {
                mark.wait()?;
            }
            self.host[turn].bytes_mut()[..from.len()].copy_from_slice(from);
            let words = tile_words * n.div_ceil(16) as u64;
            let target = to.at + first as u64 / 16 * tile_words * 4;
            let args = Args::new()
                .with(self.device[turn].at())
                .with(row_bytes as u64)
                .with(n as u32)
                .with(w.cols() as u32)
                .with(target)
                .with(words);
            let blocks = words.div_ceil(256).min(1 << 16) as u32;
            // SAFETY: the piece holds these rows; the matrix has room for their row tiles. Pinned memory is written again only
            // after the mark behind the copy was passed.
            unsafe {
                self.gpu.upload(self.device[turn].at(), &self.host[turn].bytes()[..from.len()])?;
                self.gpu.launch(&kernels.pack, [blocks, 1, 1], 256, args)?;
            }
            self.busy[turn] = Some(self.gpu.mark()?);
            self.done += from.len() as u64;
            progress(self.done, self.total);
        }
        Ok(())
    }

    fn finish(self) -> Result<(), CudaError> {
        self.gpu.synchronize()
    }
}
