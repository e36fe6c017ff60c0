//! Reading tiles through the ABI against calling the same code directly: the mean ratio must stay below 1.03.
//!
//! A single pair may differ by a few per cent either way: the library and this program hold two copies of the kernels
//! at different addresses.
//!
//! The plugin comes from its library when that was built for this profile (`cargo build --release -p kv-scalar`), else
//! it is linked in. Short rounds of both ways alternate and the fastest of each counts: what else runs on the machine can
//! only slow a round down. `cargo bench -p opencoti-kv-scalar` prints a table and fails beyond the limit; `-- --criterion` gives
//! criterion's report, `-- --test` runs every pair once.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use criterion::Criterion;
use opencoti_kv_scalar::{Level, ScalarCodec};
use opencoti_plugin_api::cpu_tiles::CpuTiles;
use opencoti_plugin_api::host::{Codec, CodecPlugin, Instance, NoSink};
use opencoti_plugin_api::kv_codec::{KvCodec, OpenParams, Rows, RowsMut, Side};
use opencoti_plugin_api::{PAGE_TOKENS, PluginRoot};

const NAMES: [&str; 7] = ["f16", "bf16", "q8_0", "q6_0", "q5_1", "q5_0", "q4_0"];
const HEAD_DIMS: [usize; 3] = [64, 128, 256];
const ROWS: [usize; 3] = [1, 3, 8];
const LIMIT: f64 = 1.03;
const ROUNDS: usize = 400;
const MOST_ROUNDS: usize = 20_000;
const ROUND_NS: usize = 60_000;

/// The root in the plugin's library, when there is one.
fn loaded() -> Option<&'static PluginRoot> {
    let name = libloading::library_filename("kv_scalar");
    let bench = std::env::current_exe().ok()?;
    let path = bench.parent()?.parent()?.join(name);
    // SAFETY: our own library, whose initialisation does nothing; the symbol's type is the ABI's. It stays loaded.
    unsafe {
        let library = Box::leak(Box::new(libloading::Library::new(path).ok()?));
        let root = library.get::<unsafe extern "C" fn() -> *const PluginRoot>(b"opencoti_plugin_root").ok()?;
        Some(&*root())
    }
}

/// 64 aligned bytes.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line {
    _bytes: [u8; 64],
}

/// One tile and everything both ways need to read it.
struct Pair {
    label: String,
    direct: ScalarCodec,
    k: Codec,
    v: Codec,
    head_dim: usize,
    n_rows: usize,
    tile: Vec<u8>,
    prepared: Vec<Line>,
    scores: Vec<f32>,
    acc: Vec<f32>,
}

fn values(n: usize) -> Vec<f32> {
    (0..n).map(|i| ((i * 7919) % 1013) as f32 / 500.0 - 1.0).collect()
}

impl Pair {
    fn new(plugin: &CodecPlugin, name: &str, head_dim: usize, n_rows: usize) -> Pair {
        let params = OpenParams { codec: name.into(), options: serde_json::json!({}), side: Side::K, head_dim };
        let direct = ScalarCodec::open(&params, Level::detect()).unwrap();
        let [k, v] = [Side::K, Side::V].map(|side| plugin.open(name, "{}", side, head_dim).unwrap());
        let mut tile = vec![0; direct.facts().tile_bytes];
        let rows = values(PAGE_TOKENS * head_dim);
        direct.encode_page(&mut tile, Rows::new(&rows, PAGE_TOKENS, head_dim, head_dim)).unwrap();
        let mut prepared = vec![Line { _bytes: [0; 64] }; n_rows * direct.query_bytes() / 64];
        let q = values(n_rows * head_dim);
        // SAFETY: the space holds the rows.
        unsafe {
            let tiles = k.cpu_tiles().unwrap();
            tiles.prepare_query(q.as_ptr(), n_rows, head_dim, prepared.as_mut_ptr().cast()).unwrap();
        }
        Pair {
            label: format!("{name:5} {head_dim:4} {n_rows:3}"),
            scores: vec![0.0; n_rows * PAGE_TOKENS],
            acc: vec![0.0; n_rows * head_dim],
            direct,
            k,
            v,
            head_dim,
            n_rows,
            tile,
            prepared,
        }
    }

