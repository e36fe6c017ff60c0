//! Cases: stores with pages in random codecs, a step over them, and queries.

use std::collections::HashMap;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use opencoti_compute::channels::Channels;
use opencoti_compute::cpu::rope::Rotary;
use opencoti_compute::graph::{Graph, GraphBuilder, KvGeometry, KvLayerId, Rope, RopePairing, RopeScaling};
use opencoti_compute::plan::{
    AppendRun, GroupPlan, LayerTiles, Mask, PageSet, PageSpan, QueryRotation, Residency, SealRun, Segment, Step,
    StoreView, TileSide,
};
use opencoti_plugin_api::host::{Codec, CodecPlugin, Instance, NoSink};
use opencoti_plugin_api::kv_codec::Side;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::f64_attention::stored;
use crate::plain_codec;

/// Layers in a page, and the one that is tested: the other holds bytes that must not matter.
const LAYERS: usize = 2;
/// The layer under test.
pub(crate) const LAYER: usize = 1;
/// Codecs of the scalar plugin.
pub(crate) const SCALAR: [&str; 7] = ["f16", "bf16", "q8_0", "q6_0", "q5_1", "q5_0", "q4_0"];
/// Those of them with integer codes, whose kernels round queries and weights to 16 bits.
const ROUNDED: [&str; 5] = ["q8_0", "q6_0", "q5_1", "q5_0", "q4_0"];
/// Token-wise codecs of rotated groups.
pub(crate) const ROTATED: [&str; 6] = ["turbo2", "turbo3", "turbo4", "turbo8", "turbo2_tcq", "turbo3_tcq"];
const PAGES: u32 = 8;

/// A step with everything it works on.
pub(crate) struct Case {
    pub(crate) graph: Graph,
    pub(crate) geometry: KvGeometry,
    pub(crate) n_heads: usize,
    pub(crate) step: Step,
    pub(crate) q: Vec<f32>,
    pub(crate) k: Vec<f32>,
    pub(crate) v: Vec<f32>,
    pub(crate) rope: Option<Rotary>,
    pub(crate) pairing: RopePairing,
    pub(crate) angles: Vec<f32>,
    pub(crate) scale: f32,
    pub(crate) softcap: Option<f32>,
    /// Slots written in each page of each store.
    filled: HashMap<(u32, u32), u32>,
    /// The stores' pages.
    _memory: Vec<Vec<[u64; 8]>>,
}

struct Plugins {
    scalar: CodecPlugin,
    turbo: CodecPlugin,
    trellis: CodecPlugin,
    kvarn: CodecPlugin,
    plain: CodecPlugin,
}

impl Plugins {
    fn new() -> Plugins {
        let linked = |root| CodecPlugin::new(Instance::create(root, "{}", Arc::new(NoSink)).unwrap()).unwrap();
        Plugins {
            scalar: linked(opencoti_kv_scalar::root()),
            turbo: linked(opencoti_kv_turbo::root()),
            trellis: linked(opencoti_kv_tcq::root()),
            kvarn: linked(opencoti_kv_kvarn::root()),
            plain: plain_codec::plugin(),
        }
    }

