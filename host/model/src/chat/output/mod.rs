//! Reading what a model writes: thought, content and tool calls, told apart while the text streams in.
//!
//! [`OutputParser`] looks for markers in the text; what stands behind a call's marker is read by the family's reader, of
//! which there is one in each file here. Every character is looked at a bounded number of times.

mod gemma4;
mod hermes;
mod json;
mod lfm2;
mod mistral;
mod qwen_xml;
mod reader;
pub(super) mod schema_types;
mod syntax;

use std::sync::Arc;

use self::reader::{CallReader, Found, Progress};
pub use self::syntax::{CallSyntax, ThoughtSyntax};
use super::tools::Tool;

/// A part of the answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OutputEvent {
    /// The next part of the text for the user.
    Content(String),
    /// The next part of the thought.
    Reasoning(String),
    /// A tool call begins; `index` counts from 0.
    ToolCallStart { index: usize, id: String, name: String },
    /// The next part of the call's arguments. The parts joined are at every moment the beginning of a JSON object.
    ToolArguments { index: usize, delta: String },
    /// The call is complete, and so are its arguments unless the answer was cut short
    /// ([`OutputParser::finish_cut`]).
    ToolCallEnd { index: usize },
}

/// What to look for in the output.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OutputFormat {
    /// Thoughts may come.
    pub thoughts: bool,
    /// The prompt ends inside a thought, so the output begins in it.
    pub in_thought: bool,
    /// How thoughts are marked.
    pub thought_syntax: ThoughtSyntax,
    /// How calls are written.
    pub call_syntax: CallSyntax,
    /// The tools that may be called. Without any, nothing is taken for a call.
    pub tools: Arc<[Tool]>,
}

impl OutputFormat {
    /// The markers that the parser looks for. Where they are special tokens of the vocabulary, these must be printed.
    pub fn markers(&self) -> impl Iterator<Item = &'static str> + use<> {
        let (open, close) = self.thought_syntax.markers();
        let thoughts = (self.thoughts || self.in_thought).then_some([open, close]);
        let calls = (!self.tools.is_empty()).then(|| self.call_syntax.markers());
        thoughts.into_iter().flatten().chain(calls.into_iter().flatten())
    }
}

#[derive(Clone, Debug)]
enum State {
    /// Nothing but white space so far: a thought may begin, or a call that has no marker.
    Start {
        may_think: bool,
    },
    Thought,
    Content,
    Call(Box<dyn CallReader>),
    /// Behind a call: its end marker comes, or another call.
    AfterCall {
        ended: bool,
    },
}

/// Splits a stream of text into events. The joined events don't depend on how the text was cut, and no part of a marker
/// is ever shown as content.
///
/// What looks like a call and is none becomes content. Where that shows only after the call was announced, its arguments
/// are completed to an object and the rest of the text is content.
#[derive(Clone, Debug)]
pub struct OutputParser {
    format: OutputFormat,
    state: State,
    /// Text that may still turn out to be a marker; what is before `at` is done with.
    pending: String,
    at: usize,
    /// What content is searched for.
    marks: Vec<&'static str>,
    /// White space that is dropped if a marker follows.
    space: String,
    /// White space is dropped until other text comes.
    skip_space: bool,
    /// The marker of the call that is being read and the white space before it, content if that turns out to be no call.
    before_call: String,
    /// The text behind that, until the call is announced.
    raw: String,
    started: bool,
    calls: usize,
    id_prefix: String,
    events: Vec<OutputEvent>,
}

impl OutputParser {
    /// A parser for one answer. The ids of its calls are `id_prefix` and the index, so the prefix must be unique.
    pub fn new(format: OutputFormat, id_prefix: impl Into<String>) -> Self {
        let mut marks: Vec<&'static str> = Vec::new();
        if !format.tools.is_empty() {
            marks.extend(format.call_syntax.openings());
        }
        if format.thoughts && format.thought_syntax.comes_anywhere() {
            marks.push(format.thought_syntax.markers().0);
        }
        let may_begin = format.thoughts || format.call_syntax.is_bare() && !format.tools.is_empty();
        let state = match (format.in_thought, may_begin) {
            (true, _) => State::Thought,
            (false, true) => State::Start { may_think: format.thoughts },
            (false, false) => State::Content,
        };
        Self {
            state,
            skip_space: format.in_thought,
            format,
            pending: String::new(),
            at: 0,
            marks,
            space: String::new(),
            before_call: String::new(),
            raw: String::new(),
            started: false,
            calls: 0,
            id_prefix: id_prefix.into(),
            events: Vec::new(),
        }
    }

    /// Takes the next piece of text and returns what is certain by now.
    pub fn push(&mut self, text: &str) -> Vec<OutputEvent> {
        self.pending.push_str(text);
        while self.step() {}
        self.pending.drain(..self.at);
        self.at = 0;
        std::mem::take(&mut self.events)
    }

