//! Two distributions over the next token, and sums over many of them.

use crate::measure::stats;

/// A row of logits as log-probabilities.
pub struct Distribution {
    log_p: Vec<f64>,
    top: usize,
}

impl Distribution {
    /// Of a row of logits; of equal ones the first is the top.
    pub fn of(logits: &[f32]) -> Distribution {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|&l| f64::from(l - max).exp()).sum();
        let log_sum = f64::from(max) + sum.ln();
        let top = logits.iter().position(|&l| l == max).unwrap_or(0);
        Distribution { log_p: logits.iter().map(|&l| f64::from(l) - log_sum).collect(), top }
    }

    /// Nats by which a token surprises.
    pub fn surprise(&self, token: u32) -> f64 {
        self.log_p.get(token as usize).map_or(f64::NAN, |log_p| -log_p)
    }

    /// How far `other` is from this.
    pub fn compare(&self, other: &Distribution) -> Difference {
        let (mut kld, mut tv) = (0.0, 0.0);
        for (&p, &q) in self.log_p.iter().zip(&other.log_p) {
            let (exp_p, exp_q) = (p.exp(), q.exp());
            // A token of no probability adds nothing, whatever its logarithm.
            if exp_p > 0.0 {
                kld += exp_p * (p - q);
            }
            tv += (exp_p - exp_q).abs();
        }
        Difference { kld, tv: tv / 2.0, same_top: self.top == other.top }
    }
}

/// How far one distribution is from another.
#[derive(Clone, Copy, Debug)]
pub struct Difference {
    /// Kullback-Leibler divergence, in nats.
    pub kld: f64,
    /// Total variation, 0 to 1.
    pub tv: f64,
    /// Whether the most probable token is the same.
    pub same_top: bool,
}

/// What was found at many positions.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    klds: Vec<f64>,
    tvs: Vec<f64>,
    same_tops: usize,
    hits: usize,
    surprises: Vec<f64>,
}

impl Tally {
    /// Adds a position with what was found there, and the token that follows.
    pub fn add(&mut self, difference: Difference, found: &Distribution, token: u32) {
        self.klds.push(difference.kld);
        self.tvs.push(difference.tv);
        self.same_tops += usize::from(difference.same_top);
        self.hits += usize::from(found.top == token as usize);
        self.surprises.push(found.surprise(token));
    }

    /// Mean divergence.
    pub fn kld(&self) -> f64 {
        stats::mean(&self.klds)
    }

    /// Divergence that a share `q` of positions does not exceed.
    pub fn kld_quantile(&self, q: f64) -> f64 {
        stats::quantile(&self.klds, q)
    }

    /// Mean total variation.
    pub fn tv(&self) -> f64 {
        stats::mean(&self.tvs)
    }

    /// Share of positions with the same most probable token.
    pub fn top1(&self) -> f64 {
        self.same_tops as f64 / self.klds.len() as f64
    }

    /// Whether at every position the token that follows was the most probable one: greedy decoding would have said them.
    pub fn is_said(&self) -> bool {
        self.hits == self.surprises.len()
    }

    /// Nats by which a token surprised, the mean.
    pub fn surprise(&self) -> f64 {
        stats::mean(&self.surprises)
    }

    /// Perplexity of the text.
    pub fn perplexity(&self) -> f64 {
        stats::mean(&self.surprises).exp()
    }

    /// Standard error of the perplexity, as if positions were independent.
    pub fn perplexity_error(&self) -> f64 {
        let (n, mean) = (self.surprises.len() as f64, stats::mean(&self.surprises));
        let variance = self.surprises.iter().map(|s| (s - mean).powi(2)).sum::<f64>() / (n - 1.0);
        self.perplexity() * (variance / n).sqrt()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_those_of_the_textbook() {
        // Probabilities 1/2, 1/4, 1/4 and 1/4, 1/2, 1/4, of logits that are shifted.
        let p = Distribution::of(&[7.0, 7.0 - 2f32.ln(), 7.0 - 2f32.ln()]);
        let q = Distribution::of(&[-2f32.ln(), 0.0, -2f32.ln()]);
        let found = p.compare(&q);
        assert!((found.kld - 0.25 * 2f64.ln()).abs() < 1e-6, "{found:?}");
        assert!((found.tv - 0.25).abs() < 1e-6 && !found.same_top, "{found:?}");
        assert!((p.surprise(1) - 4f64.ln()).abs() < 1e-6);
        assert!(p.surprise(9).is_nan());
        let same = p.compare(&p);
        assert!(same.kld == 0.0 && same.tv == 0.0 && same.same_top);
    }

    #[test]
    fn what_is_impossible_adds_nothing() {
        let p = Distribution::of(&[0.0, f32::NEG_INFINITY]);
        assert!((p.compare(&Distribution::of(&[0.0, 0.0])).kld - 2f64.ln()).abs() < 1e-9);
    }

    #[test]
    fn logits_that_are_no_numbers_are_seen_in_every_sum() {
        let difference = Distribution::of(&[0.0, 0.0]).compare(&Distribution::of(&[f32::NAN, 0.0]));
        assert!(difference.kld.is_nan() && difference.tv.is_nan());
    }

    #[test]
    fn a_tally_sums_up_positions() {
        let mut tally = Tally::default();
        // Surprises of ln 2, ln 4 and ln 4; the first two tokens are the top ones.
        let even = Distribution::of(&[0.0, 0.0]);
        let quarters = Distribution::of(&[0.0; 4]);
        for (kld, same_top, found, token) in
            [(0.0, true, &even, 0), (0.1, false, &quarters, 0), (0.5, true, &quarters, 3)]
        {
            assert_eq!(tally.is_said(), tally.hits == tally.klds.len());
            tally.add(Difference { kld, tv: 0.1, same_top }, found, token);
        }
        assert!((tally.kld() - 0.2).abs() < 1e-12 && tally.kld_quantile(0.5) == 0.1);
        assert!((tally.top1() - 2.0 / 3.0).abs() < 1e-12 && !tally.is_said());
        let mean = 5.0 / 3.0 * 2f64.ln();
        assert!((tally.surprise() - mean).abs() < 1e-9 && (tally.perplexity() - mean.exp()).abs() < 1e-9);
        // The variance of 1, 2 and 2 is 1/3, in units of ln 2.
        let error = mean.exp() * 2f64.ln() * (1.0f64 / 9.0).sqrt();
        assert!((tally.perplexity_error() - error).abs() < 1e-9);
    }
}
