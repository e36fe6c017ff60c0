//! A model with a paged cache of scalar codecs, on the CPU or on a card.

use std::sync::Arc;

use opencoti_compute::cpu::attention::Attention;
use opencoti_compute::cpu::executor::{Config as CpuConfig, Executor as CpuExecutor};
use opencoti_cuda::driver::Gpu;
use opencoti_cuda::executor::{Config, Executor};
use opencoti_kv::{BatchItem, Cache, CacheConfig, GroupConfig, Outputs, SeqId, StateConfig};
use opencoti_model::Model;
use opencoti_plugin_api::host::{CodecPlugin, Instance, NoSink};
use opencoti_plugin_api::kv_codec::Side;

/// What runs the steps.
enum Engine {
    Cpu(Box<CpuExecutor>),
    Cuda(Box<Executor>),
}

/// A model with its cache.
pub(crate) struct Runner {
    engine: Engine,
    pub(crate) cache: Cache,
}

fn cache(model: &Model, codec: &str, capacity_tokens: usize, step_tokens: usize) -> CacheConfig {
    let plugin = Instance::create(opencoti_kv_scalar::root(), "{}", Arc::new(NoSink)).unwrap();
    let plugin = CodecPlugin::new(plugin).unwrap();
    let open = |side, head_dim| plugin.open(codec, "{}", side, head_dim).unwrap();
    let groups = model.graph.cache_groups().into_iter().map(|group| GroupConfig {
        name: "kv".to_owned(),
        k: open(Side::K, group.geometry.k_head_dim),
        v: open(Side::V, group.geometry.v_head_dim),
        geometry: group.geometry,
        n_layers: group.layers.len(),
        stage: None,
    });
    CacheConfig {
        groups: groups.collect(),
        capacity_tokens,
        slots: 8,
        recent_sequences: 0,
        window_sequences: None,
        step_tokens,
        rollback_tokens: 1,
        whole_texts: false,
        snapshots: 0,
        states: StateConfig::default(),
    }
}

impl Runner {
    pub(crate) fn cpu(model: &Model, codec: &str, tokens: usize, rows: usize) -> Runner {
        let config = CpuConfig { threads: 4, max_rows: rows, max_outputs: rows };
        let attention = Box::new(Attention::new(&model.graph));
        let executor = CpuExecutor::new(model.graph.clone(), model.weights.clone(), attention, config).unwrap();
        Runner {
            engine: Engine::Cpu(Box::new(executor)),
            cache: Cache::new(cache(model, codec, tokens, rows)).unwrap(),
        }
    }

    pub(crate) fn cuda(gpu: &Arc<Gpu>, model: &Model, codec: &str, tokens: usize, config: Config) -> Runner {
        let cache = Cache::new(cache(model, codec, tokens, config.max_rows)).unwrap();
        let executor = Executor::new(gpu, model.graph.clone(), &model.weights, &[], config, &mut |_, _| {}).unwrap();
        Runner { engine: Engine::Cuda(Box::new(executor)), cache }
    }

    /// One step: each sequence goes on with its tokens. Logits of the wanted rows of each.
    pub(crate) fn step(&mut self, batch: &[(SeqId, &[u32])], outputs: Outputs) -> Vec<Vec<f32>> {
        let items: Vec<_> = batch.iter().map(|&(seq, tokens)| BatchItem { seq, tokens, outputs }).collect();
        let planned = self.cache.plan(&items).expect("a plan");
        let logits = match &mut self.engine {
            Engine::Cpu(executor) => {
                let results = executor.run(&planned.step).expect("runs");
                (0..results.rows()).map(|i| results.logits(i).to_vec()).collect()
            }
            Engine::Cuda(executor) => {
                let results = executor.run(&planned.step).expect("runs");
                (0..results.rows()).map(|i| results.logits(i).to_vec()).collect()
            }
        };
        self.cache.commit(planned.id).expect("ends");
        logits
    }
}
