//! Calls as a list of Python calls, `[name(key=value, …), …]`: LFM2 between its markers.

use super::json::{push_text, quoted};
use super::reader::{CallReader, Found, Progress, arguments, scalar};

/// Longest name of a function or argument.
const MAX_NAME: usize = 512;
const MAX_DEPTH: usize = 100;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Container {
    Call,
    Object,
    Array,
}

#[derive(Clone, Debug)]
enum State {
    Open,
    /// The name of a function, or the end of the list if it is empty so far.
    Name(String),
    /// The name of an argument, or the end of the call if it has none so far.
    Argument(String),
    /// A key of a dictionary comes, or its end.
    Key,
    Value,
    Text(Text),
    Bare(String),
    Next,
    /// Behind a call.
    NextCall,
}

/// The inside of a string.
#[derive(Clone, Debug)]
struct Text {
    quote: char,
    is_key: bool,
    escape: Escape,
    /// A quotation mark and the white space behind it. It ends the string only if punctuation follows: templates write
    /// apostrophes without escaping them.
    end: String,
}

#[derive(Clone, Debug)]
enum Escape {
    None,
    Begun,
    /// Digits of a character's number, of which so many are missing.
    Code {
        digits: String,
        missing: usize,
    },
}

/// The state of reading one list of calls.
#[derive(Clone, Debug)]
pub(super) struct PythonCalls {
    state: State,
    open: Vec<Container>,
    /// What separates the next value from what was passed on.
    lead: String,
    in_list: bool,
}

impl PythonCalls {
    pub(super) fn new() -> Self {
        Self { state: State::Open, open: Vec::new(), lead: String::new(), in_list: false }
    }

    fn go(&mut self, state: State) -> Progress {
        self.state = state;
        Progress::More
    }

    fn in_name(&mut self, c: char, found: &mut Vec<Found>) -> Progress {
        let State::Name(name) = &mut self.state else { return Progress::Broken };
        match c {
            '(' if !name.is_empty() => {
                found.extend([Found::Name(name.trim().to_owned()), Found::Arguments("{".to_owned())]);
                self.open.push(Container::Call);
                self.lead.clear();
                self.go(State::Argument(String::new()))
            }
            _ if name.is_empty() && c.is_whitespace() => Progress::More,
            _ if is_name(c) && name.len() < MAX_NAME => {
                name.push(c);
                Progress::More
            }
            _ => Progress::Broken,
        }
    }

    fn in_argument(&mut self, c: char, found: &mut Vec<Found>) -> Progress {
        let State::Argument(name) = &mut self.state else { return Progress::Broken };
        match c {
            '=' if !name.is_empty() => {
                let key = quoted(name);
                self.lead.push_str(&key);
                self.lead.push_str(": ");
                self.go(State::Value)
            }
            ')' if name.is_empty() => self.close(found),
            _ if c.is_whitespace() => Progress::More,
            _ if is_name(c) && name.len() < MAX_NAME => {
                name.push(c);
                Progress::More
            }
            _ => Progress::Broken,
        }
    }

    fn begin_key(&mut self, c: char, found: &mut Vec<Found>) -> Progress {
        match c {
            '}' => self.close(found),
            '\'' | '"' => {
                self.lead(found).push('"');
                self.go(State::Text(Text { quote: c, is_key: true, escape: Escape::None, end: String::new() }))
            }
            _ => Progress::Broken,
        }
    }

    fn begin_value(&mut self, c: char, found: &mut Vec<Found>) -> Progress {
        match c {
            '\'' | '"' => {
                self.lead(found).push('"');
                self.go(State::Text(Text { quote: c, is_key: false, escape: Escape::None, end: String::new() }))
            }
            '{' | '[' if self.open.len() >= MAX_DEPTH => Progress::Broken,
            '{' => {
                self.lead(found).push(c);
                self.open.push(Container::Object);
                self.go(State::Key)
            }
            '[' => {
                self.lead(found).push(c);
                self.open.push(Container::Array);
                self.go(State::Value)
            }
            ']' if self.open.last() == Some(&Container::Array) => self.close(found),
            _ if c == '-' || c == '+' || c == '.' || c.is_alphanumeric() => self.go(State::Bare(c.to_string())),
            _ => Progress::Broken,
        }
    }

