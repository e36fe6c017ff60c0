//! What a model demands of a machine: the weights that a token reads, the elements it leaves in the cache, the state that a
//! sequence keeps.

use opencoti_compute::graph::{Graph, KvGeometry, Op};
use opencoti_compute::weights::Weight;

/// A model's demands, by its graph.
#[derive(Clone, Debug, PartialEq)]
pub struct Demands {
    /// Parameters that take part in computing a token: all but those of experts that are not chosen and rows of tables that are
    /// not looked up.
    pub active_parameters: u64,
    /// Bytes of them, with the rows that are looked up: what the weights of a single token's step take to read.
    pub active_bytes: u64,
    /// Of these, the bytes of experts: those that a single token chooses.
    pub expert_bytes: u64,
    /// Part of the experts that a token chooses; 1 in a model without any.
    pub expert_share: f64,
    /// Bytes that a sequence keeps for recurrent layers, however long it is.
    pub state_bytes: u64,
    /// Layers of equal keys and values.
    pub caches: Vec<CacheDemand>,
}

/// Layers of equal keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheDemand {
    /// Heads and their sizes.
    pub geometry: KvGeometry,
    /// Layers.
    pub layers: usize,
    /// Elements of keys and values that a token leaves in all of them.
    pub elements: usize,
}

impl Demands {
    /// The demands of a graph with its weights.
    pub fn of(graph: &Graph, weights: &[Weight]) -> Demands {
        let (mut active_parameters, mut active_bytes) = (0.0, 0.0);
        let (mut expert_bytes, mut expert_share) = (0.0, 1.0);
        for (share, weight) in shares(graph).into_iter().zip(weights) {
            let rows = weight.rows() as f64;
            let row_bytes = weight.ty().row_bytes(weight.cols()).unwrap_or(0) as f64;
            let (computed, read) = match share {
                Share::Lookup => (0.0, 1.0),
                Share::Part(part) => (rows * part, rows * part),
            };
            active_parameters += computed * weight.cols() as f64;
            active_bytes += read * row_bytes;
            if let Share::Part(part) = share
                && part < 1.0
            {
                expert_bytes += read * row_bytes;
                expert_share = part;
            }
        }
        let caches = graph.cache_groups().into_iter().map(|group| {
            let g = group.geometry;
            let layers = group.layers.len();
            CacheDemand { geometry: g, layers, elements: layers * g.n_kv_heads * (g.k_head_dim + g.v_head_dim) }
        });
        let caches = caches.collect();
        let state_bytes = (graph.state_words() * size_of::<f32>()) as u64;
        Demands {
            active_parameters: active_parameters as u64,
            active_bytes: active_bytes as u64,
            expert_bytes: expert_bytes as u64,
            expert_share,
            state_bytes,
            caches,
        }
    }

    /// Bytes of weights that a step of `rows` tokens reads when each is read once: of experts those that any row chooses, if
    /// rows choose independently of each other.
    pub fn step_bytes(&self, rows: usize) -> f64 {
        let chosen = 1.0 - (1.0 - self.expert_share).powf(rows as f64);
        (self.active_bytes - self.expert_bytes) as f64 + self.expert_bytes as f64 / self.expert_share * chosen
    }

    /// Elements that every token leaves for good, in layers that see all tokens.
    pub fn full_elements(&self) -> usize {
        self.caches.iter().filter(|c| c.geometry.window.is_none()).map(|c| c.elements).sum()
    }

    /// Elements of a token in layers that see a window, which forget it.
    pub fn window_elements(&self) -> usize {
        self.caches.iter().filter(|c| c.geometry.window.is_some()).map(|c| c.elements).sum()
    }
}

/// Names of the weights of which a token reads one row: embedding tables that are no head as well.
pub fn lookups(graph: &Graph) -> impl Iterator<Item = &str> {
    let weights = shares(graph).into_iter().zip(&graph.weights);
    weights.filter(|(share, _)| matches!(share, Share::Lookup)).map(|(_, weight)| weight.name.as_str())
}

/// How much of a weight a token reads.
#[derive(Clone, Copy)]
enum Share {
    /// One row.
    Lookup,
    /// Such a part of all rows.
    Part(f64),
}

fn shares(graph: &Graph) -> Vec<Share> {
    let mut shares = vec![Share::Part(1.0); graph.weights.len()];
    for op in &graph.ops {
        match *op {
            Op::Embed { table, .. } | Op::EmbedBy { table, .. } => shares[table.0 as usize] = Share::Lookup,
            Op::ExpertMatMul { route, experts, .. } => {
                let (id, chosen) = (experts.stack.0 as usize, graph.width(route) / 2);
                shares[id] = Share::Part(chosen as f64 / graph.weights[id].experts as f64);
            }
            _ => {}
        }
    }
    // A table may be the head, too, which comes last.
    for op in &graph.ops {
        if let Op::MatMul { weight, .. } = *op {
            shares[weight.0 as usize] = Share::Part(1.0);
        }
    }
    shares
}

