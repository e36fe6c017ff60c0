//! What the HTTP surfaces say to the engine and hear from it.
//!
//! One engine thread owns the scheduler, the pages and the executor. Everybody else holds an [`EngineHandle`]: requests
//! go in by a channel, events come out by one channel a request. Dropping the receiving end is how a client goes away:
//! the engine notices at its next step and frees the sequence. No JSON here; the surfaces translate.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

pub use opencoti_kv::PrefixNode;
use opencoti_model::chat::ChatTemplate;
use opencoti_model::tokenizer::Tokenizer;
use tokio::sync::{mpsc, oneshot};

use crate::pools::{Capacity, Capture, MakePool, PoolChange, PoolCommand, PoolId, PoolInfo, PoolList, Rates};
use crate::sampling::SamplingParams;
use crate::trace::StepTrace;

/// Identifies a request for as long as the server lives.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// How the output is constrained. Compiled before the request is queued; a failure is [`EngineError::Invalid`].
#[derive(Clone, Debug, PartialEq)]
pub enum Constraint {
    /// A GBNF grammar.
    Gbnf(String),
    /// A JSON schema; `true` or `{}` allows any JSON object's grammar as the schema says.
    JsonSchema(serde_json::Value),
    /// Any JSON object (`response_format: json_object`).
    JsonObject,
    /// A Lark grammar in llguidance's dialect (tool calls).
    Lark(String),
}

/// Why a field of the request named in an [`EngineError::Invalid`] is the one at fault: the field's path in the body.
pub type FieldPath = String;

/// A sequence whose beginning a request asks to share.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SharedSlot {
    /// The slot that runs it or ran it last.
    pub slot: u32,
    /// How many of its tokens.
    pub tokens: u32,
}

/// One generation request, already tokenised.
#[derive(Clone, Debug)]
pub struct GenerateRequest {
    /// Prompt tokens, including BOS where the model wants one. Not empty.
    pub prompt: Vec<u32>,
    /// Sampling.
    pub sampling: SamplingParams,
    /// Most tokens to generate; `None` until the end of the context or of the text; 0 = prefill only.
    pub n_predict: Option<u32>,
    /// Parallel continuations of the one prompt, at least 1; each has its own `index` in the events.
    pub n_choices: u32,
    /// Texts that end the generation; not returned.
    pub stop: Vec<String>,
    /// Constraint on the output.
    pub constraint: Option<Constraint>,
    /// Which body field the constraint came from, for errors (`json_schema`, `grammar`, `response_format`, `tools`).
    pub constraint_field: FieldPath,
    /// Pins a slot.
    pub id_slot: Option<u32>,
    /// Reuses cached prefixes.
    pub cache_prompt: bool,
    /// Session for slot affinity.
    pub session_id: Option<String>,
    /// Pool that the prompt begins with; as much of it is shared as the two have in common.
    pub pool: Option<PoolId>,
    /// Another sequence that the prompt begins with.
    pub shared_slot: Option<SharedSlot>,
    /// Makes a pool of the prompt; answered by [`Event::Pool`].
    pub make_pool: Option<MakePool>,
    /// Goes first of those that wait; equals in the order in which they came.
    pub priority: i32,
    /// Asks admission to let it in anyway.
    pub overcommit: bool,
    /// Minimal indentation of generated lines (native `n_indent`); 0 for off.
    pub n_indent: u32,
    /// Ends at a newline once so much time has gone into generating.
    pub t_max_predict: Option<Duration>,
    /// Sends [`Event::Progress`] during prefill.
    pub return_progress: bool,
    /// Whether special tokens appear in the text (tool-call markers are special tokens in some models).
    pub render_special: bool,
    /// Logprobs of the prompt's own tokens are wanted (OpenAI `echo` with `logprobs`); count as in `n_probs`.
    pub prompt_logprobs: Option<u32>,
    /// Gives up after so long in queue and work together.
    pub deadline: Option<Duration>,
}

