//! Thoughts, texts and tool calls of a scripted model, through tokenizer, grammar, parser and every chat surface over a
//! real connection.

use std::sync::Arc;

use opencoti_http::{Listen, Server, ServerConfig};
use opencoti_tests::{model, scripted};
use serde_json::{Value, json};

/// Markers that some vocabularies have as special tokens, whose text appears only where it is asked for.
const MARKERS: [&str; 4] = ["<think>", "</think>", "<tool_call>", "</tool_call>"];
const SCRIPT: &str = "[say]<think>\nThe user wants Rome.\n</think>\n\nLet me look: 21 °C?\n<tool_call>\n\
    {\"name\": \"weather\", \"arguments\": {\"city\": \"Rome\", \"days\": [1, 2]}}\n</tool_call>[/say]";

/// What an answer said, whatever its surface.
#[derive(Debug, PartialEq)]
struct Said {
    thought: String,
    text: String,
    calls: Vec<(String, Value)>,
    end: String,
}

impl Said {
    fn rome(end: &str) -> Self {
        Said {
            thought: "The user wants Rome.".to_owned(),
            text: "Let me look: 21 °C?".to_owned(),
            calls: vec![("weather".to_owned(), json!({"city": "Rome", "days": [1, 2]}))],
            end: end.to_owned(),
        }
    }
}

/// A server in front of the scripted model.
struct Scripted {
    base: String,
    client: reqwest::Client,
    _model: tempfile::NamedTempFile,
}

impl Scripted {
    /// A server whose vocabulary has these tokens too.
    async fn new(special: &[&str]) -> Self {
        let file = tempfile::Builder::new().suffix(".gguf").tempfile().expect("a file for the model");
        model::write_with(file.path(), special).expect("the model is written");
        let engine = scripted::engine(file.path()).expect("the engine starts");
        let listen = Listen::Tcp(([127, 0, 0, 1], 0).into());
        let server = Server::bind(ServerConfig { listen, ..ServerConfig::default() }).await.expect("a free port");
        let base = format!("http://{}", server.local_addr().expect("it listens on TCP"));
        server.control().set_ready(engine, Arc::new(|| json!([])));
        tokio::spawn(server.serve(std::future::pending()));
        Scripted { base, client: reqwest::Client::new(), _model: file }
    }

    async fn text(&self, path: &str, body: &Value) -> String {
        let response = self.client.post(format!("{}{path}", self.base)).json(body).send().await.expect("an answer");
        let (status, text) = (response.status(), response.text().await.expect("a body"));
        assert_eq!(status, 200, "{text}");
        text
    }

    async fn whole(&self, path: &str, body: &Value) -> Value {
        serde_json::from_str(&self.text(path, body).await).expect("JSON")
    }

    /// The data of a stream's events.
    async fn streamed(&self, path: &str, body: &Value) -> Vec<Value> {
        let mut body = body.clone();
        body["stream"] = true.into();
        let text = self.text(path, &body).await;
        let data = text.lines().filter_map(|line| line.strip_prefix("data: ")).filter(|data| *data != "[DONE]");
        data.map(|data| serde_json::from_str(data).expect("JSON")).collect()
    }

    async fn both_markers() -> [Self; 2] {
        [Self::new(&[]).await, Self::new(&MARKERS).await]
    }
}

