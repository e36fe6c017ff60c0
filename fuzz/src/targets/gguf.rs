//! Model files: header, metadata, tensor table, hyperparameters and graph.

use std::path::Path;

use opencoti_model::gguf::Gguf;

use super::Target;

/// The target.
pub const TARGET: Target = Target { name: "gguf", seeds, run };

/// The tiny models of the parity tests, cut behind the tensor table so that mutations hit what is parsed.
fn seeds() -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../host/model/tests/fixtures");
    let mut seeds: Vec<Vec<u8>> = ["llama.gguf", "gemma3.gguf"]
        .iter()
        .filter_map(|name| std::fs::read(folder.join(name)).ok())
        .flat_map(|whole| [whole[..whole.len().min(6000)].to_vec(), whole])
        .collect();
    seeds.push(b"GGUF\x03\0\0\0".to_vec());
    seeds
}

fn run(input: &[u8]) -> String {
    match Gguf::parse(input, "input") {
        Err(e) => e.to_string(),
        Ok(gguf) => format!("{} keys, {} tensors", gguf.metadata.len(), gguf.tensors.len()),
    }
}
