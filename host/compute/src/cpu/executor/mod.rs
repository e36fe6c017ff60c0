//! Runs graphs on the processor.
//!
//! A graph is compiled once into a [`compile::Schedule`]: buffers for its values and barriers between its operations.
//! A step is one [`Pool::run`]: every worker walks the schedule, takes its part of each operation and meets the others
//! where the schedule says so. Buffers, tables and scratch are allocated when the executor is made (scratch grows to
//! its final size in the first steps); a step allocates nothing.

mod compile;
mod experts;
mod recurrent;
mod run;

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use self::compile::Schedule;
pub(in crate::cpu) use self::compile::{inputs, output};
use super::matmul::{Packed, Precision, precision};
use super::pool::{Pool, PoolError, Worker};
use super::rope::Rotary;
use super::simd::Isa;
use crate::graph::{Experts, Graph, KvGeometry, Op, RowIndex, Value, WeightId};
use crate::plan::{PlanError, Step};
use crate::weights::Weight;
use opencoti_weights::memory::Arena;

/// Why an executor could not be made or a step not be run.
#[derive(Debug, thiserror::Error)]
pub enum ExecutorError {
    /// The graph contradicts itself.
    #[error("the model's graph cannot run: {0}")]
    Graph(String),
    /// A weight does not have the declared shape.
    #[error("tensor `{name}` is {rows}x{cols}, but the graph needs {need_rows}x{need_cols}")]
    WeightShape { name: String, rows: usize, cols: usize, need_rows: usize, need_cols: usize },
    /// Not one weight for each declaration.
    #[error("{found} weights were bound to a graph that names {expected}")]
    WeightCount { found: usize, expected: usize },
    /// The step is larger than the executor.
    #[error("a step has {found} {what}, but this executor was made for {limit}")]
    TooLarge { what: &'static str, found: usize, limit: usize },
    /// A token beyond the vocabulary.
    #[error("token {token} of row {row} is outside the model's vocabulary of {vocabulary}")]
    Token { token: u32, row: usize, vocabulary: usize },
    /// A position or token type beyond the table that a model has of them.
    #[error("row {row} has {what} {found}, but the model knows only {limit}")]
    Row { what: &'static str, found: u32, row: usize, limit: usize },
    /// The plan contradicts itself.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// Keys and values could not be written or read.
    #[error("attention failed: {0}")]
    Attention(String),
    /// No address space for packed weights.
    #[error("there is no memory for {bytes} bytes of packed weights: {source}; free some or take a smaller model")]
    Memory { bytes: usize, source: std::io::Error },
    /// A worker failed.
    #[error(transparent)]
    Pool(#[from] PoolError),
}

/// One layer's part of a step.
#[derive(Clone, Copy)]
pub struct LayerStep<'a> {
    /// Instruction set to use.
    pub isa: Isa,
    /// The step.
    pub step: &'a Step,
    /// Cache group of the layer: its plan is `step.groups[group]`.
    pub group: usize,
    /// Place among the group's layers.
    pub layer: usize,
    /// Heads and their sizes.
    pub geometry: KvGeometry,
}

/// The rows of an attention: all of a step's, or only those that it wants outputs for.
#[derive(Clone, Copy, Debug)]
pub struct QueryRows<'a> {
    positions: &'a [u32],
    outputs: Option<&'a [u32]>,
}

impl<'a> QueryRows<'a> {
    /// One for each row of the step.
    pub fn all(step: &'a Step) -> Self {
        QueryRows { positions: &step.positions, outputs: None }
    }

    /// One for each output of the step.
    pub fn outputs(step: &'a Step) -> Self {
        QueryRows { positions: &step.positions, outputs: Some(&step.outputs) }
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.outputs.unwrap_or(self.positions).len()
    }

    /// Whether these are the output rows.
    pub fn are_outputs(&self) -> bool {
        self.outputs.is_some()
    }

    /// The row of the step that query row `i` is.
    pub fn step_row(&self, i: usize) -> usize {
        self.outputs.map_or(i, |outputs| outputs[i] as usize)
    }

    /// Position of query row `i`.
    pub fn position(&self, i: usize) -> u32 {
        self.positions[self.step_row(i)]
    }

