//! The body of a request: blocks of typed content become messages.

use opencoti_model::chat::{Ending, Message, Role, Tool, ToolCall, ToolChoice};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use crate::body::{self, Strict, describe, object_at, string_at};
use crate::chat::Conversation;
use crate::chat::constraint::{self, Tools};
use crate::chat::turns::{Rules, Turns};
use crate::error::ApiError;
use crate::fields::Texts;
use crate::generation::{Constrained, GenerationFields};
use crate::sampling::SamplingFields;

const RULES: Rules = Rules { result: "a tool_result block", id: "tool_use_id", joins_user: true };

/// First words of a line that some clients put before the system text and change with every request.
const BILLING_LINE: &str = "x-anthropic-billing-header:";

/// The fields of these routes alone.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
pub(crate) struct MessagesFields {
    /// Name to report.
    pub(crate) model: Option<String>,
    /// The conversation. An assistant message at the end is continued.
    #[schema(value_type = Vec<InputMessage>)]
    messages: Option<Value>,
    /// The system prompt: a text or an array of text blocks.
    system: Option<Value>,
    /// Most tokens to generate; 0 only fills the cache.
    #[schema(required, minimum = 0)]
    max_tokens: Option<i64>,
    /// Texts that end the answer and are not part of it.
    stop_sequences: Option<Vec<String>>,
    /// Tools that the model may call.
    #[schema(value_type = Option<Vec<InputTool>>)]
    tools: Option<Vec<Strict<InputTool>>>,
    /// How they may be called.
    #[schema(value_type = Option<InputToolChoice>)]
    tool_choice: Option<Strict<InputToolChoice>>,
    /// Whether the model thinks before it answers.
    #[schema(value_type = Option<Thinking>)]
    thinking: Option<Strict<Thinking>>,
    /// The form of the answer.
    #[schema(value_type = Option<OutputConfig>)]
    output_config: Option<Strict<OutputConfig>>,
    /// Accepted; nothing depends on it.
    #[schema(value_type = Option<Object>)]
    #[expect(dead_code, reason = "only its type is checked")]
    metadata: Option<Map<String, Value>>,
    /// Must be absent or empty: this server reaches no MCP server.
    #[schema(value_type = Option<Vec<Object>>)]
    mcp_servers: Option<Vec<Value>>,
    /// Must be absent: this server has no containers.
    #[schema(value_type = Option<Object>)]
    container: Option<Value>,
}

/// A message of a conversation.
#[derive(ToSchema)]
#[expect(dead_code, reason = "it describes what is read by hand")]
pub(crate) struct InputMessage {
    /// `user`, `assistant` or `system`.
    role: String,
    /// A text, or an array of blocks: `text`, `thinking`, `tool_use` and `tool_result`.
    content: Value,
}

/// A tool that the model may call.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, ToSchema)]
pub(crate) struct InputTool {
    /// `custom`, or absent.
    #[serde(rename = "type")]
    kind: Option<String>,
    name: Option<String>,
    description: Option<String>,
    /// JSON schema of the input.
    #[schema(value_type = Object)]
    input_schema: Option<Value>,
}

/// `tool_choice`.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, ToSchema)]
pub(crate) struct InputToolChoice {
    /// `auto`, `any`, `tool` or `none`.
    #[serde(rename = "type")]
    kind: Option<String>,
    /// The tool of `tool`.
    name: Option<String>,
    /// At most one call in an answer.
    disable_parallel_tool_use: Option<bool>,
}

/// `thinking`.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, ToSchema)]
pub(crate) struct Thinking {
    /// `enabled`, `adaptive` or `disabled`.
    #[serde(rename = "type")]
    kind: Option<String>,
    /// What the client means to spend on thoughts. Only `max_tokens` bounds them.
    budget_tokens: Option<i64>,
    /// `omitted` leaves the thoughts out of the answer; they are never summarised.
    display: Option<String>,
}

/// `output_config`.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, ToSchema)]
pub(crate) struct OutputConfig {
    /// The form of the answer.
    #[schema(value_type = Option<OutputForm>)]
    format: Option<Strict<OutputForm>>,
}

/// `output_config.format`.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, ToSchema)]
pub(crate) struct OutputForm {
    /// `json_schema`.
    #[serde(rename = "type")]
    kind: Option<String>,
    /// The schema.
    schema: Option<Value>,
}

