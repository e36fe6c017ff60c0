//! Chat messages as clients send them, checked and brought into one form.

use serde_json::{Map, Value, json};

use super::template::Capabilities;

/// What is wrong with the messages or tools of a request, and where.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{path}: {problem}")]
pub struct MessageError {
    /// The JSON path of the field, such as `messages[2].content[0].type`.
    pub path: String,
    /// What was found and what was expected.
    pub problem: String,
}

impl MessageError {
    pub(super) fn new(path: impl Into<String>, problem: impl Into<String>) -> Self {
        Self { path: path.into(), problem: problem.into() }
    }
}

/// Who speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// `system` or `developer`.
    System,
    User,
    Assistant,
    /// The result of a tool call.
    Tool,
}

impl Role {
    /// The name templates know the role by.
    pub fn name(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
        }
    }

    fn parse(name: &str) -> Option<Self> {
        Some(match name {
            "system" | "developer" => Self::System,
            "user" => Self::User,
            "assistant" => Self::Assistant,
            "tool" => Self::Tool,
            _ => return None,
        })
    }
}

/// A call an assistant message made.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolCall {
    pub id: String,
    pub name: String,
    /// Always an object.
    pub arguments: Map<String, Value>,
}

/// One message.
#[derive(Clone, Debug, PartialEq)]
pub struct Message {
    pub role: Role,
    /// The text; parts of a multi-part content are joined by line breaks.
    pub content: String,
    /// The thought before the content, of an assistant message.
    pub reasoning: Option<String>,
    pub tool_calls: Vec<ToolCall>,
    /// Which call a tool message answers.
    pub tool_call_id: Option<String>,
    /// The speaker's name; of a tool message, the function's.
    pub name: Option<String>,
}

impl Message {
    /// A message that has only text.
    pub fn text(role: Role, content: impl Into<String>) -> Self {
        let (reasoning, tool_call_id, name) = (None, None, None);
        Self { role, content: content.into(), reasoning, tool_calls: Vec::new(), tool_call_id, name }
    }

    /// The object templates see.
    pub(super) fn to_json(&self, template: &Capabilities) -> Value {
        let mut out = Map::new();
        out.insert("role".into(), self.role.name().into());
        let content = if template.typed_content {
            json!([{"type": "text", "text": self.content}])
        } else {
            self.content.clone().into()
        };
        out.insert("content".into(), content);
        let reasoning = if template.thinking_field { "thinking" } else { "reasoning_content" };
        let optional = [(reasoning, &self.reasoning), ("tool_call_id", &self.tool_call_id), ("name", &self.name)];
        for (key, value) in optional {
            if let Some(value) = value {
                out.insert(key.into(), value.clone().into());
            }
        }
        if !self.tool_calls.is_empty() {
            let calls = self.tool_calls.iter().map(|call| call.to_json(template.object_arguments)).collect();
            out.insert("tool_calls".into(), Value::Array(calls));
        }
        Value::Object(out)
    }
}

impl ToolCall {
    fn to_json(&self, object_arguments: bool) -> Value {
        let arguments = Value::Object(self.arguments.clone());
        let arguments = if object_arguments { arguments } else { arguments.to_string().into() };
        json!({"id": self.id, "type": "function", "function": {"name": self.name, "arguments": arguments}})
    }
}

/// Reads the `messages` array of a request.
///
/// # Errors
/// If it is empty, if a message has an unknown role, lacks its content or has a part that is no text, if a tool call of
/// the history has arguments that are no JSON object, or if the last two messages are both the assistant's.
pub fn parse_messages(messages: &Value) -> Result<Vec<Message>, MessageError> {
    let list = messages
        .as_array()
        .ok_or_else(|| MessageError::new("messages", format!("is {}, expected an array", kind_of(messages))))?;
    if list.is_empty() {
        return Err(MessageError::new("messages", "is empty; send at least one message"));
    }
    let mut parsed: Vec<Message> = Vec::with_capacity(list.len());
    for (index, message) in list.iter().enumerate() {
        let message = parse_message(message, &format!("messages[{index}]"))?;
        let message = with_function_name(message, &parsed);
        parsed.push(message);
    }
    if let [.., a, b] = parsed.as_slice()
        && a.role == Role::Assistant
        && b.role == Role::Assistant
    {
        let problem = "the last two messages are both the assistant's; only one can be continued";
        return Err(MessageError::new(format!("messages[{}]", parsed.len() - 1), problem));
    }
    Ok(parsed)
}

