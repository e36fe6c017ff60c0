//! Reading JSON character by character: what comes out is at every moment the beginning of a valid text, and can be
//! completed to one.
//!
//! Models write control characters and unknown escapes into strings; both are repaired, because the meaning is plain.
//! Everything else that is no JSON is refused at the character that makes it so.

/// Deepest nesting; what parses the arguments afterwards has such a bound too.
const MAX_DEPTH: usize = 100;

/// What a character did to the value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// The value goes on.
    More,
    /// The character was the value's last.
    Done,
    /// The value, a number, ended before the character.
    DoneBefore,
    /// The character can't come here; it was not taken.
    Invalid,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Container {
    Object,
    Array,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// A value comes.
    Value,
    /// A value or the end of the array.
    FirstItem,
    /// A key or the end of the object.
    FirstKey,
    Key,
    Colon,
    /// A comma or the end of the container.
    Next,
    Text {
        is_key: bool,
    },
    /// Inside an escape; its text is held back.
    Escape {
        is_key: bool,
    },
    /// Inside a word, of which this much is missing.
    Word(&'static str),
    Number(Number),
    Done,
}

/// The place inside a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Number {
    Minus,
    Zero,
    Integer,
    Point,
    Fraction,
    E,
    Sign,
    Exponent,
}

impl Number {
    fn next(self, c: char) -> Option<Self> {
        use Number::{E, Exponent, Fraction, Integer, Minus, Point, Sign, Zero};
        Some(match (self, c) {
            (Minus, '0') => Zero,
            (Minus, '1'..='9') | (Integer, '0'..='9') => Integer,
            (Zero | Integer, '.') => Point,
            (Point | Fraction, '0'..='9') => Fraction,
            (Zero | Integer | Fraction, 'e' | 'E') => E,
            (E, '+' | '-') => Sign,
            (E | Sign | Exponent, '0'..='9') => Exponent,
            _ => return None,
        })
    }

    fn is_complete(self) -> bool {
        matches!(self, Self::Zero | Self::Integer | Self::Fraction | Self::Exponent)
    }
}

/// The state of reading one value.
#[derive(Clone, Debug)]
pub(super) struct JsonReader {
    open: Vec<Container>,
    state: State,
    /// A comma and a key, which are certain only with the value they lead to.
    held: String,
    /// The escape that is being read, and before it a high surrogate's that waits for its partner.
    escape: String,
    surrogate: Option<String>,
}

impl JsonReader {
    /// A reader of any value.
    pub(super) fn new() -> Self {
        Self { open: Vec::new(), state: State::Value, held: String::new(), escape: String::new(), surrogate: None }
    }

    /// Takes the next character and appends to `out` what is certain by now.
    pub(super) fn push(&mut self, c: char, out: &mut String) -> Step {
        let mut held = std::mem::take(&mut self.held);
        let step = self.take(c, &mut held);
        if self.leads_to_value() {
            self.held = held;
        } else {
            out.push_str(&held);
        }
        step
    }

    /// Whether what was read last is a comma, a key or a colon.
    fn leads_to_value(&self) -> bool {
        match self.state {
            State::Key | State::Colon | State::Text { is_key: true } | State::Escape { is_key: true } => true,
            State::Value => !self.open.is_empty(),
            _ => false,
        }
    }

    fn take(&mut self, c: char, out: &mut String) -> Step {
        match self.state {
            State::Text { is_key } => self.in_text(c, is_key, out),
            State::Escape { is_key } => self.in_escape(c, is_key, out),
            State::Word(rest) => self.in_word(c, rest, out),
            State::Number(number) => self.in_number(c, number, out),
            State::Done => Step::Invalid,
            _ if matches!(c, ' ' | '\t' | '\n' | '\r') => {
                out.push(c);
                Step::More
            }
            _ => self.structure(c, out),
        }
    }

    fn structure(&mut self, c: char, out: &mut String) -> Step {
        self.state = match (self.state, c) {
            (State::FirstKey | State::Key, '"') => State::Text { is_key: true },
            (State::Colon, ':') => State::Value,
            (State::Next, ',') => match self.open.last() {
                Some(Container::Object) => State::Key,
                _ => State::Value,
            },
            (State::FirstKey, '}') | (State::FirstItem, ']') => return self.close(c, out),
            (State::Next, '}') if self.open.last() == Some(&Container::Object) => return self.close(c, out),
            (State::Next, ']') if self.open.last() == Some(&Container::Array) => return self.close(c, out),
            (State::Value | State::FirstItem, _) => match self.begin(c) {
                Some(state) => state,
                None => return Step::Invalid,
            },
            _ => return Step::Invalid,
        };
        out.push(c);
        Step::More
    }

