//! Adaptive-p: draws tokens whose probability is near a target, and moves the target to hold the average there.
//!
//! Definition: llama.cpp pull request 17927. With target t and decay d, S and W are decayed sums of the original
//! probabilities of the drawn tokens and of ones, starting at t/(1−d) and 1/(1−d). A token of probability p gets the
//! logit `5 − 10·x²/(1+x)` with `x = |p − a| / 0.3`, where `a = clamp(2t − S/W, 0, 1)`; then comes an ordinary draw.

use super::candidates::{Candidate, Candidates};

const PEAK_LOGIT: f32 = 5.0;
const SHARPNESS: f32 = 10.0;
const WIDTH: f32 = 0.3;

#[derive(Debug, Clone)]
pub(crate) struct Adaptive {
    target: f32,
    decay: f32,
    weighted_sum: f32,
    total_weight: f32,
    /// The probabilities before the transformation, in the candidates' order.
    original: Vec<Candidate>,
}

impl Adaptive {
    pub(crate) fn new(target: f32, decay: f32) -> Self {
        let decay = decay.clamp(0.0, 0.99);
        let target = target.clamp(0.0, 1.0);
        let total_weight = 1.0 / (1.0 - decay);
        Self { target, decay, weighted_sum: target * total_weight, total_weight, original: Vec::new() }
    }

    fn adapted_target(&self) -> f32 {
        (2.0 * self.target - self.weighted_sum / self.total_weight).clamp(0.0, 1.0)
    }

    /// Favours tokens near the adapted target.
    pub(crate) fn transform(&mut self, c: &mut Candidates) {
        c.softmax();
        self.original.clear();
        self.original.extend_from_slice(&c.items);
        let target = self.adapted_target();
        for item in &mut c.items {
            let x = (item.p - target).abs() / WIDTH;
            item.logit = PEAK_LOGIT - SHARPNESS * x * x / (1.0 + x);
        }
        c.disorder();
        c.softmax();
    }

    /// Adds the original probability of the drawn token to the average.
    pub(crate) fn observe(&mut self, drawn: u32) {
        if let Some(original) = self.original.iter().find(|c| c.id == drawn) {
            self.weighted_sum = original.p + self.decay * self.weighted_sum;
            self.total_weight = 1.0 + self.decay * self.total_weight;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::candidates::tests::with_probabilities;
    use super::*;

    /// Target 0.3: x is 1, 0, 2/3 for 0.6, 0.3, 0.1, so the logits are 0, 5 and 5 − 10·(4/9)/(5/3) = 7/3.
    #[test]
    fn the_token_nearest_the_target_wins() {
        let mut c = with_probabilities(&[0.6, 0.3, 0.1]);
        Adaptive::new(0.3, 0.9).transform(&mut c);
        for (item, logit) in c.items.iter().zip([0.0, 5.0, 7.0 / 3.0]) {
            assert!((item.logit - logit).abs() < 1e-4, "{item:?}");
        }
    }

    /// Decay ½: W = 2, S = 0.6; after 0.6 was drawn S = 0.9, W = 2, so the target moves to 0.6 − 0.45 = 0.15.
    #[test]
    fn likely_tokens_lower_the_target() {
        let mut a = Adaptive::new(0.3, 0.5);
        let mut c = with_probabilities(&[0.6, 0.3, 0.1]);
        a.transform(&mut c);
        a.observe(0);
        assert!((a.adapted_target() - 0.15).abs() < 1e-5);
    }
}
