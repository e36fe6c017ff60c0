//! Samplers that cut the tail off: top-k, top-p, min-p, top-n-sigma and locally typical sampling.
//!
//! Each leaves at least one candidate, and at least `min_keep` where it has that bound.

use super::candidates::Candidates;

/// Keeps the `k` most probable; 0 keeps all.
pub(crate) fn top_k(c: &mut Candidates, k: usize, min_keep: usize) {
    if k > 0 {
        c.keep_highest(k.max(min_keep).max(1));
    }
}

/// Nucleus sampling: keeps the most probable tokens whose probabilities sum to at least `p`; 1 keeps all.
pub(crate) fn top_p(c: &mut Candidates, p: f32, min_keep: usize) {
    if p >= 1.0 {
        return;
    }
    c.softmax();
    c.narrow(p, min_keep);
    c.sort();
    let mut sum = 0f32;
    let mut keep = c.len();
    for (i, item) in c.items.iter().enumerate() {
        sum += item.p;
        if sum >= p && i + 1 >= min_keep {
            keep = i + 1;
            break;
        }
    }
    c.truncate(keep);
}

/// Keeps tokens at least `p` times as probable as the best one; 0 keeps all.
pub(crate) fn min_p(c: &mut Candidates, p: f32, min_keep: usize) {
    if p <= 0.0 {
        return;
    }
    let floor = c.max_logit() + p.ln();
    let above = c.items.iter().filter(|item| item.logit >= floor).count();
    if above >= min_keep.max(1) {
        c.retain(|item| item.logit >= floor);
    } else {
        c.keep_highest(min_keep.max(1));
    }
}

/// Keeps tokens whose logit is within `n` standard deviations (of all logits) of the best one; ≤ 0 keeps all.
pub(crate) fn top_n_sigma(c: &mut Candidates, n: f32, min_keep: usize) {
    if n <= 0.0 || c.len() <= 1 {
        return;
    }
    let count = c.len() as f64;
    let mean = c.items.iter().map(|item| f64::from(item.logit)).sum::<f64>() / count;
    let variance = c.items.iter().map(|item| (f64::from(item.logit) - mean).powi(2)).sum::<f64>() / count;
    let floor = f64::from(c.max_logit()) - f64::from(n) * variance.sqrt();
    let above = c.items.iter().filter(|item| f64::from(item.logit) >= floor).count();
    if above >= min_keep.max(1) {
        c.retain(|item| f64::from(item.logit) >= floor);
    } else {
        c.keep_highest(min_keep.max(1));
    }
}

/// Locally typical sampling (Meister et al. 2022): keeps the tokens whose surprise is nearest to the expected one,
/// until their probabilities sum to more than `p`; 1 keeps all.
pub(crate) fn typical(c: &mut Candidates, p: f32, min_keep: usize) {
    if p >= 1.0 {
        return;
    }
    c.softmax();
    let entropy = c.entropy();
    let distance = |p: f32| (-p.max(f32::MIN_POSITIVE).ln() - entropy).abs();
    c.items.sort_unstable_by(|a, b| distance(a.p).total_cmp(&distance(b.p)).then(a.id.cmp(&b.id)));
    c.disorder();
    let mut sum = 0f32;
    let mut keep = c.len();
    for (i, item) in c.items.iter().enumerate() {
        sum += item.p;
        if sum > p && i + 1 >= min_keep {
            keep = i + 1;
            break;
        }
    }
    c.truncate(keep);
}

#[cfg(test)]
mod tests {
    use super::super::candidates::tests::{ids, with_probabilities};
    use super::*;

    const P: [f32; 4] = [0.1, 0.2, 0.3, 0.4];

    fn kept(cut: impl Fn(&mut Candidates)) -> Vec<u32> {
        let mut c = with_probabilities(&P);
        cut(&mut c);
        let mut kept = ids(&c);
        kept.sort_unstable();
        kept
    }

    #[test]
    fn top_k_keeps_k_and_zero_keeps_all() {
        assert_eq!(kept(|c| top_k(c, 1, 0)), [3]);
        assert_eq!(kept(|c| top_k(c, 3, 0)), [1, 2, 3]);
        assert_eq!(kept(|c| top_k(c, 9, 0)), [0, 1, 2, 3]);
        assert_eq!(kept(|c| top_k(c, 0, 0)), [0, 1, 2, 3]);
        assert_eq!(kept(|c| top_k(c, 1, 2)), [2, 3]);
    }

    #[test]
    fn top_p_keeps_the_smallest_set_that_reaches_p() {
        assert_eq!(kept(|c| top_p(c, 0.0, 0)), [3]);
        assert_eq!(kept(|c| top_p(c, 0.69, 0)), [2, 3]);
        assert_eq!(kept(|c| top_p(c, 0.8, 0)), [1, 2, 3]);
        assert_eq!(kept(|c| top_p(c, 1.0, 0)), [0, 1, 2, 3]);
        assert_eq!(kept(|c| top_p(c, 0.0, 3)), [1, 2, 3]);
    }

    #[test]
    fn min_p_is_relative_to_the_best() {
        assert_eq!(kept(|c| min_p(c, 0.26, 0)), [1, 2, 3]);
        assert_eq!(kept(|c| min_p(c, 0.49, 0)), [1, 2, 3]);
        assert_eq!(kept(|c| min_p(c, 0.76, 0)), [3]);
        assert_eq!(kept(|c| min_p(c, 1.0, 0)), [3]);
        assert_eq!(kept(|c| min_p(c, 1.0, 2)), [2, 3]);
        assert_eq!(kept(|c| min_p(c, 0.0, 0)), [0, 1, 2, 3]);
    }

    /// Logits 0, 0, 0, 4: mean 1, standard deviation √3 ≈ 1.732, so one sigma cuts at 2.27 and three at −1.2.
    #[test]
    fn top_n_sigma_cuts_by_standard_deviations() {
        let with = |n| {
            let mut c = Candidates::default();
            c.fill(&[0.0, 0.0, 0.0, 4.0], |_| true);
            top_n_sigma(&mut c, n, 0);
            ids(&c)
        };
        assert_eq!(with(1.0), [3]);
        assert_eq!(with(3.0), [0, 1, 2, 3]);
        assert_eq!(with(-1.0), [0, 1, 2, 3]);
    }

    /// Entropy of P is 1.2799 nats; surprises are 2.303, 1.609, 1.204, 0.916, so the distances are
    /// 1.02, 0.33, 0.076, 0.36 and the order of typicality is 2, 1, 3, 0.
    #[test]
    fn typical_prefers_the_expected_surprise_to_the_highest_probability() {
        assert_eq!(kept(|c| typical(c, 0.2, 0)), [2]);
        assert_eq!(kept(|c| typical(c, 0.49, 0)), [1, 2]);
        assert_eq!(kept(|c| typical(c, 0.6, 0)), [1, 2, 3]);
        assert_eq!(kept(|c| typical(c, 1.0, 0)), [0, 1, 2, 3]);
    }
}
