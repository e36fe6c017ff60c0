//! `POST /v1/chat/completions` and `/apply-template`.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::Response;
use opencoti_engine::api::{EngineInfo, GenerateRequest};
use opencoti_model::chat::{Ending, parse_messages, parse_tool_choice, parse_tools};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

pub(crate) use super::chat_answer::ChatAnswer;
use super::chat_answer::{Context, ThoughtStyle};
use crate::answers::{InputTokens, new_id, now};
use crate::body::{self, Input, Strict};
use crate::chat::constraint::{self, CHAT_SCHEMA, ResponseFormat, Tools};
use crate::chat::{Asked, Conversation, Prepared, in_message};
use crate::config::ServerConfig;
use crate::error::ApiError;
use crate::generation::{GenerationFields, n_probs};
use crate::native::completion::Settings;
use crate::run;
use crate::sampling::SamplingFields;
use crate::state::{App, HttpId, Ready};

/// Most alternatives that OpenAI's `top_logprobs` may ask for, and what it is where a request says nothing.
const TOP_LOGPROBS: usize = 20;

/// The fields of this route alone. `messages`, `tools` and `tool_choice` are read by the chat module.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
pub(crate) struct ChatFields {
    /// The conversation. An assistant message at the end is continued.
    #[schema(value_type = Vec<ChatMessage>)]
    messages: Option<Value>,
    /// Name to report.
    model: Option<String>,
    /// Functions that the model may call.
    #[schema(value_type = Option<Vec<ToolDefinition>>)]
    tools: Option<Value>,
    /// `none`, `auto`, `required`, `{type: function, function: {name}}` or `{type: allowed_tools, …}`.
    tool_choice: Option<Value>,
    /// Allows several calls in one answer; true where absent.
    parallel_tool_calls: Option<bool>,
    /// The form of the answer.
    #[schema(value_type = Option<ResponseFormat>)]
    response_format: Option<Strict<ResponseFormat>>,
    /// Reports log-probabilities.
    logprobs: Option<bool>,
    /// Alternatives reported with each token, 0 to 20.
    top_logprobs: Option<i64>,
    /// Another way to ask for `logprobs` with so many alternatives.
    n_probs: Option<i64>,
    /// Where thoughts go: `none` leaves them in the content, `deepseek` and `auto` put them into `reasoning_content`,
    /// `deepseek-legacy` into both.
    reasoning_format: Option<String>,
    /// More variables for the template.
    chat_template_kwargs: Option<Map<String, Value>>,
    /// Ends the prompt with the beginning of an answer.
    add_generation_prompt: Option<bool>,
    /// Continues the last message, which must be the assistant's.
    continue_final_message: Option<bool>,
}

/// A message of a conversation.
#[derive(ToSchema)]
#[expect(dead_code, reason = "it describes what the chat module reads")]
pub(crate) struct ChatMessage {
    /// `system`, `developer`, `user`, `assistant` or `tool`.
    role: String,
    /// A text, or an array of parts `{type: text, text}`.
    content: Option<Value>,
    /// The thought before the content, of an assistant message.
    reasoning_content: Option<String>,
    /// Calls of an assistant message: `{id, type: function, function: {name, arguments}}`.
    tool_calls: Option<Vec<Value>>,
    /// Which call a tool message answers.
    tool_call_id: Option<String>,
    /// Name of the speaker or function.
    name: Option<String>,
}

/// A function that the model may call.
#[derive(ToSchema)]
#[expect(dead_code, reason = "it describes what the chat module reads")]
pub(crate) struct ToolDefinition {
    /// `function`.
    r#type: String,
    /// `{name, description, parameters}`, where `parameters` is a JSON schema.
    function: Value,
}

/// A request of `POST /v1/chat/completions`.
#[derive(ToSchema)]
pub(crate) struct ChatRequest {
    #[serde(flatten)]
    own: ChatFields,
    #[serde(flatten)]
    generation: GenerationFields,
    #[serde(flatten)]
    sampling: SamplingFields,
    #[schema(ignore)]
    conversation: Conversation,
    #[schema(ignore)]
    thought_style: ThoughtStyle,
}

impl ChatRequest {
    /// Reads the fields of a body and checks the conversation.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, ApiError> {
        let body = body::object(bytes)?;
        let own: ChatFields = body::fields(&body)?;
        let generation: GenerationFields = body::fields(&body)?;
        let conversation = own.conversation(generation.thinks()?)?;
        let thought_style = ThoughtStyle::parse(own.reasoning_format.as_deref())?;
        Ok(ChatRequest { own, generation, sampling: body::fields(&body)?, conversation, thought_style })
    }
}

