//! Pre-tokenisation of byte-level BPE: cutting a text into the words, numbers and runs inside which merges happen.
//!
//! Model files name one of a family of regular expressions that differ in a few clauses. Here the family is a hand-written
//! scanner and each name a row of clauses: one pass, no backtracking, no limit on the length of a run. The tests hold
//! it against the expressions themselves, run by a regex engine.

use unicode_properties::{GeneralCategoryGroup, UnicodeGeneralCategory};

/// The clauses in which the pre-tokenizers differ, in the order in which they are tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rules {
    /// First of all, every number character becomes a piece of its own and the text between is cut separately.
    isolate_numbers: bool,
    contractions: Case,
    letters: Letters,
    numbers: Numbers,
    /// Punctuation takes the line breaks after it: `[\r\n]*`.
    punctuation_takes_newlines: bool,
    /// `\s*[\r\n]+` before the other white-space clauses.
    newline_runs: bool,
}

/// How `'s 't 're 've 'm 'll 'd` are matched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Case {
    Sensitive,
    Insensitive,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Letters {
    /// ` ?\p{L}+`
    AfterSpace,
    /// `[^\r\n\p{L}\p{N}]?\p{L}+`
    AfterAny,
    /// `[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+`, and marks are no punctuation.
    WithMarks,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Numbers {
    /// ` ?\p{N}+`
    AfterSpace,
    /// `\p{N}{1,n}`
    AtMost(usize),
}

const GPT2: Rules = Rules {
    isolate_numbers: false,
    contractions: Case::Sensitive,
    letters: Letters::AfterSpace,
    numbers: Numbers::AfterSpace,
    punctuation_takes_newlines: false,
    newline_runs: false,
};
const SMOLLM: Rules = Rules { isolate_numbers: true, ..GPT2 };
const LLAMA3: Rules = Rules {
    isolate_numbers: false,
    contractions: Case::Insensitive,
    letters: Letters::AfterAny,
    numbers: Numbers::AtMost(3),
    punctuation_takes_newlines: true,
    newline_runs: true,
};
const QWEN2: Rules = Rules { numbers: Numbers::AtMost(1), ..LLAMA3 };
const QWEN35: Rules = Rules { letters: Letters::WithMarks, ..QWEN2 };

/// What a `tokenizer.ggml.pre` name stands for.
#[derive(Clone, Copy, Debug)]
pub(super) struct PreTokenizer {
    pub rules: Rules,
    /// A piece that is a token as a whole is taken without merging.
    pub ignore_merges: bool,
    /// Whether a beginning-of-sequence token is added when the file doesn't say.
    pub add_bos: bool,
    /// Compose characters (NFC) first, as the reference tokenizer of the family does.
    pub nfc: bool,
}

const PLAIN: PreTokenizer = PreTokenizer { rules: GPT2, ignore_merges: false, add_bos: false, nfc: false };
const DIGITS: PreTokenizer = PreTokenizer { rules: SMOLLM, ..PLAIN };
const TIKTOKEN: PreTokenizer = PreTokenizer { rules: LLAMA3, ..PLAIN };
const LLAMA: PreTokenizer = PreTokenizer { ignore_merges: true, add_bos: true, ..TIKTOKEN };
const QWEN: PreTokenizer = PreTokenizer { rules: QWEN2, nfc: true, ..PLAIN };

/// Every name that is known, and what it stands for.
const KNOWN: &[(&str, PreTokenizer)] = &[
    ("codeshell", DIGITS),
    ("command-r", DIGITS),
    ("dbrx", TIKTOKEN),
    ("deepseek-r1-qwen", QWEN),
    ("default", PLAIN),
    ("exaone", DIGITS),
    ("exaone4", PLAIN),
    ("falcon3", LLAMA),
    ("gpt-2", PLAIN),
    ("granite-docling", PLAIN),
    ("jais", PLAIN),
    ("llama-bpe", LLAMA),
    ("llama-v3", LLAMA),
    ("llama3", LLAMA),
    ("minerva-7b", DIGITS),
    ("mpt", PLAIN),
    ("olmo", PLAIN),
    ("phi-2", PLAIN),
    ("pixtral", LLAMA),
    ("qwen2", QWEN),
    ("qwen35", PreTokenizer { rules: QWEN35, ..QWEN }),
    ("refact", DIGITS),
    ("roberta-bpe", PLAIN),
    ("smaug-bpe", TIKTOKEN),
    ("smollm", DIGITS),
    ("stablelm2", PreTokenizer { nfc: false, ..QWEN }),
    ("starcoder", DIGITS),
    ("trillion", PLAIN),
];

/// The pre-tokenizer of a `tokenizer.ggml.pre` name.
pub(super) fn by_name(name: &str) -> Option<PreTokenizer> {
    KNOWN.iter().find(|(known, _)| *known == name).map(|(_, pre)| *pre)
}

/// The names `by_name` knows, for error messages.
pub(super) fn known_names() -> String {
    KNOWN.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ")
}

/// The kinds of characters the clauses speak of.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Class {
    Letter,
    Mark,
    Number,
    Newline,
    Space,
    Other,
}

