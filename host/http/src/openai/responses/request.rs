//! The body of a request.

use opencoti_model::chat::{Ending, Tool, ToolChoice};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use super::items;
use crate::body::{self, Strict, describe};
use crate::chat::Conversation;
use crate::chat::constraint::{self, Tools};
use crate::error::ApiError;
use crate::generation::{Constrained, GenerationFields, n_probs};
use crate::sampling::SamplingFields;

/// Most alternatives that `top_logprobs` may ask for.
const TOP_LOGPROBS: usize = 20;
/// The entry of `include` that asks for log-probabilities.
const INCLUDE_LOGPROBS: &str = "message.output_text.logprobs";

/// The fields of this route alone.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
pub(crate) struct ResponsesFields {
    /// Name to report.
    pub(super) model: Option<String>,
    /// A text, or an array of items: `message`, `function_call`, `function_call_output` and `reasoning`.
    input: Option<Value>,
    /// The system prompt.
    pub(super) instructions: Option<String>,
    /// Functions that the model may call: `{type: function, name, description, parameters, strict}`.
    #[schema(value_type = Option<Vec<FunctionTool>>)]
    pub(super) tools: Option<Value>,
    /// `none`, `auto`, `required`, `{type: function, name}` or `{type: allowed_tools, mode, tools}`.
    pub(super) tool_choice: Option<Value>,
    /// Allows several calls in one answer; true where absent.
    parallel_tool_calls: Option<bool>,
    /// The form of the answer.
    #[schema(value_type = Option<TextConfig>)]
    text: Option<Strict<TextConfig>>,
    /// Most tokens to generate, thoughts included.
    pub(super) max_output_tokens: Option<i64>,
    /// Whether the model thinks before it answers.
    #[schema(value_type = Option<ReasoningConfig>)]
    reasoning: Option<Strict<ReasoningConfig>>,
    /// What more the answer shows; `message.output_text.logprobs` is the entry that counts.
    include: Option<Vec<String>>,
    /// Alternatives reported with each token, 0 to 20.
    pub(super) top_logprobs: Option<i64>,
    /// Repeated in the answer.
    #[schema(value_type = Option<Object>)]
    pub(super) metadata: Option<Map<String, Value>>,
    /// Accepted; nothing is stored.
    #[expect(dead_code, reason = "only its type is checked")]
    store: Option<bool>,
    /// Must be absent: nothing is stored.
    previous_response_id: Option<String>,
    /// Must be absent: nothing is stored.
    conversation: Option<Value>,
    /// Must be absent: this server has no prompt templates.
    prompt: Option<Value>,
    /// Must be absent or false: an answer comes with its request.
    background: Option<bool>,
    /// `disabled`: a conversation that is too long is refused.
    truncation: Option<String>,
}

/// A function that the model may call.
#[derive(ToSchema)]
#[expect(dead_code, reason = "it describes what is read by hand")]
pub(crate) struct FunctionTool {
    /// `function`.
    r#type: String,
    name: String,
    description: Option<String>,
    /// JSON schema of the arguments.
    parameters: Option<Value>,
    /// The schema is enforced, whatever is said here.
    strict: Option<bool>,
}

/// `text`.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, ToSchema)]
pub(crate) struct TextConfig {
    /// The form of the answer.
    #[schema(value_type = Option<TextFormat>)]
    format: Option<Strict<TextFormat>>,
}

/// `text.format`.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, ToSchema)]
pub(crate) struct TextFormat {
    /// `text`, `json_object` or `json_schema`.
    #[serde(rename = "type")]
    kind: Option<String>,
    /// Name of the schema; means nothing here.
    name: Option<String>,
    /// The schema of `json_schema`.
    schema: Option<Value>,
}

/// `reasoning`.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, ToSchema)]
pub(crate) struct ReasoningConfig {
    /// `none` turns thinking off; any other effort is the same here.
    effort: Option<String>,
}

/// A request of `POST /v1/responses`.
#[derive(ToSchema)]
pub(crate) struct ResponsesRequest {
    #[serde(flatten)]
    pub(super) own: ResponsesFields,
    #[serde(flatten)]
    pub(super) sampling: SamplingFields,
    /// Sends events as the answer grows.
    #[serde(rename = "stream")]
    pub(super) _stream: Option<bool>,
    #[schema(ignore)]
    pub(super) generation: GenerationFields,
    #[schema(ignore)]
    pub(super) conversation: Conversation,
    #[schema(ignore)]
    pub(super) form: Option<Constrained>,
    #[schema(ignore)]
    pub(super) top_logprobs: Option<usize>,
}

