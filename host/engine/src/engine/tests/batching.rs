//! Batching changes nothing but the time.

use super::rig::{Rig, Sizes, prompt, request, sampled};
use crate::api::{Command, Event, GenerateRequest, StopReason};
use crate::engine::Elastic;

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

/// Most sequences in one step of those that are remembered.
fn most_at_once(rig: &Rig) -> usize {
    rig.ask(Command::Trace).iter().map(|step| step.rows.len()).max().unwrap_or(0)
}

#[test]
fn slots_are_opened_one_by_one_while_somebody_waits_and_what_is_asked_for_holds() {
    let open = |elastic| {
        let mut rig = Rig::new(Sizes { open_slots: Some(1), elastic, held: true, ..Sizes::default() });
        let running: Vec<_> = (0..3).map(|seed| rig.start(request(prompt(seed, 20), 30))).collect();
        rig.let_go();
        running.into_iter().for_each(|r| assert_eq!(r.answer().unwrap().tokens.len(), 30));
        let most = most_at_once(&rig);
        rig.close();
        most
    };
    assert_eq!(open(Elastic::default()), 3);
    assert_eq!(open(Elastic { tps_floor: f32::MAX, memory_reserve: 0 }), 1);
    assert_eq!(open(Elastic { tps_floor: 0.0, memory_reserve: u64::MAX }), 1);
}

#[test]
fn a_reserved_context_can_not_be_taken_by_others() {
    // Four contexts of 256 tokens and a page for what a fork cuts.
    let sizes = Sizes { n_ctx: 256, capacity: 4 * 384, reserve_context: true, ..Sizes::default() };
    let rig = Rig::new(sizes);
    let unbounded = |seed| {
        let mut ask = request(prompt(seed, 100), 0);
        ask.n_predict = None;
        rig.start(ask)
    };
    let running: Vec<_> = (0..4).map(unbounded).collect();
    for answer in running.into_iter().map(|r| r.answer().unwrap()) {
        assert_eq!(answer.finish.timings.predicted_n, 156, "each fills its own context");
    }
    rig.close();
}

#[test]
fn a_higher_priority_leaves_the_queue_first() {
    let mut rig = Rig::new(Sizes { n_slots: 1, held: true, ..Sizes::default() });
    let first = rig.start(request(prompt(1, 20), 3));
    let low = rig.start(request(prompt(2, 20), 3));
    let high = rig.start(GenerateRequest { priority: 5, ..request(prompt(3, 20), 3) });
    rig.let_go();
    let (earlier, later) = (high.id.0, low.id.0);
    [first, low, high].into_iter().for_each(|r| drop(r.answer().unwrap()));
    let steps = rig.ask(Command::Trace);
    let of = |id| steps.iter().position(|step| step.rows.iter().any(|r| r.request == id)).expect("it ran");
    assert!(of(earlier) < of(later));
    rig.close();
}

#[test]
fn a_trace_tells_who_took_part_in_each_step() {
    let rig = Rig::new(Sizes::default());
    rig.answer(request(prompt(1, 200), 5));
    let steps = rig.ask(Command::Trace);
    let rows: Vec<_> = steps.iter().flat_map(|s| &s.rows).collect();
    assert_eq!(rows.iter().filter(|r| !r.decodes).map(|r| r.tokens).sum::<u32>(), 200);
    assert_eq!(rows.iter().filter(|r| r.decodes).count(), 4);
    assert!(steps.iter().all(|s| s.began <= s.planned && s.planned <= s.ran && s.ran <= s.ended));
    rig.close();
}
