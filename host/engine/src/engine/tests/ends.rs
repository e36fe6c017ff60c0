//! Every request ends, and gives back what it had.

use std::sync::atomic::Ordering;
use std::time::Duration;

use opencoti_plugin_api::admission::{Decision, Request, Snapshot, Verdict};

use super::rig::{Fault, Rig, Sizes, prompt, request, sampled};
use crate::admission::AdmissionDecider;
use crate::api::{Command, EngineError, Event, StopReason};

#[test]
fn sixty_four_requests_over_eight_slots_and_a_small_cache_each_end() {
    let rig = Rig::new(Sizes { n_slots: 8, n_ctx: 512, capacity: 2048, window: Some(64), ..Sizes::default() });
    let running: Vec<_> = (0..64u64)
        .map(|i| {
            let mut ask = sampled(prompt(i % 11, 20 + (i as usize * 37) % 400), 10 + (i as u32 * 7) % 60, i as i64);
            if i % 5 == 0 {
                ask.n_predict = None;
            }
            ask.overcommit = i % 13 == 0;
            rig.start(ask)
        })
        .collect();
    let (mut done, mut rejected) = (0, 0);
    for r in running {
        match r.answers() {
            Ok(answers) => {
                assert_eq!(answers.len(), 1);
                done += 1;
            }
            Err(EngineError::Rejected { retry_after, reason, message }) => {
                assert!(retry_after >= 1 && reason == "kv", "{reason}: {message}");
                rejected += 1;
            }
            Err(error) => panic!("{error}"),
        }
    }
    assert_eq!(done + rejected, 64);
    assert!(done >= 8, "{done} done");
    rig.close();
}

#[test]
fn a_rejection_names_the_store_and_what_was_asked() {
    let rig = Rig::new(Sizes { n_ctx: 4096, capacity: 512, ..Sizes::default() });
    let error = rig.start(request(prompt(1, 300), 400)).answer().unwrap_err();
    let EngineError::Rejected { reason, message, .. } = error else { panic!("{error}") };
    assert_eq!(reason, "kv");
    assert_eq!(message, "the cache `kv` has room for 512 more tokens, 700 are needed");
    rig.answer(request(prompt(1, 300), 100));
    rig.close();
}

#[test]
fn whoever_outgrows_the_cache_ends_truncated_and_nobody_else_is_harmed() {
    let rig = Rig::new(Sizes { capacity: 1024, ..Sizes::default() });
    // First, so that there is room to reserve, however fast the others grow.
    let bounded = rig.start(request(prompt(3, 100), 300));
    let mut endless = request(prompt(1, 100), 0);
    endless.n_predict = None;
    let endless: Vec<_> = [1, 2]
        .map(|seed| {
            endless.prompt = prompt(seed, 100);
            rig.start(endless.clone())
        })
        .into_iter()
        .collect();
    let bounded = bounded.answer().unwrap();
    assert_eq!((bounded.tokens.len(), bounded.finish.truncated), (300, false));
    for e in endless {
        let e = e.answer().unwrap();
        assert_eq!((e.finish.reason, e.finish.truncated), (StopReason::Limit, true));
        assert_eq!(e.text.len(), e.tokens.len());
        assert!(e.tokens.len() > 100);
    }
    rig.close();
}

#[test]
fn the_end_of_the_context_truncates() {
    let rig = Rig::new(Sizes { n_ctx: 128, ..Sizes::default() });
    let mut ask = request(prompt(1, 100), 0);
    ask.n_predict = None;
    let answer = rig.answer(ask);
    assert_eq!((answer.finish.reason, answer.finish.truncated), (StopReason::Limit, true));
    assert_eq!(answer.tokens.len(), 28);
    rig.close();
}

#[test]
fn cancelling_works_in_the_queue_in_prefill_and_in_decode() {
    let mut rig = Rig::new(Sizes { n_slots: 2, held: true, n_batch: 32, prefill_chunk: 8, ..Sizes::default() });
    let mut decoding = rig.start(request(prompt(1, 20), 500));
    rig.permit(1);
    assert!(matches!(decoding.next(), Some(Event::Started { .. })));
    assert!(matches!(decoding.next(), Some(Event::Token { .. })));
    let mut prefilling = rig.start(request(prompt(2, 900), 5));
    let queued = rig.start(request(prompt(3, 20), 5));
    rig.permit(3);
    assert!(matches!(prefilling.next(), Some(Event::Started { .. })));
    let replies: Vec<_> = [queued.id, prefilling.id, decoding.id, decoding.id]
        .into_iter()
        .map(|id| {
            let (reply, answer) = tokio::sync::oneshot::channel();
            rig.commands.send(Command::Cancel(id, reply)).ok().unwrap();
            answer
        })
        .collect();
    rig.let_go();
    let there: Vec<bool> = replies.into_iter().map(|r| r.blocking_recv().unwrap()).collect();
    assert_eq!(there, [true, true, true, false]);
    for cancelled in [queued, prefilling, decoding] {
        assert!(matches!(cancelled.answers(), Err(EngineError::Unavailable(_))));
    }
    rig.until("all slots are free", |slots| slots.iter().all(|s| s.task.is_none()));
    assert!(rig.watch.rows() < 300, "{} rows were computed", rig.watch.rows());
    rig.close();
}