/// A request of `POST /v1/messages`.
#[derive(ToSchema)]
pub(crate) struct MessagesRequest {
    #[serde(flatten)]
    pub(crate) own: MessagesFields,
    #[serde(flatten)]
    pub(crate) sampling: SamplingFields,
    /// Sends events as the answer grows.
    #[serde(rename = "stream")]
    pub(crate) _stream: Option<bool>,
    #[schema(ignore)]
    pub(crate) generation: GenerationFields,
    #[schema(ignore)]
    pub(crate) conversation: Conversation,
    #[schema(ignore)]
    pub(crate) form: Option<Constrained>,
    #[schema(ignore)]
    pub(crate) omits_thoughts: bool,
}

impl MessagesRequest {
    /// Reads the fields of a body and checks the conversation.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, ApiError> {
        let request = Self::parse_prompt(bytes)?;
        match request.own.max_tokens {
            None => Err(ApiError::field("max_tokens", "is missing; say how many tokens may be generated")),
            Some(n) if n < 0 => Err(ApiError::field("max_tokens", format!("is {n}, expected 0 or more"))),
            Some(n)
                if request.own.thinking.as_ref().and_then(|t| t.0.budget_tokens).is_some_and(|budget| budget >= n) =>
            {
                Err(ApiError::field("thinking.budget_tokens", format!("is not less than max_tokens, which is {n}")))
            }
            Some(_) => Ok(request),
        }
    }

    /// Reads a body of which only the prompt counts.
    pub(crate) fn parse_prompt(bytes: &[u8]) -> Result<Self, ApiError> {
        let body = body::object(bytes)?;
        let own: MessagesFields = body::fields(&body)?;
        own.check_absent()?;
        // The names of other surfaces mean nothing here, where they would say something else than this one's own.
        let generation = GenerationFields {
            n_predict: own.max_tokens,
            stop: own.stop_sequences.clone().map(Texts::Many),
            n: None,
            n_cmpl: None,
            return_progress: None,
            reasoning_budget_tokens: None,
            thinking_budget_tokens: None,
            ..body::fields(&body)?
        };
        let tools = own.tools()?;
        let (kwargs, omits_thoughts) = own.thinking()?;
        let messages = own.messages()?;
        let ending = match messages.last() {
            Some(last) if last.role == Role::Assistant => Ending::Continue,
            _ => Ending::Generate,
        };
        let format = own.format()?;
        let form = constraint::form(&generation, format, &tools)?;
        let conversation = Conversation { messages, tools, ending, kwargs, field: "messages" };
        let sampling = body::fields(&body)?;
        Ok(MessagesRequest { own, sampling, _stream: None, generation, conversation, form, omits_thoughts })
    }
}

impl MessagesFields {
    fn check_absent(&self) -> Result<(), ApiError> {
        if self.mcp_servers.as_ref().is_some_and(|servers| !servers.is_empty()) {
            return Err(ApiError::field("mcp_servers", "names a server, but this one reaches none; leave it empty"));
        }
        if self.container.is_some() {
            return Err(ApiError::field("container", "is given, but this server has no containers; leave it out"));
        }
        Ok(())
    }

    fn messages(&self) -> Result<Vec<Message>, ApiError> {
        let list = self.messages.as_ref().and_then(Value::as_array).filter(|list| !list.is_empty());
        let list = list.ok_or_else(|| {
            let found = match &self.messages {
                Some(Value::Array(_)) => "an empty array".to_owned(),
                other => describe(other.as_ref()),
            };
            ApiError::field("messages", format!("is {found}, expected an array of at least one message"))
        })?;
        let mut turns = Turns::new(RULES);
        if let Some(system) = &self.system {
            add_system(&mut turns, system, "system")?;
        }
        for (index, message) in list.iter().enumerate() {
            add_message(&mut turns, message, &format!("messages[{index}]"))?;
        }
        turns.finish()
    }

