//! Calls of Mistral behind `[TOOL_CALLS]`: an array of objects, or `name[ARGS]{…}` in newer models.

use super::hermes::{Accept, CallArray};
use super::json::{JsonReader, Step};
use super::reader::{CallReader, Found, Progress, arguments};

const ARGUMENTS: &str = "[ARGS]";
/// Longest name of a function, with what may stand between it and its arguments.
const MAX_NAME: usize = 512;

/// The state of reading a call, or an array of them.
#[derive(Clone, Debug)]
pub(super) enum MistralCall {
    Open,
    Array(CallArray),
    Name(String),
    Arguments(Box<JsonReader>),
}

impl MistralCall {
    pub(super) fn new() -> Self {
        Self::Open
    }

    fn in_name(&mut self, c: char, found: &mut Vec<Found>) -> Progress {
        let Self::Name(name) = self else { return Progress::Broken };
        if c != '{' {
            name.push(c);
            return if name.len() <= MAX_NAME && c != '\n' { Progress::More } else { Progress::Broken };
        }
        // An id may stand between the name and the arguments.
        let name = name.trim().trim_end_matches(ARGUMENTS).split("[CALL_ID]").next().unwrap_or_default().trim();
        if name.is_empty() || name.contains(['[', ']', '"']) {
            return Progress::Broken;
        }
        found.push(Found::Name(name.to_owned()));
        let mut json = Box::new(JsonReader::new());
        json.push(c, arguments(found));
        *self = Self::Arguments(json);
        Progress::More
    }
}

impl CallReader for MistralCall {
    fn push(&mut self, c: char, found: &mut Vec<Found>) -> Progress {
        match self {
            Self::Open if c.is_whitespace() => Progress::More,
            Self::Open if matches!(c, '[' | '{') => {
                let mut array = CallArray::new(Accept::Any);
                let progress = array.push(c, found);
                *self = Self::Array(array);
                progress
            }
            Self::Open => {
                *self = Self::Name(String::new());
                self.in_name(c, found)
            }
            Self::Array(array) => array.push(c, found),
            Self::Name(_) => self.in_name(c, found),
            Self::Arguments(json) => match json.push(c, arguments(found)) {
                Step::More => Progress::More,
                Step::Done => {
                    found.push(Found::End);
                    Progress::Done
                }
                Step::DoneBefore | Step::Invalid => Progress::Broken,
            },
        }
    }

    fn complete(&mut self) -> String {
        let mut rest = String::new();
        match self {
            Self::Array(array) => return array.complete(),
            Self::Arguments(json) => json.complete(&mut rest),
            Self::Open | Self::Name(_) => {}
        }
        rest
    }

    fn boxed_clone(&self) -> Box<dyn CallReader> {
        Box::new(self.clone())
    }
}
