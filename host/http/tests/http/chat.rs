//! Chat answers that are not streamed, and what a request may say.

use opencoti_engine::api::{Constraint, EngineError, StopReason};
use opencoti_engine::sampling::SamplerKind;
use opencoti_http::ServerConfig;
use serde_json::{Value, json};

use crate::fake::{N_VOCAB, TestServer, byte_token, config, fails, says};

const CHAT: &str = "/v1/chat/completions";

/// A request with more fields.
fn with(fields: Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "hi"}]});
    let all = fields.as_object().expect("fields").clone();
    body.as_object_mut().expect("an object").extend(all);
    body
}

#[tokio::test]
async fn an_answer_has_openais_shape() {
    let server = TestServer::new(says(&["Hel", "lo"], StopReason::Eos)).await;
    let answer = server.ok(CHAT, with(json!({"model": "gpt-x"}))).await;
    assert!(answer["id"].as_str().is_some_and(|id| id.starts_with("chatcmpl-") && id.len() == 9 + 32), "{answer}");
    assert_eq!(answer["object"], "chat.completion");
    assert_eq!(answer["model"], "gpt-x");
    assert!(answer["created"].as_u64().is_some_and(|time| time > 1_600_000_000));
    let choice = json!({
        "index": 0, "message": {"role": "assistant", "content": "Hello", "refusal": null},
        "logprobs": null, "finish_reason": "stop"});
    assert_eq!(answer["choices"], json!([choice]));
    let n = server.log.last().prompt.len();
    let usage = json!({
        "prompt_tokens": n, "completion_tokens": 2, "total_tokens": n + 2,
        "prompt_tokens_details": {"cached_tokens": 1}, "completion_tokens_details": {"reasoning_tokens": 0}});
    assert_eq!(answer["usage"], usage);
    assert_eq!(
        answer["timings"]["prompt_n"].as_u64().zip(answer["timings"]["cache_n"].as_u64()),
        Some((n as u64 - 1, 1))
    );
    assert_eq!(answer["timings"]["predicted_per_second"], 1000.0);
}

#[tokio::test]
async fn the_prompt_is_the_templates_with_one_beginning_token() {
    let server = TestServer::new(says(&["x"], StopReason::Eos)).await;
    let body = json!({"messages": [{"role": "developer", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "u"}]}]});
    let answer = server.ok("/apply-template", body.clone()).await;
    assert_eq!(answer, json!({"prompt": "[system]s\n[user]u\n[assistant]"}));
    server.ok(CHAT, body).await;
    let tokens: Vec<u32> = [1].into_iter().chain("[system]s\n[user]u\n[assistant]".bytes().map(byte_token)).collect();
    assert_eq!(server.log.last().prompt, tokens);
}

#[tokio::test]
async fn tokens_are_counted_without_a_generation() {
    let server = TestServer::new(says(&["x"], StopReason::Eos)).await;
    server.ok(CHAT, with(json!({}))).await;
    let expected = json!({"object": "response.input_tokens", "input_tokens": server.log.last().prompt.len()});
    assert_eq!(server.ok("/v1/chat/completions/input_tokens", with(json!({}))).await, expected);
    assert_eq!(server.log.count(), 1);
}

#[tokio::test]
async fn an_assistant_message_at_the_end_is_continued() {
    let server = TestServer::new(says(&["x"], StopReason::Eos)).await;
    let messages = json!([{"role": "user", "content": "u"}, {"role": "assistant", "content": "The ans"}]);
    for body in [json!({"messages": messages}), json!({"messages": messages, "continue_final_message": true})] {
        let answer = server.ok("/apply-template", body).await;
        assert_eq!(answer["prompt"], "[user]u\n[assistant]The ans");
    }
    let both = json!({"messages": messages, "continue_final_message": true, "add_generation_prompt": true});
    assert_eq!(server.error(CHAT, both, 400).await["param"], "continue_final_message");
    let wrong = with(json!({"continue_final_message": true}));
    assert_eq!(server.error(CHAT, wrong, 400).await["param"], "continue_final_message");
}

