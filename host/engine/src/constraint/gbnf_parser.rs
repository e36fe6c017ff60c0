//! Reads GBNF text into rules over character classes.
//!
//! The notation: `name ::= alternatives`, texts in double quotes, classes in brackets (`[a-z]`, `[^"]`), `.` for any
//! character, groups, `|`, and the repetitions `*`, `+`, `?`, `{m}`, `{m,}`, `{m,n}`, `{,n}`; `#` begins a comment. Groups
//! and repetitions become rules of their own, so what is left is sequences of classes and rules.

use std::collections::HashMap;

use super::ConstraintError;

/// A set of characters as inclusive ranges of code points, or the complement of one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Class {
    pub(super) ranges: Vec<(u32, u32)>,
    pub(super) negated: bool,
}

impl Class {
    fn one(c: char) -> Self {
        Self { ranges: vec![(c as u32, c as u32)], negated: false }
    }

    fn any() -> Self {
        Self { ranges: Vec::new(), negated: true }
    }

    pub(super) fn contains(&self, c: u32) -> bool {
        self.ranges.iter().any(|&(low, high)| (low..=high).contains(&c)) != self.negated
    }

    /// Whether some code point in `low..=high` is in the class.
    pub(super) fn meets(&self, low: u32, high: u32) -> bool {
        if !self.negated {
            return self.ranges.iter().any(|&(a, b)| a <= high && low <= b);
        }
        let mut sorted = self.ranges.clone();
        sorted.sort_unstable();
        let mut next = low;
        for (a, b) in sorted {
            if a > next {
                break;
            }
            next = next.max(b.saturating_add(1));
        }
        next <= high
    }
}

/// One place of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Symbol {
    /// A character of the class of this index.
    Class(u32),
    /// The rule of this index.
    Rule(u32),
    /// End of the sequence.
    End,
}

/// Rules as one flat list of symbols.
#[derive(Debug, Default)]
pub(super) struct Rules {
    pub(super) symbols: Vec<Symbol>,
    /// Per rule, where each of its alternatives begins.
    pub(super) alternatives: Vec<Vec<u32>>,
    pub(super) classes: Vec<Class>,
    /// Per rule its name; rules made from groups carry the name of the rule they stand in.
    pub(super) names: Vec<String>,
    pub(super) root: u32,
}

/// Longest list of symbols that a grammar may expand to.
const MAX_SYMBOLS: usize = 200_000;
/// Deepest nesting of groups.
const MAX_DEPTH: usize = 200;

pub(super) fn parse(text: &str) -> Result<Rules, ConstraintError> {
    let mut parser =
        Parser { text, at: 0, rules: Rules::default(), ids: HashMap::new(), rule: String::new(), depth: 0 };
    parser.space(true);
    while parser.at < text.len() {
        parser.rule()?;
    }
    parser.finish()
}

struct Parser<'a> {
    text: &'a str,
    at: usize,
    rules: Rules,
    ids: HashMap<String, u32>,
    /// The rule being read.
    rule: String,
    depth: usize,
}

type Sequence = Vec<Symbol>;

