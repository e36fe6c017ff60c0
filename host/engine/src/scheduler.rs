//! The policy of a step: how many tokens of whom.
//!
//! Everybody who decodes gets their one token first, so decoding never starves. What is left of the step's budget goes
//! to prompts in even shares, rotating who comes first, so that a long prompt cannot hold up a short one. While
//! somebody decodes, prompts get at most `prefill_chunk` tokens a step, which bounds the time between two tokens.

/// Sizes of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepBudget {
    /// Most tokens in a step.
    pub n_batch: usize,
    /// Most prompt tokens in a step in which somebody decodes.
    pub prefill_chunk: usize,
    /// Most rows of which logits or hidden states are computed in a step; at least the number of slots.
    pub max_outputs: usize,
}

/// A prompt that wants to go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Prompt {
    /// Tokens still to be computed, up to the next place where others wait to attach.
    pub(crate) tokens: usize,
    /// Whether each of them needs an output row.
    pub(crate) all_outputs: bool,
}

/// Shares a step between `decoding` sequences and `prompts`; gives each prompt's number of tokens. `turn` counts steps.
pub(crate) fn share(budget: StepBudget, decoding: usize, prompts: &[Prompt], turn: usize) -> Vec<usize> {
    let mut granted = vec![0; prompts.len()];
    if prompts.is_empty() {
        return granted;
    }
    let mut tokens = budget.n_batch.saturating_sub(decoding);
    if decoding > 0 {
        tokens = tokens.min(budget.prefill_chunk);
    }
    // Every prompt may need a row for its last token.
    let mut outputs = budget.max_outputs.saturating_sub(decoding + prompts.len());
    for place in 0..prompts.len() {
        let i = (turn + place) % prompts.len();
        let share = tokens.div_ceil(prompts.len() - place);
        let prompt = prompts[i];
        let mut n = prompt.tokens.min(share);
        if prompt.all_outputs {
            n = n.min(outputs + 1);
            outputs -= n.saturating_sub(1);
        }
        granted[i] = n;
        tokens -= n;
    }
    granted
}

/// Shares a step between texts of which each is computed as a whole: as many as fit, first come first served.
pub(crate) fn share_whole(budget: StepBudget, texts: &[usize]) -> Vec<usize> {
    let mut left = budget.n_batch;
    let mut full = false;
    let grant = |&tokens: &usize| {
        full |= tokens > left;
        let granted = if full { 0 } else { tokens };
        left -= granted;
        granted
    };
    texts.iter().map(grant).collect()
}

/// Number of leading tokens that two prompts have in common.
pub(crate) fn common_prefix(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(x, y)| x == y).count()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BUDGET: StepBudget = StepBudget { n_batch: 100, prefill_chunk: 40, max_outputs: 20 };

    fn prompts(tokens: &[usize]) -> Vec<Prompt> {
        tokens.iter().map(|&tokens| Prompt { tokens, all_outputs: false }).collect()
    }

    #[test]
    fn a_lone_prompt_gets_the_whole_step() {
        assert_eq!(share(BUDGET, 0, &prompts(&[500]), 0), [100]);
        assert_eq!(share(BUDGET, 0, &prompts(&[7]), 0), [7]);
    }

    #[test]
    fn while_somebody_decodes_prompts_get_a_chunk() {
        assert_eq!(share(BUDGET, 1, &prompts(&[500]), 0), [40]);
        assert_eq!(share(BUDGET, 90, &prompts(&[500]), 0), [10]);
    }

    #[test]
    fn a_short_prompt_is_not_held_up_by_a_long_one() {
        assert_eq!(share(BUDGET, 0, &prompts(&[5000, 30]), 0), [50, 30]);
        assert_eq!(share(BUDGET, 0, &prompts(&[30, 5000]), 0), [30, 70]);
    }

    #[test]
    fn who_comes_first_rotates_when_not_everybody_gets_a_token() {
        let tiny = StepBudget { n_batch: 2, ..BUDGET };
        assert_eq!(share(tiny, 0, &prompts(&[9, 9, 9]), 0), [1, 1, 0]);
        assert_eq!(share(tiny, 0, &prompts(&[9, 9, 9]), 1), [0, 1, 1]);
        assert_eq!(share(tiny, 0, &prompts(&[9, 9, 9]), 2), [1, 0, 1]);
    }

    #[test]
    fn rows_that_need_outputs_are_bounded() {
        let all = [Prompt { tokens: 500, all_outputs: true }];
        assert_eq!(share(BUDGET, 0, &all, 0), [20]);
        assert_eq!(share(BUDGET, 8, &all, 0), [12]);
    }

    #[test]
    fn whole_texts_go_in_their_order_or_wait() {
        assert_eq!(share_whole(BUDGET, &[40, 50, 10, 5]), [40, 50, 10, 0]);
        assert_eq!(share_whole(BUDGET, &[60, 60, 10]), [60, 0, 0]);
        assert_eq!(share_whole(BUDGET, &[]), [0usize; 0]);
    }

    proptest! {
        #[test]
        fn a_share_keeps_every_bound(
            n_batch in 1usize..64,
            prefill_chunk in 1usize..64,
            decoding in 0usize..16,
            wanted in proptest::collection::vec((1usize..100, any::<bool>()), 0..16),
            turn in 0usize..100,
        ) {
            let budget = StepBudget { n_batch: n_batch + decoding, prefill_chunk, max_outputs: 32 };
            let prompts: Vec<_> = wanted.iter().map(|&(tokens, all_outputs)| Prompt { tokens, all_outputs }).collect();
            let granted = share(budget, decoding, &prompts, turn);
            prop_assert!(granted.iter().sum::<usize>() + decoding <= budget.n_batch);
            let rows: usize = granted.iter().zip(&prompts).map(|(&n, p)| if p.all_outputs { n } else { n.min(1) }).sum();
            prop_assert!(rows + decoding <= budget.max_outputs);
            prop_assert!(granted.iter().zip(&prompts).all(|(&n, p)| n <= p.tokens));
            prop_assert!(prompts.is_empty() || granted.iter().any(|&n| n > 0));
        }
    }
}
