//! Attention over the paged cache: writing keys and values, and reading segments.
//!
//! A step is cut into [`work::Item`]s before it runs. In each layer the workers take items one by one, each giving a
//! partial result (maximum, sum, weighted values) of its query rows, in the plain basis; then they meet and merge the
//! partial results of every row and head. Scratch grows to its final size in the first steps.

mod item;
mod kernels;
mod softmax;
mod work;

use std::cell::UnsafeCell;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use opencoti_plugin_api::PAGE_TOKENS;
use opencoti_plugin_api::kv_codec::Side;

use self::item::{Reader, Scratch};
use self::softmax::Softmax;
use self::work::{GroupWork, QUERY_ROWS};
use super::executor::{Attend, AttentionKernels, LayerStep, QueryRows, inputs, output};
use super::pool::Worker;
use crate::graph::{Graph, KvGeometry, Op};
use crate::plan::{AppendRun, SealRun, Step, StoreView, TileSide};

/// Heads of a cache group.
#[derive(Clone, Copy, Debug)]
struct GroupShape {
    geometry: KvGeometry,
    /// Most query heads that share a KV head in any layer of the group.
    heads_per_kv: usize,
    /// Whether some layer is read by output rows alone.
    for_outputs: bool,
}

/// The work of one group in one step.
#[derive(Default)]
struct Work {
    /// Of all rows.
    all: GroupWork,
    /// Of the output rows; empty if no layer needs it.
    outputs: GroupWork,
}

impl Work {
    fn of(&self, rows: QueryRows<'_>) -> &GroupWork {
        if rows.are_outputs() { &self.outputs } else { &self.all }
    }
}

/// The kernels of [`Op::Append`] and [`Op::Attend`] over codecs of plugins.
pub struct Attention {
    shapes: Vec<GroupShape>,
    work: Vec<Work>,
    /// One a worker.
    scratch: Vec<UnsafeCell<Scratch>>,
    /// Weighted sums of values: `v_head_dim` for each entry, that is each partial row and query head that shares the
    /// KV head.
    acc: Shared<f32>,
    /// Maximum and sum of weights of each entry.
    state: Shared<Softmax>,
    /// The next item of the running layer that nobody has taken.
    next: AtomicUsize,
    /// Set by the first failure of a step: the rest of its items are left out.
    failed: AtomicBool,
}

/// Values that workers write side by side, each its own.
struct Shared<T>(Vec<UnsafeCell<T>>);

impl<T> Shared<T> {
    /// Values `range`, to write.
    ///
    /// # Safety
    /// Nobody else uses them while the slice lives.
    #[allow(clippy::mut_from_ref, reason = "items, not the borrow checker, keep workers apart")]
    unsafe fn part(&self, range: Range<usize>) -> &mut [T] {
        let cells = &self.0[range];
        // SAFETY: a cell is its value; the rest is the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(UnsafeCell::raw_get(cells.as_ptr()), cells.len()) }
    }

    /// All values.
    ///
    /// # Safety
    /// Nobody writes while the slice lives.
    unsafe fn all(&self) -> &[T] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts(UnsafeCell::raw_get(self.0.as_ptr()), self.0.len()) }
    }

    fn grow(&mut self, len: usize, value: impl Fn() -> T) {
        self.0.resize_with(self.0.len().max(len), || UnsafeCell::new(value()));
    }
}

// SAFETY: scratch `i` is used by worker `i` alone; entries of the partial results by the worker that took their item,
// and after the barrier by readers only; everything else is written through `&mut self` or is atomic.
unsafe impl Sync for Attention {}

impl Attention {
    /// Kernels for the layers of `graph`.
    pub fn new(graph: &Graph) -> Attention {
        let groups = graph.cache_groups();
        let mut shapes: Vec<GroupShape> = groups
            .iter()
            .map(|group| GroupShape { geometry: group.geometry, heads_per_kv: 1, for_outputs: false })
            .collect();
        let mut selected = vec![false; graph.widths.len()];
        for op in &graph.ops {
            let of_outputs =
                matches!(op, Op::SelectOutputs { .. }) || inputs(op).iter().any(|v| selected[v.0 as usize]);
            if let Some(out) = output(op) {
                selected[out.0 as usize] = of_outputs;
            }
            if let Op::Attend { q, layer, .. } = op {
                let geometry = graph.kv_layers[layer.0 as usize];
                let heads = graph.width(*q) / geometry.k_head_dim / geometry.n_kv_heads;
                for shape in shapes.iter_mut().filter(|shape| shape.geometry == geometry) {
                    shape.heads_per_kv = shape.heads_per_kv.max(heads);
                    shape.for_outputs |= of_outputs;
                }
            }
        }
        Attention {
            shapes,
            work: groups.iter().map(|_| Work::default()).collect(),
            scratch: Vec::new(),
            acc: Shared(Vec::new()),
            state: Shared(Vec::new()),
            next: AtomicUsize::new(0),
            failed: AtomicBool::new(false),
        }
    }

