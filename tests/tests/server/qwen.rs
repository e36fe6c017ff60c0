//! Qwen2.5-Coder-Instruct, real weights in K-quants, where `$OPENCOTI_TEST_MODELS` has it (`cargo xtask fetch qwen2.5-coder-1.5b`,
//! 1.1 GB; the folder is the cache's `models`): chat and tools.

use opencoti_tests::server::{Server, Site};
use serde_json::{Value, json};

const MODELS: [&str; 2] = ["Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf", "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf"];

/// Every model that is there, served.
fn servers() -> impl Iterator<Item = (&'static str, Server)> {
    let sites = MODELS.into_iter().filter_map(|name| Some((name, Site::with_real_model(name)?)));
    sites.map(|(name, site)| (name, Server::at(site, &["--ctx-size", "2048", "--parallel", "1"])))
}

fn tools() -> Value {
    json!([{"type": "function", "function": {
        "name": "get_weather",
        "description": "Current weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": false,
        },
    }}])
}

fn message(server: &Server, body: Value) -> Value {
    let answer = server.post("/v1/chat/completions", &body).ok();
    answer["choices"][0]["message"].clone()
}

#[test]
fn it_answers_questions() {
    for (name, server) in servers() {
        let ask = json!({
            "messages": [{"role": "user", "content": "What is the capital of France? Answer with one word."}],
            "temperature": 0, "max_tokens": 12,
        });
        let content = message(&server, ask)["content"].to_string();
        assert!(content.contains("Paris"), "{name}: {content}");
        let code = json!({
            "messages": [{"role": "user", "content": "Write a Python function `add` that returns the sum of two numbers."}],
            "temperature": 0, "max_tokens": 80,
        });
        let content = message(&server, code)["content"].to_string();
        assert!(content.contains("def add(") && content.contains("return"), "{name}: {content}");
    }
}

#[test]
fn it_calls_a_tool_and_uses_its_result() {
    for (name, server) in servers() {
        let mut messages = vec![json!({"role": "user", "content": "What is the weather in Paris right now?"})];
        let ask = json!({
            "messages": messages, "tools": tools(), "tool_choice": "required", "temperature": 0, "max_tokens": 80,
        });
        let called = message(&server, ask);
        let call = &called["tool_calls"][0];
        assert_eq!(call["function"]["name"], "get_weather", "{name}: {called}");
        let arguments: Value =
            serde_json::from_str(call["function"]["arguments"].as_str().expect("text")).expect("arguments are JSON");
        assert!(arguments["city"].as_str().is_some_and(|city| city.contains("Paris")), "{name}: {arguments}");
        messages.push(json!({"role": "assistant", "content": null, "tool_calls": [call]}));
        messages.push(
            json!({"role": "tool", "tool_call_id": call["id"], "content": "{\"sky\": \"clear\", \"celsius\": 23}"}),
        );
        let ask = json!({"messages": messages, "tools": tools(), "temperature": 0, "max_tokens": 60});
        let content = message(&server, ask)["content"].to_string();
        assert!(content.contains("23"), "{name}: {content}");
    }
}
