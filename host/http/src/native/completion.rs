//! `POST /completion`: native completion.

use std::collections::VecDeque;
use std::sync::Arc;

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use opencoti_engine::api::{Constraint, EngineInfo, Event, Finish, GenerateRequest, StopReason, Timings};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::answers::{Probabilities, ProgressBody, TimingsBody, probabilities};
use crate::body::{self, Input};
use crate::config::ServerConfig;
use crate::error::ApiError;
use crate::fields::Prompts;
use crate::generation::{GenerationFields, n_probs};
use crate::run::{self, Collected, Delivery, Frames, Surface};
use crate::sampling::{SamplingFields, SamplingSettings};
use crate::sse;
use crate::state::{App, HttpId, Ready};
use crate::text;

/// The fields of this route alone.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
pub(crate) struct CompletionFields {
    /// What to continue.
    pub(crate) prompt: Option<Prompts>,
    /// How many alternatives are reported with each token.
    pub(crate) n_probs: Option<i64>,
    /// Second name of `n_probs`.
    pub(crate) logprobs: Option<i64>,
    /// Fields to return; `a/b` moves `b` to the root.
    pub(crate) response_fields: Option<Vec<String>>,
    /// Name to report as `model`.
    pub(crate) model: Option<String>,
}

/// A request of `POST /completion`.
#[derive(Clone, Debug, ToSchema)]
pub(crate) struct CompletionRequest {
    #[serde(flatten)]
    pub(crate) own: CompletionFields,
    #[serde(flatten)]
    pub(crate) generation: GenerationFields,
    #[serde(flatten)]
    pub(crate) sampling: SamplingFields,
}

impl CompletionRequest {
    /// Reads the fields of a body. `prompt` is required.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, ApiError> {
        let body = body::object(bytes)?;
        let request = CompletionRequest {
            own: body::fields(&body)?,
            generation: body::fields(&body)?,
            sampling: body::fields(&body)?,
        };
        if request.own.prompt.is_none() {
            return Err(ApiError::field("prompt", "is missing; give a text, tokens, or an array of them"));
        }
        Ok(request)
    }
}

/// What the answers repeat of the request.
struct Context {
    model: String,
    n: usize,
    after_chain: bool,
    return_tokens: bool,
    timings_per_token: bool,
    response_fields: Vec<String>,
    /// Per prompt: its text and number of tokens.
    prompts: Vec<(String, u32)>,
    settings: Settings,
    delivery: Delivery,
}

/// `generation_settings`.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Settings {
    n_predict: i64,
    max_tokens: i64,
    n_keep: i64,
    n_discard: i64,
    n_indent: u32,
    t_max_predict_ms: i64,
    stop: Vec<String>,
    stream: bool,
    grammar: String,
    json_schema: Option<Value>,
    cache_prompt: bool,
    timings_per_token: bool,
    /// Empty: no adapter is loaded.
    lora: Vec<Value>,
    #[serde(rename = "speculative.types")]
    speculative_types: &'static str,
    #[serde(flatten)]
    sampling: SamplingSettings,
}

impl Settings {
    /// What is in effect for a request.
    pub(crate) fn new(info: &EngineInfo, fields: &GenerationFields, request: &GenerateRequest) -> Self {
        let n_predict = request.n_predict.map_or(-1, i64::from);
        let (grammar, json_schema) = match &request.constraint {
            Some(Constraint::Gbnf(text) | Constraint::Lark(text)) => (text.clone(), None),
            Some(Constraint::JsonSchema(schema)) => (String::new(), Some(schema.clone())),
            Some(Constraint::JsonObject) => (String::new(), Some(serde_json::json!({"type": "object"}))),
            None => (String::new(), None),
        };
        Settings {
            n_predict,
            max_tokens: n_predict,
            n_keep: fields.n_keep.unwrap_or(0),
            n_discard: fields.n_discard.unwrap_or(0),
            n_indent: request.n_indent,
            t_max_predict_ms: fields.t_max_predict_ms.unwrap_or(-1),
            stop: request.stop.clone(),
            stream: fields.is_streamed(),
            grammar,
            json_schema,
            cache_prompt: request.cache_prompt,
            timings_per_token: fields.timings_per_token.unwrap_or(false),
            lora: Vec::new(),
            speculative_types: "none",
            sampling: SamplingSettings::new(info, &request.sampling),
        }
    }
}

