//! Streams: their order, their errors, their end.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use opencoti_engine::api::{EngineError, Event, Notice, StopReason};
use serde_json::{Value, json};

use crate::fake::{Script, Step, TestServer, done, parse_events, says, started, token};

const CHAT: &str = "/v1/chat/completions";

fn streamed(fields: Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "hi"}], "stream": true});
    let all = fields.as_object().expect("fields").clone();
    body.as_object_mut().expect("an object").extend(all);
    body
}

#[tokio::test]
async fn a_chat_stream_is_role_content_finish_done() {
    let server = TestServer::new(says(&["Hel", "lo", " €"], StopReason::Eos)).await;
    let events = server.events(CHAT, streamed(json!({}))).await;
    let deltas: Vec<&Value> = events[..events.len() - 1].iter().map(|event| &event["choices"][0]["delta"]).collect();
    let expected = [
        json!({"role": "assistant", "content": null}),
        json!({"content": "Hel"}),
        json!({"content": "lo"}),
        json!({"content": " €"}),
        json!({}),
    ];
    assert_eq!(deltas, expected.iter().collect::<Vec<_>>());
    let (last, done) = (&events[4], &events[5]);
    assert_eq!(done, "[DONE]");
    assert_eq!(last["choices"][0]["finish_reason"], "stop");
    assert_eq!(last["timings"]["predicted_n"], 3);
    for event in &events[..5] {
        assert_eq!(
            (&event["id"], &event["created"], &event["model"]),
            (&events[0]["id"], &events[0]["created"], &json!("tiny"))
        );
        assert_eq!(event["object"], "chat.completion.chunk");
        assert!(event.get("usage").is_none(), "no usage unless asked for");
        assert!(event["choices"][0].get("finish_reason").is_some());
    }
    assert!(
        events[..4]
            .iter()
            .all(|event| event["choices"][0]["finish_reason"].is_null() && event.get("timings").is_none())
    );
}

#[tokio::test]
async fn usage_comes_in_a_chunk_of_its_own_and_is_null_in_the_others() {
    let server = TestServer::new(says(&["a", "b"], StopReason::Eos)).await;
    for (path, prompt) in [(CHAT, json!({})), ("/v1/completions", json!({"prompt": "hi"}))] {
        let mut fields = json!({"stream_options": {"include_usage": true, "include_obfuscation": false}});
        fields.as_object_mut().expect("an object").extend(prompt.as_object().expect("an object").clone());
        let events = server.events(path, streamed(fields)).await;
        let (usage, others) = (&events[events.len() - 2], &events[..events.len() - 2]);
        assert_eq!(usage["choices"], json!([]));
        assert_eq!(usage["usage"]["completion_tokens"], 2);
        assert_eq!(usage["usage"]["prompt_tokens"], server.log.last().prompt.len());
        assert!(others.iter().all(|event| event.get("usage") == Some(&Value::Null)), "{path} {others:?}");
    }
}

#[tokio::test]
async fn choices_interleave_and_each_has_its_role_and_its_end() {
    let server = TestServer::new(says(&["a", "b"], StopReason::Eos)).await;
    let events = server.events(CHAT, streamed(json!({"n": 2}))).await;
    for index in 0..2 {
        let own: Vec<&Value> = events
            .iter()
            .filter_map(|event| event["choices"].get(0).filter(|choice| choice["index"] == index))
            .collect();
        assert_eq!(own[0]["delta"]["role"], "assistant");
        let text: String = own.iter().filter_map(|choice| choice["delta"]["content"].as_str()).collect();
        assert_eq!(text, "ab");
        assert_eq!(own.iter().filter(|choice| choice["finish_reason"] == "stop").count(), 1);
    }
    assert_eq!(events.iter().filter(|event| **event == "[DONE]").count(), 1);
}

#[tokio::test]
async fn streamed_and_whole_texts_are_equal() {
    let server = TestServer::new(says(&["<think>a ", "b</think>", "x\n", "y"], StopReason::Eos)).await;
    let whole = server.ok(CHAT, json!({"messages": [{"role": "user", "content": "hi"}]})).await;
    let events = server.events(CHAT, streamed(json!({}))).await;
    for name in ["content", "reasoning_content"] {
        let text: String = events.iter().filter_map(|event| event["choices"][0]["delta"][name].as_str()).collect();
        assert_eq!(text, whole["choices"][0]["message"][name].as_str().expect("text"));
    }
}

#[tokio::test]
async fn progress_comes_first_and_counts_as_a_result() {
    let script: Script = Arc::new(|request| {
        let progress = Event::Progress { index: 0, total: 20, cache: 4, processed: 12, time_ms: 1.5 };
        let error = EngineError::Internal("a device failed".to_owned());
        vec![
            Step::Say(started(0)),
            Step::Say(progress),
            Step::Say(token(0, "a", request, 1)),
            Step::Say(Event::Failed(error)),
        ]
    });
    let server = TestServer::new(script).await;
    let events = server.events(CHAT, streamed(json!({"return_progress": true}))).await;
    assert!(server.log.last().return_progress);
    assert_eq!(events[0]["prompt_progress"], json!({"total": 20, "cache": 4, "processed": 12, "time_ms": 1.5}));
    assert_eq!(events[1]["choices"][0]["delta"]["role"], "assistant");
    let native = server.events("/completion", json!({"prompt": "x", "stream": true, "return_progress": true})).await;
    assert_eq!(native[0]["prompt_progress"]["processed"], 12);
}

