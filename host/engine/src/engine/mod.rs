//! The engine thread: commands in, steps, events out.
//!
//! One thread owns the model's runner, the cache and the slots; nothing here is locked. [`Engine::run`] is the whole
//! loop. Its parts: [`start`] takes requests from the queue into slots (prefix reuse, admission, reservation),
//! [`step`] composes, runs and delivers a step, [`snapshots`] says where a prompt is kept for others, [`end`] is how a choice leaves its slot, [`embed`] and [`manage`] serve
//! what is no generation, [`pools`] keeps prefixes for those who ask.

mod choice;
mod elastic;
mod embed;
mod end;
mod manage;
mod pools;
mod queue;
mod slots;
mod snapshots;
mod start;
mod step;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use opencoti_kv::{Cache, ModelFingerprint};
use tokio::sync::mpsc::error::TryRecvError;
use tokio::sync::{mpsc, oneshot};

use self::embed::EmbedJob;
use self::queue::Queue;
use self::slots::Slot;
use crate::admission::{AdmissionDecider, Gate};
use crate::api::{Command, EngineError, EngineHandle, EngineInfo, Pooling};
use crate::compiler::{Compiled, Compiler};
use crate::metrics::Meters;
use crate::pools::tree::Pools;
use crate::runner::StepRunner;
use crate::scheduler::StepBudget;
use crate::trace::Trace;
use crate::vocab::Vocab;

/// How long the thread sleeps when requests wait for something that no step brings about.
const IDLE_NAP: Duration = Duration::from_millis(2);

/// Sizes and limits of an engine.
#[derive(Debug, Clone, Copy)]
pub struct EngineConfig {
    /// Sequences that may run at once.
    pub n_slots: usize,
    /// Of these, how many run from the start; the others are opened when they are needed.
    pub open_slots: usize,
    /// When another one may be opened.
    pub elastic: Elastic,
    /// Every sequence has room for its whole context reserved, so that none can take another's.
    pub reserve_context: bool,
    /// Tokens that one sequence may hold.
    pub n_ctx: usize,
    /// Requests that may wait.
    pub max_queue: usize,
    /// Pools at a time; each needs a place among the cache's `slots`.
    pub max_pools: usize,
    /// Sizes of a step.
    pub budget: StepBudget,
    /// Pooling of embeddings where a request says nothing.
    pub pooling: Pooling,
    /// What the model does.
    pub model: ModelKind,
}

/// What must hold for another slot to be opened.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Elastic {
    /// Tokens a second that each sequence would still have; 0 for no bound.
    pub tps_floor: f32,
    /// Bytes of memory that are free on the machine.
    pub memory_reserve: u64,
}

/// What a model does with a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModelKind {
    /// Goes on with it, token by token.
    Generator,
    /// Reads it as a whole, in one step, and gives hidden states.
    Encoder,
    /// As an encoder, with a head that scores it.
    Ranker,
}

/// What an engine is made of.
pub struct EngineParts {
    /// Sizes and limits.
    pub config: EngineConfig,
    /// The cache; its `slots` must be at least one more than the engine's, for embeddings.
    pub cache: Cache,
    /// The model.
    pub runner: Box<dyn StepRunner>,
    /// The vocabulary.
    pub vocab: Arc<Vocab>,
    /// Which model it is, for the files of slots.
    pub model: ModelFingerprint,
    /// The admission policy; the built-in rule without one.
    pub admission: Option<Box<dyn AdmissionDecider>>,
}

/// Starts the engine thread.
pub fn spawn(parts: EngineParts, info: Arc<EngineInfo>) -> std::io::Result<(EngineHandle, JoinHandle<()>)> {
    let (commands, receiver) = mpsc::unbounded_channel();
    let mut engine = Engine::new(parts, receiver)?;
    let thread = std::thread::Builder::new().name("engine".to_owned()).spawn(move || engine.run())?;
    Ok((EngineHandle::new(commands, info), thread))
}

/// The engine. The runner stands apart from the rest, because its results are borrowed while they are delivered.
pub(crate) struct Engine {
    runner: Box<dyn StepRunner>,
    core: Core,
    commands: mpsc::UnboundedReceiver<Command>,
    compiled: mpsc::UnboundedReceiver<Compiled>,
}

pub(crate) struct Core {
    pub(crate) config: EngineConfig,
    pub(crate) cache: Cache,
    pub(crate) vocab: Arc<Vocab>,
    pub(crate) model: ModelFingerprint,
    pub(crate) gate: Gate,
    pub(crate) compiler: Compiler,
    pub(crate) queue: Queue,
    pub(crate) slots: Vec<Slot>,
    /// Slots that are open, the first ones.
    pub(crate) open: usize,
    /// When the machine's free memory was looked at last, and whether it would do.
    pub(crate) memory: Option<(Instant, bool)>,
    pub(crate) pools: Pools,
    pub(crate) embeds: VecDeque<EmbedJob>,
    pub(crate) meters: Meters,
    pub(crate) trace: Trace,
    /// Counts uses of slots.
    pub(crate) clock: u64,
    /// Counts steps.
    pub(crate) turn: usize,
    /// A copy of a row of logits, for the sampler to change.
    pub(crate) logits: Vec<f32>,
    /// Seconds of a step, a moving average; 0 before the first.
    pub(crate) step_seconds: f32,
    pub(crate) shutdown: Option<Shutdown>,
    /// Why no work is taken any more.
    pub(crate) closed: Option<EngineError>,
}