/// Prepares the generations of a body.
fn prepare(
    info: &Arc<EngineInfo>,
    config: &ServerConfig,
    bytes: &[u8],
) -> Result<(Vec<GenerateRequest>, Context), ApiError> {
    let CompletionRequest { own, generation, sampling } = CompletionRequest::parse(bytes)?;
    let n_vocab = info.tokenizer.n_vocab();
    let n_probs = match own.n_probs {
        Some(_) => n_probs("n_probs", own.n_probs, n_vocab)?,
        None => n_probs("logprobs", own.logprobs, n_vocab)?,
    };
    generation.thinks()?;
    let constrained = generation.grammar().or_else(|| generation.schema());
    let template = generation.request(info, config, &sampling, n_probs, constrained)?;
    let prompts = own.prompt.unwrap_or(Prompts(Vec::new()));
    let encoded = text::encode_prompts(info, &prompts, config.max_prompts, "prompt")?;
    let context = Context {
        model: own.model.unwrap_or_else(|| info.model_alias.clone()),
        n: template.n_choices as usize,
        after_chain: template.sampling.post_sampling_probs,
        return_tokens: generation.return_tokens.unwrap_or(false),
        timings_per_token: generation.timings_per_token.unwrap_or(false),
        response_fields: own.response_fields.unwrap_or_default(),
        prompts: encoded.iter().map(|tokens| (shown(info, tokens), tokens.len() as u32)).collect(),
        settings: Settings::new(info, &generation, &template),
        delivery: generation.delivery(config),
    };
    let requests = encoded.into_iter().map(|prompt| GenerateRequest { prompt, ..template.clone() }).collect();
    Ok((requests, context))
}

/// The prompt as the model sees it, special tokens spelled out.
fn shown(info: &EngineInfo, tokens: &[u32]) -> String {
    String::from_utf8_lossy(&info.tokenizer.decode(tokens, true)).into_owned()
}

/// Handler of the route.
pub(crate) async fn completion(
    State(app): State<App>,
    ready: Ready,
    id: HttpId,
    input: Input,
) -> Result<Response, ApiError> {
    run::serve(&app, &ready, &id, input, prepare).await
}

/// The answer, and the last event of a stream.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct CompletionAnswer {
    index: usize,
    content: String,
    tokens: Vec<u32>,
    id_slot: i64,
    stop: bool,
    model: String,
    tokens_predicted: u32,
    tokens_evaluated: u32,
    generation_settings: Settings,
    prompt: String,
    has_new_line: bool,
    truncated: bool,
    stop_type: &'static str,
    stopping_word: String,
    tokens_cached: u32,
    timings: TimingsBody,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    completion_probabilities: Vec<Probabilities>,
}

/// An event of a stream before the last.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct CompletionChunk {
    index: usize,
    content: String,
    tokens: Vec<u32>,
    stop: bool,
    id_slot: i64,
    tokens_predicted: u32,
    tokens_evaluated: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    timings: Option<TimingsBody>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_progress: Option<ProgressBody>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    completion_probabilities: Vec<Probabilities>,
}

impl Context {
    fn prompt(&self, index: usize) -> (String, u32) {
        self.prompts.get(index / self.n.max(1)).cloned().unwrap_or_default()
    }

    fn one(&self, index: usize, choice: &Collected) -> Result<Value, ApiError> {
        let Some(finish) = &choice.finish else {
            return Err(ApiError::internal("the engine ended a choice without its result"));
        };
        let probs = choice.probs.iter().map(|probs| probabilities(probs, self.after_chain)).collect();
        let tokens = if self.return_tokens { choice.tokens.clone() } else { Vec::new() };
        Ok(self.last(index, choice.text(), tokens, probs, finish))
    }

    fn last(
        &self,
        index: usize,
        content: String,
        tokens: Vec<u32>,
        completion_probabilities: Vec<Probabilities>,
        finish: &Finish,
    ) -> Value {
        let (prompt, tokens_evaluated) = self.prompt(index);
        let (stop_type, stopping_word) = stop_type(&finish.reason);
        let answer = CompletionAnswer {
            index,
            content,
            tokens,
            id_slot: finish.id_slot.into(),
            stop: true,
            model: self.model.clone(),
            tokens_predicted: finish.timings.predicted_n,
            tokens_evaluated,
            generation_settings: self.settings.clone().with_seed(finish.seed),
            prompt,
            has_new_line: finish.has_new_line,
            truncated: finish.truncated,
            stop_type,
            stopping_word,
            tokens_cached: finish.tokens_cached,
            timings: (&finish.timings).into(),
            completion_probabilities,
        };
        let answer = serde_json::to_value(answer).unwrap_or_default();
        if self.response_fields.is_empty() { answer } else { select(&answer, &self.response_fields) }
    }
}

