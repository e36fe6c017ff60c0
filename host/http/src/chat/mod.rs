//! A chat request as all chat surfaces see it: a checked conversation, what was asked of its answer, and the generation
//! that is made of both. The surfaces differ in how they read a body and in how they show the answer, not in between.

pub(crate) mod constraint;
pub(crate) mod reader;
pub(crate) mod turns;

use std::sync::Arc;

use opencoti_engine::api::{EngineInfo, GenerateRequest};
use opencoti_model::chat::{self, ChatError, Ending, Message, MessageError, OutputFormat};
use opencoti_model::tokenizer::EncodeOptions;
use serde_json::{Map, Value};
use time::OffsetDateTime;

use self::constraint::{Tools, special_token};
use crate::config::ServerConfig;
use crate::error::ApiError;
use crate::generation::{Constrained, GenerationFields};
use crate::sampling::SamplingFields;
use crate::text;

/// The checked conversation of a request.
pub(crate) struct Conversation {
    pub(crate) messages: Vec<Message>,
    pub(crate) tools: Tools,
    pub(crate) ending: Ending,
    /// More variables for the template.
    pub(crate) kwargs: Map<String, Value>,
    /// The body's field that holds the messages, for errors.
    pub(crate) field: &'static str,
}

/// What a request asks of the answer to its conversation.
pub(crate) struct Asked<'a> {
    pub(crate) generation: &'a GenerationFields,
    pub(crate) sampling: &'a SamplingFields,
    /// The form that holds the whole output.
    pub(crate) form: Option<Constrained>,
    /// How many alternatives are reported with each token; `None` without log-probabilities.
    pub(crate) top_logprobs: Option<usize>,
    /// Thoughts are told apart from the answer; else they stay in it, tags and all.
    pub(crate) separates_thoughts: bool,
}

/// A generation and how to read its text.
pub(crate) struct Prepared {
    pub(crate) request: GenerateRequest,
    pub(crate) output: OutputFormat,
    /// The prompt's text.
    pub(crate) prompt: String,
}

/// The client's error for what is wrong in a message or tool.
pub(crate) fn in_message(error: MessageError) -> ApiError {
    ApiError::field(error.path, error.problem)
}

impl Conversation {
    /// The prompt by the model's template.
    pub(crate) fn render(&self, info: &EngineInfo) -> Result<chat::Rendered, ApiError> {
        let request = chat::ChatRequest {
            messages: &self.messages,
            tools: self.tools.shown(),
            ending: self.ending,
            kwargs: &self.kwargs,
            now: OffsetDateTime::now_utc(),
        };
        info.template.render(request).map_err(|error| match error {
            ChatError::Request(error) => in_message(error),
            other => ApiError::field(self.field, format!("can't be rendered: {other}")),
        })
    }

    /// The prompt's tokens; at least one.
    fn encode(&self, info: &EngineInfo, prompt: &str) -> Result<Vec<u32>, ApiError> {
        let options = EncodeOptions { add_special: true, parse_special: true };
        let tokens = text::encode(info, prompt, options, self.field)?;
        if tokens.is_empty() {
            let problem = "gives an empty prompt by this model's template; say something in it";
            return Err(ApiError::field(self.field, problem));
        }
        Ok(tokens)
    }

    /// How many tokens the prompt has.
    pub(crate) fn count_tokens(&self, info: &EngineInfo) -> Result<usize, ApiError> {
        Ok(self.encode(info, &self.render(info)?.prompt)?.len())
    }

    /// The generation of the answer.
    pub(crate) fn prepare(
        &self,
        info: &Arc<EngineInfo>,
        config: &ServerConfig,
        asked: Asked,
    ) -> Result<Prepared, ApiError> {
        let rendered = self.render(info)?;
        let constrained = constraint::constraint(asked.form.clone(), &self.tools, info, &rendered.output)?;
        // A form holds from the first token, so there is neither a thought nor a call.
        let is_plain = asked.form.is_some() && !self.tools.are_usable();
        let shows_markers = !is_plain && rendered.output.markers().any(|marker| special_token(info, marker).is_some());
        let output = match (is_plain, asked.separates_thoughts) {
            (true, _) => OutputFormat::default(),
            (false, true) => rendered.output,
            (false, false) => OutputFormat { thoughts: false, in_thought: false, ..rendered.output },
        };
        // The engine reports a token's own probability only together with at least one alternative.
        let n_probs = asked.top_logprobs.map_or(0, |top| top.max(1));
        let mut request = asked.generation.request(info, config, asked.sampling, n_probs, constrained)?;
        request.sampling.post_sampling_probs = false;
        request.render_special = shows_markers;
        request.prompt = self.encode(info, &rendered.prompt)?;
        Ok(Prepared { request, output, prompt: rendered.prompt })
    }
}
