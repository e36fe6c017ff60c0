//! The output of a response, item by item. A stream sends the steps; the whole answer is what they leave behind, so both
//! are the same.

use opencoti_model::chat::OutputEvent;
use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

use super::answer::ResponseAnswer;
use crate::answers::{Probabilities, new_id};

/// Where an item stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(super) enum Status {
    /// It grows.
    InProgress,
    /// It is whole.
    Completed,
    /// It was cut short.
    Incomplete,
    /// The response ended by an error.
    Failed,
}

/// An item of the output.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum Item {
    /// A thought.
    Reasoning {
        id: String,
        /// Empty: thoughts are not summarised.
        summary: Vec<Value>,
        content: Vec<Part>,
        /// Null: thoughts are not encrypted.
        encrypted_content: Option<String>,
        status: Status,
    },
    /// A message to the user.
    Message { id: String, status: Status, role: &'static str, content: Vec<Part> },
    /// A call of a function.
    FunctionCall {
        id: String,
        /// What the call's output must name.
        call_id: String,
        name: String,
        /// JSON, as text.
        arguments: String,
        status: Status,
    },
}

/// A part of an item's content.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum Part {
    /// Text for the user.
    OutputText { text: String, annotations: Vec<Value>, logprobs: Vec<Probabilities> },
    /// A part of a thought.
    ReasoningText { text: String },
}

impl Part {
    fn text(&self) -> &str {
        match self {
            Part::OutputText { text, .. } | Part::ReasoningText { text } => text,
        }
    }

    fn add(&mut self, more: &str, probs: Vec<Probabilities>) {
        match self {
            Part::OutputText { text, logprobs, .. } => {
                text.push_str(more);
                logprobs.extend(probs);
            }
            Part::ReasoningText { text } => text.push_str(more),
        }
    }
}

impl Item {
    fn id(&self) -> &str {
        match self {
            Item::Reasoning { id, .. } | Item::Message { id, .. } | Item::FunctionCall { id, .. } => id,
        }
    }

    fn set_status(&mut self, new: Status) {
        match self {
            Item::Reasoning { status, .. } | Item::Message { status, .. } | Item::FunctionCall { status, .. } => {
                *status = new;
            }
        }
    }

    /// The only part of the content; a call has none.
    fn part_mut(&mut self) -> Option<&mut Part> {
        match self {
            Item::Reasoning { content, .. } | Item::Message { content, .. } => content.first_mut(),
            Item::FunctionCall { .. } => None,
        }
    }
}

/// An event of a stream.
#[derive(Clone, Debug, Serialize)]
pub(super) struct StreamEvent {
    /// Its name.
    #[serde(rename = "type")]
    pub(super) kind: &'static str,
    sequence_number: u64,
    #[serde(flatten)]
    body: Body,
}

/// What an event says.
#[derive(Clone, Debug, Serialize)]
#[serde(untagged)]
pub(super) enum Body {
    /// The whole response, of its beginning or end.
    Response { response: Box<ResponseAnswer> },
    /// An item begins or ends.
    Item { output_index: usize, item: Item },
    /// A part of an item's content begins or ends.
    Part {
        #[serde(flatten)]
        place: Place,
        part: Part,
    },
    /// A part grows.
    TextDelta {
        #[serde(flatten)]
        place: Place,
        delta: String,
        #[serde(skip_serializing_if = "Option::is_none")]
        logprobs: Option<Vec<Probabilities>>,
    },
    /// The text of a part is whole.
    Text {
        #[serde(flatten)]
        place: Place,
        text: String,
        #[serde(skip_serializing_if = "Option::is_none")]
        logprobs: Option<Vec<Probabilities>>,
    },
    /// The arguments of a call grow.
    ArgumentsDelta {
        #[serde(flatten)]
        place: Place,
        delta: String,
    },
    /// The arguments of a call are whole.
    Arguments {
        #[serde(flatten)]
        place: Place,
        name: String,
        arguments: String,
    },
}

/// Which item, and which part of it, an event is about.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Place {
    item_id: String,
    output_index: usize,
    /// A call has no parts.
    #[serde(skip_serializing_if = "Option::is_none")]
    content_index: Option<usize>,
}

/// Builds the output.
#[derive(Default)]
pub(super) struct Output {
    items: Vec<Item>,
    /// The last item may still grow.
    is_open: bool,
    sequence: u64,
    /// Probabilities of tokens whose text did not come yet.
    probs: Vec<Probabilities>,
}

impl Output {
    /// The next event.
    pub(super) fn event(&mut self, kind: &'static str, body: Body) -> StreamEvent {
        let sequence_number = self.sequence;
        self.sequence += 1;
        StreamEvent { kind, sequence_number, body }
    }

    /// The items so far.
    pub(super) fn items(&self) -> &[Item] {
        &self.items
    }

    /// Probabilities that go with the next text.
    pub(super) fn add_probs(&mut self, probs: impl IntoIterator<Item = Probabilities>) {
        self.probs.extend(probs);
    }