fn parse_message(value: &Value, path: &str) -> Result<Message, MessageError> {
    let object = value
        .as_object()
        .ok_or_else(|| MessageError::new(path, format!("is {}, expected an object", kind_of(value))))?;
    let role_path = format!("{path}.role");
    let role_name =
        optional_string(object, "role", path)?.ok_or_else(|| MessageError::new(&role_path, "is missing"))?;
    let role = Role::parse(&role_name).ok_or_else(|| {
        let expected = "expected system, developer, user, assistant or tool";
        MessageError::new(&role_path, format!("is '{role_name}', {expected}"))
    })?;
    let content = parse_content(object.get("content"), &format!("{path}.content"))?;
    let tool_calls = parse_tool_calls(object.get("tool_calls"), &format!("{path}.tool_calls"))?;
    if role != Role::Assistant && !tool_calls.is_empty() {
        return Err(MessageError::new(format!("{path}.tool_calls"), "only assistant messages can call tools"));
    }
    let reasoning = optional_string(object, "reasoning_content", path)?;
    if content.is_none() && (role != Role::Assistant || (tool_calls.is_empty() && reasoning.is_none())) {
        let problem = match role {
            Role::Assistant => "is missing; an assistant message needs content or tool_calls".to_owned(),
            _ => format!("is missing; a {} message needs content", role.name()),
        };
        return Err(MessageError::new(format!("{path}.content"), problem));
    }
    Ok(Message {
        role,
        content: content.unwrap_or_default(),
        reasoning,
        tool_calls,
        tool_call_id: optional_string(object, "tool_call_id", path)?,
        name: optional_string(object, "name", path)?,
    })
}

/// A string, or an array of text parts; `None` if absent or null.
fn parse_content(content: Option<&Value>, path: &str) -> Result<Option<String>, MessageError> {
    match content {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(Value::Array(parts)) => {
            let texts: Result<Vec<String>, _> =
                parts.iter().enumerate().map(|(i, part)| parse_part(part, &format!("{path}[{i}]"))).collect();
            Ok(Some(texts?.join("\n")))
        }
        Some(other) => {
            Err(MessageError::new(path, format!("is {}, expected a string or an array of parts", kind_of(other))))
        }
    }
}

fn parse_part(part: &Value, path: &str) -> Result<String, MessageError> {
    let object =
        part.as_object().ok_or_else(|| MessageError::new(path, format!("is {}, expected an object", kind_of(part))))?;
    match object.get("type").and_then(Value::as_str) {
        Some("text") => object
            .get("text")
            .and_then(Value::as_str)
            .map(str::to_owned)
            .ok_or_else(|| MessageError::new(format!("{path}.text"), "is missing or no string")),
        Some(other) => {
            let problem = format!("is '{other}', but this model takes only parts of type 'text'");
            Err(MessageError::new(format!("{path}.type"), problem))
        }
        None => Err(MessageError::new(format!("{path}.type"), "is missing or no string; expected 'text'")),
    }
}

fn parse_tool_calls(calls: Option<&Value>, path: &str) -> Result<Vec<ToolCall>, MessageError> {
    match calls {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(Value::Array(calls)) => {
            calls.iter().enumerate().map(|(i, call)| parse_tool_call(call, i, &format!("{path}[{i}]"))).collect()
        }
        Some(other) => Err(MessageError::new(path, format!("is {}, expected an array", kind_of(other)))),
    }
}

