//! From settings to a running engine. Everything that can be refused is refused here, before a request is taken.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use opencoti_compute::cpu::matmul::{Precision, precision};
use opencoti_compute::quant::WeightType;
use opencoti_engine::admission::AdmissionDecider;
use opencoti_engine::api::{EngineHandle, EngineInfo, Pooling, Ranking};
use opencoti_engine::engine::{Elastic, EngineConfig, EngineParts, ModelKind, spawn};
use opencoti_engine::sampling::SamplingParams;
use opencoti_engine::{StepBudget, vocab::Vocab};
use opencoti_kv::{Cache, CacheConfig, GroupConfig, StateConfig, StoreSize};
use opencoti_model::chat::{ChatTemplate, default_template};
use opencoti_model::hparams::PoolingType;
use opencoti_model::{LoadOptions, Model};
use opencoti_plugin_api::PAGE_TOKENS;
use opencoti_plugin_api::residency::{self, EVENT_START, GroupState};
use opencoti_registry::Registry;

use crate::device::Device;
use crate::settings::{PoolingChoice, Settings};
use crate::{channels, fingerprint, kv, memory};

/// Texts of an encoder for each of which the cache has a page, so that short ones run together.
const ENCODER_TEXTS: usize = 64;

/// Context taken from a model that was trained for more, when the settings say nothing.
const DEFAULT_CTX: u32 = 8192;

/// A model with everything around it, ready to start.
pub struct Prepared {
    model: Model,
    template: Arc<ChatTemplate>,
    cache: CacheConfig,
    channels: channels::Prepared,
    /// What people should know.
    pub summary: Summary,
    n_ctx: u32,
    name: String,
    template_source: String,
    budget: StepBudget,
    pooling: Pooling,
    device: Device,
}

/// The facts of a start, in the order they are shown.
#[derive(Debug, Default)]
pub struct Summary(pub Vec<(&'static str, String)>);

impl Summary {
    fn add(&mut self, what: &'static str, text: impl Into<String>) {
        self.0.push((what, text.into()));
    }
}

impl std::fmt::Display for Summary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (what, text) in &self.0 {
            writeln!(f, "  {what:<14} {text}")?;
        }
        Ok(())
    }
}

/// Loads and checks everything but the memory.
pub fn prepare(settings: &Settings, registry: &Registry, progress: impl FnMut(f32)) -> Result<Prepared> {
    let path = settings.model.as_deref().context("no model is set; give `--model FILE` or `model.path`")?;
    let options =
        LoadOptions { repeat_layers: settings.repeat_layers.clone(), context: Some(asked_context(settings) as usize) };
    let model = load_model(path, &options, progress)?;
    let (template, template_source) = template(settings, &model)?;
    let n_ctx = slot_context(settings, context(settings, &model)?)?;
    let device = Device::find(settings)?;
    let cache = cache_config(settings, registry, &model, n_ctx, &device)?;
    let channels = channels::Prepared::read(settings, &model)?;

    let name = model.name.clone().unwrap_or_else(|| file_stem(path));
    let mut prepared = Prepared {
        budget: step_budget(settings, &model, n_ctx),
        pooling: pooling(settings, &model)?,
        model,
        template: Arc::new(template),
        cache,
        channels,
        summary: Summary::default(),
        n_ctx,
        name,
        template_source,
        device,
    };
    prepared.summary = summary(&prepared, settings, registry)?;
    Ok(prepared)
}

/// What is said at the start.
fn summary(prepared: &Prepared, settings: &Settings, registry: &Registry) -> Result<Summary> {
    let Prepared { model, cache, n_ctx, name, .. } = prepared;
    let mut summary = Summary::default();
    let sizes = &model.sizes;
    summary.add(
        "model",
        format!(
            "{name} ({}, {}, {:.1} M weights, {})",
            model.architecture,
            sizes.file_type,
            sizes.parameters as f64 / 1e6,
            memory::show(sizes.tensor_bytes as f64)
        ),
    );
    add_repeated_layers(&mut summary, model);
    add_slow_weights(&mut summary, model);
    summary.add(
        "context",
        format!(
            "{n_ctx} tokens a sequence (trained for {}), {} slots, {} tokens of cache",
            model.hparams.context_length, settings.parallel, cache.capacity_tokens
        ),
    );
    for group in &cache.groups {
        add_cache_group(&mut summary, group);
    }
    if !prepared.channels.name().is_empty() {
        summary.add("channels", prepared.channels.name());
    }
    add_memory(&mut summary, cache)?;
    let residency = registry.residency().map(|policy| policy.instance().name().to_owned());
    summary
        .add("residency", residency.unwrap_or_else(|| "none listed: every page stays resident, unchecked".to_owned()));
    let admission = registry.admission().map(|policy| policy.instance().name().to_owned());
    summary.add("admission", admission.unwrap_or_else(|| "none listed: the built-in rule decides".to_owned()));
    summary.add("chat template", prepared.template_source.clone());
    summary.add("embeddings", embeddings_line(prepared.pooling, ranking(settings, &prepared.model)));
    add_output_forms(&mut summary, &prepared.template);
    summary.add("device", prepared.device.line.clone());
    summary.add("threads", threads(settings).to_string());
    Ok(summary)
}

