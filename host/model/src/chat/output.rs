//! Reading what a model writes: thought, content and tool calls, told apart while the text streams in.

use super::call_scanner::{CallScanner, Found, Progress};

const THINK: &str = "<think>";
const END_THINK: &str = "</think>";
pub(super) const CALL: &str = "<tool_call>";
pub(super) const END_CALL: &str = "</tool_call>";

/// A part of the answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OutputEvent {
    /// The next part of the text for the user.
    Content(String),
    /// The next part of the thought.
    Reasoning(String),
    /// A tool call begins; `index` counts from 0.
    ToolCallStart { index: usize, id: String, name: String },
    /// The next part of the call's arguments; all parts together are JSON if the generation wasn't cut short.
    ToolArguments { index: usize, delta: String },
    /// The call is complete, or the generation ended inside it.
    ToolCallEnd { index: usize },
}

/// How tool calls look in the output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ToolOutput {
    /// There are none: everything is content.
    #[default]
    None,
    /// `<tool_call>{"name": …, "arguments": …}</tool_call>`, among content.
    Tagged,
    /// The whole output is one call object, or an array of them (a generation forced by a schema).
    BareJson,
}

/// What to look for in the output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OutputFormat {
    /// A thought may come first, as `<think>…</think>`.
    pub thoughts: bool,
    /// The prompt ends inside a thought, so the output begins in it.
    pub in_thought: bool,
    pub tools: ToolOutput,
}

#[derive(Clone, Debug)]
enum State {
    /// Nothing but white space so far: a thought may begin.
    Start,
    Thought,
    Content,
    Call(Box<CallScanner>),
    /// Behind the call's object: its end tag comes.
    CallEnd,
    /// Between the objects of bare JSON.
    Bare,
}

/// Splits a stream of text into events. The joined events don't depend on how the text was cut, and no part of a marker
/// is ever shown as content.
#[derive(Clone, Debug)]
pub struct OutputParser {
    format: OutputFormat,
    state: State,
    /// Text that may still turn out to be a marker, or white space that may be dropped.
    pending: String,
    skip_space: bool,
    /// White space before the call tag, dropped unless that turns out to be no call.
    before_call: String,
    calls: usize,
    id_prefix: String,
    events: Vec<OutputEvent>,
}

impl OutputParser {
    /// A parser for one answer. The ids of its calls are `id_prefix` and the index, so the prefix must be unique.
    pub fn new(format: OutputFormat, id_prefix: impl Into<String>) -> Self {
        let mut parser = Self {
            format,
            state: State::Start,
            pending: String::new(),
            skip_space: format.in_thought,
            before_call: String::new(),
            calls: 0,
            id_prefix: id_prefix.into(),
            events: Vec::new(),
        };
        if format.in_thought {
            parser.state = State::Thought;
        } else if !format.thoughts {
            parser.state = parser.after_thought();
        }
        parser
    }

    /// Takes the next piece of text and returns what is certain by now.
    pub fn push(&mut self, text: &str) -> Vec<OutputEvent> {
        self.pending.push_str(text);
        while self.step() {}
        std::mem::take(&mut self.events)
    }

    /// Ends the answer and returns the rest.
    pub fn finish(&mut self) -> Vec<OutputEvent> {
        let rest = std::mem::take(&mut self.pending);
        match std::mem::replace(&mut self.state, State::Content) {
            State::Thought => self.reasoning(rest.trim_end()),
            State::Call(scanner) if scanner.started() => self.end_call(),
            State::Call(scanner) => {
                let text = self.call_text(&scanner.raw);
                self.content(&text);
            }
            // Half an end tag belongs to the call.
            State::CallEnd => {}
            State::Start | State::Content | State::Bare => self.content(&rest),
        }
        std::mem::take(&mut self.events)
    }

    /// Number of tool calls so far.
    pub fn tool_calls(&self) -> usize {
        self.calls
    }

    /// Does what the pending text allows; `false` when it needs more.
    fn step(&mut self) -> bool {
        if self.skip_space && !matches!(self.state, State::Call(_)) {
            let space = self.pending.len() - self.pending.trim_start().len();
            self.pending.drain(..space);
            if self.pending.is_empty() {
                return false;
            }
            self.skip_space = false;
        }
        match &self.state {
            State::Start => self.step_start(),
            State::Thought => self.step_thought(),
            State::Content => self.step_content(),
            State::Call(_) => self.step_call(),
            State::CallEnd => self.step_call_end(),
            State::Bare => self.step_bare(),
        }
    }

