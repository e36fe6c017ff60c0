//! XTC, "exclude top choices": now and then removes all likely tokens but the least likely of them.

use super::candidates::Candidates;

/// If `chance` (a uniform draw from [0, 1)) is below `probability`, drops every candidate of at least `threshold`
/// except the least probable of these. A threshold above one half can never hold twice and turns the sampler off.
pub(crate) fn xtc(c: &mut Candidates, probability: f32, threshold: f32, min_keep: usize, chance: f32) {
    if probability <= 0.0 || threshold > 0.5 || c.len() < 2 || chance >= probability {
        return;
    }
    c.sort();
    c.softmax();
    let likely = c.items.iter().take_while(|item| item.p >= threshold).count();
    let dropped = likely.saturating_sub(1);
    if dropped > 0 && c.len() - dropped >= min_keep {
        c.drop_first(dropped);
    }
}

#[cfg(test)]
mod tests {
    use super::super::candidates::tests::{ids, with_probabilities};
    use super::*;

    fn left(probability: f32, threshold: f32, min_keep: usize, chance: f32) -> Vec<u32> {
        let mut c = with_probabilities(&[0.4, 0.3, 0.2, 0.1]);
        xtc(&mut c, probability, threshold, min_keep, chance);
        ids(&c)
    }

    #[test]
    fn all_likely_tokens_but_the_last_go() {
        assert_eq!(left(1.0, 0.15, 0, 0.0), [2, 3]);
        assert_eq!(left(1.0, 0.25, 0, 0.0), [1, 2, 3]);
        assert_eq!(left(1.0, 0.0, 0, 0.0), [3]);
    }

    #[test]
    fn it_acts_only_by_chance_and_never_below_min_keep() {
        assert_eq!(left(0.5, 0.15, 0, 0.5), [0, 1, 2, 3]);
        assert_eq!(left(0.0, 0.15, 0, 0.0), [0, 1, 2, 3]);
        assert_eq!(left(1.0, 0.15, 3, 0.0), [0, 1, 2, 3]);
        assert_eq!(left(1.0, 0.51, 0, 0.0), [0, 1, 2, 3]);
    }
}