impl Surface for Context {
    type Frames = Stream;

    fn delivery(&self) -> Delivery {
        self.delivery
    }

    fn answer(&self, choices: &[Collected]) -> Result<Response, ApiError> {
        let answers = choices.iter().enumerate().map(|(index, choice)| self.one(index, choice));
        let mut answers: Vec<Value> = answers.collect::<Result<_, _>>()?;
        Ok(match answers.len() {
            1 => Json(answers.swap_remove(0)).into_response(),
            _ => Json(answers).into_response(),
        })
    }

    fn frames(self) -> Stream {
        Stream { context: self, states: Vec::new() }
    }
}

impl Settings {
    fn with_seed(mut self, seed: u64) -> Self {
        self.sampling.set_seed(seed);
        self
    }
}

fn stop_type(reason: &StopReason) -> (&'static str, String) {
    match reason {
        StopReason::Eos => ("eos", String::new()),
        StopReason::Limit => ("limit", String::new()),
        StopReason::Word(word) => ("word", word.clone()),
        StopReason::None => ("none", String::new()),
    }
}

/// The named fields; of `a/b/c` the last part is the name at the root. Missing ones are left out.
fn select(answer: &Value, names: &[String]) -> Value {
    let found = names.iter().filter_map(|name| {
        let value = name.split('/').try_fold(answer, |value, part| value.get(part))?;
        Some((name.rsplit('/').next().unwrap_or(name).to_owned(), value.clone()))
    });
    Value::Object(found.collect::<Map<_, _>>())
}

#[derive(Clone, Debug, Default)]
struct ChoiceState {
    id_slot: i64,
    timings: Timings,
}

struct Stream {
    context: Context,
    states: Vec<ChoiceState>,
}

impl Stream {
    fn state(&mut self, index: usize) -> &mut ChoiceState {
        if self.states.len() <= index {
            self.states.resize(index + 1, ChoiceState { id_slot: -1, timings: Timings::default() });
        }
        &mut self.states[index]
    }

    fn chunk(&mut self, index: usize) -> CompletionChunk {
        let (_, tokens_evaluated) = self.context.prompt(index);
        let with_timings = self.context.timings_per_token;
        let state = self.state(index);
        CompletionChunk {
            index,
            content: String::new(),
            tokens: Vec::new(),
            stop: false,
            id_slot: state.id_slot,
            tokens_predicted: state.timings.predicted_n,
            tokens_evaluated,
            timings: with_timings.then(|| (&state.timings).into()),
            prompt_progress: None,
            completion_probabilities: Vec::new(),
        }
    }
}

impl Frames for Stream {
    fn event(&mut self, event: Event, out: &mut VecDeque<Bytes>) {
        let index = run::index(&event) as usize;
        match event {
            Event::Started { id_slot, .. } => self.state(index).id_slot = id_slot.into(),
            Event::PromptLogprobs { .. } | Event::Pool(_) | Event::Failed(_) => {}
            Event::Progress { total, cache, processed, time_ms, .. } => {
                let mut chunk = self.chunk(index);
                chunk.prompt_progress = Some(ProgressBody { total, cache, processed, time_ms });
                out.push_back(sse::data(&chunk));
            }
            Event::Token { text, tokens, probs, timings, .. } => {
                self.state(index).timings = timings;
                let after_chain = self.context.after_chain;
                let chunk = CompletionChunk {
                    content: text,
                    tokens,
                    completion_probabilities: probs.iter().map(|probs| probabilities(probs, after_chain)).collect(),
                    ..self.chunk(index)
                };
                out.push_back(sse::data(&chunk));
            }
            Event::Done(finish) => {
                let last = self.context.last(index, String::new(), Vec::new(), Vec::new(), &finish);
                out.push_back(sse::data(&last));
            }
        }
    }

    fn end(&mut self, _: &mut VecDeque<Bytes>) {}
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn response_fields_move_inner_fields_to_the_root_and_leave_missing_ones_out() {
        let answer = json!({"content": "x", "timings": {"prompt_n": 3}, "a": {"b": {"c": 1}}});
        let names = ["content", "timings/prompt_n", "a/b/c", "nothing", "content/x"].map(str::to_owned);
        assert_eq!(select(&answer, &names), json!({"content": "x", "prompt_n": 3, "c": 1}));
    }
}