    /// Ends the answer where the model ended it, and returns the rest. The arguments of a call that isn't complete are
    /// completed.
    pub fn finish(&mut self) -> Vec<OutputEvent> {
        if let State::Call(reader) = &mut self.state
            && self.started
        {
            let rest = reader.complete();
            self.arguments(&rest);
        }
        self.finish_cut()
    }

    /// Ends an answer that was cut short, and returns the rest. The arguments of a call that isn't complete stay so:
    /// nobody should act on half of them.
    pub fn finish_cut(&mut self) -> Vec<OutputEvent> {
        let rest = self.pending.split_off(self.at);
        match std::mem::replace(&mut self.state, State::Content) {
            State::Thought => self.text(Part::Reasoning, &rest),
            State::Call(_) if self.started => self.end_call(),
            State::Call(_) => {
                self.no_call();
                let space = std::mem::take(&mut self.space);
                self.emit(Part::Content, &space);
            }
            // Half an end marker belongs to the call.
            State::AfterCall { .. } => self.space.clear(),
            State::Start { .. } | State::Content => {
                self.text(Part::Content, &rest);
                let space = std::mem::take(&mut self.space);
                self.emit(Part::Content, &space);
            }
        }
        std::mem::take(&mut self.events)
    }

    /// Number of tool calls so far.
    pub fn tool_calls(&self) -> usize {
        self.calls
    }

    /// Does what the pending text allows; `false` when it needs more.
    fn step(&mut self) -> bool {
        match self.state {
            State::Start { may_think } => self.step_start(may_think),
            State::Thought => self.step_thought(),
            State::Content => self.step_content(),
            State::Call(_) => self.step_call(),
            State::AfterCall { ended } => self.step_after_call(ended),
        }
    }

    fn rest(&self) -> &str {
        &self.pending[self.at..]
    }

    /// Sets white space aside; `false` if there is nothing else.
    fn take_space(&mut self) -> bool {
        let rest = &self.pending[self.at..];
        let len = rest.len() - rest.trim_start().len();
        if !self.skip_space {
            self.space.push_str(&rest[..len]);
        }
        self.at += len;
        self.at < self.pending.len()
    }

    fn step_start(&mut self, may_think: bool) -> bool {
        if !self.take_space() {
            return false;
        }
        let (open, _) = self.format.thought_syntax.markers();
        if may_think && self.rest().starts_with(open) {
            self.at += open.len();
            self.begin_thought();
        } else if may_think && open.starts_with(self.rest()) {
            return false;
        } else if !self.begin_bare_call() {
            self.state = State::Content;
        }
        true
    }

    fn begin_thought(&mut self) {
        self.space.clear();
        self.skip_space = true;
        self.state = State::Thought;
    }

    fn step_thought(&mut self) -> bool {
        let (_, close) = self.format.thought_syntax.markers();
        let found = self.take_text(Part::Reasoning, &[close]).is_some();
        if found {
            self.space.clear();
            self.skip_space = true;
            self.state = State::Start { may_think: false };
        }
        found
    }

    fn step_content(&mut self) -> bool {
        let marks = std::mem::take(&mut self.marks);
        let found = self.take_text(Part::Content, &marks);
        self.marks = marks;
        if self.marks.is_empty() {
            // Nothing that drops white space can follow.
            let space = std::mem::take(&mut self.space);
            self.emit(Part::Content, &space);
        }
        match found {
            None => false,
            Some(mark) if mark == self.format.thought_syntax.markers().0 => {
                self.begin_thought();
                true
            }
            Some(mark) => {
                self.begin_call(mark);
                true
            }
        }
    }