#[tokio::test]
async fn what_a_request_says_reaches_the_engine() {
    let server = TestServer::new(says(&["x"], StopReason::Limit)).await;
    let answer = server.ok(CHAT, with(json!({
        "max_tokens": 9, "max_completion_tokens": 7, "stop": ["a", "b"], "temperature": -1, "top_k": -5, "top_p": 1.5,
        "seed": 42, "samplers": ["top_k", "temperature"], "logit_bias": {"5": -1.5}, "prompt_cache_key": "s1", "id_slot": 2,
        "cache_prompt": false, "n": 3, "mirostat": 9, "dry_base": 0.5, "repeat_last_n": -1, "t_max_predict_ms": 250,
        "unknown_field": {"x": 1}, "user": "u", "store": true, "metadata": {"a": "b"}, "top_logprobs": null, "overcommit": true,
    }))).await;
    assert_eq!(answer["choices"].as_array().map(Vec::len), Some(3));
    assert_eq!(answer["choices"][2]["finish_reason"], "length");
    let request = server.log.last();
    assert_eq!((request.n_predict, request.n_choices, request.id_slot), (Some(7), 3, Some(2)));
    assert_eq!(request.stop, ["a", "b"]);
    assert_eq!(request.session_id.as_deref(), Some("s1"));
    assert!(!request.cache_prompt && request.overcommit);
    assert_eq!(request.t_max_predict.map(|time| time.as_millis()), Some(250));
    let sampling = request.sampling;
    assert_eq!((sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed), (0.0, 0, 1.0, 42));
    assert_eq!(sampling.samplers, [SamplerKind::TopK, SamplerKind::Temperature]);
    assert_eq!(sampling.logit_bias, [(5, -1.5)]);
    assert_eq!((sampling.mirostat, sampling.dry_base, sampling.repeat_last_n), (2, 1.75, -1));
}

#[tokio::test]
async fn absent_and_null_fields_take_llama_cpps_defaults() {
    let server = TestServer::new(says(&["x"], StopReason::Eos)).await;
    for body in [
        with(json!({})),
        with(json!({
        "temperature": null, "top_k": null, "max_tokens": null, "stop": null, "n": null, "logit_bias": null, "tools": null,
        "tool_choice": null, "response_format": null, "stream": null, "stream_options": null, "seed": null, "model": null,
        "grammar": null, "json_schema": null, "samplers": null, "lora": null, "chat_template_kwargs": null})),
    ] {
        server.ok(CHAT, body).await;
        let request = server.log.last();
        assert_eq!(request.sampling, opencoti_engine::sampling::SamplingParams::default());
        assert_eq!((request.n_predict, request.n_choices), (None, 1));
        assert!(request.stop.is_empty() && request.constraint.is_none() && request.cache_prompt);
    }
}

