//! Prefixes: what was computed is not computed again.

use super::rig::{Rig, Sizes, prompt, request, sampled};
use crate::api::{Command, Event, StopReason};

#[test]
fn a_prompt_that_was_there_before_is_reused_but_for_its_last_token() {
    let rig = Rig::new(Sizes::default());
    let first = rig.answer(request(prompt(1, 200), 10));
    let second = rig.answer(request(prompt(1, 200), 10));
    assert_eq!((second.finish.timings.cache_n, second.finish.timings.prompt_n), (199, 1));
    assert_eq!(first.text, second.text);
    let mut longer = prompt(1, 200);
    longer.extend(first.tokens);
    longer.extend(prompt(9, 30));
    // The last token that was drawn had not been fed.
    assert_eq!(rig.answer(request(longer, 5)).finish.timings.cache_n, 209);
    rig.close();
}

#[test]
fn a_fork_may_be_at_any_token() {
    let rig = Rig::new(Sizes::default());
    rig.answer(request(prompt(1, 300), 5));
    for shared in [1, 77, 127, 128, 129, 255] {
        let mut other = prompt(1, shared);
        other.push(if prompt(1, 300)[shared] == 0 { 1 } else { 0 });
        other.extend(prompt(shared as u64 + 50, 40));
        let timings = rig.answer(request(other.clone(), 5)).finish.timings;
        assert_eq!(timings.cache_n as usize, shared);
        assert_eq!((timings.cache_n + timings.prompt_n) as usize, other.len());
    }
    rig.close();
}

#[test]
fn without_cache_prompt_everything_is_computed() {
    let rig = Rig::new(Sizes::default());
    let first = rig.answer(request(prompt(1, 200), 10));
    let mut ask = request(prompt(1, 200), 10);
    ask.cache_prompt = false;
    let second = rig.answer(ask);
    assert_eq!((second.finish.timings.cache_n, second.text), (0, first.text));
    rig.close();
}

#[test]
fn a_sequence_that_is_still_generating_shares_its_prefix() {
    let mut rig = Rig::new(Sizes { held: true, n_batch: 512, ..Sizes::default() });
    let mut talker = rig.start(request(prompt(1, 200), 50));
    rig.permit(5);
    assert!(matches!(talker.next(), Some(Event::Started { .. })));
    let mut talk = prompt(1, 200);
    for _ in 0..5 {
        let Some(Event::Token { tokens, .. }) = talker.next() else { panic!("expected a token") };
        talk.extend(tokens);
    }
    talk.push(3);
    let listener = rig.start(request(talk, 5));
    rig.let_go();
    assert!(listener.answer().unwrap().finish.timings.cache_n >= 203);
    talker.answer().unwrap();
    rig.close();
}

fn identical_prompts_are_computed_once(sizes: Sizes) {
    let mut rig = Rig::new(Sizes { n_slots: 8, held: true, ..sizes });
    let running: Vec<_> = (0..8).map(|seed| rig.start(sampled(prompt(1, 400), 6, seed))).collect();
    rig.until("all eight hold a slot", |slots| slots.iter().all(|s| s.task.is_some()));
    rig.let_go();
    let answers: Vec<_> = running.into_iter().map(|r| r.answer().unwrap()).collect();
    let computed: u32 = answers.iter().map(|a| a.finish.timings.prompt_n).sum();
    assert!(computed <= 400 + 7, "{computed} prompt tokens were computed");
    assert!(rig.watch.rows() <= 400 + 8 + 8 * 6, "{} rows were computed", rig.watch.rows());
    assert!(answers.iter().all(|a| a.tokens.len() == 6));
    assert_ne!(answers[0].text, answers[1].text);
    rig.close();
}

#[test]
fn eight_identical_cold_prompts_are_computed_once() {
    identical_prompts_are_computed_once(Sizes::default());
}

#[test]
fn with_a_sliding_window_too() {
    identical_prompts_are_computed_once(Sizes { window: Some(100), ..Sizes::default() });
}