#[cfg(test)]
mod tests {
    use crate::synth::{Preset, Quant};
    use crate::{LoadOptions, Model};

    use super::*;

    /// A preset's model by its header alone.
    fn model(name: &str) -> Model {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("header.gguf");
        Preset::of(name).unwrap().spec(Quant::Q4_K_M, None).unwrap().write_header(&path).unwrap();
        Model::inspect(&path, &LoadOptions::default()).unwrap_or_else(|e| panic!("{name}: {e}"))
    }

    /// Name, bytes a token in f16 in full layers and in window layers, the window.
    const CACHES: &[(&str, usize, usize, Option<usize>)] = &[
        ("smollm2-135m", 23_040, 0, None),
        ("smollm2-360m", 40_960, 0, None),
        ("smollm2-1.7b", 196_608, 0, None),
        ("llama3-8b", 131_072, 0, None),
        ("llama3-70b", 327_680, 0, None),
        ("qwen2-0.5b", 12_288, 0, None),
        ("qwen2-7b", 57_344, 0, None),
        ("qwen2-14b", 196_608, 0, None),
        ("qwen3-0.6b", 114_688, 0, None),
        ("qwen3-8b", 147_456, 0, None),
        ("qwen3-14b", 163_840, 0, None),
        ("qwen3-32b", 262_144, 0, None),
        ("qwen3-30b-a3b", 98_304, 0, None),
        ("moe-1gb", 32_768, 0, None),
        ("gemma3-270m", 3_072, 15_360, Some(512)),
        ("gemma3-1b", 4_096, 22_528, Some(512)),
        ("gemma3-4b", 20_480, 118_784, Some(1024)),
        ("gemma3-12b", 65_536, 327_680, Some(1024)),
        ("gemma3-27b", 81_920, 425_984, Some(1024)),
        ("gemma4-e2b", 6_144, 12_288, Some(512)),
        ("gemma4-e4b", 16_384, 40_960, Some(512)),
        ("gemma4-12b", 16_384, 327_680, Some(1024)),
        ("gemma4-26b-a4b", 20_480, 204_800, Some(1024)),
        ("gemma4-31b", 81_920, 819_200, Some(1024)),
        ("qwen35-0.8b", 12_288, 0, None),
        ("qwen35-9b", 32_768, 0, None),
        ("qwen35-27b", 65_536, 0, None),
        ("qwen35-35b-a3b", 20_480, 0, None),
    ];

    #[test]
    fn keys_and_values_of_each_preset_take_what_is_known() {
        for &(name, full, windowed, window) in CACHES {
            let model = model(name);
            let demands = Demands::of(&model.graph, &model.weights);
            assert_eq!(2 * demands.full_elements(), full, "{name}");
            assert_eq!(2 * demands.window_elements(), windowed, "{name}");
            let found = demands.caches.iter().find_map(|c| c.geometry.window);
            assert_eq!(found, window, "{name}");
        }
    }

    #[test]
    fn states_of_each_hybrid_preset_take_what_is_known() {
        for (name, layers, bytes) in [
            ("qwen35-0.8b", 18, 20_201_472),
            ("qwen35-9b", 24, 52_690_944),
            ("qwen35-27b", 48, 156_893_184),
            ("qwen35-35b-a3b", 30, 65_863_680),
            ("qwen3next-80b-a3b", 36, 79_036_416),
        ] {
            let graph = model(name).graph;
            assert_eq!((graph.state_layers.len(), 4 * graph.state_words()), (layers, bytes), "{name}");
        }
    }

    #[test]
    fn only_tables_that_are_no_head_are_looked_up() {
        let e2b = model("gemma4-e2b");
        assert_eq!(lookups(&e2b.graph).collect::<Vec<_>>(), ["per_layer_token_embd.weight"]);
        assert_eq!(lookups(&model("llama3-8b").graph).collect::<Vec<_>>(), ["token_embd.weight"]);
    }

    #[test]
    fn only_chosen_experts_and_no_lookups_are_active() {
        // Billions of active parameters, and their bytes in Q4_K_M.
        for (name, billions) in [
            ("qwen3-30b-a3b", 3.04),
            ("smollm2-135m", 0.135),
            ("llama3-8b", 7.50),
            ("gemma4-e2b", 2.3),
            ("gemma4-26b-a4b", 3.8),
        ] {
            let model = model(name);
            let found = Demands::of(&model.graph, &model.weights).active_parameters as f64 / 1e9;
            assert!((found / billions - 1.0).abs() < 0.01, "{name}: {found} billion");
        }
        let moe = model("moe-1gb");
        let demands = Demands::of(&moe.graph, &moe.weights);
        let share = demands.active_bytes as f64 / moe.sizes.tensor_bytes as f64;
        assert!((0.15..0.25).contains(&share), "{share} of the 1 GB model");
        assert!((0.95e9..1.2e9).contains(&(moe.sizes.tensor_bytes as f64)), "{} bytes", moe.sizes.tensor_bytes);
    }
}