/// A token with its log-probability (or probability, after sampling, when the request asked so).
#[derive(Clone, Debug, PartialEq)]
pub struct TokenProb {
    /// Token id.
    pub id: u32,
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// Natural logarithm before sampling, or the probability after the chain.
    pub value: f32,
}

/// The probabilities reported with one token.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenProbs {
    /// The token that was taken.
    pub token: TokenProb,
    /// The most probable ones, best first.
    pub top: Vec<TokenProb>,
}

/// Why a generation ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// An end-of-generation token (or the grammar allowed nothing more).
    Eos,
    /// `n_predict`, the context's end, or the time limit.
    Limit,
    /// A stop text.
    Word(String),
    /// The request only asked for prefill.
    None,
}

/// Times and counts of one choice. `prompt_n + cache_n` is the prompt's length.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Timings {
    /// Prompt tokens taken from the cache.
    pub cache_n: u32,
    /// Prompt tokens computed.
    pub prompt_n: u32,
    /// Milliseconds of prefill.
    pub prompt_ms: f64,
    /// Tokens generated.
    pub predicted_n: u32,
    /// Milliseconds of generation.
    pub predicted_ms: f64,
}

/// What comes back. Order for each index: `Started`, `Progress`*, `Token`*, then `Done`; or one `Failed` at any time,
/// which ends the whole request.
#[derive(Clone, Debug)]
pub enum Event {
    /// The request left the queue and holds a slot. A surface that streams sends its status line no earlier than the
    /// first event after this one, so that an early failure is still an ordinary HTTP error.
    Started {
        /// Choice.
        index: u32,
        /// Slot.
        id_slot: u32,
        /// What its client should know at once.
        notice: Notice,
    },
    /// Prefill so far.
    Progress {
        /// Choice.
        index: u32,
        /// Prompt tokens.
        total: u32,
        /// Of these, from the cache.
        cache: u32,
        /// Processed, cached ones included.
        processed: u32,
        /// Milliseconds since it started.
        time_ms: f64,
    },
    /// Log-probabilities of the prompt (asked for with `prompt_logprobs`): one entry a token, `None` for the first.
    PromptLogprobs {
        /// Choice.
        index: u32,
        /// One a prompt token.
        probs: Vec<Option<TokenProbs>>,
    },
    /// Text became certain. Never an incomplete UTF-8 sequence, never part of a stop text.
    Token {
        /// Choice.
        index: u32,
        /// New text; may be empty while something is held back.
        text: String,
        /// Tokens since the last event.
        tokens: Vec<u32>,
        /// Their probabilities, when asked for.
        probs: Vec<TokenProbs>,
        /// Times so far.
        timings: Timings,
    },
    /// The pool that was asked for is there; the end of the request.
    Pool(Box<PoolInfo>),
    /// The end of one choice.
    Done(Finish),
    /// The end of the request by an error.
    Failed(EngineError),
}

/// What is known of a request when it gets its slot.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Notice {
    /// What was short, a store or a pool, when admission let it in all the same.
    pub saturated: Option<String>,
    /// How many more sessions its pool may take, where that is enforced.
    pub sessions_remaining: Option<u32>,
    /// Tokens a second of its session so far; `None` before they are known.
    pub session_tps: Option<f32>,
}

/// The end of a choice.
#[derive(Clone, Debug)]
pub struct Finish {
    /// Choice.
    pub index: u32,
    /// Slot it ran in.
    pub id_slot: u32,
    /// Why it ended.
    pub reason: StopReason,
    /// Whether the context or the cache ended before the text did.
    pub truncated: bool,
    /// Whether the text has a newline.
    pub has_new_line: bool,
    /// Tokens in the cache at the end.
    pub tokens_cached: u32,
    /// Seed that was used (drawn when the request asked for a random one).
    pub seed: u64,
    /// Tokens a second of its session; 0 before they are known.
    pub session_tps: f32,
    /// Times.
    pub timings: Timings,
}

