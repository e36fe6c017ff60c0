//! A model in an executor, and caches beside it: one executor runs steps over caches of any codecs.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use opencoti_compute::cpu::executor::{AttentionKernels, Config, Executor, Outputs as Results};
use opencoti_kv::{BatchItem, Cache, CacheConfig, Outputs, SeqId, StateConfig};
use opencoti_model::demands::Demands;
use opencoti_model::{LoadOptions, Model};
use opencoti_registry::Registry;

use super::codecs::Pair;
use crate::settings::Settings;
use crate::{boot, channels, kv};

/// Runs steps of a model.
pub struct Rig {
    /// The model.
    pub model: Model,
    /// Seconds from opening the file to being ready for a step.
    pub load_seconds: f64,
    executor: Executor,
    step_tokens: usize,
}

/// Sizes of a rig.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// Most rows of a step.
    pub rows: usize,
    /// Most rows of a step that have logits.
    pub outputs: usize,
    /// Longest sequence, in tokens.
    pub context: usize,
}

impl Rig {
    /// Loads the settings' model; `kernels` makes its attention.
    ///
    /// # Errors
    /// No model, one that can't be loaded, or one that generates no text.
    pub fn load(
        settings: &Settings,
        size: Size,
        kernels: impl FnOnce(&Model) -> Box<dyn AttentionKernels>,
    ) -> Result<Rig> {
        let path = settings.model.as_deref().context("no model is set; give `--model FILE`")?;
        let start = Instant::now();
        let model = open(settings, path, size.context)?;
        let config = Config { threads: boot::threads(settings), max_rows: size.rows, max_outputs: size.outputs };
        let executor = Executor::new(model.graph.clone(), model.weights.clone(), kernels(&model), config)?;
        // What products need of the weights is packed now.
        model.file.release();
        Ok(Rig { model, load_seconds: start.elapsed().as_secs_f64(), executor, step_tokens: size.rows })
    }

    /// Most rows of a step.
    pub fn step_tokens(&self) -> usize {
        self.step_tokens
    }

    /// Bytes of weights that a single token's step reads.
    pub fn weight_bytes(&self) -> f64 {
        Demands::of(&self.model.graph, &self.model.weights).step_bytes(1)
    }

    /// A cache in a pair of codecs, for `sequences` at once that hold `tokens` together.
    ///
    /// # Errors
    /// Codecs that don't exist or can't store this model; too little memory.
    pub fn cache(&self, pair: &Pair, registry: &Registry, tokens: usize, sequences: usize) -> Result<Cache> {
        let config = CacheConfig {
            groups: kv::groups(&pair.settings, registry, &self.model.graph)?,
            capacity_tokens: tokens,
            slots: sequences,
            window_sequences: None,
            recent_sequences: 0,
            step_tokens: self.step_tokens,
            rollback_tokens: 1,
            whole_texts: false,
            snapshots: 0,
            states: StateConfig::of(&self.model.graph),
        };
        let mut cache = Cache::new(config)?;
        channels::Prepared::read(&pair.settings, &self.model)?.apply(&mut cache)?;
        Ok(cache)
    }

    /// Runs a step; its results live until the next.
    ///
    /// # Errors
    /// No room in the cache, or a codec that failed.
    pub fn step(&mut self, cache: &mut Cache, batch: &[BatchItem<'_>]) -> Result<Results<'_>> {
        let planned = cache.plan(batch)?;
        match self.executor.run(&planned.step) {
            Ok(results) => {
                cache.commit(planned.id)?;
                Ok(results)
            }
            Err(error) => {
                cache.abort(planned.id)?;
                Err(error.into())
            }
        }
    }

    /// Lets a sequence go on with tokens of which no result is wanted, in steps as large as they may be.
    ///
    /// # Errors
    /// As for [`Rig::step`].
    pub fn fill(&mut self, cache: &mut Cache, seq: SeqId, tokens: &[u32]) -> Result<()> {
        self.feed(cache, seq, tokens, Outputs::None)
    }

    /// As [`Rig::fill`], with an outcome of every token, so that each takes part in the last layer's attention, too.
    ///
    /// # Errors
    /// As for [`Rig::step`].
    pub fn fill_with_outputs(&mut self, cache: &mut Cache, seq: SeqId, tokens: &[u32]) -> Result<()> {
        self.feed(cache, seq, tokens, Outputs::Hidden)
    }

    fn feed(&mut self, cache: &mut Cache, seq: SeqId, tokens: &[u32], outputs: Outputs) -> Result<()> {
        for part in tokens.chunks(self.step_tokens) {
            self.step(cache, &[BatchItem { seq, tokens: part, outputs }])?;
        }
        Ok(())
    }
}

fn open(settings: &Settings, path: &Path, context: usize) -> Result<Model> {
    let options = LoadOptions { repeat_layers: settings.repeat_layers.clone(), context: Some(context) };
    let model = Model::load_with(path, &options, |_| {})?;
    if model.graph.bidirectional || model.graph.logits.is_none() {
        bail!("{} is an encoder ({}), expected a model that generates text", path.display(), model.architecture);
    }
    Ok(model)
}
