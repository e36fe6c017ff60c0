//! What an error in keys and values does to attention: computed in f64, without a model.

use super::capture::{Layer, Query};

/// Sums over queries of how attention over decoded keys and values differs from that over exact ones.
#[derive(Clone, Copy, Debug, Default)]
pub struct AttentionError {
    /// Squared difference of logits and their square, both without the mean over keys, which no softmax sees.
    logit_error: f64,
    logits: f64,
    /// Product of exact and decoded logits, for the slope.
    products: f64,
    /// Total variation of weights.
    tv: f64,
    queries: usize,
    /// Squared difference of outputs and their square.
    output_error: f64,
    outputs: f64,
}

impl AttentionError {
    /// Relative squared error of logits.
    pub fn logit_mse(&self) -> f64 {
        self.logit_error / self.logits
    }

    /// Slope of decoded logits on exact ones.
    pub fn slope(&self) -> f64 {
        self.products / self.logits
    }

    /// Mean total variation of a query's weights.
    pub fn tv(&self) -> f64 {
        self.tv / self.queries as f64
    }

    /// Relative squared error of outputs.
    pub fn output_mse(&self) -> f64 {
        self.output_error / self.outputs
    }

    /// Adds those of one KV head: keys and values of the layer's head, exact and decoded.
    pub fn add_head(&mut self, layer: &Layer, head: usize, exact: [&[f32]; 2], decoded: [&[f32]; 2]) {
        let tokens = decoded[0].len() / layer.geometry.k_head_dim;
        for query in layer.queries.iter().filter(|query| query.position < tokens) {
            let heads = query.row.len() / layer.geometry.k_head_dim / layer.geometry.n_kv_heads;
            for q in query.row.chunks_exact(layer.geometry.k_head_dim).skip(head * heads).take(heads) {
                self.add(layer, query, q, exact, decoded);
            }
        }
    }

    fn add(&mut self, layer: &Layer, query: &Query, q: &[f32], [k, v]: [&[f32]; 2], decoded: [&[f32]; 2]) {
        let first = layer.geometry.window.map_or(0, |window| (query.position + 1).saturating_sub(window));
        let seen = first..query.position + 1;
        let logits = |keys: &[f32]| -> Vec<f64> {
            let keys = keys.chunks_exact(q.len()).skip(seen.start).take(seen.len());
            let dot = |key: &[f32]| q.iter().zip(key).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
            keys.map(|key| capped(dot(key) * f64::from(query.scale), query.softcap)).collect()
        };
        let (exact, found) = (logits(k), logits(decoded[0]));
        let mean = |l: &[f64]| l.iter().sum::<f64>() / l.len() as f64;
        let (exact_mean, found_mean) = (mean(&exact), mean(&found));
        for (a, b) in exact.iter().zip(&found) {
            let (a, b) = (a - exact_mean, b - found_mean);
            self.logit_error += (a - b).powi(2);
            self.logits += a * a;
            self.products += a * b;
        }
        let (p, p_found) = (softmax(&exact), softmax(&found));
        self.tv += p.iter().zip(&p_found).map(|(a, b)| (a - b).abs()).sum::<f64>() / 2.0;
        self.queries += 1;
        let dim = layer.geometry.v_head_dim;
        let (out, out_found) = (weighted(&p, v, seen.start, dim), weighted(&p_found, decoded[1], seen.start, dim));
        for (a, b) in out.iter().zip(&out_found) {
            self.output_error += (a - b).powi(2);
            self.outputs += a * a;
        }
    }
}

fn capped(score: f64, cap: Option<f32>) -> f64 {
    cap.map(f64::from).map_or(score, |cap| cap * (score / cap).tanh())
}

fn softmax(logits: &[f64]) -> Vec<f64> {
    let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let exp: Vec<f64> = logits.iter().map(|l| (l - max).exp()).collect();
    let sum: f64 = exp.iter().sum();
    exp.into_iter().map(|e| e / sum).collect()
}

fn weighted(weights: &[f64], values: &[f32], first: usize, dim: usize) -> Vec<f64> {
    let mut out = vec![0.0; dim];
    for (weight, value) in weights.iter().zip(values.chunks_exact(dim).skip(first)) {
        out.iter_mut().zip(value).for_each(|(o, v)| *o += weight * f64::from(*v));
    }
    out
}

#[cfg(test)]
mod tests {
    use opencoti_compute::graph::KvGeometry;

    use super::*;

    fn layer(window: Option<usize>) -> Layer {
        let geometry = KvGeometry { n_kv_heads: 1, k_head_dim: 2, v_head_dim: 1, window };
        let query = Query { position: 2, row: vec![1.0, 0.0, 0.0, 1.0], scale: 1.0, softcap: None };
        Layer { group: 0, place: 0, geometry, k: Vec::new(), v: Vec::new(), queries: vec![query] }
    }

    const K: [f32; 8] = [1.0, 0.0, 0.0, 1.0, -1.0, 2.0, 9.0, 9.0];
    const V: [f32; 4] = [1.0, 2.0, 3.0, 9.0];

    #[test]
    fn a_constant_added_to_all_keys_is_no_error() {
        let mut error = AttentionError::default();
        let shifted = K.map(|k| k + 5.0);
        error.add_head(&layer(None), 0, [&K, &V], [&shifted, &V]);
        assert!(error.logit_mse() < 1e-12 && error.tv() < 1e-12 && error.output_mse() < 1e-12, "{error:?}");
        assert!((error.slope() - 1.0).abs() < 1e-9 && error.queries == 2);
    }

    #[test]
    fn smaller_keys_have_a_smaller_slope_and_values_come_through() {
        let mut error = AttentionError::default();
        let (smaller, doubled) = (K.map(|k| k * 0.9), V.map(|v| v * 2.0));
        error.add_head(&layer(None), 0, [&K, &V], [&smaller, &V]);
        assert!((error.slope() - 0.9).abs() < 1e-6 && (error.logit_mse() - 0.01).abs() < 1e-6 && error.tv() > 0.0);
        let mut error = AttentionError::default();
        error.add_head(&layer(None), 0, [&K, &V], [&K, &doubled]);
        assert!(error.tv() == 0.0 && (error.output_mse() - 1.0).abs() < 1e-9);
    }

    #[test]
    fn keys_beyond_the_window_and_after_the_query_are_not_seen() {
        let mut error = AttentionError::default();
        let mut other = K;
        other[0] = 100.0;
        other[6] = -100.0;
        error.add_head(&layer(Some(2)), 0, [&K, &V], [&other, &V]);
        assert!(error.tv() == 0.0 && error.logit_mse() == 0.0);
    }
}
