//! Calls as JSON objects, `{"name": …, "arguments": {…}}`: Hermes, Qwen 2.5 and 3, SmolLM3, Granite, Llama 3.
//!
//! The arguments are passed on while they come, so a client sees them grow.

use std::sync::Arc;

use serde_json::Value;

use super::json::{JsonReader, Step};
use super::reader::{CallReader, Found, Progress, arguments};
use crate::chat::tools::Tool;

/// Which objects are taken for calls.
#[derive(Clone, Debug)]
pub(super) enum Accept {
    /// Any with a name: a marker said that a call comes.
    Any,
    /// Those that name one of the tools and have no fields that calls don't have: the object may as well be an answer.
    Known(Arc<[Tool]>),
}

/// The next thing expected inside the call object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expect {
    Open,
    FirstKey,
    Key,
    InKey,
    Colon,
    Value,
    InValue,
    /// The arguments, passed on as they come.
    InArguments,
    CommaOrEnd,
}

/// The state of reading one call object.
#[derive(Clone, Debug)]
pub(super) struct CallObject {
    accept: Accept,
    expect: Expect,
    json: JsonReader,
    key: String,
    value: String,
    name: Option<String>,
    /// Arguments that are complete but wait for the name.
    waiting: Option<String>,
    started: bool,
}

impl CallObject {
    pub(super) fn new(accept: Accept) -> Self {
        Self {
            accept,
            expect: Expect::Open,
            json: JsonReader::new(),
            key: String::new(),
            value: String::new(),
            name: None,
            waiting: None,
            started: false,
        }
    }

    fn structure(&mut self, c: char, found: &mut Vec<Found>) -> Progress {
        self.expect = match (self.expect, c) {
            (Expect::Open, '{') => Expect::FirstKey,
            (Expect::FirstKey | Expect::Key, '"') => {
                self.json = JsonReader::new();
                self.key.clear();
                self.json.push(c, &mut self.key);
                Expect::InKey
            }
            (Expect::Colon, ':') => Expect::Value,
            (Expect::Value, _) => return self.begin_value(c, found),
            (Expect::CommaOrEnd, ',') => Expect::Key,
            (Expect::FirstKey | Expect::CommaOrEnd, '}') => return self.close(found),
            _ => return Progress::Broken,
        };
        Progress::More
    }

    fn in_key(&mut self, c: char) -> Progress {
        if self.json.push(c, &mut self.key) == Step::Done {
            self.key = serde_json::from_str(&self.key).unwrap_or_default();
            self.expect = Expect::Colon;
            let is_of_calls = matches!(self.key.as_str(), "name" | "arguments" | "parameters" | "type" | "id");
            if !is_of_calls && matches!(self.accept, Accept::Known(_)) {
                return Progress::Broken;
            }
        }
        Progress::More
    }

    fn begin_value(&mut self, c: char, found: &mut Vec<Found>) -> Progress {
        self.value.clear();
        self.json = JsonReader::new();
        self.expect = Expect::InValue;
        if c == '{' && self.is_arguments() && !self.started && self.name.is_some() {
            self.start(found);
            self.expect = Expect::InArguments;
            return self.in_arguments(c, found);
        }
        self.in_value(c, found)
    }

    fn in_value(&mut self, c: char, found: &mut Vec<Found>) -> Progress {
        match self.json.push(c, &mut self.value) {
            Step::More => Progress::More,
            Step::Done => self.end_value(found),
            Step::DoneBefore => match self.end_value(found) {
                Progress::More if !c.is_whitespace() => self.structure(c, found),
                progress => progress,
            },
            Step::Invalid => Progress::Broken,
        }
    }

    fn in_arguments(&mut self, c: char, found: &mut Vec<Found>) -> Progress {
        match self.json.push(c, arguments(found)) {
            Step::More => Progress::More,
            Step::Done | Step::DoneBefore => {
                self.expect = Expect::CommaOrEnd;
                Progress::More
            }
            Step::Invalid => Progress::Broken,
        }
    }

    fn end_value(&mut self, found: &mut Vec<Found>) -> Progress {
        self.expect = Expect::CommaOrEnd;
        if self.key == "name" && self.name.is_none() {
            match serde_json::from_str::<String>(&self.value) {
                Ok(name) if self.accepts(&name) => self.name = Some(name),
                _ => return Progress::Broken,
            }
        } else if self.is_arguments() && self.waiting.is_none() && !self.started {
            match whole_arguments(&self.value) {
                Some(object) => self.waiting = Some(object),
                None => return Progress::Broken,
            }
        }
        self.start_if_complete(found);
        Progress::More
    }