    fn step_start(&mut self) -> bool {
        let text = self.pending.trim_start();
        if let Some(rest) = text.strip_prefix(THINK) {
            self.pending = rest.to_owned();
            self.skip_space = true;
            self.state = State::Thought;
            return true;
        }
        if THINK.starts_with(text) {
            return false;
        }
        self.state = self.after_thought();
        true
    }

    fn step_thought(&mut self) -> bool {
        let (text, found) = self.text_before(END_THINK);
        self.reasoning(&text);
        if found {
            self.skip_space = true;
            self.state = self.after_thought();
        }
        found
    }

    fn step_content(&mut self) -> bool {
        if self.format.tools != ToolOutput::Tagged {
            let text = std::mem::take(&mut self.pending);
            self.content(&text);
            return false;
        }
        let (text, found) = self.text_before(CALL);
        self.content(&text);
        if found {
            self.state = State::Call(Box::new(CallScanner::new()));
        }
        found
    }

    fn step_call(&mut self) -> bool {
        let pending = std::mem::take(&mut self.pending);
        let State::Call(mut scanner) = std::mem::replace(&mut self.state, State::CallEnd) else { return false };
        let mut chars = pending.chars();
        let mut progress = Progress::More;
        while progress == Progress::More
            && let Some(c) = chars.next()
        {
            progress = scanner.push(c);
            for found in scanner.found.drain(..) {
                self.found(found);
            }
        }
        self.pending = chars.as_str().to_owned();
        match progress {
            Progress::More => {
                self.state = State::Call(scanner);
                return false;
            }
            Progress::Broken if !scanner.started() => {
                let text = self.call_text(&scanner.raw);
                self.content(&text);
                self.state = State::Content;
            }
            Progress::Broken | Progress::Done => self.end_call(),
        }
        true
    }

    fn step_call_end(&mut self) -> bool {
        if self.format.tools == ToolOutput::BareJson {
            self.state = State::Bare;
            return true;
        }
        if let Some(rest) = self.pending.strip_prefix(END_CALL) {
            self.pending = rest.to_owned();
        } else if END_CALL.starts_with(&self.pending) {
            return false;
        }
        self.skip_space = true;
        self.state = State::Content;
        true
    }

    fn step_bare(&mut self) -> bool {
        match self.pending.trim_start().chars().next() {
            None => false,
            Some('[' | ',' | ']') => {
                let rest = self.pending.trim_start()[1..].to_owned();
                self.pending = rest;
                true
            }
            Some('{') => {
                self.state = State::Call(Box::new(CallScanner::new()));
                true
            }
            Some(_) => {
                self.state = State::Content;
                true
            }
        }
    }

    fn after_thought(&self) -> State {
        match self.format.tools {
            ToolOutput::BareJson => State::Bare,
            _ => State::Content,
        }
    }

    /// Takes the pending text up to `marker` and the marker itself; white space between them is set aside. If the marker
    /// isn't there yet, takes the text that can't be part of it; white space at the end waits for what follows.
    fn text_before(&mut self, marker: &str) -> (String, bool) {
        let found = self.pending.find(marker);
        let end = found.unwrap_or_else(|| self.pending.len() - partial_marker(&self.pending, marker));
        let text = self.pending[..end].trim_end().to_owned();
        if found.is_some() {
            self.before_call = self.pending[text.len()..end].to_owned();
            self.pending.drain(..end + marker.len());
        } else {
            self.pending.drain(..text.len());
        }
        (text, found.is_some())
    }

    fn found(&mut self, found: Found) {
        match found {
            Found::Name(name) => {
                let index = self.calls;
                let id = format!("{}{index}", self.id_prefix);
                self.calls += 1;
                self.events.push(OutputEvent::ToolCallStart { index, id, name });
            }
            Found::Arguments(c) => self.arguments(c.encode_utf8(&mut [0; 4])),
            Found::AllArguments(text) => self.arguments(&text),
        }
    }

