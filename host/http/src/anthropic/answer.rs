//! Answers of the messages route, whole and streamed.

use std::collections::VecDeque;

use axum::Json;
use axum::body::Bytes;
use axum::response::{IntoResponse, Response};
use opencoti_engine::api::{Event, Finish, StopReason, Timings};
use opencoti_model::chat::OutputFormat;
use serde::Serialize;
use serde_json::json;
use utoipa::ToSchema;

use super::blocks::{BlockEvent, Blocks, ContentBlock};
use super::error::AnthropicError;
use crate::chat::reader::Reader;
use crate::error::ApiError;
use crate::run::{Collected, Delivery, Frames, Surface, only_choice};
use crate::sse;

/// What the answers repeat of the request.
pub(crate) struct Context {
    pub(crate) id: String,
    pub(crate) model: String,
    pub(crate) output: OutputFormat,
    pub(crate) omits_thoughts: bool,
    pub(crate) delivery: Delivery,
}

/// The answer.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct MessageAnswer {
    id: String,
    /// `message`.
    #[serde(rename = "type")]
    kind: &'static str,
    role: &'static str,
    model: String,
    content: Vec<ContentBlock>,
    /// `end_turn`, `max_tokens`, `stop_sequence`, `tool_use` or `model_context_window_exceeded`.
    stop_reason: Option<&'static str>,
    /// The text that ended the answer.
    stop_sequence: Option<String>,
    usage: MessageUsage,
}

/// `usage`. `input_tokens` leaves out those that were in the cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub(crate) struct MessageUsage {
    input_tokens: u32,
    output_tokens: u32,
    cache_creation_input_tokens: u32,
    cache_read_input_tokens: u32,
    output_tokens_details: OutputDetails,
}

/// What the answer's tokens were.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub(crate) struct OutputDetails {
    thinking_tokens: u32,
}

impl MessageUsage {
    fn new(timings: &Timings, thinking_tokens: u32) -> Self {
        MessageUsage {
            input_tokens: timings.prompt_n,
            output_tokens: timings.predicted_n,
            cache_creation_input_tokens: 0,
            cache_read_input_tokens: timings.cache_n,
            output_tokens_details: OutputDetails { thinking_tokens },
        }
    }
}

/// How an answer ended.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct End {
    stop_reason: &'static str,
    stop_sequence: Option<String>,
}

impl End {
    fn new(finish: &Finish, n_calls: usize) -> Self {
        let (stop_reason, stop_sequence) = match &finish.reason {
            StopReason::Limit if finish.truncated => ("model_context_window_exceeded", None),
            StopReason::Limit | StopReason::None => ("max_tokens", None),
            StopReason::Eos | StopReason::Word(_) if n_calls > 0 => ("tool_use", None),
            StopReason::Eos => ("end_turn", None),
            StopReason::Word(word) => ("stop_sequence", Some(word.clone())),
        };
        End { stop_reason, stop_sequence }
    }
}

impl Context {
    /// The answer before its first block.
    fn empty(&self, timings: &Timings) -> MessageAnswer {
        MessageAnswer {
            id: self.id.clone(),
            kind: "message",
            role: "assistant",
            model: self.model.clone(),
            content: Vec::new(),
            stop_reason: None,
            stop_sequence: None,
            usage: MessageUsage::new(timings, 0),
        }
    }
}

/// The answer while it grows.
struct Growing {
    reader: Reader,
    blocks: Blocks,
}

impl Growing {
    fn new(context: &Context) -> Self {
        Growing { reader: Reader::new(context.output.clone(), "toolu_"), blocks: Blocks::new(context.omits_thoughts) }
    }

    /// Takes the next text, which came with so many tokens.
    fn push(&mut self, text: &str, n_tokens: u32) -> Vec<BlockEvent> {
        let mut out = Vec::new();
        for event in self.reader.push(text, n_tokens) {
            self.blocks.push(event, &mut out);
        }
        out
    }

    fn finish(&mut self, reason: &StopReason) -> Vec<BlockEvent> {
        let mut out = Vec::new();
        for event in self.reader.finish(reason) {
            self.blocks.push(event, &mut out);
        }
        self.blocks.close(&mut out);
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
        for (text, n_tokens) in &choice.pieces {
            growing.push(text, *n_tokens);
        }
        growing.finish(&finish.reason);
        let End { stop_reason, stop_sequence } = End::new(finish, growing.reader.tool_calls());
        let answer = MessageAnswer {
            stop_reason: Some(stop_reason),
            stop_sequence,
            usage: MessageUsage::new(&finish.timings, growing.reader.reasoning_tokens()),
            content: growing.blocks.into_content(),
            ..self.empty(&finish.timings)
        };
        Ok(Json(answer).into_response())
    }

    fn frames(self) -> Stream {
        Stream { growing: Growing::new(&self), context: self, opened: false, pinged: false }
    }
}

/// Makes the events of a stream.
pub(crate) struct Stream {
    context: Context,
    growing: Growing,
    opened: bool,
    pinged: bool,
}

impl Stream {
    fn open(&mut self, timings: &Timings, out: &mut VecDeque<Bytes>) {
        if !std::mem::replace(&mut self.opened, true) {
            let message = self.context.empty(timings);
            out.push_back(sse::event("message_start", &json!({"type": "message_start", "message": message})));
        }
    }

    /// Sends steps of blocks; a ping follows the first beginning of one, as Anthropic's streams have it.
    fn send(&mut self, events: Vec<BlockEvent>, out: &mut VecDeque<Bytes>) {
        for event in events {
            out.push_back(sse::event(event.kind, &event));
            if !std::mem::replace(&mut self.pinged, true) {
                out.push_back(Bytes::from_static(Self::PING));
            }
        }
    }

    fn done(&mut self, finish: &Finish, out: &mut VecDeque<Bytes>) {
        let rest = self.growing.finish(&finish.reason);
        self.send(rest, out);
        let end = End::new(finish, self.growing.reader.tool_calls());
        let usage = MessageUsage::new(&finish.timings, self.growing.reader.reasoning_tokens());
        let delta = json!({"type": "message_delta", "delta": end, "usage": usage});
        out.push_back(sse::event("message_delta", &delta));
    }
}

impl Frames for Stream {
    const PING: &'static [u8] = b"event: ping\ndata: {\"type\": \"ping\"}\n\n";

    fn event(&mut self, event: Event, out: &mut VecDeque<Bytes>) {
        match event {
            Event::Started { .. }
            | Event::Progress { .. }
            | Event::PromptLogprobs { .. }
            | Event::Pool(_)
            | Event::Failed(_) => {}
            Event::Token { text, tokens, timings, .. } => {
                self.open(&timings, out);
                let events = self.growing.push(&text, tokens.len() as u32);
                self.send(events, out);
            }
            Event::Done(finish) => {
                self.open(&finish.timings, out);
                self.done(&finish, out);
            }
        }
    }

    fn end(&mut self, out: &mut VecDeque<Bytes>) {
        out.push_back(sse::event("message_stop", &json!({"type": "message_stop"})));
    }

    fn error(&mut self, error: &ApiError) -> Bytes {
        sse::event("error", &AnthropicError::new(error, None))
    }
}