    fn accepts(&self, name: &str) -> bool {
        match &self.accept {
            Accept::Any => !name.is_empty(),
            Accept::Known(tools) => tools.iter().any(|tool| tool.name == name),
        }
    }

    fn close(&mut self, found: &mut Vec<Found>) -> Progress {
        if self.name.is_none() {
            return Progress::Broken;
        }
        if !self.started {
            self.waiting.get_or_insert_with(|| "{}".into());
            self.start_if_complete(found);
        }
        found.push(Found::End);
        Progress::Done
    }

    fn start_if_complete(&mut self, found: &mut Vec<Found>) {
        if self.started || self.name.is_none() {
            return;
        }
        if let Some(waiting) = self.waiting.take() {
            self.start(found);
            found.push(Found::Arguments(waiting));
        }
    }

    fn start(&mut self, found: &mut Vec<Found>) {
        self.started = true;
        found.extend(self.name.clone().map(Found::Name));
    }

    fn is_arguments(&self) -> bool {
        matches!(self.key.as_str(), "arguments" | "parameters")
    }
}

impl CallReader for CallObject {
    fn push(&mut self, c: char, found: &mut Vec<Found>) -> Progress {
        match self.expect {
            Expect::InKey => self.in_key(c),
            Expect::InValue => self.in_value(c, found),
            Expect::InArguments => self.in_arguments(c, found),
            _ if c.is_whitespace() => Progress::More,
            _ => self.structure(c, found),
        }
    }

    fn complete(&mut self) -> String {
        let mut rest = String::new();
        if self.expect == Expect::InArguments {
            self.json.complete(&mut rest);
        }
        rest
    }

    fn boxed_clone(&self) -> Box<dyn CallReader> {
        Box::new(self.clone())
    }
}

/// Arguments that came as a JSON string hold the object itself; none at all is an empty object.
fn whole_arguments(value: &str) -> Option<String> {
    let is_object = |text: &str| serde_json::from_str::<Value>(text).is_ok_and(|value| value.is_object());
    match serde_json::from_str(value) {
        Ok(Value::Null) => Some("{}".into()),
        Ok(Value::String(text)) if text.trim().is_empty() => Some("{}".into()),
        Ok(Value::String(text)) => is_object(&text).then_some(text),
        Ok(Value::Object(_)) => Some(value.to_owned()),
        _ => None,
    }
}

/// Calls in an array, `[{"name": …}, …]`, or one of them without it: Granite 3, Phi 4 and Mistral behind their marker.
#[derive(Clone, Debug)]
pub(super) struct CallArray {
    accept: Accept,
    state: InArray,
}

#[derive(Clone, Debug)]
enum InArray {
    Open,
    /// A call comes, or the end if there may be none.
    Item {
        may_end: bool,
    },
    Call {
        call: Box<CallObject>,
        in_array: bool,
    },
    Next,
}

impl CallArray {
    pub(super) fn new(accept: Accept) -> Self {
        Self { accept, state: InArray::Open }
    }

    fn begin(&mut self, c: char, in_array: bool, found: &mut Vec<Found>) -> Progress {
        let mut call = Box::new(CallObject::new(self.accept.clone()));
        let progress = call.push(c, found);
        self.state = InArray::Call { call, in_array };
        progress
    }
}

impl CallReader for CallArray {
    fn push(&mut self, c: char, found: &mut Vec<Found>) -> Progress {
        match &mut self.state {
            InArray::Call { call, in_array } => {
                let in_array = *in_array;
                match call.push(c, found) {
                    Progress::Done if in_array => self.state = InArray::Next,
                    progress => return progress,
                }
            }
            _ if c.is_whitespace() => {}
            InArray::Open if c == '[' => self.state = InArray::Item { may_end: true },
            InArray::Open if c == '{' => return self.begin(c, false, found),
            InArray::Item { .. } if c == '{' => return self.begin(c, true, found),
            InArray::Item { may_end: true } | InArray::Next if c == ']' => return Progress::Done,
            InArray::Next if c == ',' => self.state = InArray::Item { may_end: false },
            _ => return Progress::Broken,
        }
        Progress::More
    }

    fn complete(&mut self) -> String {
        match &mut self.state {
            InArray::Call { call, .. } => call.complete(),
            _ => String::new(),
        }
    }

    fn boxed_clone(&self) -> Box<dyn CallReader> {
        Box::new(self.clone())
    }
}