    fn tools(&self) -> Result<Tools, ApiError> {
        let mut list: Vec<Tool> = Vec::new();
        for (index, tool) in self.tools.iter().flatten().enumerate() {
            let tool = tool.0.read(&format!("tools[{index}]"))?;
            if list.iter().any(|other| other.name == tool.name) {
                let problem = format!("is {:?}, the name of another tool", tool.name);
                return Err(ApiError::field(format!("tools[{index}].name"), problem));
            }
            list.push(tool);
        }
        let choice = self.tool_choice.as_ref().map(|choice| &choice.0);
        let parallel = !choice.and_then(|choice| choice.disable_parallel_tool_use).unwrap_or(false);
        let choice = choice.map_or(Ok(ToolChoice::Auto), |choice| choice.read(&list))?;
        Ok(Tools { list, choice, parallel, schema_field: "input_schema" })
    }

    /// The template's variables, and whether thoughts are left out of the answer.
    fn thinking(&self) -> Result<(Map<String, Value>, bool), ApiError> {
        let mut kwargs = Map::new();
        let Some(Strict(thinking)) = &self.thinking else { return Ok((kwargs, false)) };
        let thinks = match (thinking.kind.as_deref(), thinking.budget_tokens) {
            (Some("disabled"), _) => false,
            (Some("adaptive"), _) => true,
            (Some("enabled"), Some(1..)) => true,
            (Some("enabled"), Some(budget)) => {
                return Err(ApiError::field("thinking.budget_tokens", format!("is {budget}, expected 1 or more")));
            }
            (Some("enabled"), None) => {
                return Err(ApiError::field("thinking.budget_tokens", "is missing; thinking that is enabled needs it"));
            }
            (Some(other), _) => {
                let problem = format!("is {other:?}, expected enabled, adaptive or disabled");
                return Err(ApiError::field("thinking.type", problem));
            }
            (None, _) => return Err(ApiError::field("thinking.type", "is missing; expected enabled or disabled")),
        };
        kwargs.insert("enable_thinking".to_owned(), thinks.into());
        match thinking.display.as_deref() {
            None | Some("summarized") => Ok((kwargs, false)),
            Some("omitted") => Ok((kwargs, true)),
            Some(other) => {
                Err(ApiError::field("thinking.display", format!("is {other:?}, expected summarized or omitted")))
            }
        }
    }

    fn format(&self) -> Result<Option<Constrained>, ApiError> {
        let Some(Strict(format)) = self.output_config.as_ref().and_then(|config| config.0.format.as_ref()) else {
            return Ok(None);
        };
        let path = "output_config.format";
        match (format.kind.as_deref(), &format.schema) {
            (Some("json_schema"), Some(schema)) => constraint::json_schema(schema, &format!("{path}.schema")).map(Some),
            (Some("json_schema"), None) => {
                Err(ApiError::field(format!("{path}.schema"), "is missing; give a JSON schema"))
            }
            (other, _) => {
                let problem = format!("is {}, expected json_schema", other.unwrap_or("missing"));
                Err(ApiError::field(format!("{path}.type"), problem))
            }
        }
    }
}

impl InputTool {
    fn read(&self, path: &str) -> Result<Tool, ApiError> {
        if let Some(kind) = self.kind.as_deref().filter(|kind| *kind != "custom") {
            let problem = format!("is {kind:?}, but this server runs no tools of its own; define a custom tool");
            return Err(ApiError::field(format!("{path}.type"), problem));
        }
        let name = self.name.as_ref().filter(|name| !name.is_empty());
        let name = name.ok_or_else(|| ApiError::field(format!("{path}.name"), "is missing or empty"))?;
        let Some(parameters @ Value::Object(_)) = &self.input_schema else {
            let problem = format!("is {}, expected a JSON schema object", describe(self.input_schema.as_ref()));
            return Err(ApiError::field(format!("{path}.input_schema"), problem));
        };
        let mut function = json!({"name": name, "description": self.description, "parameters": parameters});
        if self.description.is_none() {
            function.as_object_mut().map(|function| function.shift_remove("description"));
        }
        let definition = json!({"type": "function", "function": function});
        Ok(Tool { name: name.clone(), parameters: parameters.clone(), definition })
    }
}

