//! Nanoseconds a row of encoding, and a tile of scoring and summing, for every codec; f16 is the measure.
//!
//! `cargo bench -p opencoti-kv-common`; `-- --test` runs everything once. Short rounds of all codecs alternate and the
//! fastest of each counts: what else runs on the machine can only slow a round down.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use opencoti_plugin_api::PAGE_TOKENS;
use opencoti_plugin_api::host::{Codec, CodecPlugin, Instance, NoSink};
use opencoti_plugin_api::kv_codec::Side;

const HEAD_DIMS: [usize; 3] = [64, 128, 256];
const ROWS: [usize; 3] = [1, 3, 8];
const ROUNDS: usize = 60;
const ROUND_NS: u128 = 300_000;

/// 64 aligned bytes.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line {
    _bytes: [u8; 64],
}

const ZERO: Line = Line { _bytes: [0; 64] };

/// A codec with tiles enough that they do not stay in the first-level cache.
struct Bench {
    name: String,
    k: Codec,
    v: Codec,
    head_dim: usize,
    n_rows: usize,
    values: Vec<f32>,
    keys: Vec<Line>,
    sums: Vec<Line>,
    prepared: Vec<Line>,
    scores: Vec<f32>,
    acc: Vec<f32>,
}

impl Bench {
    fn new(plugin: &CodecPlugin, name: &str, head_dim: usize, n_rows: usize) -> Bench {
        let open = |side| plugin.open(name, "{}", side, head_dim).expect("opens");
        let (k, v) = (open(Side::K), open(Side::V));
        let lines = |codec: &Codec| vec![ZERO; codec.layout().tile_bytes.div_ceil(64)];
        let values = (0..PAGE_TOKENS * head_dim).map(|i| ((i * 7919) % 1013) as f32 / 500.0 - 1.0).collect();
        let query_bytes = k.cpu_tiles().expect("kernels").query_bytes();
        let mut bench = Bench {
            name: name.to_owned(),
            keys: lines(&k),
            sums: lines(&v),
            k,
            v,
            head_dim,
            n_rows,
            values,
            prepared: vec![ZERO; n_rows * query_bytes / 64],
            scores: vec![0.0; n_rows * PAGE_TOKENS],
            acc: vec![0.0; n_rows * head_dim],
        };
        bench.encode();
        // SAFETY: a tile and a page of rows.
        unsafe { bench.v.encode_page(bench.sums.as_mut_ptr().cast(), bench.values.as_ptr(), head_dim) }
            .expect("encodes");
        let tiles = bench.k.cpu_tiles().expect("kernels");
        // SAFETY: the rows and the space for them.
        unsafe {
            let to = bench.prepared.as_mut_ptr().cast();
            tiles.prepare_query(bench.values.as_ptr(), n_rows, head_dim, to).expect("prepares");
        }
        bench
    }

    fn encode(&mut self) {
        // SAFETY: a tile and a page of rows.
        unsafe { self.k.encode_page(self.keys.as_mut_ptr().cast(), self.values.as_ptr(), self.head_dim) }
            .expect("encodes");
    }

    fn score(&mut self) {
        let tiles = self.k.cpu_tiles().expect("kernels");
        let (prepared, tile) = (self.prepared.as_ptr().cast(), self.keys.as_ptr().cast());
        // SAFETY: prepared rows, a tile and space for the scores.
        unsafe { tiles.score(prepared, self.n_rows, tile, 0, PAGE_TOKENS, self.scores.as_mut_ptr(), PAGE_TOKENS) }
            .expect("scores");
    }

    fn accumulate(&mut self) {
        let tiles = self.v.cpu_tiles().expect("kernels");
        let (weights, tile) = (self.scores.as_ptr(), self.sums.as_ptr().cast());
        let acc = self.acc.as_mut_ptr();
        // SAFETY: weights, a tile and rows of sums.
        unsafe { tiles.accumulate(weights, PAGE_TOKENS, self.n_rows, tile, 0, PAGE_TOKENS, acc, self.head_dim) }
            .expect("sums");
    }

    /// Nanoseconds of a call, mean of a round.
    fn time(&mut self, call: fn(&mut Bench)) -> f64 {
        self.acc.fill(0.0);
        let (start, mut n) = (Instant::now(), 0);
        while start.elapsed().as_nanos() < ROUND_NS {
            call(black_box(self));
            n += 1;
        }
        start.elapsed().as_nanos() as f64 / f64::from(n)
    }
}

fn main() {
    let roots =
        [opencoti_kv_scalar::root(), opencoti_kv_turbo::root(), opencoti_kv_tcq::root(), opencoti_kv_kvarn::root()];
    let plugins =
        roots.map(|r| CodecPlugin::new(Instance::create(r, "{}", Arc::new(NoSink)).expect("is made")).expect("is one"));
    let rounds = if std::env::args().any(|a| a == "--test") { 1 } else { ROUNDS };
    println!("codec       head rows  encode ns/row  score ns/tile  sum ns/tile  both, of f16");
    for head_dim in HEAD_DIMS {
        for n_rows in ROWS {
            let mut benches = Vec::new();
            for plugin in &plugins {
                for codec in plugin.codecs().expect("codecs") {
                    benches.push(Bench::new(plugin, &codec.name, head_dim, n_rows));
                }
            }
            let mut best = vec![[f64::INFINITY; 3]; benches.len()];
            for _ in 0..rounds {
                for (bench, best) in benches.iter_mut().zip(&mut best) {
                    for (call, best) in [Bench::encode, Bench::score, Bench::accumulate].into_iter().zip(best) {
                        *best = best.min(bench.time(call));
                    }
                }
            }
            let f16 = best[0][1] + best[0][2];
            for (bench, [encode, score, sum]) in benches.iter().zip(&best) {
                println!(
                    "{:11} {head_dim:4} {n_rows:4} {:14.0} {score:14.0} {sum:12.0} {:13.2}",
                    bench.name,
                    encode / PAGE_TOKENS as f64,
                    (score + sum) / f16
                );
            }
        }
    }
}
