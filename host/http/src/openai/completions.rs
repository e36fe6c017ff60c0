//! `POST /v1/completions`: OpenAI's legacy completions.

use std::collections::VecDeque;
use std::sync::Arc;

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use opencoti_engine::api::{EngineInfo, Event, GenerateRequest, StopReason, Timings, TokenProb, TokenProbs};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::answers::{TimingsBody, Usage, finite, new_id, now, usage};
use crate::body::{self, Input};
use crate::config::ServerConfig;
use crate::error::ApiError;
use crate::fields::{Piece, Prompt, Prompts};
use crate::generation::{GenerationFields, n_probs};
use crate::run::{self, Collected, Delivery, Frames, Surface};
use crate::sampling::SamplingFields;
use crate::sse;
use crate::state::{App, HttpId, Ready};
use crate::text;

/// The fields of this route alone.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
pub(crate) struct CompletionsFields {
    /// What to continue.
    pub(crate) prompt: Option<Prompts>,
    /// Alternatives reported with each token; 0 reports the tokens themselves.
    pub(crate) logprobs: Option<i64>,
    /// Returns the prompt before the answer; with `logprobs` its log-probabilities too.
    pub(crate) echo: Option<bool>,
    /// Text after the answer. This model can't be asked so; must be empty.
    pub(crate) suffix: Option<String>,
    /// Only the number of answers itself is possible.
    pub(crate) best_of: Option<i64>,
    /// Name to report.
    pub(crate) model: Option<String>,
}

/// A request of `POST /v1/completions`.
#[derive(Clone, Debug, ToSchema)]
pub(crate) struct CompletionsRequest {
    #[serde(flatten)]
    own: CompletionsFields,
    #[serde(flatten)]
    generation: GenerationFields,
    #[serde(flatten)]
    sampling: SamplingFields,
}

impl CompletionsRequest {
    /// Reads the fields of a body. `prompt` is required.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, ApiError> {
        let body = body::object(bytes)?;
        let request = CompletionsRequest {
            own: body::fields(&body)?,
            generation: body::fields(&body)?,
            sampling: body::fields(&body)?,
        };
        request.own.check(request.generation.n)?;
        Ok(request)
    }
}

impl CompletionsFields {
    fn check(&self, n: Option<i64>) -> Result<(), ApiError> {
        if self.prompt.is_none() {
            return Err(ApiError::field("prompt", "is missing; give a text, tokens, or an array of them"));
        }
        if self.suffix.as_ref().is_some_and(|suffix| !suffix.is_empty()) {
            return Err(ApiError::field("suffix", "is not supported; leave it empty"));
        }
        match self.best_of {
            Some(best_of) if best_of != n.unwrap_or(1) => Err(ApiError::field(
                "best_of",
                format!("is {best_of}, but only the number of answers (`n`) is supported"),
            )),
            _ => Ok(()),
        }
    }
}

/// What the answers repeat of the request.
struct Context {
    info: Arc<EngineInfo>,
    id: String,
    created: u64,
    model: String,
    build: String,
    n: usize,
    /// Per prompt: what `echo` puts before the answer.
    echo: Option<Vec<Echo>>,
    /// How many alternatives `top_logprobs` lists; `None` without `logprobs`.
    logprobs: Option<usize>,
    include_usage: bool,
    timings_per_token: bool,
    delivery: Delivery,
}

/// A prompt, as `echo` returns it.
#[derive(Clone, Default)]
struct Echo {
    text: String,
    tokens: Vec<u32>,
}

