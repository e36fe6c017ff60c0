//! Answers of the chat route, whole and streamed. Both read the model's text by the same [`Deltas`].

use std::collections::VecDeque;

use axum::Json;
use axum::body::Bytes;
use axum::response::{IntoResponse, Response};
use opencoti_engine::api::{Event, Finish, StopReason, Timings, TokenProbs};
use opencoti_model::chat::{OutputEvent, OutputFormat};
use serde::Serialize;
use serde_json::{Value, json};
use utoipa::ToSchema;

use crate::answers::{Probabilities, ProgressBody, TimingsBody, Usage, probabilities, usage};
use crate::chat::reader::Reader;
use crate::error::ApiError;
use crate::native::completion::Settings;
use crate::run::{self, Collected, Delivery, Frames, Surface};
use crate::sse;

/// Where thoughts go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ThoughtStyle {
    /// They stay in the content, tags and all.
    Content,
    /// Into `reasoning_content`.
    Reasoning,
    /// Into both.
    Both,
}

impl ThoughtStyle {
    /// Reads `reasoning_format`.
    pub(crate) fn parse(name: Option<&str>) -> Result<Self, ApiError> {
        match name {
            None | Some("auto" | "deepseek") => Ok(Self::Reasoning),
            Some("none") => Ok(Self::Content),
            Some("deepseek-legacy") => Ok(Self::Both),
            Some(other) => {
                let problem = format!("is {other:?}, expected none, auto, deepseek or deepseek-legacy");
                Err(ApiError::field("reasoning_format", problem))
            }
        }
    }
}

/// What the answers repeat of the request.
pub(crate) struct Context {
    pub(crate) id: String,
    pub(crate) created: u64,
    pub(crate) model: String,
    pub(crate) build: String,
    pub(crate) output: OutputFormat,
    pub(crate) thought_style: ThoughtStyle,
    /// How many alternatives `top_logprobs` lists; `None` without `logprobs`.
    pub(crate) top_logprobs: Option<usize>,
    pub(crate) include_usage: bool,
    pub(crate) timings_per_token: bool,
    /// The prompt and the settings, to show in `__verbose`.
    pub(crate) verbose: Option<(String, Settings)>,
    pub(crate) delivery: Delivery,
}

/// A part of a message, as a stream sends it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, ToSchema)]
pub(crate) struct Delta {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    /// Null beside the role.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    content: Option<Option<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_calls: Option<[CallDelta; 1]>,
}

/// A part of a tool call.
#[derive(Clone, Debug, Default, PartialEq, Serialize, ToSchema)]
pub(crate) struct CallDelta {
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
    function: FunctionDelta,
}

/// A part of the call's function.
#[derive(Clone, Debug, Default, PartialEq, Serialize, ToSchema)]
pub(crate) struct FunctionDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    arguments: String,
}

impl Delta {
    fn role() -> Self {
        Delta { role: Some("assistant"), content: Some(None), ..Delta::default() }
    }

    fn content(text: String) -> Self {
        Delta { content: Some(Some(text)), ..Delta::default() }
    }

    fn call(call: CallDelta) -> Self {
        Delta { tool_calls: Some([call]), ..Delta::default() }
    }
}

/// Reads the text of one choice into deltas.
struct Deltas {
    reader: Reader,
    style: ThoughtStyle,
    /// The last part was a thought whose closing tag the content still lacks (`deepseek-legacy`).
    open_thought: bool,
}

impl Deltas {
    fn new(context: &Context) -> Self {
        Deltas {
            reader: Reader::new(context.output.clone(), "call_"),
            style: context.thought_style,
            open_thought: false,
        }
    }

    /// Takes the next text, which came with so many tokens.
    fn push(&mut self, text: &str, n_tokens: u32) -> Vec<Delta> {
        let events = self.reader.push(text, n_tokens);
        self.deltas(events)
    }

    fn finish(&mut self, reason: &StopReason) -> Vec<Delta> {
        let events = self.reader.finish(reason);
        self.deltas(events)
    }

