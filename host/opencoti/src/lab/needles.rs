//! Haystacks with needles, and questions about them (after RULER, arXiv 2404.06654).

use anyhow::{Result, bail};
use opencoti_model::tokenizer::{EncodeOptions, Tokenizer};

/// What is asked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Task {
    /// One fact in the text.
    Single,
    /// One fact of many that look alike.
    Keys,
    /// A fact behind another one: B is as A, and A is told elsewhere.
    Hops,
}

impl Task {
    /// All of them.
    pub const ALL: [Task; 3] = [Task::Single, Task::Keys, Task::Hops];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Task::Single => "single",
            Task::Keys => "keys",
            Task::Hops => "hops",
        }
    }
}

/// A question and its answer, behind a haystack.
#[derive(Clone, Debug)]
pub struct Question {
    /// Where the fact is, in percent of the text.
    pub depth: usize,
    /// Question and answer.
    pub tokens: Vec<u32>,
    /// Of these, the answer.
    pub answer: usize,
}

/// A text with facts in it.
#[derive(Clone, Debug)]
pub struct Haystack {
    /// What it is for.
    pub task: Task,
    /// The text.
    pub tokens: Vec<u32>,
    /// What is asked about it.
    pub questions: Vec<Question>,
}

/// Places that have numbers. As many depths can be asked for, and no place's name begins another's.
const PLACES: [&str; 20] = [
    "Lisbon", "Oslo", "Cairo", "Lima", "Kyoto", "Denver", "Nairobi", "Vienna", "Quito", "Dublin", "Hanoi", "Tunis",
    "Riga", "Perth", "Bogota", "Minsk", "Accra", "Tirana", "Sofia", "Malaga",
];

/// Most depths of a haystack: a hop needs two places.
pub const MOST_DEPTHS: usize = PLACES.len() / 2;

/// Makes haystacks out of a text.
pub struct Maker<'a> {
    /// The model's tokenizer.
    pub tokenizer: &'a Tokenizer,
    /// The text.
    pub text: &'a [u32],
    /// Token that begins every text.
    pub begin: Option<u32>,
    /// Tokens of a haystack.
    pub length: usize,
    /// Where facts are, in percent.
    pub depths: &'a [usize],
    /// Which numbers the places have; other trials have others.
    pub trial: usize,
}

impl Maker<'_> {
    /// The haystacks of a task: one for each depth if there is to be one fact, else one with facts at all depths.
    ///
    /// # Errors
    /// Too short a text, or a vocabulary that has no such words.
    pub fn haystacks(&self, task: Task) -> Result<Vec<Haystack>> {
        match task {
            Task::Single => (0..self.depths.len()).map(|i| self.haystack(task, &[i])).collect(),
            _ => Ok(vec![self.haystack(task, &(0..self.depths.len()).collect::<Vec<_>>())?]),
        }
    }

    /// With facts at the depths of these indices.
    fn haystack(&self, task: Task, places: &[usize]) -> Result<Haystack> {
        let mut facts = Vec::new();
        let mut questions = Vec::new();
        for &i in places {
            let (place, depth) = (PLACES[i], self.depths[i]);
            facts.push((depth, format!("The secret number of {place} is {}.", self.number(i))));
            let asked = match task {
                Task::Hops => {
                    let other = PLACES[MOST_DEPTHS + i];
                    // The link is as far from the other end as the fact is from the beginning.
                    facts.push((100 - depth, format!("The secret number of {other} is the same as that of {place}.")));
                    other
                }
                _ => place,
            };
            questions.push(self.question(asked, i)?);
        }
        Ok(Haystack { task, tokens: self.with_facts(facts)?, questions })
    }

    fn question(&self, place: &str, i: usize) -> Result<Question> {
        let question =
            format!("\n\nQuestion: What is the secret number of {place}?\nAnswer: The secret number of {place} is");
        let mut tokens = self.encode(&question)?;
        let asked = tokens.len();
        // Tokenised together, since the answer's space may belong to a token of its own.
        tokens = self.encode(&format!("{question} {}", self.number(i)))?;
        let answer = tokens.len().saturating_sub(asked);
        if answer == 0 {
            bail!("the model's vocabulary has no numbers, so it can't be asked for one");
        }
        Ok(Question { depth: self.depths[i], tokens, answer })
    }

    /// Five digits that differ by place and trial, the same in every run.
    fn number(&self, i: usize) -> usize {
        let mixed = (self.trial * PLACES.len() + i + 1).wrapping_mul(0x9e37_79b9) >> 7;
        10_000 + mixed % 90_000
    }

    fn with_facts(&self, mut facts: Vec<(usize, String)>) -> Result<Vec<u32>> {
        facts.sort_by_key(|(depth, _)| *depth);
        let facts: Vec<(usize, Vec<u32>)> = facts
            .into_iter()
            .map(|(d, fact)| Ok((d, self.encode(&format!("\n\n{fact}\n\n"))?)))
            .collect::<Result<_>>()?;
        let begin = usize::from(self.begin.is_some());
        let taken: usize = begin + facts.iter().map(|(_, tokens)| tokens.len()).sum::<usize>();
        let filler = self.length.checked_sub(taken).filter(|n| *n <= self.text.len());
        let Some(filler) = filler else {
            bail!(
                "a haystack of {} tokens holds {taken} of facts, and the text has {}; ask for a length between",
                self.length,
                self.text.len()
            );
        };
        let mut tokens: Vec<u32> = self.begin.into_iter().collect();
        let mut at = 0;
        for (depth, fact) in facts {
            let end = self.sentence_end((filler * depth / 100).max(at), filler);
            tokens.extend_from_slice(&self.text[at..end]);
            tokens.extend(fact);
            at = end;
        }
        tokens.extend_from_slice(&self.text[at..filler]);
        Ok(tokens)
    }

    /// The next place after `at` at which a sentence or a line ends, if there is one near.
    fn sentence_end(&self, at: usize, limit: usize) -> usize {
        let ends = |&i: &usize| self.tokenizer.piece(self.text[i], false).iter().any(|b| matches!(b, b'.' | b'\n'));
        (at..limit.min(at + NEAR)).find(ends).map_or(at, |i| i + 1)
    }

    fn encode(&self, text: &str) -> Result<Vec<u32>> {
        Ok(self.tokenizer.encode(text, EncodeOptions { add_special: false, parse_special: false })?)
    }
}

