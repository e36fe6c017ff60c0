//! Catching what a model writes to its cache and asks of it: keys, values and queries of every layer, exact.

use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Result, bail};
use opencoti_compute::cpu::attention::Attention;
use opencoti_compute::cpu::executor::{Attend, AttentionKernels, LayerStep};
use opencoti_compute::cpu::pool::Worker;
use opencoti_compute::graph::{Graph, KvGeometry};
use opencoti_compute::plan::Step;
use opencoti_model::Model;
use opencoti_registry::Registry;

use super::{Options, text};
use crate::measure::codecs::Pair;
use crate::measure::rig::{Rig, Size};
use crate::settings::Settings;

/// What one layer was given.
#[derive(Clone, Debug)]
pub struct Layer {
    /// Cache group.
    pub group: usize,
    /// Place among the group's layers.
    pub place: usize,
    /// Heads.
    pub geometry: KvGeometry,
    /// Keys after rope, `n_kv_heads * k_head_dim` a token.
    pub k: Vec<f32>,
    /// Values, `n_kv_heads * v_head_dim` a token.
    pub v: Vec<f32>,
    /// Queries after rope, each of all heads.
    pub queries: Vec<Query>,
}

/// A row of queries.
#[derive(Clone, Debug)]
pub struct Query {
    /// Its position.
    pub position: usize,
    /// `n_heads * k_head_dim` values.
    pub row: Vec<f32>,
    /// Factor on scores.
    pub scale: f32,
    /// Cap on scores.
    pub softcap: Option<f32>,
}

/// The layers of a model, in the order of its graph; shared by the kernels that record and the one who reads.
#[derive(Clone)]
pub struct Recording(Arc<Vec<Mutex<Layer>>>);

impl Recording {
    /// An empty recording of a model.
    pub fn new(graph: &Graph) -> Recording {
        let mut layers: Vec<Option<Mutex<Layer>>> = graph.kv_layers.iter().map(|_| None).collect();
        for (g, group) in graph.cache_groups().into_iter().enumerate() {
            for (place, layer) in group.layers.into_iter().enumerate() {
                let geometry = group.geometry;
                let empty = Layer { group: g, place, geometry, k: Vec::new(), v: Vec::new(), queries: Vec::new() };
                layers[layer.0 as usize] = Some(Mutex::new(empty));
            }
        }
        Recording(Arc::new(layers.into_iter().flatten().collect()))
    }

    /// What was recorded; it is empty again.
    pub fn take(&self) -> Vec<Layer> {
        let take = |layer: &Mutex<Layer>| {
            let mut layer = layer.lock().unwrap_or_else(PoisonError::into_inner);
            let empty = Layer { k: Vec::new(), v: Vec::new(), queries: Vec::new(), ..*layer };
            std::mem::replace(&mut *layer, empty)
        };
        self.0.iter().map(take).collect()
    }
}

/// Attention that records what it is given.
pub struct Recorder {
    inner: Attention,
    recording: Recording,
    /// Layers of each cache group, as places in the recording.
    places: Vec<Vec<usize>>,
    /// Every so many positions a query is kept.
    stride: usize,
}

impl Recorder {
    /// Records to `recording` every key and value, and the queries of one position in `stride`.
    pub fn new(graph: &Graph, recording: Recording, stride: usize) -> Recorder {
        let place = |group: opencoti_compute::graph::CacheGroup| group.layers.iter().map(|l| l.0 as usize).collect();
        Recorder {
            inner: Attention::new(graph),
            places: graph.cache_groups().into_iter().map(place).collect(),
            recording,
            stride: stride.max(1),
        }
    }

    fn record(&self, at: LayerStep<'_>, change: impl FnOnce(&mut Layer)) {
        let layer = &self.recording.0[self.places[at.group][at.layer]];
        change(&mut layer.lock().unwrap_or_else(PoisonError::into_inner));
    }

    fn record_queries(&self, at: LayerStep<'_>, attend: &Attend<'_>) {
        let dim = at.geometry.k_head_dim;
        let width = attend.n_heads * dim;
        let kept =
            (0..attend.rows.count()).filter(|&i| attend.rows.position(i) as usize % self.stride == self.stride - 1);
        let query = |i: usize| {
            let mut row = attend.q[i * width..][..width].to_vec();
            if let Some(rope) = attend.rope {
                let angles = &attend.angles[attend.rows.step_row(i) * rope.n_rot()..][..rope.n_rot()];
                row.chunks_exact_mut(dim).for_each(|head| rope.rotate(angles, head));
            }
            let position = attend.rows.position(i) as usize;
            Query { position, row, scale: attend.scale, softcap: attend.softcap }
        };
        let queries: Vec<Query> = kept.map(query).collect();
        self.record(at, |layer| layer.queries.extend(queries));
    }
}

impl AttentionKernels for Recorder {
    fn prepare(&mut self, step: &Step, workers: usize) -> std::result::Result<(), String> {
        self.inner.prepare(step, workers)
    }

    unsafe fn append(
        &self,
        worker: Worker<'_>,
        at: LayerStep<'_>,
        k: &[f32],
        v: &[f32],
    ) -> std::result::Result<(), String> {
        // Every worker is called with the same rows.
        if worker.index() == 0 {
            self.record(at, |layer| {
                layer.k.extend_from_slice(k);
                layer.v.extend_from_slice(v);
            });
        }
        // SAFETY: passed on.
        unsafe { self.inner.append(worker, at, k, v) }
    }

    unsafe fn seal(&self, worker: Worker<'_>, at: LayerStep<'_>) -> std::result::Result<(), String> {
        // SAFETY: passed on.
        unsafe { self.inner.seal(worker, at) }
    }

    unsafe fn attend(
        &self,
        worker: Worker<'_>,
        at: LayerStep<'_>,
        attend: &Attend<'_>,
    ) -> std::result::Result<(), String> {
        if worker.index() == 0 {
            self.record_queries(at, attend);
        }
        // SAFETY: passed on.
        unsafe { self.inner.attend(worker, at, attend) }
    }
}

/// A model's layers with what they were given.
pub struct Captured {
    /// The model.
    pub model: Model,
    /// Its layers.
    pub layers: Vec<Layer>,
}

/// Runs a text through the model with an f16 cache and records it, with the queries of so many positions.
///
/// # Errors
/// A text that is too short, or a model without keys and values.
pub fn run(
    settings: &Settings,
    registry: &Registry,
    common: &Options,
    tokens: usize,
    queries: usize,
) -> Result<Captured> {
    let mut recording = None;
    let rows = settings.batch_size.max(1) as usize;
    let mut rig = Rig::load(settings, Size { rows, outputs: rows, context: tokens }, |model| {
        let empty = Recording::new(&model.graph);
        recording = Some(empty.clone());
        Box::new(Recorder::new(&model.graph, empty, tokens / queries.max(1)))
    })?;
    let text = common.text.tokens(&rig.model.tokenizer)?;
    let passage = text::passages(&text, tokens, 1, text::begin(&rig.model.tokenizer))?;
    let mut cache = rig.cache(&Pair::parse(settings, "f16")?, registry, tokens, 1)?;
    let seq = cache.create();
    // Only a row with an outcome takes part in the last layer's attention.
    rig.fill_with_outputs(&mut cache, seq, &passage[0])?;
    let layers = recording.map(|recording| recording.take()).unwrap_or_default();
    if layers.is_empty() {
        bail!("the model has no layer with keys and values, so there is nothing to store");
    }
    Ok(Captured { model: rig.model, layers })
}
