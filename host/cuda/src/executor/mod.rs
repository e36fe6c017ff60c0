//! Runs graphs on a card.
//!
//! A graph is compiled once into a schedule of launches; weights, buffers and kernels are on the card before the first step. A
//! step is one block of numbers (tokens, positions, the plan's arrays), copied to the card, and the launches. Steps of few rows are
//! recorded and replayed: a recording depends on the number of rows and on the sizes of the plan's arrays, rounded up, and reads
//! everything else from the block.

mod block;
mod launch;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

use opencoti_compute::cpu::rope::Rotary;
use opencoti_compute::graph::{Graph, Op, RopePairing};
use opencoti_compute::plan::{PlanError, Step, StoreView};
use opencoti_compute::weights::Weight;
use opencoti_plugin_api::host::Codec;

use self::block::{Block, Sizes};
use crate::CudaError;
use crate::compile::Cache;
use crate::driver::{Gpu, Memory, Pinned, Recorded};
use crate::kernels::RowKernels;
use crate::plan::{ExtraAngles, FlatGroup, GroupShape, StoreKernels};
use crate::schedule::{Rows, Schedule, compile};
use crate::stores::Stores;
use crate::weights::{Progress, Weights};

/// Steps of up to so many rows are recorded.
const RECORDED_ROWS: usize = 64;
/// Recordings kept; when there are more, all are made anew.
const RECORDINGS: usize = 128;
/// Bytes of partial sums of products whose columns are shared among blocks.
const PARTS_BYTES: usize = 64 << 20;

/// Sizes of an executor.
#[derive(Clone, Debug)]
pub struct Config {
    /// Most tokens in a step.
    pub max_rows: usize,
    /// Most rows in a step of which logits are computed.
    pub max_outputs: usize,
    /// Where compiled kernels are kept.
    pub kernel_cache: Option<PathBuf>,
    /// Whether steps of few rows are recorded and replayed.
    pub record: bool,
}

/// A rope as the kernels take it.
struct Rope {
    frequencies: Memory,
    n_rot: usize,
    magnitude: f32,
    neox: bool,
    /// Angles: a row for each of the step's, and more for other positions of queries.
    table: Memory,
}

/// Results of a step, one row an output in the order asked for.
#[derive(Debug, Clone, Copy)]
pub struct Outputs<'a> {
    rows: usize,
    logits: &'a [f32],
    with_logits: Option<&'a [u32]>,
    hidden: &'a [f32],
}

impl<'a> Outputs<'a> {
    /// Output rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Logits of output `i`; empty if none were asked for.
    pub fn logits(&self, i: usize) -> &'a [f32] {
        match self.with_logits {
            None => row(self.logits, self.rows, i),
            Some(with) => with.binary_search(&(i as u32)).map_or(&[], |place| row(self.logits, with.len(), place)),
        }
    }

    /// Hidden state of output `i` after the final norm.
    pub fn hidden(&self, i: usize) -> &'a [f32] {
        row(self.hidden, self.rows, i)
    }
}

fn row(data: &[f32], rows: usize, i: usize) -> &[f32] {
    assert!(i < rows, "output {i} of {rows}");
    let width = data.len() / rows;
    &data[i * width..(i + 1) * width]
}

/// A graph with its weights on a card.
pub struct Executor {
    // Recordings go before what they were recorded with.
    recordings: HashMap<Sizes, Recorded>,
    graph: Graph,
    schedule: Schedule,
    config: Config,
    /// Cache group and place in it of each layer.
    layers: Vec<(usize, usize)>,
    /// Layers in each group.
    group_sizes: Vec<usize>,
    shapes: Vec<GroupShape>,
    weights: Weights,
    rows: RowKernels,
    ropes: Vec<Rope>,
    buffers: Vec<Memory>,
    parts: Memory,
    partials: Option<Memory>,
    partial_sums: Option<Memory>,
    angle_rows: usize,
    stores: Stores,
    flat: Vec<FlatGroup>,
    extra: ExtraAngles,
    block: Block,
    logits: Pinned,
    hidden: Pinned,
    with_logits: Vec<u32>,
    gpu: Arc<Gpu>,
}