fn parameters() -> Value {
    json!({"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "array", "items": {"type": "integer"}}},
        "required": ["city", "days"]})
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn joined<'a>(events: &'a [Value], pick: impl Fn(&'a Value) -> &'a Value) -> String {
    events.iter().map(|event| text(pick(event))).collect()
}

fn parsed(arguments: &str) -> Value {
    serde_json::from_str(arguments).unwrap_or_else(|error| panic!("{arguments:?} is no JSON: {error}"))
}

#[tokio::test]
async fn chat_tells_thought_text_and_call_apart() {
    let body = json!({"messages": [{"role": "user", "content": SCRIPT}], "tools": [
        {"type": "function", "function": {"name": "weather", "parameters": parameters()}}]});
    for server in Scripted::both_markers().await {
        let answer = server.whole("/v1/chat/completions", &body).await;
        let message = &answer["choices"][0]["message"];
        let calls = message["tool_calls"].as_array().expect("calls").iter();
        let said = Said {
            thought: text(&message["reasoning_content"]),
            text: text(&message["content"]),
            calls: calls
                .map(|call| (text(&call["function"]["name"]), parsed(&text(&call["function"]["arguments"]))))
                .collect(),
            end: text(&answer["choices"][0]["finish_reason"]),
        };
        assert_eq!(said, Said::rome("tool_calls"));

        let events = server.streamed("/v1/chat/completions", &body).await;
        let text_of = |key: &'static str| joined(&events, |event| &event["choices"][0]["delta"][key]);
        let call_of = |key: &'static str| {
            joined(&events, |event| &event["choices"][0]["delta"]["tool_calls"][0]["function"][key])
        };
        let said = Said {
            thought: text_of("reasoning_content"),
            text: text_of("content"),
            calls: vec![(call_of("name"), parsed(&call_of("arguments")))],
            end: text(&events.last().expect("events")["choices"][0]["finish_reason"]),
        };
        assert_eq!(said, Said::rome("tool_calls"));
    }
}

#[tokio::test]
async fn messages_tell_thought_text_and_call_apart() {
    let body = json!({"max_tokens": 500, "messages": [{"role": "user", "content": SCRIPT}],
        "tools": [{"name": "weather", "input_schema": parameters()}]});
    for server in Scripted::both_markers().await {
        let answer = server.whole("/v1/messages", &body).await;
        let content = answer["content"].as_array().expect("blocks");
        let said = Said {
            thought: text(&content[0]["thinking"]),
            text: text(&content[1]["text"]),
            calls: vec![(text(&content[2]["name"]), content[2]["input"].clone())],
            end: text(&answer["stop_reason"]),
        };
        assert_eq!((said, content.len()), (Said::rome("tool_use"), 3));

        let events = server.streamed("/v1/messages", &body).await;
        let end = events.iter().find(|event| event["type"] == "message_delta").expect("an end");
        let said = Said {
            thought: joined(&events, |event| &event["delta"]["thinking"]),
            text: joined(&events, |event| &event["delta"]["text"]),
            calls: vec![(
                joined(&events, |event| &event["content_block"]["name"]),
                parsed(&joined(&events, |event| &event["delta"]["partial_json"])),
            )],
            end: text(&end["delta"]["stop_reason"]),
        };
        assert_eq!(said, Said::rome("tool_use"));
        assert_eq!(end["usage"]["output_tokens"], answer["usage"]["output_tokens"]);
    }
}

#[tokio::test]
async fn responses_tell_thought_text_and_call_apart() {
    let body = json!({"input": SCRIPT, "tools": [{"type": "function", "name": "weather", "parameters": parameters()}]});
    for server in Scripted::both_markers().await {
        let answer = server.whole("/v1/responses", &body).await;
        let output = answer["output"].as_array().expect("items");
        let said = Said {
            thought: text(&output[0]["content"][0]["text"]),
            text: text(&output[1]["content"][0]["text"]),
            calls: vec![(text(&output[2]["name"]), parsed(&text(&output[2]["arguments"])))],
            end: text(&answer["status"]),
        };
        assert_eq!((said, output.len()), (Said::rome("completed"), 3));
        assert!(answer["usage"]["output_tokens_details"]["reasoning_tokens"].as_u64() > Some(3), "{answer}");

        let events = server.streamed("/v1/responses", &body).await;
        let deltas = |kind: &str| {
            let own = events.iter().filter(|event| event["type"] == format!("response.{kind}.delta"));
            own.map(|event| text(&event["delta"])).collect::<String>()
        };
        let last = &events.last().expect("events")["response"];
        let said = Said {
            thought: deltas("reasoning_text"),
            text: deltas("output_text"),
            calls: vec![(text(&last["output"][2]["name"]), parsed(&deltas("function_call_arguments")))],
            end: text(&last["status"]),
        };
        assert_eq!(said, Said::rome("completed"));
    }
}

