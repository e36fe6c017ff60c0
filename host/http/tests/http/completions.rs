//! Native and legacy completions.

use opencoti_engine::api::{Constraint, StopReason};
use serde_json::{Value, json};

use crate::fake::{N_VOCAB, TestServer, byte_token, says};

const NATIVE: &str = "/completion";
const LEGACY: &str = "/v1/completions";

#[tokio::test]
async fn a_native_answer_has_all_its_fields() {
    let server = TestServer::new(says(&["Hel", "lo"], StopReason::Word("\n".to_owned()))).await;
    let answer = server.ok(NATIVE, json!({"prompt": "hi", "n_predict": 8, "seed": 5, "return_tokens": true})).await;
    let expected = json!({
        "index": 0, "content": "Hello", "id_slot": 0, "stop": true, "model": "tiny", "tokens_predicted": 2,
        "tokens_evaluated": 3, "prompt": "<s>hi", "has_new_line": false, "truncated": false, "stop_type": "word",
        "stopping_word": "\n", "tokens_cached": 5, "tokens": [byte_token(b'H'), byte_token(b'l')]});
    for (name, value) in expected.as_object().expect("an object") {
        assert_eq!(&answer[name], value, "{name}");
    }
    let settings = &answer["generation_settings"];
    assert_eq!(
        (&settings["n_predict"], &settings["max_tokens"], &settings["seed"]),
        (&json!(8), &json!(8), &json!(77))
    );
    assert_eq!(settings["samplers"][0], "penalties");
    assert_eq!(answer["timings"]["prompt_n"], 2);
    assert!(answer.get("completion_probabilities").is_none());
    let no_tokens = server.ok("/completions", json!({"prompt": "hi"})).await;
    assert_eq!(no_tokens["tokens"], json!([]));
}

#[tokio::test]
async fn a_native_stream_has_no_done_and_ends_with_the_answer() {
    let server = TestServer::new(says(&["Hel", "lo"], StopReason::Eos)).await;
    let events = server.events(NATIVE, json!({"prompt": "hi", "stream": true, "n_probs": 1})).await;
    assert_eq!(events.len(), 3);
    let text: String = events.iter().filter_map(|event| event["content"].as_str()).collect();
    assert_eq!(text, "Hello");
    assert_eq!((&events[0]["stop"], &events[2]["stop"]), (&json!(false), &json!(true)));
    assert_eq!((&events[1]["tokens_predicted"], &events[1]["tokens_evaluated"]), (&json!(2), &json!(3)));
    assert_eq!(events[0]["completion_probabilities"][0]["logprob"], -0.25);
    assert_eq!(events[2]["stop_type"], "eos");
    assert!(events[0].get("timings").is_none() && events[2]["timings"].is_object());
}

#[tokio::test]
async fn prompts_may_be_texts_tokens_and_mixtures_of_them() {
    let server = TestServer::new(says(&["x"], StopReason::Eos)).await;
    let (a, b) = (byte_token(b'a'), byte_token(b'b'));
    for (prompt, tokens) in [
        (json!("a"), vec![1, a]),
        (json!([a, b]), vec![a, b]),
        (json!(["a", b]), vec![1, a, b]),
        (json!([b, "a"]), vec![b, a]),
        (json!({"prompt_string": "a"}), vec![1, a]),
        (json!(["a"]), vec![1, a]),
    ] {
        let answer = server.ok(NATIVE, json!({"prompt": prompt})).await;
        assert!(answer.is_object(), "one prompt gives one object");
        assert_eq!(server.log.last().prompt, tokens, "{prompt}");
    }
    let answers = server.ok(NATIVE, json!({"prompt": ["a", [a, b], "b"], "n": 2})).await;
    let indices: Vec<_> = answers.as_array().expect("an array").iter().map(|answer| answer["index"].as_u64()).collect();
    assert_eq!(indices, (0..6).map(Some).collect::<Vec<_>>());
    assert_eq!(answers[2]["prompt"], "ab");
    for (prompt, param) in [
        (json!([]), "prompt"),
        (json!([[]]), "prompt"),
        (json!(["a", []]), "prompt[1]"),
        (json!([N_VOCAB]), "prompt[0]"),
        (json!([-1]), "prompt[0]"),
        (json!([[1, 2], [3, 99999]]), "prompt[1][1]"),
        (json!(true), "prompt"),
        (json!([1, {"prompt_string": "x", "multimodal_data": ["eA=="]}]), "prompt[1]"),
        (Value::Null, "prompt"),
    ] {
        let error = server.error(NATIVE, json!({"prompt": prompt}), 400).await;
        assert_eq!(error["param"], param, "{prompt}: {error}");
    }
}