    /// Passes on what leads to a value; the value is appended next.
    fn lead<'f>(&mut self, found: &'f mut Vec<Found>) -> &'f mut String {
        let out = arguments(found);
        out.push_str(&std::mem::take(&mut self.lead));
        out
    }

    fn in_text(&mut self, c: char, found: &mut Vec<Found>) -> Progress {
        let State::Text(text) = &mut self.state else { return Progress::Broken };
        let follows = if text.is_key { ":" } else { ",)]}" };
        if text.end.is_empty() || !(follows.contains(c) || c.is_whitespace() && text.end.len() < MAX_NAME) {
            text.push(c, arguments(found));
            return Progress::More;
        }
        if c.is_whitespace() {
            text.end.push(c);
            return Progress::More;
        }
        arguments(found).push('"');
        if text.is_key {
            arguments(found).push_str(": ");
            return self.go(State::Value);
        }
        self.next(c, found)
    }

    fn in_bare(&mut self, c: char, found: &mut Vec<Found>) -> Progress {
        let State::Bare(text) = &mut self.state else { return Progress::Broken };
        match c {
            ',' | ')' | ']' | '}' => {
                let value = scalar(text.trim());
                self.lead(found).push_str(&value);
                self.next(c, found)
            }
            '(' | '[' | '{' | '\'' | '"' | '\n' | '=' => Progress::Broken,
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
            (')', Some(Container::Call)) | ('}', Some(Container::Object)) | (']', Some(Container::Array)) => {
                self.close(found)
            }
            (',', Some(container)) => {
                self.lead = ", ".to_owned();
                self.state = match container {
                    Container::Call => State::Argument(String::new()),
                    Container::Object => State::Key,
                    Container::Array => State::Value,
                };
                Progress::More
            }
            _ if c.is_whitespace() => Progress::More,
            _ => Progress::Broken,
        }
    }

    fn close(&mut self, found: &mut Vec<Found>) -> Progress {
        self.state = State::Next;
        self.lead.clear();
        arguments(found).extend(self.open.pop().map(closing));
        if !self.open.is_empty() {
            return Progress::More;
        }
        found.push(Found::End);
        self.state = State::NextCall;
        if self.in_list { Progress::More } else { Progress::Done }
    }
}

impl Text {
    /// A character of the string, or of what may be its end.
    fn push(&mut self, c: char, out: &mut String) {
        for c in std::mem::take(&mut self.end).chars() {
            push_text(c, out);
        }
        match &mut self.escape {
            Escape::None if c == self.quote => self.end.push(c),
            Escape::None if c == '\\' => self.escape = Escape::Begun,
            Escape::None => push_text(c, out),
            Escape::Begun => self.escape = begin_escape(c, out),
            Escape::Code { digits, missing } if c.is_ascii_hexdigit() => {
                digits.push(c);
                *missing -= 1;
                if *missing == 0 {
                    push_code(digits, out);
                    self.escape = Escape::None;
                }
            }
            Escape::Code { digits, .. } => {
                push_code(digits, out);
                self.escape = Escape::None;
                self.push(c, out);
            }
        }
    }

    /// What is held back, when nothing follows. A quotation mark then ends the string.
    fn finish(&mut self, out: &mut String) {
        match &self.escape {
            Escape::None => {}
            Escape::Begun => push_text('\\', out),
            Escape::Code { digits, .. } => push_code(digits, out),
        }
        out.push('"');
    }
}

fn begin_escape(c: char, out: &mut String) -> Escape {
    let plain = match c {
        'n' => '\n',
        't' => '\t',
        'r' => '\r',
        'b' => '\u{8}',
        'f' => '\u{c}',
        '\\' | '\'' | '"' => c,
        'x' => return Escape::Code { digits: String::new(), missing: 2 },
        'u' => return Escape::Code { digits: String::new(), missing: 4 },
        'U' => return Escape::Code { digits: String::new(), missing: 8 },
        // Python keeps the backslash of an escape it doesn't know.
        _ => {
            push_text('\\', out);
            c
        }
    };
    push_text(plain, out);
    Escape::None
}

fn push_code(digits: &str, out: &mut String) {
    let c = u32::from_str_radix(digits, 16).ok().and_then(char::from_u32).unwrap_or('\u{fffd}');
    push_text(c, out);
}

fn is_name(c: char) -> bool {
    c.is_alphanumeric() || matches!(c, '_' | '-' | '.')
}

fn closing(container: Container) -> char {
    if container == Container::Array { ']' } else { '}' }
}

impl CallReader for PythonCalls {
    fn push(&mut self, c: char, found: &mut Vec<Found>) -> Progress {
        match self.state {
            State::Open | State::Key | State::Value | State::NextCall if c.is_whitespace() => Progress::More,
            State::Open if c == '[' => {
                self.in_list = true;
                self.go(State::Name(String::new()))
            }
            State::Open => {
                self.state = State::Name(String::new());
                self.in_name(c, found)
            }
            State::Name(_) => self.in_name(c, found),
            State::Argument(_) => self.in_argument(c, found),
            State::Key => self.begin_key(c, found),
            State::Value => self.begin_value(c, found),
            State::Text(_) => self.in_text(c, found),
            State::Bare(_) => self.in_bare(c, found),
            State::Next => self.next(c, found),
            State::NextCall => match c {
                ',' => self.go(State::Name(String::new())),
                ']' => Progress::Done,
                _ => Progress::Broken,
            },
        }
    }

    fn complete(&mut self) -> String {
        let mut found = Vec::new();
        match std::mem::replace(&mut self.state, State::Next) {
            State::Text(mut text) => {
                let out = arguments(&mut found);
                text.finish(out);
                if text.is_key {
                    out.push_str(": null");
                }
            }
            State::Bare(text) => self.lead(&mut found).push_str(&scalar(text.trim())),
            State::Value if self.open.last() == Some(&Container::Object) => arguments(&mut found).push_str("null"),
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