    /// The query rows among `rows` of the step.
    pub fn within(&self, rows: &Range<u32>) -> Range<u32> {
        let first = |outputs: &[u32], row: u32| outputs.partition_point(|&o| o < row) as u32;
        self.outputs.map_or(rows.clone(), |outputs| first(outputs, rows.start)..first(outputs, rows.end))
    }
}

/// What attention works on.
pub struct Attend<'a> {
    /// The rows of `q` and `out`.
    pub rows: QueryRows<'a>,
    /// Unrotated queries, `n_heads * k_head_dim` wide.
    pub q: &'a [f32],
    /// Query heads.
    pub n_heads: usize,
    /// How queries rotate.
    pub rope: Option<&'a Rotary>,
    /// Its table for each row of the step at the row's own position, `n_rot` a row; empty without rope.
    pub angles: &'a [f32],
    /// Factor on scores.
    pub scale: f32,
    /// Cap on scores.
    pub softcap: Option<f32>,
    /// The result, `n_heads * v_head_dim` wide, shared by the workers.
    pub out: *mut f32,
}

/// Writing and reading the cache; implemented by the attention kernels.
///
/// `append` and `attend` are called by every worker with the same arguments; a worker does its part and returns, and may
/// meet the others at the worker's barrier as long as all do. Between two calls of `attend` there is a barrier.
pub trait AttentionKernels: Send + Sync {
    /// Called once before the workers run a step that was checked.
    ///
    /// # Errors
    /// One sentence about a plan that cannot run; nothing of the step is run then.
    fn prepare(&mut self, _step: &Step, _workers: usize) -> Result<(), String> {
        Ok(())
    }

    /// Writes keys and values of the step's rows where its plan says.
    ///
    /// # Errors
    /// One sentence, for example that a codec failed.
    ///
    /// # Safety
    /// The step was checked, and its stores are those of the graph.
    unsafe fn append(&self, worker: Worker<'_>, at: LayerStep<'_>, k: &[f32], v: &[f32]) -> Result<(), String>;

    /// Encodes the pages that the step's plan seals. `append` does so itself where the plan has rows.
    ///
    /// # Errors
    /// One sentence, for example that a codec failed.
    ///
    /// # Safety
    /// As [`append`](Self::append), and the exact tokens of the pages are written.
    unsafe fn seal(&self, worker: Worker<'_>, at: LayerStep<'_>) -> Result<(), String>;

    /// Attention of the step's rows, or of its output rows, over its segments.
    ///
    /// # Errors
    /// One sentence, for example that a codec failed.
    ///
    /// # Safety
    /// As [`append`](Self::append); `out` has a row for each of `attend.rows`, and only the workers of this call touch it.
    unsafe fn attend(&self, worker: Worker<'_>, at: LayerStep<'_>, attend: &Attend<'_>) -> Result<(), String>;
}

/// Sizes of an executor.
#[derive(Debug, Clone, Copy)]
pub struct Config {
    /// Workers, the calling thread included.
    pub threads: usize,
    /// Most tokens in a step.
    pub max_rows: usize,
    /// Most rows in a step of which logits are computed. Of rows whose hidden state alone is wanted there may be as many
    /// as tokens, if the graph tells the two apart.
    pub max_outputs: usize,
}

/// Results of a step, one row an output in the order asked for.
#[derive(Debug, Clone, Copy)]
pub struct Outputs<'a> {
    rows: usize,
    logits: &'a [f32],
    /// Outputs that have logits, where not all do.
    with_logits: Option<&'a [u32]>,
    hidden: &'a [f32],
}

impl<'a> Outputs<'a> {
    /// Output rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Logits of output `i`; empty if the graph has none or none were asked for.
    pub fn logits(&self, i: usize) -> &'a [f32] {
        assert!(i < self.rows, "output {i} of {}", self.rows);
        match self.with_logits {
            None => row(self.logits, self.rows, i),
            Some(with) => match with.binary_search(&(i as u32)) {
                Ok(place) => row(self.logits, with.len(), place),
                Err(_) => &[],
            },
        }
    }

    /// Hidden state of output `i` after the final norm; empty if the graph names none.
    pub fn hidden(&self, i: usize) -> &'a [f32] {
        row(self.hidden, self.rows, i)
    }
}

fn row(data: &[f32], rows: usize, i: usize) -> &[f32] {
    assert!(i < rows, "output {i} of {rows}");
    let width = data.len() / rows;
    &data[i * width..(i + 1) * width]
}

/// A graph with its weights, ready to run steps.
pub struct Executor {
    graph: Graph,
    schedule: Schedule,
    weights: Vec<Weight>,
    /// Weights of products, packed where their type allows it.
    packed: Vec<Option<Packed>>,
    /// Small weights in f32 (norms, biases, and the taps of convolutions a row a tap); empty for the others.
    vectors: Vec<Vec<f32>>,
    ropes: Vec<Rotary>,
    /// Cosines and sines of each rope, `n_rot` a row.
    angles: Vec<Vec<f32>>,
    buffers: Vec<Vec<f32>>,
    /// Outputs of the last step that have logits.
    with_logits: Vec<u32>,
    /// Cache group and place in it of each layer.
    layers: Vec<(usize, usize)>,
    /// Layers in each cache group.
    group_sizes: Vec<usize>,
    attention: Box<dyn AttentionKernels>,
    /// One a worker; locked once a step, by its own worker.
    locals: Vec<Mutex<run::Local>>,
    config: Config,
    isa: Isa,
    pool: Pool,
}

