//! What the readers of calls have in common: they take the text behind a call's marker character by character.

use serde_json::Value;

use super::json::quoted;

/// What a reader has found out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// A call of this function begins.
    Name(String),
    /// The next part of its arguments; the parts joined are at every moment the beginning of a JSON object.
    Arguments(String),
    /// The call is complete.
    End,
}

/// Where a reader stands after a character.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    More,
    /// The character was the last of the call, or of the list of calls.
    Done,
    /// The character can't stand here.
    Broken,
}

/// Reads one call, or a list of them.
pub(super) trait CallReader: std::fmt::Debug + Send + Sync {
    /// Takes the next character.
    fn push(&mut self, c: char, found: &mut Vec<Found>) -> Progress;

    /// The text that makes an object of the arguments passed on so far. After it nothing may be pushed.
    fn complete(&mut self) -> String;

    fn boxed_clone(&self) -> Box<dyn CallReader>;
}

impl Clone for Box<dyn CallReader> {
    fn clone(&self) -> Self {
        self.boxed_clone()
    }
}

/// Finds the end of a run of text: the first of some marks, each character of which is looked at once.
#[derive(Clone, Debug)]
pub(super) struct Until {
    marks: &'static [&'static str],
    /// A beginning of one of the marks.
    held: String,
}

impl Until {
    pub(super) fn new(marks: &'static [&'static str]) -> Self {
        Self { marks, held: String::new() }
    }

    /// Takes the next character; appends to `text` what is no part of a mark. `true` once a mark is complete.
    pub(super) fn push(&mut self, c: char, text: &mut String) -> bool {
        self.held.push(c);
        loop {
            if self.marks.contains(&self.held.as_str()) {
                self.held.clear();
                return true;
            }
            if self.held.is_empty() || self.marks.iter().any(|mark| mark.starts_with(&self.held)) {
                return false;
            }
            text.push(self.held.remove(0));
        }
    }

    /// What is held back, when nothing follows.
    pub(super) fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// A scalar as JSON: a number or a word as it stands (Python's words too), anything else as a string.
pub(super) fn scalar(text: &str) -> String {
    match text {
        "True" => return "true".to_owned(),
        "False" => return "false".to_owned(),
        "None" => return "null".to_owned(),
        _ => {}
    }
    if is_number_or_word(text) { text.to_owned() } else { quoted(text) }
}

fn is_number_or_word(text: &str) -> bool {
    let is_bare =
        text.starts_with(|c: char| c == '-' || c.is_ascii_alphanumeric()) && !text.ends_with(char::is_whitespace);
    is_bare && serde_json::from_str::<Value>(text).is_ok()
}

/// Where the next part of the arguments is appended.
pub(super) fn arguments(found: &mut Vec<Found>) -> &mut String {
    if !matches!(found.last(), Some(Found::Arguments(_))) {
        found.push(Found::Arguments(String::new()));
    }
    match found.last_mut() {
        Some(Found::Arguments(text)) => text,
        _ => unreachable!("the last one was just made"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_found_across_false_starts() {
        let mut until = Until::new(&["\n</p>", "</p>"]);
        let mut text = String::new();
        let ends: Vec<bool> = "a\n\n</\n</p>".chars().map(|c| until.push(c, &mut text)).collect();
        assert_eq!(text, "a\n\n</");
        assert_eq!(ends.iter().position(|&end| end), Some(ends.len() - 1));
        assert_eq!((until.push('\n', &mut text), until.finish()), (false, "\n".to_owned()));
    }

    #[test]
    fn scalars_are_numbers_words_or_text() {
        for (text, json) in [
            ("1", "1"),
            ("-2.5e3", "-2.5e3"),
            ("true", "true"),
            ("None", "null"),
            ("01", "\"01\""),
            ("1,", "\"1,\""),
            ("", "\"\""),
            ("a b", "\"a b\""),
            ("1e999", "\"1e999\""),
            ("tru", "\"tru\""),
        ] {
            assert_eq!(scalar(text), json, "{text}");
        }
    }
}