    fn begin(&mut self, c: char) -> Option<State> {
        Some(match c {
            '{' | '[' if self.open.len() >= MAX_DEPTH => return None,
            '{' => {
                self.open.push(Container::Object);
                State::FirstKey
            }
            '[' => {
                self.open.push(Container::Array);
                State::FirstItem
            }
            '"' => State::Text { is_key: false },
            't' => State::Word("rue"),
            'f' => State::Word("alse"),
            'n' => State::Word("ull"),
            '-' => State::Number(Number::Minus),
            '0' => State::Number(Number::Zero),
            '1'..='9' => State::Number(Number::Integer),
            _ => return None,
        })
    }

    fn close(&mut self, c: char, out: &mut String) -> Step {
        out.push(c);
        self.open.pop();
        self.value_ends()
    }

    fn value_ends(&mut self) -> Step {
        let is_outermost = self.open.is_empty();
        self.state = if is_outermost { State::Done } else { State::Next };
        if is_outermost { Step::Done } else { Step::More }
    }

    fn in_text(&mut self, c: char, is_key: bool, out: &mut String) -> Step {
        if c == '\\' {
            self.escape.push(c);
            self.state = State::Escape { is_key };
            return Step::More;
        }
        self.drop_lone_surrogate(out);
        if c != '"' {
            push_text(c, out);
            return Step::More;
        }
        out.push(c);
        if is_key {
            self.state = State::Colon;
            return Step::More;
        }
        self.value_ends()
    }

    fn in_escape(&mut self, c: char, is_key: bool, out: &mut String) -> Step {
        let first = self.escape.len() == 1;
        match c {
            'u' if first => self.escape.push(c),
            '0'..='9' | 'a'..='f' | 'A'..='F' if !first => {
                self.escape.push(c);
                if self.escape.len() == "\\u0000".len() {
                    self.state = State::Text { is_key };
                    self.end_code(out);
                }
            }
            '"' | '\\' | '/' | 'b' | 'f' | 'n' | 'r' | 't' if first => {
                self.drop_lone_surrogate(out);
                out.push('\\');
                out.push(c);
                self.escape.clear();
                self.state = State::Text { is_key };
            }
            // No escape: the backslash is meant as one.
            _ => {
                self.drop_lone_surrogate(out);
                out.push('\\');
                out.push_str(&std::mem::take(&mut self.escape));
                self.state = State::Text { is_key };
                return self.in_text(c, is_key, out);
            }
        }
        Step::More
    }

    /// Ends `\uXXXX`. Surrogates count in pairs only.
    fn end_code(&mut self, out: &mut String) {
        let escape = std::mem::take(&mut self.escape);
        match (u16::from_str_radix(&escape[2..], 16).unwrap_or_default(), self.surrogate.take()) {
            (0xD800..=0xDBFF, lone) => {
                out.extend(lone.map(|_| '\u{fffd}'));
                self.surrogate = Some(escape);
            }
            (0xDC00..=0xDFFF, Some(high)) => out.extend([high, escape]),
            (0xDC00..=0xDFFF, None) => out.push('\u{fffd}'),
            (_, lone) => {
                out.extend(lone.map(|_| '\u{fffd}'));
                out.push_str(&escape);
            }
        }
    }

    fn drop_lone_surrogate(&mut self, out: &mut String) {
        out.extend(self.surrogate.take().map(|_| '\u{fffd}'));
    }

    fn in_word(&mut self, c: char, rest: &'static str, out: &mut String) -> Step {
        if !rest.starts_with(c) {
            return Step::Invalid;
        }
        out.push(c);
        self.state = State::Word(&rest[1..]);
        if rest.len() == 1 { self.value_ends() } else { Step::More }
    }

    fn in_number(&mut self, c: char, number: Number, out: &mut String) -> Step {
        if let Some(next) = number.next(c) {
            out.push(c);
            self.state = State::Number(next);
            return Step::More;
        }
        if !number.is_complete() {
            return Step::Invalid;
        }
        match self.value_ends() {
            Step::Done => Step::DoneBefore,
            _ => self.take(c, out),
        }
    }

    /// Appends what makes the text so far a valid value: the shortest end. A key without a value is left out.
    pub(super) fn complete(&mut self, out: &mut String) {
        self.held.clear();
        match self.state {
            State::Text { is_key: false } | State::Escape { is_key: false } => {
                self.drop_lone_surrogate(out);
                if !self.escape.is_empty() {
                    out.push('\\');
                    out.push_str(&std::mem::take(&mut self.escape));
                }
                out.push('"');
            }
            State::Word(rest) => out.push_str(rest),
            State::Number(number) if !number.is_complete() => out.push('0'),
            State::Value if self.open.is_empty() => out.push_str("null"),
            _ => {}
        }
        while let Some(container) = self.open.pop() {
            out.push(if container == Container::Object { '}' } else { ']' });
        }
        self.state = State::Done;
    }
}

