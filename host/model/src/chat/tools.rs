//! Tool definitions and choices of a request, how they are told to a model whose template knows no tools, and the grammar
//! that makes a model call them in the right form.

use serde_json::{Map, Value, json};

use super::messages::{Message, MessageError, Role, kind_of};
use super::output::{CALL, END_CALL};

/// A function the model may call.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    pub name: String,
    /// JSON schema of the arguments.
    pub parameters: Value,
    /// The definition as the client sent it.
    pub definition: Value,
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

/// What holds a generation to the form of tool calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToolConstraint {
    /// Nothing: no tool may be called.
    None,
    /// A grammar in llguidance's Lark dialect, for the whole output from its first token.
    Lark(String),
}

/// What the grammar has to fit.
#[derive(Clone, Copy)]
pub struct ConstraintOptions<'a> {
    /// Allow several calls. A choice that names one function is one call all the same.
    pub parallel: bool,
    /// A JSON schema for the answer of a model that calls nothing; free text without one.
    pub answer: Option<&'a Value>,
    /// The output may begin with `<think>…</think>`.
    pub thoughts: bool,
    /// The output begins inside a thought.
    pub in_thought: bool,
    /// Whether a marker such as `<tool_call>` is a special token of the vocabulary; it is then matched as that token and
    /// not by its bytes.
    pub is_special: &'a dyn Fn(&str) -> bool,
}

/// The constraint for a choice among tools, in the form `<tool_call>{"name": …, "arguments": …}</tool_call>`.
pub fn tool_constraint(tools: &[Tool], choice: &ToolChoice, options: ConstraintOptions) -> ToolConstraint {
    let allowed: Vec<&Tool> = match choice {
        ToolChoice::None => Vec::new(),
        ToolChoice::Auto | ToolChoice::Required => tools.iter().collect(),
        ToolChoice::Named(name) => tools.iter().filter(|tool| tool.name == *name).collect(),
        ToolChoice::Allowed { names, .. } => tools.iter().filter(|tool| names.contains(&tool.name)).collect(),
    };
    if allowed.is_empty() {
        return ToolConstraint::None;
    }
    let required =
        matches!(choice, ToolChoice::Required | ToolChoice::Named(_) | ToolChoice::Allowed { required: true, .. });
    let parallel = options.parallel && !matches!(choice, ToolChoice::Named(_));
    let options = ConstraintOptions { parallel, ..options };
    let grammar = [
        calls_rule(required, options),
        thought_rule(options),
        format!("body: SPACE json SPACE {}\n", literal(END_CALL, options)),
        format!("json: %json {}\n", calls_schema(&allowed)),
        "SPACE: /[ \\n]*/\nTEXT: /(.|\\n)*/\n".to_owned(),
    ];
    ToolConstraint::Lark(grammar.concat())
}

/// The rules that say how many calls there are, and what text is around them.
fn calls_rule(required: bool, options: ConstraintOptions) -> String {
    let open = literal(CALL, options);
    let thought = match (options.in_thought, options.thoughts) {
        (true, _) => "thought_end ",
        (_, true) => "thought? ",
        _ => "",
    };
    let calls = if options.parallel { "call (SPACE call)*" } else { "call" };
    match options.answer {
        _ if required => return format!("start: {thought}SPACE {calls}\ncall: {open} body\n"),
        Some(schema) => {
            return format!("start: {thought}SPACE ({calls} | answer)\ncall: {open} body\nanswer: %json {schema}\n");
        }
        None => {}
    }
    let free = match options.parallel {
        true => format!("start: {thought}call* rest\n"),
        false => format!("start: {thought}(call | rest)\n"),
    };
    // Free text up to the marker; the lazy lexeme ends as soon as the marker is complete.
    let call = if (options.is_special)(CALL) {
        format!("call: TEXT? {open} body\n")
    } else {
        format!("call: head body\nhead[lazy]: TEXT {open}\n")
    };
    format!("{free}rest: TEXT\n{call}")
}

fn thought_rule(options: ConstraintOptions) -> String {
    let (begin, end) = (literal("<think>", options), literal("</think>", options));
    let begin =
        if options.thoughts && !options.in_thought { format!("thought: {begin} thought_end\n") } else { String::new() };
    match (options.thoughts || options.in_thought, (options.is_special)("</think>")) {
        (false, _) => String::new(),
        (true, true) => format!("{begin}thought_end: TEXT {end} SPACE\n"),
        (true, false) => format!("{begin}thought_end: thought_text SPACE\nthought_text[lazy]: TEXT {end}\n"),
    }
}

/// A marker as a Lark string, or as the special token of that text (whose Lark form is the text itself).
fn literal(marker: &str, options: ConstraintOptions) -> String {
    if (options.is_special)(marker) { marker.to_owned() } else { Value::from(marker).to_string() }
}

/// The schema of one call of any of the tools.
fn calls_schema(tools: &[&Tool]) -> Value {
    match tools {
        [tool] => call_schema(tool, "#"),
        _ => {
            let calls = tools.iter().enumerate().map(|(i, tool)| call_schema(tool, &format!("#/anyOf/{i}"))).collect();
            json!({"anyOf": Value::Array(calls)})
        }
    }
}

fn call_schema(tool: &Tool, root: &str) -> Value {
    let mut arguments = tool.parameters.clone();
    rebase_references(&mut arguments, &format!("{root}/properties/arguments"));
    json!({
        "type": "object",
        "properties": {"name": {"const": tool.name}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": false,
    })
}

/// References inside a schema start at its root; once the schema is part of a larger one, they start at `base`.
fn rebase_references(schema: &mut Value, base: &str) {
    match schema {
        Value::Object(object) => {
            for (key, value) in object.iter_mut() {
                match value {
                    Value::String(reference) if key == "$ref" => {
                        if let Some(pointer) = reference.strip_prefix('#') {
                            *reference = format!("{base}{pointer}");
                        }
                    }
                    // Instances, not schemas.
                    _ if matches!(key.as_str(), "const" | "enum" | "default" | "examples") => {}
                    _ => rebase_references(value, base),
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(|item| rebase_references(item, base)),
        _ => {}
    }
}

/// Tells the tools in words, for a template that can't.
pub(super) fn tools_as_text(tools: &[Tool]) -> String {
    let lines: Vec<String> = tools.iter().map(|tool| tool.definition.to_string()).collect();
    format!(
        "You can call functions. These are their signatures, one JSON object per line:\n<tools>\n{}\n</tools>\n\
         To call a function, answer with its name and arguments as JSON between tags, one pair of tags per call:\n\
         {CALL}\n{{\"name\": <function name>, \"arguments\": <arguments object>}}\n{END_CALL}",
        lines.join("\n")
    )
}

/// Writes the calls of an assistant message into its text.
pub(super) fn calls_as_text(message: &Message) -> Message {
    let calls = message.tool_calls.iter().map(|call| {
        let call = json!({"name": call.name, "arguments": call.arguments});
        format!("{CALL}\n{call}\n{END_CALL}")
    });
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