impl InputToolChoice {
    fn read(&self, tools: &[Tool]) -> Result<ToolChoice, ApiError> {
        match (self.kind.as_deref(), &self.name) {
            (Some("none"), _) => Ok(ToolChoice::None),
            (Some("auto"), _) => Ok(ToolChoice::Auto),
            (Some("any"), _) if tools.is_empty() => {
                Err(ApiError::field("tool_choice.type", "is \"any\", but tools is empty"))
            }
            (Some("any"), _) => Ok(ToolChoice::Required),
            (Some("tool"), Some(name)) if tools.iter().any(|tool| tool.name == *name) => {
                Ok(ToolChoice::Named(name.clone()))
            }
            (Some("tool"), name) => {
                let found = name.as_ref().map_or("missing".to_owned(), |name| format!("{name:?}"));
                Err(ApiError::field("tool_choice.name", format!("is {found}, expected the name of one of the tools")))
            }
            (other, _) => {
                let problem = format!("is {}, expected auto, any, tool or none", other.unwrap_or("missing"));
                Err(ApiError::field("tool_choice.type", problem))
            }
        }
    }
}

/// Text without the line that changes with every request, which would keep any prefix from being found again.
fn without_billing_line(text: &str) -> &str {
    match text.strip_prefix(BILLING_LINE) {
        Some(rest) => rest.split_once('\n').map_or("", |(_, rest)| rest),
        None => text,
    }
}

fn add_system(turns: &mut Turns, content: &Value, path: &str) -> Result<(), ApiError> {
    let texts = texts(content, path)?;
    let texts: Vec<&str> = texts.into_iter().map(without_billing_line).filter(|text| !text.is_empty()).collect();
    if !texts.is_empty() {
        turns.system(&texts.join("\n"));
    }
    Ok(())
}

fn add_message(turns: &mut Turns, message: &Value, path: &str) -> Result<(), ApiError> {
    let object = object_at(message, path)?;
    let content_path = format!("{path}.content");
    let content = object.get("content").ok_or_else(|| ApiError::field(&content_path, "is missing"))?;
    match object.get("role").and_then(Value::as_str) {
        Some("user") => add_user(turns, content, &content_path),
        Some("assistant") => add_assistant(turns, content, &content_path),
        Some("system") => add_system(turns, content, &content_path),
        Some(other) => {
            Err(ApiError::field(format!("{path}.role"), format!("is {other:?}, expected user, assistant or system")))
        }
        None => {
            let problem = format!("is {}, expected user, assistant or system", describe(object.get("role")));
            Err(ApiError::field(format!("{path}.role"), problem))
        }
    }
}

/// Results come before the texts, whatever their order: they belong to the calls before this message.
fn add_user(turns: &mut Turns, content: &Value, path: &str) -> Result<(), ApiError> {
    let Some(blocks) = blocks(content, path)? else {
        turns.user(content.as_str().unwrap_or_default());
        return Ok(());
    };
    let mut texts = Vec::new();
    for Block { path, kind, object } in blocks {
        match kind {
            "text" => texts.push(string_at(object, "text", &path)?),
            "tool_result" => {
                let id = string_at(object, "tool_use_id", &path)?;
                turns.result(&format!("{path}.tool_use_id"), id, &result_text(object, &path)?)?;
            }
            other => return Err(unknown_block(&path, other, "text and tool_result")),
        }
    }
    texts.into_iter().for_each(|text| turns.user(text));
    Ok(())
}

fn add_assistant(turns: &mut Turns, content: &Value, path: &str) -> Result<(), ApiError> {
    let Some(blocks) = blocks(content, path)? else {
        return turns.assistant(content.as_str().unwrap_or_default());
    };
    for Block { path, kind, object } in blocks {
        match kind {
            "text" => turns.assistant(string_at(object, "text", &path)?)?,
            "thinking" => turns.thought(string_at(object, "thinking", &path)?)?,
            // What another server encrypted can't be read here.
            "redacted_thinking" => {}
            "tool_use" => {
                let call = ToolCall {
                    id: string_at(object, "id", &path)?.to_owned(),
                    name: string_at(object, "name", &path)?.to_owned(),
                    arguments: input(object, &path)?,
                };
                turns.call(path, call)?;
            }
            other => return Err(unknown_block(&path, other, "text, thinking and tool_use")),
        }
    }
    Ok(())
}

