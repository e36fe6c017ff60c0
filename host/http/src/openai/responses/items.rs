//! The `input` of a request: items become messages.

use opencoti_model::chat::{Message, ToolCall};
use serde_json::{Map, Value};

use crate::body::{describe, object_at, string_at};
use crate::chat::turns::{Rules, Turns};
use crate::error::ApiError;

const RULES: Rules = Rules { result: "a function_call_output item", id: "call_id", joins_user: false };

/// What an item may be.
const ITEMS: &str = "message, function_call, function_call_output or reasoning";

/// The conversation of `instructions` and `input`.
pub(super) fn messages(instructions: Option<&str>, input: Option<&Value>) -> Result<Vec<Message>, ApiError> {
    let mut turns = Turns::new(RULES);
    if let Some(text) = instructions.filter(|text| !text.is_empty()) {
        turns.system(text);
    }
    match input {
        Some(Value::String(text)) => turns.user(text),
        Some(Value::Array(items)) if !items.is_empty() => {
            for (index, item) in items.iter().enumerate() {
                add_item(&mut turns, item, &format!("input[{index}]"))?;
            }
        }
        Some(Value::Array(_)) => return Err(ApiError::field("input", "is empty; send at least one item")),
        other => {
            let problem = format!("is {}, expected a string or an array of items", describe(other));
            return Err(ApiError::field("input", problem));
        }
    }
    turns.finish()
}

fn add_item(turns: &mut Turns, item: &Value, path: &str) -> Result<(), ApiError> {
    let object = object_at(item, path)?;
    let kind = match object.get("type") {
        None | Some(Value::Null) if object.contains_key("role") => "message",
        _ => string_at(object, "type", path)?,
    };
    match kind {
        "message" => add_message(turns, object, path),
        "function_call" => {
            let call = ToolCall {
                id: string_at(object, "call_id", path)?.to_owned(),
                name: string_at(object, "name", path)?.to_owned(),
                arguments: arguments(object, path)?,
            };
            turns.call(path.to_owned(), call)
        }
        "function_call_output" => {
            let id = string_at(object, "call_id", path)?;
            let output = text(object.get("output"), &format!("{path}.output"), &["input_text"])?;
            turns.result(&format!("{path}.call_id"), id, &output)
        }
        "reasoning" => {
            let thought = thought(object, path)?;
            if thought.is_empty() { Ok(()) } else { turns.thought(&thought) }
        }
        "item_reference" => {
            let problem = "is \"item_reference\", but this server stores no items; send the item itself";
            Err(ApiError::field(format!("{path}.type"), problem))
        }
        other => Err(ApiError::field(format!("{path}.type"), format!("is {other:?}, expected {ITEMS}"))),
    }
}

fn add_message(turns: &mut Turns, object: &Map<String, Value>, path: &str) -> Result<(), ApiError> {
    let content = |kinds| text(object.get("content"), &format!("{path}.content"), kinds);
    match string_at(object, "role", path)? {
        "system" | "developer" => turns.system(&content(&["input_text"])?),
        "user" => turns.user(&content(&["input_text"])?),
        "assistant" => turns.assistant(&content(&["output_text", "input_text", "refusal"])?)?,
        other => {
            let problem = format!("is {other:?}, expected user, assistant, system or developer");
            return Err(ApiError::field(format!("{path}.role"), problem));
        }
    }
    Ok(())
}

/// A string, or an array of parts of these types.
fn text(content: Option<&Value>, path: &str, kinds: &[&str]) -> Result<String, ApiError> {
    match content {
        Some(Value::String(text)) => Ok(text.clone()),
        Some(Value::Array(parts)) => {
            let part = |(index, part)| part_text(part, &format!("{path}[{index}]"), kinds);
            Ok(parts.iter().enumerate().map(part).collect::<Result<Vec<_>, _>>()?.join("\n"))
        }
        other => Err(ApiError::field(path, format!("is {}, expected a string or an array of parts", describe(other)))),
    }
}

fn part_text<'a>(part: &'a Value, path: &str, kinds: &[&str]) -> Result<&'a str, ApiError> {
    let object = object_at(part, path)?;
    match string_at(object, "type", path)? {
        kind if !kinds.contains(&kind) => {
            let problem = format!("is {kind:?}, but here this model takes only {}", kinds.join(", "));
            Err(ApiError::field(format!("{path}.type"), problem))
        }
        "refusal" => string_at(object, "refusal", path),
        _ => string_at(object, "text", path),
    }
}

/// The text of a reasoning item, of its content or else of its summary. What is encrypted elsewhere can't be read.
fn thought(object: &Map<String, Value>, path: &str) -> Result<String, ApiError> {
    for (key, kind) in [("content", "reasoning_text"), ("summary", "summary_text")] {
        let parts = object.get(key).filter(|parts| !parts.is_null());
        let Some(parts @ Value::Array(_)) = parts else {
            match parts {
                None => continue,
                other => {
                    let problem = format!("is {}, expected an array of {kind} parts", describe(other));
                    return Err(ApiError::field(format!("{path}.{key}"), problem));
                }
            }
        };
        let text = text(Some(parts), &format!("{path}.{key}"), &[kind])?;
        if !text.is_empty() {
            return Ok(text);
        }
    }
    Ok(String::new())
}

fn arguments(object: &Map<String, Value>, path: &str) -> Result<Map<String, Value>, ApiError> {
    let path = format!("{path}.arguments");
    let text = match object.get("arguments") {
        Some(Value::String(text)) if text.trim().is_empty() => return Ok(Map::new()),
        Some(Value::String(text)) => text,
        other => {
            return Err(ApiError::field(path, format!("is {}, expected a string of JSON", describe(other))));
        }
    };
    match serde_json::from_str(text) {
        Ok(Value::Object(arguments)) => Ok(arguments),
        Ok(other) => Err(ApiError::field(path, format!("holds {}, expected a JSON object", describe(Some(&other))))),
        Err(error) => Err(ApiError::field(path, format!("is not valid JSON ({error}); send an object as a string"))),
    }
}