impl Executor {
    /// Puts a graph's weights on the card and compiles what it needs. `codecs` are the pairs that stores will have.
    ///
    /// # Errors
    /// When the graph or a weight needs something that there are no kernels for (by its name), or memory does not suffice.
    pub fn new(
        gpu: &Arc<Gpu>,
        graph: Graph,
        weights: &[Weight],
        codecs: &[(Codec, Codec)],
        config: Config,
        progress: Progress<'_>,
    ) -> Result<Executor, CudaError> {
        gpu.enter()?;
        check_weights(&graph, weights)?;
        let schedule = compile(&graph)?;
        let groups = graph.cache_groups();
        let mut layers = vec![(0, 0); graph.kv_layers.len()];
        for (g, group) in groups.iter().enumerate() {
            for (place, layer) in group.layers.iter().enumerate() {
                layers[layer.0 as usize] = (g, place);
            }
        }
        let shapes = shapes(&graph, &schedule, &layers, groups.len())?;
        let cache = || Cache::new(config.kernel_cache.clone());
        let mut stores = Stores::new(gpu, cache(), groups.len());
        for (k, v) in codecs {
            stores.class(k, v)?;
        }
        let (matrices, vectors) = used_weights(&graph);
        let names = |id: u32| graph.weights[id as usize].name.clone();
        let on_card = Weights::new(gpu, &cache(), weights, &names, &matrices, &vectors, progress)?;
        let counts = |rows: Rows| count(rows, config.max_rows, most_outputs(&schedule, &config), config.max_outputs);
        let buffers = schedule.buffers.iter().map(|b| gpu.allocate(counts(b.rows) * b.row_bytes, "activations"));
        let buffers = buffers.collect::<Result<Vec<_>, _>>()?;
        let angle_rows = 2 * config.max_rows;
        let ropes = graph.ropes.iter().map(|r| {
            let divisors = r.freq_divisors.map(|d| weights[d.0 as usize].to_f32());
            rope(gpu, &Rotary::new(r, divisors.as_deref()), r.pairing, angle_rows)
        });
        let ropes = ropes.collect::<Result<_, _>>()?;
        let width = |value: Option<_>| value.map_or(0, |v| graph.width(v)) * 4;
        Ok(Executor {
            recordings: HashMap::new(),
            rows: RowKernels::new(gpu, &cache())?,
            parts: gpu.allocate(PARTS_BYTES, "sums of products")?,
            partials: None,
            partial_sums: None,
            angle_rows,
            flat: groups.iter().map(|_| FlatGroup::default()).collect(),
            extra: ExtraAngles::default(),
            block: Block::new(gpu)?,
            logits: gpu.pinned(config.max_outputs * width(graph.logits))?,
            hidden: gpu.pinned(most_outputs(&schedule, &config) * width(graph.hidden))?,
            with_logits: Vec::with_capacity(config.max_outputs),
            gpu: Arc::clone(gpu),
            group_sizes: groups.iter().map(|g| g.layers.len()).collect(),
            weights: on_card,
            graph,
            schedule,
            config,
            layers,
            shapes,
            ropes,
            buffers,
            stores,
        })
    }