impl Executor {
    /// Binds `weights`, in the order of the graph's declarations.
    ///
    /// # Errors
    /// When shapes do not match, the graph contradicts itself, or threads cannot be started.
    pub fn new(
        graph: Graph,
        weights: Vec<Weight>,
        attention: Box<dyn AttentionKernels>,
        config: Config,
    ) -> Result<Executor, ExecutorError> {
        check_weights(&graph, &weights)?;
        let precisions: Vec<Precision> = weights.iter().map(|w| precision(w.ty())).collect();
        let schedule = compile::compile(&graph, &precisions)?;
        let vectors = vectors(&graph, &weights);
        let ropes: Vec<Rotary> = graph
            .ropes
            .iter()
            .map(|r| Rotary::new(r, r.freq_divisors.map(|d| vectors[d.0 as usize].as_slice())))
            .collect();
        let (rows, outputs) = (config.max_rows, most_outputs(&graph, &config));
        let room = |b: &compile::BufferSize| b.rows.count(rows, outputs, config.max_outputs) * b.width;
        let buffers = schedule.buffers.iter().map(|b| vec![0.0; room(b)]).collect();
        let local = || run::Local {
            experts: experts::ExpertScratch::new(&graph, &schedule, &weights, rows, outputs),
            ..run::Local::default()
        };
        let angles = ropes.iter().map(|r| vec![0.0; config.max_rows * r.n_rot()]).collect();
        let groups = graph.cache_groups();
        let mut layers = vec![(0, 0); graph.kv_layers.len()];
        for (g, group) in groups.iter().enumerate() {
            for (place, layer) in group.layers.iter().enumerate() {
                layers[layer.0 as usize] = (g, place);
            }
        }
        let mut pool = Pool::new(config.threads)?;
        let isa = Isa::detect();
        let packed = pack(isa, &graph, &weights, &mut pool)?;
        Ok(Executor {
            locals: (0..pool.workers()).map(|_| Mutex::new(local())).collect(),
            group_sizes: groups.iter().map(|g| g.layers.len()).collect(),
            isa,
            packed,
            graph,
            schedule,
            weights,
            vectors,
            ropes,
            angles,
            buffers,
            with_logits: Vec::with_capacity(config.max_outputs),
            layers,
            attention,
            config,
            pool,
        })
    }

