//! The tiny models as the engine runs them, executor and paged cache, against the logits of transformers: however the tokens
//! are cut into steps, whatever else is in the batch, and after taking tokens back.

use opencoti_kv::{Outputs, SeqId};
use proptest::prelude::*;

use crate::cached::Runner;
use crate::mistakes::rebuilt;
use crate::{Fixture, NAMES, TOLERANCE, fixture, max_diff};

impl Fixture {
    /// The reference logits of some positions.
    fn expected(&self, positions: std::ops::Range<usize>) -> &[f32] {
        &self.logits[positions.start * self.vocab..positions.end * self.vocab]
    }
}

fn assert_close(name: &str, what: &str, found: &[f32], expected: &[f32]) {
    let diff = max_diff(found, expected);
    assert!(diff <= TOLERANCE, "{name}, {what}: {diff}");
}

/// Logits of a sequence fed in chunks of these sizes.
fn in_chunks(runner: &mut Runner, tokens: &[u32], sizes: impl Iterator<Item = usize>) -> Vec<f32> {
    let seq = runner.create();
    let mut logits = Vec::new();
    let mut rest = tokens;
    for size in sizes {
        let (chunk, later) = rest.split_at(size.min(rest.len()));
        logits.extend(runner.step(&[(seq, chunk)]).concat());
        rest = later;
        if rest.is_empty() {
            break;
        }
    }
    logits
}

#[test]
fn one_batch_agrees_with_transformers() {
    for &name in NAMES {
        let f = fixture(name);
        for threads in [1, 2] {
            let mut runner = Runner::new(&f.model, threads);
            let logits = in_chunks(&mut runner, &f.tokens, std::iter::once(f.tokens.len()));
            assert_close(name, &format!("{threads} threads"), &logits, &f.logits);
        }
    }
}

#[test]
fn token_by_token_agrees_with_transformers() {
    for &name in NAMES {
        let f = fixture(name);
        let logits = in_chunks(&mut Runner::new(&f.model, 1), &f.tokens, std::iter::repeat(1));
        assert_close(name, "token by token", &logits, &f.logits);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]

    #[test]
    fn random_splits_agree_with_transformers(sizes in prop::collection::vec(1usize..12, 41)) {
        for &name in NAMES {
            let f = fixture(name);
            let logits = in_chunks(&mut Runner::new(&f.model, 1), &f.tokens, sizes.iter().copied());
            prop_assert!(max_diff(&logits, &f.logits) <= TOLERANCE, "{name} in {sizes:?}");
        }
    }
}

#[test]
fn an_interleaved_sequence_changes_nothing() {
    for &name in NAMES {
        let f = fixture(name);
        let mut runner = Runner::new(&f.model, 2);
        let (a, b) = (runner.create(), runner.create());
        let mut other = f.tokens.clone();
        other.reverse();
        let (mut of_a, mut of_b) = (Vec::new(), Vec::new());
        // The second sequence starts two steps later and runs in larger steps.
        let mut rest = other.chunks(7);
        for (i, chunk) in f.tokens.chunks(5).enumerate() {
            let mut batch = vec![(a, chunk)];
            batch.extend((i >= 2).then(|| rest.next()).flatten().map(|chunk| (b, chunk)));
            let logits = runner.step(&batch);
            of_a.extend_from_slice(&logits[0]);
            logits.get(1).into_iter().for_each(|l| of_b.extend_from_slice(l));
        }
        assert_close(name, "beside another", &of_a, &f.logits);
        let alone = in_chunks(&mut Runner::new(&f.model, 1), &other, std::iter::once(other.len()));
        assert_eq!(of_b.len(), alone.len());
        assert_close(name, "the other itself", &of_b, &alone);
    }
}

#[test]
fn rows_without_outputs_change_nothing() {
    for &name in NAMES {
        let f = fixture(name);
        let mut runner = Runner::new(&f.model, 2);
        let (a, b) = (runner.create(), runner.create());
        let mut done = 0;
        for (chunk, outputs) in f.tokens.chunks(7).zip([Outputs::Last, Outputs::None, Outputs::Last].iter().cycle()) {
            let logits = runner.step_for(&[(b, &chunk[..1]), (a, chunk)], *outputs);
            done += chunk.len();
            if *outputs != Outputs::None {
                assert_close(name, "last rows alone", &logits[1], f.expected(done - 1..done));
            }
        }
    }
}

#[test]
fn tokens_taken_back_leave_no_trace() {
    for &name in NAMES {
        let f = fixture(name);
        let mut runner = Runner::new(&f.model, 1);
        let seq = runner.create();
        runner.step(&[(seq, &f.tokens[..20])]);
        let wrong: Vec<u32> = f.tokens[20..31].iter().rev().copied().collect();
        runner.step(&[(seq, &wrong)]);
        runner.truncate(seq, 17);
        let logits = runner.step(&[(seq, &f.tokens[17..])]).concat();
        assert_close(name, "after truncation", &logits, f.expected(17..41));
    }
}

/// Logits of the tokens from `20 + accepted` on, after five tokens were tried of which so many were right, and the rest taken
/// back by `back`.
fn after_trying(f: &Fixture, accepted: usize, back: impl Fn(&mut Runner, SeqId, usize)) -> Vec<f32> {
    let mut runner = Runner::new(&f.model, 1);
    let seq = runner.create();
    runner.step(&[(seq, &f.tokens[..20])]);
    let mut tried = f.tokens[20..25].to_vec();
    tried[accepted..].iter_mut().for_each(|t| *t = (*t + 1) % f.vocab as u32);
    runner.step(&[(seq, &tried)]);
    back(&mut runner, seq, 20 + accepted);
    runner.step(&[(seq, &f.tokens[20 + accepted..])]).concat()
}

#[test]
fn any_number_of_tried_tokens_can_be_kept() {
    for name in NAMES {
        let f = fixture(name);
        for accepted in 0..5 {
            let logits = after_trying(&f, accepted, Runner::truncate);
            assert_close(name, &format!("{accepted} kept"), &logits, f.expected(20 + accepted..41));
        }
    }
}

#[test]
fn inputs_of_convolutions_that_are_not_taken_back_are_seen() {
    for name in ["qwen35", "lfm2"] {
        let f = fixture(name);
        for accepted in 1..4 {
            let logits = after_trying(&f, accepted, Runner::truncate_without_inputs);
            assert!(max_diff(&logits, f.expected(20 + accepted..41)) > 0.01, "{name}, {accepted} kept");
        }
    }
}

#[test]
fn a_window_off_by_one_is_seen() {
    let f = fixture("gemma3");
    for window in [7, 9] {
        let model = rebuilt(&f.model, |hp| hp.sliding_window = Some(window));
        let logits = in_chunks(&mut Runner::new(&model, 1), &f.tokens, std::iter::repeat(6));
        assert!(max_diff(&logits, &f.logits) > 0.1, "{window}");
    }
}
