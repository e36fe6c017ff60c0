//! What requests may ask for, and what is refused.

use super::rig::{EOS, N_VOCAB, Rig, Sizes, prompt, request};
use crate::api::{Command, Constraint, EmbedRequest, EngineError, Event, GenerateRequest, Pooling, StopReason};

#[test]
fn what_cannot_be_served_is_refused_with_the_field() {
    let rig = Rig::new(Sizes { n_ctx: 100, ..Sizes::default() });
    type Change = fn(&mut GenerateRequest);
    let cases: [(&str, Change); 7] = [
        ("prompt", |r| r.prompt.clear()),
        ("prompt", |r| r.prompt.push(N_VOCAB as u32)),
        ("n", |r| r.n_choices = 0),
        ("n", |r| r.n_choices = 5),
        ("id_slot", |r| r.id_slot = Some(4)),
        ("repeat_last_n", |r| r.sampling.repeat_last_n = -2),
        ("logit_bias", |r| r.sampling.logit_bias = vec![(99, 1.0)]),
    ];
    for (field, change) in cases {
        let mut ask = request(prompt(1, 10), 5);
        change(&mut ask);
        let error = rig.start(ask).answer().unwrap_err();
        assert!(matches!(&error, EngineError::Invalid { field: Some(f), .. } if f == field), "{field}: {error}");
    }
    let error = rig.start(request(prompt(1, 100), 5)).answer().unwrap_err();
    assert_eq!(error, EngineError::ExceedsContext { n_prompt_tokens: 100, n_ctx: 100 });
    assert_eq!(rig.answer(request(prompt(1, 99), 5)).tokens.len(), 1);
    rig.close();
}

#[test]
fn prefill_only_yields_no_token_and_fills_the_cache() {
    let rig = Rig::new(Sizes::default());
    let answer = rig.answer(request(prompt(1, 200), 0));
    assert_eq!((answer.tokens.len(), answer.finish.reason), (0, StopReason::None));
    assert_eq!(rig.answer(request(prompt(1, 200), 1)).finish.timings.cache_n, 199);
    rig.close();
}

#[test]
fn a_grammar_is_obeyed_and_ends_the_text() {
    let rig = Rig::new(Sizes::default());
    let mut ask = request(prompt(1, 50), 100);
    ask.constraint = Some(Constraint::Gbnf("root ::= [x-z] [x-z] \",\" [a-c]{3}".to_owned()));
    let answer = rig.answer(ask);
    let text: Vec<char> = answer.text.chars().collect();
    assert!(text.len() == 6 && text[2] == ',', "{text:?}");
    assert!(text[..2].iter().all(|c| ('x'..='z').contains(c)) && text[3..].iter().all(|c| ('a'..='c').contains(c)));
    assert_eq!(answer.finish.reason, StopReason::Eos);
    assert!(!answer.tokens.contains(&EOS));
    rig.close();
}

#[test]
fn a_grammar_that_cannot_be_enforced_is_refused_with_its_field() {
    let rig = Rig::new(Sizes::default());
    for constraint in [
        Constraint::Gbnf("root ::= ".repeat(2)),
        Constraint::Gbnf("root ::= \"0\"".to_owned()),
        Constraint::JsonSchema(serde_json::json!({"not": {}})),
        Constraint::Lark("start: nothing".to_owned()),
    ] {
        let mut ask = request(prompt(1, 50), 5);
        ask.constraint = Some(constraint.clone());
        let error = rig.start(ask).answer().unwrap_err();
        let EngineError::Invalid { field: Some(field), .. } = &error else { panic!("{constraint:?}: {error}") };
        assert!(field.starts_with("grammar"), "{field}");
    }
    rig.close();
}

#[test]
fn probabilities_come_with_each_token() {
    let rig = Rig::new(Sizes::default());
    let mut ask = request(prompt(1, 50), 5);
    ask.sampling.n_probs = 3;
    let answer = rig.answer(ask.clone());
    assert_eq!(answer.probs.len(), 5);
    for (p, &token) in answer.probs.iter().zip(&answer.tokens) {
        assert_eq!((p.token.id, p.top.len(), &p.top[0]), (token, 3, &p.token));
        assert!(p.top.windows(2).all(|w| w[0].value >= w[1].value) && p.top[0].value < 0.0);
        assert_eq!(p.token.bytes.len(), 1);
    }
    ask.sampling.post_sampling_probs = true;
    assert!(rig.answer(ask).probs.iter().all(|p| p.token.value == 1.0));
    rig.close();
}

