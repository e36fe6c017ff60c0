//! Request bodies, as far as they are read without a model.

use opencoti_http::ApiError;

use super::Target;

/// Bodies of chat requests.
pub const CHAT: Target = Target { name: "chat-body", seeds: chat_seeds, run: chat };
/// Bodies of completion requests, native and OpenAI's.
pub const COMPLETION: Target = Target { name: "completion-body", seeds: completion_seeds, run: completion };

/// Bodies of Anthropic messages requests.
pub const MESSAGES: Target = Target { name: "messages-body", seeds: messages_seeds, run: messages };
/// Bodies of OpenAI responses requests.
pub const RESPONSES: Target = Target { name: "responses-body", seeds: responses_seeds, run: responses };

fn chat_seeds() -> Vec<Vec<u8>> {
    let bodies = [
        r#"{"messages":[{"role":"user","content":"hi"}],"stream":true,"stream_options":{"include_usage":true}}"#,
        r#"{"messages":[{"role":"system","content":[{"type":"text","text":"be brief"}]},{"role":"user","content":"x"}],
            "temperature":0.5,"top_p":0.9,"n":2,"stop":["a","b"],"logprobs":true,"top_logprobs":3,"seed":1}"#,
        r#"{"messages":[{"role":"user","content":"w?"},{"role":"assistant","content":null,"tool_calls":[{"id":"c","type":
            "function","function":{"name":"f","arguments":"{\"a\":1}"}}]},{"role":"tool","tool_call_id":"c","content":"1"}],
            "tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object"}}}],
            "tool_choice":{"type":"function","function":{"name":"f"}},"parallel_tool_calls":false}"#,
        r#"{"messages":[{"role":"user","content":"x"}],"response_format":{"type":"json_schema","json_schema":{"name":"s",
            "schema":{"type":"object","properties":{"a":{"type":"integer"}}}}},"logit_bias":{"5":-100},"max_tokens":7}"#,
    ];
    bodies.map(|b| b.as_bytes().to_vec()).to_vec()
}

fn completion_seeds() -> Vec<Vec<u8>> {
    let bodies = [
        r#"{"prompt":"hello","n_predict":5,"temperature":0,"stop":["x"],"n_probs":2,"cache_prompt":true}"#,
        r#"{"prompt":[1,2,"three",4],"samplers":["top_k","temperature"],"logit_bias":[[1,-1.5],["x",false]]}"#,
        r#"{"prompt":[["a"],[1,2]],"dry_sequence_breakers":["\n"],"grammar":"root ::= \"a\"","response_fields":["a/b"]}"#,
        r#"{"prompt":{"prompt_string":"x","multimodal_data":[]},"echo":true,"logprobs":1,"max_tokens":4,"id_slot":0}"#,
    ];
    bodies.map(|b| b.as_bytes().to_vec()).to_vec()
}

fn messages_seeds() -> Vec<Vec<u8>> {
    let bodies = [
        r#"{"max_tokens":9,"system":[{"type":"text","text":"be brief"}],"messages":[{"role":"user","content":"hi"}],"stream":true,
            "stop_sequences":["a"],"temperature":0.5,"top_k":3,"thinking":{"type":"enabled","budget_tokens":5}}"#,
        r#"{"max_tokens":9,"messages":[{"role":"user","content":[{"type":"text","text":"w?"}]},{"role":"assistant","content":[
            {"type":"thinking","thinking":"hm","signature":"s"},{"type":"tool_use","id":"t","name":"f","input":{"a":1}}]},
            {"role":"user","content":[{"type":"tool_result","tool_use_id":"t","is_error":true,"content":[{"type":"text",
            "text":"1"}]}]}],"tools":[{"name":"f","input_schema":{"type":"object"}}],"tool_choice":{"type":"tool","name":"f",
            "disable_parallel_tool_use":true}}"#,
        r#"{"max_tokens":1,"messages":[{"role":"user","content":"x"}],"output_config":{"format":{"type":"json_schema",
            "schema":{"type":"object"}}},"metadata":{"user_id":"u"}}"#,
    ];
    bodies.map(|b| b.as_bytes().to_vec()).to_vec()
}

fn responses_seeds() -> Vec<Vec<u8>> {
    let bodies = [
        r#"{"input":"hi","instructions":"be brief","max_output_tokens":9,"stream":true,"reasoning":{"effort":"none"},
            "include":["message.output_text.logprobs"],"top_logprobs":3,"metadata":{"a":"b"}}"#,
        r#"{"input":[{"role":"user","content":[{"type":"input_text","text":"w?"}]},{"type":"reasoning","summary":[],"content":[
            {"type":"reasoning_text","text":"hm"}]},{"type":"function_call","call_id":"c","name":"f","arguments":"{"a":1}"},
            {"type":"function_call_output","call_id":"c","output":"1"}],"tools":[{"type":"function","name":"f",
            "parameters":{"type":"object"}}],"tool_choice":{"type":"function","name":"f"},"parallel_tool_calls":false}"#,
        r#"{"input":"x","text":{"format":{"type":"json_schema","name":"s","schema":{"type":"object"}}},"truncation":"disabled",
            "tool_choice":{"type":"allowed_tools","mode":"auto","tools":[{"name":"f"}]},"previous_response_id":null}"#,
    ];
    bodies.map(|b| b.as_bytes().to_vec()).to_vec()
}

fn outcome(result: Result<(), ApiError>) -> String {
    result.map_or_else(|e| e.message().to_owned(), |()| "accepted".to_owned())
}

fn chat(input: &[u8]) -> String {
    outcome(opencoti_http::parse_chat(input))
}

fn completion(input: &[u8]) -> String {
    outcome(opencoti_http::parse_completion(input))
}

fn messages(input: &[u8]) -> String {
    outcome(opencoti_http::parse_messages(input))
}

fn responses(input: &[u8]) -> String {
    outcome(opencoti_http::parse_responses(input))
}
