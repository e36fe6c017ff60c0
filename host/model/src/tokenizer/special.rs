//! Finding the texts of special and user-defined tokens in raw text before it is tokenised.

use aho_corasick::{AhoCorasick, MatchKind};

/// A part of a text: a token whose text was found as it stands, or raw text between such tokens.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Fragment<'t> {
    Raw(&'t str),
    Token(u32),
}

/// A matcher for a set of token texts. Of the texts that match at a place, the longest wins; places are found left to right.
#[derive(Default)]
pub(super) struct Splitter {
    automaton: Option<AhoCorasick>,
    tokens: Vec<u32>,
}

impl Splitter {
    /// Builds the matcher for `(text, id)` pairs; empty texts are left out because they would match everywhere.
    ///
    /// # Errors
    /// If the texts are too many or too long for an automaton.
    pub(super) fn new<'t>(texts: impl Iterator<Item = (&'t str, u32)>) -> Result<Self, aho_corasick::BuildError> {
        let (patterns, tokens): (Vec<&str>, Vec<u32>) = texts.filter(|(text, _)| !text.is_empty()).unzip();
        let automaton = if patterns.is_empty() {
            None
        } else {
            Some(AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(patterns)?)
        };
        Ok(Self { automaton, tokens })
    }

    /// Calls `emit` with the fragments of `text` in order; raw fragments are never empty.
    pub(super) fn split<'t>(&self, text: &'t str, mut emit: impl FnMut(Fragment<'t>)) {
        let mut done = 0;
        for found in self.automaton.iter().flat_map(|automaton| automaton.find_iter(text)) {
            if found.start() > done {
                emit(Fragment::Raw(&text[done..found.start()]));
            }
            emit(Fragment::Token(self.tokens[found.pattern().as_usize()]));
            done = found.end();
        }
        if done < text.len() {
            emit(Fragment::Raw(&text[done..]));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_text_wins_and_the_rest_stays_raw() {
        let splitter = Splitter::new([("\n", 1), ("\n\n\n", 3), ("<x>", 9), ("", 7)].into_iter()).unwrap();
        let mut fragments = Vec::new();
        splitter.split("a<x>\n\n\n\nb<x", |fragment| fragments.push(fragment));
        use Fragment::{Raw, Token};
        assert_eq!(fragments, [Raw("a"), Token(9), Token(3), Token(1), Raw("b<x")]);
    }

    #[test]
    fn without_texts_everything_is_raw() {
        let splitter = Splitter::new(std::iter::empty()).unwrap();
        let mut fragments = Vec::new();
        splitter.split("ab", |fragment| fragments.push(fragment));
        assert_eq!(fragments, [Fragment::Raw("ab")]);
    }
}
