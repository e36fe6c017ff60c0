//! Tools: definitions, choices, calls in answers and in the history.

use opencoti_engine::api::{Constraint, StopReason};
use serde_json::{Value, json};

use crate::fake::{TestServer, says};

const CHAT: &str = "/v1/chat/completions";
const CALL: &[&str] = &[
    "Let me see.\n<tool_",
    "call>\n{\"name\": \"weather\", \"argu",
    "ments\": {\"city\": \"Rom",
    "e\"}}\n</tool_call>",
];

fn with_tools(fields: Value) -> Value {
    let mut body = json!({
        "messages": [{"role": "user", "content": "Weather?"}],
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": {
            "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}],
    });
    let all = fields.as_object().expect("fields").clone();
    body.as_object_mut().expect("an object").extend(all);
    body
}

#[tokio::test]
async fn a_call_in_the_text_becomes_a_tool_call() {
    let server = TestServer::new(says(CALL, StopReason::Eos)).await;
    let answer = server.ok(CHAT, with_tools(json!({}))).await;
    let choice = &answer["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls");
    assert_eq!(choice["message"]["content"], "Let me see.");
    let calls = choice["message"]["tool_calls"].as_array().expect("calls");
    assert_eq!(calls.len(), 1);
    assert_eq!((&calls[0]["type"], &calls[0]["function"]["name"]), (&json!("function"), &json!("weather")));
    let arguments: Value =
        serde_json::from_str(calls[0]["function"]["arguments"].as_str().expect("a string")).expect("JSON");
    assert_eq!(arguments, json!({"city": "Rome"}));
    assert!(matches!(server.log.last().constraint, Some(Constraint::Lark(_))));
    assert_eq!(server.log.last().constraint_field, "tools");
}

#[tokio::test]
async fn a_streamed_call_begins_with_its_name_and_its_parts_join_to_json() {
    let server = TestServer::new(says(CALL, StopReason::Eos)).await;
    let events = server.events(CHAT, with_tools(json!({"stream": true}))).await;
    let parts: Vec<&Value> =
        events.iter().filter_map(|event| event["choices"][0]["delta"]["tool_calls"].get(0)).collect();
    assert!(parts[0]["id"].as_str().is_some_and(|id| id.starts_with("call_")), "{parts:?}");
    assert_eq!((&parts[0]["index"], &parts[0]["type"]), (&json!(0), &json!("function")));
    assert_eq!(parts[0]["function"], json!({"name": "weather", "arguments": ""}));
    for part in &parts[1..] {
        assert!(
            part.get("id").is_none() && part.get("type").is_none() && part["function"].get("name").is_none(),
            "{part}"
        );
    }
    let arguments: String = parts.iter().filter_map(|part| part["function"]["arguments"].as_str()).collect();
    assert_eq!(serde_json::from_str::<Value>(&arguments).expect("JSON"), json!({"city": "Rome"}));
    let finish = events.iter().rev().find_map(|event| event["choices"][0]["finish_reason"].as_str());
    assert_eq!(finish, Some("tool_calls"));
    let text: String = events.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(text, "Let me see.", "no part of a marker is shown");
}

#[tokio::test]
async fn content_is_null_beside_calls_alone() {
    let call = &["<tool_call>{\"name\": \"weather\", \"arguments\": {}}</tool_call>"];
    let server = TestServer::new(says(call, StopReason::Eos)).await;
    let answer = server.ok(CHAT, with_tools(json!({}))).await;
    assert_eq!(answer["choices"][0]["message"].get("content"), Some(&Value::Null));
}

#[tokio::test]
async fn a_call_that_is_cut_off_ends_by_length() {
    let server = TestServer::new(says(&CALL[..3], StopReason::Limit)).await;
    let answer = server.ok(CHAT, with_tools(json!({}))).await;
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
}

#[tokio::test]
async fn tool_choice_takes_words_and_objects() {
    let server = TestServer::new(says(&["ok"], StopReason::Eos)).await;
    for choice in [
        json!("auto"),
        json!("required"),
        json!({"type": "function", "function": {"name": "weather"}}),
        json!({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "weather"}}]}}),
    ] {
        server.ok(CHAT, with_tools(json!({"tool_choice": choice}))).await;
        assert!(matches!(server.log.last().constraint, Some(Constraint::Lark(_))), "{choice}");
    }
    server.ok(CHAT, with_tools(json!({"tool_choice": "none"}))).await;
    assert_eq!(server.log.last().constraint, None);
    for (choice, param) in [
        (json!("sometimes"), "tool_choice"),
        (json!({"type": "function", "function": {"name": "x"}}), "tool_choice.function.name"),
        (json!({"type": "custom"}), "tool_choice.type"),
    ] {
        assert_eq!(server.error(CHAT, with_tools(json!({"tool_choice": choice})), 400).await["param"], param);
    }
}

#[tokio::test]
async fn tools_that_are_no_functions_are_refused() {
    let server = TestServer::new(says(&["ok"], StopReason::Eos)).await;
    for (tools, param) in [
        (json!([{"type": "custom", "custom": {"name": "x"}}]), "tools[0].type"),
        (json!([{"type": "function", "function": {"name": "a"}}, {"type": "web_search"}]), "tools[1].type"),
        (json!([{"type": "function", "function": {}}]), "tools[0].function.name"),
        (json!([{"type": "function", "function": {"name": "a", "parameters": 5}}]), "tools[0].function.parameters"),
    ] {
        let error = server.error(CHAT, with_tools(json!({"tools": tools})), 400).await;
        assert_eq!(error["param"], param, "{error}");
    }
    assert_eq!(server.log.count(), 0);
}

#[tokio::test]
async fn a_keyword_of_a_tool_that_cannot_be_enforced_is_refused_by_its_path() {
    let server = TestServer::new(says(&["ok"], StopReason::Eos)).await;
    let tool = |name: &str, keyword: &str| {
        json!({"type": "function", "function": {"name": name, "parameters": {
            "type": "object", "properties": {"list": {"type": "array", "items": {keyword: {}}}}}}})
    };
    let tools = json!([tool("good", "title"), tool("bad", "not")]);
    let error = server.error(CHAT, with_tools(json!({"tools": tools})), 400).await;
    assert_eq!(error["param"], "tools[1].function.parameters.properties.list.items.not", "{error}");
    // What may not be called need not be enforceable.
    let choice = json!({"type": "function", "function": {"name": "good"}});
    server.ok(CHAT, with_tools(json!({"tools": tools, "tool_choice": choice}))).await;
}

#[tokio::test]
async fn a_history_with_broken_arguments_is_refused_by_its_path() {
    let server = TestServer::new(says(&["ok"], StopReason::Eos)).await;
    let history = |arguments: Value| {
        json!({"messages": [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": null, "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}]},
            {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        ]})
    };
    server.ok(CHAT, with_tools(history(json!("{\"city\": \"Rome\"}")))).await;
    for broken in ["{\"city\": ", "[1]", "nonsense"] {
        let error = server.error(CHAT, with_tools(history(json!(broken))), 400).await;
        assert_eq!(error["param"], "messages[1].tool_calls[0].function.arguments", "{error}");
    }
}
