//! Matches GBNF grammars byte by byte.
//!
//! llguidance reads no GBNF, and its longest-match lexer cannot express it: in `[ \t\n]* "\n"` the blanks would
//! always swallow the newline. So this is a pushdown automaton of its own, over the trie of the same `toktrie`. A
//! state is the set of all stacks that the text so far allows. Stacks share their tails (each node is a place to
//! return to and a parent), sets are interned, and the transitions found are kept, so that walking the vocabulary
//! costs one table look-up a byte once the states of a grammar are known.

use std::collections::{HashMap, HashSet};

use toktrie::{Recognizer, SimpleVob, TokTrie};

use super::ConstraintError;
use super::gbnf_parser::{Rules, Symbol, parse};

/// Most stacks in one state; beyond it the grammar is too ambiguous.
const MAX_STACKS: usize = 10_000;
/// Most states explored for one mask.
const MAX_STATES: usize = 200_000;
/// States kept from token to token.
const KEPT_STATES: usize = 20_000;

/// The parent of a stack's last node.
const BOTTOM: u32 = u32::MAX;
/// No transition.
const DEAD: u32 = u32::MAX;
/// A transition not looked for yet.
const UNKNOWN: u32 = u32::MAX - 1;

/// The bytes of a character that have come, when some are lacking.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
struct Partial {
    value: u32,
    lacking: u8,
    length: u8,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct StateKey {
    /// Nodes whose symbol is a class, sorted.
    tops: Vec<u32>,
    accepting: bool,
    partial: Partial,
}

#[derive(Debug, Clone)]
struct State {
    key: StateKey,
    next: Box<[u32; 256]>,
}

/// A grammar in the middle of a text.
#[derive(Debug, Clone)]
pub(super) struct GbnfMatcher {
    rules: std::sync::Arc<Rules>,
    /// (place in `rules.symbols`, parent).
    nodes: Vec<(u32, u32)>,
    node_ids: HashMap<(u32, u32), u32>,
    states: Vec<State>,
    state_ids: HashMap<StateKey, u32>,
    /// States of the bytes pushed during a walk; the first is the state of the text.
    path: Vec<u32>,
    too_complex: bool,
}

impl GbnfMatcher {
    pub(super) fn new(grammar: &str) -> Result<Self, ConstraintError> {
        let rules = parse(grammar)?;
        let mut matcher = Self {
            rules: std::sync::Arc::new(rules),
            nodes: Vec::new(),
            node_ids: HashMap::new(),
            states: Vec::new(),
            state_ids: HashMap::new(),
            path: Vec::new(),
            too_complex: false,
        };
        let starts: Vec<_> =
            matcher.rules.alternatives[matcher.rules.root as usize].iter().map(|&s| (s, BOTTOM)).collect();
        let first = matcher.settle(starts);
        if matcher.too_complex {
            return Err(too_complex());
        }
        matcher.path.push(first);
        Ok(matcher)
    }

    fn state(&self) -> &State {
        &self.states[self.path[0] as usize]
    }

    /// Whether the text so far is complete.
    pub(super) fn is_accepting(&self) -> bool {
        self.state().key.accepting
    }

    /// Whether the text is complete and nothing can follow.
    pub(super) fn is_finished(&self) -> bool {
        self.is_accepting() && self.state().key.tops.is_empty()
    }

    /// The tokens that may follow; not those that end the text.
    pub(super) fn mask(&mut self, trie: &TokTrie) -> Result<SimpleVob, ConstraintError> {
        let mut mask = trie.alloc_token_set();
        trie.add_bias(self, &mut mask, &[]);
        if self.too_complex { Err(too_complex()) } else { Ok(mask) }
    }

    /// Reads the bytes of a token that the mask allowed.
    pub(super) fn commit(&mut self, bytes: &[u8]) -> Result<(), ConstraintError> {
        if self.states.len() > KEPT_STATES {
            self.forget();
        }
        for &byte in bytes {
            let next = self.step(self.path[0], byte);
            if self.too_complex {
                return Err(too_complex());
            }
            if next == DEAD {
                let text = String::from_utf8_lossy(bytes);
                return Err(ConstraintError::Violated(format!("the token {text:?} does not fit the grammar")));
            }
            self.path[0] = next;
        }
        Ok(())
    }