    /// The graph it runs.
    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    /// Runs the graph over a step; the results live until the next.
    ///
    /// # Errors
    /// When the step does not fit the executor or contradicts itself (nothing was run then), or when a kernel or a
    /// codec failed (the rows' keys and values are undefined then).
    pub fn run(&mut self, step: &Step) -> Result<Outputs<'_>, ExecutorError> {
        self.check(step)?;
        self.with_logits.clear();
        self.with_logits.extend_from_slice(&step.logits);
        if !step.tokens.is_empty() {
            self.run_checked(step)?;
        }
        let rows = step.outputs.len();
        let result = |value: Option<Value>, rows: usize| match value {
            Some(v) => &self.buffers[self.schedule.buffer_of[v.0 as usize]][..rows * self.graph.width(v)],
            None => &[],
        };
        let with_logits = selects_logits(&self.graph).then_some(self.with_logits.as_slice());
        let logits = result(self.graph.logits, with_logits.map_or(rows, <[u32]>::len));
        Ok(Outputs { rows, logits, with_logits, hidden: result(self.graph.hidden, rows) })
    }

    /// Encodes the pages that the plans of a step without rows seal.
    ///
    /// # Errors
    /// When the step contradicts itself or has rows (nothing was written then), or when a codec failed (the pages to
    /// write are undefined then).
    pub fn seal(&mut self, step: &Step) -> Result<(), ExecutorError> {
        self.check(step)?;
        if !step.tokens.is_empty() {
            let found = step.tokens.len();
            return Err(PlanError::Count { what: "rows beside pages that are only sealed", found, expected: 0 }.into());
        }
        self.attention.prepare(step, self.pool.workers()).map_err(ExecutorError::Attention)?;
        let geometries: Vec<KvGeometry> = self.graph.cache_groups().iter().map(|g| g.geometry).collect();
        let (attention, isa, sizes) = (&*self.attention, self.isa, &self.group_sizes);
        let failure = Mutex::new(None);
        self.pool.run(|worker| {
            for (group, (&geometry, &layers)) in geometries.iter().zip(sizes).enumerate() {
                for layer in 0..layers {
                    // SAFETY: the step was checked, and has no rows that are yet to be written.
                    let done = unsafe { attention.seal(worker, LayerStep { isa, step, group, layer, geometry }) };
                    if let Err(message) = done {
                        failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(message);
                    }
                }
            }
        })?;
        match failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some(message) => Err(ExecutorError::Attention(message)),
            None => Ok(()),
        }
    }

    fn run_checked(&mut self, step: &Step) -> Result<(), ExecutorError> {
        self.attention.prepare(step, self.pool.workers()).map_err(ExecutorError::Attention)?;
        let run = run::Run {
            graph: &self.graph,
            schedule: &self.schedule,
            weights: &self.weights,
            packed: &self.packed,
            vectors: &self.vectors,
            ropes: &self.ropes,
            layers: &self.layers,
            attention: &*self.attention,
            locals: &self.locals,
            isa: self.isa,
            step,
            buffers: run::Memory::of(&mut self.buffers),
            angles: run::Memory::of(&mut self.angles),
            failure: Mutex::new(None),
        };
        self.pool.run(|worker| run.work(worker))?;
        match run.failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some(message) => Err(ExecutorError::Attention(message)),
            None => Ok(()),
        }
    }

    fn check(&self, step: &Step) -> Result<(), ExecutorError> {
        let fits = |what, found, limit| match found <= limit {
            true => Ok(()),
            false => Err(ExecutorError::TooLarge { what, found, limit }),
        };
        fits("tokens", step.tokens.len(), self.config.max_rows)?;
        fits("outputs", step.outputs.len(), most_outputs(&self.graph, &self.config))?;
        fits("outputs with logits", step.logits.len(), self.config.max_outputs)?;
        step.check(self.group_sizes.len())?;
        self.check_states(step)?;
        if let Some(&row) = step.outputs.iter().find(|o| **o as usize >= step.tokens.len()) {
            let (found, limit) = (row.into(), step.tokens.len() as u64);
            return Err(PlanError::OutOfRange { group: 0, what: "output row", found, limit }.into());
        }
        for store in &step.stores {
            let (found, expected) = (store.layers.len(), self.group_sizes.get(store.group as usize));
            if expected != Some(&found) {
                let expected = expected.copied().unwrap_or(0);
                return Err(PlanError::Count { what: "layers in a store", found, expected }.into());
            }
        }
        let ascending = step.logits.windows(2).all(|w| w[0] < w[1]);
        if let Some(&last) = step.logits.last().filter(|&&last| !ascending || last as usize >= step.outputs.len()) {
            let (found, limit) = (last.into(), step.outputs.len() as u64);
            return Err(PlanError::OutOfRange { group: 0, what: "output with logits", found, limit }.into());
        }
        self.check_indices(step)?;
        let vocabulary = self.vocabulary();
        match step.tokens.iter().position(|t| *t as usize >= vocabulary) {
            Some(row) => Err(ExecutorError::Token { token: step.tokens[row], row, vocabulary }),
            None => Ok(()),
        }
    }

    /// Positions and token types must be in the tables that are read by them.
    fn check_indices(&self, step: &Step) -> Result<(), ExecutorError> {
        for op in &self.graph.ops {
            let Op::EmbedBy { table, index, .. } = *op else { continue };
            let limit = self.weights[table.0 as usize].rows();
            let found = (0..step.tokens.len()).map(|row| (row, step.index(index, row)));
            if let Some((row, found)) = { found }.find(|&(_, found)| found as usize >= limit) {
                let what = match index {
                    RowIndex::Position => "position",
                    RowIndex::TokenType => "token type",
                };
                return Err(ExecutorError::Row { what, found, row, limit });
            }
        }
        Ok(())
    }

    /// A graph with recurrent layers needs planes of its size, and a state for every row.
    fn check_states(&self, step: &Step) -> Result<(), PlanError> {
        let expected = self.graph.state_words();
        let found = step.states.as_ref().map_or(0, |states| states.plane_words);
        if expected == 0 || step.tokens.is_empty() {
            return Ok(());
        }
        if found != expected {
            return Err(PlanError::Count { what: "words in a plane of states", found, expected });
        }
        match step.state_runs.is_empty() {
            true => Err(PlanError::Count { what: "rows with a state", found: 0, expected: step.tokens.len() }),
            false => Ok(()),
        }
    }

    /// Rows of the smallest embedding table.
    fn vocabulary(&self) -> usize {
        let tables = self.graph.ops.iter().filter_map(|op| match op {
            Op::Embed { table, .. } => Some(self.weights[table.0 as usize].rows()),
            _ => None,
        });
        tables.min().unwrap_or(usize::MAX)
    }
}