#[tokio::test]
async fn an_error_after_the_first_result_is_the_last_event() {
    let script: Script = Arc::new(|request| {
        let error = EngineError::Internal("a device failed".to_owned());
        vec![Step::Say(started(0)), Step::Say(token(0, "a", request, 1)), Step::Say(Event::Failed(error))]
    });
    let server = TestServer::new(script).await;
    for (path, body) in [
        (CHAT, streamed(json!({}))),
        ("/v1/completions", json!({"prompt": "x", "stream": true})),
        ("/completion", json!({"prompt": "x", "stream": true})),
    ] {
        let events = server.events(path, body).await;
        let error = &events.last().expect("an event")["error"];
        assert_eq!(
            (&error["code"], &error["type"], &error["message"]),
            (&json!(500), &json!("server_error"), &json!("a device failed"))
        );
        assert!(events.len() >= 2 && !events.contains(&json!("[DONE]")), "{events:?}");
    }
}

#[tokio::test]
async fn an_engine_that_ends_without_a_word_is_an_error() {
    let server = TestServer::new(Arc::new(|_| vec![Step::Say(started(0))])).await;
    server.error(CHAT, streamed(json!({})), 500).await;
    server.error(CHAT, json!({"messages": [{"role": "user", "content": "hi"}]}), 500).await;
}

#[tokio::test]
async fn a_saturated_cache_is_told_in_a_header() {
    let script: Script = Arc::new(|request| {
        let notice = Notice { saturated: Some("swa".to_owned()), sessions_remaining: Some(3), session_tps: Some(12.5) };
        let started = Event::Started { index: 0, id_slot: 1, notice };
        vec![Step::Say(started), Step::Say(token(0, "a", request, 1)), Step::Say(done(0, request, 1, StopReason::Eos))]
    });
    let server = TestServer::new(script).await;
    for stream in [false, true] {
        let response = server.post(CHAT, streamed(json!({"stream": stream}))).await;
        assert_eq!(response.headers()["x-kv-pool-saturated"], "swa");
        assert_eq!(response.headers()["x-sessions-remaining"], "3");
        assert_eq!(response.headers()["x-session-tps"], "12.50");
    }
}

#[tokio::test]
async fn a_client_that_goes_away_frees_its_request_wherever_it_is() {
    let after_a_token: Script =
        Arc::new(|request| vec![Step::Say(started(0)), Step::Say(token(0, "a", request, 1)), Step::Hang]);
    let in_prefill: Script = Arc::new(|_| vec![Step::Say(started(0)), Step::Hang]);
    let in_queue: Script = Arc::new(|_| vec![Step::Hang]);
    for (name, script) in [("decode", after_a_token), ("prefill", in_prefill), ("queue", in_queue)] {
        let server = TestServer::new(script).await;
        for (nth, stream) in [false, true].into_iter().enumerate() {
            let url = format!("{}{CHAT}", server.base);
            let client = reqwest::Client::new();
            let body = streamed(json!({"stream": stream}));
            let request = tokio::spawn(async move {
                let response = client.post(url).json(&body).send().await.expect("an answer begins");
                let mut chunks = response.bytes_stream();
                while chunks.next().await.is_some() {}
            });
            server.log.wait_requests(nth + 1).await;
            if name == "decode" && stream {
                // The stream has begun, so the connection ends in the middle of a body.
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            assert_eq!(*server.log.gone.lock().expect("the log"), nth as u32, "{name}: nobody is gone yet");
            request.abort();
            let _ = request.await;
            server.log.wait_gone(nth as u32 + 1).await;
        }
        assert_eq!(server.get("/health").await.status(), 200, "{name}");
    }
}

#[tokio::test]
async fn silence_is_filled_with_comments() {
    let script: Script = Arc::new(|request| {
        vec![
            Step::Say(started(0)),
            Step::Say(token(0, "a", request, 1)),
            Step::Pause(Duration::from_millis(1300)),
            Step::Say(done(0, request, 1, StopReason::Eos)),
        ]
    });
    let server = TestServer::new(script).await;
    let text = server.post(CHAT, streamed(json!({"sse_ping_interval": 1}))).await.text().await.expect("a stream");
    assert!(text.contains("\n\n:\n\n"), "{text}");
    assert_eq!(parse_events(&text).last(), Some(&json!("[DONE]")));
    let text = server.post(CHAT, streamed(json!({"sse_ping_interval": -1}))).await.text().await.expect("a stream");
    assert!(!text.contains("\n\n:\n\n"), "{text}");
}

#[tokio::test]
async fn logprobs_go_with_their_text() {
    let server = TestServer::new(says(&["a", "b"], StopReason::Eos)).await;
    let events = server.events(CHAT, streamed(json!({"logprobs": true, "top_logprobs": 2}))).await;
    for event in &events[..events.len() - 1] {
        let choice = &event["choices"][0];
        match choice["delta"]["content"].as_str() {
            Some(text) => assert_eq!(choice["logprobs"]["content"][0]["token"], text),
            None => assert!(choice.get("logprobs").is_none(), "{choice}"),
        }
    }
}

#[tokio::test]
async fn timings_per_token_come_with_every_chunk_of_text() {
    let server = TestServer::new(says(&["a", "b"], StopReason::Eos)).await;
    let events = server.events(CHAT, streamed(json!({"timings_per_token": true}))).await;
    let counts: Vec<_> = events.iter().filter_map(|event| event["timings"]["predicted_n"].as_u64()).collect();
    assert_eq!(counts, [1, 2, 2]);
}