/// What an embeddings request wants of the hidden states.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// Mean over the tokens.
    Mean,
    /// The last token's.
    Last,
    /// The first token's.
    Cls,
    /// Every token's.
    None,
    /// The scores that the model's head gives the first token.
    Rank,
}

/// How texts are ranked by a query.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ranking {
    /// By the score that the model's head gives to query and text together.
    Head,
    /// By the cosine of their embeddings.
    Cosine,
    /// Not at all: the model is not known to embed texts.
    None,
}

/// One embeddings request: one input.
#[derive(Clone, Debug)]
pub struct EmbedRequest {
    /// Tokens; not empty.
    pub tokens: Vec<u32>,
    /// Pooling; `None` takes the model's own.
    pub pooling: Option<Pooling>,
    /// Where the second text begins, if the tokens are a pair of texts.
    pub second: Option<usize>,
}

/// Vectors of one input: one, or one a token without pooling, or the scores of a head. Not normalised.
#[derive(Clone, Debug)]
pub struct Embedding {
    /// The vectors.
    pub vectors: Vec<Vec<f32>>,
}

/// Errors by what the client can do about them. Messages are one sentence.
#[derive(Clone, Debug, thiserror::Error, PartialEq)]
pub enum EngineError {
    /// The request can't be served as written (400).
    #[error("{message}")]
    Invalid {
        /// Path of the field at fault in the body, when known.
        field: Option<FieldPath>,
        /// What was found and what was expected.
        message: String,
    },
    /// The prompt is longer than the context (400, `exceed_context_size_error`).
    #[error(
        "the request has {n_prompt_tokens} tokens and exceeds the available context size of {n_ctx}; shorten it or raise the context size"
    )]
    ExceedsContext {
        /// Tokens of the prompt.
        n_prompt_tokens: u32,
        /// Tokens of the context.
        n_ctx: u32,
    },
    /// Not now (429 with `Retry-After`).
    #[error("{message}")]
    Rejected {
        /// Whole seconds, at least 1.
        retry_after: u32,
        /// A short label for metrics: `kv`, `queue`, `policy`.
        reason: &'static str,
        /// The short store, what was asked, what is free.
        message: String,
    },
    /// The server can't serve now (503): shutting down, a plugin in quarantine.
    #[error("{0}")]
    Unavailable(String),
    /// This model or build can't (501).
    #[error("{0}")]
    Unsupported(String),
    /// No such slot, file, pool or request (404).
    #[error("{0}")]
    NotFound(String),
    /// The state of the server does not allow it (409).
    #[error("{0}")]
    Conflict(String),
    /// The request's deadline passed (408).
    #[error("{0}")]
    TimedOut(String),
    /// Our fault (500): the step failed, a plugin failed.
    #[error("{0}")]
    Internal(String),
}

/// A slot, as `GET /slots` shows it.
#[derive(Clone, Debug)]
pub struct SlotInfo {
    /// Its number.
    pub id: u32,
    /// Tokens its context may hold.
    pub n_ctx: u32,
    /// The request it runs, if any.
    pub task: Option<SlotTask>,
    /// Tokens cached for its last sequence.
    pub n_cached: u32,
    /// Session bound to it.
    pub session_id: Option<String>,
    /// Pool of that session.
    pub pool: Option<PoolId>,
    /// Tokens of its sequence that are those of the pool.
    pub n_pool_shared: u32,
}

/// What a slot is doing.
#[derive(Clone, Debug)]
pub struct SlotTask {
    /// Request.
    pub id: RequestId,
    /// Prompt tokens.
    pub n_prompt_tokens: u32,
    /// Processed so far.
    pub n_prompt_tokens_processed: u32,
    /// From the cache.
    pub n_prompt_tokens_cache: u32,
    /// Generated so far.
    pub n_decoded: u32,
    /// Still allowed; `None` without a bound.
    pub n_remain: Option<u32>,
    /// Whether a newline was generated.
    pub has_new_line: bool,
    /// Sampling of the request.
    pub sampling: SamplingParams,
}