#[tokio::test]
async fn response_fields_choose_what_comes_back() {
    let server = TestServer::new(says(&["x"], StopReason::Eos)).await;
    let fields = ["content", "generation_settings/n_predict", "nothing"];
    let answer = server.ok(NATIVE, json!({"prompt": "a", "n_predict": 3, "response_fields": fields})).await;
    assert_eq!(answer, json!({"content": "x", "n_predict": 3}));
}

#[tokio::test]
async fn probabilities_are_of_the_logits_or_after_the_chain() {
    let server = TestServer::new(says(&["x"], StopReason::Eos)).await;
    for name in ["n_probs", "logprobs"] {
        let answer = server.ok(NATIVE, json!({"prompt": "a", name: 2})).await;
        let entry = &answer["completion_probabilities"][0];
        assert_eq!(entry["top_logprobs"].as_array().map(Vec::len), Some(2));
        assert_eq!((&entry["id"], &entry["bytes"]), (&json!(byte_token(b'x')), &json!([120])));
        assert!(entry.get("prob").is_none());
    }
    let answer = server.ok(NATIVE, json!({"prompt": "a", "n_probs": 1, "post_sampling_probs": true})).await;
    let entry = &answer["completion_probabilities"][0];
    assert!(entry["prob"].is_number() && entry["top_probs"].is_array() && entry.get("logprob").is_none(), "{entry}");
}

#[tokio::test]
async fn grammar_wins_over_a_schema_and_internal_fields_mean_nothing() {
    let server = TestServer::new(says(&["x"], StopReason::Eos)).await;
    let body = json!({
        "prompt": "a", "grammar": "root ::= \"a\"", "json_schema": {}, "grammar_lazy": true, "grammar_triggers": "x",
        "preserved_tokens": 5, "chat_format": {}, "chat_parser": 1, "generation_prompt": 1, "parse_tool_calls": "x"});
    server.ok(NATIVE, body).await;
    assert_eq!(server.log.last().constraint, Some(Constraint::Gbnf("root ::= \"a\"".to_owned())));
    server.ok(NATIVE, json!({"prompt": "a", "grammar_type": "x", "reasoning_budget_start_tag": 4})).await;
    assert_eq!(server.log.last().constraint, None);
}

#[tokio::test]
async fn ignore_eos_shows_as_bans() {
    let server = TestServer::new(says(&["x"], StopReason::Limit)).await;
    let answer = server.ok(NATIVE, json!({"prompt": "a", "ignore_eos": true})).await;
    assert!(server.log.last().sampling.ignore_eos);
    let bias = answer["generation_settings"]["logit_bias"].as_array().expect("an array");
    assert!(bias.contains(&json!({"token": 2, "bias": null})), "{bias:?}");
}

#[tokio::test]
async fn prefill_only_is_n_predict_0() {
    let server = TestServer::new(says(&[], StopReason::None)).await;
    let answer = server.ok(NATIVE, json!({"prompt": "a", "n_predict": 0})).await;
    assert_eq!(server.log.last().n_predict, Some(0));
    assert_eq!((&answer["stop_type"], &answer["content"]), (&json!("none"), &json!("")));
}

