//! Changed copies of the tiny models.

use opencoti_model::Model;
use opencoti_model::arch::Architecture;
use opencoti_model::gguf::write::GgufWriter;
use opencoti_model::gguf::{GgufFile, Value};
use opencoti_model::hparams::HParams;

/// A copy of a file with its tensors passed through `change`: it returns the writer with whatever stands for the tensor, or
/// `None` to keep it as it is.
pub(crate) fn rewrite(file: &GgufFile, change: impl Fn(GgufWriter, &str) -> Option<GgufWriter>) -> Rewritten {
    let mut writer = keys(file);
    for info in file.tensors() {
        let tensor = file.tensor(&info.name).expect("listed");
        writer = match change(writer.clone(), &info.name) {
            Some(changed) => changed,
            None => writer.tensor(&info.name, &info.dims, info.ty, tensor.bytes().to_vec()),
        };
    }
    write(&writer)
}

/// A copy of a file with one key of another value.
pub(crate) fn with_key(file: &GgufFile, key: &str, value: Value) -> Rewritten {
    let mut writer = keys(file).set_key(key, value);
    for info in file.tensors() {
        let tensor = file.tensor(&info.name).expect("listed");
        writer = writer.tensor(&info.name, &info.dims, info.ty, tensor.bytes().to_vec());
    }
    write(&writer)
}

/// A file and the folder it lives in.
pub(crate) type Rewritten = (tempfile::TempDir, GgufFile);

fn keys(file: &GgufFile) -> GgufWriter {
    file.metadata().iter().fold(GgufWriter::new(), |writer, (key, value)| writer.key(key, value.clone()))
}

pub(crate) fn write(writer: &GgufWriter) -> Rewritten {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("rewritten.gguf");
    writer.write_to(&path).expect("written");
    let file = GgufFile::open(&path).expect("valid");
    (dir, file)
}

pub(crate) fn load(file: GgufFile) -> Result<Model, String> {
    let arch = Architecture::of(&file).map_err(|e| e.to_string())?;
    let hparams = HParams::read(&file, arch.name).map_err(|e| e.to_string())?;
    Model::build(file, arch, hparams).map_err(|e| e.to_string())
}
