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
    order: Order,
}

/// How the candidates lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Order {
    /// By rising id, as they were taken.
    #[default]
    Id,
    /// By falling logit.
    Logit,
    /// In no particular order.
    None,
}

/// Order of falling logit; equal logits keep the smaller id first, so that ties are broken the same way everywhere.
fn by_logit(a: &Candidate, b: &Candidate) -> Ordering {
    b.logit.total_cmp(&a.logit).then(a.id.cmp(&b.id))
}

impl Candidates {
    /// Takes every token whose logit is above −∞ and which `allowed` lets through.
    pub(crate) fn fill(&mut self, logits: &[f32], allowed: impl Fn(u32) -> bool) {
        self.items.clear();
        self.order = Order::Id;
        for (id, &logit) in logits.iter().enumerate() {
            let id = id as u32;
            if logit > f32::NEG_INFINITY && allowed(id) {
                self.items.push(Candidate { id, logit, p: 0.0 });
            }
        }
    }

    /// Takes the `k` highest of what [`Candidates::fill`] would take, in order, without looking at the others twice.
    pub(crate) fn fill_highest(&mut self, logits: &[f32], k: usize, allowed: impl Fn(u32) -> bool) {
        self.items.clear();
        // With room for twice as many, the floor rises once in `k` takings.
        let room = k.saturating_mul(2).min(logits.len());
        let mut floor = f32::NEG_INFINITY;
        for (id, &logit) in logits.iter().enumerate() {
            if logit > floor && allowed(id as u32) {
                self.items.push(Candidate { id: id as u32, logit, p: 0.0 });
                if self.items.len() == room && k < room {
                    self.items.select_nth_unstable_by(k - 1, by_logit);
                    self.items.truncate(k);
                    floor = self.items[k - 1].logit;
                }
            }
        }
        self.order = Order::None;
        self.keep_highest(k);
    }

    /// Changes the logits of the given tokens, where they are candidates.
    pub(crate) fn adjust(&mut self, changes: impl Iterator<Item = (u32, impl Fn(f32) -> f32)>) {
        for (id, change) in changes {
            let at = match self.order {
                Order::Id => self.items.binary_search_by_key(&id, |c| c.id).ok(),
                Order::Logit | Order::None => self.items.iter().position(|c| c.id == id),
            };
            if let Some(at) = at {
                self.items[at].logit = change(self.items[at].logit);
            }
        }
        if self.order == Order::Logit {
            self.order = Order::None;
        }
    }

    /// Drops a tail that holds less than `1 − mass` of the probability, where that can be seen without sorting all.
    /// At least `least` are left. Needs [`Candidates::softmax`].
    pub(crate) fn narrow(&mut self, mass: f32, least: usize) {
        if self.order == Order::Logit {
            return;
        }
        for k in [256usize, 4096] {
            if k < least || k >= self.items.len() {
                continue;
            }
            self.items.select_nth_unstable_by(k - 1, by_logit);
            self.order = Order::None;
            // A margin, since the sum depends on the order of its terms.
            if self.items[..k].iter().map(|c| f64::from(c.p)).sum::<f64>() >= f64::from(mass) + 1e-4 {
                return self.items.truncate(k);
            }
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.items.len()
    }

    /// Says that logits were changed one by one, so that the order no longer holds.
    pub(crate) fn disorder(&mut self) {
        self.order = Order::None;
    }

    /// Brings the candidates in order of falling logit.
    pub(crate) fn sort(&mut self) {
        if self.order != Order::Logit {
            self.items.sort_unstable_by(by_logit);
            self.order = Order::Logit;
        }
    }

    /// Keeps the `k` highest logits, in order.
    pub(crate) fn keep_highest(&mut self, k: usize) {
        if k < self.items.len() {
            if self.order != Order::Logit {
                self.items.select_nth_unstable_by(k, by_logit);
                self.order = Order::None;
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
    fn narrowing_keeps_the_nucleus() {
        let logits: Vec<f32> = (0..10_000).map(|i| -((i * 7919 % 10_000) as f32) / 50.0).collect();
        for (mass, kept) in [(0.9, 256), (0.999, 4096), (0.999_99, 10_000)] {
            let mut c = Candidates::default();
            c.fill(&logits, |_| true);
            c.softmax();
            c.narrow(mass, 0);
            assert_eq!(c.len(), kept, "{mass}");
            assert!(c.items.iter().map(|c| c.p).sum::<f32>() >= mass);
        }
    }

    proptest::proptest! {
        #[test]
        fn taking_the_highest_at_once_is_the_same_as_taking_all_first(
            logits in proptest::collection::vec(-4i8..4, 1..60),
            k in 1usize..70,
        ) {
            let logits: Vec<f32> = logits.into_iter().map(f32::from).collect();
            let (mut a, mut b) = (Candidates::default(), Candidates::default());
            a.fill(&logits, |id| id % 5 != 0);
            a.keep_highest(k);
            b.fill_highest(&logits, k, |id| id % 5 != 0);
            proptest::prop_assert_eq!(a.items, b.items);
        }
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