fn prepare(
    info: &Arc<EngineInfo>,
    config: &ServerConfig,
    bytes: &[u8],
) -> Result<(Vec<GenerateRequest>, Context), ApiError> {
    let CompletionsRequest { own, generation, sampling } = CompletionsRequest::parse(bytes)?;
    let top = n_probs("logprobs", own.logprobs, info.tokenizer.n_vocab())?;
    let logprobs = own.logprobs.map(|_| top);
    let echo = own.echo.unwrap_or(false);
    generation.thinks()?;
    let constrained = generation.grammar().or_else(|| generation.schema());
    // The engine reports a token's own probability only together with at least one alternative.
    let wanted = logprobs.map_or(0, |top| top.max(1));
    let mut template = generation.request(info, config, &sampling, wanted, constrained)?;
    template.sampling.post_sampling_probs = false;
    template.prompt_logprobs = logprobs.filter(|_| echo).map(|_| u32::try_from(wanted).unwrap_or(u32::MAX));
    let prompts = own.prompt.unwrap_or(Prompts(Vec::new()));
    let encoded = text::encode_prompts(info, &prompts, config.max_prompts, "prompt")?;
    let echoes = || prompts.0.iter().zip(&encoded).map(|(prompt, tokens)| Echo::new(info, prompt, tokens)).collect();
    let context = Context {
        info: Arc::clone(info),
        id: new_id("cmpl-"),
        created: now(),
        model: own.model.unwrap_or_else(|| info.model_alias.clone()),
        build: config.build.clone(),
        n: template.n_choices as usize,
        echo: echo.then(echoes),
        logprobs,
        include_usage: generation.includes_usage(),
        timings_per_token: generation.timings_per_token.unwrap_or(false),
        delivery: generation.delivery(config),
    };
    let requests = encoded.into_iter().map(|prompt| GenerateRequest { prompt, ..template.clone() }).collect();
    Ok((requests, context))
}

impl Echo {
    fn new(info: &EngineInfo, prompt: &Prompt, tokens: &[u32]) -> Self {
        let texts = prompt.0.iter().map(|piece| match piece {
            Piece::Text(text) => Some(text.as_str()),
            Piece::Token(_) => None,
        });
        let text = texts.collect::<Option<String>>();
        let text = text.unwrap_or_else(|| text::piece(&info.tokenizer.decode(tokens, false)));
        Echo { text, tokens: tokens.to_vec() }
    }
}

/// Handler of the route.
pub(crate) async fn completions(
    State(app): State<App>,
    ready: Ready,
    id: HttpId,
    input: Input,
) -> Result<Response, ApiError> {
    run::serve(&app, &ready, &id, input, prepare).await
}

/// The answer, and each chunk of a stream.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct CompletionsAnswer {
    id: String,
    object: &'static str,
    created: u64,
    model: String,
    system_fingerprint: String,
    choices: Vec<TextChoice>,
    /// Absent in a stream without `include_usage`; null in its chunks but the last with it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Usage>)]
    usage: Option<Option<Usage>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    timings: Option<TimingsBody>,
}

/// One answer.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct TextChoice {
    text: String,
    index: usize,
    logprobs: Option<LegacyLogprobs>,
    finish_reason: Option<&'static str>,
}

/// Log-probabilities in the legacy shape: four lists of one length.
#[derive(Clone, Debug, Default, PartialEq, Serialize, ToSchema)]
pub(crate) struct LegacyLogprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<Option<f32>>,
    #[schema(value_type = Vec<Option<Object>>)]
    top_logprobs: Vec<Option<Map<String, Value>>>,
    /// In characters from the beginning of `text`.
    text_offset: Vec<usize>,
}

/// Builds the legacy lists. Offsets go on over the chunks of a stream.
#[derive(Clone, Debug, Default)]
struct LogprobsWriter {
    /// Characters begun so far.
    offset: usize,
}

impl LogprobsWriter {
    fn push(&mut self, lists: &mut LegacyLogprobs, token: &[u8], printed: bool, probs: Option<(&TokenProbs, usize)>) {
        lists.tokens.push(token_name(token));
        let continues = token.first().is_some_and(|byte| byte & 0xc0 == 0x80);
        lists.text_offset.push(self.offset.saturating_sub(usize::from(continues)));
        lists.token_logprobs.push(probs.map(|(probs, _)| finite(probs.token.value)));
        lists.top_logprobs.push(probs.map(|(probs, top)| top_map(probs, top)));
        if printed {
            self.offset += token.iter().filter(|byte| **byte & 0xc0 != 0x80).count();
        }
    }
}

