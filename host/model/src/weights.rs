//! Binding the tensors of a file to the weights a graph declares.

use std::sync::Arc;

use opencoti_compute::graph::Graph;
use opencoti_compute::quant::WeightType;
use opencoti_compute::weights::Weight;

use crate::error::{Dims, ModelError};
use crate::gguf::{GgufFile, TensorData};

/// A weight for each declaration of `graph`, in their order. The bytes stay in the mapped file, which each weight keeps alive.
///
/// # Errors
/// A tensor is missing, of another shape, or of a type that is no weight type.
pub(crate) fn bind(graph: &Graph, file: &GgufFile) -> Result<Vec<Weight>, ModelError> {
    let weights = graph.weights.iter().map(|decl| {
        let (ty, tensor) = find_weight(file, &decl.name, &[decl.cols, decl.rows / decl.experts, decl.experts])?;
        Weight::new(ty, decl.rows, decl.cols, Arc::new(tensor)).map_err(|e| ModelError::Tensor {
            file: file.name().to_owned(),
            tensor: decl.name.clone(),
            detail: format!("cannot be used: {e}"),
        })
    });
    weights.collect()
}

/// The tensor of this name, checked to be of a weight type and to have these dimensions, the fastest first.
pub(crate) fn find_weight(file: &GgufFile, name: &str, dims: &[usize]) -> Result<(WeightType, TensorData), ModelError> {
    let (file_name, tensor_name) = (|| file.name().to_owned(), || name.to_owned());
    let expected = Dims::of(dims);
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