#[tokio::test]
async fn a_legacy_answer_has_openais_shape() {
    let server = TestServer::new(says(&["Hel", "lo"], StopReason::Limit)).await;
    let answer = server.ok(LEGACY, json!({"prompt": ["a", "bc"], "model": "m", "best_of": 1})).await;
    assert!(answer["id"].as_str().is_some_and(|id| id.starts_with("cmpl-")));
    assert_eq!((&answer["object"], &answer["model"]), (&json!("text_completion"), &json!("m")));
    assert_eq!(answer["choices"][1], json!({"text": "Hello", "index": 1, "logprobs": null, "finish_reason": "length"}));
    assert_eq!(answer["usage"]["prompt_tokens"], 2 + 3);
    assert_eq!(answer["usage"]["completion_tokens"], 4);
}

#[tokio::test]
async fn legacy_logprobs_are_four_lists() {
    let server = TestServer::new(says(&["ä", "b"], StopReason::Eos)).await;
    let answer = server.ok(LEGACY, json!({"prompt": "a", "logprobs": 1})).await;
    let expected = json!({
        "tokens": ["ä", "b"], "token_logprobs": [-0.25, -0.25], "top_logprobs": [{"ä": -0.25}, {"b": -0.25}],
        "text_offset": [0, 1]});
    assert_eq!(answer["choices"][0]["logprobs"], expected);
    let none = server.ok(LEGACY, json!({"prompt": "a", "logprobs": 0})).await;
    assert_eq!(none["choices"][0]["logprobs"]["top_logprobs"], json!([{}, {}]));
    let absent = server.ok(LEGACY, json!({"prompt": "a"})).await;
    assert_eq!(absent["choices"][0]["logprobs"], Value::Null);
}

#[tokio::test]
async fn echo_returns_the_prompt_with_its_logprobs_the_first_of_them_null() {
    let server = TestServer::new(says(&["c"], StopReason::Limit)).await;
    let body = json!({"prompt": [byte_token(b'a'), byte_token(b'b')], "echo": true, "logprobs": 1, "max_tokens": 1});
    let answer = server.ok(LEGACY, body.clone()).await;
    assert_eq!(server.log.last().prompt_logprobs, Some(1));
    let choice = &answer["choices"][0];
    assert_eq!(choice["text"], "abc");
    assert_eq!(choice["logprobs"]["tokens"], json!(["a", "b", "c"]));
    assert_eq!(choice["logprobs"]["token_logprobs"], json!([null, -1.0, -0.25]));
    assert_eq!(choice["logprobs"]["top_logprobs"], json!([null, {"b": -1.0}, {"c": -0.25}]));
    assert_eq!(choice["logprobs"]["text_offset"], json!([0, 1, 2]));

    let mut streamed = body;
    streamed["stream"] = true.into();
    let events = server.events(LEGACY, streamed).await;
    let text: String = events.iter().filter_map(|event| event["choices"][0]["text"].as_str()).collect();
    assert_eq!(text, "abc");
    let tokens: Vec<&Value> =
        events.iter().filter_map(|event| event["choices"][0]["logprobs"]["tokens"].as_array()).flatten().collect();
    assert_eq!(tokens, ["a", "b", "c"]);

    let plain = server.ok(LEGACY, json!({"prompt": "héy ", "echo": true})).await;
    assert_eq!(plain["choices"][0]["text"], "héy c");
    assert_eq!(server.log.last().prompt_logprobs, None);
}

#[tokio::test]
async fn what_legacy_completions_can_not_do_is_refused() {
    let server = TestServer::new(says(&["x"], StopReason::Eos)).await;
    for (fields, param) in [
        (json!({"prompt": "a", "suffix": "b"}), "suffix"),
        (json!({"prompt": "a", "best_of": 3}), "best_of"),
        (json!({"prompt": "a", "n": 2, "best_of": 1}), "best_of"),
        (json!({"prompt": "a", "logprobs": -1}), "logprobs"),
        (json!({"prompt": "a", "logprobs": true}), "logprobs"),
        (json!({"prompt": "a", "echo": "x"}), "echo"),
        (json!({}), "prompt"),
    ] {
        assert_eq!(server.error(LEGACY, fields, 400).await["param"], param);
    }
}