pub(crate) struct Shutdown {
    deadline: Instant,
    reply: Option<oneshot::Sender<()>>,
}

impl Engine {
    pub(crate) fn new(parts: EngineParts, commands: mpsc::UnboundedReceiver<Command>) -> std::io::Result<Self> {
        let (done, compiled) = mpsc::unbounded_channel();
        let compiler = Compiler::spawn(Arc::clone(&parts.vocab), done, |compiled| compiled)?;
        let core = Core {
            open: parts.config.open_slots.clamp(1, parts.config.n_slots.max(1)),
            memory: None,
            slots: (0..parts.config.n_slots).map(|_| Slot::default()).collect(),
            logits: vec![0.0; parts.vocab.len()],
            gate: Gate::new(parts.admission),
            queue: Queue::new(parts.config.max_queue),
            pools: Pools::new(parts.config.max_pools),
            meters: Meters::new(),
            trace: Trace::new(),
            config: parts.config,
            cache: parts.cache,
            vocab: parts.vocab,
            model: parts.model,
            compiler,
            embeds: VecDeque::new(),
            clock: 0,
            turn: 0,
            step_seconds: 0.0,
            shutdown: None,
            closed: None,
        };
        Ok(Self { runner: parts.runner, core, commands, compiled })
    }

    /// Serves until everybody who could send a command has gone, or a shutdown is done.
    pub(crate) fn run(&mut self) {
        while self.hear() {
            self.core.drop_departed();
            self.core.heed_quarantine();
            self.core.settle_pools();
            self.core.sweep_pools();
            self.core.start_waiting();
            if !self.step() && !self.core.is_idle() {
                std::thread::sleep(IDLE_NAP);
            }
            if self.core.is_shut_down() {
                break;
            }
        }
        self.core.end_all("the server is shutting down");
        self.core.drop_pools();
        if let Some(reply) = self.core.shutdown.take().and_then(|s| s.reply) {
            let _ = reply.send(());
        }
    }

    /// Takes all commands that have come; waits for one when there is nothing else to do. `false` when nobody is left
    /// who could send one.
    fn hear(&mut self) -> bool {
        while let Ok(compiled) = self.compiled.try_recv() {
            self.core.accept_compiled(compiled);
        }
        if self.core.is_idle() {
            match self.commands.blocking_recv() {
                Some(command) => self.core.obey(command, &mut *self.runner),
                None => return false,
            }
        }
        loop {
            match self.commands.try_recv() {
                Ok(command) => self.core.obey(command, &mut *self.runner),
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => return !self.core.is_idle(),
            }
        }
    }
}

impl Core {
    fn is_idle(&self) -> bool {
        !self.is_waiting() && !self.is_running() && self.shutdown.is_none()
    }

    fn is_waiting(&self) -> bool {
        !self.queue.is_empty() || !self.embeds.is_empty() || self.shutdown.is_some()
    }

    fn is_running(&self) -> bool {
        self.slots.iter().any(|s| s.choice.is_some())
    }

    fn is_shut_down(&self) -> bool {
        let drained = !self.is_running() && self.queue.is_empty() && self.embeds.is_empty();
        self.shutdown.as_ref().is_some_and(|s| drained || Instant::now() >= s.deadline)
    }

    fn obey(&mut self, command: Command, runner: &mut dyn StepRunner) {
        match command {
            Command::Generate(id, request, events) => self.enqueue(id, *request, events),
            Command::Embed(request, reply) => self.enqueue_embed(request, reply),
            Command::Cancel(id, reply) => {
                let _ = reply.send(self.cancel(id));
            }
            Command::Slots(reply) => {
                let _ = reply.send(self.slot_infos());
            }
            Command::SaveSlot(slot, path, reply) => {
                let _ = reply.send(self.save_slot(slot, &path, runner));
            }
            Command::RestoreSlot(slot, path, reply) => {
                let _ = reply.send(self.restore_slot(slot, &path, runner));
            }
            Command::EraseSlot(slot, reply) => {
                let _ = reply.send(self.erase_slot(slot));
            }
            Command::Prefixes(reply) => drop(reply.send(self.cache.prefix_tree())),
            Command::Trace(reply) => drop(reply.send(self.trace.steps())),
            Command::Pool(command) => self.obey_about_pools(command),
            Command::Stats(reply) => {
                let _ = reply.send(self.stats());
            }
            Command::Shutdown(grace, reply) => {
                let why = EngineError::Unavailable("the server is shutting down".to_owned());
                self.shutdown = Some(Shutdown { deadline: Instant::now() + grace, reply: Some(reply) });
                self.refuse_queue(&why);
                self.closed = Some(why);
            }
        }
    }

    /// Next value of the count of uses.
    pub(crate) fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }
}
