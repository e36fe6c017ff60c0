//! Bodies that nobody should send.

use std::sync::Arc;

use axum::body::Body;
use axum::http::Request;
use opencoti_engine::api::StopReason;
use opencoti_http::{Server, parse_chat, parse_completion, parse_messages, parse_responses};
use proptest::prelude::*;
use serde_json::{Map, Value, json};
use tower::ServiceExt;

use crate::fake::{config, engine, info, plugins, says};

const ROUTES: [&str; 15] = [
    "/v1/chat/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/v1/completions",
    "/completion",
    "/v1/embeddings",
    "/embedding",
    "/v1/rerank",
    "/tokenize",
    "/detokenize",
    "/apply-template",
    "/props",
    "/slots/0?action=save",
];

const FIELDS: [&str; 80] = [
    "query",
    "documents",
    "texts",
    "top_n",
    "return_documents",
    "messages",
    "prompt",
    "input",
    "content",
    "tokens",
    "model",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
    "logprobs",
    "top_logprobs",
    "n_probs",
    "stream",
    "stream_options",
    "n",
    "n_predict",
    "max_tokens",
    "max_completion_tokens",
    "stop",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "samplers",
    "logit_bias",
    "grammar",
    "json_schema",
    "id_slot",
    "session_id",
    "lora",
    "response_fields",
    "echo",
    "best_of",
    "suffix",
    "chat_template_kwargs",
    "reasoning_format",
    "add_generation_prompt",
    "continue_final_message",
    "dry_sequence_breakers",
    "dry_base",
    "repeat_last_n",
    "mirostat",
    "adaptive_decay",
    "encoding_format",
    "dimensions",
    "embd_normalize",
    "add_special",
    "with_pieces",
    "filename",
    "verbose",
    "timings_per_token",
    "return_progress",
    "sse_ping_interval",
    "t_max_predict_ms",
    "min_keep",
    "pool_id",
    "n_keep",
    "backend_sampling",
    "n_indent",
    "role",
    "system",
    "stop_sequences",
    "thinking",
    "output_config",
    "metadata",
    "instructions",
    "text",
    "reasoning",
    "include",
    "max_output_tokens",
    "truncation",
    "background",
    "previous_response_id",
];

/// Values as clients send them by mistake.
fn value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        (-3i64..300).prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(|number| json!(number)),
        ".{0,12}".prop_map(Value::from),
        prop::sample::select(
            &["user", "assistant", "tool", "system", "function", "text", "auto", "required", "json_object"][..]
        )
        .prop_map(Value::from),
    ];
    let keys = prop::sample::select(
        &["role", "content", "type", "text", "function", "name", "arguments", "tool_calls", "schema", "5"][..],
    );
    leaf.prop_recursive(4, 40, 5, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
            prop::collection::vec((keys.clone(), inner), 0..5).prop_map(|fields| fields
                .into_iter()
                .map(|(key, value)| (key.to_owned(), value))
                .collect::<Map<_, _>>()
                .into()),
        ]
    })
}

/// Blocks of messages and items of an input, nearly right.
fn typed() -> impl Strategy<Value = Value> {
    let kinds = [
        "text",
        "thinking",
        "redacted_thinking",
        "tool_use",
        "tool_result",
        "image",
        "message",
        "function_call",
        "function_call_output",
        "reasoning",
        "input_text",
        "output_text",
        "refusal",
        "item_reference",
    ];
    let keys = [
        "text",
        "thinking",
        "id",
        "name",
        "input",
        "tool_use_id",
        "content",
        "is_error",
        "call_id",
        "arguments",
        "output",
        "summary",
        "role",
        "refusal",
    ];
    let right = [
        json!("x"),
        json!("t1"),
        json!("{}"),
        json!({}),
        json!([]),
        json!(true),
        json!("user"),
        json!("assistant"),
        json!([{"type": "text", "text": "x"}]),
        json!([{"type": "input_text", "text": "x"}]),
    ];
    let value = prop_oneof![4 => prop::sample::select(right.to_vec()), 1 => value()];
    let fields = prop::collection::vec((prop::sample::select(keys.to_vec()), value), 0..8);
    (prop::sample::select(kinds.to_vec()), fields).prop_map(|(kind, fields)| {
        let fields = fields.into_iter().map(|(key, value)| (key.to_owned(), value));
        fields.chain([("type".to_owned(), kind.into())]).collect::<Map<_, _>>().into()
    })
}