impl ResponsesRequest {
    /// Reads the fields of a body and checks the conversation.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, ApiError> {
        let body = body::object(bytes)?;
        let own: ResponsesFields = body::fields(&body)?;
        own.check_stateless()?;
        // The names of other surfaces mean nothing here, where they would say something else than this one's own.
        let generation = GenerationFields {
            n_predict: own.max_output_tokens()?,
            max_tokens: None,
            max_completion_tokens: None,
            n: None,
            n_cmpl: None,
            return_progress: None,
            ..body::fields(&body)?
        };
        let mut kwargs = Map::new();
        let effort = own.reasoning.as_ref().and_then(|reasoning| reasoning.0.effort.as_deref());
        if effort == Some("none") || !generation.thinks()? {
            kwargs.insert("enable_thinking".to_owned(), false.into());
        }
        let tools = own.tools()?;
        let messages = items::messages(own.instructions.as_deref(), own.input.as_ref())?;
        let conversation = Conversation { messages, tools, ending: Ending::Generate, kwargs, field: "input" };
        let form = constraint::form(&generation, own.format()?, &conversation.tools)?;
        let top_logprobs = own.top_logprobs()?;
        let sampling = body::fields(&body)?;
        Ok(ResponsesRequest { own, sampling, _stream: None, generation, conversation, form, top_logprobs })
    }
}

impl ResponsesFields {
    /// Refuses what would need responses of the past, or ones that outlive their request.
    fn check_stateless(&self) -> Result<(), ApiError> {
        let whole = "but this server stores no responses; send the whole conversation in `input`";
        let named = [
            ("previous_response_id", self.previous_response_id.is_some(), "names a response", whole),
            ("conversation", self.conversation.is_some(), "names a conversation", whole),
            ("prompt", self.prompt.is_some(), "names a template", "but this server has none; write it into `input`"),
            ("background", self.background == Some(true), "is true", "but an answer comes only with its request"),
        ];
        if let Some((field, _, found, but)) = named.into_iter().find(|(_, given, ..)| *given) {
            return Err(ApiError::field(field, format!("{found}, {but}")));
        }
        match self.truncation.as_deref() {
            None | Some("disabled") => Ok(()),
            Some(other) => {
                let problem =
                    format!("is {other:?}, but this server drops nothing of a conversation; expected disabled");
                Err(ApiError::field("truncation", problem))
            }
        }
    }

    fn max_output_tokens(&self) -> Result<Option<i64>, ApiError> {
        match self.max_output_tokens {
            Some(n) if n < 1 => Err(ApiError::field("max_output_tokens", format!("is {n}, expected 1 or more"))),
            n => Ok(n),
        }
    }

    fn top_logprobs(&self) -> Result<Option<usize>, ApiError> {
        let included = self.include.iter().flatten().any(|name| name == INCLUDE_LOGPROBS);
        let top = n_probs("top_logprobs", self.top_logprobs, TOP_LOGPROBS)?;
        Ok((included || top > 0).then_some(top))
    }

    fn format(&self) -> Result<Option<Constrained>, ApiError> {
        let Some(Strict(format)) = self.text.as_ref().and_then(|text| text.0.format.as_ref()) else { return Ok(None) };
        match (format.kind.as_deref(), &format.schema) {
            (Some("text"), _) => Ok(None),
            (Some("json_object"), _) => Ok(Some(constraint::json_object("text.format"))),
            (Some("json_schema"), Some(schema)) => constraint::json_schema(schema, "text.format.schema").map(Some),
            (Some("json_schema"), None) => Err(ApiError::field("text.format.schema", "is missing; give a JSON schema")),
            (other, _) => {
                let found = other.map_or("missing".to_owned(), |other| format!("{other:?}"));
                let problem = format!("is {found}, expected text, json_object or json_schema");
                Err(ApiError::field("text.format.type", problem))
            }
        }
    }

    /// `text.format`, as the answer repeats it.
    pub(super) fn format_echo(&self) -> Value {
        let format = self.text.as_ref().and_then(|text| text.0.format.as_ref());
        match format.and_then(|format| Some((format.0.kind.as_deref()?, &format.0))) {
            Some(("json_schema", format)) => {
                json!({"type": "json_schema", "name": format.name, "schema": format.schema, "strict": true})
            }
            Some((kind, _)) => json!({"type": kind}),
            None => json!({"type": "text"}),
        }
    }

    /// `reasoning.effort`, as the answer repeats it.
    pub(super) fn effort(&self) -> Option<&str> {
        self.reasoning.as_ref()?.0.effort.as_deref()
    }