impl Parser<'_> {
    fn error(&self, message: impl std::fmt::Display) -> ConstraintError {
        let before = &self.text[..self.at.min(self.text.len())];
        let line = before.matches('\n').count() + 1;
        let column = before.chars().rev().take_while(|&c| c != '\n').count() + 1;
        ConstraintError::Invalid(format!("line {line}, column {column}: {message}"))
    }

    fn peek(&self) -> Option<char> {
        self.text[self.at..].chars().next()
    }

    fn next(&mut self) -> Option<char> {
        let c = self.peek()?;
        self.at += c.len_utf8();
        Some(c)
    }

    fn eat(&mut self, expected: &str) -> bool {
        let found = self.text[self.at..].starts_with(expected);
        if found {
            self.at += expected.len();
        }
        found
    }

    /// Skips blanks and comments, and newlines too where a rule may go on.
    fn space(&mut self, newlines: bool) {
        while let Some(c) = self.peek() {
            match c {
                ' ' | '\t' => {}
                '\r' | '\n' if newlines => {}
                '#' => {
                    self.at = self.text[self.at..].find('\n').map_or(self.text.len(), |n| self.at + n);
                    continue;
                }
                _ => break,
            }
            self.at += 1;
        }
    }

    fn name(&mut self) -> Result<String, ConstraintError> {
        let rest = &self.text[self.at..];
        let length = rest.find(|c: char| !(c.is_ascii_alphanumeric() || c == '-' || c == '_')).unwrap_or(rest.len());
        if length == 0 {
            return Err(self.error(format_args!("expected the name of a rule, found {}", self.found())));
        }
        let name = rest[..length].to_owned();
        self.at += length;
        Ok(name)
    }

    fn found(&self) -> String {
        self.peek().map_or("the end".to_owned(), |c| format!("{c:?}"))
    }

    fn rule_id(&mut self, name: &str) -> u32 {
        if let Some(&id) = self.ids.get(name) {
            return id;
        }
        let id = self.new_rule(name.to_owned());
        self.ids.insert(name.to_owned(), id);
        id
    }

    fn new_rule(&mut self, name: String) -> u32 {
        self.rules.names.push(name);
        self.rules.alternatives.push(Vec::new());
        self.rules.names.len() as u32 - 1
    }

    fn add(&mut self, rule: u32, sequence: &[Symbol]) -> Result<(), ConstraintError> {
        if self.rules.symbols.len() + sequence.len() >= MAX_SYMBOLS {
            return Err(self.error("the grammar expands to too many symbols; use smaller repetition counts"));
        }
        self.rules.alternatives[rule as usize].push(self.rules.symbols.len() as u32);
        self.rules.symbols.extend_from_slice(sequence);
        self.rules.symbols.push(Symbol::End);
        Ok(())
    }

    fn rule(&mut self) -> Result<(), ConstraintError> {
        self.rule = self.name()?;
        self.space(false);
        if !self.eat("::=") {
            return Err(self.error(format_args!("expected `::=` after `{}`, found {}", self.rule, self.found())));
        }
        self.space(true);
        let name = self.rule.clone();
        let id = self.rule_id(&name);
        if !self.rules.alternatives[id as usize].is_empty() {
            return Err(self.error(format_args!("the rule `{name}` is defined twice")));
        }
        self.alternatives(id)?;
        match self.peek() {
            None | Some('\r' | '\n') => {}
            Some(c) => {
                return Err(self.error(format_args!("expected the end of the rule `{name}`, found {c:?}")));
            }
        }
        self.space(true);
        Ok(())
    }

    fn alternatives(&mut self, id: u32) -> Result<(), ConstraintError> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err(self.error("groups are nested too deeply"));
        }
        loop {
            let sequence = self.sequence()?;
            self.add(id, &sequence)?;
            if !self.eat("|") {
                break;
            }
            self.space(true);
        }
        self.depth -= 1;
        Ok(())
    }

    fn sequence(&mut self) -> Result<Sequence, ConstraintError> {
        let mut sequence = Sequence::new();
        loop {
            let in_group = self.depth > 1;
            self.space(in_group);
            let item = match self.peek() {
                Some('"') => self.literal()?,
                Some('[') => vec![self.class()?],
                Some('.') => {
                    self.at += 1;
                    vec![self.class_symbol(Class::any())]
                }
                Some('(') => self.group()?,
                Some('<' | '!') => {
                    return Err(self.error("token references are not supported; write the text of the token"));
                }
                Some(c) if c.is_ascii_alphanumeric() || c == '_' => {
                    let name = self.name()?;
                    vec![Symbol::Rule(self.rule_id(&name))]
                }
                _ => break,
            };
            self.space(in_group);
            let item = self.repetition(item)?;
            sequence.extend(item);
        }
        Ok(sequence)
    }

    fn group(&mut self) -> Result<Sequence, ConstraintError> {
        self.at += 1;
        let id = self.new_rule(self.rule.clone());
        self.space(true);
        self.alternatives(id)?;
        if !self.eat(")") {
            return Err(self.error(format_args!("expected `)`, found {}", self.found())));
        }
        Ok(vec![Symbol::Rule(id)])
    }

    fn class_symbol(&mut self, class: Class) -> Symbol {
        let index = self.rules.classes.iter().position(|c| *c == class).unwrap_or_else(|| {
            self.rules.classes.push(class);
            self.rules.classes.len() - 1
        });
        Symbol::Class(index as u32)
    }

    fn literal(&mut self) -> Result<Sequence, ConstraintError> {
        self.at += 1;
        let mut sequence = Sequence::new();
        while !self.eat("\"") {
            let c = self.character()?;
            let symbol = self.class_symbol(Class::one(c));
            sequence.push(symbol);
        }
        Ok(sequence)
    }

    fn class(&mut self) -> Result<Symbol, ConstraintError> {
        self.at += 1;
        let negated = self.eat("^");
        let mut ranges = Vec::new();
        while !self.eat("]") {
            let low = self.character()?;
            let rest = &self.text[self.at..];
            let high = if rest.starts_with('-') && !rest.starts_with("-]") {
                self.at += 1;
                self.character()?
            } else {
                low
            };
            if low > high {
                return Err(self.error(format_args!("the range {low:?} to {high:?} runs backwards")));
            }
            ranges.push((low as u32, high as u32));
        }
        if ranges.is_empty() && !negated {
            return Err(self.error("the class `[]` matches nothing"));
        }
        Ok(self.class_symbol(Class { ranges, negated }))
    }

    /// A character or an escape.
    fn character(&mut self) -> Result<char, ConstraintError> {
        match self.next() {
            None | Some('\n') => Err(self.error("a text or class is not closed")),
            Some('\\') => match self.next() {
                Some('n') => Ok('\n'),
                Some('r') => Ok('\r'),
                Some('t') => Ok('\t'),
                Some('x') => self.hex(2),
                Some('u') => self.hex(4),
                Some('U') => self.hex(8),
                Some(c @ ('\\' | '"' | '[' | ']' | '-' | '^' | '/' | '\'')) => Ok(c),
                Some(c) => Err(self.error(format_args!("unknown escape `\\{c}`"))),
                None => Err(self.error("a text or class is not closed")),
            },
            Some(c) => Ok(c),
        }
    }

    fn hex(&mut self, digits: usize) -> Result<char, ConstraintError> {
        let code = self.text.get(self.at..self.at + digits).filter(|d| d.bytes().all(|b| b.is_ascii_hexdigit()));
        let Some(code) = code else {
            return Err(self.error(format_args!("expected {digits} hexadecimal digits")));
        };
        let character = u32::from_str_radix(code, 16).ok().and_then(char::from_u32);
        let character = character.ok_or_else(|| self.error(format_args!("{code} is no character")))?;
        self.at += digits;
        Ok(character)
    }

    /// Applies the repetition that follows `item`, if any.
    fn repetition(&mut self, item: Sequence) -> Result<Sequence, ConstraintError> {
        let (least, most) = match self.peek() {
            Some('*') => (0, None),
            Some('+') => (1, None),
            Some('?') => (0, Some(1)),
            Some('{') => return self.counted(item),
            _ => return Ok(item),
        };
        self.at += 1;
        self.repeat(item, least, most)
    }

    fn counted(&mut self, item: Sequence) -> Result<Sequence, ConstraintError> {
        self.at += 1;
        let least = self.number()?;
        let most = if self.eat(",") { self.number()? } else { least.or(Some(0)) };
        if !self.eat("}") || (least.is_none() && most.is_none()) {
            return Err(self.error("expected a repetition such as {2}, {2,} or {2,5}"));
        }
        let least = least.unwrap_or(0);
        if most.is_some_and(|most| most < least) {
            return Err(self.error("the repetition's upper bound is below its lower bound"));
        }
        self.repeat(item, least, most)
    }

    fn number(&mut self) -> Result<Option<usize>, ConstraintError> {
        self.space(false);
        let rest = &self.text[self.at..];
        let length = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        let digits = &rest[..length];
        self.at += length;
        self.space(false);
        if digits.is_empty() {
            return Ok(None);
        }
        digits.parse().map(Some).map_err(|_| self.error(format_args!("the repetition count {digits} is too large")))
    }

    /// `item` `least` times, then up to `most` times in all: `x{2,4}` becomes `x x (x (x)?)?`.
    fn repeat(&mut self, item: Sequence, least: usize, most: Option<usize>) -> Result<Sequence, ConstraintError> {
        let copies = most.unwrap_or(least).max(least);
        if copies.saturating_mul(item.len() + 1) >= MAX_SYMBOLS {
            return Err(self.error("the grammar expands to too many symbols; use smaller repetition counts"));
        }
        let mut tail = match most {
            None => Some(self.star(&item)?),
            Some(_) => None,
        };
        for _ in least..most.unwrap_or(least) {
            let id = self.new_rule(self.rule.clone());
            let mut optional = item.clone();
            optional.extend(tail);
            self.add(id, &optional)?;
            self.add(id, &[])?;
            tail = Some(Symbol::Rule(id));
        }
        let mut sequence: Sequence = std::iter::repeat_n(&item, least).flatten().copied().collect();
        sequence.extend(tail);
        Ok(sequence)
    }

    fn star(&mut self, item: &[Symbol]) -> Result<Symbol, ConstraintError> {
        let id = self.new_rule(self.rule.clone());
        let mut again = item.to_vec();
        again.push(Symbol::Rule(id));
        self.add(id, &again)?;
        self.add(id, &[])?;
        Ok(Symbol::Rule(id))
    }

    fn finish(mut self) -> Result<Rules, ConstraintError> {
        let Some(&root) = self.ids.get("root") else {
            return Err(ConstraintError::Invalid("the grammar has no rule `root`, where it must begin".to_owned()));
        };
        self.rules.root = root;
        let undefined = self.rules.alternatives.iter().position(Vec::is_empty);
        if let Some(id) = undefined {
            return Err(ConstraintError::Invalid(format!(
                "the rule `{}` is used but not defined",
                self.rules.names[id]
            )));
        }
        check_left_recursion(&self.rules)?;
        Ok(self.rules)
    }
}