fn class(c: char) -> Class {
    match c {
        'a'..='z' | 'A'..='Z' => Class::Letter,
        '0'..='9' => Class::Number,
        '\r' | '\n' => Class::Newline,
        ' ' | '\t' | '\x0b' | '\x0c' => Class::Space,
        '\0'..='\x7f' => Class::Other,
        _ if c.is_whitespace() => Class::Space,
        _ => match c.general_category_group() {
            GeneralCategoryGroup::Letter => Class::Letter,
            GeneralCategoryGroup::Mark => Class::Mark,
            GeneralCategoryGroup::Number => Class::Number,
            _ => Class::Other,
        },
    }
}

fn is_space(class: Class) -> bool {
    matches!(class, Class::Space | Class::Newline)
}

/// Bytes of the longest prefix whose characters all satisfy `accept`, at most `max` of them.
fn run(text: &str, max: usize, accept: impl Fn(Class) -> bool) -> usize {
    let mut chars = text.chars();
    for _ in 0..max {
        let rest = chars.as_str();
        if !chars.next().is_some_and(|c| accept(class(c))) {
            return text.len() - rest.len();
        }
    }
    text.len() - chars.as_str().len()
}

impl Rules {
    /// Calls `emit` with each piece of `text`, in order; the pieces joined are the text.
    pub(super) fn for_each_piece(&self, text: &str, mut emit: impl FnMut(&str)) {
        let mut rest = text;
        while !rest.is_empty() {
            let (fragment, isolated) = self.next_fragment(rest);
            rest = &rest[fragment.len()..];
            if isolated {
                emit(fragment);
            } else {
                self.cut(fragment, &mut emit);
            }
        }
    }

