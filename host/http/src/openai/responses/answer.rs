//! Answers of the responses route, whole and streamed.

use std::collections::VecDeque;

use axum::Json;
use axum::body::Bytes;
use axum::response::{IntoResponse, Response};
use opencoti_engine::api::{Event, Finish, StopReason, Timings, TokenProbs};
use opencoti_model::chat::OutputFormat;
use serde::Serialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use super::output::{Body, Item, Output, Status, StreamEvent};
use super::request::ResponsesFields;
use crate::answers::{now, probabilities};
use crate::chat::reader::Reader;
use crate::error::ApiError;
use crate::run::{Collected, Delivery, Frames, Surface, only_choice};
use crate::sse;

/// What the answers repeat of the request.
pub(super) struct Context {
    pub(super) id: String,
    pub(super) created: u64,
    pub(super) model: String,
    pub(super) output: OutputFormat,
    /// How many alternatives `top_logprobs` lists; `None` without log-probabilities.
    pub(super) top_logprobs: Option<usize>,
    pub(super) temperature: f32,
    pub(super) top_p: f32,
    pub(super) parallel: bool,
    pub(super) own: ResponsesFields,
    pub(super) delivery: Delivery,
}

/// The answer.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct ResponseAnswer {
    id: String,
    object: &'static str,
    created_at: u64,
    completed_at: Option<u64>,
    /// `in_progress`, `completed`, `incomplete` or `failed`.
    status: Status,
    background: bool,
    error: Option<ResponseError>,
    incomplete_details: Option<IncompleteDetails>,
    instructions: Option<String>,
    max_output_tokens: Option<i64>,
    #[schema(value_type = Object)]
    metadata: Map<String, Value>,
    model: String,
    output: Vec<Item>,
    parallel_tool_calls: bool,
    /// Null: nothing is stored.
    previous_response_id: Option<String>,
    #[schema(value_type = Object)]
    reasoning: Value,
    /// False: nothing is stored.
    store: bool,
    temperature: f32,
    #[schema(value_type = Object)]
    text: Value,
    tool_choice: Value,
    tools: Value,
    top_logprobs: usize,
    top_p: f32,
    truncation: &'static str,
    /// Null until the end.
    usage: Option<ResponseUsage>,
}

/// Why a response failed.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct ResponseError {
    code: &'static str,
    message: String,
}

/// Why a response is incomplete.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct IncompleteDetails {
    /// `max_output_tokens`, also where the context ended before them.
    reason: &'static str,
}

/// `usage`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub(crate) struct ResponseUsage {
    input_tokens: u32,
    input_tokens_details: InputDetails,
    output_tokens: u32,
    output_tokens_details: OutputDetails,
    total_tokens: u32,
}

/// What the prompt's tokens were.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub(crate) struct InputDetails {
    cached_tokens: u32,
    cache_write_tokens: u32,
}

/// What the answer's tokens were.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[schema(as = ResponseOutputDetails)]
pub(crate) struct OutputDetails {
    reasoning_tokens: u32,
}

impl ResponseUsage {
    fn new(timings: &Timings, reasoning_tokens: u32) -> Self {
        let (input_tokens, output_tokens) = (timings.cache_n + timings.prompt_n, timings.predicted_n);
        ResponseUsage {
            input_tokens,
            input_tokens_details: InputDetails { cached_tokens: timings.cache_n, cache_write_tokens: 0 },
            output_tokens,
            output_tokens_details: OutputDetails { reasoning_tokens },
            total_tokens: input_tokens + output_tokens,
        }
    }
}

/// The status of a response that ended so.
fn status(reason: &StopReason) -> Status {
    match reason {
        StopReason::Eos | StopReason::Word(_) => Status::Completed,
        StopReason::Limit | StopReason::None => Status::Incomplete,
    }
}

impl Context {
    /// The response before its first item.
    fn begun(&self) -> ResponseAnswer {
        let own = &self.own;
        ResponseAnswer {
            id: self.id.clone(),
            object: "response",
            created_at: self.created,
            completed_at: None,
            status: Status::InProgress,
            background: false,
            error: None,
            incomplete_details: None,
            instructions: own.instructions.clone(),
            max_output_tokens: own.max_output_tokens,
            metadata: own.metadata.clone().unwrap_or_default(),
            model: self.model.clone(),
            output: Vec::new(),
            parallel_tool_calls: self.parallel,
            previous_response_id: None,
            reasoning: json!({"effort": own.effort(), "summary": null}),
            store: false,
            temperature: self.temperature,
            text: json!({"format": own.format_echo()}),
            tool_choice: own.tool_choice.clone().unwrap_or_else(|| "auto".into()),
            tools: own.tools.clone().unwrap_or_else(|| json!([])),
            top_logprobs: self.top_logprobs.unwrap_or(0),
            top_p: self.top_p,
            truncation: "disabled",
            usage: None,
        }
    }

    /// The response at its end.
    fn ended(&self, items: &[Item], finish: &Finish, reasoning_tokens: u32) -> ResponseAnswer {
        let status = status(&finish.reason);
        ResponseAnswer {
            status,
            completed_at: (status == Status::Completed).then(now),
            incomplete_details: (status == Status::Incomplete)
                .then_some(IncompleteDetails { reason: "max_output_tokens" }),
            output: items.to_vec(),
            usage: Some(ResponseUsage::new(&finish.timings, reasoning_tokens)),
            ..self.begun()
        }
    }