/// A token's text, or OpenAI's spelling of bytes that are no text.
fn token_name(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => bytes.iter().fold("bytes:".to_owned(), |name, byte| name + &format!("\\x{byte:02x}")),
    }
}

/// The best `top` tokens and the one that was taken.
fn top_map(probs: &TokenProbs, top: usize) -> Map<String, Value> {
    let entry = |prob: &TokenProb| (token_name(&prob.bytes), Value::from(finite(prob.value)));
    let taken = Some(entry(&probs.token)).filter(|_| top > 0);
    probs.top.iter().take(top).map(entry).chain(taken).collect()
}

impl Context {
    fn echo(&self, index: usize) -> Option<&Echo> {
        self.echo.as_ref()?.get(index / self.n.max(1))
    }

    /// The logprobs of a prompt before its answer's.
    fn prompt_logprobs(
        &self,
        index: usize,
        probs: &[Option<TokenProbs>],
        writer: &mut LogprobsWriter,
        lists: &mut LegacyLogprobs,
    ) {
        let (Some(echo), Some(top)) = (self.echo(index), self.logprobs) else { return };
        for (position, &token) in echo.tokens.iter().enumerate() {
            let probs = probs.get(position).and_then(Option::as_ref).map(|probs| (probs, top));
            let printed = !self.info.tokenizer.is_special(token);
            writer.push(lists, self.info.tokenizer.piece(token, true), printed, probs);
        }
    }

    fn answer_logprobs(&self, probs: &[TokenProbs], writer: &mut LogprobsWriter, lists: &mut LegacyLogprobs) {
        let Some(top) = self.logprobs else { return };
        for probs in probs {
            writer.push(lists, &probs.token.bytes, true, Some((probs, top)));
        }
    }

    fn whole(&self, choices: &[Collected]) -> CompletionsAnswer {
        let timings: Vec<Timings> = choices.iter().map(Collected::timings).collect();
        let choices = choices.iter().enumerate().map(|(index, choice)| {
            let (mut writer, mut lists) = (LogprobsWriter::default(), LegacyLogprobs::default());
            self.prompt_logprobs(index, &choice.prompt_probs, &mut writer, &mut lists);
            self.answer_logprobs(&choice.probs, &mut writer, &mut lists);
            TextChoice {
                text: self.echo(index).map(|echo| echo.text.clone()).unwrap_or_default() + &choice.text(),
                index,
                logprobs: self.logprobs.map(|_| lists),
                finish_reason: Some(finish_reason(choice.reason())),
            }
        });
        let choices = choices.collect();
        let total = usage(&timings, self.n);
        CompletionsAnswer { usage: Some(Some(total)), timings: timings.first().map(Into::into), ..self.chunk(choices) }
    }