/// Result of a slot's save, restore or erase.
#[derive(Clone, Debug)]
pub struct SlotFile {
    /// Tokens.
    pub n_tokens: u32,
    /// Bytes of the file; 0 for erase.
    pub n_bytes: u64,
    /// Milliseconds.
    pub ms: f64,
}

/// One store, for metrics and `/props`.
#[derive(Clone, Debug)]
pub struct StoreStats {
    /// `kv` or `swa`.
    pub name: String,
    /// Codec of the keys and of the values.
    pub codecs: (String, String),
    /// Layers that it serves.
    pub n_layers: u32,
    /// Token slots.
    pub cells_total: u64,
    /// Token slots whose memory is where the executor reads it.
    pub cells_resident: u64,
    /// In use, retained prefixes included.
    pub cells_used: u64,
    /// Used by more than one sequence.
    pub cells_shared: u64,
    /// Used only by retained prefixes.
    pub cells_reclaimable: u64,
    /// Bytes of the store, those of exact tokens included.
    pub bytes: u64,
    /// Slots of exact tokens; 0 without a stage.
    pub stage_cells: u64,
    /// Bytes of exact tokens.
    pub stage_bytes: u64,
    /// Whether the codecs of keys and values compute on their tiles; the tiles of others are decoded first.
    pub cpu_tiles: (bool, bool),
}

/// The store of recurrent state. A plane is the state of one sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StateStats {
    /// Recurrent layers.
    pub n_layers: u32,
    /// Bytes of a plane.
    pub plane_bytes: u64,
    /// Planes.
    pub planes_total: u64,
    /// In use, those of retained prefixes and snapshots included.
    pub planes_used: u64,
    /// Used by more than one sequence.
    pub planes_shared: u64,
    /// Used only by retained prefixes and snapshots.
    pub planes_reclaimable: u64,
}

/// Numbers of the moment.
#[derive(Clone, Debug, Default)]
pub struct Stats {
    /// The stores.
    pub stores: Vec<StoreStats>,
    /// Recurrent state; `None` for a model without recurrent layers.
    pub state: Option<StateStats>,
    /// Snapshots kept at positions of prompts.
    pub snapshots: u32,
    /// Requests in slots.
    pub processing: u32,
    /// Requests waiting.
    pub deferred: u32,
    /// Sequences kept for their prefix.
    pub retained: u32,
}

/// What never changes while the engine lives.
#[derive(Clone)]
pub struct EngineInfo {
    /// Name under which the model is served.
    pub model_alias: String,
    /// Path of the model file.
    pub model_path: String,
    /// Architecture.
    pub architecture: String,
    /// File type (`Q4_1`).
    pub file_type: String,
    /// Weights.
    pub n_params: u64,
    /// Bytes of the weights.
    pub model_bytes: u64,
    /// Width of an embedding.
    pub n_embd: u32,
    /// Context the model was trained for.
    pub n_ctx_train: u32,
    /// Tokens a sequence may hold.
    pub n_ctx: u32,
    /// Slots.
    pub n_slots: u32,
    /// Codec names of keys and values, with options.
    pub kv_codecs: (String, String),
    /// Plugin that decides which pages stay resident; `None` when nobody was asked.
    pub residency_policy: Option<String>,
    /// Tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// Chat template.
    pub template: Arc<ChatTemplate>,
    /// Where the template comes from: `model file`, `--chat-template-file`, or `default of <architecture>`.
    pub template_source: String,
    /// Sampling where a request says nothing.
    pub default_sampling: SamplingParams,
    /// Most tokens to generate where a request says nothing; `None` without a bound.
    pub default_n_predict: Option<u32>,
    /// Most requests that may wait.
    pub max_queue: u32,
    /// Most pools at a time; 0 when there are none.
    pub max_pools: u32,
    /// Whether sequences share all cells; otherwise each has its context reserved.
    pub kv_unified: bool,
    /// Pooling of embeddings where a request says nothing.
    pub pooling: Pooling,
    /// Blocks of the model that run twice; `None` if none do.
    pub repeat_layers: Option<String>,
    /// Whether the model generates text; encoders do not.
    pub generates: bool,
    /// How it ranks texts.
    pub ranking: Ranking,
}