    fn arguments(&mut self, text: &str) {
        let index = self.calls.saturating_sub(1);
        match self.events.last_mut() {
            Some(OutputEvent::ToolArguments { delta, .. }) => delta.push_str(text),
            _ => self.events.push(OutputEvent::ToolArguments { index, delta: text.to_owned() }),
        }
    }

    fn end_call(&mut self) {
        self.skip_space = true;
        self.events.push(OutputEvent::ToolCallEnd { index: self.calls.saturating_sub(1) });
    }

    /// The text of something that looked like a call and was none.
    fn call_text(&self, raw: &str) -> String {
        match self.format.tools {
            ToolOutput::BareJson => raw.to_owned(),
            _ => format!("{}{CALL}{raw}", self.before_call),
        }
    }

    fn content(&mut self, text: &str) {
        match self.events.last_mut() {
            _ if text.is_empty() => {}
            Some(OutputEvent::Content(last)) => last.push_str(text),
            _ => self.events.push(OutputEvent::Content(text.to_owned())),
        }
    }

    fn reasoning(&mut self, text: &str) {
        match self.events.last_mut() {
            _ if text.is_empty() => {}
            Some(OutputEvent::Reasoning(last)) => last.push_str(text),
            _ => self.events.push(OutputEvent::Reasoning(text.to_owned())),
        }
    }
}