    /// Passes on the text before the first of `marks` and returns that mark, or the text that can't be part of one.
    fn take_text(&mut self, part: Part, marks: &[&'static str]) -> Option<&'static str> {
        let pending = std::mem::take(&mut self.pending);
        let rest = &pending[self.at..];
        let (text, found) = find_mark(rest, marks);
        self.text(part, &rest[..text]);
        self.at += text + found.map_or(0, str::len);
        self.pending = pending;
        found
    }

    /// A call without a marker, where the family writes such.
    fn begin_bare_call(&mut self) -> bool {
        let is_call =
            !self.format.tools.is_empty() && self.format.call_syntax.is_bare() && self.rest().starts_with('{');
        if is_call {
            self.begin_call("");
        }
        is_call
    }

    fn begin_call(&mut self, mark: &str) {
        self.before_call = std::mem::take(&mut self.space) + mark;
        self.raw.clear();
        self.state = State::Call(self.format.call_syntax.reader(mark, &self.format.tools));
    }

    fn step_call(&mut self) -> bool {
        let State::Call(mut reader) = std::mem::replace(&mut self.state, State::Content) else { return false };
        let pending = std::mem::take(&mut self.pending);
        let mut found = Vec::new();
        let mut progress = Progress::More;
        for c in pending[self.at..].chars() {
            progress = reader.push(c, &mut found);
            if progress == Progress::Broken {
                break;
            }
            self.at += c.len_utf8();
            self.raw.push(c);
            self.found(&mut found);
            if progress == Progress::Done {
                break;
            }
        }
        self.pending = pending;
        // A reader may report something before the character that breaks it.
        self.found(&mut found);
        match progress {
            Progress::More => {
                self.state = State::Call(reader);
                return false;
            }
            Progress::Done => {
                self.raw.clear();
                self.state = State::AfterCall { ended: false };
            }
            Progress::Broken if self.started => {
                let rest = reader.complete();
                self.arguments(&rest);
                self.end_call();
                self.skip_space = false;
            }
            Progress::Broken => self.no_call(),
        }
        true
    }

    /// Reports what a reader found; `found` is empty afterwards.
    fn found(&mut self, found: &mut Vec<Found>) {
        for found in found.drain(..) {
            match found {
                Found::Name(name) => {
                    let index = self.calls;
                    let id = format!("{}{index}", self.id_prefix);
                    self.calls += 1;
                    self.started = true;
                    self.before_call.clear();
                    self.events.push(OutputEvent::ToolCallStart { index, id, name });
                }
                Found::Arguments(text) => self.arguments(&text),
                Found::End => self.end_call(),
            }
            self.raw.clear();
        }
    }

    fn step_after_call(&mut self, ended: bool) -> bool {
        self.skip_space = true;
        if !self.take_space() {
            return false;
        }
        let rest = self.rest();
        let closings = if ended { &[] } else { self.format.call_syntax.closings() };
        if let Some(close) = closings.iter().find(|close| rest.starts_with(**close)) {
            self.at += close.len();
            self.state = State::AfterCall { ended: true };
        } else if closings.iter().any(|close| close.starts_with(rest)) {
            return false;
        } else if self.format.call_syntax.is_bare() && rest.starts_with(';') {
            self.at += 1;
        } else if !self.begin_bare_call() {
            self.state = State::Content;
        }
        true
    }

    fn arguments(&mut self, text: &str) {
        let index = self.calls.saturating_sub(1);
        match self.events.last_mut() {
            _ if text.is_empty() => {}
            Some(OutputEvent::ToolArguments { delta, .. }) => delta.push_str(text),
            _ => self.events.push(OutputEvent::ToolArguments { index, delta: text.to_owned() }),
        }
    }

    fn end_call(&mut self) {
        self.started = false;
        self.skip_space = true;
        self.events.push(OutputEvent::ToolCallEnd { index: self.calls.saturating_sub(1) });
    }

    /// What looked like a call was none.
    fn no_call(&mut self) {
        let text = std::mem::take(&mut self.before_call) + &std::mem::take(&mut self.raw);
        self.skip_space &= text.is_empty();
        self.text(Part::Content, &text);
        self.state = State::Content;
    }

    /// Passes on text but for the white space at its end, which waits for what follows.
    fn text(&mut self, part: Part, text: &str) {
        let text = if self.skip_space { text.trim_start() } else { text };
        let body = text.trim_end();
        if body.is_empty() {
            self.space.push_str(text);
            return;
        }
        self.skip_space = false;
        let space = std::mem::replace(&mut self.space, text[body.len()..].to_owned());
        self.emit(part, &space);
        self.emit(part, body);
    }

    fn emit(&mut self, part: Part, text: &str) {
        match (self.events.last_mut(), part) {
            _ if text.is_empty() => {}
            (Some(OutputEvent::Content(last)), Part::Content)
            | (Some(OutputEvent::Reasoning(last)), Part::Reasoning) => {
                last.push_str(text);
            }
            (_, Part::Content) => self.events.push(OutputEvent::Content(text.to_owned())),
            (_, Part::Reasoning) => self.events.push(OutputEvent::Reasoning(text.to_owned())),
        }
    }
}

/// What a text is part of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Content,
    Reasoning,
}

/// Length of the text before the first of `marks`, and that mark; without one, length of the text that can't be part of
/// any. All marks begin with `<` or `[`.
fn find_mark(text: &str, marks: &[&'static str]) -> (usize, Option<&'static str>) {
    let mut from = 0;
    while let Some(at) = text[from..].find(['<', '[']).map(|at| from + at).filter(|_| !marks.is_empty()) {
        let tail = &text[at..];
        if let Some(mark) = marks.iter().find(|mark| tail.starts_with(**mark)) {
            return (at, Some(mark));
        }
        if marks.iter().any(|mark| mark.starts_with(tail)) {
            return (at, None);
        }
        from = at + 1;
    }
    (text.len(), None)
}

#[cfg(test)]
mod tests;
