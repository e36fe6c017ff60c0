//! From prepared requests to answers: starting generations, merging their events, collecting or streaming them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use axum::http::HeaderValue;
use axum::response::Response;
use futures::stream::{self, BoxStream, SelectAll};
use futures::{FutureExt, StreamExt};
use opencoti_engine::api::{
    EngineError, EngineHandle, EngineInfo, Event, Finish, GenerateRequest, Notice, StopReason, Timings, TokenProbs,
};
use tokio_stream::wrappers::UnboundedReceiverStream;

use crate::body::Input;
use crate::config::ServerConfig;
use crate::error::ApiError;
use crate::sse;
use crate::state::{App, HttpId, Ready, Registered, Requests};

/// The generations of one HTTP request. Choices are numbered through: `prompt · n + choice`.
///
/// Dropping it drops every generation's receiver, which frees their slots at the engine's next step.
struct Running {
    events: SelectAll<BoxStream<'static, Event>>,
    n_choices: usize,
    done: usize,
    registered: Registered,
}

/// What is known before the first result.
#[derive(Debug, Default)]
struct Opening {
    /// Everything up to the first event that counts as a result, in order.
    events: Vec<Event>,
    /// What is told in headers.
    notice: Notice,
}

impl Running {
    /// Starts one generation a prompt. All have the same number of choices.
    fn start(app: &App, engine: &EngineHandle, id: &HttpId, requests: Vec<GenerateRequest>) -> Result<Self, ApiError> {
        let mut events = SelectAll::new();
        let mut generations = Vec::with_capacity(requests.len());
        let mut n_choices = 0;
        for request in requests {
            let (offset, n) = (n_choices, request.n_choices);
            let generation = engine.generate(request)?;
            generations.push(generation.id);
            let numbered = UnboundedReceiverStream::new(generation.events).map(move |event| renumber(event, offset));
            events.push(numbered.boxed());
            n_choices += n;
        }
        let registered = Requests::register(app, id, generations);
        Ok(Running { events, n_choices: n_choices as usize, done: 0, registered })
    }

    /// The next event; `None` once every choice is done. After an error there is nothing more.
    async fn next(&mut self) -> Option<Result<Event, ApiError>> {
        if self.done == self.n_choices {
            return None;
        }
        match self.events.next().await {
            // However the engine words it, the client learns that somebody cancelled.
            Some(Event::Failed(_)) | None if self.registered.is_cancelled() => {
                Some(Err(self.end_with(ApiError::cancelled())))
            }
            Some(Event::Failed(error)) => Some(Err(self.end_with(error.into()))),
            Some(event) => {
                self.done += usize::from(matches!(event, Event::Done(_)));
                Some(Ok(event))
            }
            None => {
                let error = EngineError::Internal("the engine ended the request without a result".to_owned());
                Some(Err(self.end_with(error.into())))
            }
        }
    }

    /// Drops all generations; one that fails takes the others of its request along.
    fn end_with(&mut self, error: ApiError) -> ApiError {
        self.events.clear();
        self.done = self.n_choices;
        error
    }

    /// Waits for the first result, which decides the response's status.
    async fn open(&mut self) -> Result<Opening, ApiError> {
        let mut opening = Opening::default();
        while let Some(event) = self.next().await {
            let event = event?;
            let is_result = !matches!(event, Event::Started { .. });
            if let Event::Started { notice, .. } = &event {
                merge(&mut opening.notice, notice);
            }
            opening.events.push(event);
            if is_result {
                break;
            }
        }
        Ok(opening)
    }

    /// Runs to the end and returns what each choice produced.
    async fn collect(mut self) -> Result<(Vec<Collected>, Notice), ApiError> {
        let mut choices = vec![Collected::default(); self.n_choices];
        let mut notice = Notice::default();
        while let Some(event) = self.next().await {
            let event = event?;
            match &event {
                Event::Started { notice: told, .. } => merge(&mut notice, told),
                Event::Done(finish) if finish.session_tps > 0.0 => notice.session_tps = Some(finish.session_tps),
                _ => {}
            }
            if let Some(choice) = choices.get_mut(index(&event) as usize) {
                choice.take(event);
            }
        }
        Ok((choices, notice))
    }
}