    /// The response that an error ended.
    fn failed(&self, items: &[Item], error: &ApiError) -> ResponseAnswer {
        let code = if error.status().as_u16() == 429 { "rate_limit_exceeded" } else { "server_error" };
        let error = ResponseError { code, message: error.message().to_owned() };
        ResponseAnswer { status: Status::Failed, error: Some(error), output: items.to_vec(), ..self.begun() }
    }
}

/// The answer while it grows.
struct Growing {
    reader: Reader,
    output: Output,
    top_logprobs: Option<usize>,
}

impl Growing {
    fn new(context: &Context) -> Self {
        let (reader, output) = (Reader::new(context.output.clone(), "call_"), Output::default());
        Growing { reader, output, top_logprobs: context.top_logprobs }
    }

    fn add_probs(&mut self, probs: &[TokenProbs]) {
        let Some(top) = self.top_logprobs else { return };
        self.output.add_probs(probs.iter().map(|probs| {
            let listed = probs.top.iter().take(top).cloned().collect();
            probabilities(&TokenProbs { token: probs.token.clone(), top: listed }, false)
        }));
    }

    /// Takes the next text, which came with so many tokens.
    fn push(&mut self, text: &str, n_tokens: u32) -> Vec<StreamEvent> {
        let mut out = Vec::new();
        for event in self.reader.push(text, n_tokens) {
            self.output.push(event, Status::Completed, &mut out);
        }
        out
    }

    /// Ends the text; the item that ends with it has the status of the reason.
    fn finish(&mut self, reason: &StopReason) -> Vec<StreamEvent> {
        let (status, mut out) = (status(reason), Vec::new());
        for event in self.reader.finish(reason) {
            self.output.push(event, status, &mut out);
        }
        self.output.close(status, &mut out);
        out
    }
}

impl Surface for Context {
    type Frames = Stream;

    fn delivery(&self) -> Delivery {
        self.delivery
    }

    fn answer(&self, choices: &[Collected]) -> Result<Response, ApiError> {
        let (choice, finish) = only_choice(choices)?;
        let mut growing = Growing::new(self);
        let mut probs = &choice.probs[..];
        for (text, n_tokens) in &choice.pieces {
            let (own, rest) = probs.split_at((*n_tokens as usize).min(probs.len()));
            growing.add_probs(own);
            probs = rest;
            growing.push(text, *n_tokens);
        }
        growing.finish(&finish.reason);
        let answer = self.ended(growing.output.items(), finish, growing.reader.reasoning_tokens());
        Ok(Json(answer).into_response())
    }

    fn frames(self) -> Stream {
        Stream { growing: Growing::new(&self), context: self, opened: false }
    }
}

/// Makes the events of a stream.
pub(super) struct Stream {
    context: Context,
    growing: Growing,
    opened: bool,
}

impl Stream {
    fn open(&mut self, out: &mut VecDeque<Bytes>) {
        if !std::mem::replace(&mut self.opened, true) {
            for kind in ["response.created", "response.in_progress"] {
                let event = self.growing.output.event(kind, whole(self.context.begun()));
                send(&event, out);
            }
        }
    }

    fn done(&mut self, finish: &Finish, out: &mut VecDeque<Bytes>) {
        let status = status(&finish.reason);
        self.growing.finish(&finish.reason).iter().for_each(|event| send(event, out));
        let reasoning_tokens = self.growing.reader.reasoning_tokens();
        let response = self.context.ended(self.growing.output.items(), finish, reasoning_tokens);
        let kind = if status == Status::Completed { "response.completed" } else { "response.incomplete" };
        send(&self.growing.output.event(kind, whole(response)), out);
    }
}

fn whole(response: ResponseAnswer) -> Body {
    Body::Response { response: Box::new(response) }
}

fn send(event: &StreamEvent, out: &mut VecDeque<Bytes>) {
    out.push_back(sse::event(event.kind, event));
}

impl Frames for Stream {
    fn event(&mut self, event: Event, out: &mut VecDeque<Bytes>) {
        match event {
            Event::Started { .. }
            | Event::Progress { .. }
            | Event::PromptLogprobs { .. }
            | Event::Pool(_)
            | Event::Failed(_) => {}
            Event::Token { text, tokens, probs, .. } => {
                self.open(out);
                self.growing.add_probs(&probs);
                self.growing.push(&text, tokens.len() as u32).iter().for_each(|event| send(event, out));
            }
            Event::Done(finish) => {
                self.open(out);
                self.done(&finish, out);
            }
        }
    }

    fn end(&mut self, _: &mut VecDeque<Bytes>) {}

    fn error(&mut self, error: &ApiError) -> Bytes {
        let mut last = Vec::new();
        self.growing.output.close(Status::Incomplete, &mut last);
        let response = self.context.failed(self.growing.output.items(), error);
        last.push(self.growing.output.event("response.failed", whole(response)));
        let frames = last.iter().flat_map(|event| sse::event(event.kind, event));
        frames.collect()
    }
}