    /// The graph it runs.
    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    /// The card.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// Runs the graph over a step; the results live until the next.
    ///
    /// # Errors
    /// When the step does not fit the executor or contradicts itself (nothing was run then), or when the card failed.
    pub fn run(&mut self, step: &Step) -> Result<Outputs<'_>, CudaError> {
        self.gpu.enter()?;
        self.check(step)?;
        self.with_logits.clear();
        self.with_logits.extend_from_slice(&step.logits);
        if !step.tokens.is_empty() {
            let sizes = self.upload(step)?;
            self.compute(sizes)?;
            self.download(step)?;
        }
        Ok(self.outputs(step))
    }

    /// Brings a page of a store from the card to the host's memory, where the cache may read it.
    ///
    /// # Safety
    /// The view is a living store's, and nobody else touches the page meanwhile.
    pub unsafe fn page_to_host(&self, view: &StoreView, page: u32) -> Result<(), CudaError> {
        // SAFETY: passed on.
        unsafe { self.stores.download(view, page) }
    }

    /// Brings a page that the cache filled in the host's memory to the card.
    ///
    /// # Safety
    /// As [`page_to_host`](Self::page_to_host).
    pub unsafe fn page_to_card(&mut self, view: &StoreView, page: u32) -> Result<(), CudaError> {
        let before = self.stores.len();
        // SAFETY: passed on.
        unsafe { self.stores.upload(view, page) }?;
        if self.stores.len() != before {
            self.recordings.clear();
        }
        Ok(())
    }

    /// Flattens the step's plans and copies everything to the card.
    fn upload(&mut self, step: &Step) -> Result<Sizes, CudaError> {
        let mut stores: Vec<Option<StoreKernels>> = Vec::with_capacity(step.stores.len());
        for view in &step.stores {
            let (kernels, new) = self.stores.find(view)?;
            if new {
                self.recordings.clear();
            }
            stores.push(Some(kernels));
        }
        self.extra.positions.clear();
        // A block of threads for each multiprocessor four times.
        let blocks = self.gpu.multiprocessors as usize * 4;
        let classes = self.stores.classes();
        for ((flat, plan), shape) in self.flat.iter_mut().zip(&step.groups).zip(&self.shapes) {
            flat.fill(step, plan, *shape, &stores, classes, blocks, &mut self.extra);
        }
        self.make_room(step)?;
        let (sizes, moved) = self.block.fill(step, &self.extra, &self.flat, self.stores.len())?;
        if moved || self.recordings.len() >= RECORDINGS {
            self.recordings.clear();
        }
        Ok(sizes)
    }

    /// Memory for partial results and angles, as much as the step needs.
    fn make_room(&mut self, step: &Step) -> Result<(), CudaError> {
        let widths = self.graph.kv_layers.iter().map(|g| g.v_head_dim).max().unwrap_or(0);
        let partials = self.flat.iter().map(|f| f.n_partials as usize).max().unwrap_or(0);
        let held = self.partial_sums.as_ref().map_or(0, |m| m.len() / 8);
        if partials > held {
            self.recordings.clear();
            self.gpu.synchronize()?;
            let room = partials.next_power_of_two();
            (self.partials, self.partial_sums) = (None, None);
            self.partials = Some(self.gpu.allocate(room * widths * 4, "partial results of attention")?);
            self.partial_sums = Some(self.gpu.allocate(room * 8, "partial results of attention")?);
        }
        let angles = step.tokens.len() + self.extra.positions.len().next_power_of_two();
        if angles > self.angle_rows {
            self.recordings.clear();
            self.gpu.synchronize()?;
            self.angle_rows = angles.next_power_of_two();
            for rope in &mut self.ropes {
                rope.table = self.gpu.allocate(self.angle_rows * rope.n_rot * 4, "rotations")?;
            }
        }
        Ok(())
    }

    fn compute(&mut self, sizes: Sizes) -> Result<(), CudaError> {
        if !self.config.record || sizes.tokens > RECORDED_ROWS {
            // SAFETY: the block was filled for these sizes.
            return unsafe { self.enqueue(&sizes) };
        }
        if !self.recordings.contains_key(&sizes) {
            // SAFETY: as above; what was recorded is dropped before what it was recorded with changes.
            let recorded = self.gpu.capture(|| unsafe { self.enqueue(&sizes) })?;
            self.recordings.insert(sizes.clone(), recorded);
        }
        // SAFETY: as above.
        unsafe { self.recordings[&sizes].launch() }
    }

    fn download(&mut self, step: &Step) -> Result<(), CudaError> {
        let results = [
            (self.graph.logits, self.logit_rows(step), &mut self.logits),
            (self.graph.hidden, step.outputs.len(), &mut self.hidden),
        ];
        for (value, rows, to) in results {
            let Some(value) = value else { continue };
            let bytes = rows * self.graph.width(value) * 4;
            let from = self.buffers[self.schedule.buffer_of[value.0 as usize]].at();
            // SAFETY: the buffer holds these rows; the pinned memory is read after the stream has passed.
            unsafe { self.gpu.download(&mut to.bytes_mut()[..bytes], from) }?;
        }
        self.gpu.synchronize()
    }

    fn logit_rows(&self, step: &Step) -> usize {
        if self.schedule.selects_logits { step.logits.len() } else { step.outputs.len() }
    }

    fn outputs(&self, step: &Step) -> Outputs<'_> {
        let floats = |pinned: &'_ Pinned, value: Option<opencoti_compute::graph::Value>, rows: usize| -> usize {
            debug_assert!(pinned.bytes().len().is_multiple_of(4));
            value.map_or(0, |v| rows * self.graph.width(v) * 4)
        };
        let logits = floats(&self.logits, self.graph.logits, self.logit_rows(step));
        let hidden = floats(&self.hidden, self.graph.hidden, step.outputs.len());
        Outputs {
            rows: step.outputs.len(),
            logits: bytemuck::cast_slice(&self.logits.bytes()[..logits]),
            with_logits: self.schedule.selects_logits.then_some(self.with_logits.as_slice()),
            hidden: bytemuck::cast_slice(&self.hidden.bytes()[..hidden]),
        }
    }

    fn check(&self, step: &Step) -> Result<(), CudaError> {
        let fits = |what, found: usize, limit: usize| match found <= limit {
            true => Ok(()),
            false => {
                Err(CudaError::Wrong(format!("a step has {found} {what}, but this executor was made for {limit}")))
            }
        };
        fits("tokens", step.tokens.len(), self.config.max_rows)?;
        fits("outputs", step.outputs.len(), most_outputs(&self.schedule, &self.config))?;
        fits("outputs with logits", step.logits.len(), self.config.max_outputs)?;
        step.check(self.group_sizes.len())?;
        if step.groups.iter().any(|plan| !plan.seals.is_empty()) {
            return Err(CudaError::Unsupported("pages that are encoded as a whole have no CUDA kernels".to_owned()));
        }
        let beyond = |what, list: &[u32], limit: usize| match list.iter().find(|i| **i as usize >= limit) {
            Some(&found) => Err(PlanError::OutOfRange { group: 0, what, found: found.into(), limit: limit as u64 }),
            None => Ok(()),
        };
        beyond("output row", &step.outputs, step.tokens.len())?;
        beyond("output with logits", &step.logits, step.outputs.len())?;
        for store in &step.stores {
            let (found, expected) = (store.layers.len(), self.group_sizes[store.group as usize]);
            if found != expected {
                return Err(PlanError::Count { what: "layers in a store", found, expected }.into());
            }
        }
        for op in &self.graph.ops {
            let Op::Embed { table, .. } = op else { continue };
            let vocabulary = self.graph.weights[table.0 as usize].rows;
            if let Some(row) = step.tokens.iter().position(|t| *t as usize >= vocabulary) {
                let token = step.tokens[row];
                return Err(CudaError::Wrong(format!(
                    "token {token} of row {row} is outside the model's vocabulary of {vocabulary}"
                )));
            }
        }
        Ok(())
    }
}