/// Quantised types without kernels of their own: their products are computed in f32.
fn add_slow_weights(summary: &mut Summary, model: &Model) {
    let slow = |ty: WeightType| !ty.is_float() && precision(ty) == Precision::Float;
    let mut types: Vec<&str> =
        model.weights.iter().map(|w| w.ty()).filter(|ty| slow(*ty)).map(|ty| ty.name()).collect();
    types.sort_unstable();
    types.dedup();
    if !types.is_empty() {
        let text = format!(
            "weights of type {} have no packed kernels; they are brought to f32 in every product",
            types.join(", ")
        );
        summary.add("slower", text);
    }
}

/// Blocks that run twice, with a warning about those that rarely do good.
fn add_repeated_layers(summary: &mut Summary, model: &Model) {
    let (plan, blocks) = (&model.hparams.repeat, model.hparams.block_count);
    if plan.is_empty() {
        return;
    }
    summary.add("layers", format!("{} from {blocks} blocks; {plan} run twice", model.hparams.passes().count()));
    let outer = plan.at_the_boundary(blocks);
    if !outer.is_empty() {
        summary.add("warning", format!("repeating {outer} touches the first or last blocks, which rarely does good"));
    }
}

/// How calls and thoughts are told apart from the answer.
fn add_output_forms(summary: &mut Summary, template: &ChatTemplate) {
    let found = template.capabilities();
    let calls = match found.call_syntax.filter(|_| found.native_tools()) {
        Some(syntax) => format!("in the form `{}`, found in the template", syntax.name()),
        None => "in the form `hermes`, told in words: the template shows no complete form of its own".to_owned(),
    };
    summary.add("tool calls", calls);
    if let Some(syntax) = found.thought_syntax {
        let (open, close) = syntax.markers();
        summary.add("thoughts", format!("between {open} and {close}"));
    }
}

fn add_cache_group(summary: &mut Summary, group: &GroupConfig) {
    let window = group.geometry.window.map_or(String::new(), |w| format!(", window {w}"));
    summary.add(
        "cache",
        format!(
            "{}: {} layers{window}, K {}, V {}, {} a token{}",
            group.name,
            group.n_layers,
            kv::codec_label(&group.k),
            kv::codec_label(&group.v),
            memory::show(kv::bytes_per_token(group)),
            kv::stage_label(group)
        ),
    );
    for codec in [&group.k, &group.v].into_iter().filter(|codec| codec.cpu_tiles().is_none()) {
        let text = format!("codec {} has no CPU tiles; its tiles are decoded before they are read", codec.name());
        summary.add("slower", text);
    }
}

/// Recurrent state, for a model that has any, and what all of the cache takes.
fn add_memory(summary: &mut Summary, cache: &CacheConfig) -> Result<()> {
    let size = cache.state_size()?;
    if size.n_planes > 0 {
        let text = format!(
            "{} recurrent layers, {} a sequence, {} planes for what runs and {} for snapshots and ended sequences, {}",
            cache.states.layers.len(),
            memory::show(size.plane_bytes as f64),
            size.n_planes - cache.states.idle_planes,
            cache.states.idle_planes,
            memory::show(size.bytes() as f64)
        );
        summary.add("state", text);
    }
    if let Some(warning) = snapshot_warning(cache) {
        summary.add("warning", warning);
    }
    summary.add("cache total", memory::show(cache.bytes()? as f64));
    Ok(())
}