    /// Brings scratch and partial results to the size of the step.
    fn reserve(&mut self, step: &Step, workers: usize) {
        let query_bytes = step
            .stores
            .iter()
            .flat_map(|s| &s.layers)
            .filter_map(|l| l.k.codec.cpu_tiles())
            .map(|tiles| tiles.query_bytes());
        let query_bytes = query_bytes.max().unwrap_or(0);
        self.scratch.resize_with(self.scratch.len().max(workers), UnsafeCell::default);
        for shape in &self.shapes {
            let rows = QUERY_ROWS.max(shape.heads_per_kv);
            for scratch in &mut self.scratch {
                scratch.get_mut().reserve(rows, &shape.geometry, query_bytes);
            }
        }
        for (shape, work) in self.shapes.iter().zip(&self.work) {
            let entries = work.all.n_partials.max(work.outputs.n_partials) * shape.heads_per_kv;
            self.acc.grow(entries * shape.geometry.v_head_dim, || 0.0);
            self.state.grow(entries, || Softmax::EMPTY);
        }
    }

    /// Takes items until none is left.
    ///
    /// # Safety
    /// As [`AttentionKernels::attend`].
    unsafe fn run_items(&self, worker: Worker<'_>, at: LayerStep<'_>, attend: &Attend<'_>) -> Result<(), String> {
        let work = self.work[at.group].of(attend.rows);
        // SAFETY: this worker's own.
        let scratch = unsafe { &mut *self.scratch[worker.index()].get() };
        let heads = attend.n_heads / at.geometry.n_kv_heads;
        while !self.failed.load(Ordering::Relaxed) {
            let Some(item) = work.items.get(self.next.fetch_add(1, Ordering::Relaxed)) else { break };
            let entries =
                item.partial as usize * heads..(item.partial + item.rows.end - item.rows.start) as usize * heads;
            let v_dim = at.geometry.v_head_dim;
            // SAFETY: the entries of this item belong to the worker that took it.
            let (acc, state) =
                unsafe { (self.acc.part(entries.start * v_dim..entries.end * v_dim), self.state.part(entries)) };
            let rows = &work.rows[item.rows.start as usize..item.rows.end as usize];
            // SAFETY: the step was checked.
            let done = unsafe { Reader::new(at, attend, item, rows).run(scratch, acc, state) };
            if done.is_err() {
                self.failed.store(true, Ordering::Relaxed);
                return done;
            }
        }
        Ok(())
    }

    /// Merges the partial results of this worker's share of rows and KV heads.
    ///
    /// # Safety
    /// All items are done, and `attend.out` is as [`AttentionKernels::attend`] says.
    unsafe fn merge(&self, worker: Worker<'_>, at: LayerStep<'_>, attend: &Attend<'_>) {
        let (work, n_kv, v_dim) = (self.work[at.group].of(attend.rows), at.geometry.n_kv_heads, at.geometry.v_head_dim);
        let heads = attend.n_heads / n_kv;
        // SAFETY: nobody writes partial results now.
        let (acc, state) = unsafe { (self.acc.all(), self.state.all()) };
        for slot in worker.share(attend.rows.count() * n_kv, 1) {
            let parts = &work.parts[work.first_part[slot] as usize..work.first_part[slot + 1] as usize];
            for head in 0..heads {
                let entries = parts.iter().map(|&p| p as usize * heads + head);
                // SAFETY: this worker's share of the output.
                let out =
                    unsafe { std::slice::from_raw_parts_mut(attend.out.add((slot * heads + head) * v_dim), v_dim) };
                merge_row(entries.map(|e| (state[e], &acc[e * v_dim..][..v_dim])), out);
            }
        }
    }
}

/// Weighted mean of partial results by log-sum-exp; zeros when no part saw a key.
fn merge_row<'a>(parts: impl Iterator<Item = (Softmax, &'a [f32])> + Clone, out: &mut [f32]) {
    out.fill(0.0);
    let max = parts.clone().fold(f32::NEG_INFINITY, |max, (s, _)| max.max(s.max));
    let mut sum = 0.0;
    for (state, acc) in parts.filter(|(s, _)| s.max > f32::NEG_INFINITY) {
        let weight = (state.max - max).exp2();
        sum += weight * state.sum;
        for (o, a) in out.iter_mut().zip(acc) {
            *o += weight * a;
        }
    }
    // A NaN among the sums goes through.
    if sum != 0.0 {
        out.iter_mut().for_each(|o| *o /= sum);
    }
}

