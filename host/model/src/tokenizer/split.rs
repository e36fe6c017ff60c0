//! Pre-tokenisation of byte-level BPE: cutting a text into the words, numbers and runs inside which merges happen.
//!
//! Model files name one of a family of regular expressions that differ in a few clauses. Here the family is a hand-written
//! scanner and each name a row of clauses: one pass, no backtracking, no limit on the length of a run. The tests hold
//! it against the expressions themselves, run by a regex engine.

use unicode_properties::{GeneralCategory, GeneralCategoryGroup, UnicodeGeneralCategory};

/// The clauses in which the pre-tokenizers differ, in the order in which they are tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rules {
    /// First of all, every number character becomes a piece of its own and the text between is cut separately.
    isolate_numbers: bool,
    contractions: Contractions,
    letters: Letters,
    numbers: Numbers,
    /// What punctuation takes after it.
    after_punctuation: AfterPunctuation,
    /// `\s*[\r\n]+` before the other white-space clauses.
    newline_runs: bool,
}

/// How `'s 't 're 've 'm 'll 'd` are matched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Contractions {
    /// As pieces of their own, in small letters.
    Small,
    /// As pieces of their own, in small or capital letters.
    AnyCase,
    /// At the end of a word, in small or capital letters.
    OfWord,
    None,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Letters {
    /// ` ?\p{L}+`
    AfterSpace,
    /// `[^\r\n\p{L}\p{N}]?\p{L}+`
    AfterAny,
    /// `[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+`, and marks are no punctuation.
    WithMarks,
    /// Capitals, then small letters, where other letters and marks (`X`) are both: `[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}X]*[\p{Ll}X]+`,
    /// or the same with `+` and `*` exchanged.
    ByCase,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AfterPunctuation {
    Nothing,
    /// `[\r\n]*`
    Newlines,
    /// `[\r\n/]*`
    NewlinesAndSlashes,
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
    contractions: Contractions::Small,
    letters: Letters::AfterSpace,
    numbers: Numbers::AfterSpace,
    after_punctuation: AfterPunctuation::Nothing,
    newline_runs: false,
};
const SMOLLM: Rules = Rules { isolate_numbers: true, ..GPT2 };
const LLAMA3: Rules = Rules {
    isolate_numbers: false,
    contractions: Contractions::AnyCase,
    letters: Letters::AfterAny,
    numbers: Numbers::AtMost(3),
    after_punctuation: AfterPunctuation::Newlines,
    newline_runs: true,
};
const QWEN2: Rules = Rules { numbers: Numbers::AtMost(1), ..LLAMA3 };
const QWEN35: Rules = Rules { letters: Letters::WithMarks, ..QWEN2 };
const SEED: Rules = Rules { after_punctuation: AfterPunctuation::Nothing, ..QWEN2 };
const GPT4O: Rules = Rules {
    contractions: Contractions::OfWord,
    letters: Letters::ByCase,
    after_punctuation: AfterPunctuation::NewlinesAndSlashes,
    ..LLAMA3
};
const TEKKEN: Rules = Rules { contractions: Contractions::None, numbers: Numbers::AtMost(1), ..GPT4O };

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
const SINGLE_DIGITS: PreTokenizer = PreTokenizer { rules: QWEN2, ..PLAIN };
const QWEN: PreTokenizer = PreTokenizer { nfc: true, ..SINGLE_DIGITS };
const O200K: PreTokenizer = PreTokenizer { rules: GPT4O, ..PLAIN };

/// Every name that is known, and what it stands for. Converters name a tokenizer by what it does, not by its model: OLMo 2,
/// Phi 4 and Granite 4 are `dbrx`, Granite 3 is `refact`, SmolLM3 is `smaug-bpe`.
const KNOWN: &[(&str, PreTokenizer)] = &[
    ("a.x-4.0", PLAIN),
    ("chatglm-bpe", TIKTOKEN),
    ("codeshell", DIGITS),
    ("command-r", DIGITS),
    ("dbrx", TIKTOKEN),
    ("deepseek-r1-qwen", QWEN),
    ("default", PLAIN),
    ("exaone", DIGITS),
    ("exaone4", PLAIN),
    ("falcon-h1", LLAMA),
    ("falcon3", LLAMA),
    ("gigachat", PLAIN),
    ("glm4", PreTokenizer { ignore_merges: true, ..TIKTOKEN }),
    ("gpt-2", PLAIN),
    ("gpt-4o", O200K),
    ("granite-docling", PLAIN),
    ("grok-2", SINGLE_DIGITS),
    ("hunyuan", SINGLE_DIGITS),
    ("jais", PLAIN),
    ("kanana2", O200K),
    ("lfm2", LLAMA),
    ("llama-bpe", LLAMA),
    ("llama-v3", LLAMA),
    ("llama3", LLAMA),
    ("llama4", O200K),
    ("megrez", SINGLE_DIGITS),
    ("mellum", PLAIN),
    ("mellum2", DIGITS),
    ("midm-2.0", LLAMA),
    ("minerva-7b", DIGITS),
    ("minimax-m2", O200K),
    ("mpt", PLAIN),
    ("olmo", PLAIN),
    ("phi-2", PLAIN),
    ("pixtral", LLAMA),
    ("qwen2", QWEN),
    ("qwen35", PreTokenizer { rules: QWEN35, ..QWEN }),
    ("refact", DIGITS),
    ("roberta-bpe", PLAIN),
    ("seed-coder", PreTokenizer { rules: SEED, ..PLAIN }),
    ("smaug-bpe", TIKTOKEN),
    ("smollm", DIGITS),
    ("solar-open", SINGLE_DIGITS),
    ("stablelm2", SINGLE_DIGITS),
    ("starcoder", DIGITS),
    ("tekken", PreTokenizer { rules: TEKKEN, ignore_merges: true, add_bos: true, nfc: false }),
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
    Capital,
    Small,
    /// Of a script without case, or a modifier.
    Letter,
    Mark,
    Number,
    Newline,
    Space,
    Other,
}

fn class(c: char) -> Class {
    match c {
        'a'..='z' => Class::Small,
        'A'..='Z' => Class::Capital,
        '0'..='9' => Class::Number,
        '\r' | '\n' => Class::Newline,
        ' ' | '\t' | '\x0b' | '\x0c' => Class::Space,
        '\0'..='\x7f' => Class::Other,
        _ if c.is_whitespace() => Class::Space,
        _ => match (c.general_category(), c.general_category_group()) {
            (GeneralCategory::UppercaseLetter | GeneralCategory::TitlecaseLetter, _) => Class::Capital,
            (GeneralCategory::LowercaseLetter, _) => Class::Small,
            (_, GeneralCategoryGroup::Letter) => Class::Letter,
            (_, GeneralCategoryGroup::Mark) => Class::Mark,
            (_, GeneralCategoryGroup::Number) => Class::Number,
            _ => Class::Other,
        },
    }
}

fn is_letter(class: Class) -> bool {
    matches!(class, Class::Capital | Class::Small | Class::Letter)
}

/// Letters of no case, and marks, which go with either.
fn is_caseless(class: Class) -> bool {
    matches!(class, Class::Letter | Class::Mark)
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

    /// A contraction that is a piece of its own.
    fn contraction(&self, text: &str) -> Option<usize> {
        match self.contractions {
            Contractions::Small => contraction(text, |c| c),
            Contractions::AnyCase => contraction(text, small),
            Contractions::OfWord | Contractions::None => None,
        }
    }

    fn is_letter(&self, class: Class) -> bool {
        is_letter(class) || (class == Class::Mark && self.letters == Letters::WithMarks)
    }

    /// The letters clause: a run of letters, with the one character that may stand before it.
    fn word(&self, text: &str) -> Option<usize> {
        let first = text.chars().next()?;
        let may_precede = match self.letters {
            Letters::AfterSpace => first == ' ',
            _ => !is_letter(class(first)) && !matches!(class(first), Class::Number | Class::Newline),
        };
        let prefix = if may_precede { first.len_utf8() } else { 0 };
        if self.letters == Letters::ByCase {
            return self.word_by_case(text, prefix);
        }
        let letters = run(&text[prefix..], usize::MAX, |c| self.is_letter(c));
        if letters > 0 {
            return Some(prefix + letters);
        }
        // The prefix is optional: a mark may be a whole word.
        (prefix > 0 && self.is_letter(class(first))).then_some(prefix)
    }

    fn word_by_case(&self, text: &str, prefix: usize) -> Option<usize> {
        let behind = |prefix: usize, len: Option<usize>| Some(prefix + len?);
        let word = behind(prefix, ends_small(&text[prefix..]))
            .or_else(|| ends_small(text))
            .or_else(|| behind(prefix, begins_capital(&text[prefix..])))
            .or_else(|| begins_capital(text))?;
        let suffix = match self.contractions {
            Contractions::OfWord => contraction(&text[word..], small),
            _ => None,
        };
        Some(word + suffix.unwrap_or(0))
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
        let is_taken = |c: char| match self.after_punctuation {
            AfterPunctuation::Nothing => false,
            AfterPunctuation::Newlines => matches!(c, '\r' | '\n'),
            AfterPunctuation::NewlinesAndSlashes => matches!(c, '\r' | '\n' | '/'),
        };
        let taken = text[end..].find(|c| !is_taken(c)).unwrap_or(text.len() - end);
        Some(end + taken)
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

/// Length of one of `'s 't 're 've 'm 'll 'd` at the start of a text, whose letters `fold` makes small.
fn contraction(text: &str, fold: impl Fn(char) -> char) -> Option<usize> {
    let mut chars = text.strip_prefix('\'')?.chars();
    let first = chars.next()?;
    let len = match (fold(first), chars.next().map(fold)) {
        ('s' | 't', _) => first.len_utf8(),
        ('r' | 'v', Some('e')) | ('l', Some('l')) => 2,
        ('m' | 'd', _) => 1,
        _ => return None,
    };
    Some(1 + len)
}

/// The small letter that a case-insensitive expression takes a letter for.
fn small(c: char) -> char {
    if c == 'ſ' { 's' } else { c.to_ascii_lowercase() }
}

/// `[\p{Lu}\p{Lt}X]*[\p{Ll}X]+`: capitals and then small letters. Where no small letter follows, the last caseless one of
/// the first run is the second.
fn ends_small(text: &str) -> Option<usize> {
    let capitals = run(text, usize::MAX, |c| c == Class::Capital || is_caseless(c));
    let rest = run(&text[capitals..], usize::MAX, |c| c == Class::Small || is_caseless(c));
    if rest > 0 {
        return Some(capitals + rest);
    }
    text[..capitals].char_indices().rev().find(|&(_, c)| is_caseless(class(c))).map(|(at, c)| at + c.len_utf8())
}

/// `[\p{Lu}\p{Lt}X]+[\p{Ll}X]*`
fn begins_capital(text: &str) -> Option<usize> {
    let capitals = run(text, usize::MAX, |c| c == Class::Capital || is_caseless(c));
    let rest = run(&text[capitals..], usize::MAX, |c| c == Class::Small || is_caseless(c));
    (capitals > 0).then_some(capitals + rest)
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

    fn by_case(suffix: &str, numbers: &str) -> String {
        let (capitals, small) = (r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]");
        let before = r"[^\r\n\p{L}\p{N}]?";
        format!(
            r"{before}{capitals}*{small}+{suffix}|{before}{capitals}+{small}*{suffix}|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{TAIL}"
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
            (SEED, vec![qwen(r"\p{L}", r"\p{N}").replace(r"+[\r\n]*", "+")]),
            (GPT4O, vec![by_case(&format!("(?i:{CONTRACTIONS})?"), r"\p{N}{1,3}")]),
            (TEKKEN, vec![by_case("", r"\p{N}")]),
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
            "McDonald's HTTPServer'LL 漢AB漢cD ʰAʰ ǅa ǄA aǄ path/to//x?/\n/ É\u{301}É",
            "\u{1d400}\u{10ffff}",
        ] {
            assert_same(text);
        }
    }

    #[test]
    fn long_runs_are_cut_in_linear_time() {
        for unit in [" ", "\n", "a", "A", "漢A", "7", "!", "\t\r\n", "\u{301}"] {
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
        fn random_text_is_cut_like_the_expressions(text in "([ \t\r\n'strevmlLdDSAa1½.,/éÉʰǅ\u{301}漢😀\u{a0}]|\\PC){0,24}") {
            assert_same(&text);
        }
    }
}
