//! An engine over a model that can be checked: its logits are a function of exactly the tokens a row may see.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc as std_mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use opencoti_compute::graph::{KvGeometry, StateGeometry};
use opencoti_compute::plan::{PageSet, Step};
use opencoti_kv::{Cache, CacheConfig, GroupConfig, ModelFingerprint, StateConfig};
use opencoti_plugin_api::conformance::reference;
use opencoti_plugin_api::host::Codec;
use opencoti_plugin_api::kv_codec::Side;
use tokio::sync::{mpsc, oneshot};

use crate::admission::AdmissionDecider;
use crate::api::{Command, EngineError, Event, Finish, GenerateRequest, Pooling, RequestId, TokenProbs};
use crate::engine::{Elastic, Engine, EngineConfig, EngineParts, ModelKind};
use crate::runner::{StepOutputs, StepRunner};
use crate::sampling::SamplingParams;
use crate::scheduler::StepBudget;
use crate::vocab::Vocab;

/// Letters a to z, space, newline, comma, and the end token.
pub(super) const N_VOCAB: usize = 30;
pub(super) const EOS: u32 = 29;

pub(super) fn vocab() -> Arc<Vocab> {
    let mut tokens: Vec<_> = (b'a'..=b'z').chain(*b" \n,").map(|b| (vec![b], false)).collect();
    tokens.push((b"<end>".to_vec(), true));
    Arc::new(Vocab::new(tokens, &[EOS]))
}

fn codec(side: Side) -> Codec {
    reference::plain().unwrap().open("f32", "{}", side, 4).unwrap()
}

fn group(name: &str, window: Option<usize>) -> GroupConfig {
    GroupConfig {
        name: name.to_owned(),
        geometry: KvGeometry { n_kv_heads: 1, k_head_dim: 4, v_head_dim: 4, window },
        n_layers: 1,
        k: codec(Side::K),
        v: codec(Side::V),
        stage: None,
    }
}

/// What the model does in a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Fault {
    Error,
    Panic,
}

/// What a test sees of the model, and how it holds it.
#[derive(Default)]
pub(super) struct Watch {
    /// Rows of each step.
    pub(super) steps: Mutex<Vec<usize>>,
    pub(super) fault: Mutex<Option<Fault>>,
    /// Every so many tokens the end token is likely; 0 for never.
    pub(super) end_every: AtomicU64,
}

impl Watch {
    pub(super) fn rows(&self) -> usize {
        self.steps.lock().unwrap().iter().sum()
    }
}

/// Writes tokens into tiles, a byte in each slot, and gathers what each row may see through the plan's segments. The state of its
/// recurrent layer, if it has one, is the hash of all tokens seen.
struct Oracle {
    watch: Arc<Watch>,
    permits: Option<std_mpsc::Receiver<()>>,
    logits: Vec<Vec<f32>>,
    hidden: Vec<Vec<f32>>,
}

impl Oracle {
    fn write(&mut self, step: &Step) {
        for run in &step.groups[0].appends {
            for (i, row) in run.rows.clone().enumerate() {
                let at = slot(step, run.store, run.page, run.first_slot + i as u32);
                // SAFETY: the step was checked, and nobody else uses the memory. Zero is for what was never written.
                unsafe { at.write(step.tokens[row as usize] as u8 + 1) };
            }
        }
    }

    /// Goes on with the states of a step. What each row's state is then.
    fn fold(&self, step: &Step) -> Vec<u64> {
        let mut states = Vec::new();
        for run in &step.state_runs {
            // SAFETY: a plane has two words; nobody else uses the memory.
            let mut state = run.from.map_or(SEED, |from| unsafe { plane(step, from).read_unaligned() });
            for (i, row) in run.rows.clone().enumerate() {
                state = next(state, step.tokens[row as usize]);
                states.push(state);
                for write in run.to.iter().filter(|w| w.after as usize == i + 1) {
                    // SAFETY: as above.
                    unsafe { plane(step, write.plane).write_unaligned(state) };
                }
            }
        }
        states
    }

