//! Which model a saved slot belongs to.

use opencoti_kv::ModelFingerprint;
use opencoti_model::Model;
use sha2::{Digest, Sha256};

/// Bytes taken from each end of a tensor.
const SAMPLE: usize = 4096;

/// A digest of hyperparameters and weights: every tensor's name, type, shape and both ends of its bytes. Reading whole
/// files would make starting slow, and weights that differ, differ there.
pub fn of(model: &Model, name: &str) -> ModelFingerprint {
    let mut hash = Sha256::new();
    hash.update(format!("{} {:?}", model.architecture, model.hparams));
    for info in model.file.tensors() {
        hash.update(format!("{info:?}"));
        if let Some(data) = model.file.tensor(&info.name) {
            let bytes = data.bytes();
            hash.update(&bytes[..bytes.len().min(SAMPLE)]);
            hash.update(&bytes[bytes.len().saturating_sub(SAMPLE)..]);
        }
    }
    ModelFingerprint { name: name.to_owned(), digest: hash.finalize().into() }
}
