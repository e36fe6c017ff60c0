//! Batching changes nothing but the time.

use super::rig::{Rig, Sizes, prompt, request, sampled};
use crate::api::{Event, StopReason};

#[test]
fn counts_add_up() {
    let rig = Rig::new(Sizes::default());
    let answer = rig.answer(request(prompt(1, 300), 20));
    let t = &answer.finish.timings;
    assert_eq!((t.cache_n, t.prompt_n, t.predicted_n), (0, 300, 20));
    assert_eq!((answer.tokens.len(), answer.text.len()), (20, 20));
    assert_eq!((answer.finish.reason, answer.finish.truncated), (StopReason::Limit, false));
    // The last token drawn was never fed.
    assert_eq!(answer.finish.tokens_cached, 319);
    rig.close();
}

#[test]
fn the_answer_depends_neither_on_the_batch_size_nor_on_who_else_runs() {
    let alone = Rig::new(Sizes { n_batch: 512, prefill_chunk: 512, ..Sizes::default() });
    let expected = alone.answer(sampled(prompt(1, 200), 30, 5)).text;
    alone.close();
    let crowd = Rig::new(Sizes { n_batch: 16, prefill_chunk: 7, ..Sizes::default() });
    let others: Vec<_> = (2..9).map(|i| crowd.start(sampled(prompt(i, 40 * i as usize), 25, 5))).collect();
    let found = crowd.answer(sampled(prompt(1, 200), 30, 5)).text;
    others.into_iter().for_each(|o| assert_eq!(o.answer().unwrap().tokens.len(), 25));
    assert_eq!(found, expected);
    crowd.close();
}

#[test]
fn the_same_seed_gives_the_same_text_and_another_one_another() {
    let rig = Rig::new(Sizes::default());
    let text = |seed| rig.answer(sampled(prompt(1, 50), 30, seed)).text;
    let first = text(1);
    assert_eq!(first, text(1));
    assert_ne!(first, text(2));
    rig.close();
}

#[test]
fn a_random_seed_is_reported_and_gives_the_text_again() {
    let rig = Rig::new(Sizes::default());
    let random = rig.answer(sampled(prompt(1, 50), 30, -1));
    let again = rig.answer(sampled(prompt(1, 50), 30, random.finish.seed as i64));
    assert_eq!(random.text, again.text);
    rig.close();
}

#[test]
fn decoding_never_starves_while_a_long_prompt_is_computed() {
    let mut rig = Rig::new(Sizes { held: true, n_batch: 64, prefill_chunk: 16, ..Sizes::default() });
    let mut talker = rig.start(request(prompt(1, 10), 100));
    rig.permit(1);
    assert!(matches!(talker.next(), Some(Event::Started { .. })));
    assert!(matches!(talker.next(), Some(Event::Token { .. })));
    let reader = rig.start(request(prompt(2, 400), 1));
    rig.until("both run", |slots| slots.iter().filter(|s| s.task.is_some()).count() == 2);
    rig.permit(10);
    for _ in 0..10 {
        assert!(matches!(talker.next(), Some(Event::Token { .. })));
    }
    assert!(rig.watch.steps.lock().unwrap().iter().all(|&rows| rows <= 17));
    rig.let_go();
    talker.answer().unwrap();
    reader.answer().unwrap();
    rig.close();
}

#[test]
fn progress_is_told_when_asked_for() {
    let rig = Rig::new(Sizes { n_batch: 64, ..Sizes::default() });
    let mut ask = request(prompt(1, 150), 1);
    ask.return_progress = true;
    let mut running = rig.start(ask);
    let mut seen = Vec::new();
    while let Some(event) = running.next() {
        if let Event::Progress { total, cache, processed, .. } = event {
            seen.push((total, cache, processed));
        }
    }
    assert_eq!(seen, [(150, 0, 64), (150, 0, 128), (150, 0, 150)]);
    rig.close();
}