    /// The text up to the next isolated number, or that number (then `true`).
    fn next_fragment<'t>(&self, text: &'t str) -> (&'t str, bool) {
        if !self.isolate_numbers {
            return (text, false);
        }
        match run(text, usize::MAX, |c| c != Class::Number) {
            0 => (&text[..run(text, 1, |c| c == Class::Number)], true),
            end => (&text[..end], false),
        }
    }

    fn cut(&self, mut text: &str, emit: &mut impl FnMut(&str)) {
        while !text.is_empty() {
            let (piece, rest) = text.split_at(self.piece_len(text));
            emit(piece);
            text = rest;
        }
    }

    /// Length of the piece at the start of a non-empty text: the first clause that matches, else one white-space character.
    fn piece_len(&self, text: &str) -> usize {
        self.contraction(text)
            .or_else(|| self.word(text))
            .or_else(|| self.number(text))
            .or_else(|| self.punctuation(text))
            .unwrap_or_else(|| self.white_space(text))
    }

    fn contraction(&self, text: &str) -> Option<usize> {
        let rest = text.strip_prefix('\'')?;
        let fold = |c: char| match self.contractions {
            Case::Sensitive => c,
            Case::Insensitive if c == 'ſ' => 's',
            Case::Insensitive => c.to_ascii_lowercase(),
        };
        let mut chars = rest.chars();
        let first = chars.next()?;
        let len = match (fold(first), chars.next().map(fold)) {
            ('s' | 't', _) => first.len_utf8(),
            ('r' | 'v', Some('e')) | ('l', Some('l')) => 2,
            ('m' | 'd', _) => 1,
            _ => return None,
        };
        Some(1 + len)
    }

    fn is_letter(&self, class: Class) -> bool {
        class == Class::Letter || (class == Class::Mark && self.letters == Letters::WithMarks)
    }

    /// The letters clause: a run of letters, with the one character that may stand before it.
    fn word(&self, text: &str) -> Option<usize> {
        let first = text.chars().next()?;
        let may_precede = match self.letters {
            Letters::AfterSpace => first == ' ',
            _ => !matches!(class(first), Class::Letter | Class::Number | Class::Newline),
        };
        let prefix = if may_precede { first.len_utf8() } else { 0 };
        let letters = run(&text[prefix..], usize::MAX, |c| self.is_letter(c));
        if letters > 0 {
            return Some(prefix + letters);
        }
        // The prefix is optional: a mark may be a whole word.
        (prefix > 0 && self.is_letter(class(first))).then_some(prefix)
    }

    fn number(&self, text: &str) -> Option<usize> {
        let (prefix, max) = match self.numbers {
            Numbers::AfterSpace => (usize::from(text.starts_with(' ')), usize::MAX),
            Numbers::AtMost(max) => (0, max),
        };
        let digits = run(&text[prefix..], max, |c| c == Class::Number);
        (digits > 0).then_some(prefix + digits)
    }

    /// ` ?[^\s\p{L}\p{N}]+`
    fn punctuation(&self, text: &str) -> Option<usize> {
        let prefix = usize::from(text.starts_with(' '));
        let accept = |c| !is_space(c) && c != Class::Number && !self.is_letter(c);
        let signs = run(&text[prefix..], usize::MAX, accept);
        if signs == 0 {
            return None;
        }
        let end = prefix + signs;
        let newlines =
            if self.punctuation_takes_newlines { run(&text[end..], usize::MAX, |c| c == Class::Newline) } else { 0 };
        Some(end + newlines)
    }

    /// `\s*[\r\n]+|\s+(?!\S)|\s+`: up to the last line break, else the run without its last character unless the text ends.
    fn white_space(&self, text: &str) -> usize {
        let end = run(text, usize::MAX, is_space);
        let spaces = &text[..end];
        if let Some(last) = spaces.rfind(['\r', '\n']).filter(|_| self.newline_runs) {
            return last + 1;
        }
        match spaces.char_indices().next_back() {
            Some((last, _)) if last > 0 && end < text.len() => last,
            Some(_) => end,
            // Every other character is matched by a clause before this one; one that isn't would stand alone.
            None => text.chars().next().map_or(text.len(), char::len_utf8),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tokenizers::tokenizer::pattern::Pattern;
    use tokenizers::utils::SysRegex;

    const CONTRACTIONS: &str = "'s|'t|'re|'ve|'m|'ll|'d";
    const TAIL: &str = r"\s*[\r\n]+|\s+(?!\S)|\s+";

    fn gpt2() -> String {
        format!(r"{CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)")
    }

    fn qwen(letters: &str, numbers: &str) -> String {
        format!(
            r"(?i:{CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?[{letters}]+|{numbers}| ?[^\s{letters}\p{{N}}]+[\r\n]*|{TAIL}"
        )
    }

    /// The expressions each set of rules stands for, applied one after another.
    fn expressions() -> Vec<(Rules, Vec<String>)> {
        vec![
            (GPT2, vec![gpt2()]),
            (SMOLLM, vec![r"\p{N}".into(), gpt2()]),
            (LLAMA3, vec![qwen(r"\p{L}", r"\p{N}{1,3}")]),
            (QWEN2, vec![qwen(r"\p{L}", r"\p{N}")]),
            (QWEN35, vec![qwen(r"\p{L}\p{M}", r"\p{N}")]),
        ]
    }

    fn by_regex(text: &str, expressions: &[String]) -> Vec<String> {
        let mut pieces = vec![text.to_owned()];
        for expression in expressions {
            let regex = SysRegex::new(expression).unwrap();
            pieces = pieces
                .iter()
                .flat_map(|piece| {
                    let found = (&regex).find_matches(piece).unwrap();
                    found.into_iter().map(|((a, b), _)| piece[a..b].to_owned()).collect::<Vec<_>>()
                })
                .filter(|piece| !piece.is_empty())
                .collect();
        }
        pieces
    }

    fn by_rules(text: &str, rules: Rules) -> Vec<String> {
        let mut pieces = Vec::new();
        rules.for_each_piece(text, |piece| pieces.push(piece.to_owned()));
        pieces
    }

    fn assert_same(text: &str) {
        for (rules, expressions) in expressions() {
            assert_eq!(by_rules(text, rules), by_regex(text, &expressions), "{rules:?} on {text:?}");
        }
    }

    #[test]
    fn the_scanner_cuts_like_the_expressions() {
        for text in [
            "",
            " ",
            "  ",
            "a",
            "Hello world! It's 3.14159 o'clock; WE'LL see, they'Re here, 'SS 'ſ 'x",
            "a  b\n\n  c\r\n\r\n\td \n",
            "x\n",
            "\n\n\n",
            " \n \n a",
            "if (x) {\n\treturn 100000;\n}\n",
            "1 22  333   4444 ½ ² ٣",
            "e\u{301}a\u{300}\u{301} \u{301}\u{301}x ก็ไม่ हिन्दी",
            "漢字かな交じり文。 русский ελλ",
            "😀😀 👨‍👩‍👧 \u{a0}\u{3000}z \u{85}\u{2028}q",
            "!!!\n\n?? \r",
            "'",
            "''",
            "'l",
            "'r e",
            "\u{1d400}\u{10ffff}",
        ] {
            assert_same(text);
        }
    }

    #[test]
    fn long_runs_are_cut_in_linear_time() {
        for unit in [" ", "\n", "a", "7", "!", "\t\r\n", "\u{301}"] {
            let text = unit.repeat(100_000) + "x";
            for (rules, _) in expressions() {
                let mut total = 0;
                rules.for_each_piece(&text, |piece| total += piece.len());
                assert_eq!(total, text.len());
            }
        }
    }

    #[test]
    fn names_are_sorted_and_unknown_ones_unknown() {
        assert!(KNOWN.is_sorted_by_key(|(name, _)| *name));
        assert!(by_name("qwen2").is_some());
        assert!(by_name("qwen9").is_none());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]
        #[test]
        fn random_text_is_cut_like_the_expressions(text in "([ \t\r\n'strevmlLdDSa1½.,é\u{301}漢😀\u{a0}]|\\PC){0,24}") {
            assert_same(&text);
        }
    }
}
