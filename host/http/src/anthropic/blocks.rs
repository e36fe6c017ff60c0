//! The content of an answer, block by block. A stream sends the steps; the whole answer is what they leave behind, so both
//! are the same.

use opencoti_model::chat::OutputEvent;
use serde::Serialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

/// Stands where a thought's signature would. Thoughts that come back are not verified, but clients want a text here.
const SIGNATURE: &str = "unsigned";

/// A block of an answer.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum ContentBlock {
    /// Text for the user.
    Text {
        /// The text.
        text: String,
    },
    /// A thought.
    Thinking {
        /// The thought.
        thinking: String,
        /// A text to send back with the thought; it proves nothing.
        signature: String,
    },
    /// A call of a tool.
    ToolUse {
        /// Its id.
        id: String,
        /// The tool.
        name: String,
        /// What it is given; empty where the answer was cut short inside it.
        input: Map<String, Value>,
    },
}

/// What a stream says of a block; `kind` is the event's name.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct BlockEvent {
    #[serde(rename = "type")]
    pub(crate) kind: &'static str,
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    content_block: Option<ContentBlock>,
    #[serde(skip_serializing_if = "Option::is_none")]
    delta: Option<Value>,
}

/// Builds the content.
#[derive(Debug, Default)]
pub(crate) struct Blocks {
    content: Vec<ContentBlock>,
    /// The last block may still grow.
    is_open: bool,
    /// JSON of the open call's input.
    input: String,
    omits_thoughts: bool,
}

impl Blocks {
    /// No content yet. `omits_thoughts` leaves the texts of thoughts out.
    pub(crate) fn new(omits_thoughts: bool) -> Self {
        Blocks { omits_thoughts, ..Blocks::default() }
    }

    /// Takes what was read of the output.
    pub(crate) fn push(&mut self, event: OutputEvent, out: &mut Vec<BlockEvent>) {
        match event {
            OutputEvent::Content(text) => {
                if !self.is_open || !matches!(self.content.last(), Some(ContentBlock::Text { .. })) {
                    self.open(ContentBlock::Text { text: String::new() }, out);
                }
                out.push(self.event("content_block_delta", None, Some(json!({"type": "text_delta", "text": text}))));
                if let Some(ContentBlock::Text { text: whole }) = self.content.last_mut() {
                    whole.push_str(&text);
                }
            }
            OutputEvent::Reasoning(text) => self.thought(&text, out),
            OutputEvent::ToolCallStart { id, name, .. } => {
                self.open(ContentBlock::ToolUse { id, name, input: Map::new() }, out);
            }
            OutputEvent::ToolArguments { delta, .. } => {
                let part = json!({"type": "input_json_delta", "partial_json": delta});
                out.push(self.event("content_block_delta", None, Some(part)));
                self.input.push_str(&delta);
            }
            OutputEvent::ToolCallEnd { .. } => self.close(out),
        }
    }

    fn thought(&mut self, text: &str, out: &mut Vec<BlockEvent>) {
        if !self.is_open || !matches!(self.content.last(), Some(ContentBlock::Thinking { .. })) {
            self.open(ContentBlock::Thinking { thinking: String::new(), signature: String::new() }, out);
        }
        if self.omits_thoughts {
            return;
        }
        out.push(self.event("content_block_delta", None, Some(json!({"type": "thinking_delta", "thinking": text}))));
        if let Some(ContentBlock::Thinking { thinking, .. }) = self.content.last_mut() {
            thinking.push_str(text);
        }
    }

    /// Ends the open block.
    pub(crate) fn close(&mut self, out: &mut Vec<BlockEvent>) {
        if !std::mem::take(&mut self.is_open) {
            return;
        }
        let arguments = std::mem::take(&mut self.input);
        match self.content.last_mut() {
            Some(ContentBlock::Thinking { signature, .. }) => {
                SIGNATURE.clone_into(signature);
                let delta = json!({"type": "signature_delta", "signature": SIGNATURE});
                out.push(self.event("content_block_delta", None, Some(delta)));
            }
            Some(ContentBlock::ToolUse { input, .. }) => *input = serde_json::from_str(&arguments).unwrap_or_default(),
            Some(ContentBlock::Text { .. }) | None => {}
        }
        out.push(self.event("content_block_stop", None, None));
    }

    /// The content so far.
    pub(crate) fn into_content(self) -> Vec<ContentBlock> {
        self.content
    }

    fn open(&mut self, block: ContentBlock, out: &mut Vec<BlockEvent>) {
        self.close(out);
        self.content.push(block.clone());
        self.is_open = true;
        out.push(self.event("content_block_start", Some(block), None));
    }

    /// An event of the last block.
    fn event(&self, kind: &'static str, content_block: Option<ContentBlock>, delta: Option<Value>) -> BlockEvent {
        BlockEvent { kind, index: self.content.len().saturating_sub(1), content_block, delta }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_do_not_overlap_and_a_call_that_was_cut_off_has_an_empty_input() {
        let mut blocks = Blocks::new(false);
        let mut out = Vec::new();
        for event in [
            OutputEvent::Reasoning("hm".to_owned()),
            OutputEvent::Content("a".to_owned()),
            OutputEvent::Content("b".to_owned()),
            OutputEvent::ToolCallStart { index: 0, id: "t".to_owned(), name: "f".to_owned() },
            OutputEvent::ToolArguments { index: 0, delta: "{\"x\": ".to_owned() },
        ] {
            blocks.push(event, &mut out);
        }
        blocks.close(&mut out);
        blocks.close(&mut out);
        let steps: Vec<_> =
            out.iter().map(|event| (event.index, event.kind.trim_start_matches("content_block_"))).collect();
        let (start, delta, stop) = ("start", "delta", "stop");
        let expected = [
            (0, start),
            (0, delta),
            (0, delta),
            (0, stop),
            (1, start),
            (1, delta),
            (1, delta),
            (1, stop),
            (2, start),
            (2, delta),
            (2, stop),
        ];
        assert_eq!(steps, expected);
        let content = blocks.into_content();
        assert_eq!(content[1], ContentBlock::Text { text: "ab".to_owned() });
        assert_eq!(serde_json::to_value(&content[2]).unwrap()["input"], json!({}));
    }

    #[test]
    fn an_omitted_thought_keeps_its_block_and_signature() {
        let mut blocks = Blocks::new(true);
        let mut out = Vec::new();
        blocks.push(OutputEvent::Reasoning("secret".to_owned()), &mut out);
        blocks.close(&mut out);
        assert!(!format!("{out:?}").contains("secret"));
        let expected = ContentBlock::Thinking { thinking: String::new(), signature: SIGNATURE.to_owned() };
        assert_eq!(blocks.into_content(), [expected]);
    }
}