/// What a user should know who keeps no snapshots although the model can't be shared without them.
fn snapshot_warning(cache: &CacheConfig) -> Option<String> {
    let recurrent = !cache.states.layers.is_empty();
    let windowed = cache.groups.iter().any(|group| group.geometry.window.is_some());
    let kind = match (recurrent, windowed) {
        (true, _) if cache.snapshots == 0 || cache.states.idle_planes == 0 => "recurrent layers",
        (false, true) if cache.snapshots == 0 && cache.recent_sequences > 0 => "sliding windows",
        _ => return None,
    };
    Some(format!(
        "no snapshots are kept, so that a model with {kind} computes prompts again which it could have shared; raise \
         `kv.snapshots` or `kv.budget`"
    ))
}

fn load_model(path: &Path, options: &LoadOptions, mut progress: impl FnMut(f32)) -> Result<Model> {
    use opencoti_model::LoadStage;
    let stage = |stage| match stage {
        LoadStage::Reading => 0.1,
        LoadStage::Building => 0.3,
        LoadStage::Done => 0.6,
    };
    Ok(Model::load_with(path, options, |s| progress(stage(s)))?)
}

fn file_stem(path: &Path) -> String {
    path.file_stem().map_or_else(|| "model".to_owned(), |s| s.to_string_lossy().into_owned())
}

/// The template and where it comes from.
fn template(settings: &Settings, model: &Model) -> Result<(ChatTemplate, String)> {
    let tokenizer = &*model.tokenizer;
    let token = |id: Option<u32>| id.and_then(|id| tokenizer.token_text(id)).unwrap_or("").to_owned();
    let (bos, eos) = (token(tokenizer.bos()), token(tokenizer.eos()));
    let (source, origin) = if let Some(file) = &settings.chat_template_file {
        let source = std::fs::read_to_string(file)
            .with_context(|| format!("the chat template {} can't be read", file.display()))?;
        (source, file.display().to_string())
    } else if let Some(source) = &model.chat_templates.default {
        (source.clone(), "model file".to_owned())
    } else if model.graph.bidirectional {
        // Never rendered into anything: an encoder generates nothing.
        ("{{ messages[-1].content }}".to_owned(), "none (the model is an encoder, it generates no text)".to_owned())
    } else if let Some((name, source)) = default_template(model.architecture, tokenizer) {
        (source.to_owned(), format!("{name} (the default of {}; the model file has none)", model.architecture))
    } else {
        bail!(
            "the model has no chat template and architecture {} has no default; give one with `--chat-template-file`",
            model.architecture
        );
    };
    let template = ChatTemplate::new(&source, &bos, &eos).with_context(|| format!("chat template from {origin}"))?;
    Ok((template, origin))
}

/// The context that is asked for, which a model may not reach.
fn asked_context(settings: &Settings) -> u32 {
    if settings.ctx_size == 0 { DEFAULT_CTX } else { settings.ctx_size }
}

fn context(settings: &Settings, model: &Model) -> Result<u32> {
    let trained = u32::try_from(model.hparams.context_length).unwrap_or(u32::MAX);
    match settings.ctx_size {
        0 => Ok(trained.min(asked_context(settings))),
        asked if asked <= trained => Ok(asked),
        asked => bail!("`engine.ctx_size` is {asked}, but the model was trained for {trained} tokens; lower it"),
    }
}

/// The context of a sequence: with cells of its own, no more than its part of them.
fn slot_context(settings: &Settings, n_ctx: u32) -> Result<u32> {
    if settings.kv_unified {
        return Ok(n_ctx);
    }
    if settings.max_parallel > settings.parallel {
        bail!(
            "`engine.max_parallel` is {}, but slots with cells of their own can't be opened later; set `kv.unified` or \
             leave it out",
            settings.max_parallel
        );
    }
    match settings.kv_tokens.checked_div(settings.parallel).unwrap_or(0) {
        0 if settings.kv_tokens > 0 => bail!("`kv.tokens` is {}, less than one a slot; raise it", settings.kv_tokens),
        0 => Ok(n_ctx),
        part => Ok(n_ctx.min(part)),
    }
}

/// Cells with which no slot can take another's: a context for each slot, for embeddings and for each pool, with what forks waste
/// in the page that they cut short and the one in which they go on.
fn own_cells(config: &CacheConfig, n_ctx: u32, budget: u64) -> Result<usize> {
    let each = (n_ctx as usize).next_multiple_of(PAGE_TOKENS) + 2 * PAGE_TOKENS;
    let wanted = each.saturating_mul(config.slots);
    let fits = fitting(config, wanted, budget)?;
    if fits < wanted {
        bail!(
            "a context of {n_ctx} tokens for each of {} sequences takes {wanted} tokens of cache, but `kv.budget` holds {fits}; \
             lower `engine.ctx_size`, or set `kv.unified`",
            config.slots
        );
    }
    Ok(wanted)
}