    fn deltas(&mut self, events: Vec<OutputEvent>) -> Vec<Delta> {
        let mut deltas = Vec::with_capacity(events.len());
        for event in events {
            match event {
                OutputEvent::Content(text) => {
                    let text = if std::mem::take(&mut self.open_thought) { format!("</think>{text}") } else { text };
                    deltas.push(Delta::content(text));
                }
                OutputEvent::Reasoning(text) => {
                    let content = match self.style {
                        ThoughtStyle::Content | ThoughtStyle::Reasoning => None,
                        ThoughtStyle::Both if std::mem::replace(&mut self.open_thought, true) => Some(text.clone()),
                        ThoughtStyle::Both => Some(format!("<think>{text}")),
                    };
                    let content = content.map(Some);
                    deltas.push(Delta { content, reasoning_content: Some(text), ..Delta::default() });
                }
                OutputEvent::ToolCallStart { index, id, name } => {
                    let function = FunctionDelta { name: Some(name), arguments: String::new() };
                    deltas.push(Delta::call(CallDelta { index, id: Some(id), kind: Some("function"), function }));
                }
                OutputEvent::ToolArguments { index, delta } => {
                    let function = FunctionDelta { name: None, arguments: delta };
                    deltas.push(Delta::call(CallDelta { index, function, ..CallDelta::default() }));
                }
                OutputEvent::ToolCallEnd { .. } => {}
            }
        }
        deltas
    }

    fn finish_reason(&self, reason: &StopReason) -> &'static str {
        match reason {
            StopReason::Limit | StopReason::None => "length",
            StopReason::Eos | StopReason::Word(_) if self.reader.tool_calls() > 0 => "tool_calls",
            StopReason::Eos | StopReason::Word(_) => "stop",
        }
    }
}

/// The answer.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct ChatAnswer {
    id: String,
    object: &'static str,
    created: u64,
    model: String,
    system_fingerprint: String,
    choices: Vec<Choice>,
    usage: Usage,
    timings: Option<TimingsBody>,
    #[serde(rename = "__verbose", skip_serializing_if = "Option::is_none")]
    verbose: Option<Value>,
}

/// One answer of `n`.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Choice {
    index: usize,
    message: AnswerMessage,
    logprobs: Option<Logprobs>,
    finish_reason: &'static str,
}

/// The assistant's message.
#[derive(Clone, Debug, Default, Serialize, ToSchema)]
pub(crate) struct AnswerMessage {
    role: &'static str,
    content: Option<String>,
    refusal: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<Call>,
}

/// A tool call.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Call {
    id: String,
    #[serde(rename = "type")]
    kind: &'static str,
    function: CalledFunction,
}

/// The function of a call.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct CalledFunction {
    name: String,
    /// JSON, as text.
    arguments: String,
}

/// `logprobs`.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Logprobs {
    content: Vec<Probabilities>,
    refusal: Option<Vec<Probabilities>>,
}

impl AnswerMessage {
    fn add(&mut self, delta: Delta) {
        if let Some(Some(text)) = delta.content {
            self.content.get_or_insert_default().push_str(&text);
        }
        if let Some(text) = delta.reasoning_content {
            self.reasoning_content.get_or_insert_default().push_str(&text);
        }
        for part in delta.tool_calls.into_iter().flatten() {
            if let (Some(id), Some(name)) = (part.id, part.function.name) {
                let function = CalledFunction { name, arguments: String::new() };
                self.tool_calls.push(Call { id, kind: "function", function });
            }
            if let Some(call) = self.tool_calls.get_mut(part.index) {
                call.function.arguments.push_str(&part.function.arguments);
            }
        }
    }
}

impl Context {
    fn logprobs(&self, probs: &[TokenProbs]) -> Option<Logprobs> {
        let top = self.top_logprobs?;
        let content = probs.iter().map(|probs| {
            let listed = probs.top.iter().take(top).cloned().collect();
            probabilities(&TokenProbs { token: probs.token.clone(), top: listed }, false)
        });
        Some(Logprobs { content: content.collect(), refusal: None })
    }