fn parse_tool_call(call: &Value, index: usize, path: &str) -> Result<ToolCall, MessageError> {
    if let Some(kind) = call.get("type").filter(|kind| kind.as_str() != Some("function")) {
        return Err(MessageError::new(format!("{path}.type"), format!("is {kind}, expected \"function\"")));
    }
    let name = call.pointer("/function/name").and_then(Value::as_str);
    let name = name.ok_or_else(|| MessageError::new(format!("{path}.function.name"), "is missing or no string"))?;
    let path = format!("{path}.function.arguments");
    let arguments = match call.pointer("/function/arguments") {
        None | Some(Value::Null) => Value::Object(Map::new()),
        Some(Value::String(text)) if text.trim().is_empty() => Value::Object(Map::new()),
        Some(Value::String(text)) => serde_json::from_str(text).map_err(|e| {
            MessageError::new(&path, format!("is not valid JSON ({e}); send an object as a JSON string"))
        })?,
        Some(other) => other.clone(),
    };
    let Value::Object(arguments) = arguments else {
        return Err(MessageError::new(path, format!("is {}, expected a JSON object", kind_of(&arguments))));
    };
    let id = call.get("id").and_then(Value::as_str).map_or_else(|| format!("call_{index}"), str::to_owned);
    Ok(ToolCall { id, name: name.to_owned(), arguments })
}

/// Gives a tool message the name of the function it answers, which some templates print.
fn with_function_name(mut message: Message, earlier: &[Message]) -> Message {
    if message.role == Role::Tool && message.name.is_none() {
        let calls = earlier.iter().rev().flat_map(|message| &message.tool_calls);
        message.name = calls
            .clone()
            .find(|call| message.tool_call_id.as_ref().is_some_and(|id| *id == call.id))
            .map(|call| call.name.clone());
    }
    message
}

fn optional_string(object: &Map<String, Value>, key: &str, path: &str) -> Result<Option<String>, MessageError> {
    match object.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(other) => {
            Err(MessageError::new(format!("{path}.{key}"), format!("is {}, expected a string", kind_of(other))))
        }
    }
}

/// What a JSON value is, for error messages.
pub(super) fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(messages: Value) -> String {
        parse_messages(&messages).unwrap_err().to_string()
    }

    #[test]
    fn content_may_be_text_parts_or_null_beside_tool_calls() {
        let messages = parse_messages(&json!([
            {"role": "developer", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": null, "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{\"x\": 1}"}}]},
            {"role": "tool", "tool_call_id": "c1", "content": "r"},
        ]))
        .unwrap();
        assert_eq!(messages[0].role, Role::System);
        assert_eq!(messages[1].content, "a\nb");
        assert_eq!(messages[2].tool_calls[0].arguments["x"], 1);
        assert_eq!(messages[3].name.as_deref(), Some("f"));
    }

    #[test]
    fn errors_name_the_field() {
        let user = json!({"role": "user", "content": "x"});
        let assistant = json!({"role": "assistant", "content": "x"});
        for (messages, expected) in [
            (json!("x"), "messages: is a string, expected an array"),
            (json!([]), "messages: is empty; send at least one message"),
            (json!([1]), "messages[0]: is a number, expected an object"),
            (json!([{"content": "x"}]), "messages[0].role: is missing"),
            (
                json!([user, {"role": "robot", "content": "x"}]),
                "messages[1].role: is 'robot', expected system, developer, user, assistant or tool",
            ),
            (json!([{"role": "user"}]), "messages[0].content: is missing; a user message needs content"),
            (
                json!([{"role": "user", "content": 3}]),
                "messages[0].content: is a number, expected a string or an array of parts",
            ),
            (
                json!([user, user, {"role": "user", "content": [{"type": "image_url"}]}]),
                "messages[2].content[0].type: is 'image_url', but this model takes only parts of type 'text'",
            ),
            (
                json!([user, {"role": "assistant"}]),
                "messages[1].content: is missing; an assistant message needs content or tool_calls",
            ),
            (
                json!([user, assistant, assistant]),
                "messages[2]: the last two messages are both the assistant's; only one can be continued",
            ),
            (
                json!([user, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}]),
                "messages[1].tool_calls[0].function.arguments: is an array, expected a JSON object",
            ),
        ] {
            assert_eq!(error(messages), expected);
        }
        let broken =
            error(json!([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{x"}}]}]));
        assert!(broken.starts_with("messages[0].tool_calls[0].function.arguments: is not valid JSON"), "{broken}");
    }
}