fn cache_config(
    settings: &Settings,
    registry: &Registry,
    model: &Model,
    n_ctx: u32,
    device: &Device,
) -> Result<CacheConfig> {
    if settings.parallel == 0 || settings.batch_size == 0 {
        bail!("`engine.parallel` and `engine.batch_size` must be at least 1");
    }
    let budget = match settings.kv_budget.0 {
        0 => {
            let host = || memory::available().map_or(u64::MAX, |bytes| bytes / 2);
            device.cache_budget(model).unwrap_or_else(host)
        }
        bytes => bytes,
    };
    if settings.n_predict < -1 {
        bail!("`engine.n_predict` is {}, expected -1 for no bound, or a number of tokens", settings.n_predict);
    }
    let whole_texts = model.graph.bidirectional;
    let mut config = CacheConfig {
        groups: kv::groups(settings, registry, &model.graph)?,
        capacity_tokens: 0,
        // One more than the engine's, for embeddings; a pool holds one, too.
        slots: settings.slots() as usize + 1 + settings.max_pools as usize,
        window_sequences: (settings.swa_seq_budget > 0).then_some(settings.swa_seq_budget as usize),
        recent_sequences: settings.retain as usize,
        step_tokens: step_budget(settings, model, n_ctx).n_batch,
        rollback_tokens: 1,
        whole_texts,
        // Nothing is kept of what has ended, if nothing is to be.
        snapshots: if settings.retain == 0 { 0 } else { settings.snapshots as usize },
        states: StateConfig::of(&model.graph),
    };
    config.states.idle_planes = idle_planes(&config, budget)?;
    let texts = if whole_texts { ENCODER_TEXTS * PAGE_TOKENS } else { 0 };
    let wanted = texts.max(n_ctx as usize * settings.parallel as usize);
    config.capacity_tokens = match settings.kv_tokens {
        _ if !settings.kv_unified && !whole_texts => own_cells(&config, n_ctx, budget)?,
        0 => fitting(&config, wanted, budget)?,
        tokens => tokens as usize,
    };
    check_residency(registry, &config, budget)?;
    Ok(config)
}

/// Planes of recurrent state for snapshots, and for the sequence that ran last in each slot, but no more than half of the
/// budget holds.
fn idle_planes(config: &CacheConfig, budget: u64) -> Result<usize> {
    let least = config.state_size()?;
    if least.plane_bytes == 0 {
        return Ok(0);
    }
    if least.bytes() > budget {
        bail!(
            "the recurrent state of {} sequences takes {}, more than the budget of {}; choose fewer slots or a larger \
             `kv.budget`",
            config.slots,
            memory::show(least.bytes() as f64),
            memory::show(budget as f64)
        );
    }
    let room = (budget / 2).saturating_sub(least.bytes()) / least.plane_bytes as u64;
    let ended = config.recent_sequences.min(config.slots);
    Ok((config.snapshots + ended).min(usize::try_from(room).unwrap_or(usize::MAX)))
}

/// As many tokens as wanted, or as many as the budget holds.
fn fitting(config: &CacheConfig, wanted: usize, budget: u64) -> Result<usize> {
    let size =
        |tokens: usize| -> Result<u64> { Ok(CacheConfig { capacity_tokens: tokens, ..config.clone() }.bytes()?) };
    if size(wanted)? <= budget {
        return Ok(wanted);
    }
    let (mut fits, mut too_many) = (0, wanted);
    while too_many - fits > 128 {
        let middle = fits + (too_many - fits) / 2;
        if size(middle.max(1))? <= budget { fits = middle } else { too_many = middle }
    }
    match fits {
        0 => bail!(
            "the KV cache of {wanted} tokens takes {} and not even a page fits the budget of {}; choose smaller codecs, \
             fewer slots or a larger `kv.budget`",
            memory::show(size(wanted)? as f64),
            memory::show(budget as f64)
        ),
        tokens => Ok(tokens),
    }
}