/// The choice of a surface that has one alone, and its end.
pub(crate) fn only_choice(choices: &[Collected]) -> Result<(&Collected, &Finish), ApiError> {
    let choice = choices.first();
    choice
        .and_then(|choice| Some((choice, choice.finish.as_ref()?)))
        .ok_or_else(|| ApiError::internal("the engine ended the answer without its result"))
}

/// What one choice produced.
#[derive(Clone, Debug, Default)]
pub(crate) struct Collected {
    /// The text in the pieces in which it came, each with its number of tokens.
    pub(crate) pieces: Vec<(String, u32)>,
    /// The tokens.
    pub(crate) tokens: Vec<u32>,
    /// Their probabilities, when asked for.
    pub(crate) probs: Vec<TokenProbs>,
    /// Those of the prompt, when asked for.
    pub(crate) prompt_probs: Vec<Option<TokenProbs>>,
    /// The end.
    pub(crate) finish: Option<Finish>,
}

impl Collected {
    fn take(&mut self, event: Event) {
        match event {
            Event::Started { .. } | Event::Progress { .. } | Event::Pool(_) | Event::Failed(_) => {}
            Event::PromptLogprobs { probs, .. } => self.prompt_probs = probs,
            Event::Token { text, tokens, probs, .. } => {
                self.pieces.push((text, tokens.len() as u32));
                self.tokens.extend(tokens);
                self.probs.extend(probs);
            }
            Event::Done(finish) => self.finish = Some(finish),
        }
    }

    /// The whole text.
    pub(crate) fn text(&self) -> String {
        self.pieces.iter().map(|(text, _)| text.as_str()).collect()
    }

    /// Times at the end.
    pub(crate) fn timings(&self) -> Timings {
        self.finish.as_ref().map(|finish| finish.timings.clone()).unwrap_or_default()
    }

    /// Why it ended.
    pub(crate) fn reason(&self) -> &StopReason {
        self.finish.as_ref().map_or(&StopReason::None, |finish| &finish.reason)
    }
}

/// How an answer reaches its client.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Delivery {
    /// As events while it grows.
    pub(crate) is_streamed: bool,
    /// Silence after which a stream sends a sign of life.
    pub(crate) ping: Option<Duration>,
}

/// How a route shows what its generations produced.
pub(crate) trait Surface: Sized + Send + 'static {
    /// Makes the frames of a streamed answer.
    type Frames: Frames;
    /// How the answer reaches its client.
    fn delivery(&self) -> Delivery;
    /// The whole answer.
    fn answer(&self, choices: &[Collected]) -> Result<Response, ApiError>;
    /// The streamed answer.
    fn frames(self) -> Self::Frames;
}

/// Makes of a body the generations and how to show them.
pub(crate) type Prepare<S> = fn(&Arc<EngineInfo>, &ServerConfig, &[u8]) -> Result<(Vec<GenerateRequest>, S), ApiError>;

/// Serves a route that generates.
pub(crate) async fn serve<S: Surface>(
    app: &App,
    ready: &Ready,
    id: &HttpId,
    input: Input,
    prepare: Prepare<S>,
) -> Result<Response, ApiError> {
    let (shared, info) = (App::clone(app), Arc::clone(ready.engine.info()));
    let (requests, surface) = input.compute(move |bytes| prepare(&info, &shared.config, bytes)).await?;
    let running = Running::start(app, &ready.engine, id, requests)?;
    let Delivery { is_streamed, ping } = surface.delivery();
    if is_streamed {
        return stream(running, surface.frames(), ping).await;
    }
    let (choices, notice) = running.collect().await?;
    let mut response = surface.answer(&choices)?;
    add_headers(&mut response, &notice);
    Ok(response)
}

/// Makes the frames of a stream.
pub(crate) trait Frames: Send + 'static {
    /// Sent after a silence.
    const PING: &'static [u8] = sse::COMMENT;
    /// The frames of one event.
    fn event(&mut self, event: Event, out: &mut VecDeque<Bytes>);
    /// The frames after the last choice is done.
    fn end(&mut self, out: &mut VecDeque<Bytes>);
    /// The frame of an error after the stream began; the stream ends with it.
    fn error(&mut self, error: &ApiError) -> Bytes {
        sse::data(&error.body())
    }
}