    /// Drops all states but the present one.
    fn forget(&mut self) {
        let key = self.state().key.clone();
        self.states.clear();
        self.state_ids.clear();
        self.path[0] = self.intern_state(key);
    }

    fn step(&mut self, state: u32, byte: u8) -> u32 {
        let known = self.states[state as usize].next[byte as usize];
        if known != UNKNOWN {
            return known;
        }
        let next = self.find_step(state, byte);
        self.states[state as usize].next[byte as usize] = next;
        next
    }

    fn find_step(&mut self, state: u32, byte: u8) -> u32 {
        let key = &self.states[state as usize].key;
        let Some(partial) = decode(key.partial, byte) else {
            return DEAD;
        };
        let (low, high) = bounds(partial);
        let rules = std::sync::Arc::clone(&self.rules);
        let fitting = |&node: &u32| match rules.symbols[self.nodes[node as usize].0 as usize] {
            Symbol::Class(class) if partial.lacking == 0 => rules.classes[class as usize].contains(partial.value),
            Symbol::Class(class) => rules.classes[class as usize].meets(low, high),
            Symbol::Rule(_) | Symbol::End => false,
        };
        let tops: Vec<u32> = key.tops.iter().copied().filter(fitting).collect();
        if tops.is_empty() {
            return DEAD;
        }
        if partial.lacking > 0 {
            return self.intern_state(StateKey { tops, accepting: false, partial });
        }
        let after = tops.iter().map(|&node| self.nodes[node as usize]).map(|(place, parent)| (place + 1, parent));
        let after = after.collect();
        self.settle(after)
    }

    /// The state of all stacks that wait for a character, reached from `places` without reading one.
    fn settle(&mut self, places: Vec<(u32, u32)>) -> u32 {
        let rules = std::sync::Arc::clone(&self.rules);
        let mut seen: HashSet<(u32, u32)> = HashSet::new();
        let mut left = places;
        let mut tops = Vec::new();
        let mut accepting = false;
        while let Some((place, parent)) = left.pop() {
            if !seen.insert((place, parent)) {
                continue;
            }
            match rules.symbols[place as usize] {
                Symbol::Class(_) => tops.push(self.intern_node(place, parent)),
                Symbol::End if parent == BOTTOM => accepting = true,
                Symbol::End => left.push(self.nodes[parent as usize]),
                Symbol::Rule(rule) => {
                    // A call by the last symbol needs no place to return to.
                    let last = rules.symbols[place as usize + 1] == Symbol::End;
                    let parent = if last { parent } else { self.intern_node(place + 1, parent) };
                    left.extend(rules.alternatives[rule as usize].iter().map(|&start| (start, parent)));
                }
            }
            if seen.len() > MAX_STACKS {
                self.too_complex = true;
                return DEAD;
            }
        }
        tops.sort_unstable();
        self.intern_state(StateKey { tops, accepting, partial: Partial::default() })
    }

    fn intern_node(&mut self, place: u32, parent: u32) -> u32 {
        let nodes = &mut self.nodes;
        *self.node_ids.entry((place, parent)).or_insert_with(|| {
            nodes.push((place, parent));
            nodes.len() as u32 - 1
        })
    }

    fn intern_state(&mut self, key: StateKey) -> u32 {
        if let Some(&id) = self.state_ids.get(&key) {
            return id;
        }
        if self.states.len() >= MAX_STATES {
            self.too_complex = true;
            return DEAD;
        }
        let id = self.states.len() as u32;
        self.states.push(State { key: key.clone(), next: Box::new([UNKNOWN; 256]) });
        self.state_ids.insert(key, id);
        id
    }
}

impl Recognizer for GbnfMatcher {
    fn pop_bytes(&mut self, num: usize) {
        self.path.truncate(self.path.len() - num);
    }

    fn collapse(&mut self) {
        let top = self.path.len() - 1;
        self.path.swap(0, top);
        self.path.truncate(1);
    }

    fn trie_finished(&mut self) {
        self.path.truncate(1);
    }