    fn tools(&self) -> Result<Tools, ApiError> {
        let given = match &self.tools {
            None => &[][..],
            Some(Value::Array(tools)) => tools,
            other => {
                let problem = format!("is {}, expected an array", describe(other.as_ref()));
                return Err(ApiError::field("tools", problem));
            }
        };
        let mut list: Vec<Tool> = Vec::new();
        for (index, tool) in given.iter().enumerate() {
            let tool = read_tool(tool, &format!("tools[{index}]"))?;
            if list.iter().any(|other| other.name == tool.name) {
                let problem = format!("is {:?}, the name of another tool", tool.name);
                return Err(ApiError::field(format!("tools[{index}].name"), problem));
            }
            list.push(tool);
        }
        let choice = self.tool_choice.as_ref().map_or(Ok(ToolChoice::Auto), |choice| read_choice(choice, &list))?;
        let parallel = self.parallel_tool_calls.unwrap_or(true);
        Ok(Tools { list, choice, parallel, schema_field: "parameters" })
    }
}

fn read_tool(tool: &Value, path: &str) -> Result<Tool, ApiError> {
    match tool.get("type").and_then(Value::as_str) {
        Some("function") => {}
        other => {
            let found = other.map_or_else(|| describe(tool.get("type")), |other| format!("{other:?}"));
            let problem = format!("is {found}, but only \"function\" tools are supported");
            return Err(ApiError::field(format!("{path}.type"), problem));
        }
    }
    let name = tool.get("name").and_then(Value::as_str).filter(|name| !name.is_empty());
    let name = name.ok_or_else(|| ApiError::field(format!("{path}.name"), "is missing or no string"))?;
    let parameters = match tool.get("parameters") {
        None | Some(Value::Null) => json!({"type": "object", "properties": {}}),
        Some(schema @ Value::Object(_)) => schema.clone(),
        other => {
            let problem = format!("is {}, expected a JSON schema object", describe(other));
            return Err(ApiError::field(format!("{path}.parameters"), problem));
        }
    };
    let mut function = Map::from_iter([("name".to_owned(), name.into())]);
    if let Some(description @ Value::String(_)) = tool.get("description") {
        function.insert("description".to_owned(), description.clone());
    }
    function.insert("parameters".to_owned(), parameters.clone());
    let definition = json!({"type": "function", "function": function});
    Ok(Tool { name: name.to_owned(), parameters, definition })
}

fn read_choice(choice: &Value, tools: &[Tool]) -> Result<ToolChoice, ApiError> {
    let named = |value: Option<&Value>, path: &str| {
        let name = value.and_then(Value::as_str).filter(|name| tools.iter().any(|tool| tool.name == *name));
        let found = || value.and_then(Value::as_str).map_or_else(|| describe(value), |name| format!("{name:?}"));
        let problem = || format!("is {}, expected the name of one of the tools", found());
        name.map(str::to_owned).ok_or_else(|| ApiError::field(path, problem()))
    };
    match (choice.as_str(), choice.get("type").and_then(Value::as_str)) {
        (Some("none"), _) => Ok(ToolChoice::None),
        (Some("auto"), _) => Ok(ToolChoice::Auto),
        (Some("required"), _) if tools.is_empty() => {
            Err(ApiError::field("tool_choice", "is \"required\", but tools is empty"))
        }
        (Some("required"), _) => Ok(ToolChoice::Required),
        (_, Some("function")) => Ok(ToolChoice::Named(named(choice.get("name"), "tool_choice.name")?)),
        (_, Some("allowed_tools")) => {
            let list = choice.get("tools").and_then(Value::as_array).filter(|list| !list.is_empty());
            let path = "tool_choice.tools";
            let list = list.ok_or_else(|| ApiError::field(path, "is missing or empty, expected an array of tools"))?;
            let name = |(index, tool): (usize, &Value)| named(tool.get("name"), &format!("{path}[{index}].name"));
            let names = list.iter().enumerate().map(name).collect::<Result<_, _>>()?;
            match choice.get("mode").and_then(Value::as_str) {
                Some("required") => Ok(ToolChoice::Allowed { names, required: true }),
                Some("auto") => Ok(ToolChoice::Allowed { names, required: false }),
                _ => Err(ApiError::field("tool_choice.mode", "is missing or unknown, expected auto or required")),
            }
        }
        (Some(other), _) => {
            Err(ApiError::field("tool_choice", format!("is {other:?}, expected none, auto, required or an object")))
        }
        (None, _) => {
            let problem = "is missing or unknown, expected function or allowed_tools";
            Err(ApiError::field("tool_choice.type", problem))
        }
    }
}