/// Tokens within which the end of a sentence is looked for.
const NEAR: usize = 64;

#[cfg(test)]
mod tests {
    use opencoti_model::tokenizer::TokenizerSpec;

    use super::*;

    /// A vocabulary of single characters.
    fn tokenizer() -> Tokenizer {
        let mut tokens = ["<unk>", "<s>", "</s>", "\n", "\u{2581}"].map(str::to_owned).to_vec();
        tokens.extend((0x21..0x7fu8).map(|c| char::from(c).to_string()));
        let n = tokens.len();
        let types = (0..n).map(|i| [2, 3, 3].get(i).copied().unwrap_or(1)).collect();
        let spec = TokenizerSpec {
            model: "llama".to_owned(),
            scores: Some(vec![0.0; n]),
            token_types: Some(types),
            tokens,
            bos: Some(1),
            eos: Some(2),
            unk: Some(0),
            add_space_prefix: Some(false),
            ..TokenizerSpec::default()
        };
        Tokenizer::new(spec).expect("a tokenizer")
    }

    fn with_maker<T>(length: usize, depths: &[usize], trial: usize, use_it: impl FnOnce(Maker<'_>) -> T) -> T {
        let tokenizer = tokenizer();
        let text = "Some words that say nothing. And a line\n".repeat(40);
        let options = EncodeOptions { add_special: false, parse_special: false };
        let text = tokenizer.encode(&text, options).expect("the text");
        use_it(Maker { tokenizer: &tokenizer, text: &text, begin: Some(1), length, depths, trial })
    }

    fn said(tokens: &[u32]) -> String {
        String::from_utf8(tokenizer().decode(tokens, false)).expect("text")
    }

    #[test]
    fn one_fact_stands_at_its_depth_behind_the_end_of_a_sentence() {
        with_maker(1000, &[0, 50, 100], 0, |maker| {
            let haystacks = maker.haystacks(Task::Single).unwrap();
            assert_eq!(haystacks.len(), 3);
            for (haystack, expected) in haystacks.iter().zip([0.0, 0.5, 1.0]) {
                assert_eq!((haystack.tokens.len(), haystack.tokens[0]), (1000, 1));
                let text = said(&haystack.tokens);
                let at = text.find("The secret number").expect("the fact");
                assert!((at as f64 / 960.0 - expected).abs() < 0.07, "{at}");
                let before = text[..at].trim_end_matches('\n');
                assert!(before.is_empty() || before.ends_with(['.', 'e']), "{before}");
                let [question] = haystack.questions.as_slice() else { panic!("one question") };
                let (asked, answer) = question.tokens.split_at(question.tokens.len() - question.answer);
                assert!(said(asked).ends_with(" is") && text.contains(&format!("is{}.", said(answer))), "{text}");
            }
        });
    }

    #[test]
    fn a_hop_asks_for_a_place_that_is_told_only_through_another() {
        with_maker(1200, &[10, 60], 0, |maker| {
            let haystacks = maker.haystacks(Task::Hops).unwrap();
            let [haystack] = haystacks.as_slice() else { panic!("one text for all") };
            let text = said(&haystack.tokens);
            assert_eq!((text.matches("secret number").count(), haystack.questions.len()), (4, 2));
            for question in &haystack.questions {
                let (asked, answer) = question.tokens.split_at(question.tokens.len() - question.answer);
                let asked = said(asked);
                let place = asked.rsplit(' ').nth(1).expect("a place");
                let (_, link) = text.split_once(&format!("of {place} is the same as that of ")).expect("a link");
                let other = link.split('.').next().expect("a place");
                assert!(text.contains(&format!("of {other} is{}.", said(answer))), "{place} {other} {text}");
                assert!(!text.contains(&format!("of {place} is{}", said(answer))));
            }
        });
    }

    #[test]
    fn trials_have_other_numbers_and_a_text_that_is_too_short_is_refused() {
        let first =
            |trial| with_maker(1000, &[50], trial, |m| said(&m.haystacks(Task::Keys).unwrap()[0].questions[0].tokens));
        assert_eq!(first(0), first(0));
        assert_ne!(first(0), first(1));
        for length in [20, 5000] {
            let error = with_maker(length, &[50], 0, |m| m.haystacks(Task::Keys).unwrap_err().to_string());
            assert!(error.contains(&format!("a haystack of {length} tokens")), "{error}");
        }
    }
}