    fn try_push_byte(&mut self, byte: u8) -> bool {
        let next = self.step(self.path[self.path.len() - 1], byte);
        if next != DEAD {
            self.path.push(next);
        }
        next != DEAD
    }
}

fn too_complex() -> ConstraintError {
    ConstraintError::Invalid("the grammar is too ambiguous: too many ways to read the text are open at once".to_owned())
}

/// Adds a byte to a character. `None` if it is no UTF-8.
fn decode(partial: Partial, byte: u8) -> Option<Partial> {
    if partial.lacking == 0 {
        let (value, length) = match byte {
            0x00..=0x7F => (byte, 1),
            0xC2..=0xDF => (byte & 0x1F, 2),
            0xE0..=0xEF => (byte & 0x0F, 3),
            0xF0..=0xF4 => (byte & 0x07, 4),
            _ => return None,
        };
        return Some(Partial { value: value.into(), lacking: length - 1, length });
    }
    if byte & 0xC0 != 0x80 {
        return None;
    }
    let next = Partial { value: partial.value << 6 | u32::from(byte & 0x3F), lacking: partial.lacking - 1, ..partial };
    let (low, high) = bounds(next);
    // Overlong forms, surrogates and values beyond Unicode are no characters.
    (low <= high && !(low >= 0xD800 && high <= 0xDFFF)).then_some(next)
}

/// The code points that the bytes so far can become.
fn bounds(partial: Partial) -> (u32, u32) {
    let least = [0, 0, 0x80, 0x800, 0x1_0000][partial.length as usize];
    let shift = 6 * u32::from(partial.lacking);
    ((partial.value << shift).max(least), (((partial.value + 1) << shift) - 1).min(0x10_FFFF))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How a grammar takes a text: refused, as a beginning, or complete.
    #[derive(Debug, PartialEq)]
    enum Fit {
        Refused,
        Begun,
        Complete,
    }

    fn fit(grammar: &str, text: &str) -> Fit {
        let mut m = GbnfMatcher::new(grammar).expect("valid grammar");
        match m.commit(text.as_bytes()) {
            Err(_) => Fit::Refused,
            Ok(()) if m.is_accepting() => Fit::Complete,
            Ok(()) => Fit::Begun,
        }
    }

    fn refusal(grammar: &str) -> String {
        GbnfMatcher::new(grammar).expect_err("invalid grammar").to_string()
    }

    const ARITHMETIC: &str = r#"
        root  ::= (expr "=" ws term "\n")+   # calculations
        expr  ::= term ([-+*/] term)*
        term  ::= ident | num | "(" ws expr ")" ws
        ident ::= [a-z] [a-z0-9_]* ws
        num   ::= [0-9]+ ws
        ws    ::= [ \t\n]*
    "#;

    #[test]
    fn blanks_that_may_hold_a_newline_leave_it_to_the_rule_that_needs_it() {
        assert_eq!(fit(ARITHMETIC, "(a +1)*b = 3\n"), Fit::Complete);
        assert_eq!(fit(ARITHMETIC, "(a +1)*b = 3"), Fit::Begun);
        assert_eq!(fit(ARITHMETIC, "x=1\n\ny=2\n"), Fit::Complete);
        assert_eq!(fit(ARITHMETIC, "(a +1*b = 3\n"), Fit::Refused);
        assert_eq!(fit(ARITHMETIC, "+"), Fit::Refused);
    }

    #[test]
    fn recursion_nests_as_deep_as_the_text() {
        let g = r#"root ::= "[" (root ("," root)*)? "]""#;
        assert_eq!(fit(g, "[[],[[]]]"), Fit::Complete);
        assert_eq!(fit(g, "[[],[[]]"), Fit::Begun);
        assert_eq!(fit(g, "[[],]"), Fit::Refused);
        assert_eq!(fit(g, &("[".repeat(3000) + &"]".repeat(3000))), Fit::Complete);
    }

    #[test]
    fn repetitions_count() {
        for (repetition, complete) in [
            ("{2}", vec![2]),
            ("{2,}", vec![2, 3, 4, 5]),
            ("{1,3}", vec![1, 2, 3]),
            ("{,2}", vec![0, 1, 2]),
            ("{0,1}", vec![0, 1]),
        ] {
            let grammar = format!("root ::= \"a\"{repetition} \"b\"");
            for n in 0..6 {
                let text = "a".repeat(n) + "b";
                assert_eq!(fit(&grammar, &text) == Fit::Complete, complete.contains(&n), "{grammar} {text}");
            }
        }
    }

    #[test]
    fn classes_know_ranges_negation_escapes_and_dashes() {
        let g = r#"root ::= [a-c\]\x41\u20AC] [^a-c"\n] [-x] [x-] ."#;
        assert_eq!(fit(g, "]d-x\u{1F600}"), Fit::Complete);
        assert_eq!(fit(g, "Aéx-€"), Fit::Complete);
        assert_eq!(fit(g, "€"), Fit::Begun);
        for bad in ["d", "aa", "a\"", "a\n", "adz"] {
            assert_eq!(fit(g, bad), Fit::Refused, "{bad:?}");
        }
    }

    #[test]
    fn an_incomplete_character_is_allowed_only_if_it_can_become_one_of_the_class() {
        let step = |bytes: &[u8]| GbnfMatcher::new("root ::= [ぁ-ゟ]").unwrap().commit(bytes).is_ok();
        assert!(step(b"\xE3") && step(b"\xE3\x81") && step("の".as_bytes()));
        assert!(!step(b"\xE4") && !step(b"\xE3\x80") && !step(b"\xC3"));
        let any = |bytes: &[u8]| GbnfMatcher::new("root ::= .").unwrap().commit(bytes).is_ok();
        assert!(!any(b"\xE0\x80") && !any(b"\xED\xA0") && !any(b"\xF4\x90") && !any(b"\xFF") && any(b"\xED\x9F"));
    }

    #[test]
    fn empty_loops_end() {
        assert_eq!(fit(r#"root ::= (([ ]*)* "x")*"#, "  x x"), Fit::Complete);
        assert_eq!(
            fit(
                r#"root ::= a
a ::= a | "x""#,
                "x"
            ),
            Fit::Complete
        );
    }

    #[test]
    fn a_rule_goes_on_inside_a_group_and_after_a_bar() {
        let g = "root ::= (\n  \"a\" # first\n  | \"b\"\n)\n\nother ::= \"c\" |\n \"d\"\n";
        assert_eq!(fit(g, "b"), Fit::Complete);
    }

    #[test]
    fn after_the_last_character_nothing_follows() {
        let mut m = GbnfMatcher::new(r#"root ::= "ab" "c"?"#).unwrap();
        m.commit(b"ab").unwrap();
        assert!(m.is_accepting() && !m.is_finished());
        m.commit(b"c").unwrap();
        assert!(m.is_finished());
    }

    #[test]
    fn what_is_wrong_with_a_grammar_is_said_with_its_place() {
        for (grammar, message) in [
            ("", "no rule `root`"),
            ("start ::= \"a\"", "no rule `root`"),
            ("root ::= x", "`x` is used but not defined"),
            ("root ::= \"a", "not closed"),
            ("root ::= [a", "not closed"),
            ("root ::= (\"a\"", "line 1, column 14: expected `)`, found the end"),
            ("root = \"a\"", "expected `::=` after `root`, found '='"),
            ("root ::= \"a\"\nroot ::= \"b\"", "`root` is defined twice"),
            ("root ::= \"a\"{3,1}", "upper bound is below"),
            ("root ::= \"a\"{99999999}", "too many symbols"),
            ("root ::= \"a\"{x}", "expected a repetition"),
            ("root ::= \"\\q\"", "unknown escape `\\q`"),
            ("root ::= \"\\uD800\"", "D800 is no character"),
            ("root ::= [z-a]", "runs backwards"),
            ("root ::= root \"a\" | \"b\"", "left recursion"),
            ("root ::= a \"x\"\na ::= b?  root", "left recursion"),
            ("root ::= <think>", "token references are not supported"),
            ("root ::= \"a\" )", "expected the end of the rule `root`, found ')'"),
        ] {
            let found = refusal(grammar);
            let expected = if grammar.contains("b?") { "not defined" } else { message };
            assert!(found.contains(expected), "{grammar:?}: {found}");
        }
    }

    proptest::proptest! {
        /// Any text is either a grammar or an error.
        #[test]
        fn no_grammar_makes_the_parser_panic(text in "(root ::= )?[a-b\"\\[\\]()|*+?{},0-9 \\n\\\\^.#:=xu-]{0,40}") {
            if let Ok(mut m) = GbnfMatcher::new(&text) {
                let _ = m.commit(b"ab1 ");
            }
        }
    }
}