#[tokio::test]
async fn a_wrong_type_is_a_400_that_names_the_field() {
    let server = TestServer::new(says(&["x"], StopReason::Eos)).await;
    let table = [
        (json!({"temperature": "hot"}), "temperature", "a number"),
        (json!({"top_k": 1.5}), "top_k", "an integer"),
        (json!({"max_tokens": "many"}), "max_tokens", "an integer"),
        (json!({"n": []}), "n", "an integer"),
        (json!({"stream": "yes"}), "stream", "true or false"),
        (json!({"stream_options": []}), "stream_options", "an object"),
        (json!({"stream_options": {"include_usage": 1}}), "stream_options.include_usage", "true or false"),
        (json!({"stop": 5}), "stop", "a string or an array of strings"),
        (json!({"stop": ["a", 5]}), "stop[1]", "a string"),
        (json!({"seed": 0.5}), "seed", "an integer"),
        (json!({"samplers": {}}), "samplers", "a string or an array of strings"),
        (json!({"logprobs": "x"}), "logprobs", "true or false"),
        (json!({"response_format": "json"}), "response_format", "an object"),
        (json!({"response_format": {"type": 5}}), "response_format.type", "a string"),
        (json!({"chat_template_kwargs": []}), "chat_template_kwargs", "an object"),
        (
            json!({"chat_template_kwargs": {"enable_thinking": "no"}}),
            "chat_template_kwargs.enable_thinking",
            "true or false",
        ),
        (json!({"lora": [1]}), "lora[0]", "an object"),
        (json!({"grammar": 1}), "grammar", "a string"),
        (json!({"session_id": 1}), "session_id", "a string"),
        (json!({"messages": "hi"}), "messages", "an array"),
        (json!({"messages": [1]}), "messages[0]", "an object"),
        (json!({"messages": [{"role": "user", "content": 1}]}), "messages[0].content", "a string or an array"),
        (json!({"tools": {}}), "tools", "an array"),
        (json!({"tool_choice": 1}), "tool_choice", "a string or an object"),
    ];
    for (fields, param, expected) in table {
        let error = server.error(CHAT, with(fields), 400).await;
        assert_eq!(error["param"], param, "{error}");
        assert_eq!(error["type"], "invalid_request_error");
        let message = error["message"].as_str().expect("a message");
        assert!(message.contains(param) && message.contains(&format!("expected {expected}")), "{message}");
    }
    assert_eq!(server.log.count(), 0, "none of them reached the engine");
}

#[tokio::test]
async fn a_value_out_of_a_hard_range_is_a_400_that_names_the_field() {
    let server = TestServer::new(says(&["x"], StopReason::Eos)).await;
    for (fields, param) in [
        (json!({"n": 0}), "n"),
        (json!({"n": 5}), "n"),
        (json!({"max_tokens": -2}), "max_tokens"),
        (json!({"n_predict": -2, "max_tokens": 5}), "n_predict"),
        (json!({"n_keep": -2}), "n_keep"),
        (json!({"n_keep": 4}), "n_keep"),
        (json!({"n_discard": -1}), "n_discard"),
        (json!({"n_discard": 4}), "n_discard"),
        (json!({"backend_sampling": true}), "backend_sampling"),
        (json!({"n_cache_reuse": 256}), "n_cache_reuse"),
        (json!({"n_indent": -1}), "n_indent"),
        (json!({"n_cache_reuse": -1}), "n_cache_reuse"),
        (json!({"t_max_predict_ms": -2}), "t_max_predict_ms"),
        (json!({"sse_ping_interval": -2}), "sse_ping_interval"),
        (json!({"repeat_last_n": -2}), "repeat_last_n"),
        (json!({"dry_penalty_last_n": -2}), "dry_penalty_last_n"),
        (json!({"dry_allowed_length": -1}), "dry_allowed_length"),
        (json!({"dry_sequence_breakers": []}), "dry_sequence_breakers"),
        (json!({"adaptive_decay": 1.0}), "adaptive_decay"),
        (json!({"min_keep": -1}), "min_keep"),
        (json!({"temperature": 1e300}), "temperature"),
        (json!({"id_slot": 4}), "id_slot"),
        (json!({"id_slot": -2}), "id_slot"),
        (json!({"top_logprobs": 3}), "top_logprobs"),
        (json!({"logprobs": true, "top_logprobs": 21}), "top_logprobs"),
        (json!({"samplers": ["top_k", "magic"]}), "samplers[1]"),
        (json!({"samplers": "kz"}), "samplers"),
        (json!({"reasoning_format": "loud"}), "reasoning_format"),
        (json!({"reasoning_budget_tokens": 5}), "reasoning_budget_tokens"),
        (json!({"thinking_budget_tokens": -2}), "thinking_budget_tokens"),
        (json!({"pool_id": -2}), "pool_id"),
        (json!({"shared_pool_slot": 4}), "shared_pool_slot"),
        (json!({"shared_prefix_n_tokens": -1}), "shared_prefix_n_tokens"),
        (json!({"timeout": 0}), "timeout"),
        (json!({"priority": 1i64 << 40}), "priority"),
        (json!({"lora": [{"id": 0, "scale": 1.0}]}), "lora"),
        (json!({"logit_bias": [[1, 2], [3]]}), "logit_bias[1]"),
        (json!({"logit_bias": [[1, "x"]]}), "logit_bias[0][1]"),
        (json!({"logit_bias": [[1, true]]}), "logit_bias[0][1]"),
        (json!({"logit_bias": [[1, 1e39]]}), "logit_bias[0][1]"),
        (json!({"logit_bias": [[N_VOCAB, 1]]}), "logit_bias[0][0]"),
        (json!({"logit_bias": [[[1], 1]]}), "logit_bias[0][0]"),
        (json!({"logit_bias": {"999": 1}}), "logit_bias.999"),
        (json!({"logit_bias": 5}), "logit_bias"),
        (json!({"messages": []}), "messages"),
        (json!({"messages": [{"role": "robot", "content": "x"}]}), "messages[0].role"),
        (json!({"messages": [{"role": "user"}]}), "messages[0].content"),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]}]}),
            "messages[0].content[1].type",
        ),
    ] {
        let error = server.error(CHAT, with(fields.clone()), 400).await;
        assert_eq!(error["param"], param, "{fields}: {error}");
    }
    let (status, answer) = server.ask(CHAT, json!({})).await;
    assert_eq!((status, &answer["error"]["param"]), (400, &json!("messages")));
    assert_eq!(server.log.count(), 0, "none of them reached the engine");
}

