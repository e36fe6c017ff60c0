//! DRY, "don't repeat yourself": penalises tokens that would go on with a sequence that was there before.
//!
//! If the last `n` tokens also occur earlier, the token that followed them there gets the penalty
//! `multiplier · base^(n − allowed_length)` once `n ≥ allowed_length`. Sequence breakers (a newline, a quote) stop
//! the comparison, so that formatting may repeat.

use std::collections::HashMap;
use std::sync::Arc;

use super::candidates::Candidates;
use crate::vocab::Vocab;

/// The largest exponent that keeps `base^x` a finite f32.
const MAX_LN: f32 = 88.0;

#[derive(Debug, Clone)]
pub(crate) struct Dry {
    multiplier: f32,
    base: f32,
    allowed_length: usize,
    breakers: Vec<Vec<u8>>,
    vocab: Arc<Vocab>,
    /// Number of tokens since the last breaker.
    since_breaker: usize,
    /// The newest bytes of text, one less than the longest breaker, in which a breaker may have begun.
    tail: Vec<u8>,
    /// Scratch of [`Dry::apply`]: repeat length by next token.
    repeats: HashMap<u32, usize>,
    /// Scratch: the Z function of the reversed history.
    z: Vec<usize>,
}

impl Dry {
    pub(crate) fn new(
        multiplier: f32,
        base: f32,
        allowed_length: usize,
        breakers: &[String],
        vocab: Arc<Vocab>,
    ) -> Self {
        let breakers = breakers.iter().filter(|b| !b.is_empty()).map(|b| b.as_bytes().to_vec()).collect();
        Self {
            multiplier,
            base,
            allowed_length,
            breakers,
            vocab,
            since_breaker: 0,
            tail: Vec::new(),
            repeats: HashMap::new(),
            z: Vec::new(),
        }
    }

    pub(crate) fn is_active(&self) -> bool {
        self.multiplier != 0.0 && self.base >= 1.0
    }

    /// Notes a token that was added to the history.
    pub(crate) fn accept(&mut self, token: u32) {
        let known = self.tail.len();
        self.tail.extend_from_slice(self.vocab.token_bytes(token));
        // A breaker counts when its last byte is in the new token.
        let broke = self.breakers.iter().any(|b| {
            let from = known.saturating_sub(b.len() - 1);
            self.tail[from..].windows(b.len()).any(|w| w == b.as_slice())
        });
        self.since_breaker = if broke { 0 } else { self.since_breaker + 1 };
        let longest = self.breakers.iter().map(Vec::len).max().unwrap_or(1);
        let excess = self.tail.len().saturating_sub(longest - 1);
        self.tail.drain(..excess);
    }

    /// `history` is the window of tokens looked at, oldest first.
    pub(crate) fn apply(&mut self, c: &mut Candidates, history: &[u32]) {
        if !self.is_active() || history.len() <= self.allowed_length {
            return;
        }
        let limit = self.since_breaker.min(history.len());
        if limit < self.allowed_length {
            return;
        }
        self.find_repeats(history, limit);
        if self.repeats.is_empty() {
            return;
        }
        let max_exponent = if self.base > 1.000_001 { MAX_LN / self.base.ln() } else { f32::INFINITY };
        let penalty = |(&id, &length): (&u32, &usize)| {
            let exponent = ((length - self.allowed_length) as f32).min(max_exponent);
            let loss = self.multiplier * self.base.powf(exponent);
            (id, move |logit: f32| (logit - loss).clamp(f32::MIN, f32::MAX))
        };
        c.adjust(self.repeats.iter().filter(|(id, _)| !self.is_breaker(**id)).map(penalty));
    }

    fn is_breaker(&self, token: u32) -> bool {
        let text = self.vocab.token_bytes(token);
        self.breakers.iter().any(|b| text.windows(b.len()).any(|w| w == b.as_slice()))
    }

    /// For each token that once followed a copy of the newest tokens: the length of the longest such copy.
    ///
    /// The reversed history's Z function at `i` is how many of the newest tokens recur `i` tokens back.
    fn find_repeats(&mut self, history: &[u32], limit: usize) {
        let n = history.len();
        let at = |i: usize| history[n - 1 - i];
        self.repeats.clear();
        self.z.clear();
        self.z.resize(n, 0);
        let (mut left, mut right) = (0, 0);
        for i in 1..n {
            let mut z = if i < right { self.z[i - left].min(right - i) } else { 0 };
            while i + z < n && at(z) == at(i + z) {
                z += 1;
            }
            if i + z > right {
                (left, right) = (i, i + z);
            }
            self.z[i] = z;
            let length = z.min(limit);
            if length > 0 && length >= self.allowed_length {
                let longest = self.repeats.entry(at(i - 1)).or_insert(0);
                *longest = (*longest).max(length);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Token `i` is the letter `a + i`; token 9 is a newline, token 8 is "x\ny".
    fn vocab() -> Arc<Vocab> {
        let mut tokens: Vec<_> = (0..8u8).map(|i| (vec![b'a' + i], false)).collect();
        tokens.push((b"x\ny".to_vec(), false));
        tokens.push((b"\n".to_vec(), false));
        Arc::new(Vocab::new(tokens, &[]))
    }

    fn penalties(history: &[u32], breakers: &[&str]) -> Vec<f32> {
        let breakers: Vec<String> = breakers.iter().map(|b| (*b).to_owned()).collect();
        let mut dry = Dry::new(1.0, 2.0, 2, &breakers, vocab());
        history.iter().for_each(|&t| dry.accept(t));
        let mut c = Candidates::default();
        c.fill(&[0.0; 10], |_| true);
        dry.apply(&mut c, history);
        c.items.iter().map(|c| -c.logit).collect()
    }

    /// a b c d a b c: the newest three recur, and d followed them: 2^(3−2) = 2.
    #[test]
    fn the_token_that_followed_the_longest_copy_is_penalised() {
        let mut expected = vec![0.0; 10];
        expected[3] = 2.0;
        assert_eq!(penalties(&[0, 1, 2, 3, 0, 1, 2], &["\n"]), expected);
    }

    /// A copy shorter than the allowed length costs nothing.
    #[test]
    fn short_copies_are_allowed() {
        assert_eq!(penalties(&[2, 3, 0, 1, 2], &["\n"]), vec![0.0; 10]);
    }

    /// a b c d a \n b c: only two tokens stand since the breaker, so "b c" counts as 2 and costs 2^0.
    #[test]
    fn a_breaker_ends_the_comparison() {
        let mut expected = vec![0.0; 10];
        expected[3] = 1.0;
        assert_eq!(penalties(&[0, 9, 1, 2, 3, 0, 9, 1, 2], &["\n"]), expected);
    }

    /// With breaker "ab" neither a nor b alone breaks; together they do, across the token border.
    #[test]
    fn a_breaker_may_span_tokens() {
        assert_eq!(penalties(&[2, 0, 1, 3, 2, 0, 1], &["ab"]), vec![0.0; 10]);
        assert_eq!(penalties(&[2, 0, 1, 3, 2, 0, 1], &["ba"])[3], 2.0);
    }

    #[test]
    fn breaker_tokens_themselves_are_never_penalised() {
        assert_eq!(penalties(&[0, 1, 8, 0, 1], &["\n"]), vec![0.0; 10]);
        assert_eq!(penalties(&[0, 1, 8, 0, 1], &["q"])[8], 1.0);
    }
}
