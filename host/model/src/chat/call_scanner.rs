//! Reading one tool call, `{"name": …, "arguments": {…}}`, character by character as it is generated.
//!
//! The arguments are passed on verbatim while they come, so a client sees them grow; that needs no JSON tree, only the
//! place inside the object and the end of each value.

use serde_json::Value;

/// What a scanner has found out since it was last asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// The name is known and the arguments begin.
    Name(String),
    /// The next part of the arguments.
    Arguments(char),
    /// All the arguments at once, when they came before the name or as a JSON string.
    AllArguments(String),
}

/// Where a scanner stands after a character.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    More,
    /// The closing brace of the call has been read.
    Done,
    /// This is no tool call; the characters read so far are in `raw`.
    Broken,
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
    CommaOrEnd,
}

/// Finds the end of a JSON value.
#[derive(Clone, Copy, Debug, Default)]
struct Extent {
    depth: usize,
    in_string: bool,
    escaped: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    NotYet,
    /// The character is the value's last.
    Here,
    /// The character is already behind the value.
    Before,
}

impl Extent {
    fn push(&mut self, c: char) -> End {
        if self.in_string {
            match c {
                _ if self.escaped => self.escaped = false,
                '\\' => self.escaped = true,
                '"' => {
                    self.in_string = false;
                    return self.end_if_outermost();
                }
                _ => {}
            }
            return End::NotYet;
        }
        match c {
            '"' => self.in_string = true,
            '{' | '[' => self.depth += 1,
            '}' | ']' | ',' if self.depth == 0 => return End::Before,
            c if c.is_whitespace() && self.depth == 0 => return End::Before,
            '}' | ']' => {
                self.depth -= 1;
                return self.end_if_outermost();
            }
            _ => {}
        }
        End::NotYet
    }

    fn end_if_outermost(&self) -> End {
        if self.depth == 0 { End::Here } else { End::NotYet }
    }
}

/// The state of reading one call.
#[derive(Clone, Debug)]
pub(super) struct CallScanner {
    expect: Expect,
    extent: Extent,
    key: String,
    value: String,
    name: Option<String>,
    /// Arguments that are complete but wait for the name.
    waiting: Option<String>,
    started: bool,
    streaming: bool,
    /// Everything read, until the name has been reported.
    pub raw: String,
    pub found: Vec<Found>,
}

impl CallScanner {
    pub(super) fn new() -> Self {
        Self {
            expect: Expect::Open,
            extent: Extent::default(),
            key: String::new(),
            value: String::new(),
            name: None,
            waiting: None,
            started: false,
            streaming: false,
            raw: String::new(),
            found: Vec::new(),
        }
    }

    /// Whether the name has been reported.
    pub(super) fn started(&self) -> bool {
        self.started
    }

    /// Reads the next character.
    pub(super) fn push(&mut self, c: char) -> Progress {
        if !self.started {
            self.raw.push(c);
        }
        match self.expect {
            Expect::InKey => self.in_key(c),
            Expect::InValue => self.in_value(c),
            _ if c.is_whitespace() => Progress::More,
            _ => self.structure(c),
        }
    }

    fn structure(&mut self, c: char) -> Progress {
        self.expect = match (self.expect, c) {
            (Expect::Open, '{') => Expect::FirstKey,
            (Expect::FirstKey | Expect::Key, '"') => {
                self.key = "\"".into();
                self.extent = Extent { in_string: true, ..Extent::default() };
                Expect::InKey
            }
            (Expect::Colon, ':') => Expect::Value,
            (Expect::Value, _) => return self.begin_value(c),
            (Expect::CommaOrEnd, ',') => Expect::Key,
            (Expect::FirstKey | Expect::CommaOrEnd, '}') => return self.close(),
            _ => return Progress::Broken,
        };
        Progress::More
    }

    fn in_key(&mut self, c: char) -> Progress {
        self.key.push(c);
        if self.extent.push(c) == End::Here {
            self.key = serde_json::from_str(&self.key).unwrap_or_default();
            self.expect = Expect::Colon;
        }
        Progress::More
    }

    fn begin_value(&mut self, c: char) -> Progress {
        self.value.clear();
        self.extent = Extent::default();
        self.expect = Expect::InValue;
        self.streaming = c == '{' && self.is_arguments() && self.name.is_some() && !self.started;
        if self.streaming {
            self.start();
        }
        self.in_value(c)
    }

    fn in_value(&mut self, c: char) -> Progress {
        let end = self.extent.push(c);
        if end != End::Before {
            if self.streaming {
                self.found.push(Found::Arguments(c));
            } else {
                self.value.push(c);
            }
        }
        match end {
            End::NotYet => Progress::More,
            End::Here => self.end_value(),
            End::Before if self.value.is_empty() => Progress::Broken,
            End::Before => match self.end_value() {
                Progress::More if !c.is_whitespace() => self.structure(c),
                progress => progress,
            },
        }
    }

    fn end_value(&mut self) -> Progress {
        self.expect = Expect::CommaOrEnd;
        if self.streaming {
            self.streaming = false;
            return Progress::More;
        }
        if self.key == "name" && self.name.is_none() {
            match serde_json::from_str(&self.value) {
                Ok(name) => self.name = Some(name),
                Err(_) => return Progress::Broken,
            }
        } else if self.is_arguments() && self.waiting.is_none() {
            self.waiting = Some(whole_arguments(&self.value));
        }
        self.start_if_complete();
        Progress::More
    }

    fn close(&mut self) -> Progress {
        if self.name.is_none() {
            return Progress::Broken;
        }
        self.waiting.get_or_insert_with(|| "{}".into());
        self.start_if_complete();
        Progress::Done
    }

    fn start_if_complete(&mut self) {
        if self.started || self.name.is_none() {
            return;
        }
        if let Some(arguments) = self.waiting.take() {
            self.start();
            self.found.push(Found::AllArguments(arguments));
        }
    }

    fn start(&mut self) {
        self.started = true;
        self.raw = String::new();
        self.found.extend(self.name.clone().map(Found::Name));
    }

    fn is_arguments(&self) -> bool {
        matches!(self.key.as_str(), "arguments" | "parameters")
    }
}

/// Arguments that came as a JSON string hold the JSON itself; none at all is an empty object.
fn whole_arguments(value: &str) -> String {
    match serde_json::from_str(value) {
        Ok(Value::Null) => "{}".into(),
        Ok(Value::String(text)) => text,
        _ => value.to_owned(),
    }
}
