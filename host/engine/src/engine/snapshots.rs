//! Where snapshots of a prompt are worth their memory.
//!
//! Recurrent state and sliding windows can be gone back to only where a snapshot was kept. Three kinds of requests
//! should find one: the same prompt again, the next turn of a conversation, and another prompt with the same beginning.
//! A template may render a finished turn otherwise than it rendered the prompt for it (thoughts are dropped from the
//! history), so what later turns have in common with a prompt ends before the generation prompt: after the token with
//! which the last turn ends.

use super::Core;
use super::choice::Phase;

/// Snapshots nearer to each other save nothing that is worth one.
const LEAST_APART: usize = 16;

/// Long prompts get snapshots at multiples of so many tokens, or of a power of two times as many.
const STRIDE: usize = 1024;

/// Most snapshots at multiples of the stride in one prompt.
const MOST_STRIDES: usize = 4;

/// Positions at which snapshots of a prompt are wanted, of which `cached` tokens are there already. Another prompt has
/// its first `common` tokens in common; `ends_turn` says which tokens end a turn.
fn positions(prompt: &[u32], cached: usize, common: usize, ends_turn: impl Fn(u32) -> bool) -> Vec<usize> {
    let last = prompt.len() - 1;
    let turns: Vec<usize> = (1..=last).filter(|&at| ends_turn(prompt[at - 1])).collect();
    let mut wanted: Vec<usize> = Vec::new();
    // The most useful first: of two that are too near to each other the first one is kept.
    let turn_ends = [turns.last(), Some(&last), Some(&common), turns.first(), turns.iter().rev().nth(1)];
    for at in turn_ends.into_iter().flatten().copied().chain(strides(last)) {
        let apart = |other: &usize| at.abs_diff(*other) >= LEAST_APART;
        if (cached + LEAST_APART..=last).contains(&at) && wanted.iter().all(apart) {
            wanted.push(at);
        }
    }
    wanted
}

/// At most [`MOST_STRIDES`] multiples of a stride below `end`. Larger strides are multiples of smaller ones, so that
/// prompts of different lengths meet.
fn strides(end: usize) -> impl Iterator<Item = usize> {
    let mut stride = STRIDE;
    while end / stride > MOST_STRIDES {
        stride *= 2;
    }
    (1..=end / stride).map(move |i| i * stride)
}

impl Core {
    /// Asks the cache for snapshots of the prompt that is computed in a slot.
    pub(super) fn keep_snapshots(&mut self, slot: usize) {
        if !self.cache.uses_snapshots() {
            return;
        }
        let Some(choice) = self.slots[slot].choice.as_ref().filter(|c| c.phase == Phase::Prefill) else { return };
        let prompt = choice.prompt();
        let common = self.cache.common_beginning(&prompt[..prompt.len() - 1]);
        let wanted = positions(prompt, choice.fed, common, |token| self.vocab.is_end_of_generation(token));
        if let Err(error) = self.cache.keep_snapshots(choice.seq, &wanted) {
            tracing::error!(%error, "snapshots of a prompt could not be asked for");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const END: u32 = 9;

    fn wanted(prompt: &[u32], cached: usize, common: usize) -> Vec<usize> {
        let mut wanted = positions(prompt, cached, common, |token| token == END);
        wanted.sort_unstable();
        wanted
    }

    fn turns(lengths: &[usize], generation_prompt: usize) -> Vec<u32> {
        let turn = |&n: &usize| [vec![1; n - 1], vec![END]].concat();
        lengths.iter().flat_map(turn).chain(vec![2; generation_prompt]).collect()
    }

    #[test]
    fn a_conversation_is_kept_after_its_system_prompt_and_around_its_last_turn() {
        assert_eq!(wanted(&turns(&[100, 50, 60, 40], 5), 0, 0), [100, 210, 250]);
        // What was there already is not kept again.
        assert_eq!(wanted(&turns(&[100, 50, 60, 40], 5), 210, 210), [250]);
    }

    #[test]
    fn a_prompt_without_turns_is_kept_but_for_its_last_token() {
        assert_eq!(wanted(&[1; 200], 0, 0), [199]);
        assert_eq!(wanted(&[1; 200], 190, 190), [0; 0]);
        assert_eq!(wanted(&[1; 10], 0, 0), [0; 0]);
    }

    #[test]
    fn a_beginning_that_another_prompt_has_too_is_kept() {
        assert_eq!(wanted(&[1; 500], 0, 320), [320, 499]);
    }

    #[test]
    fn long_prompts_are_kept_at_few_multiples_of_a_stride() {
        assert_eq!(wanted(&vec![1; 3000], 0, 0), [1024, 2048, 2999]);
        assert_eq!(wanted(&vec![1; 100_000], 0, 0), [32_768, 65_536, 98_304, 99_999]);
    }
}
