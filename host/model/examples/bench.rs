//! Speed of a model: prefill of a prompt, and single tokens at given depths, in tokens a second.
//!
//!     bench MODEL [THREADS] [PROMPT] [DEPTH,DEPTH,..] [REPETITIONS]
//!
//! Defaults: all cores, 512 tokens, depths 0 and 2048, 5 repetitions. Prints medians and the best, which
//! is what counts on a machine that others use, too.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use opencoti_compute::cpu::attention::Attention;
use opencoti_compute::cpu::executor::{Config, Executor};
use opencoti_kv::{BatchItem, Cache, CacheConfig, GroupConfig, Outputs, SeqId, StateConfig};
use opencoti_model::Model;
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
    let mut report = |name: String, depth, measured, step| -> Result<()> {
        let mut speeds = (0..repetitions).map(|_| bench.speed(depth, measured, step)).collect::<Result<Vec<_>>>()?;
        speeds.sort_by(f64::total_cmp);
        println!("{name:12} {:9.1} tokens/s, best {:.1}", speeds[repetitions / 2], speeds[repetitions - 1]);
        Ok(())
    };
    if prompt > 0 {
        report(format!("prefill {prompt}"), 0, prompt, STEP)?;
    }
    for depth in depths {
        report(format!("decode @{depth}"), depth, DECODED, 1)?;
    }
    Ok(())
}
