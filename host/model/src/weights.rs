//! The tensors a graph refers to, as slices of the mapped file.

use opencoti_compute::graph::{Graph, WeightId};
use opencoti_compute::quant::WeightType;

use crate::error::{Dims, ModelError};
use crate::gguf::{GgufFile, TensorData};

/// The weights of a graph by their ids. Keeps the file mapped; cloning shares the mapping.
#[derive(Clone, Debug)]
pub struct Weights {
    tensors: Vec<(WeightType, TensorData)>,
}

/// One weight: `rows` rows of `cols` elements, each row whole blocks of its type.
#[derive(Clone, Copy, Debug)]
pub struct WeightRef<'a> {
    /// Element type.
    pub ty: WeightType,
    /// The rows, one after the other.
    pub bytes: &'a [u8],
}

impl Weights {
    /// Binds each weight that `graph` declares to the tensor of its name.
    ///
    /// # Errors
    /// A tensor is missing, of another shape, or of a type that is no weight type.
    pub fn bind(graph: &Graph, file: &GgufFile) -> Result<Weights, ModelError> {
        let tensors = graph.weights.iter().map(|decl| find_weight(file, &decl.name, decl.cols, decl.rows));
        Ok(Weights { tensors: tensors.collect::<Result<_, _>>()? })
    }

    /// The weight of this id of the graph that was bound.
    pub fn get(&self, id: WeightId) -> WeightRef<'_> {
        let (ty, tensor) = &self.tensors[id.0 as usize];
        WeightRef { ty: *ty, bytes: tensor.bytes() }
    }

    /// Number of weights.
    pub fn len(&self) -> usize {
        self.tensors.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }
}

/// The tensor of this name, checked to be of a weight type and to have `rows` rows of `cols` elements.
pub(crate) fn find_weight(
    file: &GgufFile,
    name: &str,
    cols: usize,
    rows: usize,
) -> Result<(WeightType, TensorData), ModelError> {
    let (file_name, tensor_name) = (|| file.name().to_owned(), || name.to_owned());
    let expected = Dims::of(&[cols, rows]);
    let Some(tensor) = file.tensor(name) else {
        return Err(ModelError::MissingTensor { file: file_name(), tensor: tensor_name(), expected });
    };
    let found = Dims::of(&tensor.info().dims);
    if found != expected {
        return Err(ModelError::Shape { file: file_name(), tensor: tensor_name(), found, expected });
    }
    let ty = tensor.info().ty;
    match ty.weight_type() {
        Some(ty) => Ok((ty, tensor)),
        None => {
            let detail = format!("is of type {ty}, which no operation takes");
            Err(ModelError::Tensor { file: file_name(), tensor: tensor_name(), detail })
        }
    }
}