    /// The tokens at positions 0 to the row's own, or what is wrong with the plan.
    fn seen(&self, step: &Step, row: u32) -> Result<Vec<u32>, String> {
        let own = step.positions[row as usize];
        let mut seen: Vec<Option<u32>> = vec![None; own as usize + 1];
        for segment in step.groups[0].segments.iter().filter(|s| s.queries.iter().any(|q| q.contains(&row))) {
            let PageSet::All(pages) = &segment.pages else { return Err("a selection of pages".to_owned()) };
            for (span, slot) in pages.iter().flat_map(|span| (0..span.len).map(move |slot| (span, slot))) {
                let position = (span.start_pos + slot) as usize;
                // SAFETY: the step was checked, and nobody else uses the memory.
                let token = unsafe { self::slot(step, segment.store, span.page, slot).read() };
                let token =
                    token.checked_sub(1).ok_or_else(|| format!("row {row} reads what was never written"))?.into();
                if position < seen.len() && seen[position].replace(token).is_some() {
                    return Err(format!("row {row} reads position {position} twice"));
                }
            }
        }
        seen.into_iter().collect::<Option<_>>().ok_or_else(|| format!("row {row} does not see all before it"))
    }
}

/// Where a slot's token is.
fn slot(step: &Step, store: u32, page: u32, slot: u32) -> *mut u8 {
    let view = &step.stores[store as usize];
    // SAFETY: the step was checked; a tile has four floats for each slot.
    unsafe { view.tile(&view.layers[0].k, page, 0).add(slot as usize * 16) }
}

/// Where a plane is.
fn plane(step: &Step, plane: u32) -> *mut u64 {
    let view = step.states.as_ref().expect("states of a step with state runs");
    assert!((plane as usize) < view.n_planes && view.plane_words == 2);
    // SAFETY: inside the store.
    unsafe { view.base.as_ptr().add(plane as usize * 2).cast() }
}

/// The hash of nothing.
const SEED: u64 = 0xcbf2_9ce4_8422_2325;

fn next(hash: u64, token: u32) -> u64 {
    (hash ^ u64::from(token)).wrapping_mul(0x0100_0000_01b3).rotate_left(17)
}

fn hash(tokens: &[u32]) -> u64 {
    tokens.iter().fold(SEED, |h, &t| next(h, t))
}

impl StepRunner for Oracle {
    fn run(&mut self, step: &Step) -> Result<StepOutputs<'_>, String> {
        if let Some(permits) = &self.permits
            && permits.recv().is_err()
        {
            self.permits = None;
        }
        let fault = self.watch.fault.lock().unwrap().take();
        match fault {
            Some(Fault::Error) => return Err("the test says so".to_owned()),
            Some(Fault::Panic) => panic!("the test says so"),
            None => {}
        }
        step.check(step.groups.len()).map_err(|e| e.to_string())?;
        self.watch.steps.lock().unwrap().push(step.tokens.len());
        self.write(step);
        let states = self.fold(step);
        self.logits.clear();
        self.hidden.clear();
        let end_every = self.watch.end_every.load(Ordering::Relaxed);
        for &row in &step.outputs {
            let seen = self.seen(step, row)?;
            let h = hash(&seen);
            if states.get(row as usize).is_some_and(|&state| state != h) {
                return Err(format!("the state of row {row} is not that of its {} tokens", seen.len()));
            }
            let mut logits: Vec<f32> =
                (0..N_VOCAB as u32).map(|v| (hash(&[h as u32, v]) % 4096) as f32 / 512.0).collect();
            logits[EOS as usize] = if end_every > 0 && h.is_multiple_of(end_every) { 100.0 } else { -100.0 };
            self.logits.push(logits);
            self.hidden.push(vec![seen.len() as f32, step.tokens[row as usize] as f32]);
        }
        Ok(StepOutputs {
            logits: self.logits.iter().map(Vec::as_slice).collect(),
            hidden: self.hidden.iter().map(Vec::as_slice).collect(),
        })
    }
}

/// Sizes of a rig.
pub(super) struct Sizes {
    pub(super) n_slots: usize,
    pub(super) open_slots: Option<usize>,
    pub(super) elastic: Elastic,
    pub(super) reserve_context: bool,
    pub(super) n_ctx: usize,
    /// Tokens that all sequences together may hold.
    pub(super) capacity: usize,
    pub(super) n_batch: usize,
    pub(super) prefill_chunk: usize,
    pub(super) max_queue: usize,
    pub(super) max_pools: usize,
    pub(super) window: Option<usize>,
    /// Sequences whose recurrent state there is room for; `None` for a model without.
    pub(super) states: Option<usize>,
    pub(super) snapshots: usize,
    /// Steps wait for permits.
    pub(super) held: bool,
    pub(super) admission: Option<Box<dyn AdmissionDecider>>,
}