/// The text of a result; a failure is said in words, for templates have no other form for it.
fn result_text(object: &Map<String, Value>, path: &str) -> Result<String, ApiError> {
    let content = object.get("content").filter(|content| !content.is_null());
    let texts = content.map_or(Ok(Vec::new()), |content| texts(content, &format!("{path}.content")))?;
    let text = texts.join("\n");
    match object.get("is_error") {
        None | Some(Value::Null | Value::Bool(false)) => Ok(text),
        Some(Value::Bool(true)) => Ok(format!("Error: {text}")),
        Some(other) => {
            let problem = format!("is {}, expected true or false", describe(Some(other)));
            Err(ApiError::field(format!("{path}.is_error"), problem))
        }
    }
}

fn input(object: &Map<String, Value>, path: &str) -> Result<Map<String, Value>, ApiError> {
    match object.get("input") {
        Some(Value::Object(input)) => Ok(input.clone()),
        other => Err(ApiError::field(format!("{path}.input"), format!("is {}, expected an object", describe(other)))),
    }
}

/// The texts of a content in which only texts may be.
fn texts<'a>(content: &'a Value, path: &str) -> Result<Vec<&'a str>, ApiError> {
    let Some(blocks) = blocks(content, path)? else {
        return Ok(content.as_str().into_iter().collect());
    };
    let text = |Block { path, kind, object }: Block<'a>| match kind {
        "text" => string_at(object, "text", &path),
        other => Err(unknown_block(&path, other, "text")),
    };
    blocks.into_iter().map(text).collect()
}

/// A block of content with its place.
struct Block<'a> {
    path: String,
    kind: &'a str,
    object: &'a Map<String, Value>,
}

/// The blocks of a content; `None` if it is a plain text.
fn blocks<'a>(content: &'a Value, path: &str) -> Result<Option<Vec<Block<'a>>>, ApiError> {
    let list = match content {
        Value::String(_) => return Ok(None),
        Value::Array(list) => list,
        other => {
            let problem = format!("is {}, expected a string or an array of blocks", describe(Some(other)));
            return Err(ApiError::field(path, problem));
        }
    };
    let block = |(index, block): (usize, &'a Value)| {
        let path = format!("{path}[{index}]");
        let object = object_at(block, &path)?;
        let kind = string_at(object, "type", &path)?;
        Ok(Block { path, kind, object })
    };
    list.iter().enumerate().map(block).collect::<Result<_, _>>().map(Some)
}

fn unknown_block(path: &str, kind: &str, expected: &str) -> ApiError {
    let problem = format!("is {kind:?}, but here this model takes only blocks of type {expected}");
    ApiError::field(format!("{path}.type"), problem)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn conversation(messages: Value) -> Result<Vec<Message>, ApiError> {
        let body = json!({"max_tokens": 1, "messages": messages}).to_string();
        MessagesRequest::parse(body.as_bytes()).map(|request| request.conversation.messages)
    }

    #[test]
    fn results_stand_before_the_texts_of_their_message_and_failures_say_so() {
        let call = json!({"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}});
        let result = json!({"type": "tool_result", "tool_use_id": "t1", "is_error": true,
            "content": [{"type": "text", "text": "no"}, {"type": "text", "text": "way"}]});
        let messages = conversation(json!([
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "s"}, call]},
            {"role": "user", "content": [{"type": "text", "text": "and?"}, result]},
        ]))
        .unwrap();
        let shown: Vec<_> = messages.iter().map(|m| (m.role, m.content.as_str())).collect();
        assert_eq!(
            shown,
            [(Role::User, "go"), (Role::Assistant, ""), (Role::Tool, "Error: no\nway"), (Role::User, "and?")]
        );
        assert_eq!(messages[1].reasoning.as_deref(), Some("hm"));
        assert_eq!(messages[1].tool_calls[0].arguments["x"], 1);
    }

    #[test]
    fn a_line_that_changes_with_every_request_is_no_part_of_the_prompt() {
        let prompt = |code: &str| {
            let system = json!([
                {"type": "text", "text": format!("{BILLING_LINE} cc_version=1; cch={code};")},
                {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]);
            let body = json!({"max_tokens": 1, "system": system, "messages": [{"role": "user", "content": "x"}]});
            let request = MessagesRequest::parse(body.to_string().as_bytes()).unwrap();
            request.conversation.messages[0].content.clone()
        };
        assert_eq!((prompt("a1b2c"), prompt("ffff0")), ("Be brief.".to_owned(), "Be brief.".to_owned()));
        assert_eq!(without_billing_line("x-anthropic-billing-header: a\nb\nc"), "b\nc");
    }
}