/// What goes to the engine thread.
pub enum Command {
    /// Start a generation; events go to the sender until it is closed.
    Generate(RequestId, Box<GenerateRequest>, mpsc::UnboundedSender<Event>),
    /// Compute embeddings.
    Embed(EmbedRequest, oneshot::Sender<Result<Embedding, EngineError>>),
    /// Cancel a generation; answered with whether it was there.
    Cancel(RequestId, oneshot::Sender<bool>),
    /// Describe the slots.
    Slots(oneshot::Sender<Vec<SlotInfo>>),
    /// Save a slot's sequence.
    SaveSlot(u32, PathBuf, oneshot::Sender<Result<SlotFile, EngineError>>),
    /// Restore a slot's sequence.
    RestoreSlot(u32, PathBuf, oneshot::Sender<Result<SlotFile, EngineError>>),
    /// Drop a slot's sequence.
    EraseSlot(u32, oneshot::Sender<Result<SlotFile, EngineError>>),
    /// The prefixes that the cache holds.
    Prefixes(oneshot::Sender<Vec<PrefixNode>>),
    /// What the last steps did.
    Trace(oneshot::Sender<Vec<StepTrace>>),
    /// Make, show or change pools.
    Pool(PoolCommand),
    /// Numbers of the moment.
    Stats(oneshot::Sender<Stats>),
    /// Refuse new work, end what runs within the given time, then leave the thread.
    Shutdown(Duration, oneshot::Sender<()>),
}

/// Everybody's end of the engine. Cheap to clone.
#[derive(Clone)]
pub struct EngineHandle {
    commands: mpsc::UnboundedSender<Command>,
    info: Arc<EngineInfo>,
    next_id: Arc<AtomicU64>,
}

/// A running generation. Dropping it cancels.
pub struct Generation {
    /// For cancelling by id.
    pub id: RequestId,
    /// What comes back.
    pub events: mpsc::UnboundedReceiver<Event>,
}

fn gone() -> EngineError {
    EngineError::Unavailable("the engine has stopped; restart the server".to_owned())
}

impl EngineHandle {
    /// A handle over the commands' channel; used by the engine and by tests with an engine of their own.
    pub fn new(commands: mpsc::UnboundedSender<Command>, info: Arc<EngineInfo>) -> Self {
        EngineHandle { commands, info, next_id: Arc::new(AtomicU64::new(1)) }
    }

    /// Facts of the model and the engine.
    pub fn info(&self) -> &Arc<EngineInfo> {
        &self.info
    }

    /// Whether the engine thread lives.
    pub fn is_alive(&self) -> bool {
        !self.commands.is_closed()
    }

    /// Starts a generation.
    pub fn generate(&self, request: GenerateRequest) -> Result<Generation, EngineError> {
        let id = RequestId(self.next_id.fetch_add(1, Ordering::Relaxed));
        let (sender, events) = mpsc::unbounded_channel();
        self.send(Command::Generate(id, Box::new(request), sender))?;
        Ok(Generation { id, events })
    }

    /// Cancels a generation; `false` when it is not there (any more).
    pub async fn cancel(&self, id: RequestId) -> Result<bool, EngineError> {
        self.ask(|reply| Command::Cancel(id, reply)).await
    }

    /// Computes embeddings of one input.
    pub async fn embed(&self, request: EmbedRequest) -> Result<Embedding, EngineError> {
        self.ask(|reply| Command::Embed(request, reply)).await?
    }

