//! Requests that can't be served as they are: refused by name, before anything is computed.

use opencoti_tests::server::{Server, prompt};
use serde_json::{Value, json};

/// Expects a status, the field at fault and parts of the message.
#[track_caller]
fn refused(server: &Server, path: &str, body: &Value, status: u16, param: Value, parts: &[&str]) -> Value {
    let reply = server.post(path, body);
    assert_eq!(reply.status, status, "{body}: {}", reply.body);
    let message = reply.message();
    assert!(parts.iter().all(|part| message.contains(part)), "{body}: {message}");
    assert!(!message.contains('\n') && message.len() < 500, "one sentence: {message}");
    assert_eq!(reply.body["error"]["param"], param, "{body}: {}", reply.body);
    reply.body["error"].clone()
}

fn message(role: &str, content: &str) -> Value {
    json!({"role": role, "content": content})
}

#[test]
fn a_prompt_longer_than_the_context_is_refused_with_both_numbers() {
    let server = Server::start(&["--ctx-size", "256", "--parallel", "2"]);
    let error = refused(&server, "/completion", &json!({"prompt": prompt(1, 300)}), 400, Value::Null, &["300", "256"]);
    assert_eq!(error["type"], "exceed_context_size_error");
    assert_eq!((&error["n_prompt_tokens"], &error["n_ctx"]), (&json!(300), &json!(256)));
    let chat = json!({"messages": [message("user", &"word ".repeat(100))]});
    let reply = server.post("/v1/chat/completions", &chat);
    assert_eq!((reply.status, &reply.body["error"]["type"]), (400, &json!("exceed_context_size_error")));
    // As a stream, too, it is an ordinary error.
    let reply = server.post("/completion", &json!({"prompt": prompt(1, 300), "stream": true}));
    assert_eq!(reply.status, 400, "{}", reply.body);
    // Up to the context's end the answer just ends there.
    let full = server.complete(&json!({"prompt": prompt(1, 250), "ignore_eos": true}));
    assert_eq!((&full["stop_type"], &full["truncated"]), (&json!("limit"), &json!(true)));
}

#[test]
fn constraints_that_can_not_be_kept_are_refused_with_their_path() {
    let server = Server::start(&["--ctx-size", "256"]);
    let with = |field: &str, value: Value| json!({"prompt": "x", "n_predict": 4, field: value});
    let check = |body: Value, param: &str, parts: &[&str]| {
        refused(&server, "/completion", &body, 400, json!(param), parts);
    };
    check(with("grammar", json!("root ::= (")), "grammar", &["grammar"]);
    check(with("grammar", json!("root ::= missing")), "grammar", &["missing"]);
    check(with("grammar", json!("root ::= root \"a\"")), "grammar", &["root"]);
    check(
        with("json_schema", json!({"type": "object", "properties": {"a": {"not": {"type": "string"}}}})),
        "json_schema.properties.a.not",
        &["not"],
    );
    check(with("json_schema", json!({"type": "strange"})), "json_schema.type", &["strange"]);
    let chat = json!({
        "messages": [message("user", "x")],
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"if": {}, "then": false}}},
    });
    let reply = server.post("/v1/chat/completions", &chat);
    assert_eq!(reply.status, 400, "{}", reply.body);
    let param = reply.body["error"]["param"].as_str().expect("a path");
    assert!(param.starts_with("response_format.json_schema.schema"), "{param}");
    assert_eq!(server.metric("opencoti_kv_cells_used"), 0.0, "nothing was computed");
    server.complete(&with("grammar", json!("root ::= \"a\"")));
}

#[test]
fn bodies_that_are_no_requests_are_refused() {
    let server = Server::start(&["--ctx-size", "256", "--parallel", "2", "--max-body", "64KiB"]);
    for (path, body, part) in [
        ("/completion", "{\"prompt\": ", "JSON"),
        ("/completion", "", "JSON"),
        ("/completion", "[1, 2]", "object"),
        ("/v1/chat/completions", "{\"messages\": [}", "JSON"),
        ("/tokenize", "nonsense", "JSON"),
    ] {
        let reply = server.post_text(path, body);
        assert_eq!(reply.status, 400, "{path} {body}: {}", reply.body);
        assert!(reply.message().contains(part), "{path} {body}: {}", reply.message());
    }
    let huge = server.post("/completion", &json!({"prompt": "x".repeat(100_000)}));
    assert_eq!(huge.status, 413, "{}", huge.body);
    assert_eq!(server.get("/completion").status, 405);
    assert_eq!(server.get("/nowhere").status, 404);

    let check = |path: &str, body: Value, param: &str| {
        refused(&server, path, &body, 400, json!(param), &[]);
    };
    check("/completion", json!({}), "prompt");
    check("/completion", json!({"prompt": "x", "temperature": "hot"}), "temperature");
    check("/completion", json!({"prompt": "x", "n_predict": "many"}), "n_predict");
    check("/completion", json!({"prompt": "x", "n_predict": -7}), "n_predict");
    check("/completion", json!({"prompt": "x", "stop": [1]}), "stop[0]");
    check("/completion", json!({"prompt": "x", "id_slot": 2}), "id_slot");
    check("/completion", json!({"prompt": "x", "n": 3}), "n");
    check("/completion", json!({"prompt": ""}), "prompt");
    check("/completion", json!({"prompt": [1, 2, 100_000]}), "prompt[2]");
    check("/detokenize", json!({"tokens": [-1]}), "tokens[0]");
    check("/v1/embeddings", json!({"input": []}), "input");
    server.complete(&json!({"prompt": "x", "n_predict": 2}));
}

#[test]
fn conversations_that_make_no_sense_are_refused() {
    let server = Server::start(&["--ctx-size", "512"]);
    let check = |body: Value, param: &str, parts: &[&str]| {
        refused(&server, "/v1/chat/completions", &body, 400, json!(param), parts);
    };
    let messages = |messages: Value| json!({"messages": messages, "max_tokens": 4});
    check(json!({}), "messages", &[]);
    check(messages(json!([])), "messages", &[]);
    check(messages(json!([{"role": "robot", "content": "x"}])), "messages[0].role", &["robot", "assistant"]);
    check(messages(json!([{"content": "x"}])), "messages[0].role", &[]);
    check(messages(json!([{"role": "user", "content": 7}])), "messages[0].content", &[]);
    let call = |arguments: &str| {
        json!({
            "role": "assistant", "content": null,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}],
        })
    };
    check(
        messages(
            json!([message("user", "x"), call("{\"a\": "), {"role": "tool", "tool_call_id": "1", "content": "y"}]),
        ),
        "messages[1].tool_calls[0].function.arguments",
        &["JSON"],
    );
    check(json!({"messages": [message("user", "x")], "tool_choice": "required"}), "tool_choice", &[]);
    server.post("/v1/chat/completions", &messages(json!([message("user", "x")]))).ok();
}
