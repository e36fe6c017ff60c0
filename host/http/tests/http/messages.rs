//! Anthropic's surface: shapes, events, tools, thoughts, errors.

use std::sync::Arc;

use opencoti_engine::api::{Constraint, EngineError, Event, StopReason};
use opencoti_http::ServerConfig;
use serde_json::{Value, json};

use crate::fake::{Script, Step, THINKS_AND_CALLS, TestServer, config, done, fails, says, started, token};

const MESSAGES: &str = "/v1/messages";
const COUNT: &str = "/v1/messages/count_tokens";

/// A request with more fields.
fn with(fields: Value) -> Value {
    let mut body = json!({"model": "m", "max_tokens": 50, "messages": [{"role": "user", "content": "hi"}]});
    let all = fields.as_object().expect("fields").clone();
    body.as_object_mut().expect("an object").extend(all);
    body
}

fn with_tools(fields: Value) -> Value {
    let mut body = with(json!({"tools": [{"name": "weather", "description": "d", "input_schema": {
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}]}));
    let all = fields.as_object().expect("fields").clone();
    body.as_object_mut().expect("an object").extend(all);
    body
}

impl TestServer {
    /// The error of a request that must fail so, in Anthropic's shape.
    async fn anthropic_error(&self, path: &str, body: Value, status: u16) -> Value {
        let response = self.post(path, body.clone()).await;
        assert_eq!(response.status(), status, "{path} {body}");
        let id = response.headers()["request-id"].to_str().expect("an id").to_owned();
        let answer: Value = response.json().await.expect("a JSON body");
        assert_eq!(answer["type"], "error", "{answer}");
        assert_eq!(answer["request_id"], id, "{answer}");
        let names: Vec<&String> = answer["error"].as_object().expect("an object").keys().collect();
        assert_eq!(names, ["type", "message"], "{answer}");
        answer["error"].clone()
    }
}

#[tokio::test]
async fn an_answer_has_anthropics_shape() {
    let server = TestServer::new(says(&["Hel", "lo"], StopReason::Eos)).await;
    let mut answer = server.ok(MESSAGES, with(json!({}))).await;
    let id = answer.as_object_mut().and_then(|answer| answer.remove("id")).expect("an id");
    assert!(id.as_str().is_some_and(|id| id.starts_with("msg_")), "{id}");
    let n = server.log.last().prompt.len();
    let expected = json!({
        "type": "message", "role": "assistant", "model": "m", "content": [{"type": "text", "text": "Hello"}],
        "stop_reason": "end_turn", "stop_sequence": null,
        "usage": {"input_tokens": n - 1, "output_tokens": 2, "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 1, "output_tokens_details": {"thinking_tokens": 0}}});
    assert_eq!(answer, expected);
}

#[tokio::test]
async fn what_a_request_says_reaches_the_engine_and_other_surfaces_names_mean_nothing() {
    let server = TestServer::new(says(&["x"], StopReason::Eos)).await;
    let body = with(json!({
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "t"}],
        "stop_sequences": ["a", "b"], "temperature": 0.25, "top_p": 0.5, "top_k": 7, "max_tokens": 9,
        "metadata": {"user_id": "u"}, "n_predict": 5, "max_completion_tokens": 6, "n": 3, "stop": ["z"],
        "service_tier": "auto", "unknown": 1,
        "messages": [{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "b"}]}]}));
    server.ok(MESSAGES, body).await;
    let request = server.log.last();
    assert_eq!((request.n_predict, request.n_choices), (Some(9), 1));
    assert_eq!(request.stop, ["a", "b"]);
    let sampling = request.sampling;
    assert_eq!((sampling.temperature, sampling.top_p, sampling.top_k), (0.25, 0.5, 7));
    assert_eq!(server.log.last_prompt(), "[system]s\nt\n[user]a\nb\n[assistant]");
    let request =
        with(json!({"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "The ans"}]}));
    server.ok(MESSAGES, request).await;
    assert!(server.log.last_prompt().ends_with("[assistant]The ans"), "a prefill is continued");
}

#[tokio::test]
async fn why_an_answer_ended_is_told_truly() {
    let truncated: Script = Arc::new(|request| {
        let Event::Done(mut finish) = done(0, request, 1, StopReason::Limit) else { unreachable!("it is the end") };
        finish.truncated = true;
        vec![Step::Say(started(0)), Step::Say(token(0, "a", request, 1)), Step::Say(Event::Done(finish))]
    });
    for (script, reason, word) in [
        (says(&["a"], StopReason::Eos), "end_turn", Value::Null),
        (says(&["a"], StopReason::Limit), "max_tokens", Value::Null),
        (says(&["a"], StopReason::Word("END".to_owned())), "stop_sequence", json!("END")),
        (truncated, "model_context_window_exceeded", Value::Null),
    ] {
        let server = TestServer::new(script).await;
        let answer = server.ok(MESSAGES, with(json!({}))).await;
        assert_eq!((&answer["stop_reason"], &answer["stop_sequence"]), (&json!(reason), &word));
        let events = server.named_events(MESSAGES, with(json!({"stream": true}))).await;
        let delta = &events.iter().find(|event| event["type"] == "message_delta").expect("one")["delta"];
        assert_eq!(*delta, json!({"stop_reason": reason, "stop_sequence": word}));
    }
}

#[tokio::test]
async fn a_stream_has_anthropics_events_in_their_order() {
    let server = TestServer::new(says(&["Hel", "lo"], StopReason::Eos)).await;
    let events = server.named_events(MESSAGES, with(json!({"stream": true}))).await;
    let kinds: Vec<&str> = events.iter().filter_map(|event| event["type"].as_str()).collect();
    let expected = [
        "message_start",
        "content_block_start",
        "ping",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ];
    assert_eq!(kinds, expected);
    let message = &events[0]["message"];
    assert_eq!((&message["content"], &message["stop_reason"]), (&json!([]), &Value::Null));
    assert_eq!(message["usage"]["cache_read_input_tokens"], 1);
    assert_eq!(message["usage"]["input_tokens"], server.log.last().prompt.len() - 1);
    assert_eq!(
        events[1],
        json!({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}})
    );
    let delta = json!({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hel"}});
    assert_eq!(events[3], delta);
    assert_eq!(events[5], json!({"type": "content_block_stop", "index": 0}));
    assert_eq!(events[6]["usage"]["output_tokens"], 2);
}

#[tokio::test]
async fn thoughts_texts_and_calls_are_blocks_that_do_not_overlap() {
    let server = TestServer::new(says(THINKS_AND_CALLS, StopReason::Eos)).await;
    let answer = server.ok(MESSAGES, with_tools(json!({}))).await;
    assert_eq!(answer["stop_reason"], "tool_use");
    let content = answer["content"].as_array().expect("blocks");
    assert_eq!((&content[0]["type"], &content[0]["thinking"]), (&json!("thinking"), &json!("Rome it is.")));
    assert!(content[0]["signature"].as_str().is_some_and(|signature| !signature.is_empty()));
    assert_eq!(content[1], json!({"type": "text", "text": "Let me see."}));
    assert!(content[2]["id"].as_str().is_some_and(|id| id.starts_with("toolu_")), "{content:?}");
    assert_eq!((&content[2]["name"], &content[2]["input"]), (&json!("weather"), &json!({"city": "Rome"})));
    assert_eq!(content.len(), 3);
    assert_eq!(answer["usage"]["output_tokens_details"]["thinking_tokens"], 2);
    assert!(matches!(server.log.last().constraint, Some(Constraint::Lark(_))));

    let events = server.named_events(MESSAGES, with_tools(json!({"stream": true}))).await;
    let mut open = None;
    let mut built: Vec<Value> = Vec::new();
    let mut inputs = String::new();
    for event in &events {
        match event["type"].as_str().expect("a type") {
            "content_block_start" => {
                assert!(open.is_none(), "{event}");
                assert_eq!(event["index"], built.len());
                open = Some(built.len());
                built.push(event["content_block"].clone());
            }
            "content_block_delta" => {
                assert_eq!(event["index"].as_u64().map(|index| index as usize), open, "{event}");
                let block = built.last_mut().expect("a block");
                let delta = &event["delta"];
                let mut append = |key: &str| {
                    let text = [block[key].as_str().expect("text"), delta[key].as_str().expect("text")].concat();
                    block[key] = text.into();
                };
                match delta["type"].as_str().expect("a type") {
                    "text_delta" => append("text"),
                    "thinking_delta" => append("thinking"),
                    "signature_delta" => append("signature"),
                    "input_json_delta" => inputs += delta["partial_json"].as_str().expect("text"),
                    other => panic!("{other}"),
                }
            }
            "content_block_stop" => assert_eq!(open.take().map(|index| json!(index)), Some(event["index"].clone())),
            _ => assert!(open.is_none() || event["type"] == "ping", "{event}"),
        }
    }
    assert_eq!(built[2]["input"], json!({}), "a call begins with an empty input");
    built[2]["input"] = serde_json::from_str(&inputs).expect("JSON");
    for (built, whole) in built.iter_mut().zip(content) {
        built["id"] = whole["id"].clone();
        let mut whole = whole.clone();
        whole["id"] = built["id"].clone();
        assert_eq!(*built, whole, "stream and whole answer are equal");
    }
}

#[tokio::test]
async fn a_call_that_is_cut_off_ends_by_max_tokens_with_an_object_for_its_input() {
    let server = TestServer::new(says(&THINKS_AND_CALLS[..5], StopReason::Limit)).await;
    let answer = server.ok(MESSAGES, with_tools(json!({}))).await;
    assert_eq!((&answer["stop_reason"], &answer["content"][2]["input"]), (&json!("max_tokens"), &json!({})));
}

#[tokio::test]
async fn thinking_is_switched_by_the_template_and_may_be_omitted() {
    let server = TestServer::new(says(THINKS_AND_CALLS, StopReason::Eos)).await;
    for (thinking, shown) in [
        (json!({"type": "enabled", "budget_tokens": 20}), Some("True")),
        (json!({"type": "adaptive"}), Some("True")),
        (json!({"type": "disabled"}), Some("False")),
        (Value::Null, None),
    ] {
        server.ok(MESSAGES, with(json!({"thinking": thinking}))).await;
        let prompt = server.log.last_prompt();
        let found = prompt.split("(thinking: ").nth(1).and_then(|rest| rest.split(')').next());
        assert_eq!(found.map(str::to_lowercase), shown.map(str::to_lowercase), "{prompt}");
    }
    let omitted = json!({"thinking": {"type": "adaptive", "display": "omitted"}});
    let answer = server.ok(MESSAGES, with(omitted)).await;
    assert_eq!((&answer["content"][0]["type"], &answer["content"][0]["thinking"]), (&json!("thinking"), &json!("")));
    for (thinking, word) in [
        (json!({"type": "enabled"}), "thinking.budget_tokens"),
        (json!({"type": "enabled", "budget_tokens": 0}), "thinking.budget_tokens"),
        (json!({"type": "enabled", "budget_tokens": 50}), "max_tokens"),
        (json!({"type": "always"}), "thinking.type"),
        (json!({}), "thinking.type"),
        (json!({"type": "adaptive", "display": "loud"}), "thinking.display"),
        (json!("on"), "thinking"),
    ] {
        let error = server.anthropic_error(MESSAGES, with(json!({"thinking": thinking})), 400).await;
        assert!(error["message"].as_str().is_some_and(|message| message.contains(word)), "{error}");
    }
}

#[tokio::test]
async fn tool_choice_binds_and_no_choice_leaves_the_tools_out() {
    let server = TestServer::new(says(&["ok"], StopReason::Eos)).await;
    for choice in [
        json!({"type": "auto"}),
        json!({"type": "any", "disable_parallel_tool_use": true}),
        json!({"type": "tool", "name": "weather"}),
    ] {
        server.ok(MESSAGES, with_tools(json!({"tool_choice": choice}))).await;
        let Some(Constraint::Lark(grammar)) = server.log.last().constraint else { panic!("{choice} binds") };
        let parallel = grammar.contains("(SPACE call)*") || grammar.contains("call* rest");
        assert_eq!(parallel, choice["type"] == "auto", "{grammar}");
    }
    server.ok(MESSAGES, with_tools(json!({"tool_choice": {"type": "none"}}))).await;
    assert_eq!(server.log.last().constraint, None);
    let form = json!({"format": {"type": "json_schema", "schema": {"type": "object"}}, "effort": "low"});
    server.ok(MESSAGES, with(json!({"output_config": form}))).await;
    assert!(matches!(server.log.last().constraint, Some(Constraint::JsonSchema(_))));
    assert_eq!(server.log.last().constraint_field, "output_config.format.schema");
}

#[tokio::test]
async fn what_can_not_be_served_is_refused_by_its_path() {
    let server = TestServer::new(says(&["x"], StopReason::Eos)).await;
    let block =
        |block: Value| json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, block]}]});
    let assistant = |block: Value| json!({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": [block]}, {"role": "user", "content": "y"}]});
    let image = json!({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}});
    let call = json!({"type": "tool_use", "id": "t", "name": "f", "input": {}});
    let result = |content: Value| {
        json!({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": [call]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": content}]}]})
    };
    server.ok(MESSAGES, with(result(json!("fine")))).await;
    server.ok(MESSAGES, with(result(Value::Null))).await;
    for (fields, word) in [
        (block(image.clone()), "`messages[0].content[1].type` is \"image\""),
        (block(json!({"type": "document"})), "messages[0].content[1].type"),
        (block(json!({"text": "x"})), "messages[0].content[1].type"),
        (block(json!({"type": "text", "text": 5})), "messages[0].content[1].text"),
        (
            block(json!({"type": "tool_result", "tool_use_id": "t9", "content": "x"})),
            "messages[0].content[1].tool_use_id",
        ),
        (block(json!("x")), "messages[0].content[1]"),
        (result(json!([image])), "messages[2].content[0].content[0].type"),
        (result(json!(7)), "messages[2].content[0].content"),
        (assistant(call.clone()), "messages[1].content[0]"),
        (assistant(json!({"type": "tool_use", "id": "t", "name": "f", "input": "x"})), "messages[1].content[0].input"),
        (assistant(json!({"type": "server_tool_use"})), "messages[1].content[0].type"),
        (json!({"messages": []}), "messages"),
        (json!({"messages": "hi"}), "messages"),
        (json!({"messages": [{"role": "robot", "content": "x"}]}), "messages[0].role"),
        (json!({"messages": [{"role": "user"}]}), "messages[0].content"),
        (json!({"system": 5}), "system"),
        (json!({"system": [image]}), "system[0].type"),
        (json!({"max_tokens": null}), "max_tokens"),
        (json!({"max_tokens": -1}), "max_tokens"),
        (json!({"max_tokens": "many"}), "max_tokens"),
        (json!({"stop_sequences": "x"}), "stop_sequences"),
        (json!({"metadata": []}), "metadata"),
        (json!({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}), "tools[0].type"),
        (json!({"tools": [{"name": "f"}]}), "tools[0].input_schema"),
        (json!({"tools": [{"input_schema": {}}]}), "tools[0].name"),
        (json!({"tools": [{"name": "f", "input_schema": {}}, {"name": "f", "input_schema": {}}]}), "tools[1].name"),
        (json!({"tool_choice": {"type": "any"}}), "tool_choice.type"),
        (json!({"tool_choice": {"type": "tool", "name": "f"}}), "tool_choice.name"),
        (json!({"tool_choice": {"type": "maybe"}}), "tool_choice.type"),
        (json!({"tool_choice": "auto"}), "tool_choice"),
        (json!({"output_config": {"format": {"type": "xml"}}}), "output_config.format.type"),
        (json!({"mcp_servers": [{"url": "x"}]}), "mcp_servers"),
        (json!({"container": "c"}), "container"),
    ] {
        let error = server.anthropic_error(MESSAGES, with(fields), 400).await;
        assert_eq!(error["type"], "invalid_request_error");
        assert!(error["message"].as_str().is_some_and(|message| message.contains(word)), "{word}: {error}");
    }
    assert_eq!(server.log.count(), 2);
}

