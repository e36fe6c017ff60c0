//! Calls of Gemma 4: `call:NAME{key:value,…}` with bare keys and strings between `<|"|>`.

use super::json::{JsonReader, Step, push_text, quoted};
use super::reader::{CallReader, Found, Progress, Until, arguments, scalar};

const CALL: &str = "call:";
const QUOTE: &[&str] = &["<|\"|>"];
/// Longest name of a function or argument.
const MAX_NAME: usize = 512;
const MAX_DEPTH: usize = 100;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Container {
    Object,
    Array,
}

#[derive(Clone, Debug)]
enum State {
    /// `call:`, of which this much has been read.
    Prefix(String),
    Name(String),
    /// A key comes; or the end of the object, if it is empty so far.
    Key {
        may_end: bool,
    },
    BareKey(String),
    QuotedKey(Until, String),
    /// The colon behind a quoted key.
    Colon(String),
    /// A value comes; or the end of the array, if it is empty so far.
    Value {
        may_end: bool,
    },
    /// The quotation mark before a key or value, of which this much has been read.
    Quote {
        read: String,
        of_key: bool,
    },
    Text(Until),
    /// A string in JSON's quotes, which the format doesn't have.
    JsonText(JsonReader),
    Bare(String),
    Next,
}

/// The state of reading one call.
#[derive(Clone, Debug)]
pub(super) struct GemmaCall {
    state: State,
    open: Vec<Container>,
    /// What separates the next value from what was passed on.
    lead: String,
}

impl GemmaCall {
    pub(super) fn new() -> Self {
        Self { state: State::Prefix(String::new()), open: Vec::new(), lead: String::new() }
    }

    fn go(&mut self, state: State) -> Progress {
        self.state = state;
        Progress::More
    }

    fn in_name(&mut self, c: char, found: &mut Vec<Found>) -> Progress {
        let State::Name(name) = &mut self.state else { return Progress::Broken };
        if c != '{' {
            name.push(c);
            let is_name = !matches!(c, '<' | '}' | '\n') && name.len() <= MAX_NAME;
            return if is_name { Progress::More } else { Progress::Broken };
        }
        let name = name.trim();
        if name.is_empty() {
            return Progress::Broken;
        }
        found.extend([Found::Name(name.to_owned()), Found::Arguments("{".to_owned())]);
        self.open.push(Container::Object);
        self.go(State::Key { may_end: true })
    }

    fn begin_key(&mut self, c: char) -> Progress {
        match c {
            '<' => self.go(State::Quote { read: c.to_string(), of_key: true }),
            ',' | ':' | '{' | '}' | '[' | ']' => Progress::Broken,
            _ => self.go(State::BareKey(c.to_string())),
        }
    }

    fn in_bare_key(&mut self, c: char) -> Progress {
        let State::BareKey(key) = &mut self.state else { return Progress::Broken };
        match c {
            ':' => {
                let key = key.trim();
                let bare = key.strip_prefix('"').and_then(|key| key.strip_suffix('"')).unwrap_or(key).to_owned();
                self.keyed(&bare)
            }
            ',' | '{' | '}' | '[' | ']' | '<' | '\n' => Progress::Broken,
            _ if key.len() > MAX_NAME => Progress::Broken,
            _ => {
                key.push(c);
                Progress::More
            }
        }
    }

    /// The key is complete; it is passed on with its value.
    fn keyed(&mut self, key: &str) -> Progress {
        self.lead.push_str(&quoted(key));
        self.lead.push_str(": ");
        self.go(State::Value { may_end: false })
    }

    fn begin_value(&mut self, c: char, found: &mut Vec<Found>) -> Progress {
        match c {
            '<' => self.go(State::Quote { read: c.to_string(), of_key: false }),
            '{' | '[' if self.open.len() >= MAX_DEPTH => Progress::Broken,
            '{' => {
                self.lead(found).push(c);
                self.open.push(Container::Object);
                self.go(State::Key { may_end: true })
            }
            '[' => {
                self.lead(found).push(c);
                self.open.push(Container::Array);
                self.go(State::Value { may_end: true })
            }
            '"' => {
                let mut json = JsonReader::new();
                json.push(c, self.lead(found));
                self.go(State::JsonText(json))
            }
            ',' | '}' | ']' | ':' => Progress::Broken,
            _ => self.go(State::Bare(c.to_string())),
        }
    }

