//! Temperature, fixed or driven by the entropy of the distribution.

use super::candidates::Candidates;

/// Divides the logits by `temperature`, which must be positive.
///
/// With `range` > 0 the temperature moves within `temperature ± range` with the entropy of the distribution, as
/// `low + (high − low) · (entropy / ln n)^exponent`: sure distributions stay sharp, flat ones are flattened more.
pub(crate) fn temperature(c: &mut Candidates, temperature: f32, range: f32, exponent: f32) {
    let t = if range > 0.0 && c.len() > 1 {
        let low = (temperature - range).max(0.0);
        let high = temperature + range;
        c.softmax();
        let normalized = (c.entropy() / (c.len() as f32).ln()).clamp(0.0, 1.0);
        low + (high - low) * normalized.powf(exponent)
    } else {
        temperature
    };
    scale(c, t);
}

/// Divides by `t`; towards 0 only the best candidate is left.
fn scale(c: &mut Candidates, t: f32) {
    let max = c.max_logit();
    if !(t.is_finite() && t > 1e-6) {
        if t > 0.0 && !t.is_finite() {
            c.items.iter_mut().for_each(|item| item.logit = 0.0);
            c.disorder();
        } else {
            c.keep_highest(1);
        }
        return;
    }
    // The maximum is subtracted first so that a small temperature cannot overflow upwards; downwards it saturates.
    for item in &mut c.items {
        item.logit = ((item.logit - max) / t).max(f32::MIN);
    }
}

#[cfg(test)]
mod tests {
    use super::super::candidates::tests::{ids, with_probabilities};
    use super::*;

    fn probabilities(c: &mut Candidates) -> Vec<f32> {
        c.softmax();
        c.items.iter().map(|c| c.p).collect()
    }

    /// p^(1/0.5) = p²: 0.04, 0.64 normalised.
    #[test]
    fn half_the_temperature_squares_the_odds() {
        let mut c = with_probabilities(&[0.2, 0.8]);
        temperature(&mut c, 0.5, 0.0, 1.0);
        let p = probabilities(&mut c);
        assert!((p[0] - 0.04 / 0.68).abs() < 1e-6 && (p[1] - 0.64 / 0.68).abs() < 1e-6);
    }

    /// A uniform distribution has full entropy, so the dynamic temperature is the upper end; a sure one the lower.
    #[test]
    fn dynamic_temperature_follows_the_entropy() {
        let mut flat = with_probabilities(&[0.25; 4]);
        flat.items[0].logit += 0.0;
        temperature(&mut flat, 1.0, 0.5, 1.0);
        assert!(probabilities(&mut flat).iter().all(|p| (p - 0.25).abs() < 1e-6));

        // Entropy of (0.8, 0.2) is 0.5004 nats = 0.72193 bits, so t = 0.5 + 1.0 · 0.72193 = 1.22193.
        let mut c = with_probabilities(&[0.8, 0.2]);
        temperature(&mut c, 1.0, 0.5, 1.0);
        let odds = c.items[0].logit - c.items[1].logit;
        assert!((odds - 4f32.ln() / 1.221_928).abs() < 1e-4, "{odds}");
    }

    #[test]
    fn logits_stay_finite_whatever_the_temperature() {
        let mut c = Candidates::default();
        c.fill(&[0.0, 3e38, -3e38], |_| true);
        temperature(&mut c, 0.25, 0.0, 1.0);
        assert_eq!(c.items.iter().map(|c| c.logit).collect::<Vec<_>>(), [f32::MIN, 0.0, f32::MIN]);
    }

    #[test]
    fn a_vanishing_temperature_leaves_the_best() {
        let mut c = with_probabilities(&[0.2, 0.5, 0.3]);
        temperature(&mut c, 1e-9, 0.0, 1.0);
        assert_eq!(ids(&c), [1]);
    }
}
