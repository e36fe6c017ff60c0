//! Times prompts and decoding of a model on a card: `timing MODEL [CODEC [DEPTH[,DEPTH...] [STREAMS[,STREAMS...]]]]`.
//!
//! MODEL is a file, or the name of a preset of made-up models, which is written in Q4_K_M to the folder for temporary files.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use opencoti_cuda::driver::Gpu;
use opencoti_cuda::executor::{Config, Executor};
use opencoti_kv::{BatchItem, Cache, CacheConfig, GroupConfig, Outputs, SeqId, StateConfig};
use opencoti_model::Model;
use opencoti_model::synth::{Preset, Quant};
use opencoti_plugin_api::host::{CodecPlugin, Instance, NoSink};
use opencoti_plugin_api::kv_codec::Side;

type Error = Box<dyn std::error::Error>;

/// Rows of a step of a prompt.
const ROWS: usize = 2048;
/// Steps that are timed, after as many as a fifth that are not.
const STEPS: usize = 100;

fn main() -> Result<(), Error> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let arg = |i: usize, default: &str| args.get(i).map_or(default.to_owned(), Clone::clone);
    let numbers =
        |text: String| -> Result<Vec<usize>, Error> { Ok(text.split(',').map(str::parse).collect::<Result<_, _>>()?) };
    let path = arg(0, "");
    if path.is_empty() {
        return Err("usage: timing MODEL [CODEC [DEPTHS [STREAMS]]]".into());
    }
    let (codec, depths, streams) = (arg(1, "f16"), numbers(arg(2, "0,4096"))?, numbers(arg(3, "1"))?);
    let gpu = Gpu::open(0)?;
    println!("{} (compute capability {}.{})", gpu.name, gpu.arch / 10, gpu.arch % 10);
    let path = file(&path)?;
    let start = Instant::now();
    let model = Model::load(&path)?;
    let folder = std::env::temp_dir().join("opencoti-test-kernels");
    let config = Config { max_rows: ROWS, max_outputs: 64, kernel_cache: Some(folder), record: true };
    let mut executor = Executor::new(&gpu, model.graph.clone(), &model.weights, &[], config, &mut |_, _| {})?;
    println!("loaded in {:.2} s", start.elapsed().as_secs_f64());
    for &n in &streams {
        for &depth in &depths {
            let mut cache = Cache::new(cache(&model, &codec, n * (depth + 2 * STEPS + 256), n)?)?;
            measure(&mut executor, &mut cache, &model, depth, n)?;
        }
    }
    Ok(())
}

/// The file of a model, which is written first if it is a preset's.
fn file(model: &str) -> Result<PathBuf, Error> {
    let Ok(preset) = Preset::of(model) else { return Ok(PathBuf::from(model)) };
    let path = std::env::temp_dir().join(format!("{model}-q4_k_m.gguf"));
    if !path.exists() {
        preset.spec(Quant::Q4_K_M, None)?.write(&path, 1)?;
    }
    Ok(path)
}

fn cache(model: &Model, codec: &str, capacity_tokens: usize, slots: usize) -> Result<CacheConfig, Error> {
    let plugin = CodecPlugin::new(Instance::create(opencoti_kv_scalar::root(), "{}", Arc::new(NoSink))?)?;
    let mut groups = Vec::new();
    for group in model.graph.cache_groups() {
        groups.push(GroupConfig {
            name: "kv".to_owned(),
            k: plugin.open(codec, "{}", Side::K, group.geometry.k_head_dim)?,
            v: plugin.open(codec, "{}", Side::V, group.geometry.v_head_dim)?,
            geometry: group.geometry,
            n_layers: group.layers.len(),
            stage: None,
        });
    }
    Ok(CacheConfig {
        groups,
        capacity_tokens,
        slots,
        recent_sequences: 0,
        window_sequences: None,
        step_tokens: ROWS,
        rollback_tokens: 1,
        whole_texts: false,
        snapshots: 0,
        states: StateConfig::default(),
    })
}

fn step(executor: &mut Executor, cache: &mut Cache, batch: &[(SeqId, &[u32])]) -> Result<(), Error> {
    let items: Vec<_> = batch.iter().map(|&(seq, tokens)| BatchItem { seq, tokens, outputs: Outputs::Last }).collect();
    let planned = cache.plan(&items)?;
    let outputs = executor.run(&planned.step)?;
    if outputs.rows() > 0 && outputs.logits(0).iter().any(|v| !v.is_finite()) {
        return Err("logits are not finite".into());
    }
    cache.commit(planned.id)?;
    Ok(())
}

fn measure(executor: &mut Executor, cache: &mut Cache, model: &Model, depth: usize, n: usize) -> Result<(), Error> {
    let vocabulary = model.graph.logits.map_or(1, |l| model.graph.width(l));
    let token = |i: usize| ((i * 7919 + 13) % vocabulary) as u32;
    let sequences: Vec<SeqId> = (0..n).map(|_| cache.create()).collect();
    let prompt: Vec<u32> = (0..depth.max(1)).map(token).collect();
    let start = Instant::now();
    for &seq in &sequences {
        for part in prompt.chunks(ROWS) {
            step(executor, cache, &[(seq, part)])?;
        }
    }
    let prefill = start.elapsed().as_secs_f64();
    let mut times = Vec::new();
    for i in 0..STEPS + STEPS / 5 {
        let tokens: Vec<[u32; 1]> = (0..n).map(|s| [token(i * n + s)]).collect();
        let batch: Vec<(SeqId, &[u32])> = sequences.iter().zip(&tokens).map(|(s, t)| (*s, t.as_slice())).collect();
        let start = Instant::now();
        step(executor, cache, &batch)?;
        if i >= STEPS / 5 {
            times.push(start.elapsed().as_secs_f64() * 1e3);
        }
    }
    times.sort_by(f64::total_cmp);
    let median = times[times.len() / 2];
    println!(
        "{n} streams at {depth}: {median:.3} ms a step ({:.1} tokens/s; {:.3} to {:.3} ms), prompt {:.0} tokens/s",
        n as f64 * 1e3 / median,
        times[0],
        times[times.len() - 1],
        (n * depth.max(1)) as f64 / prefill
    );
    Ok(())
}