#[test]
fn a_client_that_goes_away_frees_its_place() {
    let mut rig = Rig::new(Sizes { n_slots: 1, held: true, ..Sizes::default() });
    let decoding = rig.start(request(prompt(1, 20), 900));
    let queued = rig.start(request(prompt(2, 20), 900));
    let next = rig.start(request(prompt(3, 20), 5));
    rig.permit(3);
    drop((decoding, queued));
    rig.let_go();
    assert_eq!(next.answer().unwrap().tokens.len(), 5);
    assert!(rig.watch.rows() < 200, "{} rows were computed", rig.watch.rows());
    rig.close();
}

#[test]
fn a_deadline_ends_a_request_wherever_it_is() {
    let mut rig = Rig::new(Sizes { n_slots: 1, held: true, ..Sizes::default() });
    let mut ask = request(prompt(1, 20), 900);
    ask.deadline = Some(Duration::from_millis(20));
    let running: Vec<_> = (0..2).map(|_| rig.start(ask.clone())).collect();
    std::thread::sleep(Duration::from_millis(30));
    rig.let_go();
    for r in running {
        assert!(matches!(r.answer(), Err(EngineError::TimedOut(_))));
    }
    rig.close();
}

#[test]
fn a_step_that_fails_or_panics_ends_its_requests_and_no_others() {
    for fault in [Fault::Error, Fault::Panic] {
        let rig = Rig::new(Sizes::default());
        let before = rig.answer(request(prompt(1, 50), 5)).text;
        *rig.watch.fault.lock().unwrap() = Some(fault);
        let error = rig.start(request(prompt(2, 50), 5)).answer().unwrap_err();
        assert!(matches!(error, EngineError::Internal(_)), "{error}");
        assert_eq!(rig.answer(request(prompt(1, 50), 5)).text, before);
        rig.close();
    }
}

#[test]
fn a_failed_step_ends_those_who_took_part_in_it_and_frees_their_pages() {
    for fault in [Fault::Error, Fault::Panic] {
        let rig = Rig::new(Sizes { n_slots: 2, held: true, ..Sizes::default() });
        let expected = |n| (0..n).map(|_| rig.start(request(prompt(9, 60), 4))).collect::<Vec<_>>();
        let taking_part = [1, 2].map(|seed| rig.start(request(prompt(seed, 60), 50)));
        rig.until("both decode", |slots| slots.iter().all(|s| s.task.as_ref().is_some_and(|t| t.n_decoded > 0)));
        let waiting = expected(2);
        *rig.watch.fault.lock().unwrap() = Some(fault);
        rig.permit(200);
        for running in taking_part {
            let error = running.answer().unwrap_err();
            let EngineError::Internal(message) = error else { panic!("{error}") };
            assert!(message.starts_with("the step failed: "), "{message}");
        }
        let texts: Vec<String> = waiting.into_iter().map(|w| w.answer().unwrap().text).collect();
        assert_eq!(texts[0], texts[1]);
        assert_eq!(texts[0].len(), 4);
        rig.close();
    }
}

#[test]
fn the_end_token_ends_the_text_and_is_not_shown() {
    let rig = Rig::new(Sizes::default());
    rig.watch.end_every.store(5, Ordering::Relaxed);
    let answer = rig.answer(request(prompt(1, 50), 500));
    assert_eq!(answer.finish.reason, StopReason::Eos);
    assert!(!answer.text.contains('<') && answer.tokens.len() < 100);
    assert_eq!(answer.finish.timings.predicted_n as usize, answer.tokens.len() + 1);
    rig.watch.end_every.store(1, Ordering::Relaxed);
    let mut ask = request(prompt(1, 50), 8);
    ask.sampling.ignore_eos = true;
    assert_eq!(rig.answer(ask).tokens.len(), 8);
    rig.close();
}