#[tokio::test]
async fn a_result_goes_back_and_the_prompt_before_it_comes_from_the_cache() {
    for server in Scripted::both_markers().await {
        let tools = json!([{"name": "weather", "input_schema": parameters()}]);
        let mut body = json!({"max_tokens": 500, "messages": [{"role": "user", "content": SCRIPT}], "tools": tools});
        let first = server.whole("/v1/messages", &body).await;
        let result = json!({"type": "tool_result", "tool_use_id": first["content"][2]["id"], "content": "[say]It is sunny.[/say]"});
        let messages = body["messages"].as_array_mut().expect("messages");
        messages.push(json!({"role": "assistant", "content": first["content"]}));
        messages.push(json!({"role": "user", "content": [result]}));
        let second = server.whole("/v1/messages", &body).await;
        assert_eq!(second["content"], json!([{"type": "text", "text": "It is sunny."}]));
        assert_eq!(second["stop_reason"], "end_turn");
        let usage = |answer: &Value, key: &str| answer["usage"][key].as_u64().expect("a count");
        let before = usage(&first, "input_tokens") + usage(&first, "cache_read_input_tokens");
        assert!(usage(&second, "cache_read_input_tokens") >= before - 1, "{second}");
        body["tool_choice"] = json!({"type": "none"});
        let none = server.whole("/v1/messages", &body).await;
        assert_eq!(none["content"][0]["text"], "It is sunny.");
    }
}

#[tokio::test]
async fn thinking_that_is_turned_off_leaves_the_answer() {
    for server in Scripted::both_markers().await {
        let messages = json!([{"role": "user", "content": "[say]Four.[/say]"}]);
        let body = json!({"max_tokens": 50, "messages": messages, "thinking": {"type": "disabled"}});
        let answer = server.whole("/v1/messages", &body).await;
        assert_eq!(answer["content"], json!([{"type": "text", "text": "Four."}]));
        let body = json!({"input": "[say]Four.[/say]", "reasoning": {"effort": "none"}});
        let answer = server.whole("/v1/responses", &body).await;
        assert_eq!(answer["output"][0]["content"][0]["text"], "Four.");
    }
}

#[tokio::test]
async fn stop_texts_and_bounds_end_an_answer_in_the_middle() {
    let server = Scripted::new(&[]).await;
    let messages = json!([{"role": "user", "content": "[say]one two three four[/say]"}]);
    let cut = json!({"max_tokens": 50, "messages": messages, "stop_sequences": ["zero", "three"]});
    let answer = server.whole("/v1/messages", &cut).await;
    assert_eq!((&answer["stop_reason"], &answer["stop_sequence"]), (&json!("stop_sequence"), &json!("three")));
    assert_eq!(answer["content"][0]["text"], "one two ");
    let short = json!({"max_tokens": 3, "messages": messages});
    let answer = server.whole("/v1/messages", &short).await;
    assert_eq!((&answer["stop_reason"], &answer["usage"]["output_tokens"]), (&json!("max_tokens"), &json!(3)));
    let short = json!({"max_output_tokens": 3, "input": "[say]one two three four[/say]"});
    let answer = server.whole("/v1/responses", &short).await;
    assert_eq!((&answer["status"], &answer["output"][0]["status"]), (&json!("incomplete"), &json!("incomplete")));
}

#[tokio::test]
async fn two_calls_in_a_row_are_two_blocks_unless_only_one_is_allowed() {
    let script = "[say]<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Rome\", \"days\": []}}\n</tool_call>\n\
        <tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Oslo\", \"days\": []}}\n</tool_call>[/say]";
    for server in Scripted::both_markers().await {
        let mut body = json!({"max_tokens": 500, "messages": [{"role": "user", "content": script}],
            "tools": [{"name": "weather", "input_schema": parameters()}], "tool_choice": {"type": "any"}});
        let answer = server.whole("/v1/messages", &body).await;
        let cities: Vec<_> =
            answer["content"].as_array().expect("blocks").iter().map(|b| &b["input"]["city"]).collect();
        assert_eq!(cities, ["Rome", "Oslo"]);
        body["tool_choice"]["disable_parallel_tool_use"] = true.into();
        let answer = server.whole("/v1/messages", &body).await;
        let cities: Vec<_> =
            answer["content"].as_array().expect("blocks").iter().map(|b| &b["input"]["city"]).collect();
        assert_eq!(cities, ["Rome"]);
    }
}