    fn read_directly(&mut self) {
        let (n, d) = (self.n_rows, self.head_dim);
        // SAFETY: the lines are plain bytes.
        let prepared = unsafe { std::slice::from_raw_parts(self.prepared.as_ptr().cast(), self.prepared.len() * 64) };
        let codec = black_box(&self.direct);
        codec.score(prepared, &self.tile, 0, RowsMut::new(&mut self.scores, n, PAGE_TOKENS, PAGE_TOKENS)).unwrap();
        let weights = Rows::new(&self.scores, n, PAGE_TOKENS, PAGE_TOKENS);
        codec.accumulate(weights, &self.tile, 0, RowsMut::new(&mut self.acc, n, d, d)).unwrap();
    }

    fn read_through_abi(&mut self) {
        let (n, d) = (self.n_rows, self.head_dim);
        let (tile, scores, acc) = (self.tile.as_ptr(), self.scores.as_mut_ptr(), self.acc.as_mut_ptr());
        let (k, v) = (black_box(&self.k).cpu_tiles().unwrap(), black_box(&self.v).cpu_tiles().unwrap());
        // SAFETY: the same sizes as above.
        unsafe {
            k.score(self.prepared.as_ptr().cast(), n, tile, 0, PAGE_TOKENS, scores, PAGE_TOKENS).unwrap();
            v.accumulate(scores, PAGE_TOKENS, n, tile, 0, PAGE_TOKENS, acc, d).unwrap();
        }
    }

    /// Nanoseconds of one reading, mean of `times`.
    fn time(&mut self, times: usize, read: fn(&mut Pair)) -> f64 {
        self.acc.fill(0.0);
        let start = Instant::now();
        (0..times).for_each(|_| read(self));
        start.elapsed().as_nanos() as f64 / times as f64
    }

    /// Nanoseconds of a reading, directly and through the ABI. Goes on while the machine is too busy to tell.
    fn measure(&mut self) -> (f64, f64) {
        let times = (ROUND_NS / (self.time(8, Pair::read_directly) as usize).max(1)).max(1);
        let (mut direct, mut abi) = (f64::INFINITY, f64::INFINITY);
        for round in 0..MOST_ROUNDS {
            direct = direct.min(self.time(times, Pair::read_directly));
            abi = abi.min(self.time(times, Pair::read_through_abi));
            if round >= ROUNDS && abi <= LIMIT * direct {
                break;
            }
        }
        (direct, abi)
    }
}

fn for_each_pair(plugin: &CodecPlugin, mut f: impl FnMut(Pair)) {
    for name in NAMES {
        for head_dim in HEAD_DIMS {
            for n_rows in ROWS {
                f(Pair::new(plugin, name, head_dim, n_rows));
            }
        }
    }
}

fn main() {
    let root = loaded();
    println!("the plugin is {}", if root.is_some() { "loaded from its library" } else { "linked in" });
    let root = root.unwrap_or_else(opencoti_kv_scalar::root);
    let plugin = CodecPlugin::new(Instance::create(root, "{}", Arc::new(NoSink)).unwrap()).unwrap();
    let asked = |flag: &str| std::env::args().any(|a| a == flag);
    if asked("--test") {
        for_each_pair(&plugin, |mut pair| {
            pair.read_directly();
            pair.read_through_abi();
        });
    } else if asked("--criterion") {
        let mut criterion = Criterion::default();
        for_each_pair(&plugin, |mut pair| {
            let mut group = criterion.benchmark_group(pair.label.clone());
            group.bench_function("direct", |b| b.iter(|| pair.read_directly()));
            group.bench_function("abi", |b| b.iter(|| pair.read_through_abi()));
            group.finish();
        });
    } else {
        table(&plugin);
    }
}

/// Prints every pair; panics when their geometric mean is beyond the limit.
fn table(plugin: &CodecPlugin) {
    println!("codec head rows   direct ns      abi ns  ratio");
    let (mut logs, mut worst) = (Vec::new(), 0f64);
    for_each_pair(plugin, |mut pair| {
        let (direct, abi) = pair.measure();
        let ratio = abi / direct;
        println!("{} {direct:13.0} {abi:11.0} {ratio:6.3}", pair.label);
        logs.push(ratio.ln());
        worst = worst.max(ratio);
    });
    let mean = (logs.iter().sum::<f64>() / logs.len() as f64).exp();
    println!("mean {mean:.4}, largest {worst:.3}");
    assert!(mean <= LIMIT, "reading through the ABI takes {mean:.3} times as long, the limit is {LIMIT}");
}
