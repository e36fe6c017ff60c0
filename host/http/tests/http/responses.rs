//! OpenAI's responses: shapes, events, items, tools, errors.

use std::sync::Arc;

use opencoti_engine::api::{Constraint, EngineError, Event, StopReason};
use serde_json::{Value, json};

use crate::fake::{Script, Step, THINKS_AND_CALLS, TestServer, fails, says, started, token};

const RESPONSES: &str = "/v1/responses";

/// A request with more fields.
fn with(fields: Value) -> Value {
    let mut body = json!({"model": "m", "input": "hi"});
    let all = fields.as_object().expect("fields").clone();
    body.as_object_mut().expect("an object").extend(all);
    body
}

fn tools() -> Value {
    json!([{"type": "function", "name": "weather", "description": "d", "strict": true, "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}])
}

fn kinds(events: &[Value]) -> Vec<&str> {
    events.iter().filter_map(|event| event["type"].as_str()).map(|kind| kind.trim_start_matches("response.")).collect()
}

/// An answer without what differs every time.
fn without_ids(mut answer: Value) -> Value {
    for key in ["id", "created_at", "completed_at"] {
        answer.as_object_mut().expect("an object").remove(key);
    }
    for item in answer["output"].as_array_mut().into_iter().flatten() {
        for key in ["id", "call_id"] {
            item.as_object_mut().expect("an object").remove(key);
        }
    }
    answer
}

#[tokio::test]
async fn an_answer_has_openais_shape() {
    let server = TestServer::new(says(&["Hel", "lo"], StopReason::Eos)).await;
    let body =
        with(json!({"instructions": "s", "metadata": {"a": "b"}, "store": true, "temperature": 0.5, "top_p": 0.25,
        "max_output_tokens": 16, "reasoning": {"effort": "low", "summary": "auto"}, "truncation": "disabled"}));
    let answer = server.ok(RESPONSES, body).await;
    assert!(answer["id"].as_str().is_some_and(|id| id.starts_with("resp_")), "{answer}");
    assert!(answer["output"][0]["id"].as_str().is_some_and(|id| id.starts_with("msg_")), "{answer}");
    assert!(answer["completed_at"].as_u64() >= answer["created_at"].as_u64(), "{answer}");
    let n = server.log.last().prompt.len();
    let expected = json!({
        "object": "response", "status": "completed", "background": false, "error": null, "incomplete_details": null,
        "instructions": "s", "max_output_tokens": 16, "metadata": {"a": "b"}, "model": "m",
        "output": [{"type": "message", "status": "completed", "role": "assistant",
            "content": [{"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}]}],
        "parallel_tool_calls": true, "previous_response_id": null, "reasoning": {"effort": "low", "summary": null},
        "store": false, "temperature": 0.5, "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [],
        "top_logprobs": 0, "top_p": 0.25, "truncation": "disabled",
        "usage": {"input_tokens": n, "input_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 0},
            "output_tokens": 2, "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": n + 2}});
    assert_eq!(without_ids(answer), expected);
    assert_eq!(server.log.last().n_predict, Some(16));
    assert_eq!(server.ok("/responses", with(json!({}))).await["object"], "response");
}

#[tokio::test]
async fn items_become_the_messages_of_their_turns() {
    let server = TestServer::new(says(&["x"], StopReason::Eos)).await;
    let body = json!({"instructions": "be brief", "input": [
        {"role": "developer", "content": [{"type": "input_text", "text": "d"}]},
        {"type": "message", "role": "user", "content": "u"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}], "encrypted_content": null},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [{"type": "output_text", "text": "let me see", "annotations": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": "{\"x\": 1}", "status": "completed"},
        {"type": "function_call", "call_id": "c2", "name": "f", "arguments": ""},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
    ]});
    server.ok(RESPONSES, body.clone()).await;
    let prompt = server.log.last_prompt();
    assert!(prompt.starts_with("[system]be brief\n[system]d\n[user]u\n[assistant]let me see"), "{prompt}");
    assert!(prompt.ends_with("[assistant]"), "{prompt}");
    for word in ["{\"name\":\"f\",\"arguments\":{\"x\":1}}", "one", "two"] {
        assert!(prompt.contains(word), "{word}: {prompt}");
    }
    let n = server.log.last().prompt.len();
    let counted = server.ok("/v1/responses/input_tokens", body).await;
    assert_eq!(counted, json!({"object": "response.input_tokens", "input_tokens": n}));
    let trailing = json!({"input": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]});
    server.ok(RESPONSES, trailing).await;
    assert!(server.log.last_prompt().ends_with("[assistant]a\n[assistant]"), "an answer is a message of its own");
}

#[tokio::test]
async fn a_stream_has_openais_events_in_their_order() {
    let server = TestServer::new(says(&["Hel", "lo"], StopReason::Eos)).await;
    let events = server.named_events(RESPONSES, with(json!({"stream": true}))).await;
    let expected = [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ];
    assert_eq!(kinds(&events), expected);
    for (nth, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], nth, "{event}");
    }
    let id = &events[2]["item"]["id"];
    for event in &events[3..8] {
        assert_eq!((&event["item_id"], &event["output_index"], &event["content_index"]), (id, &json!(0), &json!(0)));
    }
    assert_eq!((&events[2]["item"]["status"], &events[2]["item"]["content"]), (&json!("in_progress"), &json!([])));
    assert_eq!((&events[4]["delta"], &events[4]["logprobs"]), (&json!("Hel"), &json!([])));
    assert_eq!(events[6]["text"], "Hello");
    assert_eq!(events[0]["response"]["status"], "in_progress");
    assert_eq!((&events[0]["response"]["output"], &events[0]["response"]["usage"]), (&json!([]), &Value::Null));
    let last = &events[9]["response"];
    assert_eq!((&last["id"], &last["output"][0]), (&events[0]["response"]["id"], &events[8]["item"]));
    assert_eq!(without_ids(last.clone()), without_ids(server.ok(RESPONSES, with(json!({}))).await));
}

#[tokio::test]
async fn thoughts_texts_and_calls_are_items() {
    let server = TestServer::new(says(THINKS_AND_CALLS, StopReason::Eos)).await;
    let whole = server.ok(RESPONSES, with(json!({"tools": tools()}))).await;
    let output = whole["output"].as_array().expect("items");
    let types: Vec<&str> = output.iter().filter_map(|item| item["type"].as_str()).collect();
    assert_eq!(types, ["reasoning", "message", "function_call"]);
    assert_eq!(output[0]["content"], json!([{"type": "reasoning_text", "text": "Rome it is."}]));
    assert_eq!((&output[0]["summary"], &output[0]["encrypted_content"]), (&json!([]), &Value::Null));
    assert_eq!(output[1]["content"][0]["text"], "Let me see.");
    assert!(output[2]["id"].as_str().is_some_and(|id| id.starts_with("fc_")));
    assert!(output[2]["call_id"].as_str().is_some_and(|id| id.starts_with("call_")));
    let arguments: Value = serde_json::from_str(output[2]["arguments"].as_str().expect("a string")).expect("JSON");
    assert_eq!((&output[2]["name"], arguments), (&json!("weather"), json!({"city": "Rome"})));
    assert_eq!((&whole["status"], &whole["tools"]), (&json!("completed"), &tools()));
    assert_eq!(whole["usage"]["output_tokens_details"]["reasoning_tokens"], 2);

    let events = server.named_events(RESPONSES, with(json!({"stream": true, "tools": tools()}))).await;
    let seen = kinds(&events);
    let call = seen.iter().rposition(|kind| *kind == "output_item.added").expect("a call");
    let expected = ["output_item.added", "function_call_arguments.delta"];
    assert_eq!(seen[call..call + 2], expected);
    assert_eq!(seen[seen.len() - 3..], ["function_call_arguments.done", "output_item.done", "completed"]);
    let reasoning = [
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
    ];
    assert_eq!(seen[2..9], reasoning);
    let deltas: String = events
        .iter()
        .filter(|event| event["type"] == "response.function_call_arguments.delta")
        .filter_map(|event| event["delta"].as_str())
        .collect();
    assert_eq!(deltas, output[2]["arguments"].as_str().expect("a string"));
    assert!(events.iter().all(|event| event.get("delta").is_none() || event.get("output_index").is_some()));
    assert_eq!(without_ids(events.last().expect("one")["response"].clone()), without_ids(whole));
}

#[tokio::test]
async fn an_answer_that_is_cut_short_is_incomplete() {
    let server = TestServer::new(says(&THINKS_AND_CALLS[..5], StopReason::Limit)).await;
    let whole = server.ok(RESPONSES, with(json!({"tools": tools()}))).await;
    assert_eq!(whole["status"], "incomplete");
    assert_eq!(whole["incomplete_details"], json!({"reason": "max_output_tokens"}));
    assert_eq!(whole["completed_at"], Value::Null);
    let statuses: Vec<_> = whole["output"].as_array().expect("items").iter().map(|item| &item["status"]).collect();
    assert_eq!(statuses, ["completed", "completed", "incomplete"]);
    let events = server.named_events(RESPONSES, with(json!({"stream": true, "tools": tools()}))).await;
    assert_eq!(kinds(&events).last(), Some(&"incomplete"));
    assert_eq!(without_ids(events.last().expect("one")["response"].clone()), without_ids(whole));
}

#[tokio::test]
async fn an_error_after_the_first_result_ends_the_response_as_failed() {
    let script: Script = Arc::new(|request| {
        let error = EngineError::Internal("a device failed".to_owned());
        vec![Step::Say(started(0)), Step::Say(token(0, "a", request, 1)), Step::Say(Event::Failed(error))]
    });
    let server = TestServer::new(script).await;
    let events = server.named_events(RESPONSES, with(json!({"stream": true}))).await;
    assert_eq!(
        kinds(&events)[4..],
        ["output_text.delta", "output_text.done", "content_part.done", "output_item.done", "failed"]
    );
    let response = &events.last().expect("one")["response"];
    assert_eq!(response["error"], json!({"code": "server_error", "message": "a device failed"}));
    assert_eq!((&response["status"], &response["output"][0]["status"]), (&json!("failed"), &json!("incomplete")));
    let server = TestServer::new(fails(EngineError::Internal("broken".to_owned()))).await;
    server.error(RESPONSES, with(json!({"stream": true})), 500).await;
}

#[tokio::test]
async fn log_probabilities_come_where_they_are_asked_for() {
    let server = TestServer::new(says(&["a", "b"], StopReason::Eos)).await;
    let body = json!({"include": ["message.output_text.logprobs"], "top_logprobs": 1});
    let whole = server.ok(RESPONSES, with(body)).await;
    let logprobs = whole["output"][0]["content"][0]["logprobs"].as_array().expect("probabilities");
    let tokens: Vec<_> = logprobs.iter().map(|entry| &entry["token"]).collect();
    assert_eq!(tokens, ["a", "b"]);
    assert_eq!(logprobs[0]["top_logprobs"].as_array().map(Vec::len), Some(1));
    let events = server.named_events(RESPONSES, with(json!({"top_logprobs": 2, "stream": true}))).await;
    for event in events.iter().filter(|event| event["type"] == "response.output_text.delta") {
        assert_eq!(event["logprobs"][0]["token"], event["delta"]);
        assert_eq!(event["logprobs"][0]["top_logprobs"].as_array().map(Vec::len), Some(2));
    }
}

#[tokio::test]
async fn forms_and_choices_bind() {
    let server = TestServer::new(says(&["{}"], StopReason::Eos)).await;
    let format = json!({"type": "json_schema", "name": "s", "schema": {"type": "object"}, "strict": true});
    let answer = server.ok(RESPONSES, with(json!({"text": {"format": format, "verbosity": "low"}}))).await;
    assert!(matches!(server.log.last().constraint, Some(Constraint::JsonSchema(_))));
    assert_eq!(server.log.last().constraint_field, "text.format.schema");
    assert_eq!(answer["text"]["format"], format);
    server.ok(RESPONSES, with(json!({"text": {"format": {"type": "json_object"}}}))).await;
    assert_eq!(server.log.last().constraint, Some(Constraint::JsonObject));
    for choice in [
        json!("auto"),
        json!("required"),
        json!({"type": "function", "name": "weather"}),
        json!({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]}),
    ] {
        let body = json!({"tools": tools(), "tool_choice": choice, "parallel_tool_calls": false});
        let answer = server.ok(RESPONSES, with(body)).await;
        assert!(matches!(server.log.last().constraint, Some(Constraint::Lark(_))), "{choice}");
        assert_eq!((&answer["tool_choice"], &answer["parallel_tool_calls"]), (&choice, &json!(false)));
    }
    server.ok(RESPONSES, with(json!({"tools": tools(), "tool_choice": "none"}))).await;
    assert_eq!(server.log.last().constraint, None);
    server.ok(RESPONSES, with(json!({"reasoning": {"effort": "none"}}))).await;
    let prompt = server.log.last_prompt();
    assert!(prompt.to_lowercase().contains("(thinking: false)"), "{prompt}");
}

#[tokio::test]
async fn what_can_not_be_served_is_refused_by_its_path() {
    let server = TestServer::new(says(&["x"], StopReason::Eos)).await;
    let items = |items: Value| json!({"input": items});
    let user = |part: Value| json!({"input": [{"role": "user", "content": [part]}]});
    let call = |arguments: Value| json!({"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments});
    for (fields, param) in [
        (json!({"previous_response_id": "resp_1"}), "previous_response_id"),
        (json!({"conversation": "conv_1"}), "conversation"),
        (json!({"prompt": {"id": "p"}}), "prompt"),
        (json!({"background": true}), "background"),
        (json!({"truncation": "auto"}), "truncation"),
        (json!({"input": null}), "input"),
        (json!({"input": []}), "input"),
        (json!({"input": 5}), "input"),
        (items(json!(["x"])), "input[0]"),
        (items(json!([{"type": "web_search_call"}])), "input[0].type"),
        (items(json!([{"type": "item_reference", "id": "msg_1"}])), "input[0].type"),
        (items(json!([{}])), "input[0].type"),
        (items(json!([{"role": "robot", "content": "x"}])), "input[0].role"),
        (items(json!([{"role": "user"}])), "input[0].content"),
        (user(json!({"type": "input_image", "image_url": "x"})), "input[0].content[0].type"),
        (user(json!({"type": "input_text"})), "input[0].content[0].text"),
        (user(json!([])), "input[0].content[0]"),
        (items(json!([call(json!("{}"))])), "input[0]"),
        (items(json!([call(json!("{"))])), "input[0].arguments"),
        (items(json!([call(json!("[]"))])), "input[0].arguments"),
        (items(json!([call(json!({}))])), "input[0].arguments"),
        (items(json!([{"type": "function_call_output", "call_id": "c", "output": "x"}])), "input[0].call_id"),
        (items(json!([{"type": "reasoning", "content": "x"}])), "input[0].content"),
        (json!({"max_output_tokens": 0}), "max_output_tokens"),
        (json!({"max_output_tokens": "x"}), "max_output_tokens"),
        (json!({"top_logprobs": 21}), "top_logprobs"),
        (json!({"tools": {}}), "tools"),
        (json!({"tools": [{"type": "web_search"}]}), "tools[0].type"),
        (json!({"tools": [{"type": "function", "function": {"name": "f"}}]}), "tools[0].name"),
        (json!({"tools": [{"type": "function", "name": "f", "parameters": 5}]}), "tools[0].parameters"),
        (json!({"tool_choice": "required"}), "tool_choice"),
        (json!({"tool_choice": {"type": "function", "name": "f"}}), "tool_choice.name"),
        (json!({"tool_choice": {"type": "mcp"}}), "tool_choice.type"),
        (json!({"text": {"format": {"type": "xml"}}}), "text.format.type"),
        (json!({"text": {"format": {"type": "json_schema"}}}), "text.format.schema"),
        (json!({"text": []}), "text"),
        (json!({"include": "x"}), "include"),
        (json!({"reasoning": "high"}), "reasoning"),
    ] {
        let error = server.error(RESPONSES, with(fields), 400).await;
        assert_eq!(error["param"], param, "{error}");
    }
    assert_eq!(server.log.count(), 0);
}