    fn verbose(&self, content: &str, tokens: &[u32], finish: &Finish) -> Option<Value> {
        let (prompt, settings) = self.verbose.as_ref()?;
        Some(json!({
            "prompt": prompt,
            "generation_settings": settings,
            "content": content,
            "tokens": tokens,
            "id_slot": finish.id_slot,
            "truncated": finish.truncated,
            "tokens_cached": finish.tokens_cached,
            "has_new_line": finish.has_new_line,
        }))
    }

    fn whole(&self, collected: &[Collected]) -> ChatAnswer {
        let mut reasoning_tokens = 0;
        let choices = collected.iter().enumerate().map(|(index, choice)| {
            let mut deltas = Deltas::new(self);
            let mut message = AnswerMessage { role: "assistant", ..AnswerMessage::default() };
            for (text, n_tokens) in &choice.pieces {
                deltas.push(text, *n_tokens).into_iter().for_each(|delta| message.add(delta));
            }
            deltas.finish(choice.reason()).into_iter().for_each(|delta| message.add(delta));
            if message.tool_calls.is_empty() {
                message.content.get_or_insert_default();
            }
            reasoning_tokens += deltas.reader.reasoning_tokens();
            let finish_reason = deltas.finish_reason(choice.reason());
            Choice { index, message, logprobs: self.logprobs(&choice.probs), finish_reason }
        });
        let choices = choices.collect();
        let timings: Vec<Timings> = collected.iter().map(Collected::timings).collect();
        let mut usage = usage(&timings, timings.len());
        usage.set_reasoning(reasoning_tokens);
        let verbose =
            collected.first().and_then(|choice| self.verbose(&choice.text(), &choice.tokens, choice.finish.as_ref()?));
        ChatAnswer {
            id: self.id.clone(),
            object: "chat.completion",
            created: self.created,
            model: self.model.clone(),
            system_fingerprint: self.build.clone(),
            choices,
            usage,
            timings: timings.first().map(Into::into),
            verbose,
        }
    }
}

impl Surface for Context {
    type Frames = Stream;

    fn delivery(&self) -> Delivery {
        self.delivery
    }

    fn answer(&self, choices: &[Collected]) -> Result<Response, ApiError> {
        Ok(Json(self.whole(choices)).into_response())
    }

    fn frames(self) -> Stream {
        Stream { context: self, states: Vec::new() }
    }
}

/// A chunk of a stream.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct ChatChunk {
    id: String,
    object: &'static str,
    created: u64,
    model: String,
    system_fingerprint: String,
    choices: Vec<ChunkChoice>,
    /// Absent without `include_usage`; null in all chunks but the last with it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Usage>)]
    usage: Option<Option<Usage>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    timings: Option<TimingsBody>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_progress: Option<ProgressBody>,
    #[serde(rename = "__verbose", skip_serializing_if = "Option::is_none")]
    verbose: Option<Value>,
}

/// A choice's part of a chunk.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct ChunkChoice {
    index: usize,
    delta: Delta,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<Logprobs>,
    finish_reason: Option<&'static str>,
}

struct ChoiceState {
    deltas: Deltas,
    opened: bool,
    /// Probabilities of tokens whose text was not sent yet.
    pending: Vec<TokenProbs>,
    timings: Timings,
    /// The text and tokens so far, kept for `__verbose`.
    seen: (String, Vec<u32>),
}

/// Makes the chunks of a stream.
pub(crate) struct Stream {
    context: Context,
    states: Vec<ChoiceState>,
}

impl Stream {
    fn chunk(&self, choices: Vec<ChunkChoice>) -> ChatChunk {
        ChatChunk {
            id: self.context.id.clone(),
            object: "chat.completion.chunk",
            created: self.context.created,
            model: self.context.model.clone(),
            system_fingerprint: self.context.build.clone(),
            choices,
            usage: self.context.include_usage.then_some(None),
            timings: None,
            prompt_progress: None,
            verbose: None,
        }
    }