    /// Takes what was read of the output; `status` is that of an item that ends here.
    pub(super) fn push(&mut self, event: OutputEvent, status: Status, out: &mut Vec<StreamEvent>) {
        match event {
            OutputEvent::Content(text) => {
                if !self.is_open || !matches!(self.items.last(), Some(Item::Message { .. })) {
                    self.open_message(out);
                }
                let probs = std::mem::take(&mut self.probs);
                self.grow("response.output_text.delta", &text, Some(probs), out);
            }
            OutputEvent::Reasoning(text) => {
                if !self.is_open || !matches!(self.items.last(), Some(Item::Reasoning { .. })) {
                    self.open_reasoning(out);
                }
                self.probs.clear();
                self.grow("response.reasoning_text.delta", &text, None, out);
            }
            OutputEvent::ToolCallStart { id: call_id, name, .. } => {
                let (id, status) = (new_id("fc_"), Status::InProgress);
                self.open(Item::FunctionCall { id, call_id, name, arguments: String::new(), status }, None, out);
            }
            OutputEvent::ToolArguments { delta, .. } => {
                self.probs.clear();
                if let Some(Item::FunctionCall { arguments, .. }) = self.items.last_mut() {
                    arguments.push_str(&delta);
                }
                let body = Body::ArgumentsDelta { place: self.place(None), delta };
                out.push(self.event("response.function_call_arguments.delta", body));
            }
            OutputEvent::ToolCallEnd { .. } => self.close(status, out),
        }
    }

    /// Ends the open item.
    pub(super) fn close(&mut self, status: Status, out: &mut Vec<StreamEvent>) {
        if !std::mem::take(&mut self.is_open) {
            return;
        }
        if let Some(item) = self.items.last_mut() {
            item.set_status(status);
        }
        let Some(item) = self.items.last().cloned() else { return };
        match &item {
            Item::Reasoning { content, .. } => self.end_part("response.reasoning_text.done", content.first(), out),
            Item::Message { content, .. } => self.end_part("response.output_text.done", content.first(), out),
            Item::FunctionCall { name, arguments, .. } => {
                let (name, arguments) = (name.clone(), arguments.clone());
                let body = Body::Arguments { place: self.place(None), name, arguments };
                out.push(self.event("response.function_call_arguments.done", body));
            }
        }
        let body = Body::Item { output_index: self.items.len() - 1, item };
        out.push(self.event("response.output_item.done", body));
    }

    fn open_message(&mut self, out: &mut Vec<StreamEvent>) {
        let (id, status) = (new_id("msg_"), Status::InProgress);
        let part = Part::OutputText { text: String::new(), annotations: Vec::new(), logprobs: Vec::new() };
        self.open(Item::Message { id, status, role: "assistant", content: Vec::new() }, Some(part), out);
    }

    fn open_reasoning(&mut self, out: &mut Vec<StreamEvent>) {
        let item = Item::Reasoning {
            id: new_id("rs_"),
            summary: Vec::new(),
            content: Vec::new(),
            encrypted_content: None,
            status: Status::InProgress,
        };
        self.open(item, Some(Part::ReasoningText { text: String::new() }), out);
    }

    fn open(&mut self, item: Item, part: Option<Part>, out: &mut Vec<StreamEvent>) {
        self.close(Status::Completed, out);
        let body = Body::Item { output_index: self.items.len(), item: item.clone() };
        out.push(self.event("response.output_item.added", body));
        self.items.push(item);
        self.is_open = true;
        if let Some(part) = part {
            let body = Body::Part { place: self.place(Some(0)), part: part.clone() };
            out.push(self.event("response.content_part.added", body));
            if let Some(Item::Reasoning { content, .. } | Item::Message { content, .. }) = self.items.last_mut() {
                content.push(part);
            }
        }
    }

    /// Adds text to the open item's part. Only texts for the user have probabilities.
    fn grow(&mut self, kind: &'static str, text: &str, probs: Option<Vec<Probabilities>>, out: &mut Vec<StreamEvent>) {
        let (place, delta) = (self.place(Some(0)), text.to_owned());
        out.push(self.event(kind, Body::TextDelta { place, delta, logprobs: probs.clone() }));
        if let Some(part) = self.items.last_mut().and_then(Item::part_mut) {
            part.add(text, probs.unwrap_or_default());
        }
    }

    fn end_part(&mut self, kind: &'static str, part: Option<&Part>, out: &mut Vec<StreamEvent>) {
        let Some(part) = part else { return };
        let logprobs = match part {
            Part::OutputText { logprobs, .. } => Some(logprobs.clone()),
            Part::ReasoningText { .. } => None,
        };
        let text = part.text().to_owned();
        let body = Body::Text { place: self.place(Some(0)), text, logprobs };
        out.push(self.event(kind, body));
        let body = Body::Part { place: self.place(Some(0)), part: part.clone() };
        out.push(self.event("response.content_part.done", body));
    }

    /// Where the last item is.
    fn place(&self, content_index: Option<usize>) -> Place {
        let item_id = self.items.last().map(|item| item.id().to_owned()).unwrap_or_default();
        Place { item_id, output_index: self.items.len().saturating_sub(1), content_index }
    }
}