#[tokio::test]
async fn logit_bias_takes_texts_tokens_and_bans() {
    let server = TestServer::new(says(&["x"], StopReason::Eos)).await;
    server.ok(CHAT, with(json!({"logit_bias": [["ab", 2], [7, false]]}))).await;
    let bias = server.log.last().sampling.logit_bias;
    assert_eq!(bias, [(byte_token(b'a'), 2.0), (byte_token(b'b'), 2.0), (7, f32::NEG_INFINITY)]);
}

#[tokio::test]
async fn the_form_of_the_answer_becomes_a_constraint_with_its_field() {
    let server = TestServer::new(says(&["{}"], StopReason::Eos)).await;
    let schema = json!({"type": "object"});
    let table = [
        (json!({"response_format": {"type": "text"}}), None, ""),
        (json!({"response_format": {"type": "json_object"}}), Some(Constraint::JsonObject), "response_format"),
        (
            json!({"response_format": {"type": "json_object", "schema": schema}}),
            Some(Constraint::JsonSchema(schema.clone())),
            "response_format.schema",
        ),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": true, "schema": schema}}}),
            Some(Constraint::JsonSchema(schema.clone())),
            "response_format.json_schema.schema",
        ),
        (json!({"json_schema": schema}), Some(Constraint::JsonSchema(schema.clone())), "json_schema"),
        (json!({"grammar": "root ::= \"a\""}), Some(Constraint::Gbnf("root ::= \"a\"".to_owned())), "grammar"),
        (json!({"grammar": ""}), None, ""),
    ];
    for (fields, constraint, field) in table {
        server.ok(CHAT, with(fields)).await;
        let request = server.log.last();
        assert_eq!((request.constraint, request.constraint_field.as_str()), (constraint, field));
    }
    let tool = json!([{"type": "function", "function": {"name": "f"}}]);
    for (fields, param) in [
        (json!({"grammar": "root ::= \"a\"", "json_schema": {}}), "grammar"),
        (json!({"grammar": "root ::= \"a\"", "tools": tool}), "grammar"),
        (json!({"response_format": {"type": "json_object"}, "json_schema": {}}), "json_schema"),
        (json!({"response_format": {"type": "sound"}}), "response_format.type"),
        (json!({"response_format": {}}), "response_format.type"),
        (json!({"response_format": {"type": "json_object", "schema": 123}}), "response_format.schema"),
        (json!({"response_format": {"type": "json_schema"}}), "response_format.json_schema.schema"),
    ] {
        assert_eq!(server.error(CHAT, with(fields), 400).await["param"], param);
    }
}

