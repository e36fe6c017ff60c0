//! Logits of a model over given tokens, written as f32: one row a token. For comparisons with other engines.
//!
//!     logits MODEL TOKENS.json OUT.f32 [CODEC] [ROWS]
//!
//! `CODEC` (default f16) stores keys and values; `ROWS` (default 512) tokens go through in one step.

use std::io::Write;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use opencoti_compute::cpu::executor::{Config, Executor};
use opencoti_kv::{BatchItem, Cache, CacheConfig, GroupConfig, Outputs, StateConfig};
use opencoti_model::Model;
use opencoti_plugin_api::host::{CodecPlugin, Instance, NoSink};
use opencoti_plugin_api::kv_codec::Side;

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [model, tokens, out, rest @ ..] = args.as_slice() else {
        bail!("logits MODEL TOKENS.json OUT.f32 [CODEC] [ROWS]")
    };
    let codec = rest.first().map_or("f16", String::as_str);
    let step: usize = rest.get(1).map_or(Ok(512), |n| n.parse()).context("ROWS is a number")?;
    let tokens: Vec<u32> = serde_json::from_slice(&std::fs::read(tokens)?)?;
    let model = Model::load(model.as_ref())?;

    let plugin = CodecPlugin::new(Instance::create(opencoti_kv_scalar::root(), "{}", Arc::new(NoSink))?)?;
    let open = |side, dim| plugin.open(codec, "{}", side, dim);
    let mut groups = Vec::new();
    for group in model.graph.cache_groups() {
        groups.push(GroupConfig {
            name: "kv".to_owned(),
            k: open(Side::K, group.geometry.k_head_dim)?,
            v: open(Side::V, group.geometry.v_head_dim)?,
            geometry: group.geometry,
            n_layers: group.layers.len(),
            stage: None,
        });
    }
    let mut cache = Cache::new(CacheConfig {
        groups,
        capacity_tokens: tokens.len() + step,
        slots: 1,
        window_sequences: None,
        recent_sequences: 0,
        step_tokens: step,
        rollback_tokens: 1,
        whole_texts: false,
        snapshots: 0,
        states: StateConfig::of(&model.graph),
    })?;
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let mut executor = Executor::new(
        model.graph.clone(),
        model.weights.clone(),
        Box::new(opencoti_compute::cpu::attention::Attention::new(&model.graph)),
        Config { threads, max_rows: step, max_outputs: step },
    )?;
    let mut file = std::io::BufWriter::new(std::fs::File::create(out)?);
    let seq = cache.create();
    let start = std::time::Instant::now();
    for part in tokens.chunks(step) {
        let planned = cache.plan(&[BatchItem { seq, tokens: part, outputs: Outputs::All }])?;
        let outputs = executor.run(&planned.step)?;
        for row in 0..outputs.rows() {
            for value in outputs.logits(row) {
                file.write_all(&value.to_le_bytes())?;
            }
        }
        cache.commit(planned.id)?;
    }
    eprintln!("{} tokens in {:.2} s", tokens.len(), start.elapsed().as_secs_f64());
    file.flush()?;
    Ok(())
}