/// Refuses rules that can call themselves without reading a character, unless by their last symbol only (a loop that
/// the matcher recognises): such a rule would pile up return addresses without end.
fn check_left_recursion(rules: &Rules) -> Result<(), ConstraintError> {
    let nullable = nullable(rules);
    // Edges: the rule, a rule it may begin with, whether more follows there.
    let mut edges: Vec<Vec<(usize, bool)>> = vec![Vec::new(); rules.names.len()];
    for (rule, starts) in rules.alternatives.iter().enumerate() {
        for &start in starts {
            let mut at = start as usize;
            while let Symbol::Rule(r) = rules.symbols[at] {
                edges[rule].push((r as usize, rules.symbols[at + 1] != Symbol::End));
                if !nullable[r as usize] {
                    break;
                }
                at += 1;
            }
        }
    }
    for (rule, targets) in edges.iter().enumerate() {
        for &(target, _) in targets.iter().filter(|(_, more)| *more) {
            if reaches(&edges, target, rule) {
                return Err(ConstraintError::Invalid(format!(
                    "the rule `{}` can begin with itself (left recursion), which is not supported; write it as a repetition",
                    rules.names[rule]
                )));
            }
        }
    }
    Ok(())
}

fn reaches(edges: &[Vec<(usize, bool)>], from: usize, to: usize) -> bool {
    let mut seen = vec![false; edges.len()];
    let mut left = vec![from];
    while let Some(rule) = left.pop() {
        if rule == to {
            return true;
        }
        if !std::mem::replace(&mut seen[rule], true) {
            left.extend(edges[rule].iter().map(|e| e.0));
        }
    }
    false
}

/// Per rule whether it matches the empty text.
fn nullable(rules: &Rules) -> Vec<bool> {
    let mut nullable = vec![false; rules.names.len()];
    loop {
        let mut changed = false;
        for (rule, starts) in rules.alternatives.iter().enumerate() {
            let empty = |&start: &u32| {
                let sequence = rules.symbols[start as usize..].iter().take_while(|s| **s != Symbol::End);
                sequence.into_iter().all(|s| matches!(s, Symbol::Rule(r) if nullable[*r as usize]))
            };
            if !nullable[rule] && starts.iter().any(empty) {
                nullable[rule] = true;
                changed = true;
            }
        }
        if !changed {
            return nullable;
        }
    }
}