#[tokio::test]
async fn tokens_are_counted_without_a_generation() {
    let server = TestServer::new(says(&["x"], StopReason::Eos)).await;
    let mut body = with_tools(json!({"system": "s"}));
    server.ok(MESSAGES, body.clone()).await;
    let n = server.log.last().prompt.len();
    body.as_object_mut().expect("an object").remove("max_tokens");
    assert_eq!(server.ok(COUNT, body).await, json!({"input_tokens": n}));
    assert_eq!(server.log.count(), 1);
    server.anthropic_error(COUNT, json!({"messages": []}), 400).await;
}

#[tokio::test]
async fn every_failure_has_anthropics_shape() {
    for (error, status, kind) in [
        (EngineError::ExceedsContext { n_prompt_tokens: 900, n_ctx: 512 }, 400, "invalid_request_error"),
        (EngineError::Rejected { retry_after: 3, reason: "kv", message: "full".to_owned() }, 429, "rate_limit_error"),
        (EngineError::Unavailable("stopping".to_owned()), 503, "overloaded_error"),
        (EngineError::TimedOut("late".to_owned()), 408, "timeout_error"),
        (EngineError::Internal("broken".to_owned()), 500, "api_error"),
    ] {
        let server = TestServer::new(fails(error)).await;
        for stream in [false, true] {
            let error = server.anthropic_error(MESSAGES, with(json!({"stream": stream})), status).await;
            assert_eq!(error["type"], kind);
        }
    }
    let server =
        TestServer::new(fails(EngineError::Rejected { retry_after: 3, reason: "kv", message: "full".to_owned() }))
            .await;
    assert_eq!(server.post(MESSAGES, with(json!({}))).await.headers()["retry-after"], "3");
    let loading = TestServer::loading(config()).await;
    assert_eq!(loading.anthropic_error(MESSAGES, with(json!({})), 503).await["type"], "overloaded_error");
    let small = TestServer::with(ServerConfig { body_limit: 20, ..config() }, says(&["x"], StopReason::Eos)).await;
    assert_eq!(small.anthropic_error(MESSAGES, with(json!({})), 413).await["type"], "request_too_large");
    let answer: Value = server.get(MESSAGES).await.json().await.expect("JSON");
    assert_eq!(answer["type"], "error", "a wrong method too: {answer}");
    let plain = server.error("/v1/chat/completions", json!({}), 400).await;
    assert_eq!(plain["type"], "invalid_request_error", "other surfaces keep their shape");
}

