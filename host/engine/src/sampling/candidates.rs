//! The tokens that are still in the running, with logits and probabilities.

use std::cmp::Ordering;

/// One token still in the running.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Candidate {
    pub(crate) id: u32,
    pub(crate) logit: f32,
    /// Probability among the candidates; valid after [`Candidates::softmax`].
    pub(crate) p: f32,
}

/// The candidates of one draw. The buffer is kept from token to token.
#[derive(Debug, Default, Clone)]
pub(crate) struct Candidates {
    pub(crate) items: Vec<Candidate>,
    /// Whether `items` is in order of falling logit.
    sorted: bool,
}

/// Order of falling logit; equal logits keep the smaller id first, so that ties are broken the same way everywhere.
fn by_logit(a: &Candidate, b: &Candidate) -> Ordering {
    b.logit.total_cmp(&a.logit).then(a.id.cmp(&b.id))
}

impl Candidates {
    /// Takes every token whose logit is above −∞ and which `allowed` lets through.
    pub(crate) fn fill(&mut self, logits: &[f32], allowed: impl Fn(u32) -> bool) {
        self.items.clear();
        self.sorted = false;
        for (id, &logit) in logits.iter().enumerate() {
            let id = id as u32;
            if logit > f32::NEG_INFINITY && allowed(id) {
                self.items.push(Candidate { id, logit, p: 0.0 });
            }
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.items.len()
    }

    /// Says that logits were changed one by one, so that the order no longer holds.
    pub(crate) fn disorder(&mut self) {
        self.sorted = false;
    }

    /// Brings the candidates in order of falling logit.
    pub(crate) fn sort(&mut self) {
        if !self.sorted {
            self.items.sort_unstable_by(by_logit);
            self.sorted = true;
        }
    }

    /// Keeps the `k` highest logits, in order.
    pub(crate) fn keep_highest(&mut self, k: usize) {
        if k < self.items.len() {
            if !self.sorted {
                self.items.select_nth_unstable_by(k, by_logit);
            }
            self.items.truncate(k);
        }
        self.sort();
    }

    /// Keeps the first `n` in the present order.
    pub(crate) fn truncate(&mut self, n: usize) {
        self.items.truncate(n);
    }

    /// Drops the first `n` in the present order.
    pub(crate) fn drop_first(&mut self, n: usize) {
        self.items.drain(..n);
    }

    pub(crate) fn retain(&mut self, keep: impl FnMut(&Candidate) -> bool) {
        self.items.retain(keep);
    }

    pub(crate) fn max_logit(&self) -> f32 {
        self.items.iter().map(|c| c.logit).fold(f32::NEG_INFINITY, f32::max)
    }

    /// Sets each `p` to the probability among the candidates. The order is kept.
    pub(crate) fn softmax(&mut self) {
        let max = self.max_logit();
        let mut sum = 0f64;
        for c in &mut self.items {
            c.p = (c.logit - max).exp();
            sum += f64::from(c.p);
        }
        for c in &mut self.items {
            c.p = (f64::from(c.p) / sum) as f32;
        }
    }

    /// Shannon entropy of the probabilities, in nats.
    pub(crate) fn entropy(&self) -> f32 {
        self.items.iter().filter(|c| c.p > 0.0).map(|c| -c.p * c.p.ln()).sum()
    }

    /// The candidate at position `u` ∈ [0, 1) of the cumulated probabilities.
    pub(crate) fn at_quantile(&self, u: f64) -> Option<Candidate> {
        let total: f64 = self.items.iter().map(|c| f64::from(c.p)).sum();
        let mut left = u * total;
        for c in &self.items {
            left -= f64::from(c.p);
            if left < 0.0 && c.p > 0.0 {
                return Some(*c);
            }
        }
        self.items.iter().rev().find(|c| c.p > 0.0).copied()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Candidates whose probabilities are `p`, ids counting from 0.
    pub(crate) fn with_probabilities(p: &[f32]) -> Candidates {
        let mut c = Candidates::default();
        c.fill(&p.iter().map(|p| p.ln()).collect::<Vec<_>>(), |_| true);
        c
    }

    pub(crate) fn ids(c: &Candidates) -> Vec<u32> {
        c.items.iter().map(|c| c.id).collect()
    }

    #[test]
    fn ruled_out_tokens_are_no_candidates() {
        let mut c = Candidates::default();
        c.fill(&[1.0, f32::NEG_INFINITY, 2.0, 3.0], |id| id != 3);
        assert_eq!(ids(&c), [0, 2]);
    }

    #[test]
    fn softmax_gives_the_probabilities_back() {
        let mut c = with_probabilities(&[0.1, 0.6, 0.3]);
        c.softmax();
        for (c, p) in c.items.iter().zip([0.1, 0.6, 0.3]) {
            assert!((c.p - p).abs() < 1e-6);
        }
        assert!((c.entropy() - 0.897_945_6).abs() < 1e-5);
    }

    #[test]
    fn a_quantile_falls_into_its_share() {
        let mut c = with_probabilities(&[0.25, 0.5, 0.25]);
        c.softmax();
        for (u, id) in [(0.0, 0), (0.24, 0), (0.26, 1), (0.74, 1), (0.76, 2), (0.999_999_999, 2)] {
            assert_eq!(c.at_quantile(u).unwrap().id, id, "u = {u}");
        }
    }

    #[test]
    fn the_highest_are_kept_in_order_and_ties_go_to_the_smaller_id() {
        let mut c = with_probabilities(&[0.2, 0.3, 0.2, 0.3]);
        c.keep_highest(3);
        assert_eq!(ids(&c), [1, 3, 0]);
    }
}
