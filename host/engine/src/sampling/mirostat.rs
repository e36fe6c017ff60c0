//! Mirostat 1 and 2 (Basu et al. 2021): hold the surprise of the text near a target by feedback.

use super::candidates::{Candidate, Candidates};

/// How many candidates the first version looks at to estimate Zipf's exponent.
const ZIPF_SAMPLE: usize = 100;

/// The feedback state of one sequence.
#[derive(Debug, Clone)]
pub(crate) struct Mirostat {
    tau: f32,
    eta: f32,
    /// The most surprise, in bits, that a token may have; starts at twice the target.
    mu: f32,
    n_vocab: usize,
}

impl Mirostat {
    pub(crate) fn new(tau: f32, eta: f32, n_vocab: usize) -> Self {
        Self { tau, eta, mu: 2.0 * tau, n_vocab }
    }

    /// Version 1: estimates Zipf's exponent and from it the k of a top-k that gives the target surprise.
    pub(crate) fn truncate_v1(&self, c: &mut Candidates) {
        c.sort();
        c.softmax();
        let s = zipf_exponent(c);
        let epsilon = s - 1.0;
        let k = (epsilon * self.mu.exp2() / (1.0 - (self.n_vocab as f32).powf(-epsilon))).powf(1.0 / s);
        let k = if k.is_finite() { (k as usize).max(1) } else { c.len() };
        c.keep_highest(k);
        c.softmax();
    }

    /// Version 2: drops the tokens whose surprise is above the bound, keeping at least one.
    pub(crate) fn truncate_v2(&self, c: &mut Candidates) {
        c.sort();
        c.softmax();
        let keep = c.items.iter().take_while(|item| -item.p.log2() <= self.mu).count();
        c.truncate(keep.max(1));
        c.softmax();
    }

    /// Moves the bound by the error of the token that was drawn.
    pub(crate) fn observe(&mut self, drawn: &Candidate) {
        let surprise = -drawn.p.max(f32::MIN_POSITIVE).log2();
        self.mu -= self.eta * (surprise - self.tau);
    }
}

/// Least-squares estimate of s in p(i) ∝ i^−s over the leading candidates, as in the paper's equation 30.
fn zipf_exponent(c: &Candidates) -> f32 {
    let (mut tb, mut tt) = (0f32, 0f32);
    for (i, pair) in c.items.windows(2).take(ZIPF_SAMPLE - 1).enumerate() {
        if pair[1].p <= 0.0 {
            break;
        }
        let t = ((i + 2) as f32 / (i + 1) as f32).ln();
        let b = (pair[0].p / pair[1].p).ln();
        tb += t * b;
        tt += t * t;
    }
    if tt > 0.0 { tb / tt } else { 1.0 }
}

#[cfg(test)]
mod tests {
    use super::super::candidates::tests::{ids, with_probabilities};
    use super::*;

    /// Surprises of ½, ¼, ⅛, ⅛ are 1, 2, 3, 3 bits; the bound starts at 2·tau.
    #[test]
    fn version_2_drops_what_surprises_too_much() {
        for (tau, kept) in [(0.4, vec![0]), (1.0, vec![0, 1]), (1.5, vec![0, 1, 2, 3])] {
            let mut c = with_probabilities(&[0.5, 0.25, 0.125, 0.125]);
            Mirostat::new(tau, 0.1, 4).truncate_v2(&mut c);
            assert_eq!(ids(&c), kept, "tau {tau}");
        }
    }

    #[test]
    fn zipf_exponent_of_a_zipf_distribution_is_found() {
        let p: Vec<f32> = (1..50).map(|i| (i as f32).powf(-1.3)).collect();
        let mut c = with_probabilities(&p);
        c.sort();
        c.softmax();
        assert!((zipf_exponent(&c) - 1.3).abs() < 1e-3);
    }

    /// s = 2, ε = 1, μ = 2·2 = 4, n = 100: k = (2⁴ / (1 − 1/100))^½ = 4.02.
    #[test]
    fn version_1_turns_the_bound_into_a_top_k() {
        let p: Vec<f32> = (1..=100).map(|i| (i as f32).powf(-2.0)).collect();
        let mut c = with_probabilities(&p);
        Mirostat::new(2.0, 0.1, 100).truncate_v1(&mut c);
        assert_eq!(ids(&c), [0, 1, 2, 3]);
    }

    /// A drawn token of 1 bit against a target of 2 raises the bound by eta · 1.
    #[test]
    fn the_bound_follows_the_error() {
        let mut m = Mirostat::new(2.0, 0.1, 4);
        m.observe(&Candidate { id: 0, logit: 0.0, p: 0.5 });
        assert!((m.mu - 4.1).abs() < 1e-6);
    }
}