/// Conversations of typed blocks, as messages and as an input.
fn conversation() -> impl Strategy<Value = Value> {
    let roles = prop::sample::select(vec!["user", "assistant", "system", "robot"]);
    let message = (roles, prop::collection::vec(typed(), 0..4));
    let message = message.prop_map(|(role, content)| json!({"role": role, "content": content}));
    let messages = prop::collection::vec(message, 0..4);
    (messages, prop::collection::vec(typed(), 0..6))
        .prop_map(|(messages, input)| json!({"messages": messages, "input": input, "max_tokens": 5}))
}

/// Bodies that are right but for a few fields.
fn body() -> impl Strategy<Value = Value> {
    let fields = prop::collection::vec((prop::sample::select(&FIELDS[..]), value()), 0..5);
    fields.prop_map(|fields| {
        let mut body = json!({
            "messages": [{"role": "user", "content": "hi"}], "prompt": "hi", "input": "hi", "tokens": [5], "filename": "a",
            "query": "hi", "documents": ["hi", "ho"], "max_tokens": 5});
        for (name, value) in fields {
            body[name] = value;
        }
        body
    })
}

fn status(runtime: &tokio::runtime::Runtime, router: &axum::Router, path: &str, body: Vec<u8>) -> u16 {
    let request = Request::post(path).body(Body::from(body)).expect("a request");
    runtime.block_on(async {
        let response = router.clone().oneshot(request).await.expect("the router never fails");
        let status = response.status().as_u16();
        let bytes = axum::body::to_bytes(response.into_body(), usize::MAX).await.expect("a body");
        if status >= 400 {
            let error: Value = serde_json::from_slice(&bytes).expect("errors are JSON");
            match path.starts_with("/v1/messages") {
                true => assert_eq!(error["type"], "error", "{error}"),
                false => assert_eq!(error["error"]["code"], status, "{error}"),
            }
        }
        status
    })
}

fn router(runtime: &tokio::runtime::Runtime) -> axum::Router {
    runtime.block_on(async {
        let server = Server::bind(config()).await.expect("a free port");
        let (handle, _) = engine(info(), says(&["a", "b"], StopReason::Eos), false);
        server.control().set_ready(handle, Arc::new(plugins));
        server.router()
    })
}

#[test]
fn no_body_makes_the_server_fail() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let router = router(&runtime);
    proptest!(ProptestConfig::with_cases(1500), |(route in prop::sample::select(&ROUTES[..]), body in body())| {
        let status = status(&runtime, &router, route, body.to_string().into_bytes());
        // 501: what is turned off on this server.
        prop_assert!(status < 500 || status == 501, "{route} {body} gave {status}");
    });
}

#[test]
fn no_conversation_of_blocks_makes_the_server_fail() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let router = router(&runtime);
    proptest!(ProptestConfig::with_cases(1500), |(route in prop::sample::select(&ROUTES[1..5]), body in conversation())| {
        let status = status(&runtime, &router, route, body.to_string().into_bytes());
        prop_assert!(status < 500, "{route} {body} gave {status}");
    });
}

#[test]
fn no_bytes_make_the_server_fail() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let router = router(&runtime);
    proptest!(ProptestConfig::with_cases(500), |(route in prop::sample::select(&ROUTES[..]), body in prop::collection::vec(any::<u8>(), 0..64))| {
        let status = status(&runtime, &router, route, body);
        prop_assert!(status < 500 || status == 501, "{route} gave {status}");
    });
}

proptest! {
    #[test]
    fn parsing_never_panics(body in body(), cut in any::<prop::sample::Index>()) {
        let bytes = body.to_string().into_bytes();
        for bytes in [&bytes[..], &bytes[..cut.index(bytes.len())]] {
            let _ = parse_chat(bytes);
            let _ = parse_completion(bytes);
            let _ = parse_messages(bytes);
            let _ = parse_responses(bytes);
        }
    }
}

#[test]
fn deep_nesting_is_a_client_error() {
    let deep = |field: &str| format!("{{\"{field}\":{}", "[".repeat(100_000)).into_bytes();
    for outcome in [parse_chat(&deep("messages")), parse_messages(&deep("messages")), parse_responses(&deep("input"))] {
        let error = outcome.expect_err("too deep");
        assert_eq!(error.status(), 400);
        assert!(error.message().contains("recursion limit"), "{}", error.message());
    }
}

#[test]
fn paths_and_queries_that_are_no_text_are_client_errors_in_our_shape() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let router = router(&runtime);
    for path in ["/slots/%ff?action=save", "/v1/requests/%ff/cancel", "/slots/0?action=%ff%", "/shutdown"] {
        let status = status(&runtime, &router, path, Vec::new());
        assert!((400..500).contains(&status) || status == 501, "{path} gave {status}");
    }
}