#[tokio::test]
async fn a_key_may_come_in_either_header_and_the_version_is_not_looked_at() {
    let config = ServerConfig { api_keys: vec!["k".to_owned()], api_prefix: "/llm".to_owned(), ..config() };
    let server = TestServer::with(config, says(&["x"], StopReason::Eos)).await;
    let error = server.anthropic_error(MESSAGES, with(json!({})), 401).await;
    assert_eq!(error["type"], "authentication_error");
    for (name, value) in [("x-api-key", "k"), ("authorization", "Bearer k")] {
        let url = format!("{}{MESSAGES}", server.base);
        let request = server.client.post(url).header(name, value).header("anthropic-version", "2023-06-01");
        let response = request.json(&with(json!({}))).send().await.expect("an answer");
        assert_eq!(response.status(), 200, "{name}");
    }
}

#[tokio::test]
async fn an_error_after_the_first_result_is_an_error_event() {
    let script: Script = Arc::new(|request| {
        let error = EngineError::Internal("a device failed".to_owned());
        vec![Step::Say(started(0)), Step::Say(token(0, "a", request, 1)), Step::Say(Event::Failed(error))]
    });
    let server = TestServer::new(script).await;
    let events = server.named_events(MESSAGES, with(json!({"stream": true}))).await;
    let expected = json!({"type": "error", "error": {"type": "api_error", "message": "a device failed"}});
    assert_eq!(events.last(), Some(&expected));
}

#[tokio::test]
async fn silence_is_filled_with_pings() {
    let script: Script = Arc::new(|request| {
        vec![
            Step::Say(started(0)),
            Step::Say(token(0, "a", request, 1)),
            Step::Pause(std::time::Duration::from_millis(1300)),
            Step::Say(done(0, request, 1, StopReason::Eos)),
        ]
    });
    let server = TestServer::new(script).await;
    let events = server.named_events(MESSAGES, with(json!({"stream": true, "sse_ping_interval": 1}))).await;
    assert_eq!(events.iter().filter(|event| event["type"] == "ping").count(), 2);
}