    fn open(&self, name: &str, rotated: bool, side: Side, head_dim: usize) -> Codec {
        let (plugin, options) = match name {
            _ if SCALAR.contains(&name) => (&self.scalar, if rotated { r#"{"rotation":"hadamard"}"# } else { "{}" }),
            _ if name.ends_with("_tcq") => (&self.trellis, "{}"),
            _ if name.starts_with("kvarn") => (&self.kvarn, "{}"),
            _ if ROTATED.contains(&name) => (&self.turbo, "{}"),
            _ => (&self.plain, "{}"),
        };
        plugin.open(name, options, side, head_dim).unwrap()
    }
}

fn pick<T: Copy>(rng: &mut ChaCha8Rng, from: &[T]) -> T {
    from[rng.random_range(0..from.len())]
}

/// A run of rows by itself.
pub(crate) fn one(rows: Range<u32>) -> Vec<Range<u32>> {
    std::iter::once(rows).collect()
}

/// Rows of uniform values with an outlier as the last, which shows a kernel that stops early.
fn rows(rng: &mut ChaCha8Rng, n: usize, d: usize) -> Vec<f32> {
    let mut values: Vec<f32> = (0..n * d).map(|_| rng.random_range(-1.0..1.0)).collect();
    values.chunks_exact_mut(d).for_each(|row| row[d - 1] = rng.random_range(-6.0..6.0));
    values
}

fn graph(geometry: KvGeometry, n_heads: usize) -> Graph {
    let mut b = GraphBuilder::new();
    let (dk, dv, n_kv) = (geometry.k_head_dim, geometry.v_head_dim, geometry.n_kv_heads);
    let table = b.weight("token_embd.weight", n_heads * dk, 4);
    let (wk, wv) = (b.weight("k", n_heads * dk, n_kv * dk), b.weight("v", n_heads * dk, n_kv * dv));
    let x = b.embed(table, 1.0);
    let (k, v) = (b.matmul(x, wk), b.matmul(x, wv));
    for _ in 0..LAYERS {
        let layer = b.kv_layer(geometry);
        b.append(layer, k, v);
        b.attend(x, layer, None, 1.0, None);
    }
    let out = b.select_outputs(x);
    b.attend(out, KvLayerId(LAYER as u32), None, 1.0, None);
    b.finish(out, out)
}

impl Case {
    /// Whether some codec's kernels round queries or weights.
    pub(crate) fn rounds(&self) -> bool {
        let layers = self.step.stores.iter().flat_map(|s| &s.layers);
        layers.flat_map(|l| [&l.k, &l.v]).any(|side| ROUNDED.contains(&side.codec.name()))
    }

    fn new(rng: &mut ChaCha8Rng, geometry: KvGeometry, heads: usize, positions: Vec<u32>) -> Case {
        let n_heads = geometry.n_kv_heads * heads;
        let n = positions.len();
        let (dk, dv) = (geometry.k_head_dim, geometry.v_head_dim);
        let step = Step { tokens: vec![0; n], positions, groups: vec![GroupPlan::default()], ..Step::default() };
        Case {
            graph: graph(geometry, n_heads),
            geometry,
            n_heads,
            step,
            q: rows(rng, n * n_heads, dk),
            k: rows(rng, n * geometry.n_kv_heads, dk),
            v: rows(rng, n * geometry.n_kv_heads, dv),
            rope: None,
            pairing: RopePairing::Neox,
            angles: vec![],
            scale: 1.0 / (dk as f32).sqrt(),
            softcap: None,
            filled: HashMap::new(),
            _memory: vec![],
        }
    }

    /// Adds a store of [`PAGES`] pages.
    fn add_store(&mut self, k: &Codec, v: &Codec) -> u32 {
        let mut offset = 0;
        let mut side = |codec: &Codec| {
            let tile_bytes = codec.layout().tile_bytes;
            let at = offset;
            offset += tile_bytes * self.geometry.n_kv_heads;
            TileSide { codec: codec.clone(), offset: at, tile_bytes, channels: None }
        };
        let layers = (0..LAYERS).map(|_| LayerTiles { k: side(k), v: side(v) }).collect();
        let mut memory = vec![[0xfcfc_fcfc_fcfc_fcfc; 8]; PAGES as usize * offset.div_ceil(64)];
        self.step.stores.push(StoreView {
            group: 0,
            base: NonNull::new(memory.as_mut_ptr().cast()).unwrap(),
            page_bytes: offset.next_multiple_of(64),
            n_pages: PAGES as usize,
            layers,
        });
        self._memory.push(memory);
        self.step.stores.len() as u32 - 1
    }

    /// Lets the keys and values of a store be stored with other offsets and factors of their channels.
    fn prepare_channels(&mut self, rng: &mut ChaCha8Rng, store: u32) {
        let n = self.geometry.n_kv_heads;
        let tiles = &mut self.step.stores[store as usize].layers[LAYER];
        for side in [&mut tiles.k, &mut tiles.v] {
            let d = side.codec.head_dim();
            let offsets = (0..n * d).map(|_| rng.random_range(-1.0..1.0)).collect();
            let factors = (0..n * d).map(|_| rng.random_range(0.5..2.0)).collect();
            side.channels = Some(Arc::new(Channels::new(n, d, Some(offsets), Some(factors)).unwrap()));
        }
    }

    /// Fills a page up to `len` slots with random rows.
    fn fill(&mut self, rng: &mut ChaCha8Rng, store: u32, page: u32, len: u32) {
        let filled = self.filled.entry((store, page)).or_insert(0);
        let (first, n) = (*filled as usize, len.saturating_sub(*filled) as usize);
        if n == 0 {
            return;
        }
        *filled = len;
        let view = &self.step.stores[store as usize];
        for side in [&view.layers[LAYER].k, &view.layers[LAYER].v] {
            let d = side.codec.head_dim();
            for head in 0..self.geometry.n_kv_heads {
                let rows = rows(rng, n, d);
                // SAFETY: the page exists and only this thread uses it.
                unsafe { side.codec.append(view.tile(side, page, head), first, n, rows.as_ptr(), d).unwrap() };
            }
        }
    }

    fn use_rope(&mut self, pairing: RopePairing, n_rot: usize) {
        let rope = Rope { pairing, n_rot, base: 1e4, scaling: RopeScaling::None, freq_divisors: None };
        let rope = Rotary::new(&rope, None);
        self.angles = vec![0.0; self.step.positions.len() * n_rot];
        for (table, &position) in self.angles.chunks_exact_mut(n_rot).zip(&self.step.positions) {
            rope.angles(position, table);
        }
        (self.rope, self.pairing) = (Some(rope), pairing);
    }

    /// Consecutive spans over some pages, filled; often shorter than a page, sometimes with a gap of positions.
    fn spans(&mut self, rng: &mut ChaCha8Rng, store: u32) -> Vec<PageSpan> {
        let n = rng.random_range(1..=3);
        let mut position = rng.random_range(0..40);
        let mut spans = Vec::new();
        for _ in 0..n {
            // The last page is kept for writes.
            let page = rng.random_range(0..PAGES - 1);
            let len = pick(rng, &[1, 7, 64, 127, 128, 128, 128]);
            self.fill(rng, store, page, len);
            spans.push(PageSpan { page, start_pos: position, len });
            position += len + pick(rng, &[0, 0, 0, 5]);
        }
        spans
    }

    fn random_segment(&mut self, rng: &mut ChaCha8Rng, store: u32) -> Segment {
        let n = self.step.positions.len() as u32;
        let middle = rng.random_range(0..=n);
        let queries: Vec<Range<u32>> = match rng.random_range(0..3) {
            0 => one(0..n),
            1 => one(middle..n),
            _ => vec![0..middle / 2, middle..n],
        };
        let pages = match rng.random_range(0..4) {
            0 => PageSet::PerHead((0..self.geometry.n_kv_heads).map(|_| self.spans(rng, store)).collect()),
            _ => PageSet::All(self.spans(rng, store)),
        };
        let window = rng.random_range(1..300);
        Segment {
            queries,
            store,
            pages,
            mask: pick(rng, &[Mask::Causal, Mask::Causal, Mask::Full, Mask::Window(window)]),
            rotation: pick(rng, &[QueryRotation::Own, QueryRotation::Offset(-17), QueryRotation::At(33)]),
            residency: pick(rng, &[Residency::Device, Residency::Host]),
        }
    }

    /// Writes the batch's rows to the last page of `store`, and reads them causally.
    fn write_rows(&mut self, store: u32, mask: Mask) {
        let n = self.step.positions.len() as u32;
        let (page, start_pos) = (PAGES - 1, self.step.positions[0]);
        let plan = &mut self.step.groups[0];
        plan.appends.push(AppendRun { rows: 0..n, store, page, first_slot: 0 });
        plan.segments.push(Segment {
            queries: one(0..n),
            store,
            pages: PageSet::All(vec![PageSpan { page, start_pos, len: n }]),
            mask,
            rotation: QueryRotation::Own,
            residency: Residency::Device,
        });
    }

    /// Codec x mask x query rotation x page splits x shared pages x grouped heads x head sizes x stores x selections.
    pub(crate) fn random(seed: u64) -> Case {
        let rng = &mut ChaCha8Rng::seed_from_u64(seed);
        let plugins = Plugins::new();
        let dk = pick(rng, &[64, 96, 128, 256, 512]);
        let dv = pick(rng, &[dk, dk, 64, 96]);
        let n_kv_heads = rng.random_range(1..=3);
        let geometry = KvGeometry { n_kv_heads, k_head_dim: dk, v_head_dim: dv, window: None };
        let n = pick(rng, &[1, 1, 2, 5, 13, 40]);
        let first = rng.random_range(0..400);
        let heads = pick(rng, &[1, 3, 4, 7, 8]);
        let mut case = Case::new(rng, geometry, heads, (first..first + n).collect());
        for _ in 0..rng.random_range(1..=3) {
            let name = |rng: &mut ChaCha8Rng| match rng.random_range(0..8) {
                0 => "f32",
                1..=4 => pick(rng, &SCALAR),
                _ => pick(rng, &ROTATED),
            };
            let (k, v) = (name(rng), name(rng));
            let k = plugins.open(k, rng.random(), Side::K, dk);
            let v = plugins.open(v, rng.random(), Side::V, dv);
            let store = case.add_store(&k, &v);
            if rng.random_range(0..3) == 0 {
                case.prepare_channels(rng, store);
            }
        }
        match rng.random_range(0..3) {
            0 => {}
            1 => case.use_rope(RopePairing::Neox, dk),
            _ => case.use_rope(RopePairing::Norm, dk / 2),
        }
        case.softcap = pick(rng, &[None, None, Some(20.0)]);
        let stores = case.step.stores.len() as u32;
        for _ in 0..rng.random_range(0..=3) {
            let store = rng.random_range(0..stores);
            let segment = case.random_segment(rng, store);
            case.step.groups[0].segments.push(segment);
        }
        let store = rng.random_range(0..stores);
        case.write_rows(store, pick(rng, &[Mask::Causal, Mask::Full, Mask::Window(3)]));
        case
    }

    /// One store of two codecs, three pages and the rows' own.
    pub(crate) fn of_codecs(k: &str, v: &str, rotated: bool, n: u32) -> Case {
        let rng = &mut ChaCha8Rng::seed_from_u64(n.into());
        let plugins = Plugins::new();
        let geometry = KvGeometry { n_kv_heads: 2, k_head_dim: 64, v_head_dim: 64, window: None };
        let mut case = Case::new(rng, geometry, 3, (300..300 + n).collect());
        let k = plugins.open(k, rotated, Side::K, 64);
        let v = plugins.open(v, rotated, Side::V, 64);
        let store = case.add_store(&k, &v);
        case.use_rope(RopePairing::Neox, 64);
        case.write_rows(store, Mask::Causal);
        let mut pages = Vec::new();
        for (page, len) in [(0, 128), (1, 44), (2, 128)] {
            case.fill(rng, store, page, len);
            pages.push(PageSpan { page, start_pos: pages.last().map_or(0, |p: &PageSpan| p.start_pos + p.len), len });
        }
        case.step.groups[0].segments[0].pages = match &case.step.groups[0].segments[0].pages {
            PageSet::All(own) => PageSet::All(pages.into_iter().chain(own.iter().copied()).collect()),
            per_head => per_head.clone(),
        };
        case
    }

    /// Two pages of exact tokens, the second of them cut short, that are sealed and read as records, and a third one that
    /// the batch's `n` rows fill up and read exactly. Wide heads, so that a tile has several slices.
    pub(crate) fn sealed(k: &str, v: &str, head_dim: usize, heads: usize, n: u32) -> Case {
        let rng = &mut ChaCha8Rng::seed_from_u64(n.into());
        let plugins = Plugins::new();
        let geometry = KvGeometry { n_kv_heads: 2, k_head_dim: head_dim, v_head_dim: head_dim, window: None };
        let mut case = Case::new(rng, geometry, heads, (228..228 + n).collect());
        let open = |name: &str, side| plugins.open(name, side == Side::V, side, head_dim);
        let records = case.add_store(&open(k, Side::K), &open(v, Side::V));
        let exact = case.add_store(&open("f16", Side::K), &open("f16", Side::V));
        if !n.is_multiple_of(2) {
            case.prepare_channels(rng, records);
        }
        case.use_rope(RopePairing::Neox, head_dim);
        case.write_rows(exact, Mask::Causal);
        let mut pages = Vec::new();
        for (page, start_pos, len) in [(0, 0, 128), (1, 128, 100)] {
            case.fill(rng, exact, page, len);
            let seal = SealRun { from_store: exact, from_page: page, filled: len, store: records, page: page + 2 };
            case.step.groups[0].seals.push(seal);
            pages.push(PageSpan { page: page + 2, start_pos, len });
        }
        case.step.groups[0].segments.push(Segment {
            queries: one(0..n),
            store: records,
            pages: PageSet::All(pages),
            mask: Mask::Causal,
            rotation: QueryRotation::Own,
            residency: Residency::Device,
        });
        case
    }

    /// Rows of `n` sequences over the same pages, in a codec that counts.
    pub(crate) fn shared_prefix(n: u32, heads: usize) -> Case {
        let rng = &mut ChaCha8Rng::seed_from_u64(1);
        let plugins = Plugins::new();
        let geometry = KvGeometry { n_kv_heads: 2, k_head_dim: 64, v_head_dim: 96, window: None };
        let mut case = Case::new(rng, geometry, heads, vec![400; n as usize]);
        let k = plugins.open("counted", false, Side::K, 64);
        let v = plugins.open("counted", false, Side::V, 96);
        let store = case.add_store(&k, &v);
        let pages = (0..3).map(|page| PageSpan { page, start_pos: page * 128, len: 128 }).collect();
        (0..3).for_each(|page| case.fill(rng, store, page, 128));
        case.step.groups[0].segments.push(Segment {
            queries: (0..n).map(|row| row..row + 1).collect(),
            store,
            pages: PageSet::All(pages),
            mask: Mask::Causal,
            rotation: QueryRotation::Own,
            residency: Residency::Device,
        });
        case
    }

    /// A case whose keys are in a codec that panics.
    pub(crate) fn faulty(codec: &str) -> Case {
        let rng = &mut ChaCha8Rng::seed_from_u64(2);
        let plugins = Plugins::new();
        let geometry = KvGeometry { n_kv_heads: 2, k_head_dim: 64, v_head_dim: 64, window: None };
        let mut case = Case::new(rng, geometry, 2, (0..9).collect());
        let k = plugins.open(codec, false, Side::K, 64);
        let v = plugins.open("f16", false, Side::V, 64);
        let store = case.add_store(&k, &v);
        case.write_rows(store, Mask::Causal);
        case
    }

    /// Checks that the rows of the batch were written where the plan says, to within their codec's error.
    pub(crate) fn check_written(&self) {
        for run in &self.step.groups[0].appends {
            let store = &self.step.stores[run.store as usize];
            let tiles = &store.layers[LAYER];
            for (side, values) in [(&tiles.k, &self.k), (&tiles.v, &self.v)] {
                let d = side.codec.head_dim();
                let n_kv = self.geometry.n_kv_heads;
                for head in 0..n_kv {
                    let found = stored(store, side, run.page, head, run.rows.len());
                    for (row, found) in run.rows.clone().zip(found.chunks_exact(d)) {
                        let given = &values[(row as usize * n_kv + head) * d..][..d];
                        let error: f64 = given.iter().zip(found).map(|(a, b)| (f64::from(*a) - b).powi(2)).sum();
                        let norm: f64 = given.iter().map(|a| f64::from(*a).powi(2)).sum();
                        let bound = if side.codec.name().starts_with("turbo2") { 0.25 } else { 0.1 };
                        // Offsets and factors weigh the error otherwise.
                        let bound = if side.channels.is_some() { 4.0 * bound } else { bound };
                        assert!(error < bound * norm, "{} row {row} head {head}", side.codec.name());
                    }
                }
            }
        }
    }
}
