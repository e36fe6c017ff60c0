//! Calls as tags, `<function=NAME><parameter=KEY>VALUE</parameter>…</function>`: Qwen 3.5, Qwen 3 Coder and their kin.
//!
//! Values stand there without quotes, so only the tool's schema says whether `12` is a number or a text.

use std::sync::Arc;

use super::json::{push_text, quoted};
use super::reader::{CallReader, Found, Progress, Until, arguments, scalar};
use super::schema_types::{Types, types_of};
use crate::chat::tools::Tool;

const FUNCTION: &str = "<function=";
const END_FUNCTION: &str = "</function>";
const PARAMETER: &str = "<parameter=";
/// A value ends with its tag; the line break before it is not part of the value.
const END_VALUE: &[&str] = &["\n</parameter>", "</parameter>"];
/// Longest tag, so that a name can't take up the whole answer.
const MAX_TAG: usize = 512;

/// The state of reading one call.
#[derive(Clone, Debug)]
pub(super) struct XmlCall {
    tools: Arc<[Tool]>,
    function: String,
    started: bool,
    n_values: usize,
    state: State,
}

#[derive(Clone, Debug)]
enum State {
    /// Between tags; this much of the next one has been read.
    Tag(String),
    Value(Value),
}

#[derive(Clone, Debug)]
struct Value {
    until: Until,
    /// Nothing was read yet: a line break here belongs to the tag.
    at_start: bool,
    kind: Kind,
}

#[derive(Clone, Debug)]
enum Kind {
    /// A string, passed on as it comes.
    Text,
    /// Anything else, looked at when it is complete.
    Typed { types: Types, text: String },
}

impl XmlCall {
    /// A reader that begins before the function's tag, of which `tag` has been read already.
    pub(super) fn new(tools: Arc<[Tool]>, tag: &str) -> Self {
        Self { tools, function: String::new(), started: false, n_values: 0, state: State::Tag(tag.to_owned()) }
    }

    fn in_tag(&mut self, c: char, found: &mut Vec<Found>) -> Progress {
        let State::Tag(tag) = &mut self.state else { return Progress::Broken };
        if tag.is_empty() && c.is_whitespace() {
            return Progress::More;
        }
        tag.push(c);
        let expected: &[&str] = if self.started { &[PARAMETER, END_FUNCTION] } else { &[FUNCTION] };
        let is_begun = expected.iter().any(|start| start.starts_with(tag.as_str()));
        let has_name =
            expected.iter().any(|start| start.ends_with('=') && tag.len() > start.len() && tag.starts_with(start));
        if tag == END_FUNCTION && self.started {
            return self.close(found);
        }
        match c {
            _ if is_begun => Progress::More,
            '>' if has_name => {
                let tag = std::mem::take(tag);
                self.named(&tag, found)
            }
            '\n' | '<' | '>' => Progress::Broken,
            _ if has_name && tag.len() <= MAX_TAG => Progress::More,
            _ => Progress::Broken,
        }
    }

    /// A tag with a name is complete: that of the function, or that of a parameter.
    fn named(&mut self, tag: &str, found: &mut Vec<Found>) -> Progress {
        let name = tag.trim_end_matches('>').split_once('=').map_or("", |(_, name)| name.trim());
        if name.is_empty() {
            return Progress::Broken;
        }
        if !self.started {
            self.started = true;
            self.function = name.to_owned();
            found.push(Found::Name(name.to_owned()));
            return Progress::More;
        }
        let out = arguments(found);
        out.push_str(if self.n_values == 0 { "{" } else { ", " });
        out.push_str(&quoted(name));
        out.push_str(": ");
        self.n_values += 1;
        let types = self.types_of(name);
        let kind = if types == Types::STRING {
            out.push('"');
            Kind::Text
        } else {
            Kind::Typed { types, text: String::new() }
        };
        self.state = State::Value(Value { until: Until::new(END_VALUE), at_start: true, kind });
        Progress::More
    }

    fn types_of(&self, parameter: &str) -> Types {
        let tool = self.tools.iter().find(|tool| tool.name == self.function);
        let schema = tool.and_then(|tool| Some((tool, tool.parameters.get("properties")?.get(parameter)?)));
        schema.map_or(Types::ALL, |(tool, schema)| types_of(schema, &tool.parameters))
    }

    fn in_value(&mut self, c: char, found: &mut Vec<Found>) -> Progress {
        let State::Value(value) = &mut self.state else { return Progress::Broken };
        if std::mem::take(&mut value.at_start) && c == '\n' {
            return Progress::More;
        }
        let mut text = String::new();
        let ended = value.until.push(c, &mut text);
        value.add(&text, found);
        if ended {
            value.end(found);
            self.state = State::Tag(String::new());
        }
        Progress::More
    }

    fn close(&mut self, found: &mut Vec<Found>) -> Progress {
        arguments(found).push_str(if self.n_values == 0 { "{}" } else { "}" });
        found.push(Found::End);
        Progress::Done
    }
}

impl Value {
    fn add(&mut self, more: &str, found: &mut Vec<Found>) {
        match &mut self.kind {
            Kind::Typed { text, .. } => text.push_str(more),
            Kind::Text if more.is_empty() => {}
            Kind::Text => {
                let out = arguments(found);
                more.chars().for_each(|c| push_text(c, out));
            }
        }
    }

    fn end(&self, found: &mut Vec<Found>) {
        match &self.kind {
            Kind::Text => arguments(found).push('"'),
            Kind::Typed { types, text } => arguments(found).push_str(&typed(text, *types)),
        }
    }
}

/// A value as JSON: as what it looks like if the schema allows that, else as a string.
fn typed(text: &str, types: Types) -> String {
    let looks_like = |json: &str| serde_json::from_str(json).is_ok_and(|value| types.allow(&value));
    let trimmed = text.trim();
    let word = scalar(trimmed);
    [trimmed, word.as_str()]
        .into_iter()
        .find(|json| !json.starts_with('"') && looks_like(json))
        .map_or_else(|| quoted(text), str::to_owned)
}

impl CallReader for XmlCall {
    fn push(&mut self, c: char, found: &mut Vec<Found>) -> Progress {
        match self.state {
            State::Tag(_) => self.in_tag(c, found),
            State::Value(_) => self.in_value(c, found),
        }
    }

    fn complete(&mut self) -> String {
        let mut found = Vec::new();
        if let State::Value(value) = &mut self.state {
            let held = value.until.finish();
            value.add(&held, &mut found);
            value.end(&mut found);
        }
        let rest = if self.started { arguments(&mut found) } else { return String::new() };
        rest.push_str(if self.n_values == 0 { "{}" } else { "}" });
        std::mem::take(rest)
    }

    fn boxed_clone(&self) -> Box<dyn CallReader> {
        Box::new(self.clone())
    }
}