#[tokio::test]
async fn a_schema_beside_tools_binds_the_answer_without_calls() {
    let server = TestServer::new(says(&["{}"], StopReason::Eos)).await;
    let tool = json!([{"type": "function", "function": {"name": "f"}}]);
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}});
    let named = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}});
    for format in [
        json!({"response_format": named}),
        json!({"response_format": {"type": "json_object", "schema": schema}}),
        json!({"json_schema": schema}),
    ] {
        let mut fields = format.clone();
        fields["tools"] = tool.clone();
        let answer = server.ok(CHAT, with(fields.clone())).await;
        assert_eq!(answer["choices"][0]["message"]["content"], "{}");
        let Some(Constraint::Lark(grammar)) = server.log.last().constraint else { panic!("{format}") };
        assert!(grammar.contains("answer: %json {") && grammar.contains("\"integer\""), "{grammar}");
        fields["tool_choice"] = json!("none");
        server.ok(CHAT, with(fields.clone())).await;
        assert_eq!(server.log.last().constraint, Some(Constraint::JsonSchema(schema.clone())));
    }
    let fields = json!({"json_schema": {"properties": {"a": {"not": {}}}}, "tools": tool});
    assert_eq!(server.error(CHAT, with(fields), 400).await["param"], "json_schema.properties.a.not");
}

#[tokio::test]
async fn fields_that_ask_for_nothing_are_taken() {
    let server = TestServer::new(says(&["x"], StopReason::Eos)).await;
    let fields =
        json!({"n_keep": 0, "n_discard": 0, "n_cache_reuse": 0, "backend_sampling": false, "cache_prompt": true});
    server.ok(CHAT, with(fields)).await;
    server.ok(CHAT, with(json!({"n_keep": -1, "n_discard": null}))).await;
}

#[tokio::test]
async fn a_constraint_that_the_engine_refuses_is_a_400_with_its_field_streamed_or_not() {
    let error = EngineError::Invalid {
        field: Some("json_schema.properties.a.not".to_owned()),
        message: "`not` can't be enforced; leave it out".to_owned(),
    };
    let server = TestServer::new(fails(error)).await;
    for stream in [false, true] {
        let error = server.error(CHAT, with(json!({"json_schema": {"not": {}}, "stream": stream})), 400).await;
        assert_eq!(error["param"], "json_schema.properties.a.not");
        assert_eq!(error["type"], "invalid_request_error");
    }
}

#[tokio::test]
async fn logprobs_have_openais_shape() {
    let server = TestServer::new(says(&["a", "ä"], StopReason::Eos)).await;
    let answer = server.ok(CHAT, with(json!({"logprobs": true, "top_logprobs": 1}))).await;
    let content = &answer["choices"][0]["logprobs"]["content"];
    assert_eq!(content[1]["token"], "ä");
    assert_eq!(content[1]["bytes"], json!([195, 164]));
    assert_eq!(content[1]["logprob"], -0.25);
    assert_eq!(content[1]["top_logprobs"].as_array().map(Vec::len), Some(1));
    assert_eq!(server.log.last().sampling.n_probs, 1);
    assert_eq!(answer["choices"][0]["logprobs"]["refusal"], Value::Null);
    let none = server.ok(CHAT, with(json!({"logprobs": true, "top_logprobs": 0}))).await;
    assert_eq!(none["choices"][0]["logprobs"]["content"][0]["top_logprobs"], json!([]));
    server.ok(CHAT, with(json!({"logprobs": true}))).await;
    assert_eq!(server.log.last().sampling.n_probs, 20);
}