    fn chunk(&self, choices: Vec<TextChoice>) -> CompletionsAnswer {
        CompletionsAnswer {
            id: self.id.clone(),
            object: "text_completion",
            created: self.created,
            model: self.model.clone(),
            system_fingerprint: self.build.clone(),
            choices,
            usage: self.include_usage.then_some(None),
            timings: None,
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

fn finish_reason(reason: &StopReason) -> &'static str {
    match reason {
        StopReason::Eos | StopReason::Word(_) => "stop",
        StopReason::Limit | StopReason::None => "length",
    }
}

#[derive(Clone, Default)]
struct ChoiceState {
    writer: LogprobsWriter,
    /// Logprobs of tokens whose text was not sent yet.
    pending: LegacyLogprobs,
    echoed: bool,
    timings: Timings,
}

struct Stream {
    context: Context,
    states: Vec<ChoiceState>,
}

impl Stream {
    fn state(&mut self, index: usize) -> &mut ChoiceState {
        if self.states.len() <= index {
            self.states.resize_with(index + 1, ChoiceState::default);
        }
        &mut self.states[index]
    }

    /// The prompt's text, before the first text of a choice.
    fn echo_once(&mut self, index: usize) -> String {
        let text = self.context.echo(index).map(|echo| echo.text.clone()).unwrap_or_default();
        if std::mem::replace(&mut self.state(index).echoed, true) { String::new() } else { text }
    }

    fn send(&mut self, index: usize, text: String, finish_reason: Option<&'static str>, out: &mut VecDeque<Bytes>) {
        let text = self.echo_once(index) + &text;
        let pending = std::mem::take(&mut self.state(index).pending);
        let logprobs = self.context.logprobs.map(|_| pending);
        let mut chunk = self.context.chunk(vec![TextChoice { text, index, logprobs, finish_reason }]);
        if finish_reason.is_some() || self.context.timings_per_token {
            chunk.timings = Some((&self.state(index).timings).into());
        }
        out.push_back(sse::data(&chunk));
    }
}

impl Frames for Stream {
    fn event(&mut self, event: Event, out: &mut VecDeque<Bytes>) {
        let index = run::index(&event) as usize;
        self.state(index);
        match event {
            Event::Started { .. } | Event::Pool(_) | Event::Failed(_) | Event::Progress { .. } => {}
            Event::PromptLogprobs { probs, .. } => {
                let state = &mut self.states[index];
                self.context.prompt_logprobs(index, &probs, &mut state.writer, &mut state.pending);
            }
            Event::Token { text, probs, timings, .. } => {
                let state = &mut self.states[index];
                state.timings = timings;
                self.context.answer_logprobs(&probs, &mut state.writer, &mut state.pending);
                if !text.is_empty() {
                    self.send(index, text, None, out);
                }
            }
            Event::Done(finish) => {
                self.states[index].timings = finish.timings;
                self.send(index, String::new(), Some(finish_reason(&finish.reason)), out);
            }
        }
    }

    fn end(&mut self, out: &mut VecDeque<Bytes>) {
        if self.context.include_usage {
            let timings: Vec<Timings> = self.states.iter().map(|state| state.timings.clone()).collect();
            let total = usage(&timings, self.context.n);
            out.push_back(sse::data(&CompletionsAnswer { usage: Some(Some(total)), ..self.context.chunk(Vec::new()) }));
        }
        out.push_back(Bytes::from_static(sse::DONE));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_count_characters_and_split_characters_are_spelled_as_bytes() {
        let (mut writer, mut lists) = (LogprobsWriter::default(), LegacyLogprobs::default());
        for (token, printed) in
            [(&b"<s>"[..], false), ("ä".as_bytes(), true), (b"\xe2\x82", true), (b"\xac", true), (b"z", true)]
        {
            writer.push(&mut lists, token, printed, None);
        }
        assert_eq!(lists.text_offset, [0, 0, 1, 1, 2]);
        assert_eq!(lists.tokens, ["<s>", "ä", "bytes:\\xe2\\x82", "bytes:\\xac", "z"]);
    }

    #[test]
    fn the_taken_token_is_in_the_map_even_when_it_is_not_among_the_best() {
        let prob = |id, text: &str, value| TokenProb { id, bytes: text.into(), value };
        let probs = TokenProbs { token: prob(9, "x", -7.0), top: vec![prob(1, "a", -0.5), prob(2, "b", -1.0)] };
        assert_eq!(Value::Object(top_map(&probs, 2)), serde_json::json!({"a": -0.5, "b": -1.0, "x": -7.0}));
        assert_eq!(top_map(&probs, 1).len(), 2);
        assert!(top_map(&probs, 0).is_empty());
    }
}
