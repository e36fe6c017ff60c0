//! Models whose sequences can't be shared at any token: recurrent state, sliding windows.

use super::rig::{Answer, EOS, Rig, Sizes, prompt, request, sampled};
use crate::api::{Command, EmbedRequest, EngineError};

fn recurrent() -> Sizes {
    Sizes { states: Some(5), snapshots: 8, ..Sizes::default() }
}

fn windowed() -> Sizes {
    Sizes { window: Some(100), snapshots: 8, ..Sizes::default() }
}

fn both() -> Sizes {
    Sizes { window: Some(100), ..recurrent() }
}

/// A prompt of turns, each ended by the end token, with the beginning of an answer.
fn conversation(turns: &[(u64, usize)]) -> Vec<u32> {
    let mut tokens = Vec::new();
    for &(seed, n) in turns {
        tokens.extend(prompt(seed, n));
        tokens.push(EOS);
    }
    tokens.extend([1, 2, 3]);
    tokens
}

fn cached(answer: &Answer) -> usize {
    answer.finish.timings.cache_n as usize
}

#[test]
fn the_same_prompt_again_is_reused_but_for_its_end() {
    for sizes in [recurrent, windowed, both] {
        let rig = Rig::new(sizes());
        let first = rig.answer(request(prompt(1, 400), 300));
        for _ in 0..2 {
            let again = rig.answer(request(prompt(1, 400), 300));
            assert_eq!((cached(&again), again.finish.timings.prompt_n), (399, 1));
            assert_eq!(first.text, again.text);
        }
        rig.close();
    }
}

#[test]
fn the_next_turn_goes_on_where_the_last_prompt_or_answer_ended() {
    for sizes in [recurrent, windowed, both] {
        let rig = Rig::new(sizes());
        let first = rig.answer(request(conversation(&[(1, 100), (2, 200)]), 250));
        // As the answer was given: only its last token had not been fed.
        let mut next = conversation(&[(1, 100), (2, 200)]);
        next.extend(&first.tokens);
        next.extend(prompt(3, 40));
        assert_eq!(cached(&rig.answer(request(next, 5))), 305 + 249);
        // Rendered otherwise than it was given: up to the end of the last turn.
        let mut next = conversation(&[(1, 100), (2, 200)]);
        next.truncate(302);
        next.extend(prompt(4, 100));
        assert_eq!(cached(&rig.answer(request(next, 5))), 302);
        // Another question after the same system prompt.
        assert_eq!(cached(&rig.answer(request(conversation(&[(1, 100), (5, 50)]), 5))), 101);
        rig.close();
    }
}

#[test]
fn a_beginning_without_turns_is_shared_from_the_third_prompt_on() {
    let rig = Rig::new(recurrent());
    let found: Vec<usize> =
        (10..14).map(|seed| cached(&rig.answer(request([prompt(1, 300), prompt(seed, 50)].concat(), 5)))).collect();
    assert_eq!(found[..2], [0, 0]);
    assert!(found[2..].iter().all(|&n| (300..305).contains(&n)), "{found:?}");
    rig.close();
}

#[test]
fn interleaved_answers_are_those_given_alone() {
    let sizes = || Sizes { n_batch: 40, prefill_chunk: 20, ..recurrent() };
    let ask = |i: usize| sampled(prompt(i as u64, 90 + 50 * i), 60, i as i64);
    let alone: Vec<String> = (0..4)
        .map(|i| {
            let rig = Rig::new(sizes());
            let text = rig.answer(ask(i)).text;
            rig.close();
            text
        })
        .collect();
    let rig = Rig::new(sizes());
    let running: Vec<_> = (0..4).map(|i| rig.start(ask(i))).collect();
    let embed = EmbedRequest { tokens: prompt(9, 120), pooling: None, second: None };
    rig.ask(|reply| Command::Embed(embed, reply)).unwrap();
    let together: Vec<String> = running.into_iter().map(|r| r.answer().unwrap().text).collect();
    assert_eq!(together, alone);
    rig.close();
}