#[tokio::test]
async fn thoughts_go_where_the_format_says() {
    let server = TestServer::new(says(&["<think>", "hm, ", "yes</think>", "Done"], StopReason::Eos)).await;
    let answer = server.ok(CHAT, with(json!({}))).await;
    let message = &answer["choices"][0]["message"];
    assert_eq!((&message["content"], &message["reasoning_content"]), (&json!("Done"), &json!("hm, yes")));
    assert!(answer["usage"]["completion_tokens_details"]["reasoning_tokens"].as_u64() >= Some(1), "{answer}");
    let raw = server.ok(CHAT, with(json!({"reasoning_format": "none"}))).await;
    assert_eq!(raw["choices"][0]["message"]["content"], "<think>hm, yes</think>Done");
    let both = server.ok(CHAT, with(json!({"reasoning_format": "deepseek-legacy"}))).await;
    let message = &both["choices"][0]["message"];
    assert_eq!(
        (&message["content"], &message["reasoning_content"]),
        (&json!("<think>hm, yes</think>Done"), &json!("hm, yes"))
    );
    let off = server.ok("/apply-template", with(json!({"reasoning_budget_tokens": 0}))).await;
    assert!(off["prompt"].as_str().is_some_and(|prompt| prompt.to_lowercase().contains("(thinking: false)")), "{off}");
}

#[tokio::test]
async fn verbose_shows_what_the_server_made_of_the_request() {
    let server = TestServer::new(says(&["a"], StopReason::Eos)).await;
    let answer = server.ok(CHAT, with(json!({"verbose": true, "temperature": 0.5}))).await;
    let verbose = &answer["__verbose"];
    assert_eq!(verbose["prompt"], "[user]hi\n[assistant]");
    assert_eq!(verbose["generation_settings"]["temperature"], 0.5);
    assert_eq!(verbose["content"], "a");
}

#[tokio::test]
async fn engine_errors_have_their_status_and_a_failed_request_harms_no_other() {
    let exceeds = EngineError::ExceedsContext { n_prompt_tokens: 600, n_ctx: 512 };
    let table = [
        (exceeds, 400, "exceed_context_size_error"),
        (EngineError::Unavailable("a plugin is in quarantine".to_owned()), 503, "unavailable_error"),
        (EngineError::Unsupported("no".to_owned()), 501, "not_supported_error"),
        (EngineError::NotFound("no".to_owned()), 404, "not_found_error"),
        (EngineError::TimedOut("late".to_owned()), 408, "timeout_error"),
        (EngineError::Internal("broke".to_owned()), 500, "server_error"),
    ];
    for (error, status, kind) in table {
        let server = TestServer::new(fails(error)).await;
        for stream in [false, true] {
            let error = server.error(CHAT, with(json!({"stream": stream})), status).await;
            assert_eq!(error["type"], kind);
            if kind == "exceed_context_size_error" {
                assert_eq!((&error["n_prompt_tokens"], &error["n_ctx"]), (&json!(600), &json!(512)));
                assert!(error["message"].as_str().is_some_and(|m| m.contains("exceeds the available context size")));
            }
        }
        assert_eq!(server.get("/health").await.status(), 200);
    }
}

#[tokio::test]
async fn a_rejected_request_says_when_to_come_back() {
    let message = "store kv: 100 cells were asked for, 7 are free".to_owned();
    let server =
        TestServer::new(fails(EngineError::Rejected { retry_after: 0, reason: "kv", message: message.clone() })).await;
    let response = server.post(CHAT, with(json!({}))).await;
    assert_eq!(response.status(), 429);
    assert_eq!(response.headers()["retry-after"], "1");
    let expected = json!({"error": {"code": 429, "type": "rate_limit_error", "message": message, "param": null}});
    assert_eq!(response.json::<Value>().await.expect("JSON"), expected);
}

#[tokio::test]
async fn a_deadline_goes_with_the_request() {
    let wait = std::time::Duration::from_secs(9);
    let server =
        TestServer::with(ServerConfig { request_timeout: Some(wait), ..config() }, says(&["x"], StopReason::Eos)).await;
    server.ok(CHAT, with(json!({}))).await;
    assert_eq!(server.log.last().deadline, Some(wait));
}