    fn state(&mut self, index: usize) -> &mut ChoiceState {
        while self.states.len() <= index {
            let deltas = Deltas::new(&self.context);
            let (pending, timings, seen) = (Vec::new(), Timings::default(), Default::default());
            self.states.push(ChoiceState { deltas, opened: false, pending, timings, seen });
        }
        &mut self.states[index]
    }

    /// The chunk with the role, once a choice.
    fn open(&mut self, index: usize, out: &mut VecDeque<Bytes>) {
        if !std::mem::replace(&mut self.state(index).opened, true) {
            let choice = ChunkChoice { index, delta: Delta::role(), logprobs: None, finish_reason: None };
            out.push_back(sse::data(&self.chunk(vec![choice])));
        }
    }

    /// Sends deltas; the probabilities that wait go with the first.
    fn send(&mut self, index: usize, deltas: Vec<Delta>, out: &mut VecDeque<Bytes>) {
        for delta in deltas {
            let logprobs = self.take_logprobs(index);
            let mut chunk = self.chunk(vec![ChunkChoice { index, delta, logprobs, finish_reason: None }]);
            if self.context.timings_per_token {
                chunk.timings = Some((&self.state(index).timings).into());
            }
            out.push_back(sse::data(&chunk));
        }
    }

    fn take_logprobs(&mut self, index: usize) -> Option<Logprobs> {
        let pending = std::mem::take(&mut self.state(index).pending);
        if pending.is_empty() { None } else { self.context.logprobs(&pending) }
    }

    fn done(&mut self, index: usize, finish: Finish, out: &mut VecDeque<Bytes>) {
        let state = self.state(index);
        state.timings = finish.timings.clone();
        let rest = state.deltas.finish(&finish.reason);
        let finish_reason = Some(state.deltas.finish_reason(&finish.reason));
        let seen = std::mem::take(&mut state.seen);
        self.send(index, rest, out);
        let logprobs = self.take_logprobs(index);
        let last = ChunkChoice { index, delta: Delta::default(), logprobs, finish_reason };
        let chunk = ChatChunk {
            timings: Some((&finish.timings).into()),
            verbose: self.context.verbose(&seen.0, &seen.1, &finish),
            ..self.chunk(vec![last])
        };
        out.push_back(sse::data(&chunk));
    }
}

impl Frames for Stream {
    fn event(&mut self, event: Event, out: &mut VecDeque<Bytes>) {
        let index = run::index(&event) as usize;
        match event {
            Event::Started { .. } | Event::Pool(_) | Event::Failed(_) | Event::PromptLogprobs { .. } => {}
            Event::Progress { total, cache, processed, time_ms, .. } => {
                let choice = ChunkChoice { index, delta: Delta::default(), logprobs: None, finish_reason: None };
                let prompt_progress = Some(ProgressBody { total, cache, processed, time_ms });
                out.push_back(sse::data(&ChatChunk { prompt_progress, ..self.chunk(vec![choice]) }));
            }
            Event::Token { text, tokens, probs, timings, .. } => {
                self.open(index, out);
                let keeps_text = self.context.verbose.is_some();
                let state = self.state(index);
                state.timings = timings;
                state.pending.extend(probs);
                let parts = state.deltas.push(&text, tokens.len() as u32);
                if keeps_text {
                    state.seen.0.push_str(&text);
                    state.seen.1.extend(tokens);
                }
                self.send(index, parts, out);
            }
            Event::Done(finish) => {
                self.open(index, out);
                self.done(index, finish, out);
            }
        }
    }

    fn end(&mut self, out: &mut VecDeque<Bytes>) {
        if self.context.include_usage {
            let timings: Vec<Timings> = self.states.iter().map(|state| state.timings.clone()).collect();
            let mut total = usage(&timings, timings.len());
            total.set_reasoning(self.states.iter().map(|state| state.deltas.reader.reasoning_tokens()).sum());
            out.push_back(sse::data(&ChatChunk { usage: Some(Some(total)), ..self.chunk(Vec::new()) }));
        }
        out.push_back(Bytes::from_static(sse::DONE));
    }
}
