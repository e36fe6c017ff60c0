//! Speed of a model: prefill of a prompt, and single tokens at given depths, in tokens a second.
//!
//!     bench MODEL [THREADS] [PROMPT] [DEPTH,DEPTH,..] [REPETITIONS]
//!
//! Defaults: all cores, 512 tokens, depths 0 and 2048, 5 repetitions. Prints medians and the best, which
//! is what counts on a machine that others use, too. Between decoding runs, as many threads read memory as fast as
//! they can: what a token's weights would take at that speed is the floor of its time, and its share is printed.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use opencoti_compute::cpu::attention::Attention;
use opencoti_compute::cpu::executor::{Config, Executor};
use opencoti_kv::{BatchItem, Cache, CacheConfig, GroupConfig, Outputs, SeqId, StateConfig};
use opencoti_model::Model;
use opencoti_model::demands::Demands;
use opencoti_plugin_api::host::{CodecPlugin, Instance, NoSink};
use opencoti_plugin_api::kv_codec::Side;

/// Single tokens in one measurement.
const DECODED: usize = 64;
/// Rows of a step.
const STEP: usize = 512;

/// An executor and its cache.
struct Bench {
    executor: Executor,
    cache: Cache,
}

impl Bench {
    fn new(model: &Model, threads: usize, capacity_tokens: usize) -> Result<Bench> {
        let plugin = CodecPlugin::new(Instance::create(opencoti_kv_scalar::root(), "{}", Arc::new(NoSink))?)?;
        let mut groups = Vec::new();
        for group in model.graph.cache_groups() {
            groups.push(GroupConfig {
                name: "kv".to_owned(),
                k: plugin.open("f16", "{}", Side::K, group.geometry.k_head_dim)?,
                v: plugin.open("f16", "{}", Side::V, group.geometry.v_head_dim)?,
                geometry: group.geometry,
                n_layers: group.layers.len(),
                stage: None,
            });
        }
        let cache = Cache::new(CacheConfig {
            groups,
            capacity_tokens,
            slots: 1,
            recent_sequences: 0,
            step_tokens: STEP,
            rollback_tokens: 1,
            whole_texts: false,
            snapshots: 0,
            states: StateConfig::of(&model.graph),
        })?;
        let attention = Box::new(Attention::new(&model.graph));
        let config = Config { threads, max_rows: STEP, max_outputs: 1 };
        let executor = Executor::new(model.graph.clone(), model.weights.clone(), attention, config)?;
        Ok(Bench { executor, cache })
    }

    /// Runs `tokens` in steps of `step`, with the logits of each step's last token; returns the seconds.
    fn run(&mut self, seq: SeqId, tokens: &[u32], step: usize) -> Result<f64> {
        let start = Instant::now();
        for part in tokens.chunks(step) {
            let planned = self.cache.plan(&[BatchItem { seq, tokens: part, outputs: Outputs::Last }])?;
            self.executor.run(&planned.step)?;
            self.cache.commit(planned.id)?;
        }
        Ok(start.elapsed().as_secs_f64())
    }

    /// Tokens a second of `measured` after `depth` other tokens, in steps of `step`.
    fn speed(&mut self, depth: usize, measured: usize, step: usize) -> Result<f64> {
        let seq = self.cache.create();
        self.run(seq, &tokens(depth), STEP)?;
        let seconds = self.run(seq, &tokens(measured), step)?;
        self.cache.release(seq)?;
        Ok(measured as f64 / seconds)
    }
}

/// Words of a buffer that no cache holds.
const BUFFER: usize = 128 << 20;

/// Bytes a second at which `threads` threads read a buffer once.
fn read_speed(buffer: &[u64], threads: usize) -> f64 {
    let start = Instant::now();
    let sum: u64 = std::thread::scope(|scope| {
        let parts = buffer.chunks(buffer.len().div_ceil(threads.max(1)));
        let readers: Vec<_> =
            parts.map(|part| scope.spawn(|| part.iter().fold(0u64, |s, v| s.wrapping_add(*v)))).collect();
        readers.into_iter().map(|r| r.join().unwrap_or(0)).fold(0, u64::wrapping_add)
    });
    std::hint::black_box(sum);
    size_of_val(buffer) as f64 / start.elapsed().as_secs_f64()
}

/// Some tokens; which ones makes no difference to the work.
fn tokens(n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| 100 + i * 37 % 1000).collect()
}

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [path, rest @ ..] = args.as_slice() else { bail!("bench MODEL [THREADS] [PROMPT] [DEPTHS] [REPETITIONS]") };
    let number = |at: usize, default: usize| match rest.get(at) {
        Some(text) => text.parse().with_context(|| format!("`{text}` is not a number")),
        None => Ok(default),
    };
    let threads = number(0, std::thread::available_parallelism().map_or(1, usize::from))?;
    let (prompt, repetitions) = (number(1, 512)?, number(3, 5)?.max(1));
    let depths: Vec<usize> = match rest.get(2) {
        Some(list) => list.split(',').map(str::parse).collect::<Result<_, _>>().context("depths are numbers")?,
        None => vec![0, 2048],
    };

    let model = Model::load(path.as_ref())?;
    let capacity = depths.iter().max().unwrap_or(&0) + prompt.max(DECODED) + STEP;
    let mut bench = Bench::new(&model, threads, capacity)?;
    bench.speed(0, prompt.max(1), STEP)?;
    let sorted = |mut speeds: Vec<f64>| {
        speeds.sort_by(f64::total_cmp);
        speeds
    };
    let say = |name: String, speeds: &[f64]| {
        println!("{name:12} {:9.1} tokens/s, best {:.1}", speeds[repetitions / 2], speeds[repetitions - 1]);
    };
    if prompt > 0 {
        let speeds = (0..repetitions).map(|_| bench.speed(0, prompt, STEP)).collect::<Result<Vec<_>>>()?;
        say(format!("prefill {prompt}"), &sorted(speeds));
    }
    let read = Demands::of(&model.graph, &model.weights).active_bytes as f64;
    let buffer: Vec<u64> = (0..BUFFER as u64).collect();
    for depth in depths {
        let (mut speeds, mut floors, mut shares) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..repetitions {
            let floor = read_speed(&buffer, threads) / read;
            let speed = bench.speed(depth, DECODED, 1)?;
            shares.push(speed / floor);
            floors.push(floor);
            speeds.push(speed);
        }
        let (floors, shares) = (sorted(floors), sorted(shares));
        say(format!("decode @{depth}"), &sorted(speeds));
        println!(
            "{:12} {:9.1} tokens/s, best {:.1}: {:.0} MB of weights a token at {:.1} GB/s; share {:.0} %, best {:.0} %",
            "  floor",
            floors[repetitions / 2],
            floors[repetitions - 1],
            read / 1e6,
            floors[repetitions / 2] * read / 1e9,
            100.0 * shares[repetitions / 2],
            100.0 * shares[repetitions - 1],
        );
    }
    Ok(())
}