/// Streams a request's events. Fails, with an ordinary status, if the first result is an error.
async fn stream<F: Frames>(mut running: Running, mut frames: F, ping: Option<Duration>) -> Result<Response, ApiError> {
    let opening = running.open().await?;
    let mut queue = VecDeque::new();
    for event in opening.events {
        frames.event(event, &mut queue);
    }
    let state = Streaming { running, frames, queue, ended: false };
    let body = stream::unfold(state, |mut state| async move { state.next().await.map(|frame| (frame, state)) });
    let mut response = sse::response(body, ping, F::PING);
    add_headers(&mut response, &opening.notice);
    Ok(response)
}

/// Adds what another prompt or choice of the same request was told.
fn merge(notice: &mut Notice, told: &Notice) {
    if told.saturated.is_some() {
        notice.saturated.clone_from(&told.saturated);
    }
    notice.sessions_remaining = told.sessions_remaining.or(notice.sessions_remaining);
    notice.session_tps = told.session_tps.or(notice.session_tps);
}

/// Tells in headers what was short when the request was let in all the same, how many sessions its pool may still take,
/// and how fast its session generates.
fn add_headers(response: &mut Response, notice: &Notice) {
    let headers = response.headers_mut();
    if let Some(name) = notice.saturated.as_deref().and_then(|name| HeaderValue::from_str(name).ok()) {
        headers.insert("x-kv-pool-saturated", name);
    }
    if let Some(remaining) = notice.sessions_remaining {
        headers.insert("x-sessions-remaining", HeaderValue::from(remaining));
    }
    if let Some(tps) = notice.session_tps.and_then(|tps| HeaderValue::from_str(&format!("{tps:.2}")).ok()) {
        headers.insert("x-session-tps", tps);
    }
}

struct Streaming<F> {
    running: Running,
    frames: F,
    queue: VecDeque<Bytes>,
    ended: bool,
}

impl<F: Frames> Streaming<F> {
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            if !self.queue.is_empty() {
                return Some(self.take_queue());
            }
            if self.ended {
                return None;
            }
            match self.running.next().await {
                Some(Ok(event)) => self.frames.event(event, &mut self.queue),
                Some(Err(error)) => {
                    self.ended = true;
                    self.queue.push_back(self.frames.error(&error));
                }
                None => {
                    self.ended = true;
                    self.frames.end(&mut self.queue);
                }
            }
            self.take_ready();
        }
    }

    /// Handles the events that are already there, so that a burst leaves in one write.
    fn take_ready(&mut self) {
        while !self.ended && self.running.done < self.running.n_choices {
            match self.running.next().now_or_never() {
                Some(Some(Ok(event))) => self.frames.event(event, &mut self.queue),
                Some(Some(Err(error))) => {
                    self.ended = true;
                    self.queue.push_back(self.frames.error(&error));
                }
                Some(None) | None => return,
            }
        }
    }

    fn take_queue(&mut self) -> Bytes {
        if self.queue.len() == 1 {
            return self.queue.pop_front().unwrap_or_default();
        }
        let mut burst = Vec::with_capacity(self.queue.iter().map(Bytes::len).sum());
        self.queue.drain(..).for_each(|frame| burst.extend_from_slice(&frame));
        burst.into()
    }
}

/// The choice an event belongs to; 0 for the failure of a request.
pub(crate) fn index(event: &Event) -> u32 {
    match event {
        Event::Started { index, .. }
        | Event::Progress { index, .. }
        | Event::PromptLogprobs { index, .. }
        | Event::Token { index, .. } => *index,
        Event::Done(finish) => finish.index,
        Event::Pool(_) | Event::Failed(_) => 0,
    }
}

fn renumber(mut event: Event, offset: u32) -> Event {
    match &mut event {
        Event::Started { index, .. }
        | Event::Progress { index, .. }
        | Event::PromptLogprobs { index, .. }
        | Event::Token { index, .. } => *index += offset,
        Event::Done(finish) => finish.index += offset,
        Event::Pool(_) | Event::Failed(_) => {}
    }
    event
}