fn grow<T: Clone>(vec: &mut Vec<T>, len: usize, value: T) {
    if vec.len() < len {
        vec.resize(len, value);
    }
}

/// Checks that the tiles of a store are those of the group's heads.
fn check_store(index: usize, store: &StoreView, geometry: &KvGeometry) -> Result<(), String> {
    let sides =
        store.layers.iter().flat_map(|l| [(&l.k, Side::K, geometry.k_head_dim), (&l.v, Side::V, geometry.v_head_dim)]);
    for (tiles, side, head_dim) in sides {
        let TileSide { codec, offset, tile_bytes, channels } = tiles;
        if codec.side() != side {
            return Err(format!("store {index} has a codec opened for {} in place of {side}", codec.side()));
        }
        if codec.head_dim() != head_dim {
            let found = codec.head_dim();
            return Err(format!("store {index} has a codec of head size {found} for {side}, expected {head_dim}"));
        }
        if let Some(channels) = channels
            && (channels.n_heads(), channels.head_dim()) != (geometry.n_kv_heads, head_dim)
        {
            let (heads, dim) = (channels.n_heads(), channels.head_dim());
            return Err(format!("store {index} prepares {heads} heads of {dim} channels for {side}"));
        }
        if *tile_bytes != codec.layout().tile_bytes {
            let expected = codec.layout().tile_bytes;
            return Err(format!("store {index} has tiles of {tile_bytes} bytes for {side}, expected {expected}"));
        }
        let end = tile_bytes.checked_mul(geometry.n_kv_heads).and_then(|n| n.checked_add(*offset));
        if end.is_none_or(|end| end > store.page_bytes) {
            return Err(format!("store {index} has pages of {} bytes, too few for its {side} tiles", store.page_bytes));
        }
    }
    Ok(())
}

impl AttentionKernels for Attention {
    fn prepare(&mut self, step: &Step, workers: usize) -> Result<(), String> {
        for (index, store) in step.stores.iter().enumerate() {
            check_store(index, store, &self.shapes[store.group as usize].geometry)?;
        }
        for ((work, plan), shape) in self.work.iter_mut().zip(&step.groups).zip(&self.shapes) {
            let cut = |work: &mut GroupWork, rows| {
                work.cut(plan, rows, shape.geometry.n_kv_heads, shape.heads_per_kv, workers)
            };
            cut(&mut work.all, QueryRows::all(step))?;
            if shape.for_outputs {
                cut(&mut work.outputs, QueryRows::outputs(step))?;
            }
        }
        self.reserve(step, workers);
        *self.next.get_mut() = 0;
        *self.failed.get_mut() = false;
        Ok(())
    }

    unsafe fn append(&self, worker: Worker<'_>, at: LayerStep<'_>, k: &[f32], v: &[f32]) -> Result<(), String> {
        // SAFETY: passed on.
        let done = unsafe { self.append_rows(worker, at, k, v) };
        if at.step.groups[at.group].seals.is_empty() {
            return done;
        }
        worker.barrier();
        // SAFETY: passed on; what the pages to seal hold is written.
        done.and(unsafe { self.seal(worker, at) })
    }

    unsafe fn seal(&self, worker: Worker<'_>, at: LayerStep<'_>) -> Result<(), String> {
        let n_kv_heads = at.geometry.n_kv_heads;
        let seals = &at.step.groups[at.group].seals;
        // SAFETY: this worker's own.
        let scratch = unsafe { &mut *self.scratch[worker.index()].get() };
        for unit in worker.share(seals.len() * n_kv_heads * 2, 1) {
            if self.failed.load(Ordering::Relaxed) {
                break;
            }
            let (run, rest) = (&seals[unit / (n_kv_heads * 2)], unit % (n_kv_heads * 2));
            let side = if rest % 2 == 0 { Side::K } else { Side::V };
            // SAFETY: `prepare` found one writer a page, so this worker alone writes the tile.
            let done = unsafe { seal_head(at, run, side, rest / 2, scratch) };
            if done.is_err() {
                self.failed.store(true, Ordering::Relaxed);
                return done;
            }
        }
        Ok(())
    }

    unsafe fn attend(&self, worker: Worker<'_>, at: LayerStep<'_>, attend: &Attend<'_>) -> Result<(), String> {
        // SAFETY: passed on.
        let done = unsafe { self.run_items(worker, at, attend) };
        worker.barrier();
        if worker.index() == 0 {
            // The executor places a barrier before the next attention.
            self.next.store(0, Ordering::Relaxed);
        }
        // SAFETY: all items are done, or their results are never used.
        unsafe { self.merge(worker, at, attend) };
        done
    }
}