/// Asks the residency policy whether the cache may be as large as configured.
fn check_residency(registry: &Registry, config: &CacheConfig, budget: u64) -> Result<()> {
    let Some(policy) = registry.residency() else { return Ok(()) };
    let sizes = config.sizes()?;
    let groups: Vec<GroupState> = config
        .groups
        .iter()
        .zip(&sizes)
        .map(|(group, size)| GroupState {
            page_bytes: size.page_bytes as u64,
            pages_total: size.n_pages as u64,
            pages_used: 0,
            layers: group.n_layers as u32,
            window: group.geometry.window.unwrap_or(0) as u32,
        })
        .collect();
    let decision = policy.plan(&residency::Snapshot {
        event: EVENT_START,
        groups: &groups,
        // Exact tokens and recurrent state stay where they are.
        device_budget: sizes
            .iter()
            .map(StoreSize::stage_bytes)
            .fold(budget.saturating_sub(config.state_size()?.bytes()), u64::saturating_sub),
        host_budget: 0,
        link_bytes_per_second: 0.0,
    });
    let decision = decision.with_context(|| format!("residency policy `{}`", policy.instance().name()))?;
    for (group, (state, resident)) in config.groups.iter().zip(groups.iter().zip(&decision.device_pages)) {
        if *resident < state.pages_total {
            bail!(
                "residency policy `{}` keeps {resident} of the {} pages of `{}`, but the CPU executor reads every page \
                 where it is; lower `kv.tokens` or list another policy",
                policy.instance().name(),
                state.pages_total,
                group.name
            );
        }
    }
    Ok(())
}

/// Sizes of a step. While answers run, prompts get at most an eighth of it, so that a token never waits for a long one. A step
/// of an encoder holds the longest text as a whole.
pub fn step_budget(settings: &Settings, model: &Model, n_ctx: u32) -> StepBudget {
    let n_batch = (settings.batch_size as usize).max(settings.slots() as usize + 1);
    if model.graph.bidirectional {
        let n_batch = n_batch.max(n_ctx as usize);
        return StepBudget { n_batch, prefill_chunk: n_batch, max_outputs: n_batch };
    }
    let prefill_chunk = (n_batch / 8).max(1);
    // Logits of a large vocabulary are large: rows with outputs are bounded.
    let max_outputs = n_batch.min(64).max(settings.slots() as usize + 1);
    StepBudget { n_batch, prefill_chunk, max_outputs }
}

/// The pooling that the settings ask for, or the model's own.
fn pooling(settings: &Settings, model: &Model) -> Result<Pooling> {
    match settings.pooling {
        PoolingChoice::Rank if kind(model) != ModelKind::Ranker => {
            bail!(
                "`model.pooling` is rank, but the model has no head that scores texts; choose mean, cls, last or none"
            )
        }
        PoolingChoice::Rank => Ok(Pooling::Rank),
        PoolingChoice::Mean => Ok(Pooling::Mean),
        PoolingChoice::Last => Ok(Pooling::Last),
        PoolingChoice::Cls => Ok(Pooling::Cls),
        PoolingChoice::None => Ok(Pooling::None),
        PoolingChoice::Auto => Ok(match model.hparams.pooling {
            None | Some(PoolingType::Mean) => Pooling::Mean,
            Some(PoolingType::None) => Pooling::None,
            Some(PoolingType::Cls) => Pooling::Cls,
            Some(PoolingType::Last) => Pooling::Last,
            Some(PoolingType::Rank) if kind(model) == ModelKind::Ranker => Pooling::Rank,
            Some(PoolingType::Rank) => bail!(
                "the model file asks to pool by rank, but {} has no head that scores texts here; give another `model.pooling`",
                model.architecture
            ),
        }),
    }
}

fn kind(model: &Model) -> ModelKind {
    match (model.graph.bidirectional, model.graph.logits) {
        (false, _) => ModelKind::Generator,
        (true, None) => ModelKind::Encoder,
        (true, Some(_)) => ModelKind::Ranker,
    }
}

/// By a head if there is one with a single score; by embeddings if the model, or who starts it, says how they are pooled.
fn ranking(settings: &Settings, model: &Model) -> Ranking {
    let scores = model.graph.logits.map(|scores| model.graph.width(scores));
    let pools = model.hparams.pooling.is_some() || model.graph.bidirectional;
    match (kind(model), settings.pooling) {
        (ModelKind::Ranker, PoolingChoice::Auto | PoolingChoice::Rank) if scores == Some(1) => Ranking::Head,
        (ModelKind::Ranker, PoolingChoice::Auto | PoolingChoice::Rank) | (_, PoolingChoice::None) => Ranking::None,
        (_, PoolingChoice::Auto) if !pools || model.hparams.pooling == Some(PoolingType::None) => Ranking::None,
        _ => Ranking::Cosine,
    }
}