#[test]
fn with_recurrent_state_too() {
    identical_prompts_are_computed_once(Sizes { states: Some(9), ..Sizes::default() });
}

#[test]
fn those_who_waited_for_a_prompt_that_is_cancelled_compute_it_themselves() {
    let mut rig = Rig::new(Sizes { held: true, ..Sizes::default() });
    let leader = rig.start(request(prompt(1, 400), 6));
    let follower = rig.start(request(prompt(1, 390), 6));
    rig.permit(1);
    rig.until("both hold a slot", |slots| slots.iter().filter(|s| s.task.is_some()).count() == 2);
    let (reply, cancelled) = tokio::sync::oneshot::channel();
    rig.commands.send(Command::Cancel(leader.id, reply)).ok().unwrap();
    rig.let_go();
    assert!(cancelled.blocking_recv().unwrap());
    assert!(leader.answer().is_err());
    assert_eq!(follower.answer().unwrap().tokens.len(), 6);
    rig.close();
}

#[test]
fn several_choices_share_one_prompt() {
    let rig = Rig::new(Sizes::default());
    let mut ask = sampled(prompt(1, 300), 12, 3);
    ask.n_choices = 4;
    let answers = rig.start(ask).answers().unwrap();
    assert_eq!(answers.iter().map(|a| a.finish.index).collect::<Vec<_>>(), [0, 1, 2, 3]);
    assert!(answers.iter().all(|a| a.tokens.len() == 12 && a.finish.reason == StopReason::Limit));
    assert!(answers.iter().all(|a| a.finish.timings.cache_n + a.finish.timings.prompt_n == 300));
    assert_eq!(answers.iter().map(|a| a.finish.timings.prompt_n).sum::<u32>(), 300);
    assert_ne!(answers[0].text, answers[1].text);
    // The first choice is what a single one with this seed gives.
    assert_eq!(rig.answer(sampled(prompt(1, 300), 12, 3)).text, answers[0].text);
    rig.close();
}

#[test]
fn a_session_comes_back_to_its_slot_and_a_pin_is_obeyed() {
    let rig = Rig::new(Sizes::default());
    let with_session = |id: &str, seed| {
        let mut ask = request(prompt(seed, 40), 3);
        ask.session_id = Some(id.to_owned());
        rig.answer(ask).finish.id_slot
    };
    let a = with_session("a", 1);
    let b = with_session("b", 2);
    assert_ne!(a, b);
    assert_eq!(with_session("a", 3), a);
    assert_eq!(with_session("b", 4), b);
    let mut pinned = request(prompt(5, 40), 3);
    pinned.id_slot = Some(3);
    assert_eq!(rig.answer(pinned).finish.id_slot, 3);
    rig.close();
}

#[test]
fn a_slot_is_saved_restored_and_erased() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("slot.bin");
    let rig = Rig::new(Sizes::default());
    let slot = rig.answer(request(prompt(1, 200), 4)).finish.id_slot;
    let saved = rig.ask(|reply| Command::SaveSlot(slot, path.clone(), reply)).unwrap();
    assert_eq!(saved.n_tokens, 203);
    assert_eq!(saved.n_bytes, std::fs::metadata(&path).unwrap().len());
    assert_eq!(rig.ask(|reply| Command::EraseSlot(slot, reply)).unwrap().n_tokens, 203);
    assert_eq!(rig.answer(request(prompt(1, 150), 4)).finish.timings.cache_n, 0);
    let restored = rig.ask(|reply| Command::RestoreSlot(1, path.clone(), reply)).unwrap();
    assert_eq!((restored.n_tokens, restored.n_bytes), (203, saved.n_bytes));
    assert_eq!(rig.ask(Command::Slots)[1].n_cached, 203);
    for (slot, path) in [(9, &path), (0, &folder.path().join("none"))] {
        assert!(rig.ask(|reply| Command::RestoreSlot(slot, path.clone(), reply)).is_err());
    }
    std::fs::write(&path, b"no state").unwrap();
    assert!(rig.ask(|reply| Command::RestoreSlot(1, path.clone(), reply)).is_err());
    rig.close();
}