impl Default for Sizes {
    fn default() -> Self {
        Self {
            n_slots: 4,
            open_slots: None,
            elastic: Elastic::default(),
            reserve_context: false,
            n_ctx: 1024,
            capacity: 8192,
            n_batch: 128,
            prefill_chunk: 64,
            max_queue: 100,
            max_pools: 0,
            window: None,
            states: None,
            snapshots: 0,
            held: false,
            admission: None,
        }
    }
}

pub(super) struct Rig {
    pub(super) commands: mpsc::UnboundedSender<Command>,
    pub(super) watch: Arc<Watch>,
    permits: Option<std_mpsc::Sender<()>>,
    thread: JoinHandle<Engine>,
    next: AtomicU64,
}

/// A running request.
pub(super) struct Running {
    pub(super) id: RequestId,
    pub(super) events: mpsc::UnboundedReceiver<Event>,
}

/// What came back of a choice.
#[derive(Debug, Clone)]
pub(super) struct Answer {
    pub(super) text: String,
    pub(super) tokens: Vec<u32>,
    pub(super) probs: Vec<TokenProbs>,
    pub(super) finish: Finish,
}

impl Rig {
    pub(super) fn new(sizes: Sizes) -> Self {
        let mut groups = vec![group("kv", None)];
        groups.extend(sizes.window.map(|w| group("swa", Some(w))));
        let cache = Cache::new(CacheConfig {
            groups,
            capacity_tokens: sizes.capacity,
            slots: sizes.states.unwrap_or(sizes.n_slots + 1) + sizes.max_pools,
            window_sequences: None,
            recent_sequences: 8,
            step_tokens: sizes.n_batch,
            rollback_tokens: 1,
            whole_texts: false,
            snapshots: sizes.snapshots,
            states: StateConfig {
                layers: sizes.states.map(|_| StateGeometry { conv: 0, recurrent: 2 }).into_iter().collect(),
                rollback: 0,
                idle_planes: if sizes.snapshots > 0 { sizes.snapshots + 8 } else { 0 },
            },
        })
        .unwrap();
        let (permit, permits) = std_mpsc::channel();
        let watch = Arc::new(Watch::default());
        let runner = Oracle {
            watch: Arc::clone(&watch),
            permits: sizes.held.then_some(permits),
            logits: Vec::new(),
            hidden: Vec::new(),
        };
        let budget = StepBudget { n_batch: sizes.n_batch, prefill_chunk: sizes.prefill_chunk, max_outputs: 64 };
        let parts = EngineParts {
            config: EngineConfig {
                n_slots: sizes.n_slots,
                open_slots: sizes.open_slots.unwrap_or(sizes.n_slots),
                elastic: sizes.elastic,
                reserve_context: sizes.reserve_context,
                n_ctx: sizes.n_ctx,
                max_queue: sizes.max_queue,
                max_pools: sizes.max_pools,
                budget,
                pooling: Pooling::Mean,
                model: ModelKind::Generator,
            },
            cache,
            runner: Box::new(runner),
            vocab: vocab(),
            model: ModelFingerprint { name: "oracle".to_owned(), digest: [7; 32] },
            admission: sizes.admission,
        };
        let (commands, receiver) = mpsc::unbounded_channel();
        let mut engine = Engine::new(parts, receiver).unwrap();
        let thread = std::thread::spawn(move || {
            engine.run();
            engine
        });
        let permits = sizes.held.then_some(permit);
        Self { commands, watch, permits, thread, next: AtomicU64::new(1) }
    }

    /// Lets `n` steps run.
    pub(super) fn permit(&self, n: usize) {
        (0..n).for_each(|_| self.permits.as_ref().unwrap().send(()).unwrap());
    }

    /// Lets all steps run.
    pub(super) fn let_go(&mut self) {
        self.permits = None;
    }

    pub(super) fn start(&self, request: GenerateRequest) -> Running {
        let id = RequestId(self.next.fetch_add(1, Ordering::Relaxed));
        let (sender, events) = mpsc::unbounded_channel();
        self.commands.send(Command::Generate(id, Box::new(request), sender)).ok().unwrap();
        Running { id, events }
    }

    pub(super) fn answer(&self, request: GenerateRequest) -> Answer {
        self.start(request).answer().unwrap()
    }