/// What people should know about embeddings and ranking.
fn embeddings_line(pooling: Pooling, ranking: Ranking) -> String {
    let pooled = match pooling {
        Pooling::Mean => "pooled by the mean",
        Pooling::Last => "pooled by the last token",
        Pooling::Cls => "pooled by the first token",
        Pooling::None => "one a token",
        Pooling::Rank => "none",
    };
    let ranked = match ranking {
        Ranking::Head => "/v1/rerank by the model's ranking head",
        Ranking::Cosine => "/v1/rerank by the cosine of embeddings",
        Ranking::None => "no /v1/rerank",
    };
    format!("{pooled}; {ranked}")
}

/// Compute threads.
pub fn threads(settings: &Settings) -> usize {
    match settings.threads {
        0 => std::thread::available_parallelism().map_or(1, usize::from),
        n => n as usize,
    }
}

impl Prepared {
    /// Takes the memory and starts the engine thread.
    pub fn start(self, settings: &Settings, registry: &Registry) -> Result<EngineHandle> {
        let budget = self.budget;
        let channels = self.channels.name();
        let runner = self.device.runner(settings, &self.model, &self.cache, channels, budget, threads(settings))?;
        // What products need of the weights is packed now, or on the card.
        self.model.file.release();
        let info = self.info(settings, registry);
        let mut cache = Cache::new(self.cache)?;
        self.channels.apply(&mut cache)?;
        let parts = EngineParts {
            config: EngineConfig {
                n_slots: settings.slots() as usize,
                open_slots: settings.parallel as usize,
                elastic: Elastic {
                    tps_floor: settings.max_parallel_tps_floor,
                    memory_reserve: settings.max_parallel_reserve.0,
                },
                reserve_context: !settings.kv_unified,
                n_ctx: self.n_ctx as usize,
                max_queue: settings.max_queue as usize,
                max_pools: settings.max_pools as usize,
                budget,
                pooling: self.pooling,
                model: kind(&self.model),
            },
            cache,
            runner,
            vocab: Arc::new(Vocab::from(self.model.tokenizer.as_ref())),
            model: fingerprint::of(&self.model, &self.name),
            admission: registry.admission().map(|p| Box::new(p.clone()) as Box<dyn AdmissionDecider>),
        };
        Ok(spawn(parts, Arc::new(info)).context("the engine thread could not be started")?.0)
    }

    fn info(&self, settings: &Settings, registry: &Registry) -> EngineInfo {
        let (model, path) = (&self.model, settings.model.as_deref().unwrap_or_else(|| Path::new("")));
        let codecs = self.cache.groups.first().map(|g| (kv::codec_label(&g.k), kv::codec_label(&g.v)));
        EngineInfo {
            model_alias: settings.alias.clone().unwrap_or_else(|| self.name.clone()),
            model_path: path.display().to_string(),
            architecture: model.architecture.to_owned(),
            file_type: model.sizes.file_type.to_string(),
            n_params: model.sizes.parameters,
            model_bytes: model.sizes.tensor_bytes,
            n_embd: model.hparams.embedding_length as u32,
            n_ctx_train: model.hparams.context_length as u32,
            n_ctx: self.n_ctx,
            n_slots: settings.slots(),
            kv_codecs: codecs.unwrap_or_default(),
            residency_policy: registry.residency().map(|policy| policy.instance().name().to_owned()),
            tokenizer: Arc::clone(&model.tokenizer),
            template: Arc::clone(&self.template),
            template_source: self.template_source.clone(),
            default_sampling: SamplingParams {
                temperature: settings.temperature,
                top_k: settings.top_k,
                top_p: settings.top_p,
                min_p: settings.min_p,
                repeat_penalty: settings.repeat_penalty,
                seed: settings.seed,
                ..SamplingParams::default()
            },
            default_n_predict: u32::try_from(settings.n_predict).ok(),
            max_queue: settings.max_queue,
            max_pools: settings.max_pools,
            kv_unified: settings.kv_unified,
            pooling: self.pooling,
            repeat_layers: Some(&model.hparams.repeat).filter(|plan| !plan.is_empty()).map(ToString::to_string),
            generates: !model.graph.bidirectional,
            ranking: ranking(settings, model),
        }
    }
}