fn count(rows: Rows, tokens: usize, outputs: usize, logits: usize) -> usize {
    match rows {
        Rows::Tokens => tokens,
        Rows::Outputs => outputs,
        Rows::Logits => logits,
    }
}

/// Most output rows of a step: as many as tokens, unless every output has logits.
fn most_outputs(schedule: &Schedule, config: &Config) -> usize {
    if schedule.selects_logits { config.max_rows } else { config.max_outputs }
}

fn check_weights(graph: &Graph, weights: &[Weight]) -> Result<(), CudaError> {
    if weights.len() != graph.weights.len() {
        let (found, expected) = (weights.len(), graph.weights.len());
        return Err(CudaError::Wrong(format!("{found} weights were bound to a graph that names {expected}")));
    }
    for (w, decl) in weights.iter().zip(&graph.weights) {
        if (w.rows(), w.cols()) != (decl.rows, decl.cols) {
            let (name, rows, cols) = (&decl.name, w.rows(), w.cols());
            let (need_rows, need_cols) = (decl.rows, decl.cols);
            return Err(CudaError::Wrong(format!(
                "tensor `{name}` is {rows}x{cols}, but the graph needs {need_rows}x{need_cols}"
            )));
        }
    }
    Ok(())
}

/// Weights that are packed, and those that are f32 vectors.
fn used_weights(graph: &Graph) -> (Vec<u32>, Vec<u32>) {
    let (mut matrices, mut vectors) = (Vec::new(), Vec::new());
    for op in &graph.ops {
        match *op {
            Op::Embed { table, .. } => matrices.push(table.0),
            Op::MatMul { weight, bias, .. } => {
                matrices.push(weight.0);
                vectors.extend(bias.map(|b| b.0));
            }
            Op::RmsNorm { weight, .. } => vectors.extend(weight.map(|w| w.0)),
            _ => {}
        }
    }
    for list in [&mut matrices, &mut vectors] {
        list.sort_unstable();
        list.dedup();
    }
    (matrices, vectors)
}

/// Heads of each cache group.
fn shapes(
    graph: &Graph,
    schedule: &Schedule,
    layers: &[(usize, usize)],
    groups: usize,
) -> Result<Vec<GroupShape>, CudaError> {
    let mut shapes: Vec<Option<GroupShape>> = vec![None; groups];
    for op in &graph.ops {
        let Op::Attend { q, layer, .. } = *op else { continue };
        if schedule.rows_of[q.0 as usize] != Rows::Tokens {
            return Err(CudaError::Unsupported("the model attends with its output rows alone".to_owned()));
        }
        let geometry = graph.kv_layers[layer.0 as usize];
        let heads = graph.width(q) / geometry.k_head_dim / geometry.n_kv_heads;
        let shape = GroupShape::new(geometry.n_kv_heads, heads);
        let slot = &mut shapes[layers[layer.0 as usize].0];
        if slot.is_some_and(|s| s != shape) {
            return Err(CudaError::Unsupported("layers of one cache group have different numbers of heads".to_owned()));
        }
        *slot = Some(shape);
    }
    Ok(shapes.into_iter().map(|s| s.unwrap_or(GroupShape::new(1, 1))).collect())
}

fn rope(gpu: &Arc<Gpu>, rotary: &Rotary, pairing: RopePairing, rows: usize) -> Result<Rope, CudaError> {
    let frequencies = gpu.allocate(rotary.frequencies().len() * 8, "rotations")?;
    // SAFETY: the memory has that size; the copy is waited for.
    unsafe { gpu.upload(frequencies.at(), bytemuck::cast_slice(rotary.frequencies())) }?;
    gpu.synchronize()?;
    Ok(Rope {
        frequencies,
        n_rot: rotary.n_rot(),
        magnitude: rotary.magnitude() as f32,
        neox: pairing == RopePairing::Neox,
        table: gpu.allocate(rows * rotary.n_rot() * 4, "rotations")?,
    })
}