/// Appends a character of a string, escaped where JSON wants it.
pub(super) fn push_text(c: char, out: &mut String) {
    match c {
        '"' => out.push_str("\\\""),
        '\\' => out.push_str("\\\\"),
        '\n' => out.push_str("\\n"),
        '\r' => out.push_str("\\r"),
        '\t' => out.push_str("\\t"),
        '\0'..='\x1f' => out.push_str(&format!("\\u{:04x}", u32::from(c))),
        c => out.push(c),
    }
}

/// A string as JSON.
pub(super) fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    /// What comes out of a text, completed, and whether the text was a value as it stood.
    fn read(text: &str) -> (String, bool) {
        let (mut reader, mut out) = (JsonReader::new(), String::new());
        for c in text.chars() {
            match reader.push(c, &mut out) {
                Step::More => {}
                step => {
                    let whole = step == Step::Done;
                    reader.complete(&mut out);
                    return (out, whole);
                }
            }
        }
        reader.complete(&mut out);
        (out, false)
    }

    #[test]
    fn valid_values_come_out_as_they_are() {
        for text in [
            r#"{"a": [1, -0.5e+3, true, null, "x\n\"é\ud83d\ude00"], "b": {}, "c": []}"#,
            r#"[{"": [[]]}]"#,
            "\" \"",
            "false",
        ] {
            assert_eq!(read(text), (text.to_owned(), true), "{text}");
        }
    }

    #[test]
    fn what_is_cut_off_is_completed() {
        for (text, expected) in [
            ("{", "{}"),
            ("{\"a", "{}"),
            ("{\"a\"", "{}"),
            ("{\"a\":", "{}"),
            ("{\"a\":-", "{\"a\":-0}"),
            ("{\"a\":1.", "{\"a\":1.0}"),
            ("{\"a\":1, \"b\"", "{\"a\":1}"),
            ("[tr", "[true]"),
            ("[\"x\\", "[\"x\\\\\"]"),
            ("[\"x\\u12", "[\"x\\\\u12\"]"),
            ("[[1", "[[1]]"),
        ] {
            assert_eq!(read(text).0, expected);
        }
    }

    #[test]
    fn careless_strings_are_repaired() {
        assert_eq!(read("\"a\n\t\u{1}b\""), ("\"a\\n\\t\\u0001b\"".to_owned(), true));
        assert_eq!(read(r#""\d+ \' \u12x""#), (r#""\\d+ \\' \\u12x""#.to_owned(), true));
        assert_eq!(read(r#""\ud83d \ude00 \ud83d\ud83d\ude00""#).0, "\"\u{fffd} \u{fffd} \u{fffd}\\ud83d\\ude00\"");
    }

    #[test]
    fn what_is_no_json_is_refused_where_it_begins() {
        for (text, expected) in [("{a", "{}"), ("[1,]", "[1]"), ("{\"a\" 1", "{}"), ("[01", "[0]"), ("[1}", "[1]")] {
            assert_eq!(read(text), (expected.to_owned(), false), "{text}");
        }
        assert!(!read(&"[".repeat(1000)).1);
    }

    fn value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            (-1e9f64..1e9).prop_map(Value::from),
            "\\PC{0,6}".prop_map(Value::from),
            "[\"\\\\\n\u{1}]{0,4}".prop_map(Value::from),
        ];
        leaf.prop_recursive(3, 12, 4, |inner| {
            prop_oneof![
                proptest::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                proptest::collection::vec(("\\PC{0,3}", inner), 0..4)
                    .prop_map(|items| json!(items.into_iter().collect::<serde_json::Map<_, _>>())),
            ]
        })
    }

    proptest! {
        #[test]
        fn every_value_is_read_whole(value in value()) {
            let text = json!([value]).to_string();
            prop_assert_eq!(read(&text), (text, true));
        }

        #[test]
        fn every_beginning_of_anything_becomes_valid(text in "[\\[\\]{}\",:0-9a-fntrul.eE+\\\\ \n\u{e9}-]{0,24}", value in value(), cut in 0usize..200) {
            for text in [text, value.to_string().chars().take(cut).collect()] {
                let out = read(&text).0;
                // Numbers beyond the range of a double are JSON, but no value.
                let is_valid = serde_json::from_str::<Value>(&out).map_or_else(|e| e.to_string().contains("out of range"), |_| true);
                prop_assert!(is_valid, "{} of {}", out, text);
            }
        }
    }
}