    pub(super) fn ask<T>(&self, command: impl FnOnce(oneshot::Sender<T>) -> Command) -> T {
        let (reply, answer) = oneshot::channel();
        self.commands.send(command(reply)).ok().unwrap();
        answer.blocking_recv().unwrap()
    }

    /// Waits until the engine says so of its slots; lets steps run meanwhile.
    pub(super) fn until(&self, what: &str, holds: impl Fn(&[crate::api::SlotInfo]) -> bool) {
        for _ in 0..2000 {
            let (reply, slots) = oneshot::channel();
            self.commands.send(Command::Slots(reply)).ok().unwrap();
            // A step that waits for its permit keeps the engine from answering.
            if self.permits.is_some() {
                self.permit(1);
            }
            if holds(&slots.blocking_recv().unwrap()) {
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        panic!("waited in vain until {what}");
    }

    /// Stops the engine and checks that nothing is in use any more.
    pub(super) fn close(mut self) -> Engine {
        self.let_go();
        self.ask(|reply| Command::Shutdown(Duration::from_secs(5), reply));
        let mut engine = self.thread.join().expect("the engine thread lives to its end");
        let cache = &mut engine.core.cache;
        cache.check().unwrap();
        assert_eq!(cache.live_sequences(), 0);
        assert!(cache.stats().iter().all(|s| s.promised == 0), "{:?}", cache.stats());
        while cache.evict_lru().is_some() {}
        assert!(cache.stats().iter().all(|s| s.free == s.total), "{:?}", cache.stats());
        assert!(cache.state_stats().is_none_or(|s| s.free == s.total && s.promised == 0), "{:?}", cache.state_stats());
        engine
    }
}

impl Running {
    /// All answers, by index; or the error.
    pub(super) fn answers(mut self) -> Result<Vec<Answer>, EngineError> {
        let mut parts: HashMap<u32, (String, Vec<u32>, Vec<TokenProbs>)> = HashMap::new();
        let mut answers = Vec::new();
        while let Some(event) = self.events.blocking_recv() {
            match event {
                Event::Token { index, text, tokens, probs, .. } => {
                    let part = parts.entry(index).or_default();
                    part.0.push_str(&text);
                    part.1.extend(tokens);
                    part.2.extend(probs);
                }
                Event::Done(finish) => {
                    let (text, tokens, probs) = parts.remove(&finish.index).unwrap_or_default();
                    answers.push(Answer { text, tokens, probs, finish });
                }
                Event::Failed(error) => return Err(error),
                Event::Started { .. } | Event::Progress { .. } | Event::PromptLogprobs { .. } | Event::Pool(_) => {}
            }
        }
        answers.sort_by_key(|a| a.finish.index);
        Ok(answers)
    }

    pub(super) fn answer(self) -> Result<Answer, EngineError> {
        let mut answers = self.answers()?;
        assert_eq!(answers.len(), 1);
        Ok(answers.remove(0))
    }

    /// The next event that is no progress.
    pub(super) fn next(&mut self) -> Option<Event> {
        self.events.blocking_recv()
    }
}

/// `n` tokens that depend on `seed`.
pub(super) fn prompt(seed: u64, n: usize) -> Vec<u32> {
    (0..n as u64).map(|i| (hash(&[seed as u32, i as u32]) % 26) as u32).collect()
}

/// A greedy request for `n_predict` tokens.
pub(super) fn request(prompt: Vec<u32>, n_predict: u32) -> GenerateRequest {
    GenerateRequest {
        prompt,
        sampling: SamplingParams { temperature: 0.0, ..SamplingParams::default() },
        n_predict: Some(n_predict),
        n_choices: 1,
        stop: Vec::new(),
        constraint: None,
        constraint_field: "grammar".to_owned(),
        id_slot: None,
        cache_prompt: true,
        session_id: None,
        pool: None,
        shared_slot: None,
        make_pool: None,
        priority: 0,
        overcommit: false,
        n_indent: 0,
        t_max_predict: None,
        return_progress: false,
        render_special: false,
        prompt_logprobs: None,
        deadline: None,
    }
}

/// Drawn at temperature 1 from `seed`.
pub(super) fn sampled(prompt: Vec<u32>, n_predict: u32, seed: i64) -> GenerateRequest {
    let sampling = SamplingParams { temperature: 1.0, seed, ..SamplingParams::default() };
    GenerateRequest { sampling, ..request(prompt, n_predict) }
}