#[test]
fn the_prompts_own_probabilities_are_those_of_its_tokens() {
    let rig = Rig::new(Sizes { n_batch: 32, ..Sizes::default() });
    let start = prompt(1, 60);
    let mut first = request(start.clone(), 20);
    first.sampling.n_probs = 2;
    let answer = rig.answer(first);
    let mut ask = request(start, 1);
    ask.prompt.extend(&answer.tokens);
    ask.prompt_logprobs = Some(2);
    let mut running = rig.start(ask);
    let mut found = None;
    while let Some(event) = running.next() {
        if let Event::PromptLogprobs { probs, .. } = event {
            found = Some(probs);
        }
    }
    let found = found.unwrap();
    assert_eq!(found.len(), 80);
    assert!(found[0].is_none() && found[1..].iter().all(Option::is_some));
    let of_answer: Vec<_> = found[60..].iter().flatten().cloned().collect();
    assert_eq!(of_answer, answer.probs);
    rig.close();
}

#[test]
fn embeddings_pool_the_hidden_states() {
    let rig = Rig::new(Sizes { n_batch: 32, ..Sizes::default() });
    let tokens = prompt(1, 100);
    let talker = rig.start(request(prompt(2, 100), 50));
    let embed = |pooling| {
        rig.ask(|reply| Command::Embed(EmbedRequest { tokens: tokens.clone(), pooling, second: None }, reply)).unwrap()
    };
    let last = *tokens.last().unwrap() as f32;
    assert_eq!(embed(Some(Pooling::Last)).vectors, [[100.0, last]]);
    assert_eq!(embed(Some(Pooling::Cls)).vectors, [[1.0, tokens[0] as f32]]);
    let all = embed(Some(Pooling::None)).vectors;
    assert_eq!(all.len(), 100);
    assert_eq!(all[41], [42.0, tokens[41] as f32]);
    let mean = embed(None).vectors;
    assert!((mean[0][0] - 50.5).abs() < 1e-3, "{mean:?}");
    assert_eq!(talker.answer().unwrap().tokens.len(), 50);
    let empty =
        rig.ask(|reply| Command::Embed(EmbedRequest { tokens: Vec::new(), pooling: None, second: None }, reply));
    assert!(matches!(empty, Err(EngineError::Invalid { .. })));
    let long =
        rig.ask(|reply| Command::Embed(EmbedRequest { tokens: vec![1; 1025], pooling: None, second: None }, reply));
    assert!(matches!(long, Err(EngineError::ExceedsContext { .. })));
    rig.close();
}

#[test]
fn many_short_texts_share_steps() {
    let mut rig = Rig::new(Sizes { held: true, n_batch: 256, ..Sizes::default() });
    let texts: Vec<Vec<u32>> = (0..20).map(|i| prompt(i, 5 + i as usize)).collect();
    let answers: Vec<_> = texts
        .iter()
        .map(|tokens| {
            let (reply, answer) = tokio::sync::oneshot::channel();
            let request = EmbedRequest { tokens: tokens.clone(), pooling: Some(Pooling::Mean), second: None };
            rig.commands.send(Command::Embed(request, reply)).ok().unwrap();
            answer
        })
        .collect();
    rig.let_go();
    for (tokens, answer) in texts.iter().zip(answers) {
        let vectors = answer.blocking_recv().unwrap().unwrap().vectors;
        let n = tokens.len() as f32;
        assert!((vectors[0][0] - (n + 1.0) / 2.0).abs() < 1e-3, "{vectors:?}");
    }
    let steps = rig.watch.steps.lock().unwrap().clone();
    assert_eq!(steps.iter().sum::<usize>(), texts.iter().map(Vec::len).sum::<usize>());
    // The engine may have begun with the first texts before the others came.
    assert!(steps.len() <= 4, "{steps:?}");
    rig.close();
}

#[test]
fn slots_and_stats_show_what_runs() {
    let mut rig = Rig::new(Sizes { held: true, ..Sizes::default() });
    let mut running = rig.start(request(prompt(1, 50), 10));
    rig.permit(1);
    assert!(matches!(running.next(), Some(Event::Started { .. })));
    assert!(matches!(running.next(), Some(Event::Token { .. })));
    let (reply, slots) = tokio::sync::oneshot::channel();
    rig.commands.send(Command::Slots(reply)).ok().unwrap();
    rig.permit(1);
    let slots = slots.blocking_recv().unwrap();
    let busy: Vec<_> = slots.iter().filter_map(|s| s.task.as_ref()).collect();
    assert_eq!((slots.len(), busy.len()), (4, 1));
    assert_eq!((busy[0].n_prompt_tokens, busy[0].n_prompt_tokens_processed), (50, 50));
    rig.let_go();
    running.answer().unwrap();
    let stats = rig.ask(Command::Stats);
    assert_eq!((stats.processing, stats.deferred, stats.retained), (0, 0, 1));
    let kv = &stats.stores[0];
    assert_eq!((kv.name.as_str(), kv.cells_total, kv.cells_used, kv.cells_reclaimable), ("kv", 8192, 128, 128));
    rig.close();
}
