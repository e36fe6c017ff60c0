//! Bytes that a step moves, by the arithmetic of weights and codecs.

use opencoti_kv::GroupConfig;
use opencoti_model::Model;
use opencoti_model::demands::Demands;

use crate::kv;

/// What one model moves with one pair of codecs.
#[derive(Clone, Debug)]
pub struct Cost {
    demands: Demands,
    /// Of each cache group: bytes of a token in all its layers, and how many tokens a query sees at most.
    groups: Vec<(f64, Option<usize>)>,
}

/// Rows of one sequence in a step.
#[derive(Clone, Copy, Debug)]
pub struct Run {
    /// Tokens before them.
    pub depth: usize,
    /// Leading ones of these that another run of the step reads, too.
    pub shared: usize,
    /// Rows.
    pub rows: usize,
}

impl Cost {
    /// Of a model whose cache has these groups.
    pub fn new(model: &Model, groups: &[GroupConfig]) -> Cost {
        let groups = groups.iter().map(|g| (kv::bytes_per_token(g), g.geometry.window)).collect();
        Cost { demands: Demands::of(&model.graph, &model.weights), groups }
    }

    /// Bytes of keys and values that a token leaves in all layers.
    pub fn token_bytes(&self) -> f64 {
        self.groups.iter().map(|(bytes, _)| bytes).sum()
    }

    /// Bytes of weights that a step of so many rows reads, each once.
    pub fn weight_bytes(&self, rows: usize) -> f64 {
        self.demands.step_bytes(rows)
    }

    /// Bytes of cache and state that a step reads and writes: every token once for all rows that see it.
    pub fn cache_bytes(&self, runs: &[Run]) -> f64 {
        let of_run = |run: &Run| {
            let of_group = |&(bytes, window): &(f64, Option<usize>)| {
                let seen = |tokens: usize| window.map_or(tokens, |w| tokens.min(w.saturating_add(run.rows) - 1));
                // Shared tokens count in the run that reads them for all.
                let read = seen(run.depth + run.rows).saturating_sub(run.shared.min(seen(run.depth + run.rows)));
                bytes * (read + run.rows) as f64
            };
            self.groups.iter().map(of_group).sum::<f64>() + 2.0 * self.demands.state_bytes as f64
        };
        runs.iter().map(of_run).sum()
    }

    /// All bytes of a step.
    pub fn step_bytes(&self, runs: &[Run]) -> f64 {
        self.weight_bytes(runs.iter().map(|run| run.rows).sum()) + self.cache_bytes(runs)
    }
}

/// Bits of a stored value, the mean over keys and values of all layers, by the bytes of tiles.
pub fn bits_per_value(groups: &[GroupConfig]) -> f64 {
    let values = |g: &GroupConfig| g.n_layers * g.geometry.n_kv_heads * (g.geometry.k_head_dim + g.geometry.v_head_dim);
    let bytes: f64 = groups.iter().map(kv::bytes_per_token).sum();
    8.0 * bytes / groups.iter().map(values).sum::<usize>() as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cost(groups: Vec<(f64, Option<usize>)>) -> Cost {
        let demands = Demands {
            active_parameters: 0,
            active_bytes: 1000,
            expert_bytes: 400,
            expert_share: 0.25,
            state_bytes: 7,
            caches: Vec::new(),
        };
        Cost { demands, groups }
    }

    #[test]
    fn a_row_reads_what_it_sees_and_writes_itself() {
        let run = Run { depth: 99, shared: 0, rows: 1 };
        assert_eq!(cost(vec![(10.0, None)]).cache_bytes(&[run]), 10.0 * 101.0 + 14.0);
        assert_eq!(cost(vec![(10.0, Some(16))]).cache_bytes(&[run]), 10.0 * 17.0 + 14.0);
        // A chunk of eight rows: the first sees 16 tokens, each further one a newer one.
        assert_eq!(cost(vec![(10.0, Some(16))]).cache_bytes(&[Run { rows: 8, ..run }]), 10.0 * (23.0 + 8.0) + 14.0);
    }

    #[test]
    fn a_shared_prefix_is_read_once() {
        let first = Run { depth: 99, shared: 0, rows: 1 };
        let other = Run { shared: 90, ..first };
        assert_eq!(cost(vec![(1.0, None)]).cache_bytes(&[first, other]), 101.0 + 11.0 + 28.0);
    }

    #[test]
    fn rows_read_the_experts_that_any_of_them_chose() {
        let cost = cost(Vec::new());
        assert_eq!(cost.weight_bytes(1), 1000.0);
        // 1600 bytes of experts in all, a quarter of which a row chooses.
        assert_eq!(cost.weight_bytes(2), 600.0 + 1600.0 * (1.0 - 0.75 * 0.75));
    }
}