#[test]
fn several_choices_fork_the_state_of_their_prompt() {
    for sizes in [recurrent, both] {
        let rig = Rig::new(sizes());
        let mut ask = sampled(prompt(1, 300), 20, 3);
        ask.n_choices = 4;
        let answers = rig.start(ask).answers().unwrap();
        assert_eq!(answers.iter().map(|a| a.finish.timings.prompt_n).sum::<u32>(), 300);
        assert_eq!(rig.answer(sampled(prompt(1, 300), 20, 3)).text, answers[0].text);
        assert_ne!(answers[0].text, answers[1].text);
        rig.close();
    }
}

#[test]
fn a_saved_slot_is_reused_by_its_prompt_and_its_conversation() {
    for sizes in [recurrent, windowed, both] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("slot.bin");
        let rig = Rig::new(sizes());
        let first = rig.answer(request(prompt(1, 400), 200));
        let slot = first.finish.id_slot;
        let saved = rig.ask(|reply| Command::SaveSlot(slot, path.clone(), reply)).unwrap();
        assert_eq!((saved.n_tokens, saved.n_bytes), (599, path.metadata().unwrap().len()));
        rig.ask(|reply| Command::EraseSlot(slot, reply)).unwrap();
        let stats = rig.ask(Command::Stats);
        assert!(stats.stores.iter().all(|s| s.cells_used == 0) && stats.snapshots == 0, "{stats:?}");
        assert!(stats.state.is_none_or(|s| s.planes_used == 0), "{stats:?}");
        rig.close();

        let rig = Rig::new(sizes());
        rig.ask(|reply| Command::RestoreSlot(2, path.clone(), reply)).unwrap();
        let again = rig.answer(request(prompt(1, 400), 200));
        assert_eq!((cached(&again), &again.text), (399, &first.text));
        let next = [prompt(1, 400), first.tokens.clone(), prompt(3, 40)].concat();
        assert_eq!(cached(&rig.answer(request(next, 5))), 599);
        rig.close();
    }
}

#[test]
fn a_missing_file_is_named_without_its_folder() {
    let folder = tempfile::tempdir().unwrap();
    let rig = Rig::new(Sizes::default());
    for name in ["none.bin", "text.bin"] {
        std::fs::write(folder.path().join("text.bin"), "no state").unwrap();
        let error = rig.ask(|reply| Command::RestoreSlot(0, folder.path().join(name), reply)).unwrap_err();
        let (message, folder) = (error.to_string(), folder.path().display().to_string());
        assert!(message.contains(name) && !message.contains(&folder), "{message}");
    }
    rig.close();
}

#[test]
fn a_request_for_which_there_is_no_state_is_refused_by_name() {
    let mut rig = Rig::new(Sizes { states: Some(1), held: true, ..Sizes::default() });
    let running = rig.start(request(prompt(1, 50), 30));
    rig.permit(1);
    rig.until("it runs", |slots| slots.iter().any(|s| s.task.is_some()));
    let refused = rig.start(request(prompt(2, 50), 30));
    rig.let_go();
    match refused.answer() {
        Err(EngineError::Rejected { message, reason: "kv", .. }) => {
            assert_eq!(message, "the cache has no room for the recurrent state of another sequence; try again later");
        }
        other => panic!("{other:?}"),
    }
    running.answer().unwrap();
    assert_eq!(rig.answer(request(prompt(2, 50), 30)).tokens.len(), 30);
    rig.close();
}

#[test]
fn without_snapshots_everything_is_computed_again() {
    let rig = Rig::new(Sizes { snapshots: 0, ..recurrent() });
    let first = rig.answer(request(prompt(1, 200), 10));
    let again = rig.answer(request(prompt(1, 200), 10));
    assert_eq!((cached(&again), again.text), (0, first.text));
    rig.close();
}
