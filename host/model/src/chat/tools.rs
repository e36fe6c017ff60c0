//! Tool definitions and choices of a request, and how they are told to a model whose template knows no tools.

use serde_json::{Map, Value, json};

use super::messages::{Message, MessageError, Role, kind_of};
use super::output::CallSyntax;

/// A function the model may call.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    pub name: String,
    /// JSON schema of the arguments.
    pub parameters: Value,
    /// The definition as the client sent it.
    pub definition: Value,
}

impl Tool {
    /// Whether the definition asks for arguments that are sure to fit the schema (`strict`).
    pub fn is_strict(&self) -> bool {
        self.definition.pointer("/function/strict").and_then(Value::as_bool).unwrap_or(false)
    }
}

/// Which tools the model may or must call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// No tool.
    None,
    /// The model decides.
    #[default]
    Auto,
    /// At least one call of any tool.
    Required,
    /// A call of this tool.
    Named(String),
    /// Only these tools; at least one call if `required`.
    Allowed { names: Vec<String>, required: bool },
}

impl ToolChoice {
    /// Whether the function of that name may be called.
    pub fn allows(&self, name: &str) -> bool {
        match self {
            Self::None => false,
            Self::Auto | Self::Required => true,
            Self::Named(named) => named == name,
            Self::Allowed { names, .. } => names.iter().any(|allowed| allowed == name),
        }
    }
}

/// Reads the `tools` array of a request.
///
/// # Errors
/// If a tool is no function, lacks a name, has the name of another or parameters that are no schema object.
pub fn parse_tools(tools: &Value) -> Result<Vec<Tool>, MessageError> {
    let list = match tools {
        Value::Null => return Ok(Vec::new()),
        Value::Array(list) => list,
        other => return Err(MessageError::new("tools", format!("is {}, expected an array", kind_of(other)))),
    };
    let mut parsed: Vec<Tool> = Vec::with_capacity(list.len());
    for (index, tool) in list.iter().enumerate() {
        let path = format!("tools[{index}]");
        let tool = parse_tool(tool, &path)?;
        if parsed.iter().any(|other| other.name == tool.name) {
            let problem = format!("is '{}', the name of another tool", tool.name);
            return Err(MessageError::new(format!("{path}.function.name"), problem));
        }
        parsed.push(tool);
    }
    Ok(parsed)
}

fn parse_tool(tool: &Value, path: &str) -> Result<Tool, MessageError> {
    match tool.get("type") {
        Some(Value::String(kind)) if kind == "function" => {}
        Some(kind) => {
            return Err(MessageError::new(
                format!("{path}.type"),
                format!("is {kind}, but only \"function\" tools are supported"),
            ));
        }
        None => return Err(MessageError::new(format!("{path}.type"), "is missing, expected \"function\"")),
    }
    let name = tool.pointer("/function/name").and_then(Value::as_str).filter(|name| !name.is_empty());
    let name = name.ok_or_else(|| MessageError::new(format!("{path}.function.name"), "is missing or no string"))?;
    let parameters = match tool.pointer("/function/parameters") {
        None | Some(Value::Null) => json!({"type": "object", "properties": {}}),
        Some(schema @ Value::Object(_)) => schema.clone(),
        Some(other) => {
            let problem = format!("is {}, expected a JSON schema object", kind_of(other));
            return Err(MessageError::new(format!("{path}.function.parameters"), problem));
        }
    };
    Ok(Tool { name: name.to_owned(), parameters, definition: tool.clone() })
}

/// Reads `tool_choice`: a word, `{type: function, function: {name}}` or `{type: allowed_tools, …}`.
///
/// # Errors
/// If it has another form, names a tool that isn't there, or requires a call where there are no tools.
pub fn parse_tool_choice(choice: &Value, tools: &[Tool]) -> Result<ToolChoice, MessageError> {
    let parsed = match choice {
        Value::Null => ToolChoice::Auto,
        Value::String(word) => match word.as_str() {
            "none" => ToolChoice::None,
            "auto" => ToolChoice::Auto,
            "required" => ToolChoice::Required,
            other => {
                let problem = format!("is '{other}', expected none, auto, required or an object that names a function");
                return Err(MessageError::new("tool_choice", problem));
            }
        },
        Value::Object(object) => parse_choice_object(object, tools)?,
        other => {
            let problem = format!("is {}, expected a string or an object", kind_of(other));
            return Err(MessageError::new("tool_choice", problem));
        }
    };
    if parsed == ToolChoice::Required && tools.is_empty() {
        return Err(MessageError::new("tool_choice", "is 'required', but tools is empty"));
    }
    Ok(parsed)
}

