//! Loading a model: from a path to everything the engine needs.

use std::collections::HashSet;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use opencoti_compute::graph::Graph;
use opencoti_compute::weights::Weight;

use crate::arch::Architecture;
use crate::error::ModelError;
use crate::file_type::FileType;
use crate::gguf::GgufFile;
use crate::hparams::HParams;
use crate::layer_plan::{RepeatLayers, RepeatLayersError};
use crate::tokenizer::Tokenizer;
use crate::{demands, safetensors, tokenizer_keys, weights};

/// A model ready for an executor.
#[derive(Clone)]
pub struct Model {
    /// Its family.
    pub architecture: &'static str,
    /// `general.name`, if the file has one.
    pub name: Option<String>,
    /// Sizes and constants.
    pub hparams: HParams,
    /// The operations.
    pub graph: Graph,
    /// What they work with, in the order of the graph's declarations; the bytes stay in the mapped file.
    pub weights: Vec<Weight>,
    /// Text to token ids and back; knows ids alone if the file has no vocabulary.
    pub tokenizer: Arc<Tokenizer>,
    /// Chat templates as the file carries them.
    pub chat_templates: ChatTemplates,
    /// How large it is.
    pub sizes: Sizes,
    /// The container, for whatever else a caller wants of it.
    pub file: GgufFile,
}

/// Jinja sources of the chat templates of a file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChatTemplates {
    /// `tokenizer.chat_template`; base models have none.
    pub default: Option<String>,
    /// Name and source of each `tokenizer.chat_template.NAME`, in file order.
    pub named: Vec<(String, String)>,
}

/// How large a model is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Elements of all tensors.
    pub parameters: u64,
    /// Bytes of all tensors.
    pub tensor_bytes: u64,
    /// Bytes of all files.
    pub file_bytes: u64,
    /// What the file was quantised to.
    pub file_type: FileType,
}

/// Stages of loading, for a progress display.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadStage {
    /// The headers are being read and checked.
    Reading,
    /// The graph is being built and every tensor checked.
    Building,
    /// All is there.
    Done,
}

/// How a model is loaded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoadOptions {
    /// Blocks that run twice.
    pub repeat_layers: RepeatLayers,
    /// Longest sequence that will be run, in tokens, if it is less than the model was trained for.
    pub context: Option<usize>,
}

impl Model {
    /// Loads a model from one file, from any part of a split one, or from a folder (see [`safetensors`]). Tensor data stays on disk until it
    /// is used.
    ///
    /// # Errors
    /// See [`ModelError`].
    pub fn load(path: &Path) -> Result<Model, ModelError> {
        Model::load_with(path, &LoadOptions::default(), |_| {})
    }

    /// As [`load`](Self::load), with options; `progress` is called at the start of each stage.
    ///
    /// # Errors
    /// See [`ModelError`]; also when the options do not suit the model.
    pub fn load_with(
        path: &Path,
        options: &LoadOptions,
        mut progress: impl FnMut(LoadStage),
    ) -> Result<Model, ModelError> {
        let model = Model::read(path, options, &mut progress)?;
        // Of these a token needs one row: reading all of them would push out of memory what every token needs.
        let lookups: HashSet<&str> = demands::lookups(&model.graph).collect();
        model.file.read_ahead(|tensor| lookups.contains(tensor));
        progress(LoadStage::Done);
        Ok(model)
    }

    /// As [`load_with`](Self::load_with) for one who wants to know about the model, not to run it: weights are not read.
    ///
    /// # Errors
    /// See [`ModelError`]; also when the options do not suit the model.
    pub fn inspect(path: &Path, options: &LoadOptions) -> Result<Model, ModelError> {
        Model::read(path, options, &mut |_| {})
    }

    fn read(path: &Path, options: &LoadOptions, progress: &mut dyn FnMut(LoadStage)) -> Result<Model, ModelError> {
        progress(LoadStage::Reading);
        let file = open(path)?;
        progress(LoadStage::Building);
        let architecture = Architecture::of(&file)?;
        let mut hparams = HParams::read(&file, architecture.name)?;
        hparams.serve(options.context.unwrap_or(usize::MAX));
        hparams.repeat = repeated(&file, architecture, &hparams, &options.repeat_layers)?;
        Model::build(file, architecture, hparams)
    }

    /// Builds a model from a file with the hyperparameters given, which need not be those of the file.
    ///
    /// # Errors
    /// A tensor is missing or does not fit `hparams`.
    pub fn build(file: GgufFile, architecture: &'static Architecture, hparams: HParams) -> Result<Model, ModelError> {
        let graph = architecture.build(&file, &hparams)?;
        Ok(Model {
            architecture: architecture.name,
            name: file.metadata().str("general.name")?.map(str::to_owned),
            weights: weights::bind(&graph, &file)?,
            tokenizer: Arc::new(tokenizer(&file, &hparams)?),
            chat_templates: ChatTemplates::read(&file)?,
            sizes: Sizes::of(&file)?,
            hparams,
            graph,
            file,
        })
    }
}

impl fmt::Debug for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Model { architecture, name, hparams, sizes, .. } = self;
        f.debug_struct("Model")
            .field("architecture", architecture)
            .field("name", name)
            .field("hparams", hparams)
            .field("sizes", sizes)
            .finish_non_exhaustive()
    }
}

/// The plan, if it suits the model.
fn repeated(
    file: &GgufFile,
    architecture: &'static Architecture,
    hparams: &HParams,
    plan: &RepeatLayers,
) -> Result<RepeatLayers, ModelError> {
    let checked = match plan.is_empty() || architecture.repeats {
        true => plan.check(hparams.block_count),
        false => Err(RepeatLayersError::Architecture { architecture: architecture.name }),
    };
    match checked {
        Ok(()) => Ok(plan.clone()),
        Err(source) => Err(ModelError::RepeatLayers { file: file.name().to_owned(), source }),
    }
}

/// Opens a GGUF file, or a folder with weights in safetensors.
fn open(path: &Path) -> Result<GgufFile, ModelError> {
    match path.is_dir() {
        true => Ok(safetensors::open_folder(path)?),
        false => Ok(GgufFile::open(path)?),
    }
}

fn tokenizer(file: &GgufFile, hparams: &HParams) -> Result<Tokenizer, ModelError> {
    let spec = tokenizer_keys::spec(file.metadata(), hparams.vocab_size)?;
    Tokenizer::new(spec).map_err(|source| ModelError::Tokenizer { file: file.name().to_owned(), source })
}

impl ChatTemplates {
    fn read(file: &GgufFile) -> Result<ChatTemplates, ModelError> {
        let meta = file.metadata();
        let mut named = Vec::new();
        for (key, _) in meta.iter() {
            if let Some(name) = key.strip_prefix("tokenizer.chat_template.")
                && let Some(source) = meta.str(key)?
            {
                named.push((name.to_owned(), source.to_owned()));
            }
        }
        Ok(ChatTemplates { default: meta.str("tokenizer.chat_template")?.map(str::to_owned), named })
    }
}

impl Sizes {
    fn of(file: &GgufFile) -> Result<Sizes, ModelError> {
        let sum = |f: fn(&crate::gguf::TensorInfo) -> usize| file.tensors().map(|t| f(t) as u64).sum();
        Ok(Sizes {
            parameters: sum(|t| t.elements()),
            tensor_bytes: sum(|t| t.range.len()),
            file_bytes: file.bytes_on_disk(),
            file_type: FileType::of(file)?,
        })
    }
}