    /// The slots.
    pub async fn slots(&self) -> Result<Vec<SlotInfo>, EngineError> {
        self.ask(Command::Slots).await
    }

    /// Saves a slot's sequence to a file.
    pub async fn save_slot(&self, slot: u32, path: PathBuf) -> Result<SlotFile, EngineError> {
        self.ask(|reply| Command::SaveSlot(slot, path, reply)).await?
    }

    /// Restores a slot's sequence from a file.
    pub async fn restore_slot(&self, slot: u32, path: PathBuf) -> Result<SlotFile, EngineError> {
        self.ask(|reply| Command::RestoreSlot(slot, path, reply)).await?
    }

    /// Drops a slot's sequence.
    pub async fn erase_slot(&self, slot: u32) -> Result<SlotFile, EngineError> {
        self.ask(|reply| Command::EraseSlot(slot, reply)).await?
    }

    /// Makes a pool of a request's prompt, which must have [`GenerateRequest::make_pool`].
    pub async fn make_pool(&self, request: GenerateRequest) -> Result<PoolInfo, EngineError> {
        let mut generation = self.generate(request)?;
        loop {
            match generation.events.recv().await {
                Some(Event::Pool(info)) => return Ok(*info),
                Some(Event::Failed(error)) => return Err(error),
                Some(_) => {}
                None => return Err(gone()),
            }
        }
    }

    /// Makes a pool of what a sequence has computed.
    pub async fn capture_pool(&self, capture: Capture) -> Result<PoolInfo, EngineError> {
        self.ask(|reply| Command::Pool(PoolCommand::Capture(capture, reply))).await?
    }

    /// All pools.
    pub async fn pools(&self) -> Result<PoolList, EngineError> {
        self.ask(|reply| Command::Pool(PoolCommand::List(reply))).await
    }

    /// One pool.
    pub async fn pool(&self, id: PoolId) -> Result<PoolInfo, EngineError> {
        self.ask(|reply| Command::Pool(PoolCommand::Get(id, reply))).await?
    }

    /// Changes a pool and shows it.
    pub async fn change_pool(&self, id: PoolId, change: PoolChange) -> Result<PoolInfo, EngineError> {
        self.ask(|reply| Command::Pool(PoolCommand::Change(id, change, reply))).await?
    }

    /// Whether a pool can take a session that will use so many tokens.
    pub async fn pool_capacity(&self, id: PoolId, expected: Option<u64>) -> Result<Capacity, EngineError> {
        self.ask(|reply| Command::Pool(PoolCommand::Capacity(id, expected, reply))).await?
    }

    /// The rates of all sessions.
    pub async fn rates(&self) -> Result<Rates, EngineError> {
        self.ask(|reply| Command::Pool(PoolCommand::Rates(reply))).await
    }

    /// The tree of prefixes that the cache holds.
    pub async fn prefixes(&self) -> Result<Vec<PrefixNode>, EngineError> {
        self.ask(Command::Prefixes).await
    }

    /// What the last steps did, oldest first.
    pub async fn trace(&self) -> Result<Vec<StepTrace>, EngineError> {
        self.ask(Command::Trace).await
    }

    /// Numbers of the moment.
    pub async fn stats(&self) -> Result<Stats, EngineError> {
        self.ask(Command::Stats).await
    }

    /// Stops the engine.
    pub async fn shutdown(&self, grace: Duration) -> Result<(), EngineError> {
        self.ask(|reply| Command::Shutdown(grace, reply)).await
    }

    fn send(&self, command: Command) -> Result<(), EngineError> {
        self.commands.send(command).map_err(|_| gone())
    }

    async fn ask<T>(&self, command: impl FnOnce(oneshot::Sender<T>) -> Command) -> Result<T, EngineError> {
        let (reply, answer) = oneshot::channel();
        self.send(command(reply))?;
        answer.await.map_err(|_| gone())
    }
}
