//! Changed copies of the tiny models.

use opencoti_model::Model;
use opencoti_model::arch::Architecture;
use opencoti_model::gguf::GgufFile;
use opencoti_model::gguf::write::GgufWriter;
use opencoti_model::hparams::HParams;

/// A copy of a file with its tensors passed through `change`: name, dimensions and bytes in, the same (or others) out.
pub(crate) fn rewrite(
    file: &GgufFile,
    change: impl Fn(GgufWriter, &str) -> Option<GgufWriter>,
) -> (tempfile::TempDir, GgufFile) {
    let mut writer = GgufWriter::new();
    for (key, value) in file.metadata().iter() {
        writer = writer.key(key, value.clone());
    }
    for info in file.tensors() {
        let tensor = file.tensor(&info.name).expect("listed");
        writer = match change(writer.clone(), &info.name) {
            Some(changed) => changed,
            None => writer.tensor(&info.name, &info.dims, info.ty, tensor.bytes().to_vec()),
        };
    }
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
