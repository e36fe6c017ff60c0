//! What is generated: the same for the same seed, streamed or not, and in time.

use std::sync::atomic::{AtomicUsize, Ordering};

use opencoti_tests::server::{Server, prompt};
use serde_json::{Value, json};

fn content(events: impl Iterator<Item = Value>) -> String {
    events.filter_map(|event| event["content"].as_str().map(str::to_owned)).collect()
}

#[test]
fn a_seed_makes_a_text_and_another_one_another() {
    let server = Server::start(&["--ctx-size", "512"]);
    let text = |seed: u64| {
        let body = json!({"prompt": "the end", "n_predict": 40, "seed": seed, "temperature": 1.5, "ignore_eos": true});
        let answer = server.complete(&body);
        assert_eq!(answer["generation_settings"]["seed"], seed);
        answer["content"].clone()
    };
    let first = text(7);
    assert!((0..3).all(|_| text(7) == first));
    assert_ne!(text(8), first);
}

#[test]
fn a_seed_holds_in_company() {
    let server = Server::start(&["--parallel", "4", "--ctx-size", "1024"]);
    let body =
        |seed: u64| json!({"prompt": "an inn", "n_predict": 40, "seed": seed, "temperature": 1.5, "ignore_eos": true});
    let alone: Vec<Value> = (0..4).map(|seed| server.complete(&body(seed))["content"].clone()).collect();
    let together: Vec<Value> = std::thread::scope(|scope| {
        let ask = |seed| server.complete(&body(seed))["content"].clone();
        let clients: Vec<_> = (0..4).map(|seed| scope.spawn(move || ask(seed))).collect();
        clients.into_iter().map(|client| client.join().expect("a client")).collect()
    });
    assert_eq!(alone, together);
}

#[test]
fn a_stream_says_what_a_whole_answer_says() {
    let server = Server::start(&["--ctx-size", "512"]);
    let body = json!({"prompt": "the inn", "n_predict": 40, "temperature": 0, "ignore_eos": true});
    let whole = server.complete(&body);
    assert_eq!(content(server.stream("/completion", &body)), whole["content"]);

    let body = json!({"messages": [{"role": "user", "content": "the inn"}], "max_tokens": 40, "temperature": 0});
    let whole = server.post("/v1/chat/completions", &body).ok();
    let events: Vec<Value> = server.stream("/v1/chat/completions", &body).collect();
    let text: String =
        events.iter().filter_map(|e| e["choices"][0]["delta"]["content"].as_str()).map(str::to_owned).collect();
    let choice = &whole["choices"][0];
    assert_eq!(choice["message"]["content"], text);
    assert!(!text.is_empty());
    assert_eq!(events.last().expect("events")["choices"][0]["finish_reason"], choice["finish_reason"]);
}

#[test]
fn a_running_stream_goes_on_while_a_long_prompt_is_read() {
    // A step holds 64 tokens, of which prompts get 16 while answers run: the prompt takes 250 steps.
    let server = Server::start(&["--parallel", "2", "--ctx-size", "16384", "--batch-size", "64"]);
    let tokens = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let body = json!({"prompt": prompt(1, 5), "n_predict": 16000, "ignore_eos": true, "return_tokens": true});
        let mut events = server.stream("/completion", &body);
        events.next().expect("a token");
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        let tokens = &tokens;
        let reader = scope.spawn(move || {
            while stopped.try_recv().is_err() {
                let event = events.next().expect("the stream goes on");
                assert_eq!(event["stop"], false, "it runs all the time");
                tokens.fetch_add(event["tokens"].as_array().map_or(0, Vec::len), Ordering::Relaxed);
            }
        });
        let before = tokens.load(Ordering::Relaxed);
        let long = server.complete(&json!({"prompt": prompt(2, 4000), "n_predict": 1}));
        let meanwhile = tokens.load(Ordering::Relaxed) - before;
        assert_eq!(long["timings"]["prompt_n"], 4000);
        assert!(meanwhile >= 125, "{meanwhile} tokens came in the prompt's 250 steps");
        stop.send(()).expect("the reader listens");
        reader.join().expect("the reader");
    });
}

#[test]
fn stop_texts_grammars_and_schemas_bind_a_random_model() {
    let server = Server::start(&["--ctx-size", "512"]);
    let grammar = json!({"prompt": "x", "n_predict": 20, "grammar": "root ::= \"yes\" | \"no\""});
    let answer = server.complete(&grammar);
    assert!(answer["content"] == "yes" || answer["content"] == "no", "{}", answer["content"]);
    let schema = json!({"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": false});
    let answer = server.complete(&json!({"prompt": "x", "n_predict": 60, "json_schema": schema}));
    let value: Value = serde_json::from_str(answer["content"].as_str().unwrap()).expect("JSON");
    assert!(value == json!({"a": 1}) || value == json!({"a": 2}), "{value}");

    let mut body = json!({"prompt": "the inn", "n_predict": 40, "temperature": 0, "ignore_eos": true});
    let text = server.complete(&body)["content"].as_str().unwrap().to_owned();
    let stop = &text[5..7];
    body["stop"] = json!([stop]);
    let cut = server.complete(&body);
    assert_eq!(cut["content"], text[..text.find(stop).unwrap()]);
    assert_eq!((&cut["stop_type"], &cut["stopping_word"]), (&json!("word"), &json!(stop)));
}