    /// Passes on what leads to a value; the value is appended next.
    fn lead<'f>(&mut self, found: &'f mut Vec<Found>) -> &'f mut String {
        let out = arguments(found);
        out.push_str(&std::mem::take(&mut self.lead));
        out
    }

    fn in_quote(&mut self, c: char, found: &mut Vec<Found>) -> Progress {
        let State::Quote { read, of_key } = &mut self.state else { return Progress::Broken };
        read.push(c);
        match (read.as_str() == QUOTE[0], *of_key) {
            (true, true) => self.go(State::QuotedKey(Until::new(QUOTE), String::new())),
            (true, false) => {
                self.lead(found).push('"');
                self.go(State::Text(Until::new(QUOTE)))
            }
            (false, _) if QUOTE[0].starts_with(read.as_str()) => Progress::More,
            (false, _) => Progress::Broken,
        }
    }

    fn in_bare(&mut self, c: char, found: &mut Vec<Found>) -> Progress {
        let State::Bare(text) = &mut self.state else { return Progress::Broken };
        match c {
            ',' | '}' | ']' => {
                let value = scalar(text.trim());
                self.lead(found).push_str(&value);
                self.next(c, found)
            }
            '<' | '{' | '[' | '\n' => Progress::Broken,
            _ => {
                text.push(c);
                Progress::More
            }
        }
    }

    /// Behind a value.
    fn next(&mut self, c: char, found: &mut Vec<Found>) -> Progress {
        self.state = State::Next;
        match (c, self.open.last()) {
            ('}', Some(Container::Object)) | (']', Some(Container::Array)) => self.close(found),
            (',', Some(container)) => {
                self.lead = ", ".to_owned();
                let is_object = *container == Container::Object;
                self.go(if is_object { State::Key { may_end: false } } else { State::Value { may_end: false } })
            }
            _ if c.is_whitespace() => Progress::More,
            _ => Progress::Broken,
        }
    }

    fn close(&mut self, found: &mut Vec<Found>) -> Progress {
        self.state = State::Next;
        arguments(found).extend(self.open.pop().map(closing));
        if self.open.is_empty() {
            found.push(Found::End);
            return Progress::Done;
        }
        Progress::More
    }
}

fn closing(container: Container) -> char {
    if container == Container::Object { '}' } else { ']' }
}

/// Appends the next part of a string; `true` at its end.
fn in_text(until: &mut Until, c: char, found: &mut Vec<Found>) -> bool {
    let mut text = String::new();
    let ended = until.push(c, &mut text);
    if !text.is_empty() || ended {
        let out = arguments(found);
        text.chars().for_each(|c| push_text(c, out));
        out.extend(ended.then_some('"'));
    }
    ended
}

impl CallReader for GemmaCall {
    fn push(&mut self, c: char, found: &mut Vec<Found>) -> Progress {
        match &mut self.state {
            State::Prefix(read) if read.is_empty() && c.is_whitespace() => Progress::More,
            State::Prefix(read) => {
                read.push(c);
                match read.as_str() {
                    CALL => self.go(State::Name(String::new())),
                    read if CALL.starts_with(read) => Progress::More,
                    _ => Progress::Broken,
                }
            }
            State::Name(_) => self.in_name(c, found),
            State::Key { may_end: true } if c == '}' => self.close(found),
            State::Value { may_end: true } if c == ']' => self.close(found),
            State::Key { .. } | State::Value { .. } | State::Colon(_) if c.is_whitespace() => Progress::More,
            State::Key { .. } => self.begin_key(c),
            State::BareKey(_) => self.in_bare_key(c),
            State::QuotedKey(_, key) if key.len() > MAX_NAME => Progress::Broken,
            State::QuotedKey(until, key) => match until.push(c, key) {
                true => {
                    let key = std::mem::take(key);
                    self.go(State::Colon(key))
                }
                false => Progress::More,
            },
            State::Colon(key) if c == ':' => {
                let key = std::mem::take(key);
                self.keyed(&key)
            }
            State::Colon(_) => Progress::Broken,
            State::Value { .. } => self.begin_value(c, found),
            State::Quote { .. } => self.in_quote(c, found),
            State::Text(until) => match in_text(until, c, found) {
                true => self.go(State::Next),
                false => Progress::More,
            },
            State::JsonText(json) => match json.push(c, arguments(found)) {
                Step::More => Progress::More,
                Step::Done => self.go(State::Next),
                Step::DoneBefore | Step::Invalid => Progress::Broken,
            },
            State::Bare(_) => self.in_bare(c, found),
            State::Next => self.next(c, found),
        }
    }

    fn complete(&mut self) -> String {
        let mut found = Vec::new();
        match std::mem::replace(&mut self.state, State::Next) {
            State::Text(mut until) => {
                let out = arguments(&mut found);
                until.finish().chars().for_each(|c| push_text(c, out));
                out.push('"');
            }
            State::JsonText(mut json) => json.complete(arguments(&mut found)),
            State::Bare(text) => self.lead(&mut found).push_str(&scalar(text.trim())),
            _ => {}
        }
        let rest = arguments(&mut found);
        rest.extend(self.open.drain(..).rev().map(closing));
        std::mem::take(rest)
    }

    fn boxed_clone(&self) -> Box<dyn CallReader> {
        Box::new(self.clone())
    }
}
