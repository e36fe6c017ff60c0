//! The text of one choice, taken apart while it comes.

use opencoti_engine::api::StopReason;
use opencoti_model::chat::{OutputEvent, OutputFormat, OutputParser};

use crate::answers::new_id;

/// Characters of a call's id before its index.
const ID_PREFIX: usize = 24;

/// Reads the text of one choice: thoughts, content and tool calls.
pub(crate) struct Reader {
    parser: OutputParser,
    reasoning_tokens: u32,
}

impl Reader {
    /// A reader whose calls have ids that begin with `prefix`.
    pub(crate) fn new(output: OutputFormat, prefix: &str) -> Self {
        let id = new_id(prefix).chars().take(prefix.len() + ID_PREFIX).collect::<String>();
        Reader { parser: OutputParser::new(output, id), reasoning_tokens: 0 }
    }

    /// Takes the next text, which came with so many tokens.
    pub(crate) fn push(&mut self, text: &str, n_tokens: u32) -> Vec<OutputEvent> {
        let events = self.parser.push(text);
        let is_thought = |event: &OutputEvent| matches!(event, OutputEvent::Reasoning(_));
        if !events.is_empty() && events.iter().all(is_thought) {
            self.reasoning_tokens += n_tokens;
        }
        events
    }

    /// Ends the text and returns the rest. A call that a limit cut off stays incomplete.
    pub(crate) fn finish(&mut self, reason: &StopReason) -> Vec<OutputEvent> {
        match reason {
            StopReason::Limit | StopReason::None => self.parser.finish_cut(),
            StopReason::Eos | StopReason::Word(_) => self.parser.finish(),
        }
    }

    /// Tokens that were thoughts.
    pub(crate) fn reasoning_tokens(&self) -> u32 {
        self.reasoning_tokens
    }

    /// Number of calls so far.
    pub(crate) fn tool_calls(&self) -> usize {
        self.parser.tool_calls()
    }
}
