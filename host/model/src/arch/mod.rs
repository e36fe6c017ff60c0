//! Architectures: each is one file that turns hyperparameters and the tensors of a file into a graph.

mod bert;
mod block;
mod builder;
mod gemma2;
mod gemma3;
mod gemma4;
mod granite;
mod hybrid;
mod lfm2;
mod llama;
mod moe;
mod olmo2;
mod phi3;
mod qwen2;
mod qwen3;
mod qwen35;
mod qwen35moe;
mod qwen3moe;
mod qwen3next;
mod smollm3;
#[cfg(test)]
mod tests;

use opencoti_compute::graph::Graph;

use crate::error::ModelError;
use crate::gguf::GgufFile;
use crate::hparams::HParams;

/// A model family by its name in `general.architecture`.
#[derive(Debug)]
pub struct Architecture {
    /// The name.
    pub name: &'static str,
    /// Whether its blocks may run twice.
    pub repeats: bool,
    build: fn(&GgufFile, &HParams) -> Result<Graph, ModelError>,
}

/// By name.
static ARCHITECTURES: &[Architecture] = &[
    Architecture { name: "bert", repeats: false, build: bert::build },
    Architecture { name: "gemma2", repeats: true, build: gemma2::build },
    Architecture { name: "gemma3", repeats: true, build: gemma3::build },
    Architecture { name: "gemma4", repeats: true, build: gemma4::build },
    Architecture { name: "granite", repeats: true, build: granite::build },
    Architecture { name: "granitemoe", repeats: true, build: granite::build_experts },
    Architecture { name: "lfm2", repeats: true, build: lfm2::build },
    Architecture { name: "llama", repeats: true, build: llama::build },
    Architecture { name: "olmo2", repeats: true, build: olmo2::build },
    Architecture { name: "phi3", repeats: true, build: phi3::build },
    Architecture { name: "qwen2", repeats: true, build: qwen2::build },
    Architecture { name: "qwen3", repeats: true, build: qwen3::build },
    Architecture { name: "qwen35", repeats: true, build: qwen35::build },
    Architecture { name: "qwen35moe", repeats: true, build: qwen35moe::build },
    Architecture { name: "qwen3moe", repeats: true, build: qwen3moe::build },
    Architecture { name: "qwen3next", repeats: true, build: qwen3next::build },
    Architecture { name: "smollm3", repeats: true, build: smollm3::build },
];

impl Architecture {
    /// All architectures, by name.
    pub fn all() -> impl Iterator<Item = &'static Architecture> {
        ARCHITECTURES.iter()
    }

    /// The architecture that a file names.
    ///
    /// # Errors
    /// The key is missing, or names an architecture that is not built in.
    pub fn of(file: &GgufFile) -> Result<&'static Architecture, ModelError> {
        let meta = file.metadata();
        let key = "general.architecture";
        let found = meta.str(key)?.ok_or_else(|| meta.missing(key, "the name of an architecture"))?;
        Architecture::all().find(|a| a.name == found).ok_or_else(|| ModelError::UnknownArchitecture {
            file: file.name().to_owned(),
            found: found.to_owned(),
            known: Architecture::all().map(|a| a.name).collect::<Vec<_>>().join(", "),
        })
    }

    /// The graph over the tensors of `file`, all checked for presence and shape.
    ///
    /// # Errors
    /// A mandatory tensor is missing, has other dimensions than `hparams` say, or the file holds block tensors that the
    /// architecture has no use for.
    pub fn build(&self, file: &GgufFile, hparams: &HParams) -> Result<Graph, ModelError> {
        let graph = (self.build)(file, hparams)?;
        if let Some(causal) = hparams.causal.filter(|&causal| causal == graph.bidirectional) {
            let known = if graph.bidirectional { "reads texts in both directions" } else { "is causal" };
            let key = format!("{}.attention.causal", self.name);
            let detail = format!("is {causal}, but {} {known} here; this variant is not supported", self.name);
            return Err(ModelError::Key { file: file.name().to_owned(), key, detail });
        }
        Ok(graph)
    }
}