/// Length of the longest end of `text` that is a beginning of `marker`.
fn partial_marker(text: &str, marker: &str) -> usize {
    (1..marker.len()).rev().find(|&n| text.ends_with(&marker[..n])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn format(tools: ToolOutput) -> OutputFormat {
        OutputFormat { thoughts: true, in_thought: false, tools }
    }

    /// The events of a text that comes in pieces of `sizes` characters, joined where they continue each other.
    fn events(text: &str, format: OutputFormat, sizes: &[usize]) -> Vec<OutputEvent> {
        let mut parser = OutputParser::new(format, "c");
        let mut all = Vec::new();
        let chars: Vec<char> = text.chars().collect();
        let mut rest = chars.as_slice();
        let mut sizes = sizes.iter().cycle();
        while !rest.is_empty() {
            let n = sizes.next().copied().unwrap_or(1).clamp(1, rest.len());
            all.extend(parser.push(&rest[..n].iter().collect::<String>()));
            rest = &rest[n..];
        }
        all.extend(parser.finish());
        join(all)
    }

    fn join(events: Vec<OutputEvent>) -> Vec<OutputEvent> {
        use OutputEvent::*;
        let mut joined: Vec<OutputEvent> = Vec::new();
        for event in events {
            match (joined.last_mut(), &event) {
                (Some(Content(a)), Content(b)) | (Some(Reasoning(a)), Reasoning(b)) => a.push_str(b),
                (Some(ToolArguments { delta: a, .. }), ToolArguments { delta: b, .. }) => a.push_str(b),
                _ => joined.push(event),
            }
        }
        joined
    }

    fn call(index: usize, name: &str, arguments: &str) -> Vec<OutputEvent> {
        vec![
            OutputEvent::ToolCallStart { index, id: format!("c{index}"), name: name.into() },
            OutputEvent::ToolArguments { index, delta: arguments.into() },
            OutputEvent::ToolCallEnd { index },
        ]
    }

    fn content(text: &str) -> Vec<OutputEvent> {
        vec![OutputEvent::Content(text.into())]
    }

    fn reasoning(text: &str) -> Vec<OutputEvent> {
        vec![OutputEvent::Reasoning(text.into())]
    }

    #[test]
    fn thought_content_and_calls_are_told_apart() {
        let text = "<think>\nneed time\n</think>\n\nLet me see.\n<tool_call>\n{\"name\": \"get\", \"arguments\": {\"a\": \"}\\\"\"}}\n\
                    </tool_call>\n<tool_call>\n{\"arguments\": {\"b\": [1]}, \"name\": \"put\"}\n</tool_call>";
        let expected = [
            reasoning("need time"),
            content("Let me see."),
            call(0, "get", "{\"a\": \"}\\\"\"}"),
            call(1, "put", "{\"b\": [1]}"),
        ];
        assert_eq!(events(text, format(ToolOutput::Tagged), &[1]), expected.concat());
    }

    #[test]
    fn output_may_begin_inside_a_thought() {
        let format = OutputFormat { in_thought: true, ..format(ToolOutput::None) };
        assert_eq!(
            events("\nhm </thin </think>\nyes ", format, &[2]),
            [reasoning("hm </thin"), content("yes ")].concat()
        );
        assert_eq!(events("never done", format, &[3]), reasoning("never done"));
    }

    #[test]
    fn without_tools_and_thoughts_text_passes_untouched_and_at_once() {
        let mut parser = OutputParser::new(OutputFormat::default(), "c");
        assert_eq!(parser.push(" a <tool_call> \n"), content(" a <tool_call> \n"));
        assert_eq!(parser.finish(), []);
    }

    #[test]
    fn what_is_no_call_stays_content() {
        for text in [
            "a <tool_call>b</tool_call> c",
            "x <tool_call>{\"name\": 3}",
            "<tool_call>{}",
            "a <tool_c",
            "a <tool_call>{\"na",
        ] {
            assert_eq!(events(text, format(ToolOutput::Tagged), &[1]), content(text), "{text}");
        }
    }

    #[test]
    fn odd_arguments_become_objects_and_missing_end_tags_are_forgiven() {
        for (body, arguments) in [
            (r#"{"name":"f"}"#, "{}"),
            (r#"{"name":"f","arguments":null}"#, "{}"),
            (r#"{"name":"f","arguments":"{\"a\":1}"}"#, r#"{"a":1}"#),
            (r#"{"id":7,"name":"f","parameters":{"a":{}},"x":[{}]}"#, r#"{"a":{}}"#),
        ] {
            assert_eq!(
                events(&format!("<tool_call>{body}"), format(ToolOutput::Tagged), &[1]),
                call(0, "f", arguments)
            );
        }
        let cut = events(r#"<tool_call>{"name":"f","arguments":{"a":"#, format(ToolOutput::Tagged), &[1]);
        assert_eq!(cut, call(0, "f", r#"{"a":"#));
    }

    #[test]
    fn bare_json_is_one_call_or_an_array_of_them() {
        let format = format(ToolOutput::BareJson);
        let one = r#"{"name":"f","arguments":{"a":1}}"#;
        assert_eq!(events(one, format, &[1]), call(0, "f", r#"{"a":1}"#));
        let two = format!("[{one}, {one}]");
        assert_eq!(events(&two, format, &[4]), [call(0, "f", r#"{"a":1}"#), call(1, "f", r#"{"a":1}"#)].concat());
        assert_eq!(events("sorry", format, &[1]), content("sorry"));
    }

    #[test]
    fn arguments_stream_while_they_are_written() {
        let mut parser = OutputParser::new(format(ToolOutput::Tagged), "c");
        let start = parser.push("<tool_call>{\"name\":\"f\",\"arguments\":{\"a");
        assert_eq!(start[1], OutputEvent::ToolArguments { index: 0, delta: "{\"a".into() });
        assert_eq!(parser.push("\":"), [OutputEvent::ToolArguments { index: 0, delta: "\":".into() }]);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1000))]
        #[test]
        fn the_events_do_not_depend_on_the_chunks(
            parts in proptest::collection::vec(prop_oneof![
                Just("<think>".to_owned()), Just("</think>".to_owned()), Just("<tool_call>".to_owned()),
                Just("</tool_call>".to_owned()), Just("{\"name\": \"f\", \"arguments\": {\"k\": \"é\"}}".to_owned()),
                Just("{\"arguments\": \"{}\", \"name\": \"g\"}".to_owned()), Just(" \n".to_owned()), Just("[".to_owned()),
                "[a-z<>{}/_:,\" \n\\\\]{0,6}",
            ], 0..10),
            sizes in proptest::collection::vec(1usize..9, 1..6),
            thoughts: bool, in_thought: bool, tools in 0..3,
        ) {
            let tools = [ToolOutput::None, ToolOutput::Tagged, ToolOutput::BareJson][tools as usize];
            let format = OutputFormat { thoughts, in_thought, tools };
            let text = parts.concat();
            prop_assert_eq!(events(&text, format, &sizes), events(&text, format, &[text.len().max(1)]));
        }
    }
}
