//! Speed of a model: prompts and single tokens at given depths, in tokens a second.
//!
//!     bench MODEL [THREADS] [PROMPT] [DEPTH,DEPTH,..] [REPETITIONS] [CODEC,CODEC,..]
//!
//! Defaults: all cores, 512 tokens, depths 0 and 2048, 5 repetitions, f16. A codec of kv-scalar serves keys and values;
//! `q8_0/q4_0` is one for each. Codecs take turns, so that all suffer alike from what else the machine does. Prints
//! medians and the best, which is what counts on a machine that others use, too. Between decoding runs, as many threads
//! read memory as fast as they can: what a token's weights, keys and values would take at that speed is the floor of its
//! time, and its share is printed.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use opencoti_compute::cpu::attention::Attention;
use opencoti_compute::cpu::executor::{Config, Executor};
use opencoti_kv::{BatchItem, Cache, CacheConfig, GroupConfig, Outputs, SeqId, StateConfig};
use opencoti_model::Model;
use opencoti_model::demands::Demands;
use opencoti_plugin_api::PAGE_TOKENS;
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
    fn new(model: &Model, threads: usize, capacity_tokens: usize, codecs: &str) -> Result<Bench> {
        let (k, v) = codecs.split_once('/').unwrap_or((codecs, codecs));
        let plugin = CodecPlugin::new(Instance::create(opencoti_kv_scalar::root(), "{}", Arc::new(NoSink))?)?;
        let mut groups = Vec::new();
        for group in model.graph.cache_groups() {
            groups.push(GroupConfig {
                name: "kv".to_owned(),
                k: plugin.open(k, "{}", Side::K, group.geometry.k_head_dim)?,
                v: plugin.open(v, "{}", Side::V, group.geometry.v_head_dim)?,
                geometry: group.geometry,
                n_layers: group.layers.len(),
                stage: None,
            });
        }
        let cache = Cache::new(CacheConfig {
            groups,
            capacity_tokens,
            slots: 2,
            window_sequences: None,
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

    /// Bytes of keys and values that a token at `depth` reads.
    fn cache_bytes(&self, depth: usize) -> f64 {
        let of = |group: &GroupConfig| {
            let tiles = group.k.layout().tile_bytes + group.v.layout().tile_bytes;
            let seen = group.geometry.window.map_or(depth, |window| depth.min(window));
            (tiles * group.geometry.n_kv_heads * group.n_layers * seen) as f64 / PAGE_TOKENS as f64
        };
        self.cache.config().groups.iter().map(of).sum()
    }

    /// A sequence of `depth` tokens.
    fn at_depth(&mut self, depth: usize) -> Result<SeqId> {
        let seq = self.cache.create();
        self.run(seq, &tokens(depth), STEP)?;
        Ok(seq)
    }

    /// Tokens a second of `measured` behind those of `base`, `depth` of them, in steps of `step`.
    fn speed(&mut self, base: SeqId, depth: usize, measured: usize, step: usize) -> Result<f64> {
        let seq = if depth == 0 { self.cache.create() } else { self.cache.fork(base, depth)? };
        let seconds = self.run(seq, &tokens(measured), step)?;
        self.cache.release(seq)?;
        Ok(measured as f64 / seconds)
    }
}

/// Bytes of a buffer that no cache holds.
const BUFFER: usize = 1 << 30;

/// Such a buffer, in huge pages like the weights.
fn buffer() -> Result<memmap2::MmapMut> {
    let mut buffer = memmap2::MmapOptions::new().len(BUFFER).map_anon().context("no memory for a buffer of 1 GiB")?;
    #[cfg(target_os = "linux")]
    buffer.advise(memmap2::Advice::HugePage)?;
    buffer.fill(1);
    Ok(buffer)
}

/// Bytes a second at which `threads` threads read a buffer once.
fn read_speed(buffer: &[u8], threads: usize) -> f64 {
    let (buffer, _) = buffer.as_chunks();
    let start = Instant::now();
    let sum: u64 = std::thread::scope(|scope| {
        let parts = buffer.chunks(buffer.len().div_ceil(threads.max(1)));
        let readers: Vec<_> = parts
            .map(|part| scope.spawn(|| part.iter().fold(0u64, |s, v| s.wrapping_add(u64::from_le_bytes(*v)))))
            .collect();
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
    let [path, rest @ ..] = args.as_slice() else {
        bail!("bench MODEL [THREADS] [PROMPT] [DEPTHS] [REPETITIONS] [CODECS]")
    };
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

    let codecs: Vec<&str> = rest.get(4).map_or("f16", String::as_str).split(',').collect();

    let model = Model::load(path.as_ref())?;
    let capacity = 2 * (depths.iter().max().unwrap_or(&0) + prompt.max(DECODED) + STEP);
    let new = |codecs: &&str| Bench::new(&model, threads, capacity, codecs);
    let mut benches = codecs.iter().map(new).collect::<Result<Vec<_>>>()?;
    let weights = Demands::of(&model.graph, &model.weights).active_bytes as f64;
    let buffer = buffer()?;
    for depth in depths {
        let bases = benches.iter_mut().map(|b| b.at_depth(depth)).collect::<Result<Vec<_>>>()?;
        let (mut prompts, mut decoded) = (vec![Vec::new(); codecs.len()], vec![Vec::new(); codecs.len()]);
        let mut bandwidth = Vec::new();
        for _ in 0..repetitions {
            bandwidth.push(read_speed(&buffer, threads));
            for (i, (bench, &base)) in benches.iter_mut().zip(&bases).enumerate() {
                if prompt > 0 {
                    prompts[i].push(bench.speed(base, depth, prompt, STEP)?);
                }
                decoded[i].push(bench.speed(base, depth, DECODED, 1)?);
            }
        }
        let (bandwidth, _) = middle(&mut bandwidth);
        for (i, (bench, base)) in benches.iter_mut().zip(bases).enumerate() {
            if prompt > 0 {
                let (median, best) = middle(&mut prompts[i]);
                println!("{:9} prefill {prompt} @{depth:<5} {median:9.1} tokens/s, best {best:.1}", codecs[i]);
            }
            let (median, best) = middle(&mut decoded[i]);
            let read = weights + bench.cache_bytes(depth);
            println!(
                "{:9} decode @{depth:<9} {median:9.1} tokens/s, best {best:.1}; {:.1} MB a token at {:.1} GB/s: {:.0} % of the floor",
                codecs[i],
                read / 1e6,
                bandwidth / 1e9,
                100.0 * median * read / bandwidth,
            );
            bench.cache.release(base)?;
        }
    }
    Ok(())
}

/// Median and largest of some speeds.
fn middle(speeds: &mut [f64]) -> (f64, f64) {
    speeds.sort_by(f64::total_cmp);
    (speeds[speeds.len() / 2], speeds[speeds.len() - 1])
}