impl Attention {
    /// Writes this worker's share of the step's rows.
    ///
    /// # Safety
    /// As [`AttentionKernels::append`].
    unsafe fn append_rows(&self, worker: Worker<'_>, at: LayerStep<'_>, k: &[f32], v: &[f32]) -> Result<(), String> {
        let g = at.geometry;
        let appends = &at.step.groups[at.group].appends;
        // SAFETY: this worker's own.
        let scratch = unsafe { &mut *self.scratch[worker.index()].get() };
        for unit in worker.share(appends.len() * g.n_kv_heads * 2, 1) {
            if self.failed.load(Ordering::Relaxed) {
                break;
            }
            let (run, rest) = (&appends[unit / (g.n_kv_heads * 2)], unit % (g.n_kv_heads * 2));
            let tiles = &at.step.stores[run.store as usize].layers[at.layer];
            let done = match rest % 2 {
                // SAFETY: `prepare` found one run a page, so this worker alone writes the tile.
                0 => unsafe { append_head(at, run, &tiles.k, rest / 2, k, g.k_head_dim, scratch) },
                // SAFETY: as above.
                _ => unsafe { append_head(at, run, &tiles.v, rest / 2, v, g.v_head_dim, scratch) },
            };
            if done.is_err() {
                self.failed.store(true, Ordering::Relaxed);
                return done;
            }
        }
        Ok(())
    }
}

/// Writes one head's rows of a run into its tile.
///
/// # Safety
/// Nobody else uses the tile; the step was checked.
unsafe fn append_head(
    at: LayerStep<'_>,
    run: &AppendRun,
    side: &TileSide,
    kv_head: usize,
    values: &[f32],
    head_dim: usize,
    scratch: &mut Scratch,
) -> Result<(), String> {
    let width = at.geometry.n_kv_heads * head_dim;
    let rows = &values[run.rows.start as usize * width..run.rows.end as usize * width];
    if rows.is_empty() {
        return Ok(());
    }
    let first = &rows[kv_head * head_dim..];
    let (slot, n) = (run.first_slot as usize, run.rows.len());
    assert!(slot + n <= PAGE_TOKENS);
    let (first, stride) = match &side.channels {
        None => (first, width),
        Some(channels) => (scratch.stored(channels, kv_head, first, width, n), head_dim),
    };
    // SAFETY: the page and head exist by the checks of the step; `first` begins `n` rows, `stride` apart.
    unsafe {
        let tile = at.step.stores[run.store as usize].tile(side, run.page, kv_head);
        side.codec.append(tile, slot, n, first.as_ptr(), stride).map_err(|e| codec_failed("store", side, &e))
    }
}

/// Encodes one head's exact tokens into its tile of another store.
///
/// # Safety
/// Nobody else uses the tiles; the step was checked.
unsafe fn seal_head(
    at: LayerStep<'_>,
    run: &SealRun,
    side: Side,
    kv_head: usize,
    scratch: &mut Scratch,
) -> Result<(), String> {
    let (from_store, to_store) = (&at.step.stores[run.from_store as usize], &at.step.stores[run.store as usize]);
    let (from, to) = (from_store.layers[at.layer].side(side), to_store.layers[at.layer].side(side));
    let (d, filled) = (from.codec.head_dim(), run.filled as usize);
    let rows = scratch.page(d);
    // SAFETY: the pages and the head exist by the checks of the step; `rows` has room for a page.
    unsafe {
        let tile = from_store.tile(from, run.from_page, kv_head);
        from.codec.decode_page(tile, 0, filled, rows.as_mut_ptr(), d).map_err(|e| codec_failed("read", from, &e))?;
        // Only rotates where the exact tokens are kept in another basis.
        let back = from.codec.transform_output(rows.as_mut_ptr(), filled, d);
        back.map_err(|e| codec_failed("transform the output of", from, &e))?;
    }
    let (written, missing) = rows.split_at_mut(filled * d);
    for row in written.chunks_exact_mut(d) {
        // The sum of one row with weight 1 is the row.
        from.channels.iter().for_each(|channels| channels.output(kv_head, 1.0, row));
        to.channels.iter().for_each(|channels| channels.store(kv_head, row));
    }
    missing.chunks_exact_mut(d).for_each(|row| row.copy_from_slice(&written[(filled - 1) * d..]));
    // SAFETY: as above.
    unsafe {
        let tile = to_store.tile(to, run.page, kv_head);
        to.codec.encode_page(tile, rows.as_ptr(), d).map_err(|e| codec_failed("store", to, &e))
    }
}

/// The sentence about a codec that failed.
fn codec_failed(doing: &str, side: &TileSide, error: &opencoti_plugin_api::Error) -> String {
    let (name, plugin) = (side.codec.name(), side.codec.plugin().name());
    format!("codec `{name}` of plugin `{plugin}` could not {doing} {}: {error}", side.codec.side())
}