/// Whether the graph computes logits of chosen outputs only.
fn selects_logits(graph: &Graph) -> bool {
    graph.ops.iter().any(|op| matches!(op, Op::SelectLogits { .. }))
}

/// Most output rows in a step: as many as tokens, unless every output has logits.
fn most_outputs(graph: &Graph, config: &Config) -> usize {
    match graph.logits.is_none() || selects_logits(graph) {
        true => config.max_rows,
        false => config.max_outputs,
    }
}

fn check_weights(graph: &Graph, weights: &[Weight]) -> Result<(), ExecutorError> {
    if weights.len() != graph.weights.len() {
        return Err(ExecutorError::WeightCount { found: weights.len(), expected: graph.weights.len() });
    }
    for (weight, decl) in weights.iter().zip(&graph.weights) {
        if (weight.rows(), weight.cols()) != (decl.rows, decl.cols) {
            return Err(ExecutorError::WeightShape {
                name: decl.name.clone(),
                rows: weight.rows(),
                cols: weight.cols(),
                need_rows: decl.rows,
                need_cols: decl.cols,
            });
        }
    }
    Ok(())
}

/// Bytes of packed weights that a worker fills at a time.
const PACK_BYTES: usize = 1 << 20;

/// Packs the weights of products, on all workers.
fn pack(isa: Isa, graph: &Graph, weights: &[Weight], pool: &mut Pool) -> Result<Vec<Option<Packed>>, ExecutorError> {
    let mut sizes: Vec<Option<usize>> = vec![None; weights.len()];
    for op in &graph.ops {
        if let Op::MatMul { weight: id, .. } | Op::ExpertMatMul { experts: Experts { stack: id, .. }, .. } = op {
            let w = &weights[id.0 as usize];
            sizes[id.0 as usize] = Packed::bytes_for(isa, w.ty(), w.rows(), w.cols());
        }
    }
    let bytes = sizes.iter().flatten().sum();
    let mut memory = Arena::new(bytes).map_err(|source| ExecutorError::Memory { bytes, source })?;
    let mut place =
        |(w, bytes): (&Weight, Option<usize>)| Some(Packed::new(isa, w.ty(), w.rows(), w.cols(), memory.take(bytes?)));
    let mut packed: Vec<Option<Packed>> = weights.iter().zip(sizes).map(&mut place).collect();
    let parts = packed.iter_mut().zip(weights).filter_map(|(packed, w)| Some((packed.as_mut()?, w)));
    let queue = Mutex::new(parts.flat_map(|(packed, w)| packed.parts(PACK_BYTES).map(move |part| (part, w.matrix()))));
    pool.run(|_| {
        let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).next();
        while let Some((mut part, w)) = next() {
            part.fill(&w);
        }
    })?;
    drop(queue);
    Ok(packed)
}

/// f32 copies of the small weights that row functions read.
fn vectors(graph: &Graph, weights: &[Weight]) -> Vec<Vec<f32>> {
    let mut vectors = vec![Vec::new(); weights.len()];
    let used = graph.ops.iter().flat_map(|op| match *op {
        Op::RmsNorm { weight, .. } => [weight, None],
        Op::LayerNorm { weight, bias, .. } => [Some(weight), Some(bias)],
        Op::MatMul { bias, .. } => [bias, None],
        Op::ExpertMatMul { experts, .. } => [experts.scale, None],
        Op::Decay { bias, rate, .. } => [Some(bias), Some(rate)],
        _ => [None; 2],
    });
    let divisors = graph.ropes.iter().filter_map(|r| r.freq_divisors);
    for WeightId(id) in used.flatten().chain(divisors) {
        vectors[id as usize] = weights[id as usize].to_f32();
    }
    for op in &graph.ops {
        if let Op::ShortConv { weight: WeightId(id), .. } = *op {
            vectors[id as usize] = transposed(&weights[id as usize]);
        }
    }
    vectors
}

/// The columns of a weight one after the other.
fn transposed(weight: &Weight) -> Vec<f32> {
    let values = weight.to_f32();
    (0..weight.cols()).flat_map(|c| values.iter().skip(c).step_by(weight.cols())).copied().collect()
}

#[cfg(test)]
mod expert_tests;
#[cfg(test)]
mod tests;