#[test]
fn a_stop_text_is_not_returned() {
    let rig = Rig::new(Sizes::default());
    let whole = rig.answer(request(prompt(1, 50), 40)).text;
    let stop = whole[20..24].to_owned();
    let mut ask = request(prompt(1, 50), 40);
    ask.stop = vec!["0".to_owned(), stop.clone()];
    let answer = rig.answer(ask);
    assert_eq!(answer.finish.reason, StopReason::Word(stop.clone()));
    assert_eq!(answer.text, whole[..whole.find(&stop).unwrap()]);
    rig.close();
}

#[test]
fn too_many_waiting_are_refused_at_once() {
    let mut rig = Rig::new(Sizes { n_slots: 1, max_queue: 2, held: true, ..Sizes::default() });
    let running: Vec<_> = (0..6).map(|i| rig.start(request(prompt(i, 20), 3))).collect();
    rig.let_go();
    let results: Vec<_> = running.into_iter().map(|r| r.answer()).collect();
    let refused = |e: &EngineError| matches!(e, EngineError::Rejected { reason: "queue", retry_after: 1.., .. });
    assert!(results.iter().filter_map(|r| r.as_ref().err()).all(refused));
    let done = results.iter().filter(|r| r.is_ok()).count();
    assert!((2..6).contains(&done), "{done} done");
    rig.close();
}

#[test]
fn a_shutdown_lets_those_who_run_finish_and_refuses_the_rest() {
    let mut rig = Rig::new(Sizes { n_slots: 1, held: true, ..Sizes::default() });
    let mut running = rig.start(request(prompt(1, 20), 30));
    rig.permit(1);
    assert!(matches!(running.next(), Some(Event::Started { .. })));
    let queued = rig.start(request(prompt(2, 20), 30));
    let (reply, _stopped) = tokio::sync::oneshot::channel();
    rig.commands.send(Command::Shutdown(Duration::from_secs(5), reply)).ok().unwrap();
    let late = rig.start(request(prompt(3, 20), 30));
    rig.let_go();
    assert!(matches!(queued.answer(), Err(EngineError::Unavailable(_))));
    assert!(late.answers().map_or(true, |a| a.is_empty()));
    assert_eq!(running.answer().unwrap().tokens.len(), 30);
}

/// Lets everybody in and reserves nothing.
struct Open;

impl AdmissionDecider for Open {
    fn decide(&mut self, _: &Request, _: &Snapshot) -> Result<Decision, String> {
        Ok(Decision {
            verdict: Verdict::Admit,
            retry_after_seconds: 1,
            demand_tokens: 0,
            warn: false,
            short_store: None,
            reason: String::new(),
        })
    }
}

#[test]
fn without_admission_prompts_that_do_not_fit_together_cost_only_the_younger() {
    let mut rig = Rig::new(Sizes { capacity: 512, held: true, admission: Some(Box::new(Open)), ..Sizes::default() });
    let older = rig.start(request(prompt(1, 400), 20));
    let younger = rig.start(request(prompt(2, 400), 20));
    rig.until("both hold a slot", |slots| slots.iter().filter(|s| s.task.is_some()).count() == 2);
    rig.let_go();
    assert_eq!(older.answer().unwrap().tokens.len(), 20);
    let error = younger.answer().unwrap_err();
    assert!(matches!(error, EngineError::Rejected { reason: "kv", .. }), "{error}");
    rig.close();
}

/// Says what it is told to say.
struct Says(Verdict, u64);

impl AdmissionDecider for Says {
    fn decide(&mut self, request: &Request, snapshot: &Snapshot) -> Result<Decision, String> {
        assert_eq!((request.prompt_tokens, request.declared_tokens), (50, 5));
        assert_eq!((snapshot.slots_total, snapshot.stores[0].name.as_str()), (4, "kv"));
        Ok(Decision {
            verdict: self.0,
            retry_after_seconds: 0,
            demand_tokens: self.1,
            warn: false,
            short_store: None,
            reason: String::new(),
        })
    }
}

#[test]
fn the_policys_word_counts() {
    let outcome = |verdict, demand| {
        let rig = Rig::new(Sizes { admission: Some(Box::new(Says(verdict, demand))), ..Sizes::default() });
        let result = rig.start(request(prompt(1, 50), 5)).answer();
        rig.close();
        result
    };
    assert!(outcome(Verdict::Admit, 0).is_ok());
    assert!(outcome(Verdict::Admit, 55).is_ok());
    for refused in [outcome(Verdict::Reject, 0), outcome(Verdict::Queue, 0), outcome(Verdict::Admit, u64::MAX)] {
        assert!(matches!(refused, Err(EngineError::Rejected { retry_after: 1.., .. })), "{refused:?}");
    }
}