impl ChatFields {
    fn conversation(&self, thinks: bool) -> Result<Conversation, ApiError> {
        let messages =
            self.messages.as_ref().ok_or_else(|| ApiError::field("messages", "is missing; send an array"))?;
        let messages = parse_messages(messages).map_err(in_message)?;
        let list = parse_tools(self.tools.as_ref().unwrap_or(&Value::Null)).map_err(in_message)?;
        let choice = parse_tool_choice(self.tool_choice.as_ref().unwrap_or(&Value::Null), &list).map_err(in_message)?;
        let parallel = self.parallel_tool_calls.unwrap_or(true);
        let tools = Tools { list, choice, parallel, schema_field: CHAT_SCHEMA };
        let ending = Ending::choose(&messages, self.add_generation_prompt, self.continue_final_message);
        let mut kwargs = self.chat_template_kwargs.clone().unwrap_or_default();
        if let Some(other) = kwargs.get("enable_thinking").filter(|value| !value.is_boolean()) {
            let problem = format!("is {}, expected true or false", body::describe(Some(other)));
            return Err(ApiError::field("chat_template_kwargs.enable_thinking", problem));
        }
        if !thinks {
            kwargs.insert("enable_thinking".to_owned(), false.into());
        }
        let ending = ending.map_err(in_message)?;
        Ok(Conversation { messages, tools, ending, kwargs, field: "messages" })
    }

    /// How many alternatives are reported with each token; `None` without log-probabilities.
    fn top_logprobs(&self, n_vocab: usize) -> Result<Option<usize>, ApiError> {
        let wanted = self.logprobs.unwrap_or(false);
        if !wanted && self.top_logprobs.is_some_and(|top| top != 0) {
            return Err(ApiError::field("top_logprobs", "needs `logprobs` to be true"));
        }
        if wanted {
            let top = self.top_logprobs.map(|_| n_probs("top_logprobs", self.top_logprobs, TOP_LOGPROBS));
            return top.unwrap_or(Ok(TOP_LOGPROBS)).map(Some);
        }
        let top = n_probs("n_probs", self.n_probs, n_vocab)?;
        Ok(Some(top).filter(|&top| top > 0))
    }
}

fn prepare(
    info: &Arc<EngineInfo>,
    config: &ServerConfig,
    bytes: &[u8],
) -> Result<(Vec<GenerateRequest>, Context), ApiError> {
    let ChatRequest { own, generation, sampling, conversation, thought_style } = ChatRequest::parse(bytes)?;
    let format = own.response_format.as_ref().map(|format| format.0.constraint()).transpose()?.flatten();
    let top_logprobs = own.top_logprobs(info.tokenizer.n_vocab())?;
    let asked = Asked {
        generation: &generation,
        sampling: &sampling,
        form: constraint::form(&generation, format, &conversation.tools)?,
        top_logprobs,
        separates_thoughts: thought_style != ThoughtStyle::Content,
    };
    let Prepared { request, output, prompt } = conversation.prepare(info, config, asked)?;
    let verbose = generation.verbose.unwrap_or(false);
    let context = Context {
        id: new_id("chatcmpl-"),
        created: now(),
        model: own.model.unwrap_or_else(|| info.model_alias.clone()),
        build: config.build.clone(),
        output,
        thought_style,
        top_logprobs,
        include_usage: generation.includes_usage(),
        timings_per_token: generation.timings_per_token.unwrap_or(false),
        verbose: verbose.then(|| (prompt, Settings::new(info, &generation, &request))),
        delivery: generation.delivery(config),
    };
    Ok((vec![request], context))
}

/// Handler of `POST /v1/chat/completions`.
pub(crate) async fn chat(State(app): State<App>, ready: Ready, id: HttpId, input: Input) -> Result<Response, ApiError> {
    run::serve(&app, &ready, &id, input, prepare).await
}

/// Handler of `POST /v1/chat/completions/input_tokens`.
pub(crate) async fn input_tokens(ready: Ready, input: Input) -> Result<Json<InputTokens>, ApiError> {
    let info = Arc::clone(ready.engine.info());
    let count = move |bytes: &[u8]| ChatRequest::parse(bytes)?.conversation.count_tokens(&info);
    Ok(Json(InputTokens::new(input.compute(count).await?)))
}

/// The answer of `POST /apply-template`.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct TemplateAnswer {
    prompt: String,
}

/// Handler of `POST /apply-template`.
pub(crate) async fn apply_template(ready: Ready, input: Input) -> Result<Json<TemplateAnswer>, ApiError> {
    let info = Arc::clone(ready.engine.info());
    let render = move |bytes: &[u8]| ChatRequest::parse(bytes)?.conversation.render(&info);
    let rendered = input.compute(render).await?;
    Ok(Json(TemplateAnswer { prompt: rendered.prompt }))
}