fn parse_choice_object(object: &Map<String, Value>, tools: &[Tool]) -> Result<ToolChoice, MessageError> {
    let named = |value: Option<&Value>, path: &str| {
        let name = value.and_then(Value::as_str);
        let name = name.ok_or_else(|| MessageError::new(path, "is missing or no string"))?;
        if tools.iter().any(|tool| tool.name == name) {
            Ok(name.to_owned())
        } else {
            Err(MessageError::new(path, format!("is '{name}', which is not among the tools")))
        }
    };
    match object.get("type").and_then(Value::as_str) {
        Some("function") => {
            let name = object.get("function").and_then(|function| function.get("name"));
            Ok(ToolChoice::Named(named(name, "tool_choice.function.name")?))
        }
        Some("allowed_tools") => {
            let allowed = object.get("allowed_tools");
            let list = allowed.and_then(|allowed| allowed.get("tools")).and_then(Value::as_array);
            let path = "tool_choice.allowed_tools.tools";
            let list = list.filter(|list| !list.is_empty());
            let list =
                list.ok_or_else(|| MessageError::new(path, "is missing or empty, expected an array of tools"))?;
            let names = list
                .iter()
                .enumerate()
                .map(|(i, tool)| named(tool.pointer("/function/name"), &format!("{path}[{i}].function.name")))
                .collect::<Result<_, _>>()?;
            match allowed.and_then(|allowed| allowed.get("mode")).and_then(Value::as_str) {
                Some("required") => Ok(ToolChoice::Allowed { names, required: true }),
                Some("auto") | None => Ok(ToolChoice::Allowed { names, required: false }),
                Some(other) => {
                    let problem = format!("is '{other}', expected auto or required");
                    Err(MessageError::new("tool_choice.allowed_tools.mode", problem))
                }
            }
        }
        _ => Err(MessageError::new("tool_choice.type", "is missing or unknown, expected function or allowed_tools")),
    }
}

/// Tells the tools in words, for a template that can't.
pub(super) fn tools_as_text(tools: &[Tool]) -> String {
    let lines: Vec<String> = tools.iter().map(|tool| tool.definition.to_string()).collect();
    let (call, end_call) = (CallSyntax::Hermes.openings()[0], CallSyntax::Hermes.closings()[0]);
    format!(
        "You can call functions. These are their signatures, one JSON object per line:\n<tools>\n{}\n</tools>\n\
         To call a function, answer with its name and arguments as JSON between tags, one pair of tags per call:\n\
         {call}\n{{\"name\": <function name>, \"arguments\": <arguments object>}}\n{end_call}",
        lines.join("\n")
    )
}

/// Writes the calls of an assistant message into its text.
pub(super) fn calls_as_text(message: &Message, syntax: CallSyntax) -> Message {
    let calls = (!message.tool_calls.is_empty()).then(|| syntax.calls_text(&message.tool_calls));
    let content = (!message.content.is_empty()).then(|| message.content.clone());
    let content = content.into_iter().chain(calls).collect::<Vec<_>>().join("\n");
    Message { content, tool_calls: Vec::new(), ..message.clone() }
}

/// Turns tool results into user turns; results that follow each other share one.
pub(super) fn results_as_text(messages: &[Message]) -> Vec<Message> {
    let mut out: Vec<Message> = Vec::with_capacity(messages.len());
    let mut in_results = false;
    for message in messages {
        if message.role != Role::Tool {
            in_results = false;
            out.push(message.clone());
            continue;
        }
        let text = format!("<tool_response>\n{}\n</tool_response>", message.content);
        match out.last_mut().filter(|_| in_results) {
            Some(turn) => turn.content = format!("{}\n{text}", turn.content),
            None => out.push(Message::text(Role::User, text)),
        }
        in_results = true;
    }
    out
}
